"""What the tables of hub formats share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from axon_dist.core.errors import UnsupportedError
from axon_dist.models import TransformerConfig

from .rule import WeightRule

LAYER = "layer"
"""The group of a name that counts layers."""


def block_rules(config: TransformerConfig, rows: Iterable[tuple[Any, ...]]) -> list[WeightRule]:
    """Rules of the parameters of blocks, whether a model keeps blocks in a list or stacked.

    Args:
        config: of the model; `scan_layers` says which.
        rows: name, path or paths within a block, form, and the dim of a split.
    """
    start, stack = ("blocks/", LAYER) if config.scan_layers else (f"blocks/{{{LAYER}}}/", None)
    found = []
    for names, paths, form, *dim in rows:
        inside = (paths,) if isinstance(paths, str) else paths
        found.append(WeightRule(names, tuple(start + path for path in inside), form,
                          dim=dim[0] if dim else 0, stack=stack))  # fmt: skip
    return found


def sizes_of(config: TransformerConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """The sizes of a config under the names of a family, every default resolved.

    Args:
        config: of the model.
        names: fields of a `TransformerConfig` -> keys of `config.json`.
    """
    resolved = {"num_kv_heads": "kv_heads", "head_dim": "key_size", "ffn_width": "hidden_size"}
    return {theirs: getattr(config, resolved.get(ours, ours)) for ours, theirs in names.items()}


def require(config: TransformerConfig, family: str, wanted: Mapping[str, Any]) -> None:
    """Raises `UnsupportedError` unless fields or properties of a config have some values."""
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise UnsupportedError(
                f"a Transformer with {field}={getattr(config, field)!r} is no {family}, which has "
                f"{field}={value!r}; use another format, or 'native'"
            )
