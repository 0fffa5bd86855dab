"""AdamW with 8-bit moments: the code, its errors, and the state of a step on devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from axon_dist import World, build_train_step, ddp, fsdp, load_checkpoint, save_checkpoint, zero
from axon_dist.core.errors import ConfigError
from axon_dist.core.tree import leaves_with_paths
from axon_dist.mesh import MeshSpec
from axon_dist.optim import DynamicCode, adamw_8bit, dequantize, quantize
from axon_dist.sharding import ByRule, LargestDim, Merge, optimizer_decisions
from axon_dist.sharding.policy import axes_of

CODES = {"signed": DynamicCode(True), "unsigned": DynamicCode(False)}


def table(signed):
    """The values of the paper, decade by decade: midpoints of equal parts of [0.1, 1]."""
    found = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        found += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(found)).astype(np.float32)


def reference(x, signed):
    """Codes and scales of the rows of an array, in blocks of 256 along the last dim."""
    values = table(signed)
    blocks = x.reshape(*x.shape[:-1], -1, 256)
    scales = np.abs(blocks).max(-1)
    rounded = np.abs((blocks / scales[..., None])[..., None] - values).argmin(-1)
    if not signed:
        rounded = np.where((blocks > 0) & (rounded == 0), 1, rounded)
    return rounded.reshape(x.shape), scales


@pytest.mark.parametrize("name", CODES)
def test_a_code_has_the_values_of_the_paper(name):
    code = CODES[name]
    values = table(code.signed)
    np.testing.assert_array_equal(code.values, values)
    np.testing.assert_array_equal(code.encode(jnp.asarray(values)), np.arange(256))
    np.testing.assert_allclose(code.decode(jnp.arange(256, dtype=jnp.uint8)), values, rtol=3e-7)


@pytest.mark.parametrize("name", CODES)
def test_rounds_to_the_nearest_value_of_a_block(name):
    code = CODES[name]
    x = np.random.default_rng(0).normal(size=(600, 512)) * 10.0 ** np.linspace(-8, 2, 600)[:, None]
    x[0] = 0.0
    x[1, 256:] = 0.0
    x = (x if code.signed else x**2).astype(np.float32)
    found = jax.jit(lambda x: quantize(x, code))(x)
    codes, scales = reference(np.where(x == 0, 1e-30, x), code.signed)
    np.testing.assert_array_equal(np.asarray(found.scales)[2:], scales[2:])
    is_zero = x == 0
    np.testing.assert_array_equal(np.asarray(found.codes)[~is_zero], codes[~is_zero])
    again = np.asarray(dequantize(found, code))
    assert not again[is_zero].any()
    # The error is at most half of the distance between two values, the largest being 0.9 / 64.
    assert np.abs(again - x).max() <= (0.0071 + 1e-6) * np.abs(x).max()
    assert code.signed or (again > 0)[~is_zero].all()


def test_blocks_that_do_not_divide_a_dim():
    x = np.random.default_rng(0).normal(size=(700, 300)).astype(np.float32)
    found = jax.jit(lambda x: quantize(x, CODES["signed"]))(x)
    assert found.scales.shape == (700, 2)
    np.testing.assert_array_equal(found.scales[:, 1], np.abs(x[:, 256:]).max(1))
    assert np.abs(dequantize(found, CODES["signed"]) - x).max() <= 0.0071 * np.abs(x).max()


SIZE = 128


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(SIZE, 4 * SIZE, rngs=rngs)
        self.down = nnx.Linear(4 * SIZE, SIZE, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


X = np.random.default_rng(0).normal(size=(24, SIZE)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(3 * X)}


@functools.cache
def net():
    return Net(nnx.Rngs(0))


def mean_square(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def optimizer():
    return adamw_8bit(1e-2, weight_decay=0.1)


@functools.cache
def one_device_programs(make):
    """The first parameters, and compiled functions that start and update an optimizer."""
    optimizer = make()
    graph, state = nnx.split(net(), nnx.Param)

    @jax.jit
    def step(params, opt_state):
        loss = lambda p: mean_square(nnx.merge(graph, p), BATCH)
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return nnx.to_pure_dict(state), jax.jit(optimizer.init), step


def on_one_device(num_steps, make):
    params, init, step = one_device_programs(make)
    opt_state, losses = init(params), []
    for _ in range(num_steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    return params, opt_state, losses


def test_trains_as_adamw_does():
    """The loss differs from that with float32 moments by at most 0.1% of the first loss."""
    _, state, losses = on_one_device(40, optimizer)
    _, full_state, full = on_one_device(40, lambda: optax.adamw(1e-2, weight_decay=0.1))
    assert full[-1] < 0.1 * full[0]
    assert max(np.abs(np.array(losses) - full)) < 2e-3 * full[0]
    sizes = [sum(x.nbytes for x in jax.tree.leaves(s)) for s in (state, full_state)]
    assert sizes[0] < 0.29 * sizes[1]


WAYS = {
    "ddp": (8, "dp=8", ddp),
    "zero1": (8, "dp=8", lambda: zero(1)),
    "fsdp": (8, "fsdp=8", fsdp),
    "fsdp 3": (3, "fsdp=3", fsdp),
    "fsdp 5": (5, "fsdp=5", fsdp),
}
DEFAULT = ("fsdp 3",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.full) for n in WAYS]
)
def test_a_step_on_devices_is_that_on_one(name, tmp_path):
    ranks, mesh, make = WAYS[name]
    batch = {k: np.concatenate([x] * 5)[: 24 if ranks != 5 else 120] for k, x in BATCH.items()}
    world = World.emulate(ranks, mesh)
    step = build_train_step(net(), optimizer(), mean_square, make(), world)
    state = step.init()
    for number in range(3):
        if number == 2:
            save_checkpoint(tmp_path / "c", state)
            state = load_checkpoint(tmp_path / "c", step)
        state, _ = step(state, batch)
    want, want_state, _ = on_one_device(3, optimizer)
    weights = step.weights(state)
    for path, x in leaves_with_paths(want):
        # A gradient that differs by rounding may change the code of a few elements by one.
        difference = np.abs(np.asarray(weights[path]) - x)
        assert difference.max() < 1e-3, path
        assert (difference > 2e-6).mean() < 1e-3, path
    largest = 0
    for (path, mine), theirs in zip(
        leaves_with_paths(state.opt_state), jax.tree.leaves(want_state), strict=True
    ):
        if theirs.size >= 4096:
            assert mine.dtype == jnp.uint8
            largest += 1
            share = mine.addressable_shards[0].data.size / mine.size
            assert share == (1 if name == "ddp" else 1 / ranks), path
    assert largest == 4


def test_scales_are_split_like_their_parameter():
    params = {"up": jax.ShapeDtypeStruct((512, 2048), "float32")}
    state = jax.eval_shape(adamw_8bit(1e-3).init, params)
    column = ByRule(((r"up$", PartitionSpec(None, "tp")),))
    for policy in (LargestDim(("fsdp",), 256), column, Merge((LargestDim(("fsdp",)), column))):
        mesh = MeshSpec(fsdp=4, tp=2)
        found = optimizer_decisions(policy, params, state, mesh)
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
        places = [(leaf.shape, decision.spec) for leaf, decision in pairs if leaf.ndim]
        assert {shape for shape, _ in places} == {(512, 2048), (2, 2048)}
        of_columns = {axes_of(spec, 1) for _, spec in places}
        assert of_columns == {axes_of(policy("up", (512, 2048), mesh), 1)} != {()}


def test_what_has_no_moments_of_8_bits_is_refused():
    with pytest.raises(ConfigError, match="'z', complex64") as error:
        adamw_8bit(1e-3).init({"z": jnp.zeros((64, 64), jnp.complex64)})
    assert error.value.code == "eight-bit-parameter"
    with pytest.raises(ConfigError, match="min_size"):
        adamw_8bit(1e-3, min_size=-1)


@pytest.mark.full
def test_devices_that_share_a_block_have_the_numbers_of_devices_that_do_not():
    """1001 does not divide by 8, so FSDP splits the other dim, along which blocks run."""
    batch = {"x": np.random.default_rng(0).normal(size=(8, 1001)).astype(np.float32)}
    loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2)
    make = lambda: nnx.Linear(1001, 256, use_bias=False, rngs=nnx.Rngs(0))
    kernels = {}
    for strategy, mesh in ((fsdp(), "fsdp=8"), (ddp(), "dp=8")):
        step = build_train_step(make, optimizer(), loss_fn, strategy, World.emulate(8, mesh))
        state = step.init()
        kernels[mesh] = state.params["kernel"].sharding.spec, []
        for _ in range(3):
            state, _ = step(state, batch)
            kernels[mesh][1].append(jax.device_get(step.weights(state)["kernel"]))
    (split, mine), (_, theirs) = kernels.values()
    assert split == PartitionSpec(None, "fsdp")
    difference = np.abs(np.array(mine) - np.array(theirs))
    assert difference.max() < 1e-3
    assert (difference > 2e-6).mean() < 1e-3
