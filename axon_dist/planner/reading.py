"""Estimates memory and time of a step on one device from its trace, before compilation.

`recompute_least` finds the least recomputation with which a step fits into memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from ..core.arguments import SIZE
from ..core.errors import ConfigError
from ..core.files import host_memory
from ..core.renamed import renamed_arguments
from ..core.typing import Batch
from ..core.words import byte_size
from ..inspect.steps import Step, trace_step
from ..mesh import World
from ..mesh.chips import Hardware, machine_of
from ..mesh.rates import AttentionShape, ProductShape, rates_of
from ..nn import ActivationCheckpointing
from ..schedule import Costs, PipelineSchedule, build_schedule, simulate
from ..schedule.action import check_positive
from .device import liveness_program
from .kernel_work import KernelWork, kernel_work
from .liveness import peak_of
from .placement import ProductDims, Sent, Splits, of_spec


@dataclasses.dataclass(frozen=True)
class StepCost:
    """The parts of a step's time, in seconds.

    Args:
        compute: products, attention and memory-bound kernels with the gaps between them, including
            recomputation, and what they lose to transfers that run at the same time.
        bubble: the idle time of pipeline ranks.
        update: reading and writing the training state.
        communication: all transfers, as if nothing else ran.
        exposed: the transfers that compute does not hide.
    """

    compute: float
    bubble: float
    update: float
    communication: float
    exposed: float

    def utilization(self, flops: float, hardware: Hardware) -> float:
        """Returns the MFU: a device's useful FLOPs relative to the chip's bfloat16 peak."""
        return flops / (hardware.flops * self.total)

    @property
    def total(self) -> float:
        """The time of the whole step."""
        return self.compute + self.bubble + self.update + self.exposed

    @property
    def overhead(self) -> float:
        """The share of transfers (hidden or not) and bubble in a device's total work."""
        lost = self.bubble + self.communication
        return lost / (self.compute + lost)


@renamed_arguments(num_stages="num_devices")
def idle_share(
    schedule: str, num_devices: int, num_microbatches: int, recomputed: int = 1
) -> float:
    """Returns the idle time of a pipeline rank relative to its compute time.

    Args:
        schedule: a name of `PipelineSchedule`.
        num_devices: the ranks of the axis `pp`.
        num_microbatches: M.
        recomputed: forward passes that a backward pass repeats.

    Raises:
        ScheduleError: for sizes that the schedule does not support.
        ConfigError: for an unknown schedule, or `recomputed` passes that are negative or no whole
            number.

    Example:
        >>> idle_share("gpipe", 4, 8) == 3 / 8
        True
    """
    check_positive(num_devices=num_devices, num_microbatches=num_microbatches)
    SIZE.check("idle_share", "recomputed", recomputed)
    sizes = map(operator.index, (num_devices, num_microbatches, recomputed))
    return _idle_share(PipelineSchedule(schedule), *sizes)


@functools.cache
def _idle_share(
    schedule: PipelineSchedule, num_devices: int, num_microbatches: int, recomputed: int
) -> float:
    if num_devices == 1:
        return 0.0
    work = num_microbatches * (3 + recomputed)
    table = build_schedule(schedule, num_devices, num_microbatches)
    costs = Costs(f=1, i=1 + recomputed, w=1)
    return (simulate(table, costs, lockstep=True).makespan - work) / work


ROUNDS: Mapping[str, float] = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
}
"""How often a ring sends the share `(N-1)/N` of an array, by the kind of the collective."""

COMBINED = 30e6
"""The bytes up to which compilers combine collectives, where compute hides them."""

WAITED = frozenset({"tp", "pp"})
"""The axes whose collectives the next product waits for; compute hides the others."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """One device's memory, compute and communication in a step, read from the step's program.

    Args:
        state: bytes of the train state between steps.
        batch: bytes of the device's samples.
        temporaries: bytes at the peak, in addition to these.
        flops: FLOPs of its products; a conditional counts its costliest branch.
        sends: collectives of all branches, and how often each runs.
        mesh: the axes and their sizes, outer to inner.
        work: the work of its kernels.
    """

    state: int
    batch: int
    temporaries: int
    flops: float
    sends: tuple[tuple[Sent, int], ...]
    mesh: Mapping[str, int]
    work: KernelWork = dataclasses.field(default_factory=KernelWork)

    @property
    def peak(self) -> int:
        """The most bytes that a device holds at once."""
        return self.state + self.batch + self.temporaries

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(self.by_axes.values())

    @property
    def by_axes(self) -> dict[str, float]:
        """Bytes that a device sends in a step, by the axes over which they are sent."""
        by_axes: dict[str, float] = defaultdict(float)
        for sent, times in self.sends:
            by_axes[",".join(sent.axes)] += self._wire(sent) * times
        return {axes: size for axes, size in by_axes.items() if size}

    def _wire(self, sent: Sent) -> float:
        if sent.kind == "collective-permute":
            return sent.num_bytes
        return ROUNDS[sent.kind] * (1 - 1 / self._ranks(sent)) * sent.num_bytes

    def _combined(self) -> dict[tuple[str, tuple[str, ...], int], list[int]]:
        """Groups sizes of collectives of the same kind, over the same axes, run equally often."""
        sizes: dict[tuple[str, tuple[str, ...], int], list[int]] = {}
        for sent, times in self.sends:
            sizes.setdefault((sent.kind, sent.axes, times), []).append(sent.num_bytes)
        return sizes

    def _ranks(self, sent: Sent) -> int:
        return math.prod(self.mesh[axis] for axis in sent.axes)

    def _stride(self, sent: Sent) -> int:
        """Returns the distance, in devices, of two consecutive ranks of the innermost axis."""
        names = list(self.mesh)
        innermost = max(names.index(axis) for axis in sent.axes)
        return math.prod(self.mesh[name] for name in names[innermost + 1 :])

    def step_time(
        self,
        hardware: Hardware,
        compute: DTypeLike,
        *,
        flops: float | None = None,
        idle: float = 0.0,
    ) -> StepCost:
        """Estimates a step's time: kernels at the rates of `mesh.rates`, transfers, and the update.

        Args:
            hardware: FLOP/s by dtype, bytes/s of memory and links of one chip.
            compute: the dtype of products whose sizes are not known.
            flops: FLOPs to use instead of those read, for a pipeline whose ranks idle in turn.
            idle: the idle share of a pipeline, from `idle_share`.

        Returns:
            The parts. Collectives over `tp` and `pp` are exposed. Compute is assumed to hide the
            others, which is the best case, and to lose the processors on which they run.
        """
        rates = rates_of(hardware)
        update = rates.memory_seconds(2 * self.state)
        busy = self._busy(hardware, compute, flops)
        communication, exposed, hidden = self._transfers(hardware)
        return StepCost(
            compute=busy + rates.slowdown(min(hidden, busy)),
            bubble=busy * idle,
            update=update,
            communication=communication,
            exposed=exposed + max(0.0, hidden - busy),
        )

    def _busy(self, hardware: Hardware, compute: DTypeLike, flops: float | None) -> float:
        """Returns the seconds of all kernels except those that update the state."""
        rates = rates_of(hardware)
        work = self.work
        # A dtype whose rate is not known is taken to be as fast as float32; it is slower.
        rate = hardware.flops * hardware.rate_share(jnp.dtype(compute).itemsize)
        seconds = work.unsized / (rates.products * rate / hardware.flops)
        for dims, count in work.products.items():
            seconds += count * _product_seconds(dims, hardware)
        if flops is not None and self.flops:
            seconds *= flops / self.flops
        # The program includes the update, which is accounted for separately.
        moved = max(0.0, work.moved - 2 * self.state)
        return seconds + rates.memory_seconds(moved) + work.kernels * rates.gap

    def _transfers(self, hardware: Hardware) -> tuple[float, float, float]:
        """Returns the seconds of all transfers, of the exposed ones, and of the others."""
        hidden = 0.0
        exposed = 0.0
        for (kind, axes, times), sizes in self._combined().items():
            one = Sent(kind, axes, sum(sizes))
            ranks = self._ranks(one)
            stride = self._stride(one)
            if ranks == 1:
                continue
            is_exposed = not WAITED.isdisjoint(axes)
            calls = len(sizes) if is_exposed else math.ceil(one.num_bytes / COMBINED)
            calls *= max(1, round(ROUNDS.get(kind, 1.0)))
            latency = calls * hardware.ring_latency(ranks, stride)
            took = times * (latency + self._wire(one) / hardware.bandwidth(ranks, stride))
            if is_exposed:
                exposed += took
            else:
                hidden += took
        return hidden + exposed, exposed, hidden


def _product_seconds(dims: ProductDims, hardware: Hardware) -> float:
    """Returns the seconds of one product, or of one pass of attention."""
    rates = rates_of(hardware)
    if dims.kind != "product":
        is_backward = dims.kind == "backward"
        return rates.attention_seconds(
            AttentionShape(dims.flops, dims.rows, dims.columns, is_backward, dims.is_causal)
        )
    shape = ProductShape(dims.rows, dims.columns, dims.summed, dims.batch, dims.written, dims.read)
    return rates.product_seconds(shape, hardware.rate_share(dims.read))


def read_program(
    program: ClosedJaxpr,
    arguments: Sequence[Any],
    num_state: int,
    mesh: Mapping[str, int],
    platform: str,
) -> Reading:
    """Reads a traced train step.

    Args:
        program: the closed jaxpr of a step, over global arrays.
        arguments: its arguments in order, shapes with shardings.
        num_state: how many of the first arguments are the train state. The new state is returned
            first and overwrites it.
        mesh: the sizes of the axes.
        platform: `cpu`, `gpu` or `tpu`; its platform-dependent branches are read.

    Returns:
        The reading.
    """
    liveness = liveness_program(program, [*map(_splits, arguments)], mesh, platform, num_state)
    sizes = [liveness.sizes[buffer] for buffer in liveness.inputs]
    return Reading(
        state=sum(sizes[:num_state]),
        batch=sum(sizes[num_state:]),
        temporaries=peak_of(liveness, range(num_state)),
        flops=liveness.flops,
        sends=tuple(liveness.sends()),
        mesh=dict(mesh),
        work=kernel_work(liveness),
    )


class Traceable(Step, Protocol):
    """A step that can be traced for shapes."""

    abstract_state: Any

    @property
    def world(self) -> World:
        """The devices, which may be placeholders."""
        ...


def read_step(step: Traceable, batch: Batch) -> Reading:
    """Reads the program of a step for the devices it was built for, which need not exist here.

    Args:
        step: a step that was built, not compiled.
        batch: shapes of a global batch.
    """
    program, arguments = trace_step(step, batch)
    mesh = step.world.mesh
    num_state = len(jax.tree.leaves(step.abstract_state))
    sizes = {str(name): size for name, size in mesh.shape.items()}
    return read_program(program, arguments, num_state, sizes, mesh.devices.flat[0].platform)


def _splits(leaf: jax.ShapeDtypeStruct) -> Splits:
    return of_spec(getattr(leaf.sharding, "spec", ()), len(leaf.shape))


Remat: TypeAlias = ActivationCheckpointing | Literal["auto"] | None
"""The recomputation setting of a config; `AUTO` is the least with which a step fits."""

LADDER: Mapping[str, ActivationCheckpointing | None] = MappingProxyType(
    {
        "nothing": None,
        "all but matrix products": ActivationCheckpointing(policy="dots_no_batch"),
        "every block": ActivationCheckpointing(),
    }
)
"""Recomputation settings by their name in messages; each row keeps less than the one before."""

USABLE = 0.9
"""The share of device memory that a step may fill; the rest is for runtime and fragmentation."""

SURE = 0.75
"""The share of the usable memory up to which a traced step certainly fits: compiled steps have
needed 0.63 to 1.18 times the traced estimate."""

AnyStep = TypeVar("AnyStep")


def recompute_least(
    build: Callable[[ActivationCheckpointing | None], AnyStep],
    read: Callable[[AnyStep], Reading],
    peak: Callable[[AnyStep], int],
    usable: float,
) -> AnyStep:
    """Returns the step of the first row of `LADDER` that fits; no row changes results.

    Args:
        build: makes the step with a row's setting.
        read: traces it.
        peak: returns a device's bytes by the compiled step. It is called only where the traced step
            fits but fills more than `SURE` of the usable memory.
        usable: bytes of a device that it may fill.

    Returns:
        The step.

    Raises:
        ConfigError: when no row fits.
    """
    peaks: dict[str, str] = {}
    for name, remat in LADDER.items():
        step = build(remat)
        traced = read(step).peak
        is_close = SURE * usable < traced <= usable
        needs = peak(step) if is_close else traced
        if needs <= usable:
            return step
        peaks[name] = byte_size(needs)
    needs = ", ".join(f"{size} where it recomputes {name}" for name, size in peaks.items())
    raise ConfigError(
        f"remat: auto found nothing that fits the {byte_size(int(usable))} of usable device "
        f"memory: a step needs {needs}. Use more microbatches (train.accumulate), or split the "
        "model over more devices, as axon plan suggests",
        code="remat-does-not-fit",
    )


def recomputing_line(
    remat: ActivationCheckpointing | None, reading: Reading, full: Reading, usable: float
) -> str:
    """Describes the chosen setting and its savings in a sentence.

    Args:
        remat: the step's setting, a value of `LADDER`.
        reading: the reading of the step.
        full: the reading of a step that recomputes every block.
        usable: bytes of a device that a step may fill.
    """
    name = next(name for name, row in LADDER.items() if row == remat)
    saved = 1 - reading.flops / full.flops if full.flops else 0.0
    return (
        f"remat: auto recomputes {name}: {byte_size(reading.peak)} of {byte_size(int(usable))} "
        f"usable memory, {saved:.1%} fewer FLOPs than recomputing every block"
    )


def knows_memory(world: World) -> bool:
    """Whether the devices' memory size is known, from their chip or from their runtime."""
    if machine_of(world.mesh) is not None:
        return True
    local = [d for d in world.mesh.devices.flat if d.process_index == world.process_index]
    return bool(local) and "bytes_limit" in (local[0].memory_stats() or {})


def usable_bytes(world: World) -> int:
    """Returns the bytes of a device that a step may fill, of its chip or its share of this host."""
    local = [d for d in world.mesh.devices.flat if d.process_index == world.process_index]
    row = machine_of(world.mesh)
    if row is not None:
        return int(USABLE * row.memory_bytes)
    stats = {} if world.is_cpu else local[0].memory_stats() or {}
    return int(USABLE * stats.get("bytes_limit", host_memory() // max(1, len(local))))
