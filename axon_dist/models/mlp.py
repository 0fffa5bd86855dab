"""A multi-layer perceptron in plain Flax NNX."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import MappingProxyType

from flax import nnx

from axon_dist.core.errors import ConfigError, did_you_mean
from axon_dist.core.told import RNGS, is_whole
from axon_dist.core.typing import Array

ACTIVATIONS: MappingProxyType[str, Callable[[Array], Array]] = MappingProxyType(
    {
        "gelu": nnx.gelu,
        "gelu_exact": functools.partial(nnx.gelu, approximate=False),
        "relu": nnx.relu,
        "silu": nnx.silu,
        "tanh": nnx.tanh,
    }
)
"""Functions between layers; `gelu` is the approximation by tanh, `gelu_exact` the one by erf."""


class MLP(nnx.Module):
    """Linear layers with an activation and dropout between them, and neither after the last.

    Args:
        sizes: widths from the input to the output, for example `(784, 256, 10)`.
        activation: a key of `ACTIVATIONS`.
        dropout: rate after every activation, in [0, 1).
        rngs: source of the initial weights (`params`) and of dropout.

    Raises:
        ConfigError: fewer than two sizes, one below 1, a rate out of range, an unknown activation.

    Example:
        >>> import jax.numpy as jnp
        >>> MLP((784, 256, 10), rngs=nnx.Rngs(0))(jnp.ones((4, 784))).shape
        (4, 10)
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        activation: str = "relu",
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        _check(sizes, activation, dropout)
        RNGS.check("MLP", "rngs", rngs)
        self.layers = nnx.List(
            nnx.Linear(num_inputs, num_outputs, rngs=rngs)
            for num_inputs, num_outputs in itertools.pairwise(sizes)
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout else None)
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        """Maps `[..., sizes[0]]` to `[..., sizes[-1]]`."""
        *hidden, last = self.layers
        for layer in hidden:
            x = self.dropout(ACTIVATIONS[self.activation](layer(x)))
        return last(x)


def _check(sizes: Sequence[int], activation: str, dropout: float) -> None:
    is_list = isinstance(sizes, Sequence) and all(map(is_whole, sizes))
    if not is_list or len(sizes) < 2 or min(sizes) < 1:
        raise ConfigError(
            f"sizes={sizes!r:.80} must name at least an input and an output width, each 1 or "
            "more, for example (784, 256, 10)."
        )
    if activation not in ACTIVATIONS:
        hint = did_you_mean(activation, ACTIVATIONS)
        raise ConfigError(f"activation={activation!r} is not an activation.{hint}")
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"dropout={dropout} must lie in [0, 1); 0 turns it off.")
