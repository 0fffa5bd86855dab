"""Every state that a kill or a power cut leaves of a save: the older one or the newer is there."""

import dataclasses

import pytest

from axon_dist.checkpoint import seal
from benchmarks.crash_states import KINDS, measure_states, moments_of, problem_with

FAST = ("export", "token cache", "compiled programs", "memory copies", "bucket")


def bad_states(kind, folder):
    moments = moments_of(kind, folder)
    problems = [problem_with(kind, x, folder / str(n)) for n, x in enumerate(moments)]
    return [problem for problem in problems if problem is not None], len(moments)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.full) for n in KINDS]
)
def test_no_state_loses_what_was_saved(tmp_path, store, name):
    for row, count, good in measure_states(tmp_path, [name], store):
        assert (row, good) == (row, count)


def test_a_checkpoint_is_replaced_without_a_moment_without_one(tmp_path):
    kind = dataclasses.replace(KINDS["full"], last=2)
    bad, count = bad_states(kind, tmp_path)
    assert bad == []
    assert count > 40


def test_the_states_between_two_renames_are_seen(tmp_path, monkeypatch):
    """Where the older checkpoint has no name, only `found_at` finds it."""
    monkeypatch.setattr(seal, "found_at", lambda folder: folder)
    monkeypatch.setattr("axon_dist.checkpoint.save.found_at", lambda folder: folder)
    kind = dataclasses.replace(KINDS["full"], last=2, is_on_disk=False)
    bad, _ = bad_states(kind, tmp_path)
    assert any("there is no checkpoint" in problem for problem in bad)
