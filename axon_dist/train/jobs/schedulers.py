"""The table of schedulers: how to write, check and submit a job file for each."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from ...core.errors import LaunchError
from ...core.words import printable
from . import jobset, skypilot, slurm
from .job import Job


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """One row of the table.

    Args:
        write: returns the text of the job file.
        suffix: the suffix of the job file.
        submit: the command that submits the file; the file is its last argument.
        test: the command that only checks the file; empty if there is none.
        check: checks the text in Python; returns a description of the check, or None if it could
            not be checked.
        unused: the fields of a `Job` that the job file does not contain.
    """

    write: Callable[[Job], str]
    suffix: str
    submit: tuple[str, ...]
    test: tuple[str, ...] = ()
    check: Callable[[str], str | None] = lambda text: None
    unused: tuple[str, ...] = ()


SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": Scheduler(
        slurm.script,
        ".sbatch",
        ("sbatch",),
        ("sbatch", "--test-only"),
        unused=("image", "accelerator"),
    ),
    "jobset": Scheduler(
        jobset.manifest,
        ".yaml",
        ("kubectl", "apply", "-f"),
        check=jobset.check,
        unused=("accelerator", "hours"),
    ),
    "skypilot": Scheduler(
        skypilot.task,
        ".sky.yaml",
        ("sky", "jobs", "launch", "--yes", "--detach-run"),
        check=skypilot.check,
        unused=("hours",),
    ),
}
"""The schedulers, by the name of their option."""


def check_job(scheduler: Scheduler, path: Path) -> list[str]:
    """Checks a job file in Python, and with the scheduler's own command if it is installed.

    Args:
        scheduler: a row of `SCHEDULERS`.
        path: the file.

    Returns:
        Descriptions of the checks.

    Raises:
        LaunchError: when a check fails; it has the scheduler's message.
    """
    found = scheduler.check(path.read_text())
    checked = [] if found is None else [found]
    if scheduler.test and shutil.which(scheduler.test[0]):
        _run((*scheduler.test, str(path)), "rejects the job file")
        checked.append(" ".join(scheduler.test))
    return checked


def submit_job(scheduler: Scheduler, path: Path) -> str:
    """Submits a job file to its scheduler.

    Args:
        scheduler: a row of `SCHEDULERS`.
        path: the file.

    Returns:
        The scheduler's output.

    Raises:
        LaunchError: if the scheduler is not installed here, or rejects the job.
    """
    program = scheduler.submit[0]
    if shutil.which(program) is None:
        raise LaunchError(
            f"there is no {program} on this machine, so the job was not submitted; copy {path} to "
            f"a machine that has it, and run: {' '.join(scheduler.submit)} {path.name}",
            code="scheduler-not-installed",
        )
    return _run((*scheduler.submit, str(path)), "rejects the job")


def _run(command: tuple[str, ...], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise LaunchError(f"{command[0]} does not start: {error.strerror}") from error
    output = " ".join(printable(f"{done.stdout} {done.stderr}").split())
    if done.returncode:
        raise LaunchError(f"{command[0]} {what} {command[-1]} (code {done.returncode}): {output}")
    return output
