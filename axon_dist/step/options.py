"""What a step does besides its strategy."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from ..core.errors import ConfigError, GroupError, did_you_mean
from ..core.told import REAL, TEXTS
from ..core.typing import OptionValue
from ..mesh import ProcessGroup, World
from ..nn import ActivationCheckpointing
from ..ops.precision import GradScaler
from .state import Nonfinite


def check_arguments(
    optimizer: Any,
    loss_fn: Any,
    world: Any,
    remat: Any = None,
    strategy: Any = None,
    model: Any = None,
) -> None:
    """Checks the kinds of the arguments that are no plain values.

    Args:
        optimizer: must have `init` and `update`, as optax transformations do.
        loss_fn: must be callable.
        world: must be a `World`.
        remat: must be an `ActivationCheckpointing` or None.
        strategy: a wrapper must be over a group of this world, and around such a model.
        model: the model, or a function that makes it.

    Raises:
        ConfigError: naming what was got and what to give instead.
        GroupError: when a wrapper is over a group of another world.

    Example:
        >>> check_arguments(None, len, None)
        Traceback (most recent call last):
            ...
        axon_dist.core.errors.ConfigError: optimizer is a NoneType; give an optax transformation...
    """
    if isinstance(optimizer, nnx.Optimizer):
        raise ConfigError(
            "optimizer is an nnx.Optimizer, which keeps a state of its own; give the optax "
            "transformation it was made of, the step keeps its state in TrainState.opt_state"
        )
    if inspect.isclass(optimizer):
        raise ConfigError(
            f"optimizer is the class {optimizer.__name__}; give an optax transformation, such as "
            "optax.adamw(1e-3)"
        )
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}; give an optax transformation, such as "
            "optax.adamw(1e-3)"
        )
    if inspect.isclass(loss_fn):
        raise ConfigError(
            f"loss_fn is the class {loss_fn.__name__}; give a function loss_fn(model, batch), or "
            "an instance that can be called so"
        )
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is a {type(loss_fn).__name__}; give a function loss_fn(model, batch) that "
            "returns a scalar mean or Weighted(total, weight)"
        )
    _check_arity(loss_fn)
    if not isinstance(world, World):
        raise ConfigError(
            f"world is a {type(world).__name__}; give a World, made by World.init(...) or "
            "World.emulate(8)"
        )
    check_kind("remat", remat, ActivationCheckpointing, "such as ActivationCheckpointing()")
    group = getattr(strategy, "group", None)
    if isinstance(group, ProcessGroup) and group.mesh != world.mesh:
        raise GroupError(
            f"the {type(strategy).__name__} is over a group of a mesh {_axes(group.mesh)}, and the "
            f"step is for a world of {_axes(world.mesh)}, or of other devices; give it "
            f"world.group({', '.join(map(repr, group.axes))}) of this world"
        )
    wrapped: Any = getattr(strategy, "module", None)
    both = isinstance(wrapped, nnx.Module) and isinstance(model, nnx.Module)
    # Made anew it is as good: a strategy depends on names and shapes alone.
    if both and wrapped is not model and _weights(wrapped) != _weights(model):
        raise ConfigError(
            f"the {type(strategy).__name__} is around another {type(wrapped).__name__} than the "
            f"{type(model).__name__} that the step is for, with other weights; build the step for "
            "its .module, or give its .strategy"
        )


def _weights(model: Any) -> dict[Any, Any]:
    """The shape of every weight by its path."""
    found: Any = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: getattr(variable.get_value(), "shape", None) for path, variable in found}


def _axes(mesh: Mesh) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _check_arity(loss_fn: Any) -> None:
    """Raises unless a loss can be called as `loss_fn(model, batch)`, or with a `step` besides."""
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # A callable that Python knows no signature of.
        return
    try:
        signature.bind(None, None, **({"step": None} if is_told_step(loss_fn) else {}))
    except TypeError as error:
        raise ConfigError(
            f"loss_fn takes {signature}, and is called as loss_fn(model, batch): {error}; let it "
            "take these two, and bind the others with functools.partial"
        ) from error


def is_told_step(loss_fn: Any) -> bool:
    """Whether a loss function has a parameter `step` that it must be given.

    Example:
        >>> is_told_step(lambda model, batch, *, step: 0.0), is_told_step(lambda model, batch: 0.0)
        (True, False)
    """
    try:
        found = inspect.signature(loss_fn).parameters.get("step")
    except (TypeError, ValueError):  # A callable that Python knows no signature of.
        return False
    positional = inspect.Parameter.POSITIONAL_ONLY
    return found is not None and found.default is found.empty and found.kind is not positional


def check_kind(name: str, value: Any, kind: type, example: str) -> None:
    """Raises `ConfigError` unless an option is None or of its kind.

    Example:
        >>> check_kind("pad", None, str, "the path of a leaf")
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; it must be None or {example}")


METRICS = ("loss", "grad_norm", "param_norm")
"""What a step can be asked to report."""

LOSS_SCALE = "loss_scale"
"""The metric in which a step with a `GradScaler` reports its scale."""


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What a step does besides the strategy.

    Args:
        accumulate: K microbatches per step, added up before the optimizer runs; 1 beside a
            pipeline, which has a number of its own.
        clip_norm: the largest global gradient norm; longer gradients are scaled down to it.
        metrics: which numbers a step reports, among `loss`, `grad_norm`, `param_norm`.
        scaler: the loss scale, or None without one.
        nonfinite: what to do after a loss or gradient that is not finite; None does not look.
        deterministic: whether every run has to give the same bits.
        pad: the leaf of the batch that weighs samples, to fill batches up by; None refuses them.
        compiler_options: what the compiler is told beside what the chip has.
        separable: whether the parts of a batch give its loss; None reads it from the program.
        eval_kwargs: what the call of the model is given in evaluations, in place of its own.
        ema: the decay of the moving average of the parameters; None keeps none.
        unroll: up to how many blocks are written out rather than run by a loop; None says so by
            what is recomputed.
    """

    accumulate: int = 1
    clip_norm: float | None = None
    metrics: tuple[str, ...] = ("loss",)
    scaler: GradScaler | None = None
    nonfinite: Nonfinite | None = None
    deterministic: bool = False
    pad: str | None = None
    compiler_options: Mapping[str, OptionValue | None] | None = None
    separable: bool | None = None
    eval_kwargs: Mapping[str, Any] | None = None
    ema: float | None = None
    unroll: int | None = None

    @property
    def holds(self) -> bool:
        """Whether the state stays as it was from the first step that is not finite."""
        return self.nonfinite is not None and self.nonfinite.holds

    def validate(self) -> None:
        """Raises `ConfigError` unless every option has a possible value."""
        whole = isinstance(self.accumulate, int) and not isinstance(self.accumulate, bool)
        if not whole or self.accumulate < 1:
            raise ConfigError(
                f"accumulate is {self.accumulate!r}; it must be a whole number of microbatches, "
                "at least 1"
            )
        whole = isinstance(self.unroll, int) and not isinstance(self.unroll, bool)
        if self.unroll is not None and not (whole and self.unroll >= 1):
            raise ConfigError(
                f"unroll is {self.unroll!r}; it must be up to how many blocks are written out, at "
                "least 1, which runs all of them by a loop, or None"
            )
        REAL.or_none().check("build_train_step", "clip_norm", self.clip_norm)
        REAL.or_none().check("build_train_step", "ema", self.ema)
        TEXTS.check("build_train_step", "metrics", self.metrics)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"clip_norm is {self.clip_norm}; it must be positive, or None not to clip"
            )
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ConfigError(
                f"ema is {self.ema}; it must be the decay of the average, at least 0 and below 1, "
                "such as 0.999, or None not to average"
            )
        check_kind("scaler", self.scaler, GradScaler, "such as GradScaler()")
        check_kind("deterministic", self.deterministic, bool, "True or False")
        check_kind("pad", self.pad, str, "the path of the leaf of the batch that weighs samples")
        check_kind("separable", self.separable, bool, "True or False")
        told = "arguments of the model's call by name, such as {'deterministic': True}"
        check_kind("eval_kwargs", self.eval_kwargs, Mapping, told)
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(f"unknown metric {name!r}.{did_you_mean(name, METRICS)}")
