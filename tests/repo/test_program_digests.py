"""Whether a commit changed the programs that run; `python -m benchmarks.programs --write` pins."""

import pytest

from benchmarks import programs

NAMES = list(programs.CELLS)
DEFAULT = set(NAMES[:: programs.DEFAULT])


def rows():
    """Every fifth cell by default, the others in full runs."""
    marks = {True: (), False: (pytest.mark.full,)}
    return [pytest.param(name, marks=marks[name in DEFAULT]) for name in NAMES]


@pytest.mark.parametrize("name", rows())
def test_programs_are_as_pinned(name):
    pins = programs.pinned()
    if not pins:
        pytest.skip(f"no digests are pinned for JAX {programs.version()}")
    now = programs.digest(programs.CELLS[name].lowered())
    assert now == pins[name], (
        f"{name}: the program changed. If it was to, run `python -m benchmarks.programs --write` "
        "and name the cell in the commit."
    )


def test_names_do_not_count_and_numbers_do():
    text = "module @jit_step { func @main { call @block } func @block { add 1.0 } }"
    renamed = text.replace("block", "layer").replace("jit_step", "jit_run")
    assert programs.digest(text) == programs.digest(renamed)
    assert programs.digest(text) != programs.digest(text.replace("1.0", "2.0"))
    assert programs.digest(text) != programs.digest(text.replace("call @block", "call @main"))
