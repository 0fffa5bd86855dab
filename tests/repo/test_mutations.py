"""The faults of `benchmarks.mutations` still fit the code, and their tests exist."""

import pathlib
import re

import pytest

from benchmarks.mutations import MUTATIONS, Mutation, copy_of, main

ROOT = pathlib.Path(__file__).parents[2]


def test_there_are_forty_mutations_over_most_subpackages():
    assert len({(m.file, m.text) for m in MUTATIONS}) == len(MUTATIONS) >= 40
    assert len({m.file.split("/")[0] for m in MUTATIONS}) >= 12


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}-{m.text[:20]}")
def test_the_text_occurs_once(mutation):
    source = (ROOT / "axon_dist" / mutation.file).read_text()
    compile(mutation.applied(source), mutation.file, "exec")
    assert mutation.fault not in ("", mutation.text)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}-{m.text[:20]}")
def test_the_tests_exist(mutation):
    assert mutation.tests
    for name in mutation.tests:
        file, _, function = name.partition("::")
        found = re.findall(r"^def (test_\w+)", (ROOT / "tests" / file).read_text(), re.MULTILINE)
        assert function.split("[")[0] in ["", *found]


def test_a_text_that_has_moved_is_an_error():
    with pytest.raises(ValueError, match=r"axon_dist/a\.py has 'x = 1' 0 times"):
        Mutation("a.py", "x = 1", "x = 2", ()).applied("x = 3")
    with pytest.raises(ValueError, match="2 times"):
        Mutation("a.py", "x", "y", ()).applied("x = x")


def test_a_fault_is_put_into_a_copy(tmp_path):
    copy_of(ROOT, tmp_path)
    assert (tmp_path / "axon_dist" / "step" / "update.py").is_file()
    assert (tmp_path / "conftest.py").is_file()


@pytest.fixture
def outcomes(monkeypatch):
    """Replaces the runs of pytest by what they would return, in turn; none needs a whole copy."""
    codes = []
    monkeypatch.setattr("benchmarks.mutations.COPIED", ("axon_dist/planner",))
    monkeypatch.setattr("benchmarks.mutations.run_tests", lambda *_: (codes.pop(0), "the output"))
    return codes


@pytest.mark.parametrize(
    ("codes", "result", "text"),
    [
        ([0, 1], 0, "1 of 1 killed"),
        ([0, 0], 1, "SURVIVED"),
        ([0, None], 1, "HUNG"),
        ([0, 4], 1, "BROKEN (4)"),
        ([1], 1, "without any fault"),
    ],
)
def test_only_failing_tests_count(outcomes, capsys, codes, result, text):
    outcomes += codes
    assert main(["--only", "planner/reading.py"]) == result
    assert text in capsys.readouterr().out


def test_the_readme_counts_them():
    text = (ROOT / "README.md").read_text()
    assert f"{len(MUTATIONS)} places" in " ".join(text.split())
