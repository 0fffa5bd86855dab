"""AdamW with moments of 8 bits: a code of one byte per element, and a scale per block.

The moments of AdamW in float32 need 8 bytes per parameter; here they need about 2. A moment is cut
into blocks of 256 elements. A block is divided by its largest absolute value, and every element is
rounded to the nearest of 256 values (`DynamicCode`). The update itself is computed in float32, from
moments that are rounded only when they are stored.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.checks import SIZE
from ..core.errors import ConfigError
from ..core.tree import leaves_with_paths
from ..core.typing import Array, PyTree, Shape

BLOCK = 256
"""The most elements that share a scale."""

MIN_SIZE = 4096
"""By default, the moments of parameters with fewer elements stay in full precision."""

_SMALL_BLOCK = 64
"""Blocks run along another dim if they would have fewer elements."""

_DECADES = 7
"""The powers of ten that a code covers."""


@dataclasses.dataclass(frozen=True)
class DynamicCode:
    """The 256 values of a dynamic code: dense near zero, so that small moments keep their digits.

    The interval from 0.1 to 1 is cut into equal parts, and the values are the middles of the parts;
    each smaller decade has half as many. Zero and 1 are values as well.

    Args:
        signed: whether there are negative values; without them there are twice as many positive
            ones.

    Example:
        >>> code = DynamicCode(signed=True)
        >>> x = np.array([-1.0, 0.0, 0.003, 1.0], np.float32)
        >>> codes = code.encode(jnp.asarray(x))
        >>> codes.tolist()
        [0, 127, 146, 255]
        >>> [round(value, 4) for value in code.decode(codes).tolist()]
        [-0.993, 0.0, 0.003, 1.0]
    """

    signed: bool

    @property
    def values(self) -> np.ndarray:
        """All values in ascending order, float32 `[256]`; code `c` stands for `values[c]`."""
        positive = [scale * (0.1 + width * (np.arange(n) + 0.5)) for n, scale, width in self._parts]
        negative = [-x[::-1] for x in positive[::-1]] if self.signed else []
        return np.concatenate([*negative, [0.0], *positive, [1.0]]).astype(np.float32)

    @property
    def zero(self) -> int:
        """The code of zero."""
        return 127 if self.signed else 0

    @property
    def _parts(self) -> list[tuple[int, float, float]]:
        """For each decade the number of its values, its upper end, and the width of a part."""
        counts = [2 ** (decade + (not self.signed)) for decade in range(_DECADES)]
        return [(n, 10.0 ** (d + 1 - _DECADES), 0.9 / n) for d, n in enumerate(counts)]

    def encode(self, x: Array) -> Array:
        """Returns the codes of the nearest values.

        Without negative values, only zero itself is rounded to zero. Adam divides by the root of
        this moment, and a small moment that became zero would make an update without bound.

        Args:
            x: float32 numbers from -1 to 1, or from 0 to 1 without negative values.

        Returns:
            uint8, like `x`.
        """
        # Computes the code instead of searching a table, because gathers are slow on TPUs.
        size = jnp.abs(x)
        positive = self.values[self.zero + 1 :]
        number = jnp.zeros(x.shape, jnp.int32)
        first = 0
        for count, scale, width in self._parts:
            within = jnp.floor((size * (1 / scale) - 0.1) * (1 / width)).astype(jnp.int32)
            candidate = first + jnp.clip(within, 0, count - 1)
            border = (positive[first - 1] + positive[first]) / 2 if first else 0.0
            number = jnp.where(size >= border, candidate, number)
            first += count
        if not self.signed:
            number = jnp.where(size >= (positive[-2] + 1) / 2, first, number)
            return jnp.where(size > 0, 1 + number, 0).astype(jnp.uint8)
        is_one = x >= (positive[-2] + 1) / 2
        number = jnp.where(is_one, first, number)
        codes = jnp.where(x > 0, 128 + number, 126 - number)
        return jnp.where(size < positive[0] / 2, self.zero, codes).astype(jnp.uint8)

    def decode(self, codes: Array) -> Array:
        """Returns the values of codes, float32."""
        number = codes.astype(jnp.int32) - self.zero
        is_negative = number < 0
        index = jnp.abs(number) - 1
        value = jnp.zeros(codes.shape, jnp.float32)
        first = 0
        for count, scale, width in self._parts:
            middle = scale * (0.1 + width * ((index - first).astype(jnp.float32) + 0.5))
            value = jnp.where(index >= first, middle, value)
            first += count
        value = jnp.where(index >= first, 1.0, value)
        return jnp.where(is_negative, -value, value)


SIGNED = DynamicCode(signed=True)
UNSIGNED = DynamicCode(signed=False)


class Quantized(NamedTuple):
    """An array rounded block by block.

    Args:
        codes: uint8, in the shape of the array.
        scales: the largest absolute value of each block, float32. The shape is that of the array,
            except that the dim along which blocks run has one entry per block.
    """

    codes: Any
    scales: Any


def block_dim(shape: Shape) -> int:
    """Returns the dim along which an array is cut into blocks.

    It is the last one, unless that is the largest; then it is the one before. FSDP and ZeRO usually
    split the largest dim and blocks run along another one, so that no shard boundary cuts a block.
    If that other dim is so short that blocks would be small and scales many, blocks run along the
    largest dim after all. Devices that share a block compute its scale together, so it is the one
    that a single device computes.

    Example:
        >>> block_dim((1024, 256)), block_dim((256, 1024)), block_dim((3, 1024))
        (1, 0, 1)
    """
    last = len(shape) - 1
    is_largest = last > 0 and shape[last] > max(shape[:last])
    dim = last - 1 if is_largest else last
    return dim if shape[dim] >= _SMALL_BLOCK else shape.index(max(shape))


def quantize(x: Array, code: DynamicCode) -> Quantized:
    """Rounds an array block by block.

    Args:
        x: an array with at least one dim; it is cast to float32.
        code: the values to which elements are rounded.

    Example:
        >>> rounded = quantize(jnp.linspace(-2, 2, 512).reshape(2, 256), SIGNED)
        >>> rounded.codes.shape, rounded.scales.tolist()
        ((2, 256), [[2.0], [2.0]])
    """
    blocks, dim = _blocks(x.astype(jnp.float32))
    scales = jnp.max(jnp.abs(blocks), axis=dim + 1, keepdims=True)
    codes = code.encode(blocks / jnp.where(scales > 0, scales, 1.0))
    return Quantized(_merge_blocks(codes, x.shape), jnp.squeeze(scales, dim + 1))


def dequantize(x: Quantized, code: DynamicCode) -> Array:
    """Returns the values of a rounded array, float32.

    Example:
        >>> x = jnp.linspace(-2, 2, 512).reshape(2, 256)
        >>> [round(float(v), 3) for v in dequantize(quantize(x, SIGNED), SIGNED)[0, :2]]
        [-1.986, -1.986]
    """
    blocks, dim = _blocks(code.decode(x.codes))
    return _merge_blocks(blocks * jnp.expand_dims(x.scales, dim + 1), x.codes.shape)


def _blocks(x: Array) -> tuple[Array, int]:
    """Splits the dim of `block_dim` into blocks and their elements; zeros fill the last block."""
    dim = block_dim(x.shape)
    size = x.shape[dim]
    length = min(BLOCK, size)
    count = -(-size // length)
    if rest := count * length - size:
        x = jnp.pad(x, [(0, rest if d == dim else 0) for d in range(x.ndim)])
    return x.reshape(*x.shape[:dim], count, length, *x.shape[dim + 1 :]), dim


def _scales_shape(shape: Shape) -> Shape:
    dim = block_dim(shape)
    return (*shape[:dim], -(-shape[dim] // BLOCK), *shape[dim + 1 :])


def _merge_blocks(blocks: Array, shape: Shape) -> Array:
    """Inverts `_blocks`."""
    dim = block_dim(shape)
    count, length = blocks.shape[dim : dim + 2]
    merged = blocks.reshape(*shape[:dim], count * length, *shape[dim + 1 :])
    if count * length == shape[dim]:
        return merged
    return jax.lax.slice_in_dim(merged, 0, shape[dim], axis=dim)


class Adam8bitState(NamedTuple):
    """The state of `scale_by_adam_8bit`.

    Args:
        count: the number of updates.
        mu: the codes of the means of the gradients, like the parameters.
        mu_scales: their scales.
        nu: the codes of the means of the squares.
        nu_scales: their scales.
    """

    count: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: PyTree
    mu_scales: PyTree
    nu: PyTree
    nu_scales: PyTree


def scale_by_adam_8bit(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Scales updates as `optax.scale_by_adam`, with both moments of every parameter in 8 bits.

    Args:
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added to the square root of the latter.

    Raises:
        ConfigError: in `init`, for a parameter that is complex or has no dim.
    """

    def init(params: PyTree) -> Adam8bitState:
        for path, leaf in leaves_with_paths(params):
            if not jnp.issubdtype(leaf.dtype, jnp.floating) or not leaf.ndim:
                raise ConfigError(
                    f"8-bit moments: got the parameter {path!r}, {leaf.dtype}{list(leaf.shape)}; "
                    "it must be real and have at least one dim: use optax.adamw for it, for "
                    "example with axon_dist.optim.by_path",
                    code="eight-bit-parameter",
                )
        scales = jax.tree.map(lambda p: jnp.zeros(_scales_shape(p.shape)), params)
        return Adam8bitState(
            jnp.zeros([], jnp.int32),
            mu=jax.tree.map(lambda p: jnp.full(p.shape, SIGNED.zero, jnp.uint8), params),
            mu_scales=scales,
            nu=jax.tree.map(lambda p: jnp.full(p.shape, UNSIGNED.zero, jnp.uint8), params),
            nu_scales=jax.tree.map(jnp.copy, scales),
        )

    def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, Adam8bitState]:
        del params
        count = jnp.asarray(optax.safe_increment(state.count))
        structure = jax.tree.structure(updates)

        def update_leaf(gradient: Array, *moments: Array) -> tuple[Array, Quantized, Quantized]:
            wide = gradient.astype(jnp.float32)
            mu = b1 * dequantize(Quantized(*moments[:2]), SIGNED) + (1 - b1) * wide
            nu = b2 * dequantize(Quantized(*moments[2:]), UNSIGNED) + (1 - b2) * wide**2
            mean = mu / (1 - b1**count)
            root = jnp.sqrt(nu / (1 - b2**count))
            change = (mean / (root + eps)).astype(gradient.dtype)
            return change, quantize(mu, SIGNED), quantize(nu, UNSIGNED)

        trees = (updates, state.mu, state.mu_scales, state.nu, state.nu_scales)
        leaves = [update_leaf(*values) for values in zip(*map(jax.tree.leaves, trees), strict=True)]
        columns = zip(*leaves, strict=True) if leaves else ((), (), ())
        changes, mu, nu = (structure.unflatten(column) for column in columns)
        return changes, Adam8bitState(count, *_codes_and_scales(mu), *_codes_and_scales(nu))

    return optax.GradientTransformation(init, update)


def _codes_and_scales(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the codes and the scales of a tree of `Quantized`."""

    def is_quantized(x: object) -> bool:
        return isinstance(x, Quantized)

    codes = jax.tree.map(lambda x: x.codes, tree, is_leaf=is_quantized)
    scales = jax.tree.map(lambda x: x.scales, tree, is_leaf=is_quantized)
    return codes, scales


def adamw_8bit(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Callable[[PyTree], PyTree] | PyTree | None = None,
    *,
    min_size: int = MIN_SIZE,
) -> optax.GradientTransformation:
    """AdamW with 8-bit moments: a quarter of the memory of the optimizer state.

    Equal to `optax.adamw`, except that the moments of large parameters are rounded when they are
    stored: to one byte per element and a float32 scale per block of up to 256 elements. A block
    runs along one dim (see `block_dim`), so the state is split over devices like the parameters.

    Args:
        learning_rate: a number, or a schedule.
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added to the square root of the latter.
        weight_decay: the fraction of a parameter that a step at learning rate 1 removes.
        mask: which parameters decay: a tree of flags, or a function of the parameters; None for
            all.
        min_size: parameters with fewer elements have the full-precision moments of `optax.adamw`.

    Returns:
        The optax transformation.

    Raises:
        ConfigError: if `min_size` is not a whole number of at least 0; in `init`, for a large
            parameter that is complex.

    Example:
        >>> optimizer = adamw_8bit(1e-3)
        >>> params = {"kernel": jnp.ones((64, 64)), "bias": jnp.ones(64)}
        >>> state = optimizer.init(params)
        >>> sorted({str(x.dtype) for x in jax.tree.leaves(state) if x.size >= 4096})
        ['uint8']
    """
    SIZE.check("adamw_8bit", "min_size", min_size)

    def labels(params: PyTree) -> PyTree:
        return jax.tree.map(lambda p: "8bit" if p.ndim and p.size >= min_size else "full", params)

    by_size: dict[Hashable, optax.GradientTransformation] = {
        "8bit": scale_by_adam_8bit(b1, b2, eps),
        "full": optax.scale_by_adam(b1, b2, eps),
    }
    return optax.chain(
        optax.partition(by_size, labels),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
