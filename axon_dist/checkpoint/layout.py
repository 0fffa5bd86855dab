"""The layout of a checkpoint's files, and its manifest.

step_00000012/        the checkpoint; `step_00000012.tmp` while it is being written
    COMMITTED         the checksum of the manifest, written last
    manifest.json     every leaf and every file, with their checksums
    arrays/           the values, written by the store of the checkpoint's type
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import operator
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from ..core import errors
from ..core.checks import is_number, is_whole
from ..core.errors import (
    MALFORMED,
    AxonDistError,
    CheckpointError,
    ConfigError,
    NamedChoice,
    reworded,
)
from ..core.tree import is_key, leaves_with_paths
from ..core.typing import Array, Leaf, PyTree, Shape
from ..core.typing import Path as LeafPath
from ..mesh import process_index
from ..mesh.world import available_devices
from ..sharding.padding import EvenShards, paddings_in

MARKER = "COMMITTED"
MANIFEST = "manifest.json"
ARRAYS = "arrays"
ZARR = "zarr"
"""The folder of the values in a bucket, instead of `ARRAYS`."""
SLOTS = ((MANIFEST, ZARR), ("manifest.2.json", "zarr.2"))
"""The two pairs of names for the manifest and the values of a checkpoint in a bucket.

A bucket cannot rename, so a checkpoint that replaces another uses the pair that the other does not
use. The checksum in the marker says which manifest is valid.
"""
UNFINISHED = ".tmp"
"""The suffix of a folder that is being written or removed."""
OLD = ".old"
"""Precedes that suffix in the name of a checkpoint that is being replaced."""

_STEP_NAME = re.compile(r"step_([0-9]{8,18})")


def step_name(step: int) -> str:
    """The name of the checkpoint of a step; names sort like their steps.

    Args:
        step: how many steps the state has taken, at least 0.

    Raises:
        ConfigError: for a negative number or another type.

    Example:
        >>> step_name(12)
        'step_00000012'
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(
            f"got step={step!r}; the step of a checkpoint is the number of steps taken: give an "
            "integer of at least 0"
        )
    return f"step_{number:08d}"


def step_of(name: str) -> int | None:
    """Parses the name of a checkpoint; None for any other name.

    Example:
        >>> step_of("step_00000012"), step_of("step_00000012.tmp")
        (12, None)
    """
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def staging_of(folder: Path) -> Path:
    """The folder on a disk in which a checkpoint is written before it gets its name."""
    return folder.with_name(folder.name + UNFINISHED)


def replaced_of(folder: Path) -> Path:
    """The name of an old checkpoint while a new one replaces it."""
    return folder.with_name(f"{folder.name}{OLD}{UNFINISHED}")


def is_part(name: str) -> bool:
    """Whether a checkpoint can have an entry of this name."""
    # While a store writes, it may append a suffix to the name of the values.
    in_slots = [name for slot in SLOTS for name in slot]
    return name in (MARKER, ARRAYS, *in_slots) or name.startswith(f"{ARRAYS}.")


def marker_of(manifest: bytes) -> bytes:
    """The contents of the marker: the checksum of the manifest."""
    return f"{zlib.crc32(manifest):08x}\n".encode()


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """The dtype and global shape of a leaf, independent of the mesh.

    Args:
        dtype: its name in JAX, such as `bfloat16` or `key<fry>`.
        shape: the global shape.

    Example:
        >>> str(LeafSpec("float32", (8, 4)))
        'float32[8,4]'
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def leaf_specs(data: Mapping[LeafPath, Any]) -> dict[LeafPath, LeafSpec]:
    """Converts leaves from JSON."""
    return {path: LeafSpec(x["dtype"], tuple(x["shape"])) for path, x in data.items()}


_RENAMED_FIELDS = {"meeting": "outer_state"}
"""Fields of `TrainState` that older checkpoints have under another name: old name to new name."""


def saved_names(saved: Collection[LeafPath], wanted: Collection[LeafPath]) -> dict[LeafPath, str]:
    """Maps each wanted leaf to its path in a checkpoint, where an older version named it otherwise.

    A leaf is renamed only if the checkpoint has it only under the old name, and the state to
    restore only under the new name.

    Args:
        saved: the paths of the leaves of the checkpoint.
        wanted: the paths of the leaves of the state to restore.

    Returns:
        Paths in the checkpoint, by path in the state.

    Example:
        >>> saved_names(["step", "meeting/missing"], ["step", "outer_state/missing"])
        {'step': 'step', 'outer_state/missing': 'meeting/missing'}
    """
    names = {path: path for path in wanted}
    watched = _clipped_in_chain(saved)
    for old in saved:
        for now in (renamed(old), _without_clip(old, watched)):
            if old not in names and now in names and now not in saved:
                names[now] = old
    return names


def renamed(path: LeafPath) -> LeafPath:
    """The path of a leaf of an older checkpoint, with the name that its field has now.

    Example:
        >>> renamed("meeting/missing/w"), renamed("params/meeting")
        ('outer_state/missing/w', 'params/meeting')
    """
    field, slash, rest = path.partition("/")
    return f"{_RENAMED_FIELDS.get(field, field)}{slash}{rest}"


def _clipped_in_chain(saved: Collection[LeafPath]) -> list[str]:
    """The paths of the states of watched optimizers that had a clip before them in their chain."""
    steps = [path for path in saved if path.startswith("opt_state/") and path.endswith("/steps")]
    starts = [path.removesuffix("steps") for path in steps]
    # A clip has no state, so its place in the chain, 0, has no leaves.
    empty = [x for x in starts if not any(path.startswith(f"{x}inner/0/") for path in saved)]
    return [x for x in empty if any(path.startswith(f"{x}inner/1/") for path in saved)]


def _without_clip(path: LeafPath, watched: Iterable[str]) -> LeafPath:
    for start in watched:
        if path.startswith(f"{start}inner/1/"):
            return f"{start}inner/0/{path.removeprefix(f'{start}inner/1/')}"
    return path


def differences(
    saved: Mapping[LeafPath, LeafSpec], wanted: Mapping[LeafPath, LeafSpec]
) -> list[str]:
    """Lists leaf by leaf how a checkpoint differs from the state to restore.

    Args:
        saved: the leaves of the checkpoint.
        wanted: the leaves of the state to restore.

    Returns:
        A sentence for each leaf that differs.

    Example:
        >>> differences({"w": LeafSpec("float32", (2,))}, {"w": LeafSpec("float32", (3,))})
        ['w is float32[2] in the checkpoint and float32[3] here']
    """
    unlike = []
    for path in [*saved, *(path for path in wanted if path not in saved)]:
        if path not in wanted:
            unlike.append(f"{path} ({saved[path]}) is in the checkpoint and not here")
        elif path not in saved:
            unlike.append(f"{path} ({wanted[path]}) is here and not in the checkpoint")
        elif saved[path] != wanted[path]:
            unlike.append(f"{path} is {saved[path]} in the checkpoint and {wanted[path]} here")
    return unlike


def named_leaves(tree: PyTree) -> dict[LeafPath, Any]:
    """The leaves of a tree by path.

    Raises:
        CheckpointError: if two leaves have the same path.
    """
    pairs = leaves_with_paths(tree)
    leaves = dict(pairs)
    if len(leaves) < len(pairs):
        paths = [path for path, _ in pairs]
        twice = next(path for path in paths if paths.count(path) > 1)
        raise CheckpointError(
            f"two leaves of the state have the path {twice!r}; rename the key with a slash"
        )
    return leaves


def even_shards(path: LeafPath, shape: Shape, leaf: Leaf) -> EvenShards:
    """The resharding of a padded leaf to the model's shape.

    Raises:
        CheckpointError: if it is not on a mesh.
    """
    place = leaf.sharding
    if not isinstance(place, NamedSharding):
        raise CheckpointError(
            f"leaf {path} of the state is padded to {tuple(leaf.shape)} from {tuple(shape)}, but "
            f"has the sharding {place}; pass the state as the step returned it, on its mesh"
        )
    return EvenShards(shape, place)


def without_padding(state: PyTree, arrays: Mapping[LeafPath, Array]) -> dict[LeafPath, Array]:
    """Returns the arrays of a state with the padded ones in the model's shapes, split evenly.

    Raises:
        CheckpointError: if a padded array is not on a mesh.
    """
    even = {
        path: even_shards(path, shape, arrays[path]).of(arrays[path])
        for path, shape in paddings_in(state).items()
    }
    return {**arrays, **even}


def as_array(path: LeafPath, leaf: Leaf) -> Array:
    """Converts a leaf to a JAX array; numbers and numpy arrays go to the default device.

    Raises:
        CheckpointError: if JAX cannot convert it, or would change its dtype, as it does to int64
            by default.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        array = jnp.asarray(leaf)
    except OverflowError as error:
        raise CheckpointError(
            f"leaf {path} of the state is the number {leaf}: {error}; keep it smaller, or set "
            "jax_enable_x64"
        ) from error
    except (TypeError, ValueError) as error:
        dtype = f" of dtype {leaf.dtype}" if hasattr(leaf, "dtype") else ""
        raise CheckpointError(
            f"leaf {path} of the state is of type {type(leaf).__name__}{dtype}; only arrays, "
            "random keys and numbers can be saved: remove it from the state, or put it into meta"
        ) from error
    if isinstance(leaf, (np.ndarray, np.generic)) and array.dtype != leaf.dtype:
        raise CheckpointError(
            f"leaf {path} is a numpy {leaf.dtype}, which JAX would turn into {array.dtype}; "
            f"convert it, or set jax_enable_x64"
        )
    return array


def to_stored(leaf: Array) -> Array:
    """The stored form of a leaf: its values, or the data of random keys, [..., words] uint32."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def stored_target(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of `to_stored(leaf)`; the words of a key are not split."""
    if not is_key(leaf):
        return leaf
    words = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=leaf.sharding)


def from_stored(stored: Array, target: jax.ShapeDtypeStruct) -> Array:
    """The inverse of `to_stored`; `target` describes the leaf."""
    return jax.random.wrap_key_data(stored, impl=_key_impl(target)) if is_key(target) else stored


def described(target: PyTree) -> dict[LeafPath, jax.ShapeDtypeStruct]:
    """The shape, dtype and sharding of every leaf of a target.

    Numbers and numpy arrays have no sharding. They are replicated over the mesh of the other
    leaves; if none is on a mesh, they go to the default device of a single process.

    Raises:
        CheckpointError: if a `ShapeDtypeStruct` has no sharding, or a leaf is something else, or
            several processes have a number or numpy array and no mesh.
    """
    leaves = named_leaves(target)
    places = (getattr(leaf, "sharding", None) for leaf in leaves.values())
    meshes = (place.mesh for place in places if isinstance(place, NamedSharding))
    mesh = next(meshes, None)
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return {path: _described(path, leaf, whole) for path, leaf in leaves.items()}


def _described(path: LeafPath, leaf: Leaf, whole: NamedSharding | None) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    shape = getattr(leaf, "shape", ())
    dtype = getattr(leaf, "dtype", None)
    is_host = isinstance(leaf, (*_NUMBERS, np.ndarray))
    if is_host:
        array = as_array(path, _sample(leaf))
        dtype = array.dtype
        sharding = array.sharding if whole is None and _is_alone() else whole
    if sharding is None:
        # A shape is no hint that the leaf is small, so it gets no default device.
        raise CheckpointError(
            f"leaf {path} of the target is a {type(leaf).__name__} without a sharding; give "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=...), as target_of makes them"
            f"{_OR_A_MESH if is_host else ''}"
        )
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


_OR_A_MESH = ", or let another leaf of the target be on the mesh of all processes"


def _is_alone() -> bool:
    """Whether there is one process; the default device of each of several is another one."""
    return len({device.process_index for device in available_devices()}) == 1


_PLAIN = (bool, int, float, complex)
_NUMBERS = (*_PLAIN, np.generic)


def _plain_type(number: complex) -> type[complex]:
    """The type of a number; for an instance of a subclass, such as an enum, the built-in type."""
    return next(kind for kind in _PLAIN if isinstance(number, kind))


def _sample(leaf: Any) -> Any:
    """A small leaf of the same dtype, of which only the dtype is used."""
    if isinstance(leaf, np.ndarray):
        return np.empty(0, leaf.dtype)
    # The value of a number may be too large for JAX, while that in the checkpoint is not.
    return leaf if isinstance(leaf, np.generic) else _plain_type(leaf)()


def in_form_of(target: PyTree, arrays: Iterable[Array]) -> PyTree:
    """Puts restored arrays, in the order of the leaves, into the structure of a target.

    Numbers of the target come back as numbers of their types; those of a subclass, such as an
    enum, as numbers of the built-in type, because a subclass may not take every value.
    """
    leaves, structure = jax.tree.flatten(target)
    return structure.unflatten(map(_in_form_of, leaves, arrays))


def _in_form_of(leaf: Leaf, array: Array) -> Any:
    if not isinstance(leaf, _NUMBERS):
        return array
    number = np.asarray(array)
    return number[()] if isinstance(leaf, np.generic) else _plain_type(leaf)(number.item())


def target_of(abstract: PyTree, shardings: PyTree) -> PyTree:
    """Combines shapes and shardings into a target for `load_checkpoint`.

    Args:
        abstract: arrays or `ShapeDtypeStruct`s, such as `step.abstract_state`.
        shardings: the same tree of shardings, such as `step.state_shardings`.

    Returns:
        The same tree of `ShapeDtypeStruct`s with shardings.

    Example:
        >>> from axon_dist.mesh import World
        >>> from jax.sharding import NamedSharding, PartitionSpec
        >>> split = NamedSharding(World.emulate(8).mesh, PartitionSpec("dp"))
        >>> target_of({"w": jnp.zeros(16)}, {"w": split})["w"].sharding.shard_shape((16,))
        (2,)
    """
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
    )


def _key_impl(target: jax.ShapeDtypeStruct) -> Any:
    """The implementation of random keys; JAX returns it only for arrays and tracers."""
    impls = []
    jax.eval_shape(lambda keys: impls.append(jax.random.key_impl(keys)), target)
    return impls[0]


def is_main() -> bool:
    """Whether this is process 0, which makes decisions and writes files that are written once."""
    return process_index() == 0


def broadcast_json(value: object, source: int = 0) -> Any:
    """Broadcasts a value from process 0 or another process; all must call this.

    Args:
        value: a JSON value; ignored on processes other than the source.
        source: the process that sends.
    """

    def sent(x: np.ndarray) -> np.ndarray:
        is_source = process_index() == source
        return np.asarray(multihost_utils.broadcast_one_to_all(x, is_source=is_source))

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(sent(np.asarray(text.size, np.int32)))
    padded = np.zeros(size, np.uint8)
    padded[: text.size] = text[:size]
    return json.loads(bytes(sent(padded)))


def on_main(action: Callable[[], Any]) -> Any:
    """Runs an action on process 0 only, and returns its result or raises its error on all.

    Args:
        action: returns a JSON value.

    Raises:
        AxonDistError: if the action raised an error of this library.
    """
    outcome: dict[str, Any] = {}
    if is_main():
        try:
            outcome = {"result": action()}
        except AxonDistError as error:
            outcome = {"kind": type(error).__name__, "text": str(error)}
    outcome = broadcast_json(outcome)
    if "kind" in outcome:
        raise getattr(errors, outcome["kind"])(outcome["text"])
    return outcome["result"]


_FORMAT = 1
_PACKAGES = ("axon_dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_READERS = ("tokenizers", "jinja2", "pillow", "pyarrow")
"""Packages that turn files into samples."""


class StateDictType(NamedChoice):
    """How the values of a checkpoint are written; both types restore onto any mesh."""

    FULL = "full"
    """Process 0 gathers the whole state in host memory and writes one safetensors file."""
    SHARDED = "sharded"
    """Every process writes the shards it owns, through Orbax."""


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint.

    Args:
        size: its size in bytes.
        crc32: the CRC-32 of its contents.
    """

    size: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The metadata of a checkpoint, stored as JSON next to its values.

    Args:
        type: how the values are stored.
        leaves: dtype and shape of every leaf.
        checksums: the checksum of every leaf, independent of the mesh.
        mesh: sizes of the mesh axes of the saved state; empty on a single device.
        versions: the versions of the packages that wrote it.
        meta: user data, such as the config and the position in the data.
        score: for choosing the best checkpoints, lower is better; None without one.
        serial: how many checkpoints were written into the folder before it.
        files: every file except the manifest and the marker, by path inside the checkpoint.
        format: the version of this layout.
    """

    type: StateDictType
    leaves: Mapping[LeafPath, LeafSpec]
    checksums: Mapping[LeafPath, int]
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    meta: Mapping[str, Any]
    score: float | None = None
    serial: int = 0
    files: Mapping[str, FileRecord] = dataclasses.field(default_factory=dict)
    format: int = _FORMAT

    def to_json(self) -> str:
        """Formats the manifest as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parses the output of `to_json`.

        Raises:
            CheckpointError: if a newer version of this library wrote it.
            DamagedCheckpointError: if it is malformed.
        """
        what = f"{MANIFEST} was not written by a save"
        damaged = errors.DamagedCheckpointError
        with reworded(what, "use another checkpoint", damaged, MALFORMED):
            data = json.loads(text)
            if not is_whole(data["format"]):
                raise TypeError(f"the format is {data['format']!r:.60}")
            if data["format"] > _FORMAT:
                raise CheckpointError(
                    f"the checkpoint has format {data['format']}, this version reads formats up to "
                    f"{_FORMAT}; install axon_dist {data['versions'].get('axon_dist')} or newer"
                )
            _check_parts(data)
            data["type"] = {str(kind): kind for kind in StateDictType}[data["type"]]
            data["files"] = {name: FileRecord(**record) for name, record in data["files"].items()}
            data["leaves"] = leaf_specs(data["leaves"])
            return cls(**data)


def _check_parts(data: Mapping[str, Any]) -> None:
    """Raises `TypeError` unless the fields of a manifest have the right types."""
    sizes = [size for leaf in data["leaves"].values() for size in leaf["shape"]]
    numbers = [data["serial"], *data["checksums"].values(), *sizes]
    for record in data["files"].values():
        numbers += [record["size"], record["crc32"]]
    odd = [number for number in numbers if not is_whole(number) or not 0 <= number < 2**63]
    if odd:
        raise TypeError(f"it has {odd[0]!r:.60} instead of a whole number")
    if data["score"] is not None and not is_number(data["score"]):
        raise TypeError(f"its score is {data['score']!r:.60}")
    if not all(isinstance(data[name], dict) for name in ("meta", "mesh", "versions", "checksums")):
        raise TypeError("a part of it is not a section")
    if data["checksums"].keys() != data["leaves"].keys():
        raise TypeError("leaves and checksums have different names")
    outside = [name for name in data["files"] if name.startswith("/") or ".." in name.split("/")]
    if outside:
        raise TypeError(f"it names the file {outside[0]!r:.80}, which no checkpoint has")


def check_meta(meta: Any) -> None:
    """Raises `CheckpointError`, with the key, unless `meta` can be written as JSON."""
    if not isinstance(meta, Mapping):
        raise CheckpointError(
            f"meta is of type {type(meta).__name__}; give a mapping that JSON can represent"
        )
    for key, value in meta.items():
        what = f"the meta of a checkpoint is written as JSON, and {key!r} in it cannot be"
        advice = (
            "use dicts with string keys, lists, strings, numbers, booleans and None, or put "
            "arrays into the state"
        )
        with reworded(what, advice, CheckpointError, MALFORMED):
            json.dumps({key: value})


def installed_versions() -> dict[str, str]:
    """The versions of installed packages that a checkpoint or the data depends on."""
    versions = {}
    for name in (*_PACKAGES, *_READERS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def mesh_shape(arrays: Iterable[Array]) -> dict[str, int]:
    """The mesh sizes of the first array on a mesh; empty if there is none."""
    for array in arrays:
        if isinstance(array.sharding, NamedSharding):
            return {str(axis): size for axis, size in array.sharding.mesh.shape.items()}
    return {}


def spec_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> LeafSpec:
    """The `LeafSpec` of an array or a `ShapeDtypeStruct`."""
    return LeafSpec(str(leaf.dtype), tuple(leaf.shape))
