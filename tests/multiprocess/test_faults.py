"""One process is killed, stopped, fails or never comes: the others say who, and end."""

import itertools
import signal
import time

import pytest

from axon_dist.launch.watchdog import EXIT_PEER_LOST

from .conftest import SILENCE_SECONDS

pytestmark = pytest.mark.multiprocess

LOOP = """
import sys, time, numpy as np, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from axon_dist.mesh import World, rank_table, self_test

world = World.emulate(int(sys.argv[1]))
self_test(world, timeout=60)
split = NamedSharding(world.mesh, PartitionSpec("dp"))
ones = jax.make_array_from_callback((world.size,), split, lambda i: np.ones(world.size)[i])
add = jax.jit(jnp.sum, out_shardings=NamedSharding(world.mesh, PartitionSpec()))
while float(add(ones)) == world.size:
    print(rank_table(world)[-1], flush=True)
    time.sleep(0.1)
    if len(sys.argv) > 2 and world.process_index == int(sys.argv[2]):
        raise ValueError("boom")
"""


def lose(processes, lost, number):
    """Sends one process a signal; returns what each other said, and how long it took."""
    processes.wait_for("process ")
    time.sleep(1)
    started = time.monotonic()
    processes.all[lost].send_signal(number)
    others = [rank for rank in range(len(processes.all)) if rank != lost]
    codes = processes.wait(others, timeout=60)
    assert codes == [EXIT_PEER_LOST] * len(others), processes.text(others[0])
    return [processes.text(rank) for rank in others], time.monotonic() - started


ALWAYS = (0, signal.SIGKILL)
CASES = [
    pytest.param(*case, marks=[] if case == ALWAYS else pytest.mark.slow)
    for case in itertools.product((0, 1, 2), (signal.SIGKILL, signal.SIGSTOP))
]


@pytest.mark.parametrize(("lost", "number"), CASES)
def test_a_lost_process_is_named_by_all_others(start, lost, number):
    # Longer for a killed one: a busy machine must raise the error of a broken connection, print it
    # and tell the others before the silence that needs no such error is over.
    silence = 10 if number == signal.SIGKILL else SILENCE_SECONDS
    processes = start(3, "-c", LOOP, "3", AXON_SILENCE_TIMEOUT=str(silence))
    texts, seconds = lose(processes, lost, number)
    for text in texts:
        assert f"lost process {lost} (host " in text
        # Its neighbours see the connections of one that died break: five heartbeats tell the rest.
        waited = silence / 2 if number == signal.SIGKILL else silence
        assert f"no sign of life for {waited:g} s" in text, text
    assert seconds < SILENCE_SECONDS + 10


@pytest.mark.slow
@pytest.mark.parametrize("failed", [0, 1])
def test_an_exception_is_told_to_the_others(start, failed):
    processes = start(2, "-c", LOOP, "2", str(failed))
    codes = processes.wait([0, 1], timeout=60)
    assert (codes[failed], codes[1 - failed]) == (1, EXIT_PEER_LOST)
    assert "ValueError: boom" in processes.text(1 - failed)
    assert f"process {failed}" in processes.text(1 - failed)


@pytest.mark.full
def test_a_process_that_does_not_come_is_named(start):
    processes = start(2, "-c", LOOP, "4", WORLD_SIZE="4", AXON_LAUNCH_TIMEOUT="3")
    assert processes.wait([0, 1], timeout=60) == [1, 1]
    for rank in range(2):
        assert "LaunchError: processes 2, 3 of 4 did not report within 3 s" in processes.text(rank)
