"""A run whose fourth batch has a nonfinite loss."""

import dataclasses
import io
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from axon_dist.checkpoint import read_manifest
from axon_dist.core.errors import NonfiniteError
from axon_dist.mesh import World
from axon_dist.models import next_token_loss
from axon_dist.train.app import train
from axon_dist.train.app.runs import build_loader
from axon_dist.train.config import MODELS, RunConfig
from axon_dist.train.config.models import NextToken

BAD = 4


@pytest.fixture
def config(tiny, texts, monkeypatch):
    """Makes the loss of one batch of the run NaN; returns the config for a policy."""

    def make(policy, **checkpoint):
        data = dict(tiny)
        data["train"] = tiny["train"] | {"nonfinite": policy, "log_every": 1, "eval_every": 0}
        data["checkpoint"] = {"every": 0} | checkpoint
        return RunConfig.from_dict(data)

    # No window occurs twice.
    (texts / "train.txt").write_text(" ".join(map(str, range(1000))))
    loader = build_loader(make("stop"), World.emulate(8))
    row = [next(loader)["tokens"] for _ in range(BAD)][-1][5].copy()

    def poisoned(model, batch):
        is_bad = jnp.all(batch["tokens"] == row, axis=-1).any()
        loss = next_token_loss(model, batch)
        poison = jnp.where(is_bad, jnp.nan, 0.0)
        return type(loss)(loss.total + poison, loss.weight)

    row_of_table = dataclasses.replace(MODELS["transformer"], task=NextToken(poisoned))
    monkeypatch.setattr("axon_dist.train.config.models.MODELS", {"transformer": row_of_table})
    return make


def samples_at(done, step):
    return read_manifest(done / "checkpoints" / f"step_{step:08}").meta["data"]["samples_seen"]


@pytest.mark.full
def test_a_run_that_stops_can_go_on_where_it_was(config, tmp_path):
    with pytest.raises(NonfiniteError, match=r"step 4: the loss is nan; the state is that of st"):
        train(config("stop"))
    run = tmp_path / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000003"]
    assert samples_at(run, 3) == 24

    with pytest.raises(NonfiniteError, match="step 4: the loss is nan"):
        train(config("stop"), resume="auto")
    done = train(config("skip"), resume="auto")
    assert (done.summary["steps"], done.summary["skipped_steps"]) == (6, 1)
    assert samples_at(run, 6) == 48


@pytest.mark.full
def test_a_run_that_goes_back(config, tmp_path):
    done = train(config("rollback", every=2))
    assert (done.summary["steps"], done.summary["rollbacks"]) == (6, 1)
    # Batches 1 and 2, then 5 and later: 3 and 4 are given up.
    assert samples_at(tmp_path / "run", 6) == 64
    rows = [json.loads(line) for line in done.directory.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 3, 4, 5, 6]
    assert [row["seen/tokens"] for row in rows if "train/loss" in row][-1] == 64 * 16
    assert all(np.isfinite(loss) for _, loss in done.result.train_curve)


@pytest.mark.full
def test_a_run_does_not_go_back_to_steps_that_it_gave_up(config, tmp_path):
    train(config("skip", every=2))
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert steps == ["step_00000002", "step_00000004", "step_00000006"]
    older = str(tmp_path / "run" / "checkpoints" / "2")
    console = Console(file=io.StringIO(), width=400)
    done = train(config("rollback", every=4), console, resume=older)
    assert "step 4: the loss is nan: went back to step 2" in " ".join(
        console.file.getvalue().split()
    )
    assert (done.summary["steps"], done.summary["rollbacks"]) == (6, 1)
    # Batches 1 and 2, then 5 and later.
    assert samples_at(tmp_path / "run", 6) == 64


@pytest.mark.full
def test_a_run_that_stops_right_after_its_copy_in_memory_saves_that_state(
    config, tmp_path, monkeypatch
):
    memory, checkpoints = tmp_path / "memory", tmp_path / "run" / "checkpoints"
    memory.mkdir()
    monkeypatch.setenv("AXON_MEMORY", str(memory))
    # The first run stops with a checkpoint of step 3, too.
    for _ in range(2):
        with pytest.raises(NonfiniteError, match="step 4: the loss is nan; the state is that of"):
            train(config("stop", memory_every=3), resume="auto")
        assert [path.name for path in checkpoints.iterdir()] == ["step_00000003"]
        assert samples_at(tmp_path / "run", 3) == 24
        shutil.rmtree(checkpoints)


@pytest.mark.full
def test_a_run_in_another_folder_knows_the_steps_that_were_skipped(config, tmp_path):
    train(config("skip", every=5))
    other = dataclasses.replace(config("skip"), run_dir=str(tmp_path / "other"))
    newest = str(tmp_path / "run" / "checkpoints" / "5")
    done = train(other, resume=newest)
    assert (done.summary["steps"], done.summary["skipped_steps"]) == (6, 1)
    again = train(other, resume="auto")
    assert again.result.skipped_steps == 1
