"""Converts between PEFT's adapter files and the adapter parameters of a model.

A PEFT folder has safetensors and an `adapter_config.json`. A layer `NAME` has the tensors
`base_model.model.NAME.lora_A.weight`, `[r, in]`, and `...lora_B.weight`, `[out, r]`; an embedding
has `lora_embedding_A` and `lora_embedding_B`. PEFT scales the product of A and B by
`lora_alpha / r`. If the model's adapter has a different scale, loading multiplies `lora_b` by the
ratio of the two.

A fused layer of the file, such as `qkv_proj`, is several layers of the model. It has one adapter
in the file and one adapter per part in the model. Saving concatenates the A of all parts and makes
B block-diagonal, so the rank in the file is the sum of the ranks. Loading gives each part its own
rows of B. It gives each part its own rows of A if B is block-diagonal, and else all of A.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from axon_dist.checkpoint import TensorEntry, list_tensors
from axon_dist.core.errors import (
    MALFORMED,
    CheckpointError,
    ConfigError,
    UnsupportedError,
    reworded,
)
from axon_dist.core.files import read_text
from axon_dist.core.typing import Path as LeafPath
from axon_dist.core.typing import Shape
from axon_dist.core.words import pattern_error
from axon_dist.nn.lora import ScaledLoRA, scale_of

from ..models.snapshot import ADAPTER_CONFIG
from ..models.weight_rules import WeightRule, WeightRules, shorten

ADAPTER_STEM = "adapter_model"
PREFIX = "base_model.model."
_PREFIX = re.escape(PREFIX)
_ROWS = ".token_adapter"
_FORMS = (("A", "a", "r in -> in r"), ("B", "b", "out r -> r out"))
_PLAIN = ("out in -> in out", "")
"""Forms of kernels that keep the order of output features between file and model."""

_MERGE = "merge them with peft's merge_and_unload and load the merged weights"

_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    # Other initializations change the base weights.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
    "bias": (None, "none", "all", "lora_only"),
}
"""Config keys with their supported values; other values raise."""

_FREE = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_version", "runtime_config", "megatron_core", "lora_dropout", "fan_in_fan_out"),
        # The names of the tensors say which layers have adapters.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
        *("modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
        # Used only to initialize adapters.
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),
        # Only read if use_qalora is set.
        "qalora_group_size",
    )
)
"""Config keys that may have any value: handled here, or without effect on the computation."""


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterTensor(TensorEntry):
    """An adapter tensor, with its options from `adapter_config.json`.

    Args:
        stored: the tensor in the file.
        scale: the scale of the LoRA product that this tensor is a factor of.
        tokens: the rows of an embedding table that this tensor replaces; None for a whole tensor.
        ties: whether a tied head changes together with a replaced table.
    """

    stored: TensorEntry
    scale: float = 1.0
    tokens: tuple[int, ...] | None = None
    ties: bool = False

    @classmethod
    def of(cls, entry: TensorEntry, **options: Any) -> AdapterTensor:
        """Wraps a tensor of a file."""
        return cls(entry.path, entry.dtype, entry.shape, entry.start, entry, **options)

    def open(self) -> np.ndarray:
        """Maps the stored tensor."""
        return self.stored.open()


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayEntry(TensorEntry):
    """A tensor in memory, computed from tensors of files.

    Args:
        array: its values.
    """

    array: np.ndarray

    @classmethod
    def of(cls, entry: TensorEntry, array: np.ndarray) -> ArrayEntry:
        """Wraps an array computed from `entry`, whose file is named in error messages."""
        return cls(entry.path, array.dtype, array.shape, 0, array)

    def open(self) -> np.ndarray:
        """Returns the values."""
        return self.array


def adapter_rules(rules: WeightRules) -> WeightRules:
    """Returns the rules for the adapters of the kernels and embeddings in `rules`.

    Args:
        rules: the rules of the model.
    """
    adapters: list[WeightRule] = []
    for rule in rules.rules:
        if not _is_adaptable(rule):
            continue
        layer = rule.names[0].removesuffix(r"\.weight")
        for number, path in enumerate(rule.paths):
            part = rf"\.{number}" if len(rule.paths) > 1 else ""
            is_table = path.endswith("/embedding")
            layer_path = path.rpartition("/")[0]
            for peft_factor, factor, form in _FORMS:
                if is_table:
                    end = rf"lora_embedding_{peft_factor}"
                else:
                    end = rf"lora_{peft_factor}\.weight"
                name = rf"{_PREFIX}{layer}{part}\.{end}"
                adapter_path = f"{layer_path}/lora/lora_{factor}"
                adapters.append(WeightRule(name, adapter_path, form, stack=rule.stack))
    return WeightRules(tuple(adapters))


def _is_adaptable(rule: WeightRule) -> bool:
    """Whether both PEFT and `lora` can adapt the layer of a rule."""
    if len(rule.names) > 1 or not rule.names[0].endswith(r"\.weight"):
        return False
    if all(path.endswith("/kernel") for path in rule.paths):
        return rule.form in _PLAIN and (len(rule.paths) == 1 or rule.dim == 1)
    return len(rule.paths) == 1 and rule.paths[0].endswith("/embedding") and not rule.form


def list_adapters(folder: Path) -> dict[str, TensorEntry]:
    """Reads the adapter tensors of a PEFT folder and their config.

    Raises:
        CheckpointError: when the folder has no readable adapters.
        UnsupportedError: when `lora` does not support adapters of that kind.
    """
    file = folder / ADAPTER_CONFIG
    what = f"{str(file)!r} is not an adapter config of peft"
    advice = "use a folder written by save_pretrained"
    with reworded(what, advice, CheckpointError, MALFORMED):
        config = json.loads(read_text(file, f"{str(file)!r}", CheckpointError))
        for key, value in config.items():
            is_known = value in _ONLY[key] if key in _ONLY else key in _FREE
            if not is_known and (key in _ONLY or value not in (None, False, [], {})):
                raise _refused(folder, f"{key}={value!r:.80}")
        if config.get("peft_type") not in _ONLY["peft_type"]:
            raise _refused(folder, f"peft_type={config.get('peft_type')!r:.80}")
        entries = list_tensors(folder / f"{ADAPTER_STEM}.safetensors")
        return {name: _described(name, entry, config) for name, entry in entries.items()}


def _refused(folder: Path, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"the adapters of {str(folder)!r} have {what}, which is not supported; {_MERGE}",
        code="adapter-not-supported",
    )


def _described(name: str, entry: TensorEntry, config: Mapping[str, Any]) -> AdapterTensor:
    """Adds to a tensor its LoRA scale, or the tokens whose rows it has."""
    if not name.startswith(PREFIX):
        raise ValueError(f"it has a tensor {name!r:.80}, which does not begin with {PREFIX!r}")
    if name.endswith(".trainable_tokens_delta"):
        layer = name.removeprefix(PREFIX).rpartition(".")[0].removesuffix(_ROWS)
        tokens = _tokens_of(layer, config["trainable_token_indices"])
        if len(tokens) != entry.shape[0]:
            raise ValueError(f"{name} has {entry.shape[0]} rows for {len(tokens)} tokens")
        return AdapterTensor.of(entry, tokens=tokens, ties=True)
    hit = re.fullmatch(rf"{_PREFIX}(?P<layer>.+)\.lora_(B\.weight|embedding_B)", name)
    if hit is None or len(entry.shape) != 2:
        return AdapterTensor.of(entry, ties=bool(config.get("ensure_weight_tying")))
    alpha = config["lora_alpha"]
    rank = entry.shape[1]
    layer = hit["layer"]
    starts = [0, *(place.end() for place in re.finditer(r"\.", layer))]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if why := pattern_error(pattern):
            raise ValueError(f"alpha_pattern has {pattern!r:.80}, which {why}")
        # Not as a part of a longer pattern, where flags such as (?i) are invalid.
        if any(re.compile(pattern).fullmatch(layer, start) for start in starts):
            alpha = value
            break
    scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if not math.isfinite(scale):
        raise ValueError(f"lora_alpha={alpha!r} is out of range")
    return AdapterTensor.of(entry, scale=scale)


def _tokens_of(layer: str, indices: Any) -> tuple[int, ...]:
    """Returns the tokens of a layer; `indices` is a list for the embeddings, or a dict by layer."""
    if isinstance(indices, Mapping):
        indices = next(v for k, v in indices.items() if layer == k or layer.endswith(f".{k}"))
    return tuple(int(index) for index in indices)


@dataclasses.dataclass
class _Fitting:
    """Converts tensors of weights and adapters to the names and layout of the model's rules."""

    entries: dict[str, TensorEntry]
    rules: WeightRules
    shapes: Mapping[LeafPath, Shape]
    scales: Mapping[LeafPath, float]

    def run(self) -> dict[str, TensorEntry]:
        """Returns all tensors; raises if no layer of the model can use one of them."""
        adapters = {n: e for n, e in self.entries.items() if isinstance(e, AdapterTensor)}
        layers: dict[str, dict[str, AdapterTensor]] = {}
        changed: list[str] = []
        for name, entry in adapters.items():
            del self.entries[name]
            inner = name.removeprefix(PREFIX)
            if hit := re.fullmatch(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", inner):
                layers.setdefault(hit[1], {})[hit[2]] = entry
            elif entry.tokens is not None:
                table = inner.rpartition(".")[0].removesuffix(_ROWS)
                changed.append(self._replace_rows(f"{table}.weight", entry))
            elif ".lora_" in inner:
                raise _refused(entry.path.parent, f"the tensor {name}")
            else:
                changed += self._replace(inner.replace(".base_layer.", "."), entry)
        self._check_tied(changed, adapters)
        for layer, factors in layers.items():
            self._fit(layer, factors)
        return self.entries

    def _rule_of(self, name: str) -> tuple[WeightRule, tuple[LeafPath, ...]] | None:
        for rule in self.rules.rules:
            if hit := rule.match(name):
                groups = {k: v for k, v in hit[1].items() if k not in rule.stacked}
                return rule, rule.paths_of(groups)
        return None

    def _own_name(self, name: str) -> str:
        """Returns the name that a tensor has in the base weights, where a prefix may be missing."""
        short = name.removeprefix("model.").removeprefix("transformer.")
        known = (n for n in (name, short) if n in self.entries)
        return next(known, name)

    def _replace(self, name: str, entry: AdapterTensor) -> list[str]:
        """Replaces a base weight with an adapter tensor; returns its name if values change."""
        own = self._own_name(name)
        is_copy = any(re.fullmatch(pattern, own) for pattern in self.rules.copies)
        if self._rule_of(own) is None and not is_copy:
            raise _refused(entry.path.parent, f"the tensor {PREFIX}{name}")
        before = self.entries.get(own)
        self.entries[own] = entry.stored
        # With an embedding adapter, peft also writes the unchanged table.
        is_same = before is not None and np.array_equal(before.open(), entry.open())
        return [] if is_same else [own]

    def _replace_rows(self, name: str, entry: AdapterTensor) -> str:
        own = self._own_name(name)
        is_copy = any(re.fullmatch(pattern, own) for pattern in self.rules.copies)
        if own not in self.entries and is_copy:
            # A tied head has no separate tensor: it is the embedding table.
            return own
        if own not in self.entries:
            raise CheckpointError(
                f"the adapters in {str(entry.path.parent)!r} replace rows of {name}, which is in "
                "no file of weights; name the snapshot before them: [snapshot, adapters]",
                code="adapter-rows-without-table",
            )
        table = np.array(self.entries[own].open())
        table[list(entry.tokens or ())] = entry.open().astype(table.dtype)
        self.entries[own] = ArrayEntry.of(self.entries[own], table)
        return own

    def _check_tied(self, changed: Sequence[str], adapters: Mapping[str, AdapterTensor]) -> None:
        """Raises if the embeddings and the head differ, but the model has one array for both."""
        for pattern, original in self.rules.copies.items():
            head = next((n for n in self.entries if re.fullmatch(pattern, n)), None)
            table = next((n for n in self.entries if re.fullmatch(original, n)), None)
            if table is None or not {table, head} & {*changed}:
                continue
            ties = any(e.ties for n, e in adapters.items() if _own_end(n, (table, head)))
            if head is not None and ties and head not in changed:
                self.entries[head] = self.entries[table]
            one = self.entries[table].open()
            is_same = ties if head is None else np.array_equal(one, self.entries[head].open())
            if not is_same:
                folder = next(iter(adapters.values())).path.parent
                raise UnsupportedError(
                    f"the adapters of {str(folder)!r} change {' and '.join(sorted({*changed}))}, "
                    "so the head is no longer tied to the embeddings, but the model has one "
                    f"array for both; {_MERGE} into a model with tie_word_embeddings=false",
                    code="adapter-unties",
                )

    def _fit(self, layer: str, factors: dict[str, AdapterTensor]) -> None:
        """Adds the adapter of a layer, rescaled to the scale of the model's adapter."""
        folder = next(iter(factors.values())).path.parent
        found = self._rule_of(self._own_name(f"{layer}.weight"))
        if found is None or not _is_adaptable(found[0]) or {*factors} != {"A", "B"}:
            raise _refused(folder, f"the layer {layer}")
        paths = found[1]
        lora_paths = [path.rpartition("/")[0] + "/lora" for path in paths]
        if not any(f"{path}/lora_a" in self.shapes for path in lora_paths):
            rank = factors["A"].shape[0]
            raise CheckpointError(
                f"the adapters in {str(folder)!r} have the layer {layer}, but the model has no "
                f"adapter at {' + '.join(paths)}; add one with lora(model, {rank}, "
                f"({paths[0].rpartition('/')[0]!r}, ...)), or {_MERGE}",
                code="adapter-missing-in-model",
            )
        if len(paths) == 1:
            end = ("lora_embedding_A", "lora_embedding_B")
            names = end if paths[0].endswith("embedding") else ("lora_A.weight", "lora_B.weight")
            self.entries[f"{PREFIX}{layer}.{names[0]}"] = factors["A"].stored
            self.entries[f"{PREFIX}{layer}.{names[1]}"] = self._scaled(factors["B"], lora_paths[0])
            return
        self._split(layer, factors, paths, lora_paths)

    def _scaled(self, entry: AdapterTensor, lora_path: LeafPath) -> TensorEntry:
        ratio = entry.scale / self.scales.get(lora_path, 1.0)
        if ratio == 1:
            return entry.stored
        return ArrayEntry.of(entry, entry.open().astype(np.float32) * np.float32(ratio))

    def _split(
        self,
        layer: str,
        factors: Mapping[str, AdapterTensor],
        paths: Sequence[LeafPath],
        lora_paths: Sequence[LeafPath],
    ) -> None:
        """Splits the adapter of a fused layer by its parts.

        Each part gets its rows of B, and all of A, or only its rows of A if B is block-diagonal.
        """
        a = factors["A"].open()
        b = factors["B"].open()
        sizes = [self.shapes[path][-1] for path in paths]
        ranks = [self.shapes.get(f"{path}/lora_a", (0,))[-1] for path in lora_paths]
        row_bounds = [*itertools.accumulate(sizes, initial=0)]
        rows = [b[start:stop] for start, stop in itertools.pairwise(row_bounds)]
        rank_bounds = [*itertools.accumulate(ranks, initial=0)]
        blocks = [slice(start, stop) for start, stop in itertools.pairwise(rank_bounds)]
        # Whether B is block-diagonal, as `save_adapters` writes it: zero outside each part's block.
        is_blocked = sum(ranks) == len(a) and not any(
            np.delete(part, np.r_[block], axis=1).any()
            for part, block in zip(rows, blocks, strict=True)
        )
        for number, (path, rank, part) in enumerate(zip(lora_paths, ranks, rows, strict=True)):
            if not rank and not part.any():
                continue
            if row_bounds[-1] != len(b) or (not is_blocked and rank != len(a)):
                raise CheckpointError(
                    f"the adapter of {layer} has the shapes {list(a.shape)} and {list(b.shape)}, "
                    f"but those at {' + '.join(lora_paths)} have the ranks {ranks}; give each the "
                    f"rank {len(a)} with lora(model, {len(a)}, ...), or {_MERGE}",
                    code="adapter-shapes",
                )
            ratio = np.float32(factors["B"].scale / self.scales.get(path, 1.0))
            factor = part[:, blocks[number]] if is_blocked else part
            if ratio != 1:
                factor = factor.astype(np.float32) * ratio
            name = f"{PREFIX}{layer}.{number}"
            part_a = a[blocks[number]] if is_blocked else a
            self.entries[f"{name}.lora_A.weight"] = ArrayEntry.of(factors["A"], np.array(part_a))
            self.entries[f"{name}.lora_B.weight"] = ArrayEntry.of(factors["B"], np.array(factor))


def _own_end(name: str, tables: Iterable[str | None]) -> bool:
    """Whether an adapter tensor belongs to one of these embedding tables."""
    layer = name.rpartition(".")[0].removesuffix(".base_layer").removesuffix(_ROWS)
    return any(t is not None and layer.endswith(t.removesuffix(".weight")) for t in tables)


def fitted(
    entries: dict[str, TensorEntry],
    rules: WeightRules,
    model: nnx.Module,
    targets: Mapping[LeafPath, Any],
) -> dict[str, TensorEntry]:
    """Converts the adapters among tensors to those of a model: splits and rescales them.

    Args:
        entries: the tensors of all files, by name.
        rules: the rules of the model, without those of its adapters.
        model: the model; its arrays may be shapes.
        targets: its parameters by path, anything with a shape.

    Raises:
        CheckpointError: when the model lacks an adapter, or has one of another rank.
        UnsupportedError: when no model with these rules can have such adapters; the message
            advises `merge_and_unload`.
    """
    if not any(isinstance(entry, AdapterTensor) for entry in entries.values()):
        return entries
    shapes = {path: tuple(leaf.shape) for path, leaf in targets.items()}
    return _Fitting(dict(entries), rules, shapes, adapter_scales(model)).run()


def adapters_of(model: nnx.Module) -> dict[LeafPath, nnx.LoRA]:
    """Returns the adapters of a model, by path."""
    modules = nnx.iter_modules(model)
    return {"/".join(map(str, keys)): m for keys, m in modules if isinstance(m, nnx.LoRA)}


def adapter_scales(model: nnx.Module) -> dict[LeafPath, float]:
    """Returns the scales of a model's adapters, by path."""
    return {path: scale_of(adapter) for path, adapter in adapters_of(model).items()}


def adapter_config(
    shapes: Mapping[str, Shape],
    scales: Mapping[str, float],
    layers: Iterable[str],
    base: str | None,
    *,
    rslora: bool = False,
    modules: Sequence[str] = (),
) -> dict[str, object]:
    """Returns the contents of `adapter_config.json`.

    Args:
        shapes: the shapes of the written tensors, by name.
        scales: the scales of the LoRA products, by layer name.
        layers: the names of all layers of the model that could have adapters.
        base: the path or name of the base model, for users and for peft.
        rslora: whether scales are `alpha / sqrt(rank)`.
        modules: the names of layers whose parameters are written in full.

    Raises:
        ConfigError: when there is no tensor.
    """
    pattern = _PREFIX + r"(?P<layer>.+)\.lora_(?:A\.weight|embedding_A)"
    ranks = {
        hit["layer"]: shape[0]
        for name, shape in shapes.items()
        if (hit := re.fullmatch(pattern, name))
    }
    if not ranks:
        raise ConfigError(
            "the model has no adapters to save; lora(model, rank, paths) adds them to layers, "
            "and save_weights writes models",
            code="no-adapters",
        )
    alphas = {
        layer: _number(scales.get(layer, 1.0) * (math.sqrt(r) if rslora else r))
        for layer, r in ranks.items()
    }
    rank = max(ranks.values())
    alpha = max(a for layer, a in alphas.items() if ranks[layer] == rank)
    # peft adapts every layer whose name ends in a target module. So short names are right only if
    # all layers with these endings have adapters; otherwise list full names.
    ends = {layer.rpartition(".")[2] for layer in ranks}
    same_end = {layer for layer in layers if layer.rpartition(".")[2] in ends}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {layer: r for layer, r in ranks.items() if r != rank},
        "alpha_pattern": {layer: a for layer, a in alphas.items() if a != alpha},
        "target_modules": sorted(ends if same_end == {*ranks} else ranks),
        "modules_to_save": list(modules) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": rslora,
        "use_dora": False,
        "inference_mode": True,
    }


def _number(value: float) -> float:
    """Removes float rounding errors: 16.000000000000004 becomes 16."""
    near = round(value, 9)
    return int(near) if near == int(near) else value


def check_named(paths: Iterable[str], rules: WeightRules) -> None:
    """Raises `ConfigError` if there are adapters without a rule."""
    unnamed = [p for p in paths if not any(rule.groups_of(p) for rule in rules.rules)]
    if unnamed:
        raise ConfigError(
            f"peft has no name for the adapters {shorten(unnamed)}: in files of this format their "
            "layers are parts of larger ones. Merge them into the kernels with merge_lora(model), "
            "and use save_weights",
            code="adapters-without-name",
        )


def is_rslora(model: nnx.Module) -> bool:
    """Whether all adapters of a model are scaled by `alpha / sqrt(rank)`."""
    adapters = [*adapters_of(model).values()]
    return bool(adapters) and all(isinstance(a, ScaledLoRA) and a.rslora for a in adapters)
