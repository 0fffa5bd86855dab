"""What `build_train_step` is given, checked before anything is traced."""

from __future__ import annotations

import inspect
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from ..core.errors import ConfigError, GroupError
from ..mesh import ProcessGroup, World
from ..nn import ActivationCheckpointing


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
