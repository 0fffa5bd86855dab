"""Arrays whose split dim does not divide: padded between steps, as they are within a step.

JAX stores an array only in equal shards. A dim of 512 over 5 devices is therefore stored as 515
rows, 103 on each device, of which the last three are zeros. Within a jitted program
`with_sharding_constraint` accepts 512 over 5 as it is: XLA keeps the same 103 rows on each device,
so that cutting the padding off and adding it again moves nothing between devices.

Two shapes belong to such an array: the *model's* shape, about which policies decide, and the
*stored* shape, a multiple of the number of shards. A `Padding` says which leaves of a state have
two.
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
        leaves: pairs of a path in the stored tree and the model's shape, in the order of the tree.

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
    """The shape in which an array is stored: every split dim a multiple of its shards.

    Args:
        shape: of the array in the model.
        spec: how it is split.
        mesh: anything with `.shape`, axis name to size.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> stored_shape((512, 512), PartitionSpec("fsdp"), MeshSpec(fsdp=5))
        (515, 512)
    """
    counts = (math.prod(mesh.shape[axis] for axis in axes_of(spec, d)) for d in range(len(shape)))
    return tuple(-(-size // count) * count for size, count in zip(shape, counts, strict=True))


def padded(x: Any, shape: Shape) -> Any:
    """An array with zeros behind its last rows, up to a shape; itself where it has that shape.

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


def cut(x: Array, shape: Shape) -> Array:
    """The first rows of an array, as many as a shape has; the inverse of `padded`.

    Example:
        >>> cut(jnp.array([1.0, 1.0, 0.0]), (2,)).tolist()
        [1.0, 1.0]
    """
    if tuple(x.shape) == tuple(shape):
        return x
    return x[tuple(slice(size) for size in shape)]


def stored_tree(tree: PyTree, places: PyTree) -> PyTree:
    """Leaves of the model's shapes as they are stored, padded with zeros; inside or outside `jit`.

    Args:
        tree: arrays of the model's shapes.
        places: a `NamedSharding` for each, which need not divide it.
    """
    return jax.tree.map(
        lambda x, at: padded(x, stored_shape(np.shape(x), at.spec, at.mesh)), tree, places
    )


def stored_shapes(tree: PyTree, places: PyTree) -> PyTree:
    """As `stored_tree`, of shapes."""

    def one(x: Leaf, at: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(stored_shape(x.shape, at.spec, at.mesh), x.dtype)

    return jax.tree.map(one, tree, places)


def padding_of(tree: PyTree, places: PyTree) -> Padding | None:
    """Which leaves of a tree are padded where they are stored.

    Args:
        tree: arrays or shapes, in the model's shapes.
        places: a `NamedSharding` for each.

    Returns:
        The padding; None where every split dim divides.
    """
    stored = stored_shapes(tree, places)
    pairs = zip(leaves_with_paths(tree), jax.tree.leaves(stored), strict=True)
    leaves = [(path, tuple(x.shape)) for (path, x), y in pairs if tuple(x.shape) != y.shape]
    return Padding(tuple(leaves)) if leaves else None


def model_tree(stored: PyTree, shapes: PyTree, places: PyTree) -> PyTree:
    """Stored leaves in the model's shapes, split as before; inside `jit`.

    Args:
        stored: arrays as they are stored.
        shapes: a leaf of the model's shape for each.
        places: a `NamedSharding` for each.
    """

    def one(x: Array, like: Leaf, place: NamedSharding) -> Array:
        if tuple(x.shape) == tuple(like.shape):
            return x
        here = _in_memory(place)
        x = x if here is place else jax.device_put(x, here)
        return jax.lax.with_sharding_constraint(cut(x, like.shape), here)

    return jax.tree.map(one, stored, shapes, places)


def _in_memory(place: NamedSharding) -> NamedSharding:
    return place if place.memory_kind in (None, "device") else place.with_memory_kind("device")


def even_spec(spec: PartitionSpec, shape: Shape, mesh: HasShape) -> PartitionSpec:
    """The part of a spec that divides a shape: of each dim as many of its first axes as divide.

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


def even_places(tree: PyTree, places: PyTree) -> PyTree:
    """Shardings that divide leaves of the model's shapes; see `even_spec`."""
    return jax.tree.map(
        lambda x, at: at.update(spec=even_spec(at.spec, x.shape, at.mesh)), tree, places
    )


def for_region(tree: PyTree, specs: PyTree, mesh: HasShape) -> PyTree:
    """Leaves as a `shard_map` takes them, which asks for dims that divide: padded with zeros.

    Args:
        tree: arrays of the model's shapes, inside `jit`.
        specs: how the region splits each.
        mesh: of the region.
    """
    return jax.tree.map(lambda x, spec: padded(x, stored_shape(x.shape, spec, mesh)), tree, specs)


def like(tree: PyTree, shapes: PyTree) -> PyTree:
    """Leaves that come out of a `shard_map`, cut to the shapes of others."""
    return jax.tree.map(lambda x, one: cut(x, one.shape), tree, shapes)


def paddings_in(tree: PyTree) -> dict[Path, Shape]:
    """The model's shapes of the padded leaves of a tree, by path, wherever a state stands in it.

    Args:
        tree: any; what has a `padding`, as a `TrainState` does, says of its own leaves which are
            padded.
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
    """The shards of a padded array, cut anew so that they divide the model's shape.

    Of 512 rows that 5 devices store as 515, four devices get 128 each: the largest number of
    devices, up to those there are, that divides 512. No device ever holds the whole array. It is
    how checkpoints write padded arrays in the model's shape.

    Args:
        shape: the model's.
        place: the sharding in which the array is stored, padded.

    Example:
        >>> from axon_dist.mesh import World
        >>> mesh = World.emulate(5, "fsdp=5").mesh
        >>> even = EvenShards((512, 8), NamedSharding(mesh, PartitionSpec("fsdp")))
        >>> even.target.num_devices, even.target.shard_shape((512, 8))
        (4, (128, 8))
    """

    shape: Shape
    place: NamedSharding

    @cached_property
    def _dims(self) -> dict[int, int]:
        """Of each dim that is padded the number of devices that divides it."""
        mesh, dims = self.place.mesh, {}
        for dim, size in enumerate(self.shape):
            count = math.prod(mesh.shape[axis] for axis in axes_of(self.place.spec, dim))
            if size % count:
                dims[dim] = max(n for n in range(1, count + 1) if size % n == 0)
        return dims

    @property
    def _is_within_process(self) -> bool:
        return self.place.is_fully_addressable

    @cached_property
    def _here(self) -> NamedSharding:
        """The same shards in device memory, which alone lets one cut them."""
        return _in_memory(self.place)

    @cached_property
    def target(self) -> NamedSharding:
        """The sharding of the array in the model's shape.

        Over several processes, where each has to take part, the padded dims are whole.
        """
        mesh, spec = self.place.mesh, self.place.spec
        if not self._is_within_process:
            whole = spec_of(
                () if d in self._dims else axes_of(spec, d) for d in range(len(self.shape))
            )
            return NamedSharding(mesh, whole, memory_kind=self._here.memory_kind)
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
        return NamedSharding(fewer, spec_of(entries), memory_kind=self._here.memory_kind)

    @property
    def _recut(self) -> Shape:
        """The shape of an array over all devices, of which the first few hold the model's rows."""
        recut = list(self.shape)
        for dim, count in self._dims.items():
            axes = axes_of(self.place.spec, dim)
            ranks = math.prod(self.place.mesh.shape[axis] for axis in axes)
            recut[dim] = self.shape[dim] // count * ranks
        return tuple(recut)

    def of(self, stored: Array) -> Array:
        """The array in the model's shape, from the one that is stored."""
        stored = jax.device_put(stored, self._here)
        if not self._is_within_process:
            return _reshaped(self.shape, self.shape, self.target)(stored)
        recut = _reshaped(self.shape, self._recut, self._here)(stored)
        return _on_devices(recut.addressable_shards, self.shape, self.target)

    def stored(self, array: Array) -> Array:
        """The stored array, from the one in the model's shape; the inverse of `of`."""
        full = stored_shape(self.shape, self.place.spec, self.place.mesh)
        if self._is_within_process:
            array = self._on_all(array)
        return jax.device_put(_reshaped(self.shape, full, self._here)(array), self.place)

    def _on_all(self, array: Array) -> Array:
        """An array over all devices, of which those without a part have zeros."""
        held = {shard.device: shard.data for shard in array.addressable_shards}
        size, pieces = self._here.shard_shape(self._recut), []
        for device in self._here.addressable_devices_indices_map(self._recut):
            at = SingleDeviceSharding(device, memory_kind=self._here.memory_kind)
            piece = held.get(device)
            pieces.append(
                jax.device_put(np.zeros(size, array.dtype), at) if piece is None else piece
            )
        return jax.make_array_from_single_device_arrays(self._recut, self._here, pieces)


@functools.lru_cache(maxsize=4096)
def _reshaped(shape: Shape, to: Shape, place: NamedSharding) -> Function:
    """The program that cuts an array to one shape and pads it to another, kept by shape."""
    return jax.jit(lambda x: padded(cut(x, shape), to), out_shardings=place)


def _on_devices(shards: Iterable[Any], shape: Shape, place: NamedSharding) -> Array:
    """An array made of those of the shards that are on the devices of a sharding."""
    held = {shard.device: shard.data for shard in shards}
    pieces = [held[device] for device in place.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, place, pieces)
