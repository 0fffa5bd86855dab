"""`Manifest`: what a checkpoint says about itself."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from ..core.errors import CheckpointError, ConfigError, did_you_mean
from ..core.told import is_number, is_whole
from ..core.typing import Array
from ..core.typing import Path as LeafPath
from .layout import LeafSpec

_FORMAT = 1
_PACKAGES = ("axon_dist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class StateDictType(enum.StrEnum):
    """Who writes the values of a checkpoint; either kind restores onto any mesh."""

    FULL = "full"
    """Process 0 gathers the whole state in host memory and writes one safetensors file."""
    SHARDED = "sharded"
    """Every process writes the shards it owns, through Orbax."""

    @classmethod
    def _missing_(cls, value: object) -> StateDictType:
        raise ConfigError(
            f"unknown type of checkpoint {value!r}.{did_you_mean(str(value), list(cls))}"
        )


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint.

    Args:
        size: in bytes.
        crc32: of its contents.
    """

    size: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself, as JSON beside its values.

    Args:
        type: how the values are stored.
        leaves: dtype and shape of every leaf.
        checksums: of every leaf, independent of the mesh.
        mesh: sizes of the mesh axes that the state was on; empty on a single device.
        versions: of the packages that wrote it.
        meta: whatever the caller had to say, such as the config and the position in the data.
        score: what the best checkpoints are chosen by, lower being better; None without one.
        serial: how many checkpoints were written into the folder before it.
        files: every file but the manifest and the marker, by path inside the checkpoint.
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
        """Writes itself as text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what `to_json` wrote.

        Raises:
            CheckpointError: when a newer version of this library wrote it.
        """
        data = json.loads(text)
        if not is_whole(data["format"]):
            raise TypeError(f"the format is {data['format']!r:.60}")
        if data["format"] > _FORMAT:
            raise CheckpointError(
                f"the checkpoint has format {data['format']}, this version reads formats up to "
                f"{_FORMAT}; install axon_dist {data['versions'].get('axon_dist')} or newer"
            )
        _check_parts(data)
        leaves = {
            path: LeafSpec(leaf["dtype"], tuple(leaf["shape"]))
            for path, leaf in data["leaves"].items()
        }
        files = {name: FileRecord(**record) for name, record in data["files"].items()}
        return cls(
            **{**data, "type": StateDictType(data["type"]), "leaves": leaves, "files": files}
        )


def _check_parts(data: Mapping[str, Any]) -> None:
    """Raises `TypeError` unless what a manifest says is of the kinds that a save writes."""
    sizes = [size for leaf in data["leaves"].values() for size in leaf["shape"]]
    numbers = [data["serial"], *data["checksums"].values(), *sizes]
    for record in data["files"].values():
        numbers += [record["size"], record["crc32"]]
    odd = [number for number in numbers if not is_whole(number) or number < 0]
    if odd:
        raise TypeError(f"it has {odd[0]!r:.60} where a whole number must be")
    if data["score"] is not None and not is_number(data["score"]):
        raise TypeError(f"its score is {data['score']!r:.60}")
    if not all(isinstance(data[name], dict) for name in ("meta", "mesh", "versions", "checksums")):
        raise TypeError("a part of it is no section")
    if data["checksums"].keys() != data["leaves"].keys():
        raise TypeError("leaves and checksums are not of the same arrays")
    outside = [name for name in data["files"] if name.startswith("/") or ".." in name.split("/")]
    if outside:
        raise TypeError(f"it names the file {outside[0]!r:.80}, which is none of its own")


def check_meta(meta: Any) -> None:
    """Raises `CheckpointError`, naming the key, unless JSON holds what a checkpoint is to carry."""
    if not isinstance(meta, Mapping):
        raise CheckpointError(
            f"meta is of type {type(meta).__name__}; give a mapping that JSON holds"
        )
    for key, value in meta.items():
        try:
            json.dumps({key: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the meta of a checkpoint is written as JSON, and {key!r} in it cannot be: "
                f"{error}; make it of dicts with text keys, lists, texts, numbers, booleans and "
                "None, or put arrays into the state"
            ) from error


def installed_versions() -> dict[str, str]:
    """The versions of the packages that a checkpoint depends on, where they are installed."""
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def mesh_shape(arrays: Iterable[Array]) -> dict[str, int]:
    """The mesh of the first array that lies on one; empty where none does."""
    for array in arrays:
        if isinstance(array.sharding, NamedSharding):
            return {str(axis): size for axis, size in array.sharding.mesh.shape.items()}
    return {}


def spec_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> LeafSpec:
    """The dtype and global shape of an array or of its description."""
    return LeafSpec(str(leaf.dtype), tuple(leaf.shape))
