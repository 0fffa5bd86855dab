"""Does a long run grow that is stopped, killed and has its logs rotated? By what the kernel counts.

    python -m benchmarks.long_run --steps 20000 --saves 400 --stops 10 --kills 4 --rotations 10

`axon launch` runs a tiny model with checkpoints and copies in memory. At steps spread over the run
its process is stopped for a second or killed, or its log is renamed or cut to nothing, as logrotate
does. Memory, open files and threads of the launcher and of the rank, shared memory and the disk of
the checkpoints are read as it goes. Each is put into parts, of `PART` steps or, after many kills,
one for each process; the median of a part counts. A row is the slope of a line through the parts,
per 1000 steps, with its standard error. The line goes through all processes, so that it also shows
a process that needs more memory the longer the run is that it resumes. Exits with 1 where the run
did not end as it should, or something grew over the run by more than 1 % and two standard errors.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from .soak import last_step

PART, MANY, WARM_UP, MOST_GROWTH = 250, 8, 2000, 0.01
"""Steps of a part; processes from which on each is a part; steps after a start that do not count;
growth that is allowed.

Caches fill at first: JAX's, and the table of CPython's interned strings, which grows once by 4 MB.
"""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The kernel's counts at a moment.

    Args:
        step: the newest step in the metrics.
        pid: the process that trains.
        numbers: by its name each count.
    """

    step: int
    pid: int
    numbers: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Slope:
    """Growth per 1000 steps, its standard error, and the median of all parts."""

    growth: float
    error: float
    median: float

    def is_flat(self, steps: int) -> bool:
        """Whether growth over so many steps is within two standard errors of what is allowed."""
        return (self.growth - 2 * self.error) * steps / 1000 <= MOST_GROWTH * self.median


def slope_of(samples: list[Sample], name: str) -> Slope:
    """The slope of a count.

    Args:
        samples: of a run.
        name: a key of their numbers.
    """
    firsts: dict[int, int] = {}
    for sample in samples:
        firsts.setdefault(sample.pid, sample.step)
    # Samples of one process are alike, so each process is one part if there are enough of them.
    has_many = len(firsts) >= MANY
    parts: dict[int, list[tuple[int, float]]] = {}
    for sample in samples:
        if sample.step >= firsts[sample.pid] + WARM_UP and name in sample.numbers:
            part = sample.pid if has_many else sample.step // PART
            parts.setdefault(part, []).append((sample.step, sample.numbers[name]))
    values = np.array([statistics.median(x for _, x in part) for part in parts.values()])
    if len(values) < 3:
        raise SystemExit(f"{name}: {len(values)} parts are too few for a slope; take more steps")
    steps = np.array([statistics.fmean(at for at, _ in part) / 1000 for part in parts.values()])
    centred = steps - steps.mean()
    growth = float(centred @ values / (centred @ centred))
    rest = values - values.mean() - growth * centred
    error = math.sqrt(float(rest @ rest) / (len(values) - 2) / float(centred @ centred))
    return Slope(growth, error, float(np.median(values)))


class LongRun:
    """A run under the launcher.

    Args:
        folder: an empty one.
        steps: how many it takes.
        saves: how many checkpoints; four times as many copies go to memory.
    """

    def __init__(self, folder: Path, steps: int, saves: int):
        self.run, self.logs, self.said = folder / "run", folder / "logs", folder / "said"
        self.steps, self.rotated = steps, 0
        (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
        (folder / "b.txt").write_text("a lazy dog jumps over the quick brown fox. " * 20)
        every = max(4, steps // saves)
        config = {
            "name": "long",
            "run_dir": str(self.run),
            "model": {"width": 8, "num_layers": 1, "num_heads": 1, "ffn_width": 8, "max_length": 8},
            "data": {
                "files": [str(folder / "a.txt")],
                "validation_files": [str(folder / "b.txt")],
                "sequence_length": 8,
            },
            "optimizer": {"name": "adamw", "learning_rate": 0.001},
            "train": {"steps": steps, "global_batch": 4, "eval_every": 0, "log_every": 10},
            "checkpoint": {"every": every, "keep": 2, "memory_every": every // 4},
            "mesh": {"dp": 1},
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        axon = [sys.executable, "-m", "axon_dist.train.cli"]
        launch = [*axon, "launch", "-n", "1", "--devices-per-process", "1", "--max-restarts", "999"]
        train = [*axon, "train", str(folder / "config.yaml"), "--resume", "auto"]
        hidden = ("XLA_FLAGS", "NPROC", "AXON_MEMORY", "PYTHONDONTWRITEBYTECODE")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        with open(self.said, "ab") as log:
            self.launcher = subprocess.Popen(
                [*launch, "--log-dir", str(self.logs), "--", *train],
                env=env, stdout=log, stderr=log,
            )  # fmt: skip

    def step(self) -> int:
        """The newest step in its metrics."""
        return last_step(self.run / "metrics.jsonl")

    def rank(self) -> int | None:
        """The process that trains; None while there is none."""
        with contextlib.suppress(OSError):
            number = self.launcher.pid
            for pid in Path(f"/proc/{number}/task/{number}/children").read_text().split():
                if b"\0RANK=0\0" in Path(f"/proc/{pid}/environ").read_bytes():
                    return int(pid)
        return None

    def sample(self) -> Sample | None:
        """The kernel's counts now; None while no process trains."""
        pid, numbers = self.rank(), dict[str, float]()
        if pid is None:
            return None
        try:
            for name, number in (("launcher", self.launcher.pid), ("rank", pid)):
                numbers |= {f"{name}: {what}": n for what, n in _counts(number).items()}
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return None
        if (memory := re.search(rb"AXON_MEMORY=([^\0]+)", environ)) is not None:
            numbers["shared memory, kB"] = _size(Path(os.fsdecode(memory[1]))) / 1000
        numbers["checkpoints, kB"] = _size(self.run / "checkpoints") / 1000
        others = [path for path in self.run.glob("*") if path.name != "metrics.jsonl"]
        numbers["files of the run"] = len(others)
        return Sample(self.step(), pid, numbers)

    def stop(self) -> None:
        """Stops the process that trains for a second."""
        if (pid := self.rank()) is not None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1)
            os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kills the process that trains; the launcher starts another."""
        if (pid := self.rank()) is not None:
            os.kill(pid, signal.SIGKILL)

    def rotate(self) -> None:
        """Renames the logs of ranks, or cuts them to nothing, in turn."""
        self.rotated += 1
        for path in self.logs.rglob("*.log"):
            if self.rotated % 2:
                path.rename(path.with_suffix(".old"))
            else:
                os.truncate(path, 0)


def _counts(pid: int) -> dict[str, float]:
    """Memory that only this process has, its open files and its threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = re.search(r"RssAnon:\s+(\d+)", status)
    threads = re.search(r"Threads:\s+(\d+)", status)
    if anonymous is None or threads is None:
        raise ProcessLookupError(pid)
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return {"MB": int(anonymous[1]) / 1024, "files": files, "threads": int(threads[1])}


def _size(folder: Path) -> int:
    """Bytes of all files below a folder, without those under way."""
    size = 0
    for path in folder.rglob("*"):
        is_under_way = any(part.endswith(".tmp") for part in path.relative_to(folder).parts)
        # Older ones are removed meanwhile.
        with contextlib.suppress(OSError):
            size += 0 if is_under_way or path.is_dir() else path.stat().st_size
    return size


def watch(run: LongRun, events: list[tuple[int, Callable[[], None]]]) -> list[Sample]:
    """Samples a run twice a second until it ends.

    Args:
        run: the run.
        events: steps, rising, and what is done after each.
    """
    samples, left = list[Sample](), list(events)
    while run.launcher.poll() is None:
        sample = run.sample()
        if sample is not None:
            samples.append(sample)
            if left and sample.step >= left[0][0]:
                left.pop(0)[1]()
        time.sleep(0.5)
    return samples


def events_of(run: LongRun, stops: int, kills: int, rotations: int) -> list:
    """So many of each, spread evenly over a run."""
    events = []
    for count, act in ((stops, run.stop), (kills, run.kill), (rotations, run.rotate)):
        events += [(run.steps * (n + 1) // (count + 1), act) for n in range(count)]
    return sorted(events, key=lambda event: event[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, count in (("steps", 100_000), ("saves", 2000), ("stops", 50), ("kills", 20)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--rotations", type=int, default=20)
    parser.add_argument("--samples", type=Path, help="a file for all samples, one a line")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = LongRun(Path(folder), asked.steps, asked.saves)
        try:
            samples = watch(run, events_of(run, asked.stops, asked.kills, asked.rotations))
        finally:
            run.launcher.terminate()
            code = run.launcher.wait()
        if asked.samples:
            rows = [json.dumps(dataclasses.asdict(sample)) + "\n" for sample in samples]
            asked.samples.write_text("".join(rows))
        has_ended = code == 0 and (run.run / "summary.json").exists()
        if not has_ended:
            print(f"exit {code} at step {run.step()}: {run.said.read_text()[-2000:]}")
    table = Table(
        "what", "median", "per 1000 steps", "standard error", title=f"{asked.steps} steps"
    )
    is_flat = True
    for name in samples[-1].numbers:
        slope = slope_of(samples, name)
        is_flat = is_flat and slope.is_flat(asked.steps)
        cells = (f"{slope.median:.1f}", f"{slope.growth:+.3f}", f"{slope.error:.3f}")
        table.add_row(name, *cells)
    Console(width=100).print(table)
    return 0 if has_ended and is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
