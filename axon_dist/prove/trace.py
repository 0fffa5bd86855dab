"""Traces and compiles a function on one mesh, and names its outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from ..core.errors import ConfigError
from .inputs import is_array
from .meshes import build_mesh, rebind, sizes_of, title_of, unchecked
from .program import Evaluation, Injected, Region, Value, compiler, flatten, is_key, plain
from .relations import NOISY_RUNS, bound_of


@dataclasses.dataclass(frozen=True)
class Run:
    """What one step of a program computed.

    Args:
        outputs: its outputs.
        output_bounds: by how much rounding may change each.
        values: the recorded values.
        bounds: by how much rounding may change each.
    """

    outputs: list[np.ndarray]
    output_bounds: list[float]
    values: Mapping[Value, np.ndarray]
    bounds: Mapping[Value, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function traced on one mesh.

    Args:
        program: its operations.
        names: the names of its outputs.
        mesh: the mesh on which it was traced.
        context: the mesh in context, if the function takes its mesh from there.
        shardings: how the array arguments are placed; None where unknown.
        leaves: the arrays and shapes among the arguments.
    """

    program: Region
    names: tuple[str, ...]
    mesh: Mesh
    context: Mesh | None
    shardings: tuple[NamedSharding | None, ...]
    leaves: tuple[Any, ...]
    _compiled: Callable[..., Any] = dataclasses.field(default_factory=compiler)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis of the mesh."""
        return sizes_of(self.mesh)

    @property
    def title(self) -> str:
        """The mesh as text, such as `dp=4,tp=2`."""
        return title_of(self.sizes)

    def run(
        self,
        inputs: Sequence[Any],
        wanted: Iterable[Value] = (),
        injected: Mapping[int, Injected] | None = None,
        noise: int | None = None,
    ) -> tuple[list[np.ndarray], dict[Value, np.ndarray]]:
        """Runs a step; returns its outputs and the recorded values.

        Args:
            inputs: its inputs.
            wanted: the values to record.
            injected: bits that replace those of draws, by the number of the operation.
            noise: a seed, with which results are perturbed by a unit in the last place; 0 perturbs
                nothing, in the same compiled program.
        """
        placed = [_placed(x, sharding) for x, sharding in zip(inputs, self.shardings, strict=True)]
        seed = None
        if noise is not None:
            seed = np.uint32(noise * 2654435761 % 2**32), np.float32(noise > 0)
        how = Evaluation(frozenset(wanted), seed, injected or {})
        placed = [how.moved(x, 977 + number) for number, x in enumerate(placed)]
        with contextlib.nullcontext() if self.context is None else jax.set_mesh(self.context):
            # On one device each operation runs by itself: JAX compiles it once, for all programs
            # that have it, and a whole program with noise takes many times longer to compile. Loops
            # would be compiled anew in each run.
            is_whole = self.mesh.size > 1 or any(o.regions for o in self.program.operations)
            run = self._compiled if is_whole else Evaluation.run
            outputs, values = run(how, self.program, placed)
        return [np.asarray(plain(x)) for x in outputs], {
            v: np.asarray(x) for v, x in values.items()
        }

    def measured(
        self,
        inputs: Sequence[Any],
        wanted: Iterable[Value] = (),
        injected: Mapping[int, Injected] | None = None,
    ) -> Run:
        """Runs a step once as it is and a few times perturbed, to measure what rounding changes."""
        wanted = frozenset(wanted)
        several = [self.run(inputs, wanted, injected, n) for n in range(NOISY_RUNS + 1)]
        outputs, values = zip(*several, strict=True)
        bounds = {value: bound_of([one[value] for one in values]) for value in values[0]}
        of_outputs = [bound_of(each) for each in zip(*outputs, strict=True)]
        return Run(outputs[0], of_outputs, values[0], bounds)


def _placed(x: Any, sharding: NamedSharding | None) -> Any:
    # The arrays may come from another mesh.
    if is_key(x):
        data = jax.numpy.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return np.asarray(x) if sharding is None else jax.device_put(np.asarray(x), sharding)


def array_leaves(arguments: tuple[Any, ...]) -> list[Any]:
    """Returns the arrays and shapes among arguments."""
    return [leaf for leaf in _flat(arguments)[0] if is_array(leaf)]


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A function and its arguments, to be traced on several meshes.

    Args:
        make: returns the function and the arguments for a mesh.
        name: the name of the function.
        is_in_context: whether the function takes its mesh from the context.
    """

    make: Callable[[Mesh], tuple[Callable[..., Any], tuple[Any, ...]]]
    name: str
    is_in_context: bool = False

    def place(self, mesh: Mesh) -> list[tuple[str, int]]:
        """Returns the file and line at which the function begins, if known."""
        with contextlib.suppress(Exception):
            code = inspect.unwrap(self.make(mesh)[0]).__code__
            return [(code.co_filename, code.co_firstlineno)]
        return []

    def on(self, sizes: Mapping[str, int], like: Any, checked: bool = True) -> Traced:
        """Traces the function on a mesh of these sizes.

        Args:
            sizes: the size of each axis.
            like: a mesh whose axis types are used; anything else for none.
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
            inputs = rebuild([next(given) if is_array(leaf) else leaf for leaf in leaves])
            result = _with_modules(function(*inputs), inputs)
            pairs = jax.tree_util.tree_leaves_with_path(result)
            pairs = [(path, x) for path, x in pairs if hasattr(x, "dtype")]
            names[:] = [f"output{jax.tree_util.keystr(path)}" for path, _ in pairs]
            return [x for _, x in pairs]

        context = mesh if self.is_in_context else None
        shardings = tuple(_sharding(leaf, mesh) for leaf in dynamic)
        structs = [
            jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(dynamic, shardings, strict=True)
        ]
        with contextlib.nullcontext() if context is None else jax.set_mesh(context):
            closed = jax.make_jaxpr(run)(*structs)
        if not names:
            raise ConfigError(
                f"[PROVE012] {self.name} returns no JAX array, so there is nothing to compare; "
                "prove a function that returns arrays"
            )
        return Traced(flatten(closed), tuple(names), mesh, context, shardings, tuple(dynamic))


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


def _sharding(leaf: Any, mesh: Mesh) -> NamedSharding | None:
    """Returns how an argument was placed, on this mesh, if the mesh has its axes."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, NamedSharding):
        return None
    is_known = set(sharding.mesh.axis_names) <= set(mesh.axis_names)
    return NamedSharding(mesh, sharding.spec) if is_known else None


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


def _with_modules(result: Any, inputs: Any) -> Any:
    """Returns a function's result, and its module arguments, which it may have changed."""
    if any(map(_is_module, jax.tree.leaves(result, is_leaf=_is_module))):
        result = nnx.state(result)
    modules = [nnx.state(x) for x in inputs if _is_module(x)]
    return {"returned": result, "updated": modules} if modules else result


def subject_of(function: Any, arguments: tuple[Any, ...], name: str | None = None) -> Subject:
    """Returns the subject with which a function is tried on other meshes.

    If `mesh` is the function's only parameter, it is called with a mesh and returns the function to
    prove, or a pair of that and its arguments. If `mesh` is one of several parameters, it is passed
    by name. Any other function is copied with each mesh in its closure replaced.
    """
    if not callable(function):
        raise ConfigError(f"[PROVE004] got {function!r:.60} to prove; give a function")
    name = name or str(getattr(function, "__qualname__", type(function).__name__))
    parameters: list[str] = []
    with contextlib.suppress(ValueError, TypeError):
        parameters = list(inspect.signature(function).parameters)

    def made(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if parameters == ["mesh"]:
            return _pair(function(mesh), arguments, name)
        if "mesh" in parameters:
            return functools.partial(function, mesh=mesh), arguments
        return rebind(function, sizes_of(mesh)), arguments

    return Subject(made, name, "mesh" not in parameters and mesh_in_context() is not None)


def _pair(made: Any, arguments: tuple[Any, ...], name: str) -> tuple[Callable[..., Any], Any]:
    """Reads what `make(mesh)` returned: a function, or a pair of a function and its arguments."""
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return made[0], tuple(made[1])
    if not callable(made):
        raise ConfigError(
            f"[PROVE005] {name}(mesh) returned {type(made).__name__}; it must return a function, "
            "or a pair of a function and its arguments"
        )
    return made, arguments


def mesh_in_context() -> Mesh | None:
    """Returns the mesh that `jax.set_mesh` set, or None."""
    mesh = jax.sharding.get_mesh()
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None
