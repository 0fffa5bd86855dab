"""Lookups split by vocabulary, of layers that do something to the ids or the rows themselves."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp
from axon_dist.parallel import tensor_parallel
from tests.drawn import drawn
from tests.one_device import trained

TOKENS = np.arange(24, dtype=np.int32).reshape(4, 6) % 14


class Shifted(nnx.Embed):
    """Ids count from two, as positions do in some models."""

    def __call__(self, ids):
        return super().__call__(ids + 2)


class LinenShifted(nn.Embed):
    """The same in Linen, where the call of a superclass is intercepted too."""

    def __call__(self, ids):
        return super().__call__(ids + 2)


class Net(nnx.Module):
    def __init__(self, kind=nnx.Embed):
        rngs = nnx.Rngs(0)
        self.table, self.out = kind(16, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, ids):
        return self.out(jnp.tanh(self.table(ids)))


class LinenNet(nn.Module):
    kind: type = nn.Embed

    def setup(self):
        self.table, self.out = self.kind(16, 8), nn.Dense(3)

    def __call__(self, ids):
        return self.out(jnp.tanh(self.table(ids)))


def bridged(kind):
    return nnx.bridge.ToNNX(LinenNet(kind), rngs=nnx.Rngs(0)).lazy_init(TOKENS)


MODELS = {
    "nnx": lambda: drawn(Net),
    "nnx shifted": lambda: drawn(lambda: Net(Shifted)),
    "linen": lambda: bridged(nn.Embed),
    "linen shifted": lambda: bridged(LinenShifted),
}


def loss_fn(model, batch):
    return jnp.mean(model(batch["ids"]) ** 2)


@pytest.mark.sample("linen", "nnx shifted")
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_device(name):
    make, optimizer = MODELS[name], optax.sgd(0.5)
    model = make()
    step = build_train_step(
        model, optimizer, loss_fn, tensor_parallel({"table$": "vocab"}), World.emulate(2, "tp=2")
    )
    state, batch = step.init(), {"ids": TOKENS}
    for loss in trained(model, optimizer, loss_fn, [batch] * 2):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    mine = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))["table"]["embedding"]
    theirs = nnx.to_pure_dict(nnx.state(model, nnx.Param))["table"]["embedding"]
    np.testing.assert_allclose(mine, theirs, atol=1e-6)
    table = state.params["table"]["embedding"]
    assert table.addressable_shards[0].data.shape == (8, 8)


@pytest.mark.sample("-1-int8-True", "16-uint8-False", "-17-int32-True")
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("id", "dtype"), [(-1, "int32"), (-1, "int8"), (16, "uint8"), (-17, "int32")]
)
def test_ids_outside_of_the_table_are_those_of_the_whole_table(id, dtype, sequence):
    """-1 is the last row, and what is no row gives NaN, as in `jnp.take`."""
    batch = {"ids": np.full((2, 2), id).astype(dtype)}
    model, optimizer = drawn(Net), optax.sgd(0.5)
    strategy = tensor_parallel({"table$": "vocab"}, sequence=sequence)
    step = build_train_step(model, optimizer, loss_fn, strategy, World.emulate(2, "tp=2"))
    state, metrics = step(step.init(), batch)
    (loss,) = trained(model, optimizer, loss_fn, [batch])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert np.isnan(loss) == (id != -1)
    mine = step.merge(state).table.embedding[...]
    np.testing.assert_allclose(mine, model.table.embedding[...], atol=1e-6)


class LinenPassing(nn.Dense):
    """A layer that calls its superclass, and does nothing else."""

    def __call__(self, x):
        return super().__call__(x)


class LinenHead(nn.Module):
    kind: type

    def setup(self):
        self.out = self.kind(4)

    def __call__(self, x):
        return self.out(x)


def test_a_layer_that_calls_its_superclass_is_pinned_once():
    batch = {"ids": np.ones((4, 8), np.float32)}

    def constraints(kind):
        make = lambda: nnx.bridge.ToNNX(LinenHead(kind), rngs=nnx.Rngs(0)).lazy_init(batch["ids"])
        plan, world = tensor_parallel({"out$": "column"}), World.emulate(2, "tp=2")
        step = build_train_step(make, optax.sgd(0.5), loss_fn, plan, world)
        return step.lower(batch).as_text().count("sharding_constraint")

    assert constraints(LinenPassing) == constraints(nn.Dense) > 0


class Conditioned(nnx.Module):
    """One id per sample, such as its class, besides those of the positions."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table, self.kinds = nnx.Embed(16, 8, rngs=rngs), nnx.Embed(4, 8, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, ids):
        return self.out(jnp.tanh(self.table(ids) + self.kinds(ids[:, 0] % 4)[:, None]))


@pytest.mark.sample("dp=2,tp=2")
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_positions_are_split_only_where_there_are_some(mesh):
    model, optimizer, batch = drawn(Conditioned), optax.sgd(0.5), {"ids": TOKENS}
    strategy = tensor_parallel({"table$": "vocab", "kinds$": "vocab"}, sequence=True)
    strategy = compose(ddp(), strategy) if "dp" in mesh else strategy
    world = World.emulate(4 if "dp" in mesh else 2, mesh)
    step = build_train_step(model, optimizer, loss_fn, strategy, world)
    state, metrics = step(step.init(), batch)
    (loss,) = trained(model, optimizer, loss_fn, [batch])
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(
        step.merge(state).kinds.embedding[...], model.kinds.embedding[...], atol=1e-6
    )
