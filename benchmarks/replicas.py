"""A run of four processes loses one, and goes on from the copies in memory: with what, and when?

    python -m benchmarks.replicas --runs 20 --hosts 20

`axon launch` runs a small transformer, data-parallel over four processes, whose state is copied
into the memory of the host every few steps. At a random step a random process gets SIGKILL. Half of
the runs then go on with three processes (`--elastic`), which keep the global batch by more
microbatches; they have to end with the very bits of a run of three that begins with a checkpoint of
the step that the copy had. The other half goes on with all four, and has to end with the bits of a
run that nobody disturbed. Then four launchers, each with a process and a memory of its own, stand
for four hosts that the state is split over (`fsdp`). One of them is lost: its launcher gets
SIGKILL, what it had in memory is removed, and another takes its place; five times in each run,
which has to end with the bits of one that nobody disturbed. No run may read a checkpoint. Exits
with 1 if one did, or ended with other bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from axon_dist.launch.local import free_port

from .faults import final_bits

PROCESSES, STEPS, EVERY = 4, 40, 3
CONFIG = """
name: replicas
mesh: {{dp: -1}}
parallel: ddp
model: {{width: 16, num_layers: 2, num_heads: 2, ffn_width: 32, max_length: 16}}
data: {{files: [{texts}/a.txt], validation_files: [{texts}/b.txt], sequence_length: 16}}
optimizer: {{name: adamw, learning_rate: 0.003}}
train: {{steps: {steps}, global_batch: 12, eval_every: 0, eval_batches: 1, log_every: 1}}
checkpoint: {{every: {every}, keep: 100, memory_every: {every}}}
"""
FEWER, WHOLE = "three go on", "four go on"
HOST = "its host was lost, under fsdp"
SHARDED = ("mesh={fsdp: -1}", "parallel=fsdp")
SILENCE_SECONDS = 10
LOSSES = 5
"""In each run that loses hosts."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """The outcome of a run that lost a process.

    Args:
        kind: `FEWER`, `WHOLE` or `HOST`.
        at: the newest step in its metrics when the process was killed.
        copied: the step of the copy that it went on from.
        seconds: from the kill to the first step that it had not taken before.
        has_same_bits: whether it ended as it should.
    """

    kind: str
    at: int
    copied: int
    seconds: float
    has_same_bits: bool


class Runs:
    """Runs of one config in one folder.

    Args:
        folder: for the texts, the runs and the compilation cache.
        overrides: of the config.
        silence: seconds after which a process that says nothing is lost, beyond what a launcher
            sees of its own host; None leaves the usual ones.
    """

    def __init__(self, folder: Path, overrides: tuple[str, ...] = (), silence: float | None = None):
        self.silence = {} if silence is None else {"AXON_SILENCE_TIMEOUT": str(silence)}
        self.folder, self.config, self.overrides = folder, folder / "config.yaml", overrides
        for name in ("a.txt", "b.txt"):
            (folder / name).write_text(f"{name}: the quick brown fox jumps over a lazy dog. " * 200)
        self.config.write_text(CONFIG.format(texts=folder, steps=STEPS, every=EVERY))
        self._expected: dict[int, dict[str, bytes]] = {}

    def start(self, name: str, count: int, *options: str, overrides: tuple[str, ...] = ()):
        """`axon launch` on its way, with `count` processes of one device each."""
        hidden = ("XLA_FLAGS", "NPROC", "AXON_MEMORY", "PYTHONDONTWRITEBYTECODE")
        env = {key: value for key, value in os.environ.items() if key not in hidden} | {
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **self.silence,
        }
        axon = [sys.executable, "-m", "axon_dist.train.cli"]
        logs = self.folder / f"{name}-logs"
        launch = [*axon, "launch", "-n", str(count), "--devices-per-process", "1"]
        launch += ["--max-restarts", "3", "--log-dir", str(logs)]
        train = [*axon, "train", str(self.config), f"run_dir={self.folder / name}"]
        train += ["--resume", "auto"]
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [*launch, *options, "--", *train, *self.overrides, *overrides],
                env=env,
                stdout=log,
                stderr=log,
            )

    def finish(self, name: str, count: int, *overrides: str) -> dict[str, bytes]:
        """The bits that an undisturbed run ends with."""
        if self.start(name, count, overrides=overrides).wait():
            raise SystemExit(self.log(name))
        return final_bits(self.folder / name)

    def log(self, name: str) -> str:
        """The output of the launcher and rank 0."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def records(self, name: str) -> list[dict]:
        """The metrics of a run so far."""
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if "train/loss" in row]

    def expected(self, kind: str, copied: int) -> dict[str, bytes]:
        """The bits that a run should end with which went on from the copy of a step.

        A run of three begins with the checkpoint that an undisturbed run of four has written after
        that step, and is told the microbatches.
        """
        if STEPS not in self._expected:
            self._expected[STEPS] = self.finish("undisturbed", PROCESSES)
        if kind == WHOLE:
            return self._expected[STEPS]
        if copied not in self._expected:
            name, checkpoint = f"from-{copied}", f"checkpoints/step_{copied:08d}"
            source = self.folder / "undisturbed" / checkpoint
            shutil.copytree(source, self.folder / name / checkpoint)
            self._expected[copied] = self.finish(name, PROCESSES - 1, "train.accumulate=2")
        return self._expected[copied]


def pid_of(launcher: subprocess.Popen, rank: int) -> int:
    """The process of a rank."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    mark = f"\0RANK={rank}\0"
    return next(int(p) for p in children if mark in Path(f"/proc/{p}/environ").read_text())


def lose_one(runs: Runs, name: str, kind: str, chance: random.Random) -> Loss:
    """Kills one process at a random step; what became of the run."""
    options = ("--elastic",) if kind == FEWER else ()
    launcher = runs.start(name, PROCESSES, *options)
    wanted, rank = chance.randrange(EVERY + 1, STEPS - 5), chance.randrange(PROCESSES)
    while len(runs.records(name)) < wanted:
        if launcher.poll() is not None:
            raise SystemExit(runs.log(name))
        time.sleep(0.01)
    time.sleep(chance.random() * 0.05)
    at, killed = runs.records(name)[-1]["step"], time.time()
    os.kill(pid_of(launcher, rank), signal.SIGKILL)
    if launcher.wait():
        raise SystemExit(runs.log(name))
    found = re.search(r"resuming after step (\d+) from the copies in memory", runs.log(name))
    if found is None:
        return Loss(kind, at, -1, float("nan"), False)
    copied = int(found[1])
    beyond = [r["time/unix"] for r in runs.records(name) if r["step"] > at]
    expected = runs.expected(kind, copied)
    return Loss(kind, at, copied, min(beyond) - killed, final_bits(runs.folder / name) == expected)


class Hosts:
    """The launchers of a run over several hosts, which share nothing but the run's folder."""

    def __init__(self, runs: Runs, name: str):
        self.runs, self.name, self.port = runs, name, free_port()
        self.launchers = [self.start(rank) for rank in range(PROCESSES)]

    def start(self, rank: int) -> subprocess.Popen:
        options = ["--nnodes", str(PROCESSES), "--node-rank", str(rank), "--max-restarts", "99"]
        options += ["--master-addr", "127.0.0.2", "--master-port", str(self.port)]
        return self.runs.start(self.name, 1, *options)

    def lose(self, rank: int) -> None:
        """A host is gone with all that is in its memory, and an empty one takes its place."""
        environ = Path(f"/proc/{pid_of(self.launchers[rank], rank)}/environ")
        memory = re.search(r"AXON_MEMORY=([^\0]+)", environ.read_text())
        assert memory is not None
        self.launchers[rank].kill()
        self.launchers[rank].wait()
        while environ.exists():
            time.sleep(0.01)
        # A launcher that starts removes the memory of launchers that are dead, here on one machine.
        shutil.rmtree(memory[1], ignore_errors=True)
        self.launchers[rank] = self.start(rank)

    def until(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            if any(launcher.poll() for launcher in self.launchers):
                raise SystemExit(self.runs.log(self.name))
            time.sleep(0.01)


def lose_hosts(runs: Runs, name: str, count: int, chance: random.Random) -> list[Loss]:
    """Loses one host after the other at random steps; what became of the run each time."""
    hosts, losses, at = Hosts(runs, name), [], 0
    copies = re.compile(r"resuming after step (\d+) from the copies in memory")
    try:
        for number in range(count):
            wanted = at + chance.randrange(EVERY + 1, (STEPS - 1) // count)
            hosts.until(lambda n=wanted: any(r["step"] >= n for r in runs.records(name)))
            time.sleep(chance.random() * 0.05)
            killed = time.time()
            hosts.lose(chance.randrange(PROCESSES))
            # The others may have been in a step that needs it no more.
            time.sleep(1)
            at = runs.records(name)[-1]["step"]

            def beyond(at=at) -> list[float]:
                return [r["time/unix"] for r in runs.records(name) if r["step"] > at]

            hosts.until(lambda is_there=beyond: bool(is_there()))
            copied = [int(step) for step in copies.findall(runs.log(name))]
            found = copied[-1] if len(copied) == number + 1 else -1
            losses.append(Loss(HOST, at, found, min(beyond()) - killed, found > 0))
            print(losses[-1], flush=True)
        done = [launcher.wait() for launcher in hosts.launchers]
    finally:
        for launcher in hosts.launchers:
            launcher.terminate()
            launcher.wait()
    same = not any(done) and final_bits(runs.folder / name) == runs.expected(WHOLE, 0)
    return [replace(loss, has_same_bits=loss.has_same_bits and same) for loss in losses]


def table_of(losses: list[Loss]) -> Table:
    """A row for each kind of loss."""
    columns = ("then", "times", "same bits", "steps again", "seconds lost", "most")
    table = Table(*columns, title=f"one of {PROCESSES} killed")
    for kind in (FEWER, WHOLE, HOST):
        rows = [loss for loss in losses if loss.kind == kind]
        if rows:
            seconds = [loss.seconds for loss in rows]
            again = f"at most {max(loss.at - loss.copied for loss in rows)}"
            good = sum(loss.has_same_bits for loss in rows)
            times = f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"
            table.add_row(kind, str(len(rows)), f"{good}/{len(rows)}", again, *times)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20, help="processes to kill, one in each run")
    parser.add_argument(
        "--hosts", type=int, default=20, help=f"hosts to lose, {LOSSES} in each run"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the ranks")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder))
        for number in range(arguments.runs):
            losses.append(lose_one(runs, f"run-{number}", (FEWER, WHOLE)[number % 2], chance))
            print(f"run {number + 1} of {arguments.runs}: {losses[-1]}", flush=True)
            shutil.rmtree(Path(folder) / f"run-{number}")
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), SHARDED, silence=SILENCE_SECONDS)
        for first in range(0, arguments.hosts, LOSSES):
            count = min(LOSSES, arguments.hosts - first)
            losses += lose_hosts(runs, f"hosts-{first}", count, chance)
    Console().print(table_of(losses))
    return 0 if all(loss.has_same_bits for loss in losses) else 1


if __name__ == "__main__":
    sys.exit(main())
