"""From logits to the next token: the likeliest, or a draw from a distribution cut to its head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from axon_dist.core.errors import ConfigError
from axon_dist.core.told import REAL, WHOLE
from axon_dist.core.typing import Array


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from `softmax(logits / temperature)`, its head alone.

    Args:
        temperature: 0 takes the likeliest token; below 1 sharpens, above 1 flattens.
        top_k: draw among this many of the likeliest tokens; None for all.
        top_p: draw among the fewest of the likeliest tokens whose probabilities, after `top_k`, add
            up to at least this (nucleus sampling, arXiv:1904.09751); None for all.

    Of tokens that are equally likely, the lower id counts as likelier.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.9).validate()
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def validate(self) -> None:
        """Checks the values.

        Raises:
            ConfigError: one is out of range, or means nothing beside another.
        """
        REAL.check("Sampling", "temperature", self.temperature)
        WHOLE.or_none().check("Sampling", "top_k", self.top_k)
        REAL.or_none().check("Sampling", "top_p", self.top_p)
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 1e6:
            raise ConfigError(
                f"temperature={self.temperature} must be 0 or lie in [1e-6, 1e6]; 0 takes the "
                "likeliest token, 1 draws from the distribution as it is"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"top_k={self.top_k} must be at least 1; leave it out to draw among all tokens"
            )
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"top_p={self.top_p} must lie in (0, 1]; leave it out to draw among all tokens"
            )
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ConfigError(
                    f"temperature=0 takes the likeliest token, so that {name}="
                    f"{getattr(self, name)} would change nothing; leave one of them out"
                )


def kept_logits(logits: Array, sampling: Sampling) -> Array:
    """The logits that a draw is made from: `log p` up to a constant, minus infinity for the tail.

    Args:
        logits: `[..., V]`.
        sampling: of a temperature above 0.

    Returns:
        `[..., V]`, float32.

    Example:
        >>> kept_logits(jnp.log(jnp.array([1.0, 4.0, 3.0])), Sampling(top_k=1)).argmax().item()
        1
    """
    scaled = logits.astype(jnp.float32) / sampling.temperature
    size = scaled.shape[-1]
    count = size if sampling.top_k is None else min(sampling.top_k, size)
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    if count == size and top_p == 1.0:
        return scaled
    # Sorted from the likeliest on; of equal ones the lower id comes first.
    values, ids = jax.lax.top_k(scaled, count)
    if top_p < 1.0:
        probabilities = jax.nn.softmax(values, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # Nothing is before the first, whatever rounding makes of the difference.
        is_kept = (before < top_p).at[..., 0].set(True)
        values = jnp.where(is_kept, values, -jnp.inf)
    nothing = jnp.full_like(scaled, -jnp.inf)
    return jnp.put_along_axis(nothing, ids, values, axis=-1, inplace=False)


def draw(key: Array, logits: Array, sampling: Sampling) -> Array:
    """Takes one token for every row, each with random bits of its own.

    Args:
        key: one typed key.
        logits: `[B, V]`.
        sampling: how.

    Returns:
        Token ids, int32 `[B]`.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(logits.shape[0]))
    kept = kept_logits(logits, sampling)
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)
