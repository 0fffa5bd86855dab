import json

import jax
import pytest

from axon_dist.core.errors import LaunchError
from axon_dist.launch import Timeouts
from axon_dist.launch.rendezvous import Peer
from axon_dist.mesh import agreement
from axon_dist.mesh.agreement import StepWatch, find_culprit

ME = [Peer(process=p, num_processes=3, host="h", pid=p, versions={}) for p in range(3)]


class Shelf(dict):
    """A store in memory."""

    set = dict.__setitem__

    def items(self, prefix):
        found = {k: v for k, v in super().items() if k.startswith(prefix)}
        return {key.removeprefix(prefix): value for key, value in found.items()}


def verdict_after(rounds, steps_at):
    """The message of process p after `steps_at(round, p)` steps; None for no sign."""
    store = Shelf()
    watches = [StepWatch(me, store, timeout=2.0) for me in ME]
    for number in range(rounds):
        for watch in watches:
            step = steps_at(number, watch.me.process)
            if step is not None:
                watch(step)
        for watch in reversed(watches):
            watch._exchange()
    return store.get("axon/watch/bulletin/verdict")


def test_while_anybody_gets_ahead_nobody_hangs():
    assert verdict_after(50, lambda number, process: number) is None
    assert verdict_after(50, lambda number, process: number if process == 2 else 0) is None
    assert verdict_after(10, lambda number, process: 0) is None


def test_other_signs_than_steps_count_too():
    assert verdict_after(50, lambda number, process: 7) is None


@pytest.mark.parametrize("hangs", range(3))
def test_who_is_behind_holds_the_others_up(hangs):
    signs = lambda process: 2 if process == hangs else 3
    text = verdict_after(30, lambda number, process: 4 if number < signs(process) else None)
    who = f"process {hangs} (host h, pid {hangs})"
    assert text.startswith(f"{who} hangs: no sign for 2 s after step 4, and the others wait for it")


def test_where_all_are_equal_nobody_is_blamed():
    text = verdict_after(30, lambda number, process: 4 if number == 0 else None)
    assert text.startswith("no process made progress for 2 s after step 4: the devices hang, or")


def test_two_may_hang():
    rows = [{"who": str(me), "step": 3, "signs": 4 if me.process else 5} for me in ME]
    text = find_culprit({p: json.dumps(row) for p, row in enumerate(rows)}, 9.0)
    assert text.startswith("process 1 (host h, pid 1), process 2 (host h, pid 2) hangs: no sign")


def test_the_timeout_is_positive():
    with pytest.raises(LaunchError, match="AXON_STEP_TIMEOUT=0 must be more than 0 seconds"):
        Timeouts.from_env({"AXON_STEP_TIMEOUT": "0"})


def test_without_a_word_of_the_user_the_time_follows_the_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("axon_dist.mesh.agreement.time.monotonic", lambda: now[0])
    watch, told = StepWatch(ME[0], Shelf(), 1800.0, follows=True), StepWatch(ME[0], Shelf(), 1800.0)
    seen = []
    for step, seconds in enumerate([200.0, 1.0, 1.0, 30.0, 1.0, 1.0]):
        now[0] += seconds
        for one in (watch, told):
            one(step)
        seen.append(watch.limit)
    # Until there are enough, then 20 of the longest after the first; compiling took 200.
    assert seen == [1800.0] * 4 + [600.0] * 2
    assert told.limit == 1800.0
    now[0] += 100.0
    watch(7)
    assert watch.limit == 2000.0


def test_quick_steps_leave_time_to_save():
    watch = StepWatch(ME[0], Shelf(), 1800.0, follows=True)
    for step in range(10):
        watch(step)
    assert watch.limit == 300.0


def test_a_process_that_does_not_look_at_the_folder_is_named(tmp_path, monkeypatch):
    store = Shelf()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "SharedStore", lambda: store)
    waits = agreement._exchange
    exchange = lambda count, topic, value: waits(count, topic, value, timeout=0.1)
    monkeypatch.setattr(agreement, "_exchange", exchange)
    text = r"processes 1 of 2 did not report their view of the folder of checkpoints within 0.1 s"
    with pytest.raises(LaunchError, match=text):
        agreement.check_shared(tmp_path, "the folder of checkpoints")
    assert list(tmp_path.iterdir()) == []
