"""What the tables of hub formats share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from axon_dist.core.errors import UnsupportedError
from axon_dist.models import TransformerConfig

from .rule import WeightRule

LAYER, EXPERT = "layer", "expert"
"""The groups of a name that count layers and experts."""

ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu_new": "gelu",
        "gelu_pytorch_tanh": "gelu",
        "gelu": "gelu_exact",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
        "tanh": "tanh",
    }
)
"""What hubs call the activations that there are here; the first of two names is written."""


def block_rules(config: TransformerConfig, rows: Iterable[tuple[Any, ...]]) -> list[WeightRule]:
    """Rules of the parameters of blocks, whether a model keeps blocks in a list or stacked.

    Args:
        config: of the model; `scan_layers` says which.
        rows: name, path or paths within a block, form, and the dim of a split. The tensors of
            experts are stacked, behind layers that are.
    """
    start, lead = ("blocks/", (LAYER,)) if config.scan_layers else (f"blocks/{{{LAYER}}}/", ())
    found = []
    for names, paths, form, *dim in rows:
        inside = (paths,) if isinstance(paths, str) else paths
        stack = (*lead, EXPERT) if f"(?P<{EXPERT}>" in names else lead
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


def require(config: object, family: str, wanted: Mapping[str, Any]) -> None:
    """Raises `UnsupportedError` unless fields or properties of a config have some values."""
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise UnsupportedError(
                f"a Transformer with {field}={getattr(config, field)!r} is no {family}, which has "
                f"{field}={value!r}; use another format, or 'native'"
            )
