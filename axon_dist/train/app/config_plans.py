"""Ranks meshes and strategies for a config on any machine, by the costs of each traced step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import optax
from flax import nnx

from axon_dist.core.checks import SIZE, checked
from axon_dist.core.errors import AxonDistError, ConfigError
from axon_dist.core.words import AUTO
from axon_dist.inspect import Report, bytes_per_device, trace_outer_steps
from axon_dist.ir.loop_rule import LoopChoice
from axon_dist.mesh import SLOW_AXES, World, abstract_world
from axon_dist.mesh.chips import MOST_DEVICES, Hardware, hardware, machine_of
from axon_dist.mesh.targets import compute_capability
from axon_dist.ops.precision import MixedPrecision
from axon_dist.parallel import STRATEGIES, ZERO
from axon_dist.planner import (
    AXES,
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
from axon_dist.planner.candidates import divisors, first_guess
from axon_dist.planner.reading import USABLE
from axon_dist.step import TrainStep, sharing_steps

from ...core.own_context import in_own_context
from ..config import CONFIG, RunConfig, abstract_batch, with_own_precision, without_option
from ..loop.meters import useful_flops_per_token
from .examine import examine
from .steps import ModelOfZeros, build_step, names_on, optimizer_of

MOST = 10
"""The number of kinds of plans to trace, simplest first."""

FEW = 2
"""The number of kinds of plans to trace for each variant with different numerics."""

TIE = 0.03
"""Plans whose predicted step times differ by less than this fraction count as equally fast."""

TRIES = 5
"""The maximum number of traces of a candidate until it fits."""

_BEFORE_REMAT = 2
"""The number of these tries that shrink the microbatch before blocks are recomputed."""

Tell: TypeAlias = Callable[[str, str], None]
"""Takes the name of a candidate and a clause about it."""


def silent(name: str, clause: str) -> None:
    """Reports nothing."""


@dataclasses.dataclass(frozen=True)
class TracedPlan:
    """One way to run a config: the cost of its traced step and, if compiled, its report.

    Args:
        candidate: the mesh axes and what is split over them.
        config: the config with these axes and strategies.
        reading: the memory, computation and communication of a device, read from the traced step.
        time: the time of a step, by cause.
        device_bytes: the memory of a device.
        measured: the report of the compiled step; None if it was not compiled.
        changed: why its numerics differ from the config's; None if they do not.
        outer_bytes: bytes that a device sends in an outer step, divided by the number of steps
            between two outer steps.
        loops: which equal blocks run as a loop, and why.
        utilization: MFU, the share of the chip's bfloat16 peak that the step reaches; masked, idle
            and recomputed FLOPs do not count. For a model of tokens these are the FLOPs that a run
            counts. 0 if they are not known.
    """

    candidate: Candidate
    config: RunConfig
    reading: Reading
    time: StepCost
    device_bytes: int
    measured: Report | None = None
    changed: str | None = None
    outer_bytes: float = 0.0
    loops: tuple[LoopChoice, ...] = ()
    utilization: float = 0.0

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in a step, including its share of an outer step."""
        return self.reading.wire_bytes + self.outer_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak memory fits into the usable memory."""
        return self.reading.peak <= USABLE * self.device_bytes


@dataclasses.dataclass(frozen=True)
class ConfigPlans:
    """The plans of a config, best first.

    Args:
        work: the workload: model, loss and batch.
        hardware: the rates used to estimate times.
        num_devices: the number of devices.
        plans: plans that fit come first; then sorted by predicted step time, and equally fast ones
            by simplicity.
        refused: pairs of the name of a candidate whose step cannot be built, and the reason.
        others: plans with different numerics that fit and are faster than all of `plans`.
    """

    work: Workload
    hardware: Hardware
    num_devices: int
    plans: tuple[TracedPlan, ...]
    refused: tuple[tuple[str, str], ...]
    others: tuple[TracedPlan, ...] = ()

    @property
    def best(self) -> TracedPlan:
        """The best plan; if none fits, the one that needs the least memory."""
        return self.plans[0]

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.best.fits


@in_own_context
@checked(config=CONFIG, num_compiled=SIZE)
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

    Of each kind of candidate, the search takes the one that splits the model least and whose train
    state fits into memory. It builds the step on an abstract mesh, traces it, and reads memory,
    bytes and matrix products from the program. A candidate that does not fit is traced again with
    smaller microbatches, then with every block recomputed. The best `num_compiled` are compiled.
    Stacked experts are split if the model has any. If the config has `diloco` or `local_sgd`, all
    candidates have it.

    Plans with different numerics are listed separately if they are faster than all others: a
    narrower precision, and replicas that rarely synchronize over the links between nodes.

    Args:
        config: a run as YAML describes it; its mesh, strategies, rematerialisation and
            microbatches are replaced.
        hardware: the chip.
        num_devices: the number of devices; all are used.
        device_bytes: memory of a device; None uses the chip's.
        target: the machine to compile for, such as `"h100:8"`.
        num_compiled: how many of the best plans to compile.
        tell: takes the name of each plan that is traced or compiled, and a clause about it.

    Returns:
        The plans.

    Raises:
        ConfigError: if no mesh of all the devices divides the batch, every plan is refused, or no
            slice of a TPU has that many devices.
    """
    hardware.check_size(num_devices)
    # Candidates have other strategies, but the same precision.
    config = with_own_precision(config)
    size = hardware.memory_bytes if device_bytes is None else device_bytes
    outer = _outer_loop_of(config, hardware.num_nodes(num_devices))
    factory = ModelOfZeros(config)
    optimizer = optax.with_extra_args_support(optimizer_of(config, factory))
    search = _Search(config, hardware, num_devices, size, factory, optimizer, *outer, tell=tell)
    refused: dict[str, str] = {}
    with sharing_steps():
        plans = search.plans(MOST, refused)
        if not plans:
            name, why = next(iter(refused.items()))
            raise ConfigError(f"no candidate can be built; {name}: {why}")
        others = [plan for other in search.with_other_numbers() for plan in other.plans(FEW, {})]
    ranked = _ranked(plans)
    limit = ranked[0].time.total if ranked[0].fits else float("inf")
    faster = [plan for plan in others if plan.fits and (1 + TIE) * plan.time.total < limit]
    for rank, plan in enumerate(ranked[:num_compiled]):
        tell(plan.candidate.name, f"compiled for {plan.candidate.mesh}")
        ranked[rank] = _measured(plan, target)
    kinds = tuple(ranked), tuple(refused.items()), tuple(_ranked(faster))
    return ConfigPlans(search.work, hardware, num_devices, *kinds)


@dataclasses.dataclass(frozen=True)
class _Search:
    """One search: a config, and how its replicas synchronize over slow links.

    Args:
        config: a checked run.
        hardware: the chip.
        num_devices: the number of devices; all are used.
        device_bytes: memory of a device.
        factory: makes the config's model for traces.
        optimizer: the config's.
        outer: how replicas synchronize in outer steps; None without outer steps.
        replicas: the number of replicas.
        changed: why its numerics differ from the config's; None if they do not.
        tell: takes the name of each plan that is traced, and a clause about it.
        residuals: the bytes that a traced plan saves for the backward pass, relative to the
            workload's estimate, by the axes that split the model. The searches of the same config
            with other numerics share it.
        flops: the least FLOPs, over all devices, of a traced plan without a pipeline and without
            recomputation, by `changed`.
    """

    config: RunConfig
    hardware: Hardware
    num_devices: int
    device_bytes: int
    factory: Callable[[], nnx.Module]
    optimizer: optax.GradientTransformation
    outer: SlowReplicas | None = None
    replicas: int = 1
    changed: str | None = None
    tell: Tell = silent
    residuals: dict[tuple[str, ...], float] = dataclasses.field(default_factory=dict)
    flops: dict[str | None, float] = dataclasses.field(default_factory=dict)

    @property
    def platform(self) -> str:
        """JAX's name of the platform; chips without a compile target count as GPUs."""
        wiring = self.hardware.wiring
        return "gpu" if wiring is None or wiring.platform == "cuda" else wiring.platform

    @functools.cached_property
    def work(self) -> Workload:
        """The workload, read from the abstract model and its loss."""
        return workload_of(
            self.factory,
            self.config.kind.task.loss_fn,
            abstract_batch(self.config),
            self.config.precision,
            self.platform,
        )

    @property
    def usable(self) -> float:
        """Bytes of a device that a plan may fill."""
        return USABLE * self.device_bytes

    def note(self, plan: TracedPlan, split: _Split) -> None:
        """Records a plan's FLOPs and the bytes that it saves for the backward pass."""
        one = plan.candidate
        if one.pp > 1 or one.remat:
            return
        flops = plan.reading.flops * one.num_devices
        self.flops[self.changed] = min(flops, self.flops.get(self.changed, flops))
        if not self.work.activations:
            return
        whole = _activations(plan, split) * one.num_microbatches * one.num_devices
        self.residuals.setdefault(_axes_of(one), whole / self.work.activations)

    def plans(self, most: int, refused: dict[str, str]) -> list[TracedPlan]:
        """Traces the simplest kinds whose train state fits; if none fits, the smallest.

        Args:
            most: the maximum number of kinds to trace.
            refused: filled with the names of candidates whose step cannot be built, and why.

        Raises:
            ConfigError: if no mesh of all the devices divides the batch.
        """
        count = self.num_devices
        batch = self.work.global_batch
        if not 1 <= count <= MOST_DEVICES:
            raise ConfigError(f"got {count} devices; plan for 1 to {MOST_DEVICES}")
        kinds: dict[str, list[Candidate]] = {}
        for one in candidates(self.work, count, self.hardware, self.outer, self.replicas):
            kinds.setdefault(one.name, []).append(one)
        if not kinds:
            raise ConfigError(
                f"no mesh of {count} devices divides global_batch={batch} and "
                f"{self.work.num_layers} blocks; make the batch a multiple of {count}, such as "
                f"{-(-batch // count) * count}"
            )
        plans: list[TracedPlan | None] = []
        too_large: list[_Split] = []
        for group in sorted(kinds.values(), key=lambda group: _complexity(group[0])):
            if len(plans) - plans.count(None) == most:
                break
            split = _least_split(self, group, refused)
            if split is not None and split.state <= self.usable:
                plans.append(_read(self, refused, split))
            elif split is not None:
                too_large.append(split)
        if plans.count(None) == len(plans) and too_large:
            plans.append(_read(self, refused, min(too_large, key=lambda split: split.state)))
        return [plan for plan in plans if plan is not None]

    def with_other_numbers(self) -> Iterator[_Search]:
        """Yields the same config in a narrower precision, and with replicas that rarely sync."""
        current = MixedPrecision.of(self.config.precision)
        narrow = MixedPrecision.bf16()
        # A dtype without a rate, such as float64, is slower than all that have one.
        rates = [self.hardware.rate(each.compute) or 0.0 for each in (narrow, current)]
        if rates[0] > rates[1]:
            config = dataclasses.replace(self.config, precision="bf16")
            yield dataclasses.replace(self, config=config, changed="precision bf16")
        nodes = self.hardware.num_nodes(self.num_devices)
        shares = not (self.num_devices % nodes or self.work.global_batch % nodes)
        if self.outer is None and nodes > 1 and shares:
            outer = SlowReplicas()
            changed = f"replicas synchronize every {outer.every} steps"
            yield dataclasses.replace(self, outer=outer, replicas=nodes, changed=changed)


def _outer_loop_of(config: RunConfig, nodes: int) -> tuple[SlowReplicas | None, int]:
    """Returns the outer loop of a config's replicas, if any, and the number of replicas."""
    known = STRATEGIES.over(*SLOW_AXES)
    named = next((name for name in known if name in (config.parallel or {})), None)
    if named is None:
        return None, 1
    options = config.parallel[named]
    outer = SlowReplicas(named, options["every"], options.get("axis", "nodes"))
    return outer, max(config.mesh[outer.axis], nodes)


def config_for(config: RunConfig, candidate: Candidate) -> RunConfig:
    """Returns the config with a candidate's mesh and strategies; keeps their other options.

    The axis names of the model mean axes of the candidate's mesh.

    Args:
        config: a checked run.
        candidate: the mesh and strategies to use.
    """
    plain = config.to_dict()
    lines = candidate.to_config()
    given = plain.get("parallel") or {}
    key = "activation_checkpointing"
    own_remats = [options[key] for options in given.values() if options.get(key) is not None]
    # The candidate says whether blocks are recomputed, and `remat` below says how.
    strategies = without_option(given, key)
    lines["parallel"] = {
        name: {**strategies.get(name, {}), **options} for name, options in lines["parallel"].items()
    }
    train = {**plain["train"], "accumulate": 1, **lines.pop("train", {})}
    configured = None if config.remat == AUTO else plain.get("remat")
    configured = configured or next(iter(own_remats), None)
    remat = configured or {"interval": 1} if candidate.remat else None
    devices = {"emulate": None}
    names = names_on(config.axis_names, config.mesh, candidate.mesh)
    own = {"train": train, "remat": remat, "devices": devices, "axis_names": names}
    return RunConfig.from_dict({**plain, **lines, **own})


def _axes_of(one: Candidate) -> tuple[str, ...]:
    """Returns the axes over which a candidate splits the model or its positions."""
    return tuple(axis for axis in AXES if axis not in ("dp", "fsdp") and getattr(one, axis) > 1)


def _complexity(one: Candidate) -> int:
    """Ranks a candidate by the parallelisms it combines; smaller is simpler, and preferred.

    Each model-parallel axis is one bit above the preference for the data-parallel strategy.
    """
    axes = dict.fromkeys(("tp", "cp", "pp", "ep", *AXES))
    model = [n for n, a in enumerate(axes) if a not in ("dp", "fsdp") and getattr(one, a) > 1]
    plans = STRATEGIES.of_data()
    most = max(plan.preference for plan in plans.values())
    return (most + 1) * sum(2**bit for bit in model) + plans[one.strategy].preference


def _build(search: _Search, candidate: Candidate) -> tuple[RunConfig, TrainStep]:
    config = config_for(search.config, candidate)
    capability = compute_capability(search.hardware.name)
    world = abstract_world(config.mesh, search.num_devices, search.platform, capability)
    # No candidate changes the model or the optimizer.
    step = build_step(
        config,
        world,
        search.optimizer,
        checks_loss=False,
        factory=search.factory,
    )
    return config, step


@dataclasses.dataclass(frozen=True)
class _Split:
    """A candidate, its step, and the bytes per device of its train state and its gradients.

    Args:
        candidate: the candidate, as `candidates` makes it: one microbatch, a pipeline with several.
        config: the config with the candidate's mesh and strategies.
        step: the step of this config.
        state: bytes of the train state.
        gradients: bytes of the gradients that are summed over microbatches.
    """

    candidate: Candidate
    config: RunConfig
    step: TrainStep
    state: float
    gradients: float


def _least_split(search: _Search, group: list[Candidate], refused: dict[str, str]) -> _Split | None:
    """Returns the first candidate whose train state fits, else the smallest; None if all fail."""
    best: _Split | None = None
    for one in sorted(group, key=lambda one: one.num_devices // (one.replicas * one.shard_ranks)):
        try:
            config, step = _build(search, one)
            # A step moves an offloaded state to the device, so it must fit there too.
            state = bytes_per_device(step.state_layout.placed_shapes, None)
        except AxonDistError as error:
            refused.setdefault(one.name, str(error))
            continue
        if best is None or state < best.state:
            best = _Split(one, config, step, state, _gradient_bytes(one, step))
        if state <= search.usable:
            break
    return best


def _gradient_bytes(one: Candidate, step: TrainStep) -> int:
    """Returns the bytes of the gradients that a device sums over microbatches."""
    claims = step.claims
    is_split = ZERO[STRATEGIES.of_data()[one.strategy].stage].grads
    return (claims.grads if is_split else claims.params).bytes_per_device


def _read(search: _Search, refused: dict[str, str], split: _Split) -> TracedPlan | None:
    """Traces a candidate until it fits: smaller microbatches first, then recomputed blocks."""
    free = search.usable - split.state - split.gradients
    ratio = search.residuals.get(_axes_of(split.candidate))
    measured = None if ratio is None else ratio * search.work.activations
    one = first_guess(split.candidate, search.work, free, measured)
    # If the guess has more microbatches than the split, they were already shrunk once.
    shrunk = int(one.num_microbatches > split.candidate.num_microbatches)
    plan: TracedPlan | None = None
    larger: Candidate | None = None
    for tried in range(shrunk, TRIES):
        traced = _traced(search, refused, split, one, plan)
        if traced is None:
            return plan
        plan = traced
        search.note(plan, split)
        larger = _larger(plan, split, search) if plan.fits and tried == shrunk else None
        smaller = None if plan.fits else _smaller(plan, search, tried)
        if smaller is None:
            break
        one = smaller
    while plan is not None and larger is not None:
        traced = _traced(search, refused, split, larger, plan)
        if traced is None or not traced.fits:
            break
        plan = traced
        larger = _larger(plan, split, search)
    return plan


def _traced(
    search: _Search,
    refused: dict[str, str],
    split: _Split,
    one: Candidate,
    before: TracedPlan | None,
) -> TracedPlan | None:
    """Traces a candidate and reads its costs; None if its step is refused.

    Args:
        search: the search.
        refused: filled with the name of a candidate whose step cannot be built, and why.
        split: the kind of the candidate, built with the microbatches of `candidates`.
        one: the candidate.
        before: the candidate's plan with other microbatches; None for its first trace.
    """
    remat = ", remat" * one.remat
    also = f", {search.changed}" if search.changed else ""
    search.tell(one.name, f"traced on {one.mesh} with K={one.num_microbatches}{remat}{also}")
    config = split.config
    step = split.step
    try:
        if one != split.candidate:
            config, step = _build(search, one)
        reading = read_step(step, abstract_batch(config))
    except AxonDistError as error:
        if before is None:
            refused.setdefault(one.name, str(error))
        return None
    time, sent = _with_outer_step(
        _time(reading, one, search), step, reading, search, one.slow_replicas
    )
    share = _useful_flops(search, step) / one.num_devices
    return TracedPlan(
        one,
        config,
        reading,
        time,
        search.device_bytes,
        changed=search.changed,
        outer_bytes=sent,
        loops=step.loop_choices,
        utilization=time.utilization(share, search.hardware),
    )


def _useful_flops(search: _Search, step: TrainStep) -> float:
    """Returns the FLOPs of a step that MFU counts, over all devices; 0 if they are not known."""
    config = search.config
    task = config.kind.task
    if task.item != "tokens":
        return search.work.useful_flops
    # As in the metrics of a run: a traced program does not tell which of its products are masked.
    length = task.items_per_sample(config.data)
    return useful_flops_per_token(step, length) * length * config.train.global_batch


def _larger(plan: TracedPlan, split: _Split, search: _Search) -> Candidate | None:
    """Returns a candidate with larger microbatches that may also fit; None if there is none.

    The first number of microbatches is a guess, which may be larger than needed.
    """
    one = plan.candidate
    counts = divisors(one.num_microbatches)
    if one.pp > 1 or one.remat or len(counts) == 1:
        return None
    count = counts[-2]
    grows = _activations(plan, split) * (one.num_microbatches / count - 1)
    if plan.reading.peak + _AT_LEAST * grows > search.usable:
        return None
    return dataclasses.replace(one, num_microbatches=count)


_AT_LEAST = 0.6
"""The smallest share of a step's temporaries, without gradients, that grows with its microbatch.
Others do not grow, such as weights in the compute dtype."""


def _activations(plan: TracedPlan, split: _Split) -> float:
    return max(0.0, plan.reading.temporaries - split.gradients)


def _smaller(plan: TracedPlan, search: _Search, tried: int) -> Candidate | None:
    """Returns the next candidate to trace after one that does not fit; None if none is left."""
    one = plan.candidate
    reading = plan.reading
    available = search.usable - reading.state - reading.batch
    if available <= 0:
        return None
    # Activations for the backward pass grow with the samples of a microbatch.
    least = math.ceil(one.num_microbatches * reading.temporaries / available)
    more = more_microbatches(one, search.work, max(least, 2 * one.num_microbatches))
    if more is None or (tried >= _BEFORE_REMAT and not one.remat):
        return None if one.remat else dataclasses.replace(one, remat=True)
    return more


def _with_outer_step(
    time: StepCost, step: Any, reading: Reading, search: _Search, outer: SlowReplicas | None
) -> tuple[StepCost, float]:
    """Adds a step's share of an outer step to its time; also returns that share of the bytes."""
    if outer is None:
        return time, 0.0
    readings = [
        read_program(program, arguments, len(arguments), reading.mesh, search.platform)
        for program, arguments in trace_outer_steps(step)
    ]
    # Nothing else runs during an outer step.
    waits = [one.step_time(search.hardware, search.work.policy.compute) for one in readings]
    waited = sum(one.communication for one in waits) / outer.every
    sent = sum(one.wire_bytes for one in readings) / outer.every
    communication = time.communication + waited
    exposed = time.exposed + waited
    return dataclasses.replace(time, communication=communication, exposed=exposed), sent


def _time(reading: Reading, candidate: Candidate, search: _Search) -> StepCost:
    work = search.work
    hardware = search.hardware
    counted = {}
    if candidate.pp > 1:
        # A pipeline's actions are branches of a conditional, of which the traced count takes the
        # costliest in every tick. So it is an upper bound, and the count is that of other programs:
        # the loss on one device, or a step without a pipeline, whose mixture of experts may take
        # fewer products.
        whole = min(work.flops, search.flops.get(search.changed, math.inf))
        recomputed = 4 / 3 * whole / candidate.num_devices  # every stage is recomputed
        counted["flops"] = min(recomputed, reading.flops)
        sizes = candidate.pp, candidate.num_microbatches
        counted["idle"] = idle_share(candidate.schedule, *sizes, 1)
    return reading.step_time(hardware, work.policy.compute, **counted)


def _ranked(plans: list[TracedPlan]) -> list[TracedPlan]:
    """Sorts plans that fit by time, and ties by simplicity; the others follow, sorted by memory."""
    remaining = sorted(
        plans, key=lambda p: (not p.fits, p.time.total if p.fits else p.reading.peak)
    )
    ranked: list[TracedPlan] = []
    while remaining:
        limit = (1 + TIE) * remaining[0].time.total
        tied = [p for p in remaining if p.fits and p.time.total <= limit] or remaining[:1]
        ranked.append(min(tied, key=lambda p: (_complexity(p.candidate), p.candidate.remat)))
        remaining.remove(ranked[-1])
    return ranked


def plan_here(config: RunConfig, world: World) -> ConfigPlans | None:
    """Plans a config for the machine of a world; None if the chip is unknown or planning fails."""
    chip = machine_of(world.mesh)
    try:
        return None if chip is None else plan_config(config, hardware(chip.name), world.size)
    except AxonDistError:
        return None


def _measured(plan: TracedPlan, target: str | None) -> TracedPlan:
    config = plan.config
    if target is not None and target.startswith("cpu:"):
        emulated = dataclasses.replace(config.devices, emulate=plan.candidate.num_devices)
        config = dataclasses.replace(config, devices=emulated)
        target = None
    return dataclasses.replace(plan, measured=examine(config, target).report)
