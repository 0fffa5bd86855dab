"""Auto-wrap policies: which modules FSDP gathers and frees as one unit."""

from __future__ import annotations

import dataclasses
import math

from flax import nnx

from ..core.errors import ConfigError
from ..core.told import is_whole
from ..core.typing import Path
from ..nn import block_paths
from ..program import linen_modules


@dataclasses.dataclass(frozen=True)
class TransformerAutoWrapPolicy:
    """Every module of the block classes is a unit.

    Args:
        classes: block classes or their names; none means the classes of the blocks that the model
            keeps in lists, and the blocks that a bridged Linen model repeats. Within a bridged
            model, whose modules exist only while it runs, the name of a module without its number.

    Example:
        >>> TransformerAutoWrapPolicy("Block").classes
        ('Block',)
    """

    classes: tuple[str, ...]

    def __init__(self, *classes: type | str):
        for name in classes:
            if not isinstance(name, (str, type)):
                raise ConfigError(
                    f"TransformerAutoWrapPolicy got a {type(name).__name__}; give classes of "
                    "blocks, or their names"
                )
        names = tuple(name if isinstance(name, str) else name.__name__ for name in classes)
        object.__setattr__(self, "classes", names)

    def units(self, model: nnx.Module) -> frozenset[Path]:
        """The paths of the units of a model."""
        return block_paths(model, self.classes)


@dataclasses.dataclass(frozen=True)
class SizeBasedAutoWrapPolicy:
    """A module is a unit when it is called, holds enough parameters and no such module inside.

    Lists of modules are not called, and the model itself is no unit of its own.

    Args:
        min_params: the least number of parameters of a unit.

    Raises:
        ConfigError: when `min_params` is below one.
    """

    min_params: int = 100_000_000

    def __post_init__(self) -> None:
        if not is_whole(self.min_params) or self.min_params < 1:
            raise ConfigError(f"min_params is {self.min_params}; it must be at least 1 parameter")

    def units(self, model: nnx.Module) -> frozenset[Path]:
        """The paths of the units of a model, inner modules decided first."""
        called = [keys for keys, module in nnx.iter_modules(model) if callable(module)]
        called += [keys for keys, _ in linen_modules(model)]
        modules = sorted(called, key=len, reverse=True)
        sizes = {
            keys: math.prod(variable.get_value().shape)
            for keys, variable in nnx.iter_graph(model)
            if isinstance(variable, nnx.Param)
        }
        wrapped: list[tuple] = []
        for keys in modules:
            held = sum(size for leaf, size in sizes.items() if leaf[: len(keys)] == keys)
            has_unit = any(inner[: len(keys)] == keys for inner in wrapped)
            if keys and not has_unit and held >= self.min_params:
                wrapped.append(keys)
        return frozenset(_path(keys) for keys in wrapped)


def _path(keys: tuple) -> Path:
    return "/".join(str(key) for key in keys)


AutoWrapPolicy = TransformerAutoWrapPolicy | SizeBasedAutoWrapPolicy
"""Anything with `units(model)`, the paths of the modules gathered as one."""
