"""Tensor parallelism of an unmodified model, by a plan and constrained activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from ..core.checks import checked
from ..core.errors import ConfigError, StrategyConflictError, UnsupportedError
from ..core.modules import Around, is_node, wrap_calls
from ..core.reduction import all_sum, sum_scatter
from ..core.same_function import compare, is_from
from ..core.typing import Array, Function, Path, PyTree, Shape
from ..ir.linen import linen_modules
from ..nn import (
    SUMS,
    Layout,
    ParallelMode,
    VocabParallelEmbedding,
    constrain,
    summed,
    taken_rows,
)
from ..nn.layout import FREE
from .kernels import COLUMNS, ROWS, RingProducts, into
from .strategy import AdaptLayers, Strategy
from .tensor_dims import Module, SplitDims, split_dims
from .tensor_plan import BIAS, ByPlan, Plan, PlanLike, Rule, plan_of

LOOKUPS: tuple[Function, ...] = (nnx.Embed.__call__, VocabParallelEmbedding.__call__)
"""The calls of NNX layers that look rows of a table up by ids."""


@checked()
def tensor_parallel(
    plan: PlanLike, axis: str = "tp", sequence: bool = False, rings: bool = False
) -> Strategy:
    """Splits the layers of a model over a mesh axis, without changes to its source.

    A column layer followed by a row layer computes

        y = sum_r f(x A[:, r]) B[r, :]        r = the rank's share of the hidden features

    with one sum over the ranks at its end in the forward pass, and one at its start in the backward
    pass. The model stays a single-device program: the plan gives the shardings of the kernels,
    activations are constrained where a layer of the plan reads or returns them, and the compiler
    partitions the rest.

    Args:
        plan: a `Plan`, a dict from path pattern to mode, or the name of a preset.
        axis: the mesh axis.
        sequence: sequence parallelism: norms, dropout and residuals hold 1/size of the positions,
            and each sum becomes a reduce-scatter, with an all-gather before the next column
            layer. The same bytes are sent, and activations take 1/size of the memory.
        rings: sends those gathers and reduce-scatters piece by piece around a ring, each piece
            while the previous one is multiplied. The same bytes are sent, but the time
            that they take is hidden while products run. Needs `sequence`.

    Returns:
        The strategy; it splits no batch: compose it with `ddp`, `zero` or `fsdp`.

    Raises:
        ConfigError: for an unknown preset or mode, or rings without `sequence`.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> strategy = tensor_parallel({"up$": "column", "down$": "row"})
        >>> strategy.params("mlp/down/kernel", (256, 64), MeshSpec(tp=4))
        P('tp',)

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053; Korthikanti et al., Reducing Activation
    Recomputation, arXiv:2205.05198; Wang et al., Overlap Communication with Dependent Computation,
    ASPLOS 2023.
    """
    if rings and not sequence:
        raise ConfigError(
            "tensor_parallel got rings=True and sequence=False; a ring sends positions that the "
            "ranks split between layers: set sequence=True too, or leave rings out"
        )
    policy = ByPlan(Plan.of(plan), axis)
    return Strategy(
        "tensor",
        params=policy,
        opt_state=policy,
        layers=(TensorLayers(policy, sequence, rings),),
    )


@dataclasses.dataclass(frozen=True)
class TensorLayers(AdaptLayers):
    """Constrains the layout of activations at the layers of a plan.

    Args:
        policy: the plan and its axis.
        sequence: whether positions are split between a row layer and the next column layer.
        rings: whether positions are sent around the ranks within these layers.
    """

    policy: ByPlan
    sequence: bool = False
    rings: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes it needs."""
        return (self.policy.axis,)

    @property
    def sends_around(self) -> bool:
        """True with rings; without them, ranks gather and scatter."""
        return self.rings

    def extend(self, layout: Layout) -> Layout:
        """Splits heads, like the features that they consist of, and the vocabulary."""
        axis = self.policy.axis
        return dataclasses.replace(
            layout,
            heads=(*layout.heads, axis),
            vocabulary=(*layout.vocabulary, axis),
        )

    def check(self, model: nnx.Module, layout: Layout) -> None:
        """Raises unless the plan matches something.

        Raises:
            UnsupportedError: when the plan is empty, or matches no layer and no parameter.
            StrategyConflictError: when other axes split the positions that a ring sends.
        """
        if self.rings and layout.sequence:
            names = "×".join(layout.sequence)
            raise StrategyConflictError(
                f"tensor_parallel sends positions around the ranks of {self.policy.axis!r}, but "
                f"{names!r} splits them in every layer; leave out rings or the context parallelism",
                code="rings-and-context",
            )
        plan = self.policy.plan
        if not plan.rules:
            whys = list(plan.why_whole)
            more = [f"and {len(whys) - 8} more"] if len(whys) > 8 else []
            why = "; ".join(whys[:8] + more) + ". " if whys else ""
            raise UnsupportedError(
                f"the plan has no rules, and would split nothing. {why}Give a plan of "
                "patterns and modes, or leave tensor_parallel out",
                code="plan-empty",
            )
        modules = [*nnx.iter_modules(model), *linen_modules(model)]
        paths = sorted("/".join(map(str, keys)) for keys, _ in modules)
        leaves = ("/".join(map(str, keys)) for keys, v in nnx.iter_graph(model) if is_param(v))
        if not any(map(plan.rule_of, paths)) and not any(map(plan.rule_of_parameter, leaves)):
            patterns = ", ".join(repr(rule.pattern) for rule in self.policy.plan.rules)
            raise UnsupportedError(
                f"the plan matches no layer of the model: patterns {patterns}; the layers are "
                f"{', '.join(filter(None, paths))}. Change the patterns, or use "
                "suggest_plan(model)",
                code="plan-matches-nothing",
            )

    def __call__(self, model: nnx.Module, layout: Layout) -> None:
        """Changes the calls of a merged model's layers, in place."""
        for keys, module in list(nnx.iter_modules(model)):
            path = "/".join(map(str, keys))
            if isinstance(module, nnx.LoRA) and keys[-1:] == ("lora",):
                continue  # The adapter belongs to its layer, whose call is constrained as a whole.
            if isinstance(module, nnx.bridge.ToNNX):
                below = nnx.iter_graph(module)
                shapes = [("/".join(map(str, k)), _shape(v)) for k, v in below if is_param(v)]
                pins = LinenPins(self, layout, path, tuple(sorted(shapes)))
                wrap_calls(module, {"__call__": pins})
            elif rule := self.policy.plan.rule_of(path):
                params = {name: _shape(v) for name, v in vars(module).items() if is_param(v)}
                pin = self.pin(rule, path, params, layout)
                wrap_calls(module, pin.calls(module))

    def pin(
        self, rule: Rule, path: Path, shapes: Mapping[str, Shape], layout: Layout
    ) -> LayerLayout:
        """Returns the constraints around the calls of one layer.

        Args:
            rule: the layer's rule.
            path: its path.
            shapes: the shapes of its parameters, by name.
            layout: the layout of the activations.
        """
        is_split = any(
            self.policy(f"{path}/{name}", shape, layout.mesh) for name, shape in shapes.items()
        )
        # Without pattern and reason, equal layers get equal values.
        value = dataclasses.replace(rule, pattern="", reason="")
        return LayerLayout(value, self.policy.axis, is_split, self.sequence, layout, self.rings)


def check_sums(strategy: Strategy, model: nnx.Module) -> None:
    """Checks that the remat policy `sums` is used only with tensor parallelism, which has sums.

    Args:
        strategy: the composed strategy of a step.
        model: its model, of arrays or shapes.

    Raises:
        ConfigError: when neither the strategy nor the model sums over tensor ranks.
    """
    if strategy.remat is None or strategy.remat.policy != SUMS:
        return
    by_plan = any(isinstance(layers, TensorLayers) for layers in strategy.layers)
    by_layer = any(rule.mode is ParallelMode.ROW for rule in plan_of(model).rules)
    if not (by_plan or by_layer):
        raise ConfigError(
            f"remat policy {SUMS!r} keeps what tensor parallelism sums over its ranks, but "
            f"strategy {strategy.name!r} has none; take the policy 'nothing', or compose it with "
            "tensor_parallel(plan)",
            code="remat-sums-without-tensor",
        )


def sends_pieces(layers: AdaptLayers) -> bool:
    """Whether layers communicate within the units of a model only by pieces sent around a ring."""
    rules = layers.policy.plan.rules if isinstance(layers, TensorLayers) else ()
    replicates = any(rule.mode is ParallelMode.REPLICATE for rule in rules)
    return isinstance(layers, TensorLayers) and layers.rings and not replicates


def ring_products(strategy: Strategy, layout: Layout) -> tuple[RingProducts, ...]:
    """Returns the ring products of a strategy, one value per axis.

    Args:
        strategy: the composed strategy of a step.
        layout: the layout of its activations.
    """
    tensor_layers = (layers for layers in strategy.layers if isinstance(layers, TensorLayers))
    return tuple(RingProducts(layout, each.policy.axis) for each in tensor_layers if each.rings)


@dataclasses.dataclass(frozen=True)
class LayerLayout:
    """The layout of the activations around one layer; compares by value, so equal layers match.

    Args:
        rule: the rule of the layer, without its pattern.
        axis: the mesh axis.
        is_split: whether any of its parameters is split; an optional layer may stay whole.
        sequence: whether positions are split between layers.
        layout: the layout of other activations.
        rings: whether positions are sent around the ranks.
    """

    rule: Rule
    axis: str
    is_split: bool
    sequence: bool
    layout: Layout
    rings: bool = False

    def calls(self, module: nnx.Module) -> dict[str, Around]:
        """Returns the replacements of the module's methods, by name."""
        if self.rule.mode is ParallelMode.VOCAB and hasattr(module, "attend"):
            columns = dataclasses.replace(self.rule, mode=ParallelMode.COLUMN, dim=-1)
            head = dataclasses.replace(self, rule=columns, rings=False)
            return {"__call__": self, "attend": head}
        return {"__call__": self}

    def __call__(self, call: Function, module: Module, *args: object, **kwargs: object) -> Array:
        """Runs a call between its layout constraints, by the rule's mode."""
        if self.rule.mode is ParallelMode.REPLICATE:
            output = call(module, *args, **kwargs)
            return jax.tree.map(self._constrained, output, is_leaf=is_node)
        if self.rule.mode is ParallelMode.SEQUENCE:
            # The layer computes every position independently, so positions may be split.
            return self._residual(call(module, *args, **kwargs))
        around: dict[ParallelMode, Callable[..., Array]] = {
            ParallelMode.COLUMN: self.around_columns,
            ParallelMode.ROW: self.around_rows,
            ParallelMode.VOCAB: self.around_vocabulary,
        }
        return around[self.rule.mode](call, module, *args, **kwargs)

    def around_columns(
        self, call: Function, module: Module, x: Array, *args: object, **kwargs: object
    ) -> Array:
        """Takes whole features and returns split features."""
        x = self._constrained(self._ring(COLUMNS, x))
        num_fused = self.rule.num_fused
        dims = split_dims(self.rule, call, module, x, args, kwargs)

        def run(layer):
            return self._split(call(layer, x, *args, **kwargs), dims.output, dims.output_leads)

        is_cut = num_fused > 1 and self.is_split
        if not is_cut or not isinstance(module, nnx.Module) or not can_cut(module, dims):
            return run(module)

        # The type checkers do not see within `run_blocks` that the module was checked.
        whole = module
        dim = dims.kernel if dims.output is None else dims.output

        def run_blocks(run: Callable[[nnx.Module], Array]) -> Array:
            blocks = [run(layer) for layer in cut_outputs(whole, num_fused, dims)]
            if not self.rule.stacked:
                return jnp.concatenate(blocks, dim)
            lead, size, rest = (
                blocks[0].shape[:dim],
                blocks[0].shape[dim],
                blocks[0].shape[dim:][1:],
            )
            return jnp.stack(blocks, dim - 1).reshape((*lead, num_fused * size, *rest))

        if dims.is_known and _has_library_hooks(module):
            return run_blocks(run)

        # Blocks of a layer of the user's may depend on each other, as in a softmax over outputs.
        def called(x: Array) -> Array:
            return call(module, x, *args, **kwargs)

        def called_in_blocks(x: Array) -> Array:
            return run_blocks(lambda layer: call(layer, x, *args, **kwargs))

        compared = compare(called_in_blocks, called, (_few_rows(module, x),))
        name = f"{type(module).__name__}.__call__"
        is_same = compared.equal_or_warn(name, "is called whole, and divided by the compiler")
        return run_blocks(run) if is_same else run(module)

    def around_rows(
        self, call: Function, module: Module, x: Array, *args: object, **kwargs: object
    ) -> Array:
        """Takes split features and returns the sum over the ranks."""
        dims = split_dims(self.rule, call, module, x, args, kwargs)
        x = self._split(self._ring(ROWS, x), dims.input, dims.input_leads)
        y = call(module, x, *args, **kwargs)
        return summed(self._residual(y) if dims.output_leads else y)

    def around_lookup(
        self, call: Function, module: Module, tokens: Array, *args: object, **kwargs: object
    ) -> Array:
        """Takes token ids and returns rows of the table; every rank looks up the rows it holds.

        Written with `shard_map`: left to itself the compiler may send the table, or the gradients
        of all positions, instead of one sum of rows.
        """
        is_plain = all(argument is None for argument in (*args, *kwargs.values()))
        lookup = _lookup(call, module) if self.is_split and is_plain else None
        if lookup is None:
            return self._residual(call(module, tokens, *args, **kwargs))
        table, look_up = lookup
        rows = self.layout.spec((*tokens.shape, 1), sequence=self._positions)

        def local(table: Array, tokens: Array) -> Array:
            size = jax.tree.leaves(table)[0].shape[0]
            vectors = taken_rows(lambda ids: look_up(table, ids), tokens, size, self.axis)
            # One id per sample, such as its class, has no positions to split.
            if self.sequence and tokens.ndim > 1:
                return sum_scatter(vectors, self.axis, 1)
            return all_sum(vectors, self.axis)

        ids = self.layout.spec((*tokens.shape, 1))
        mapped = self.layout.mapped(
            local, (PartitionSpec(self.axis), PartitionSpec(*ids[:-1])), rows
        )
        return mapped(table, tokens)

    def around_vocabulary(
        self, call: Function, module: Module, x: Array, *args: object, **kwargs: object
    ) -> Array:
        """Looks rows up for integer inputs; otherwise computes split logits, as a head."""
        looks_up = not jnp.issubdtype(x.dtype, jnp.floating)
        around = self.around_lookup if looks_up else self.around_columns
        return around(call, module, x, *args, **kwargs)

    def _ring(self, kind: str, x: Array) -> Array:
        # A head may be a transposed table; it is one product outside all loops, and needs no ring.
        rings = self.rings and self.is_split and self.rule.mode is not ParallelMode.VOCAB
        return into(kind, x) if rings else x

    def _constrained(self, x: Array) -> Array:
        # A layer may also return an NNX object, or a term of the loss, which has no dims.
        has_dims = not is_node(x) and _is_float(x) and jnp.ndim(x) > 0
        return self.layout.constrain(x) if has_dims else x

    def _split(self, x: Array, dim: int | None, leads: bool) -> Array:
        """Constrains the split features of activations; does nothing if their dim is not known.

        Args:
            x: the activations.
            dim: the dim of the split features, from the end.
            leads: whether the first dims are the samples and positions. Otherwise all dims but
                the features are left to the compiler.
        """
        features = (self.axis,) if self.is_split else ()
        if dim is None:
            return x
        if leads:
            return self.layout.constrain(x, features, dim)
        entries: list = [FREE] * x.ndim
        entries[dim] = features or None
        return constrain(x, self.layout.mesh, PartitionSpec(*entries))

    def _residual(self, x: Array) -> Array:
        return self.layout.constrain(x, sequence=self._positions)

    @property
    def _positions(self) -> tuple[str, ...]:
        return (self.axis,) if self.sequence else ()


@dataclasses.dataclass(frozen=True)
class LinenPins:
    """Constrains the layers inside a bridged Linen module, which are not NNX modules.

    Args:
        layers: how each parallel layer is split, by path.
        layout: the layout of the activations.
        path: the path of the bridge.
        shapes: sorted pairs of a parameter's path below the bridge and its shape.
    """

    layers: TensorLayers
    layout: Layout
    path: Path
    shapes: tuple[tuple[Path, Shape], ...]

    def __call__(self, call: Function, module: Module, *args: object, **kwargs: object) -> Array:
        """Runs the bridge with its inner calls intercepted."""
        pinned: list[nn.Module] = []

        def intercept(
            call: Function,
            args: Sequence[PyTree],
            kwargs: Mapping[str, PyTree],
            context: nn.module.InterceptorContext,
        ) -> Array:
            # A layer may call the method of its superclass, which is intercepted too.
            if any(context.module is layer for layer in pinned):
                return call(*args, **kwargs)
            pinned.append(context.module)
            try:
                return self.intercept(call, args, kwargs, context)
            finally:
                pinned.pop()

        with nn.intercept_methods(intercept):
            return call(module, *args, **kwargs)

    def intercept(
        self,
        call: Function,
        args: Sequence[PyTree],
        kwargs: Mapping[str, PyTree],
        context: nn.module.InterceptorContext,
    ) -> Array:
        """Runs one Linen method between the layout constraints of its layer."""
        path = "/".join(filter(None, (self.path, *context.module.path)))
        rule = self.layers.policy.plan.rule_of(path)
        if rule is None or context.method_name != "__call__":
            return call(*args, **kwargs)
        below = "/".join(context.module.path) + "/"
        shapes = {p.removeprefix(below): s for p, s in self.shapes if p.startswith(below)}
        pin = self.layers.pin(rule, path, shapes, self.layout)
        return pin(lambda _, *a, **k: call(*a, **k), context.module, *args, **kwargs)


def _lookup(call: Function, module: Module) -> tuple[PyTree, Function] | None:
    """Returns the table of a lookup layer and its lookup function; None for other layers.

    A subclass of `Embed` that changes the ids first, such as by adding an offset, is excluded: it
    cannot be called with ids relative to one rank's rows.
    """
    if isinstance(module, nn.Module):
        if type(module).__call__ is not nn.Embed.__call__ or not _has_library_hooks(module):
            return None
        layer = module

        def take(table, ids):
            return jnp.take(table.astype(layer.dtype or table.dtype), ids, axis=0)

        return layer.embedding, take
    if getattr(call, "__wrapped__", None) not in LOOKUPS or not _has_library_hooks(module):
        return None
    graphdef, table, rest = nnx.split(module, nnx.Param, ...)
    return table, lambda table, ids: call(nnx.merge(graphdef, table, rest, copy=True), ids)


HOOKS = ("dot_general", "dot_general_cls", "einsum_op", "promote_dtype")
"""The attributes of Flax layers that may hold a function in place of JAX's own."""


def _has_library_hooks(module: Module) -> bool:
    """Whether the functions that a Flax layer calls are those of JAX and Flax."""
    hooks = (getattr(module, name, None) for name in HOOKS)
    return all(is_from(x, "jax.", "flax.", "axon_dist.") for x in hooks if callable(x))


def _few_rows(module: nnx.Module, x: Array) -> jax.ShapeDtypeStruct:
    """Returns the shape of a smaller input of a layer, for a comparison."""
    leaves = jax.tree.leaves(nnx.state(module, nnx.Param))
    # Leading dims are free, unless a kernel contracts several dims of the input.
    num_free = x.ndim - 1 if all(leaf.ndim <= 2 for leaf in leaves) else 1
    few = tuple(min(size, 2) for size in x.shape[:num_free])
    return jax.ShapeDtypeStruct((*few, *x.shape[num_free:]), x.dtype)


def can_cut(module: nnx.Module, dims: SplitDims) -> bool:
    """Whether a layer can be cut.

    A layer of an unknown class always counts: `around_columns` compares its blocks with the whole.
    """
    bias = getattr(module, "bias", None)
    # The bias of an Einsum may have another shape of the same size.
    is_usual = not isinstance(bias, nnx.Param) or len(_shape(bias)) == dims.num_bias
    return not dims.is_known or (dims.output is not None and is_usual)


def cut_outputs(module: nnx.Module, num_fused: int, dims: SplitDims) -> list[nnx.Module]:
    """Cuts a layer into several layers with equal, consecutive shares of its outputs.

    A rank with a slice of the columns of `[q | k | v]` does not hold q, k and v of the same head.
    Cut up, each block is split separately: the small kernel is sent between the ranks instead of
    the activations.
    """
    features = getattr(module, "out_features", -1)
    outputs = features if isinstance(features, tuple) else (features,)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    flat = nnx.to_flat_state(params)
    pieces = [_pieces(keys, variable[...], num_fused, dims, outputs) for keys, variable in flat]

    def block(index):
        return nnx.from_flat_state(
            [(k, v.replace(piece[index])) for (k, v), piece in zip(flat, pieces, strict=True)]
        )

    layers = [nnx.merge(graphdef, block(index), rest, copy=True) for index in range(num_fused)]
    at = len(outputs) + dims.kernel
    for layer in layers:
        if isinstance(layer, nnx.LinearGeneral):
            # The layer reshapes its bias to these.
            layer.out_features = (*outputs[:at], outputs[at] // num_fused, *outputs[at + 1 :])
        if isinstance(layer, nnx.Einsum):
            layer.kernel_shape = _shape(layer.kernel)
    return layers


def _pieces(
    keys: KeyPath, leaf: Array, num_fused: int, dims: SplitDims, outputs: tuple[int, ...]
) -> list[Array]:
    """Returns a parameter's share of each block; all blocks share an adapter's `lora_a`."""
    if keys[-2:] == ("lora", "lora_a"):
        return [leaf] * num_fused
    if keys[-2:-1] != ("lora",):
        bias = dims.bias if keys[-1] in BIAS else None
        return jnp.split(leaf, num_fused, dims.kernel if bias is None else bias)
    if len(outputs) == 1:
        return jnp.split(leaf, num_fused, -1)
    # The outputs of an adapter are flattened, so a block of a later dim is not consecutive.
    pieces = jnp.split(leaf.reshape(leaf.shape[0], *outputs), num_fused, dims.kernel)
    return [piece.reshape(leaf.shape[0], -1) for piece in pieces]


def is_param(value: Array) -> bool:
    """Whether a node of a model's graph is an `nnx.Param`, trained or frozen."""
    return isinstance(value, nnx.Param)


def _shape(variable: nnx.Variable) -> Shape:
    return variable.get_value().shape


def _is_float(x: Array) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
