"""Pipelines as GPUs and TPUs would run them: memory that does not grow with microbatches.

Interleaved 1F1B on S ranks with two chunks keeps up to 3S - 1 chunks in flight, so that with 8
microbatches on 8 ranks it is not yet at its peak: its rows have four ranks.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, pipelined
from axon_dist.inspect import target_devices
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import tensor_parallel

pytestmark = pytest.mark.aot
TENSOR = {"(q|k|v|gate|up)$": "column", "(out|down)$": "row"}


def temp(target, mesh, count, *strategies):
    """Bytes of temporary memory of a step, compiled for a machine that is not here."""
    if missing := missing_compiler(target):
        pytest.skip(missing)
    config = TransformerConfig(
        vocab_size=512, width=256, num_layers=8, num_heads=4, ffn_width=1024, max_length=128
    )
    world = World.init(mesh, devices=list(target_devices(target)))
    step = build_train_step(
        lambda: Transformer(config, rngs=nnx.Rngs(0)),
        optax.adam(1e-3),
        next_token_loss,
        compose(*strategies),
        world,
    )
    ranks = 8 // world.mesh.shape["pp"]
    tokens = jax.ShapeDtypeStruct((2 * ranks * count, 129), jnp.int32)
    program = step.lower({"tokens": tokens}).compile()
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("schedule", "size", "other"),
    [
        ("1f1b", 8, None),
        ("zero_bubble_h1", 8, None),
        ("interleaved_1f1b", 4, "dp"),
        ("1f1b", 4, "tp"),
    ],
)
@pytest.mark.parametrize("target", ["h100:8", "v5p:2x2x2"])
def test_memory_does_not_grow_with_microbatches(target, schedule, size, other):
    mesh = f"pp={size},{other}={8 // size}" if other else f"pp={size}"
    others = {"dp": [ddp()], "tp": [tensor_parallel(TENSOR, sequence=True)], None: []}[other]
    few, many = (
        temp(target, mesh, count, pipelined(size, count, schedule), *others) for count in (8, 64)
    )
    assert many <= 1.02 * few
