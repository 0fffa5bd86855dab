"""Losses of the small models, in float32, written for one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from axon_dist.core.errors import ConfigError
from axon_dist.core.typing import Array
from axon_dist.core.weighted import Weighted


def next_token_loss(model: Callable[[Array], Array], batch: Mapping[str, Array]) -> Weighted:
    """Sums `-log p(token[t+1] | tokens[..t])` over the tokens that count.

    Args:
        model: maps tokens `[B, T]` to logits `[B, T, V]`.
        batch: `"tokens"`, integer `[B, T + 1]`, and optionally `"mask"`, `[B, T + 1]`, zero where a
            token is padding or prompt and must not count as a target (its first column never does);
            and `"weight"`, `[B]`, by which each sample counts.

    Returns:
        The sum of the losses in nats, float32, and the number of tokens that count.

    Raises:
        ConfigError: the mask has another shape than the tokens.

    Example:
        >>> uniform = lambda tokens: jnp.zeros((*tokens.shape, 4))
        >>> loss = next_token_loss(uniform, {"tokens": jnp.zeros((2, 4), jnp.int32)})
        >>> float(loss.weight), round(float(loss.mean), 4)
        (6.0, 1.3863)
    """
    tokens = batch["tokens"]
    mask = batch.get("mask", jnp.ones(tokens.shape, jnp.float32))
    if mask.shape != tokens.shape:
        raise ConfigError(
            f"mask of shape {mask.shape} beside tokens of shape {tokens.shape}: "
            "give one mask entry per token, the first column included."
        )
    losses = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
    counts = mask[:, 1:].astype(jnp.float32)
    if "weight" in batch:
        counts = counts * batch["weight"][:, None]
    return Weighted(jnp.sum(losses * counts), jnp.sum(counts))


def classification_loss(model: Callable[[Array], Array], batch: Mapping[str, Array]) -> Array:
    """Means the cross-entropy of `model(batch["x"])` against the labels `batch["y"]`.

    Args:
        model: maps inputs `[B, ...]` to logits `[B, C]`.
        batch: `"x"`, the inputs, and `"y"`, integer labels `[B]`.

    Returns:
        A float32 scalar in nats.
    """
    return jnp.mean(cross_entropy(model(batch["x"]), batch["y"]))


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Computes `logsumexp(logits) - logits[label]` in float32.

    The logit of the label is picked by comparing with an iota instead of by indexing: XLA fuses
    that, its gradient has no scatter, and it partitions where classes are split over devices.

    Args:
        logits: `[..., C]`.
        labels: integers `[...]` in `[0, C)`.

    Returns:
        Losses `[...]` in nats, float32.
    """
    logits = logits.astype(jnp.float32)
    classes = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    chosen = jnp.where(classes == labels[..., None], logits, 0.0).sum(axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen
