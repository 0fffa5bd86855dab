"""Losses that are told the number of the step, in every view."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Reduction, Weighted, build_train_step, compose, ddp, fsdp, pipelined
from axon_dist.step.options import takes_step
from tests.one_device import trained

BATCH = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}


class Net(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def loss_fn(model, batch, step):
    """A weight that grows: a penalty is warmed up."""
    found = jnp.mean(model(batch["x"]) ** 2)
    return found * (1 + step), {"step": Weighted(step.astype(jnp.float32), 1.0)}


def on_one_device(steps):
    model, told = Net(), lambda model, step: loss_fn(model, BATCH, step)[0]
    return trained(model, optax.sgd(0.1), told, map(jnp.int32, range(steps))), model


@pytest.mark.full
@pytest.mark.sample("microbatches")
@pytest.mark.parametrize(
    ("axes", "strategy", "options"),
    [
        ("fsdp=4", fsdp(min_elements=8), {}),
        ("dp=4", ddp(), {"accumulate": 2}),
        ("fsdp=4", fsdp(min_elements=8, reduction=Reduction(manual=True)), {}),
        ("pp=2,dp=2", compose(pipelined(2, 2), ddp()), {}),
    ],
    ids=["global", "microbatches", "by hand", "pipeline"],
)
def test_a_loss_is_told_how_many_steps_were_taken(axes, strategy, options, make_world):
    step = build_train_step(Net, optax.sgd(0.1), loss_fn, strategy, make_world(axes), **options)
    state, losses = step.init(), []
    for number in range(3):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
        assert metrics["step"] == number
    want, model = on_one_device(3)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    leaves = [jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (step.merge(state), model)]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    told = step.evaluate(state, BATCH)["loss"]
    np.testing.assert_allclose(told, loss_fn(model, BATCH, jnp.int32(3))[0], rtol=1e-5)


def test_only_a_parameter_that_must_be_given_is_told():
    """A default is a number that somebody has chosen."""
    assert takes_step(loss_fn)
    assert takes_step(lambda model, batch, *, step: 0.0)
    assert not takes_step(lambda model, batch, step=1: 0.0)
    assert not takes_step(print)
