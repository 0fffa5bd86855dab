"""Compositions of ordinary strategies that once crashed or trained on wrong numbers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist import Reduction, World, build_train_step, compose, ddp, zero
from axon_dist.core.errors import DivisibilityError, StrategyConflictError, UnsupportedError
from axon_dist.models import next_token_loss
from axon_dist.parallel import (
    context_parallel,
    fsdp,
    pipelined,
    suggest_plan,
    tensor_parallel,
)
from tests.drawn import drawn

from .models import CASES, Case, mean_square, regression_batch, token_batch, transformer
from .reference import assert_close, train
from .rows import and_full, part

STEPS = 3
TRANSFORMER = {
    "width": 32, "ffn_width": 32, "vocab_size": 32, "max_length": 16, "num_heads": 4,
    "gated": False,
}  # fmt: skip


def equals_one_device(case, strategy, mesh, accumulate=1, optimizer=None, **options):
    """Trains a few steps on a mesh and on one device; returns the step and its last state."""
    make = optimizer or (lambda: optax.sgd(0.05, momentum=0.9))
    world = World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)
    options |= {} if strategy.pipeline else {"accumulate": accumulate}
    step = build_train_step(case.make(), make(), case.loss_fn, strategy, world, **options)
    want = train(case, make(), STEPS, accumulate)
    state = step.init()
    for number in range(STEPS):
        if strategy.pipeline is None:
            grads, _ = step.gradients(state, case.batch(number))
            assert_close(grads, want.grads[number], 3e-5, f"gradient of step {number}")
        state, metrics = step(state, case.batch(number))
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-5)
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(trained, want.params, 3e-5, "parameter")
    return step, state


def decoder(**changes):
    return Case(lambda: transformer(**{**TRANSFORMER, **changes}), next_token_loss, token_batch)


class Same(nnx.Module):
    """Returns its input, in place of a feed-forward."""

    def __call__(self, x):
        return x


def attention_alone(**changes):
    """A decoder whose blocks are nothing but attention: half of the program."""
    case = decoder(**changes)

    def make():
        model = case.make()
        for block in model.blocks:
            block.mlp = Same()
        return model

    return dataclasses.replace(case, make=lambda: drawn(make))


def by_plan(sequence=False):
    return tensor_parallel("transformer", sequence=sequence)


BF16 = {
    "ddp x tp": (lambda: compose(ddp(), by_plan()), "dp=2,tp=2", 2),
    "zero1 x tp": (lambda: compose(zero(1, min_elements=8), by_plan()), "dp=2,tp=2", 2),
    "buckets x tp": (lambda: compose(ddp(bucket_capacity=1000), by_plan()), "dp=2,tp=2", 1),
    "zero2 by hand x tp": (
        lambda: compose(zero(2, min_elements=8, reduction=Reduction(manual=True)), by_plan(True)),
        "dp=2,tp=2",
        2,
    ),
    "full_shard by hand x cp": (
        lambda: compose(
            fsdp(min_elements=8, reduction=Reduction(manual=True)), context_parallel("ulysses")
        ),
        "fsdp=2,cp=2",
        1,
    ),
    "ddp x ring": (lambda: compose(ddp(), context_parallel("ring")), "dp=2,cp=2", 2),
    "pp x cp x tp": (
        lambda: compose(pipelined(2, 2), context_parallel("ulysses"), by_plan()),
        "pp=2,cp=2,tp=2",
        2,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", part(BF16, ["buckets x tp"]))
def test_bf16_in_manual_regions_with_automatic_axes(name):
    """XLA:CPU ends the process over a bfloat16 reduction that is not widened."""
    make, mesh, accumulate = BF16[name]
    case, strategy = decoder(), make()
    world = World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)
    options = {} if strategy.pipeline else {"accumulate": accumulate}
    step = build_train_step(
        case.make(), optax.sgd(0.1), case.loss_fn, strategy, world, precision="bf16", **options
    )
    want = train(case, optax.sgd(0.1), 2, accumulate)
    state = step.init()
    for number in range(2):
        state, metrics = step(state, case.batch(number))
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=3e-3)


@pytest.mark.parametrize(
    ("mesh", "heads", "sequence"),
    and_full(
        [("pp=2,cp=2", 4, False)],
        [("pp=2,cp=2,tp=2", 8, True), ("pp=2,cp=2,tp=2", 4, False), ("pp=2,cp=4", 4, False)],
    ),
)
def test_pipelines_with_context_and_tensor_parallelism(mesh, heads, sequence):
    parts = [pipelined(2, 2), context_parallel("ulysses")]
    parts += [by_plan(sequence)] if "tp" in mesh else []
    equals_one_device(attention_alone(num_heads=heads), compose(*parts), mesh, 2)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ulysses", "ring"])
def test_heads_are_divided_by_tensor_ranks_once(mode):
    strategy = compose(ddp(), by_plan(), context_parallel(mode))
    equals_one_device(decoder(), strategy, "dp=2,cp=2,tp=2", 2)


OVER_POSITIONS = {
    "fsdp": (lambda axes: fsdp(axes=axes, min_elements=8), "fsdp=2,cp=2", "ring", 1),
    "zero1 once a step": (lambda axes: zero(1, axes, min_elements=8), "dp=2,cp=2", "ring", 2),
    "zero2 by hand": (
        lambda axes: zero(2, axes, min_elements=8, reduction=Reduction(manual=True)),
        "dp=2,cp=2",
        "ulysses",
        2,
    ),
    "fsdp by hand": (
        lambda axes: fsdp(axes=axes, min_elements=8, reduction=Reduction(manual=True)),
        "fsdp=2,cp=2",
        "ring",
        1,
    ),
    "no samples are split": (lambda axes: fsdp(axes=axes, min_elements=8), "cp=4", "ring", 1),
    "with tensor": (
        lambda axes: fsdp(axes=axes[:2], min_elements=8),
        "fsdp=2,cp=2,tp=2",
        "ring",
        1,
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", part(OVER_POSITIONS, ["fsdp"]))
def test_state_is_split_over_the_ranks_of_positions(name):
    make, mesh, mode, accumulate = OVER_POSITIONS[name]
    axes = tuple(axis.split("=")[0] for axis in mesh.split(","))
    parts = [make(axes), context_parallel(mode), *([by_plan()] if "tp" in mesh else [])]
    adam = lambda: optax.adam(1e-2)
    strategy = compose(*parts)
    step, state = equals_one_device(decoder(), strategy, mesh, accumulate, adam)
    assert "cp" not in strategy.batch_axes
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    ways = math.prod(step.world.mesh.shape[axis] for axis in axes if axis != "tp")
    assert min(x.size // x.addressable_shards[0].data.size for x in moments) == ways
    if strategy.params.split_axes:
        held = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
        program = step.lower(decoder().batch(0)).compile()
        arguments = program.memory_analysis().argument_size_in_bytes
        assert arguments < 1.2 * held / ways


@pytest.mark.full
def test_too_few_heads_advise_what_works():
    build = lambda *parts: equals_one_device(
        decoder(num_heads=2), compose(*parts, context_parallel("ulysses"), by_plan()), mesh, 2
    )
    mesh = "pp=2,cp=2,tp=2"
    with pytest.raises(DivisibilityError, match=r"2 heads .* over tp×cp=4; .* among \[1\](?!, or)"):
        build(pipelined(2, 2))
    mesh = "dp=2,cp=2,tp=2"
    with pytest.raises(DivisibilityError, match=r"among \[1\], or context mode 'ring'"):
        build(ddp())


class FusedBlock(nnx.Module):
    """Attention with one kernel for queries, keys and values, separated in three ways."""

    def __init__(self, how, rngs):
        self.norm, self.how = nnx.LayerNorm(16, rngs=rngs), how
        self.qkv, self.out = nnx.Linear(16, 48, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        y = self.qkv(self.norm(x))
        if self.how == "split":
            parts = [a.reshape(*x.shape[:2], 2, 8) for a in jnp.split(y, 3, -1)]
        elif self.how == "stacked":
            stacked = y.reshape(*x.shape[:2], 3, 2, 8)
            parts = [stacked[:, :, i] for i in range(3)]
        else:
            parts = jnp.split(y.reshape(*x.shape[:2], 6, 8), 3, 2)
        scores = jnp.einsum("bthk,bshk->bhts", *parts[:2]) / math.sqrt(8)
        mixed = jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, -1), parts[2])
        return x + self.out(mixed.reshape(x.shape))


class FusedNet(nnx.Module):
    """Blocks with fused kernels, over learnt positions."""

    def __init__(self, how):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (32, 16)))
        self.layers = nnx.List(FusedBlock(how, rngs) for _ in range(2))
        self.head = nnx.Linear(16, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "sequence"),
    and_full([("split", True)], [("stacked", False), ("heads", True), ("split", False)]),
)
def test_fused_kernels_in_pipelines_with_tensor_parallelism(how, sequence):
    case = Case(lambda: FusedNet(how), next_token_loss, token_batch)
    plan = suggest_plan(case.make(), jnp.zeros((4, 8), jnp.int32))
    strategy = compose(pipelined(2, 2), tensor_parallel(plan, sequence=sequence))
    _, state = equals_one_device(case, strategy, "pp=2,tp=2", 2)
    kernels = [x for x in jax.tree.leaves(state.params) if x.shape[-2:] == (16, 48)]
    assert all(x.addressable_shards[0].data.shape[-1] == 24 for x in kernels)
    assert kernels


@pytest.mark.full
@pytest.mark.parametrize("accumulate", part([1, 2], [2]))
def test_defaults_of_the_reduction_do_not_conflict(accumulate):
    case = CASES["batchnorm"]
    for first in (ddp(), zero(1, min_elements=8))[accumulate - 1 :]:
        both = compose(first, fsdp(min_elements=8))
        step, _ = equals_one_device(case, both, "dp=2,fsdp=2", accumulate)
        assert step.spec.reduction.per == "microbatch"
    said = compose(ddp(per="step"), fsdp(min_elements=8))
    step, _ = equals_one_device(case, said, "dp=2,fsdp=2", accumulate)
    assert step.spec.reduction.per == "step"


def test_different_values_for_one_setting_conflict():
    said = fsdp(reduction=Reduction(per="microbatch"))
    with pytest.raises(StrategyConflictError, match=r"per='step' in 'ddp' and per='microbatch' in"):
        compose(ddp(per="step"), said)
    with pytest.raises(StrategyConflictError, match=r"is dtype=.*float16.* in 'ddp' and dtype="):
        compose(ddp(reduce_dtype="float16"), fsdp(reduction=Reduction(dtype="bfloat16")))
    both = compose(ddp(bucket_capacity=10), zero(0, "fsdp", reduction=Reduction(manual=True)))
    assert both.reduction == Reduction(bucket_capacity=10, manual=True)


class AnnotatedNet(nnx.Module):
    """A feed-forward whose author has written the layout that a plan says too."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        init = lambda *names: nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
        self.up = nnx.Linear(16, 24, kernel_init=init(None, "tp"), rngs=rngs)
        self.down = nnx.Linear(24, 4, kernel_init=init("tp", None), rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


@pytest.mark.full
def test_equal_claims_of_metadata_and_plan_are_one():
    case = Case(AnnotatedNet, mean_square, regression_batch)
    with nnx.use_eager_sharding(False):
        plan = {"up$": "column", "down$": "row"}
        strategy = compose(ddp(), tensor_parallel(plan))
        _, state = equals_one_device(case, strategy, "dp=2,tp=2", 2)
        assert state.params["up"]["kernel"].sharding.spec == P(None, "tp")
        other = compose(ddp(), tensor_parallel({"up$": "row", "down$": "column"}))
        with pytest.raises(StrategyConflictError, match="mesh axis 'tp' is claimed for two dims"):
            equals_one_device(case, other, "dp=2,tp=2")


class ComplexBlock(nnx.Module):
    """A block with complex weights between real ones."""

    def __init__(self, rngs):
        draw = jax.random.normal(rngs.params(), (16, 16), dtype=jnp.complex64)
        self.turn, self.out = nnx.Param(0.3 * draw), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.out(jnp.real(x.astype(jnp.complex64) @ self.turn[...] ** 2))


class ComplexNet(nnx.Module):
    """Complex parameters inside and outside of blocks."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.phase = nnx.Param(jax.random.normal(rngs.params(), (16,), dtype=jnp.complex64))
        self.layers = nnx.List(ComplexBlock(rngs) for _ in range(2))
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.imag(x * self.phase[...])
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


COMPLEX = {
    "ddp": (lambda: ddp(), "dp=2", 1),
    "ddp, buckets x tp": (lambda: ddp(bucket_capacity=100), "dp=2,tp=2", 2),
    "ddp, wire named": (lambda: ddp(reduce_dtype="float32", bucket_capacity=50), "dp=2", 2),
    "zero2": (lambda: zero(2, min_elements=1), "dp=2", 2),
    "full_shard": (lambda: fsdp(min_elements=1), "fsdp=2", 1),
    "full_shard by hand": (
        lambda: fsdp(min_elements=1, reduction=Reduction(manual=True)),
        "fsdp=2",
        2,
    ),
    "pipeline": (lambda: compose(ddp(), pipelined(2, 2)), "dp=2,pp=2", 2),
    "pipeline x tp": (
        lambda: compose(zero(1, min_elements=1), pipelined(2, 2)),
        "dp=2,pp=2,tp=2",
        2,
    ),
}


@pytest.mark.full
@pytest.mark.sample("pipeline")
@pytest.mark.parametrize("name", part(COMPLEX, ["full_shard by hand", "pipeline"]))
def test_complex_parameters(name):
    make, mesh, accumulate = COMPLEX[name]
    case = Case(ComplexNet, mean_square, regression_batch)
    conjugate = optax.stateless(lambda grads, _: jax.tree.map(jnp.conj, grads))
    optimizer = lambda: optax.chain(conjugate, optax.sgd(1e-3, momentum=0.9))
    equals_one_device(case, make(), mesh, accumulate, optimizer)


class ConvNet(nnx.Module):
    """Dense, grouped and depthwise convolutions, one in a loop, one recomputed, one in a branch."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        conv = lambda groups: nnx.Conv(8, 8, (3,), feature_group_count=groups, rngs=rngs)
        self.dense, self.grouped, self.depthwise = conv(1), conv(2), conv(8)
        self.looped = nnx.Param(0.3 * jax.random.normal(rngs.params(), (2, 3, 1, 8)))
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.dense(x[:, :, None] * jnp.arange(1.0, 9.0)))
        x = jax.checkpoint(lambda kernel, x: self.convolve(kernel, x))(self.looped[0], x)
        # The predicate depends on no sample, so that microbatches add up to the batch.
        is_positive = jnp.sum(self.looped[...] ** 2) > 0
        x = jax.lax.cond(is_positive, self.depthwise, lambda x: x, self.grouped(x))
        x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(self.convolve(k, x)), None), x, self.looped[...])
        return self.out(x.mean(-1))

    @staticmethod
    def convolve(kernel, x):
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), "SAME", dimension_numbers=numbers, feature_group_count=8
        )


CONVOLUTIONS = {
    "ddp": (lambda: ddp(), "dp=2,tp=2", 1),
    "ddp, axes turned": (lambda: ddp(), "tp=2,dp=2", 1),
    "ddp per rank": (lambda: ddp(), "dp=2,tp=2", 2),
    "hybrid": (lambda: fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8), "dp=2,fsdp=2", 1),
    "full_shard": (lambda: fsdp(min_elements=8), "fsdp=2,tp=4", 1),
}


@pytest.mark.full
@pytest.mark.parametrize("name", part(CONVOLUTIONS, ["hybrid"]))
def test_convolutions_on_meshes_with_two_axes(name):
    """XLA multiplies the gradients of grouped kernels by the size of the other axis."""
    make, mesh, accumulate = CONVOLUTIONS[name]
    equals_one_device(Case(ConvNet, mean_square, regression_batch), make(), mesh, accumulate)


class OwnDerivative(nnx.Module):
    """A convolution in a function with a derivative of its own."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((3, 1, 1)))

    def __call__(self, x):
        run = jax.custom_vjp(lambda k, x: jnp.convolve(x[0], k[:, 0, 0], "same") * x)
        run.defvjp(lambda k, x: (run(k, x), (k, x)), lambda saved, ct: saved)
        return run(self.kernel[...], x)[:, :4]


def test_a_convolution_that_cannot_be_reached_is_refused():
    case = Case(OwnDerivative, mean_square, regression_batch)
    with pytest.raises(
        UnsupportedError, match=r"convolves inside 'custom_vjp_call.*one axis, such"
    ):
        equals_one_device(case, ddp(), "dp=2,tp=2")


@pytest.mark.full
@pytest.mark.parametrize("offload", ["params", "full"])
def test_a_pipeline_in_host_memory_is_merged(offload):
    strategy = compose(pipelined(2, 2), fsdp(min_elements=8, cpu_offload=offload))
    equals_one_device(decoder(), strategy, "pp=2,fsdp=2", 2)
