"""All schedules by name: a new one is a new file and a new row here."""

from __future__ import annotations

import operator
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from ..core.errors import ScheduleError, did_you_mean
from .action import check_sizes
from .one_f_one_b import (
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)
from .table import Schedule
from .v_shaped import dual_pipe_v, v_half, v_min


class PipelineSchedule(StrEnum):
    """The schedules that have a name.

    `EAGER_1F1B` is the default: the step runs a table tick by tick, and a tick of `ONE_F_ONE_B` has
    forwards on some ranks and backwards on others, which wait for each other.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    EAGER_1F1B = "eager_1f1b"
    INTERLEAVED_1F1B = "interleaved_1f1b"
    LOOPED_BFS = "looped_bfs"
    ZERO_BUBBLE_H1 = "zero_bubble_h1"
    ZERO_BUBBLE_H2 = "zero_bubble_h2"
    ZERO_BUBBLE_V = "zero_bubble_v"
    INTERLEAVED_ZERO_BUBBLE = "interleaved_zero_bubble"
    DUAL_PIPE_V = "dual_pipe_v"
    V_HALF = "v_half"
    V_MIN = "v_min"


class Builder(NamedTuple):
    """A row of `SCHEDULES`: the function, its usual chunks, and whether these can be chosen."""

    build: Callable[..., Schedule]
    chunks: int = 1
    any_chunks: bool = False


SCHEDULES: dict[PipelineSchedule, Builder] = {
    PipelineSchedule.GPIPE: Builder(gpipe),
    PipelineSchedule.ONE_F_ONE_B: Builder(one_f_one_b),
    PipelineSchedule.EAGER_1F1B: Builder(eager_1f1b),
    PipelineSchedule.INTERLEAVED_1F1B: Builder(interleaved_1f1b, chunks=2, any_chunks=True),
    PipelineSchedule.LOOPED_BFS: Builder(looped_bfs, chunks=2, any_chunks=True),
    PipelineSchedule.ZERO_BUBBLE_H1: Builder(zero_bubble_h1),
    PipelineSchedule.ZERO_BUBBLE_H2: Builder(zero_bubble_h2),
    PipelineSchedule.ZERO_BUBBLE_V: Builder(zero_bubble_v, chunks=2),
    PipelineSchedule.INTERLEAVED_ZERO_BUBBLE: Builder(
        interleaved_zero_bubble, chunks=2, any_chunks=True
    ),
    PipelineSchedule.DUAL_PIPE_V: Builder(dual_pipe_v, chunks=2),
    PipelineSchedule.V_HALF: Builder(v_half, chunks=2),
    PipelineSchedule.V_MIN: Builder(v_min, chunks=2),
}


def build_schedule(
    name: str, num_stages: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """Builds a schedule by its name.

    Args:
        name: one of `PipelineSchedule`, or its text such as `"1f1b"`.
        num_stages: length of the pipeline: the number of devices, each with `chunks` stages.
        num_microbatches: microbatches per step.
        chunks: stages per device. None takes what is usual for the schedule: 2 where it needs
            several, else 1.

    Returns:
        The table, of `num_stages * chunks` stages.

    Raises:
        ScheduleError: an unknown name, sizes the schedule cannot do, or a number of chunks where
            it has a fixed one.

    Example:
        >>> build_schedule("1f1b", num_stages=4, num_microbatches=8).num_ticks
        22
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ScheduleError(f"got the schedule {name!r:.80}.{did_you_mean(str(name), SCHEDULES)}")
    builder = SCHEDULES[PipelineSchedule(name)]
    check_sizes(num_stages=num_stages, num_microbatches=num_microbatches)
    num_stages, num_microbatches = operator.index(num_stages), operator.index(num_microbatches)
    if builder.any_chunks:
        chunks = builder.chunks if chunks is None else chunks
        check_sizes(num_stages=num_stages, num_microbatches=num_microbatches, chunks=chunks)
        return builder.build(num_stages, num_microbatches, operator.index(chunks))
    if chunks not in (None, builder.chunks):
        free = " or ".join(kind for kind, other in SCHEDULES.items() if other.any_chunks)
        raise ScheduleError(
            f"{name} got chunks={chunks}, but always has {builder.chunks} per device. Leave chunks "
            f"out, or use {free}."
        )
    return builder.build(num_stages, num_microbatches)
