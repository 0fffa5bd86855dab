import pytest

from axon_dist.cli.main import main
from axon_dist.schedule import SCHEDULES, Schedule, build_schedule


def test_draws_and_writes(capsys, tmp_path):
    csv, svg = tmp_path / "a.csv", tmp_path / "a.svg"
    sizes = ["--stages", "4", "--microbatches", "8"]
    assert main(["schedule", "1f1b", *sizes, "--csv", str(csv), "--svg", str(svg)]) == 0
    out = capsys.readouterr().out
    assert "bubble 27.3%" in out
    assert "4 microbatches in flight" in out
    assert Schedule.from_csv(csv.read_text()).rows == build_schedule("1f1b", 4, 8).rows
    assert svg.read_text().startswith("<svg")
    assert main(["schedule", str(csv)]) == 0
    assert "bubble 27.3%" in capsys.readouterr().out


def test_compares_all(capsys):
    assert main(["schedule", "--compare", "--stages", "4", "--microbatches", "6"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SCHEDULES)
    assert "interleaved_1f1b: " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1b"], "--stages None and --microbatches None"),
        (["1f1c", "--stages", "2", "--microbatches", "2"], "Did you mean '1f1b'"),
        (["none.csv"], "there is no file 'none.csv'"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert main(["schedule", *arguments]) == 2
    assert message in capsys.readouterr().err
