"""The cost of continuing after a kill: from starting Python to the end of the next step.

    python -m benchmarks.restart [--kills 10] [--config configs/quickstart.yaml] [KEY=VALUE ...]

Trains a config once undisturbed, and once more in a process that SIGKILL ends a step after a
checkpoint, to go on with `--resume auto`. Both have to end with the same bits. Seconds are those of
the clock, and of the CPU on all cores, until the first step after the start has ended. Programs are
kept in a folder of this benchmark, empty at first, and modules are compiled next to it, as
installing them does. `--without-cache` keeps no programs. Exits with 1 if the bits differ.

Each start may be in another layout: `--layouts` takes overrides for one start after another, again
from the first when all are through. The undisturbed run has those of the first. For elastic bits:

    python -m benchmarks.restart deterministic=elastic logical_shards=8 --layouts mesh=dp=8 \\
        "devices.emulate=2 mesh=dp=2" "devices.emulate=4 mesh=fsdp=4 parallel=fsdp"
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from axon_dist.checkpoint import read_manifest

EVERY = 4
_COMPILED = "compiling the train step: "
_CLOCK = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run, up to the end of its first step.

    Args:
        seconds: of the clock.
        cpu_seconds: of all threads.
        compile_seconds: of the clock, in the first step.
    """

    seconds: float
    cpu_seconds: float
    compile_seconds: float


class Runs:
    """Starts one run again and again.

    Args:
        args: of the command line.
        folder: holds the runs, what Python compiles, and compiled programs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.folder, self.args = folder, args
        own = {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPYCACHEPREFIX": str(folder / "pyc")}
        cached = {"JAX_ENABLE_COMPILATION_CACHE": "0"} if args.without_cache else {}
        left = {"PYTHONDONTWRITEBYTECODE", "JAX_COMPILATION_CACHE_DIR"}
        env = {name: value for name, value in os.environ.items() if name not in left}
        self.env = {**env, **own, **cached, "PYTHONUNBUFFERED": "1"}

    def start(self, name: str, steps: int, kill_after: int | None, layout: str) -> Start:
        """Starts or goes on with a run, and kills it after a checkpoint, or lets it end."""
        run = self.folder / name
        overrides = [f"run_dir={run}", f"train.steps={steps}", f"checkpoint.every={EVERY}"]
        verb = ["train", self.args.config, *overrides, *self.args.overrides, *layout.split()]
        verb += ["--resume", "auto"]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "axon_dist.train.cli", *verb],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env,
        )  # fmt: skip
        assert process.stdout is not None
        told, found = [], None
        for line in process.stdout:
            told.append(line)
            if line.startswith(_COMPILED):
                seconds = time.perf_counter() - begin
                compiled = float(line.removeprefix(_COMPILED).split()[0])
                found = Start(seconds, _cpu_seconds(process.pid), compiled)
                break
        if found is not None and kill_after is not None:
            while process.poll() is None and not is_saved(run, kill_after):
                time.sleep(0.01)
            process.kill()
        rest = process.stdout.read()
        if (process.wait() and kill_after is None) or found is None:
            raise SystemExit("".join(told) + rest)
        return found


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK


def is_saved(run: Path, step: int) -> bool:
    """Whether a run has a checkpoint of a step, or of a later one."""
    names = [one.name for one in run.glob("checkpoints/step_*")]
    return any(name[5:].isdigit() and int(name[5:]) >= step for name in names)


def last_checksums(run: Path) -> object:
    """The checksums of all leaves of the last state."""
    last = max(run.glob("checkpoints/step_*"))
    return last.name, dict(read_manifest(last).checksums)


def main() -> None:
    """Measures, prints a table, and exits with 1 if a bit differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--without-cache", action="store_true")
    parser.add_argument("--layouts", nargs="+", default=[""], metavar="OVERRIDES")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="axon-restart-"))
    runs, steps = Runs(args, folder), EVERY * (args.kills + 8)
    try:
        table = Table("start", "seconds", "CPU-seconds", "first step")
        kept = []
        for number in range(args.kills + 1):
            is_last = number == args.kills
            layout = args.layouts[number % len(args.layouts)]
            until = None if is_last else EVERY * (number + 1)
            start = runs.start("killed", steps, until, layout)
            kept.append(start)
            label = "new" if number == 0 else f"after kill {number}"
            cells = (start.seconds, start.cpu_seconds, start.compile_seconds)
            table.add_row(label, *(f"{cell:.1f}" for cell in cells))
            print(label, layout, *(f"{cell:.1f}" for cell in cells), flush=True)
        runs.start("whole", steps, None, args.layouts[0])
        same = last_checksums(folder / "killed") == last_checksums(folder / "whole")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    after = kept[1:]
    names = [field.name for field in dataclasses.fields(Start)]
    medians = [statistics.median(getattr(one, name) for one in after) for name in names]
    table.add_row("median after a kill", *(f"{value:.1f}" for value in medians))
    Console(width=100).print(table)
    print(f"{args.kills} kills; {'same bits' if same else 'OTHER BITS'} as the run without")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
