"""Signals in each phase of a run: the documented exit code, and a saved state."""

import pytest

from benchmarks.signals import Cell, cells, problem_of

pytestmark = pytest.mark.full


def test_every_signal_meets_every_phase():
    assert len({str(cell) for cell in cells()}) == len(cells()) == 198


@pytest.mark.parametrize(
    "cell",
    [
        Cell("train", "SIGTERM", "saving", 1),
        Cell("train", "SIGHUP", "stepping", 10),
        Cell("launch", "SIGINT", "starting", 2),
    ],
    ids=str,
)
def test_it_does_as_documented(tmp_path, cell):
    assert problem_of(tmp_path / "run", cell) is None
