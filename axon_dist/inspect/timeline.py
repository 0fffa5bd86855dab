"""The time that each operation of a program takes in a trace of `jax.profiler`.

Every moment of a device is attributed to one operation, or to none. If several run at once, as on
the streams of a GPU, it goes to the one that the step would wait for anyway: a product before a
copy, a copy before a transfer. So a transfer keeps only the time that nothing hides.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from ..core.errors import UnsupportedError

_DEVICE = re.compile(r"/device:(?:GPU|TPU):(\d+)")
_TPU_NAME = re.compile(r"%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One execution of an operation.

    Args:
        name: the name of the HLO instruction, or of a kernel that has no instruction.
        program: the name of the HLO module; "" if the trace does not name it.
        device: the number of the device.
        start: the start in nanoseconds.
        end: the end in nanoseconds.
        run: a number shared by the operations of one execution of a program; None if the trace has
            none.
    """

    name: str
    program: str
    device: int
    start: float
    end: float
    run: int | None = None


def read_trace(folder: str | Path) -> list[Event]:
    """Reads the newest trace in a folder.

    Args:
        folder: the folder that was passed to `jax.profiler.trace`.

    Returns:
        The executions of operations: on GPU those on streams, on TPU those of the line `XLA Ops`,
        on CPU those that name an HLO instruction.

    Raises:
        UnsupportedError: if there is no trace, or it has no operations.
    """
    files = sorted(Path(folder).glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UnsupportedError(
            f"{str(folder)!r} holds no trace (*.xplane.pb); pass the folder that "
            "jax.profiler.trace wrote to",
            code="no-trace",
        )
    with warnings.catch_warnings():
        # Python warns that the reader's types lack the attribute __module__.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = jax.profiler.ProfileData.from_file(str(files[-1])).planes
        events = [event for plane in planes for event in _events(plane)]
    if not events:
        raise UnsupportedError(
            f"the trace {str(files[-1])!r} has no operation of a CPU, GPU or TPU; run a step in "
            "the trace, and wait for its result before the trace ends",
            code="no-operations",
        )
    return events


def _events(plane: Any) -> Iterable[Event]:
    if match := _DEVICE.fullmatch(plane.name):
        device = int(match.group(1))
        for line in plane.lines:
            if line.name.startswith("Stream") or line.name == "XLA Ops":
                yield from (_event(one, device) for one in line.events)
    elif plane.name == "/host:CPU":
        for line in plane.lines:
            for one in line.events:
                stats = dict(one.stats)
                if "hlo_op" in stats:
                    yield _event(one, int(stats.get("device_ordinal", 0)), stats)


def _event(one: Any, device: int, stats: Mapping[str, Any] | None = None) -> Event:
    stats = dict(one.stats) if stats is None else stats
    match = _TPU_NAME.match(one.name)
    name = str(stats.get("hlo_op") or (match.group(1) if match else one.name))
    run = stats.get("run_id")
    start = float(one.start_ns)
    return Event(
        name=name,
        program=str(stats.get("hlo_module", "")),
        device=device,
        start=start,
        end=start + float(one.duration_ns),
        run=None if run is None else int(run),
    )


@dataclasses.dataclass(frozen=True)
class Spent:
    """The time of one step, as the mean over devices.

    Args:
        step: seconds from the start of a step to the start of the next.
        by_name: seconds attributed to each operation.
        counts: how often a device runs each operation.
        gaps: seconds within a step in which a device runs nothing, by the operation that follows.
        between: seconds in which a device waits for the next step to start.
        num_steps: how many steps were measured.
        num_devices: how many devices were traced.
    """

    step: float
    by_name: Mapping[str, float]
    counts: Mapping[str, float]
    gaps: Mapping[str, float]
    between: float
    num_steps: int
    num_devices: int


def spent(events: Sequence[Event], num_runs: int, priority: Callable[[Event], int]) -> Spent:
    """Adds up the times of the operations of a step.

    Args:
        events: the events of `num_runs` consecutive steps, on all devices.
        num_runs: the number of traced steps. The first is not measured, because the trace starts in
            it. The last only marks the end of the step before it.
        priority: a moment in which several events run is shared equally by those with the lowest
            number.

    Raises:
        UnsupportedError: if fewer than three steps can be distinguished.
    """
    by_device: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_device[event.device].append(event)
    runs = {device: _runs(own, num_runs) for device, own in by_device.items()}
    found = min(map(len, runs.values()), default=0)
    if found < 3:
        raise UnsupportedError(
            f"{found} of {num_runs} steps can be distinguished in the trace; a profile needs 3: "
            "the trace begins in the first, the second is measured, and the third marks its end"
        )
    begin = min(spans[1][0] for spans in runs.values())
    end = min(spans[-1][0] for spans in runs.values())
    scale = 1e-9 / (found - 2) / len(runs)
    totals: dict[str, dict[str, float]] = {
        name: defaultdict(float) for name in ("by_name", "counts", "gaps")
    }
    between = 0.0
    for device, own in by_device.items():
        between += _sweep(own, runs[device], (begin, end), priority, totals)
    counts = {name: x / (found - 2) / len(runs) for name, x in totals["counts"].items()}
    return Spent(
        step=(end - begin) * 1e-9 / (found - 2),
        by_name={name: x * scale for name, x in totals["by_name"].items()},
        counts=counts,
        gaps={name: x * scale for name, x in totals["gaps"].items()},
        between=between * scale,
        num_steps=found - 2,
        num_devices=len(runs),
    )


def _runs(events: Sequence[Event], num_runs: int) -> list[tuple[float, float]]:
    """Returns the start and end of each execution of the step on one device, in order."""
    groups: dict[int, list[Event]] = defaultdict(list)
    if all(event.run is not None for event in events):
        for event in events:
            groups[event.run or 0].append(event)
    else:
        # An operation that a step runs once occurs as often as there are steps.
        counts = Counter((event.program, event.name) for event in events)
        seen: Counter[tuple[str, str]] = Counter()
        for event in sorted(events, key=lambda event: event.start):
            key = event.program, event.name
            if counts[key] == num_runs:
                groups[seen[key]].append(event)
                seen[key] += 1
    # Keep the longest: other programs run between steps, such as one that reads a metric.
    spans = [(min(e.start for e in own), max(e.end for e in own)) for own in groups.values()]
    longest = sorted(spans, key=lambda span: span[0] - span[1])[:num_runs]
    return sorted(longest)


def _sweep(
    events: Sequence[Event],
    runs: Sequence[tuple[float, float]],
    window: tuple[float, float],
    priority: Callable[[Event], int],
    totals: Mapping[str, dict[str, float]],
) -> float:
    """Attributes every moment of a window to operations; returns the time between steps."""
    begin, end = window
    inside = sorted((e for e in events if e.end > begin and e.start < end), key=lambda e: e.start)
    for event in inside:
        totals["counts"][event.name] += event.start >= begin
    priorities = [priority(event) for event in inside]
    running: set[int] = set()
    ends: list[tuple[float, int]] = []
    between = 0.0
    clock = begin
    for number, event in itertools.chain(enumerate(inside), [(None, None)]):
        until = end if event is None else max(begin, event.start)
        while ends and ends[0][0] <= until:
            stop, ended = heapq.heappop(ends)
            _share(inside, priorities, running, stop - clock, totals["by_name"])
            running.discard(ended)
            clock = max(clock, stop)
        if running:
            _share(inside, priorities, running, until - clock, totals["by_name"])
        elif until > clock:
            idle = _outside(clock, until, runs)
            between += idle
            totals["gaps"][event.name if event else inside[-1].name] += until - clock - idle
        clock = max(clock, until)
        if event is not None and number is not None:
            running.add(number)
            heapq.heappush(ends, (min(event.end, end), number))
    return between


def _share(
    events: Sequence[Event],
    priorities: Sequence[int],
    running: set[int],
    time: float,
    total: dict[str, float],
) -> None:
    """Shares a time among the running events with the lowest number."""
    if time <= 0:
        return
    lowest = min(priorities[number] for number in running)
    owners = [number for number in running if priorities[number] == lowest]
    for number in owners:
        total[events[number].name] += time / len(owners)


def _outside(begin: float, end: float, runs: Sequence[tuple[float, float]]) -> float:
    """Returns how much of an interval lies outside all runs."""
    covered = (min(end, stop) - max(begin, start) for start, stop in runs)
    return (end - begin) - sum(x for x in covered if x > 0)


PRIORITY: Mapping[str, int] = MappingProxyType(
    {
        "products": 0,
        "attention": 0,
        "recomputed": 0,
        "kernels": 1,
        "copies": 2,
        "wire": 3,
        "gaps": 4,
    }
)
"""The kinds of work; a moment with several kinds belongs to those with the lowest number."""
