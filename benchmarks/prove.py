"""How many planted mistakes `axon prove` finds, and at which line: `python -m benchmarks.prove`.

The names of tables run these alone: `python -m benchmarks.prove right differences`.
"""

import math
import os
import sys
import time

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from axon_dist import World
from axon_dist.prove import bisect, prove

REAL = "dp=4,tp=2"


def main() -> int:
    """Runs the tables of tests/prove that are named, or all; returns 1 below the promise."""
    World.emulate(8)
    wanted = sys.argv[1:] or list(_TABLES)
    if unknown := set(wanted) - set(_TABLES):
        print(f"got {sorted(unknown)}; the tables are {list(_TABLES)}")
        return 2
    start = time.process_time()
    is_kept = [_TABLES[name]() for name in wanted]
    print(f"{time.process_time() - start:.0f} CPU-seconds")
    return 0 if all(is_kept) else 1


def _mistakes() -> bool:
    from tests.prove import parts, wrong

    found = at_line = of_kind = 0
    for name, (kind, make) in wrong.WRONG.items():
        report = prove(make, meshes=REAL)
        first = report.mistakes[0] if report.mistakes else None
        file, lines = parts.lines_of(make)
        place = first.place if first is not None else None
        is_right = place is not None and place.file == file and place.line in lines
        found, at_line = found + (first is not None), at_line + is_right
        of_kind += first is not None and first.kind is kind
        if not is_right:
            print(f"{name}: {report}")
    total = len(wrong.WRONG)
    print(f"planted mistakes: {found} of {total}, line {at_line}, kind {of_kind}", flush=True)
    return found >= total - 3 and at_line >= total - 6


def _history() -> bool:
    from tests.prove.historic import HISTORIC

    known = [name for name, make in HISTORIC.items() if prove(make, meshes=REAL).mistakes]
    print(f"mistakes of history: {len(known)} of {len(HISTORIC)}", flush=True)
    return len(known) >= len(HISTORIC) - 1


def _right() -> bool:
    from tests.prove.right import RIGHT

    reports = {name: prove(make, meshes=REAL) for name, make in RIGHT.items()}
    false = [name for name, report in reports.items() if report.findings]
    statuses = [output.status for report in reports.values() for output in report.outputs]
    proven = f"{statuses.count('proven')} of {len(statuses)} outputs proven for every input"
    print(f"right programs: {len(RIGHT)}, found in them: {false}; {proven}", flush=True)
    return not false


def _differences() -> bool:
    from tests.prove import planted

    located = sum(_is_located(plant, planted) for plant in planted.PLANTS)
    print(f"planted differences: {located} of {len(planted.PLANTS)} located", flush=True)
    return located >= len(planted.PLANTS) - 1


def _is_located(plant, planted) -> bool:
    place, layer, step = plant
    arguments = (planted.COUNT, planted.PARAMETERS, planted.TOKENS)
    programs = [planted.train_step(p) for p in (planted.Plant(), planted.Plant(*plant))]
    parting = bisect(*programs, *arguments, steps=3)
    with open(planted.__file__) as file:
        lines = file.read().splitlines()
    at = any(f'at("{place}"' in lines[p.line - 1] for p in parting.places)
    is_there = at and (parting.step, parting.time) == (step, layer + 1)
    if not is_there or parting.runs > math.log2(parting.operations) + 3:
        print(f"{plant}: {parting}")
        return False
    return True


_TABLES = {
    "mistakes": _mistakes,
    "history": _history,
    "right": _right,
    "differences": _differences,
}


if __name__ == "__main__":
    sys.exit(main())
