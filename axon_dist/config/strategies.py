"""From the `parallel` section to one strategy: each name looked up, its options read by type."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

from axon_dist.core.errors import ConfigError, did_you_mean
from axon_dist.mesh import World
from axon_dist.parallel import STRATEGIES, Strategy, as_strategy, compose
from axon_dist.parallel.plans import USUAL_EVERY

from .read import read

StrategyOptions: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Options by strategy name."""

_OTHER_NAMES: MappingProxyType[str, str] = MappingProxyType(
    {
        "dp": "ddp",
        "fsdp": "full_shard",
        "fsdp2": "full_shard",
        "hsdp": "hybrid_shard",
        "tp": "tensor",
        "cp": "context",
        "ep": "expert",
        "experts": "expert",
        "moe": "expert",
        "pp": "pipeline",
    }
)
"""Names from elsewhere, mesh axes among them, and the strategy that an error then points to."""

_REQUIRED: MappingProxyType[str, tuple[str, Any]] = MappingProxyType(
    {
        "num_microbatches": ("the number of parts that a batch is cut into", 8),
        "every": ("the steps that replicas take on their own before they meet", USUAL_EVERY),
    }
)
"""Options without a default: what they are, and a value to show."""


def strategy_options(value: Any) -> StrategyOptions:
    """Reads `ddp`, `[full_shard, tensor]` or `{ddp: {bucket_capacity: 1000000}}`.

    Raises:
        ValueError: for anything else, none, or a strategy that stands twice.

    Example:
        >>> dict(strategy_options("ddp"))
        {'ddp': {}}
    """
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        twice = next((name for name in value if value.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"got {list(value)}, in which {twice} stands twice; a strategy applies once, so "
                "name it once"
            )
        value = {name: {} for name in value}
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            f"got {value!r}, which must be a strategy, a list of them, or a section "
            "{strategy: {option: value}}"
        )
    for name, options in value.items():
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(
                f"{name} has {options!r} under it, which must be a section of its options"
            )
    return MappingProxyType({str(name): dict(options or {}) for name, options in value.items()})


def plain_options(options: StrategyOptions) -> dict[str, dict[str, Any]]:
    """Options by strategy name, as YAML has them."""
    return {name: dict(values) for name, values in options.items()}


def build_strategy(parallel: Mapping[str, Mapping[str, Any]], model: Any, world: World) -> Strategy:
    """Makes the strategies that a config names, and composes them.

    Args:
        parallel: options by strategy name, as plain data.
        model: a module or a factory of one.
        world: the devices, and the mesh they form.

    Raises:
        ConfigError: for an unknown strategy or option, an option of the wrong type, or a missing
            one that has no default.
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
        ConfigError: for an unknown strategy or option, an option of the wrong type, or a missing
            one that has no default.
    """
    for name in parallel:
        if name not in STRATEGIES:
            hint = did_you_mean(_OTHER_NAMES.get(name.lower(), name), STRATEGIES)
            raise ConfigError(f"parallel.{name}: there is no such strategy.{hint}")
    return {
        name: _read_options(STRATEGIES[name], options, name) for name, options in parallel.items()
    }


def _read_options(
    function: Callable[..., Any], options: Mapping[str, Any], strategy: str
) -> dict[str, Any]:
    """Reads keyword arguments of a function by their annotations."""
    path = f"parallel.{strategy}"
    hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    parameters = inspect.signature(function).parameters
    known = {name: p for name, p in parameters.items() if name not in ("model", "world")}
    for key in options:
        if key not in known:
            raise ConfigError(f"{path}.{key}: there is no such option.{did_you_mean(key, known)}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(_says_missing(strategy, key))
    return {key: read(hints[key], value, f"{path}.{key}") for key, value in options.items()}


def _says_missing(strategy: str, option: str) -> str:
    meaning, value = _REQUIRED.get(option, ("which has no default", "..."))
    return (
        f"parallel.{strategy} needs {option}, {meaning}; write "
        f"parallel: {{{strategy}: {{{option}: {value}}}}}"
    )
