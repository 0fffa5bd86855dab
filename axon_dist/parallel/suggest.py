"""Derives a tensor-parallel plan from one trace: how a kernel is split follows from its uses."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr
from rich import box
from rich.console import Console
from rich.table import Table

from ..core.checks import MODEL, made_by
from ..core.errors import ConfigError, UnsupportedError
from ..core.modules import wrap_calls
from ..core.own_context import in_own_context
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Function, Leaf, Path, PyTree
from ..nn import ParallelMode, attended, mixes, softmax_attention
from .dataflow import Cut, Flow, FlowValue, Product, follow
from .expert import MIX, HasExperts, has_experts
from .tensor_plan import BIAS, TABLES, Plan, Rule

SAMPLES, POSITIONS = 2, 12
"""The sizes of the inputs that are tried if none are given."""

LAYER_LEAVES = ("kernel", *BIAS, *TABLES)
"""Leaves of these names belong to a layer; a rule then names the layer instead of the leaf."""


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """A kernel that no rule of a suggestion splits.

    Args:
        path: the parameter's path in the model.
        reason: why it is not split.
    """

    path: Path
    reason: str


@dataclasses.dataclass(frozen=True)
class Suggestion(Plan):
    """A plan, and the kernels that it could not place; prints as a table.

    Args:
        rules: the rules, each with its reason.
        unplaced: the kernels that stay whole.
        experts: the argument of `expert_parallel(experts=...)`: a pattern of the path of each stack
            of experts, and the dim of the experts, counted from the end.
    """

    unplaced: tuple[Unplaced, ...] = ()
    experts: tuple[tuple[str, int], ...] = ()

    @property
    def why_whole(self) -> tuple[str, ...]:
        """The reasons why layers without a rule stay whole, a sentence each."""
        return tuple(f"{kernel.path} stays whole: {kernel.reason}" for kernel in self.unplaced)

    def table(self) -> Table:
        """Returns a table of how every layer is split, and why."""
        table = Table(title="tensor-parallel plan", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("layers", "mode", "reason"):
            table.add_column(column, overflow="fold")
        for rule in self.rules:
            table.add_row(rule.pattern, rule.mode.value, rule.reason)
        for kernel in self.unplaced:
            table.add_row(kernel.path, "(whole)", kernel.reason)
        for pattern, dim in self.experts:
            table.add_row(pattern, "expert", f"a matrix for each expert, in dim {dim}")
        return table

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


@in_own_context
def suggest_plan(
    model: nnx.Module | Callable[[], nnx.Module], *inputs: PyTree, **keywords: PyTree
) -> Suggestion:
    """Derives the plan of a model from the flow of data between its kernels.

    The model is traced, not run. A hidden dim can be split with one sum over the ranks if one
    kernel produces it, only elementwise operations and batched products use it, and a later kernel
    sums over it. The kernels that produce it are split by columns, those that sum over it by rows.
    Heads are such a dim; the residual stream is not, because norms reduce it. Token tables, and
    output heads with one logit per row of such a table, are split by vocabulary.

    Args:
        model: an NNX module, or a function of no arguments that makes one. A Linen module goes
            through `nnx.bridge.ToNNX` and `lazy_init`.
        *inputs: the positional arguments of a call, trees of arrays, shapes and flags. Without any,
            they are the tuple that the model's method `example_inputs` returns. A model without
            this method is tried with tokens `[2, 12]`, then with floats whose last dim is the first
            of some kernel.
        **keywords: the keyword arguments of the call, of the same kinds.

    Returns:
        The plan; `print` it for the reasons.

    Raises:
        UnsupportedError: when the model cannot be traced without inputs being given.
        ConfigError: when the model's `example_inputs` returns something else than a tuple.

    Example:
        >>> from axon_dist.nn import ParallelMLP
        >>> plan = suggest_plan(lambda: ParallelMLP(4, 8, rngs=nnx.Rngs(0)))
        >>> [(rule.pattern, rule.mode.value) for rule in plan.rules]
        [('^down$', 'row'), ('^up$', 'column')]
    """
    return _Placement(*_trace(model, inputs, keywords)).suggestion()


def _split(
    model: nnx.Module | Callable[[], nnx.Module],
) -> tuple[nnx.GraphDef[nnx.Module], PyTree, PyTree]:
    """Returns a model's graphdef, and the shapes of its parameters and of its other state."""
    MODEL.check("suggest_plan", "model", model)
    structure = []

    def split() -> tuple[PyTree, PyTree]:
        # With eager sharding, models with sharding annotations would need a mesh in context.
        with nnx.use_eager_sharding(False):
            graphdef, params, rest = nnx.split(made_by(model, "suggest_plan"), nnx.Param, ...)
        structure.append(graphdef)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    # Split inside eval_shape: a raw array attribute is a leaf of the state, but a shape in its
    # place would count as part of the structure.
    params, rest = jax.eval_shape(split)
    return structure[0], params, rest


def _trace(
    model: nnx.Module | Callable[[], nnx.Module],
    inputs: tuple[PyTree, ...],
    keywords: dict[str, PyTree],
) -> tuple[Flow, dict[Path, list[int]]]:
    """Follows the program of a model; returns the flow and the nodes of its parameters."""
    graphdef, params, rest = _split(model)
    if not inputs and not keywords:
        inputs = _example_inputs(nnx.merge(graphdef, params, rest))
    leaves, form = jax.tree.flatten((inputs, keywords))
    arrays = tuple(leaf for leaf in leaves if hasattr(leaf, "shape"))

    def call(replaces: bool, params: PyTree, rest: PyTree, arrays: Array) -> PyTree:
        merged = nnx.merge(graphdef, params, rest, copy=True)
        # Flags are not arrays and stay as they are.
        remaining = iter(arrays)
        filled = [next(remaining) if hasattr(leaf, "shape") else leaf for leaf in leaves]
        inputs, keywords = form.unflatten(filled)
        inputs = (*remaining, *inputs)  # `remaining` is a guessed input, where none has an array.
        for _, module in list(nnx.iter_modules(merged)) if replaces else ():
            if mixes(module):
                wrap_calls(module, {"attend": _plain_attention})
            if has_experts(module):
                wrap_calls(module, {MIX: _dense_experts})
        return merged(*inputs, **keywords)

    try:
        closed, arrays = _make_jaxpr(functools.partial(call, True), params, rest, arrays)
    except Exception:
        # Methods of these names may be of another meaning. The model's own error is the one to see.
        closed, arrays = _make_jaxpr(functools.partial(call, False), params, rest, arrays)
    flow, nodes, values = Flow(), {}, []
    for path, leaf in leaves_with_paths(params):
        nodes[path] = flow.new(leaf.shape)
        values.append(FlowValue(nodes[path], origin=path))
    values += [FlowValue(flow.new(leaf.shape)) for leaf in jax.tree.leaves(rest)]
    for leaf in arrays:
        values.append(FlowValue(flow.new(leaf.shape), from_input=True))
        # Input features are whole on every rank, so a kernel cannot be split along them.
        for node in values[-1].dims:
            flow.spoil(node, "is a dim of the model's input")
    outputs = follow(flow, closed.jaxpr, values)
    for output in outputs:
        for node in output.dims[-1:]:
            flow.outputs.add(node)
            flow.spoil(node, "is the model's output")
    return flow, nodes


def _example_inputs(model: Any) -> tuple[PyTree, ...]:
    """Returns the inputs that a model states; none if it states none."""
    # Not through `__getattr__`: a bridged Linen module would run a method of this name.
    if not callable(getattr(type(model), "example_inputs", None)):
        return ()
    inputs = model.example_inputs()
    if not isinstance(inputs, (tuple, list)):
        raise ConfigError(
            f"{type(model).__name__}.example_inputs returned a {type(inputs).__name__}; it must "
            "return a tuple of the positional arguments of a call, arrays or jax.ShapeDtypeStruct",
            code="bad-example-inputs",
        )
    return tuple(inputs)


def _plain_attention(
    attend: Function, module: nnx.Module, *args: object, **kwargs: object
) -> Array:
    """Replaces attention of any form in the trace, because fused kernels hide their heads."""
    query, key, value, _ = attended(attend, module, args, kwargs)
    share = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(heads, share, axis=2) for heads in (key, value))
    return softmax_attention(query, key, value, causal=True)


def _dense_experts(
    mix: Function, module: HasExperts, tokens: Array, gates: Array, experts: Array, kernels: PyTree
) -> tuple[Array, Array]:
    """Replaces sorting tokens by expert in the trace: every token is sent to all experts."""
    count = jax.tree.leaves(kernels)[0].shape[0]
    weights = jnp.sum(jax.nn.one_hot(experts, count) * gates[..., None], axis=-2)
    rows = jnp.broadcast_to(tokens, (count, *tokens.shape))

    def product(rows, kernel):
        return jnp.einsum("ebtd,edh->ebth", rows, kernel)

    made = module.feed(product, rows, kernels)
    return jnp.einsum("ebtd,bte->btd", made, weights.astype(made.dtype)), jnp.zeros(())


def _make_jaxpr(
    call: Function, params: PyTree, rest: PyTree, inputs: tuple[Array, ...]
) -> tuple[ClosedJaxpr, tuple[Leaf, ...]]:
    if inputs:
        return jax.make_jaxpr(call)(params, rest, inputs), inputs
    failures = []
    for guess in _guesses(params):
        try:
            return jax.make_jaxpr(call)(params, rest, (guess,)), (guess,)
        except Exception as error:  # whatever somebody's model raises on a wrong input
            failures.append(f"{guess.dtype}{list(guess.shape)}: {str(error).splitlines()[0]}")
    raise UnsupportedError(
        f"the model could not be traced with any of the inputs tried ({'; '.join(failures[:3])}); "
        "give suggest_plan the inputs that it takes, arrays or jax.ShapeDtypeStruct; or give the "
        "model a method `example_inputs` that returns a tuple of them; or in a config, give "
        "parallel.tensor.plan, such as {up$: column, down$: row}",
        code="no-example-inputs",
    )


def _guesses(params: PyTree) -> Iterator[jax.ShapeDtypeStruct]:
    yield jax.ShapeDtypeStruct((SAMPLES, POSITIONS), jnp.int32)
    sizes = dict.fromkeys(x.shape[0] for x in jax.tree.leaves(params) if len(x.shape) > 1)
    for size in sizes:
        yield jax.ShapeDtypeStruct((SAMPLES, POSITIONS, size), jnp.float32)
        yield jax.ShapeDtypeStruct((SAMPLES, size), jnp.float32)


class _Placement:
    """Turns segments into rules."""

    def __init__(self, flow: Flow, nodes: dict[Path, list[int]]):
        self.flow = flow
        self.nodes = nodes
        self.reasons = flow.reasons()
        self.group_of = self._groups()
        self.rules: dict[Path, Rule] = {}

    def suggestion(self) -> Suggestion:
        """Places the vocabulary, then every hidden dim, then the norms between them."""
        self._place_vocabulary()
        usable = ((n for n in p.free if self._why_not(n) is None) for p in self.flow.products)
        firsts = (next(nodes, None) for nodes in usable)
        for group in dict.fromkeys(self._of(node) for node in firsts if node is not None):
            self._place_hidden(group)
        self._place_norms()
        rules, unplaced = tuple(_as_layers(self.rules)), tuple(self._unplaced())
        return Suggestion(rules, unplaced, tuple(self._experts()))

    def _experts(self) -> Iterator[tuple[str, int]]:
        """Yields the parameters with one row for each of the experts that a router chooses from.

        Where all tokens go to all experts, the expert dim is not a batch dim of the first product,
        and biases are in no product. Both are found because they share the segment of another
        product's batch dim.
        """
        products = self.flow.products
        routers = {self.flow.sizes[node] for p in products for node in p.free[-1:]}
        stacks = {
            self._segment(node)
            for p in products
            for node in p.batched
            if 1 < self.flow.sizes[node] in routers
        }
        scores = {p.path for p in products if not p.batched and len(self.nodes[p.path]) < 3}
        for path, dims in self.nodes.items():
            expert_dims = [d for d, node in enumerate(dims[:-1]) if self._segment(node) in stacks]
            if expert_dims and path not in scores:
                yield f"^{re.escape(path)}$", expert_dims[0] - len(dims)

    def _groups(self) -> dict[int, int]:
        """Joins each segment with one usable part: the major factor, or else the next one."""
        parent: dict[int, int] = {}

        def find(segment: int) -> int:
            while parent.setdefault(segment, segment) != segment:
                segment = parent[segment]
            return segment

        used: set[int] = set()
        for cut in self.flow.cuts:
            dim = self.flow.find(cut.dim)
            piece = self.flow.find(cut.piece)
            if piece in self.reasons or dim in self.reasons or cut.dim in used:
                continue
            # Split by its major factor, a dim stays in order; the next one would interleave it.
            if cut.num_fused == 1:
                used.add(cut.dim)
            parent[find(piece)] = find(dim)
        return {segment: find(segment) for segment in list(parent)}

    def _segment(self, node: int) -> int:
        return self.flow.find(node)

    def _of(self, node: int) -> int:
        """Returns the group of a node."""
        segment = self._segment(node)
        return self.group_of.get(segment, segment)

    def _why_not(self, node: int) -> str | None:
        if self.flow.sizes[node] == 1:
            return "has size 1"
        return self.reasons.get(self._segment(node))

    def _place_vocabulary(self) -> None:
        summed = {self._segment(node) for p in self.flow.products for node in p.contracted}
        outputs = {self._segment(node) for node in self.flow.outputs} - summed
        for path, rows in self.flow.lookups.items():
            self._set(path, rows, ParallelMode.VOCAB, "tokens index its rows")
            for product in self.flow.products:
                logits = [node for node in product.free if self._segment(node) in outputs]
                sizes = [self.flow.sizes[node] for node in logits]
                if product.path != path and sizes == [self.flow.sizes[rows]]:
                    why = "its outputs are logits, one for each row of the token table"
                    self._set(product.path, logits[0], ParallelMode.VOCAB, why)

    def _place_hidden(self, group: int) -> None:
        """Splits the kernels that produce a hidden dim by columns, and its consumers by rows."""

        def of_group(nodes):
            return [node for node in nodes if self._of(node) == group]

        products = self.flow.products
        makers = [(p, of_group(p.free)) for p in products if of_group(p.free)]
        users = [(p, of_group(p.contracted)) for p in products if of_group(p.contracted)]
        # The residual stream is produced after it is used: later blocks add to it. Skip it.
        if not users or max(self._first(makers)) > min(self._first(users)):
            return
        if any(p.path in self.rules for p, _ in (*makers, *users)):
            return

        def names(pairs):
            return ", ".join(dict.fromkeys(_layer(p.path)[0] for p, _ in pairs))

        most = max(self._units(node) for _, nodes in (*makers, *users) for node in nodes)
        for product, (node, *_) in makers:
            why = f"its outputs reach {names(users)} feature by feature"
            self._set(product.path, node, ParallelMode.COLUMN, why, most)
            self._place_bias(product, node)
        for product, (node, *_) in users:
            why = f"sums over what {names(makers)} give"
            self._set(product.path, node, ParallelMode.ROW, why, most)

    def _first(self, pairs: list[tuple[Product, list[int]]]) -> list[int]:
        """Returns the first use of each kernel of some products, which may be used repeatedly."""
        paths = {product.path for product, _ in pairs}
        orders = {p.path: p.order for p in reversed(self.flow.products) if p.path in paths}
        return list(orders.values())

    def _place_bias(self, product: Product, node: int) -> None:
        """Splits a bias that is a parameter outside any layer like the outputs."""
        for path, dims in self.nodes.items():
            # Biases with a usual name follow the rule of their layer; others need their own.
            lone = len(dims) < len(self.nodes[product.path]) and path not in self.rules
            if lone and path.rpartition("/")[2] not in BIAS:
                shared = [d for d in dims if self._segment(d) == self._segment(node)]
                for dim in shared[:1]:
                    self._set(path, dim, ParallelMode.COLUMN, "is added to split outputs")

    def _place_norms(self) -> None:
        """Makes norms, which only scale the residual stream, split positions instead."""
        streams = {
            self._segment(node)
            for product in self.flow.products
            for node in product.free
            if product.path in self.rules and self.rules[product.path].mode is ParallelMode.ROW
        }
        for path, dims in self.nodes.items():
            is_scale = path.rpartition("/")[2] == "scale"
            if is_scale and self._segment(dims[-1]) in streams:
                why = "works on each position of the residual stream by itself"
                self.rules[path] = Rule(path, ParallelMode.SEQUENCE, reason=why)

    def _set(self, path: Path, node: int, mode: ParallelMode, why: str, most: int = 1) -> None:
        dims = self.nodes[path]
        position = next(
            i for i, other in enumerate(dims) if self._segment(other) == self._segment(node)
        )
        units = self._units(node)
        cut = self._blocks(node)
        if cut is not None:
            why += f"; {cut.num_fused} blocks are side by side"
        size = self.flow.sizes[node]
        self.rules[path] = Rule(
            path,
            mode,
            dim=position - len(dims),
            multiple_of=1 if units in (size, 0) else size // units,
            # Tables rarely divide: GPT-2's has 50257 rows. Such a table stays whole.
            optional=0 < units < most or mode is ParallelMode.VOCAB,
            num_fused=1 if cut is None else cut.num_fused,
            stacked=cut is not None and cut.by_reshape,
            reason=why,
        )

    def _units(self, node: int) -> int:
        """Returns how many indivisible units a dim has: heads, where it is cut into heads."""
        segment, size = self._segment(node), self.flow.sizes[node]
        used = [
            cut
            for cut in self.flow.cuts
            if self._segment(cut.dim) == segment
            and self._of(cut.piece) == self._of(node)
            and not cut.repeats
        ]
        majors = [self.flow.sizes[cut.piece] for cut in used if cut.num_fused == 1]
        inner = [self._units(cut.piece) * cut.num_fused for cut in used if cut.num_fused > 1]
        return min([size, *majors, *inner])

    def _blocks(self, node: int) -> Cut | None:
        """Returns the cut that separates concatenated blocks of equal units, if there is one."""
        segment = self._segment(node)
        used = [
            cut
            for cut in self.flow.cuts
            if self._segment(cut.dim) == segment
            and self._of(cut.piece) == self._of(node)
            and self._segment(cut.piece) not in self.reasons
        ]
        first = min(used, key=lambda cut: cut.num_fused, default=None)
        return None if first is None or first.num_fused == 1 else first

    def _unplaced(self) -> Iterator[Unplaced]:
        used = {product.path: product for product in self.flow.products}
        for path, dims in self.nodes.items():
            if path in self.rules or len(dims) < 2 or path.rpartition("/")[2] in (*BIAS, "scale"):
                continue
            if path not in used:
                yield Unplaced(path, "no product with activations was found")
                continue
            whys = [self._why_not(node) for node in (*used[path].free, *used[path].contracted)]
            reasons = [why for why in whys if why] or ["no later kernel sums over its outputs"]
            yield Unplaced(path, "; ".join(dict.fromkeys(f"a dim {why}" for why in reasons)))


def _layer(path: Path) -> tuple[Path, str]:
    """Returns a parameter's layer and its name there; one outside a layer is its own layer."""
    layer, _, leaf = path.rpartition("/")
    return (layer, leaf) if leaf in LAYER_LEAVES or leaf == "scale" else (path, "")


def _as_layers(rules: dict[Path, Rule]) -> Iterator[Rule]:
    """Merges the rules of repeated layers: numbers in their paths become `\\d+`."""
    merged: dict[str, Rule] = {}
    clashing: set[str] = set()
    for path, rule in rules.items():
        pattern = _pattern(_layer(path)[0])
        reason = re.sub(r"(^|[/ ])\d+(?=/)", r"\1*", rule.reason)
        general = dataclasses.replace(rule, pattern=pattern, reason=reason)
        if merged.setdefault(pattern, general) != general:
            clashing.add(pattern)
    for path, rule in rules.items():
        pattern = _pattern(_layer(path)[0])
        if pattern in clashing:
            merged[f"^{re.escape(_layer(path)[0])}$"] = rule
    agreed = {pattern: rule for pattern, rule in merged.items() if pattern not in clashing}
    yield from (dataclasses.replace(agreed[pattern], pattern=pattern) for pattern in sorted(agreed))


def _pattern(layer: Path) -> str:
    names = (r"\d+" if name.isdigit() else re.escape(name) for name in layer.split("/"))
    return f"^{'/'.join(names)}$"
