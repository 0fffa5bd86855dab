import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.checkpoint import Entry, Retention
from axon_dist.checkpoint.manager import lineage_of, next_lineage, ranked
from axon_dist.core.errors import ConfigError

scores = st.one_of(st.none(), st.just(math.nan), st.floats(-1, 1))


@st.composite
def folders(draw):
    steps = draw(st.lists(st.integers(0, 50), unique=True, max_size=12))
    entries = []
    for serial, step in enumerate(steps):
        told = written(next_lineage(None, entries, Entry(step, serial)), serial)
        entries.append(Entry(step, serial, draw(scores), told))
    return entries


def written(lineage, serial):
    """What the manifest tells: nothing if the run never went back."""
    return None if lineage == [(0, serial)] else tuple(lineage)


retentions = st.builds(Retention, st.integers(1, 4), st.integers(0, 3), st.sampled_from([0, 1, 5]))


@given(folders(), retentions)
def test_retained_checkpoints(entries, retention):
    gone = retention.outdated(entries)
    stays = [entry for entry in entries if entry not in gone]
    assert stays[-1:] == entries[-1:]
    assert set(entries[-retention.last :]) <= set(stays)
    if retention.every:
        assert all(entry in stays for entry in entries if entry.step % retention.every == 0)
    earliest = {e.serial: min(x.step for x in entries[e.serial :]) for e in entries}
    # A later entry of an earlier step means that the run went back and gave up this one.
    counts = [e for e in entries if e.step == earliest[e.serial]]
    scored = sorted(e.score for e in counts if e.score is not None and not math.isnan(e.score))
    best = scored[: retention.best]
    assert sorted(e.score for e in stays if e in counts and e.score in best)[: len(best)] == best
    most = retention.last + retention.best
    assert retention.every or len(stays) <= most
    assert not retention.outdated(stays)


def test_the_newest_is_the_one_written_last_not_the_one_of_the_highest_step():
    back = [Entry(step=10, serial=0), Entry(step=30, serial=1), Entry(step=20, serial=2)]
    assert [entry.step for entry in Retention(last=1).outdated(back)] == [10, 30]


def test_ties_go_to_the_newer():
    entries = [Entry(step, step, 0.5) for step in (1, 2, 3, 4)]
    assert [e.step for e in Retention(last=1, best=2).outdated(entries)] == [1, 2]


def test_the_best_is_of_no_step_that_was_undone():
    scores = {2: 0.5, 4: 0.2, 6: 0.1}
    entries = [Entry(step, serial, score) for serial, (step, score) in enumerate(scores.items())]
    assert [e.step for e in ranked(entries)] == [6, 4, 2]
    again = [entries[0], entries[2], Entry(4, 3, 0.9)]
    assert [e.step for e in ranked(again)] == [2, 4]
    assert [e.step for e in Retention(last=1, best=1).outdated(again)] == [6]
    # The first checkpoint of a run that went back to step 2 may be of a later step than all.
    beyond = [*entries, Entry(8, 3, 0.9, lineage=((0, 0), (3, 3))), Entry(10, 4, 0.3)]
    assert [e.step for e in ranked(beyond)] == [10, 2, 8]


def test_a_branch_that_was_undone_counts_again_once_a_run_follows_it():
    entries = [Entry(2, 0, 0.5), Entry(4, 1, 0.2), Entry(6, 2, 0.1)]
    entries.append(Entry(8, 3, 0.9, tuple(next_lineage([(0, 0)], entries, Entry(8, 3)))))
    again = next_lineage(lineage_of(entries[:3], entries), entries, Entry(10, 4))
    entries.append(Entry(10, 4, 0.3, tuple(again)))
    assert again == [(0, 2), (4, 4)]
    assert [e.step for e in ranked(entries)] == [6, 4, 10, 2]
    assert [e.step for e in Retention(last=1, best=1).outdated(entries)] == [2, 4, 8]


moves = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 3)),
    st.tuples(st.just("back"), st.integers(0, 9)),
    st.tuples(st.just("begin"), st.integers(0, 20)),
)


@given(st.lists(moves, max_size=25), st.lists(scores, min_size=25, max_size=25), retentions)
def test_what_counts_is_what_the_newest_checkpoint_follows(history, values, retention):
    """A run saves, goes back to any checkpoint, or begins from one of another folder."""
    entries, ancestors = [], {}
    step, followed, lineage = 0, [], []
    for (move, number), score in zip(history, values, strict=False):
        if move == "begin":
            step, followed, lineage = number, [], []
        elif move == "back" and entries:
            at = entries[number % len(entries)]
            step, followed = at.step, ancestors[at.serial]
            lineage = lineage_of([e for e in entries if e.serial in followed], entries)
        elif move == "save":
            step += number
            serial = 1 + max((e.serial for e in entries), default=-1)
            lineage = next_lineage(lineage, entries, Entry(step, serial))
            told = written(lineage, serial)
            followed = ancestors[serial] = [*followed, serial]
            entries = [e for e in entries if e.step != step] + [Entry(step, serial, score, told)]
            gone = retention.outdated(entries)
            scored = [e for e in entries if e.score is not None and not math.isnan(e.score)]
            assert {*ranked(entries)} == {e for e in scored if e.serial in followed}
            entries = [e for e in entries if e not in gone]
            assert all(entry.serial in followed for entry in ranked(entries))


@pytest.mark.parametrize("wrong", [{"last": 0}, {"best": -1}, {"every": -5}])
def test_impossible_counts(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}={value}.*, at least"):
        Retention(**wrong)
