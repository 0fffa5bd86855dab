"""`Plan`: one arrangement with its memory, its time, and what speaks for or against it."""

from __future__ import annotations

import dataclasses
import functools

from ..core.errors import ScheduleError
from ..core.words import byte_size
from ..mesh.chips import Hardware
from ..schedule import PipelineSchedule, build_schedule, peak_live
from .arrangement import Arrangement
from .cost import StepTime, estimate_step_time
from .memory import MemoryEstimate, estimate_memory
from .transfer import Transfer, microbatch_size, transfers
from .workload import Workload

USABLE = 0.9
"""The share of device memory that a plan may fill; the rest is the runtime's and fragmentation."""

ROOMY = 0.5
"""The share that may be held through a step before everything that can be split should be."""

QUIET = 0.3
"""The share of a step that transfers and bubble may take."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a workload could run, and what that would cost a device.

    Args:
        arrangement: the axes and what is split over them.
        memory: bytes on the fullest device, by category.
        time: seconds of a step, by cause.
        transfers: bytes on the wire, by axis.
        device_bytes: what a device has.
    """

    arrangement: Arrangement
    memory: MemoryEstimate
    time: StepTime
    transfers: tuple[Transfer, ...]
    device_bytes: int

    @property
    def name(self) -> str:
        """What is combined."""
        return self.arrangement.name

    @property
    def fits(self) -> bool:
        """Whether all of it fits into the usable memory."""
        return self.memory.total <= USABLE * self.device_bytes

    @property
    def is_roomy(self) -> bool:
        """Whether what is there through the step leaves half of the memory to activations."""
        return self.held_share <= ROOMY

    @property
    def held_share(self) -> float:
        """The share of memory that is held through the step, batch or not.

        That is the training state, and what a pipeline gathers of it, once for all microbatches.
        """
        gathered = self.memory.gathered if self.arrangement.pp > 1 else 0
        return (self.memory.states + gathered) / self.device_bytes

    @property
    def is_quiet(self) -> bool:
        """Whether transfers and bubble are a small share of the step."""
        return self.time.overhead <= QUIET

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(transfer.wire_bytes for transfer in self.transfers)

    @property
    def reasons(self) -> tuple[str, ...]:
        """What decides about it, in sentences."""
        need, have = byte_size(self.memory.total), byte_size(self.device_bytes)
        fits = "fits" if self.fits else "does not fit"
        lost = f"transfers and bubble are {self.time.overhead:.0%} of a step"
        return (
            f"{need} {fits} into {USABLE:.0%} of {have}",
            f"{self.held_share:.0%} of the memory is held through the step"
            + ("" if self.is_roomy else f", more than {ROOMY:.0%}"),
            lost if self.is_quiet else f"{lost}, more than {QUIET:.0%}",
        )


def evaluate(
    arrangement: Arrangement,
    work: Workload,
    hardware: Hardware,
    device_bytes: int | None = None,
) -> Plan:
    """Estimates memory, traffic and time of one arrangement.

    Args:
        arrangement: axis sizes, what data-parallel ranks split, what is recomputed.
        work: the model and its batch.
        hardware: FLOP/s by dtype, bytes/s of memory and links of one chip.
        device_bytes: memory of a device; None takes the hardware's.

    Returns:
        The plan.

    Example:
        >>> from axon_dist.planner import arrange, guess_shape, hardware
        >>> work = Workload(shape=guess_shape(3e9), global_batch=8)
        >>> plan = evaluate(arrange("shard_grad_op", 8), work, hardware("h100"))
        >>> plan.fits, plan.memory.states / 1e9
        (True, 16.5)
    """
    pp, count = arrangement.pp, arrangement.num_microbatches
    activations = work.shape.activations(
        microbatch_size(arrangement, work),
        itemsize=work.policy.compute.itemsize,
        tp=arrangement.tp,
        pp=pp,
        cp=arrangement.cp,
        sequence=arrangement.sequence,
        flash=work.flash,
        remat=arrangement.remat,
        remade=arrangement.remakes,
        in_flight=_in_flight(arrangement.schedule, pp, count),
    )
    memory = estimate_memory(
        work.params_beside(arrangement.ep),
        arrangement,
        optimizer=work.cost,
        precision=work.precision,
        activations=activations,
        layer_params=work.shape.layer_params,
    )
    return Plan(
        arrangement,
        memory,
        estimate_step_time(arrangement, work, hardware),
        transfers(arrangement, work),
        hardware.memory_bytes if device_bytes is None else device_bytes,
    )


def on_best_schedule(
    plan: Plan, work: Workload, hardware: Hardware, device_bytes: int | None = None
) -> Plan:
    """The same plan with the schedule whose step is the shortest of those that fit.

    Args:
        plan: of a pipeline; another is given back.
        work: the model and its batch.
        hardware: the chip.
        device_bytes: memory of a device; None takes the chip's.

    Returns:
        The plan; its own schedule where none is quicker.
    """
    found = [plan]
    pp, count = plan.arrangement.pp, plan.arrangement.num_microbatches
    for name in PipelineSchedule if pp > 1 else ():
        try:
            chunks = build_schedule(name, pp, min(count, 2 * pp)).num_stages // pp
            one = dataclasses.replace(plan.arrangement, schedule=name)
            if work.shape.divides(one.tp, pp * chunks, one.cp):
                found.append(evaluate(one, work, hardware, device_bytes))
        except ScheduleError:  # Sizes that it cannot do.
            continue
    return min(found, key=lambda p: (not p.fits, p.time.total if p.fits else p.memory.total))


@functools.cache
def _in_flight(schedule: str, num_stages: int, num_microbatches: int) -> int:
    """Stage inputs that wait on the fullest rank; past 2 S microbatches they are as many."""
    if num_stages == 1:
        return 0
    grows = schedule in (PipelineSchedule.GPIPE, PipelineSchedule.LOOPED_BFS)
    count = num_microbatches if grows else min(num_microbatches, 2 * num_stages)
    return max(peak_live(build_schedule(schedule, num_stages, count)))
