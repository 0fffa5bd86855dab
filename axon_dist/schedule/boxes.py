"""What both drawings share: the boxes of a schedule on an axis of ticks or of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..core.errors import ScheduleError
from .action import Action, Phase
from .simulate import Timeline
from .table import Schedule

MEANINGS = {
    Phase.E: "embedding",
    Phase.F: "forward",
    Phase.V: "vocabulary",
    Phase.B: "backward",
    Phase.I: "input gradient",
    Phase.W: "weight gradient",
    Phase.G: "gradient of the embedding",
}


class Box(NamedTuple):
    """An action drawn from `start` to `end`; `chunk` counts its device's stages."""

    start: float
    end: float
    action: Action
    chunk: int


def boxes(schedule: Schedule, timeline: Timeline | None) -> tuple[tuple[Box, ...], ...]:
    """Lays out every device's actions.

    Args:
        schedule: one action per rank and tick.
        timeline: its simulation, for an axis of time; None draws ticks of one width, which
            several actions share evenly.

    Returns:
        The boxes of each device, from left to right; none of what takes no time.
    """
    if timeline is not None and not isinstance(timeline, Timeline):
        raise ScheduleError(
            f"got {timeline!r:.60}, a {type(timeline).__name__}, for a timeline; give "
            "simulate(schedule), or None for ticks"
        )
    chunk_of = {
        stage: chunk
        for device in range(schedule.num_devices)
        for chunk, stage in enumerate(schedule.stages_of(device))
    }
    if timeline is not None:
        return tuple(
            tuple(
                Box(*span, action, chunk_of[action.stage])
                for action, span in row
                if span[1] > span[0]
            )
            for row in timeline.spans
        )
    return tuple(
        tuple(
            Box(
                tick + position / len(cell),
                tick + (position + 1) / len(cell),
                action,
                chunk_of[action.stage],
            )
            for tick, cell in enumerate(row)
            for position, action in enumerate(cell)
        )
        for row in schedule.rows
    )


def label(schedule: Schedule, action: Action) -> str:
    """Names an action: phase and microbatch, after the stage where a row has several."""
    return str(action) if schedule.chunks > 1 else f"{action.phase}{action.microbatch}"


def phases(rows: Sequence[Sequence[Box]]) -> list[Phase]:
    """The phases that boxes are of, in the order of `Phase`."""
    used = {box.action.phase for row in rows for box in row}
    return [phase for phase in Phase if phase in used]


def title(schedule: Schedule, timeline: Timeline | None) -> str:
    """One line on what is drawn."""
    sizes = f"{schedule.name}: {schedule.num_stages} stages on {schedule.num_devices} devices"
    sizes += f", {schedule.num_microbatches} microbatches"
    if timeline is None:
        return f"{sizes}, {schedule.num_ticks} ticks"
    bubble = f"bubble {timeline.bubble_fraction:.1%}".replace("%", " %")
    reading = "in step: makespan" if timeline.lockstep else "makespan"
    return f"{sizes}, {reading} {timeline.makespan:g}, {bubble}"
