"""Every signal in every phase of a run, once, twice and ten times: what it exits with and leaves.

    python -m benchmarks.signals                       # axon train and axon launch
    python -m benchmarks.signals --only launch SIGHUP  # cells whose name has these words
    python -m benchmarks.signals --log rows.txt        # goes on with those that are not in a file

A run of a tiny model gets a signal while it starts, compiles, steps, saves or ends, and one under
the launcher also before its first rank. It has to exit with a code that `docs/guides/machines.md`
says, within `IN_TIME` seconds; a code that says that the state is saved has to be true, what was
saved before has to be whole, and no process may be left. Exits with 1 if a cell is bad.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from axon_dist.checkpoint import CheckpointManager
from axon_dist.checkpoint.seal import check_files, read_manifest

from .faults_launched import MARK, marked, within
from .rows import GOOD, as_line, done_in, note_in

STEPS, SAVED_EVERY, IN_TIME, PAUSE = 300, 5, 60.0, 0.15
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")
SAVING = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""The signals after which a run saves its state."""
PHASES = ("before the first rank", "starting", "compiling", "stepping", "saving", "ending")
TIMES = (1, 2, 10)
LAUNCHES = "processes; their logs"
"""The launcher's line before its first rank."""
INTERRUPTED, LOST = 75, 76
WHERE = ("train", "launch")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A signal, its receiver, when it is sent, and how often."""

    where: str
    name: str
    phase: str
    times: int

    def __str__(self) -> str:
        return f"{self.where}, {self.name} x {self.times}, {self.phase}"

    @property
    def codes(self) -> frozenset[int]:
        """The exit codes that are documented."""
        number = 128 + signal.Signals[self.name]
        if self.name == "SIGUSR1":
            # It asks for a trace; Python itself, which starts for a moment, does not know that.
            return frozenset({0, number} if self.phase in PHASES[:2] else {0})
        if self.name not in SAVING:
            # They end a run at once, unless it has ended.
            return frozenset({number, 0} if self.phase == "ending" else {number})
        codes = {INTERRUPTED}
        if self.phase in ("starting", "compiling") and self.where == "train":
            codes.add(number)
        if self.times > 1 and self.name != "SIGHUP":
            # A second one ends a run at once.
            codes.add(number)
        if self.phase == "ending":
            codes |= {0, number}
        return frozenset(codes)


def cells() -> list[Cell]:
    """All of them."""
    rows = itertools.product(WHERE, SIGNALS, PHASES, TIMES)
    return [Cell(*row) for row in rows if row[0] == "launch" or row[2] != PHASES[0]]


def _environment(folder: Path, phase: str, mark: str) -> dict[str, str]:
    """That of a run, in which what is not looked at costs little."""
    hidden = ("NPROC", "AXON_MEMORY", "JAX_NUM_CPU_DEVICES", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {MARK: mark, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    if phase == "compiling":
        # There is no compiled program to be read.
        env["XDG_CACHE_HOME"] = str(folder / "programs")
    return env


def heed_signals() -> None:
    """Makes runs heed what this process ignores, as nohup and background jobs of shells have it."""
    for name in SIGNALS:
        number = signal.Signals[name]
        if signal.getsignal(number) is signal.SIG_IGN:
            # Signals that are handled here have their default in processes that are started.
            signal.signal(number, lambda number, frame: None)


class Run:
    """A run that gets signals.

    Args:
        folder: an empty one, for all that it writes.
        where: `train`, or `launch` for two processes under the launcher.
        steps: how many it takes.
        phase: the one in which it gets a signal.
    """

    def __init__(self, folder: Path, where: str, steps: int, phase: str):
        folder.mkdir()
        self.where, self.began = where, time.monotonic()
        self.folder, self.log, self.mark = folder / "run", folder / "log", uuid.uuid4().hex
        (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 80)
        (folder / "b.txt").write_text("a lazy dog jumps over the quick brown fox. " * 20)
        config = {
            "name": "signals",
            "run_dir": str(self.folder),
            "model": {"width": 8, "num_layers": 1, "num_heads": 1, "ffn_width": 8},
            "data": {
                "files": [str(folder / "a.txt")],
                "validation_files": [str(folder / "b.txt")],
                "sequence_length": 8,
            },
            "optimizer": {"name": "sgd", "learning_rate": 0.01},
            "train": {"steps": steps, "global_batch": 4, "eval_every": 0, "log_every": 1},
            "checkpoint": {"every": SAVED_EVERY, "keep": 2, "type": "full"},
            "mesh": {"dp": 2},
        }
        config["model"]["max_length"] = 8
        if where == "train":
            config["devices"] = {"emulate": 2}
        (folder / "config.yaml").write_text(json.dumps(config))
        axon = [sys.executable, "-m", "axon_dist.train.cli"]
        command = [*axon, "train", str(folder / "config.yaml"), "--resume", "auto"]
        if where == "launch":
            logs = ["--log-dir", str(folder / "logs")]
            launch = [*axon, "launch", "-n", "2", "--devices-per-process", "1", *logs, "--"]
            command = [*launch, *command]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command, env=_environment(folder, phase, self.mark), stdout=log, stderr=log
            )

    @property
    def said(self) -> str:
        """Its output."""
        return self.log.read_text(errors="replace")

    def step(self) -> int:
        """The newest step in its metrics."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return max(map(int, re.findall(r'"step": (\d+),.*"train/loss"', text)), default=0)

    def is_in(self, phase: str, steps: int) -> bool:
        """Whether a phase has come."""
        checkpoints = self.folder / "checkpoints"
        if self.where == "launch" and LAUNCHES not in self.said:
            # The launcher itself is an interpreter that starts.
            self.began = time.monotonic()
            return False
        match phase:
            case "before the first rank":
                return LAUNCHES in self.said
            case "starting":
                # Python has read this library, and no folder is there yet.
                return time.monotonic() - self.began > 1.5
            case "compiling":
                return (self.folder / "config.yaml").exists() and "run directory" in self.said
            case "stepping":
                return self.step() > SAVED_EVERY + 1
            case "saving":
                return self.step() > SAVED_EVERY and any(checkpoints.glob("step_*.tmp"))
        return self.step() >= steps or (self.folder / "summary.json").exists()


def problem_of(folder: Path, cell: Cell) -> str | None:
    """Returns the fault in a run's behaviour; None if there is none."""
    heed_signals()
    steps = 3 * SAVED_EVERY if cell.phase == "ending" else STEPS
    if cell.name == "SIGUSR1":
        steps = 3 * SAVED_EVERY
    run = Run(folder, cell.where, steps, cell.phase)
    try:
        while run.process.poll() is None and not run.is_in(cell.phase, steps):
            # A save of this model is short.
            time.sleep(0.002 if cell.phase == "saving" else 0.02)
        for number in range(cell.times):
            time.sleep(PAUSE if number else 0)
            run.process.send_signal(signal.Signals[cell.name])
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(IN_TIME if cell.name != "SIGUSR1" else 3 * IN_TIME)
        return _problem_after(run, cell)
    finally:
        run.process.kill()
        run.process.wait()
        within(10, lambda: not marked(run.mark))


def _problem_after(run: Run, cell: Cell) -> str | None:
    code = run.process.poll()
    if code is None:
        return f"it runs on after {IN_TIME:g} s"
    code = code if code >= 0 else 128 - code
    if not within(10, lambda: not marked(run.mark)):
        return f"left behind: {', '.join(marked(run.mark).values())[:300]}"
    if code not in cell.codes:
        last = "".join(run.said.splitlines(keepends=True)[-4:])
        return f"exit {code}, not {sorted(cell.codes)}: {last}"
    manager = CheckpointManager(run.folder / "checkpoints")
    if damages := manager.passed_over():
        return f"damaged: {damages[0]}"
    newest = max(0, manager.newest_step())
    if newest > 0:
        path = run.folder / "checkpoints" / f"step_{newest:08d}"
        check_files(path, read_manifest(path))
    if code in (0, INTERRUPTED) and newest < run.step():
        return f"exit {code}, and step {newest} is saved where {run.step()} was taken"
    return None


def measure_signals(
    folder: Path, chosen: Sequence[Cell], log: Path | None = None
) -> list[tuple[str, int, int]]:
    """Rows of a command and a signal, how often, and how often it did as documented.

    Args:
        folder: an empty one.
        chosen: of `cells()`.
        log: a file with a line for each cell; a cell that is there is not tried again.
    """
    counts: dict[str, list[int]] = {}
    done = done_in(log)
    for number, cell in enumerate(chosen):
        if str(cell) not in done:
            done[str(cell)] = as_line(problem_of(folder / str(number), cell))
            print(f"{cell}: {done[str(cell)]}", flush=True)
            note_in(log, str(cell), done[str(cell)])
        row = counts.setdefault(f"axon {cell.where}: {cell.name}", [0, 0])
        row[0] += 1
        row[1] += done[str(cell)] == GOOD
    return [(name, row[0], row[1]) for name, row in counts.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=(), help="words that a cell has to have")
    parser.add_argument("--log", type=Path, help="a file of the cells that are done")
    asked = parser.parse_args()
    words = asked.only
    chosen = [cell for cell in cells() if all(word in str(cell) for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_signals(Path(folder), chosen, asked.log)
    for name, count, good in rows:
        print(f"{name}: {good}/{count}")
    return 0 if all(count == good for _, count, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
