"""Adapters of PEFT: the tensors of their files, and the parameters of a model that they become.

`adapter_config.json` beside safetensors describes them. A layer `NAME` has the tensors
`base_model.model.NAME.lora_A.weight`, `[r, in]`, and `...lora_B.weight`, `[out, r]`, an embedding
`lora_embedding_A` and `lora_embedding_B`. Their product is scaled by `lora_alpha / r`; where the
adapter of the model has another scale, `lora_b` is multiplied by the ratio of both.

A layer of the file that is several layers of the model, such as `qkv_proj`, has one adapter there
and one for each part here. Each part takes all of A and its rows of B. On the way back the parts
are written side by side, A joined and B block by block, which has the sum of their ranks.
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
"""Forms of kernels whose outputs have in files the order of the model."""

_MERGE = "merge them with peft's merge_and_unload and load the weights that it makes"

_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    # Other values change the weights to which the adapters belong.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
    "bias": (None, "none", "all", "lora_only"),
}
"""The keys whose other values an adapter of a model here cannot follow."""

_FREE = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_version", "runtime_config", "megatron_core", "lora_dropout", "fan_in_fan_out"),
        # The names of the tensors say which layers have adapters.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"),
        *("modules_to_save", "trainable_token_indices", "ensure_weight_tying"),
        # What only the first values of adapters depend on.
        *("eva_config", "corda_config", "lora_ga_config", "loftq_config"),
        # Read by use_qalora alone.
        "qalora_group_size",
    )
)
"""The keys that are followed, or that change nothing of what adapters compute."""


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterTensor(TensorEntry):
    """A tensor of adapters, with what their config says of it.

    Args:
        stored: the tensor in the file.
        scale: of the product that it is a factor of.
        tokens: the rows of a table that it replaces; None for a tensor of its own.
        ties: whether a head that is tied to a replaced table follows it.
    """

    stored: TensorEntry
    scale: float = 1.0
    tokens: tuple[int, ...] | None = None
    ties: bool = False

    @classmethod
    def of(cls, entry: TensorEntry, **options: Any) -> AdapterTensor:
        """A tensor of a file."""
        return cls(entry.path, entry.dtype, entry.shape, entry.start, entry, **options)

    def open(self) -> np.ndarray:
        """Maps the stored tensor."""
        return self.stored.open()


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayEntry(TensorEntry):
    """A tensor made of tensors of files, in memory.

    Args:
        array: its values.
    """

    array: np.ndarray

    @classmethod
    def of(cls, entry: TensorEntry, array: np.ndarray) -> ArrayEntry:
        """Values made of a tensor, whose file messages name."""
        return cls(entry.path, array.dtype, array.shape, 0, array)

    def open(self) -> np.ndarray:
        """The values."""
        return self.array


def adapter_rules(rules: WeightRules) -> WeightRules:
    """The rules of the adapters of kernels and embeddings that a table has.

    Args:
        rules: of the model.
    """
    adapters: list[WeightRule] = []
    for rule in rules.rules:
        if not _is_adaptable(rule):
            continue
        layer = rule.names[0].removesuffix(r"\.weight")
        for number, path in enumerate(rule.paths):
            part = rf"\.{number}" if len(rule.paths) > 1 else ""
            is_table = path.endswith("/embedding")
            beside = path.rpartition("/")[0]
            for theirs, ours, form in _FORMS:
                end = rf"lora_embedding_{theirs}" if is_table else rf"lora_{theirs}\.weight"
                name = rf"{_PREFIX}{layer}{part}\.{end}"
                path_here = f"{beside}/lora/lora_{ours}"
                adapters.append(WeightRule(name, path_here, form, stack=rule.stack))
    return WeightRules(tuple(adapters))


def _is_adaptable(rule: WeightRule) -> bool:
    """Whether the layer of a rule is one that peft and `lora` both adapt."""
    if len(rule.names) > 1 or not rule.names[0].endswith(r"\.weight"):
        return False
    if all(path.endswith("/kernel") for path in rule.paths):
        return rule.form in _PLAIN and (len(rule.paths) == 1 or rule.dim == 1)
    return len(rule.paths) == 1 and rule.paths[0].endswith("/embedding") and not rule.form


def list_adapters(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of adapters in their file, with what their config says.

    Raises:
        CheckpointError: when the folder has no adapters that can be read.
        UnsupportedError: when they are none that a model here can have.
    """
    file = folder / ADAPTER_CONFIG
    what = f"{str(file)!r} is no config of adapters as peft writes it"
    advice = "take the folder as save_pretrained wrote it"
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
        f"the adapters of {str(folder)!r} have {what}, which an adapter here cannot have; {_MERGE}",
        code="adapter-not-supported",
    )


def _described(name: str, entry: TensorEntry, config: Mapping[str, Any]) -> AdapterTensor:
    """A tensor with its scale, or with the tokens whose rows it has."""
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
    alpha, rank = config["lora_alpha"], entry.shape[1]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if why := pattern_error(pattern):
            raise ValueError(f"alpha_pattern has {pattern!r:.80}, which {why}")
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", hit["layer"]):
            alpha = value
            break
    scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if not math.isfinite(scale):
        raise ValueError(f"lora_alpha={alpha!r} is out of range")
    return AdapterTensor.of(entry, scale=scale)


def _tokens_of(layer: str, indices: Any) -> tuple[int, ...]:
    """The tokens of a layer; a list is about the embeddings, a dict names layers."""
    if isinstance(indices, Mapping):
        indices = next(v for k, v in indices.items() if layer == k or layer.endswith(f".{k}"))
    return tuple(int(index) for index in indices)


@dataclasses.dataclass
class _Fitting:
    """Tensors of weights and of adapters, made into those that rules of the model name."""

    entries: dict[str, TensorEntry]
    rules: WeightRules
    shapes: Mapping[LeafPath, Shape]
    scales: Mapping[LeafPath, float]

    def run(self) -> dict[str, TensorEntry]:
        """All tensors; those that layers of the model cannot take are refused."""
        theirs = {n: e for n, e in self.entries.items() if isinstance(e, AdapterTensor)}
        layers: dict[str, dict[str, AdapterTensor]] = {}
        changed: list[str] = []
        for name, entry in theirs.items():
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
        self._check_tied(changed, theirs)
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
        """The name of a tensor as the weights beside the adapters have it."""
        short = name.removeprefix("model.").removeprefix("transformer.")
        known = (n for n in (name, short) if n in self.entries)
        return next(known, name)

    def _replace(self, name: str, entry: AdapterTensor) -> list[str]:
        """Takes a tensor of the adapters for one of the weights; its name if it is another."""
        own = self._own_name(name)
        is_copy = any(re.fullmatch(pattern, own) for pattern in self.rules.copies)
        if self._rule_of(own) is None and not is_copy:
            raise _refused(entry.path.parent, f"the tensor {PREFIX}{name}")
        before = self.entries.get(own)
        self.entries[own] = entry.stored
        # Beside an adapter of embeddings peft writes the table, which is as it was.
        is_same = before is not None and np.array_equal(before.open(), entry.open())
        return [] if is_same else [own]

    def _replace_rows(self, name: str, entry: AdapterTensor) -> str:
        own = self._own_name(name)
        is_copy = any(re.fullmatch(pattern, own) for pattern in self.rules.copies)
        if own not in self.entries and is_copy:
            # A head that is the table has the rows that the table has.
            return own
        if own not in self.entries:
            raise CheckpointError(
                f"the adapters in {str(entry.path.parent)!r} have rows of {name}, which no file of "
                "weights has; name the snapshot before them: [snapshot, adapters]"
            )
        table = np.array(self.entries[own].open())
        table[list(entry.tokens or ())] = entry.open().astype(table.dtype)
        self.entries[own] = ArrayEntry.of(self.entries[own], table)
        return own

    def _check_tied(self, changed: Sequence[str], theirs: Mapping[str, AdapterTensor]) -> None:
        """Refuses a table and a head of other values where the model has one array for both."""
        for pattern, original in self.rules.copies.items():
            head = next((n for n in self.entries if re.fullmatch(pattern, n)), None)
            table = next((n for n in self.entries if re.fullmatch(original, n)), None)
            if table is None or not {table, head} & {*changed}:
                continue
            ties = any(e.ties for n, e in theirs.items() if _own_end(n, (table, head)))
            if head is not None and ties and head not in changed:
                self.entries[head] = self.entries[table]
            one = self.entries[table].open()
            is_same = ties if head is None else np.array_equal(one, self.entries[head].open())
            if not is_same:
                folder = next(iter(theirs.values())).path.parent
                raise UnsupportedError(
                    f"the adapters of {str(folder)!r} change {' and '.join(sorted({*changed}))}, "
                    "so that the head is tied to the embeddings no more, and the model has one "
                    f"array for both; {_MERGE} into a model with tie_word_embeddings=false",
                    code="adapter-unties",
                )

    def _fit(self, layer: str, factors: dict[str, AdapterTensor]) -> None:
        """Adds the adapters of a layer, scaled as the model's need it."""
        folder = next(iter(factors.values())).path.parent
        found = self._rule_of(self._own_name(f"{layer}.weight"))
        if found is None or not _is_adaptable(found[0]) or {*factors} != {"A", "B"}:
            raise _refused(folder, f"the layer {layer}")
        paths = found[1]
        beside = [path.rpartition("/")[0] + "/lora" for path in paths]
        if not any(f"{path}/lora_a" in self.shapes for path in beside):
            rank = factors["A"].shape[0]
            raise CheckpointError(
                f"the adapters in {str(folder)!r} have the layer {layer}, and the model has no "
                f"adapter at {' + '.join(paths)}; put one there by lora(model, {rank}, "
                f"({paths[0].rpartition('/')[0]!r}, ...)), or {_MERGE}"
            )
        if len(paths) == 1:
            end = ("lora_embedding_A", "lora_embedding_B")
            names = end if paths[0].endswith("embedding") else ("lora_A.weight", "lora_B.weight")
            self.entries[f"{PREFIX}{layer}.{names[0]}"] = factors["A"].stored
            self.entries[f"{PREFIX}{layer}.{names[1]}"] = self._scaled(factors["B"], beside[0])
            return
        self._split(layer, factors, paths, beside)

    def _scaled(self, entry: AdapterTensor, beside: LeafPath) -> TensorEntry:
        ratio = entry.scale / self.scales.get(beside, 1.0)
        if ratio == 1:
            return entry.stored
        return ArrayEntry.of(entry, entry.open().astype(np.float32) * np.float32(ratio))

    def _split(
        self,
        layer: str,
        factors: Mapping[str, AdapterTensor],
        paths: Sequence[LeafPath],
        beside: Sequence[LeafPath],
    ) -> None:
        """The parts of a fused layer: each takes all of A, or its own rows of it."""
        a, b = factors["A"].open(), factors["B"].open()
        sizes = [self.shapes[path][-1] for path in paths]
        ranks = [self.shapes.get(f"{path}/lora_a", (0,))[-1] for path in beside]
        here = [*itertools.accumulate(sizes, initial=0)]
        rows = [b[start:stop] for start, stop in itertools.pairwise(here)]
        places = [*itertools.accumulate(ranks, initial=0)]
        blocks = [slice(start, stop) for start, stop in itertools.pairwise(places)]
        is_blocked = sum(ranks) == len(a) and not any(
            np.delete(part, np.r_[block], axis=1).any()
            for part, block in zip(rows, blocks, strict=True)
        )
        for number, (path, rank, part) in enumerate(zip(beside, ranks, rows, strict=True)):
            if not rank and not part.any():
                continue
            if here[-1] != len(b) or (not is_blocked and rank != len(a)):
                raise CheckpointError(
                    f"the adapter of {layer} has the shapes {list(a.shape)} and {list(b.shape)}, "
                    f"and those at {' + '.join(beside)} have the ranks {ranks}; give each the rank "
                    f"{len(a)} by lora(model, {len(a)}, ...), or {_MERGE}"
                )
            ratio = np.float32(factors["B"].scale / self.scales.get(path, 1.0))
            factor = part[:, blocks[number]] if is_blocked else part
            if ratio != 1:
                factor = factor.astype(np.float32) * ratio
            name = f"{PREFIX}{layer}.{number}"
            above = a[blocks[number]] if is_blocked else a
            self.entries[f"{name}.lora_A.weight"] = ArrayEntry.of(factors["A"], np.array(above))
            self.entries[f"{name}.lora_B.weight"] = ArrayEntry.of(factors["B"], np.array(factor))


def _own_end(name: str, tables: Iterable[str | None]) -> bool:
    """Whether a tensor of adapters is of one of some tables."""
    layer = name.rpartition(".")[0].removesuffix(".base_layer").removesuffix(_ROWS)
    return any(t is not None and layer.endswith(t.removesuffix(".weight")) for t in tables)


def fitted(
    entries: dict[str, TensorEntry],
    rules: WeightRules,
    model: nnx.Module,
    targets: Mapping[LeafPath, Any],
) -> dict[str, TensorEntry]:
    """Tensors whose adapters are those of a model: each part has its own, scaled as it scales.

    Args:
        entries: the tensors of all files, by name.
        rules: of the model, without its adapters.
        model: its arrays may be shapes.
        targets: its parameters by path, anything with a shape.

    Raises:
        CheckpointError: when the model lacks an adapter, or has one of another rank.
        UnsupportedError: when no model of these rules can have them; it names `merge_and_unload`.
    """
    if not any(isinstance(entry, AdapterTensor) for entry in entries.values()):
        return entries
    shapes = {path: tuple(leaf.shape) for path, leaf in targets.items()}
    return _Fitting(dict(entries), rules, shapes, adapter_scales(model)).run()


def adapters_of(model: nnx.Module) -> dict[LeafPath, nnx.LoRA]:
    """The adapters of a model, by path."""
    modules = nnx.iter_modules(model)
    return {"/".join(map(str, keys)): m for keys, m in modules if isinstance(m, nnx.LoRA)}


def adapter_scales(model: nnx.Module) -> dict[LeafPath, float]:
    """What the products of adapters are multiplied by, by path."""
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
    """The `adapter_config.json` of adapters.

    Args:
        shapes: of the tensors that are written, by name.
        scales: of the products, by the name of a layer.
        layers: the names of all layers of the model that could have adapters.
        base: the path or name of the model that they adapt, for people and for peft.
        rslora: whether alphas are over the root of a rank.
        modules: the names of layers that are written whole.

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
            "the model has no adapters to save; lora(model, rank, paths) puts them beside layers, "
            "and save_weights writes models"
        )
    alphas = {
        layer: _number(scales.get(layer, 1.0) * (math.sqrt(r) if rslora else r))
        for layer, r in ranks.items()
    }
    rank = max(ranks.values())
    alpha = max(a for layer, a in alphas.items() if ranks[layer] == rank)
    # To peft a last name means all layers that end in it.
    ends = {layer.rpartition(".")[2] for layer in ranks}
    alike = {layer for layer in layers if layer.rpartition(".")[2] in ends}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {layer: r for layer, r in ranks.items() if r != rank},
        "alpha_pattern": {layer: a for layer, a in alphas.items() if a != alpha},
        "target_modules": sorted(ends if alike == {*ranks} else ranks),
        "modules_to_save": list(modules) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": rslora,
        "use_dora": False,
        "inference_mode": True,
    }


def _number(value: float) -> float:
    """A number as people write it: 16 for 16.000000000000004."""
    near = round(value, 9)
    return int(near) if near == int(near) else value


def check_named(paths: Iterable[str], rules: WeightRules) -> None:
    """Raises `ConfigError` for adapters that no rule gives a name."""
    unnamed = [p for p in paths if not any(rule.groups_of(p) for rule in rules.rules)]
    if unnamed:
        raise ConfigError(
            f"peft has no name for the adapters {shorten(unnamed)}: in files of this format their "
            "layers are parts of larger ones. Add them to the kernels by merge_lora(model), and "
            "save_weights"
        )


def is_rslora(model: nnx.Module) -> bool:
    """Whether all adapters of a model are scaled over the root of their rank."""
    adapters = [*adapters_of(model).values()]
    return bool(adapters) and all(isinstance(a, ScaledLoRA) and a.rslora for a in adapters)
