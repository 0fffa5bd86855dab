"""Runs, data and weights in buckets, against a server of this machine."""

import json

import pytest

from axon_dist.app import evaluate, export_run, report_page, train
from axon_dist.config import RunConfig
from axon_dist.core.errors import ConfigError

from .test_resume import bits


@pytest.fixture
def config(tiny):
    def make(run_dir, **sections):
        data = tiny | {"run_dir": str(run_dir), "checkpoint": {"every": 1, "keep": 9}}
        data["model"] = tiny["model"] | {"dropout": 0.1}
        data["train"] = tiny["train"] | {"log_every": 1}
        return RunConfig.from_dict(data | sections)

    return make


def metrics(contents):
    rows = map(json.loads, contents.decode().splitlines())
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def drop_after(store, step):
    """As if the machine had died after the checkpoint of a step."""
    for name in store.names("bucket/run/checkpoints/"):
        if int(name.split("/")[3].removeprefix("step_")) > step:
            del store.objects[name]
    lines = store.objects["bucket/run/metrics.jsonl"][1].splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    store.objects["bucket/run/metrics.jsonl"] = 1, b"".join(kept)


def test_a_run_in_a_bucket_goes_on_as_one_on_a_disk_and_is_read(config, store, tmp_path):
    whole = train(config(tmp_path / "whole"))
    store.faults = 0.1
    address = "gs://bucket/run"
    train(config(address))
    with pytest.raises(ConfigError, match="run_dir: 'gs://bucket/run' holds a run already"):
        train(config(address))
    store.faults = 0.0
    drop_after(store, 3)
    told = store.requests
    told.clear()
    resumed = train(config(address), resume="auto")
    assert bits(resumed.result.state) == bits(whole.result.state)
    there = store.objects["bucket/run/metrics.jsonl"][1]
    assert metrics(there) == metrics(whole.directory.metrics.read_bytes())
    assert json.loads(store.objects["bucket/run/summary.json"][1])["steps"] == 6
    first = next(n for n, line in enumerate(told) if line.startswith("DELETE"))
    assert "summary.json" in told[first]
    assert not resumed.directory.path.exists()
    found, expected = evaluate(address), evaluate(tmp_path / "whole")
    assert str(found.checkpoint) == f"{address}/checkpoints/step_00000006"
    assert found.metrics == expected.metrics
    assert export_run(address, tmp_path / "out.safetensors", step=6)
    assert "final validation loss" in report_page(address)
