"""The layouts of weights that hubs know, one row each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flax import nnx

from axon_dist.core.errors import (
    AxonDistError,
    CheckpointError,
    ConfigError,
    UnsupportedError,
    did_you_mean,
)
from axon_dist.core.files import as_path, read_text
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.models.config import check_fields

from .families import FAMILIES
from .family import Family
from .files import fetched
from .rule import NATIVE, WeightRules

NATIVE_NAME = "native"
CONFIG_FILE = "config.json"


FORMATS: MappingProxyType[str, Family] = MappingProxyType(
    {f"hf-{name}": row for name, row in FAMILIES.items()}
)
"""By the name that `load_weights`, `save_weights` and `axon export` take."""


def hub_config(path: str | Path, **changes: Any) -> TransformerConfig:
    """The sizes of a `Transformer` that takes up the weights of a hub's repository.

    Args:
        path: a local snapshot with a `config.json`, or that file; or `hf://org/name`.
        **changes: fields to set besides, such as `dtype="bfloat16"`.

    Returns:
        The config.

    Raises:
        CheckpointError: when it cannot be read.
        UnsupportedError: for a family without a row in `FORMATS`, or a model of one that a
            `Transformer` cannot be.

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
    config = dataclasses.replace(_from_hub(FORMATS[name], data, file), **changes)
    config.validate()
    return config


def format_name(path: str | Path) -> str:
    """The key of `FORMATS` that a snapshot's weights have.

    Args:
        path: as of `hub_config`.

    Raises:
        CheckpointError: as `hub_config` does.
        UnsupportedError: likewise.
    """
    return _read_config(path)[0]


def _read_config(path: str | Path) -> tuple[str, Mapping[str, Any], Path]:
    """The format of a snapshot, its config, and where that lies."""
    path = as_path(fetched(path, (CONFIG_FILE,)), "the config of a model", CheckpointError)
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        data = json.loads(
            read_text(file, f"{str(file)!r} as the config of a model", CheckpointError)
        )
        kind = data["model_type"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read {str(file)!r} as the config of a model: {error!r}; name the folder of a "
            f"snapshot with its {CONFIG_FILE}"
        ) from error
    for name, row in FORMATS.items():
        if row.model_type == kind:
            return name, data, file
    known = ", ".join(row.model_type for row in FORMATS.values())
    raise UnsupportedError(
        f"{str(file)!r} is of the family {kind!r}; those known here are {known}. Make the model "
        "yourself, and give load_weights rules of your own"
    )


def _from_hub(row: Family, data: Mapping[str, Any], file: Path) -> TransformerConfig:
    try:
        return row.from_hub(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, AxonDistError):
            raise
        raise CheckpointError(
            f"{str(file)!r} is no config of the family {row.model_type!r}: {error!r}; take that of "
            "the snapshot as it was published"
        ) from error


def rules_for(rules: WeightRules | str | None, model: nnx.Module) -> WeightRules:
    """The table that rules given by name, or not at all, stand for.

    Args:
        rules: a table; a name; None for the native one.
        model: its arrays may be shapes.

    Raises:
        ConfigError: for an unknown name, or a model that is no `Transformer`.
        UnsupportedError: for a `Transformer` of another family.
    """
    if isinstance(rules, WeightRules):
        return rules
    if rules is None or rules == NATIVE_NAME:
        return NATIVE
    row = format_of(rules)
    config = config_of(model, rules)
    row.to_hub(config)
    return row.rules(config)


def format_of(name: str) -> Family:
    """The row of a name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ConfigError(
            f"no format {name!r:.80}.{did_you_mean(str(name), [NATIVE_NAME, *FORMATS])}"
        )
    return FORMATS[name]


def config_of(model: nnx.Module, name: str) -> TransformerConfig:
    """The config of a `Transformer`.

    Raises:
        ConfigError: when the model is another one.
    """
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"the format {name!r} is one of a Transformer, and the model is a "
            f"{type(model).__name__}; give rules of its own: WeightRules((WeightRule(...), ...))"
        )
    return model.config
