"""Random keys in host memory: the threefry generator in NumPy.

Deriving a key takes microseconds here. JAX would compile a program for each way of deriving one,
and would wait for a device. Only the primitives in `ON_HOST` are computed here, and only for
threefry keys, whose bits JAX keeps stable:
https://docs.jax.dev/en/latest/jep/9263-typed-keys.html. JAX computes the other generators.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


@dataclasses.dataclass(frozen=True, eq=False)
class Key:
    """Random keys in host memory.

    Args:
        data: the words of the keys, along the last dim.
        impl: the generator, as `jax.random.wrap_key_data` takes it.
    """

    data: np.ndarray
    impl: Hashable


Value: TypeAlias = np.ndarray | Key
"""Integers or keys."""

OnHost: TypeAlias = Callable[[Mapping[str, Any], Sequence[Value]], Value | None]
"""(parameters, operands) -> the result; None if JAX has to compute it."""


def threefry(key: np.ndarray, high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Encrypts pairs of 32-bit words.

    Args:
        key: two words.
        high: the first words of the pairs.
        low: the second words.

    Returns:
        The encrypted pairs, along the last dim.

    Example:
        >>> key = np.array([0, 42], np.uint32)
        >>> mine = threefry(key, np.uint32(0), np.uint32(7))
        >>> theirs = jax.random.key_data(jax.random.fold_in(jax.random.key(42), 7))
        >>> bool((mine == np.asarray(theirs)).all())
        True
    """
    words = [key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]
    with np.errstate(over="ignore"):
        x = high + words[0]
        y = low + words[1]
        for round_number in range(5):
            for distance in ROTATIONS[round_number % 2]:
                x = x + y
                y = (y << np.uint32(distance)) | (y >> np.uint32(32 - distance))
                y = x ^ y
            x = x + words[(round_number + 1) % 3]
            y = y + words[(round_number + 2) % 3] + np.uint32(round_number + 1)
    return np.stack([x, y], -1)


def _fold_in(params: Mapping[str, Any], operands: Sequence[Value]) -> Value | None:
    key, data = operands
    if not isinstance(key, Key) or isinstance(data, Key) or not _is_threefry(key):
        return None
    if key.data.ndim != 1 or data.shape != () or data.dtype != np.uint32:
        return None
    return Key(threefry(key.data, np.zeros((), np.uint32), data), key.impl)


def _split(params: Mapping[str, Any], operands: Sequence[Value]) -> Value | None:
    (key,) = operands
    is_partitionable = bool(getattr(jax.config, "jax_threefry_partitionable"))  # noqa: B009
    if not isinstance(key, Key) or not _is_threefry(key) or not is_partitionable:
        return None
    shape = params["shape"]
    if key.data.ndim != 1 or math.prod(shape) >= 2**32:
        return None
    low = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    return Key(threefry(key.data, np.zeros_like(low), low), key.impl)


def _is_threefry(key: Key) -> bool:
    return str(key.impl) == "threefry2x32"


def _sliced(params: Mapping[str, Any], operands: Sequence[Value]) -> Value | None:
    starts = params["start_indices"]
    limits = params["limit_indices"]
    strides = params["strides"] or (1,) * len(starts)
    where = tuple(map(slice, starts, limits, strides))
    return _moved(operands[0], lambda x: x[where])


def _squeezed(params: Mapping[str, Any], operands: Sequence[Value]) -> Value | None:
    # Keys have their words in an extra last dim, so these dims must be counted from the front.
    dims = tuple(params["dimensions"])
    return _moved(operands[0], lambda x: np.squeeze(x, dims))


def _repeated(params: Mapping[str, Any], operands: Sequence[Value]) -> Value | None:
    shape = tuple(params["shape"])
    dims = params["broadcast_dimensions"]

    def run(x: np.ndarray) -> np.ndarray:
        sizes = [1] * len(shape)
        words = x.shape[len(dims) :]
        for dim, size in zip(dims, x.shape, strict=False):
            sizes[dim] = size
        return np.broadcast_to(x.reshape(*sizes, *words), (*shape, *words))

    return _moved(operands[0], run)


def _moved(value: Value, run: Callable[[np.ndarray], np.ndarray]) -> Value:
    if isinstance(value, Key):
        return Key(run(value.data), value.impl)
    return run(value)


def _added(params: Mapping[str, Any], operands: Sequence[Value]) -> Value | None:
    one, other = operands
    if isinstance(one, Key) or isinstance(other, Key) or one.dtype.kind not in "iu":
        return None
    with np.errstate(over="ignore"):
        return np.asarray(one + other)


ON_HOST: Mapping[str, OnHost] = {
    "random_fold_in": _fold_in,
    "random_split": _split,
    "slice": _sliced,
    "squeeze": _squeezed,
    "broadcast_in_dim": _repeated,
    "add": _added,
}
"""The primitives that are computed on the host, by name."""
