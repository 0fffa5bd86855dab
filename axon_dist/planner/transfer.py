"""What an arrangement moves in a step: one `Transfer` per axis and kind, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..mesh.chips import Hardware
from ..schedule import SCHEDULES, PipelineSchedule
from .arrangement import Arrangement
from .traffic import (
    ROUNDS,
    around,
    context_bytes,
    expert_bytes,
    pipeline_bytes,
    sequence_bytes,
    tensor_bytes,
)
from .workload import Workload


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Equal collectives over one axis.

    Args:
        axis: the mesh axis.
        kind: what moves, in words.
        wire_bytes: what a device sends in a step, bytes.
        num_calls: collectives in a step; each costs the latency of its ring.
        num_ranks: members of the group.
        stride: devices between neighbours of the group.
        hides: whether there is compute that does not wait for it.
    """

    axis: str
    kind: str
    wire_bytes: float
    num_calls: int
    num_ranks: int
    stride: int
    hides: bool

    def seconds(self, hardware: Hardware) -> float:
        """The alpha-beta time: latency of all calls, and bytes over bandwidth."""
        latency = hardware.ring_latency(self.num_ranks, self.stride)
        return self.num_calls * latency + self.wire_bytes / hardware.bandwidth(
            self.num_ranks, self.stride
        )


def transfers(arrangement: Arrangement, work: Workload) -> tuple[Transfer, ...]:
    """Lists what moves in a step.

    Gathers and reductions of layers hide behind the compute of other layers. The parameters that
    ZeRO-1 and 2 gather after the optimizer hide behind nothing, and neither do the activations of
    tensor parallelism. A pipeline gathers its stage once per step.

    Args:
        arrangement: axis sizes, what data-parallel ranks split, what is recomputed.
        work: the model and its batch.

    Returns:
        The transfers; none over an axis of size 1.

    Example:
        >>> from axon_dist.planner import arrange, guess_shape
        >>> work = Workload(shape=guess_shape(1e9), global_batch=8)
        >>> [(t.axis, t.kind, t.wire_bytes) for t in transfers(arrange("ddp", 2), work)]
        [('dp', 'gradients', 4000000000.0)]
    """
    kinds = (_data, _context, _experts, _tensor, _pipeline, _meetings)
    found = [transfer for kind in kinds for transfer in kind(arrangement, work)]
    return tuple(transfer for transfer in found if transfer.num_ranks > 1)


def microbatch_size(arrangement: Arrangement, work: Workload) -> int:
    """Samples that a data-parallel rank computes at a time, rounded up."""
    return -(-work.global_batch // (arrangement.data_ranks * arrangement.num_microbatches))


def _data(plan: Arrangement, work: Workload) -> Iterator[Transfer]:
    params = work.params_beside(plan.ep) / plan.model_ranks
    layers = -(-work.shape.num_layers // plan.pp)
    # A pipeline accumulates whole gradients of its stage, and gathers it once.
    rounds = 1 if plan.pp > 1 else plan.num_microbatches
    gathers, scatters = ROUNDS[plan.strategy].count(rounds)
    gathers = 1 if plan.pp > 1 and plan.splits_params else gathers
    reduced = params * work.policy.reduce_dtype.itemsize
    ranks, axis = plan.num_shards, "fsdp" if plan.fsdp > 1 else "dp"
    stride = plan.cp * plan.ep * plan.tp
    send = lambda kind, size, calls, hides=True: Transfer(
        axis, kind, calls * around(ranks) * size, calls * layers, ranks, stride, hides
    )
    if plan.strategy == "ddp":
        yield send("gradients", reduced, 2)
        return
    yield send("gradients", reduced, scatters)
    if plan.splits_params:
        yield send("layers", params * work.weight_bytes, gathers)
    else:
        kept = work.policy.compute if plan.keeps_masters(work.policy) else work.policy.param
        yield send("parameters", params * kept.itemsize, gathers, hides=False)
    if plan.strategy == "hybrid_shard":
        wire = 2 * around(plan.dp) * reduced / plan.fsdp
        apart = stride * plan.fsdp
        yield Transfer("dp", "gradients", wire, 2 * layers, plan.dp, apart, True)


def _context(plan: Arrangement, work: Workload) -> Iterator[Transfer]:
    layers = -(-work.shape.num_layers // plan.pp)
    # Keys are counted as wide as the residual stream: fewer heads of them send less.
    keys = work.residual_bytes(microbatch_size(plan, work)) / plan.tp
    count = plan.num_microbatches
    wire = context_bytes(keys, layers, plan.cp) * count if keys else 0.0
    calls = 3 * layers * count
    stride = plan.tp * plan.ep
    yield Transfer("cp", "keys and values", wire, calls, plan.cp, stride, True)


def _experts(plan: Arrangement, work: Workload) -> Iterator[Transfer]:
    tokens = work.residual_bytes(microbatch_size(plan, work)) / plan.cp
    if plan.ep == 1 or not tokens:
        return
    layers, again = -(-work.shape.num_layers // plan.pp), plan.pp > 1
    # Without a capacity slots for all are no fewer than the tokens of all.
    wire = expert_bytes(tokens, layers, plan.ep, remat=again) * plan.num_microbatches
    calls = (6 if again else 4) * layers * plan.num_microbatches
    yield Transfer("ep", "tokens", wire, calls, plan.ep, plan.tp, False)
    # What is no expert has its gradients summed over these ranks, too.
    others = (work.shape.num_params - work.shape.expert_params) / plan.model_ranks
    reduced = 2 * around(plan.ep) * others * work.policy.reduce_dtype.itemsize / plan.shards[1]
    calls = 2 * layers
    yield Transfer("ep", "gradients", reduced, calls, plan.ep, plan.tp, True)


def _tensor(plan: Arrangement, work: Workload) -> Iterator[Transfer]:
    layers = -(-work.shape.num_layers // plan.pp)
    residual = work.residual_bytes(microbatch_size(plan, work)) / plan.cp
    if not residual:
        return
    count = sequence_bytes if plan.sequence else tensor_bytes
    again = plan.remat or plan.pp > 1
    wire = count(residual, layers, plan.tp, remat=again) * plan.num_microbatches
    # Each all-reduce is a reduce-scatter and an all-gather.
    calls = (12 if again else 8) * layers * plan.num_microbatches
    yield Transfer("tp", "activations", wire, calls, plan.tp, 1, False)


def _pipeline(plan: Arrangement, work: Workload) -> Iterator[Transfer]:
    residual = work.residual_bytes(microbatch_size(plan, work)) / plan.cp
    if not residual:
        return
    # Neighbouring stages: a pair, whatever the length of the pipeline.
    pair, stride = min(plan.pp, 2), plan.num_devices // plan.pp
    chunks = SCHEDULES[PipelineSchedule(plan.schedule)].chunks
    wire = pipeline_bytes(residual, chunks) * plan.num_microbatches
    calls = 2 * chunks * plan.num_microbatches
    yield Transfer("pp", "activations", wire, calls, pair, stride, False)


def _meetings(plan: Arrangement, work: Workload) -> Iterator[Transfer]:
    if plan.apart is None:
        return
    # Of every parameter the owners of its shard meet, in float32; a step's share of that.
    held = 4 * work.params_beside(plan.ep) / (plan.model_ranks * plan.shards[0])
    wire = 2 * around(plan.replicas) * held / plan.apart.every
    stride = plan.num_devices // plan.replicas
    yield Transfer(plan.apart.axis, "parameters", wire, 1, plan.replicas, stride, False)
