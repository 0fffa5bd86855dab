"""A traced step says what the compiled one needs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, fsdp
from axon_dist.inspect import report, trace_step
from axon_dist.mesh import abstract_world
from axon_dist.mesh.chips import hardware
from axon_dist.mesh.rates import rates_of
from axon_dist.models import (
    ExpertConfig,
    ResNet,
    ResNetConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)
from axon_dist.parallel import STRATEGIES, compose, estimate
from axon_dist.planner import Candidate, candidate_for, read_program, workload_of


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def make():
    return Tower(nnx.Rngs(0))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


BATCH = {name: jax.ShapeDtypeStruct((2048, 256), jnp.float32) for name in "xy"}


def read(world, names, platform, **options):
    strategy = compose(*(STRATEGIES[name](make, world) for name in names))
    step = build_train_step(make, optax.adam(1e-3), loss_fn, strategy, world, **options)
    program, arguments = trace_step(step, BATCH)
    count = len(jax.tree.leaves(step.abstract_state))
    return step, read_program(program, arguments, count, dict(world.mesh.shape), platform)


@pytest.mark.sample("full_shard")
@pytest.mark.parametrize("name", ["ddp", "full_shard"])
def test_a_reading_is_near_the_compiled_step(name):
    world = World.emulate(8)
    step, reading = read(world, [name], "cpu")
    found = report(step.lower(BATCH).compile(), world.mesh)
    assert reading.state + reading.batch == found.memory.arguments
    assert reading.peak == pytest.approx(found.memory.peak, rel=0.2)
    assert reading.wire_bytes == pytest.approx(found.collectives.total_wire_bytes(), rel=0.02)
    assert reading.flops == pytest.approx(found.flops.high)
    abstract = read(abstract_world("dp=8", 8, "cpu"), [name], "cpu")[1]
    assert abstract == reading


@pytest.mark.parametrize(
    ("name", "gathers", "scatters"),
    # The backward pass needs the first kernel no more: nothing is differentiated by the input.
    [("zero1", 1, 1), ("zero2", 1, 1), ("full_shard", 5 / 3, 1)],
)
def test_bytes_are_those_of_the_papers(name, gathers, scatters):
    _, reading = read(abstract_world("dp=8", 8, "gpu"), [name], "gpu", precision="bf16")
    kernels = 2 * 3 * 256 * 256
    sizes = {"all-gather": 0.0, "reduce-scatter": 0.0}
    for sent, times in reading.sends:
        if sent.kind in sizes:
            sizes[sent.kind] += sent.num_bytes * times
    assert sizes["all-gather"] == pytest.approx(gathers * kernels, rel=0.01)
    assert sizes["reduce-scatter"] == pytest.approx(scatters * kernels, rel=0.01)


def test_masters_are_split_in_every_account():
    """ZeRO-1 in bfloat16: the traced step and `estimate` agree."""
    world = abstract_world("dp=8", 8, "gpu")
    step, reading = read(world, ["zero1"], "gpu", precision="bf16")
    theirs = estimate(step.strategy, step.model_spec.params, world.mesh, optax.adam(1e-3))
    state = theirs.param_memory_bytes + theirs.optim_memory_bytes
    assert reading.state == pytest.approx(state, abs=8)  # but for what counts steps


def test_a_slow_axis_makes_a_step_longer():
    _, reading = read(abstract_world("dp=2,tp=4", 8, "gpu"), ["ddp"], "gpu")
    fast = reading.step_time(hardware("h100"), "float32")
    wires = dataclasses.replace(hardware("h100"), link=1e9)
    slow = reading.step_time(wires, "float32")
    assert slow.total > fast.total
    for cost in (fast, slow):
        # A transfer that compute hides takes processors from it.
        lost = rates_of(hardware("h100")).slowdown(cost.communication - cost.exposed)
        assert lost > 0
        assert cost.exposed == pytest.approx(max(0.0, cost.communication - (cost.compute - lost)))


@pytest.mark.full
@pytest.mark.sample("<lambda>-2-False")
@pytest.mark.parametrize(
    ("model", "num_layers", "has_attention"),
    [
        (lambda: ResNet(ResNetConfig.preset("tiny"), rngs=nnx.Rngs(0)), 2, False),
        (lambda: ViT(ViTConfig.preset("tiny"), rngs=nnx.Rngs(0)), 2, True),
    ],
)
def test_any_model_is_a_workload(model, num_layers, has_attention):
    batch = {
        "x": jax.ShapeDtypeStruct((64, 16, 16, 3), jnp.float32),
        "y": jax.ShapeDtypeStruct((64,), jnp.int32),
    }
    work = workload_of(model, classification_loss, batch, precision="bf16")
    params = nnx.state(nnx.eval_shape(model), nnx.Param)
    assert work.num_params == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert work.num_layers == num_layers
    assert work.has_attention is has_attention
    assert work.global_batch == 64
    half = {name: jax.ShapeDtypeStruct((32, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    few = workload_of(model, classification_loss, half, precision="bf16")
    assert work.flops == pytest.approx(2 * few.flops)
    assert not work.is_worth_trying(1, num_layers + 1, 1)
    assert work.is_worth_trying(1, 1, 2) is has_attention


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_useful_flops_are_zero_where_a_program_does_not_tell_them(platform):
    batch = {"tokens": jax.ShapeDtypeStruct((2, 17), jnp.int32)}
    sizes = {"num_layers": 1, "width": 16, "num_heads": 2, "vocab_size": 16, "max_length": 16}

    def useful(model, loss_fn, batch):
        make = lambda: model(rngs=nnx.Rngs(0))
        return workload_of(make, loss_fn, batch, "bf16", platform)

    # Half of the pairs of positions are masked, whether a kernel skips them or not.
    causal = functools.partial(Transformer, TransformerConfig(**sizes))
    work = useful(causal, next_token_loss, batch)
    assert (work.useful_flops, work.has_attention) == (0, True)
    # A grouped product is priced as that of all its groups on some platforms.
    groups = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    work = useful(Grouped, lambda model, batch: jnp.mean(model(batch["x"])), {"x": groups})
    assert (work.useful_flops, work.flops > 0) == (0, True)
    plain = functools.partial(nnx.Linear, 4, 4, use_bias=False)
    work = useful(plain, lambda model, batch: jnp.mean(model(batch["x"])), {"x": groups})
    assert work.useful_flops == work.flops > 0


class Grouped(nnx.Module):
    """A product in two groups."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jnp.ones((2, 4, 4)))

    def __call__(self, x):
        return jax.lax.ragged_dot(x, self.kernel[...].astype(x.dtype), jnp.array([4, 4]))


def test_context_ranks_are_devices_too():
    plan = Candidate(strategy="ddp", dp=2, cp=4)
    assert plan.num_devices == 8
    assert plan.name == "cp + ddp"
    assert plan.to_config()["parallel"] == {"ddp": {}, "context": {}}
    assert str(candidate_for("ddp", 1, cp=2).mesh) == "dp=1,cp=2"


def test_sums_of_experts_are_scattered_inside_a_node_and_added_between():
    """An all-reduce over `dp` and `fsdp` of which a rank keeps its slice alone, as XLA parts it."""
    experts = ExpertConfig(count=4, per_token=2, width=64)
    config = TransformerConfig(64, width=64, num_layers=1, num_heads=2, experts=experts)
    model = lambda: Transformer(config, rngs=nnx.Rngs(0))
    world = abstract_world("dp=2,fsdp=4", 8, "gpu")
    strategy = fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=1)
    step = build_train_step(model, optax.sgd(1.0), next_token_loss, strategy, world)
    batch = {"tokens": np.zeros((8, 17), np.int32)}
    program, arguments = trace_step(step, batch)
    num_state = len(jax.tree.leaves(step.abstract_state))
    sends = read_program(program, arguments, num_state, dict(world.mesh.shape), "gpu").sends
    matrix = 4 * 64 * 64 * 4
    sums = {(s.kind, s.axes, s.num_bytes) for s, _ in sends if s.kind != "all-gather"}
    assert ("reduce-scatter", ("fsdp",), matrix) in sums
    assert ("all-reduce", ("dp",), matrix // 4) in sums
    assert not any(size >= matrix for kind, axes, size in sums if axes == ("dp", "fsdp"))
