"""Complex parameters: a step against JAX's gradient ascends along the imaginary part."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, ddp
from axon_dist.step.optimizer import unconjugated

CONJUGATE = optax.stateless(lambda g, p: jax.tree.map(jnp.conj, g))
PARAMS = {"w": jnp.ones(2), "z": jnp.ones(3, jnp.complex64)}

OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw": optax.adamw(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "split": optax.contrib.split_real_and_imaginary(optax.adam(0.1)),
    "lion": optax.lion(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finds_optimizers_that_do_not_conjugate(name):
    optimizer = OPTIMIZERS[name]
    assert unconjugated(optimizer, PARAMS) == ("z",)
    assert unconjugated(optax.chain(CONJUGATE, optimizer), PARAMS) == ()
    assert unconjugated(optimizer, {"w": PARAMS["w"]}) == ()


class Net(nnx.Module):
    def __init__(self):
        self.z = nnx.Param(jnp.array([1.0 + 2.0j], jnp.complex64))

    def __call__(self, x):
        return jnp.abs(x * self.z[...]) ** 2


def test_a_step_warns_and_the_advice_descends(recwarn):
    loss = lambda model, batch: jnp.mean(model(batch["x"]))
    batch = {"x": np.ones((2, 1), np.float32)}
    world = World.emulate(2)

    def losses(optimizer):
        step = build_train_step(Net, optimizer, loss, ddp(), world)
        state = step.init()
        found = []
        for _ in range(3):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    conjugated = losses(optax.chain(CONJUGATE, optax.sgd(0.1)))
    assert not recwarn
    assert conjugated == sorted(conjugated, reverse=True)
    with pytest.warns(UserWarning, match="the parameters z are complex") as told:
        plain = losses(optax.sgd(0.1))
    assert told[0].message.code == "complex-gradient"
    assert plain[-1] > plain[0]
