"""A new strategy is one file with a function, and one entry in the table of strategies."""

import importlib

import pytest

from axon_dist import World, ddp
from axon_dist.core.errors import ConfigError
from axon_dist.mesh.chips import hardware
from axon_dist.parallel import STRATEGIES, DataPlan, StrategyRow, ZeROStage
from axon_dist.parallel.registry import over_data_axes
from axon_dist.planner import Candidate, Workload, candidates
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig
from axon_dist.train.config.schema import build_strategy

FILE = '''
import dataclasses

from axon_dist.parallel import Strategy, ddp


def bucketed(axes: str | tuple[str, ...] = ("dp",), *, elements: int = 7) -> Strategy:
    """Data parallelism in small buckets.

    Args:
        axes: the mesh axes that split the batch.
        elements: how many of a gradient are reduced at once.
    """
    return dataclasses.replace(ddp(axes, bucket_capacity=elements), name="bucketed")
'''


def sizes(ranks, node_size):
    yield {"dp": ranks}


@pytest.fixture
def bucketed(tmp_path, monkeypatch):
    """Writes the file and adds the entry."""
    (tmp_path / "bucketed_strategy.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("bucketed_strategy").bucketed
    row = StrategyRow(
        make=over_data_axes(function),
        obstacle="a whole gradient on the wire",
        page="ddp",
        example="dp=8",
        other_names=("buckets",),
        plan=DataPlan(sizes=sizes, stage=ZeROStage.STAGE0, preference=5),
    )
    monkeypatch.setitem(STRATEGIES.rows, "bucketed", row)


def test_a_config_reads_it_by_its_names_and_checks_its_options(bucketed):
    config = RunConfig.from_dict({"mesh": "dp=8", "parallel": {"buckets": {"elements": 9}}})
    assert config.to_dict()["parallel"] == {"bucketed": {"elements": 9}}
    strategy = build_strategy(config.parallel, None, World.emulate(8))
    assert strategy.name == "bucketed"
    assert strategy.reduction == ddp(bucket_capacity=9).reduction
    for options in ({"element": 9}, {"elements": "many"}):
        with pytest.raises(ConfigError, match=r"^parallel\.bucketed\.element"):
            RunConfig.from_dict({"parallel": {"bucketed": options}})
    with pytest.raises(ConfigError, match="Did you mean 'bucketed'"):
        RunConfig.from_dict({"parallel": "bucketd"})


def test_the_command_explains_it(bucketed, capsys):
    assert main(["config", "parallel.buckets"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("parallel.bucketed: Data parallelism in small buckets.\n")
    assert "  parallel.bucketed.elements = 7  (whole number)\n" in text
    assert "how many of a gradient are reduced at once." in text


def test_the_planner_tries_it(bucketed):
    sizes = {"num_params": 10**6, "num_layers": 4, "flops": 1e12, "global_batch": 64}
    tried = candidates(Workload(**sizes), 8, hardware("h100"))
    assert any(one.strategy == "bucketed" and one.dp == 8 for one in tried)
    lines = Candidate(strategy="buckets", dp=8).to_config()
    assert lines == {"mesh": {"dp": 8}, "parallel": {"bucketed": {}}}
