"""One of four processes of a run is killed or stopped: do the others name it and end in time?"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from axon_dist.launch import LaunchPlan
from axon_dist.launch.local import free_port, rank_environments

PROCESSES, SILENCE_SECONDS, MARGIN_SECONDS, START_SECONDS = 4, 5, 5, 300
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class Peers:
    """The processes of a run, as a scheduler that does not care would have started them."""

    def __init__(self, config: Path, folder: Path):
        self.folder = folder
        folder.mkdir()
        command = [sys.executable, "-m", "axon_dist.train.cli", "train", str(config)]
        command += [f"run_dir={folder / 'run'}", "train.steps=1000000", "train.eval_every=0"]
        plan = LaunchPlan(command=tuple(command), num_processes=PROCESSES)
        base = os.environ | {
            "AXON_SILENCE_TIMEOUT": str(SILENCE_SECONDS),
            "JAX_COMPILATION_CACHE_DIR": str(config.parent / "cache-of-four"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.all = []
        for rank, env in enumerate(rank_environments(plan, base, PROCESSES, free_port())):
            with open(folder / f"{rank}.log", "wb") as log:
                self.all.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    def text(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text()

    def wait_until_they_train(self, steps: int) -> None:
        metrics = self.folder / "run" / "metrics.jsonl"
        deadline = time.monotonic() + START_SECONDS
        while not metrics.exists() or metrics.read_text().count("train/loss") < steps:
            if time.monotonic() > deadline or any(p.poll() is not None for p in self.all):
                raise SystemExit(f"the run of {PROCESSES} did not start:\n{self.text(0)}")
            time.sleep(0.01)

    def end(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()


def lose_one(config: Path, folder: Path, number: int, chance: random.Random) -> tuple[bool, float]:
    """Sends one process a signal; whether the others did well, and the seconds until the last."""
    peers = Peers(config, folder)
    try:
        peers.wait_until_they_train(chance.randrange(1, 30))
        time.sleep(chance.random() * 0.1)
        lost = chance.randrange(PROCESSES)
        started = time.monotonic()
        peers.all[lost].send_signal(number)
        others = [rank for rank in range(PROCESSES) if rank != lost]
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in others:
                peers.all[rank].wait(60)
        seconds = time.monotonic() - started
        have_failed = all((peers.all[rank].poll() or 0) > 0 for rank in others)
        name_it = all(f"lost process {lost} (host " in peers.text(rank) for rank in others)
        in_time = seconds <= SILENCE_SECONDS + MARGIN_SECONDS
        return have_failed and name_it and in_time, seconds
    finally:
        peers.end()


def measure_losses(
    folder: Path, config: Path, runs: int, chance: random.Random
) -> list[tuple[str, int, int]]:
    """Loses processes, half of them killed; rows of fault, how often, how often all was well."""
    rows = []
    for kind, number in SIGNALS.items():
        found = [
            lose_one(config, folder / f"{kind}-{run}", number, chance)
            for run in range(len(range(list(SIGNALS).index(kind), runs, len(SIGNALS))))
        ]
        slowest = max((seconds for _, seconds in found), default=0.0)
        good = sum(is_good for is_good, _ in found)
        name = f"one of {PROCESSES} processes {kind}: the others name it and end"
        print(f"{name}: {good} of {len(found)}, the slowest after {slowest:.1f} s")
        rows.append((f"{name} within {SILENCE_SECONDS + MARGIN_SECONDS} s", len(found), good))
    return rows
