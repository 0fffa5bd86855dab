"""Meshes and strategies for a config on machines that are not here, each read from its own step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from axon_dist.core.errors import AxonDistError, ConfigError
from axon_dist.core.told import told
from axon_dist.inspect import Report
from axon_dist.mesh import paper_world
from axon_dist.mesh.chips import Hardware
from axon_dist.ops.precision import MixedPrecision
from axon_dist.parallel.plans import APART
from axon_dist.planner import (
    Apart,
    Arrangement,
    Reading,
    StepTime,
    Workload,
    idle_share,
    on_best_schedule,
    read_program,
    workload_of,
)
from axon_dist.planner.plan import USABLE
from axon_dist.planner.recommend import SIMPLICITY, evaluated, quickest

from ..config.build import abstract_batch, build_step, model_of
from ..config.load import CONFIG
from ..config.schema import RunConfig
from .examine import examine

MOST = 10
"""How many plans are read; the others are left where the estimate has put them."""

FEW = 2
"""The same of each way to train to other numbers."""

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
        changed: why it trains to other numbers than the config says; None where it does not.
        met: bytes that a device sends in a meeting of replicas that train apart, as its share of a
            step.
    """

    arrangement: Arrangement
    config: RunConfig
    reading: Reading
    time: StepTime
    device_bytes: int
    measured: Report | None = None
    changed: str | None = None
    met: float = 0.0

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in a step, and in a meeting as its share of one."""
        return self.reading.wire_bytes + self.met

    @property
    def fits(self) -> bool:
        """Whether all of it fits into the usable memory."""
        return self.reading.peak <= USABLE * self.device_bytes

    @property
    def complexity(self) -> int:
        """How much is combined; smaller is simpler."""
        one = self.arrangement
        axes = (one.tp, one.cp, one.pp, one.ep)
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
        others: what fits and is faster than all these, and trains to other numbers.
    """

    work: Workload
    hardware: Hardware
    num_devices: int
    plans: tuple[ReadPlan, ...]
    refused: tuple[tuple[str, str], ...]
    others: tuple[ReadPlan, ...] = ()

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
    Stacked experts are split where the model has some. Replicas that train apart, as `diloco` or
    `local_sgd` say, are kept where the config has them.

    What would train to other numbers is apart: a narrower precision, and replicas over the links
    between nodes that seldom meet, where they are faster than all else.

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
    apart = _apart_in(config, hardware.num_nodes(num_devices))
    search = _Search(config, hardware, num_devices, device_bytes, *apart)
    refused: dict[str, str] = {}
    plans = search.plans(MOST, refused)
    if not plans:
        name, why = next(iter(refused.items()))
        raise ConfigError(f"no arrangement can be built; {name}: {why}")
    ranked = _ranked(plans)
    others = [plan for other in search.with_other_numbers() for plan in other.plans(FEW, {})]
    limit = ranked[0].time.total if ranked[0].fits else float("inf")
    faster = [plan for plan in others if plan.fits and (1 + ALIKE) * plan.time.total < limit]
    ranked = [_measured(p, target) if n < num_compiled else p for n, p in enumerate(ranked)]
    told = tuple(ranked), tuple(refused.items()), tuple(_ranked(faster))
    return ConfigPlans(search.work, hardware, num_devices, *told)


@dataclasses.dataclass(frozen=True)
class _Search:
    """One search: a config, and what its replicas over slow links do.

    Args:
        config: a run, checked.
        hardware: the chip.
        num_devices: all of them are used.
        device_bytes: memory of a device; None takes the chip's.
        apart: how replicas train on their own; None for one model.
        replicas: how many of them.
        changed: why it trains to other numbers than the config that is planned for.
    """

    config: RunConfig
    hardware: Hardware
    num_devices: int
    device_bytes: int | None
    apart: Apart | None = None
    replicas: int = 1
    changed: str | None = None

    @property
    def platform(self) -> str:
        """What JAX calls the platform."""
        return platform_of_chip(self.hardware)

    @functools.cached_property
    def work(self) -> Workload:
        """What is trained."""
        return workload(self.config, self.platform)

    def plans(self, most: int, refused: dict[str, str]) -> list[ReadPlan]:
        """Estimates all, and reads the best of each kind.

        Args:
            most: of how many kinds.
            refused: takes the names of those that the step refuses, and why.
        """
        work, row, size = self.work, self.hardware, self.device_bytes
        tried = evaluated(work, self.num_devices, row, size, self.apart, self.replicas)
        quick = [on_best_schedule(plan, work, row, size) for plan in quickest(tried)]
        # What splits nothing but the batch is always read: there the estimate matters least.
        splits_more = lambda plan: plan.arrangement.data_ranks < self.num_devices
        quick = sorted(quick, key=splits_more)[:most]
        device_bytes = quick[0].device_bytes
        read = functools.partial(_read, self, device_bytes, refused)
        return [plan for one in quick for plan in read(one.arrangement)]

    def with_other_numbers(self) -> Iterator[_Search]:
        """The same config in a narrower precision, and with replicas that seldom meet."""
        own, narrow = MixedPrecision.of(self.config.precision), MixedPrecision.bf16()
        if self.hardware.rate(narrow.compute) > self.hardware.rate(own.compute):
            config = dataclasses.replace(self.config, precision="bf16")
            yield dataclasses.replace(self, config=config, changed="precision bf16")
        nodes = self.hardware.num_nodes(self.num_devices)
        shares = not (self.num_devices % nodes or self.work.global_batch % nodes)
        if self.apart is None and nodes > 1 and shares:
            apart = Apart()
            changed = f"replicas meet every {apart.every} steps"
            yield dataclasses.replace(self, apart=apart, replicas=nodes, changed=changed)


def _apart_in(config: RunConfig, nodes: int) -> tuple[Apart | None, int]:
    """How the replicas of a config train apart, and how many they are."""
    named = next((name for name in APART if name in (config.parallel or {})), None)
    if named is None:
        return None, 1
    own = config.parallel[named]
    apart = Apart(named, own["every"], own.get("axis", "nodes"))
    return apart, max(config.mesh[apart.axis], nodes)


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
    search: _Search, device_bytes: int, refused: dict[str, str], arrangement: Arrangement
) -> Iterator[ReadPlan]:
    """Reads an arrangement, and the same with every block recomputed where it does not fit."""
    kinds = [arrangement]
    if not arrangement.remat:
        kinds.append(dataclasses.replace(arrangement, remat=True))
    for one in kinds:
        try:
            own = arranged(search.config, one)
            step = build_step(own, paper_world(own.mesh, search.num_devices, search.platform))
            program, arguments = step.program(abstract_batch(own))
        except AxonDistError as error:
            refused.setdefault(one.name, str(error))
            return
        mesh = {str(name): size for name, size in step.world.mesh.shape.items()}
        num_state = len(jax.tree.leaves(step.abstract_state))
        reading = read_program(program, arguments, num_state, mesh, search.platform)
        time = _time(reading, one, search.work, search.hardware)
        time, met = _with_meetings(time, step, mesh, search, one.apart)
        plan = ReadPlan(one, own, reading, time, device_bytes, changed=search.changed, met=met)
        yield plan
        if plan.fits:
            return


def _with_meetings(
    time: StepTime, step: Any, mesh: dict[str, int], search: _Search, apart: Apart | None
) -> tuple[StepTime, float]:
    """The time of a step with its share of what replicas do where they meet, and the bytes."""
    if apart is None:
        return time, 0.0
    met = [
        read_program(program, arguments, len(arguments), mesh, search.platform)
        for program, arguments in step.meeting_programs()
    ]
    # Nothing else runs while they meet.
    waits = [one.step_time(search.hardware, search.work.policy.compute) for one in met]
    waited = sum(one.communication for one in waits) / apart.every
    sent = sum(one.wire_bytes for one in met) / apart.every
    shown = dataclasses.replace(
        time, communication=time.communication + waited, exposed=time.exposed + waited
    )
    return shown, sent


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
