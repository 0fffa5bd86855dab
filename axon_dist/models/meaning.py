"""The fields of a `TransformerConfig` that determine the function of its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .rotary import RopeScaling
from .transformer_config import TransformerConfig

RESOLVED: Mapping[str, str] = MappingProxyType(
    {"num_kv_heads": "kv_heads", "head_dim": "key_size", "ffn_width": "hidden_size"}
)
"""Maps fields of a `TransformerConfig` to the properties that resolve their defaults."""

WITHOUT_MEANING = frozenset(
    (
        *("max_length", "dropout", "param_dtype", "dtype", "attention", "scan_layers"),
        *("logits", "logits_dtype", "experts"),
    )
)
"""Fields that `meaning` leaves out: they do not change what the weights mean.

Of `experts`, single fields are compared.
"""

_OF_EXPERTS = MappingProxyType(
    {
        "count": "count",
        "per_token": "per_token",
        "width": "width",
        "shared": "shared",
        # With one expert per token, `normalize` has no effect.
        "normalize": "divides_gates",
    }
)
"""Maps compared fields of an `ExpertConfig` to the fields or properties with their values."""


def meaning(config: TransformerConfig) -> Mapping[str, Any]:
    """Returns the fields that determine the function of a model, with defaults resolved.

    Args:
        config: the config of the model.

    Returns:
        Values by field; those of experts as `experts.count`. A field without effect is None, so
        that all configs have the same fields.
    """
    names = [
        field.name for field in dataclasses.fields(config) if field.name not in WITHOUT_MEANING
    ]
    values = {name: getattr(config, RESOLVED.get(name, name)) for name in names}
    if config.positions == "learned":
        values["rope_theta"] = None
    is_usual = abs(config.score_scale * config.key_size**0.5 - 1) < 1e-9
    values["attention_scale"] = None if is_usual else config.score_scale
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        values["rope_scaling"] = RopeScaling("linear", scaling.factor)
    # Layers with a window are rotated like the others if they have the same base, unscaled.
    is_same = scaling is None and config.local_rope_theta == config.rope_theta
    if is_same or not any(config.layer_windows):
        values["local_rope_theta"] = None
    far = config.max_length if values["local_rope_theta"] is None else float("inf")
    each = tuple(0 if window >= far else window for window in config.layer_windows)
    values["windows"] = each if any(each) else ()
    experts = config.experts
    if experts is not None:
        # The only feed-forwards are those of experts, whose width is compared below.
        values["ffn_width"] = None
    for name, resolved in _OF_EXPERTS.items():
        values[f"experts.{name}"] = None if experts is None else getattr(experts, resolved)
    if experts is not None:
        values["experts.width"] = config.expert_size
    return values
