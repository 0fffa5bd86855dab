import pytest

from axon_dist.cli.main import main
from axon_dist.schedule import SCHEDULES, Schedule, build_schedule

SIZES = ("--stages", "4", "--microbatches", "8")


def error_of(capsys, *arguments):
    assert main(["schedule", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_draws_and_writes(capsys, tmp_path):
    csv, svg = tmp_path / "a.csv", tmp_path / "a.svg"
    assert main(["schedule", "1f1b", *SIZES, "--csv", str(csv), "--svg", str(svg)]) == 0
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
        (
            ["--compare", *SIZES, "--svg", "a.svg", "--csv", "a.csv"],
            "got --svg a.svg and --csv a.csv beside --compare, which measures all schedules and "
            "writes no file; leave out --svg a.svg and --csv a.csv, or --compare",
        ),
        (["gpipe", "--compare", *SIZES], "got gpipe beside --compare, which measures all schedule"),
        (["--compare", *SIZES, "--chunks", "0"], "got chunks=0"),
        (
            ["1f1b", *SIZES, "--csv", "/none/a.csv"],
            "--csv /none/a.csv: there is no folder '/none'; make it first, or name another file",
        ),
        (["1f1b", *SIZES, "--svg", "/none/a.svg"], "--svg /none/a.svg: there is no folder '/none'"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert message in error_of(capsys, *arguments)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--stages", "2"], "got --stages 2, and the table '{}' has 4; leave --stages out, for a"),
        (["--microbatches", "4"], "got --microbatches 4, and the table '{}' has 8; leave --micro"),
        (["--chunks", "1"], "got --chunks 1, and the table '{}' has 2; leave --chunks out"),
    ],
)
def test_a_table_has_its_own_sizes(capsys, tmp_path, option, message):
    path = tmp_path / "a.csv"
    path.write_text(build_schedule("interleaved_1f1b", 4, 8, 2).to_csv())
    assert message.format(path) in error_of(capsys, str(path), *option)
    assert main(["schedule", str(path), *SIZES, "--chunks", "2"]) == 0
