"""`GradScaler`: a loss scale that finds its size, so that float16 gradients do not vanish."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import ConfigError
from ..core.told import NUMBER
from ..core.typing import Array, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScalerState:
    """What a loss scale remembers between steps; part of the training state.

    Args:
        scale: float32 scalar, what the loss is multiplied by.
        good_steps: int32 scalar, finite steps since the scale last changed.
        skipped: int32 scalar, steps skipped so far.
    """

    scale: Array
    good_steps: Array
    skipped: Array


@dataclasses.dataclass(frozen=True)
class GradScaler:
    """Scales the loss up before the backward pass, and gradients down after it.

    A step whose gradients are not all finite, on any device, is skipped on all of them and
    the scale is multiplied by `backoff_factor`; after `growth_interval` finite steps in a row it is
    multiplied by `growth_factor`. All of it stays on the devices.

    Args:
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by after enough good steps.
        backoff_factor: what it is multiplied by after an overflow.
        growth_interval: how many good steps in a row make it grow.
        min_scale: it never falls below.

    Raises:
        ConfigError: for a factor on the wrong side of one, or a size that is not positive.

    Example:
        >>> scaler = GradScaler(init_scale=1000.0)
        >>> state = scaler.update(scaler.init(), finite=jnp.array(False))
        >>> float(state.scale), int(state.skipped)
        (500.0, 1)

    Source: Micikevicius et al., arXiv:1710.03740; the defaults are PyTorch's.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless every number makes the scale move the right way."""
        for field in dataclasses.fields(self):
            NUMBER.check("GradScaler", field.name, getattr(self, field.name))
        checks = {
            "init_scale must be at least min_scale": self.init_scale >= self.min_scale,
            "min_scale must be positive": self.min_scale > 0,
            "growth_factor must be above 1": self.growth_factor > 1,
            "backoff_factor must lie between 0 and 1": 0 < self.backoff_factor < 1,
            "growth_interval must be at least 1": self.growth_interval >= 1,
        }
        for rule, holds in checks.items():
            if not holds:
                raise ConfigError(f"{rule}; got {self}")

    def init(self) -> ScalerState:
        """The state of a run's first step."""
        zero = jnp.zeros((), jnp.int32)
        return ScalerState(jnp.asarray(self.init_scale, jnp.float32), zero, zero)

    def scale(self, loss: Array, state: ScalerState) -> Array:
        """Multiplies a loss by the scale, in float32: float16 cannot hold the first scale."""
        return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * state.scale

    def unscale(self, grads: PyTree, state: ScalerState) -> PyTree:
        """Divides gradients by the scale, in float32 or wider."""
        wide = lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32))
        return jax.tree.map(lambda g: wide(g) / state.scale, grads)

    def update(self, state: ScalerState, finite: Array) -> ScalerState:
        """The state after a step.

        Args:
            state: the state before.
            finite: boolean scalar, whether every gradient was finite.

        Returns:
            The next state.
        """
        grown = state.good_steps + 1 >= self.growth_interval
        larger = jnp.where(grown, state.scale * self.growth_factor, state.scale)
        smaller = jnp.maximum(state.scale * self.backoff_factor, self.min_scale)
        good = jnp.where(grown, 0, state.good_steps + 1)
        return ScalerState(
            scale=jnp.where(finite, larger, smaller),
            good_steps=jnp.where(finite, good, 0),
            skipped=state.skipped + jnp.where(finite, 0, 1),
        )

    def state_dict(self, state: ScalerState) -> dict[str, Any]:
        """The state as plain numbers."""
        return {name: value.item() for name, value in vars(state).items()}

    def load_state_dict(self, numbers: dict[str, Any]) -> ScalerState:
        """The state of plain numbers; the reverse of `state_dict`."""
        return ScalerState(
            scale=jnp.asarray(numbers["scale"], jnp.float32),
            good_steps=jnp.asarray(numbers["good_steps"], jnp.int32),
            skipped=jnp.asarray(numbers.get("skipped", 0), jnp.int32),
        )


def all_finite(tree: PyTree) -> Array:
    """Whether every element of every leaf is finite, counted rather than compared by `max`.

    XLA's `max` over devices drops NaN on some platforms, a sum of counts does not.

    Example:
        >>> bool(all_finite({"a": jnp.array([1.0, jnp.inf])}))
        False
    """
    bad = [jnp.sum(~jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return sum(bad, start=jnp.zeros((), jnp.int32)) == 0


def keep_if(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Selects a whole tree by one flag, without asking the host."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
