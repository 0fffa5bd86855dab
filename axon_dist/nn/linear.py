"""Column-parallel and row-parallel linear layers, and the feed-forward built from them.

Each layer works in two views. In global view (plain `jax.jit`) kernels are sharded global arrays,
and the compiler adds the collectives that the constrained activations need. Inside a `shard_map`
over the axis, the layer holds its own shard and calls the collectives itself. Differentiate from
outside the `shard_map`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..core.checks import COUNT, RNGS, checked
from ..core.errors import ConfigError, DivisibilityError, GroupError, NamedChoice
from ..core.own_context import in_own_context
from ..core.reduction import all_gather_dim, all_max, all_sum
from ..core.tree import wide
from ..core.typing import Array
from ..mesh import ProcessGroup
from ..ops.ids import wide_ids
from .layout import FREE, constrain, manual_axes
from .remat import summed


class ParallelMode(NamedChoice):
    """How a layer takes part in tensor parallelism."""

    COLUMN = "column"
    """Output features are split: replicated inputs, split outputs."""
    ROW = "row"
    """Input features are split: split inputs, outputs summed over the ranks."""
    SEQUENCE = "sequence"
    """Norms, dropout and residuals: the sequence is split if sequence parallelism is on."""
    VOCAB = "vocab"
    """The rows of an embedding table, or the logits of a head, are split."""
    REPLICATE = "replicate"
    """Every rank computes the whole product."""


Initializer: TypeAlias = Callable[..., Array]
"""(key, shape, dtype) -> array, as in `jax.nn.initializers`."""

ADDRESSES = 2**47
"""Bytes that a process of a 64-bit machine can address."""

KERNEL_INIT: Initializer = nnx.initializers.lecun_normal()
BIAS_INIT: Initializer = nnx.initializers.zeros_init()


class _ParallelLinear(nnx.Module):
    """A kernel `[in_features, out_features]` split along one dim, and a bias.

    Args:
        features: the numbers of input and output features.
        split_dim: the split dim of the kernel; the bias is split too if it is 1, the columns.
        use_bias: whether there is a bias.
        group: the ranks that split them.
        dtypes: the dtype of the product (None for that of the parameters), and of the parameters.
        inits: the initializers of the whole kernel and the whole bias.
        rngs: source of the initial weights.
    """

    def __init__(
        self,
        features: tuple[int, int],
        split_dim: int,
        use_bias: bool,
        group: ProcessGroup | None,
        dtypes: tuple[DTypeLike | None, DTypeLike],
        inits: tuple[Initializer, Initializer],
        rngs: nnx.Rngs,
    ):
        check_divides(("in_features", "out_features")[split_dim], features[split_dim], group)
        fill_kernel, fill_bias = inits
        self.kernel = nnx.Param(filled(fill_kernel, rngs, features, dtypes[1], group, split_dim))
        bias_dim = 0 if split_dim == 1 else None
        self.bias = (
            nnx.Param(filled(fill_bias, rngs, features[1:], dtypes[1], group, bias_dim))
            if use_bias
            else None
        )
        self.in_features: int = features[0]
        self.out_features: int = features[1]
        self.group: ProcessGroup | None = group
        self.dtype, self.param_dtype = dtypes
        self.dot_general = jax.lax.dot_general

    def _product(self, x: Array) -> Array:
        dtype = self.dtype or self.param_dtype
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        return self.dot_general(x.astype(dtype), self.kernel[...].astype(dtype), dims)


class ColumnParallelLinear(_ParallelLinear):
    """`y = x A + b` with the columns of `A` split: replicated inputs, split outputs.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        use_bias: whether there is a bias.
        gather_output: all-gather the output, so every rank has all of it.
        group: the ranks that split the columns, a group by one mesh axis; None leaves the split
            to a strategy.
        dtype: dtype of the product; None is that of the parameters.
        param_dtype: dtype of the parameters.
        kernel_init: fills the whole kernel, so that it does not depend on the number of ranks.
        bias_init: fills the whole bias.
        rngs: source of the initial weights.

    Raises:
        DivisibilityError: when the columns do not divide over the group.
        GroupError: for a group by a list of ranks or by several axes.

    Example:
        >>> layer = lambda x: ColumnParallelLinear(8, 4, rngs=nnx.Rngs(0))(x)
        >>> nnx.eval_shape(layer, jnp.ones((2, 8))).shape
        (2, 4)

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053.
    """

    mode = ParallelMode.COLUMN

    @checked("ColumnParallelLinear", in_features=COUNT, out_features=COUNT, rngs=RNGS)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        gather_output: bool = False,
        group: ProcessGroup | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        features = (in_features, out_features)
        dtypes = (dtype, param_dtype)
        inits = (kernel_init, bias_init)
        super().__init__(features, 1, use_bias, group, dtypes, inits, rngs)
        self.gather_output: bool = gather_output

    def __call__(self, x: Array) -> Array:
        """Maps `[..., in_features]` to `[..., out_features]`."""
        y = self._product(x)
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)
        axis = manual_axis(self.group)
        if axis is not None:
            return all_gather_dim(y, axis, y.ndim - 1) if self.gather_output else y
        y = pinned(y, self.group, -1)
        return pinned(y, self.group, None) if self.gather_output else y


class RowParallelLinear(_ParallelLinear):
    """`y = sum over ranks of x[..., r] A[r, :] + b` with the rows of `A` split; `b` added once.

    Args:
        in_features: size of the last dim of the input.
        out_features: size of the last dim of the output.
        use_bias: whether there is a bias, replicated on every rank.
        input_is_parallel: the input is already split, as a column layer leaves it; otherwise each
            rank takes its part of a replicated input.
        group: the ranks that split the rows, a group by one mesh axis; None leaves the split to a
            strategy.
        dtype: dtype of the product; None is that of the parameters.
        param_dtype: dtype of the parameters.
        kernel_init: fills the whole kernel, so that it does not depend on the number of ranks.
        bias_init: fills the bias.
        rngs: source of the initial weights.

    Raises:
        DivisibilityError: when the rows do not divide over the group.
        GroupError: for a group by a list of ranks or by several axes.

    Example:
        >>> layer = lambda x: RowParallelLinear(8, 4, rngs=nnx.Rngs(0))(x)
        >>> nnx.eval_shape(layer, jnp.ones((2, 8))).shape
        (2, 4)
    """

    mode = ParallelMode.ROW

    @checked("RowParallelLinear", in_features=COUNT, out_features=COUNT, rngs=RNGS)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        input_is_parallel: bool = True,
        group: ProcessGroup | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        bias_init: Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
    ):
        features = (in_features, out_features)
        dtypes = (dtype, param_dtype)
        inits = (kernel_init, bias_init)
        super().__init__(features, 0, use_bias, group, dtypes, inits, rngs)
        self.input_is_parallel: bool = input_is_parallel

    def __call__(self, x: Array) -> Array:
        """Maps `[..., in_features]` to `[..., out_features]`, replicated on every rank."""
        axis = manual_axis(self.group)
        if axis is not None:
            y = all_sum(self._product(x if self.input_is_parallel else _part(x, axis)), axis)
        else:
            y = pinned(self._product(pinned(x, self.group, -1)), self.group, None)
        y = summed(y)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


class ParallelMLP(nnx.Module):
    """`down(f(up(x)))`, or gated `down(f(gate(x)) * up(x))`.

    Forward and backward need one all-reduce each.

    Args:
        in_features: size of the last dim of the input.
        hidden_features: size between the two products; this one is split.
        out_features: size of the last dim of the output; None for `in_features`.
        activation: the function `f`.
        gated: multiply with a second projection (arXiv:2002.05202).
        use_bias: whether the layers have biases.
        group: the ranks that split the hidden features; None leaves the split to a strategy.
        dtype: dtype of the products; None is that of the parameters.
        param_dtype: dtype of the parameters.
        rngs: source of the initial weights.

    Example:
        >>> mlp = lambda x: ParallelMLP(4, 8, 3, rngs=nnx.Rngs(0))(x)
        >>> nnx.eval_shape(mlp, jnp.ones((2, 4))).shape
        (2, 3)
    """

    @checked(
        "ParallelMLP",
        in_features=COUNT,
        hidden_features=COUNT,
        out_features=COUNT.or_none(),
        rngs=RNGS,
    )
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Callable[[Array], Array] = jax.nn.gelu,
        gated: bool = False,
        use_bias: bool = True,
        group: ProcessGroup | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        with_options = functools.partial(
            functools.partial,
            use_bias=use_bias,
            group=group,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        column = with_options(ColumnParallelLinear)
        row = with_options(RowParallelLinear)
        self.up: ColumnParallelLinear = column(in_features, hidden_features)
        self.gate: ColumnParallelLinear | None = (
            column(in_features, hidden_features) if gated else None
        )
        out_features = in_features if out_features is None else out_features
        self.down: RowParallelLinear = row(hidden_features, out_features)
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        """Maps `[..., in_features]` to `[..., out_features]`."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


def manual_axis(group: ProcessGroup | None) -> str | None:
    """Returns the mesh axis of a group if the caller is in a `shard_map` over it, else None."""
    axis = None if group is None else group.axes[0]
    return axis if axis in manual_axes() else None


def check_divides(what: str, size: int, group: ProcessGroup | None) -> None:
    """Raises unless `group` is by one mesh axis and its size divides `size`."""
    if group is None:
        return
    if group.members is not None or len(group.axes) != 1:
        raise GroupError(
            f"a parallel layer got the {group}; it needs a group by one mesh axis, such as "
            'world.group("tp")'
        )
    if size % group.size:
        axis = group.axes[0]
        valid = [n for n in range(1, size + 1) if size % n == 0][:12]
        raise DivisibilityError(
            f"{what}={size} does not divide over {axis}={group.size}; choose a size of {axis} "
            f"among {valid}, or a multiple of {group.size} for {what}"
        )


@in_own_context
def filled(
    init: Initializer,
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    group: ProcessGroup | None,
    dim: int | None,
) -> Array:
    """Initializes an array whose shards are split along `dim` over the ranks of a group."""
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    if size >= ADDRESSES:  # XLA aborts the process when asked for such an array.
        raise ConfigError(
            f"a weight of shape {shape} in {jnp.dtype(dtype)} has {size:.1e} bytes, but a process "
            f"can address only {ADDRESSES:.1e}; check the numbers of features"
        )
    if group is None:
        return init(rngs.params(), shape, dtype)
    spec = PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, group.axes[0])
    sharding = NamedSharding(group.mesh, spec)
    # Layers of equal shape share one compiled program.
    run = jax.jit(init, static_argnums=(1, 2), out_shardings=sharding)
    return run(rngs.params(), shape, dtype)


def pinned(x: Array, group: ProcessGroup | None, dim: int | None) -> Array:
    """Shards one dim of activations over a group's axis, or replicates the last dim over it."""
    if group is None:
        return x
    entries: list = [FREE] * (x.ndim - 1) + [None]
    if dim is not None:
        entries[dim] = group.axes[0]
    return constrain(x, group.mesh, PartitionSpec(*entries))


def _part(x: Array, axis: str) -> Array:
    size = x.shape[-1] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, axis=-1)


TABLE_INIT: Initializer = nnx.initializers.normal(0.02)


class VocabParallelEmbedding(nnx.Module):
    """Looks tokens up in a table `[num_embeddings, features]` whose rows are split.

    Every rank looks up the tokens whose rows it holds, and an all-reduce sums the results. `attend`
    uses the table as a head and leaves the logits split.

    Args:
        num_embeddings: size of the vocabulary.
        features: size of a row.
        group: the ranks that split the rows; None leaves the split to a strategy.
        dtype: dtype of the returned rows, and of the logits; None for the table's.
        param_dtype: dtype of the table.
        embedding_init: fills the whole table, so that it does not depend on the number of ranks.
        rngs: source of the initial weights.

    Raises:
        DivisibilityError: when the rows do not divide over the group.

    Example:
        >>> table = lambda x: VocabParallelEmbedding(8, 4, rngs=nnx.Rngs(0))(x)
        >>> nnx.eval_shape(table, jnp.array([[1, 2, 3]])).shape
        (1, 3, 4)
    """

    mode = ParallelMode.VOCAB

    @checked("VocabParallelEmbedding", num_embeddings=COUNT, features=COUNT, rngs=RNGS)
    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        group: ProcessGroup | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        embedding_init: Initializer = TABLE_INIT,
        rngs: nnx.Rngs,
    ):
        check_divides("num_embeddings", num_embeddings, group)
        shape = (num_embeddings, features)
        self.embedding = nnx.Param(filled(embedding_init, rngs, shape, param_dtype, group, 0))
        self.num_embeddings = num_embeddings
        self.features = features
        self.group = group
        self.dtype = dtype
        self.param_dtype = param_dtype

    def __call__(self, tokens: Array) -> Array:
        """Maps tokens `[...]` to their rows `[..., features]`, replicated on every rank."""
        table = self.embedding[...].astype(self.dtype or self.param_dtype)
        axis = manual_axis(self.group)
        if axis is not None:
            return all_sum(taken_rows(lambda ids: table[ids], tokens, len(table), axis), axis)
        return pinned(jnp.take(table, tokens, axis=0), self.group, None)

    def attend(self, x: Array) -> Array:
        """Maps `[..., features]` to logits `[..., num_embeddings]`, split over the group.

        Both are in `dtype`, or in that of the table, as in `nnx.Embed`.
        """
        dtype = self.dtype or self.param_dtype
        table = self.embedding[...].astype(dtype)
        return pinned(jnp.asarray(x, dtype) @ table.T, self.group, -1)


def own_rows(look_up: Callable[[Array], Array], tokens: Array, num_rows: int, axis: str) -> Array:
    """Looks up the rows of this rank, with zeros for all other tokens, inside `shard_map`.

    Args:
        look_up: maps positions in this rank's part of the table to rows.
        tokens: ids in the whole table.
        num_rows: how many rows this rank holds.
        axis: the mesh axis that splits the rows.

    Returns:
        This rank's term; the sum over the ranks is the full lookup.
    """
    local = tokens - jax.lax.axis_index(axis) * num_rows
    is_local = (local >= 0) & (local < num_rows)
    rows = look_up(jnp.clip(local, 0, num_rows - 1))
    return jnp.where(is_local[..., None], rows, jnp.zeros((), rows.dtype))


def taken_rows(look_up: Callable[[Array], Array], tokens: Array, num_rows: int, axis: str) -> Array:
    """Looks up the rows of this rank such that the sum over the ranks is `jnp.take` of the table.

    As there, an id of -1 is the last row, and an id outside of the table gives NaN, so that a wrong
    id is noticed with split tables too.

    Args:
        look_up: maps positions in this rank's part of the table to rows.
        tokens: ids in the whole table.
        num_rows: how many rows this rank holds.
        axis: the mesh axis that splits the rows.
    """
    size = num_rows * jax.lax.axis_size(axis)
    ids = wide_ids(tokens)
    ids = jnp.where(ids < 0, ids + size, ids)
    rows = own_rows(look_up, ids, num_rows, axis)
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return rows
    is_there = (ids >= 0) & (ids < size)
    return jnp.where(is_there[..., None], rows, jnp.full((), jnp.nan, rows.dtype))


def vocab_parallel_cross_entropy(
    logits: Array, labels: Array, group: ProcessGroup | None = None
) -> Array:
    """Computes `logsumexp(logits) - logits[label]`, with the classes split over a group.

    It computes in float32, or in the dtype of the logits if that is wider.

    The ranks exchange three numbers per position: the largest logit, the sum of exponentials and
    the logit of the label. So traffic grows with the number of labels, not with the vocabulary.

    Args:
        logits: `[..., V]`, as a column layer or `VocabParallelEmbedding.attend` leaves them.
        labels: integers `[...]` in `[0, V)`.
        group: the ranks that split the classes; None for unsplit logits.

    Returns:
        Losses `[...]` in nats, float32 or wider, replicated on every rank.

    Raises:
        DivisibilityError: when the classes do not divide over the group.

    Example:
        >>> float(jax.jit(vocab_parallel_cross_entropy)(jnp.zeros((1, 4)), jnp.array([2]))[0])
        1.3862943649291992
    """
    axis = manual_axis(group)
    if axis is None:
        check_divides("the number of classes", logits.shape[-1], group)
        return _cross_entropy(pinned(wide(logits), group, -1), labels, 0, None)
    start = jax.lax.axis_index(axis) * logits.shape[-1]
    return _cross_entropy(wide(logits), labels, start, axis)


def _cross_entropy(logits: Array, labels: Array, start: Array | int, axis: str | None) -> Array:
    """Computes the cross-entropy, summed over the ranks of `axis`; without it of all classes.

    Args:
        logits: `[..., V]`, the logits of this rank's classes.
        labels: `[...]`, ids among all classes.
        start: the id of this rank's first class.
        axis: the mesh axis that splits the classes; None if they are not split.
    """

    def total(x):
        return x if axis is None else all_sum(x, axis)

    labels = wide_ids(labels)
    largest = jax.lax.stop_gradient(logits.max(-1))
    largest = largest if axis is None else all_max(largest, axis)
    exponentials = total(jnp.exp(logits - largest[..., None]).sum(-1))
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) + start
    label_logits = total(jnp.where(classes == labels[..., None], logits, 0.0).sum(-1))
    return jnp.log(exponentials) + largest - label_logits
