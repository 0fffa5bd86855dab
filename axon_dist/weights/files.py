"""The tensors of a file, of several files, or of a folder as hubs or PEFT write it.

`adapter_config.json` beside safetensors describes adapters of PEFT. A layer `NAME` has the tensors
`base_model.model.NAME.lora_A.weight`, `[r, in]`, and `...lora_B.weight`, `[out, r]`; their product
is scaled by `lora_alpha / r`, which `nnx.LoRA` lacks, so that `lora_b` is multiplied by it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from axon_dist.checkpoint import TensorEntry, list_tensors
from axon_dist.core.errors import (
    MALFORMED,
    CheckpointError,
    ConfigError,
    UnsupportedError,
    reworded,
)
from axon_dist.core.files import as_path, kind_at, read_text
from axon_dist.core.typing import Shape
from axon_dist.core.words import pattern_error

from ..models.snapshot import ADAPTER_CONFIG, ENDING, INDEX, Files, fetched
from ..models.weight_rules import WeightRule, WeightRules, shorten

MOST_INDEX = 2**28
"""Bytes of an index, which has a line for every tensor."""


def find_tensors(files: Files) -> dict[str, TensorEntry]:
    """Reads the headers of safetensors files, and none of their values.

    Args:
        files: a file; several; a `.index.json` that says which tensor is in which file beside it;
            or a folder, such as the local snapshot of a hub's repository, with such an index or
            with one file, or with adapters as peft writes them; `hf://org/name`; or a file or a
            folder at `gs://` or `s3://`.

    Returns:
        The place of every tensor in its file, by name.

    Raises:
        CheckpointError: when there is none, one cannot be read, or two have the same name.
    """
    several = [files] if isinstance(files, str | Path) else files
    if not isinstance(several, Sequence) or not several:
        raise CheckpointError(
            f"got {files!r:.80} for the files of weights; give a path, or a list of them"
        )
    tensors: dict[str, TensorEntry] = {}
    for each in several:
        path = as_path(fetched(each), "the weights", CheckpointError)
        for name, entry in (_of_folder if path.is_dir() else _of_file)(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{name} is in {str(tensors[name].path)!r} and in {str(path)!r}; name files "
                    "that belong together"
                )
            tensors[name] = entry
    return tensors


def _of_file(path: Path) -> dict[str, TensorEntry]:
    return _of_index(path) if path.name.endswith(INDEX) else list_tensors(path)


def _of_folder(folder: Path) -> dict[str, TensorEntry]:
    """The one set of weights of a folder; of two, which is meant is not guessed."""
    indices = sorted(folder.glob(f"*{ENDING}{INDEX}"))
    files = sorted(folder.glob(f"*{ENDING}"))
    index = folder / f"model{ENDING}{INDEX}"
    single = folder / f"model{ENDING}"
    named = [path for path in (index, single) if path in (*indices, *files)]
    adapters = [folder / ADAPTER_CONFIG] if (folder / ADAPTER_CONFIG).is_file() else []
    if len(sets := [*named, *adapters]) > 1 and not _is_of_index(single, index, sets):
        raise CheckpointError(
            f"the folder {str(folder)!r} has two sets of weights, by "
            f"{' and '.join(path.name for path in sets)}; name the file to read, or remove the "
            "other set",
            code="two-sets-of-weights",
        )
    if adapters:
        return list_adapters(folder)
    for choice in (named, indices, files):
        if len(choice) == 1 or (choice is named and choice):
            return _of_file(choice[0])
    names = sorted(path.name for path in folder.iterdir())
    raise CheckpointError(
        f"the folder {str(folder)!r} has {len(indices)} files *{ENDING}{INDEX} and {len(files)} "
        f"files *{ENDING}, of {len(names)} files ({', '.join(names[:5])}); name the files to read"
    )


def _is_of_index(single: Path, index: Path, sets: Sequence[Path]) -> bool:
    """Whether the two sets are one: an index, and the only file that it names."""
    if list(sets) != [index, single]:
        return False
    return all(entry.path == single for entry in _of_index(index).values())


def _of_index(path: Path) -> dict[str, TensorEntry]:
    what = f"cannot read {str(path)!r} as the index of safetensors files"
    with reworded(what, "name the files themselves", CheckpointError, MALFORMED):
        text = read_text(path, f"the index {str(path)!r}", CheckpointError, MOST_INDEX)
        places: dict[str, str] = json.loads(text)["weight_map"]
        files = sorted(set(places.values()))
        if odd := [file for file in files if "/" in file or kind_at(path.parent / file) is None]:
            raise ValueError(f"it names {odd[0]!r:.80}, and there is no such file beside it")
    there = {file: list_tensors(path.parent / file) for file in files}
    for name, file in places.items():
        if name not in there[file]:
            raise CheckpointError(
                f"the index {str(path)!r} has {name} in {file!r}, which does not hold it; fetch "
                "the files anew"
            )
    return {name: there[file][name] for name, file in places.items()}


ADAPTER_STEM = "adapter_model"
_PREFIX = r"base_model\.model\."
_PARTS = (("A", "a", "r in -> in r"), ("B", "b", "out r -> r out"))
_PLAIN = ("out in -> in out", "")
"""Forms of kernels whose outputs have in files the order of the model."""

_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    # Other values change the weights to which the adapters belong.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
"""The keys whose other values an `nnx.LoRA` cannot follow."""


@dataclasses.dataclass(frozen=True)
class ScaledTensor(TensorEntry):
    """A tensor of a file times a number, in float32.

    Args:
        stored: the tensor in the file.
        scale: the number.
    """

    stored: TensorEntry
    scale: float

    def open(self) -> np.ndarray:
        """Reads and multiplies it."""
        return self.stored.open().astype(np.float32) * np.float32(self.scale)


def adapter_rules(rules: WeightRules) -> WeightRules:
    """The rules of the adapters of kernels that have a tensor each in a table.

    Args:
        rules: of the model.
    """
    adapters = []
    for rule in rules.rules:
        (name, *names), (path, *paths) = rule.names, rule.paths
        is_kernel = name.endswith(r"\.weight") and path.endswith("/kernel")
        if is_kernel and not names and not paths and rule.form in _PLAIN:
            layer, beside = name.removesuffix("weight"), path.removesuffix("kernel")
            adapters += [
                WeightRule(
                    rf"{_PREFIX}{layer}lora_{theirs}\.weight",
                    f"{beside}lora/lora_{ours}",
                    form,
                    stack=rule.stack,
                )
                for theirs, ours, form in _PARTS
            ]
    return WeightRules(tuple(adapters))


def list_adapters(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of adapters in their file, scaled as their config says.

    Raises:
        CheckpointError: when the folder has no adapters that can be read.
        UnsupportedError: when they are none that an `nnx.LoRA` can be.
    """
    file = folder / ADAPTER_CONFIG
    what = f"{str(file)!r} is no config of adapters as peft writes it"
    advice = "take the folder as save_pretrained wrote it"
    with reworded(what, advice, CheckpointError, MALFORMED):
        config = json.loads(read_text(file, f"{str(file)!r}", CheckpointError))
        for key, known in _ONLY.items():
            if config.get(key) not in known:
                raise UnsupportedError(
                    f"the adapters of {str(folder)!r} have {key}={config[key]!r:.80}, which an "
                    "nnx.LoRA cannot have; merge them with peft's merge_and_unload, or train others"
                )
        entries = list_tensors(folder / f"{ADAPTER_STEM}.safetensors")
        return {name: _scaled(name, entry, config) for name, entry in entries.items()}


def _scaled(name: str, entry: TensorEntry, config: Mapping[str, object]) -> TensorEntry:
    hit = re.fullmatch(_PREFIX + r"(?P<layer>.+)\.lora_B\.weight", name)
    if hit is None or len(entry.shape) != 2:
        return entry
    alpha, rank = config["lora_alpha"], entry.shape[1]
    patterns = config.get("alpha_pattern") or {}
    for pattern, value in patterns.items():  # type: ignore[union-attr]
        if why := pattern_error(pattern):
            raise ValueError(f"alpha_pattern has {pattern!r:.80}, which {why}")
        if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", hit["layer"]):
            alpha = value
            break
    scale = float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)  # type: ignore[arg-type]
    if not math.isfinite(scale):
        raise ValueError(f"lora_alpha={alpha!r} is out of range")
    if scale == 1:
        return entry
    return ScaledTensor(entry.path, np.dtype(np.float32), entry.shape, entry.start, entry, scale)


def adapter_config(
    shapes: Mapping[str, Shape], layers: Iterable[str], base: str | None
) -> dict[str, object]:
    """The `adapter_config.json` of adapters whose products are not scaled.

    Args:
        shapes: of the tensors that are written, by name.
        layers: the names of all layers of the model that could have adapters.
        base: the path or name of the model that they adapt, for people and for peft.

    Raises:
        ConfigError: when there is no tensor.
    """
    ranks = {
        hit["layer"]: shape[0]
        for name, shape in shapes.items()
        if (hit := re.fullmatch(_PREFIX + r"(?P<layer>.+)\.lora_A\.weight", name))
    }
    if not ranks:
        raise ConfigError(
            "the model has no adapters to save; lora(model, rank, paths) puts them beside layers, "
            "and save_weights writes models"
        )
    rank = max(ranks.values())
    # To peft a last name means all layers that end in it.
    ends = {layer.rpartition(".")[2] for layer in ranks}
    alike = {layer for layer in layers if layer.rpartition(".")[2] in ends}
    others = {layer: r for layer, r in ranks.items() if r != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": sorted(ends if alike == {*ranks} else ranks),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def check_named(paths: Iterable[str], rules: WeightRules) -> None:
    """Raises `ConfigError` for adapters that no rule gives a name."""
    unnamed = [p for p in paths if not any(rule.groups_of(p) for rule in rules.rules)]
    if unnamed:
        raise ConfigError(
            f"peft has no name for the adapters {shorten(unnamed)}: in files of this format their "
            "layers are parts of larger ones. Add them to the kernels by merge_lora(model), and "
            "save_weights"
        )
