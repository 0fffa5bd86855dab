"""Measures the network along each mesh axis and between pairs of hosts, and the speed of each host.

A collective ends on all of its members at about the same time, so its time does not show which host
is slow. Hosts are therefore compared by a matmul that each host computes separately, and by
exchanges between only two hosts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.core.typing import Array
from axon_dist.mesh import World
from axon_dist.mesh.chips import Hardware, machine_of

ACCELERATOR_BYTES, CPU_BYTES = 64 * 2**20, 2 * 2**20
"""Bytes per device of the large all-reduce, on accelerators and on CPUs."""

SLOW = 1.5
"""A host counts as slow if it takes this many times as long as the fastest quarter of the hosts."""

_ROUNDS = 5
_WARM_UP = 2
_CHAIN = 8
"""The number of matmuls in a row; with several, launch overhead is negligible."""

_Key = TypeVar("_Key")
Run: TypeAlias = Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class AxisSpeed:
    """The speed of all-reduces along one mesh axis.

    Args:
        axis: the axis.
        ranks: devices along it.
        bandwidth: bytes/s that a device sends into the ring.
        latency: seconds of an all-reduce of one number.
        planned_bandwidth: the bandwidth that the planner assumes; None for an unknown chip.
        planned_latency: the latency that the planner assumes; None for an unknown chip.
        slow: hosts in groups that are slower than other groups of the axis.
    """

    axis: str
    ranks: int
    bandwidth: float
    latency: float
    planned_bandwidth: float | None = None
    planned_latency: float | None = None
    slow: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class NetworkCheck:
    """The result of `check_network`.

    Args:
        axes: the speed along each mesh axis with several devices.
        hosts: the compared hosts; empty if there is only one process.
        slow: a sentence for each slow host, and for each slow link whose host is not known.
        num_bytes: bytes per device of the large all-reduces.
    """

    axes: tuple[AxisSpeed, ...]
    hosts: tuple[str, ...]
    slow: tuple[str, ...]
    num_bytes: int


def check_network(world: World) -> NetworkCheck:
    """Measures the network of a world; every process must call it.

    Args:
        world: the devices, which must exist.

    Returns:
        The speed of each axis, and the slow hosts; the same in every process.
    """
    num_bytes = CPU_BYTES if world.is_cpu else ACCELERATOR_BYTES
    names = _host_names()
    axes = tuple(
        _axis_speed(world, axis, num_bytes, names)
        for axis, size in world.mesh.shape.items()
        if size > 1
    )
    hosts = _hosts_of(names)
    if len(hosts) == 1:
        return NetworkCheck(axes, (), (), num_bytes)
    alone = _times_alone(world, names)
    links = _link_times(world, hosts, num_bytes)
    return NetworkCheck(axes, tuple(hosts), slow_hosts(alone, links), num_bytes)


def slow_hosts(
    alone: Mapping[str, float], links: Mapping[tuple[str, str], float]
) -> tuple[str, ...]:
    """Describes hosts that compute slowly, hosts with two slow links, and other slow links.

    Args:
        alone: seconds of the same matmuls, by host.
        links: seconds of the same exchange, by pair of hosts.

    Example:
        >>> slow_hosts({"a": 1.0, "b": 1.0, "c": 2.5}, {})
        ('c computes 2.5 times as long as the others',)
        >>> slow_hosts({}, {("a", "b"): 3.0, ("b", "c"): 3.0, ("c", "a"): 1.0})
        ('b exchanges 3.0 times as long as the others, with both of its neighbours',)
        >>> slow_hosts({}, {("a", "b"): 3.0, ("b", "c"): 1.0, ("c", "a"): 1.0})
        ('the link between a and b takes 3.0 times as long as the others',)
    """
    sentences = []
    for host, ratio in _slow_ratios(alone).items():
        sentences.append(f"{host} computes {ratio:.1f} times as long as the others")
    ratios = _slow_ratios(links)
    ends = [host for pair in ratios for host in pair]
    num_slow = {host: ends.count(host) for host in ends}
    for host in (host for host, count in num_slow.items() if count > 1):
        ratio = min(ratio for pair, ratio in ratios.items() if host in pair)
        sentences.append(
            f"{host} exchanges {ratio:.1f} times as long as the others, with both of its neighbours"
        )
    for pair, ratio in ratios.items():
        if all(num_slow[host] == 1 for host in pair):
            sentences.append(
                f"the link between {pair[0]} and {pair[1]} takes {ratio:.1f} times as long as the "
                "others"
            )
    return tuple(sentences)


def _slow_ratios(times: Mapping[_Key, float]) -> dict[_Key, float]:
    """Returns the slow times, as multiples of the time of the fastest quarter.

    The median is not a good reference: in a ring of three hosts, a slow host has two of the three
    links.
    """
    if not times:
        return {}
    usual = sorted(times.values())[len(times) // 4]
    return {key: value / usual for key, value in times.items() if value > SLOW * usual}


def _axis_speed(world: World, axis: str, num_bytes: int, names: Sequence[str]) -> AxisSpeed:
    run = _over_devices(world, lambda x: jax.lax.psum(x, axis))
    small = _from_all(_seconds(world, run, 1))
    large = _from_all(_seconds(world, run, num_bytes // 4))
    ranks = world.mesh.shape[axis]
    # A ring all-reduce sends the share (N-1)/N of the array twice.
    sent = 2 * (1 - 1 / ranks) * num_bytes
    latency = max(small)
    seconds = max(max(large) - latency, 1e-9)
    speed = AxisSpeed(axis, ranks, sent / seconds, latency, slow=_slow_groups(large, names))
    row = machine_of(world.mesh)
    return speed if row is None else _with_plan(speed, world, row)


def _with_plan(speed: AxisSpeed, world: World, row: Hardware) -> AxisSpeed:
    """Adds the bandwidth and latency that the planner assumes for the axis."""
    names = list(world.mesh.shape)
    stride = math.prod(world.mesh.shape[name] for name in names[names.index(speed.axis) + 1 :])
    return dataclasses.replace(
        speed,
        planned_bandwidth=row.bandwidth(speed.ranks, stride),
        planned_latency=2 * row.ring_latency(speed.ranks, stride),
    )


def _slow_groups(times: Sequence[float], names: Sequence[str]) -> tuple[str, ...]:
    """Returns the hosts of processes whose groups are slower than other groups."""
    slow = _slow_ratios(dict(enumerate(times)))
    return tuple(dict.fromkeys(names[process] for process in slow))


def _over_devices(world: World, function: Run) -> Run:
    """Compiles a function that maps `[1, n]`, so that each device maps its row of an array."""
    spec = PartitionSpec(world.mesh.axis_names)
    mapped = jax.shard_map(
        function, mesh=world.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped)


def _rows(world: World, num_words: int) -> Array:
    """Returns a float32 array `[devices, num_words]` with one row per device."""
    sharding = NamedSharding(world.mesh, PartitionSpec(world.mesh.axis_names))
    shape = world.size, num_words
    row = np.ones((1, num_words), np.float32)
    return jax.make_array_from_callback(shape, sharding, lambda index: row)


def _seconds(world: World, run: Run, num_words: int) -> float:
    """Returns the shortest time of a program in this process; all processes start it together."""
    x = _rows(world, num_words)
    together = _over_devices(world, lambda x: jax.lax.psum(x, world.mesh.axis_names))
    start = _rows(world, 1)
    best = math.inf
    for number in range(_WARM_UP + _ROUNDS):
        jax.block_until_ready(together(start))
        began = time.perf_counter()
        jax.block_until_ready(run(x))
        took = time.perf_counter() - began
        if number >= _WARM_UP:
            best = min(best, took)
    return best


def _host_names() -> list[str]:
    """Returns the host of each process, with the process number if all are on one host.

    Names are converted to short ASCII texts, because hosts may have any name.
    """
    here = ascii(socket.gethostname())[1:-1][:60]
    names = [str(name) for name in _from_all(here)]
    if len(names) > 1 and len(set(names)) == 1:
        return [f"process {process} (host {name})" for process, name in enumerate(names)]
    return names


def _hosts_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Maps hosts to their processes, in order."""
    hosts: dict[str, list[int]] = {}
    for process, name in enumerate(names):
        hosts.setdefault(name, []).append(process)
    return hosts


def _times_alone(world: World, names: Sequence[str]) -> dict[str, float]:
    """Returns, by host, the seconds that its slowest device needs for the same matmuls."""
    size, dtype = (256, jnp.float32) if world.is_cpu else (4096, jnp.bfloat16)

    def chain(x: Array) -> Array:
        for _ in range(_CHAIN):
            x = x @ x / size
        return x

    run = jax.jit(chain)
    slowest = 0.0
    for device in world.mesh.local_devices:
        x = jax.device_put(np.ones((size, size), dtype), device)
        times = []
        for _ in range(_WARM_UP + _ROUNDS):
            began = time.perf_counter()
            jax.block_until_ready(run(x))
            times.append(time.perf_counter() - began)
        slowest = max(slowest, min(times))
    alone: dict[str, float] = {}
    for name, seconds in zip(names, _from_all(slowest), strict=True):
        alone[name] = max(alone.get(name, 0.0), seconds)
    return alone


def _link_times(
    world: World, hosts: Mapping[str, Sequence[int]], num_bytes: int
) -> dict[tuple[str, str], float]:
    """Returns the seconds of an exchange between each two neighbouring hosts of a ring.

    All devices of the two hosts exchange at once. Pairs without a common host exchange in the same
    round.
    """
    positions: dict[str, list[int]] = {name: [] for name in hosts}
    of_process = {process: name for name, members in hosts.items() for process in members}
    for position, device in enumerate(world.mesh.devices.flat):
        positions[of_process[device.process_index]].append(position)
    names = list(hosts)
    ring = list(zip(names, names[1:] + names[:1], strict=True))
    ring = ring[:1] if len(names) == 2 else ring
    times: dict[tuple[str, str], float] = {}
    for links in _rounds(ring):
        pairs = [
            (source, target)
            for a, b in links
            for one, other in zip(positions[a], positions[b], strict=False)
            for source, target in ((one, other), (other, one))
        ]
        run = _over_devices(
            world, lambda x, pairs=pairs: jax.lax.ppermute(x, world.mesh.axis_names, pairs)
        )
        measured = _from_all(_seconds(world, run, num_bytes // 4))
        for a, b in links:
            times[a, b] = max(measured[process] for process in (*hosts[a], *hosts[b]))
    return times


def _rounds(ring: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Splits the links of a ring into rounds in which each host has one link.

    Example:
        >>> _rounds([("a", "b"), ("b", "c"), ("c", "a")])
        [[('a', 'b')], [('b', 'c')], [('c', 'a')]]
    """
    rounds: list[list[tuple[str, str]]] = []
    for link in ring:
        free = (r for r in rounds if not any(set(link) & set(other) for other in r))
        found = next(free, None)
        if found is None:
            rounds.append([link])
        else:
            found.append(link)
    return rounds


def _from_all(value: object) -> list[Any]:
    """Gathers a JSON value of at most 200 bytes from all processes; returns them by process."""
    text = np.zeros(200, np.uint8)
    raw = json.dumps(value).encode()
    text[: len(raw)] = np.frombuffer(raw, np.uint8)
    rows = np.reshape(multihost_utils.process_allgather(text), (-1, text.size))
    return [json.loads(bytes(row).rstrip(b"\0")) for row in rows]
