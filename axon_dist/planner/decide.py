"""`decide`: the decision in three questions, where nothing is known in numbers."""

from __future__ import annotations

from enum import StrEnum

from ..core.errors import ConfigError
from ..mesh.chips import HARDWARE

FAST = 100e9
"""Bytes/s per device from which layers can be gathered while others compute."""


class Direction(StrEnum):
    """Where to start."""

    DATA = "data"
    PIPELINE = "pipeline"
    FSDP = "fsdp"
    TENSOR = "tensor"


def decide(
    fits: bool, sequential: bool = False, interconnect: float = HARDWARE["h100"].link
) -> Direction:
    """Says which parallelism to start from.

    A model that fits is replicated. One that does not is cut into stages if it is a sequence of
    layers; otherwise it is sharded where the links are fast, and its layers are split within a
    node where they are not. `axon plan` counts instead of asking.

    Args:
        fits: whether the training state (16 bytes per parameter with Adam in float32) and the
            activations fit on one device.
        sequential: whether the model is a chain of similar layers.
        interconnect: bytes/s that a device sends to others; an H100's inside its node by default.

    Returns:
        The direction.

    Raises:
        ConfigError: for an interconnect that is not positive.

    Example:
        >>> decide(fits=True).value, decide(fits=False, sequential=True).value
        ('data', 'pipeline')
        >>> decide(fits=False).value
        'fsdp'
    """
    if not interconnect > 0:
        raise ConfigError(f"got interconnect={interconnect}; it must be positive, in bytes/s")
    if fits:
        return Direction.DATA
    if sequential:
        return Direction.PIPELINE
    return Direction.FSDP if interconnect >= FAST else Direction.TENSOR
