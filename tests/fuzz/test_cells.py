"""Random programs are equal to one device, or refused when they are built."""

import random

import pytest

from benchmarks.fuzz import main
from benchmarks.fuzz_cells import LAYOUTS, Cell, Outcome, counts, run

SEED, CELLS, ALWAYS = 20261122, 24, (12,)


CRITIC_SEED, CRITIC_CELLS = 20261124, 200


def cells():
    draw = random.Random(SEED)
    marks = lambda number: [] if number in ALWAYS else [pytest.mark.full]
    return [pytest.param(Cell.draw(draw), marks=marks(number)) for number in range(CELLS)]


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.name)
def test_a_random_program_is_equal_or_refused(cell):
    outcome = run(cell)
    assert outcome.kind in ("equal", "refused"), f"{outcome.text}\n{cell.source}"


@pytest.mark.critic
def test_many_random_programs_are_equal_or_refused(tmp_path):
    given = ["--cells", str(CRITIC_CELLS), "--seed", str(CRITIC_SEED), "--out", str(tmp_path)]
    assert main(given) == 0


@pytest.mark.full
def test_what_is_wrong_is_seen_and_written_out(tmp_path, monkeypatch, capsys):
    cell = Cell(LAYOUTS[0], "blocks", "mean", "sgd", 1, (), False)
    broken = cell.source.replace("optax.sgd(0.05)", "optax.sgd(next(RATES))")
    broken = broken.replace("import jax\n", "import jax\nRATES = iter([0.1] + 3 * [0.2])\n", 1)
    broken = broken.replace("range(12)", "range(2)")
    assert "RATES = " in broken
    assert "range(2)" in broken
    monkeypatch.setattr(Cell, "source", property(lambda self: broken))
    assert run(cell).kind == "wrong"
    assert main(["--cells", "1", "--out", str(tmp_path)]) == 1
    (written,) = tmp_path.iterdir()
    assert written.read_text() == broken
    assert "wrong" in capsys.readouterr().out


def test_exceptions_are_distinguished(monkeypatch):
    cell = Cell(LAYOUTS[0], "blocks", "mean", "sgd", 1, (), False)
    error = "from axon_dist.core.errors import ConfigError\n"
    sources = {
        "foreign": "def build(): raise ValueError",
        "refused": error + "def build(): raise ConfigError('x')",
        "late": error + "def build(): pass\ndef compare(step): raise ConfigError('x')",
    }
    for kind, source in sources.items():
        monkeypatch.setattr(Cell, "source", property(lambda self, source=source: source))
        assert run(cell).kind == kind
    assert counts({cell: Outcome("late")})["late"] == 1
