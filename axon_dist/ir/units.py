"""Units: modules of an unmodified model whose calls become visible in the traced program.

FSDP gathers the weights of one unit at a time, rematerialisation recomputes one unit at a time, and
a pipeline cuts between two units. All three need to know where the blocks of a user's model begin
and end. A marked module runs its own `__call__` inside a named `jax.jit`. So every block is one
equation in the jaxpr of the model, and equal blocks have the same inner program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

import jax
from flax import nnx
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from ..core.compat import eval_jaxpr
from ..core.errors import UnsupportedError
from ..core.modules import (
    around_of,
    bridges_of,
    check_parameters,
    is_node,
    num_stacked,
    stacks_of,
    wrap_calls,
)
from ..core.tree import path_str
from ..core.typing import Array, Function, Keys, Path, PyTree
from .linen import (
    ARRAYS,
    Gathers,
    LinenUnits,
    RunUnit,
    check_unchanged,
    linen_blocks,
    linen_modules,
)
from .walk import Aval, same_program, without_tracers

# JAX names a jitted program after its function, so this is the name of `axon_unit` below.
UNIT_NAME = "axon_unit"
"""The name of the equation that a marked call becomes."""


def is_unit(equation: JaxprEqn) -> bool:
    """Whether an equation of a jaxpr is the call of a marked unit."""
    return equation.params.get("name") == UNIT_NAME and "jaxpr" in equation.params


GATHER = "axon_gather"
"""The key of a parameter's metadata under which its gather function is stored."""

MAKES_COMPLEX = frozenset({"complex", "fft", "eig"})
"""The primitives that compute complex numbers from real ones."""

Attributes: TypeAlias = Mapping[tuple[Keys, str], object]
"""The plain attributes of modules, by (keys of the module, name of the attribute)."""

IsUnit: TypeAlias = Callable[[Path, nnx.Module | None], bool]
"""(path, module) -> whether its calls are units; module is None for one within a Linen module."""

RematPolicy: TypeAlias = Callable[..., Any]
"""A policy of `jax.checkpoint`: which intermediate results are saved for the backward pass."""


@dataclasses.dataclass(frozen=True)
class RealOnly:
    """A policy that saves what another one saves, except complex values, which are recomputed.

    `jax.checkpoint` applies `reduce_precision` to the values it saves, and that primitive refuses
    complex numbers (jax 0.10 to 0.12).

    Args:
        policy: the other policy.
    """

    policy: RematPolicy

    def __call__(self, primitive: Primitive, *avals: Aval, **params: Any) -> Any:
        """Whether to save the result of a primitive; what `policy` returns, or False."""
        dtypes = [getattr(aval, "dtype", None) for aval in avals] + [params.get("new_dtype")]
        is_complex = any(getattr(dtype, "kind", "") == "c" for dtype in dtypes)
        if is_complex or primitive.name in MAKES_COMPLEX:
            return False
        return self.policy(primitive, *avals, **params)


def units_of(model: nnx.Module, matches: IsUnit) -> Iterator[tuple[Path, nnx.Module]]:
    """Yields the outermost modules that match, with their paths; those inside one are skipped."""
    outer: set[str] = set()
    paths = sorted(
        ((path_str(keys), module) for keys, module in nnx.iter_modules(model)),
        key=lambda item: item[0].count("/") if item[0] else -1,
    )
    for path, module in paths:
        if not is_in_any(path, outer) and matches(path, module):
            outer.add(path)
            yield path, module


def is_inside(path: Path, unit: Path) -> bool:
    """Whether a path is a unit's path or lies inside it; the whole model has the path ""."""
    return path == unit or not unit or path.startswith(unit + "/")


def is_in_any(path: Path, units: Container[Path]) -> bool:
    """Whether a path is inside one of many units; looks up each prefix of the path.

    Example:
        >>> is_in_any("blocks/10/mlp", {"blocks/1", "blocks/10"}), is_in_any("head", {"blocks/1"})
        (True, False)
    """
    ends = [index for index, sign in enumerate(path) if sign == "/"]
    return "" in units or path in units or any(path[:end] in units for end in ends)


def block_paths(model: nnx.Module, names: tuple[str, ...] = ()) -> frozenset[Path]:
    """Returns the paths of the blocks of a model, including those within bridged Linen modules.

    Args:
        model: any NNX module; its leaves may be shapes.
        names: names of block classes. A module within a bridged one has a class only while it
            runs, so it goes by its name without the number: `layer` or `encoder/layer` for
            `encoder/layer/0`, `Block` for `Block_0`. If empty, the classes are those that the
            model repeats in a list or stacks, and all their modules are blocks, wherever they are.

    Returns:
        The paths.
    """
    classes = names or block_classes(model)
    blocks = {keys for keys, module in nnx.iter_modules(model) if type(module).__name__ in classes}
    for above, bridge in bridges_of(model):
        blocks.update(above + keys for keys in linen_blocks(bridge, names))
    return frozenset("/".join(map(str, keys)) for keys in blocks)


def block_classes(model: nnx.Module) -> tuple[str, ...]:
    """Returns the classes of the blocks that a model repeats, in lists or stacked by `nnx.vmap`.

    Args:
        model: any NNX module.

    Returns:
        The class names of outermost stacked modules, and of elements of outermost lists that hold
        parameters; empty if nothing is repeated. A stacked module that contains no Flax layer
        looks like a single module: pass its class name yourself.

    Example:
        >>> block_classes(nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.relu))
        ('Linear',)
    """
    stacks = stacks_of(model)
    names: dict[str, int] = {}
    for keys, module in nnx.iter_modules(model):
        path = "/".join(map(str, keys))
        depth = sum(isinstance(key, int) for key in keys)
        has_params = bool(jax.tree.leaves(nnx.state(module, nnx.Param)))
        is_listed = depth == 1 and isinstance(keys[-1], int) and has_params
        # A list within a stacked block belongs to that block.
        in_stack = any(is_inside(path, stack) for stack in stacks)
        if path in stacks or (is_listed and not in_stack):
            names.setdefault(type(module).__name__, 0)
    return tuple(names)


def mark_units(
    model: nnx.Module,
    matches: IsUnit,
    remat: RematPolicy | None = None,
    stacked_units: Container[Path] = (),
) -> list[Path]:
    """Makes every unit of a model a named equation of the traced program, in place.

    Args:
        model: a model merged inside a trace; it is changed.
        matches: which modules are units; the outermost match wins.
        remat: if given, each unit is under `jax.checkpoint` with this policy.
        stacked_units: paths of Linen modules that stack the parameters of the layers a loop calls;
            each call of a layer is a unit.

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
    units = list(units_of(model, matches))
    # Create it per trace, so that the programs of units are freed with the trace.
    around = {"__call__": AsUnit(UnitPrograms(_running(remat)))}
    for _, module in units:
        if not any(isinstance(one, AsUnit) for one in around_of(module, "__call__")):
            wrap_calls(module, around)
    outer = [path for path, _ in units]
    inner: list[Path] = []
    bridges = list(bridges_of(model))
    named = linen_modules(model) if bridges else ()
    for keys, _ in sorted(named, key=lambda item: len(item[0])):
        path = path_str(keys)
        if not is_in_any(path, {*outer, *inner}) and matches(path, None):
            inner.append(path)
    for keys, bridge in bridges:
        below = [path for path in inner if is_inside(path, path_str(keys))]
        if below:
            by_name = {path.removeprefix(path_str(keys)).lstrip("/"): path for path in below}
            stacked = frozenset(name for name, path in by_name.items() if path in stacked_units)
            run = UnitPrograms(_running(remat))
            linen = LinenUnits(frozenset(by_name), run, GATHER, stacked)
            wrap_calls(bridge, {"__call__": linen})
    return outer + inner


def _running(remat: RematPolicy | None) -> RunUnit:
    """Returns a jitted function that runs a program; its equation carries `UNIT_NAME`."""

    def axon_unit(program: ClosedJaxpr, gathers: Gathers, values: list[Array]) -> list[Array]:
        def run(values: list[Array]) -> list[Array]:
            pairs = zip_longest(values, gathers)
            operands = [x if gather is None else gather(x) for x, gather in pairs]
            return eval_jaxpr(program, operands)

        protected = run if remat is None else jax.checkpoint(run, policy=RealOnly(remat))
        return protected(values)

    return jax.jit(axon_unit, static_argnums=(0, 1))


@dataclasses.dataclass(frozen=True, eq=False)
class UnitPrograms:
    """Runs the units of one trace: calls with equal programs share one.

    It compares the traced programs of two calls, not their modules and arguments. A call may read
    globals, context variables, the type of a flag, or an object that has changed since the
    previous call.

    Args:
        run: runs a program as the equation of a unit.
        known: the programs so far, by properties that are cheap to compare.
    """

    run: RunUnit
    known: dict[Hashable, list[ClosedJaxpr]] = dataclasses.field(default_factory=dict)

    def __call__(self, program: ClosedJaxpr, gathers: Gathers, values: list[Array]) -> list[Array]:
        """Runs the first known program that computes the same as this one."""
        jaxpr = program.jaxpr
        names = tuple(equation.primitive.name for equation in jaxpr.eqns)
        candidates = self.known.setdefault((names, *(v.aval for v in jaxpr.invars)), [])
        for other in candidates:
            if same_program(program, other):
                return self.run(other, gathers, values)
        candidates.append(program)
        return self.run(program, gathers, values)


@dataclasses.dataclass(frozen=True)
class AsUnit:
    """Runs the call of a module as one named equation.

    Args:
        run: runs the units of the trace.
    """

    run: UnitPrograms

    def __call__(
        self, method: Function, module: nnx.Module, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Runs the call, and writes its changes of state back to the module and its arguments.

        Raises:
            UnsupportedError: if the module stacks many layers and is called as a whole.
        """
        if (count := num_stacked(module)) is not None:
            raise _not_one_layer(module, count)
        kind = type(module)
        attributes: dict[tuple[Keys, str], object] = {}
        arrays_set: list[tuple[Keys, str]] = []
        graphdef, params, rest = nnx.split(module, _is_weight, ...)
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_node)
        nodes = [leaf for leaf in leaves if is_node(leaf)]
        nodes_graph, nodes_state = nnx.split(nodes)
        weights = frozenset(keys for keys, _ in nnx.to_flat_state(params))

        def call(
            params: nnx.State, rest: nnx.State, arrays: Sequence[Array], state: nnx.State
        ) -> tuple[PyTree, nnx.State, nnx.State, list[object]]:
            """Returns the output, the changed state of module and arguments, and new attributes."""
            copy = nnx.merge(graphdef, gather_params(params), rest, copy=True)
            contents = _contents_of(copy)
            arg_nodes = nnx.merge(nodes_graph, state, copy=True)
            before = {keys: _value(leaf) for keys, leaf in contents[0].items()}
            more, more_nodes = iter(arrays), iter(arg_nodes)
            inputs = [
                next(more_nodes) if is_node(x) else next(more) if isinstance(x, ARRAYS) else x
                for x in leaves
            ]
            args, kwargs = jax.tree.unflatten(structure, inputs)
            output = method(copy, *args, **kwargs)
            check_unchanged(
                kind,
                inputs,
                jax.tree.leaves((args, kwargs), is_leaf=is_node),
                "or store it in an nnx.Variable",
            )
            after = _contents_after(copy, {keys: before.get(keys) for keys in weights})
            attributes.update(_changes(kind, contents, after))
            arrays_set[:] = [at for at, value in attributes.items() if isinstance(value, Tracer)]
            # Unchanged state is not written back: NNX would refuse the write within `jax.grad`.
            others = ((keys, leaf) for keys, leaf in after[0].items() if keys not in weights)
            new = {keys: leaf for keys, leaf in others if _value(leaf) is not before.get(keys)}
            # Parameters and keys never change, so they need not pass from block to block.
            changed = nnx.state(arg_nodes, nnx.Not(nnx.Any(nnx.Param, nnx.RngKey)))
            made = [attributes[at] for at in arrays_set]
            return _numbered(output, arg_nodes), nnx.from_flat_state(new), changed, made

        arrays = [leaf for leaf in leaves if isinstance(leaf, ARRAYS)]
        flat, tree = jax.tree.flatten((params, rest, arrays, nodes_state))
        closed, results = jax.make_jaxpr(
            lambda *flat: call(*jax.tree.unflatten(tree, flat)), return_shape=True
        )(*flat)
        program, read = without_tracers(closed)
        outputs = self.run(program, (), [*flat, *read])
        output, rest, changed, made = jax.tree.unflatten(jax.tree.structure(results), outputs)
        nnx.update(module, rest)
        nnx.update(nodes, changed)
        # Copy the plain attributes that the call set on its copy of the module.
        modules = dict(nnx.iter_modules(module)) if attributes else {}
        values = attributes | dict(zip(arrays_set, made, strict=True))
        for (keys, name), value in values.items():
            setattr(modules[keys], name, value)
        return _filled(output, nodes)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Given:
    """Stands, in the output of a call, for a node among its arguments.

    Args:
        number: the place of the node among the nodes.
    """

    number: int


def _numbered(output: PyTree, nodes: Sequence[object]) -> PyTree:
    """Puts the number of a node in its place, where a call returns one of its arguments.

    A traced program would return a copy, and the caller's own node would miss what the next call
    changes in that copy.
    """
    numbers = {id(node): Given(number) for number, node in enumerate(nodes)}
    return jax.tree.map(lambda x: numbers.get(id(x), x), output, is_leaf=is_node)


def _filled(output: PyTree, nodes: Sequence[object]) -> PyTree:
    """Puts the caller's nodes in the places of their numbers; the inverse of `_numbered`."""

    def is_leaf(x):
        return is_node(x) or isinstance(x, Given)

    def one(x):
        return nodes[x.number] if isinstance(x, Given) else x

    return jax.tree.map(one, output, is_leaf=is_leaf)


def _value(leaf: nnx.Variable | Array) -> Array:
    """Returns the array of a variable, or of a data attribute."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


Contents: TypeAlias = tuple[Mapping[Keys, nnx.Variable | Array], Attributes]
"""The state of a module, and its plain attributes."""


def _contents_of(module: nnx.Module) -> Contents:
    """Returns the state of a module and its submodules, and their other plain attributes.

    Plain attributes may be arrays: NNX does not count an array as data of a module if a call sets
    it or appends it to an nnx.List.
    """
    state = dict(nnx.to_flat_state(nnx.state(module)))
    names = {(*map(str, keys),) for keys in state}
    return state, {
        (keys, name): value
        for keys, one in nnx.iter_modules(module)
        for name, value in vars(one).items()
        if not (name.startswith("_pytree__") or is_node(value))
        and (*map(str, keys), name) not in names
    }


def _contents_after(module: nnx.Module, weights: Mapping[Keys, Any]) -> Contents:
    """Returns the contents of the copy of a module that a unit has called.

    Args:
        module: the copy.
        weights: the values of its parameters before the call.

    Raises:
        UnsupportedError: if the call has changed a parameter, which a unit does not return.
    """
    contents = _contents_of(module)
    before = {path_str(keys): value for keys, value in weights.items()}
    new = ((path_str(keys), _value(x)) for keys, x in contents[0].items() if keys in weights)
    check_parameters(module, before, new, f" of {type(module).__name__}")
    return contents


def _changes(module_type: type, before: Contents, after: Contents) -> Attributes:
    """Returns the attributes that a call has set to another value.

    Raises:
        UnsupportedError: if an attribute holds an array inside another object, or if the call adds
            data for which the caller's module has no place.
    """
    for keys, leaf in after[0].items():
        is_data = not isinstance(leaf, nnx.Variable) or isinstance(keys[-1], int)
        if is_data and keys not in before[0]:
            raise UnsupportedError(
                f"a call of {module_type.__name__} adds an array at {path_str(keys)!r}, where the "
                "module has none before the call: make it in __init__ with the shape that it will "
                f"have, such as self.{keys[0]} = nnx.data(jnp.zeros(())), and set it in the call"
            )
    old = before[1]
    changes = {at: x for at, x in after[1].items() if at not in old or old[at] is not x}
    for (_, name), value in changes.items():
        parts = [] if isinstance(value, Tracer) else jax.tree.leaves(value)
        if any(isinstance(leaf, Tracer) for leaf in parts):
            raise UnsupportedError(
                f"a call of {module_type.__name__} keeps an array in its attribute {name!r}, which "
                "is not part of the module's state: keep it in an nnx.Variable, or make the "
                "attribute data by nnx.data"
            )
    return changes


def _not_one_layer(module: nnx.Module, count: int) -> UnsupportedError:
    """Returns the error for a call of a whole stack of layers; it shows how to call one layer."""
    name = type(module).__name__
    return UnsupportedError(
        f"a {name} of {count} stacked layers is called as a whole, and loops over them within its "
        "own call: gathered or recomputed as one unit, it would take the memory of all layers at "
        f"once. Let {name} be one layer, and loop over the layers in its parent: "
        "nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, "
        "self.blocks); or keep the layers in an nnx.List"
    )


def _is_weight(_: Keys, variable: object) -> bool:
    if not isinstance(variable, nnx.Variable):
        return False
    return isinstance(variable, nnx.Param) or GATHER in variable.get_metadata()


def gather_params(params: nnx.State) -> nnx.State:
    """Gathers every parameter that has a gather function; the others stay unchanged."""
    flat: dict[Keys, nnx.Variable] = {}
    for keys, variable in nnx.to_flat_state(params):
        flat[keys] = variable
        if (gather := variable.get_metadata().get(GATHER)) is not None:
            flat[keys] = variable.replace(gather(variable.get_value()))
            flat[keys].del_metadata(GATHER)
    return nnx.from_flat_state(flat)


def check_some(paths: list[Path], what: str, model: nnx.Module) -> None:
    """Raises if no module of a model matched.

    Raises:
        UnsupportedError: names what was looked for, and the model's classes.
    """
    if not paths:
        raise UnsupportedError(
            f"{what} matches no module of the model; it has modules of the classes "
            f"{', '.join(names_of(model))}. Use one of these names"
        )


def names_of(model: nnx.Module) -> list[str]:
    """Returns the class names of a model's modules, and the plain names of those in Linen ones."""
    classes = {type(module).__name__ for _, module in nnx.iter_modules(model)}
    return sorted(classes | {name.rpartition("/")[2] for _, name in linen_modules(model)})
