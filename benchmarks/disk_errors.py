"""Every error at every file operation of a run, one at a time: it goes on, or ends in a sentence.

    python -m benchmarks.disk_errors                # eight errors at every operation
    python -m benchmarks.disk_errors --every 8      # at each operation one of them
    python -m benchmarks.disk_errors --slow 10      # one operation at a time takes 10 seconds

What a run does with files is done without its steps: the folder with its lock, its config and its
metrics, checkpoints, and a summary; then once more, resumed. The operations are counted, and then
each of them fails once. The run has to end, with an error of this library if with any, and to leave
the newest checkpoint whose save had not failed, from which another run goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import sys
import tempfile
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from axon_dist.checkpoint import CheckpointManager, Retention
from axon_dist.core.errors import AxonDistError
from axon_dist.train.app.directory import RunDirectory, create_directory, take_folders
from axon_dist.train.app.training import _prepare_records, _record
from axon_dist.train.config import RunConfig
from axon_dist.train.loop import JsonlWriter

from .rows import GOOD, as_line, done_in, note_in
from .watched_disk import watched

MOST_SECONDS = 10.0
"""CPU-seconds of a run and the one after it; one that takes longer hangs."""
CODES = ("ENOSPC", "EDQUOT", "EROFS", "ESTALE", "EIO", "EACCES", "ENOENT", "EMFILE")
SAVES = 2


def state_of(step: int) -> dict:
    return {"w": jnp.arange(4.0) + step}


def config_in(root: Path) -> RunConfig:
    plain = {"run_dir": str(root / "run"), "data": {"files": ["a.txt"], "sequence_length": 16}}
    return RunConfig.from_dict(plain)


def little_run(root: Path, resume: str | None, saved: list[int]) -> None:
    """The file operations of a run.

    Args:
        root: takes its folder.
        resume: as `create_directory` has it.
        saved: gets the steps whose saves have not failed.
    """
    config, told = config_in(root), []
    directory = create_directory(config, resume)
    with contextlib.ExitStack() as stack:
        take_folders(config, directory, stack, told.append)
        folder = directory.path / "checkpoints"
        manager = CheckpointManager(
            folder, Retention(last=2), type="full", background=False, tell=told.append
        )
        found = manager.restore_newest(state_of(0)) if resume else None
        first = 0 if found is None else found.step
        assert first is not None
        if resume:
            state: Any = types.SimpleNamespace(step=first)
            _prepare_records(config, directory, state, told.append, told=())
        writer = stack.enter_context(
            contextlib.closing(JsonlWriter(directory.metrics, told.append))
        )
        with manager:
            for step in range(first + 1, first + 1 + SAVES):
                writer.write(step, {"train/loss": 1.0})
                manager.save(step, state_of(step))
                if manager.failure is None:
                    saved.append(step)
        _record(directory.summary, told.append, lambda: directory.write_summary({"a": 1}))


class _Fault:
    """Counts operations, and fails one of them, or makes it last some seconds."""

    def __init__(self, number: int | None, code: int, seconds: float | None = None):
        self.number, self.code, self.seconds, self.seen = number, code, seconds, 0
        self.where = ""

    def __call__(self, name: str, path: Path) -> None:
        if self.seen == self.number:
            self.where = f"{name} {path.name}"
            self.seen += 1
            if self.seconds is not None:
                time.sleep(self.seconds)
                return
            raise OSError(self.code, os.strerror(self.code), str(path))
        self.seen += 1


def problem_of(root: Path, leg: int, fault: _Fault) -> str | None:
    """Returns the fault of a run in whose first or second leg an operation fails, or None."""
    saved: list[int] = []
    root.mkdir()
    legs: list[str | None] = [None, "auto"]
    try:
        for number, resume in enumerate(legs):
            with watched(root, fault if number == leg else lambda name, path: None):
                try:
                    little_run(root, resume, saved)
                except AxonDistError as error:
                    if number != leg:
                        return f"the leg after it ends in {error}"
        directory = RunDirectory(root / "run")
        found = CheckpointManager(directory.path / "checkpoints").restore_newest(state_of(0))
        newest = max(saved, default=0)
        step = 0 if found is None else found.step
        if step is None or step < newest:
            return f"step {newest} was saved, and {step} is found"
        if found is not None and found.state["w"].tolist() != state_of(step)["w"].tolist():
            return f"step {step} has other numbers"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def measure_errors(
    folder: Path, every: int, most: int | None = None, log: Path | None = None
) -> list[tuple[str, int, int]]:
    """Rows of an error, how often, and how often it did no harm.

    Args:
        folder: an empty one.
        every: 1 tries all errors at every operation, 8 one of them at each.
        most: how many are tried; None for all.
        log: a file with a line for each cell; a cell that is there is not tried again.
    """
    counts, good = Counter(), Counter()
    done = done_in(log)
    for leg, operation, code in _cells(folder, every)[:most]:
        cell = f"leg {leg}, {code} at operation {operation}"
        if cell not in done:
            fault = _Fault(operation, getattr(errno, code))
            work = folder / f"{leg}-{operation}-{code}"
            began = time.process_time()
            problem = problem_of(work, leg, fault)
            took = time.process_time() - began
            if problem is None and took > MOST_SECONDS:
                problem = f"it took {took:.0f} s of CPU"
            shutil.rmtree(work)
            done[cell] = as_line(problem)
            note_in(log, cell, done[cell])
            if problem is not None:
                print(f"leg {leg}, {code} at {fault.where}: {problem}", flush=True)
        counts[code] += 1
        good[code] += done[cell] == GOOD
    return [(f"{code} at a file operation", counts[code], good[code]) for code in counts]


def _cells(folder: Path, every: int) -> list[tuple[int, int, str]]:
    """Legs, operations and errors; first one error at each operation, then another, and so on."""
    cells, number = [], 0
    for leg in (0, 1):
        count = _Fault(None, 0)
        problem = problem_of(folder / f"counted-{leg}", leg, count)
        assert problem is None, problem
        for operation in range(count.seen):
            for code in CODES:
                number += 1
                # Another code at the next operation.
                if number % every == operation % every:
                    cells.append(((number - operation) % len(CODES), leg, operation, code))
    return [cell[1:] for cell in sorted(cells, key=lambda cell: cell[0])]


def measure_slowness(folder: Path, seconds: float, every: int) -> list[tuple[str, int, int]]:
    """A row of operations that took so long, how many, and how many did no harm.

    Args:
        folder: an empty one.
        seconds: that one operation of a run takes.
        every: tries one operation of so many.
    """
    count = good = 0
    for leg in (0, 1):
        counted = _Fault(None, 0)
        assert problem_of(folder / f"counted-{leg}", leg, counted) is None
        for operation in range(0, counted.seen, every):
            fault = _Fault(operation, 0, seconds)
            problem = problem_of(folder / f"{leg}-{operation}", leg, fault)
            count += 1
            good += problem is None
            if problem is not None:
                print(f"leg {leg}, {seconds:g} s at {fault.where}: {problem}", flush=True)
    return [(f"{seconds:g} s at a file operation", count, good)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--every", type=int, default=1, help="tries one of so many")
    parser.add_argument("--log", type=Path, help="a file of what is done, with which it goes on")
    parser.add_argument("--slow", type=float, help="seconds, in place of errors")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(os.path.realpath(name))
        if asked.slow is None:
            rows = measure_errors(folder, asked.every, log=asked.log)
        else:
            rows = measure_slowness(folder, asked.slow, asked.every)
    for name, count, good in rows:
        print(f"{name}: {good}/{count}")
    return 0 if all(count == good for _, count, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
