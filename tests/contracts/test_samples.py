"""A loss is computed in parts where its parts give it: equal to one device, or refused."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Reduction, Weighted, World, build_train_step, compose, ddp
from axon_dist.core.errors import AxonDistWarning, UnsupportedError
from axon_dist.inspect import separation
from axon_dist.parallel import fsdp, pipelined
from tests.drawn import drawn

from .models import Case, ragged_batch
from .reference import assert_close, train
from .rows import and_full

WIDTH = 8


class Net(nnx.Module):
    """Two equal blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List(nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def __call__(self, x):
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return x


class Deep(Net):
    """Stochastic depth: every sample draws from a key of its own whether a block counts."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.rngs = rngs.dropout.fork()

    def __call__(self, x):
        for block in self.blocks:
            keys = jax.random.split(self.rngs(), x.shape[0])
            keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys)
            x = x + keep[:, None] * jnp.tanh(block(x))
        return x


class Watching(Net):
    """A running mean of its own, which is no BatchStat, and a count."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.seen = nnx.Variable(jnp.zeros(WIDTH))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.seen[...] = 0.5 * self.seen[...] + 0.5 * x.mean(0)
        self.count[...] += x.shape[0]
        return super().__call__(x)


def batch(step: int) -> dict:
    """Eight features, scaled unevenly over the samples, and uneven weights."""
    full = ragged_batch(step)
    x = full["x"][:16, :WIDTH] * np.linspace(0.3, 2, 16, dtype=np.float32)[:, None]
    return {"x": x, "y": np.sin(2 * x), "weight": full["weight"][:16]}


def error(model, batch):
    """Computes a value for each sample."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)


def contrast(model, batch):
    """Each sample against the targets of all."""
    z = model(batch["x"])
    norm = lambda v: v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    scores = norm(z) @ norm(batch["y"]).T
    return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(z))).mean()


def decayed(model):
    """A term without samples."""
    return 0.1 * sum(jnp.sum(block.kernel[...] ** 2) for block in model.blocks)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss function, its model, and what couples its samples; "" where nothing does."""

    loss_fn: Callable
    model: Callable = Net
    why: str = ""

    @property
    def case(self) -> Case:
        """For the reference."""
        make = lambda: self.model(nnx.Rngs(0, dropout=1))
        return Case(lambda: drawn(make), self.loss_fn, batch)


LOSSES = {
    "mean": Loss(lambda m, b: error(m, b).mean()),
    "decayed": Loss(lambda m, b: error(m, b).mean() + decayed(m)),
    "sum": Loss(lambda m, b: error(m, b).sum()),
    "weighted": Loss(lambda m, b: Weighted((error(m, b) * b["weight"]).sum(), b["weight"].sum())),
    "keys": Loss(lambda m, b: error(m, b).mean(), Deep),
    "root": Loss(lambda m, b: jnp.sqrt(error(m, b).mean())),
    "contrast": Loss(contrast, why="loss multiplies every sample with every other"),
    "watching": Loss(
        lambda m, b: error(m, b).mean(), Watching, "the buffer 'seen' changes with the samples"
    ),
}
OPTIONS = {
    "accumulate": (lambda: ddp(), "dp=2", 2),
    "microbatch": (lambda: ddp(per="microbatch"), "dp=2", 2),
    "buckets": (lambda: ddp(bucket_capacity=64), "dp=4", 1),
    "overlapped": (lambda: ddp(sync="overlapped"), "dp=2", 2),
    "recast": (lambda: ddp(reduce_dtype="bfloat16"), "dp=2", 1),
    "full_shard": (
        lambda: fsdp(axes="dp", min_elements=8, reduction=Reduction(per="step")), "dp=4", 2
    ),
    "manual": (
        lambda: fsdp(
            axes="dp", min_elements=8, reduction=Reduction(per="microbatch", manual=True)
        ),
        "dp=2", 2,
    ),
    "pipeline": (lambda: compose(ddp(), pipelined(2, 2)), "pp=2,dp=2", 2),
    "pipeline_alone": (lambda: pipelined(2, 2), "pp=2", 2),
}  # fmt: skip
"""The strategy, the mesh and the microbatches."""
ASKS = {
    "buckets": "as bucket_capacity=64 requires.*leave bucket_capacity=64 out",
    "overlapped": "as sync=OVERLAPPED requires",
    "recast": "as a reduction in bfloat16 with compute in float32 requires",
    "manual": "as manual=True requires",
    "pipeline": "as a pipeline with dp requires.*leave the pipeline out",
}


def world_of(mesh: str) -> World:
    """The devices of a mesh."""
    size = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    return World.emulate(size, mesh)


def built(name: str, loss: Loss, **options):
    """A step of one of the options, with microbatches as it says."""
    make, mesh, count = OPTIONS[name]
    strategy = make()
    accumulate = 1 if strategy.pipeline is not None else count
    return build_train_step(
        loss.case.make(), optax.sgd(0.5), loss.loss_fn, strategy, world_of(mesh),
        accumulate=accumulate, **options,
    )  # fmt: skip


ALWAYS = {
    "accumulate": tuple(LOSSES),
    "manual": ("decayed", "keys", "root", "contrast", "watching"),
    "pipeline": ("decayed", "weighted", "root", "contrast", "watching"),
}
"""The losses that every run tries with an option; where samples are coupled, that is a refusal."""


@pytest.mark.sample(
    "contrast-accumulate",
    "contrast-manual",
    "weighted-pipeline",
    "contrast-pipeline",
)
@pytest.mark.parametrize(
    ("name", "option"),
    and_full(
        [(name, option) for option, names in ALWAYS.items() for name in names],
        [
            (name, option)
            for option in OPTIONS
            for name in LOSSES
            if name not in ALWAYS.get(option, ())
        ],
    ),
)
def test_equals_one_device_or_says_what_couples_the_samples(name, option):
    loss, (_, _, count) = LOSSES[name], OPTIONS[option]
    step = built(option, loss)
    if loss.why and option in ASKS:
        message = f"(?s){loss.why}.*test_samples.py:.*{ASKS[option]}.*separable=True"
        if name == "watching":
            # A mean over the samples names no line, since none is at fault. `separable=True` says
            # nothing about a buffer.
            message = f"(?s)(?=.*Change the buffer between steps){loss.why}.*{ASKS[option]}"
        with pytest.raises(UnsupportedError, match=message):
            step(step.init(), batch(0))
        return
    refused = {
        ("decayed", "pipeline"): "the loss reads a parameter of 'blocks/0'",
        ("decayed", "pipeline_alone"): "the loss reads a parameter of 'blocks/0'",
        ("decayed", "manual"): "the loss reads 'blocks/0/kernel' outside 'blocks/0'",
    }
    if name == "contrast" and count > 1:
        refused[name, option] = f"{loss.why}.*{count} microbatches .*separable=False"
    if message := refused.get((name, option)):
        with pytest.raises(UnsupportedError, match=message):
            step(step.init(), batch(0))
        return
    factor = count if name == "sum" else 1
    # Keys of samples are drawn for the whole batch, which microbatches in plain JAX would not do,
    # a root is that of the mean of all, and a running mean moves once.
    whole = name in ("keys", "root", "watching")
    want = train(loss.case, optax.sgd(0.5), 1, accumulate=1 if whole else count)
    expected = jax.tree.map(lambda g: g * factor, want.grads[0])
    loose = 1000 if option == "recast" else 1
    # Rows of stages are compared after a step, in the form of the model.
    if step.storage.stage_storage is None:
        grads, metrics = step.gradients(step.init(), batch(0))
        assert_close(grads, expected, 2e-5 * loose, "gradient")
        assert float(metrics["loss"]) == pytest.approx(want.losses[0] * factor, rel=1e-5)
    state, metrics = step(step.init(), batch(0))
    assert float(metrics["loss"]) == pytest.approx(want.losses[0] * factor, rel=1e-5)
    graphdef, params, _ = nnx.split(loss.case.make(), nnx.Param, ...)
    del graphdef
    before = nnx.to_pure_dict(params)
    after = jax.tree.map(lambda p, g: p - 0.5 * g, before, expected)
    got = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(got, after, 1e-5 * loose, "parameter")
    assert_close(state.buffers, want.buffers, 1e-5, "buffer")


@pytest.mark.full
def test_a_sum_and_a_term_of_its_own_is_counted_once():
    """The term is no part's: parts that each added it would count it as often as they are."""
    loss = Loss(lambda m, b: error(m, b).sum() + decayed(m))
    want = train(loss.case, optax.sgd(0.5), 1)
    for option in ("accumulate", "buckets"):
        step = built(option, loss)
        state, metrics = step(step.init(), batch(0))
        assert float(metrics["loss"]) == pytest.approx(want.losses[0], rel=1e-5)
        assert_close(state.params, want.params, 1e-5, "parameter")
    step = built("pipeline_alone", loss)
    with pytest.raises(UnsupportedError, match="reads a parameter of 'blocks/0'"):
        step(step.init(), batch(0))


@pytest.mark.sample("True-pipeline")
@pytest.mark.parametrize("option", ["accumulate", "buckets", "pipeline"])
@pytest.mark.parametrize("weighs", [False, True])
def test_metrics_are_those_of_the_whole_batch(option, weighs):
    def loss_fn(model, batch):
        each, weight = error(model, batch), batch["weight"]
        metrics = {
            "mean": each.mean(),
            "count": jnp.sum(weight > 0).astype(jnp.float32),
            "own": Weighted((each * weight).sum(), weight.sum()),
            "fixed": jnp.float32(3),
        }
        if not weighs:
            return each.sum(), metrics
        count = weight.sum()
        metrics["masked"] = (each**2 * weight).sum() / count
        return Weighted((each * weight).sum(), count), metrics

    loss = Loss(loss_fn)
    whole = nnx.jit(loss_fn)(loss.case.make(), batch(0))[1]
    step = built(option, loss)
    _, metrics = step(step.init(), batch(0))
    for name, want in whole.items():
        want = want.mean if isinstance(want, Weighted) else want
        assert float(metrics[name]) == pytest.approx(float(want), rel=1e-5), name


def test_a_metric_that_couples_samples_is_not_averaged():
    loss = Loss(lambda m, b: (error(m, b).mean(), {"worst": error(m, b).max()}))
    step = built("buckets", loss)
    with pytest.raises(UnsupportedError, match="the metric 'worst' takes `reduce_max` over the s"):
        step(step.init(), batch(0))
    step = built("accumulate", loss)
    with pytest.raises(UnsupportedError, match=r"'worst' takes .*2 microbatches"):
        step(step.init(), batch(0))


def test_a_buffer_that_is_no_mean_over_the_samples_is_not_changed_in_turn():
    class Queue(Net):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.seen = nnx.Variable(jnp.zeros((32, WIDTH)))

        def __call__(self, x):
            self.seen[...] = jnp.concatenate([self.seen[...][len(x) :], x])
            return super().__call__(x)

    loss = Loss(lambda m, b: error(m, b).mean(), Queue)
    with pytest.raises(UnsupportedError, match=r"the buffer 'seen' .*2 microbatches would change"):
        built("accumulate", loss, batch=batch(0))
    built("accumulate", loss, batch=batch(0), separable=False)


@pytest.mark.full
def test_separable_true_averages_and_false_runs_in_global_view():
    loss = LOSSES["root"]
    step = built("buckets", loss, separable=True)
    _, metrics = step(step.init(), batch(0))
    parts = [jax.tree.map(lambda x, r=r: np.split(x, 4)[r], batch(0)) for r in range(4)]
    mean = np.mean([float(loss.loss_fn(loss.case.make(), part)) for part in parts])
    assert float(metrics["loss"]) == pytest.approx(mean, rel=1e-5)
    denied = built("accumulate", LOSSES["mean"], separable=False)
    assert str(separation(denied, batch(0))) == (
        "global view, because separable=False says that the loss couples samples"
    )
    assert str(separation(built("accumulate", LOSSES["mean"]), batch(0))) == "per rank"


@pytest.mark.full
def test_a_loss_that_needs_all_its_samples_runs_in_global_view():
    def loss_fn(model, batch):
        assert len(batch["x"]) == 8
        return error(model, batch).mean()

    step = built("accumulate", Loss(loss_fn))
    with pytest.warns(AxonDistWarning, match="only for the 8 of a microbatch"):
        found = str(separation(step, batch(0)))
    assert "cannot be computed from 4 samples alone" in found
    step(step.init(), batch(0))


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_that_weighs_nothing_has_loss_and_gradient_zero(count):
    loss_fn = lambda m, b: Weighted(
        ((error(m, b) + decayed(m)) * b["weight"]).sum(), b["weight"].sum()
    )
    step = build_train_step(
        Net(nnx.Rngs(0)), optax.sgd(0.5), loss_fn, ddp(per="microbatch"), World.emulate(2, "dp=2"),
        accumulate=count,
    )  # fmt: skip
    empty = batch(0) | {"weight": np.zeros(16, np.float32)}
    grads, metrics = step.gradients(step.init(), empty)
    assert float(metrics["loss"]) == 0.0
    assert all(float(jnp.abs(g).max()) == 0.0 for g in jax.tree.leaves(grads))
    assert float(step.evaluate(step.init(), empty)["loss"]) == 0.0
