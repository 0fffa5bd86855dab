"""The parts of the time of a step, and what a pipeline idles."""

from __future__ import annotations

import dataclasses
import functools

from ..schedule import Costs, PipelineSchedule, build_schedule, simulate

EFFICIENCY = 0.5
"""The share of peak FLOP/s that compute reaches alone: what is published for whole steps of large
runs is 38 to 57 % (Llama 3, arXiv:2407.21783; PaLM, arXiv:2204.02311)."""


STEADY = frozenset(
    {
        PipelineSchedule.GPIPE,
        PipelineSchedule.ONE_F_ONE_B,
        PipelineSchedule.EAGER_1F1B,
        PipelineSchedule.INTERLEAVED_1F1B,
        PipelineSchedule.LOOPED_BFS,
        PipelineSchedule.ZERO_BUBBLE_H1,
    }
)
"""Schedules that are in their rhythm after as many microbatches as stages."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Where the time of a step goes, seconds.

    Args:
        compute: products, recomputation included.
        bubble: what the pipeline waits.
        update: reading and writing the training state.
        communication: all transfers, as if nothing else ran.
        exposed: what of them does not hide behind compute.
    """

    compute: float
    bubble: float
    update: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        """The step."""
        return self.compute + self.bubble + self.update + self.exposed

    @property
    def overhead(self) -> float:
        """The share of transfers and bubble, hidden or not, in all that a device has to do."""
        lost = self.bubble + self.communication
        return lost / (self.compute + lost)


@functools.cache
def idle_share(schedule: str, num_stages: int, num_microbatches: int, recomputed: int = 1) -> float:
    """What the pipeline waits, as a share of what a rank computes.

    Past `S` microbatches of a `STEADY` schedule each one more adds the same to the table, so that
    the bubble of a long step is read off two shorter ones.

    Args:
        schedule: a name of `PipelineSchedule`.
        num_stages: S.
        num_microbatches: M.
        recomputed: forward passes that a backward pass repeats.

    Raises:
        ScheduleError: for sizes that the schedule cannot do.

    Example:
        >>> idle_share("gpipe", 4, 8) == 3 / 8
        True
    """
    if num_stages == 1:
        return 0.0
    costs = Costs(f=1, i=1 + recomputed, w=1)
    work = 3 + recomputed

    def idle(count):
        return (
            simulate(build_schedule(schedule, num_stages, count), costs, lockstep=True).makespan
            - count * work
        )

    short = num_stages
    if schedule not in STEADY or num_microbatches <= 2 * short:
        return idle(num_microbatches) / (num_microbatches * work)
    slope = (idle(2 * short) - idle(short)) / short
    return (idle(short) + slope * (num_microbatches - short)) / (num_microbatches * work)
