"""The weights of a run, read as a plain module."""

import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.checkpoint import (
    CheckpointManager,
    Retention,
    load_checkpoint,
    save_checkpoint,
    step_name,
    step_of,
)
from axon_dist.core.errors import CheckpointError, ConfigError
from axon_dist.step.model_spec import split_model
from axon_dist.train.app import evaluate, load_model, train
from axon_dist.train.app.run_model import find_checkpoint, load_arrays
from axon_dist.train.app.runs import build_run
from axon_dist.train.config import RunConfig


def same(module, other):
    for left, right in zip(
        jax.tree.leaves(nnx.state(module)), jax.tree.leaves(nnx.state(other)), strict=True
    ):
        assert left.dtype == right.dtype
        if jax.numpy.issubdtype(left.dtype, jax.dtypes.prng_key):
            left, right = jax.random.key_data(left), jax.random.key_data(right)
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.full
@pytest.mark.sample("ddp")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({}, id="ddp"),
        pytest.param(
            {"mesh": "pp=2,dp=4", "parallel": {"ddp": {}, "pipeline": {"num_microbatches": 2}}},
            id="pipeline",
        ),
    ],
)
def test_the_model_of_a_run_is_a_plain_module(tiny, change):
    tiny["model"] |= {"num_layers": 2, "dropout": 0.1}
    done = train(RunConfig.from_dict({**tiny, **change, "checkpoint": {"every": 3}}))
    model: Any
    earlier: Any
    model, config = load_model(done.directory.path)
    assert config == RunConfig.from_dict({**tiny, **change, "checkpoint": {"every": 3}})
    newest = done.directory.checkpoints / "step_00000006"
    built = build_run(config).step.merge(done.result.state)
    same(model, built)
    kernel = model.blocks[1].attention.q.kernel[...]
    assert len(kernel.devices()) == 1
    target = {"params": {"blocks": {1: {"attention": {"q": {"kernel": kernel}}}}}}
    with pytest.raises(CheckpointError, match="is in the checkpoint and not here"):
        load_checkpoint(newest, target, parts=("params",))
    earlier, _ = load_model(done.directory.path, step=3)
    assert not np.array_equal(kernel, earlier.blocks[1].attention.q.kernel[...])
    losses = dict(done.result.validation_curve)
    best, _ = load_model(done.directory.path, step="best")
    same(best, model if losses[6] < losses[3] else earlier)


def test_statistics_of_ranks_are_averaged_and_dtypes_stay(tmp_path):
    model_spec, source = split_model(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    params, buffers = source.arrays
    params = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    of_ranks = jax.tree.map(lambda x: jax.numpy.stack([x, x + 3]), buffers)
    save_checkpoint(tmp_path / "last", {"params": params, "buffers": of_ranks, "opt_state": 1})
    here = of_ranks["mean"].sharding
    where = jax.tree.map(lambda _: here, params)
    loaded, statistics = load_arrays(tmp_path / "last", model_spec, where, here)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jax.numpy.dtype("bfloat16")}
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y + 1.5), statistics, buffers)


@pytest.mark.full
def test_missing_files_are_named(tiny, tmp_path):
    with pytest.raises(
        ConfigError, match=r"there is no run in 'runs/none', because it has no config"
    ):
        load_model("runs/none")
    done = train(RunConfig.from_dict({**tiny, "train": {**tiny["train"], "eval_every": 0}}))
    with pytest.raises(CheckpointError, match=r"got step 5, but .* have the steps 6; name one"):
        load_model(done.directory.path, step=5)
    (done.directory.checkpoints / "step_00000006").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="there is no finished checkpoint in"):
        load_model(done.directory.path)


@pytest.mark.full
def test_a_run_that_freezes_and_averages_is_one_model(tiny):
    """Frozen parameters are read from their section, and the average replaces trained ones."""
    tiny |= {"trainable": "attention/", "checkpoint": {"every": 0}}
    tiny["train"] |= {"steps": 2, "ema": 0.5, "eval_every": 2, "eval_batches": 1}
    done = train(RunConfig.from_dict(tiny))
    model, config = load_model(done.directory.path)
    same(model, build_run(config).step.merge(done.result.state, ema=True))
    measured = evaluate(done.directory.path, num_batches=1, one_device=True).metrics["loss"]
    assert measured == pytest.approx(dict(done.result.validation_curve)[2], rel=1e-5)


def test_the_best_checkpoint_is_by_the_metric_and_mode_of_now(tmp_path):
    def config(metric, mode):
        best = {"metric": f"validation/{metric}", "mode": mode}
        return RunConfig.from_dict({"train": {"best": best}})

    loss, accuracy = config("loss", "min"), config("accuracy", "max")
    old = {"train": {"steps": 1}}
    rows = [(0.3, loss.to_dict()), (-0.9, accuracy.to_dict()), (0.2, old), (-0.8, None)]
    with CheckpointManager(tmp_path / "checkpoints", Retention(last=9)) as manager:
        for step, (score, saved) in enumerate(rows):
            manager.save(step, {"w": jnp.ones(1)}, score=score, meta={"config": saved})
        odd = {"config": {"train": {"best": {"metric": ["validation/loss"], "mode": {}}}}}
        manager.save(len(rows), {"w": jnp.ones(1)}, score=-9.0, meta=odd)

    def best(config):
        return step_of(find_checkpoint(tmp_path, config, "best").name)

    # Checkpoints from before there was a choice count for every metric.
    assert (best(loss), best(accuracy)) == (3, 1)
    other = config("accuracy", "min")
    assert best(other) == 3
    for step in (2, 3):
        shutil.rmtree(tmp_path / "checkpoints" / step_name(step))
    assert (best(loss), best(accuracy)) == (0, 1)
    with pytest.raises(CheckpointError, match=r"score by train.best \(validation/accuracy, min\)"):
        best(other)
