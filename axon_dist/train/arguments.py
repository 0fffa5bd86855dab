"""What `build_train_step` is given, checked before anything is traced."""

from __future__ import annotations

from typing import Any

from flax import nnx

from ..core.errors import ConfigError
from ..mesh import World
from ..nn import ActivationCheckpointing
from ..parallel import Strategy
from ..precision import GradScaler


def check_arguments(optimizer: Any, loss_fn: Any, strategy: Any, world: Any) -> None:
    """Checks the kinds of the arguments that a step cannot do without.

    Args:
        optimizer: must have `init` and `update`, as optax transformations do.
        loss_fn: must be callable.
        strategy: must be a `Strategy`, or have one.
        world: must be a `World`.

    Raises:
        ConfigError: naming what was got and what to give instead.

    Example:
        >>> check_arguments(None, len, None, None)
        Traceback (most recent call last):
            ...
        axon_dist.core.errors.ConfigError: optimizer is a NoneType; give an optax transformation...
    """
    if isinstance(optimizer, nnx.Optimizer):
        raise ConfigError(
            "optimizer is an nnx.Optimizer, which keeps a state of its own; give the optax "
            "transformation it was made of, the step keeps its state in TrainState.opt_state"
        )
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ConfigError(
            f"optimizer is {_kind(optimizer)}; give an optax transformation, such as "
            "optax.adamw(1e-3)"
        )
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn is {_kind(loss_fn)}; give a function loss_fn(model, batch) that returns a "
            "scalar mean or Weighted(total, weight)"
        )
    if not isinstance(getattr(strategy, "strategy", strategy), Strategy):
        raise ConfigError(
            f"strategy is {_kind(strategy)}; give a strategy such as ddp(), or a wrapper such as "
            'DDP(model, world.group("dp"))'
        )
    if not isinstance(world, World):
        raise ConfigError(
            f"world is {_kind(world)}; give a World, made by World.init(...) or World.emulate(8)"
        )


def check_kind(name: str, value: Any, kind: type, example: str) -> None:
    """Raises `ConfigError` unless an option is None or of its kind.

    Example:
        >>> check_kind("scaler", None, GradScaler, "GradScaler()")
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}; it must be None or {example}")


def check_options(remat: Any, scaler: Any, deterministic: Any, pad: Any) -> None:
    """Raises `ConfigError` unless every option is None or of its kind."""
    check_kind("remat", remat, ActivationCheckpointing, "such as ActivationCheckpointing()")
    check_kind("scaler", scaler, GradScaler, "such as GradScaler()")
    check_kind("deterministic", deterministic, bool, "True or False")
    check_kind("pad", pad, str, "the path of the leaf of the batch that weighs samples")


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
