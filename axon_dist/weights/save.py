"""`save_weights`: writes a model as safetensors, with its own names or those of a hub format."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..checkpoint import gather, on_main, plan_order, write_gathered
from ..core.checks import COUNT, is_dtype
from ..core.errors import CheckpointError, ConfigError, DTypeError, reworded
from ..core.files import as_path, read_bytes, replace_text
from ..core.own_context import in_own_context
from ..core.tree import leaves_by_path, leaves_with_paths
from ..core.typing import Array, Path, Shape
from ..models.formats import FORMATS, config_of, rules_for
from ..models.snapshot import ADAPTER_CONFIG, CONFIG_FILE, ENDING, INDEX
from ..models.weight_rules import WeightRule, WeightRules, shorten
from ..nn import is_tied
from ..step import TrainState, TrainStep
from .adapters import (
    ADAPTER_STEM,
    PREFIX,
    adapter_config,
    adapter_rules,
    adapter_scales,
    check_named,
    is_rslora,
)


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A tensor to be written: applies a rule in the inverse direction.

    Args:
        name: the name of the tensor.
        rule: the rule that reads it.
        paths: the parameters that the tensor is made from.
        dtype: the dtype of the tensor.
        shape: the shape of the tensor.
        row: the index in the leading (stacked) dims of the parameter; empty for all.
        cut: start and stop along `rule.dim` of the parameter; None for all.
    """

    name: str
    rule: WeightRule
    paths: tuple[Path, ...]
    dtype: np.dtype
    shape: Shape
    row: tuple[int, ...] = ()
    cut: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def values(self, weights: Mapping[Path, Array]) -> Iterator[np.ndarray]:
        """Yields the tensor on process 0 and nothing elsewhere; all processes must iterate."""
        leaves = [weights[path][self.row] if self.row else weights[path] for path in self.paths]
        if self.cut is not None:
            along = (slice(None),) * self.rule.dim + (slice(*self.cut),)
            leaves = [leaf[along] for leaf in leaves]
        arrays = list(gather(leaves))
        if arrays:
            whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, self.rule.dim)
            yield self.rule.as_form.inverse.apply(whole).astype(self.dtype)


def outgoing(
    weights: Mapping[Path, Any], rules: WeightRules, dtype: np.dtype | None = None
) -> list[Outgoing]:
    """Returns the tensors to write for the arrays of a model; each array is written once.

    Args:
        weights: anything with shape and dtype, by path.
        rules: the table that maps tensors to arrays.
        dtype: replaces other float dtypes; None keeps them.

    Raises:
        ConfigError: when an array has no rule, a name is not unique, or a different rule would read
            the tensor back.
    """
    tensors: dict[str, Outgoing] = {}
    unnamed = []
    done = set()
    for path in weights:
        if path in done or any(re.fullmatch(pattern, path) for pattern in rules.own):
            continue
        hit = next(((r, groups) for r in rules.rules if (groups := r.groups_of(path))), None)
        if hit is None:
            unnamed.append(path)
            continue
        rule, (_, groups) = hit
        paths = rule.paths_of(groups)
        if absent := [other for other in paths if other not in weights]:
            raise ConfigError(
                f"{rule} needs {shorten(absent)}, which the model does not have",
                code="parameter-missing-in-model",
            )
        done.update(paths)
        for tensor in _tensors(rule, groups, {p: weights[p] for p in paths}, dtype):
            _check_read_back(tensor, rules)
            if tensor.name in tensors:
                raise ConfigError(f"{rule} gives the name {tensor.name!r} a second time")
            tensors[tensor.name] = tensor
    if unnamed:
        raise ConfigError(
            f"no rule gives a name for {shorten(unnamed)}; add rules, or write the native format",
            code="arrays-without-rule",
        )
    return list(tensors.values())


def _tensors(
    rule: WeightRule, groups: Mapping[str, str], leaves: Mapping[Path, Any], dtype: np.dtype | None
) -> Iterator[Outgoing]:
    first, *others = leaves.values()
    stored = np.dtype(first.dtype)
    kind = dtype if dtype is not None and is_dtype(stored, jnp.floating) else stored
    lead = len(rule.stacked)
    rows = list(itertools.product(*map(range, first.shape[:lead])))
    shape = list(first.shape[lead:])
    if others:
        shape[rule.dim] = sum(leaf.shape[rule.dim - len(shape)] for leaf in leaves.values())
    cuts = _cuts(rule, shape)
    for row in rows:
        for number, cut in enumerate(cuts):
            extent = [*shape]
            if cut is not None:
                extent[rule.dim] = cut[1] - cut[0]
            indices = dict(zip(rule.stacked, map(str, row), strict=True))
            name = rule.name_of(number, {**groups, **indices})
            form = rule.as_form.inverse
            if fault := form.fault(tuple(extent)):
                raise ConfigError(f"{rule} cannot write {' + '.join(leaves)}: {fault}")
            yield Outgoing(name, rule, tuple(leaves), kind, form.shape_of(tuple(extent)), row, cut)


def _cuts(rule: WeightRule, shape: list[int]) -> list[tuple[int, int] | None]:
    count = len(rule.names)
    if count == 1:
        return [None]
    length = shape[rule.dim]
    sizes = rule.split_sizes or (length // count,) * count
    if sum(sizes) != length:
        raise ConfigError(
            f"{rule}: split_sizes {list(sizes)} do not add up to the length {length} of dim "
            f"{rule.dim}"
        )
    return [*itertools.pairwise(itertools.accumulate(sizes, initial=0))]


def _check_read_back(tensor: Outgoing, rules: WeightRules) -> None:
    """Raises unless the first rule that matches the name reads the tensor back."""
    reader, hit = next(
        ((r, hit) for r in rules.rules if (hit := r.match(tensor.name))), (None, None)
    )
    if reader is None or hit is None or reader.paths_of({**hit[1]}) != tensor.paths:
        raise ConfigError(
            f"{tensor.rule} would write {tensor.name!r}, which {reader or 'no rule'} reads; put "
            "rules with longer names first"
        )


MAX_FILE = 5 * 10**9
"""The maximum bytes of a file; larger weights are written as several files, as on the hub."""


@in_own_context
def save_weights(
    model: nnx.Module | TrainState,
    path: str | FilePath,
    rules: WeightRules | str | None = None,
    *,
    step: TrainStep | None = None,
    dtype: str | None = None,
    max_file: int = MAX_FILE,
    keys: Mapping[str, Any] | None = None,
) -> None:
    """Writes every array of a model except its random streams; the inverse of `load_weights`.

    All processes of a run call it. Process 0 writes the files, with one tensor in memory at a time.

    Args:
        model: an `nnx.Module`; or the state of a step, together with `step`.
        path: a file that ends in `.safetensors`, or a folder for `model.safetensors`. The file
            appears under its name once it is complete. With a hub format, a `config.json` is
            written next to it. Its `torch_dtype` is the dtype of the floats written; if there are
            several, the one with the most bytes.
        rules: as for `load_weights`, applied in reverse.
        step: the step of that state.
        dtype: the dtype of floats, such as `"bfloat16"`; None keeps that of the model.
        max_file: the maximum bytes of a file. Larger weights go into several files
            `model-00001-of-00003.safetensors`, and `model.safetensors.index.json` maps tensors to
            files. A single tensor is never split.
        keys: further entries of a hub's `config.json`, which a model does not determine, such as
            `{"eos_token_id": 2}`.

    Raises:
        ConfigError: when the rules do not name an array or cannot be reversed, or when the folder
            has a different `config.json` or other weights that would be mixed with these.
        CheckpointError: when the files cannot be written.
        UnsupportedError: when the model is not of the family of a format.

    Example:
        >>> import tempfile
        >>> from axon_dist.checkpoint import open_tensors
        >>> path = tempfile.mkdtemp() + "/w.safetensors"
        >>> save_weights(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), path, dtype="bfloat16")
        >>> {name: str(x.dtype) for name, x in open_tensors(FilePath(path)).items()}
        {'bias': 'bfloat16', 'kernel': 'bfloat16'}
    """
    COUNT.check("save_weights", "max_file", max_file)
    structure, weights = _weights(model, step)
    table = rules_for(rules, structure)
    table.validate()
    tensors = outgoing(weights, table, _float_dtype(dtype))
    folder, stem = _place(as_path(path, "the weights"))
    config = _hub_config(rules, structure, tensors, keys or {})
    _Export(folder, stem, _files(tensors, stem, max_file), config).write(weights)


@in_own_context
def save_adapters(
    model: nnx.Module | TrainState,
    path: str | FilePath,
    rules: WeightRules | str,
    *,
    step: TrainStep | None = None,
    dtype: str | None = None,
    base: str | None = None,
    modules: str | tuple[str, ...] = (),
) -> None:
    """Writes the adapters of a model in peft's format: `adapter_config.json` and safetensors.

    `load_weights(model, [snapshot, path], rules)` and `PeftModel.from_pretrained` can read them.
    The adapted kernels are not written. Other parameters that the step trains, such as a head or
    norms, are written in full, as `modules_to_save`. All processes of a run call it.

    Args:
        model: a model from `axon_dist.lora`; or the state of a step of such a model, with `step`.
        path: a folder.
        rules: the format of the base model, or rules for its kernels.
        step: the step of that state.
        dtype: the dtype of floats, such as `"bfloat16"`; None keeps that of the adapters.
        base: the path or name of the base model, such as `"org/name"`, for peft; None writes null.
        modules: regular expressions of paths of further parameters, whose layers are written in
            full.

    Raises:
        ConfigError: when the model has no adapters, when the format has no names for them, or when
            other files are in the folder.
        CheckpointError: when the files cannot be written.
        UnsupportedError: when the model is not of the family of a format.
    """
    structure, weights = _weights(model, step)
    table = rules_for(rules, structure)
    named = adapter_rules(table)
    inside = {p: x for p, x in weights.items() if p.rpartition("/")[0].endswith("lora")}
    check_named(inside, named)
    kind = _float_dtype(dtype)
    scales = adapter_scales(structure)
    tensors = outgoing(inside, named, kind)
    plain = {p: x for p, x in weights.items() if p not in inside}
    everything = outgoing(plain, table)
    layers = _scales_of_layers(tensors, scales)
    tensors, layers = _combined(tensors, everything, layers, plain)
    trained = [p for p, _ in leaves_with_paths(step.model_spec.params)] if step is not None else []
    whole = _whole_modules(trained, modules, plain, everything, table)
    _check_whole(whole, layers, structure)
    tensors += [
        dataclasses.replace(t, name=PREFIX + t.name)
        for t in outgoing(plain, table, kind)
        if t.name.rpartition(".")[0] in whole
    ]
    config = adapter_config(
        {tensor.name: tensor.shape for tensor in tensors},
        layers,
        [t.name.removesuffix(".weight") for t in everything if t.name.endswith(".weight")],
        base,
        rslora=is_rslora(structure),
        modules=whole,
    )
    files = _files(tensors, ADAPTER_STEM, MAX_FILE)
    folder = as_path(path, "the adapters")
    _Export(folder, ADAPTER_STEM, files, _json(config), ADAPTER_CONFIG).write(weights)


_FACTOR = re.compile(r"(?P<layer>.+)\.lora_(?:embedding_)?(?P<factor>[AB])(?:\.weight)?")


def _scales_of_layers(tensors: list[Outgoing], scales: Mapping[Path, float]) -> dict[str, float]:
    """Returns the scale of each layer's adapter, by the layer's name in the file."""
    found: dict[str, float] = {}
    for tensor in tensors:
        hit = _FACTOR.fullmatch(tensor.name.removeprefix(PREFIX))
        if hit is not None:
            found[hit["layer"]] = scales.get(tensor.paths[0].rpartition("/")[0], 1.0)
    return found


@dataclasses.dataclass(frozen=True)
class JoinedAdapters(Outgoing):
    """One adapter for the parts of a fused layer: A concatenated, or B block-diagonal.

    Args:
        members: the factor of each part, by its number.
        sizes: the number of outputs of each part.
        ranks: the rank of each part; 0 for a part without an adapter.
        factors: the multiplier of B for each part.
    """

    members: Mapping[int, Outgoing] = dataclasses.field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    factors: Mapping[int, float] = dataclasses.field(default_factory=dict)

    def values(self, weights: Mapping[Path, Array]) -> Iterator[np.ndarray]:
        """Yields the tensor on process 0; all processes must iterate."""
        parts = {n: [*member.values(weights)] for n, member in self.members.items()}
        if not all(parts.values()):
            return
        arrays = {number: part[0] for number, part in parts.items()}
        if self.name.endswith("lora_A.weight"):
            yield np.concatenate([arrays[n] for n in sorted(arrays)]).astype(self.dtype)
            return
        rows = [*itertools.accumulate(self.sizes, initial=0)]
        columns = [*itertools.accumulate(self.ranks, initial=0)]
        block = np.zeros(self.shape, np.float32)
        for n, array in arrays.items():
            here = slice(rows[n], rows[n + 1]), slice(columns[n], columns[n + 1])
            block[here] = array.astype(np.float32) * np.float32(self.factors[n])
        yield block.astype(self.dtype)


def _combined(
    tensors: list[Outgoing],
    everything: list[Outgoing],
    scales: Mapping[str, float],
    plain: Mapping[Path, Any],
) -> tuple[list[Outgoing], dict[str, float]]:
    """Combines the adapters of each fused layer's parts; returns tensors, and scales by layer."""
    fused = {t.name.removesuffix(".weight"): t for t in everything if len(t.paths) > 1}
    groups: dict[tuple[str, str], dict[int, Outgoing]] = {}
    single: list[Outgoing] = []
    for tensor in tensors:
        hit = _FACTOR.fullmatch(tensor.name.removeprefix(PREFIX))
        layer, _, number = ("", "", "") if hit is None else hit["layer"].rpartition(".")
        if hit is not None and layer in fused and number.isdigit():
            groups.setdefault((layer, hit["factor"]), {})[int(number)] = tensor
        else:
            single.append(tensor)
    found = {layer: s for layer, s in scales.items() if layer.rpartition(".")[0] not in fused}
    for (layer, factor), members in groups.items():
        paths = fused[layer].paths
        of_part = {n: scales[f"{layer}.{n}"] for n in members}
        found[layer] = of_part[min(of_part)]
        axis = 0 if factor == "A" else 1
        ranks = tuple(members[n].shape[axis] if n in members else 0 for n in range(len(paths)))
        sizes = tuple(plain[path].shape[-1] for path in paths)
        first = members[min(members)]
        shape = (sum(ranks), first.shape[1]) if factor == "A" else (sum(sizes), sum(ranks))
        single.append(
            JoinedAdapters(
                f"{PREFIX}{layer}.lora_{factor}.weight",
                first.rule,
                tuple(path for member in members.values() for path in member.paths),
                first.dtype,
                shape,
                members=members,
                sizes=sizes,
                ranks=ranks,
                factors={n: s / found[layer] for n, s in of_part.items()},
            )
        )
    return single, found


def _whole_modules(
    trained: list[Path],
    modules: str | tuple[str, ...],
    plain: Mapping[Path, Any],
    everything: list[Outgoing],
    table: WeightRules,
) -> list[str]:
    """Returns the layers that are written in full: trained ones, and those that `modules` match."""
    patterns = (modules,) if isinstance(modules, str) else modules
    wanted = {path for path in trained if path in plain}
    for pattern in patterns:
        hits = {path for path in plain if re.search(pattern, path)}
        if not hits:
            raise ConfigError(
                f"save_adapters got modules={pattern!r}, which matches no parameter; there are "
                f"{shorten(list(plain))}",
                code="module-pattern",
            )
        wanted |= hits
    named = {path: t.name for t in everything for path in t.paths}
    unnamed = [p for p in wanted if p not in named and not _is_own(p, table)]
    if unnamed:
        raise ConfigError(
            f"peft has no name for {shorten(unnamed)}; do not train or name them",
            code="module-without-name",
        )
    names = {t.name.rpartition(".")[0] for t in everything if wanted & {*t.paths}}
    return sorted(names)


def _is_own(path: Path, table: WeightRules) -> bool:
    return any(re.fullmatch(pattern, path) for pattern in table.own)


def _check_whole(whole: list[str], adapted: Mapping[str, float], model: nnx.Module) -> None:
    """Raises for layers that peft cannot save in full together with adapters."""
    advice = "write the whole model: save_weights(merge_lora(model), path, rules)"
    if both := [layer for layer in whole if layer in adapted]:
        raise ConfigError(
            f"save_adapters got layers that both have adapters and are trained themselves, "
            f"{shorten(both)}, which peft's modules_to_save does not support; {advice}",
            code="adapted-and-trained",
        )
    if is_tied(model) and (tables := [x for x in whole if x.rpartition(".")[2] in _TABLES]):
        raise ConfigError(
            f"save_adapters got {shorten(tables)}, a trained embedding table that is tied to the "
            f"head; peft's modules_to_save would untie the two; {advice}",
            code="trained-tied-table",
        )


_TABLES = ("embed_tokens", "wte", "lm_head")


@dataclasses.dataclass(frozen=True)
class _Export:
    """Weight files in a folder, with an optional config file.

    Args:
        folder: the folder to write to.
        stem: the prefix of file names.
        files: the tensors by name, by file name.
        config: the text of the config file, if any. It is made before any file is written, so that
            an entry that JSON does not have leaves no weights without a config.
        config_name: the name of the config file.
    """

    folder: FilePath
    stem: str
    files: Mapping[str, Mapping[str, Outgoing]]
    config: str | None
    config_name: str = CONFIG_FILE

    def write(self, weights: Mapping[Path, Array]) -> None:
        """Writes all files; all processes call it."""
        on_main(self._check_free)
        on_main(self._begin)
        metadata = None if self.config is None else {"format": "pt"}
        for name, tensors in self.files.items():
            values = (array for tensor in tensors.values() for array in tensor.values(weights))
            write_gathered(self.folder / name, tensors, values, metadata)
        on_main(self._finish)

    def _check_free(self) -> None:
        """Raises if the folder has other files that would be mixed with these."""
        folder = self.folder
        stem = self.stem
        config_path = folder / self.config_name
        known = {*self.files, *([stem + ENDING + INDEX] if len(self.files) > 1 else [])}
        present = {*folder.glob(f"{stem}{ENDING}*"), *folder.glob(f"{stem}-?????-of-?????{ENDING}")}
        if others := sorted(path.name for path in present if path.name not in known):
            raise ConfigError(
                f"{str(folder)!r} has other weights, {', '.join(others[:3])}, that would be read "
                "together with these; remove them, or name another folder",
                code="other-weights-in-folder",
            )
        if self.config is None or not config_path.exists():
            return
        old = read_bytes(config_path, f"the config {str(config_path)!r}")
        if old != self.config.encode():
            raise ConfigError(
                f"{str(config_path)!r} exists, but is not the config of these weights; remove it, "
                "or name another folder",
                code="other-config-in-folder",
            )

    @property
    def _index(self) -> FilePath:
        return self.folder / f"{self.stem}{ENDING}{INDEX}"

    def _begin(self) -> None:
        """Removes the old index before files are replaced; the new index is written last.

        So a process killed in between does not leave a readable mix of old and new weights.
        """
        if len(self.files) > 1:
            with self._rewording(self._index):
                self._index.unlink(missing_ok=True)

    def _finish(self) -> None:
        if len(self.files) > 1:
            total = sum(tensor.size for inside in self.files.values() for tensor in inside.values())
            file_of = {name: file for file, inside in self.files.items() for name in inside}
            index = {"metadata": {"total_size": total}, "weight_map": file_of}
            with self._rewording(self._index):
                replace_text(self._index, _json(index))
        if self.config is not None:
            with self._rewording(self.folder / self.config_name):
                replace_text(self.folder / self.config_name, self.config)

    def _rewording(self, path: FilePath) -> contextlib.AbstractContextManager[None]:
        advice = "free disk space there, or name another folder"
        return reworded(f"cannot write {str(path)!r}", advice, CheckpointError)


def _weights(
    model: nnx.Module | TrainState, step: TrainStep | None
) -> tuple[nnx.Module, dict[Path, Array]]:
    """Returns the model, whose arrays may be shapes, and its arrays by path."""
    if isinstance(model, TrainState):
        if step is None:
            raise ConfigError(
                "a state alone does not define the model; give its step, too: "
                "save_weights(state, path, step=step)",
                code="state-without-step",
            )
        return step.model_spec.abstract, step.weights(model)
    if not isinstance(model, nnx.Module):
        raise ConfigError(
            f"model is a {type(model).__name__}; give an nnx.Module, or a state and its step"
        )
    arrays = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))
    return model, {path: jnp.asarray(x) for path, x in leaves_by_path(arrays).items()}


def _float_dtype(name: str | None) -> np.dtype | None:
    if name is not None and not is_dtype(name, jnp.floating):
        raise DTypeError(
            f"dtype={name!r} must be a float dtype, such as 'float32' or 'bfloat16'",
            code="dtype-not-float",
        )
    return None if name is None else jnp.dtype(name)


def _place(path: FilePath) -> tuple[FilePath, str]:
    """Returns the folder and the file name without its suffix."""
    if path.name.endswith(ENDING) and not path.is_dir():
        return path.parent, path.name.removesuffix(ENDING)
    return path, "model"


def _files(tensors: list[Outgoing], stem: str, max_file: int) -> dict[str, dict[str, Outgoing]]:
    """Assigns tensors to files."""
    groups: list[list[Outgoing]] = [[]]
    for tensor in tensors:
        if groups[-1] and sum(x.size for x in groups[-1]) + tensor.size > max_file:
            groups.append([])
        groups[-1].append(tensor)
    count = len(groups)
    names = [f"{stem}-{i:05d}-of-{count:05d}{ENDING}" for i in range(1, count + 1)]
    files = {}
    for name, group in zip(names if count > 1 else [stem + ENDING], groups, strict=True):
        by_name = {tensor.name: tensor for tensor in group}
        files[name] = {tensor: by_name[tensor] for tensor in plan_order(by_name)}
    return files


def _hub_config(
    rules: WeightRules | str | None,
    model: nnx.Module,
    tensors: list[Outgoing],
    keys: Mapping[str, Any],
) -> str | None:
    """Returns the text of a hub's `config.json`; None without a hub format."""
    if not isinstance(rules, str) or rules not in FORMATS:
        if keys:
            raise ConfigError(
                f"got keys={keys} without a hub format; leave them out, or name one",
                code="keys-without-hub-format",
            )
        return None
    config = FORMATS[rules].to_hub(config_of(model, rules))
    # The parameters may have been cast since the config of the model made them.
    stored = {} if (dtype := _main_dtype(tensors)) is None else {"torch_dtype": dtype.name}
    try:
        return _json({**config, **stored, **keys})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"config.json cannot hold keys={keys!r:.200} ({error}); give strings, numbers, lists "
            "and dicts of these with strings as keys",
            code="keys-not-json",
        ) from error


def _main_dtype(tensors: list[Outgoing]) -> np.dtype | None:
    """Returns the float dtype of most bytes, of two equal ones the wider; None without floats."""
    sizes: dict[np.dtype, int] = {}
    for tensor in tensors:
        if is_dtype(tensor.dtype, jnp.floating):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
    return max(sizes, key=lambda dtype: (sizes[dtype], dtype.itemsize), default=None)


def _json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, default=_plain) + "\n"


def _plain(value: object) -> Any:
    """Returns a number or an array of NumPy or JAX as JSON has it."""
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")
