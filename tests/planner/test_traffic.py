import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from axon_dist import MixedPrecision, World
from axon_dist.core.errors import ConfigError
from axon_dist.inspect import collectives
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.ops.ring import ring_attention
from axon_dist.planner import (
    Arrangement,
    Workload,
    arrange,
    comm_bytes,
    context_bytes,
    expert_bytes,
    guess_shape,
    pipeline_bytes,
    sequence_bytes,
    tensor_bytes,
    transfers,
    workload_of,
)

NAN = math.nan


@pytest.mark.parametrize(("ranks", "dp", "fsdp"), [(2, 1, 1.5), (4, 1.5, 2.25), (8, 1.75, 2.625)])
def test_parameters_around_the_ring(ranks, dp, fsdp):
    assert comm_bytes("ddp", 1e9, ranks, 1) == dp * 1e9
    assert comm_bytes("zero1", 1e9, ranks, 1) == dp * 1e9
    assert comm_bytes("shard_grad_op", 1e9, ranks, 1) == dp * 1e9
    assert comm_bytes("full_shard", 1e9, ranks, 1) == fsdp * 1e9
    assert comm_bytes("ddp", 1e9, ranks) == 4 * dp * 1e9


@given(n=st.integers(1, 512), k=st.integers(1, 32))
def test_microbatches(n, k):
    once = (n - 1) / n
    moved = lambda name: comm_bytes(name, 1, n, 1, num_microbatches=k)
    assert moved("ddp") == moved("zero1") == pytest.approx(2 * once)
    assert moved("zero2") == pytest.approx((k + 1) * once)
    assert moved("zero3") == pytest.approx(3 * k * once)


@pytest.mark.parametrize("name", ["full_shard", "hybrid_shard"])
def test_weights_in_fp8_send_a_byte_where_they_are_gathered(name):
    """4 P in place of 6 P, but for the tables of tokens."""
    plan = Arrangement(strategy=name, dp=2 if name == "hybrid_shard" else 1, fsdp=8)
    moved = {}
    for gather in (None, "fp8"):
        work = dataclasses.replace(WORK, precision=MixedPrecision.fp8(gather=gather))
        moved[gather] = {t.kind: t.wire_bytes for t in transfers(plan, work) if t.axis == "fsdp"}
    shape, ring = WORK.shape, 7 / 8
    assert moved[None]["layers"] == pytest.approx(2 * 2 * shape.num_params * ring)
    saved = moved[None]["layers"] - moved["fp8"]["layers"]
    assert saved == pytest.approx(2 * shape.product_params * ring)
    assert shape.product_params == shape.num_params - shape.vocab_size * shape.width
    assert moved["fp8"]["gradients"] == moved[None]["gradients"]


@pytest.mark.full
def test_weights_that_may_travel_in_fp8_are_those_of_the_layers_that_do():
    model = lambda: Transformer(TransformerConfig.preset("tiny"), rngs=nnx.Rngs(0))
    batch = {"tokens": jax.ShapeDtypeStruct((8, 17), jnp.int32)}
    work = workload_of(model, next_token_loss, batch, precision=MixedPrecision.fp8(("mlp/",)))
    kernels = nnx.to_flat_state(nnx.state(nnx.eval_shape(model), nnx.Param))
    attention = [x.size for keys, x in kernels if "attention" in keys and "kernel" in keys]
    assert work.shape.product_params == sum(attention) > 0


def test_hybrid_adds_an_all_reduce_of_the_shards():
    expected = 3 * 7 / 8 + 2 * 3 / 4 / 8
    assert comm_bytes("hybrid_shard", 1, 8, 1, num_replicas=4) == pytest.approx(expected)


def test_activations_around_the_ring():
    assert tensor_bytes(1, num_layers=1, num_ranks=2) == 4  # 4 all-reduces of 2 (t-1)/t
    assert tensor_bytes(1, num_layers=1, num_ranks=2, remat=True) == 6
    assert sequence_bytes(1, num_layers=1, num_ranks=2) == 5
    assert pipeline_bytes(10, chunks=2) == 40
    assert expert_bytes(1, num_layers=2, num_ranks=4) == 24  # 4 (c - 1) A, the ring
    assert expert_bytes(1, num_layers=2, num_ranks=4, remat=True) == 36
    assert expert_bytes(1, 1, 4, per_token=2, capacity=1.0) == 6  # 4 (c - 1)/c k f A, all to all
    assert expert_bytes(1, 1, 4, per_token=4, capacity=2.0) == expert_bytes(1, 1, 4)
    assert context_bytes(1, num_layers=2, num_ranks=3) == pytest.approx(2 * 5 * 2 / 3)
    assert context_bytes(1, 1, 2, query_bytes=4 / 3) == context_bytes(1, 1, 2, query_bytes=8) == 3


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("tensor", 1, 8), {}, r"'tensor' moves activations .* ask tensor_bytes\(\)"),
        (("expert", 1, 8), {}, r"'expert' moves activations .* ask expert_bytes\(\)"),
        (("fsdq", 1, 8), {}, "unknown strategy 'fsdq'. Did you mean 'fsdp'"),
        (("ddp", 1, 0), {}, "got num_ranks=0; it must be an integer of at least 1"),
        (("ddp", 1, 1.5), {}, r"got num_ranks=1\.5; it must be an integer of at least 1"),
        (("ddp", 1, True), {}, "got num_ranks=True; it must be an integer of at least 1"),
        (("ddp", 1, NAN), {}, "got num_ranks=nan; it must be an integer of at least 1"),
        (("ddp", -1, 8), {}, "got num_params=-1; it must be a finite number above 0"),
        (("ddp", 0, 8), {}, "got num_params=0; it must be a finite number above 0"),
        (("ddp", NAN, 8), {}, "got num_params=nan; it must be a finite number above 0"),
        (("ddp", math.inf, 8), {}, "got num_params=inf; it must be a finite number above 0"),
        (("ddp", "7B", 8), {}, "got num_params='7B'; it must be a finite number above 0"),
        (("ddp", 1, 8, NAN), {}, "got bytes_per_element=nan; it must be a finite number above 0"),
        (("ddp", 1, 8, -4), {}, "got bytes_per_element=-4; it must be a finite number above 0"),
        (("ddp", 1, 8), {"num_microbatches": 0.5}, r"got num_microbatches=0\.5; it must be an int"),
        (("hybrid_shard", 1, 8), {"num_replicas": NAN}, "got num_replicas=nan; it must be an int"),
        (("ddp", 1, 8), {"num_replicas": 2}, "ddp got num_replicas=2; only hybrid_shard has"),
    ],
)
def test_impossible_questions(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        comm_bytes(*arguments, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tensor_bytes(-1, 1, 2), "got activation_bytes=-1; it must be a finite number"),
        (lambda: tensor_bytes(1, 1.5, 2), r"got num_layers=1\.5; it must be an integer"),
        (lambda: sequence_bytes(1, 1, 0), "got num_ranks=0; it must be an integer"),
        (lambda: pipeline_bytes(NAN), "got activation_bytes=nan; it must be a finite number"),
        (lambda: pipeline_bytes(1, NAN), "got chunks=nan; it must be an integer"),
        (lambda: context_bytes(math.inf, 1, 2), "got kv_bytes=inf; it must be a finite number"),
    ],
)
def test_impossible_activations(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


WORK = Workload(shape=guess_shape(1e9), global_batch=64)


@pytest.mark.parametrize("name", ["ddp", "zero1", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("count", [1, 4])
def test_transfers_add_up_to_the_closed_form(name, count):
    plan = arrange(name, 8, num_microbatches=count)
    moved = sum(transfer.wire_bytes for transfer in transfers(plan, WORK))
    assert moved == pytest.approx(comm_bytes(name, 1e9, 8, num_microbatches=count))


def test_transfers_of_hybrid_sharding():
    plan = Arrangement(strategy="hybrid_shard", dp=4, fsdp=8)
    moved = sum(transfer.wire_bytes for transfer in transfers(plan, WORK))
    assert moved == pytest.approx(comm_bytes("hybrid_shard", 1e9, 8, num_replicas=4))


def test_tensor_traffic_does_not_depend_on_microbatches():
    sizes = {
        sum(t.wire_bytes for t in transfers(Arrangement(tp=8, num_microbatches=k), WORK))
        for k in (1, 4, 64)
    }
    residual = 64 * WORK.shape.sequence_length * WORK.shape.width * 4
    assert sizes == {tensor_bytes(residual, WORK.shape.num_layers, 8)}


def test_neighbours_of_an_axis_are_as_far_apart_as_the_axes_within():
    plan = Arrangement(strategy="full_shard", pp=2, fsdp=4, tp=8, num_microbatches=4)
    assert {t.axis: t.stride for t in transfers(plan, WORK)} == {"fsdp": 8, "tp": 1, "pp": 32}


def test_one_device_is_silent():
    assert transfers(Arrangement(), WORK) == ()


@pytest.mark.sample("2")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_ring_attention_sends_what_its_formula_says(kv_heads):
    world, heads, width = World.emulate(4, "cp=4"), 4, 64
    shape = lambda heads: jax.ShapeDtypeStruct((1, 32, heads, width), jnp.float32)
    spec = PartitionSpec(None, "cp")
    attend = lambda *arrays: ring_attention(*arrays, "cp", True, is_dealt=True)
    run = jax.shard_map(attend, mesh=world.mesh, in_specs=spec, out_specs=spec)
    # Two programs: in one the compiler would see that both send the same keys, and send them once.
    forward = jax.jit(lambda *arrays: jax.vjp(run, *arrays))
    backward = jax.jit(lambda pull, cotangent: pull(cotangent))
    given = [shape(heads), shape(kv_heads), shape(kv_heads)]
    out, pull = jax.eval_shape(forward, *given)
    programs = forward.lower(*given).compile(), backward.lower(pull, out).compile()
    sent = sum(
        size
        for program in programs
        for kind, size in collectives(program, world.mesh).by_kind().items()
        if kind == "collective-permute"
    )
    size = lambda heads: 32 * heads * width * 4
    expected = context_bytes(size(kv_heads), 1, 4, query_bytes=size(heads))
    assert sent == pytest.approx(expected, rel=0.02)
