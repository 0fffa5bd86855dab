"""A promise about a function whose program does not show that it keeps samples apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

PER_SAMPLE = "axon_dist_per_sample"
"""The name of a call that is promised to treat the samples, dim 0 of its arrays, one by one."""


def per_sample(function: Callable[..., Any]) -> Callable[..., Any]:
    """Promises that a function treats samples one by one, forwards and backwards.

    A step that computes a loss in parts reads from its program that samples do not mix. A kernel
    of Pallas, or a call into foreign code, is no program that it could read. Random numbers are
    drawn before the function: each rank runs it on its own samples, and would draw the same.

    Args:
        function: takes and returns arrays; dim 0 of each that has one for every sample counts
            samples.

    Returns:
        The function, marked.

    Example:
        >>> import jax.numpy as jnp
        >>> double = per_sample(lambda x: 2 * x)
        >>> double(jnp.ones(2)).tolist()
        [2.0, 2.0]
    """

    def run(*args: Any) -> Any:
        return function(*args)

    run.__name__ = run.__qualname__ = PER_SAMPLE
    return jax.jit(run)
