"""`axon report RUN [--compare RUN2]`: a run as one page for a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from axon_dist.app import report_page

from .verb import Verb, as_file, check_output, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, another one, and the file."""
    parser.add_argument("folder", metavar="RUN", help="the folder of a run, ended or not")
    parser.add_argument("--compare", metavar="RUN2", help="draws the curves of this run beside it")
    parser.add_argument(
        "--out", type=as_file, metavar="FILE", help="the page; report.html in the run by default"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, and says where."""
    check_output("--out", arguments.out)
    page = report_page(arguments.folder, arguments.compare)
    out = arguments.out or Path(arguments.folder).expanduser() / "report.html"
    check_output("--out", out)
    write_output("--out", out, page)
    Console().print(f"report: {out}", soft_wrap=True, highlight=False, markup=False)
    return 0


VERB = Verb(
    "report",
    "Draw a run as one HTML page.",
    add_arguments,
    run,
    examples=("axon report runs/a", "axon report runs/a --compare runs/b --out both.html"),
)
