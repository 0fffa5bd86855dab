"""`check_snapshot`: whether a model is the one that the `config.json` beside its weights describes.

Names and shapes of tensors say nothing of the base of rotary positions, of the number of heads, of
what is added inside norms: weights that fit may still belong to another function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flax import nnx

from axon_dist.core.errors import CheckpointError, ConfigError, UnsupportedError
from axon_dist.core.files import as_path
from axon_dist.core.told import TEXTS
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.models.config import check_fields

from .files import Files, fetched
from .formats import CONFIG_FILE, FORMATS, hub_config
from .rule import WeightRules

FREE = frozenset(
    {
        *("max_length", "dropout", "param_dtype", "dtype", "attention", "scan_layers"),
        *("logits", "logits_dtype", "experts"),
    }
)
"""The fields that change neither the function of a model nor the meaning of its weights."""

_RESOLVED = {
    "num_kv_heads": "kv_heads",
    "head_dim": "key_size",
    "ffn_width": "hidden_size",
}
_OF_EXPERTS = ("count", "per_token", "width", "shared", "normalize")


def check_snapshot(
    files: Files,
    model: nnx.Module,
    rules: WeightRules | str | None = None,
    differ: Iterable[str] = (),
) -> None:
    """Compares a `Transformer` with the `config.json` that lies beside weights, where one does.

    Args:
        files: as of `load_weights`.
        model: its arrays may be shapes; models of other classes are taken as they are.
        rules: as of `load_weights`. With the name of a hub's format the config must be one that
            can be compared; with rules of one's own, one that cannot is left alone.
        differ: fields of a `TransformerConfig` in which the model is to be another, such as
            `rope_theta` where it is to learn longer sequences.

    Raises:
        ConfigError: naming every field that differs, with both values.
        CheckpointError: when the file cannot be read, with a hub's format.
        UnsupportedError: when a `Transformer` cannot be what it describes, with a hub's format.

    Example:
        >>> import json, tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        >>> _ = (path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
        >>> config = hub_config(path, num_heads=8)
        >>> check_snapshot(path, Transformer(config, rngs=nnx.Rngs(0)), "hf-gpt2")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: the model is not the one of '...config.json': num_heads
        is 8 and 4 there, num_kv_heads is 8 and 4 there, head_dim is 8 and 16 there. Its weights ...
    """
    differ = (differ,) if isinstance(differ, str) else differ
    TEXTS.check("load_weights", "differ", differ)
    check_fields(TransformerConfig, dict.fromkeys(differ := tuple(differ)))
    if not isinstance(model, Transformer):
        return
    for file in _beside(files):
        try:
            theirs = hub_config(file)
        except (CheckpointError, UnsupportedError):
            if rules in FORMATS:
                raise
            continue
        found = list(_differences(model.config, theirs, differ))
        if found:
            raise ConfigError(
                f"the model is not the one of {str(file)!r}: {', '.join(found)}. Its weights would "
                "be those of another function: take the sizes from there, in a config by "
                f"model: {{hub: {file.parent}}}, in Python by hub_config({str(file.parent)!r})"
                "; or name in differ=(...) what is to differ"
            )


def _beside(files: Files) -> list[Path]:
    """The configs beside files, each of them once."""
    several = [files] if isinstance(files, str | Path) or not isinstance(files, Sequence) else files
    paths = [as_path(fetched(path), "the weights", CheckpointError) for path in several]
    folders = dict.fromkeys(path if path.is_dir() else path.parent for path in paths)
    return [folder / CONFIG_FILE for folder in folders if (folder / CONFIG_FILE).is_file()]


def _differences(
    ours: TransformerConfig, theirs: TransformerConfig, differ: Iterable[str]
) -> Iterator[str]:
    # Windows count as far as the model sees.
    mine, wanted = meaning(ours), meaning(dataclasses.replace(theirs, max_length=ours.max_length))
    for field in wanted:
        if mine[field] != wanted[field] and field.partition(".")[0] not in differ:
            yield f"{field} is {mine[field]!r} and {wanted[field]!r} there"


def meaning(config: TransformerConfig) -> Mapping[str, Any]:
    """What a config says of the function of a model, every default resolved.

    Args:
        config: of the model.

    Returns:
        Values by field; those of experts as `experts.count`.
    """
    names = [field.name for field in dataclasses.fields(config) if field.name not in FREE]
    found = {name: getattr(config, _RESOLVED.get(name, name)) for name in names}
    if config.positions == "learned":
        del found["rope_theta"]
    is_usual = abs(config.score_scale * config.key_size**0.5 - 1) < 1e-9
    found["attention_scale"] = None if is_usual else config.score_scale
    far = config.max_length if config.local_rope_theta is None else float("inf")
    each = tuple(0 if window >= far else window for window in config.layer_windows)
    found["windows"] = each if any(each) else ()
    experts = config.experts
    for name in _OF_EXPERTS:
        value = None if experts is None else getattr(experts, name)
        is_default = name == "width" and experts is not None and value is None
        found[f"experts.{name}"] = config.hidden_size if is_default else value
    return found
