"""The repeated blocks of a bridged Linen model: found by their paths, and made units.

A bridged model is one NNX module with a tree of parameters. The modules that its Linen module makes
exist only while it runs, and each has its own subtree: what stands in the tree several times under
one name and a number, with leaves alike, is a repeated block. While the model runs, Flax tells of
every call of a method, and that of a block is lifted out of it, as `flax.linen.jit` would do, to
become one equation of the traced program. Equal blocks get the same inner program: their random
keys, which Flax derives from their names, are made before the call and handed in.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.core import lift
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr

from ..core.compat import eval_equation, eval_jaxpr
from ..core.typing import Array, Function, Path, PyTree
from .walk import inners, opened, same_program, struct_of, values_of, variables

Keys: TypeAlias = tuple[Any, ...]

Gathers: TypeAlias = tuple[Callable[[Array], Array] | None, ...]
"""How each of the first values of a program is gathered; None for one that is whole."""

RunUnit: TypeAlias = Callable[[ClosedJaxpr, Gathers, list[Array]], list[Array]]
"""(program, how its values are gathered, values) -> results, as the equation of a unit."""

SAME_SHARE = 0.5
"""The least share of leaves that two modules have alike to be blocks of one kind."""

MAKES_KEYS = frozenset({"random_fold_in", "random_wrap", "random_unwrap"})
"""The primitives by which Flax makes a key for a place in a model."""


def bridges_of(model: nnx.Module) -> Iterator[tuple[Keys, nnx.bridge.ToNNX]]:
    """The bridged Linen modules of a model, with their keys."""
    for keys, module in nnx.iter_modules(model):
        if isinstance(module, nnx.bridge.ToNNX):
            yield tuple(keys), module


def linen_modules(model: nnx.Module) -> Iterator[tuple[Keys, str]]:
    """The modules within the bridged ones of a model, and what each is called.

    Args:
        model: any NNX module; its leaves may be shapes.

    Returns:
        Pairs of keys in the model and a name, the path without numbers: that of
        `encoder/layer/0` is `encoder/layer`, that of `Block_3`, as Flax names what nobody has
        named, `Block`. What only holds a list of others has no name.
    """
    for keys, bridge in bridges_of(model):
        yield from ((keys + below, "/".join(name)) for below, name in _named(_tree_of(bridge)))


def linen_named(model: nnx.Module, names: Collection[str]) -> list[Keys]:
    """The modules within the bridged ones of a model that have one of some names.

    Args:
        model: any NNX module; its leaves may be shapes.
        names: the last part of a name or more of it, `layer` or `encoder/layer`.

    Returns:
        Their keys in the model.

    Example:
        >>> layers = nn.Sequential([nn.Dense(4) for _ in range(2)])
        >>> model = nnx.bridge.ToNNX(layers, rngs=nnx.Rngs(0)).lazy_init(np.ones((1, 4)))
        >>> linen_named(model, ["layers"])
        [('layers_0',), ('layers_1',)]
    """

    def is_one(name):
        return any(f"/{name}".endswith(f"/{each}") for each in names)

    return [keys for keys, name in linen_modules(model) if is_one(name)]


def linen_blocks(model: nnx.Module) -> list[Keys]:
    """The repeated blocks of the bridged Linen modules of a model.

    Of modules in others the outermost that are alike are blocks: those whose leaves have the same
    shapes for the most part. Where modules differ that are numbered, as the stages of a ResNet do,
    what is alike within them comes first. Single layers are blocks only where nothing else is.

    Args:
        model: any NNX module; its leaves may be shapes.

    Returns:
        Their keys in the model, `layer_2` before `layer_10`.

    Example:
        >>> layers = nn.Sequential([nn.Dense(4) for _ in range(3)])
        >>> model = nnx.bridge.ToNNX(layers, rngs=nnx.Rngs(0)).lazy_init(np.ones((1, 4)))
        >>> linen_blocks(model)
        [('layers_0',), ('layers_1',), ('layers_2',)]
    """
    blocks: list[Keys] = []
    for keys, bridge in bridges_of(model):
        tree = _tree_of(bridge)
        below = _blocks(tree, composite=True) or _blocks(tree, composite=False)
        blocks += [keys + each for each in below]
    return blocks


def split_number(name: str) -> tuple[str, int | None]:
    """A module's name and its number: of `layers_2` `layers` and 2, of `0` nothing and 0."""
    match = re.fullmatch(r"(.*?)_?(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _tree_of(bridge: nnx.bridge.ToNNX) -> dict[str, PyTree]:
    """The shapes of a bridged module's parameters, by name in nested dicts."""
    shapes = {
        tuple(map(str, keys)): tuple(variable.get_value().shape)
        for keys, variable in nnx.iter_graph(bridge)
        if isinstance(variable, nnx.Param)
    }
    return unflatten_dict(shapes)


def _named(
    tree: Mapping[str, PyTree], above: Keys = (), name: tuple[str, ...] = ()
) -> Iterator[tuple[Keys, tuple[str, ...]]]:
    """Pairs of keys and the parts of a name without numbers."""
    for key, child in tree.items():
        if isinstance(child, dict):
            plain, _ = split_number(key)
            parts = (*name, plain) if plain else name
            if not any(each.isdigit() for each in child):
                yield (*above, key), parts
            yield from _named(child, (*above, key), parts)


def _blocks(tree: Mapping[str, PyTree], composite: bool) -> list[Keys]:
    """The blocks in a tree of shapes: of modules that hold others, or of single layers."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for key, child in tree.items():
        name, number = split_number(key)
        if isinstance(child, dict) and number is not None:
            groups.setdefault(name, []).append((number, key))
    blocks: list[Keys] = []
    fitting: set[str] = set()
    for name, members in groups.items():
        names = [key for _, key in sorted(members)]
        fit = [n for n in names if any(isinstance(v, dict) for v in tree[n].values()) == composite]
        fitting.update(fit)
        if len(fit) > 1 and _are_alike([tree[n] for n in fit]):
            blocks += [(n,) for n in fit]
            continue
        for each in fit:
            inner = [(each, *below) for below in _blocks(tree[each], composite)]
            # One of a kind is a block where it stands in a list, as a block does that is shared.
            blocks += inner or ([(each,)] if len(fit) > 1 or not name else [])
    for key, child in tree.items():
        if isinstance(child, dict) and key not in fitting:
            blocks += [(key, *below) for below in _blocks(child, composite)]
    return blocks


def _are_alike(trees: Sequence[Mapping[str, PyTree]]) -> bool:
    """Whether each of some modules has most of its leaves like those of the one before."""
    leaves = list(map(flatten_dict, trees))
    return all(
        len(one.items() & other.items()) >= SAME_SHARE * max(len(one), len(other))
        for one, other in itertools.pairwise(leaves)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class UnitPrograms:
    """The programs of the units of one trace: calls share one where they compute the same.

    That two calls are equal is seen from what they have traced to, and not from their modules and
    arguments: a call may read globals, context variables, the type of a flag or an object that has
    changed since the call before.

    Args:
        known: the programs so far, by what is cheap to compare.
    """

    known: dict[Hashable, list[ClosedJaxpr]] = dataclasses.field(default_factory=dict)

    def shared(self, program: ClosedJaxpr) -> ClosedJaxpr:
        """The first program that computes the same as this one."""
        jaxpr = program.jaxpr
        names = tuple(equation.primitive.name for equation in jaxpr.eqns)
        alike = self.known.setdefault((names, *(v.aval for v in jaxpr.invars)), [])
        for other in alike:
            if same_program(program, other):
                return other
        alike.append(program)
        return program


def without_tracers(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Array]]:
    """A program that is given what it has read of the trace around it, and that."""
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    read = [(v, x) for v, x in pairs if isinstance(x, Tracer)]
    consts = {v: x for v, x in pairs if not isinstance(x, Tracer)}
    invars = [*closed.jaxpr.invars, *(v for v, _ in read)]
    jaxpr = closed.jaxpr.replace(constvars=[*consts], invars=invars)
    return ClosedJaxpr(jaxpr, [*consts.values()]), [x for _, x in read]


def without_keys(
    closed: ClosedJaxpr, operands: Sequence[Array], keys: Container[int]
) -> tuple[ClosedJaxpr, list[Array]]:
    """Takes what makes keys of given keys and numbers out of a traced program.

    Args:
        closed: a closed jaxpr.
        operands: what it was traced with.
        keys: the positions of the operands that are keys, from which Flax derives others.

    Returns:
        The program, and what a call of it is given.
    """
    closed, read = without_tracers(closed)
    jaxpr, values, count = closed.jaxpr, [*operands, *read], len(operands)
    pairs = enumerate(zip(jaxpr.invars, values, strict=True))
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known = {v: x for at, (v, x) in pairs if at in keys or at >= count}
    known.update(consts)
    remaining = []
    for equation in jaxpr.eqns:
        is_known = variables(equation.invars) <= known.keys()
        if equation.primitive.name in MAKES_KEYS and is_known:
            results = eval_equation(equation, values_of(known, equation.invars))
            known.update(zip(equation.outvars, results, strict=True))
        else:
            remaining.append(equation)
    wanted = variables([*(v for equation in remaining for v in equation.invars), *jaxpr.outvars])
    made = [v for v in known if v in wanted and v not in {*jaxpr.invars, *consts}]
    constants = {v: x for v, x in consts.items() if v in wanted}
    invars = [*jaxpr.invars, *made]
    jaxpr = jaxpr.replace(constvars=[*constants], invars=invars, eqns=remaining)
    program = ClosedJaxpr(jaxpr, [*constants.values()])
    return program, [*values, *(known[v] for v in made)]


def looped_inputs(closed: ClosedJaxpr) -> dict[int, int]:
    """Which inputs of a program a scan reads row by row, each with the length of the scan."""
    program = opened(closed, [*map(struct_of, closed.jaxpr.invars)]).jaxpr
    numbers = {variable: number for number, variable in enumerate(program.invars)}
    return {
        numbers[read]: equation.params["length"]
        for equation in program.eqns
        if equation.primitive.name == "scan"
        for read in variables(inners(equation)[0].parts(equation.invars)[2]) & numbers.keys()
    }


@dataclasses.dataclass(frozen=True, eq=False)
class LinenUnits:
    """Runs a bridged module, its blocks as named equations.

    Args:
        paths: of the blocks, below the bridge.
        run: runs a program as the equation of a unit.
        metadata: of a parameter, that which says how it is gathered.
        programs: of the trace, which gives equal calls the same inner program.
        stacked: those of the paths whose parameters stack the layers of a loop, each a block.
    """

    paths: frozenset[Path]
    run: RunUnit
    metadata: str
    programs: UnitPrograms
    stacked: frozenset[Path] = frozenset()

    def __call__(
        self, call: Function, bridge: nnx.bridge.ToNNX, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Runs the bridge with the calls of its blocks intercepted."""
        by_path = {
            "/".join(map(str, keys)): variable
            for keys, variable in nnx.iter_graph(bridge)
            if isinstance(variable, nnx.Variable)
        }
        params = {path: v for path, v in by_path.items() if self.metadata in v.get_metadata()}
        gathers = {path: v.get_metadata()[self.metadata] for path, v in params.items()}
        stacked = by_path.items() if self.stacked else ()
        shapes = {path: v.get_value().shape for path, v in stacked if isinstance(v, nnx.Param)}
        # Linen takes a variable with metadata of ours for a boxed value.
        for variable in params.values():
            variable.del_metadata(self.metadata)
        try:
            with nn.intercept_methods(Intercepted(self, gathers, shapes)):
                return call(bridge, *args, **kwargs)
        finally:
            for path, variable in params.items():
                variable.set_metadata(**{self.metadata: gathers[path]})


@dataclasses.dataclass(eq=False)
class Intercepted:
    """Makes the outermost calls of blocks equations, while one call of a bridge runs.

    Args:
        units: which blocks, and how.
        gathers: how parameters are gathered, by path below the bridge.
        shapes: of the parameters as the bridge holds them, likewise; {} where nothing is stacked.
        is_inside: whether a block is being called.
    """

    units: LinenUnits
    gathers: Mapping[Path, Callable[[Array], Array]]
    shapes: Mapping[Path, tuple[int, ...]]
    is_inside: bool = False

    def __call__(
        self,
        call: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        context: nn.module.InterceptorContext,
    ) -> PyTree:
        """Runs one method of a module."""
        module, name = context.module, context.method_name
        path = "/".join(module.path)
        if self.is_inside or path not in self.units.paths or name == "setup":
            return call(*args, **kwargs)
        if path in self.units.stacked and self._is_whole(module, path):
            # The loop itself, which calls the layers.
            return call(*args, **kwargs)
        method = context.orig_method.func  # pyright: ignore[reportFunctionMemberAccess]
        lifted = nn.transforms.lift_transform(self._lift, method)
        return lifted(module, *args, **kwargs)

    def _is_whole(self, module: nn.Module, path: Path) -> bool:
        """Whether a module has its parameters as the bridge holds them: those of all layers."""
        here = flatten_dict(module.variables.get("params", {}), sep="/")
        return any(
            self.shapes.get(f"{path}/{name}") == np.shape(leaf) for name, leaf in here.items()
        )

    def _lift(self, function: Function) -> Function:
        """A transformation of Flax's: `function` takes scopes in place of a module."""

        def inner(
            scope_fn: Function,
            repack: Function,
            variables: PyTree,
            rngs: PyTree,
            *args: PyTree,
            **kwargs: PyTree,
        ) -> PyTree:
            paths = _outermost(scope_fn(variables, rngs))
            leaves, structure = jax.tree.flatten((args, kwargs))
            arrays = [leaf for leaf in leaves if is_array(leaf)]
            made: list[PyTree] = []

            def compute(variables: PyTree, rngs: PyTree, arrays: Sequence[Array]) -> list[Array]:
                values = iter(arrays)
                inputs = [next(values) if is_array(leaf) else leaf for leaf in leaves]
                args, kwargs = jax.tree.unflatten(structure, inputs)
                scopes = scope_fn(variables, rngs)
                # A number or a flag that a method returns stays what it is.
                made[:] = jax.tree.flatten((function(scopes, *args, **kwargs), repack(scopes)))
                return [leaf for leaf in made[0] if is_array(leaf)]

            self.is_inside = True
            try:
                results = iter(self._run(compute, variables, rngs, arrays, paths))
            finally:
                self.is_inside = False
            outputs, form = made
            merged = [next(results) if is_array(leaf) else leaf for leaf in outputs]
            return jax.tree.unflatten(form, merged)

        return lift.pack(inner, (True,), (True,), (True,), name="unit", enable_kwargs=True)

    def _run(
        self,
        compute: Function,
        state: PyTree,
        rngs: PyTree,
        arrays: Sequence[Array],
        paths: Sequence[Path],
    ) -> list[Array]:
        leaves, structure = jax.tree.flatten((state, rngs, arrays))
        gathers = self._of_leaves(state, paths)
        gathers += (None,) * (len(leaves) - len(gathers))
        # Traced with whole weights: the gathers stand before the program, where they compare.
        gathered = [
            leaf if gather is None else jax.eval_shape(gather, leaf)
            for leaf, gather in zip(leaves, gathers, strict=True)
        ]
        operands = jax.tree.unflatten(structure, gathered)
        closed = jax.make_jaxpr(compute)(*operands)
        first = len(jax.tree.leaves(state))
        keys = range(first, first + len(jax.tree.leaves(rngs)))
        program, values = without_keys(closed, leaves, keys)
        if not program.jaxpr.eqns:
            # A method that says a size or gives a parameter is no call that computes.
            returned = variables(program.jaxpr.outvars)
            pairs = itertools.zip_longest(program.jaxpr.invars, values, gathers)
            operands = [g(x) if g and v in returned else x for v, x, g in pairs]
            return eval_jaxpr(program, operands)
        return self.units.run(self.units.programs.shared(program), gathers, values)

    def _of_leaves(self, variables: PyTree, paths: Sequence[Path]) -> Gathers:
        """How each leaf of the variables of each scope is gathered, or None."""

        def one(path: Path, keys: Keys) -> Callable[[Array], Array] | None:
            # The first key is the collection, of which a bridged module knows nothing.
            _, *names = (str(key.key) for key in keys if hasattr(key, "key"))
            return self.gathers.get("/".join(filter(None, (path, *names))))

        (group,) = variables
        pairs = zip(paths, group, strict=True)
        return tuple(
            one(path, keys)
            for path, scope in pairs
            for keys, _ in jax.tree_util.tree_leaves_with_path(scope)
        )


def _outermost(scopes: PyTree) -> list[Path]:
    """The paths of those scopes that lie in no other, as Flax packs their variables."""
    paths = list(dict.fromkeys(scope.path for scope in jax.tree.leaves(scopes)))

    def is_below(one, other):
        return one != other and one[: len(other)] == other

    return ["/".join(p) for p in paths if not any(is_below(p, other) for other in paths)]


def is_array(leaf: object) -> bool:
    """Whether a leaf of a tree is an array, or what a trace has in place of one."""
    return isinstance(leaf, (jax.Array, np.ndarray))
