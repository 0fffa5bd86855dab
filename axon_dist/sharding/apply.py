"""Applies policies to trees: shardings of parameters and of their optimizer state.

`explain` shows the spec of every array with its reason, and checks the arrays of a run against it.

A policy splits an array along a dim that divides, or else pads a dim (`padding.py`). Where a
program of your own splits the flattened array instead, `ShardSpec` computes the sizes:

    shard_size = ceil(numel / num_shards),  padding = shard_size * num_shards - numel
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from ..core.errors import ClaimError, ConfigError
from ..core.renamed import renamed_attribute
from ..core.tree import is_key, leaves_with_paths, map_with_path, path_str, shard_bytes
from ..core.typing import Array, ArrayTree, Leaf, Path, PyTree, Shape
from .padding import stored_shape
from .policy import Decision, HasShape, Policy, Wrapped, axes_of, shard_count, spec_axes, spec_of


def specs(policy: Policy, tree: ArrayTree, mesh: Mesh) -> PyTree:
    """The PartitionSpec of every leaf of a tree.

    Args:
        policy: maps path, shape and mesh to a spec.
        tree: arrays or `ShapeDtypeStruct`s.
        mesh: the mesh whose axes the specs name.

    Returns:
        The same tree with a `PartitionSpec` at every leaf.
    """
    return map_with_path(lambda path, leaf: policy(path, tuple(leaf.shape), mesh), tree)


def shardings(
    policy: Policy, tree: ArrayTree, mesh: Mesh, memory_kind: str | None = None
) -> PyTree:
    """The NamedSharding of every leaf of a tree.

    If a policy pads a dim, the sharding is that of the padded array. Inside `jit` the unpadded
    leaf can be constrained to it; outside `jit` the leaf must be padded first.

    Example:
        >>> import jax.numpy as jnp
        >>> from axon_dist.mesh import World
        >>> from axon_dist.sharding import Replicate
        >>> mesh = World.emulate(8).mesh
        >>> shardings(Replicate(), {"w": jnp.ones((8, 4))}, mesh)["w"].spec
        P()
    """
    return map_with_path(
        lambda path, leaf: _placed(mesh, policy(path, tuple(leaf.shape), mesh), memory_kind), tree
    )


def _placed(mesh: Mesh, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
    try:
        return NamedSharding(mesh, spec, memory_kind=memory_kind)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the devices cannot hold an array as {spec} in memory_kind={memory_kind!r}: {error}; "
            "leave memory_kind out for device memory"
        ) from error


def put(tree: ArrayTree, targets: PyTree) -> PyTree:
    """Puts arrays on devices, like `jax.device_put`.

    Arrays on a single CPU device of this process are sliced by numpy into views. JAX would compile
    a program for each shape.

    Args:
        tree: arrays.
        targets: a tree of the shardings to put them in.

    Returns:
        The sharded arrays; the arrays in `tree` stay usable.

    Example:
        >>> from axon_dist.mesh import World
        >>> from axon_dist.sharding import LargestDim
        >>> tree = {"w": jnp.ones((8, 16))}
        >>> targets = shardings(LargestDim(("dp",), 1), tree, World.emulate(8).mesh)
        >>> put(tree, targets)["w"].addressable_shards[0].data.shape
        (8, 2)
    """
    on_host = jax.tree.map(_on_host, tree, targets)
    return jax.device_put(jax.tree.map(on_devices_of, on_host, targets), targets)


def on_devices_of(leaf: Array | np.ndarray, sharding: NamedSharding) -> Array | np.ndarray:
    """Moves an array to the devices of a sharding if both its devices and its memory kind differ.

    `jax.device_put` between different sets of devices ignores the memory kind and fails in JAX
    0.10 to 0.12: "Memory kind mismatch with xla::PjRtBuffers".
    """
    if not isinstance(leaf, jax.Array) or leaf.sharding.device_set == sharding.device_set:
        return leaf
    memory_kind = leaf.sharding.memory_kind
    if memory_kind is None or sharding.memory_kind in (None, memory_kind):
        return leaf
    return jax.device_put(leaf, sharding.with_memory_kind(memory_kind))


def _on_host(leaf: Array, sharding: NamedSharding) -> Array | np.ndarray:
    """Converts an array on one CPU device of this process to numpy; returns others unchanged."""
    if not isinstance(leaf, jax.Array) or is_key(leaf) or not sharding.is_fully_addressable:
        return leaf
    devices = leaf.sharding.device_set
    is_on_host = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return np.asarray(leaf) if is_on_host else leaf


def optimizer_shardings(
    policy: Policy,
    params: ArrayTree,
    opt_state: ArrayTree,
    mesh: Mesh,
    memory_kind: str | None = None,
) -> PyTree:
    """The shardings of an optax state: moments are split like their parameter.

    Args:
        policy: the policy of the optimizer state.
        params: the parameters, arrays or `ShapeDtypeStruct`s.
        opt_state: `jax.eval_shape(tx.init, params)`, or the state itself.
        mesh: the mesh of all devices.
        memory_kind: the memory of the moments; None for device memory.

    Returns:
        A tree like `opt_state` with a `NamedSharding` at every leaf.
    """
    return jax.tree.map(
        lambda decision: _placed(mesh, decision.spec, memory_kind),
        optimizer_decisions(policy, params, opt_state, mesh),
    )


def optimizer_decisions(
    policy: Policy, params: ArrayTree, opt_state: ArrayTree, mesh: HasShape
) -> PyTree:
    """A policy's decisions about every leaf of an optax state.

    A leaf belongs to a parameter if its path ends with the parameter's path and the shapes are
    equal; it is then split like the parameter. If some dims are shorter, as for the scales of
    blocks, it is split like the parameter along the other dims. Matching by path also works for
    masked and partitioned transformations, where `optax.tree_map_params` fails. Other leaves, such
    as factored or flattened moments, are split by the policy's `flexible_part`.

    Args:
        policy: the policy of the optimizer state.
        params: the parameters, arrays or `ShapeDtypeStruct`s.
        opt_state: `jax.eval_shape(tx.init, params)`, or the state itself.
        mesh: anything with named axes.

    Returns:
        A tree like `opt_state` with a `Decision` at every leaf.
    """
    keys = {
        tuple(map(str, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    paths = dict(zip(keys, (path for path, _ in leaves_with_paths(params)), strict=True))

    def of_leaf(key_path: tuple[Any, ...], leaf: Leaf) -> Decision:
        shape = tuple(leaf.shape)
        like = Decision(PartitionSpec(), policy.name, "")
        suffixes = (tuple(map(str, key_path[start:])) for start in range(len(key_path)))
        for suffix in suffixes:
            parameter = keys.get(suffix)
            if parameter is not None and parameter.shape == leaf.shape:
                return policy.decide(paths[suffix], shape, mesh)
            if parameter is not None and _is_shortened(shape, parameter.shape):
                of_parameter = policy.decide(paths[suffix], tuple(parameter.shape), mesh)
                like = _shortened(of_parameter, shape, parameter.shape)
                break
        other = policy.flexible_part.decide(path_str(key_path), shape, mesh, like.spec)
        return _with_free_dims(like, other) if like.reason else other

    return jax.tree_util.tree_map_with_path(of_leaf, opt_state)


def _is_shortened(shape: Shape, of: Shape) -> bool:
    """Whether a shape equals another one, except for some dims that are shorter."""
    pairs = [*zip(shape, of, strict=False)]
    is_equal = any(size == full for size, full in pairs)
    return len(shape) == len(of) and is_equal and all(size <= full for size, full in pairs)


def _shortened(decision: Decision, shape: Shape, of: Shape) -> Decision:
    """Adapts the decision about an array to a shape with some shorter dims."""
    axes_by_dim = [
        axes_of(decision.spec, dim) if size == full else ()
        for dim, (size, full) in enumerate(zip(shape, of, strict=True))
    ]
    reason = f"{shape} like its parameter {of}: {decision.reason}"
    return Decision(spec_of(axes_by_dim), decision.rule, reason)


def _with_free_dims(first: Decision, more: Decision) -> Decision:
    """Adds the axes of a decision along the dims that another one leaves free."""
    used = spec_axes(first.spec)
    dims = range(max(len(first.spec), len(more.spec)))
    added = [tuple(axis for axis in axes_of(more.spec, d) if axis not in used) for d in dims]
    spec = spec_of(axes_of(first.spec, d) or added[d] for d in dims)
    return dataclasses.replace(first, spec=spec)


@dataclasses.dataclass(frozen=True)
class Copies(Wrapped):
    """Splits dim 0 over an axis, one copy per rank, and shards each copy by another policy.

    Args:
        policy: the policy of one copy.
        axis: the mesh axis whose ranks have separate copies.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> from axon_dist.sharding import LargestDim
        >>> rule = Copies(LargestDim(("fsdp",)), "nodes")
        >>> rule("kernel", (2, 64, 64), MeshSpec(nodes=2, fsdp=4))
        P('nodes', 'fsdp')
    """

    axis: str

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axis, and the policy's axes."""
        return (self.axis, *self.policy.split_axes)

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one copy."""
        copy = self.policy.decide(path, shape[1:], mesh, PartitionSpec(*tuple(taken)[1:]))
        why = f"a copy for each of {self.axis}={shape[0]}: {copy.reason}"
        return Decision(PartitionSpec(self.axis, *copy.spec), copy.rule, why)


@dataclasses.dataclass(frozen=True)
class InPlaceOf(Wrapped):
    """Decides about a dict of leaves that replaces a weight, such as its quantized form.

    Each leaf is split like the weight, except along dims of size 1.

    Args:
        policy: the policy of weights.
        shapes: the shapes of the replaced weights, by path.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> from axon_dist.sharding import LargestDim
        >>> rule = InPlaceOf(LargestDim(("fsdp",)), {"up/kernel": (64, 256)})
        >>> [rule(f"up/kernel/{k}", s, MeshSpec(fsdp=4)) for k, s in
        ...  {"int8": (64, 256), "scale": (1, 256)}.items()]
        [P(None, 'fsdp'), P(None, 'fsdp')]
    """

    shapes: Mapping[Path, Shape]

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about a weight, or a leaf that replaces one."""
        weight = path.rpartition("/")[0]
        if weight not in self.shapes:
            return self.policy.decide(path, shape, mesh, taken)
        decision = self.policy.decide(weight, self.shapes[weight], mesh, taken)
        return dataclasses.replace(decision, spec=spread(decision.spec, shape))


def spread(spec: PartitionSpec, shape: Shape) -> PartitionSpec:
    """Adapts a spec to an array that is broadcast against the array of the spec.

    Args:
        spec: the spec of the full array.
        shape: the shape of the other array; its dims of size 1 are not split.

    Example:
        >>> spread(PartitionSpec("fsdp", "tp"), (1, 64))
        P(None, 'tp')
    """
    return spec_of(axes_of(spec, dim) if shape[dim] > 1 else () for dim in range(len(spec)))


@dataclasses.dataclass(frozen=True)
class WithMoments(Wrapped):
    """Shards trained parameters like their moments, and everything else by another policy.

    Args:
        policy: the policy of moments.
        otherwise: the policy of frozen parameters, and of leaves that belong to no parameter.
        frozen: the paths of the frozen parameters.
    """

    otherwise: Policy
    frozen: frozenset[Path]

    @property
    def flexible_part(self) -> Policy:
        """The flexible part of `otherwise`, because only parameters have moments."""
        return self.otherwise.flexible_part

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides by `otherwise` if the path is frozen, else by the policy of moments."""
        policy = self.otherwise if path in self.frozen else self.policy
        return policy.decide(path, shape, mesh, taken)


@dataclasses.dataclass(frozen=True)
class LeafDecision:
    """The decision about one array.

    Args:
        path: its path.
        shape: its global shape.
        dtype: its dtype.
        bytes: bytes of the whole array, without padding.
        ways: the number of shards.
        bytes_per_device: bytes of one shard, with padding.
        decision: the spec, the rule that decided, and why.
    """

    path: Path
    shape: Shape
    dtype: str
    bytes: int
    ways: int
    bytes_per_device: int
    decision: Decision

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec."""
        return self.decision.spec


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The decisions about all arrays of a tree; prints as a table.

    Args:
        rows: one per leaf, in tree order.
        title: a name for the tree.
    """

    rows: tuple[LeafDecision, ...]
    title: str = "layout"

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def bytes_per_device(self) -> int:
        """Bytes that one device holds."""
        return sum(row.bytes_per_device for row in self.rows)

    @property
    def replicated(self) -> tuple[LeafDecision, ...]:
        """The rows of the arrays that no mesh axis splits; each has its reason."""
        return tuple(row for row in self.rows if row.ways == 1)

    whole = renamed_attribute("whole", "replicated")

    def check(self, tree: ArrayTree) -> None:
        """Raises if a device holds more bytes of an array than decided.

        Args:
            tree: the arrays, or `ShapeDtypeStruct`s with the shardings of a compiled program.

        Raises:
            ClaimError: with the bytes, and the leaves of which a device holds too much.
        """
        leaves = leaves_with_paths(tree)
        sizes = [shard_bytes(leaf) for _, leaf in leaves]
        wrong = [
            f"{row.path} {row.shape} holds {size:,} bytes as {_spec_of(leaf)} instead of "
            f"{row.bytes_per_device:,} as {row.spec}"
            for row, (_, leaf), size in zip(self.rows, leaves, sizes, strict=True)
            if size > row.bytes_per_device
        ]
        if wrong:
            more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ClaimError(
                f"{self.title}: a device holds {sum(sizes):,} bytes, and {self.bytes_per_device:,} "
                f"of {self.bytes:,} are claimed; shard the arrays by the strategy's shardings:"
                + "".join(f"\n  {line}" for line in wrong[:5])
                + more
            )

    def table(self) -> Table:
        """The decisions as a table for a terminal."""
        table = Table(title=self.title)
        for column in ("leaf", "shape", "dtype", "spec", "bytes per device", "rule", "why"):
            table.add_column(column, justify="right" if "bytes" in column else "left")
        for row in self.rows:
            decided = (f"{row.bytes_per_device:,}", row.decision.rule, row.decision.reason)
            table.add_row(row.path, str(row.shape), row.dtype, str(row.spec), *decided)
        table.add_section()
        share = f"{self.bytes_per_device / max(self.bytes, 1):.1%} of {self.bytes:,}"
        table.add_row("total", "", "", "", f"{self.bytes_per_device:,}", "", share)
        return table

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def explain(policy: Policy, tree: ArrayTree, mesh: HasShape, title: str = "layout") -> Explanation:
    """Explains how a policy shards every array of a tree, which rule decided, and why.

    Args:
        policy: the policy, such as `strategy.params`.
        tree: arrays or `ShapeDtypeStruct`s.
        mesh: anything with named axes; no device is needed.
        title: a name for the tree.

    Returns:
        The decisions.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> from axon_dist.sharding import LargestDim
        >>> leaf = jax.ShapeDtypeStruct((64, 256), "float32")
        >>> found = explain(LargestDim(("fsdp",)), {"kernel": leaf}, MeshSpec(fsdp=4))
        >>> found.rows[0].decision.reason, found.bytes, found.bytes_per_device
        ('dim 1 of (64, 256) split 4 ways', 65536, 16384)
    """
    rows = [
        _row(path, leaf, policy.decide(path, tuple(leaf.shape), mesh), mesh)
        for path, leaf in leaves_with_paths(tree)
    ]
    return Explanation(tuple(rows), title)


def explain_optimizer(
    policy: Policy,
    params: ArrayTree,
    opt_state: ArrayTree,
    mesh: Mesh,
    title: str = "optimizer state",
) -> Explanation:
    """Like `explain`, for an optax state: moments are split like their parameter."""
    decisions = jax.tree.leaves(optimizer_decisions(policy, params, opt_state, mesh))
    rows = [
        _row(path, leaf, decision, mesh)
        for (path, leaf), decision in zip(leaves_with_paths(opt_state), decisions, strict=True)
    ]
    return Explanation(tuple(rows), title)


def _row(path: Path, leaf: Leaf, decision: Decision, mesh: HasShape) -> LeafDecision:
    shape = tuple(leaf.shape)
    itemsize = leaf.dtype.itemsize
    ways = shard_count(decision.spec, mesh)
    stored = math.prod(stored_shape(shape, decision.spec, mesh)) * itemsize
    size = math.prod(shape) * itemsize
    dtype = str(leaf.dtype)
    return LeafDecision(path, shape, dtype, size, ways, stored // ways, decision)


def _spec_of(leaf: Leaf) -> str:
    return str(getattr(leaf.sharding, "spec", type(leaf.sharding).__name__))


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """How a flattened array is cut into equal shards.

    Args:
        original_shape: the shape of the array.
        num_shards: the number of shards, one per rank.

    Raises:
        ConfigError: when `num_shards` is below 1.

    Example:
        >>> spec = ShardSpec((10,), 4)
        >>> spec.shard_size, spec.padding, spec.real_sizes
        (3, 2, (3, 3, 3, 1))
    """

    original_shape: Shape
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(f"num_shards is {self.num_shards}; an array needs at least 1 shard")

    @property
    def numel(self) -> int:
        """Elements of the array."""
        return math.prod(self.original_shape)

    @property
    def shard_size(self) -> int:
        """Elements of every shard, padding included."""
        return -(-self.numel // self.num_shards)

    @property
    def padding(self) -> int:
        """The number of zeros at the end of the flattened array."""
        return self.shard_size * self.num_shards - self.numel

    @property
    def real_sizes(self) -> tuple[int, ...]:
        """Elements of the array in each shard, without padding."""
        return tuple(self.local_slice(r).stop - self.local_slice(r).start for r in self._ranks)

    def local_slice(self, rank: int) -> slice:
        """The elements of the flattened array that a rank holds; empty if it has only padding."""
        start, stop = (min(r * self.shard_size, self.numel) for r in (rank, rank + 1))
        return slice(start, stop)

    def shard(self, array: Array) -> Array:
        """Cuts an array into rows `[num_shards, shard_size]`, one for each rank.

        Raises:
            ConfigError: if the array has another shape.
        """
        if tuple(array.shape) != tuple(self.original_shape):
            raise ConfigError(
                f"got an array of shape {array.shape} to cut as {self}; give one of shape "
                f"{tuple(self.original_shape)}"
            )
        return jnp.pad(array.reshape(-1), (0, self.padding)).reshape(self.num_shards, -1)

    def unshard(self, shards: Array) -> Array:
        """The inverse of `shard`, bit for bit."""
        return shards.reshape(-1)[: self.numel].reshape(self.original_shape)

    @property
    def _ranks(self) -> range:
        return range(self.num_shards)
