"""What is often overlooked in a plan, as data: one function per rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from ..core.words import byte_size
from ..mesh.chips import Hardware
from ..schedule import pipeline_advice
from .arrangement import Arrangement
from .memory import estimate_memory
from .plan import USABLE, Plan
from .workload import Workload

FAST_LINK = 25e9
"""Bytes/s per device from which gathering parameters in every step is usual: a port of HDR
InfiniBand; 10 GbE has 1.25e9."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Advice about a plan; nothing is wrong with it.

    Args:
        rule: the name of the rule.
        message: what was seen, and what to do.
    """

    rule: str
    message: str


def few_microbatches(plan: Plan, work: Workload, hardware: Hardware) -> Iterator[str]:
    """A pipeline with fewer than four microbatches per stage idles for long."""
    arrangement = plan.arrangement
    if arrangement.pp > 1:
        yield from pipeline_advice(arrangement.num_microbatches, arrangement.pp)


def slow_link(plan: Plan, work: Workload, hardware: Hardware) -> Iterator[str]:
    """Sharded parameters cross the wire in every microbatch."""
    arrangement = plan.arrangement
    for transfer in plan.transfers:
        bandwidth = hardware.bandwidth(transfer.num_ranks, transfer.stride)
        if transfer.kind == "layers" and bandwidth < FAST_LINK:
            yield (
                f"{arrangement.strategy} gathers parameters over links of {bandwidth / 1e9:.3g} "
                f"GB/s, and wants {FAST_LINK / 1e9:.3g} GB/s; use shard_grad_op or a pipeline "
                "over them, or hybrid_shard with the slow links between the replicas"
            )


def indivisible_batch(plan: Plan, work: Workload, hardware: Hardware) -> Iterator[str]:
    """Every rank and microbatch has the same number of samples."""
    divisor = plan.arrangement.data_ranks * plan.arrangement.num_microbatches
    if work.global_batch % divisor:
        yield (
            f"a global batch of {work.global_batch} does not divide over "
            f"{plan.arrangement.data_ranks} data-parallel ranks and "
            f"{plan.arrangement.num_microbatches} microbatches; make it a multiple of {divisor}, "
            f"such as {-(-work.global_batch // divisor) * divisor}"
        )


def forgotten_optimizer(plan: Plan, work: Workload, hardware: Hardware) -> Iterator[str]:
    """Parameters that fit on a device are a fraction of what training holds."""
    alone = estimate_memory(
        work.shape.num_params, Arrangement(), optimizer=work.cost, precision=work.precision
    )
    usable = USABLE * plan.device_bytes
    if alone.params <= usable < alone.states:
        yield (
            f"the parameters alone, {byte_size(alone.params)}, fit on one device, but with "
            f"gradients and optimizer state they are {byte_size(alone.states)}; replicas "
            "without sharding do not"
        )


RULES: tuple[Callable[[Plan, Workload, Hardware], Iterator[str]], ...] = (
    few_microbatches,
    slow_link,
    indivisible_batch,
    forgotten_optimizer,
)
"""The rules, in the order of their findings."""


def lint(plan: Plan, work: Workload, hardware: Hardware) -> tuple[Finding, ...]:
    """Applies every rule.

    Args:
        plan: what is planned.
        work: the model and its batch.
        hardware: FLOP/s by dtype, bytes/s of memory and links of one chip.

    Returns:
        What the rules have to say; empty where nothing stands out.

    Example:
        >>> from axon_dist.planner import arrange, evaluate, guess_shape, hardware
        >>> h100, work = hardware("h100"), Workload(shape=guess_shape(1e8), global_batch=12)
        >>> [finding.rule for finding in lint(evaluate(arrange("ddp", 8), work, h100), work, h100)]
        ['indivisible_batch']
    """
    return tuple(
        Finding(rule.__name__, message) for rule in RULES for message in rule(plan, work, hardware)
    )
