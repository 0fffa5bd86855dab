"""Experts as H100s would run them: the bytes on each axis against arithmetic.

With A bytes of tokens on each of c ranks, a ring gathers them and what comes back for the results,
and scatters the sums of both: 2 (c - 1) A each; gates and numbers of experts, G bytes each, are
gathered forward, and the gradients of gates scattered. Slots of S bytes go there and back, in both
passes: 4 (c - 1)/c S. All that is no expert is replicated over the axis, and its gradients summed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose
from axon_dist.inspect import collectives, flops, target_devices
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import (
    ExpertConfig,
    Transformer,
    TransformerConfig,
    next_token_loss,
    num_params,
)
from axon_dist.ops.dropless import slot_sizes, usual_size
from axon_dist.ops.routing import slots_for
from axon_dist.parallel import expert_parallel, fsdp

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(missing_compiler("h100:8") is not None, reason="needs the CUDA compiler"),
]
LENGTH, WIDTH, HIDDEN, COUNT, PER_TOKEN, LAYERS, CAPACITY = 512, 256, 128, 16, 2, 2, 1.25
CONFIG = TransformerConfig(
    vocab_size=512,
    width=WIDTH,
    num_layers=LAYERS,
    num_heads=4,
    max_length=LENGTH,
    attention="cudnn",
    experts=ExpertConfig(count=COUNT, per_token=PER_TOKEN, width=HIDDEN, bias_rate=0.001),
)


def test_experts_cost_what_the_tokens_do_that_go_to_them():
    """Four times as many experts, of which as many are chosen: router and padding are more."""

    def slots(count):
        share = LENGTH * PER_TOKEN / count
        sizes = slot_sizes(LENGTH, share)
        return count * sizes[usual_size(sizes, share)]

    def operations(count):
        experts = dataclasses.replace(CONFIG.experts, count=count)
        config = dataclasses.replace(CONFIG, experts=experts)
        world = World.init("fsdp=8", devices=list(target_devices("h100:8")))
        make = lambda: Transformer(config, rngs=nnx.Rngs(0))
        step = build_train_step(
            make, optax.sgd(0.1), next_token_loss, fsdp(), world, precision="bf16"
        )
        tokens = jax.ShapeDtypeStruct((world.size, LENGTH + 1), jnp.int32)
        return flops(step.lower({"tokens": tokens}).compile()).high

    # Two operations for each number of a matrix, forward, again and twice backward.
    experts, router = 4 * 2 * 3 * WIDTH * HIDDEN, 3 * 2 * WIDTH
    more = LAYERS * (experts * (slots(32) - slots(8)) + router * LENGTH * (32 - 8))
    assert operations(32) - operations(8) == pytest.approx(more, rel=0.1)


@pytest.mark.parametrize(
    ("target", "mesh", "shards", "ranks", "form"),
    [
        ("h100:8", "ep=8", 1, 8, "ring"),
        ("h100:8", "fsdp=2,ep=4", 2, 4, "ring"),
        ("h100:8", "fsdp=2,ep=4", 2, 4, "all_to_all"),
        ("h100:8x8", "fsdp=8,ep=8", 8, 8, "ring"),
        ("h100:8x8", "fsdp=8,ep=8", 8, 8, "all_to_all"),
    ],
)
def test_bytes_on_each_axis(target, mesh, shards, ranks, form):
    world = World.init(mesh, devices=list(target_devices(target)))
    capacity = CAPACITY if form == "all_to_all" else None
    split = expert_parallel(form, capacity)
    step = build_train_step(
        lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)),
        optax.adam(1e-4),
        next_token_loss,
        split if shards == 1 else compose(fsdp(), split),
        world,
        precision="bf16",
    )
    tokens = jax.ShapeDtypeStruct((world.size, LENGTH + 1), jnp.int32)
    ledger = collectives(step.lower({"tokens": tokens}).compile(), world.mesh)
    experts = LAYERS * COUNT * 3 * WIDTH * HIDDEN
    dense = num_params(CONFIG) - experts
    activations, gates = LENGTH * WIDTH * 2, LENGTH * PER_TOKEN * 4
    slots = COUNT * slots_for(LENGTH, PER_TOKEN, COUNT, CAPACITY) * WIDTH * 2
    is_ring = form == "ring"
    want = {
        ("all-gather", "ep"): is_ring * LAYERS * (ranks - 1) * 2 * (activations + gates),
        ("reduce-scatter", "ep"): is_ring * LAYERS * (ranks - 1) * (2 * activations + gates),
        ("all-to-all", "ep"): (not is_ring) * LAYERS * 4 * (ranks - 1) / ranks * slots,
        ("all-reduce", "ep"): 2 * (ranks - 1) / ranks * 2 * dense / shards,
    }
    if shards > 1:
        held = (shards - 1) / shards * 2
        want["reduce-scatter", "fsdp"] = held * (dense + experts / ranks)
    for (kind, axis), count in want.items():
        got = ledger.total_wire_bytes(kind, axis)
        assert got == pytest.approx(count, rel=0.02), f"{kind} over {axis}"
