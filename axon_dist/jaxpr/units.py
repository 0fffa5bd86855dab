"""Units: modules of an unmodified model whose calls become visible in the traced program.

FSDP gathers the weights of one unit at a time, rematerialisation recomputes one, and a pipeline
cuts between two. All three need to know where a block of somebody else's model begins and ends. A
marked module runs its own `__call__` inside a named `jax.jit`, so that in the jaxpr of the model
every block is one equation, and equal blocks have the same inner program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterator
from itertools import zip_longest
from typing import Any, TypeAlias

import jax
import numpy as np
from flax import nnx

from ..core.errors import UnsupportedError
from ..core.modules import layers_of, num_stacked, wrap_calls
from ..core.tree import path_str
from ..core.typing import Path
from .linen import BlockProgram, LinenUnits, bridges_of, linen_modules

UNIT_NAME = "axon_unit"
"""The name of the equation that a marked call becomes."""

GATHER = "axon_gather"
"""The metadata of a parameter that holds how a unit gathers it."""

ARRAY, NODE = "array", "node"
"""What takes the place of an argument of a unit: an array, or something of nnx that has state."""

MAKES_COMPLEX = frozenset({"complex", "fft", "eig"})
"""The primitives that make complex numbers of real ones."""

IsUnit: TypeAlias = Callable[[Path, nnx.Module | None], bool]
"""(path, module) -> whether its calls are a unit; None stands for a module within a Linen one."""

RematPolicy: TypeAlias = Callable[..., Any]
"""A policy of `jax.checkpoint`: which intermediate results are kept for the backward pass."""


@dataclasses.dataclass(frozen=True)
class RealOnly:
    """A policy that keeps what another keeps, but no complex values, which are computed again.

    `jax.checkpoint` rounds what it keeps with `reduce_precision`, which refuses complex numbers
    (jax 0.10 to 0.12).

    Args:
        policy: the other policy.
    """

    policy: RematPolicy

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        """What becomes of the result of a primitive."""
        dtypes = [getattr(aval, "dtype", None) for aval in avals] + [params.get("new_dtype")]
        is_complex = any(getattr(dtype, "kind", "") == "c" for dtype in dtypes)
        if is_complex or primitive.name in MAKES_COMPLEX:
            return False
        return self.policy(primitive, *avals, **params)


def units_of(model: nnx.Module, is_unit: IsUnit) -> Iterator[tuple[Path, nnx.Module]]:
    """The outermost modules that are units, with their paths; nothing inside a unit is one."""
    found: set[str] = set()
    paths = sorted(
        ((_path(keys), module) for keys, module in nnx.iter_modules(model)),
        key=lambda item: item[0].count("/") if item[0] else -1,
    )
    for path, module in paths:
        if not is_in_any(path, found) and is_unit(path, module):
            found.add(path)
            yield path, module


def is_inside(path: Path, unit: Path) -> bool:
    """Whether a path is that of a unit or of something in it; the whole model has the path ""."""
    return path == unit or not unit or path.startswith(unit + "/")


def is_in_any(path: Path, units: Container[Path]) -> bool:
    """Whether a path is inside one of many, looked up by its own beginnings.

    Example:
        >>> is_in_any("blocks/10/mlp", {"blocks/1", "blocks/10"}), is_in_any("head", {"blocks/1"})
        (True, False)
    """
    ends = [index for index, sign in enumerate(path) if sign == "/"]
    return "" in units or path in units or any(path[:end] in units for end in ends)


def mark_units(model: nnx.Module, is_unit: IsUnit, remat: RematPolicy | None = None) -> list[Path]:
    """Makes every unit of a model a named equation of the traced program, in place.

    Args:
        model: a model merged inside a trace; it is changed.
        is_unit: which modules are units; the outermost win.
        remat: when given, each unit is under `jax.checkpoint` with this policy.

    Returns:
        The paths of the units.

    Example:
        >>> model = nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(3)))
        >>> mark_units(model, lambda path, module: isinstance(module, nnx.Linear))
        ['layers/0', 'layers/1', 'layers/2']
        >>> jaxpr = jax.make_jaxpr(model)(jax.numpy.ones((1, 2)))
        >>> [equation.params["name"] for equation in jaxpr.eqns]
        ['axon_unit', 'axon_unit', 'axon_unit']
    """
    units = list(units_of(model, is_unit))
    # A function of its own, so that the programs of units live no longer than the trace does.
    around = {"__call__": AsUnit(_named(), remat)}
    for _, module in units:
        if not any(isinstance(one, AsUnit) for one in layers_of(module).around("__call__")):
            wrap_calls(module, around)
    found = [path for path, _ in units]
    return found + _mark_linen_units(model, found, is_unit, remat)


def _mark_linen_units(
    model: nnx.Module, outer: list[Path], is_unit: IsUnit, remat: RematPolicy | None
) -> list[Path]:
    """Makes units of the modules within bridged Linen ones; returns their paths."""
    found: list[Path] = []
    for keys, _ in sorted(linen_modules(model), key=lambda item: len(item[0])):
        path = _path(keys)
        if not any(is_inside(path, unit) for unit in outer + found) and is_unit(path, None):
            found.append(path)
    for keys, bridge in list(bridges_of(model)):
        below = [path for path in found if is_inside(path, _path(keys))]
        if below:
            own = frozenset(path.removeprefix(_path(keys)).lstrip("/") for path in below)
            wrap_calls(bridge, {"__call__": LinenUnits(own, _running(remat), GATHER)})
    return found


def _running(remat: RematPolicy | None) -> Callable[..., Any]:
    """A jitted function that runs a program, whose equations have the name of units."""

    def axon_unit(program: BlockProgram, gathers: tuple[Any, ...], values: Any) -> Any:
        def run(values: Any) -> Any:
            pairs = zip_longest(values, gathers)
            return program.run([x if gather is None else gather(x) for x, gather in pairs])

        protected = run if remat is None else jax.checkpoint(run, policy=RealOnly(remat))
        return protected(values)

    return jax.jit(axon_unit, static_argnums=(0, 1))


@dataclasses.dataclass(frozen=True)
class AsUnit:
    """Runs the call of a module as one named equation.

    Args:
        run: `axon_unit` jitted, which gives equal calls of one trace the same inner program.
        remat: the policy of `jax.checkpoint`, or None.
    """

    run: Any
    remat: RematPolicy | None

    def __call__(self, method: Any, module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs it, and leaves the state of module and arguments as the call did.

        Raises:
            UnsupportedError: when the module holds many layers and is called as a whole.
        """
        self.check(module)
        graphdef, params, rest = nnx.split(module, _is_weight, ...)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        nodes = [leaf for leaf in leaves if _is_node(leaf)]
        nodes_graph, nodes_state = nnx.split(nodes)
        static = tuple(_static(leaf) for leaf in leaves)
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        how = Call(method, structure, static, Structure(nodes_graph), self.remat)
        output, rest, changed = self.run(
            Structure(graphdef), how, params, rest, (arrays, nodes_state)
        )
        nnx.update(module, rest)
        nnx.update(nodes, changed)
        return output

    def check(self, module: nnx.Module) -> None:
        """Raises for a module that cannot be called as one."""
        if (count := num_stacked(module)) is not None:
            raise UnsupportedError(why_not_as_a_whole(type(module).__name__, count))


@dataclasses.dataclass(frozen=True)
class Static:
    """A flag among the arguments of a unit, which is part of its program.

    Args:
        value: anything that compares and is no array.
    """

    value: Any

    def __hash__(self) -> int:
        return _hash(self.value)


@dataclasses.dataclass(frozen=True)
class Structure:
    """The structure of a module, as a part of a program.

    A module may hold what compares and has no hash, such as a dataclass that is not frozen.

    Args:
        graphdef: from `nnx.split`.
    """

    graphdef: Any

    def __hash__(self) -> int:
        return _hash(self.graphdef)


@dataclasses.dataclass(frozen=True)
class Call:
    """All of a call that is no array, which is part of its program.

    Args:
        method: what is called.
        structure: of `(args, kwargs)`.
        static: for each leaf, its `Static`, or the kind of what takes its place.
        nodes: the structure of the modules, variables and random streams among the leaves.
        remat: the policy, or None.
    """

    method: Any
    structure: Any
    static: tuple[Any, ...]
    nodes: Structure
    remat: RematPolicy | None


def why_not_as_a_whole(name: str, count: int) -> str:
    """Says why a stack of layers that is called as a whole is no unit, and what to do."""
    return (
        f"a {name} that holds {count} stacked layers is called as a whole, and loops over them "
        "within its own call: gathered or recomputed as one, it would take the memory of all "
        f"layers at once. Let {name} be one layer, and loop where it is held: nnx.scan(lambda x, "
        "block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks); or keep the "
        "layers in an nnx.List"
    )


def _named() -> Any:
    """A jitted function whose equations have the name of units."""

    def axon_unit(module: Structure, how: Call, params: Any, rest: Any, given: Any) -> Any:
        run = functools.partial(run_call, module.graphdef, how)
        protected = run if how.remat is None else jax.checkpoint(run, policy=RealOnly(how.remat))
        return protected(params, rest, given)

    return jax.jit(axon_unit, static_argnums=(0, 1))


def run_call(graphdef: Any, how: Call, params: Any, rest: Any, given: Any) -> Any:
    """Runs a call that a unit stands for.

    Args:
        graphdef: the structure of the module.
        how: all of the call that is no array.
        params: the module's parameters.
        rest: its other state.
        given: the arrays among its arguments, and the state of modules among them.

    Returns:
        What the call returns, the state that it has changed, and that of its arguments.
    """
    module = nnx.merge(graphdef, gathered(params), rest, copy=True)
    before = {keys: variable.get_value() for keys, variable in _variables_of(module)}
    arrays, state = given
    nodes = nnx.merge(how.nodes.graphdef, state, copy=True)
    sources = {ARRAY: iter(arrays), NODE: iter(nodes)}
    leaves = [
        flag.value if isinstance(flag, Static) else next(sources[flag]) for flag in how.static
    ]
    args, kwargs = jax.tree.unflatten(how.structure, leaves)
    output = how.method(module, *args, **kwargs)
    _check_unchanged(type(module), leaves, (args, kwargs))
    # What never changes is not handed on from block to block.
    changed = nnx.state(nodes, nnx.Not(nnx.Any(nnx.Param, nnx.RngKey)))
    weights = frozenset(keys for keys, _ in nnx.to_flat_state(params))

    # What the call has left alone is not written back: within `jax.grad` it could not be.
    def is_new(keys, variable):
        return variable.get_value() is not before.get(keys)

    def is_changed(keys, variable):
        return keys not in weights and is_new(keys, variable)

    return output, nnx.state(module, is_changed), changed


def _variables_of(module: nnx.Module) -> Iterator[tuple[Any, nnx.Variable]]:
    for keys, variable in nnx.to_flat_state(nnx.state(module)):
        if isinstance(variable, nnx.Variable):
            yield keys, variable


def _is_weight(_: Any, variable: Any) -> bool:
    if not isinstance(variable, nnx.Variable):
        return False
    return isinstance(variable, nnx.Param) or GATHER in variable.get_metadata()


def _check_unchanged(module_type: type, leaves: list[Any], given: Any) -> None:
    """Raises when a call has changed a list or dict among its arguments, as its caller expects."""
    after = jax.tree.leaves(given, is_leaf=_is_node)
    if len(after) != len(leaves) or any(a is not b for a, b in zip(after, leaves, strict=True)):
        raise UnsupportedError(
            f"a call of {module_type.__name__} changes a list or dict that it is given: its "
            f"arguments had {len(leaves)} leaves and now have {len(after)}. The call is a program "
            "of its own, out of which nothing comes but what it returns: return the value, or keep "
            "it in an nnx.Variable"
        )


def gathered(params: Any) -> Any:
    """Gathers every parameter that says how; the others stay as they are."""

    def one(variable: Any) -> Any:
        gather = variable.get_metadata().get(GATHER)
        if gather is None:
            return variable
        whole = variable.replace(gather(variable.get_value()))
        whole.del_metadata(GATHER)
        return whole

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def check_some(paths: list[Path], what: str, model: nnx.Module) -> None:
    """Raises unless a model has units.

    Raises:
        UnsupportedError: naming what was looked for and the classes that the model has.
    """
    if not paths:
        raise UnsupportedError(
            f"{what} matches no module of the model; it has modules of the classes "
            f"{', '.join(names_of(model))}. Name one of them"
        )


def names_of(model: nnx.Module) -> list[str]:
    """What the modules of a model are called: by class, within Linen ones without their number."""
    classes = {type(module).__name__ for _, module in nnx.iter_modules(model)}
    return sorted(classes | {name.rpartition("/")[2] for _, name in linen_modules(model)})


def _hash(value: Any) -> int:
    """The hash of a value; of one that has none that of its type, and it is compared."""
    try:
        return hash(value)
    except TypeError:
        return hash(type(value))


def _static(leaf: Any) -> Any:
    if _is_node(leaf):
        return NODE
    return ARRAY if _is_array(leaf) else Static(leaf)


def _is_node(leaf: Any) -> bool:
    return isinstance(leaf, (nnx.Pytree, nnx.Variable))


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _path(keys: tuple[Any, ...]) -> Path:
    return path_str(tuple(keys))
