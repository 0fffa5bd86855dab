"""Names of machines to compile for: `h100:8x8`, `v5p:4x4x4`, `v5e:16x16`, `cpu:8`."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias

from ..core.errors import ConfigError, did_you_mean
from .machine import MACHINES, Machine

Platform: TypeAlias = Literal["cpu", "cuda", "tpu"]
"""Which compiler a target needs."""


@dataclasses.dataclass(frozen=True)
class _Chip:
    """`full_ring`: a torus axis of a multiple of it closes into a ring; 0 without a torus."""

    platform: Platform
    examples: tuple[str, ...]
    num_dims: tuple[int, ...]
    max_last_dim: int
    full_ring: int


_CHIPS = {
    "cpu": _Chip("cpu", ("cpu:8",), (1,), 4096, 0),
    "h100": _Chip("cuda", ("h100:8", "h100:8x8"), (1, 2), 8, 0),
    "v5e": _Chip("tpu", ("v5e:4x4", "v5e:16x16"), (2,), 16, 16),
    "v5p": _Chip("tpu", ("v5p:2x2x2", "v5p:4x4x4"), (3,), 16, 4),
    "v6e": _Chip("tpu", ("v6e:4x4", "v6e:16x16"), (2,), 16, 16),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of devices of one kind, wired in one way.

    Args:
        name: what `parse_target` reads, such as `"v5p:4x4x4"`.
        platform: `cpu`, `cuda` or `tpu`.
        chip: `cpu`, `h100`, `v5e`, `v5p` or `v6e`.
        shape: nodes and devices per node of a GPU cluster, or the dims of a TPU slice.
    """

    name: str
    platform: Platform
    chip: str
    shape: tuple[int, ...]

    @property
    def examples(self) -> tuple[str, ...]:
        """Names of targets with the same chip."""
        return _CHIPS[self.chip].examples

    @property
    def num_devices(self) -> int:
        """How many devices there are in all."""
        return math.prod(self.shape)

    @property
    def hbm_bytes(self) -> int | None:
        """Bytes of memory of one device; None for the CPU."""
        return self.machine.hbm_bytes if self.machine else None

    @property
    def machine(self) -> Machine | None:
        """The peak rates of one device; None for the CPU."""
        return next((machine for machine in MACHINES if machine.name == self.chip), None)

    @property
    def wrap(self) -> tuple[bool, bool, bool] | None:
        """Which axes of a TPU slice close into rings, or None where none does.

        A v5p slice has the wires when it is made of whole 4x4x4 cubes, a v5e or v6e slice along
        an axis of 16. The compiler has to be told: without rings it replaces all-gathers over the
        whole slice by all-reduces.
        """
        full = _CHIPS[self.chip].full_ring
        if not full:
            return None
        closed = [size % full == 0 for size in self.shape]
        if len(self.shape) == 3:
            return (True, True, True) if all(closed) else None
        return (closed[0], closed[1], False) if any(closed) else None


def parse_target(name: str) -> Target:
    """Reads the name of a target.

    `h100:8` is one node of eight GPUs, `h100:8x8` eight nodes of eight, `v5p:4x4x4` a TPU slice by
    its dims, `cpu:8` eight emulated devices.

    Args:
        name: `chip:shape`.

    Returns:
        The target; no device or compiler is touched.

    Raises:
        ConfigError: the chip is unknown or cannot have this shape.

    Example:
        >>> parse_target("h100:8x8").num_devices
        64
        >>> parse_target("v5p:2x2x2").shape
        (2, 2, 2)
    """
    chip, _, text = name.partition(":")
    if chip not in _CHIPS:
        raise ConfigError(f"no target chip {chip!r} in {name!r}.{did_you_mean(chip, _CHIPS)}")
    row = _CHIPS[chip]
    parts = text.split("x")
    shape = tuple(int(part) for part in parts if part.isdigit())
    if len(shape) != len(parts) or len(shape) not in row.num_dims or 0 in shape:
        raise ConfigError(
            f"cannot read the shape {text!r} of target {name!r}; "
            f"write it as in {' or '.join(row.examples)}"
        )
    if shape[-1] > row.max_last_dim:
        raise ConfigError(
            f"target {name!r} asks for {shape[-1]} {chip} where at most {row.max_last_dim} are "
            f"wired together; write more of them as in {row.examples[-1]}"
        )
    return Target(name, row.platform, chip, shape)


def as_target(target: Target | str) -> Target:
    """Reads a target unless it has been read already."""
    return parse_target(target) if isinstance(target, str) else target
