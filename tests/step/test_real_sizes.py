"""Losses that look at how many samples there are: right, or refused before anything runs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Weighted, World, build_train_step, compose, ddp, pipelined
from axon_dist.core.errors import UnsupportedError
from tests.drawn import drawn


class Net(nnx.Module):
    """Two equal blocks and a head of three numbers."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def batch_of(count):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(count, 6)).astype(np.float32),
        "y": rng.integers(0, 3, count).astype(np.int32),
        "t": rng.normal(size=(count, 3)).astype(np.float32),
        "w": rng.uniform(0.1, 1, count).astype(np.float32),
    }


def each(m, b):
    """The error of each sample."""
    return jnp.sum((m(b["x"]) - b["t"]) ** 2, -1)


def size(b):
    return len(b["x"])


def crossed(m, b):
    """Two sums that change their places in every turn."""
    turn = lambda c, e: ((c[1] + e, c[0] + 2 * e), None)
    (one, other), _ = jax.lax.scan(turn, (0.0, 0.0), each(m, b))
    return one - 0.3 * other


def turned(m, b):
    """A sum of matrices that is transposed in every turn."""
    turn = lambda c, h: (c.T + jnp.outer(h, jnp.arange(3.0)), None)
    total, _ = jax.lax.scan(turn, jnp.zeros((3, 3)), m(b["x"]))
    return jnp.sum(total * jnp.arange(9.0).reshape(3, 3) ** 2)


def overwritten(m, b):
    """The last sample alone."""
    last, _ = jax.lax.scan(lambda c, e: (c.at[0].set(e), None), jnp.zeros(1), each(m, b))
    return last[0]


def masked_in_a_loop(m, b):
    turn = lambda c, e: (jnp.where(e > 1, c + e, c), None)
    return jax.lax.scan(turn, 0.0, each(m, b))[0]


def other_wire(m, b):
    """The same equations for all sizes, of which another is returned."""
    found = jnp.mean(each(m, b)), jnp.mean(each(m, b) * b["w"])
    return found[size(b) >= 8]


def by_numbers(m, b):
    """A sum in a loop over the numbers of the samples."""
    found = each(m, b)
    return jax.lax.fori_loop(0, size(b), lambda i, c: c + found[i], 0.0) / size(b)


LOSSES = {
    "log of the size": lambda m, b: jnp.mean(each(m, b)) * math.log(size(b) + 1),
    "log of one is 0": lambda m, b: jnp.mean(each(m, b)) * math.log(size(b)),
    "at most 3": lambda m, b: jnp.sum(each(m, b)) / min(size(b), 3),
    "traced at most 3": lambda m, b: jnp.sum(each(m, b)) / jnp.minimum(jnp.float32(size(b)), 3),
    "branch by size": lambda m, b: jnp.mean(each(m, b)) * (2 if size(b) >= 8 else 1),
    "other power": lambda m, b: jnp.mean(each(m, b) ** (3 if size(b) >= 8 else 2)),
    "other wire": other_wire,
    "every second": lambda m, b: 2 * jnp.sum(each(m, b)[1::2]) / size(b),
    "interleaved": lambda m, b: jnp.mean(jax.nn.softplus(each(m, b)[::2] - each(m, b)[1::2])),
    "pairs": lambda m, b: jnp.mean(jax.nn.softplus(jnp.diff(each(m, b).reshape(-1, 2), axis=-1))),
    "halves": lambda m, b: jnp.mean(
        jax.nn.softplus(each(m, b)[: size(b) // 2] - each(m, b)[size(b) // 2 :])
    ),
    "halves as rows": lambda m, b: jnp.mean(jnp.tanh(jnp.subtract(*each(m, b).reshape(2, -1)))),
    "squeezed": lambda m, b: jnp.mean((m(b["x"])[:, :1].squeeze() - b["w"]) ** 2),
    "cross entropy": lambda m, b: optax.softmax_cross_entropy_with_integer_labels(
        m(b["x"]), b["y"]
    ).mean(),
    "own places": lambda m, b: -jnp.mean(
        jax.nn.log_softmax(m(b["x"]))[jnp.arange(size(b)), b["y"]]
    ),
    "weighted": lambda m, b: Weighted(jnp.sum(each(m, b) * b["w"]), jnp.sum(b["w"])),
    "weighted by the size": lambda m, b: Weighted(jnp.sum(each(m, b)), float(size(b) + 3)),
    "vmap": lambda m, b: jnp.mean(jax.vmap(lambda x: jnp.linalg.norm(m(x)))(b["x"])),
    "map": lambda m, b: jnp.mean(jax.lax.map(lambda x: jnp.linalg.norm(m(x)), b["x"])),
    "counts": lambda m, b: jnp.sum(
        jnp.zeros(3).at[b["y"]].add(each(m, b)) * jnp.arange(1.0, 4.0)
    ) / size(b),
    "crossed carries": crossed,
    "transposed carry": turned,
    "overwritten carry": overwritten,
    "by loops": by_numbers,
    "masked carry": masked_in_a_loop,
}  # fmt: skip

STRATEGIES = {
    "buckets": (ddp(bucket_capacity=64), "dp=4", 1),
    "accumulate": (ddp(), "dp=1", 4),
    "both": (ddp(), "dp=2", 2),
    "pipeline": (compose(ddp(), pipelined(2, 2)), "pp=2,dp=2", 1),
}


EVERY = frozenset(f"{how}-{count}" for how in STRATEGIES for count in (4, 16))
SINGLE = frozenset({"buckets-4", "accumulate-4", "pipeline-4"})
OTHER = frozenset({"buckets-16", "accumulate-16", "pipeline-16"})
REFUSED = {
    "other power": OTHER,
    "other wire": OTHER,
    "every second": SINGLE,
    "interleaved": SINGLE,
    "pairs": SINGLE,
    "map": frozenset({"pipeline-4", "pipeline-16"}),
    **dict.fromkeys(
        ("halves", "halves as rows", "crossed carries", "transposed carry", "overwritten carry"),
        EVERY,
    ),
}
"""Where a loss is refused: with 4 samples, each part but those of `both` is one sample."""


@pytest.mark.sample(
    "log of one is 0-accumulate-4",
    "other power-accumulate-16",
    "every second-buckets-4",
    "every second-both-4",
    "overwritten carry-buckets-4",
)
@pytest.mark.parametrize(
    ("name", "how", "count"),
    [
        pytest.param(name, how, count, id=f"{name}-{how}-{count}")
        for name in LOSSES
        for how in STRATEGIES
        for count in (4, 16)
    ],
)
def test_the_loss_equals_one_device_or_is_refused(name, how, count):
    loss_fn, (strategy, axes, accumulate) = LOSSES[name], STRATEGIES[how]
    batch, model = batch_of(count), drawn(lambda: Net(nnx.Rngs(0)))

    def mean(model):
        found = loss_fn(model, batch)
        return found.total / found.weight if isinstance(found, Weighted) else found

    want, gradient = nnx.jit(nnx.value_and_grad(mean))(model)
    world = World.emulate(math.prod(int(part[-1]) for part in axes.split(",")), axes)

    def build():
        return build_train_step(
            model, optax.sgd(0.1), loss_fn, strategy, world, accumulate=accumulate, batch=batch
        )

    if f"{how}-{count}" in REFUSED.get(name, ()):
        with pytest.raises(UnsupportedError):
            build()
        return
    step = build()
    state, metrics = step(step.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-5)
    before, after = nnx.state(model, nnx.Param), nnx.state(step.merge(state), nnx.Param)
    moved = jax.tree.map(lambda old, new: (old - new) / 0.1, before, after)

    def close(got, true):
        np.testing.assert_allclose(got, true, rtol=1e-4, atol=3e-5 * max(1.0, abs(float(want))))

    jax.tree.map(close, moved, gradient)


@pytest.mark.full
def test_a_batch_of_another_size_is_proven_too():
    """Before it runs; and a step without a batch says where one would have been."""
    model, every_second = Net(nnx.Rngs(0)), LOSSES["every second"]
    world, strategy = World.emulate(4, "dp=4"), ddp(bucket_capacity=64)
    step = build_train_step(model, optax.sgd(0.1), every_second, strategy, world)
    state, _ = step(step.init(), batch_of(16))
    with pytest.raises(UnsupportedError, match=r"takes some of.*batch=\.\.\. to build_train_step"):
        step(state, batch_of(4))
