"""The models of the contract table: small, and each with something that a mesh could break."""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axon_dist.core.weighted import Weighted
from axon_dist.models import MLP, Transformer, TransformerConfig, next_token_loss

SAMPLES = 32


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its loss, and batches that change from step to step."""

    make: Callable[[], nnx.Module]
    loss_fn: Callable
    batch: Callable[[int], dict]


def regression_batch(step: int) -> dict:
    """Sixteen features, four targets; the scale grows with the step, which Adam must notice."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(SAMPLES, 16)).astype(np.float32) * (1 + 0.5 * step)
    return {"x": x, "y": np.sin(x[:, :4]) + 0.1 * x[:, 4:8]}


def ragged_batch(step: int) -> dict:
    """Samples with very uneven weights, some zero, so that a mean of means is wrong."""
    rng = np.random.default_rng(100 + step)
    weight = rng.integers(0, 5, size=SAMPLES) * (np.arange(SAMPLES) % 8 < 5)
    return regression_batch(step) | {"weight": weight.astype(np.float32)}


def token_batch(step: int) -> dict:
    """Tokens of a vocabulary of 32, sequences of 8."""
    rng = np.random.default_rng(200 + step)
    return {"tokens": rng.integers(0, 32, size=(SAMPLES, 9)).astype(np.int32)}


def mean_square(model: nnx.Module, batch: dict) -> jax.Array:
    """A plain scalar mean."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def mean_square_with_metrics(model: nnx.Module, batch: dict):
    """A mean, and a metric."""
    error = model(batch["x"]) - batch["y"]
    return jnp.mean(error**2), {"absolute": jnp.mean(jnp.abs(error))}


def weighted_square(model: nnx.Module, batch: dict):
    """A sum over weighted samples and the sum of their weights, and a weighted mean.

    Samples that all weigh nothing have a mean that is not a number.
    """
    error, weight = model(batch["x"]) - batch["y"], batch["weight"]
    absolute = jnp.sum(jnp.mean(jnp.abs(error), axis=-1) * weight) / jnp.sum(weight)
    square = jnp.sum(jnp.mean(error**2, axis=-1) * weight)
    return Weighted(square, jnp.sum(weight)), {"absolute": absolute}


class BatchNormNet(nnx.Module):
    """Statistics of the batch between two layers."""

    def __init__(self, rngs: nnx.Rngs):
        # A bias before BatchNorm has no gradient but rounding, which Adam would blow up.
        self.inner = nnx.Linear(16, 24, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(24, momentum=0.9, rngs=rngs)
        self.outer = nnx.Linear(24, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.norm(self.inner(x))))


class DropoutNet(nnx.Module):
    """Two random masks of different shapes, one of them broadcast over samples."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(16, 24, rngs=rngs)
        self.outer = nnx.Linear(24, 4, rngs=rngs)
        self.element = nnx.Dropout(0.3, rngs=rngs)
        self.feature = nnx.Dropout(0.2, broadcast_dims=(0,), rngs=rngs)

    def __call__(self, x):
        return self.outer(self.feature(self.element(jnp.tanh(self.inner(x)))))


class LinenNet(nn.Module):
    """A Linen module, bridged."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(jnp.tanh(nn.Dense(24)(x)))


def linen_net() -> nnx.Module:
    """The Linen module as an NNX one."""
    return nnx.bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 16)))


def transformer(**changes) -> nnx.Module:
    """A tiny decoder, tied head and grouped queries included."""
    config = dataclasses.replace(TransformerConfig.preset("tiny"), **changes)
    return Transformer(config, rngs=nnx.Rngs(0, dropout=1))


CASES = {
    "mlp": Case(
        lambda: MLP((16, 24, 4), rngs=nnx.Rngs(0)), mean_square_with_metrics, regression_batch
    ),
    "weighted": Case(lambda: MLP((16, 24, 4), rngs=nnx.Rngs(0)), weighted_square, ragged_batch),
    "batchnorm": Case(lambda: BatchNormNet(nnx.Rngs(0)), mean_square, regression_batch),
    "dropout": Case(lambda: DropoutNet(nnx.Rngs(0, dropout=1)), mean_square, regression_batch),
    "linen": Case(linen_net, mean_square, regression_batch),
    "transformer": Case(transformer, next_token_loss, token_batch),
}
