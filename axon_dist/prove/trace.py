"""Traces and compiles a function on one mesh, and names its outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ..core.errors import ConfigError
from .inputs import is_array
from .meshes import build_mesh, rebind, unchecked
from .program import Evaluation, Injected, Program, Value, flatten, is_key, plain


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function traced on one mesh.

    Args:
        program: its operations.
        names: the names of its outputs.
        mesh: the mesh on which it was traced.
        context: the mesh in context, if the function takes its mesh from there.
        specs: the `PartitionSpec`s of the array arguments; None where unknown.
        leaves: the arrays and shapes among the arguments.
    """

    program: Program
    names: tuple[str, ...]
    mesh: Mesh
    context: Mesh | None
    specs: tuple[Any, ...]
    leaves: tuple[Any, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh."""
        return {str(name): size for name, size in self.mesh.shape.items()}

    @property
    def title(self) -> str:
        """The mesh as text, such as `dp=4,tp=2`."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    def compiled(
        self,
        wanted: frozenset[Value],
        with_noise: bool,
        turns: Mapping[int, int] | None = None,
        all_turns: bool = False,
    ) -> Callable[..., Any]:
        """Returns a function from (inputs, seed, scale, bits) to outputs and recorded values.

        Both are NumPy arrays.

        Args:
            wanted: the values to record.
            with_noise: whether results are perturbed by `scale` units in the last place.
            turns: which turn of a loop is recorded, by the loop's number; the first by default.
            all_turns: whether all turns of loops are recorded, in leading dims.
        """

        def evaluation(noise: tuple, bits: Mapping[int, Injected]) -> Evaluation:
            given = noise if with_noise else None
            return Evaluation(wanted, given, bits, turns or {}, all_turns)

        return functools.partial(self._call, _runnable(self.program, self.mesh, evaluation))

    def _call(
        self,
        run: Callable[..., Any],
        inputs: Sequence[Any],
        seed: int = 0,
        scale: float = 0.0,
        injected: Mapping[int, Injected] | None = None,
    ) -> tuple[list[np.ndarray], dict[Value, np.ndarray]]:
        placed = [self._placed(x, spec) for x, spec in zip(inputs, self.specs, strict=True)]
        bits = {number: one.bits for number, one in (injected or {}).items()}
        splits = tuple((number, one.splits) for number, one in (injected or {}).items())
        noise = (np.uint32(seed * 2654435761 % 2**32), np.float32(scale))
        with self.within():
            outputs, values = run(splits, placed, noise, bits)
        return [np.asarray(x) for x in outputs], {v: np.asarray(x) for v, x in values.items()}

    def _placed(self, x: Any, spec: Any) -> Any:
        # The arrays may come from another mesh.
        if is_key(x):
            data = jax.numpy.asarray(np.asarray(jax.random.key_data(x)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return np.asarray(x) if spec is None else self._put(x, spec)

    def _put(self, x: Any, spec: Any) -> Any:
        return jax.device_put(np.asarray(x), NamedSharding(self.mesh, spec))

    def within(self) -> Any:
        """Sets the mesh in context, for a function that takes its mesh from there."""
        return contextlib.nullcontext() if self.context is None else jax.set_mesh(self.context)


_COMPILER_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""A program runs a few times, so compiling it takes longer than running it."""


def array_leaves(arguments: tuple[Any, ...]) -> list[Any]:
    """Returns the arrays and shapes among arguments."""
    return [leaf for leaf in _flat(arguments)[0] if is_array(leaf)]


def _runnable(
    program: Program, mesh: Mesh, evaluation: Callable[..., Evaluation]
) -> Callable[..., Any]:
    order: list[Value] = []

    def compute(splits: Any, values: list, noise: tuple, bits: dict) -> tuple[list, list]:
        given = {number: Injected(bits[number], split) for number, split in splits}
        outputs, record = evaluation(noise, given).run(program, values)
        order[:] = record
        return [plain(x) for x in outputs], [plain(x) for x in record.values()]

    # On one device each operation runs by itself: JAX compiles it once, for all programs that have
    # it, and a whole program with noise takes many times longer to compile. Loops would be compiled
    # anew in each run.
    is_whole = mesh.size > 1 or any(operation.regions for operation in program.operations)
    jitted = jax.jit(compute, static_argnums=0, compiler_options=_COMPILER_OPTIONS)
    computed = jitted if is_whole else compute

    def run(*arguments: Any) -> tuple[list, dict[Value, Any]]:
        outputs, values = computed(*arguments)
        return outputs, dict(zip(order, values, strict=True))

    return run


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A function and its arguments, to be traced on several meshes.

    Args:
        make: returns the function and the arguments for a mesh.
        name: the name of the function.
        context: the mesh in context, if the function takes its mesh from there.
    """

    make: Callable[[Mesh], tuple[Callable[..., Any], tuple[Any, ...]]]
    name: str
    context: Mesh | None = None

    def place(self, mesh: Mesh) -> list[tuple[str, int]]:
        """Returns the file and line at which the function begins, if known."""
        with contextlib.suppress(Exception):
            code = inspect.unwrap(self.make(mesh)[0]).__code__
            return [(code.co_filename, code.co_firstlineno)]
        return []

    def on(self, sizes: Mapping[str, int], like: Mesh | None, checked: bool = True) -> Traced:
        """Traces the function on a mesh of these sizes.

        Args:
            sizes: the size of each axis.
            like: a mesh whose axis types are used.
            checked: False forces `check_vma=False` in every `shard_map`.
        """
        with contextlib.nullcontext() if checked else unchecked():
            return self._on(build_mesh(sizes, like))

    def _on(self, mesh: Mesh) -> Traced:
        function, arguments = self.make(mesh)
        _check_arguments(function, arguments, self.name)
        leaves, rebuild = _flat(arguments)
        # Traced once with shapes; drawn numbers are passed when the program runs.
        dynamic = [leaf for leaf in leaves if is_array(leaf)]
        names: list[str] = []

        def run(*arrays: Any) -> list[Any]:
            given = iter(arrays)
            filled = [next(given) if is_array(leaf) else leaf for leaf in leaves]
            inputs = rebuild(filled)
            result = _outputs(function(*inputs), inputs, arguments)
            pairs = jax.tree_util.tree_leaves_with_path(result)
            pairs = [(path, x) for path, x in pairs if hasattr(x, "dtype")]
            names[:] = [_path(path) for path, _ in pairs]
            return [x for _, x in pairs]

        context = mesh if self.context is not None else None
        within = contextlib.nullcontext() if context is None else jax.set_mesh(context)
        specs = tuple(_spec(leaf, mesh) for leaf in dynamic)
        with within:
            placed = [_struct(x, s, mesh) for x, s in zip(dynamic, specs, strict=True)]
            closed = jax.make_jaxpr(run)(*placed)
        if not names:
            raise ConfigError(
                f"[PROVE012] {self.name} returns no JAX array, so there is nothing to compare; "
                "prove a function that returns arrays"
            )
        program = flatten(closed)
        _release(program)
        return Traced(program, tuple(names), mesh, context, specs, tuple(dynamic))


def _check_arguments(function: Any, arguments: tuple[Any, ...], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        # A builtin may have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"[PROVE011] {name}{signature} cannot take the {len(arguments)} arguments that are "
            f"given ({error}); give all of them: in a file by a function named arguments that "
            "returns them, or one shape for each by --shape 'f32[8,4]'"
        ) from error


def _path(path: Any) -> str:
    return f"output{jax.tree_util.keystr(path)}"


def _spec(leaf: Any, mesh: Mesh) -> Any:
    """Returns the spec by which an argument was placed, if the mesh has its axes."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or not isinstance(leaf, jax.Array):
        return None
    return sharding.spec if set(sharding.mesh.axis_names) <= set(mesh.axis_names) else None


def _struct(leaf: Any, spec: Any, mesh: Mesh) -> Any:
    sharding = None if spec is None else NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)


def _is_module(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Pytree)


def _flat(arguments: tuple[Any, ...]) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the leaves of arguments, and a function that rebuilds them, NNX modules included."""
    if any(map(_is_module, jax.tree.leaves(arguments, is_leaf=_is_module))):
        graph, state = nnx.split(list(arguments))
        leaves, structure = jax.tree.flatten(state)
        return leaves, lambda new: nnx.merge(graph, structure.unflatten(new))
    leaves, structure = jax.tree.flatten(arguments)
    return leaves, structure.unflatten


def _outputs(result: Any, inputs: Any, arguments: Any) -> Any:
    """Returns a function's result, and its module arguments, which it may have changed."""
    if any(map(_is_module, jax.tree.leaves(result, is_leaf=_is_module))):
        result = nnx.state(result)
    modules = [x for x in inputs if _is_module(x)]
    if not modules:
        return result
    return {"returned": result, "updated": [nnx.state(module) for module in modules]}


def _release(program: Program) -> None:
    """Converts constants that are placed on the devices of a mesh to NumPy arrays."""
    regions = [program.region, *(r for o in program.operations for r in o.regions)]
    for region in regions:
        for value in region.constants:
            constant = value.constant
            if (
                isinstance(constant, jax.Array)
                and not is_key(constant)
                and len(constant.sharding.device_set) > 1
            ):
                value.constant = np.asarray(constant)


def subject_of(function: Any, arguments: tuple[Any, ...], name: str | None = None) -> Subject:
    """Returns the subject with which a function is tried on other meshes.

    If `mesh` is the function's only parameter, it is called with a mesh and returns the function to
    prove, or a pair of that and its arguments. If `mesh` is one of several parameters, it is passed
    by name. Any other function is copied with each mesh in its closure replaced.
    """
    if not callable(function):
        raise ConfigError(f"[PROVE004] got {function!r:.60} to prove; give a function")
    name = name or str(getattr(function, "__qualname__", type(function).__name__))
    parameters = _parameters(function)
    if parameters[:1] == ["mesh"] and len(parameters) == 1:
        return Subject(functools.partial(_made, function, arguments, name), name)
    if "mesh" in parameters:
        given = functools.partial
        return Subject(lambda mesh: (given(function, mesh=mesh), arguments), name)
    current = _mesh_in_context()

    def rebound(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        sizes = {str(axis): size for axis, size in mesh.shape.items()}
        return rebind(function, sizes), arguments

    return Subject(rebound, name, current)


def _made(
    function: Callable[..., Any], arguments: tuple[Any, ...], name: str, mesh: Mesh
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    made = function(mesh)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return made[0], tuple(made[1])
    if not callable(made):
        raise ConfigError(
            f"[PROVE005] {name}(mesh) returned {type(made).__name__}; it must return a function, "
            "or a pair of a function and its arguments"
        )
    return made, arguments


def _parameters(function: Any) -> list[str]:
    with contextlib.suppress(ValueError, TypeError):
        return list(inspect.signature(function).parameters)
    return []


def _mesh_in_context() -> Mesh | None:
    mesh = jax.sharding.get_mesh()
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None
