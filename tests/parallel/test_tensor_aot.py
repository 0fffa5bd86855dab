"""FSDP × tensor parallelism as H100s would run it: the bytes on each axis against arithmetic.

With A bytes of activations per rank, a sum over t ranks moves 2 (t-1)/t A, a gather or a scatter
half of it. Forward a block has two sums, backward two, and under full rematerialisation the first
of the forward pass again: ten halves. With sequence parallelism each sum is a scatter and a gather,
and recomputing gathers the inputs of both column layers: eleven. The remat policy `sums` keeps what
was summed, for eight, and ten with sequence parallelism, where only the inputs are gathered again.
The token table and the head have two sums more.
"""

import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose
from axon_dist.inspect import collectives, expect_kernels, target_devices
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import Transformer, TransformerConfig, next_token_loss, num_params
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import context_parallel, fsdp, suggest_plan, tensor_parallel

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(missing_compiler("h100:8") is not None, reason="needs the CUDA compiler"),
]
LENGTH = 4096


def compiled(target, mesh, config, *strategies, length=LENGTH, batch=None, policy="nothing"):
    """The step of a transformer with Adam, compiled for a machine that is not here."""
    world = World.init(mesh, devices=list(target_devices(target)))
    data = fsdp(
        mixed_precision="bf16", activation_checkpointing=ActivationCheckpointing(policy=policy)
    )
    step = build_train_step(
        lambda: Transformer(config, rngs=nnx.Rngs(0)),
        optax.adam(1e-4),
        next_token_loss,
        compose(data, *strategies),
        world,
    )
    tokens = jax.ShapeDtypeStruct((batch or world.size, length + 1), jnp.int32)
    program = step.lower({"tokens": tokens}).compile()
    return world, program


@pytest.mark.parametrize(
    ("policy", "sequence", "halves"),
    [("nothing", False, 10), ("nothing", True, 11), ("sums", False, 8), ("sums", True, 10)],
)
@pytest.mark.parametrize(
    ("target", "preset", "shards", "ranks"), [("h100:8", "7b", 4, 2), ("h100:8x8", "8b", 8, 8)]
)
def test_bytes_on_each_axis(target, preset, shards, ranks, policy, sequence, halves):
    config = TransformerConfig.preset(preset, num_layers=4, attention="cudnn", max_length=LENGTH)
    plan = suggest_plan(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    world, program = compiled(
        target,
        f"fsdp={shards},tp={ranks}",
        config,
        tensor_parallel(plan, sequence=sequence),
        policy=policy,
    )
    ledger = collectives(program, world.mesh)
    activations = world.size // shards * LENGTH * config.width * 2
    half = (ranks - 1) / ranks * activations
    over_tp = (halves * config.num_layers + 4) * half
    over_fsdp = 3 * (shards - 1) / shards * 2 * num_params(config) / ranks
    assert ledger.total_wire_bytes(axis="tp") <= 1.05 * over_tp
    assert ledger.total_wire_bytes(axis="fsdp") <= 1.05 * over_fsdp
    assert ledger.total_wire_bytes(axis=("fsdp", "tp")) <= 0.001 * over_tp
    sums = ledger.total_wire_bytes("all-reduce", "tp")
    assert sums < 0.01 * over_tp if sequence else sums > 0.9 * over_tp


@pytest.mark.parametrize(
    ("target", "preset", "shards", "ranks"), [("h100:8", "7b", 4, 2), ("h100:8x8", "8b", 8, 8)]
)
def test_pieces_that_go_round_are_as_many_bytes_and_hide(target, preset, shards, ranks):
    """Eleven halves a block as before, and a tenth of the step's bytes is not hidden.

    Nothing is computed twice: of each attention one forward, one recomputed and one backward.
    """
    # As deep as the models are: nothing hides the transfer of the token table.
    config = TransformerConfig.preset(preset, attention="cudnn", max_length=LENGTH)
    plan = suggest_plan(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    rings = tensor_parallel(plan, sequence=True, rings=True)
    mesh = f"fsdp={shards},tp={ranks}"
    world, program = compiled(target, mesh, config, rings, batch=shards)
    ledger = collectives(program, world.mesh)
    half = (ranks - 1) / ranks * LENGTH * config.width * 2
    over_tp = (11 * config.num_layers + 4) * half
    assert ledger.total_wire_bytes(axis="tp") <= 1.05 * over_tp
    assert (
        ledger.total_wire_bytes("collective-permute", "tp") >= 0.95 * 11 * config.num_layers * half
    )
    assert ledger.exposed_bytes() <= 0.1 * ledger.total_wire_bytes()
    expect_kernels(program, attention=3 * config.num_layers)


@pytest.mark.parametrize("kv_heads", [16, 4])
def test_a_ring_sends_the_least_and_makes_no_scores(kv_heads):
    """Keys and values once; backwards three arrays as wide as queries, or four as keys."""
    length, ranks = 65_536, 8
    config = TransformerConfig.preset(
        "1b", num_layers=1, num_kv_heads=kv_heads, vocab_size=1024, max_length=length
    )
    world, program = compiled(
        "h100:8", "fsdp=1,cp=8", config, context_parallel(), length=length, batch=1
    )
    text = program.as_text()
    queries = length // ranks * config.width * 2
    keys = queries * kv_heads // config.num_heads
    numbers = 2 * 4 * length // ranks * config.num_heads
    layer = (ranks - 1) * (2 * keys + min(4 * keys, 3 * queries + numbers))
    # The residual stream is distributed once, there and back.
    sent = collectives(program, world.mesh).by_kind()["collective-permute"]
    assert layer <= sent <= 1.02 * (layer + 2 * queries)
    # One's own keys, and two pairs of pieces in the first, the middle and the last rounds.
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 7
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 7
    tile = length // ranks // 2
    shapes = {tuple(map(int, x.split(","))) for x in re.findall(r"[a-z0-9]+\[([\d,]+)\]", text)}
    square = [s for s in shapes if sum(n % tile == 0 for n in s) > 1]
    assert not [s for s in square if math.prod(s) >= config.num_heads * tile * tile]


def test_memory_of_a_long_sequence_falls_with_the_ring():
    """32k tokens: everything except the gradients is 1/size."""
    config = TransformerConfig.preset("1b", num_layers=2, max_length=32_768, attention="einsum")
    gradients = 2 * num_params(config)
    used = []
    for target, size in (("h100:2", 2), ("h100:8", 8)):
        mesh = f"fsdp=1,cp={size}"
        _, program = compiled(target, mesh, config, context_parallel(), length=32_768, batch=1)
        used.append(program.memory_analysis().temp_size_in_bytes - gradients)
    assert used[1] <= 1.15 * used[0] / 4
