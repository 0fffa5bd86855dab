"""Activation checkpointing: the backward pass recomputes activations instead of saving them."""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ..core.checks import COUNT, SIZE, check_fields
from ..core.errors import ConfigError, did_you_mean
from ..core.typing import Array, Path
from ..ir.units import IsUnit, RematPolicy
from ..ops.ring import AROUND

SUMS = "sums"
"""The policy that saves tensor-parallel sums."""

POLICIES: MappingProxyType[str, RematPolicy] = MappingProxyType(
    {
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_saveable,
        "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "everything": jax.checkpoint_policies.everything_saveable,
        SUMS: jax.checkpoint_policies.save_only_these_names(SUMS),
    }
)
"""Named policies: which values of each block are saved for the backward pass."""

OFFLOAD = "offload_dots"
"""The policy that saves matrix products in host memory."""


@dataclasses.dataclass(frozen=True)
class ActivationCheckpointing:
    """Recomputes groups of blocks in the backward pass, so that only their inputs are saved.

    With L blocks in groups of k, `ceil(L/k) + 1` block boundaries are saved and up to k blocks are
    alive while one group is recomputed; k = sqrt(L) balances the two.

    Args:
        interval: blocks per group, or `"sqrt"`.
        policy: `nothing`, `dots`, `dots_no_batch`, `everything`; `offload_dots`, which moves
            matrix products to host memory; or `sums`, which saves tensor-parallel sums, so that
            recomputing a block repeats no all-reduce. `sums` saves two more activations per block
            and sends a fifth less.
        classes: names of the block classes; in a bridged Linen model, names of modules without
            their numbers. None takes the repeated blocks.

    Raises:
        ConfigError: for an interval below one or an unknown policy.

    Example:
        >>> ActivationCheckpointing("sqrt").group_size(64), ActivationCheckpointing(2).num_saved(8)
        (8, 5)

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
    """

    interval: int | str = 1
    policy: str = "nothing"
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless interval and policy are valid."""
        check_fields(self)
        if self.interval != "sqrt" and not COUNT.holds(self.interval):
            raise ConfigError(
                f"checkpoint interval is {self.interval!r:.80}; it must be at least 1 block, or "
                "'sqrt'"
            )
        valid = [*POLICIES, OFFLOAD]
        if self.policy not in valid:
            raise ConfigError(
                f"unknown remat policy {self.policy!r:.80}.{did_you_mean(self.policy, valid)}"
            )

    def group_size(self, num_blocks: int) -> int:
        """Returns how many of `num_blocks` blocks are recomputed together."""
        SIZE.check("ActivationCheckpointing", "num_blocks", num_blocks)
        return max(1, math.isqrt(num_blocks)) if self.interval == "sqrt" else int(self.interval)

    def num_saved(self, num_blocks: int) -> int:
        """Returns how many block boundaries are saved: the input of every group, and the output."""
        return math.ceil(num_blocks / self.group_size(num_blocks)) + 1

    @property
    def remat(self) -> RematPolicy:
        """The policy in the form that `jax.checkpoint` takes."""
        if self.policy == OFFLOAD:
            return jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        return jax.checkpoint_policies.save_from_both_policies(
            POLICIES[self.policy], jax.checkpoint_policies.save_only_these_names(AROUND)
        )


def summed(x: Array) -> Array:
    """Marks the output of a row-parallel layer, which the policy `sums` saves.

    Args:
        x: activations that are a sum over ranks.

    Returns:
        The same values.
    """
    return checkpoint_name(x, SUMS)


def by_class(*names: str) -> IsUnit:
    """Returns a predicate for units: it holds for modules of these classes."""
    return ClassIs(tuple(names))


@dataclasses.dataclass(frozen=True)
class ClassIs:
    """Whether a module's class has one of some names; a dataclass, so it compares by value.

    Args:
        names: class names.
    """

    names: tuple[str, ...]

    def __call__(self, path: Path, module: nnx.Module | None) -> bool:
        """Whether a module is a unit."""
        return type(module).__name__ in self.names
