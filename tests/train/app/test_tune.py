import json
from typing import Any

import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.nn import ActivationCheckpointing
from axon_dist.train.app import Variant, measure, tune, variants
from axon_dist.train.app.steps import build_step, build_world
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig

TRIED = (
    Variant("as configured"),
    Variant("recompute nothing", remat=None, as_config=False),
    Variant("no such option", options={"xla_no_such_option": True}),
)


@pytest.mark.full
def test_rows_are_sorted_and_what_fails_says_why(tiny):
    found = tune(RunConfig.from_dict(tiny), rounds=2, calls=1, tried=TRIED)
    rows: tuple[Any, ...] = found.rows
    first, second, last = rows
    assert 0 < first.seconds <= second.seconds
    assert first.spread[0] <= first.seconds <= first.spread[1]
    assert (last.name, last.seconds) == ("no such option", None)
    assert "xla_no_such_option" in last.failure
    assert (found.items_per_step, found.item) == (8 * 16, "tokens")


def test_nothing_that_runs_is_an_error(tiny):
    with pytest.raises(ConfigError, match="no variant of the step runs here"):
        tune(RunConfig.from_dict(tiny), 1, 1, TRIED[-1:])
    with pytest.raises(ConfigError, match="rounds=0"):
        tune(RunConfig.from_dict(tiny), 0)


def test_every_kind_of_device_tries_what_is_recomputed():
    for backend in ("cpu", "gpu", "tpu"):
        names = [variant.name for variant in variants(backend)]
        assert names[0] == "as configured"
        assert len(set(names)) == len(names) >= 5


OWN = {"interval": "sqrt"}


@pytest.mark.parametrize("name", measure.REMATS)
@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"fsdp": {"activation_checkpointing": OWN}}, "mesh": "fsdp=8"},
        {
            "parallel": {"pipeline": {"num_microbatches": 4}},
            "mesh": "pp=2",
            "devices": {"emulate": 2},
        },
    ],
    ids=["fsdp", "pipeline"],
)
def test_a_row_recomputes_what_its_name_says_whatever_the_strategies_ask_for(tiny, changes, name):
    model = tiny["model"] | {"num_layers": 2}
    config = RunConfig.from_dict(tiny | {"model": model} | changes)
    strategy = build_step(
        measure.recomputing(config, measure.REMATS[name]), build_world(config)
    ).strategy
    assert strategy.remat == measure.REMATS[name]
    # A stage that keeps nothing would run its forward pass again, whole.
    assert strategy.pipeline is None or strategy.pipeline.saves_residuals


def test_a_row_that_its_strategy_would_change_says_so_with_what_to_do(tiny, monkeypatch):
    monkeypatch.setattr(measure, "recomputing", lambda config, remat: config)
    own = tiny | {"parallel": {"fsdp": {"activation_checkpointing": OWN}}, "mesh": "fsdp=8"}
    every = Variant("every block", remat=ActivationCheckpointing(), as_config=False)
    with pytest.raises(ConfigError, match=r"recomputes .*sqrt.* by that strategy's own options"):
        tune(RunConfig.from_dict(own), 1, 1, (every,))


def test_a_row_whose_blocks_a_pipeline_cannot_choose_says_which_options_it_lacks(tiny):
    model = tiny["model"] | {"num_layers": 2}
    changes = {"mesh": "pp=2", "devices": {"emulate": 2}}
    stages = tiny | changes | {"model": model, "parallel": {"pipeline": {"num_microbatches": 4}}}
    second = Variant("second", remat=ActivationCheckpointing(interval=2), as_config=False)
    with pytest.raises(ConfigError, match=r"only the option backward.* neither interval nor"):
        tune(RunConfig.from_dict(stages), 1, 1, (second,))


@pytest.mark.full
def test_the_verb_writes_its_figures(tiny, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(tiny))
    out = tmp_path / "tuned.json"
    assert main(["tune", str(config), "--rounds", "1", "--calls", "1", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["name"] for row in rows} == {variant.name for variant in variants("cpu")}
