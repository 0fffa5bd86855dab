"""Attention whose heads are split over a mesh axis."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from ..core.checks import COUNT, RNGS, checked
from ..core.errors import DivisibilityError, UnsupportedError
from ..core.typing import Array
from ..mesh import ProcessGroup
from .layout import FREE, constrain
from .linear import ColumnParallelLinear, ParallelMode, RowParallelLinear, manual_axis


class TensorParallelAttention(nnx.Module):
    """Tensor-parallel self-attention: `q`, `k`, `v` split by heads, `out` split by rows.

    Forward and backward need one all-reduce each. With fewer key heads than ranks, every rank
    computes all key heads and uses the one that its query heads share.

    Args:
        features: size of the last dim of the input and the output.
        num_heads: query heads.
        num_kv_heads: key and value heads, each shared by `num_heads / num_kv_heads` query heads
            (grouped-query attention, arXiv:2305.13245); None for as many as query heads.
        head_dim: size of one head; None for `features / num_heads`.
        causal: position t sees positions 0 to t.
        use_bias: whether the projections have biases.
        group: the ranks that split the heads; None leaves the split to a strategy.
        dtype: dtype of the products; None for that of the parameters.
        param_dtype: dtype of the parameters.
        rngs: source of the initial weights.

    Raises:
        DivisibilityError: when heads do not divide over the group, or over the key heads.

    Example:
        >>> def attended(x):
        ...     return TensorParallelAttention(16, 4, num_kv_heads=2, rngs=nnx.Rngs(0))(x)
        >>> nnx.eval_shape(attended, jnp.ones((2, 5, 16))).shape
        (2, 5, 16)
    """

    @checked("TensorParallelAttention", features=COUNT, num_heads=COUNT, rngs=RNGS)
    def __init__(
        self,
        features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        use_bias: bool = True,
        group: ProcessGroup | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        size = features // num_heads if head_dim is None else head_dim
        _check_heads(features, num_heads, kv_heads, head_dim, group)
        with_options = functools.partial(
            functools.partial, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        column = with_options(ColumnParallelLinear)
        row = with_options(RowParallelLinear)
        splits_kv = group is None or kv_heads % group.size == 0
        kv_group = group if splits_kv else None
        self.q: ColumnParallelLinear = column(features, num_heads * size, group=group)
        self.k: ColumnParallelLinear = column(features, kv_heads * size, group=kv_group)
        self.v: ColumnParallelLinear = column(features, kv_heads * size, group=kv_group)
        if not splits_kv:
            self.k.mode = self.v.mode = ParallelMode.REPLICATE
        self.out: RowParallelLinear = row(num_heads * size, features, group=group)
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = size
        self.causal = causal
        self.group = group

    def __call__(self, x: Array) -> Array:
        """Maps `[B, T, features]` to `[B, T, features]`."""
        query = self._heads(self.q(x))
        key = self._heads(self.k(x))
        value = self._heads(self.v(x))
        key = self._shared(key, query.shape[-2])
        value = self._shared(value, query.shape[-2])
        mixed = self.attend(self._by_heads(query), key, value)
        return self.out(mixed.reshape(*x.shape[:-1], -1))

    def attend(self, query: Array, key: Array, value: Array) -> Array:
        """Computes attention over `[B, T, H, K]`."""
        return softmax_attention(query, key, value, self.causal)

    def _heads(self, x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)

    def _shared(self, heads: Array, num_queries: int) -> Array:
        """Repeats key heads for the query heads that share them; slices out those of this rank."""
        axis = manual_axis(self.group)
        if axis is None or heads.shape[-2] < self.num_kv_heads:
            return self._by_heads(jnp.repeat(heads, num_queries // heads.shape[-2], axis=-2))
        repeated = jnp.repeat(heads, self.num_heads // self.num_kv_heads, axis=-2)
        start = jax.lax.axis_index(axis) * num_queries
        return jax.lax.dynamic_slice_in_dim(repeated, start, num_queries, axis=-2)

    def _by_heads(self, x: Array) -> Array:
        if self.group is None or manual_axis(self.group) is not None:
            return x
        spec = PartitionSpec(*[FREE] * (x.ndim - 2), self.group.axes[0], None)
        return constrain(x, self.group.mesh, spec)


def mixes(module: nnx.Module) -> bool:
    """Whether a module has a method `attend(query, key, value, ...)`.

    The names may also be q, k, v, or queries, keys, values. A further argument may be `segments`,
    integers `[B, T]`: a position sees only its own segment.
    """
    method = getattr(type(module), "attend", None)
    kind = inspect.getattr_static(type(module), "attend", None)
    if not callable(method) or isinstance(kind, (staticmethod, classmethod)):
        return False
    return tuple(p.name for p in _heads(method)) in _NAMES


_NAMES = (("query", "key", "value"), ("q", "k", "v"), ("queries", "keys", "values"))
"""The names of the three arrays by which a method `attend` is known as attention."""


def _heads(attend: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a method `attend` that take query, key and value."""
    return list(inspect.signature(attend).parameters.values())[1:4]


def call_attend(
    attend: Callable[..., Array],
    module: object,
    query: Array,
    key: Array,
    value: Array,
    segments: Array | None = None,
) -> Array:
    """Calls a module's `attend`, whatever it calls its parameters for query, key and value.

    Args:
        attend: the method, as defined by the class.
        module: the module.
        query: `[B, T, H, K]`.
        key: `[B, T, N, K]`.
        value: like `key`.
        segments: integers `[B, T]`; None does not pass them.

    Returns:
        What the method returns.
    """
    pairs = list(zip(_heads(attend), (query, key, value), strict=True))
    placed = [x for p, x in pairs if p.kind is not p.KEYWORD_ONLY]
    named = {p.name: x for p, x in pairs if p.kind is p.KEYWORD_ONLY}
    more = {} if segments is None else {"segments": segments}
    return attend(module, *placed, **named, **more)


def has_residual_method(module: nnx.Module) -> bool:
    """Whether a module has a method `residual(tokens, segments, positions)`.

    The method promises that a token's result depends on `positions` and attention only, not on
    the token's place in the row: permuting the tokens of a row permutes the results.
    """
    return _parameters(module, "residual")[1:] == ["tokens", "segments", "positions"]


def _parameters(module: nnx.Module, name: str) -> list[str]:
    """Returns the names of a method's parameters; empty if there is no such method."""
    method = getattr(type(module), name, None)
    return [] if method is None else list(inspect.signature(method).parameters)


def attended(
    attend: Callable[..., Array], module: nnx.Module, args: tuple, kwargs: Mapping[str, object]
) -> tuple[Array, Array, Array, Array | None]:
    """Returns the query, key, value and segments of a call of a module's `attend`.

    Args:
        attend: the method, as defined by the class.
        module: the module that is called.
        args: the positional arguments of the call.
        kwargs: the keyword arguments of the call.

    Raises:
        UnsupportedError: when the call has other arguments.
    """
    bound = inspect.signature(attend).bind(module, *args, **kwargs).arguments
    segments = bound.pop("segments", None)
    (_, *heads), more = list(bound.values())[:4], list(bound)[4:]
    more = [name for name in more if bound[name] is not None]
    more += [name for name in list(bound)[:4] if name in ("args", "kwargs")]
    if more or len(heads) != 3:
        raise UnsupportedError(
            f"{type(module).__name__}.attend is called with {', '.join(list(bound)[1:])}; if a "
            "strategy splits attention over devices, it takes only query, key, value and segments. "
            "Store other options in the module, such as causal=True"
        )
    query, key, value = heads
    return query, key, value, segments


def check_attend(module: nnx.Module) -> None:
    """Checks that a module's `attend` can be called with three arrays.

    Raises:
        UnsupportedError: when it has further required arguments; the message names them.
    """
    _, *rest = inspect.signature(type(module).attend).parameters.values()  # type: ignore[attr-defined]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in rest[3:] if p.default is p.empty and p.kind not in kinds]
    if needed:
        raise UnsupportedError(
            f"{type(module).__name__}.attend needs {', '.join(needed)} besides query, key and "
            "value, but a strategy that splits attention over devices passes only these three. "
            "Store other options in the module, such as causal=True",
            code="attend-arguments",
        )


def softmax_attention(query: Array, key: Array, value: Array, causal: bool) -> Array:
    """Computes `softmax(q k^T / sqrt(K)) v` per head, the softmax in float32.

    Args:
        query: `[B, T, H, K]`.
        key: `[B, T, H, K]`.
        value: `[B, T, H, K]`.
        causal: position t sees positions 0 to t.

    Returns:
        `[B, T, H, K]` in the dtype of `value`.
    """
    dtype = jnp.promote_types(jnp.result_type(query, key), jnp.float32)
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=dtype)
    scores = scores * query.shape[-1] ** -0.5
    if causal:
        length = query.shape[1]
        visible = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bhts,bshk->bthk", weights, value)


def _check_heads(
    features: int, heads: int, kv_heads: int, head_dim: int | None, group: ProcessGroup | None
) -> None:
    if head_dim is None and features % heads:
        raise DivisibilityError(
            f"features={features} is not a multiple of num_heads={heads}; change one, or set "
            "head_dim"
        )
    if heads % kv_heads:
        raise DivisibilityError(
            f"num_heads={heads} is not a multiple of num_kv_heads={kv_heads}; every key head "
            "serves the same number of query heads: choose a divisor of num_heads"
        )
    if group is None:
        return
    size = group.size
    axis = "×".join(group.axes)

    def fits(n):
        return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(size):
        valid = [n for n in range(1, heads + 1) if fits(n)]
        raise DivisibilityError(
            f"{heads} heads and {kv_heads} key heads do not divide over {axis}={size}; choose a "
            f"size of {axis} among {valid}"
        )
