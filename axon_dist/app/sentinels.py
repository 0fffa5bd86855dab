"""Operations whose gradients are compared with one device: what stands guard over the compiler.

Each is a small function of samples `[B, T, D]` and a kernel. On one device and in plain JAX it is
right; laid out over a mesh it must stay so. A compiler that gets one wrong says nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..core.typing import Array

POSITIONS, FEATURES = 8, 8
"""T and D of the samples."""

Operation: TypeAlias = Callable[[Array, Array], Array]
"""(samples `[B, T, D]`, kernel) -> any array."""


@dataclasses.dataclass(frozen=True)
class Sentinel:
    """One operation.

    Args:
        run: what it computes.
        kernel: the shape of its kernel.
        core: whether it is among the quick ones, one of each kind.
    """

    run: Operation
    kernel: tuple[int, ...] = (FEATURES, FEATURES)
    core: bool = True


def _convolution(
    dims: int, groups: int = 1, padding: Any = "SAME", image: bool = False, **options: Any
) -> Operation:
    """A convolution over positions, or over images `[B, T, D / 4, 4]` of the same samples."""
    letters = "WHD"[:dims][::-1]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")

    def run(x: Array, kernel: Array) -> Array:
        x = x.reshape(*x.shape[:2], -1, 4) if image else x
        strides = options.get("strides", (1,) * dims)
        more = {name: value for name, value in options.items() if name != "strides"}
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            strides,
            padding,
            dimension_numbers=numbers,
            feature_group_count=groups,
            **more,
        )

    return run


def _numbers(x: Array) -> Array:
    """Integers in `[0, 8)` that depend on the samples `[B, T]`."""
    return (jnp.abs(x[..., 0]) * 100).astype(jnp.int32) % FEATURES


def _recurrent(x: Array, kernel: Array) -> Array:
    def step(carry: Array, now: Array) -> tuple[Array, Array]:
        new = jnp.tanh(carry @ kernel + now)
        return new, new

    _, out = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return out


def _attend(x: Array, kernel: Array) -> Array:
    query, key, value = jnp.split(x @ kernel, 3, -1)
    heads = lambda y: y.reshape(*y.shape[:2], 2, -1)
    return jax.nn.dot_product_attention(heads(query), heads(key), heads(value), is_causal=True)


def _normal(x: Array, kernel: Array) -> Array:
    y = x @ kernel
    return (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)


def _matrix(kernel: Array) -> Array:
    """A positive definite matrix near the identity."""
    return kernel @ kernel.T * 0.1 + 2 * jnp.eye(kernel.shape[0])


def _pooled(x: Array, kernel: Array, start: float, reduce: Any) -> Array:
    y = x @ kernel
    return jax.lax.reduce_window(y, start, reduce, (1, 3, 1), (1, 2, 1), "SAME")


def _ragged(x: Array, kernel: Array) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    half = rows.shape[0] // 2
    return jax.lax.ragged_dot(rows, kernel, jnp.array([half // 2, rows.shape[0] - half // 2]))


def _segments(x: Array, kernel: Array) -> Array:
    y, numbers = x @ kernel, _numbers(x)
    add = lambda y, numbers: jax.ops.segment_sum(y, numbers, FEATURES)
    return jax.vmap(add)(y, numbers)


def _chosen(x: Array, kernel: Array) -> Array:
    return jax.lax.cond(kernel[0, 0] > 0, lambda: x @ kernel, lambda: (x + 1) @ kernel)


def _repeated(x: Array, kernel: Array) -> Array:
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ kernel), x)


_CONVOLUTIONS = {
    "conv": Sentinel(_convolution(1), (3, 8, 8)),
    "conv_strided": Sentinel(_convolution(1, strides=(2,)), (3, 8, 8)),
    "conv_dilated": Sentinel(_convolution(1, rhs_dilation=(2,)), (3, 8, 8), core=False),
    "conv_valid": Sentinel(_convolution(1, padding="VALID"), (3, 8, 8), core=False),
    "conv_transposed": Sentinel(
        _convolution(1, padding=((1, 2),), lhs_dilation=(2,)), (3, 8, 8), core=False
    ),
    "conv_grouped": Sentinel(_convolution(1, groups=2), (3, 4, 8)),
    "conv_depthwise": Sentinel(_convolution(1, groups=8), (3, 1, 8)),
    "conv_multiplied": Sentinel(_convolution(1, groups=8), (3, 1, 16), core=False),
    "conv_causal": Sentinel(_convolution(1, groups=8, padding=((3, 0),)), (4, 1, 8)),
    "conv2d": Sentinel(_convolution(2, image=True), (3, 3, 4, 8)),
    "conv2d_strided": Sentinel(
        _convolution(2, image=True, strides=(2, 2)), (3, 3, 4, 8), core=False
    ),
    "conv2d_depthwise": Sentinel(_convolution(2, 4, image=True), (3, 3, 1, 4)),
    "conv_patches": Sentinel(
        _convolution(2, image=True, padding="VALID", strides=(2, 2)), (2, 2, 4, 8)
    ),
}

_PRODUCTS = {
    "dot": Sentinel(lambda x, k: x @ k),
    "dot_over_positions": Sentinel(lambda x, k: jnp.einsum("btd,ts->bsd", x, k)),
    "dot_of_all": Sentinel(lambda x, k: x.reshape(len(x), -1) @ k, (64, 8), core=False),
    "dot_of_samples": Sentinel(lambda x, k: jnp.einsum("btd,bsd->bts", x @ k, x)),
    "dot_of_experts": Sentinel(lambda x, k: jnp.einsum("btd,edf->betf", x, k), (2, 8, 4)),
    "ragged_dot": Sentinel(_ragged, (2, 8, 8)),
    "attention": Sentinel(_attend, (8, 24)),
    "recurrent": Sentinel(_recurrent),
    "repeated": Sentinel(_repeated, core=False),
    "rematerialised": Sentinel(jax.checkpoint(lambda x, k: jnp.tanh(x @ k) @ k), core=False),
    "chosen": Sentinel(_chosen, core=False),
    "solve": Sentinel(lambda x, k: jnp.linalg.solve(_matrix(k), x.swapaxes(1, 2))),
    "cholesky": Sentinel(lambda x, k: x @ jnp.linalg.cholesky(_matrix(k)), core=False),
    "fft": Sentinel(lambda x, k: jnp.abs(jnp.fft.rfft(x @ k, axis=1)) ** 2),
}

_INDEXED = {
    "embedding": Sentinel(lambda x, k: k[_numbers(x)]),
    "taken_along": Sentinel(
        lambda x, k: jnp.take_along_axis(x @ k, _numbers(x)[..., None], 2), core=False
    ),
    "scattered": Sentinel(lambda x, k: jnp.zeros((8, 8)).at[_numbers(x)].add(x @ k)),
    "segments": Sentinel(_segments, core=False),
    "sorted": Sentinel(lambda x, k: jnp.sort(x @ k, axis=1) * jnp.arange(8.0)),
    "top": Sentinel(lambda x, k: jax.lax.top_k(x @ k, 3)[0] * jnp.arange(3.0), core=False),
    "rolled": Sentinel(lambda x, k: jnp.roll(x @ k, 1, axis=1) * x),
    "flipped": Sentinel(lambda x, k: jnp.flip(x @ k, axis=1) * x, core=False),
    "shifted": Sentinel(lambda x, k: (x @ k)[:, 1:] * x[:, :-1]),
    "padded": Sentinel(lambda x, k: jnp.pad(x @ k, ((0, 0), (2, 1), (0, 3))), core=False),
    "joined": Sentinel(
        lambda x, k: jnp.concatenate([x @ k, x[:, :2]], 1) * jnp.arange(10.0)[:, None], core=False
    ),
}

_REDUCED = {
    "norm": Sentinel(_normal),
    "softmax": Sentinel(lambda x, k: jax.nn.softmax(x @ k, axis=1) * x, core=False),
    "logsumexp": Sentinel(lambda x, k: jax.nn.logsumexp(x @ k, axis=(1, 2)), core=False),
    "largest": Sentinel(lambda x, k: (x @ k).max(1), core=False),
    "batch_norm": Sentinel(lambda x, k: (x @ k - (x @ k).mean((0, 1))) * jnp.arange(8.0)),
    "summed_up": Sentinel(lambda x, k: jnp.cumsum(x @ k, axis=1)),
    "multiplied_up": Sentinel(lambda x, k: jnp.cumprod(jnp.tanh(x @ k), axis=1), core=False),
    "associative": Sentinel(
        lambda x, k: jax.lax.associative_scan(lambda a, b: a * 0.5 + b, x @ k, axis=1), core=False
    ),
    "mean_pooled": Sentinel(functools.partial(_pooled, start=0.0, reduce=jax.lax.add)),
    "max_pooled": Sentinel(functools.partial(_pooled, start=-math.inf, reduce=jax.lax.max)),
}

SENTINELS: MappingProxyType[str, Sentinel] = MappingProxyType(
    {**_CONVOLUTIONS, **_PRODUCTS, **_INDEXED, **_REDUCED}
)
"""All operations by name."""
