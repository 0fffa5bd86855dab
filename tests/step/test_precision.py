"""Mixed precision in a step: who has which dtype, and overflows that skip everywhere."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import GradScaler, MixedPrecision, World, build_train_step, ddp, fsdp, zero
from axon_dist.inspect import collectives
from axon_dist.models import MLP

WIDTH = 16


class NormNet(nnx.Module):
    """A layer, statistics of the batch, a layer."""

    def __init__(self, rngs, dtype=jnp.float32):
        self.inner = nnx.Linear(WIDTH, 24, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.outer = nnx.Linear(24, 4, param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.norm(self.inner(x))))


def make_mlp():
    return MLP((WIDTH, 24, 4), rngs=nnx.Rngs(0))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(step=0, samples=16):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(samples, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :4])}


def build(model=make_mlp, strategy=None, ranks=4, **options):
    world = World.emulate(ranks)
    return build_train_step(
        model(), optax.adam(1e-2), options.pop("loss", loss_fn), strategy or ddp(), world, **options
    )


def losses(step, num_steps=4):
    state, found = step.init(), []
    for number in range(num_steps):
        state, metrics = step(state, batch_of(number))
        found.append(float(metrics["loss"]))
    return found, state


@pytest.fixture(scope="module")
def float32():
    return losses(build())[0]


@pytest.mark.sample("fsdp-True")
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        (ddp(), "bf16"),
        (ddp(), True),
        (ddp(), "fp16"),
        (zero(2, min_elements=8), "bf16"),
        (fsdp(axes=("dp",), min_elements=8), "bf16"),
        (fsdp(axes=("dp",), min_elements=8), True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_losses_follow_those_of_float32(float32, strategy, precision):
    # The first scale by default is high enough for a step to be skipped.
    scaler = GradScaler(init_scale=1024.0) if precision == "fp16" else None
    found, state = losses(build(strategy=strategy, precision=precision, scaler=scaler))
    assert found == pytest.approx(float32, rel=2e-2)
    assert found != float32
    kept = (state.params, state.opt_state)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(kept) if leaf.ndim}
    assert dtypes == {jnp.dtype("float32")}


def operand_dtypes(jaxpr_text, primitive):
    return set(re.findall(rf":(\w+)\[[^\]]*\](?:\{{[^}}]*\}})? = {primitive}\[", jaxpr_text))


@pytest.mark.parametrize(
    ("precision", "products"), [("bf16", {"bf16"}), ("fp16", {"f16"}), (None, {"f32"})]
)
def test_matrix_products_are_computed_in_the_compute_dtype(precision, products):
    step = build(precision=precision)
    text = str(step.programs.step.trace(step.init(), step.place(batch_of())).jaxpr)
    assert operand_dtypes(text, "dot_general") == products


@pytest.mark.parametrize(
    ("precision", "wire"),
    [
        (MixedPrecision(compute="bfloat16", reduce="float32"), "f32"),
        (MixedPrecision(compute="float32", reduce="float16"), "f16"),
        ("fp16", "f32"),
    ],
)
def test_gradients_cross_the_wire_in_the_reduce_dtype(precision, wire):
    text = build(precision=precision).lower(batch_of()).as_text()
    reduced = re.findall(r'"stablehlo.all_reduce".*?\}\) : \(tensor<([^>]*)>', text, re.DOTALL)
    matrices = {shape.rsplit("x", 1)[1] for shape in reduced if shape.count("x") == 2}
    assert matrices == {wire}


@pytest.mark.full
@pytest.mark.sample("1")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_storage_dtypes_hold_from_step_to_step(accumulate):
    precision = MixedPrecision(param="bfloat16", compute="bfloat16", buffer="bfloat16")
    step = build(lambda: NormNet(nnx.Rngs(0)), precision=precision, accumulate=accumulate)
    first = jax.tree.map(lambda x: x.dtype, step.abstract_state)
    found, state = losses(step, 2)
    assert jax.tree.map(lambda x: x.dtype, state) == first
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state.buffers)} == {jnp.dtype("bfloat16")}
    expected, _ = losses(build(lambda: NormNet(nnx.Rngs(0)), accumulate=accumulate), 2)
    assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.full
def test_without_a_precision_a_model_keeps_its_own_dtypes():
    make = lambda: NormNet(nnx.Rngs(0), jnp.bfloat16)
    model = make()
    batch = batch_of()
    expected = float(loss_fn(model, batch))
    found, state = losses(build(make), 1)
    assert found == pytest.approx([expected], rel=1e-2)
    own = [x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))]
    assert {str(dtype) for dtype in own} == {"bfloat16", "float32"}
    assert [x.dtype for x in jax.tree.leaves(state.params)] == own


# The loss scale


def exploding(model, batch):
    """Samples with a flag lead to gradients that are not finite."""
    error = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.mean(error * jnp.where(batch["bad"] > 0, jnp.inf, 1.0))


def with_flag(step=0, bad=None):
    flags = np.zeros(16, np.float32)
    if bad is not None:
        flags[bad] = 1
    return batch_of(step) | {"bad": flags}


@pytest.fixture(scope="module", params=["ddp", "zero3"])
def scaled(request):
    strategy = {"ddp": ddp(), "zero3": zero(3, min_elements=8)}[request.param]
    scaler = GradScaler(init_scale=1024.0, growth_interval=2)
    return build(strategy=strategy, precision="fp16", loss=exploding, scaler=scaler)


@pytest.mark.sample("zero3")
def test_the_scale_is_part_of_the_state(scaled):
    state = scaled.init()
    assert float(state.scaler.scale) == 1024.0
    leaves = jax.tree.leaves(state)
    assert any(leaf is state.scaler.scale for leaf in leaves)


def test_float16_has_a_scale_by_default():
    assert build(precision="fp16").options.scaler == GradScaler()
    assert build(precision="bf16").options.scaler is None


@pytest.mark.sample("zero3-15")
@pytest.mark.parametrize("bad", [0, 15])
def test_an_overflow_on_one_rank_skips_the_step_on_all(scaled, bad):
    state = scaled.init()
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = scaled(state, with_flag(0, bad))
    after = jax.device_get((state.params, state.opt_state))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old, new)
    assert float(metrics["loss_scale"]) == float(state.scaler.scale) == 512.0
    assert bool(metrics["gradient_overflow"])
    assert (int(state.scaler.skipped), int(state.scaler.good_steps)) == (1, 0)
    for leaf in jax.tree.leaves(state.params):
        if leaf.sharding.is_fully_replicated:
            copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
            assert all((copy == copies[0]).all() for copy in copies)


@pytest.mark.sample("zero3")
def test_training_goes_on_and_the_scale_grows_again(scaled):
    state = scaled.init()
    state, _ = scaled(state, with_flag(0, 3))
    kept = jax.device_get(state.params)
    scales = []
    for number in range(3):
        state, metrics = scaled(state, with_flag(number))
        scales.append(float(metrics["loss_scale"]))
        assert not bool(metrics["gradient_overflow"])
    assert scales == [512.0, 1024.0, 1024.0]
    moved = [
        np.abs(np.asarray(new) - old).max()
        for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(kept), strict=True)
    ]
    assert min(moved) > 0


def test_no_host_is_asked(scaled):
    state, placed = scaled.init(), scaled.place(with_flag(0, 2))
    state, _ = scaled(state, placed)
    with jax.transfer_guard("disallow"):
        state, _ = scaled(state, placed)
    assert int(state.scaler.skipped) == 2


@pytest.mark.full
def test_the_scale_changes_no_gradient():
    """Scaled by a power of two and back, in float32, gradients keep their bits."""
    plain = build()
    scaled = build(scaler=GradScaler(init_scale=2.0**10))
    pairs = [step.gradients(step.init(), batch_of())[0] for step in (plain, scaled)]
    for want, got in zip(*map(jax.tree.leaves, pairs), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.sample("1-1")
@pytest.mark.parametrize(("stage", "accumulate"), [(1, 1), (2, 2)])
def test_ranks_that_split_moments_split_parameters_and_gather_them_once(stage, accumulate):
    """Float32 masters lie with their moments, and are gathered once per step."""
    world = World.emulate(4, "dp=4")
    make = lambda: nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    built = lambda precision: build_train_step(
        make, optax.adam(1e-2), loss_fn, zero(stage), world,
        accumulate=accumulate, precision=precision,
    )  # fmt: skip
    batch = {"x": np.ones((16, 64), np.float32)}
    mixed, single = built("bf16"), built(None)
    assert mixed.state_shardings.params["kernel"].shard_shape((64, 64)) == (16, 64)
    assert mixed.abstract_state.params["kernel"].dtype == jnp.float32
    assert single.state_shardings.params["kernel"].is_fully_replicated
    ledger = collectives(mixed.lower(batch).compile(), world.mesh).select("all-gather")
    gathers = [row for row in ledger if row.bytes_out >= 2 * 64 * 64]
    # CPUs gather float32 for bfloat16; what GPUs send is tested where their compiler is.
    assert [row.count for row in gathers] == [1]


def test_frozen_parameters_need_no_gather():
    world = World.emulate(4, "dp=4")
    make = lambda: nnx.Sequential(*(nnx.Linear(64, 64, rngs=nnx.Rngs(0)) for _ in range(2)))
    loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    step = build_train_step(
        make, optax.adam(1e-2), loss_fn, zero(1), world, precision="bf16", trainable="layers/0"
    )
    assert not step.state_shardings.params["layers"][0]["kernel"].is_fully_replicated
    assert step.state_shardings.frozen["layers"][1]["kernel"].is_fully_replicated


class Drawing(nnx.Module):
    """Draws from what it is given, and counts its calls in a variable that it is given."""

    def __init__(self):
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5)
        self.rngs = nnx.Rngs(dropout=3)
        self.calls = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x, calls, *, rngs):
        calls.set_value(calls[...] + 1)
        return self.dropout(self.layer(x), rngs=rngs), calls


def two_draws(model, batch):
    one, calls = model(batch["x"], model.calls, rngs=model.rngs)
    other, calls = model(batch["x"], calls, rngs=model.rngs)
    alike = jnp.mean(jnp.mean((one == 0) == (other == 0), -1))
    return jnp.mean(one**2), {"alike": alike, "calls": calls[...]}


@pytest.mark.sample("bf16")
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_what_a_call_changes_in_its_arguments_stays(precision):
    step = build(Drawing, loss=two_draws, ranks=2, precision=precision)
    state, found = step.init(), []
    for number in range(3):
        state, metrics = step(state, batch_of())
        found.append(float(metrics["loss"]))
        # Two independent masks agree at half of the elements.
        assert 0.25 < float(metrics["alike"]) < 0.75
        assert float(metrics["calls"]) == 2 * (number + 1)
    assert int(state.buffers["rngs"]["dropout"]["count"]) == 6
    assert len(set(found)) == 3
