"""How many planted mistakes `axon prove` finds, and at which line: `python -m benchmarks.prove`.

Names of tables run these alone, as in `python -m benchmarks.prove wrong history`; the others are
`right`, `further` and `differences`.
"""

import math
import sys
import time

from axon_dist import World
from axon_dist.prove import bisect, prove

REAL = "dp=4,tp=2"


def main(names: list[str]) -> int:
    """Runs the tables of tests/prove and prints the figures; returns 1 below the promise."""
    World.emulate(8)
    start = time.process_time()
    kept = [TABLES[name]() for name in names or TABLES]
    print(f"{time.process_time() - start:.0f} CPU-seconds")
    return 0 if all(kept) else 1


def _wrong() -> bool:
    from tests.prove import wrong

    found, at_line = _mistakes("planted mistakes", wrong.WRONG)
    return found >= len(wrong.WRONG) - 3 and at_line >= len(wrong.WRONG) - 6


def _further() -> bool:
    from tests.prove import further

    found, at_line = _mistakes("further mistakes", further.WRONG)
    is_quiet = _right("right programs like them", further.RIGHT)
    return found >= len(further.WRONG) - 1 and at_line >= len(further.WRONG) - 2 and is_quiet


def _mistakes(title: str, table) -> tuple[int, int]:
    from tests.prove import parts

    found = at_line = of_kind = 0
    for name, (kind, make) in table.items():
        report = prove(make, meshes=REAL)
        first = report.mistakes[0] if report.mistakes else None
        file, lines = parts.lines_of(make)
        place = first.place if first is not None else None
        is_right = place is not None and place.file == file and place.line in lines
        found, at_line = found + (first is not None), at_line + is_right
        of_kind += first is not None and first.kind is kind
        if not is_right:
            print(f"{name}: {report}", flush=True)
    print(f"{title}: {found} of {len(table)}, line {at_line}, kind {of_kind}", flush=True)
    return found, at_line


def _history() -> bool:
    from tests.prove import historic

    table = historic.HISTORIC
    known = [name for name, make in table.items() if prove(make, meshes=REAL).mistakes]
    print(f"mistakes of history: {len(known)} of {len(table)}", flush=True)
    return len(known) >= len(table) - 1


def _right_programs() -> bool:
    from tests.prove import right

    return _right("right programs", right.RIGHT)


def _right(title: str, table) -> bool:
    reports = {name: prove(make, meshes=REAL) for name, make in table.items()}
    false = [name for name, report in reports.items() if report.findings]
    outputs = [output.status for report in reports.values() for output in report.outputs]
    print(
        f"{title}: {len(table)}, found in them: {false}; {outputs.count('proven')} of "
        f"{len(outputs)} outputs are proven for every input",
        flush=True,
    )
    return not false


def _differences() -> bool:
    from tests.prove import planted

    located = [_is_located(plant, planted) for plant in planted.PLANTS]
    print(f"planted differences: {sum(located)} of {len(located)} located", flush=True)
    return sum(located) >= len(located) - 1


def _is_located(plant, planted) -> bool:
    place, layer, step = plant
    arguments = (planted.COUNT, planted.PARAMETERS, planted.TOKENS)
    programs = [planted.train_step(p) for p in (planted.Plant(), planted.Plant(*plant))]
    start = time.process_time()
    parting = bisect(*programs, *arguments, steps=3)
    with open(planted.__file__) as file:
        lines = file.read().splitlines()
    at = any(f'at("{place}"' in lines[p.line - 1] for p in parting.places)
    is_there = at and (parting.step, parting.time) == (step, layer + 1)
    is_kept = is_there and parting.runs <= math.log2(parting.operations) + 3
    seconds = time.process_time() - start
    print(f"{plant}: {parting.runs} runs, {seconds:.0f} CPU-s", flush=True)
    if not is_kept:
        print(parting)
    return is_kept


TABLES = {
    "wrong": _wrong,
    "history": _history,
    "right": _right_programs,
    "further": _further,
    "differences": _differences,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
