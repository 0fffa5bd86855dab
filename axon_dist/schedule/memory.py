"""Counts the activations that a schedule keeps alive, and assigns them to buffer slots."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..core.renamed import renamed_fields
from .action import TOGETHER, Action, Phase, check_sizes, dependencies
from .table import PlacedAction, Schedule

IN_FLIGHT_ENDS = (Phase.B, Phase.I)
"""A microbatch is in flight on a stage from its `F` to its `B` or `I`."""

STASH_ENDS = (Phase.B, Phase.W)
"""The values that a stage saves for its backward are live from `F` to the end of the backward."""


def peak_live(schedule: Schedule, ends: Collection[Phase] = IN_FLIGHT_ENDS) -> tuple[int, ...]:
    """Returns, per device, the largest number of stage inputs alive at one time.

    On a device with `V` chunks these are inputs of chunks: divide by `V` for microbatches over all
    its layers.

    Args:
        schedule: a valid table.
        ends: the phases that end a life. `IN_FLIGHT_ENDS` gives the papers' number, `STASH_ENDS`
            the number of slots a stash needs. They differ only if the backward is split.

    Returns:
        One count per device.

    Example:
        >>> from axon_dist.schedule import zero_bubble_h1
        >>> peak_live(zero_bubble_h1(4, 8)), peak_live(zero_bubble_h1(4, 8), STASH_ENDS)
        ((4, 3, 2, 1), (4, 4, 4, 4))
    """
    Schedule.check(schedule, "its peaks")
    return tuple(_peak(schedule.order(d), ends) for d in range(schedule.num_devices))


def _peak(order: Iterable[Action], ends: Collection[Phase]) -> int:
    live = peak = 0
    for action in order:
        live += (action.phase is Phase.F) - (action.phase in ends)
        peak = max(peak, live)
    return peak


@dataclass(frozen=True)
class PipelineMemoryStats:
    """Peak activations of a pipeline, in stage inputs of one microbatch.

    Args:
        per_stage: the peak of each stage of the whole model.
        per_device: the peak of each device; the same numbers if devices have one chunk.

    Example:
        >>> PipelineMemoryStats.one_f_one_b_peak_activations(num_stages=4, num_microbatches=8)
        PipelineMemoryStats(per_stage=(4, 3, 2, 1), per_device=(4, 3, 2, 1))
    """

    per_stage: tuple[int, ...]
    per_device: tuple[int, ...]

    @property
    def worst(self) -> int:
        """The highest peak of all devices, which must fit into memory."""
        return max(self.per_device)

    @property
    def total(self) -> int:
        """The sum over all devices."""
        return sum(self.per_device)

    @classmethod
    def of(cls, schedule: Schedule) -> PipelineMemoryStats:
        """Counts the peaks of a table.

        Args:
            schedule: a valid table.

        Returns:
            The microbatches in flight (`F` to `B` or `I`) on each stage and device.
        """
        per_device = peak_live(schedule)
        per_stage = (
            _peak((a for a in schedule.order(home) if a.stage == stage), IN_FLIGHT_ENDS)
            for stage, home in enumerate(schedule.placement)
        )
        return cls(tuple(per_stage), per_device)

    @classmethod
    def gpipe_peak_activations(cls, num_stages: int, num_microbatches: int) -> PipelineMemoryStats:
        """Returns GPipe's peaks in closed form: every stage keeps all `M`, `S * M` in total.

        Args:
            num_stages: stages `S`.
            num_microbatches: microbatches `M`.

        Returns:
            The peaks.

        Raises:
            ScheduleError: a number below 1.

        Example:
            >>> stats = PipelineMemoryStats.gpipe_peak_activations(4, 8)
            >>> stats.worst, stats.total
            (8, 32)
        """
        return cls._closed_form(num_stages, num_microbatches, lambda stage: num_microbatches)

    @classmethod
    def one_f_one_b_peak_activations(
        cls, num_stages: int, num_microbatches: int
    ) -> PipelineMemoryStats:
        """Returns 1F1B's peaks in closed form: stage `s` keeps `min(S-s, M)`.

        Arguments, results and errors are those of `gpipe_peak_activations`.

        Example:
            >>> stats = PipelineMemoryStats.one_f_one_b_peak_activations(4, 8)
            >>> stats.worst, stats.total
            (4, 10)
        """
        return cls._closed_form(num_stages, num_microbatches, lambda stage: num_stages - stage)

    @classmethod
    def _closed_form(
        cls, num_stages: int, num_microbatches: int, limit: Callable[[int], int]
    ) -> PipelineMemoryStats:
        check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
        peaks = tuple(min(limit(stage), num_microbatches) for stage in range(num_stages))
        return cls(peaks, peaks)


Moment = tuple[int, int]
"""A tick and the position in the device's cell."""

_ARRIVAL = 1 << 30  # the position of received values, after every action of the tick


@dataclass(frozen=True)
class Slots:
    """The slots of one buffer. Every device has such a buffer.

    Args:
        slot: the slot of the value of each (stage, microbatch) that is stored in the buffer.
        per_device: the number of slots each device uses, its largest number of live values.
    """

    slot: Mapping[tuple[int, int], int]
    per_device: tuple[int, ...]

    @property
    def num_slots(self) -> int:
        """The number of slots of the buffer, if it has the same size on all devices."""
        return max(self.per_device)


@renamed_fields(kept_lookups="saved_lookups")
@dataclass(frozen=True)
class SlotPlan:
    """The slots in which an executor keeps every value that outlives its action.

    A slot may be overwritten by the action that reads it last, or by a value that arrives at the
    end of that tick. Keep the inputs of stages either in `inputs`, or first in `activations` and
    from the forward on in `stash`. In the second case the forward copies its input, or saves
    residuals instead.

    Args:
        inputs: a stage's input, from its arrival (on stage 0 from its `F`) to its `B` or `W`.
        stash: the values that a stage saves for its backward, from `F` to `B` or `W`.
        activations: a stage's input until its `F`. Stage 0 reads the batch and has none.
        gradients: the gradient of a stage's output until its `B` or `I`. The last stage computes it
            and has none, except if a `V` computes it.
        held: the values that a split backward passes from `I` to `W`.
        outputs: the last stage's output, from its `F` to the `V`; empty without `V`.
        lookups: the rows looked up for the first stage, from the `E` to its `F`; empty without `E`.
        saved_lookups: the same rows until the first stage's `B` or `I`, for backward passes that
            read them again.
        scatters: the gradient of the rows, from the first stage's `B` or `I` to the `G`.
    """

    inputs: Slots
    stash: Slots
    activations: Slots
    gradients: Slots
    held: Slots
    outputs: Slots
    lookups: Slots
    saved_lookups: Slots
    scatters: Slots


class _Life(NamedTuple):
    start: Moment
    end: Moment
    device: int
    value: tuple[int, int]


def assign_slots(schedule: Schedule) -> SlotPlan:
    """Assigns a buffer slot to every value: as many slots as values that are live at one time.

    The lives of values are intervals in time. Coloring intervals greedily by their start needs
    exactly as many colors as the most intervals that overlap at one time: M per chunk for GPipe
    and looped BFS, independent of M for 1F1B and its relatives.

    Args:
        schedule: a valid table.

    Returns:
        The slots of each buffer, by (stage, microbatch).

    Example:
        >>> from axon_dist.schedule import one_f_one_b
        >>> assign_slots(one_f_one_b(4, 8)).stash.per_device
        (4, 3, 2, 1)
        >>> assign_slots(one_f_one_b(4, 64)).inputs.num_slots
        4
    """
    Schedule.check(schedule, "its slots")
    lives: dict[str, list[_Life]] = {field.name: [] for field in fields(SlotPlan)}
    for placed in schedule.placed():
        stage, _, microbatch = placed.action
        for buffer, start, end in _lives(schedule, placed):
            lives[buffer].append(_Life(start, end, placed.device, (stage, microbatch)))
    num_devices = schedule.num_devices
    return SlotPlan(
        **{buffer: _color(intervals, num_devices) for buffer, intervals in lives.items()}
    )


def _lives(schedule: Schedule, placed: PlacedAction) -> Iterator[tuple[str, Moment, Moment]]:
    """Yields the lives of the values that an action reads or stores: buffer, start, end."""
    action = placed.action
    places = schedule.where
    if action.phase in (*TOGETHER, Phase.W):
        return
    stage = action.stage
    now = _moment(placed)
    # The first stage's forward reads the batch, and computes its input itself.
    made = now
    if action.phase is not Phase.F or stage > 0:
        # All other actions read a value that another stage has computed.
        source = places[dependencies(action, schedule.num_stages, places)[-1]]
        is_local = source.device == placed.device
        made = _moment(source) if is_local else (source.tick, _ARRIVAL)
    is_last = stage + 1 == schedule.num_stages
    part = None  # the `V` of this device
    if is_last and schedule.splits_vocabulary:
        home = schedule.stages_of(placed.device)[0]
        part = places.get(Action(home, Phase.V, action.microbatch))
    lookup = places.get(Action(stage, Phase.E, action.microbatch)) if stage == 0 else None

    if action.phase is Phase.F:
        end = places.get(action._replace(phase=Phase.W)) or places[action._replace(phase=Phase.B)]
        yield "inputs", made, _moment(end)
        yield "stash", now, _moment(end)
        if stage > 0:
            yield "activations", made, now
        if part is not None:
            yield "outputs", now, _moment(part)
        if lookup is not None:
            back = places.get(action._replace(phase=Phase.I), end)
            yield "lookups", _moment(lookup), now
            yield "saved_lookups", _moment(lookup), _moment(back)
        return
    if lookup is not None:
        yield "scatters", now, _moment(places[action._replace(phase=Phase.G)])
    if not is_last:
        yield "gradients", made, now
    elif part is not None:
        yield "gradients", _moment(part), now
    if action.phase is Phase.I:
        yield "held", now, _moment(places[action._replace(phase=Phase.W)])


def _moment(placed: PlacedAction) -> Moment:
    return placed.tick, placed.position


def _color(lives: list[_Life], num_devices: int) -> Slots:
    slot: dict[tuple[int, int], int] = {}
    free: list[list[int]] = [[] for _ in range(num_devices)]
    busy: list[list[tuple[Moment, int]]] = [[] for _ in range(num_devices)]
    used = [0] * num_devices
    for start, end, device, value in sorted(lives):
        while busy[device] and busy[device][0][0] <= start:
            heapq.heappush(free[device], heapq.heappop(busy[device])[1])
        if not free[device]:
            heapq.heappush(free[device], used[device])
            used[device] += 1
        slot[value] = heapq.heappop(free[device])
        heapq.heappush(busy[device], (end, slot[value]))
    return Slots(slot, tuple(used))
