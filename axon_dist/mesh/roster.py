"""Before the first step: who is here with which devices, and whether they can talk."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..core.compat import SharedStore
from ..core.errors import LaunchError
from ..launch.watchdog import EXIT_PEER_LOST, say
from .world import World

_HOSTS, _ARRIVED, _PASSED = "axon/roster/host/", "axon/test/arrived/", "axon/test/passed/"
_PAUSE_SECONDS = 0.05


def rank_table(world: World) -> list[str]:
    """Lists the processes of a world, each with its host and its ranks; all must call it.

    Returns:
        One line per process, for process 0 to print.

    Example:
        >>> rank_table(World.emulate(4))
        ['process 0  host ...  ranks 0-3  4 x cpu']
    """
    hosts = _hosts(world)
    lines = []
    for process, host in sorted(hosts.items()):
        owned = [
            (rank, device)
            for rank, device in enumerate(world.mesh.devices.flat)
            if device.process_index == process
        ]
        ranks = ranges([rank for rank, _ in owned])
        kind = owned[0][1].device_kind if owned else "none"
        lines.append(f"process {process}  host {host}  ranks {ranks}  {len(owned)} x {kind}")
    return lines


def self_test(world: World, timeout: float) -> None:
    """Adds up the ranks over all devices, to find out now and not in an hour whether they can talk.

    Args:
        world: the devices; every process must call it.
        timeout: seconds until it names the processes that did not get through, and ends this one.

    Raises:
        LaunchError: when the sum is wrong.

    Example:
        >>> self_test(World.emulate(4), timeout=60)
    """
    split = NamedSharding(world.mesh, PartitionSpec(world.mesh.axis_names))
    numbers = np.arange(world.size, dtype=np.int32)
    with _deadline(world, timeout):
        placed = jax.make_array_from_callback(numbers.shape, split, lambda index: numbers[index])
        whole = NamedSharding(world.mesh, PartitionSpec())
        total = int(jax.jit(jnp.sum, out_shardings=whole)(placed))
    if total != numbers.sum():
        raise LaunchError(
            f"the self-test added up the ranks 0 to {world.size - 1} over all devices and got "
            f"{total} instead of {numbers.sum()}; the transport {world.backend} is broken"
        )


def ranges(numbers: Sequence[int]) -> str:
    """Writes ascending integers as ranges.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _hosts(world: World) -> dict[int, str]:
    here, count = socket.gethostname(), world.num_processes
    if count == 1:
        return {world.process_index: here}
    store = SharedStore()
    store.set(f"{_HOSTS}{world.process_index}", here)
    while len(found := store.items(_HOSTS)) < count:
        # Whoever does not come is noticed by the watchdog.
        time.sleep(_PAUSE_SECONDS)
    return {int(process): host for process, host in found.items()}


@contextlib.contextmanager
def _deadline(world: World, timeout: float) -> Iterator[None]:
    """Ends the process, with the names of those that are late, unless the body is done in time."""
    if world.num_processes == 1:
        yield
        return
    store, me = SharedStore(), world.process_index
    store.set(f"{_ARRIVED}{me}", "")
    timer = threading.Timer(timeout, _give_up, (world, store, timeout))
    timer.daemon = True
    timer.start()
    try:
        yield
        store.set(f"{_PASSED}{me}", "")
    finally:
        timer.cancel()


def _give_up(world: World, store: SharedStore, timeout: float) -> None:
    everyone = {device.process_index for device in world.mesh.devices.flat}
    absent = sorted(everyone - {int(process) for process in store.items(_ARRIVED)})
    stuck = sorted(everyone - {int(process) for process in store.items(_PASSED)} - set(absent))
    say(
        f"axon: the collective self-test did not end within {timeout:g} s: processes "
        f"{ranges(absent) or 'none'} did not begin it, processes {ranges(stuck) or 'none'} wait "
        f"in it; check the network between their hosts. Ending process {world.process_index}\n"
    )
    os._exit(EXIT_PEER_LOST)
