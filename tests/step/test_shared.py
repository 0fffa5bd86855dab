"""Leaves of a batch that belong to no sample: whole everywhere, in every view."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Shared, Weighted, build_train_step, compose, ddp, fsdp, pipelined
from axon_dist.core.errors import ConfigError, DTypeError
from axon_dist.inspect import separation
from axon_dist.step.batch import split_shared
from tests.one_device import trained

CLASSES = 4
RANDOM = np.random.default_rng(0)
ROWS = {
    "x": RANDOM.normal(size=(16, 16)).astype(np.float32),
    "y": RANDOM.integers(0, CLASSES, 16).astype(np.int32),
}
# As many numbers as a rank of four has samples: shapes must not decide what is a sample's.
WEIGHTS = np.linspace(0.5, 2, CLASSES).astype(np.float32)


class Net(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)])
        self.norm = nnx.LayerNorm(16, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(16, CLASSES, rngs=nnx.Rngs(2))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(self.norm(x))


def loss_fn(model, batch):
    """Cross-entropy weighed by the class, sharpened by a number."""
    weights = batch["classes"]["weights"][batch["y"]] * batch.get("w", 1.0)
    logits = model(batch["x"]) * batch["sharpness"]
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return Weighted((weights * each).sum(), weights.sum())


def batch_of(count=16):
    rows = {name: leaf[:count] for name, leaf in ROWS.items()}
    return {**rows, "classes": {"weights": Shared(WEIGHTS)}, "sharpness": Shared(2.0)}


def on_one_device(count=16):
    model = Net()
    batch = {name: leaf[:count] for name, leaf in ROWS.items()}
    batch |= {"classes": {"weights": jnp.asarray(WEIGHTS)}, "sharpness": jnp.float32(2)}
    mean = lambda model, batch: loss_fn(model, batch).mean
    losses = trained(model, optax.sgd(0.1), mean, [batch] * 2)
    return losses, model, float(nnx.jit(mean)(model, batch))


@pytest.mark.full
@pytest.mark.sample("pipeline")
@pytest.mark.parametrize(
    ("axes", "strategy", "options", "count"),
    [
        ("fsdp=4", fsdp(min_elements=8), {}, 16),
        ("dp=4", ddp(), {"accumulate": 2}, 16),
        ("dp=4", ddp(broadcast_buffers=False), {"accumulate": 2}, 16),
        ("pp=2,dp=2", compose(pipelined(2, 2), ddp()), {}, 16),
        ("dp=4", ddp(), {"pad": "w"}, 13),
    ],
    ids=["global", "microbatches", "own statistics", "pipeline", "padded"],
)
def test_shared_leaves_are_replicated(axes, strategy, options, count, make_world):
    step = build_train_step(
        Net, optax.sgd(0.1), loss_fn, strategy, make_world(axes), batch=batch_of(), **options
    )
    state, losses = step.init(), []
    for _ in range(2):
        state, metrics = step(state, batch_of(count))
        losses.append(float(metrics["loss"]))
    want, model, after = on_one_device(count)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    leaves = [jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (step.merge(state), model)]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(step.evaluate(state, batch_of(count))["loss"], after, rtol=1e-5)


def test_the_loss_is_still_seen_to_be_one_of_its_samples(make_world):
    step = build_train_step(Net, optax.sgd(0.1), loss_fn, ddp(), make_world("dp=4"), accumulate=2)
    assert separation(step, batch_of()).is_per_rank


def test_samples_beside_a_shared_leaf_may_be_in_tuples():
    rows = (ROWS["x"], [ROWS["y"], None])
    assert split_shared({"rows": rows, "sharpness": Shared(2.0)})[0] == {"rows": rows}


def test_shared_leaves_without_a_name_are_refused():
    with pytest.raises(ConfigError, match=r"the batch is a list that has Shared\(...\) at '1'"):
        split_shared([ROWS["x"], Shared(WEIGHTS)])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.zeros(2, [("a", "f4")]), r"'sharpness' of the batch is a numpy array of \[\('a'"),
        (np.array(["a"], np.dtypes.StringDType()), "a numpy array of StringDType"),
        (np.ma.masked_array([1.0, 2.0], [0, 1]), "is a masked array"),
        (np.ones(2, ">f4"), r"a numpy array of >f4, which JAX lacks"),
    ],
)
def test_shared_leaves_are_arrays_as_others_are(value, error):
    with pytest.raises((ConfigError, DTypeError), match=error):
        split_shared({"x": ROWS["x"], "sharpness": Shared(value)})
