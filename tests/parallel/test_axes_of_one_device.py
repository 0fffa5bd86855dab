"""A mesh with an axis of one device, as `dp: -1` makes on few devices, trains as one device."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import (
    Reduction,
    build_train_step,
    compose,
    context_parallel,
    ddp,
    fsdp,
    pipelined,
    suggest_plan,
    tensor_parallel,
    zero,
)
from axon_dist.models import Transformer, TransformerConfig

TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)


def decoder():
    config = TransformerConfig(
        vocab_size=32, width=16, num_layers=2, num_heads=2, ffn_width=32, max_length=8
    )
    return Transformer(config, rngs=nnx.Rngs(0))


def cross_entropy(model, batch):
    logits = model(batch["x"][:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"][:, 1:]))


def tensor():
    return tensor_parallel(suggest_plan(decoder, TOKENS[:, :-1]))


def late(axes, **options):
    return fsdp(axes, reduction=Reduction(per="step"), min_elements=1, **options)


ROWS = {
    "ddp, tensor": (lambda: compose(ddp(), tensor()), "dp=1,tp=2", {}),
    "zero1, tensor": (lambda: compose(zero(1, min_elements=1), tensor()), "dp=1,tp=2", {}),
    "buckets, tensor": (
        lambda: compose(ddp(bucket_capacity=100), tensor()), "dp=1,tp=2", {"accumulate": 1},
    ),
    "fsdp, tensor": (lambda: compose(late("fsdp"), tensor()), "fsdp=1,tp=2", {}),
    "hybrid, tensor": (
        lambda: compose(late(("dp", "fsdp"), sharding_strategy="hybrid_shard"), tensor()),
        "dp=1,fsdp=2,tp=2",
        {"clip_norm": 0.1},
    ),
    "ddp, context": (lambda: compose(ddp(), context_parallel()), "dp=1,cp=2", {}),
    "pipeline, ddp, tensor": (
        lambda: compose(pipelined(2, num_microbatches=2), ddp(), tensor()),
        "pp=2,dp=1,tp=2",
        {"accumulate": None},
    ),
}  # fmt: skip


def losses(strategy, world, options):
    options = {"accumulate": 2, **options}
    options = {key: value for key, value in options.items() if value is not None}
    batch = {"x": TOKENS}
    step = build_train_step(
        decoder, optax.sgd(0.3), cross_entropy, strategy, world, batch=batch, **options
    )
    state, found = step.init(), []
    for _ in range(2):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.sample("ddp, tensor")
@pytest.mark.parametrize("row", ROWS)
def test_equals_one_device(row, make_world):
    strategy, mesh, options = ROWS[row]
    alone = losses(ddp(), make_world("dp=1"), {key: options[key] for key in options if "c" in key})
    np.testing.assert_allclose(losses(strategy(), make_world(mesh), options), alone, rtol=2e-6)
