"""`axon train` as users run it: in its own process, with emulated devices."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import yaml

from axon_dist.checkpoint import read_manifest
from axon_dist.launch import INTERRUPTED
from tests.line import OWN

FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
"""The same settings as in the root `conftest.py`: less is compiled."""

CONFIG = """
name: tiny
devices: {{emulate: 8}}
mesh: {{dp: 8}}
model: {{width: 16, num_layers: 1, num_heads: 2, ffn_width: 32, max_length: 32}}
data:
  files: [{texts}/train.txt]
  validation_files: [{texts}/validation.txt]
  sequence_length: 32
optimizer: {{name: adamw, learning_rate: 0.01, schedule: {{name: constant}}}}
train: {{steps: 40, global_batch: 8, eval_every: 20, eval_batches: 2, log_every: 5}}
run_dir: {texts}/run
"""


@pytest.fixture
def config(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text(f"{name}: the quick brown fox jumps. " * 99)
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.format(texts=tmp_path))
    return path


def start(config, *overrides, cwd=None):
    # As on a fresh machine: the device emulation of these tests must not help.
    plain = {k: v for k, v in os.environ.items() if k != "NPROC"}
    plain |= {"XLA_FLAGS": FLAGS}
    return subprocess.Popen(
        [sys.executable, "-m", "axon_dist.train.cli", "train", str(config), *overrides],
        env=plain, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder):
    saved = sorted((folder / "checkpoints").iterdir())
    return [read_manifest(checkpoint).meta["step"] for checkpoint in saved]


@pytest.mark.full
def test_trains(config, tmp_path):
    process = start(config, "train.steps=60")
    out, err = process.communicate(timeout=180)
    assert (process.returncode, err) == (0, ""), err
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["devices"]) == ("finished", 60, 8)
    assert rows_of(folder)[0]["train/loss"] > 4.5
    assert summary["validation_loss"] < 3.5
    assert steps_of(folder) == [60]
    for words in ("compiling the train step: ", "step 60/60", "finished after 60 steps", "nats/",
                  f"run directory: {folder}"):  # fmt: skip
        assert words in out


def test_ctrl_c_keeps_what_was_done(config, tmp_path):
    plain = {"run_dir": str(tmp_path / "run"), "devices": {"emulate": 2}, "mesh": "dp=2", **OWN}
    plain["train"] = {"steps": 1000000, "global_batch": 8, "eval_every": 0, "log_every": 5}
    config.write_text(yaml.safe_dump(plain))
    process = start(config, cwd=pathlib.Path(__file__).parents[3])
    for line in process.stdout:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=180)
    assert (process.returncode, err) == (INTERRUPTED, ""), err
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ended"] == "SIGINT"
    assert summary["steps"] == steps_of(folder)[-1]
    assert rows_of(folder)[-1]["step"] == summary["steps"]
    assert "SIGINT: stopping after this step" in out
    assert re.search(rf"SIGINT after {summary['steps']} steps?\b", out)


@pytest.mark.full
def test_a_screen_that_nobody_reads_any_more_ends_nothing(config, tmp_path):
    """Simulates `axon train ... | head -1`."""
    process = start(config)
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=180), err) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["ended"] == "finished"
    assert steps_of(tmp_path / "run") == [40]
