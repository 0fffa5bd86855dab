"""Links and pipes in the place of every file of a run: what they lead to is not changed, nor shown.

A folder of a run may come from anybody. In the place of each file that this library reads or writes
there lies a link to a file of the user's, a hard link, or a pipe that nobody writes to. A run that
goes on there, its page and its records have to end, in seconds, with the file as it was.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from axon_dist.core.errors import AxonDistError
from axon_dist.train.app import report_page
from axon_dist.train.app.run_model import run_config
from axon_dist.train.cli.values import check_output, write_output

from .disk_errors import little_run

NAMES = (
    "config.yaml",
    "metrics.jsonl",
    "summary.json",
    "program.json",
    "loss.png",
    "memory.prof",
    "run.lock",
    "report.html",
    "checkpoints",
    "checkpoints/step_00000002",
    "checkpoints/step_00000002/manifest.json",
    "checkpoints/step_00000002/COMMITTED",
    "checkpoints/step_00000002/arrays/state.safetensors",
    "checkpoints/step_00000003.tmp",
    "checkpoints/step_00000003.old.tmp",
    "metrics.tmp",
    "config.tmp",
    "summary.tmp",
)
SECRET = "a secret of the user\n"


def _link(path: Path, mine: Path) -> None:
    path.symlink_to(mine)


def _hard_link(path: Path, mine: Path) -> None:
    os.link(mine, path)


def _pipe(path: Path, mine: Path) -> None:
    os.mkfifo(path)


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "link": _link,
    "hard link": _hard_link,
    "pipe": _pipe,
}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    elif os.path.lexists(path):
        path.unlink()


def _write_page(run: Path, page: list[str]) -> None:
    page.append(report_page(run))
    check_output("--out", run / "report.html")
    write_output("--out", run / "report.html", page[0])


def problem_of(root: Path, name: str, way: str) -> str | None:
    """Returns the effect of a link or pipe in the folder of a run; None if there is none."""
    root.mkdir()
    little_run(root, None, [])
    mine, run, page = root / "mine", root / "run", list[str]()
    mine.write_text(SECRET)
    _remove(run / name)
    WAYS[way](run / name, mine)
    verbs: list[Callable[[], object]] = [
        lambda: _write_page(run, page),
        lambda: run_config(run),
        lambda: little_run(root, "auto", []),
    ]
    for verb in verbs:
        try:
            with contextlib.suppress(AxonDistError):
                verb()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    if mine.read_text() != SECRET:
        return "the file was overwritten"
    # By another name it is the file itself, which whoever made that could read.
    if way == "link" and SECRET.strip() in "".join(page):
        return "the page shows the file"
    return None


def measure_links(folder: Path) -> list[tuple[str, int, int]]:
    """Rows of a way, how often, and how often it did no harm."""
    rows = []
    for way in WAYS:
        good = 0
        for number, name in enumerate(NAMES):
            problem = problem_of(folder / f"{way}-{number}", name, way)
            good += problem is None
            if problem is not None:
                print(f"{way} at {name}: {problem}", flush=True)
        rows.append((f"{way} in the place of a file of a run", len(NAMES), good))
    return rows
