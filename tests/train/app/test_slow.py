"""A run with replicas over a slow axis: trained, resumed, evaluated, loaded and verified."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from axon_dist.core.errors import StrategyConflictError, UnsupportedError
from axon_dist.train.app import evaluate, examine, load_model, train, verify
from axon_dist.train.config import RunConfig

LENGTH = 16


def config_of(folder, **changes):
    """Two replicas on two devices each, with dropout, which must be off in evaluation."""
    (folder / "train.txt").write_text("the quick brown fox jumps. " * 60)
    return {
        "run_dir": str(folder / "run"),
        "mesh": "nodes=2,fsdp=2",
        "parallel": {"diloco": {"every": 2, "compress": "int8"}, "full_shard": {"min_elements": 8}},
        "devices": {"emulate": 4},
        "model": {
            "width": 16, "num_layers": 1, "num_heads": 2, "ffn_width": 16, "max_length": LENGTH,
            "dropout": 0.2,
        },
        "data": {"files": [str(folder / "train.txt")], "sequence_length": LENGTH},
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {
            "steps": 4, "global_batch": 8, "eval_every": 2, "eval_batches": 1, "nonfinite": "skip",
        },
        "checkpoint": {"every": 2},
        **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("slow")


@pytest.fixture(scope="module")
def result(folder):
    return train(RunConfig.from_dict(config_of(folder)), Console(file=io.StringIO()))


@pytest.mark.full
def test_a_run_is_evaluated_with_the_model_of_the_last_outer_step(result):
    path = result.directory.path
    here, alone = evaluate(path), evaluate(path, one_device=True)
    assert here.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)
    model, _ = load_model(path)
    for want, got in zip(
        jax.tree.leaves(result.result.state.outer),
        jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param))),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(want), np.asarray(got))


@pytest.mark.full
def test_a_run_goes_on_with_another_number_of_steps(result, folder):
    plain = config_of(folder)
    plain["train"] = {**plain["train"], "steps": 6}
    plain["parallel"] = {**plain["parallel"], "diloco": {"every": 3, "compress": "int8"}}
    more = train(RunConfig.from_dict(plain), Console(file=io.StringIO()), resume="auto")
    assert (more.result.first_step, more.result.num_steps) == (4, 6)


@pytest.mark.full
def test_outer_steps_are_reported_separately_from_steps(folder):
    found = examine(RunConfig.from_dict(config_of(folder)))
    assert found.report.collectives.by_link().keys() == {"fast"}
    (outer_step,) = found.outer_steps
    assert set(outer_step.collectives.by_axis()) == {"nodes"}
    first, total = found.outer_step_lines()
    assert first.startswith("outer step of fragment 0, every 2 steps: ")
    assert total.startswith("all of them: ")
    assert total.endswith(" a step over slow links")
    assert found.to_dict()["every"] == 2


@pytest.mark.full
def test_replicas_are_verified_one_after_the_other(folder):
    plain = config_of(folder)
    plain["train"] = {**plain["train"], "accumulate": 2}
    assert verify(RunConfig.from_dict(plain), steps=4).passed


def test_the_default_of_a_config_is_refused_with_what_to_say(folder):
    plain = config_of(folder)
    del plain["train"]["nonfinite"]
    with pytest.raises(UnsupportedError, match=r"in a config, train: \{nonfinite: skip\}"):
        examine(RunConfig.from_dict(plain))
    plain = config_of(folder, parallel={"diloco": {"every": 2}, "ddp": {}}, mesh="nodes=2,dp=2")
    config = RunConfig.from_dict(plain)
    offloaded = {"full_shard": {"cpu_offload": "params"}, "diloco": {"every": 2}}
    with pytest.raises(StrategyConflictError, match="leave the offload out"):
        examine(dataclasses.replace(config, parallel=offloaded))
