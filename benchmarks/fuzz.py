"""Random programs against plain JAX: `python -m benchmarks.fuzz --cells 300 --seed 7`.

Every cell is a program (`fuzz_cells.py`): trained a few steps on a mesh, and on one device. It has
to be equal, or refused by `build_train_step`. What is wrong is written out as a program of its own.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import sys
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from axon_dist import World

from .fuzz_cells import Cell, Outcome, counts, run

_FRESH = 25
"""Cells after which compiled programs are dropped, for they fill the memory."""


def main(arguments: list[str] | None = None) -> int:
    """Runs cells, and shows how they ended; 1 if any was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz"), help="where failures go")
    parser.add_argument("--log", type=Path, help="a file that takes a line of JSON for each cell")
    given = parser.parse_args(arguments)
    World.emulate(8)
    console, draw = Console(), random.Random(given.seed)
    outcomes: dict[Cell, Outcome] = {}
    for number in track(range(given.cells), "cells", console=console):
        cell = Cell.draw(draw)
        outcomes[cell] = outcome = run(cell)
        if given.log:
            line = {"cell": cell.name, **dataclasses.asdict(outcome)}
            with given.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
        if outcome.kind not in ("equal", "refused"):
            given.out.mkdir(exist_ok=True)
            path = given.out / f"seed{given.seed}_cell{number}.py"
            path.write_text(cell.source)
            console.print(
                f"{outcome.kind}: {cell.name}\n  {outcome.text[-600:]}\n  {path}", markup=False
            )
        if number % _FRESH == _FRESH - 1:
            jax.clear_caches()
    _show(console, outcomes)
    found = counts(outcomes)
    return int(found["late"] + found["wrong"] + found["foreign"] > 0)


def _show(console: Console, outcomes: dict[Cell, Outcome]) -> None:
    table = Table("outcome", "cells", title="Random cells")
    for kind, count in counts(outcomes).items():
        table.add_row(kind, str(count))
    console.print(table)
    refusals = collections.Counter(o.text for o in outcomes.values() if o.kind == "refused")
    for text, count in refusals.most_common():
        console.print(f"{count} x {text}", markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
