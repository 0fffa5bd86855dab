"""Frozen weights in eight bits: the model with `scale * round(w / scale)` in place of `w`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import (
    Reduction,
    build_train_step,
    ddp,
    fsdp,
    load_checkpoint,
    pipelined,
    save_checkpoint,
    tensor_parallel,
    zero,
)
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.inspect import collectives
from axon_dist.ops.int8 import Int8, Int8Form, int8_form
from axon_dist.step import PortableForm
from axon_dist.step.model_spec import trainable_filter
from axon_dist.weights import load_weights, save_weights
from tests.one_device import trained

WIDTH, DEPTH = 32, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    """A table that is looked up and multiplied by, blocks, and vectors that stay as they are."""

    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


class Stacked(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nnx.vmap(Block)(nnx.Rngs(1).split(DEPTH))

    def __call__(self, x):
        loop = nnx.scan(lambda x, b: b(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(self.norm(loop(self.embed(x), self.blocks)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(64, WIDTH)(x)
        for number in range(DEPTH):
            x = x + nn.Dense(WIDTH, name=f"block_{number}")(jnp.tanh(x))
        return nn.Dense(64)(x)


def linen():
    return nnx.bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0)).lazy_init(BATCHES[0]["x"])


def loss_fn(model, batch):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


RANDOM = np.random.default_rng(0)
BATCHES = [
    {name: RANDOM.integers(0, 64, (16, 4), dtype=np.int32) for name in ("x", "y")} for _ in range(3)
]
SMALL = {"min_elements": 8}
SOME = "bias|norm"


def by_hand(path, leaf):
    """The rounded weight, in numpy; None for one that stays."""
    if leaf.ndim - ("blocks/up" in path or "blocks/down" in path) < 2:
        return None
    dim = -1 if path.endswith("embedding") else -2
    scale = np.abs(leaf).max(dim, keepdims=True) / np.float32(127)
    scale = np.asarray(jnp.asarray(scale, jnp.bfloat16), np.float32)
    return np.clip(np.round(leaf / scale), -127, 127) * scale


def rounded(make):
    """The plain model with its frozen matrices rounded."""
    model = make()
    is_trained = trainable_filter(SOME)
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        path = "/".join(map(str, keys))
        found = None if is_trained(keys, variable) else by_hand(path, np.asarray(variable[...]))
        if found is not None:
            nnx.update(model, nnx.from_flat_state([(keys, variable.replace(jnp.asarray(found)))]))
    return model


@functools.cache
def on_one_device(make=Net):
    wrt = trainable_filter(SOME)
    model = rounded(make)
    return trained(model, optax.sgd(0.5), loss_fn, BATCHES, wrt), model


def build(strategy, world, make=Net, **options):
    options = {"trainable": SOME, "frozen_dtype": "int8"} | options
    return build_train_step(make, optax.sgd(0.5), loss_fn, strategy, world, **options)


def assert_same(got, want, **bounds):
    leaves = lambda model: jax.tree.leaves(nnx.state(model, nnx.Param))
    for one, other in zip(leaves(got), leaves(want), strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 1e-5, "atol": 1e-6} | bounds))


def assert_trains(step, make=Net):
    want, model = on_one_device(make)
    state, got = step.init(), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        got.append(float(metrics["loss"]))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert_same(step.merge(state), model)
    loss = step.evaluate(state, BATCHES[0])["loss"]
    np.testing.assert_allclose(loss, loss_fn(model, BATCHES[0]), rtol=1e-5)
    return state


def own_bytes(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


class Shared(Net):
    """A layer of the last block is applied in front of the blocks, too."""

    def __init__(self):
        super().__init__()
        self.layer = self.blocks[DEPTH - 1].up


def test_a_loss_may_read_a_weight_in_eight_bits_outside_its_block(make_world):
    def reads(model, batch):
        return loss_fn(model, batch) + jnp.mean(model.layer(model.embed(batch["x"])) ** 2)

    options = {"trainable": SOME, "frozen_dtype": "int8", "batch": BATCHES[0]}
    build_train_step(Shared, optax.sgd(0.5), reads, fsdp(**SMALL), make_world("fsdp=2"), **options)
    form = int8_form("up/kernel", jax.ShapeDtypeStruct((32, 4), "float32"))
    numbers = form.narrow(jax.random.normal(jax.random.key(0), (32, 4)))
    weight = Int8(numbers["int8"], numbers["scale"], lambda x: form.widen(x.numbers, x.scale))
    variable = nnx.Param(weight)
    np.testing.assert_array_equal(variable[...], numbers["int8"] * np.float32(numbers["scale"]))


@pytest.mark.full
def test_fsdp_moves_and_holds_one_byte_of_a_frozen_weight(make_world):
    """Two gathers of a byte each, forward and backward; and a byte over the ranks between steps."""
    world = make_world("fsdp=8")
    step = build(fsdp(**SMALL), world)
    state = assert_trains(step)
    assert float(on_one_device()[0][0]) != float(loss_fn(Net(), BATCHES[0]))
    ledger = collectives(step.lower(BATCHES[0]).compile(), world.mesh)
    narrow = [row for row in ledger.rows if row.kind == "all-gather" and "s8" in row.dtypes]
    blocks, table = DEPTH * 4 * WIDTH * WIDTH, 64 * WIDTH
    moved = sum(row.wire_bytes * row.count for row in narrow)
    # In front of the first block nothing is trained, so that its first layer has no gradient to
    # multiply by its weights.
    again = blocks - 2 * WIDTH * WIDTH
    assert moved == pytest.approx((blocks + again + table) * 7 / 8, rel=1e-3)
    wide = [row for row in ledger.rows if row.kind == "all-gather" and "s8" not in row.dtypes]
    # Biases and scales: XLA:CPU moves bfloat16 as float32.
    vectors = DEPTH * 3 * WIDTH * (4 + 4) * 2 + 64 * 4
    assert sum(row.wire_bytes * row.count for row in wide) <= vectors
    scales = 2 * (DEPTH * 3 * WIDTH + 64)
    assert own_bytes(state.frozen) <= (blocks + table) / 8 + scales
    kept = state.frozen["blocks"][0]["up"]["kernel"]
    assert (kept["int8"].dtype, kept["scale"].dtype) == (jnp.int8, jnp.bfloat16)
    assert kept["int8"].sharding.spec == kept["scale"].sharding.spec == jax.P(None, "fsdp")


ROWS = {
    "ddp": ("dp=4", lambda: ddp(bucket_capacity=1000), Net, {"accumulate": 2}),
    "ddp, no buckets": ("dp=4", ddp, Net, {"accumulate": 2}),
}
MORE = {
    "linen": ("fsdp=4", lambda: fsdp(**SMALL), linen, {}),
    "by hand": ("fsdp=4", lambda: fsdp(**SMALL, reduction=Reduction(manual=True)), Net, {}),
    "per step": ("fsdp=4", lambda: fsdp(**SMALL, reduction=Reduction(per="step")), Net, {}),
    "stacked": ("fsdp=4", lambda: fsdp(**SMALL), Stacked, {}),
    "tp": ("tp=4", lambda: tensor_parallel({"up": "column", "down": "row"}), Net, {}),
    "zero1": ("dp=8", lambda: zero(1, **SMALL), Net, {}),
}
CELLS = [pytest.param(row, id=name) for name, row in ROWS.items()] + [
    pytest.param(row, id=name, marks=pytest.mark.full) for name, row in MORE.items()
]


@pytest.mark.full
@pytest.mark.sample("ddp, no buckets")
@pytest.mark.parametrize("row", CELLS)
def test_equals_the_rounded_model_on_one_device(row, make_world):
    axes, strategy, make, options = row
    assert_trains(build(strategy(), make_world(axes), make, **options), make)


@pytest.mark.full
def test_half_precision_reads_what_the_rounded_model_reads(make_world):
    """Widened and cast: as the float32 weight would be cast, rounded once."""
    step = build(fsdp(**SMALL), make_world("fsdp=2"), precision="bf16")
    plain = build(
        fsdp(**SMALL), make_world("fsdp=2"), rounded(Net), precision="bf16", frozen_dtype=None
    )
    states = [one(one.init(), BATCHES[0]) for one in (step, plain)]
    np.testing.assert_array_equal(states[0][1]["loss"], states[1][1]["loss"])
    jax.tree.map(np.testing.assert_array_equal, states[0][0].params, states[1][0].params)


@pytest.mark.full
def test_weights_of_files_and_checkpoints_are_taken_up(make_world, tmp_path):
    save_weights(Net(), tmp_path / "w.safetensors")
    step = build(fsdp(**SMALL), make_world("fsdp=2"), lambda: Net(nnx.Rngs(1)))
    state = load_weights(step, tmp_path / "w.safetensors")
    assert_same(step.merge(state), rounded(Net), rtol=0, atol=0)
    save_checkpoint(tmp_path / "c", state)
    again = load_checkpoint(tmp_path / "c", PortableForm(step).target)
    jax.tree.map(np.testing.assert_array_equal, state.frozen, again.frozen)
    path = "blocks/0/up/kernel"
    np.testing.assert_array_equal(step.weights(state)[path], rounded(Net).blocks[0].up.kernel[...])
    assert step.weight_targets[path].sharding.spec == jax.P(None, "fsdp")


@pytest.mark.parametrize(
    ("path", "shape", "stacked", "dim"),
    [
        ("up/kernel", (32, 64), 0, -2),
        ("experts/up", (8, 32, 64), 0, -2),
        ("query/kernel", (64, 4, 16), 0, -3),
        ("out/kernel", (4, 16, 64), 0, -2),
        ("blocks/up/kernel", (128, 32, 64), 1, -2),
        ("embed/embedding", (1000, 64), 0, -1),
        ("conv/kernel", (3, 3, 32, 64), 0, -2),
        ("conv/kernel", (3, 3, 3, 64), 0, None),
        ("blocks/norm/scale", (32, 64), 1, None),
        ("blocks/up/bias", (32, 64), 0, None),
        ("norm/weight", (64,), 0, None),
    ],
)
def test_weights_that_share_a_scale_lie_along_the_inputs(path, shape, stacked, dim):
    form = int8_form(path, jax.ShapeDtypeStruct(shape, "float32"), stacked)
    assert (form and form.dim) == dim


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_column_of_zeros_stays_one_and_others_are_off_by_half_a_scale(dtype):
    weight = jax.random.normal(jax.random.key(0), (32, 8)).at[:, 3].set(0).astype(dtype)
    form = Int8Form((32, 8), weight.dtype, -2)
    kept = form.narrow(weight)
    found = form.widen(kept["int8"], kept["scale"])
    assert found.dtype == weight.dtype
    off = np.abs(np.asarray(found, np.float32) - np.asarray(weight, np.float32))
    # A quarter more where the rounded scale leaves the largest weight out.
    bound = 0.76 * np.asarray(kept["scale"], np.float32)
    assert (off <= bound + 2**-8 * np.abs(np.asarray(weight, np.float32))).all()
    assert not found[:, 3].any()


def test_arrays_without_an_8_bit_form_are_refused(make_world):
    with pytest.raises(UnsupportedError, match=r"frozen_dtype='int8' and a pipeline over 'pp'"):
        build(pipelined(3, 3), make_world("pp=3"))
    with pytest.raises(ConfigError, match=r"no frozen parameter is a matrix .*: norm/scale; leave"):
        build(ddp(), make_world("dp=2"), trainable=("blocks", "embed"))
