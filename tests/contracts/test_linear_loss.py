"""A loss that never holds all logits equals the plain one under every strategy.

Both ways to it: a transformer that is asked for what its head takes, and a model of somebody
else's whose loss calls `linear_cross_entropy` itself. The oracle makes all logits on one device.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Reduction, World, build_train_step, compose, ddp, zero
from axon_dist.core.weighted import Weighted
from axon_dist.models import (
    is_likeliest,
    next_token_loss,
)
from axon_dist.nn import linear_scores
from axon_dist.parallel import context_parallel, fsdp, pipelined, tensor_parallel
from tests.drawn import drawn

from .models import SAMPLES, Case, token_batch, transformer
from .reference import METRICS, assert_close, assert_metrics, train
from .rows import part

STEPS = 3
SHAPE = {"width": 32, "ffn_width": 32, "vocab_size": 32, "max_length": 16, "tied_head": True}
OPTIONS = {"z_loss": 1e-2, "label_smoothing": 0.1, "soft_cap": 4.0}


class Block(nnx.Module):
    """A layer of somebody else's."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.inner(x))


class OwnModel(nnx.Module):
    """A model of somebody else's: no logits, a head with a bias, and positions of all lengths."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(32, 16, rngs=rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(2))
        self.out = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def weighted_batch(step: int) -> dict:
    """Tokens that count very unevenly, some samples not at all."""
    counts = np.arange(SAMPLES * 8).reshape(SAMPLES, 8) * 7 % 5
    weight = counts * (np.arange(SAMPLES) % 4 > 0)[:, None]
    return token_batch(step) | {"weight": weight.astype(np.float32)}


def own_loss(model, batch):
    """The loss as a user writes it."""
    return linear_scores(
        model(batch["tokens"][:, :-1]),
        model.out.kernel[...],
        batch["tokens"][:, 1:],
        batch["weight"],
        bias=model.out.bias[...],
        num_chunks=3,
        **OPTIONS,
    )


def plain_loss(model, batch):
    """The same with all logits."""
    x = model.out(model(batch["tokens"][:, :-1]))
    labels, weight = batch["tokens"][:, 1:], batch["weight"]
    x = OPTIONS["soft_cap"] * jnp.tanh(x / OPTIONS["soft_cap"])
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 32), OPTIONS["label_smoothing"])
    losses = optax.softmax_cross_entropy(x, smooth)
    losses = losses + OPTIONS["z_loss"] * jax.nn.logsumexp(x, -1) ** 2
    hits = jnp.sum(is_likeliest(x, labels) * weight) / jnp.sum(weight)
    return Weighted(jnp.sum(losses * weight), jnp.sum(weight)), {"accuracy": hits}


def decoder(logits: str) -> Case:
    return Case(lambda: transformer(**SHAPE, logits=logits), next_token_loss, token_batch)


def own(loss_fn) -> Case:
    return Case(lambda: drawn(lambda: OwnModel(nnx.Rngs(0))), loss_fn, weighted_batch)


MODELS = {
    "decoder": (decoder("chunked"), decoder("whole"), "transformer"),
    "own": (own(own_loss), own(plain_loss), {"table": "vocab", "out": "column"}),
}
BY_HAND = Reduction(per="microbatch", manual=True)
ROWS = {
    "ddp": (lambda plan: ddp(), "dp=4", 2),
    "ddp by step": (lambda plan: ddp(bucket_capacity=1000), "dp=2", 1),
    "zero1": (lambda plan: zero(1, min_elements=8), "dp=4", 2),
    "full_shard": (lambda plan: fsdp(min_elements=8), "fsdp=4", 1),
    "full_shard, two": (lambda plan: fsdp(min_elements=8), "fsdp=4", 2),
    "by hand": (lambda plan: fsdp(min_elements=8, reduction=BY_HAND), "fsdp=4", 2),
    "tp": (lambda plan: tensor_parallel(plan), "tp=4", 1),
    "fsdp x tp": (
        lambda plan: compose(fsdp(min_elements=8), tensor_parallel(plan)), "fsdp=2,tp=2", 1,
    ),
    "by hand x tp": (
        lambda plan: compose(fsdp(min_elements=8, reduction=BY_HAND), tensor_parallel(plan)),
        "fsdp=2,tp=2", 2,
    ),
    "pp x dp": (lambda plan: compose(pipelined(2, 2), ddp()), "pp=2,dp=2", 2),
    "pp x tp": (
        lambda plan: compose(pipelined(2, 2), ddp(), tensor_parallel(plan)), "pp=2,dp=2,tp=2", 2,
    ),
}  # fmt: skip
OF_ATTENTION = {
    "sequence": (
        lambda plan: compose(fsdp(min_elements=8), tensor_parallel(plan, sequence=True)),
        "fsdp=2,tp=2", 2,
    ),
    "ring": (
        lambda plan: compose(fsdp(min_elements=8), context_parallel("ring"), tensor_parallel(plan)),
        "fsdp=2,cp=2,tp=2", 1,
    ),
    "pp x cp x tp": (
        lambda plan: compose(pipelined(2, 2), context_parallel("ulysses"), tensor_parallel(plan)),
        "pp=2,cp=2,tp=2", 2,
    ),
}  # fmt: skip
TABLE = [f"own, {name}" for name in ROWS]
TABLE += [f"decoder, {name}" for name in (*ROWS, *OF_ATTENTION)]
ALWAYS = ["own, pp x tp", "decoder, ddp"]


def world_of(mesh: str) -> World:
    return World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)


@pytest.mark.sample("own, pp x tp")
@pytest.mark.parametrize("row", part(TABLE, ALWAYS))
def test_equals_the_loss_of_all_logits(row):
    name, strategy = row.split(", ", 1)
    case, plain, plan = MODELS[name]
    make, mesh, accumulate = (ROWS | OF_ATTENTION)[strategy]
    optimizer = lambda: optax.sgd(0.05, momentum=0.9)
    want, strategy = train(plain, optimizer(), STEPS, accumulate), make(plan)
    options = {} if strategy.pipeline else {"accumulate": accumulate}
    step = build_train_step(
        case.make(),
        optimizer(),
        case.loss_fn,
        strategy,
        world_of(mesh),
        metrics=METRICS,
        batch=case.batch(0),
        **options,
    )
    state = step.init()
    for number in range(STEPS):
        state, metrics = step(state, case.batch(number))
        assert_metrics(metrics, want.metrics[number], f"step {number}")
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(trained, want.params, 1e-5, "parameter")
