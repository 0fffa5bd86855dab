"""How little the backward pass has to recompute for a step to fit its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar

from ..core.errors import ConfigError
from ..core.words import byte_size
from ..nn import ActivationCheckpointing
from .reading import Reading

AUTO = "auto"
"""What a config says to have the least recomputed that memory allows."""

Remat: TypeAlias = ActivationCheckpointing | Literal["auto"] | None
"""What is recomputed, as a config says it."""

LADDER: Mapping[str, ActivationCheckpointing | None] = MappingProxyType(
    {
        "nothing": None,
        "all but matrix products": ActivationCheckpointing(policy="dots_no_batch"),
        "every block": ActivationCheckpointing(),
    }
)
"""What may be recomputed, by what a sentence calls it; each row keeps less than the one before."""

USABLE = 0.9
"""The share of device memory that a step may fill; the rest is the runtime's and fragmentation."""

Step = TypeVar("Step")


def recompute_least(
    build: Callable[[ActivationCheckpointing | None], Step],
    read: Callable[[Step], Reading],
    peak: Callable[[Step], int | None],
    usable: float,
) -> Step:
    """Goes down `LADDER` to the first row whose step fits; no row changes a number.

    Args:
        build: makes the step that recomputes what it is told.
        read: traces it.
        peak: bytes of a device by the compiled step, asked for where the traced one fits; None
            where it cannot be compiled.
        usable: bytes of a device that it may fill.

    Returns:
        The step.

    Raises:
        ConfigError: when no row fits.
    """
    said: dict[str, str] = {}
    for name, remat in LADDER.items():
        step = build(remat)
        traced = read(step).peak
        needs = (peak(step) if traced <= usable else None) or traced
        if needs <= usable:
            return step
        said[name] = byte_size(needs)
    needs = ", ".join(f"{size} where it recomputes {name}" for name, size in said.items())
    raise ConfigError(
        f"remat: auto found nothing that fits the {byte_size(int(usable))} of a device that may be "
        f"filled: a step needs {needs}. Take more microbatches (train.accumulate), or split the "
        "model over more devices, as axon plan says"
    )


def recomputing_line(
    remat: ActivationCheckpointing | None, own: Reading, every: Reading, usable: float
) -> str:
    """What was chosen and what it saves, in a sentence.

    Args:
        remat: what the step recomputes, of `LADDER`.
        own: what its traced program needs.
        every: the same of a step that recomputes every block.
        usable: bytes of a device that a step may fill.
    """
    name = next(name for name, row in LADDER.items() if row == remat)
    saved = 1 - own.flops / every.flops if every.flops else 0.0
    return (
        f"remat: auto recomputes {name}: {byte_size(own.peak)} of {byte_size(int(usable))} "
        f"that may be filled, {saved:.1%} fewer FLOPs than recomputing every block"
    )
