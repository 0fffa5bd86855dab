"""From the `parallel` section to one strategy: each name looked up, its options read by type."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from axon_dist.core.errors import ConfigError, did_you_mean
from axon_dist.mesh import World
from axon_dist.parallel import STRATEGIES, Strategy, as_strategy, compose

from .read import read


def build_strategy(parallel: Mapping[str, Mapping[str, Any]], model: Any, world: World) -> Strategy:
    """Makes the strategies that a config names, and composes them.

    Args:
        parallel: options by strategy name, as plain data.
        model: a module or a factory of one.
        world: the devices.

    Raises:
        ConfigError: for an unknown strategy or option, or an option of the wrong type.
        MeshError: when a strategy needs an axis that the mesh lacks.
        StrategyConflictError: when two of them contradict each other.

    Example:
        >>> build_strategy({"ddp": {"bucket_capacity": 1000}}, None, World.emulate(8)).name
        'ddp'
    """
    parts = []
    for name, options in read_strategies(parallel).items():
        parts.append(as_strategy(STRATEGIES[name](model, world, **options)))
    return parts[0] if len(parts) == 1 else compose(*parts)


def read_strategies(parallel: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Checks names and options against the registry, without a world.

    Raises:
        ConfigError: for an unknown strategy or option, or an option of the wrong type.
    """
    for name in parallel:
        if name not in STRATEGIES:
            hint = did_you_mean(name, STRATEGIES)
            raise ConfigError(f"parallel.{name}: there is no such strategy.{hint}")
    return {
        name: _read_options(STRATEGIES[name], options, f"parallel.{name}")
        for name, options in parallel.items()
    }


def _read_options(
    function: Callable[..., Any], options: Mapping[str, Any], path: str
) -> dict[str, Any]:
    """Reads keyword arguments of a function by their annotations."""
    hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    parameters = inspect.signature(function).parameters
    known = {name for name in parameters if name not in ("model", "world")}
    for key in options:
        if key not in known:
            raise ConfigError(f"{path}.{key}: there is no such option.{did_you_mean(key, known)}")
    return {key: read(hints[key], value, f"{path}.{key}") for key, value in options.items()}
