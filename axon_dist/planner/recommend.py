"""`recommend`: arrangements ranked by what fits, what is simple, and what is fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import optax

from ..core.errors import ConfigError
from ..core.told import NUMBER, WHOLE, Kind, is_number
from ..core.words import byte_size, plural
from ..mesh.chips import MOST_DEVICES, Hardware
from ..mesh.chips import hardware as look_up
from ..ops.precision import MixedPrecision
from .arrangement import Apart
from .candidates import candidates
from .lint import Finding, lint
from .plan import ROOMY, USABLE, Plan, evaluate
from .quantity import parse_count
from .shape import guess_shape
from .workload import ModelCost, Workload

GLOBAL_BATCH = 1024
"""Samples of a step where none are given: two million tokens in samples of 2048, as GPT-3 13B had
(arXiv:2005.14165, table 2.1)."""


SIMPLICITY = ("ddp", "shard_grad_op", "zero1", "full_shard", "hybrid_shard")
"""Data-parallel strategies in the order in which they are taken. ZeRO-1 holds more than ZeRO-2, and
is for steps of so many microbatches that reducing each is no longer quiet."""


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The plans of a workload, best first.

    Args:
        work: the model and its batch.
        hardware: the rates that times are estimated with.
        num_devices: how many devices.
        plans: the best plan of every combination; those that fit come first.
        findings: what is worth knowing about the best one.
    """

    work: Workload
    hardware: Hardware
    num_devices: int
    plans: tuple[Plan, ...]
    findings: tuple[Finding, ...]

    @property
    def best(self) -> Plan:
        """The plan to take, or the one that comes nearest to fitting."""
        return self.plans[0]

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.best.fits

    @property
    def faster(self) -> Plan | None:
        """The plan with the shortest estimated step, where it fits and is not the best one.

        Estimates let all transfers of layers hide; a plan that relies on it is not taken first.
        """
        quickest = min((p for p in self.plans if p.fits), key=lambda p: p.time.total, default=None)
        return quickest if quickest and quickest.time.total < self.best.time.total else None

    @property
    def strategy(self) -> str:
        """The name of the best plan, or `"does not fit"`."""
        return self.best.name if self.fits else "does not fit"

    @property
    def reason(self) -> str:
        """Why, in one sentence."""
        if self.fits:
            return f"{self.best.name}: {'; '.join(self.best.reasons)}"
        best, needed = self.best, self.devices_needed
        advice = (
            f"take at least {plural(needed, 'device')}, or an optimizer with less state"
            if needed > self.num_devices
            else "it is the activations that do not fit: take shorter samples, fewer of them at a "
            "time, or more devices"
        )
        return (
            f"does not fit: split over all {plural(self.num_devices, 'device')}, the training "
            f"state alone is {byte_size(best.memory.states)} on each, "
            f"{byte_size(best.memory.total)} with activations, and {USABLE:.0%} of "
            f"{byte_size(best.device_bytes)} can be used; {advice}"
        )

    @property
    def devices_needed(self) -> int:
        """Devices over which the training state alone would fit, if all of it is split."""
        whole = self.best.memory.states * self.num_devices
        return -(-whole // max(int(USABLE * self.best.device_bytes), 1))


_MODEL_COST = Kind(
    "a number of parameters, such as 7e9, or what a model costs, such as workload_of(model).shape",
    lambda x: is_number(x) or hasattr(x, "divides"),
)
_HARDWARE = Kind(
    "the name of a chip, such as 'h100', or a Hardware", lambda x: isinstance(x, (str, Hardware))
)


def recommend(
    num_params: float | ModelCost,
    num_devices: int,
    device_bytes: float | None = None,
    *,
    hardware: Hardware | str = "h100",
    global_batch: int | None = None,
    sequence_length: int = 2048,
    optimizer: str | optax.GradientTransformation = "adam",
    precision: MixedPrecision | str | bool | None = None,
) -> Recommendation:
    """Ranks every arrangement of a model on some devices.

    Of what fits, the simplest comes first that leaves room (its training state takes at most half
    of the memory) and is quiet (transfers and bubble are at most 30 % of a step): replicate before
    sharding, shard before splitting layers, split layers before cutting the model into stages.
    Where nothing leaves room, nothing is held twice. Among equals the faster one is better.

    Args:
        num_params: trainable scalars, or what a model costs: the sizes of a transformer, or the
            `shape` of a `workload_of` any model; a number is taken for a transformer of usual
            proportions.
        num_devices: all of them are used.
        device_bytes: memory of a device, bytes; None takes the hardware's.
        hardware: a name of `HARDWARE`, or any description.
        global_batch: samples of a step; by default the multiple of `num_devices` from 1024 on.
        sequence_length: tokens of a sample, where the model is given by a number.
        optimizer: a name of `OPTIMIZERS` or an optax transformation.
        precision: a policy or a preset's name; float32 by default.

    Returns:
        The plans, best first, the best of every combination of strategies.

    Raises:
        ConfigError: for a number that is not positive, or a batch that no mesh of all the devices
            divides.

    Example:
        >>> recommend(0.5e9, 4).strategy, recommend(10e9, 8, 80e9).strategy
        ('ddp', 'full_shard')
        >>> recommend(70e9, 8, 80e9).reason[:82]
        'does not fit: split over all 8 devices, the training state alone is 140 GB on each'
    """
    _HARDWARE.check("recommend", "hardware", hardware)
    _MODEL_COST.check("recommend", "num_params", num_params)
    NUMBER.or_none().check("recommend", "device_bytes", device_bytes)
    row = look_up(hardware) if isinstance(hardware, str) else hardware
    memory = int(row.memory_bytes if device_bytes is None else device_bytes)
    WHOLE.check("recommend", "num_devices", num_devices)
    if num_devices < 1 or memory < 1:
        raise ConfigError(
            f"got num_devices={num_devices} and device_bytes={memory}; both must be positive"
        )
    is_count = isinstance(num_params, (int, float, str))
    shape: Any = num_params
    if is_count:
        shape = guess_shape(parse_count(num_params), sequence_length)
    batch = -(-GLOBAL_BATCH // num_devices) * num_devices if global_batch is None else global_batch
    work = Workload(shape=shape, global_batch=batch, optimizer=optimizer, precision=precision)
    found = evaluated(work, num_devices, row, memory)
    plans = best_of_each(found)
    return Recommendation(work, row, num_devices, plans, lint(plans[0], work, row))


def evaluated(
    work: Workload,
    num_devices: int,
    hardware: Hardware,
    device_bytes: int | None = None,
    apart: Apart | None = None,
    replicas: int = 1,
) -> list[Plan]:
    """The estimates of every candidate.

    Args:
        work: what is trained.
        num_devices: all of them are used.
        hardware: the chip.
        device_bytes: memory of a device; None takes the chip's.
        apart: how replicas over slow links train on their own; None for one model.
        replicas: how many of them.

    Raises:
        ConfigError: for a batch that no mesh of all the devices divides.
    """
    if num_devices < 1:
        raise ConfigError(f"got num_devices={num_devices}; there must be at least one")
    if num_devices > MOST_DEVICES:
        raise ConfigError(f"got {num_devices} devices; plan for at most {MOST_DEVICES}")
    tried = candidates(work, num_devices, hardware, apart, replicas)
    found = [evaluate(one, work, hardware, device_bytes) for one in tried]
    if not found:
        batch = work.global_batch
        raise ConfigError(
            f"no mesh of {num_devices} devices divides global_batch={batch}, "
            f"{work.shape.words}; make the batch a multiple "
            f"of {num_devices}, such as {-(-batch // num_devices) * num_devices}"
        )
    return found


def quickest(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Of every name the plan with the shortest step that fits, the shortest first.

    Where nothing of a name fits it is the smallest, behind all that fit.

    Args:
        plans: estimates.
    """
    order = lambda p: (1, p.memory.total) if not p.fits else (0, p.time.total)
    best: dict[str, Plan] = {}
    for plan in sorted(plans, key=order):
        best.setdefault(plan.name, plan)
    return tuple(best.values())


def best_of_each(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Sorts plans, and keeps the first of every name."""
    best: dict[str, Plan] = {}
    for plan in sorted(plans, key=preference):
        best.setdefault(plan.name, plan)
    return tuple(best.values())


def preference(plan: Plan) -> tuple[float, ...]:
    """The order of plans: fits, roomy, quiet, simple, fast; smaller is better."""
    if not plan.fits:
        return (1, plan.memory.total)
    arrangement = plan.arrangement
    wasteful = not plan.is_roomy and arrangement.shards[0] < arrangement.shard_ranks
    simplicity = (
        8 * (arrangement.ep > 1)
        + 4 * (arrangement.pp > 1)
        + 2 * (arrangement.cp > 1)
        + (arrangement.tp > 1),
        SIMPLICITY.index(arrangement.strategy),
    )
    wishes = (not plan.is_roomy, wasteful, not plan.is_quiet)
    # Memory below half is no matter; fewer microbatches keep a device busier.
    ties = (max(plan.memory.total, ROOMY * plan.device_bytes), arrangement.num_microbatches)
    return (0, *wishes, *simplicity, plan.time.total, arrangement.remat, *ties)
