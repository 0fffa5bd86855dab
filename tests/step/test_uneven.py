"""Evaluations of any number of samples on any number of ranks: each sample counts once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import LoopOptions, Trainer, Weighted, World, build_train_step, ddp
from axon_dist.core.weighted import FilledBatch
from axon_dist.data import Loader, Sequences
from axon_dist.step.evaluation import pieces

WIDTH = 4


class Model(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))
        self.weight = nnx.Param(jnp.arange(1.0, WIDTH + 1))

    def __call__(self, x):
        return self.norm(x) @ self.weight[...]


def mean(model, batch):
    y = model(batch["x"])
    return jnp.mean(y**2), {"absolute": jnp.mean(jnp.abs(y))}


def masked(model, batch):
    losses = model(batch["x"]) ** 2 * batch["mask"]
    return Weighted(jnp.sum(losses), jnp.sum(batch["mask"]))


def plainly_masked(model, batch):
    losses = model(batch["x"]) ** 2 * batch["mask"]
    return jnp.sum(losses) / jnp.maximum(jnp.sum(batch["mask"]), 1)


def compared(model, batch):
    y = model(batch["x"])
    return jnp.mean(jax.nn.logsumexp(y[:, None] * y / 10, axis=1)), {"sum": jnp.sum(y)}


def capped(model, batch):
    """A mean of up to eight samples, and a sum of more: a loss that reads how many there are."""
    losses = model(batch["x"]) ** 2
    return jnp.sum(losses) / min(len(losses), 8)


def paired(model, batch):
    """Compares each sample with its neighbor: sums over parts of an even size add up."""
    y = model(batch["x"])
    return jnp.mean(jax.nn.softplus(y[1::2] - y[:-1:2]))


def rows_of(count):
    rng = np.random.default_rng(count)
    x, mask = rng.normal(size=(count, WIDTH)).astype(np.float32), np.ones(count, np.float32)
    mask[1::2] = 0
    return {"x": x, "mask": mask}


def loader_of(rows, global_batch, **share):
    samples = [{"x": x, "mask": mask} for x, mask in zip(rows["x"], rows["mask"], strict=True)]
    return Loader(Sequences(samples, samples, "rows"), global_batch=global_batch, **share)


def on_one_device(loss_fn, rows):
    model = Model()
    model.eval()
    value = nnx.jit(loss_fn)(model, rows)
    loss, metrics = value if isinstance(value, tuple) else (value, {})
    loss = loss.mean if isinstance(loss, Weighted) else loss
    return {"loss": float(loss), **{name: float(x) for name, x in metrics.items()}}


@pytest.mark.sample("capped-3-7", "paired-2-3")
@pytest.mark.parametrize(
    ("loss_fn", "ranks", "count"),
    [(capped, 3, 7), (capped, 3, 16), (paired, 2, 3), (paired, 2, 7)],
)
def test_a_loss_of_the_number_or_the_order_of_samples_is_that_of_one_device(loss_fn, ranks, count):
    step = build_train_step(
        lambda: _training(Model()), optax.sgd(0.1), loss_fn, ddp(), World.emulate(ranks)
    )
    state = step.init()
    rows = rows_of(count)
    found = float(step.evaluate(state, rows)["loss"])
    assert found == pytest.approx(on_one_device(loss_fn, rows)["loss"], rel=1e-6)


@pytest.mark.sample("masked-6-counts1")
@pytest.mark.parametrize(("ranks", "counts"), [(1, (7,)), (6, (1, 13)), (8, (13, 16))])
@pytest.mark.parametrize("loss_fn", [mean, masked, plainly_masked, compared])
def test_one_batch_of_any_size_is_that_of_one_device(loss_fn, ranks, counts):
    step = build_train_step(
        lambda: _training(Model()), optax.sgd(0.1), loss_fn, ddp(), World.emulate(ranks)
    )
    state = step.init()
    for count in counts:
        rows = rows_of(count)
        found = {name: float(x) for name, x in step.evaluate(state, rows).items()}
        assert found == pytest.approx(on_one_device(loss_fn, rows), rel=1e-6), count


def _at_rest():
    model = Model()
    model.eval()
    return model


def _training(model):
    model.train()
    return model


def test_a_validation_counts_every_sample_once():
    # With the statistics at rest in training too, the step leaves the model as it is.
    step = build_train_step(_at_rest, optax.sgd(0.0), masked, ddp(), World.emulate(8))
    rows, other = rows_of(37), rows_of(2)
    loaders = {"": loader_of(rows, 16), "other": loader_of(other, 16)}
    result = Trainer(
        step=step,
        batches=[rows_of(8)],
        options=LoopOptions(num_steps=1),
        validation={
            name: lambda one=one: one.validation_batches(16) for name, one in loaders.items()
        },
    ).fit()
    assert result.validation_curve[-1][1] == pytest.approx(on_one_device(masked, rows)["loss"])
    _, curve = result.metric_curves["other/loss"]
    assert curve[-1][1] == pytest.approx(on_one_device(masked, other)["loss"])


def test_the_last_batch_has_the_same_samples_on_every_process():
    for num_processes in (1, 2, 4):
        parts = [
            list(loader_of(rows_of(13), 8, process=p, num_processes=num_processes)
                 .validation_batches(16))
            for p in range(num_processes)
        ]  # fmt: skip
        seen = np.concatenate([part[0]["x"] for part in parts])
        last: list[Any] = [part[1] for part in parts]
        assert all(isinstance(batch, FilledBatch) and len(part) == 2
                   for batch, part in zip(last, parts, strict=True))  # fmt: skip
        for batch in last:
            together = np.concatenate([seen, batch.samples["x"]])
            np.testing.assert_array_equal(np.sort(together, 0), np.sort(rows_of(13)["x"], 0))
            assert len(batch["x"]) == 8 // num_processes


def test_pieces_cover_a_batch_and_divide():
    for ranks in range(1, 13):
        for samples in range(1, 40):
            cut = pieces(samples, ranks)
            covered = [at for piece in cut for at in range(piece.start, piece.stop)]
            assert covered == list(range(samples))
            assert all(piece.samples % ranks == 0 for piece in cut)
            assert all(piece.copies == 1 or piece.samples == ranks for piece in cut)
