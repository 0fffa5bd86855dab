"""Tensor parallelism of layers whose kernel has its dims in an order of its own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp
from axon_dist.parallel import suggest_plan, tensor_parallel
from axon_dist.parallel.tensor_plan import Plan, Rule
from tests.drawn import drawn
from tests.one_device import trained

WIDTH = 16


def attend(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 2)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def kernel(equation, shape, bias=None):
    return nnx.Einsum(equation, shape, bias, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(1))


class FusedRows(nnx.Module):
    """One kernel `[outputs, inputs]`, as in torch, for queries, keys and values."""

    def __init__(self, bias=None):
        self.qkv = kernel("btd,fd->btf", (48, WIDTH), bias)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x):
        parts = self.qkv(x).reshape(*x.shape[:2], 3, 4, 4)
        return x + self.out(attend(*jnp.unstack(parts, axis=2)).reshape(x.shape))


class FusedGate(nnx.Module):
    """One kernel for gate and up."""

    def __init__(self):
        self.both = kernel("...d,fd->...f", (64, WIDTH))
        self.down = kernel("btf,df->btd", (WIDTH, 32), (WIDTH,))

    def __call__(self, x):
        gate, up = jnp.split(self.both(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class HeadsFirst(nnx.Module):
    """Queries, keys and values are consecutive heads of a kernel that begins with its heads."""

    def __init__(self):
        self.qkv = kernel("BTD,NDH->BTNH", (12, WIDTH, 4), (12, 4))
        self.out = kernel("BTNH,NHD->BTD", (4, 4, WIDTH))

    def __call__(self, x):
        return self.out(attend(*jnp.split(self.qkv(x), 3, axis=2)))


class PartsFirst(nnx.Module):
    """The output begins with queries, keys and values, not with the samples."""

    def __init__(self):
        self.qkv = kernel("BTD,SNDH->SBTNH", (3, 4, WIDTH, 4), (3, 4, 4))
        self.out = kernel("BTNH,NHD->BTD", (4, 4, WIDTH))

    def __call__(self, x):
        return self.out(attend(*self.qkv(x)))


class HeadsBeforePositions(nnx.Module):
    """The activations between the two kernels are `[samples, heads, positions, features]`."""

    def __init__(self):
        self.up = kernel("btd,ndh->bnth", (4, WIDTH, 4))
        self.down = kernel("bnth,dnh->btd", (WIDTH, 4, 4))

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


class RowsOfTwoOutputs(nnx.Module):
    """A row layer with several output dims, of a class whose kernel begins with its inputs."""

    def __init__(self):
        self.up = nnx.LinearGeneral(WIDTH, (4, 6), rngs=nnx.Rngs(0))
        self.down = nnx.LinearGeneral((4, 6), (2, 8), axis=(-2, -1), rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.down(jnp.tanh(self.up(x)) / (1 + jnp.arange(6)))
        return y.reshape(x.shape)


class OwnRows(nnx.Module):
    """A user's layer with a kernel `[outputs, inputs]`."""

    class Layer(nnx.Module):
        def __init__(self, num_in, num_out):
            draw = nnx.initializers.lecun_normal()
            self.kernel = nnx.Param(draw(jax.random.key(0), (num_out, num_in)))

        def __call__(self, x):
            return x @ self.kernel[...].T

    def __init__(self):
        self.qkv = self.Layer(WIDTH, 48)
        self.out = self.Layer(WIDTH, WIDTH)

    def __call__(self, x):
        parts = jnp.split(self.qkv(x).reshape(*x.shape[:2], 12, 4), 3, axis=2)
        return self.out(attend(*parts).reshape(x.shape))


class LinenRows(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.tanh(nn.Einsum((32, WIDTH), "btd,fd->btf", use_bias=False)(x))
        return nn.Einsum((WIDTH, 32), "btf,df->btd", use_bias=False)(x)


def linen():
    return nnx.bridge.ToNNX(LinenRows(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 2, WIDTH)))


MODELS = {
    "rows": FusedRows,
    "rows with a bias": lambda: FusedRows((48,)),
    "rows with a bias of another shape": lambda: FusedRows((1, 1, 48)),
    "gate": FusedGate,
    "heads first": HeadsFirst,
    "parts first": PartsFirst,
    "heads before positions": HeadsBeforePositions,
    "two outputs": RowsOfTwoOutputs,
    "own": OwnRows,
    "linen": linen,
}


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


# Seven positions show a constraint on the wrong dim: they do not divide.
DRAW = np.random.default_rng(0).normal
BATCH = {name: DRAW(size=(4, 7, WIDTH)).astype(np.float32) for name in "xy"}


def check(make, plan, mesh="dp=2,tp=2"):
    """Compares two losses and the updated parameters with those of one device."""
    optimizer, model = optax.sgd(0.3), drawn(make)
    strategy = compose(ddp(), tensor_parallel(plan))
    step = build_train_step(drawn(make), optimizer, loss_fn, strategy, World.emulate(4, mesh))
    state = step.init()
    for loss in trained(model, optimizer, loss_fn, [BATCH] * 2):
        state, metrics = step(state, BATCH)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    mine, theirs = (nnx.state(each, nnx.Param) for each in (step.merge(state), model))
    for got, want in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.sample("rows with a bias", "heads before positions")
@pytest.mark.parametrize("name", MODELS)
def test_a_kernel_of_any_layout_equals_one_device(name):
    make = MODELS[name]
    plan = suggest_plan(make, BATCH["x"])
    assert {rule.mode.value for rule in plan.rules} == {"column", "row"}
    check(make, plan)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), [("rows", "dp=4,tp=1"), ("heads first", "dp=1,tp=4")])
def test_a_fused_kernel_of_any_layout_equals_one_device_on_other_meshes(name, mesh):
    check(MODELS[name], suggest_plan(MODELS[name], BATCH["x"]), mesh)


def test_a_plan_that_splits_a_summed_dim_as_a_column_equals_one_device():
    check(FusedRows, Plan((Rule("qkv$", "column", num_fused=2), Rule("out$", "row"))))
