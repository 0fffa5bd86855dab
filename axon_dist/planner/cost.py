"""The time of a step before there is one: compute, bubble, and what of the traffic shows."""

from __future__ import annotations

import dataclasses
import functools

from ..mesh.chips import Hardware
from ..schedule import Costs, PipelineSchedule, build_schedule, simulate
from .arrangement import Arrangement
from .transfer import Transfer, transfers
from .workload import Workload

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
class StepTime:
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


def estimate_step_time(
    arrangement: Arrangement,
    work: Workload,
    hardware: Hardware,
    efficiency: float = EFFICIENCY,
) -> StepTime:
    """Adds up a step: `FLOPs / (peak * efficiency)`, bubble, update and exposed transfers.

    A transfer takes `latency * hops + bytes / bandwidth`; those that may hide do so behind all of
    the compute, which is the best case. The bubble is simulated from the schedule's table, in step
    tick by tick, with stages recomputed as the executor does.

    Args:
        arrangement: axis sizes, what data-parallel ranks split, what is recomputed.
        work: the model and its batch.
        hardware: FLOP/s by dtype, bytes/s of memory and links of one chip.
        efficiency: the share of peak FLOP/s that compute alone reaches.

    Returns:
        The parts. Good for ranking arrangements; the compiled step, not this, says how long a step
        takes.

    Example:
        >>> from axon_dist.planner import arrange, guess_shape, hardware
        >>> work = Workload(shape=guess_shape(1e9), global_batch=64, precision="bf16")
        >>> time = estimate_step_time(arrange("ddp", 8), work, hardware("h100"))
        >>> time.exposed, round(time.overhead, 3)
        (0.0, 0.036)

    Source: Hockney's alpha-beta model; Narayanan et al., arXiv:2104.04473, section 3.
    """
    recomputed = int(arrangement.remat) + int(arrangement.pp > 1)
    rate = hardware.rate(work.policy.compute) * efficiency
    flops = work.flops(recomputed) / arrangement.num_devices
    compute = flops / rate
    moved = transfers(arrangement, work)
    stages, count = arrangement.pp, arrangement.num_microbatches
    return StepTime(
        compute=compute,
        bubble=compute * idle_share(arrangement.schedule, stages, count, recomputed),
        update=_update_seconds(arrangement, work, hardware),
        communication=sum(transfer.seconds(hardware) for transfer in moved),
        exposed=_exposed(moved, hardware, compute),
    )


def _exposed(moved: tuple[Transfer, ...], hardware: Hardware, compute: float) -> float:
    hiding = sum(transfer.seconds(hardware) for transfer in moved if transfer.hides)
    shown = sum(transfer.seconds(hardware) for transfer in moved if not transfer.hides)
    return shown + max(0.0, hiding - compute)


def _update_seconds(plan: Arrangement, work: Workload, hardware: Hardware) -> float:
    """Every value of the state that a device updates is read and written once."""
    per_param = 2 * 4 * work.policy.param.itemsize
    updated = work.params_beside(plan.ep) / (plan.model_ranks * plan.shards_for(work.policy)[2])
    return per_param * updated / hardware.memory_bandwidth


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
    idle = lambda count: (
        simulate(build_schedule(schedule, num_stages, count), costs, lockstep=True).makespan
        - count * work
    )
    short = num_stages
    if schedule not in STEADY or num_microbatches <= 2 * short:
        return idle(num_microbatches) / (num_microbatches * work)
    slope = (idle(2 * short) - idle(short)) / short
    return (idle(short) + slope * (num_microbatches - short)) / (num_microbatches * work)
