"""Profiles a step that really runs: its rows add up, and the page of its run shows them."""

import json

import pytest

from axon_dist.inspect import Waterfall
from axon_dist.train.app import report_page
from axon_dist.train.app.profile import profile_step
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig


def test_a_config_and_a_run(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    tiny |= {"mesh": "dp=2", "devices": {"emulate": 4}, "parallel": "ddp"}
    tiny["model"]["gated"] = False
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(tiny))
    out = tmp_path / "waterfall.json"
    assert main(["profile", str(folder), "mesh=dp=4", "--steps", "2", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "matrix products below the peak" in text
    assert "shared by 4 devices" in text
    found = Waterfall.from_dict(json.loads(out.read_text()))
    assert (found.num_steps, found.num_devices) == (2, 4)
    total = found.useful_seconds + sum(loss.seconds for loss in found.losses)
    assert abs(total / found.step_seconds - 1) < 0.01
    lost = {loss.kind: loss for loss in found.losses}
    assert lost["wire"].seconds > 0
    assert lost["recomputed"].seconds == 0
    assert any(line.source.startswith("layers.py") for line in lost["products"].places)
    assert json.loads((folder / "waterfall.json").read_text()) == json.loads(out.read_text())
    page = report_page(folder)
    assert "From the peak to the step" in page
    assert "layers.py" in page


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipeline_counts_what_it_runs(tiny, ranks):
    tiny |= {"mesh": f"dp={ranks},pp=2", "devices": {"emulate": 2 * ranks}}
    tiny |= {"train": {"steps": 2, "global_batch": 2 * ranks}}
    tiny |= {"parallel": {"ddp": {}, "pipeline": {"num_microbatches": 2}}}
    sizes = {"num_layers": 2, "width": 16, "num_heads": 2, "vocab_size": 256, "max_length": 16}
    tiny |= {"model": {"kind": "transformer", **sizes}}
    tiny |= {"data": {"kind": "text", "sequence_length": 16}}
    found = profile_step(RunConfig.from_dict(tiny), 2)
    block = 16 * (4 + 3 * 4) * 16
    # The program computes the masked scores too.
    per_sample = 2 * 16 * (2 * block + 16 * 256 + 2 * 2 * 16 * 16)
    # Each data rank has two samples, and its two stages share a sample.
    assert found.flops == pytest.approx(3 * 2 * per_sample / 2, rel=1e-6)
    lost = {loss.kind: loss for loss in found.losses}
    assert lost["recomputed"].seconds > 0


def test_a_broken_record_is_said(tiny, tmp_path):
    (tmp_path / "config.yaml").write_text(json.dumps(tiny))
    (tmp_path / "waterfall.json").write_text('{"losses": [{"kind": "<script>"}]}')
    page = report_page(tmp_path)
    assert "waterfall.json is broken: this is not a waterfall" in page
    assert "<script>&" not in page
    (tmp_path / "waterfall.json").write_text("[")
    assert "waterfall.json is broken: it is not a JSON object" in report_page(tmp_path)


def test_no_step_is_refused(tiny, tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(tiny))
    assert main(["profile", str(path), "--steps", "0"]) == 2
    assert "num_steps=0" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "none.yaml")]) == 2
