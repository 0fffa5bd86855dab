"""Every arrangement worth comparing on a number of devices."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ..mesh.chips import Hardware
from ..parallel import ZERO
from .arrangement import STAGES, Apart, Arrangement, arrange
from .workload import Workload

_MAX_MICROBATCH = 64


def candidates(
    work: Workload,
    num_devices: int,
    hardware: Hardware,
    apart: Apart | None = None,
    replicas: int = 1,
) -> Iterator[Arrangement]:
    """Yields the arrangements whose sizes divide the devices, the heads, the layers and the batch.

    Tensor, context and expert parallelism stay inside a node. In a pipeline, whose ranks gather
    their stage once per step, sharding moves no more than replicating, so replicas are always
    sharded there.

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
    experts = [size for size in sizes if work.shape.num_experts % size == 0]
    for tp, pp, cp, ep in itertools.product(sizes, sizes, sizes, experts):
        split = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
        if num_devices % math.prod(split.values()) or not _splits(work, split, hardware):
            continue
        ranks = num_devices // math.prod(split.values())
        if work.global_batch % (ranks * ep) == 0:
            local = work.global_batch // (ranks * ep)
            for base in _strategies(ranks, split, hardware):
                yield from _microbatches(base, local)


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
    return together and inside and work.shape.divides(**split)


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


def _microbatches(base: Arrangement, local: int) -> Iterator[Arrangement]:
    fields = {name: getattr(base, name) for name in Arrangement.__dataclass_fields__}
    sizes = [size for size in divisors(min(local, _MAX_MICROBATCH)) if local % size == 0]
    for size, remat in itertools.product(sizes, (False, True)):
        yield Arrangement(**{**fields, "num_microbatches": local // size, "remat": remat})
