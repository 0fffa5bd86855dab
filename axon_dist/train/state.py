"""`TrainState`: everything a run carries from step to step, as one pytree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ..core.typing import Array, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The arrays of a run; steps map it to the next and reuse its memory.

    Its containers are plain dicts and named tuples, which cross the border of a jitted function
    at a fraction of the cost of an `nnx.State`.

    Args:
        step: scalar int32, how many steps have been taken.
        params: nested dict, what the optimizer trains.
        opt_state: what the optax transformation keeps.
        buffers: nested dict: statistics, random keys and their counts.
        scaler: the state of the loss scale, or None without one.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    buffers: PyTree
    scaler: Any = None
