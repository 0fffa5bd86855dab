"""All schedules by name, and comparisons of their cost."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import NamedTuple, Self

from ..core.arguments import FLOAT
from ..core.errors import NamedChoice, ScheduleError, did_you_mean
from ..core.renamed import renamed_arguments
from .action import Phase, check_positive, check_sizes
from .builders import (
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
)
from .memory import assign_slots
from .simulate import Costs, simulate, transfers
from .table import Schedule
from .v_shaped import dual_pipe_v, v_half, v_min, zero_bubble_v


class Builder(NamedTuple):
    """How a schedule is built.

    Args:
        build: `build(num_devices, num_microbatches)`, which returns a table.
        chunks: the default number of stages per device.
        any_chunks: whether the caller may choose another number, as the third argument of `build`.
    """

    build: Callable[..., Schedule]
    chunks: int = 1
    any_chunks: bool = False


class PipelineSchedule(NamedChoice):
    """The schedules that have a name, each with its builder.

    To add one, write a function that returns a table, and add a member here. `EAGER_1F1B` is the
    default, because the step runs a table tick by tick, and a tick lasts as long as its slowest
    rank. In a tick of `ONE_F_ONE_B` ranks with a forward wait for those with a backward. In a
    tick of `EAGER_1F1B` every rank has a forward and a backward.
    """

    builder: Builder

    def __new__(cls, name: str, builder: Builder) -> Self:
        """Makes a member: a string equal to its name, with the attribute `builder`."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.builder = builder
        return member

    GPIPE = "gpipe", Builder(gpipe)
    """Every stage does all its forwards, then all its backwards."""
    ONE_F_ONE_B = "1f1b", Builder(one_f_one_b)
    """Stages alternate one forward and one backward after a warm-up."""
    EAGER_1F1B = "eager_1f1b", Builder(eager_1f1b)
    """1F1B for devices in lockstep: a forward and a backward share a tick."""
    INTERLEAVED_1F1B = "interleaved_1f1b", Builder(interleaved_1f1b, chunks=2, any_chunks=True)
    """1F1B with several stages per device: every `P`-th stage, on `P` devices."""
    LOOPED_BFS = "looped_bfs", Builder(looped_bfs, chunks=2, any_chunks=True)
    """All microbatches go through chunk 0, then chunk 1, ..., and back in reverse."""
    ZERO_BUBBLE_H1 = "zero_bubble_h1", Builder(zero_bubble_h1)
    """ZB-H1: 1F1B whose weight gradients fill the bubble, in 1F1B's memory."""
    ZERO_BUBBLE_H2 = "zero_bubble_h2", Builder(zero_bubble_h2)
    """ZB-H2: forwards fill the warm-up too, for twice the memory."""
    ZERO_BUBBLE_V = "zero_bubble_v", Builder(zero_bubble_v, chunks=2)
    """ZB-V: two stages per device, in a V; 1F1B's memory suffices."""
    INTERLEAVED_ZERO_BUBBLE = (
        "interleaved_zero_bubble",
        Builder(interleaved_zero_bubble, chunks=2, any_chunks=True),
    )
    """Interleaved 1F1B whose weight gradients fill the bubble."""
    DUAL_PIPE_V = "dual_pipe_v", Builder(dual_pipe_v, chunks=2)
    """DualPipeV: two stages per device, in a V; one half of DualPipe."""
    V_HALF = "v_half", Builder(v_half, chunks=2)
    """V-Half: two stages per device, in a V, with about half of 1F1B's memory."""
    V_MIN = "v_min", Builder(v_min, chunks=2)
    """V-Min: two stages per device, in a V, with about a third of 1F1B's memory."""


SCHEDULES: dict[PipelineSchedule, Builder] = {row: row.builder for row in PipelineSchedule}
"""The builder of every schedule."""


@renamed_arguments(num_stages="num_devices")
def build_schedule(
    name: str, num_devices: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """Builds a schedule by its name.

    Args:
        name: one of `PipelineSchedule`, or its text such as `"1f1b"`.
        num_devices: the ranks of the axis `pp`; each has `chunks` stages.
        num_microbatches: microbatches per step.
        chunks: stages per device. None takes the default of the schedule: 2 if it needs several
            stages per device, else 1.

    Returns:
        The table, of `num_devices * chunks` stages.

    Raises:
        ScheduleError: an unknown name, sizes that the schedule cannot have, or another number of
            chunks than the schedule's fixed one.

    Example:
        >>> build_schedule("1f1b", num_devices=4, num_microbatches=8).num_ticks
        22
    """
    member = PipelineSchedule.named(name)
    if member is None:
        raise ScheduleError(f"got the schedule {name!r:.80}.{did_you_mean(str(name), SCHEDULES)}")
    builder = member.builder
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches)
    num_devices, num_microbatches = operator.index(num_devices), operator.index(num_microbatches)
    if builder.any_chunks:
        chunks = builder.chunks if chunks is None else chunks
        check_sizes(num_devices=num_devices, num_microbatches=num_microbatches, chunks=chunks)
        return builder.build(num_devices, num_microbatches, operator.index(chunks))
    if chunks not in (None, builder.chunks):
        free = " or ".join(kind for kind, other in SCHEDULES.items() if other.any_chunks)
        raise ScheduleError(
            f"{name} got chunks={chunks}, but always has {builder.chunks} per device. Leave chunks "
            f"out, or use {free}."
        )
    return builder.build(num_devices, num_microbatches)


@dataclass(frozen=True)
class ScheduleSummary:
    """One row of a comparison. Memory is for the worst device.

    Args:
        name: the name of the schedule.
        chunks: stages per device.
        num_ticks: length of the table.
        makespan: time of the step if devices run ahead freely.
        bubble: idle share of that time.
        span_bubble: idle share of the longest device's own span (the zero-bubble papers' number).
        lockstep_makespan: time of the step with devices in lockstep, tick by tick.
        lockstep_bubble: idle share of that time.
        lockstep_slowdown: `lockstep_makespan` divided by the time that the busiest device computes;
            at least 1.
        peak_live: the most microbatches in flight on a device (`F` to `B` or `I`): the sum over its
            stages, divided by their number, as in the papers.
        num_inputs: slots for stage inputs, including waiting ones; each is one chunk's input.
        num_held: slots for values from `I` to `W`; 0 with whole backwards.
        num_transfers: values sent between devices in a step.
    """

    name: str
    chunks: int
    num_ticks: int
    makespan: float
    bubble: float
    span_bubble: float
    lockstep_makespan: float
    lockstep_bubble: float
    lockstep_slowdown: float
    peak_live: float
    num_inputs: int
    num_held: int
    num_transfers: int


@dataclass(frozen=True)
class Unavailable:
    """The row of a schedule that cannot be built for these sizes, and the reason."""

    name: str
    reason: str


def summarize(schedule: Schedule, costs: Costs | None = None) -> ScheduleSummary:
    """Measures one schedule.

    Args:
        schedule: a valid table.
        costs: times per microbatch and device.

    Returns:
        Its row.

    Example:
        >>> from axon_dist.schedule import one_f_one_b
        >>> summarize(one_f_one_b(4, 8)).peak_live
        4.0
    """
    freely = simulate(schedule, costs)
    in_step = simulate(schedule, costs, lockstep=True)
    slots = assign_slots(schedule)
    return ScheduleSummary(
        name=schedule.name,
        chunks=schedule.chunks,
        num_ticks=schedule.num_ticks,
        makespan=freely.makespan,
        bubble=freely.bubble_fraction,
        span_bubble=freely.span_bubble,
        lockstep_makespan=in_step.makespan,
        lockstep_bubble=in_step.bubble_fraction,
        lockstep_slowdown=in_step.makespan / max(in_step.work),
        peak_live=max(freely.peak_live) / schedule.chunks,
        num_inputs=slots.inputs.num_slots,
        num_held=slots.held.num_slots,
        num_transfers=len(transfers(schedule)),
    )


@renamed_arguments(num_stages="num_devices")
def compare(
    num_devices: int, num_microbatches: int, chunks: int = 2, costs: Costs | None = None
) -> tuple[ScheduleSummary | Unavailable, ...]:
    """Measures every schedule for one pipeline.

    Args:
        num_devices: the ranks of the axis `pp`.
        num_microbatches: microbatches per step.
        chunks: stages per device, for schedules that allow any number.
        costs: times per microbatch and device; by default a backward takes twice a forward.

    Returns:
        One row per schedule, in the order of `SCHEDULES`; `Unavailable` for schedules that cannot
        have these sizes.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> best = min(compare(4, 8), key=lambda row: row.makespan)
        >>> best.name, best.makespan
        ('zero_bubble_v', 25.5)
    """
    check_sizes(num_devices=num_devices, num_microbatches=num_microbatches, chunks=chunks)
    return tuple(_row(name, num_devices, num_microbatches, chunks, costs) for name in SCHEDULES)


def split_advice(schedule: Schedule, costs: Costs | None = None) -> tuple[str, ...]:
    """Says if splitting the backward does not pay for devices in lockstep.

    Args:
        schedule: a valid table.
        costs: times per microbatch and device, as measured or estimated.

    Returns:
        A sentence if a schedule with whole backwards and as many stages per device is faster;
        otherwise nothing.

    Example:
        >>> from axon_dist.schedule import zero_bubble_h1
        >>> split_advice(zero_bubble_h1(4, 64), Costs(f=1, i=1.3, w=1, b=2))
        ('zero_bubble_h1 takes 252 in lockstep and eager_1f1b 201: splitting the backward does not
        pay here, I + W take 1.15 of a whole B.',)
    """
    if not schedule.splits_backward:
        return ()
    costs = Costs() if costs is None else costs
    flat = schedule.chunks == 1
    whole = PipelineSchedule.EAGER_1F1B if flat else PipelineSchedule.INTERLEAVED_1F1B
    other = _row(whole, schedule.num_devices, schedule.num_microbatches, schedule.chunks, costs)
    makespan = simulate(schedule, costs, lockstep=True).makespan
    if isinstance(other, Unavailable) or other.lockstep_makespan >= makespan:
        return ()
    halves = costs.i + costs.w
    full = costs.of(Phase.B)
    why = (
        f"I + W take {halves / full:.2f} of a whole B"
        if halves > full
        else f"a tick takes as long as its slowest rank, with F {costs.f:g}, I {costs.i:g}, "
        f"W {costs.w:g}"
    )
    return (
        f"{schedule.name} takes {makespan:g} in lockstep and {other.name} "
        f"{other.lockstep_makespan:g}: splitting the backward does not pay here, {why}.",
    )


def _row(
    name: PipelineSchedule,
    num_devices: int,
    num_microbatches: int,
    chunks: int,
    costs: Costs | None,
) -> ScheduleSummary | Unavailable:
    num_chunks = chunks if SCHEDULES[name].any_chunks else None
    try:
        schedule = build_schedule(name, num_devices, num_microbatches, num_chunks)
    except ScheduleError as error:
        return Unavailable(str(name), str(error))
    return summarize(schedule, costs)


def efficiency(num_microbatches: int, num_stages: int) -> float:
    """Returns the share of the time in which devices work under 1F1B or GPipe, `M / (M+S-1)`.

    Microbatches come first; other functions of schedules take the stages first. So name the
    arguments.

    Args:
        num_microbatches: microbatches `M`.
        num_stages: stages `S`.

    Returns:
        A fraction in (0, 1]; one minus the bubble.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> round(efficiency(num_microbatches=8, num_stages=4), 4)
        0.7273
    """
    check_positive(num_microbatches=num_microbatches, num_stages=num_stages)
    # Converted to Python's integers, because sums of numpy's could overflow.
    microbatches, stages = operator.index(num_microbatches), operator.index(num_stages)
    return microbatches / (microbatches + stages - 1)


def min_microbatches(num_stages: int, target: float) -> int:
    """Returns the fewest microbatches with which 1F1B or GPipe reaches an efficiency.

    Args:
        num_stages: stages `S`.
        target: the wanted efficiency, in (0, 1).

    Returns:
        The least `M` with `M / (M+S-1) >= target`.

    Raises:
        ScheduleError: a number of stages below 1, or a target outside (0, 1).

    Example:
        >>> min_microbatches(4, 0.9)
        27
    """
    check_positive(num_stages=num_stages)
    if not FLOAT.holds(target) or not 0 < target < 1:
        raise ScheduleError(
            f"got an efficiency target of {target!r:.80}. It must lie between 0 and 1, both "
            "excluded: a pipeline of several stages always has a bubble; try 0.9."
        )
    exact = Fraction(str(target))  # via `str`, so that 0.9 is nine tenths, unlike the float
    return max(1, ceil(exact * (num_stages - 1) / (1 - exact)))


def pipeline_advice(num_microbatches: int, num_stages: int) -> tuple[str, ...]:
    """Reports how busy the stages are, if more microbatches would keep them busier.

    Args:
        num_microbatches: microbatches `M`.
        num_stages: stages `S`.

    Returns:
        Sentences; none if `M >= 4S`, because at least 80% of the time is then work.

    Raises:
        ScheduleError: a number below 1.

    Example:
        >>> pipeline_advice(8, 4)
        ('8 microbatches keep 4 stages busy 73% of the time; 16 would give 84%.',)
    """
    now = efficiency(num_microbatches, num_stages)
    enough = 4 * num_stages
    if num_stages == 1 or num_microbatches >= enough:
        return ()
    then = efficiency(enough, num_stages)
    advice = [
        f"{num_microbatches} microbatches keep {num_stages} stages busy {now:.0%} of the time; "
        f"{enough} would give {then:.0%}."
    ]
    if num_microbatches < num_stages:
        advice.append(
            f"With fewer microbatches than stages, at least "
            f"{num_stages - num_microbatches} devices are idle in every tick."
        )
    return tuple(advice)
