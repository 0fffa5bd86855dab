"""Meshes and strategies for a config on machines that are not here, each read from its own step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import jax

from axon_dist.core.errors import AxonDistError, ConfigError
from axon_dist.core.told import told
from axon_dist.hardware import Hardware
from axon_dist.inspect import Report
from axon_dist.mesh import paper_world
from axon_dist.planner import (
    Arrangement,
    Reading,
    StepTime,
    Workload,
    idle_share,
    read_program,
    workload_of,
)
from axon_dist.planner.plan import USABLE
from axon_dist.planner.recommend import SIMPLICITY, evaluated, quickest

from ..config.build import abstract_batch, build_step, model_of
from ..config.schema import CONFIG, RunConfig
from .examine import examine

MOST = 10
"""How many plans are read; the others are left where the estimate has put them."""

ALIKE = 0.03
"""Steps whose predicted times differ by less are as fast."""


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """One way to run a config, as its traced step says, and as its compiled one does.

    Args:
        arrangement: the axes and what is split over them.
        config: the config that runs so.
        reading: what a device holds, computes and sends.
        time: of a step, by cause.
        device_bytes: what a device has.
        measured: the compiled step, where it was compiled.
    """

    arrangement: Arrangement
    config: RunConfig
    reading: Reading
    time: StepTime
    device_bytes: int
    measured: Report | None = None

    @property
    def fits(self) -> bool:
        """Whether all of it fits into the usable memory."""
        return self.reading.peak <= USABLE * self.device_bytes

    @property
    def complexity(self) -> int:
        """How much is combined; smaller is simpler."""
        axes = (self.arrangement.tp, self.arrangement.cp, self.arrangement.pp)
        combined = sum(2**place for place, size in enumerate(axes) if size > 1)
        remat = int(self.arrangement.remat)
        return (
            2 * (len(SIMPLICITY) * combined + SIMPLICITY.index(self.arrangement.strategy)) + remat
        )


@dataclasses.dataclass(frozen=True)
class ConfigPlans:
    """The plans of a config, best first.

    Args:
        work: what is trained.
        hardware: the rates that times are estimated with.
        num_devices: how many devices.
        plans: what fits first, then by the predicted time of a step; of steps as fast the simplest.
        refused: names of arrangements that the step refuses, and why.
    """

    work: Workload
    hardware: Hardware
    num_devices: int
    plans: tuple[ReadPlan, ...]
    refused: tuple[tuple[str, str], ...]

    @property
    def best(self) -> ReadPlan:
        """The plan to take, or the one that comes nearest to fitting."""
        return self.plans[0]

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.best.fits


@told(config=CONFIG)
def plan_config(
    config: RunConfig,
    hardware: Hardware,
    num_devices: int,
    device_bytes: int | None = None,
    *,
    target: str | None = None,
    num_compiled: int = 0,
) -> ConfigPlans:
    """Ranks the ways to run a config on some devices.

    Every mesh, strategy, schedule and rematerialisation is estimated from what a sample costs the
    model (`workload_of`); the best of each kind is then built on paper, its step traced, and its
    memory, bytes and products read from the program. The best are compiled where that is asked.

    Args:
        config: a run as YAML describes it; its mesh, strategies, rematerialisation and
            microbatches are what is sought.
        hardware: the chip.
        num_devices: all of them are used.
        device_bytes: memory of a device; None takes the chip's.
        target: the machine to compile for, such as `"h100:8"`.
        num_compiled: how many of the best to compile.

    Returns:
        The plans.

    Raises:
        ConfigError: where no mesh of all the devices divides the batch, or each is refused.
    """
    platform = platform_of_chip(hardware)
    work = workload(config, platform)
    quick = quickest(evaluated(work, num_devices, hardware, device_bytes))
    # What splits nothing but the batch is always read: there the estimate matters least.
    quick = tuple(sorted(quick, key=lambda plan: plan.arrangement.data_ranks < num_devices))[:MOST]
    refused: dict[str, str] = {}
    read = functools.partial(_read, config, work, hardware, quick[0].device_bytes, refused)
    plans = [plan for one in quick for plan in read(one.arrangement, num_devices, platform)]
    if not plans:
        name, why = next(iter(refused.items()))
        raise ConfigError(f"no arrangement can be built; {name}: {why}")
    ranked = _ranked(plans)
    ranked = [_measured(p, target) if n < num_compiled else p for n, p in enumerate(ranked)]
    return ConfigPlans(work, hardware, num_devices, tuple(ranked), tuple(refused.items()))


def workload(config: RunConfig, platform: str) -> Workload:
    """What a config trains, read from its model's own program; nothing is made.

    Args:
        config: a run, checked.
        platform: `cpu`, `gpu` or `tpu`.
    """
    factory = functools.partial(model_of, config)
    return workload_of(
        factory,
        config.kind.task.loss_fn,
        abstract_batch(config),
        config.optimizer.build(config.train.steps, factory),
        config.precision,
        {"gpu": "cuda"}.get(platform, platform),
    )


def platform_of_chip(hardware: Hardware) -> str:
    """What JAX calls the platform of a chip; one that cannot be compiled for is taken for a GPU."""
    known = None if hardware.wiring is None else hardware.wiring.platform
    return {"cuda": "gpu", None: "gpu"}.get(known, known or "gpu")


def arranged(config: RunConfig, arrangement: Arrangement) -> RunConfig:
    """The config with the mesh and strategies of an arrangement; what else it says of them stays.

    Args:
        config: a run, checked.
        arrangement: for as many devices.
    """
    plain, lines = config.to_dict(), arrangement.to_config()
    own = plain.get("parallel") or {}
    lines["parallel"] = {
        _NAMES.get(name, name): {**own.get(_NAMES.get(name, name), {}), **options}
        for name, options in lines["parallel"].items()
    }
    train = {**plain["train"], "accumulate": 1, **lines.pop("train", {})}
    remat = plain.get("remat") or {"interval": 1} if arrangement.remat else None
    here = {"emulate": None}
    return RunConfig.from_dict({**plain, **lines, "train": train, "remat": remat, "devices": here})


_NAMES = {"shard_grad_op": "zero2"}


def _read(
    config: RunConfig,
    work: Workload,
    hardware: Hardware,
    device_bytes: int,
    refused: dict[str, str],
    arrangement: Arrangement,
    num_devices: int,
    platform: str,
) -> Iterator[ReadPlan]:
    """Reads an arrangement, and the same with every block recomputed where it does not fit."""
    kinds = [arrangement]
    if not arrangement.remat:
        kinds.append(dataclasses.replace(arrangement, remat=True))
    for one in kinds:
        try:
            own = arranged(config, one)
            step = build_step(own, paper_world(own.mesh, num_devices, platform))
            program, arguments = step.program(abstract_batch(own))
        except AxonDistError as error:
            refused.setdefault(one.name, str(error))
            return
        num_state = len(jax.tree.leaves(step.abstract_state))
        mesh = {str(name): size for name, size in step.world.mesh.shape.items()}
        reading = read_program(program, arguments, num_state, mesh, platform)
        time = _time(reading, one, work, hardware)
        plan = ReadPlan(one, own, reading, time, device_bytes)
        yield plan
        if plan.fits:
            return


def _time(
    reading: Reading, arrangement: Arrangement, work: Workload, hardware: Hardware
) -> StepTime:
    if arrangement.pp == 1:
        return reading.step_time(hardware, work.policy.compute)
    # The turns of a pipeline are branches of a conditional, of which the program tells no number.
    stages, count = arrangement.pp, arrangement.num_microbatches
    return reading.step_time(
        hardware,
        work.policy.compute,
        flops=work.flops(1) / arrangement.num_devices,
        idle=idle_share(arrangement.schedule, stages, count, 1),
    )


def _ranked(plans: list[ReadPlan]) -> list[ReadPlan]:
    """Fits, fast, simple; of what does not fit, the smallest first."""
    left = sorted(plans, key=lambda p: (not p.fits, p.time.total if p.fits else p.reading.peak))
    ranked: list[ReadPlan] = []
    while left:
        first = left[0]
        alike = [p for p in left if p.fits and p.time.total <= (1 + ALIKE) * first.time.total]
        chosen = min(alike, key=lambda p: p.complexity) if first.fits else first
        ranked.append(chosen)
        left.remove(chosen)
    return ranked


def _measured(plan: ReadPlan, target: str | None) -> ReadPlan:
    config = plan.config
    if target is not None and target.startswith("cpu:"):
        emulated = dataclasses.replace(config.devices, emulate=plan.arrangement.num_devices)
        config, target = dataclasses.replace(config, devices=emulated), None
    return dataclasses.replace(plan, measured=examine(config, target).report)
