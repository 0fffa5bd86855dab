"""Policies applied to trees: shardings of parameters and of the optimizer state beside them.

`explain` shows the spec of every array with its reason, and checks the arrays of a run against it.

A policy splits an array along a dim that divides, or else pads one (`padding.py`). Where the
elements of an array are counted as one row instead, as in estimates of memory and in flat buckets,
`ShardSpec` has the sizes:

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
from ..core.tree import is_key, leaves_with_paths, map_with_path, path_str, shard_bytes
from ..core.typing import Array, ArrayTree, Leaf, Path, PyTree, Shape
from .padding import stored_shape
from .policy import Decision, HasShape, Policy, Wrapped, axes_of, shard_count, spec_of


def specs(policy: Policy, tree: ArrayTree, mesh: Mesh) -> PyTree:
    """The PartitionSpec of every leaf of a tree.

    Args:
        policy: decides by path, shape and mesh.
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

    Where a policy pads a dim, the sharding is that of the padded array: within `jit` a leaf may be
    constrained to it as it is, and outside it has to be padded to a multiple of its shards first.

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
            "leave it out for their own memory"
        ) from error


def put(tree: ArrayTree, places: PyTree) -> PyTree:
    """Puts arrays where they are to be stored, as `jax.device_put` does.

    What one CPU device of this process holds is cut by numpy, into views. JAX compiles a program
    for each shape that it cuts.

    Args:
        tree: arrays.
        places: a tree like it, of the sharding of each.

    Returns:
        The arrays in their places; those given stay usable.

    Example:
        >>> from axon_dist.mesh import World
        >>> from axon_dist.sharding import LargestDim
        >>> tree = {"w": jnp.ones((8, 16))}
        >>> places = shardings(LargestDim(("dp",), 1), tree, World.emulate(8).mesh)
        >>> put(tree, places)["w"].addressable_shards[0].data.shape
        (8, 2)
    """
    return jax.device_put(jax.tree.map(_on_host, tree, places), places)


def _on_host(leaf: Array, place: NamedSharding) -> Array | np.ndarray:
    """An array that is in the memory of this process as the numpy array that it is."""
    if not isinstance(leaf, jax.Array) or is_key(leaf) or not place.is_fully_addressable:
        return leaf
    devices = leaf.sharding.device_set
    is_here = len(devices) == 1 and next(iter(devices)).platform == "cpu"
    return np.asarray(leaf) if is_here else leaf


def optimizer_shardings(
    policy: Policy,
    params: ArrayTree,
    opt_state: ArrayTree,
    mesh: Mesh,
    memory_kind: str | None = None,
) -> PyTree:
    """The shardings of an optax state: moments are split as their parameter would be.

    Args:
        policy: the policy of the optimizer state.
        params: the parameters, arrays or `ShapeDtypeStruct`s.
        opt_state: `jax.eval_shape(tx.init, params)`, or the state itself.
        mesh: names and sizes of its axes, over all devices.
        memory_kind: where the moments live; None is the device.

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
    """What a policy decides about every leaf of an optax state.

    A leaf belongs to a parameter when its path ends with the parameter's path and the shapes
    agree, and is split as the parameter would be. Matching by path holds for masked and partitioned
    transformations too, where `optax.tree_map_params` fails. What belongs to no parameter, such as
    factored or flattened moments, is split by the part of the policy that looks at no path.

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
        suffixes = (tuple(map(str, key_path[start:])) for start in range(len(key_path)))
        for suffix in suffixes:
            parameter = keys.get(suffix)
            if parameter is not None and parameter.shape == leaf.shape:
                return policy.decide(paths[suffix], tuple(leaf.shape), mesh)
        return policy.flexible_part.decide(path_str(key_path), tuple(leaf.shape), mesh)

    return jax.tree_util.tree_map_with_path(of_leaf, opt_state)


@dataclasses.dataclass(frozen=True)
class Copies(Wrapped):
    """Gives each rank of an axis one row of dim 0, and decides about a row as another policy does.

    Args:
        policy: decides about one copy.
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
        """The axis, and those of the policy."""
        return (self.axis, *self.policy.split_axes)

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one copy."""
        row = self.policy.decide(path, shape[1:], mesh, PartitionSpec(*tuple(taken)[1:]))
        why = f"a copy for each of {self.axis}={shape[0]}: {row.reason}"
        return Decision(PartitionSpec(self.axis, *row.spec), row.rule, why)


@dataclasses.dataclass(frozen=True)
class InPlaceOf(Wrapped):
    """Decides about the leaves of a dict that replaces a weight.

    Each is split as the weight would be, except along the dims in which it has one entry.

    Args:
        policy: about weights.
        shapes: of the weights, by path.

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
        """Decides about a weight, or about what replaces it."""
        weight = path.rpartition("/")[0]
        if weight not in self.shapes:
            return self.policy.decide(path, shape, mesh, taken)
        decision = self.policy.decide(weight, self.shapes[weight], mesh, taken)
        return dataclasses.replace(decision, spec=spread(decision.spec, shape))


def spread(spec: PartitionSpec, shape: Shape) -> PartitionSpec:
    """A spec of an array that others are broadcast to, for one of them.

    Args:
        spec: of the largest array.
        shape: of the other; a dim of size 1 is whole.

    Example:
        >>> spread(PartitionSpec("fsdp", "tp"), (1, 64))
        P(None, 'tp')
    """
    return spec_of(axes_of(spec, dim) if shape[dim] > 1 else () for dim in range(len(spec)))


@dataclasses.dataclass(frozen=True)
class WithMoments(Wrapped):
    """Lays trained parameters out as their moments, and leaves all else to another policy.

    Args:
        policy: of moments.
        otherwise: for frozen parameters, and for what has no path of a parameter.
        frozen: the paths of the frozen parameters.
    """

    otherwise: Policy
    frozen: frozenset[Path]

    @property
    def flexible_part(self) -> Policy:
        """What is no parameter has no moments."""
        return self.otherwise.flexible_part

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides as the one or the other."""
        policy = self.otherwise if path in self.frozen else self.policy
        return policy.decide(path, shape, mesh, taken)


@dataclasses.dataclass(frozen=True)
class LeafDecision:
    """What was decided about one array.

    Args:
        path: where it lives.
        shape: its global shape.
        dtype: its element type.
        bytes: bytes of the whole array, without padding.
        ways: into how many shards it is cut.
        bytes_per_device: bytes of one shard, with its padding.
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
        rows: one for each leaf, in the order of the tree.
        title: what the tree is.
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
    def whole(self) -> tuple[LeafDecision, ...]:
        """The rows that every device holds whole; the reason is theirs."""
        return tuple(row for row in self.rows if row.ways == 1)

    def check(self, tree: ArrayTree) -> None:
        """Raises unless the arrays are placed as decided.

        Args:
            tree: the arrays, or `ShapeDtypeStruct`s with the shardings of a compiled program.

        Raises:
            ClaimError: naming the bytes, and the leaves of which a device holds more.
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
                f"of {self.bytes:,} are claimed; lay the arrays out by the strategy's shardings:"
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
    """Tells where a policy lays every array of a tree, which rule decided, and why.

    Args:
        policy: the policy, such as `strategy.params`.
        tree: arrays or `ShapeDtypeStruct`s.
        mesh: anything with named axes; no device is needed.
        title: what the tree is.

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
    """As `explain`, of an optax state: moments are split as their parameter would be."""
    decisions = jax.tree.leaves(optimizer_decisions(policy, params, opt_state, mesh))
    rows = [
        _row(path, leaf, decision, mesh)
        for (path, leaf), decision in zip(leaves_with_paths(opt_state), decisions, strict=True)
    ]
    return Explanation(tuple(rows), title)


def _row(path: Path, leaf: Leaf, decision: Decision, mesh: HasShape) -> LeafDecision:
    shape, itemsize = tuple(leaf.shape), leaf.dtype.itemsize
    ways = shard_count(decision.spec, mesh)
    stored = math.prod(stored_shape(shape, decision.spec, mesh)) * itemsize
    size, dtype = math.prod(shape) * itemsize, str(leaf.dtype)
    return LeafDecision(path, shape, dtype, size, ways, stored // ways, decision)


def _spec_of(leaf: Leaf) -> str:
    return str(getattr(leaf.sharding, "spec", type(leaf.sharding).__name__))


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """How an array, seen as one row of elements, is cut into equal shards.

    Args:
        original_shape: the shape of the array.
        num_shards: how many ranks share it.

    Raises:
        ConfigError: when there is no rank to share it.

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
        """Zeros at the end of the row."""
        return self.shard_size * self.num_shards - self.numel

    @property
    def real_sizes(self) -> tuple[int, ...]:
        """Elements of the array in each shard, padding left out."""
        return tuple(self.local_slice(r).stop - self.local_slice(r).start for r in self._ranks)

    def local_slice(self, rank: int) -> slice:
        """Which elements of the row a rank holds; empty where only padding is left for it."""
        start, stop = (min(r * self.shard_size, self.numel) for r in (rank, rank + 1))
        return slice(start, stop)

    def shard(self, array: Array) -> Array:
        """Cuts an array into rows `[num_shards, shard_size]`, one for each rank.

        Raises:
            ConfigError: when the array has another shape.
        """
        if tuple(array.shape) != tuple(self.original_shape):
            raise ConfigError(f"got an array of shape {array.shape} to cut as {self}")
        return jnp.pad(array.reshape(-1), (0, self.padding)).reshape(self.num_shards, -1)

    def unshard(self, shards: Array) -> Array:
        """The array of its rows; bit for bit the input of `shard`."""
        return shards.reshape(-1)[: self.numel].reshape(self.original_shape)

    @property
    def _ranks(self) -> range:
        return range(self.num_shards)
