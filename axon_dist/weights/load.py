"""`load_weights`: fills a model, or the initial train state, with weights from files."""

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
from ..step.init_programs import InSlices
from .adapters import adapter_rules, fitted
from .files import find_tensors
from .match import ParameterSource, match_weights


def place(source: ParameterSource, target: jax.ShapeDtypeStruct) -> Array:
    """Reads a parameter shard by shard; puts each shard on its devices before it reads the next.

    Args:
        source: the parts of files that hold the parameter.
        target: its shape, dtype and sharding. Only shards on devices of this process are read,
            each of them once.

    Returns:
        The array.
    """
    sharding: Any = target.sharding
    indices = sharding.addressable_devices_indices_map(target.shape)
    devices_of: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in indices.items():
        bounds = (dim.indices(n)[:2] for dim, n in zip(index, target.shape, strict=True))
        devices_of.setdefault(tuple(bounds), []).append(device)
    shards: list[Array] = []
    for bounds, devices in devices_of.items():
        values = source.read([slice(*bound) for bound in bounds])
        for device in devices:
            kind = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            shards.append(jax.device_put(values, kind))
        # Wait, because the host copy cannot be freed before the transfer has ended.
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
    r"""Fills the initial state of a training step, or a plain model, from safetensors files.

    The result is the same as making the model on one device, replacing its arrays by those of the
    files, and sharding it by the strategy. But loading works shard by shard: host memory never
    holds more than one shard and a piece of the file. Names and shapes are compared first, so a
    mismatch raises before any array is made.

    Args:
        model: a step of any strategy; or an `nnx.Module`; or a function of no arguments that makes
            a module, whose initial values are then not computed.
        files: a safetensors file, several files, or a folder with one file or an index, such as the
            local snapshot of a hub repository. Every process of a run reads what it needs.
            `[snapshot, adapters]` fills a model made by `lora` from a snapshot and from adapters
            that peft wrote.
        rules: the table that maps tensors to arrays; or a key of `FORMATS` for a `Transformer`; or
            None if tensors are named by the paths of arrays, as `save_weights` names them.
        cast: whether to convert between float dtypes, rounding to nearest; otherwise tensors must
            have the dtype of the model's arrays.
        keep: regular expressions of paths; their arrays keep the model's initial values if the
            files have none, such as `r".*/lora_[ab]"`.
        differ: fields of a `TransformerConfig` in which the model may differ from the
            `config.json` next to the files, such as `"rope_theta"`. A difference in any other
            field raises.

    Returns:
        The initial state of the step, with a fresh optimizer state as from `step.init()`; or a new
        module, its arrays on the default device.

    Raises:
        CheckpointError: when tensors are missing, left over, or have the wrong shape or dtype, or
            when a file cannot be read.
        ConfigError: when the rules are invalid or the format is unknown, or when the model is not
            the one that a `config.json` next to the files describes.
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
    model_spec, source = split_model(model)
    shapes = weight_shapes(model_spec)
    sources = wanted.find(model_spec.abstract, shapes)
    here = jnp.zeros(()).sharding

    arrays = {path: place(x, shapes[path].update(sharding=here)) for path, x in sources.items()}

    def replaced(tree):
        return map_with_path(lambda path, leaf: arrays.get(path, leaf), tree)

    initial: Any = source.arrays
    if source.make is not None:
        leaves = [*leaves_with_paths(model_spec.weights), *leaves_with_paths(model_spec.buffers)]
        absent = {path for path, _ in leaves} - set(arrays)
        make = source.make
        # Compute initial values only for arrays that are not in the files.
        drawn = InSlices(lambda: _only(make(), absent), dict.fromkeys(absent, here))
        arrays |= drawn() if absent else {}
        initial = model_spec.weights, model_spec.buffers
    return model_spec.merge(*map(replaced, initial))


def check_weights(
    step: TrainStep,
    files: Files,
    rules: WeightRules | str | None = None,
    *,
    cast: bool = False,
    keep: str | Iterable[str] = (),
    differ: str | Iterable[str] = (),
) -> None:
    """Runs the checks of `load_weights`: compares names, shapes and dtypes of files with a step.

    Args:
        step: the step.
        files: as for `load_weights`.
        rules: as for `load_weights`.
        cast: as for `load_weights`.
        keep: as for `load_weights`.
        differ: as for `load_weights`.

    Raises:
        AxonDistError: any error that `load_weights` would raise before it reads an array.
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)
    _Wanted(files, rules, cast, keep, differ).of_step(step)


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """The arguments of `load_weights`, without the model."""

    files: Files
    rules: WeightRules | str | None
    cast: bool
    keep: tuple[str, ...]
    differ: str | Iterable[str]

    def of_step(self, step: TrainStep) -> dict[Path, ParameterSource]:
        """Finds the sources of a step's parameters; checks that all processes find the same."""
        try:
            sources = self.find(step.model_spec.abstract, step.weight_targets)
            error = None
        except AxonDistError as caught:
            # Raise it only after `agree`, which all processes must reach.
            sources = {}
            error = caught
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
        """Returns the source of each target, an array of the model."""
        table = rules_for(self.rules, model)
        table.validate()
        check_snapshot(self.files, model, self.rules, self.differ)
        entries = find_tensors(self.files)
        files = self.files
        source = f"{len(files)} files" if isinstance(files, list | tuple) else repr(str(files))
        entries = fitted(entries, table, model, targets)
        keep = (*self.keep, *table.own)
        table = dataclasses.replace(table, rules=(*adapter_rules(table).rules, *table.rules))
        return match_weights(entries, targets, table, files=source, cast=self.cast, keep=keep)


def _only(trees: Any, paths: set[Path]) -> dict[Path, Any]:
    pairs = [pair for tree in trees for pair in leaves_with_paths(tree)]
    return {path: leaf for path, leaf in pairs if path in paths}
