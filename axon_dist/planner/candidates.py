"""Every arrangement worth comparing on a number of devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ..core.errors import ScheduleError
from ..mesh.chips import Hardware
from ..parallel import ZERO
from ..schedule import PipelineSchedule, build_schedule
from .arrangement import STAGES, Arrangement, SlowReplicas, arrange
from .reading import idle_share
from .workload import Workload

_TURNS = 4
"""Microbatches for each stage of a pipeline, from which on it idles little."""


def candidates(
    work: Workload,
    num_devices: int,
    hardware: Hardware,
    apart: SlowReplicas | None = None,
    replicas: int = 1,
) -> Iterator[Arrangement]:
    """Yields the arrangements whose sizes divide the devices, the experts and the batch.

    Tensor, context and expert parallelism stay inside a node. In a pipeline, whose ranks gather
    their stage once per step, sharding moves no more than replicating, so replicas are always
    sharded there. Only a pipeline has several microbatches, and nothing is recomputed: whether a
    step needs that, its trace says.

    Args:
        work: the model and its batch.
        num_devices: all of them are used.
        hardware: how many devices a node has.
        apart: how replicas over slow links train on their own; None for one model.
        replicas: how many of them.

    Yields:
        Arrangements over `num_devices`; none where the replicas do not divide them and the batch.
    """
    if apart is not None:
        if replicas > 1 and not (num_devices % replicas or work.global_batch % replicas):
            share = dataclasses.replace(work, global_batch=work.global_batch // replicas)
            for one in candidates(share, num_devices // replicas, hardware):
                # A pipeline beside replicas that train apart is refused.
                if one.pp == 1:
                    yield dataclasses.replace(one, apart=apart, replicas=replicas)
        return
    sizes = divisors(num_devices)
    experts = [size for size in sizes if work.num_experts % size == 0]
    for tp, pp, cp, ep in itertools.product(sizes, sizes, sizes, experts):
        split = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
        if num_devices % math.prod(split.values()) or not _splits(work, split, hardware):
            continue
        ranks = num_devices // math.prod(split.values())
        if work.global_batch % (ranks * ep) == 0:
            local = work.global_batch // (ranks * ep)
            for base in _strategies(ranks, split, hardware):
                yield _with_turns(base, local, work.num_layers)


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending.

    Example:
        >>> divisors(12)
        (1, 2, 3, 4, 6, 12)
    """
    return tuple(i for i in range(1, number + 1) if number % i == 0)


def _splits(work: Workload, split: dict[str, int], hardware: Hardware) -> bool:
    # The stages of a pipeline take turns, and a ring of positions needs all its ranks at once.
    together = split["pp"] == 1 or split["cp"] == 1
    inside = split["tp"] * split["cp"] * split["ep"] <= (hardware.node_size or 8)
    return together and inside and work.divides(**split)


def _strategies(ranks: int, split: dict[str, int], hardware: Hardware) -> Iterator[Arrangement]:
    model = {**split, "sequence": split["tp"] > 1}
    if ranks == 1:
        yield Arrangement(strategy="ddp", **model)
        return
    for name in STAGES:
        if split["pp"] > 1 and not ZERO[STAGES[name]].params:
            continue
        if name != "hybrid_shard":
            yield arrange(name, ranks, **model)
        elif max(split.values()) == 1 and 1 < hardware.node_size < ranks:
            size = hardware.node_size
            if ranks % size == 0:
                yield Arrangement(strategy=name, dp=ranks // size, fsdp=size)


def more_microbatches(plan: Arrangement, work: Workload, least: int) -> Arrangement | None:
    """The same arrangement with smaller microbatches.

    Args:
        plan: whose microbatches are too large.
        work: the model and its batch.
        least: how many microbatches there should be.

    Returns:
        With the fewest microbatches from there on; with as many as there are samples where those
        are fewer; None where it has these already.
    """
    counts = divisors(work.global_batch // plan.data_ranks)
    count = next((n for n in counts if n >= least), counts[-1])
    return (
        dataclasses.replace(plan, num_microbatches=count) if count > plan.num_microbatches else None
    )


def _with_turns(base: Arrangement, local: int, num_layers: int) -> Arrangement:
    """A pipeline with microbatches enough to keep it busy, and the schedule that idles least."""
    if base.pp == 1:
        return base
    counts = divisors(local)
    count = next((n for n in counts if n >= _TURNS * base.pp), counts[-1])
    best, least = base.schedule, math.inf
    for name in PipelineSchedule:
        try:
            chunks = build_schedule(name, base.pp, min(count, 2 * base.pp)).num_stages // base.pp
            idle = idle_share(name, base.pp, count)
        except ScheduleError:  # Sizes that it cannot do.
            continue
        if num_layers % (base.pp * chunks) == 0 and idle < least:
            best, least = name, idle
    return dataclasses.replace(base, num_microbatches=count, schedule=best)
