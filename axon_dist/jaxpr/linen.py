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
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.core import lift
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..core.compat import eval_equation
from ..core.typing import Path
from .equality import same_program, same_value
from .walk import Atom, interpret

Keys: TypeAlias = tuple[Any, ...]

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
    found: list[Keys] = []
    for keys, bridge in bridges_of(model):
        tree = _tree_of(bridge)
        below = _blocks(tree, composite=True) or _blocks(tree, composite=False)
        found += [keys + each for each in below]
    return found


def split_number(name: str) -> tuple[str, int | None]:
    """A module's name and its number: of `layers_2` `layers` and 2, of `0` nothing and 0."""
    found = re.fullmatch(r"(.*?)_?(\d+)", name)
    return (found[1], int(found[2])) if found else (name, None)


def _tree_of(bridge: nnx.bridge.ToNNX) -> dict[str, Any]:
    """The shapes of a bridged module's parameters, by name in nested dicts."""
    tree: dict[str, Any] = {}
    for keys, variable in nnx.iter_graph(bridge):
        if isinstance(variable, nnx.Param):
            *above, last = map(str, keys)
            at = tree
            for key in above:
                at = at.setdefault(key, {})
            at[last] = tuple(variable.get_value().shape)
    return tree


def _named(tree: Mapping[str, Any], above: Keys = (), name: Keys = ()) -> Iterator[Any]:
    """Pairs of keys and the parts of a name without numbers."""
    for key, child in tree.items():
        if isinstance(child, dict):
            plain, _ = split_number(key)
            found = (*name, plain) if plain else name
            if not any(each.isdigit() for each in child):
                yield (*above, key), found
            yield from _named(child, (*above, key), found)


def _blocks(tree: Mapping[str, Any], composite: bool) -> list[Keys]:
    """The blocks in a tree of shapes: of modules that hold others, or of single layers."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for key, child in tree.items():
        name, number = split_number(key)
        if isinstance(child, dict) and number is not None:
            groups.setdefault(name, []).append((number, key))
    found: list[Keys] = []
    taken: set[str] = set()
    for name, members in groups.items():
        names = [key for _, key in sorted(members)]
        fit = [n for n in names if any(isinstance(v, dict) for v in tree[n].values()) == composite]
        taken.update(fit)
        if len(fit) > 1 and _are_alike([tree[n] for n in fit]):
            found += [(n,) for n in fit]
            continue
        for each in fit:
            inner = [(each, *below) for below in _blocks(tree[each], composite)]
            # One of a kind is a block where it stands in a list, as a block does that is shared.
            found += inner or ([(each,)] if len(fit) > 1 or not name else [])
    for key, child in tree.items():
        if isinstance(child, dict) and key not in taken:
            found += [(key, *below) for below in _blocks(child, composite)]
    return found


def _are_alike(trees: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each of some modules has most of its leaves like those of the one before."""
    leaves = [dict(_leaves(tree)) for tree in trees]
    return all(
        len(one.items() & other.items()) >= SAME_SHARE * max(len(one), len(other))
        for one, other in itertools.pairwise(leaves)
    )


def _leaves(tree: Mapping[str, Any], above: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    for key, child in tree.items():
        if isinstance(child, dict):
            yield from _leaves(child, (*above, key))
        else:
            yield (*above, key), child


@dataclasses.dataclass(frozen=True, eq=False)
class BlockProgram:
    """What a block computes, its random keys made outside it.

    Args:
        jaxpr: traced.
        consts: its constants, concrete; those that depend on other values are inputs.
        invars: its variables that a call is given, keys last.
        eqns: its equations but for those that make keys.
    """

    jaxpr: Jaxpr
    consts: Mapping[Var, Any]
    invars: tuple[Var, ...]
    eqns: tuple[JaxprEqn, ...]

    @property
    def constvars(self) -> tuple[Var, ...]:
        """Its variables with constant values."""
        return tuple(self.consts)

    @property
    def outvars(self) -> Sequence[Atom]:
        """What it returns."""
        return self.jaxpr.outvars

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Computes it."""
        return interpret(self, tuple(self.consts.values()), values, eval_equation)

    def is_like(self, other: BlockProgram) -> bool:
        """Whether another computes the same."""
        return same_program(self, other) and all(
            same_value(a, b)
            for a, b in zip(self.consts.values(), other.consts.values(), strict=True)
        )


def program_of(
    closed: ClosedJaxpr, operands: Sequence[Any], keys: Container[int]
) -> tuple[BlockProgram, Any]:
    """Takes what makes keys of given keys and numbers out of a traced program.

    Args:
        closed: a closed jaxpr.
        operands: what it was traced with.
        keys: the positions of the operands that are keys, from which Flax derives others.

    Returns:
        The program, and what a call of it is given.
    """
    jaxpr = closed.jaxpr
    traced = {v: x for v, x in zip(jaxpr.constvars, closed.consts, strict=True) if _is_traced(x)}
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    pairs = enumerate(zip(jaxpr.invars, operands, strict=True))
    known: dict[Var, Any] = {v: x for number, (v, x) in pairs if number in keys}
    kept = []
    for equation in jaxpr.eqns:
        numbers = {v: consts[v] for v in _variables(equation.invars) if v in consts}
        if equation.primitive.name in MAKES_KEYS and _knows({**known, **numbers}, equation):
            env = {**known, **numbers}
            values = [v.val if isinstance(v, Literal) else env[v] for v in equation.invars]
            known.update(zip(equation.outvars, eval_equation(equation, values), strict=True))
        else:
            kept.append(equation)
    read = _variables(v for equation in kept for v in equation.invars) | _variables(jaxpr.outvars)
    made = [v for v in known if v in read and v not in set(jaxpr.invars)]
    invars = (*jaxpr.invars, *traced, *made)
    values = [*operands, *traced.values(), *(known[v] for v in made)]
    concrete = {v: x for v, x in consts.items() if v not in traced and v in read}
    return BlockProgram(jaxpr, concrete, invars, tuple(kept)), values


def _knows(known: Mapping[Var, Any], equation: JaxprEqn) -> bool:
    return all(variable in known for variable in _variables(equation.invars))


def _variables(atoms: Any) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tracer)


@dataclasses.dataclass(frozen=True, eq=False)
class LinenUnits:
    """Runs a bridged module, its blocks as named equations.

    Args:
        paths: of the blocks, below the bridge.
        run: (program, how each value is gathered, values) -> results, as a unit's equation.
        metadata: of a parameter, that which says how it is gathered.
        stacked: those of the paths whose parameters stack the layers of a loop, each a block.
    """

    paths: frozenset[Path]
    run: Callable[..., Any]
    metadata: str
    stacked: frozenset[Path] = frozenset()
    programs: list[BlockProgram] = dataclasses.field(default_factory=list)

    def __call__(self, call: Any, bridge: nnx.bridge.ToNNX, *args: Any, **kwargs: Any) -> Any:
        """Runs the bridge with the calls of its blocks intercepted."""
        params = {
            "/".join(map(str, keys)): variable
            for keys, variable in nnx.iter_graph(bridge)
            if isinstance(variable, nnx.Variable) and self.metadata in variable.get_metadata()
        }
        gathers = {path: v.get_metadata()[self.metadata] for path, v in params.items()}
        shapes = {
            "/".join(map(str, keys)): variable.get_value().shape
            for keys, variable in nnx.iter_graph(bridge)
            if self.stacked and isinstance(variable, nnx.Param)
        }
        # Linen takes a variable with metadata of ours for a boxed value.
        for variable in params.values():
            variable.del_metadata(self.metadata)
        try:
            with nn.intercept_methods(Intercepted(self, gathers, shapes)):
                return call(bridge, *args, **kwargs)
        finally:
            for path, variable in params.items():
                variable.set_metadata(**{self.metadata: gathers[path]})

    def shared(self, program: BlockProgram) -> BlockProgram:
        """The first program of this trace that computes the same."""
        for other in self.programs:
            if program.is_like(other):
                return other
        self.programs.append(program)
        return program


class Intercepted:
    """Makes the outermost calls of blocks equations, while one call of a bridge runs.

    Args:
        units: which blocks, and how.
        gathers: how parameters are gathered, by path below the bridge.
        shapes: of the parameters as the bridge holds them, likewise; {} where nothing is stacked.
    """

    def __init__(
        self,
        units: LinenUnits,
        gathers: Mapping[Path, Callable[[Any], Any]],
        shapes: Mapping[Path, Any],
    ):
        self.units: LinenUnits = units
        self.gathers: Mapping[Path, Callable[[Any], Any]] = gathers
        self.shapes = shapes
        self.is_inside = False

    def __call__(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Runs one method of a module."""
        module, name = context.module, context.method_name
        path = "/".join(module.path)
        if self.is_inside or path not in self.units.paths or name == "setup":
            return call(*args, **kwargs)
        if path in self.units.stacked and self._is_whole(module, path):
            # The loop itself, which calls the layers.
            return call(*args, **kwargs)
        method = context.orig_method.func
        lifted = nn.transforms.lift_transform(self._lift, method)
        return lifted(module, *args, **kwargs)

    def _is_whole(self, module: nn.Module, path: Path) -> bool:
        """Whether a module has its parameters as the bridge holds them: those of all layers."""
        return any(
            self.shapes.get("/".join((path, *map(str, keys)))) == leaf.shape
            for keys, leaf in _leaves(module.variables.get("params", {}))
        )

    def _lift(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A transformation of Flax's: `function` takes scopes in place of a module."""

        def inner(
            scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            paths = _outermost(scope_fn(variables, rngs))
            leaves, structure = jax.tree.flatten((args, kwargs))
            arrays = [leaf for leaf in leaves if _is_array(leaf)]
            made: list[Any] = []

            def compute(variables: Any, rngs: Any, arrays: Sequence[Any]) -> list[Any]:
                found = iter(arrays)
                given = [next(found) if _is_array(leaf) else leaf for leaf in leaves]
                args, kwargs = jax.tree.unflatten(structure, given)
                scopes = scope_fn(variables, rngs)
                # A number or a flag that a method returns stays what it is.
                made[:] = jax.tree.flatten((function(scopes, *args, **kwargs), repack(scopes)))
                return [leaf for leaf in made[0] if _is_array(leaf)]

            self.is_inside = True
            try:
                results = iter(self._run(compute, variables, rngs, arrays, paths))
            finally:
                self.is_inside = False
            outputs, form = made
            found = [next(results) if _is_array(leaf) else leaf for leaf in outputs]
            return jax.tree.unflatten(form, found)

        return lift.pack(inner, (True,), (True,), (True,), name="unit", enable_kwargs=True)

    def _run(
        self, compute: Any, variables: Any, rngs: Any, arrays: Sequence[Any], paths: Sequence[Path]
    ) -> list[Any]:
        leaves, structure = jax.tree.flatten((variables, rngs, arrays))
        gathers = self._gathers(variables, paths)
        gathers += (None,) * (len(leaves) - len(gathers))
        # Traced with whole weights: the gathers stand before the program, where they compare.
        whole = [
            leaf if gather is None else jax.eval_shape(gather, leaf)
            for leaf, gather in zip(leaves, gathers, strict=True)
        ]
        given = jax.tree.unflatten(structure, whole)
        closed = jax.make_jaxpr(compute)(*given)
        first = len(jax.tree.leaves(variables))
        keys = range(first, first + len(jax.tree.leaves(rngs)))
        program, values = program_of(closed, leaves, keys)
        if not program.eqns:
            # A method that says a size or gives a parameter is no call that computes.
            returned = _variables(program.outvars)
            pairs = itertools.zip_longest(program.invars, values, gathers)
            return program.run([g(x) if g and v in returned else x for v, x, g in pairs])
        return self.units.run(self.units.shared(program), gathers, values)

    def _gathers(self, variables: Any, paths: Sequence[Path]) -> tuple[Any, ...]:
        """How each leaf of the variables of each scope is gathered, or None."""

        def one(path: Path, keys: Any) -> Any:
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


def _outermost(scopes: Any) -> list[Path]:
    """The paths of those scopes that lie in no other, as Flax packs their variables."""
    paths = list(dict.fromkeys(scope.path for scope in jax.tree.leaves(scopes)))

    def is_below(one, other):
        return one != other and one[: len(other)] == other

    return ["/".join(p) for p in paths if not any(is_below(p, other) for other in paths)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))
