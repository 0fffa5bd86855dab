"""A leaf of a batch that belongs to no sample, such as the weights of classes."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Shared:
    """Marks what all samples of a batch have in common, which is not cut with them.

    `batch = {"x": ..., "y": ..., "class_weights": Shared(weights)}`: the loss function finds the
    array itself under the name. Every device holds all of it, and microbatches and ranks see the
    same.

    Args:
        value: an array of any shape, the same on every process.

    Example:
        >>> import numpy as np
        >>> Shared(np.ones(3)).value.shape
        (3,)
    """

    value: Any
