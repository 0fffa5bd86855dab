import pytest

from axon_dist.parallel import pipelined
from axon_dist.schedule import SCHEDULES, STASH_ENDS, Schedule, build_schedule, peak_live
from axon_dist.train.cli.main import main

SIZES = ("--stages", "4", "--microbatches", "8")


@pytest.fixture(autouse=True)
def no_columns(monkeypatch):
    """In a pipe of unknown width, lines are not wrapped."""
    monkeypatch.delenv("COLUMNS", raising=False)


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


def test_splits_the_vocabulary(capsys, tmp_path):
    csv = tmp_path / "a.csv"
    assert main(["schedule", "1f1b", *SIZES, "--vocabulary", "0.5", "--csv", str(csv)]) == 0
    out = capsys.readouterr().out
    assert "V vocabulary" in out
    assert "in lockstep 45, which" in out
    assert pipelined(4, 8, str(csv)).pipeline.schedule.splits_vocabulary


def test_compares_all(capsys):
    assert main(["schedule", "--compare", "--stages", "4", "--microbatches", "6"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in SCHEDULES)
    assert "interleaved_1f1b: " in out


@pytest.mark.parametrize(("columns", "tables"), [(60, 2), (80, 2), (96, 1), (120, 1)])
def test_the_comparison_continues_below_where_it_is_too_wide(capsys, monkeypatch, columns, tables):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["schedule", "--compare", *SIZES]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    titles = [line for line in lines if line.startswith("schedule ")]
    assert len(titles) == tables
    words = "chunks ticks bubble in step executed in flight inputs held sent"
    assert " ".join(" ".join(titles).replace("schedule", "").split()) == words
    assert [line.split()[0] for line in lines if line.startswith("v_min ")] == ["v_min"] * tables
    assert any(line.split()[:3] == ["v_half", "2", "56"] for line in lines)


@pytest.mark.parametrize("columns", [60, 80])
def test_the_measures_break_between_words(capsys, monkeypatch, columns):
    assert main(["schedule", "1f1b", *SIZES]) == 0
    measures = capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["schedule", "1f1b", *SIZES]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    first = next(number for number, line in enumerate(lines) if line.startswith("bubble"))
    assert " ".join(map(str.strip, lines[first:])) == measures


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f1b"], "--stages None and --microbatches None"),
        (["1f1c", "--stages", "2", "--microbatches", "2"], "Did you mean '1f1b'"),
        (["none.csv"], "there is no file 'none.csv'"),
        (
            ["--compare", *SIZES, "--svg", "a.svg", "--csv", "a.csv"],
            "got --svg a.svg and --csv a.csv with --compare, which compares all schedules and "
            "writes no file; leave out --svg a.svg and --csv a.csv, or --compare",
        ),
        (["gpipe", "--compare", *SIZES], "got gpipe with --compare, which compares all schedule"),
        (["--compare", *SIZES, "--chunks", "0"], "got chunks=0"),
        (["--compare", *SIZES, "--vocabulary", "1"], "got --vocabulary 1 with --compare"),
        (["--search", *SIZES, "--vocabulary", "1"], "got --vocabulary 1 with --search, which tr"),
        (["1f1b", *SIZES, "--vocabulary", "-1"], "got the cost v=-1"),
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
        (["--stages", "2"], "got --stages 2, but the table '{}' has 4; leave --stages out"),
        (["--microbatches", "4"], "got --microbatches 4, but the table '{}' has 8; leave --micro"),
        (["--chunks", "1"], "got --chunks 1, but the table '{}' has 2; leave --chunks out"),
    ],
)
def test_a_table_has_its_own_sizes(capsys, tmp_path, option, message):
    path = tmp_path / "a.csv"
    path.write_text(build_schedule("interleaved_1f1b", 4, 8, 2).to_csv())
    assert message.format(path) in error_of(capsys, str(path), *option)
    assert main(["schedule", str(path), *SIZES, "--chunks", "2"]) == 0


def test_draws_what_runs_and_says_both_readings(capsys):
    assert main(["schedule", "1f1b", *SIZES]) == 0
    out = capsys.readouterr().out
    assert "in lockstep: makespan 40, bubble" in out
    assert "makespan 33, in lockstep 40, which is 1.667 times the busiest rank's work" in out
    assert main(["schedule", "1f1b", *SIZES, "--ahead"]) == 0
    assert "microbatches, makespan 33, bubble 27.3%" in capsys.readouterr().out


def test_says_when_a_split_backward_does_not_pay(capsys):
    pays = ["schedule", "zero_bubble_h1", *SIZES]
    assert main(pays) == 0
    assert "does not pay" not in capsys.readouterr().out
    assert main([*pays, "--costs", "1", "2", "1"]) == 0
    assert (
        "zero_bubble_h1 takes 49 in lockstep and eager_1f1b 44: splitting the backward does not "
        "pay here, a tick takes as long as its slowest rank, with F 1, I 2, W 1."
        in capsys.readouterr().out
    )
    assert main([*pays, "--costs", "1", "1.3", "1", "2"]) == 0
    assert "does not pay here, I + W take 1.15 of a whole B." in capsys.readouterr().out


def test_the_default_is_what_a_step_takes(capsys):
    assert main(["schedule", *SIZES]) == 0
    assert capsys.readouterr().out.startswith("eager_1f1b: ")


@pytest.mark.full
def test_a_long_picture_is_not_what_a_search_is_for(capsys):
    sizes = ["--stages", "8", "--microbatches", "64", "--memory", "8"]
    assert main(["schedule", "--search", *sizes]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "zero_bubble_v: the picture has 363 lines; --svg FILE draws it"
    assert second.startswith("bubble 1.8%")


def test_searches_and_the_table_runs_by_its_path(capsys, tmp_path):
    csv = tmp_path / "best.csv"
    costs = ["--costs", "1", "2", "1", "--weights", *["1"] * 7, "2"]
    words = ["schedule", "--search", *SIZES, *costs, "--memory", "4", "--csv", str(csv)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("searched: ")
    assert err == f"axon: the table is in {csv}; a pipeline accepts this file as its schedule\n"
    table = Schedule.from_csv(csv.read_text())
    assert max(peak_live(table, STASH_ENDS)) <= 4 * table.chunks
    assert pipelined(4, 8, str(csv)).pipeline.schedule.rows == table.rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["1f1b", *SIZES, "--search"],
            "got 1f1b with --search, which tries all schedules, none of them with V; leave",
        ),
        (["1f1b", *SIZES, "--memory", "4"], "got --memory 4 without --search; a named schedule"),
        (["1f1b", *SIZES, "--costs", "1", "2"], "got --costs 1 2; it takes three times, F I W, or"),
        (
            ["--search", *SIZES, "--memory", "0.5"],
            "got memory=0.5 for 4 devices and 8 microbatches",
        ),
        (["--search", "--compare", *SIZES], "got --search with --compare"),
        (["--search", *SIZES, "--weights", "1", "2"], "got 2 weights for 4 devices with up to 2"),
    ],
)
def test_mistakes_of_a_search(capsys, arguments, message):
    assert message in error_of(capsys, *arguments)
