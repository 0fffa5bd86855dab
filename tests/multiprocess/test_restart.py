"""A run under the launcher that loses a rank goes on from its last checkpoint; SIGTERM saves."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from axon_dist.launch import INTERRUPTED

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

CONFIG = """
name: tiny
devices: {{emulate: 2}}
mesh: {{fsdp: 2}}
parallel: full_shard
model: {{width: 16, num_layers: 1, num_heads: 2, ffn_width: 32, max_length: 16}}
data: {{files: [{folder}/train.txt], validation_files: [{folder}/held.txt], sequence_length: 16}}
train: {{steps: 300, global_batch: 4, eval_every: 0, eval_batches: 1, log_every: 1}}
checkpoint: {{every: 20}}
run_dir: {folder}/run
"""


@pytest.fixture
def start(tmp_path):
    """Starts `axon launch -n 2 OPTIONS -- axon train CONFIG --resume auto`."""
    for name in ("train", "held"):
        (tmp_path / f"{name}.txt").write_text(f"{name}: the quick brown fox jumps. " * 99)
    config = tmp_path / "tiny.yaml"
    config.write_text(CONFIG.format(folder=tmp_path))
    axon = [sys.executable, "-m", "axon_dist.train.cli"]
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    started = []

    def run(*options, overrides=()):
        train = [*axon, "train", str(config), *overrides, "--resume", "auto"]
        launch = [*axon, "launch", "-n", "2", "--log-dir", str(tmp_path / "logs"), *options]
        process = subprocess.Popen(
            [*launch, "--", *train], env=env, stderr=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def checkpoints(tmp_path):
    return sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("step_????????"))


def wait_for_checkpoint(tmp_path, process):
    deadline = time.monotonic() + 200
    while not checkpoints(tmp_path):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ranks_of(process):
    """The process ids of the ranks, by rank."""
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    environments = {pid: pathlib.Path(f"/proc/{pid}/environ").read_text() for pid in children}
    ranks = {
        int(line.removeprefix("RANK=")): int(pid)
        for pid, text in environments.items()
        for line in text.split("\0")
        if line.startswith("RANK=")
    }
    assert sorted(ranks) == [0, 1]
    return ranks


def steps_in(tmp_path):
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "train/loss" in row]


@pytest.mark.parametrize(("options", "processes"), [([], 2), (["--elastic"], 1)])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_restarts_the_run(start, tmp_path, options, processes, lost):
    process = start("--max-restarts", "1", *options)
    wait_for_checkpoint(tmp_path, process)
    os.kill(ranks_of(process)[lost], signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    assert f"rank {lost} was killed by SIGKILL" in err
    assert f"restart 1 of 1, with {processes} processes" in err
    assert steps_in(tmp_path) == list(range(1, 301))
    assert re.search(r"resuming after step \d+0 from", out)


def test_sigterm_saves_everywhere_and_is_for_the_scheduler_to_start_again(start, tmp_path):
    process = start("--max-restarts", "5", overrides=["train.steps=100000"])
    wait_for_checkpoint(tmp_path, process)
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, out + err
    assert "ending the other ranks" not in err
    assert "restart" not in err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ended"] in ("SIGTERM", "another process")
    assert checkpoints(tmp_path)[-1] == f"step_{summary['steps']:08}"
