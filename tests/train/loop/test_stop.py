import os
import signal
from unittest import mock

import pytest

from axon_dist.mesh import World
from axon_dist.train.loop import StopConsensus, StopRequest, stop_on_signals
from axon_dist.train.loop.limits import INTERRUPTIONS


@pytest.mark.parametrize("rank", range(8))
def test_one_rank_that_wants_to_stop_stops_all(world, rank):
    answer = StopConsensus(world).any_rank([r == rank for r in range(8)])
    assert [bool(shard.data) for shard in answer.addressable_shards] == [True] * 8


def test_nobody_wants_to_stop(make_world):
    world = make_world("dp=2,tp=4")
    assert not bool(StopConsensus(world).any_rank([False] * 8))


def test_alone_the_answer_is_immediate(world):
    consensus = StopConsensus(world)
    assert [consensus(wanted) for wanted in (False, True, False)] == [False, True, False]


def test_among_several_processes_the_answer_comes_after_the_lag(world):
    with mock.patch.object(World, "num_processes", 2):
        consensus = StopConsensus(world, lag=2)
        answers = [consensus(number == 1) for number in range(6)]
    assert answers == [False, False, False, True, False, False]


def test_the_first_reason_stays():
    request = StopRequest()
    assert not request
    request.ask("one")
    request.ask("two")
    assert request
    assert request.reason == "one"


def test_handlers_come_back_even_after_an_error():
    before, hangup = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)

    def fail_under_a_signal():
        with stop_on_signals() as request:
            assert signal.getsignal(signal.SIGINT) is not before
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError(request.reason)

    with pytest.raises(RuntimeError, match="SIGINT"):
        fail_under_a_signal()
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGHUP, hangup)


def test_a_terminal_that_closes_asks_once_to_stop():
    """The kernel and the shell both send SIGHUP, and the second must not abort the save."""
    # Under nohup the tests ignore SIGHUP, and this is kept.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with stop_on_signals() as request:
            for _ in range(10):
                os.kill(os.getpid(), signal.SIGHUP)
            assert request.reason == "SIGHUP"
        # The last save may still be running.
        os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "SIGHUP" in INTERRUPTIONS


def test_nohup_is_kept():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
