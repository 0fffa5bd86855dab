"""The constants of a program for two numbers of samples."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..core.tree import is_key
from .sample_values import CONSTANT, SIZES, Kind, Value, coupled

DIFFERS = "is another program for another number of samples"


def scalar(value: Any) -> Value:
    """A constant that is the same for any number of samples, its value known."""
    if is_key(value):
        return CONSTANT
    # Literals are Python's own numbers, too, which have no dtype.
    dtype = np.dtype(getattr(value, "dtype", type(value)))
    if dtype.kind in "biuf":
        return Value(known=np.asarray(value).item())
    # To NumPy, bfloat16 and its like are no floats.
    return Value(known=float(value)) if jnp.issubdtype(dtype, jnp.floating) else CONSTANT


def grown_constant(first: np.ndarray, second: np.ndarray, ratio: float) -> Value:
    """A constant that differs between two numbers of samples."""
    if first.shape != second.shape:
        flat = first.reshape(-1)
        if flat.size and (flat == flat[0]).all() and (second == flat[0]).all():
            return scalar(flat[0])
        return coupled("is an array with an entry of its own for every sample", "")
    if first.dtype.kind not in "iufV" or not first.size:
        return coupled(DIFFERS, "")
    a, b = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(all="ignore"):
        degrees = np.log(b / a) / math.log(ratio)
    degree = round(2 * float(np.ravel(degrees)[0])) / 2 if np.isfinite(degrees).all() else math.nan
    exact = first.dtype.kind in "iu"
    tolerance = 0.0 if exact else 4 * float(jnp.finfo(first.dtype).eps)
    if not np.allclose(b, a * ratio**degree, rtol=tolerance, atol=0):
        return coupled("is a number that " + SIZES, "")
    return Value(Kind.CONSTANT, degree)
