"""Finds the repeated blocks of a bridged Linen model by their paths, and makes them units.

A bridged model is one NNX module with a tree of parameters. The submodules of its Linen module
exist only while it runs, and each has its own subtree. Subtrees under one name with different
numbers are repeated blocks if each has at least half of its leaves, by name and shape, in common
with the one before it. While the model runs, a Flax interceptor sees every method call, and lifts
the call of a block out of the model, as `flax.linen.jit` would do: it becomes one equation of the
traced program. Equal blocks get the same inner program: their random keys, which Flax derives from
their names, are computed before the call and passed in.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from typing import TypeAlias

import flax.linen as nn
import jax
import numpy as np
from flax import nnx
from flax.core import lift
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend.core import ClosedJaxpr

from ..core.compat import eval_equation, eval_jaxpr
from ..core.errors import UnsupportedError
from ..core.modules import bridges_of
from ..core.typing import Array, Function, Keys, Path, PyTree
from .walk import inners, opened, struct_of, values_of, variables, without_tracers

Gathers: TypeAlias = tuple[Callable[[Array], Array] | None, ...]
"""The gather function of each leading input of a program; None for an unsharded value."""

RunUnit: TypeAlias = Callable[[ClosedJaxpr, Gathers, list[Array]], list[Array]]
"""(program, gather functions of its inputs, inputs) -> results; runs as the equation of a unit."""

SAME_SHARE = 0.5
"""The smallest share of equal leaves at which two modules are blocks of one kind."""

ARRAYS: tuple[type, ...] = jax.Array, np.ndarray
"""The types of array leaves; tracers are instances of `jax.Array` too."""

MAKES_KEYS = frozenset({"random_fold_in", "random_wrap", "random_unwrap"})
"""The primitives by which Flax derives the random key of a module from its path."""


def linen_modules(model: nnx.Module) -> Iterator[tuple[Keys, str]]:
    """Yields the modules within the bridged modules of a model, each with its name.

    Args:
        model: any NNX module; its leaves may be shapes.

    Returns:
        Pairs of keys in the model and a name, which is the path without numbers: `encoder/layer`
        for `encoder/layer/0`, and `Block` for `Block_3`, the default name that Flax gives.
        Modules that only hold a list of other modules are left out.
    """
    for keys, bridge in bridges_of(model):
        yield from ((keys + below, "/".join(name)) for below, name in _named(_tree_of(bridge)))


def linen_blocks(bridge: nnx.bridge.ToNNX, names: Collection[str] = ()) -> list[Keys]:
    """Returns the repeated blocks of a bridged Linen module, or its modules with given names.

    Modules are equal if each has at least half of its leaves, by name and shape, in common with the
    one before it; the outermost equal modules are blocks. If numbered modules differ, as the stages
    of a ResNet do, the equal modules within them are blocks. Single layers are blocks only if no
    larger module is.

    Args:
        bridge: its leaves may be shapes.
        names: the last part of a name, or several last parts: `layer` or `encoder/layer`. If
            empty, the repeated blocks are returned.

    Returns:
        Their keys below the bridge. Repeated blocks are in numeric order: `layer_2` before
        `layer_10`.

    Example:
        >>> layers = nn.Sequential([nn.Dense(4) for _ in range(3)])
        >>> model = nnx.bridge.ToNNX(layers, rngs=nnx.Rngs(0)).lazy_init(np.ones((1, 4)))
        >>> linen_blocks(model)
        [('layers_0',), ('layers_1',), ('layers_2',)]
        >>> linen_blocks(model, ["layers_1"]), len(linen_blocks(model, ["layers"]))
        ([], 3)
    """
    tree = _tree_of(bridge)
    if not names:
        return _blocks(tree, composite=True) or _blocks(tree, composite=False)

    def is_one(name):
        return any(f"/{name}".endswith(f"/{each}") for each in names)

    return [keys for keys, name in _named(tree) if is_one("/".join(name))]


def split_number(name: str) -> tuple[str, int | None]:
    """Splits a module's name from its number: `layers_2` gives ("layers", 2), `0` gives ("", 0)."""
    match = re.fullmatch(r"(.*?)_?(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _tree_of(bridge: nnx.bridge.ToNNX) -> dict[str, PyTree]:
    """Returns the shapes of a bridged module's parameters as nested dicts by name."""
    shapes = {
        tuple(map(str, keys)): tuple(variable.get_value().shape)
        for keys, variable in nnx.iter_graph(bridge)
        if isinstance(variable, nnx.Param)
    }
    return unflatten_dict(shapes)


def _named(
    tree: Mapping[str, PyTree], above: Keys = (), name: tuple[str, ...] = ()
) -> Iterator[tuple[Keys, tuple[str, ...]]]:
    """Yields pairs of keys and the parts of the module's name without numbers."""
    for key, child in tree.items():
        if isinstance(child, dict):
            plain, _ = split_number(key)
            parts = (*name, plain) if plain else name
            if not any(each.isdigit() for each in child):
                yield (*above, key), parts
            yield from _named(child, (*above, key), parts)


def _blocks(tree: Mapping[str, PyTree], composite: bool) -> list[Keys]:
    """Returns the blocks in a tree of shapes: composite modules, or single layers."""
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
        if len(fit) > 1 and _are_equal([tree[n] for n in fit]):
            blocks += [(n,) for n in fit]
            continue
        for each in fit:
            inner = [(each, *below) for below in _blocks(tree[each], composite)]
            # A single module in a list is a block: layers may share it.
            blocks += inner or ([(each,)] if len(fit) > 1 or not name else [])
    for key, child in tree.items():
        if isinstance(child, dict) and key not in fitting:
            blocks += [(key, *below) for below in _blocks(child, composite)]
    return blocks


def _are_equal(trees: Sequence[Mapping[str, PyTree]]) -> bool:
    """Whether each module has at least half of its leaves in common with the previous one."""
    leaves = list(map(flatten_dict, trees))
    return all(
        len(one.items() & other.items()) >= SAME_SHARE * max(len(one), len(other))
        for one, other in itertools.pairwise(leaves)
    )


def without_keys(
    closed: ClosedJaxpr, operands: Sequence[Array], keys: Container[int]
) -> tuple[ClosedJaxpr, list[Array]]:
    """Moves the equations that derive random keys from known ones out of a program.

    Args:
        closed: a closed jaxpr.
        operands: the values it was traced with.
        keys: positions of the operands that are keys; Flax derives other keys from them.

    Returns:
        The program, and the operands of a call of it.
    """
    closed, read = without_tracers(closed)
    jaxpr = closed.jaxpr
    values = [*operands, *read]
    count = len(operands)
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
    """Returns the inputs that a scan reads row by row, each with the length of the scan."""
    program = opened(closed, [*map(struct_of, closed.jaxpr.invars)]).jaxpr
    numbers = {variable: number for number, variable in enumerate(program.invars)}
    return {
        numbers[read]: equation.params["length"]
        for equation in program.eqns
        if equation.primitive.name == "scan"
        for read in variables(inners(equation)[0].split_operands(equation.invars)[2])
        & numbers.keys()
    }


@dataclasses.dataclass(frozen=True, eq=False)
class LinenUnits:
    """Runs a bridged module with its blocks as named equations.

    Args:
        paths: paths of the blocks, below the bridge.
        run: runs a program as the equation of a unit.
        metadata: the metadata key of a parameter that holds its gather function.
        stacked: the subset of the paths whose parameters stack the layers of a loop; each layer is
            a block.
    """

    paths: frozenset[Path]
    run: RunUnit
    metadata: str
    stacked: frozenset[Path] = frozenset()

    def __call__(
        self, call: Function, bridge: nnx.bridge.ToNNX, *args: PyTree, **kwargs: PyTree
    ) -> PyTree:
        """Runs the bridge and intercepts the calls of its blocks."""
        by_path = {
            "/".join(map(str, keys)): variable
            for keys, variable in nnx.iter_graph(bridge)
            if isinstance(variable, nnx.Variable)
        }
        params = {path: v for path, v in by_path.items() if self.metadata in v.get_metadata()}
        gathers = {path: v.get_metadata()[self.metadata] for path, v in params.items()}
        stacked = by_path.items() if self.stacked else ()
        shapes = {path: v.get_value().shape for path, v in stacked if isinstance(v, nnx.Param)}
        # Linen would treat a variable with our metadata as a boxed value.
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
    """Turns the outermost calls of blocks into equations, during one call of a bridge.

    Args:
        units: the blocks, and how they run.
        gathers: the gather functions of parameters, by path below the bridge.
        shapes: shapes of the bridge's parameters, by the same paths; {} if nothing is stacked.
        in_block: whether a block is being called at the moment.
    """

    units: LinenUnits
    gathers: Mapping[Path, Callable[[Array], Array]]
    shapes: Mapping[Path, tuple[int, ...]]
    in_block: bool = False

    def __call__(
        self,
        call: Function,
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        context: nn.module.InterceptorContext,
    ) -> PyTree:
        """Runs one method of a module."""
        module = context.module
        name = context.method_name
        path = "/".join(module.path)
        if self.in_block or path not in self.units.paths or name == "setup":
            return call(*args, **kwargs)
        if path in self.units.stacked and self._is_whole(module, path):
            # This is the loop itself, which calls the layers.
            return call(*args, **kwargs)
        method = context.orig_method.func  # pyright: ignore[reportFunctionMemberAccess]
        lifted = nn.transforms.lift_transform(self._lift, _without_changes(method))
        return lifted(module, *args, **kwargs)

    def _is_whole(self, module: nn.Module, path: Path) -> bool:
        """Whether a module has the parameters of all layers, in the shapes the bridge holds."""
        here = flatten_dict(module.variables.get("params", {}), sep="/")
        return any(
            self.shapes.get(f"{path}/{name}") == np.shape(leaf) for name, leaf in here.items()
        )

    def _lift(self, function: Function) -> Function:
        """Transforms a function as Flax's lifted transforms do: it takes scopes, not a module."""

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
            arrays = [leaf for leaf in leaves if isinstance(leaf, ARRAYS)]
            made: list[PyTree] = []

            def compute(variables: PyTree, rngs: PyTree, arrays: Sequence[Array]) -> list[Array]:
                values = iter(arrays)
                inputs = [next(values) if isinstance(leaf, ARRAYS) else leaf for leaf in leaves]
                args, kwargs = jax.tree.unflatten(structure, inputs)
                scopes = scope_fn(variables, rngs)
                # A Python number or flag that a method returns stays one.
                made[:] = jax.tree.flatten((function(scopes, *args, **kwargs), repack(scopes)))
                return [leaf for leaf in made[0] if isinstance(leaf, ARRAYS)]

            self.in_block = True
            try:
                results = iter(self._run(compute, variables, rngs, arrays, paths))
            finally:
                self.in_block = False
            outputs, form = made
            merged = [next(results) if isinstance(leaf, ARRAYS) else leaf for leaf in outputs]
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
        # Trace with gathered weights: the gathers stay outside the programs that are compared.
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
            # A method that only returns a size or a parameter computes nothing: not a unit.
            returned = variables(program.jaxpr.outvars)
            pairs = itertools.zip_longest(program.jaxpr.invars, values, gathers)
            operands = [g(x) if g and v in returned else x for v, x, g in pairs]
            return eval_jaxpr(program, operands)
        return self.units.run(program, gathers, values)

    def _of_leaves(self, variables: PyTree, paths: Sequence[Path]) -> Gathers:
        """Returns the gather function, or None, of each leaf of each scope's variables."""

        def one(path: Path, keys: Keys) -> Callable[[Array], Array] | None:
            # The first key is the Linen collection, which paths of a bridged module do not have.
            _, *names = (str(key.key) for key in keys if hasattr(key, "key"))
            return self.gathers.get("/".join(filter(None, (path, *names))))

        (group,) = variables
        pairs = zip(paths, group, strict=True)
        return tuple(
            one(path, keys)
            for path, scope in pairs
            for keys, _ in jax.tree_util.tree_leaves_with_path(scope)
        )


def _without_changes(method: Function) -> Function:
    """Returns a method that raises if it changes an argument: a lifted one gets a copy of each."""

    @functools.wraps(method)
    def run(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        before = jax.tree.leaves((args, kwargs))
        output = method(module, *args, **kwargs)
        after = jax.tree.leaves((args, kwargs))
        advice = "draw random numbers by make_rng, and keep state in a Linen variable"
        check_unchanged(type(module), before, after, advice, "linen-argument-changed")
        return output

    return run


def check_unchanged(
    module_type: type,
    before: Sequence[object],
    after: Sequence[object],
    advice: str,
    code: str = "",
) -> None:
    """Raises if a call changed its arguments; the caller would not see the change.

    Args:
        module_type: the class of the called module.
        before: the leaves of the arguments before the call.
        after: the same, after the call.
        advice: what to do; ends the message.
        code: the code of the error.
    """
    if len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True)):
        return
    raise UnsupportedError(
        f"a call of {module_type.__name__} changes an argument; its arguments had {len(before)} "
        f"leaves and now have {len(after)}. The call is traced as a separate program, and the "
        f"caller gets only its results: return the value; {advice}",
        code=code,
    )


def _outermost(scopes: PyTree) -> list[Path]:
    """Returns the paths of the outermost scopes, in the order in which Flax packs variables."""
    paths = list(dict.fromkeys(scope.path for scope in jax.tree.leaves(scopes)))

    def is_below(one, other):
        return one != other and one[: len(other)] == other

    return ["/".join(p) for p in paths if not any(is_below(p, other) for other in paths)]
