"""Bytes of the training state under a strategy: estimated from shapes, measured from arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from ..core.tree import num_params
from ..core.typing import Leaf, PyTree
from ..ops.precision import cast_floating
from ..sharding import Policy, Replicate, explain_optimizer
from .strategy import Strategy, with_masters


@dataclasses.dataclass(frozen=True)
class FSDPMemoryStats:
    """Bytes of the training state on the fullest device.

    Args:
        total_params: parameters of the whole model.
        param_memory_bytes: bytes of parameters on a device.
        grad_memory_bytes: bytes of gradients on a device, see `estimate` for when.
        optim_memory_bytes: bytes of optimizer state on a device.
        world_size: how many devices.
        strategy: the name of the strategy.
        replicated_bytes: bytes of the three on one device if nothing were split.

    Example:
        >>> stats = FSDPMemoryStats(5050, 5050, 5050, 10100, 4, "full_shard", 80800)
        >>> stats.total_memory_bytes, stats.memory_savings
        (20200, 0.75)
        >>> print(stats)
        full_shard total: 19.7 KiB (savings 75.0%)
    """

    total_params: int
    param_memory_bytes: int
    grad_memory_bytes: int
    optim_memory_bytes: int
    world_size: int
    strategy: str
    replicated_bytes: int

    @property
    def total_memory_bytes(self) -> int:
        """Parameters, gradients and optimizer state together."""
        return self.param_memory_bytes + self.grad_memory_bytes + self.optim_memory_bytes

    @property
    def total_memory_mib(self) -> float:
        """The total in MiB, 2**20 bytes."""
        return self.total_memory_bytes / 2**20

    @property
    def total_memory_mb(self) -> float:
        """The total in MiB, under the name that it has elsewhere."""
        return self.total_memory_mib

    @property
    def memory_savings(self) -> float:
        """The share of the replicated bytes that the strategy saves, 0 to 1."""
        return 1 - self.total_memory_bytes / self.replicated_bytes

    def __str__(self) -> str:
        return (
            f"{self.strategy} total: {format_bytes(self.total_memory_bytes)} "
            f"(savings {self.memory_savings:.1%})"
        )


def format_bytes(count: float) -> str:
    """Writes bytes in the largest binary unit that leaves at least one.

    Example:
        >>> format_bytes(20200), format_bytes(3 * 2**30)
        ('19.7 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def estimate(
    strategy: Strategy,
    params: PyTree,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
    grad_dtype: Any = None,
    accumulate: int = 2,
) -> FSDPMemoryStats:
    """Bytes per device before any array exists: leaf by leaf, as the policies lay them out.

    A leaf that stays whole, because none of its dims divides or because it is small, counts whole.
    Parameters that a step would keep as split masters, as ZeRO-1 and 2 do under a precision that
    computes in a narrower dtype, are counted so. `measure` counts the arrays that there are.

    Args:
        strategy: its policies say what is split, and how many ways.
        params: arrays or `ShapeDtypeStruct`s.
        mesh: anything with named axes; no device is needed.
        optimizer: whose state is counted; Adam by default.
        grad_dtype: the dtype that gradients are kept in; the parameters' by default.
        accumulate: microbatches per step. With several, as papers count, the gradients are those
            held from one to the next, which a reduction once per step leaves whole on every rank;
            with 1 they are what the optimizer is given, split like its moments.

    Returns:
        The bytes.
    """
    if strategy.precision is not None:
        stored = strategy.precision.param
        params = jax.eval_shape(lambda tree: cast_floating(tree, stored), params)
        strategy = with_masters(strategy, frozenset(), stored)
    state = jax.eval_shape((optimizer or optax.adam(1e-3)).init, params)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, grad_dtype or x.dtype), params)
    held = Replicate() if strategy.holds_whole_gradients(accumulate) else strategy.opt_state
    trees = ((strategy.params, params), (held, grads), (strategy.opt_state, state))
    # Counts and other scalars of the optimizer are whole everywhere and weigh nothing.
    whole = [sum(_bytes(leaf) for leaf in jax.tree.leaves(tree) if leaf.shape) for _, tree in trees]
    sizes = [_held(policy, params, tree, mesh) for policy, tree in trees]
    return _stats(strategy, params, sizes, mesh.size, sum(whole))


def measure(
    strategy: Strategy, params: PyTree, grads: PyTree, opt_state: PyTree
) -> FSDPMemoryStats:
    """Bytes per device as they are: the shards that the fullest device holds.

    Args:
        strategy: for its name.
        params: arrays on the devices.
        grads: arrays on the devices, such as from `TrainStep.gradients`.
        opt_state: arrays on the devices.

    Returns:
        The bytes, host memory not counted.
    """
    trees = (params, grads, opt_state)
    sizes = [device_bytes(jax.tree.leaves(tree)) for tree in trees]
    whole = sum(_bytes(leaf) for tree in trees for leaf in jax.tree.leaves(tree))
    devices = jax.tree.leaves(params)[0].sharding.device_set
    return _stats(strategy, params, sizes, len(devices), whole)


def _stats(
    strategy: Strategy, params: PyTree, sizes: list[int], world_size: int, whole: int
) -> FSDPMemoryStats:
    held, grads, optim = sizes
    name = strategy.name
    return FSDPMemoryStats(num_params(params), held, grads, optim, world_size, name, whole)


def device_bytes(leaves: Iterable[jax.Array]) -> int:
    """Bytes of arrays in device memory on the device that holds most."""
    held: dict[Any, int] = {}
    for leaf in leaves:
        on_host = leaf.sharding.memory_kind in ("pinned_host", "unpinned_host")
        for shard in [] if on_host else leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return max(held.values(), default=0)


def _held(policy: Policy, params: PyTree, tree: PyTree, mesh: Mesh) -> int:
    """The bytes of a tree on one device."""
    rows = explain_optimizer(policy, params, tree, mesh).rows
    return sum(row.bytes_per_device for row in rows if row.shape)


def _bytes(leaf: Leaf) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
