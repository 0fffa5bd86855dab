"""Does a long run that saves often grow? 10 000 steps with 1000 saves, by their resident memory.

    python -m benchmarks.soak --steps 10000 --saves 1000

`axon train` runs a small model on four devices, once for each type of checkpoint, and its resident
memory is read as it goes. After a warm-up of a fifth, the median of each fifth is a row. Exits with
1 where the last is more than 1 % above the second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from axon_dist.checkpoint import StateDictType

from .faults import CONFIG, start

PARTS, MOST_GROWTH = 5, 0.01


def resident_megabytes(pid: int) -> float:
    """The memory of a process, without what it only maps."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024


def last_step(metrics: Path) -> int:
    """The newest step of a run; 0 before the first."""
    if not metrics.exists():
        return 0
    with open(metrics, "rb") as file:
        file.seek(max(file.seek(0, 2) - 4096, 0))
        rows = [json.loads(line) for line in file.read().splitlines()[1:-1]]
    return max((row["step"] for row in rows), default=0)


def sampled(process: subprocess.Popen, metrics: Path) -> list[tuple[int, float]]:
    """Steps and megabytes, ten times a second, until a run ends."""
    rows = []
    while process.poll() is None:
        rows.append((last_step(metrics), resident_megabytes(process.pid)))
        time.sleep(0.1)
    # The last look may have met a process that was ending already.
    return rows[:-2]


def medians(rows: list[tuple[int, float]], steps: int) -> list[float]:
    """The median of each part of a run."""
    bounds = [steps * part // PARTS for part in range(PARTS + 1)]
    parts = itertools.pairwise(bounds)
    return [statistics.median(mb for n, mb in rows if first <= n < last) for first, last in parts]


def measure(folder: Path, type: StateDictType, steps: int, saves: int) -> list[float]:
    """Runs to the end; the medians."""
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"{name}: the quick brown fox jumps over a lazy dog. " * 200)
    config, run = folder / f"{type.value}.yaml", folder / type.value
    text = CONFIG.format(texts=folder, steps=steps).replace("every: 2", f"every: {steps // saves}")
    config.write_text(f"{text}  type: {type.value}\n")
    small = ("model.width=16", "model.ffn_width=32", "train.eval_every=0", "train.log_every=10")
    process = start(config, run, *small)
    rows = sampled(process, run / "metrics.jsonl")
    if process.wait():
        raise SystemExit(run.with_suffix(".log").read_text())
    return medians(rows, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description="A long run that saves often, by its memory.")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--saves", type=int, default=1000)
    parser.add_argument("--type", choices=[type.value for type in StateDictType], action="append")
    arguments = parser.parse_args()
    titles = [f"MB, part {part + 1}" for part in range(PARTS)]
    table = Table("checkpoints", *titles, "growth", title=f"{arguments.saves} saves")
    growths = []
    with tempfile.TemporaryDirectory() as folder:
        for type in map(StateDictType, arguments.type or StateDictType):
            found = measure(Path(folder), type, arguments.steps, arguments.saves)
            growths.append(found[-1] / found[1] - 1)
            table.add_row(type.value, *(f"{mb:.1f}" for mb in found), f"{growths[-1]:+.2%}")
    Console(width=110).print(table)
    return 0 if max(growths) <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
