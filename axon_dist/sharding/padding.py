"""Padding of arrays whose split dim does not divide by the number of shards.

JAX stores an array only in equal shards. A dim of 512 over 5 devices is therefore stored as 515
rows, 103 on each device, and the last three are zeros. Inside a jitted program
`with_sharding_constraint` accepts 512 over 5 as it is: XLA keeps the same 103 rows on each device,
so removing and adding the padding moves nothing between devices.

Such an array has two shapes: the *model's* shape, which policies see, and the *stored* shape, a
multiple of the number of shards. A `Padding` lists the leaves of a state that have two.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core.tree import leaves_with_paths, path_str
from ..core.typing import Array, Function, Leaf, Path, PyTree, Shape
from .policy import HasShape, axes_of, spec_of


@dataclasses.dataclass(frozen=True)
class Padding:
    """Which leaves of a stored tree are padded, and their shapes in the model.

    Args:
        leaves: pairs of a path in the stored tree and the model's shape, in tree order.

    Example:
        >>> padding = Padding((("params/kernel", (512, 512)),))
        >>> padding.shapes["params/kernel"]
        (512, 512)
    """

    leaves: tuple[tuple[Path, Shape], ...]

    @cached_property
    def shapes(self) -> Mapping[Path, Shape]:
        """The model's shapes by path."""
        return dict(self.leaves)


def stored_shape(shape: Shape, spec: PartitionSpec, mesh: HasShape) -> Shape:
    """The stored shape of an array: every split dim is rounded up to a multiple of its shards.

    Args:
        shape: the model's shape.
        spec: how the array is split.
        mesh: anything with `.shape`, axis name to size.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> stored_shape((512, 512), PartitionSpec("fsdp"), MeshSpec(fsdp=5))
        (515, 512)
    """
    counts = (math.prod(mesh.shape[axis] for axis in axes_of(spec, d)) for d in range(len(shape)))
    return tuple(-(-size // count) * count for size, count in zip(shape, counts, strict=True))


def padded(x: Any, shape: Shape) -> Any:
    """Appends zeros to the dims of an array up to a shape.

    Example:
        >>> padded(jnp.ones(2), (3,)).tolist()
        [1.0, 1.0, 0.0]
    """
    more = [(0, after - before) for before, after in zip(np.shape(x), shape, strict=True)]
    if not any(after for _, after in more):
        return x
    if isinstance(x, np.ndarray):
        return np.pad(x, more)
    return jnp.pad(x, more)


def unpad(x: Array, shape: Shape) -> Array:
    """Removes padding down to a shape; the inverse of `padded`.

    Example:
        >>> unpad(jnp.array([1.0, 1.0, 0.0]), (2,)).tolist()
        [1.0, 1.0]
    """
    if tuple(x.shape) == tuple(shape):
        return x
    return x[tuple(slice(size) for size in shape)]


def stored_tree(tree: PyTree, shardings: PyTree) -> PyTree:
    """Pads leaves from the model's shapes to their stored shapes; inside or outside `jit`.

    Args:
        tree: arrays of the model's shapes.
        shardings: a `NamedSharding` for each leaf; it need not divide the shape.
    """

    def one(x: Array, sharding: NamedSharding) -> Any:
        return padded(x, stored_shape(np.shape(x), sharding.spec, sharding.mesh))

    return jax.tree.map(one, tree, shardings)


def stored_shapes(tree: PyTree, shardings: PyTree) -> PyTree:
    """Returns the shapes and dtypes of `stored_tree`."""

    def one(x: Leaf, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(stored_shape(x.shape, sharding.spec, sharding.mesh), x.dtype)

    return jax.tree.map(one, tree, shardings)


def padding_of(tree: PyTree, shardings: PyTree) -> Padding | None:
    """Lists the leaves of a tree whose stored shape is padded.

    Args:
        tree: arrays or shapes, in the model's shapes.
        shardings: a `NamedSharding` for each leaf.

    Returns:
        The padding; None if every split dim divides.
    """
    stored = stored_shapes(tree, shardings)
    pairs = zip(leaves_with_paths(tree), jax.tree.leaves(stored), strict=True)
    leaves = [(path, tuple(x.shape)) for (path, x), y in pairs if tuple(x.shape) != y.shape]
    return Padding(tuple(leaves)) if leaves else None


def model_tree(stored: PyTree, shapes: PyTree, shardings: PyTree) -> PyTree:
    """Removes the padding of stored leaves and keeps their sharding; inside `jit`.

    Args:
        stored: arrays of the stored shapes.
        shapes: arrays or structs of the model's shapes.
        shardings: a `NamedSharding` for each leaf.
    """

    def one(x: Array, like: Leaf, sharding: NamedSharding) -> Array:
        if tuple(x.shape) == tuple(like.shape):
            return x
        on_device = _in_memory(sharding)
        x = x if on_device is sharding else jax.device_put(x, on_device)
        return jax.lax.with_sharding_constraint(unpad(x, like.shape), on_device)

    return jax.tree.map(one, stored, shapes, shardings)


def _in_memory(sharding: NamedSharding) -> NamedSharding:
    """Returns the same sharding in device memory."""
    if sharding.memory_kind in (None, "device"):
        return sharding
    return sharding.with_memory_kind("device")


def even_spec(spec: PartitionSpec, shape: Shape, mesh: HasShape) -> PartitionSpec:
    """Drops trailing axes of each dim until the remaining ones divide the dim.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> even_spec(PartitionSpec(("dp", "fsdp"), "tp"), (6, 8), MeshSpec(dp=2, fsdp=5, tp=2))
        P('dp', 'tp')
    """
    dims: list[tuple[str, ...]] = []
    for dim in range(len(spec)):
        axes = axes_of(spec, dim)
        while axes and shape[dim] % math.prod(mesh.shape[axis] for axis in axes):
            axes = axes[:-1]
        dims.append(axes)
    return spec_of(dims)


def even_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
    """Shardings that divide the model's shapes; see `even_spec`."""

    def one(x: Leaf, sharding: NamedSharding) -> NamedSharding:
        return sharding.update(spec=even_spec(sharding.spec, x.shape, sharding.mesh))

    return jax.tree.map(one, tree, shardings)


def for_region(tree: PyTree, specs: PyTree, mesh: HasShape) -> PyTree:
    """Pads leaves with zeros for a `shard_map`, which requires dims that divide.

    Args:
        tree: arrays of the model's shapes, inside `jit`.
        specs: the `in_specs` of the `shard_map`.
        mesh: its mesh.
    """
    return jax.tree.map(lambda x, spec: padded(x, stored_shape(x.shape, spec, mesh)), tree, specs)


def cut_like(tree: PyTree, shapes: PyTree) -> PyTree:
    """Cuts the padding off results of a `shard_map`, down to the shapes of other leaves."""
    return jax.tree.map(lambda x, one: unpad(x, one.shape), tree, shapes)


def paddings_in(tree: PyTree) -> dict[Path, Shape]:
    """The model's shapes of the padded leaves of a tree, by path.

    Args:
        tree: any tree; nodes with an attribute `padding`, such as a `TrainState`, list their own
            padded leaves.
    """
    states = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: getattr(x, "padding", None) is not None
    )
    found: dict[Path, Shape] = {}
    for keys, state in states:
        padding = getattr(state, "padding", None)
        if isinstance(padding, Padding):
            before = f"{path_str(keys)}/" if keys else ""
            found |= {f"{before}{path}": shape for path, shape in padding.leaves}
    return found


@dataclasses.dataclass(frozen=True)
class EvenShards:
    """Reshards a padded array such that its shards divide the model's shape.

    Of 512 rows that 5 devices store as 515, four devices get 128 each: four is the largest number
    of available devices that divides 512; of 509 rows, one device gets all. Over several processes
    padded dims are not split. Checkpoints write padded arrays in the model's shape this way.

    Args:
        shape: the model's shape.
        sharding: the sharding of the stored, padded array.

    Example:
        >>> from axon_dist.mesh import World
        >>> mesh = World.emulate(5, "fsdp=5").mesh
        >>> even = EvenShards((512, 8), NamedSharding(mesh, PartitionSpec("fsdp")))
        >>> even.target.num_devices, even.target.shard_shape((512, 8))
        (4, (128, 8))
    """

    shape: Shape
    sharding: NamedSharding

    @cached_property
    def _dims(self) -> dict[int, int]:
        """For each padded dim, the largest number of devices that divides it."""
        mesh = self.sharding.mesh
        dims = {}
        for dim, size in enumerate(self.shape):
            count = math.prod(mesh.shape[axis] for axis in axes_of(self.sharding.spec, dim))
            if size % count:
                dims[dim] = max(n for n in range(1, count + 1) if size % n == 0)
        return dims

    @property
    def _is_within_process(self) -> bool:
        return self.sharding.is_fully_addressable

    @cached_property
    def _in_device_memory(self) -> NamedSharding:
        """The same sharding in device memory, the only memory where arrays can be sliced."""
        return _in_memory(self.sharding)

    @cached_property
    def target(self) -> NamedSharding:
        """The sharding of the array in the model's shape.

        Over several processes the padded dims are not split, because each process must take part.
        """
        mesh = self.sharding.mesh
        spec = self.sharding.spec
        if not self._is_within_process:
            whole = spec_of(
                () if d in self._dims else axes_of(spec, d) for d in range(len(self.shape))
            )
            return NamedSharding(mesh, whole, memory_kind=self._in_device_memory.memory_kind)
        moved = {axis for dim in self._dims for axis in axes_of(spec, dim)}
        others = [axis for axis in mesh.axis_names if axis not in moved]
        order = [axis for dim in self._dims for axis in axes_of(spec, dim)] + others
        devices = np.asarray(mesh.devices).transpose(
            [mesh.axis_names.index(axis) for axis in order]
        )
        sizes = [math.prod(mesh.shape[a] for a in axes_of(spec, d)) for d in self._dims]
        devices = devices.reshape(*sizes, *(mesh.shape[axis] for axis in others))
        devices = devices[tuple(slice(count) for count in self._dims.values())]
        names = {dim: f"padded{dim}" for dim in self._dims}
        fewer = Mesh(devices, (*names.values(), *others))
        entries = ((names[d],) if d in names else axes_of(spec, d) for d in range(len(self.shape)))
        return NamedSharding(
            fewer, spec_of(entries), memory_kind=self._in_device_memory.memory_kind
        )

    @property
    def _recut(self) -> Shape:
        """The shape of an array over all devices, of which the first ones hold the model's rows."""
        recut = list(self.shape)
        for dim, count in self._dims.items():
            axes = axes_of(self.sharding.spec, dim)
            ranks = math.prod(self.sharding.mesh.shape[axis] for axis in axes)
            recut[dim] = self.shape[dim] // count * ranks
        return tuple(recut)

    def of(self, stored: Array) -> Array:
        """Converts the stored array to the model's shape."""
        stored = jax.device_put(stored, self._in_device_memory)
        if not self._is_within_process:
            return _reshaped(self.shape, self.shape, self.target)(stored)
        recut = _reshaped(self.shape, self._recut, self._in_device_memory)(stored)
        return _on_devices(recut.addressable_shards, self.shape, self.target)

    def stored(self, array: Array) -> Array:
        """Converts an array of the model's shape to the stored one; the inverse of `of`."""
        full = stored_shape(self.shape, self.sharding.spec, self.sharding.mesh)
        if self._is_within_process:
            array = self._on_all(array)
        return jax.device_put(
            _reshaped(self.shape, full, self._in_device_memory)(array), self.sharding
        )

    def _on_all(self, array: Array) -> Array:
        """Extends an array to all devices, with zeros on those without a shard."""
        shard_on = {shard.device: shard.data for shard in array.addressable_shards}
        size = self._in_device_memory.shard_shape(self._recut)
        pieces: list[Array] = []
        for device in self._in_device_memory.addressable_devices_indices_map(self._recut):
            piece = shard_on.get(device)
            if piece is None:
                sharding = SingleDeviceSharding(
                    device, memory_kind=self._in_device_memory.memory_kind
                )
                piece = jax.device_put(np.zeros(size, array.dtype), sharding)
            pieces.append(piece)
        return jax.make_array_from_single_device_arrays(self._recut, self._in_device_memory, pieces)


@functools.lru_cache(maxsize=4096)
def _reshaped(shape: Shape, to: Shape, sharding: NamedSharding) -> Function:
    """A cached program that cuts an array to one shape and pads it to another."""
    return jax.jit(lambda x: padded(unpad(x, shape), to), out_shardings=sharding)


def _on_devices(shards: Iterable[Any], shape: Shape, sharding: NamedSharding) -> Array:
    """Builds an array from the shards on the devices of a sharding."""
    shard_on = {shard.device: shard.data for shard in shards}
    pieces = [shard_on[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
