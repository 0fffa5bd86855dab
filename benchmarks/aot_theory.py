"""The fewest bytes that a training step can send: ring bytes per device, by arithmetic.

With P parameters in bfloat16 on a device, n ranks that split samples, and A bytes of the residual
stream of one microbatch on a device:

* FSDP: `(n-1)/n` of two all-gathers of the blocks, one of embedding and head, and one
  reduce-scatter of the gradients; ZeRO-1 and 2 a reduce-scatter and one all-gather; DDP one
  all-reduce, `2 (n-1)/n P`.
* Tensor parallelism over t ranks: a sum moves `2 (t-1)/t A`, a gather or a scatter half of that; a
  layer under full rematerialisation has 10 halves, 11 with sequence parallelism, and token table
  and head have 4.
* A ring of c ranks: keys and values once, and backwards the lighter of four arrays as wide as the
  keys and three as wide as the queries, with two numbers a query and head; the residual stream is
  distributed once, there and back.
* Experts over e ranks, without capacity: tokens are gathered, again for the backward pass, and as
  cotangents; results and gradients of tokens scattered, each `(e-1) A`, and with each of the five
  the numbers and gates or their gradients. All that is no expert is reduced over the axis.
* A pipeline: forward and backward the residual stream of every microbatch, for each chunk of a
  rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from axon_dist.models import TransformerConfig, num_params

_ITEM = 2
"""Bytes of a bfloat16."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A step of which the bytes are counted.

    Args:
        config: the model.
        shape: sizes of the mesh axes.
        strategy: what is done over the axes of samples.
        length: positions of a sequence; one sequence for each rank of samples and microbatch.
        microbatches: of a step.
        per: how often gradients are reduced, a `step` or a `microbatch`.
        sequence: whether residuals are split over `tp`.
        chunks: stages per rank of a pipeline.
    """

    config: TransformerConfig
    shape: Mapping[str, int]
    strategy: str
    length: int
    microbatches: int = 1
    per: str = "microbatch"
    sequence: bool = False
    chunks: int = 1

    def size(self, *axes: str) -> int:
        """How many ranks some axes have together."""
        found = 1
        for axis in axes:
            found *= self.shape.get(axis, 1)
        return found

    @property
    def activations(self) -> int:
        """Bytes of the residual stream of a microbatch on a rank."""
        return self.length // self.size("cp") * self.config.width * _ITEM

    @property
    def layers(self) -> int:
        """Layers that a rank computes."""
        return -(-self.config.num_layers // self.size("pp"))

    @property
    def dense(self) -> int:
        """Parameters that belong to no expert."""
        return num_params(self.config) - self.sparse

    @property
    def sparse(self) -> int:
        """Parameters of all experts, gated ones of three matrices."""
        config, experts = self.config, self.config.experts
        if experts is None:
            return 0
        return config.num_layers * experts.count * 3 * config.width * config.expert_size


def theory(work: Work) -> dict[str, float]:
    """Bytes per device and step, by what they are for; what an axis of one rank would send is 0."""
    found = {
        "data": _data(work),
        "tp": _tensor(work),
        "cp": _context(work),
        "ep": _experts(work),
        "pp": _pipeline(work),
    }
    return {name: value for name, value in found.items() if value}


def _data(work: Work) -> float:
    config, strategy = work.config, work.strategy
    # The state is split over positions, too, and gradients are reduced over them.
    ranks = work.size("dp", "fsdp", "cp") if not work.size("pp") > 1 else work.size("dp", "fsdp")
    ring = (ranks - 1) / ranks
    on_rank = work.size("tp", "pp")
    params = _ITEM * (work.dense + work.sparse / work.size("ep")) / on_rank
    root = _ITEM * config.vocab_size * config.width * (1 if config.tied_head else 2) / on_rank
    times = work.microbatches if work.per == "microbatch" else 1
    if work.size("pp") > 1:
        # A stage is gathered once, and reduced once.
        return ring * 2 * params
    if strategy in ("ddp", "no_shard"):
        return 2 * ring * params * times
    if strategy == "zero1":
        return ring * 2 * params
    if strategy == "zero2":
        return ring * (params * times + params)
    if strategy == "hybrid":
        shards, copies = work.size("fsdp"), work.size("dp")
        inner, across = (shards - 1) / shards, 2 * (copies - 1) / copies
        return times * (inner * (3 * params - root) + across * params / shards)
    gathers = times * (2 * params - root) if work.per == "microbatch" else params
    return ring * (gathers + times * params)


def _tensor(work: Work) -> float:
    ranks = work.size("tp")
    half = (ranks - 1) / ranks * work.activations
    halves = (11 if work.sequence else 10) * work.layers + 4
    return work.microbatches * halves * half


def _context(work: Work) -> float:
    ranks, config = work.size("cp"), work.config
    if ranks == 1:
        return 0
    positions = work.length // ranks / work.size("tp")
    queries = positions * config.num_heads * config.key_size * _ITEM
    keys = queries * config.kv_heads / config.num_heads
    numbers = 2 * 4 * positions * config.num_heads
    layer = (ranks - 1) * (2 * keys + min(4 * keys, 3 * queries + numbers))
    return work.microbatches * (work.layers * layer + 2 * work.activations)


def _experts(work: Work) -> float:
    ranks, experts = work.size("ep"), work.config.experts
    if ranks == 1 or experts is None:
        return 0
    # A number of four bytes for each choice of an expert, and its gate.
    rows = work.activations + 4 * work.length * experts.per_token
    dense = 2 * (ranks - 1) / ranks * _ITEM * work.dense / work.size("fsdp")
    return work.microbatches * (work.layers * (ranks - 1) * 5 * rows + dense)


def _pipeline(work: Work) -> float:
    if work.size("pp") == 1:
        return 0
    split = work.size("tp") if work.sequence else 1
    return 2 * work.microbatches * work.chunks * work.activations / split
