"""Modules that only some runs need: imported when asked for, and named when missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from axon_dist.core.errors import ConfigError


def has_module(name: str) -> bool:
    """Tells whether a module is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def require(name: str, extra: str, purpose: str) -> ModuleType:
    """Imports an optional module.

    Args:
        name: of the module.
        extra: the extra of this package that brings it.
        purpose: what it is needed for, to open the message.

    Raises:
        ConfigError: when it is not installed, with the command that installs it.

    Example:
        >>> require("json", "plots", "a plot").__name__
        'json'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{purpose} needs the module {error.name!r}, which is not installed; "
            f"run: pip install 'axon_dist[{extra}]'"
        ) from error
