import os
import sys
from unittest import mock

import pytest

from axon_dist.launch import distributed, watchdog
from axon_dist.launch.rendezvous import Peer
from axon_dist.launch.watchdog import EXIT_PEER_LOST, Silences, Watchdog, post_failure

PRESENT = [Peer(process=p, num_processes=3, host=f"h{p}", pid=p, versions={}) for p in range(3)]


class Shelf(dict):
    """A store in memory."""

    set = dict.__setitem__

    def items(self, prefix):
        found = {k: v for k, v in super().items() if k.startswith(prefix)}
        return {key.removeprefix(prefix): value for key, value in found.items()}


class Ended(Exception):
    """Raised in place of the end of a process."""


@pytest.fixture
def said():
    """Collects the messages that a process prints before it ends."""
    lines = []

    def end(code):
        lines.append(code)
        raise Ended

    with mock.patch.object(os, "_exit", end), mock.patch.object(watchdog, "say", lines.append):
        yield lines


def run(dog, store, rounds, also=()):
    """Runs the periods of a watchdog in a loop instead of in threads."""
    beats = iter(range(10**6))
    dog._stopped = mock.Mock(wait=mock.Mock(side_effect=[False] * rounds + [True]))

    def tick(seconds, real=dog._silences.tick):
        number = str(next(beats))
        store.set(f"axon/watch/heartbeat/{dog.me}", number)
        for other in also:
            store.set(f"axon/watch/heartbeat/{other}", number)
            if other == 0:
                store.set("axon/watch/bulletin/heartbeat", number)
        dog._listen(int(number))
        real(seconds)

    with mock.patch.object(dog._silences, "tick", tick):
        dog._watch()


def test_all_alive(said):
    store = Shelf()
    run(Watchdog(0, PRESENT, store, timeout=2.0), store, 50, also=(1, 2))
    run(Watchdog(1, PRESENT, store, timeout=2.0), store, 50, also=(0, 2))
    assert said == []


def test_process_0_names_the_silent_and_the_others_read_it(said):
    store = Shelf()
    with pytest.raises(Ended):
        run(Watchdog(0, PRESENT, store, timeout=2.0), store, 50, also=(1,))
    assert "lost process 2 (host h2, pid 2): no sign of life for 2 s" in said[0]
    assert said[1] == EXIT_PEER_LOST
    with pytest.raises(Ended):
        run(Watchdog(1, PRESENT, store, timeout=100.0), store, 2, also=(0,))
    assert "process 1 (host h1, pid 1): lost process 2 (host h2, pid 2)" in said[2]


def test_the_others_notice_process_0(said):
    store = Shelf()
    with pytest.raises(Ended):
        run(Watchdog(2, PRESENT, store, timeout=2.0), store, 50, also=(1,))
    assert "lost process 0 (host h0, pid 0)" in said[0]


@pytest.mark.parametrize(("me", "lost"), [(0, 2), (1, 0)])
def test_a_collective_that_broke_makes_silence_short(said, me, lost):
    store, also = Shelf(), set(range(3)) - {me, lost}
    dog = Watchdog(me, PRESENT, store, timeout=60.0)
    run(dog, store, 20, also)
    Watchdog(1, PRESENT, store, timeout=0.1).wait_for_verdict()
    silence = dict(dog._silences._silence)
    assert silence[lost] == 20
    with pytest.raises(Ended):
        run(dog, store, 7, also)
    assert f"lost process {lost} (host h{lost}, pid {lost}): no sign of life for 5 s" in said[0]


def test_a_broken_collective_is_reported_before_its_traceback_is_printed(monkeypatch):
    store, reported = Shelf(), []
    monkeypatch.setattr(sys, "__excepthook__", lambda *_: reported.append(bool(store)))
    monkeypatch.setattr(distributed, "_end_at_once", lambda *_: None)
    hook = distributed._OnException(Watchdog(1, PRESENT, store, timeout=0.01))
    own = ValueError("wrong shape")
    hook(ValueError, own, None)
    lost = RuntimeError(f"gloo: {distributed._PEER_WORDS[0]}")
    hook(RuntimeError, lost, None)
    assert reported == [False, True]


def test_a_process_without_standard_output_still_tells_its_failure(said, monkeypatch):
    posted = []
    monkeypatch.setattr(distributed, "SharedStore", Shelf)
    monkeypatch.setattr(distributed, "post_failure", lambda *failure: posted.append(failure))
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(Ended):
        distributed._end_at_once(3, "ValueError: boom")
    assert said == [3]
    assert [reason for *_, reason in posted] == ["ValueError: boom"]


@pytest.mark.parametrize(("failed", "reader"), [(2, 0), (0, 1)])
def test_a_failure_is_told_at_once(said, failed, reader):
    store = Shelf()
    post_failure(store, failed, "ValueError: boom")
    with pytest.raises(Ended):
        run(Watchdog(reader, PRESENT, store, timeout=100.0), store, 2, also=(0, 1, 2))
    assert f"process {failed}" in said[0]
    assert "failed: ValueError: boom" in said[0]


def test_a_stopped_process_does_not_blame_the_others():
    silences = Silences([1])
    silences.hear({1: "a"})
    silences.tick(1.0)  # an hour may have passed, but this process was stopped meanwhile
    assert silences.longer_than(2.0) == []
