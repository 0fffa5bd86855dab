"""Changes between two legs of a run: the same results, or a message that names the change."""

import pytest

from benchmarks.changes import CHANGES, OTHER, measure_changes


@pytest.mark.full
def test_no_change_passes_without_a_word(tmp_path):
    cells = [(name,) for name in CHANGES if name != OTHER]
    for row, count, good in measure_changes(tmp_path, cells):
        assert (row, good) == (row, count)


@pytest.mark.full
def test_each_of_two_changes_is_named(tmp_path):
    cells = [("dropout", "version of jax"), ("template", "tokenizer"), ("cache, half", "dropout")]
    for row, count, good in measure_changes(tmp_path, cells):
        assert (row, good) == (row, count)
