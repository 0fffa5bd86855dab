"""What the steps of a search share."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist import Shared, World, build_train_step
from axon_dist.inspect.steps import trace_step
from axon_dist.parallel import ddp
from axon_dist.step.sharing import shared_value, sharing_steps


def test_a_value_is_made_once_in_a_search_and_forgotten_after_it():
    made = []

    def make():
        made.append(len(made))
        return made[-1]

    assert (shared_value("key", make), shared_value("key", make)) == (0, 1)
    with sharing_steps():
        assert (shared_value("key", make), shared_value("key", make)) == (2, 2)
        assert shared_value("other", make) == 3
        unhashable = ["no hash"]
        assert (shared_value(unhashable, make), shared_value(unhashable, make)) == (4, 5)
    assert shared_value("key", make) == 6


def test_a_loss_of_the_whole_batch_is_traced_once_in_a_search():
    sizes = []

    def loss_fn(model, batch):
        sizes.append(len(batch["x"]))
        return jnp.mean(batch["scale"] * model(batch["x"]) ** 2)

    def make():
        return nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    world = World.emulate(2, "dp=2")
    batch = {"x": np.ones((16, 3), np.float32), "scale": Shared(np.ones((), np.float32))}

    def trace(microbatches):
        options = dict(accumulate=microbatches, batch=batch)
        step = build_train_step(make, optax.sgd(0.1), loss_fn, ddp(), world, **options)
        trace_step(step, batch)

    with sharing_steps():
        trace(2)
        trace(4)
    assert sizes.count(16) == 1
    assert {4, 2} <= set(sizes)
