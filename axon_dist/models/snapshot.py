"""Hub snapshots: fetches them, and checks that a model matches their `config.json`.

Names and shapes of tensors determine neither the RoPE base, nor the number of heads, nor the
epsilon of norms. So weights whose shapes fit a model may still belong to a different function.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import nnx

from ..core.checks import TEXTS
from ..core.errors import (
    MALFORMED,
    CheckpointError,
    ConfigError,
    UnsupportedError,
    require,
    reworded,
)
from ..core.files import Address, Place, as_path, as_place, read_text, snapshot
from .config import check_fields
from .family import TOKEN_IDS
from .formats import FORMATS
from .meaning import meaning
from .transformer import Transformer
from .transformer_config import TransformerConfig
from .weight_rules import WeightRules

Files = str | Path | Sequence[str | Path]

ENDING = ".safetensors"
INDEX = ".index.json"
"""The suffix of the index of sharded weights, which maps tensors to files."""

REMOTE = "hf://"
"""The prefix of a Hugging Face repository: `hf://org/name`, or `hf://org/name@revision`."""

_BUCKETS = ("gs:/", "s3:/")
CONFIG_FILE = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = (f"*{ENDING}", f"*{ENDING}{INDEX}", CONFIG_FILE, ADAPTER_CONFIG)


def fetched(path: Any, patterns: tuple[str, ...] = _WEIGHTS) -> Any:
    """Returns the local path of a hub repository or a bucket's folder; downloads it if needed.

    Args:
        path: a local path, which is returned unchanged; `hf://`, which is downloaded to the cache
            of huggingface_hub; or a folder or file at `gs://` or `s3://`.
        patterns: the patterns of the wanted files, which are not in subfolders.

    Raises:
        CheckpointError: when it cannot be fetched.
        StoreError: when a bucket cannot be read.
    """
    if isinstance(path, (str, Path)) and str(path).startswith(_BUCKETS):
        return _copied(as_place(path, "the weights", CheckpointError), patterns)
    if not isinstance(path, str) or not path.startswith(REMOTE):
        return path
    name, _, revision = path.removeprefix(REMOTE).partition("@")
    other = ", or name a local snapshot"
    hub = require("huggingface_hub", "hub", f"{path!r}", other, CheckpointError)
    advice = "check the name and that you may read it, or name a local snapshot"
    with reworded(f"cannot fetch {path!r}", advice, CheckpointError, (OSError, ValueError)):
        folder = hub.snapshot_download(
            name, revision=revision or None, allow_patterns=[*patterns], ignore_patterns=["*/*"]
        )
    return Path(folder)


def _copied(place: Place, patterns: tuple[str, ...]) -> Path:
    """Copies a bucket's folder, or a file in it with the JSON files next to it, to this machine."""
    assert isinstance(place, Address)
    folder, _, file = place.key.rpartition("/")
    is_file = any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)
    inside = dataclasses.replace(place, key=folder) if is_file else place

    def wanted(name: str) -> bool:
        is_needed = name == file or name.endswith(".json") or file.endswith(INDEX)
        matches = "/" not in name and any(fnmatch.fnmatchcase(name, p) for p in patterns)
        return matches and (is_needed or not is_file)

    copy = snapshot(inside, wanted)
    return copy / file if is_file else copy


def config_files(files: Files) -> list[Path]:
    """Returns the paths of the configs in the folders of files, each once."""
    several = [files] if isinstance(files, str | Path) or not isinstance(files, Sequence) else files
    paths = [as_path(fetched(path), "the weights", CheckpointError) for path in several]
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in paths)
    return [folder / CONFIG_FILE for folder in folders if (folder / CONFIG_FILE).is_file()]


def hub_config(path: str | Path, **changes: Any) -> TransformerConfig:
    """Reads the `TransformerConfig` for the weights of a hub repository.

    Args:
        path: a local snapshot with a `config.json`, or that file; or `hf://org/name`.
        **changes: fields to change, such as `dtype="bfloat16"`.

    Returns:
        The config.

    Raises:
        CheckpointError: when it cannot be read.
        UnsupportedError: when the family is not in `FORMATS`, or a `Transformer` cannot represent
            the model.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "config.json")
        >>> sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        >>> _ = path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
        >>> hub_config(path.parent).positions
        'learned'
    """
    name, data, file = _read_config(path)
    check_fields(TransformerConfig, changes)
    what = f"{str(file)!r} is not a config of the family {FORMATS[name].model_type!r}"
    advice = "use the config of the published snapshot"
    with reworded(what, advice, CheckpointError, MALFORMED):
        config = FORMATS[name].from_hub(data)
    config = dataclasses.replace(config, **changes)
    config.validate()
    return config


def format_name(path: str | Path) -> str:
    """Returns the key of `FORMATS` for a snapshot's weights.

    Args:
        path: as for `hub_config`.

    Raises:
        CheckpointError: when the config cannot be read.
        UnsupportedError: when the family is not in `FORMATS`.
    """
    return _read_config(path)[0]


def _read_config(path: str | Path) -> tuple[str, Mapping[str, Any], Path]:
    """Returns the format of a snapshot, its config, and the path of the config."""
    path = as_path(fetched(path, (CONFIG_FILE,)), "the config of a model", CheckpointError)
    file = path / CONFIG_FILE if path.is_dir() else path
    what = f"{str(file)!r} as the config of a model"
    advice = f"name the folder of a snapshot with its {CONFIG_FILE}"
    with reworded(f"cannot read {what}", advice, CheckpointError, MALFORMED):
        data = json.loads(read_text(file, what, CheckpointError))
        kind = data["model_type"]
    for name, row in FORMATS.items():
        if row.model_type == kind:
            return name, data, file
    known = ", ".join(row.model_type for row in FORMATS.values())
    raise UnsupportedError(
        f"{str(file)!r} is of the family {kind!r:.80}; the supported families are {known}. Make "
        "the model yourself, and give load_weights your own rules",
        code="unknown-family",
    )


def check_snapshot(
    files: Files,
    model: nnx.Module,
    rules: WeightRules | str | None = None,
    differ: str | Iterable[str] = (),
) -> None:
    """Compares a `Transformer` with the `config.json` next to weights, if there is one.

    Args:
        files: as for `load_weights`.
        model: the model; its arrays may be shapes. Models of other classes are not checked.
        rules: as for `load_weights`. For the name of a hub format, the config must be readable as
            that of a `Transformer`; for custom rules, an unreadable config is ignored.
        differ: fields of a `TransformerConfig` in which the model may differ, such as `rope_theta`
            for training on longer sequences.

    Raises:
        ConfigError: naming every field that differs, with both values.
        CheckpointError: when a hub format is named and the config cannot be read.
        UnsupportedError: when a hub format is named and a `Transformer` cannot represent it.

    Example:
        >>> import json, tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        >>> _ = (path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
        >>> config = hub_config(path, num_heads=8)
        >>> model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        >>> check_snapshot(path, model, "hf-gpt2")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: the model is not the one of '...config.json': num_heads
        is 8 and 4 there, num_kv_heads is 8 and 4 there, head_dim is 8 and 16 there. Its weights ...
    """
    differ = (differ,) if isinstance(differ, str) else differ
    TEXTS.check("load_weights", "differ", differ)
    check_fields(TransformerConfig, dict.fromkeys(differ := tuple(differ)))
    if not isinstance(model, Transformer):
        return
    for file in config_files(files):
        try:
            wanted = hub_config(file)
        except (CheckpointError, UnsupportedError):
            if rules in FORMATS:
                raise
            continue
        diffs = list(_differences(model.config, wanted, differ))
        if diffs:
            raise ConfigError(
                f"the model is not the one of {str(file)!r}: {', '.join(diffs)}. Its weights would "
                "belong to a different function: take the sizes from there, in a config with "
                f"model: {{hub: {file.parent}}}, in Python with hub_config({str(file.parent)!r})"
                "; or list the fields that may differ in differ=(...)",
                code="snapshot-differs",
            )


def token_ids(files: Files) -> dict[str, Any]:
    """Returns the special token ids in the `config.json` next to weights, if there is one.

    Args:
        files: as for `load_weights`.

    Raises:
        CheckpointError: when it cannot be read.
        UnsupportedError: when its family is not in `FORMATS`.
    """
    entries = {key: x for file in config_files(files) for key, x in _read_config(file)[1].items()}
    return {key: entries[key] for key in TOKEN_IDS if key in entries}


def _differences(
    config: TransformerConfig, hub: TransformerConfig, differ: Iterable[str]
) -> Iterator[str]:
    got = meaning(config)
    # Use the same `max_length`, because a window longer than it has no effect.
    wanted = meaning(dataclasses.replace(hub, max_length=config.max_length))
    for field in wanted:
        if got[field] != wanted[field] and field.partition(".")[0] not in differ:
            yield f"{field} is {got[field]!r} and {wanted[field]!r} there"
