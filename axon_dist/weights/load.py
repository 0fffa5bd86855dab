"""`load_weights`: a model, or the first state of its training, with the values of files."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.checks import TEXTS, checked
from ..core.errors import AxonDistError
from ..core.own_context import in_own_context
from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import Array, Path
from ..mesh import agree
from ..models.formats import rules_for
from ..models.snapshot import Files, check_snapshot
from ..models.weight_rules import WeightRules
from ..step import ModelLike, TrainState, TrainStep, split_model, weight_shapes
from ..step.init_programs import InParts
from .adapters import adapter_rules, fitted
from .files import find_tensors
from .match import ParameterSource, match_weights


def place(source: ParameterSource, target: jax.ShapeDtypeStruct) -> Array:
    """Reads a parameter shard by shard, each put on its devices before the next is read.

    Args:
        source: where its values are in the files.
        target: its shape and dtype, and the sharding to put it on; those shards alone are read
            that are on devices of this process, and each of them once.

    Returns:
        The array.
    """
    sharding: Any = target.sharding
    indices = sharding.addressable_devices_indices_map(target.shape)
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in indices.items():
        parts = (part.indices(n)[:2] for part, n in zip(index, target.shape, strict=True))
        devices_of.setdefault(tuple(parts), []).append(device)
    shards: list[Array] = []
    for parts, devices in devices_of.items():
        values = source.read([slice(*part) for part in parts])
        for device in devices:
            kind = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(values, kind))
        # Until a transfer has ended, the host's copy stays.
        jax.block_until_ready(shards)
    return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)


@overload
def load_weights(
    model: TrainStep,
    files: Files,
    rules: WeightRules | str | None = None,
    *,
    cast: bool = False,
    keep: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
) -> TrainState: ...
@overload
def load_weights(
    model: ModelLike,
    files: Files,
    rules: WeightRules | str | None = None,
    *,
    cast: bool = False,
    keep: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
) -> nnx.Module: ...
@in_own_context
@checked()
def load_weights(
    model: TrainStep | ModelLike,
    files: Files,
    rules: WeightRules | str | None = None,
    *,
    cast: bool = False,
    keep: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
) -> TrainState | nnx.Module:
    r"""Fills the first state of a training step, or a plain model, from safetensors files.

    Equals a model made on one device, its arrays replaced by those of the files, and split as the
    strategy says; but shard by shard: host memory never holds more than one shard
    and a piece of the file. Names and shapes are compared first, and whatever
    does not fit is refused before an array is made.

    Args:
        model: a step of any strategy; or an `nnx.Module`, or a function of no arguments that makes
            one, whose own first values are then not drawn.
        files: a safetensors file, several, or a folder with one, or with its index, such as the
            local snapshot of a hub's repository. Every process of a run reads what it needs.
            `[snapshot, adapters]` fills a model of `lora` from both, the latter as peft wrote them.
        rules: which tensor is which array; a key of `FORMATS` for a `Transformer`; None where
            tensors have the paths of the model's arrays, as `save_weights` names them.
        cast: convert between dtypes of floats, to nearest; otherwise tensors must have the dtype
            of the model's arrays.
        keep: regular expressions of paths whose arrays keep the model's own first values where the
            files have none, such as `r".*/lora_[ab]"`.
        differ: fields of a `TransformerConfig` in which the model may be another than the one of
            the `config.json` beside the files, such as `"rope_theta"`; whatever else differs from
            it is refused.

    Returns:
        The first state of the step, its optimizer as fresh as that of `step.init()`; or the module,
        a new one, its arrays on the default device.

    Raises:
        CheckpointError: naming what is missing in the files, left over, or of another shape or
            dtype; or when a file cannot be read.
        ConfigError: when the rules are wrong in themselves, or are no format; or when the model is
            not the one that a `config.json` beside the files describes.
        LaunchError: when the processes of a run see different files.

    Example:
        >>> import tempfile
        >>> from axon_dist.weights import save_weights
        >>> path = tempfile.mkdtemp() + "/w.safetensors"
        >>> save_weights(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), path)
        >>> model = load_weights(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(1)), path)
        >>> load_weights(lambda: nnx.Linear(2, 4, rngs=nnx.Rngs(1)), path)
        Traceback (most recent call last):
        axon_dist.core.errors.CheckpointError: the weights in ... do not fit the model: bias [3] of
        the files cannot be bias [4] of the model; kernel [2, 3] of the files cannot be ...
    """
    keep = (keep,) if isinstance(keep, str) else keep
    TEXTS.check("load_weights", "keep", keep)
    wanted = _Wanted(files, rules, cast, tuple(keep), differ)
    if isinstance(model, TrainStep):
        targets = model.weight_targets
        sources = wanted.of_step(model)
        return model.init({path: place(x, targets[path]) for path, x in sources.items()})
    parts, source = split_model(model)
    shapes = weight_shapes(parts)
    sources = wanted.find(parts.abstract, shapes)
    here = jnp.zeros(()).sharding

    arrays = {path: place(x, shapes[path].update(sharding=here)) for path, x in sources.items()}

    def replaced(tree):
        return map_with_path(lambda path, leaf: arrays.get(path, leaf), tree)

    first: Any = source.arrays
    if source.make is not None:
        both = [*leaves_with_paths(parts.weights), *leaves_with_paths(parts.buffers)]
        absent = {path for path, _ in both} - set(arrays)
        make = source.make
        # The arrays that are left out are not computed.
        drawn = InParts(lambda: _only(make(), absent), dict.fromkeys(absent, here))
        arrays |= drawn() if absent else {}
        first = parts.weights, parts.buffers
    return parts.merge(*map(replaced, first))


def check_weights(
    step: TrainStep,
    files: Files,
    rules: WeightRules | str | None = None,
    *,
    cast: bool = False,
    keep: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
) -> None:
    """Compares names, shapes and dtypes of files with a step, as `load_weights` does first.

    Args:
        step: the step.
        files: as for `load_weights`.
        rules: as for `load_weights`.
        cast: as for `load_weights`.
        keep: as for `load_weights`.
        differ: as for `load_weights`.

    Raises:
        AxonDistError: whatever `load_weights` would raise before it reads an array.
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    _Wanted(files, rules, cast, keep, differ).of_step(step)


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """What is read, and how; the arguments are those of `load_weights`."""

    files: Files
    rules: WeightRules | str | None
    cast: bool
    keep: tuple[str, ...]
    differ: str | Iterable[str]

    def of_step(self, step: TrainStep) -> dict[Path, ParameterSource]:
        """The sources that every process has for a step, or the error of one that has none."""
        try:
            sources, error = self.find(step.parts.abstract, step.weight_targets), None
        except AxonDistError as caught:
            sources, error = {}, caught
        if step.world.num_processes > 1:
            text = "" if error is None else str(error)
            kinds = [
                f"{path} {x.shape} {[str(p.entry.dtype) for p in x.pieces]}"
                for path, x in sources.items()
            ]
            files = zlib.crc32("\n".join([text, *kinds]).encode())
            agree(step.world, "weights", {"files": files, "error": text})
        if error is not None:
            raise error
        return sources

    def find(self, model: nnx.Module, targets: Mapping[Path, Any]) -> dict[Path, ParameterSource]:
        """The sources of some arrays of a model."""
        table = rules_for(self.rules, model)
        table.validate()
        check_snapshot(self.files, model, self.rules, self.differ)
        entries, files = find_tensors(self.files), self.files
        source = f"{len(files)} files" if isinstance(files, list | tuple) else repr(str(files))
        entries = fitted(entries, table, model, targets)
        keep = (*self.keep, *table.own)
        table = dataclasses.replace(table, rules=(*adapter_rules(table).rules, *table.rules))
        return match_weights(entries, targets, table, files=source, cast=self.cast, keep=keep)


def _only(trees: Any, paths: set[Path]) -> dict[Path, Any]:
    pairs = [pair for tree in trees for pair in leaves_with_paths(tree)]
    return {path: leaf for path, leaf in pairs if path in paths}
