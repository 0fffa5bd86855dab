"""Meshes and strategies for a config on machines that are not here, each read from its own step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from axon_dist.core.checks import checked
from axon_dist.core.errors import AxonDistError, ConfigError
from axon_dist.inspect import Report
from axon_dist.mesh import World, abstract_world
from axon_dist.mesh.chips import MOST_DEVICES, Hardware, hardware, machine_of
from axon_dist.mesh.targets import compute_capability
from axon_dist.ops.precision import MixedPrecision
from axon_dist.parallel.plans import APART
from axon_dist.planner import (
    AXES,
    DATA_PARALLEL,
    Candidate,
    Reading,
    SlowReplicas,
    StepCost,
    Workload,
    candidates,
    idle_share,
    more_microbatches,
    read_program,
    read_step,
    workload_of,
)
from axon_dist.planner.reading import AUTO, USABLE
from axon_dist.step import TrainStep

from ..config import CONFIG, RunConfig, abstract_batch
from .examine import examine
from .steps import build_step, model_of

MOST = 10
"""How many kinds of plans are traced, the simplest first."""

FEW = 2
"""The same of each way to train to other numbers."""

ALIKE = 0.03
"""Steps whose predicted times differ by less are as fast."""

TRIES = 5
"""How often an arrangement is traced until it fits."""

_BEFORE_REMAT = 2
"""How often of these smaller microbatches are tried before blocks are recomputed."""

SIMPLICITY = ("ddp", "zero2", "zero1", "full_shard", "hybrid_shard")
"""Data-parallel strategies in the order in which they are taken, before others. ZeRO-1 holds more
than ZeRO-2, and is for steps of so many microbatches that reducing each is no longer quiet."""


Tell: TypeAlias = Callable[[str, str], None]
"""Takes the name of an arrangement, and a clause about it."""


def silent(name: str, clause: str) -> None:
    """Says nothing."""


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
        met: bytes that a device sends in an outer step, divided by the steps between two of them.
    """

    arrangement: Candidate
    config: RunConfig
    reading: Reading
    time: StepCost
    device_bytes: int
    measured: Report | None = None
    changed: str | None = None
    met: float = 0.0

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in a step, and in an outer step as its share of one."""
        return self.reading.wire_bytes + self.met

    @property
    def fits(self) -> bool:
        """Whether all of it fits into the usable memory."""
        return self.reading.peak <= USABLE * self.device_bytes


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


@checked(config=CONFIG)
def plan_config(
    config: RunConfig,
    hardware: Hardware,
    num_devices: int,
    device_bytes: int | None = None,
    *,
    target: str | None = None,
    num_compiled: int = 0,
    tell: Tell = silent,
) -> ConfigPlans:
    """Ranks the ways to run a config on some devices.

    Of each kind of arrangement the one that splits the model least is taken whose train state fits,
    as the sharding policies lay it out. Its step is traced in an abstract world, and its memory,
    bytes and products are read from the program; where it does not fit, it is traced again with
    smaller microbatches and with every block recomputed. The best are compiled where that is asked.
    Stacked experts are split where the model has some. Replicas that train apart, as `diloco` or
    `local_sgd` say, are kept where the config has them.

    What would train to other numbers is apart: a narrower precision, and replicas over the links
    between nodes that seldom synchronize, where they are faster than all else.

    Args:
        config: a run as YAML describes it; its mesh, strategies, rematerialisation and
            microbatches are what is sought.
        hardware: the chip.
        num_devices: all of them are used.
        device_bytes: memory of a device; None takes the chip's.
        target: the machine to compile for, such as `"h100:8"`.
        num_compiled: how many of the best to compile.
        tell: takes the name of each plan that is traced or compiled, and what is done, with what.

    Returns:
        The plans.

    Raises:
        ConfigError: where no mesh of all the devices divides the batch, or each is refused.
    """
    size = hardware.memory_bytes if device_bytes is None else device_bytes
    apart = _apart_in(config, hardware.num_nodes(num_devices))
    search = _Search(config, hardware, num_devices, size, *apart, tell=tell)
    refused: dict[str, str] = {}
    plans = search.plans(MOST, refused)
    if not plans:
        name, why = next(iter(refused.items()))
        raise ConfigError(f"no arrangement can be built; {name}: {why}")
    ranked = _ranked(plans)
    others = [plan for other in search.with_other_numbers() for plan in other.plans(FEW, {})]
    limit = ranked[0].time.total if ranked[0].fits else float("inf")
    faster = [plan for plan in others if plan.fits and (1 + ALIKE) * plan.time.total < limit]
    compiled: list[ReadPlan] = []
    for plan in ranked[:num_compiled]:
        tell(plan.arrangement.name, f"compiled for {plan.arrangement.mesh}")
        compiled.append(_measured(plan, target))
    ranked[: len(compiled)] = compiled
    kinds = tuple(ranked), tuple(refused.items()), tuple(_ranked(faster))
    return ConfigPlans(search.work, hardware, num_devices, *kinds)


@dataclasses.dataclass(frozen=True)
class _Search:
    """One search: a config, and what its replicas over slow links do.

    Args:
        config: a run, checked.
        hardware: the chip.
        num_devices: all of them are used.
        device_bytes: memory of a device.
        apart: how replicas train on their own; None for one model.
        replicas: how many of them.
        changed: why it trains to other numbers than the config that is planned for.
        tell: takes the name of each plan that is traced, and with what.
    """

    config: RunConfig
    hardware: Hardware
    num_devices: int
    device_bytes: int
    apart: SlowReplicas | None = None
    replicas: int = 1
    changed: str | None = None
    tell: Tell = silent

    @property
    def platform(self) -> str:
        """What JAX calls the platform; a chip that cannot be compiled for is taken for a GPU."""
        wiring = self.hardware.wiring
        return "gpu" if wiring is None or wiring.platform == "cuda" else wiring.platform

    @functools.cached_property
    def work(self) -> Workload:
        """What is trained, read from the model and its loss; nothing is made."""
        return workload_of(
            functools.partial(model_of, self.config),
            self.config.kind.task.loss_fn,
            abstract_batch(self.config),
            self.config.precision,
            self.platform,
        )

    @property
    def usable(self) -> float:
        """Bytes of a device that a plan may fill."""
        return USABLE * self.device_bytes

    def plans(self, most: int, refused: dict[str, str]) -> list[ReadPlan]:
        """Traces the simplest kinds whose train state fits; the smallest where none does.

        Args:
            most: of how many kinds.
            refused: takes the names of those that the step refuses, and why.
        """
        kinds: dict[str, list[Candidate]] = {}
        for one in self.candidates():
            kinds.setdefault(one.name, []).append(one)
        found: list[ReadPlan | None] = []
        too_large: list[_Split] = []
        for group in sorted(kinds.values(), key=lambda group: _complexity(group[0])):
            if len(found) - found.count(None) == most:
                break
            split = _least_split(self, group, refused)
            if split is not None and split.state <= self.usable:
                found.append(_read(self, refused, split))
            elif split is not None:
                too_large.append(split)
        if found.count(None) == len(found) and too_large:
            found.append(_read(self, refused, min(too_large, key=lambda split: split.state)))
        return [plan for plan in found if plan is not None]

    def candidates(self) -> list[Candidate]:
        """All arrangements.

        Raises:
            ConfigError: for a batch that no mesh of all the devices divides.
        """
        count, batch = self.num_devices, self.work.global_batch
        if not 1 <= count <= MOST_DEVICES:
            raise ConfigError(f"got {count} devices; plan for 1 to {MOST_DEVICES}")
        found = list(candidates(self.work, count, self.hardware, self.apart, self.replicas))
        if not found:
            raise ConfigError(
                f"no mesh of {count} devices divides global_batch={batch} and "
                f"{self.work.num_layers} blocks; make the batch a multiple of {count}, such as "
                f"{-(-batch // count) * count}"
            )
        return found

    def with_other_numbers(self) -> Iterator[_Search]:
        """The same config in a narrower precision, and with replicas that seldom synchronize."""
        own, narrow = MixedPrecision.of(self.config.precision), MixedPrecision.bf16()
        if self.hardware.rate(narrow.compute) > self.hardware.rate(own.compute):
            config = dataclasses.replace(self.config, precision="bf16")
            yield dataclasses.replace(self, config=config, changed="precision bf16")
        nodes = self.hardware.num_nodes(self.num_devices)
        shares = not (self.num_devices % nodes or self.work.global_batch % nodes)
        if self.apart is None and nodes > 1 and shares:
            apart = SlowReplicas()
            changed = f"replicas synchronize every {apart.every} steps"
            yield dataclasses.replace(self, apart=apart, replicas=nodes, changed=changed)


def _apart_in(config: RunConfig, nodes: int) -> tuple[SlowReplicas | None, int]:
    """How the replicas of a config train apart, and how many they are."""
    named = next((name for name in APART if name in (config.parallel or {})), None)
    if named is None:
        return None, 1
    own = config.parallel[named]
    apart = SlowReplicas(named, own["every"], own.get("axis", "nodes"))
    return apart, max(config.mesh[apart.axis], nodes)


def arranged(config: RunConfig, arrangement: Candidate) -> RunConfig:
    """The config with the mesh and strategies of an arrangement; what else it says of them stays.

    Args:
        config: a run, checked.
        arrangement: for as many devices.
    """
    plain, lines = config.to_dict(), arrangement.to_config()
    own = plain.get("parallel") or {}
    lines["parallel"] = {
        name: {**own.get(name, {}), **options} for name, options in lines["parallel"].items()
    }
    train = {**plain["train"], "accumulate": 1, **lines.pop("train", {})}
    own = None if config.remat == AUTO else plain.get("remat")
    remat = own or {"interval": 1} if arrangement.remat else None
    here = {"emulate": None}
    return RunConfig.from_dict({**plain, **lines, "train": train, "remat": remat, "devices": here})


def _complexity(one: Candidate) -> int:
    """How much is combined; smaller is simpler."""
    axes = dict.fromkeys(("tp", "cp", "pp", "ep", *AXES))
    model = [n for n, a in enumerate(axes) if a not in ("dp", "fsdp") and getattr(one, a) > 1]
    order = [*dict.fromkeys((*SIMPLICITY, *DATA_PARALLEL))]
    return len(order) * sum(2**place for place in model) + order.index(one.strategy)


def _build(search: _Search, arrangement: Candidate) -> tuple[RunConfig, TrainStep]:
    config = arranged(search.config, arrangement)
    capability = compute_capability(search.hardware.name)
    world = abstract_world(config.mesh, search.num_devices, search.platform, capability)
    return config, build_step(config, world)


@dataclasses.dataclass(frozen=True)
class _Split:
    """An arrangement, its step, and the bytes of its train state on a device."""

    arrangement: Candidate
    config: RunConfig
    step: TrainStep
    state: float


def _least_split(search: _Search, group: list[Candidate], refused: dict[str, str]) -> _Split | None:
    """Of a kind the first whose train state fits, or the smallest; None where all are refused."""

    def splits(one):
        return one.num_devices // (one.replicas * one.shard_ranks)

    best: _Split | None = None
    for one in sorted(group, key=splits):
        try:
            config, step = _build(search, one)
            claims = step.claims
            state = claims.params.bytes_per_device + claims.opt_state.bytes_per_device
        except AxonDistError as error:
            refused.setdefault(one.name, str(error))
            continue
        if best is None or state < best.state:
            best = _Split(one, config, step, state)
        if state <= search.usable:
            break
    return best


def _read(search: _Search, refused: dict[str, str], split: _Split) -> ReadPlan | None:
    """Traces an arrangement until it fits: smaller microbatches first, then recomputed blocks."""
    plan: ReadPlan | None = None
    one, config, step = split.arrangement, split.config, split.step
    for tried in range(TRIES):
        number, remat = f"K={one.num_microbatches}", ", remat" * one.remat
        also = f", {search.changed}" if search.changed else ""
        search.tell(one.name, f"traced on {one.mesh} with {number}{remat}{also}")
        try:
            if tried:
                config, step = _build(search, one)
            reading = read_step(step, abstract_batch(config))
        except AxonDistError as error:
            if plan is None:
                refused.setdefault(one.name, str(error))
            return plan
        time, met = _with_outer_steps(_time(reading, one, search), step, reading, search, one.apart)
        plan = ReadPlan(one, config, reading, time, search.device_bytes, None, search.changed, met)
        smaller = None if plan.fits else _smaller(plan, search, tried)
        if smaller is None:
            break
        one = smaller
    return plan


def _smaller(plan: ReadPlan, search: _Search, tried: int) -> Candidate | None:
    """What of a plan that does not fit is to be traced next; None where nothing is left."""
    one, reading = plan.arrangement, plan.reading
    room = search.usable - reading.state - reading.batch
    if room <= 0:
        return None
    # What waits for the backward pass is as many bytes as samples are computed at a time.
    least = math.ceil(one.num_microbatches * reading.temporaries / room)
    more = more_microbatches(one, search.work, max(least, 2 * one.num_microbatches))
    if more is None or (tried >= _BEFORE_REMAT and not one.remat):
        return None if one.remat else dataclasses.replace(one, remat=True)
    return more


def _with_outer_steps(
    time: StepCost, step: Any, reading: Reading, search: _Search, apart: SlowReplicas | None
) -> tuple[StepCost, float]:
    """The time of a step with its share of what replicas do in an outer step, and the bytes."""
    if apart is None:
        return time, 0.0
    met = [
        read_program(program, arguments, len(arguments), reading.mesh, search.platform)
        for program, arguments in step.outer_step_programs()
    ]
    # Nothing else runs while they meet.
    waits = [one.step_time(search.hardware, search.work.policy.compute) for one in met]
    waited = sum(one.communication for one in waits) / apart.every
    sent = sum(one.wire_bytes for one in met) / apart.every
    communication, exposed = time.communication + waited, time.exposed + waited
    return dataclasses.replace(time, communication=communication, exposed=exposed), sent


def _time(reading: Reading, arrangement: Candidate, search: _Search) -> StepCost:
    work, hardware = search.work, search.hardware
    if arrangement.pp == 1:
        return reading.step_time(hardware, work.policy.compute)
    # The turns of a pipeline are branches of a conditional, of which the program tells no number.
    stages, count = arrangement.pp, arrangement.num_microbatches
    return reading.step_time(
        hardware,
        work.policy.compute,
        flops=4 / 3 * work.flops / arrangement.num_devices,  # every stage is recomputed
        idle=idle_share(arrangement.schedule, stages, count, 1),
    )


def _ranked(plans: list[ReadPlan]) -> list[ReadPlan]:
    """Fits, fast, simple; of what does not fit, the smallest first."""
    left = sorted(plans, key=lambda p: (not p.fits, p.time.total if p.fits else p.reading.peak))
    ranked: list[ReadPlan] = []
    while left:
        limit = (1 + ALIKE) * left[0].time.total
        alike = [p for p in left if p.fits and p.time.total <= limit] or left[:1]
        ranked.append(min(alike, key=lambda p: (_complexity(p.arrangement), p.arrangement.remat)))
        left.remove(ranked[-1])
    return ranked


def plan_here(config: RunConfig, world: World) -> ConfigPlans | None:
    """The plans of a config on the machine of a world; None of one that no table describes."""
    chip = machine_of(world.mesh)
    try:
        return None if chip is None else plan_config(config, hardware(chip.name), world.size)
    except AxonDistError:
        return None


def _measured(plan: ReadPlan, target: str | None) -> ReadPlan:
    config = plan.config
    if target is not None and target.startswith("cpu:"):
        emulated = dataclasses.replace(config.devices, emulate=plan.arrangement.num_devices)
        config, target = dataclasses.replace(config, devices=emulated), None
    return dataclasses.replace(plan, measured=examine(config, target).report)
