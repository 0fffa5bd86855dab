"""Bytes per device of parameters, gradients and optimizer state under a strategy."""

from __future__ import annotations

import dataclasses

import jax
import optax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ..core.checks import check_fields
from ..core.errors import ConfigError
from ..core.own_context import in_own_context
from ..core.tree import bytes_per_device, num_bytes, num_params
from ..core.typing import ArrayTree, Path, PyTree, Shape
from ..nn.layout import without
from ..ops.precision import cast_floating
from ..sharding import Decision, HasShape, Policy, explain_optimizer
from ..sharding.policy import Wrapped
from .strategy import Strategy, with_masters


@dataclasses.dataclass(frozen=True)
class FSDPMemoryStats:
    """Bytes of the training state on the fullest device.

    Args:
        total_params: parameters of the whole model.
        param_memory_bytes: bytes of parameters on a device.
        grad_memory_bytes: bytes of gradients on a device; see `estimate` for when.
        optim_memory_bytes: bytes of optimizer state on a device.
        world_size: the number of devices.
        strategy: the name of the strategy.
        replicated_bytes: bytes of the three together on one device if nothing were split.

    Example:
        >>> stats = FSDPMemoryStats(5050, 5050, 5050, 10100, 4, "fsdp", 80800)
        >>> stats.total_memory_bytes, stats.memory_savings
        (20200, 0.75)
        >>> print(stats)
        fsdp total: 19.7 KiB (savings 75.0%)
    """

    total_params: int
    param_memory_bytes: int
    grad_memory_bytes: int
    optim_memory_bytes: int
    world_size: int
    strategy: str
    replicated_bytes: int

    def __post_init__(self) -> None:
        check_fields(self)

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
        """The same as `total_memory_mib`."""
        return self.total_memory_mib

    @property
    def memory_savings(self) -> float:
        """The share of the replicated bytes that the strategy saves, 0 to 1."""
        if not self.replicated_bytes:
            return 0.0
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


@in_own_context
def estimate(
    strategy: Strategy,
    params: ArrayTree,
    mesh: Mesh,
    optimizer: optax.GradientTransformation | None = None,
    grad_dtype: DTypeLike | None = None,
    accumulate: int = 2,
) -> FSDPMemoryStats:
    """Estimates bytes per device before any array exists, leaf by leaf, from the policies.

    A leaf that stays whole, because none of its dims divides or because it is small, counts whole.
    If a step would shard its master weights, as ZeRO-1 and 2 do when compute is in a narrower
    dtype, parameters are counted as sharded. `measure` counts arrays that exist.

    Args:
        strategy: its policies decide what is split, and how many ways.
        params: arrays or `ShapeDtypeStruct`s.
        mesh: a mesh with named axes; no device is needed.
        optimizer: the optimizer whose state is counted; Adam by default.
        grad_dtype: the dtype in which gradients are kept; the parameters' by default.
        accumulate: microbatches per step. Above 1, as papers count, the gradients are those
            accumulated between microbatches (whole on every data-parallel rank if reduced once per
            step). With 1, they are those given to the optimizer, sharded like its moments.

    Returns:
        The bytes.

    Raises:
        ConfigError: the strategy has a pipeline.
    """
    if strategy.pipeline is not None:
        raise ConfigError(
            f"estimate got the strategy {strategy.name!r}, whose pipeline splits layers over "
            f"{strategy.pipeline.axis!r}; shapes do not tell which stage holds which parameter: "
            "build the step and read `inspect.memory(step.lower(batch).compile())`, or run "
            "`axon plan CONFIG`",
            code="estimate-of-a-pipeline",
        )
    if strategy.precision is not None:
        stored = strategy.precision.param
        params = jax.eval_shape(lambda tree: cast_floating(tree, stored), params)
        strategy = with_masters(strategy, frozenset(), stored)
    state = jax.eval_shape((optimizer or optax.adam(1e-3)).init, params)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, grad_dtype or x.dtype), params)
    grad_policy = strategy.opt_state
    if strategy.holds_whole_gradients(accumulate):
        axes = {*strategy.reduced_axes} - {*strategy.ungathered_axes}
        grad_policy = _NotOver(grad_policy, frozenset(axes))
    trees = ((strategy.params, params), (grad_policy, grads), (strategy.opt_state, state))
    # Step counts and other scalars of the optimizer are replicated and negligible.
    sizes = [num_bytes([leaf for leaf in jax.tree.leaves(tree) if leaf.shape]) for _, tree in trees]
    of_params, of_grads, moments = (_bytes_on(policy, params, tree, mesh) for policy, tree in trees)
    # Trees that live in host memory between steps take none of a device then.
    of_params = 0 if strategy.offload.params else of_params
    moments = 0 if strategy.offload.opt_state else moments
    total, name = num_params(params), strategy.name
    return FSDPMemoryStats(total, of_params, of_grads, moments, mesh.size, name, sum(sizes))


@in_own_context
def measure(
    strategy: Strategy, params: ArrayTree, grads: ArrayTree, opt_state: ArrayTree
) -> FSDPMemoryStats:
    """Measures bytes per device: the shards that the fullest device holds.

    Args:
        strategy: for its name.
        params: arrays on the devices.
        grads: arrays on the devices, such as from `TrainStep.gradients`.
        opt_state: arrays on the devices.

    Returns:
        The bytes, host memory not counted.

    Raises:
        ConfigError: when there are no arrays.
    """
    trees = (params, grads, opt_state)
    of_params, of_grads, moments = map(bytes_per_device, trees)
    total_bytes = num_bytes(trees)
    leaves = jax.tree.leaves(trees)
    if not leaves:
        raise ConfigError(
            "got no arrays to measure: params, grads and opt_state are all empty; give the arrays "
            "of a state, or take the estimate, which needs none",
            code="nothing-to-measure",
        )
    devices = leaves[0].sharding.device_set
    total, name = num_params(params), strategy.name
    return FSDPMemoryStats(total, of_params, of_grads, moments, len(devices), name, total_bytes)


@dataclasses.dataclass(frozen=True)
class _NotOver(Wrapped):
    """Shards as a policy does, but not over some axes: ranks along these hold whole gradients.

    Args:
        policy: the policy.
        axes: these axes.
    """

    axes: frozenset[str]

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides as the policy, and leaves the axes out."""
        decision = self.policy.decide(path, shape, mesh, taken)
        return dataclasses.replace(decision, spec=without(decision.spec, tuple(self.axes)))


def _bytes_on(policy: Policy, params: PyTree, tree: PyTree, mesh: Mesh) -> int:
    """Returns the bytes of a tree on one device."""
    rows = explain_optimizer(policy, params, tree, mesh).rows
    return sum(row.bytes_per_device for row in rows if row.shape)
