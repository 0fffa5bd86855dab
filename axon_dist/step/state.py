"""`TrainState`: everything a run carries from step to step, as one pytree."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.core import Tracer

from ..core.errors import ConfigError
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
        frozen: nested dict, the parameters that the optimizer leaves alone.
        ema: nested dict, the moving average of `params`, in float32 or wider; or None.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    buffers: PyTree
    scaler: Any = None
    frozen: PyTree = dataclasses.field(default_factory=dict)
    ema: PyTree = None


def averaged(state: TrainState) -> TrainState:
    """The state with the moving average in place of the parameters, in their dtypes.

    Raises:
        ConfigError: when the state has none.
    """
    if state.ema is None:
        raise ConfigError(
            "ema=True, and the state has no moving average of the parameters; ask for one: "
            "build_train_step(..., ema=0.999)"
        )
    narrow = lambda e, p: e if e.dtype == p.dtype else e.astype(p.dtype)
    params = jax.tree.map(narrow, state.ema, state.params)
    return dataclasses.replace(state, params=params)


def check_usable(state: TrainState) -> None:
    """Raises unless the arrays of a state are still there.

    A step gives the memory of its state to the next. XLA may end the process when a program is
    given what is gone (jax 0.10 on several CPU devices does).

    Raises:
        ConfigError: when an earlier step has used the state up.
    """
    is_placed = isinstance(state.step, jax.Array) and not isinstance(state.step, Tracer)
    if is_placed and state.step.is_deleted():
        raise ConfigError(
            "this state was used up by an earlier step, which gave its memory to the next state; "
            "go on with the state that the step returned: state, metrics = step(state, batch)"
        )
