"""Bytes that a device sends in a step: closed forms, one per parallelism.

A ring of N ranks moves `(N-1)/N` of an array per all-gather or reduce-scatter, and twice that per
all-reduce (Patarasuk and Yuan, 2009). P is the number of parameters, b the bytes of an element, A
the bytes of a microbatch's residual stream, `samples * positions * width * b`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from types import MappingProxyType

from ..core.errors import ConfigError, did_you_mean
from .arrangement import ALIASES


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How often a data-parallel strategy moves the parameters around the ring.

    Args:
        gathers: all-gathers of the parameters in a step.
        scatters: reduce-scatters of the gradients in a step.
        gathers_each: whether the gathers happen for every microbatch.
        scatters_each: whether the reductions do.
    """

    gathers: int
    scatters: int
    gathers_each: bool = False
    scatters_each: bool = False

    def count(self, num_microbatches: int) -> tuple[int, int]:
        """All-gathers and reduce-scatters of a step."""
        return (
            self.gathers * (num_microbatches if self.gathers_each else 1),
            self.scatters * (num_microbatches if self.scatters_each else 1),
        )


ROUNDS: MappingProxyType[str, Rounds] = MappingProxyType(
    {
        # An all-reduce is a reduce-scatter and an all-gather.
        "ddp": Rounds(1, 1),
        "zero1": Rounds(1, 1),
        "shard_grad_op": Rounds(1, 1, scatters_each=True),
        "full_shard": Rounds(2, 1, gathers_each=True, scatters_each=True),
        "hybrid_shard": Rounds(2, 1, gathers_each=True, scatters_each=True),
    }
)
"""The data-parallel strategies; `full_shard` gathers again in the backward pass."""

MOVES_ACTIVATIONS = MappingProxyType(
    {
        "tensor": "tensor_bytes",
        "tp": "tensor_bytes",
        "sequence": "sequence_bytes",
        "pipeline": "pipeline_bytes",
        "pp": "pipeline_bytes",
        "context": "context_bytes",
        "cp": "context_bytes",
        "expert": "expert_bytes",
        "ep": "expert_bytes",
    }
)


def comm_bytes(
    strategy: str,
    num_params: float,
    num_ranks: int,
    bytes_per_element: float = 4,
    *,
    num_microbatches: int = 1,
    num_replicas: int = 1,
) -> float:
    """Bytes that each rank sends in a step of a data-parallel strategy.

    DDP and ZeRO-1 move `2 (N-1)/N P b`; ZeRO-2 the same, its reductions once per microbatch;
    ZeRO-3 (`full_shard`) `3 (N-1)/N P b` per microbatch; hybrid sharding the same within its N
    ranks, and an all-reduce of the shards, `2 (R-1)/R P b / N`, between R replicas.

    Args:
        strategy: a name such as `"ddp"`, `"zero1"`, `"shard_grad_op"`, `"full_shard"`.
        num_params: P.
        num_ranks: N, the ranks that split or replicate the model.
        bytes_per_element: b; the default is float32.
        num_microbatches: microbatches that a step accumulates.
        num_replicas: R, for `hybrid_shard` alone.

    Returns:
        Bytes per rank and step.

    Raises:
        ConfigError: for an unknown strategy, one that moves activations, a size that is not finite
            and positive, or a count that is not an integer of at least 1.

    Example:
        >>> [comm_bytes("ddp", 1, n, 1) for n in (2, 4, 8)]
        [1.0, 1.5, 1.75]
        >>> [comm_bytes("fsdp", 1, n, 1) for n in (2, 4, 8)]
        [1.5, 2.25, 2.625]

    Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 7.
    """
    name = _known(strategy)
    _check_sizes(num_params=num_params, bytes_per_element=bytes_per_element)
    _check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches, num_replicas=num_replicas)
    if num_replicas > 1 and name != "hybrid_shard":
        raise ConfigError(
            f"{strategy} got num_replicas={num_replicas}; only hybrid_shard has replicas besides "
            "its ranks, so leave it out or name hybrid_shard"
        )
    size = num_params * bytes_per_element
    rounds = sum(ROUNDS[name].count(num_microbatches))
    inside = rounds * around(num_ranks) * size
    return inside + 2 * around(num_replicas) * size / num_ranks


def tensor_bytes(
    activation_bytes: float, num_layers: int, num_ranks: int, *, remat: bool = False
) -> float:
    """Bytes that each rank sends for tensor parallelism, per microbatch.

    Two all-reduces of the residual stream in the forward pass of a block and two in the backward
    pass: `8 (t-1)/t A` per block, and half as much again where blocks are recomputed.

    Args:
        activation_bytes: A.
        num_layers: blocks on a rank.
        num_ranks: t.
        remat: whether blocks are recomputed.

    Example:
        >>> tensor_bytes(1.0, num_layers=2, num_ranks=4)
        12.0

    Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
    """
    _check_sizes(activation_bytes=activation_bytes)
    _check_counts(num_layers=num_layers, num_ranks=num_ranks)
    return (12 if remat else 8) * around(num_ranks) * activation_bytes * num_layers


def sequence_bytes(
    activation_bytes: float, num_layers: int, num_ranks: int, *, remat: bool = False
) -> float:
    """Bytes that each rank sends for tensor and sequence parallelism, per microbatch.

    Each all-reduce becomes a reduce-scatter and an all-gather, which move the same; the backward
    pass gathers the inputs of two products again, `2 (t-1)/t A` per block.

    Args:
        activation_bytes: A.
        num_layers: blocks on a rank.
        num_ranks: t.
        remat: whether blocks are recomputed.

    Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
    """
    reduced = tensor_bytes(activation_bytes, num_layers, num_ranks, remat=remat)
    return reduced + 2 * around(num_ranks) * activation_bytes * num_layers


def pipeline_bytes(activation_bytes: float, chunks: int = 1) -> float:
    """Bytes that a rank in the middle of a pipeline sends per microbatch: `2 v A`.

    One residual stream forward and one gradient back at each of the boundaries of its stages. Over
    a step that is `2 v` times the batch's residual stream, however it is cut into microbatches.

    Args:
        activation_bytes: A.
        chunks: stages per rank, v.
    """
    _check_sizes(activation_bytes=activation_bytes)
    _check_counts(chunks=chunks)
    return 2 * chunks * activation_bytes


def context_bytes(
    kv_bytes: float, num_layers: int, num_ranks: int, query_bytes: float | None = None
) -> float:
    """Bytes that each rank sends for ring attention, per microbatch.

    Forward keys and values go once around the ring, `2 (c-1)/c K`. Backward either both do with
    their gradients, `4 (c-1)/c K`, or queries with their cotangents and gradients,
    `3 (c-1)/c Q`: the lighter of both (two float32 numbers a head and position are left out). What
    is recomputed is not sent again.

    Args:
        kv_bytes: K, the bytes of the keys of the whole sequence in one layer; values are as many.
        num_layers: blocks on a rank.
        num_ranks: c.
        query_bytes: Q, the bytes of the queries; None for as many heads of keys as of queries.

    Example:
        >>> context_bytes(1.0, num_layers=1, num_ranks=4)
        3.75
        >>> context_bytes(1.0, num_layers=1, num_ranks=4, query_bytes=4.0)  # four share a head
        4.5

    Source: Liu et al., Ring Attention, arXiv:2310.01889.
    """
    _check_sizes(kv_bytes=kv_bytes)
    _check_sizes(query_bytes=kv_bytes if query_bytes is None else query_bytes)
    _check_counts(num_layers=num_layers, num_ranks=num_ranks)
    backward = min(4 * kv_bytes, 3 * (kv_bytes if query_bytes is None else query_bytes))
    return (2 * kv_bytes + backward) * around(num_ranks) * num_layers


def expert_bytes(
    token_bytes: float,
    num_layers: int,
    num_ranks: int,
    per_token: int = 1,
    capacity: float | None = None,
    *,
    remat: bool = False,
) -> float:
    """Bytes that each rank sends for expert parallelism, per microbatch: the form that sends fewer.

    A ring, which brings all tokens to every rank and sums the results back, sends `4 (c-1) A` a
    layer in both passes; slots that are exchanged all to all, `4 (c-1)/c k f A`. Without a capacity
    there is a slot for every token at each of at least c experts, which is no fewer. Layers that
    are recomputed, as in stages of a pipeline, send half as much again.

    Args:
        token_bytes: A, the bytes of the tokens of a rank.
        num_layers: layers with experts.
        num_ranks: c.
        per_token: k, the experts of a token.
        capacity: f, how many times its even share of the tokens an expert takes; None for all.
        remat: whether layers are recomputed.

    Example:
        >>> expert_bytes(1.0, 1, 4), expert_bytes(1.0, 1, 4, per_token=2, capacity=1.25)
        (12.0, 7.5)

    Source: Lepikhin et al., GShard, arXiv:2006.16668.
    """
    _check_sizes(token_bytes=token_bytes)
    _check_counts(num_layers=num_layers, num_ranks=num_ranks, per_token=per_token)
    slots = num_ranks if capacity is None else min(num_ranks, per_token * capacity)
    return (6 if remat else 4) * around(num_ranks) * slots * token_bytes * num_layers


def around(num_ranks: int) -> float:
    """The share of an array that a rank sends in one pass around the ring: `(N-1)/N`."""
    return (num_ranks - 1) / num_ranks


def _known(strategy: str) -> str:
    name = ALIASES.get(strategy, strategy)
    if name in MOVES_ACTIVATIONS:
        raise ConfigError(
            f"{strategy!r} moves activations and not parameters; ask {MOVES_ACTIVATIONS[name]}()"
        )
    if name not in ROUNDS:
        raise ConfigError(
            f"unknown strategy {strategy!r}.{did_you_mean(strategy, [*ROUNDS, *ALIASES])}"
        )
    return name


def _check_sizes(**sizes: float) -> None:
    for name, value in sizes.items():
        if not (isinstance(value, numbers.Real) and 0 < value < math.inf):
            raise ConfigError(f"got {name}={value!r}; it must be a finite number above 0")


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not is_integer or value < 1:
            raise ConfigError(f"got {name}={value!r}; it must be an integer of at least 1")
