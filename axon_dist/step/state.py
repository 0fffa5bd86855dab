"""`TrainState`: everything that a run carries from step to step, as one pytree."""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..core.checks import ArgumentKind
from ..core.errors import ConfigError
from ..core.tree import leaves_with_paths, problem_of
from ..core.typing import Array, PyTree
from ..ops.precision import all_finite
from ..optim.wrappers import SPIKE as SPIKE
from ..sharding import Padding
from .options import FLAG
from .options import OVERFLOW as OVERFLOW

WEIGHTS = ArgumentKind(
    "arrays by path, as step.weight_targets names them, or nothing; the model already has "
    "its first values and its seed",
    lambda x: isinstance(x, Mapping) and all(hasattr(leaf, "shape") for leaf in x.values()),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The arrays of a run. A step maps one state to the next and reuses its memory.

    The containers are plain dicts and named tuples. Passing them into a jitted function costs a
    fraction of what an `nnx.State` costs.

    Args:
        step: scalar int32, how many steps have been taken.
        params: nested dict, the trained parameters.
        opt_state: the state of the optax transformation.
        buffers: nested dict, every Variable that is neither trained nor an `nnx.Param`: BatchStat,
            RngState, Cache, your own types.
        scaler: the state of the loss scale, or None without one.
        frozen: nested dict, the parameters that the optimizer does not train.
        ema: nested dict, the moving average of `params`, in float32 or wider; or None.
        outer: nested dict, the parameters after the last outer step where replicas train
            independently (DiLoCo), in float32 or wider; `params`, `opt_state`, `buffers` and
            `scaler` then have a dim 0 that counts replicas. None otherwise.
        outer_state: what else the next outer step of such replicas needs: `opt_state`, a tuple with
            the state of the outer optimizer for each fragment, and `missing`, the error feedback of
            each replica's compression.
        padding: which leaves end in rows of zeros, because their dims do not divide by the devices
            that split them, and their shapes in the model; None if no leaf is padded. A step never
            computes with these rows. `step.weights(state)`, `step.merge(state)` and checkpoints
            have the shapes of the model. This field is static: it is not a leaf of the tree.
    """

    step: Array
    params: PyTree
    opt_state: PyTree
    buffers: PyTree
    scaler: Any = None
    frozen: PyTree = dataclasses.field(default_factory=dict)
    ema: PyTree = None
    outer: PyTree = None
    outer_state: Any = None
    padding: Padding | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def meeting(self) -> Any:
        """The deprecated name of `outer_state`."""
        warnings.warn(
            "TrainState.meeting is deprecated; use outer_state", DeprecationWarning, stacklevel=2
        )
        return self.outer_state


def wide_copy(params: PyTree) -> PyTree:
    """Copies parameters to float32 or wider, in new arrays."""
    # Half precision would round away the small increments of an average. The copy is needed
    # because a step donates every array of its state: no two leaves may share one.
    return jax.tree.map(
        lambda p: jnp.array(p, jnp.promote_types(p.dtype, jnp.float32), copy=True), params
    )


def averaged(state: TrainState) -> TrainState:
    """Returns the state with the moving average in place of the parameters, in their dtypes.

    Raises:
        ConfigError: when the state has no moving average.
    """
    if state.ema is None:
        raise ConfigError(
            "ema=True, but the state has no moving average of the parameters; ask for one: "
            "build_train_step(..., ema=0.999)"
        )

    params = jax.tree.map(
        lambda e, p: e if e.dtype == p.dtype else e.astype(p.dtype), state.ema, state.params
    )
    return dataclasses.replace(state, params=params)


def check_fits(state: TrainState, shapes: TrainState, state_shardings: TrainState) -> None:
    """Raises unless a state is one that a step could have made.

    Args:
        state: any.
        shapes: the shapes of the step's states.
        state_shardings: their shardings.

    Raises:
        ConfigError: naming the first array that is missing, unexpected, of another shape or dtype,
            or sharded differently.
    """
    wanted = dict(leaves_with_paths(shapes))
    leaves = dict(leaves_with_paths(state))
    layouts = dict(leaves_with_paths(state_shardings))
    for path in [*wanted, *(path for path in leaves if path not in wanted)]:
        problem = _problem(leaves.get(path), wanted.get(path), layouts.get(path))
        if problem is not None:
            raise ConfigError(
                f"this state is not one of this step: {path} {problem}; give the state that this "
                "step's init() or call returned, or restore one of another model or strategy onto "
                "it: load_checkpoint(path, step)"
            )


def _is_number_of(leaf: Any, dtype: Any) -> bool:
    """Whether `jnp.asarray(leaf, dtype)` is this Python number, up to rounding."""
    if isinstance(leaf, bool) or not isinstance(leaf, (int, float)):
        return False
    # NaN and the infinities, which are no literals, are in neither range.
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min <= leaf <= jnp.iinfo(dtype).max and leaf == int(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and abs(leaf) <= float(jnp.finfo(dtype).max)


def _problem(leaf: Any, wanted: Any, sharding: Any) -> str | None:
    """Returns what is wrong with one array of a state, or None."""
    if leaf is None or wanted is None:
        return "is missing" if leaf is None else "is not part of this step's state"
    if not hasattr(leaf, "shape") or not hasattr(leaf, "__array__"):
        problem = f"is a {type(leaf).__name__}, not an array"
        # Users set numbers in an optimizer's state, such as a learning rate.
        if wanted.shape == () and _is_number_of(leaf, wanted.dtype):
            problem += f": set it to jnp.asarray({leaf}, jnp.{wanted.dtype})"
        return problem
    if leaf.shape != wanted.shape or leaf.dtype != wanted.dtype:
        return f"is {leaf.dtype}{list(leaf.shape)} and must be {wanted.dtype}{list(wanted.shape)}"
    if (problem := problem_of(leaf)) is not None:
        return problem
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.committed:
        return None
    place = sharding.with_memory_kind(leaf.sharding.memory_kind)
    if not leaf.sharding.is_equivalent_to(place, leaf.ndim):
        return f"has {leaf.sharding} and must have {sharding}"
    return None


def check_usable(state: TrainState) -> None:
    """Raises if the arrays of a state were donated.

    A step donates its state to the next one. XLA may abort the process when a program reads
    donated memory (jax 0.10 on several CPU devices does).

    Raises:
        ConfigError: when an earlier step has used the state up, or `state` is not a `TrainState`.
    """
    if not isinstance(state, TrainState):
        what = "None" if state is None else f"a {type(state).__name__}"
        what = f"the class {state.__name__}" if inspect.isclass(state) else what
        raise ConfigError(
            f"got {what} for a state; give a TrainState, that of step.init() or of the step "
            "before: state, metrics = step(state, batch)"
        )
    if isinstance(state.step, jax.Array) and problem_of(state.step) is not None:
        raise ConfigError(
            "this state was used up by an earlier step, which gave its memory to the next state; "
            "go on with the state that the step returned: state, metrics = step(state, batch)"
        )


@dataclasses.dataclass(frozen=True)
class NonfiniteLoss:
    """The first step of a run that was not finite.

    Args:
        step: its number, counted from 1.
        loss: its loss.
    """

    step: int
    loss: float

    def __str__(self) -> str:
        """Names the step and says what was not finite in it."""
        if math.isfinite(self.loss):
            return f"step {self.step}: a gradient is not finite (the loss is {self.loss:.4g})"
        return f"step {self.step}: the loss is {self.loss}"


def step_was_nonfinite(values: Mapping[str, float]) -> bool:
    """Whether the metrics of a step say that it was not finite; without a guard, its loss."""
    return bool(values[FLAG]) if FLAG in values else not math.isfinite(values["loss"])


def is_finite(state: TrainState) -> bool:
    """Whether every parameter of a state is finite; computed on the devices."""
    return bool(jax.jit(all_finite)(state.params))
