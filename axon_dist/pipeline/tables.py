"""A schedule as integer tables: what each rank does in each tick, and where every value lies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..core.typing import Array
from ..schedule import TOGETHER, Action, Cell, Phase, Placed, Schedule, SlotPlan, Slots

Tick: TypeAlias = dict[str, Array]
"""A lane's entries for one rank in one tick."""

NONE = -1
"""In a table of slots: nowhere."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """One action that every rank may do in a tick; the lanes of a tick run one after another.

    Args:
        phase: what it computes.
        active: [D, T] whether the rank does it.
        stage: [D, T] of which stage.
        microbatch: [D, T] of which microbatch.
        inputs: [D, T] the slot of the stage's input.
        gradients: [D, T] the slot of the gradient of its output.
        stash: [D, T] the slot of what a forward keeps for its backward.
        held: [D, T] the slot of what an input gradient leaves for the weight gradient.
        outputs: [D, T] the slot of the last stage's output until its vocabulary action.
        lookups: [D, T] the slot of what was looked up for the first stage.
        scatters: [D, T] the slot of the gradient of that.
        hand_over: [D, T] the slot where the neighbouring stage on the same rank looks for the
            result.
    """

    phase: Phase
    active: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    inputs: np.ndarray
    gradients: np.ndarray
    stash: np.ndarray
    held: np.ndarray
    outputs: np.ndarray
    lookups: np.ndarray
    scatters: np.ndarray
    hand_over: np.ndarray

    def columns(self, of: Callable[[np.ndarray], Any]) -> dict[str, Any]:
        """Something of each of its tables, by name."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "phase"]
        return {name: of(getattr(self, name)) for name in names}


@dataclasses.dataclass(frozen=True)
class Channel:
    """Results of one lane on their way to a neighbour, one permutation of the ranks.

    Args:
        lane: the lane that produces them.
        pairs: (source, target), each rank at most once on either side.
        slot: [D, T] where the receiver puts what arrives at the end of a tick; `NONE` for nothing.
    """

    lane: int
    pairs: tuple[tuple[int, int], ...]
    slot: np.ndarray


@dataclasses.dataclass(frozen=True)
class Program:
    """All that the executor reads of a schedule.

    Args:
        lanes: in the order in which a tick runs them.
        channels: what is sent after the lanes.
        num_ticks: ticks.
    """

    lanes: tuple[Lane, ...]
    channels: tuple[Channel, ...]
    num_ticks: int


def program_of(
    schedule: Schedule, slots: SlotPlan, stashes: bool = False, keeps_lookups: bool = False
) -> Program:
    """Turns a valid schedule into the tables that one scan over ticks reads.

    Args:
        schedule: a valid table.
        slots: where its values lie.
        stashes: whether forwards leave residuals in `slots.stash`; a stage's input is then needed
            only until its forward, and lies in `slots.activations`.
        keeps_lookups: whether the first stage's backward reads what was looked up, too.

    Returns:
        The tables.
    """
    phases = lane_phases(cell for row in schedule.rows for cell in row)
    lanes = [_empty_lane(phase, schedule) for phase in phases]
    arrivals: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for device, row in enumerate(schedule.rows):
        for tick, cell in enumerate(row):
            for lane, action in zip(_lanes_for(cell, phases), cell, strict=True):
                placed = Placed(action, device, tick, lane)
                _fill(lanes[lane], placed, schedule.num_stages - 1, slots, stashes)
                _fill_lookups(lanes[lane], placed, slots, keeps_lookups)
                _route(placed, lanes[lane], schedule, slots, stashes, arrivals)
    channels = [_channel(lane, sent, schedule) for (lane, _), sent in sorted(arrivals.items())]
    return Program(tuple(lanes), tuple(channels), schedule.num_ticks)


def lane_phases(cells: Iterable[Cell]) -> tuple[Phase, ...]:
    """A short sequence of phases of which every cell is a subsequence.

    The same on every process, and in the order of `Phase` where cells leave it open: a value is
    then written by one lane and read by a later one. XLA updates such a buffer in place, and copies
    one that is read before it is written.

    Example:
        >>> parse = lambda *texts: tuple(map(Action.parse, texts))
        >>> [str(p) for p in lane_phases([parse("0F0"), parse("0B0"), parse("0F1", "0B1")])]
        ['F', 'B']
    """
    order = list(Phase)
    wanted = sorted(
        {tuple(action.phase for action in cell) for cell in cells},
        key=lambda cell: (len(cell), [order.index(phase) for phase in cell]),
    )
    lanes: list[Phase] = []
    # Longest cells first: shorter ones mostly are subsequences of these already.
    for sequence in reversed(wanted):
        position = 0
        for phase in sequence:
            if phase not in lanes[position:]:
                lanes.insert(position, phase)
            position = lanes.index(phase, position) + 1
    return tuple(lanes)


def inputs_of(slots: SlotPlan, stashes: bool):
    """The buffer in which stages find their inputs."""
    return slots.activations if stashes else slots.inputs


def _lanes_for(cell: Cell, phases: Sequence[Phase]) -> list[int]:
    lanes, position = [], 0
    for action in cell:
        position = phases.index(action.phase, position)
        lanes.append(position)
        position += 1
    return lanes


def _empty_lane(phase: Phase, schedule: Schedule) -> Lane:
    shape = (schedule.num_devices, schedule.num_ticks)
    names = [field.name for field in dataclasses.fields(Lane)][2:]
    fields = {name: np.zeros(shape, np.int32) for name in names}
    # Slot 0 exists, so zeros could not say that nothing is handed over.
    fields["hand_over"] += NONE
    return Lane(phase, np.zeros(shape, bool), **fields)


def _fill(lane: Lane, placed: Placed, last: int, slots: SlotPlan, stashes: bool) -> None:
    stage, phase, microbatch = placed.action
    at = placed.device, placed.tick
    # A vocabulary action is about the last stage's output and its gradient, on whatever rank it is.
    key = (last if phase is Phase.V else stage), microbatch
    lane.active[at] = True
    lane.stage[at], lane.microbatch[at] = stage, microbatch
    lane.inputs[at] = inputs_of(slots, stashes).slot.get(key, 0)
    lane.gradients[at] = slots.gradients.slot.get(key, 0)
    lane.stash[at] = slots.stash.slot.get(key, 0)
    lane.held[at] = slots.held.slot.get(key, 0)
    lane.outputs[at] = slots.outputs.slot.get(key, 0)


def lookups_of(slots: SlotPlan, keeps: bool) -> Slots:
    """The buffer in which the first stage finds what was looked up for it."""
    return slots.kept_lookups if keeps else slots.lookups


def _fill_lookups(lane: Lane, placed: Placed, slots: SlotPlan, keeps: bool) -> None:
    # On whatever rank: they are about what enters the first stage.
    key = 0, placed.action.microbatch
    at = placed.device, placed.tick
    lane.lookups[at] = lookups_of(slots, keeps).slot.get(key, 0)
    lane.scatters[at] = slots.scatters.slot.get(key, 0)


def _route(
    placed: Placed,
    lane: Lane,
    schedule: Schedule,
    slots: SlotPlan,
    stashes: bool,
    arrivals: dict[tuple[int, int], list[tuple[int, int, int, int]]],
) -> None:
    """Notes where the result of an action goes: a slot here, or one on another rank."""
    receiver = _receiver(placed.action, schedule.num_stages)
    if receiver is None:
        return
    forward = placed.action.phase is Phase.F
    buffer = inputs_of(slots, stashes) if forward else slots.gradients
    slot = buffer.slot[receiver.stage, receiver.microbatch]
    target = schedule.placement[receiver.stage]
    if target == placed.device:
        lane.hand_over[placed.device, placed.tick] = slot
        return
    # One permutation per lane and distance: ranks that send equally far share it, as in a ring.
    shift = (target - placed.device) % schedule.num_devices
    sent = arrivals.setdefault((placed.position, shift), [])
    sent.append((placed.device, target, placed.tick, slot))


def _receiver(action: Action, num_stages: int) -> Action | None:
    if action.phase in (*TOGETHER, Phase.W):
        return None
    stage = action.stage + 1 if action.phase is Phase.F else action.stage - 1
    return action._replace(stage=stage) if 0 <= stage < num_stages else None


def _channel(lane: int, sent: list[tuple[int, int, int, int]], schedule: Schedule) -> Channel:
    slot = np.full((schedule.num_devices, schedule.num_ticks), NONE, np.int32)
    for _, target, tick, where in sent:
        # The receiver's row: it has to know where to put what it did not ask for.
        slot[target, tick] = where
    pairs = sorted({(source, target) for source, target, _, _ in sent})
    return Channel(lane, tuple(pairs), slot)
