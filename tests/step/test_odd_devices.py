"""Devices that do not divide the dims of a model: what a state looks like, and who reads it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import (
    Reduction,
    World,
    build_train_step,
    fsdp,
    load_checkpoint,
    save_checkpoint,
)
from axon_dist.checkpoint import export_safetensors, open_tensors, read_manifest
from axon_dist.core.errors import CheckpointError, ConfigError
from axon_dist.inspect import collectives, memory
from axon_dist.planner import read_step
from tests.drawn import drawn

WIDTH = 32
X = np.random.default_rng(0).normal(size=(120, WIDTH)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X)}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def mean_square(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make():
    return Net(nnx.Rngs(0))


@functools.cache
def step_of(ranks: int, model=None, **options):
    world = World.emulate(ranks, f"fsdp={ranks}")
    reduction = options.pop("reduction", Reduction())
    strategy = fsdp(min_elements=options.pop("min_elements", 8), reduction=reduction)
    model = drawn(make) if model is None else model
    return build_train_step(model, optax.adamw(1e-2), mean_square, strategy, world, **options)


@functools.cache
def stepped():
    """A step on five devices, and its state after a batch."""
    step = step_of(5)
    return step, step(step.init(), BATCH)[0]


@pytest.mark.full
def test_what_a_state_and_its_readers_show():
    step = step_of(5, make, ema=0.9)
    state, _ = step(step.init(), BATCH)
    kernel = state.params["layers"][0]["kernel"]
    assert kernel.shape == (35, WIDTH)
    assert kernel.addressable_shards[0].data.shape == (7, WIDTH)
    assert not np.asarray(kernel)[WIDTH:].any()
    assert state.padding.shapes["params/layers/0/kernel"] == (WIDTH, WIDTH)
    weights = step.weights(state)
    assert weights["layers/0/kernel"].shape == (WIDTH, WIDTH)
    np.testing.assert_array_equal(weights["layers/0/kernel"], np.asarray(kernel)[:WIDTH])
    np.testing.assert_array_equal(
        step.storage.to_model(state.params)["layers"][0]["kernel"], weights["layers/0/kernel"]
    )
    model = step.merge(state)
    assert model.layers[0].kernel.shape == (WIDTH, WIDTH)
    loss_of = nnx.jit(mean_square)
    loss = loss_of(model, BATCH)
    np.testing.assert_allclose(step.evaluate(state, BATCH)["loss"], loss, rtol=1e-6)
    averaged = loss_of(step.merge(state, ema=True), BATCH)
    np.testing.assert_allclose(step.evaluate(state, BATCH, ema=True)["loss"], averaged, rtol=1e-6)
    # Weights of a model that exists, and those of a state, start another run.
    again = step.init({path: jnp.array(x) for path, x in weights.items()})
    np.testing.assert_array_equal(again.params["layers"][0]["kernel"], kernel)
    given = step_of(5).init()
    np.testing.assert_array_equal(
        np.asarray(given.params["layers"][1]["kernel"])[:WIDTH],
        drawn(make).layers[1].kernel.get_value(),
    )


def assert_same_rows(x, y):
    """Compares arrays of which each may have more rows, of zeros, than the other."""
    x, y = np.asarray(x), np.asarray(y)
    common = tuple(slice(min(sizes)) for sizes in zip(x.shape, y.shape, strict=True))
    np.testing.assert_array_equal(x[common], y[common])
    assert np.abs(x).sum() == pytest.approx(np.abs(x[common]).sum(), rel=1e-6)


@pytest.mark.sample("sharded-on 3 and 8")
@pytest.mark.parametrize("numbers", [(8, 3), (1, 5)], ids=["on 3 and 8", "on 1 and 5"])
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_checkpoint_of_five_devices_is_read_on_any_number(tmp_path, kind, numbers):
    five, state = stepped()
    save_checkpoint(tmp_path / "c", state, type=kind)
    manifest = read_manifest(tmp_path / "c")
    assert manifest.leaves["params/layers/0/kernel"].shape == (WIDTH, WIDTH)
    want = five.weights(state)["layers/0/kernel"]
    moments = np.asarray(state.opt_state[0].mu["layers"][0]["kernel"])[:WIDTH]
    for ranks in numbers:
        step = step_of(ranks)
        restored = load_checkpoint(tmp_path / "c", step)
        np.testing.assert_array_equal(step.weights(restored)["layers/0/kernel"], want)
        of_layer = restored.opt_state[0].mu["layers"][0]["kernel"]
        np.testing.assert_array_equal(np.asarray(of_layer)[:WIDTH], moments)
        jax.tree.map(assert_same_rows, restored.opt_state, state.opt_state)
        params = load_checkpoint(tmp_path / "c", step, parts="params")
        assert params["layers"][0]["kernel"].shape == of_layer.shape
    step = step_of(3, ema=0.9)
    fresh = step.init_from(load_checkpoint(tmp_path / "c", step, parts="params"))
    assert int(fresh.step) == 0
    for is_average in (False, True):
        got = step.weights(fresh, ema=is_average)["layers/0/kernel"]
        np.testing.assert_array_equal(got, want)
    assert not np.any(np.asarray(fresh.opt_state[0].mu["layers"][0]["kernel"]))
    with pytest.raises(ConfigError, match=r"init_from got 1 parameters for 4 .* layers/1"):
        step.init_from({"layers": [{"kernel": want}]})


def test_exported_tensors_have_the_shapes_of_the_model(tmp_path):
    step, state = stepped()
    export_safetensors(tmp_path / "state.safetensors", state)
    save_checkpoint(tmp_path / "c", state)
    tensors = open_tensors(tmp_path / "state.safetensors")
    saved = read_manifest(tmp_path / "c").leaves
    assert {path: x.shape for path, x in tensors.items()} == {p: x.shape for p, x in saved.items()}
    for path, weight in step.weights(state).items():
        np.testing.assert_array_equal(tensors[f"params/{path}"], weight)
    mu = np.asarray(state.opt_state[0].mu["layers"][0]["kernel"])[:WIDTH]
    np.testing.assert_array_equal(tensors["opt_state/0/mu/layers/0/kernel"], mu)


def test_a_part_that_a_state_lacks_is_said(tmp_path):
    step = step_of(5)
    save_checkpoint(tmp_path / "c", step.init())
    for parts in ("nothing", ("params", "nothing"), "padding"):
        with pytest.raises(CheckpointError, match=r"got '.*'; the parts of a TrainState are step"):
            load_checkpoint(tmp_path / "c", step, parts=parts)


def test_replicated_leaves_are_reported():
    step = step_of(5, min_elements=100)
    assert {row.path for row in step.replicated_arrays} == {"layers/0/bias", "layers/1/bias"}
    assert sum(row.bytes for row in step.replicated_arrays) == 2 * 4 * WIDTH
    assert "whole on every device: 2 arrays of 256 B" in str(step)
    assert "min_elements=100" in str(step)
    assert step_of(5).replicated_arrays == ()


def padded_bytes(ranks: int) -> int:
    """Bytes of the parameters of `Net`, whose first dims are padded to a multiple of the ranks."""
    rows = -(-WIDTH // ranks) * ranks
    return 2 * 4 * (rows * WIDTH + rows)


@pytest.mark.sample("5")
@pytest.mark.parametrize("ranks", [3, 5, 6, 7])
def test_bytes_are_those_of_padded_arrays(ranks):
    """State by the compiled program and the reading of a plan, traffic by the ledger."""
    step, size = step_of(ranks, reduction=Reduction(manual=True)), padded_bytes(ranks)
    shapes = jax.eval_shape(lambda: {name: x[: 2 * ranks] for name, x in BATCH.items()})
    compiled = step.lower(shapes).compile()
    held = memory(compiled).arguments - 2 * 2 * 4 * WIDTH
    assert 3 * size / ranks <= held <= 1.01 * 3 * size / ranks + 100
    # As `axon plan` reads it, before anything is compiled.
    assert abs(read_step(step, shapes).state - held) <= 100
    claims = step.claims.params.bytes_per_device + step.claims.opt_state.bytes_per_device
    assert abs(claims - held) <= 100
    ledger, ring = collectives(compiled, step.world.mesh), (ranks - 1) / ranks
    # Gathered for each pass, and scattered to the owners.
    assert ledger.total_wire_bytes("all-gather") <= 1.01 * 2 * ring * size
    scattered = ledger.total_wire_bytes("reduce-scatter")
    assert 0.99 * ring * size <= scattered <= 1.01 * ring * size
    assert ledger.total_wire_bytes("all-reduce") < 100


def test_a_clipped_norm_is_that_of_the_model():
    """Rows of zeros change no norm; what is clipped to is the same on five devices and on one."""
    clipped = step_of(5, clip_norm=1e-3, metrics=("loss", "grad_norm"))
    grads = nnx.jit(nnx.grad(mean_square))(drawn(make), BATCH)
    want = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(grads)))
    _, metrics = clipped(clipped.init(), BATCH)
    assert float(metrics["grad_norm"]) == pytest.approx(want, rel=1e-6)


class Cube(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.zeros((4,) * 10))

    def __call__(self, x):
        return x * jnp.sum(self.w)


def test_large_arrays_that_no_dim_splits_are_warned_of():
    with pytest.warns(UserWarning, match=r"leaves 1 array of 4.19 MB whole on every device"):
        step = step_of(5, Cube)
    assert "no free dim of (4, 4" in str(step)


def test_no_whole_matrix_is_gathered_to_update_it():
    """The optimizer reads arrays without padding, and no device holds more than its rows of one."""
    step = step_of(5)
    text = step.lower(jax.eval_shape(lambda: BATCH)).compile().as_text()
    # Each weight once for each pass that reads it, and nothing for the update.
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) <= 2 * 4
    assert " all-to-all(" not in text
    assert " collective-permute(" not in text
