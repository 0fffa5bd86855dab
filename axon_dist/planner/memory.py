"""Bytes per device of a training step, by category, before any array exists."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import MappingProxyType

import jax
import optax

from ..core.errors import ConfigError, did_you_mean
from ..core.tree import num_bytes
from ..core.tree import num_params as count_params
from ..core.typing import PyTree
from ..ops.precision import MixedPrecision
from .arrangement import Arrangement, arrange

OPTIMIZERS: MappingProxyType[str, Callable[[], optax.GradientTransformation]] = MappingProxyType(
    {
        "adam": lambda: optax.adam(1e-3),
        "adamw": lambda: optax.adamw(1e-3),
        "lion": lambda: optax.lion(1e-3),
        "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
        "sgd": lambda: optax.sgd(1e-3),
        "adafactor": lambda: optax.adafactor(1e-3),
    }
)
"""Optimizers by name; any other optax transformation can be given itself."""


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """How large a model is, without any training.

    Args:
        num_params: trainable scalars.
        num_bytes: bytes that they take in their own dtypes.
    """

    num_params: int
    num_bytes: int

    @property
    def gigabytes(self) -> float:
        """Bytes in units of 10**9."""
        return self.num_bytes / 1e9


def model_size(params: PyTree | float) -> ModelSize:
    """Counts the parameters of a model and their bytes.

    Args:
        params: arrays or `ShapeDtypeStruct`s, or a number of float32 parameters.

    Returns:
        The size.

    Example:
        >>> mlp = {"up": jax.ShapeDtypeStruct((784, 256), jax.numpy.float32)}
        >>> model_size(mlp), model_size(10e9).gigabytes
        (ModelSize(num_params=200704, num_bytes=802816), 40.0)
    """
    if isinstance(params, (int, float)):
        return ModelSize(int(params), 4 * int(params))
    return ModelSize(count_params(params), num_bytes(params))


@dataclasses.dataclass(frozen=True)
class BytesPerParam:
    """What one parameter costs in a training state, in bytes.

    Args:
        params: its own value.
        grads: its gradient.
        optimizer: the moments, and a master copy if the optimizer has one.

    Example:
        >>> bytes_per_param("adam"), bytes_per_param("adam").total
        (BytesPerParam(params=4.0, grads=4.0, optimizer=8.0), 16.0)
        >>> BytesPerParam(2, 2, 12).total  # 16-bit weights with a float32 master, as ZeRO counts
        16
    """

    params: float
    grads: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three."""
        return self.params + self.grads + self.optimizer


def bytes_per_param(
    optimizer: str | optax.GradientTransformation = "adam",
    precision: MixedPrecision | str | bool | None = None,
    params: PyTree | None = None,
) -> BytesPerParam:
    """Reads the cost of a parameter off the optimizer's own state.

    Parameters, gradients and moments have the policy's `param` dtype; copies in the compute dtype
    are temporary.

    Args:
        optimizer: a name of `OPTIMIZERS` or an optax transformation.
        precision: a policy or a preset's name; float32 by default.
        params: shapes to initialize the optimizer with, in their own dtypes; a square matrix in
            the `param` dtype by default.

    Returns:
        Bytes per parameter.

    Raises:
        ConfigError: for an unknown optimizer or precision.
    """
    dtype = MixedPrecision.of(precision).param
    tree = jax.ShapeDtypeStruct((1024, 1024), dtype) if params is None else params
    count = count_params(tree)
    state = jax.eval_shape(_transformation(optimizer).init, tree)
    # Step counts and other scalars weigh nothing.
    held = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state) if x.shape)
    own = num_bytes(tree) / count
    return BytesPerParam(own, own, held / count)


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device.

    Args:
        params: parameters between steps.
        grads: gradients when the backward pass ends.
        optimizer: optimizer state.
        activations: what the backward pass waits for.
        gathered: whole layers that lie split between uses, and copies in the compute dtype.
    """

    params: int
    grads: int
    optimizer: int
    activations: int = 0
    gathered: int = 0

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer state: what stays whatever the batch."""
        return self.params + self.grads + self.optimizer

    @property
    def total(self) -> int:
        """All five."""
        return self.states + self.activations + self.gathered


def estimate_memory(
    params: PyTree | float,
    strategy: Arrangement | str,
    num_ranks: int = 1,
    *,
    optimizer: str | optax.GradientTransformation | BytesPerParam = "adam",
    precision: MixedPrecision | str | bool | None = None,
    activations: int = 0,
    layer_params: int = 0,
) -> MemoryEstimate:
    """Estimates parameters, gradients, optimizer state and activations of a device.

    With `p + g + o` bytes per parameter, ZeRO stages 0 to 3 over N ranks hold `p + g + o`,
    `p + g + o/N`, `p + (g + o)/N` and `(p + g + o)/N`, gradients as they are held between
    microbatches. Leaves too small to be split are counted as
    if they were. Under a precision that computes in a narrower dtype, stages 1 and 2 split the
    parameters too.

    Args:
        params: arrays or `ShapeDtypeStruct`s, or their number.
        strategy: an arrangement, or the name of a data-parallel strategy.
        num_ranks: data-parallel ranks, where the strategy is a name.
        optimizer: a name of `OPTIMIZERS`, an optax transformation, or the bytes per parameter.
        precision: a policy or a preset's name; float32 by default.
        activations: bytes of activations per device, such as from `step_activations`.
        layer_params: parameters of the largest unit that is gathered as one; 0 leaves gathered
            units and compute copies out.

    Returns:
        Bytes by category.

    Raises:
        ConfigError: for an unknown strategy, optimizer or precision.

    Example:
        >>> estimate_memory(7e9, "shard_grad_op", 4).total / 1e9
        49.0
        >>> zero_paper = BytesPerParam(params=2, grads=2, optimizer=12)
        >>> estimate_memory(7.5e9, "zero1", 64, optimizer=zero_paper).states / 1e9  # their figure 1
        31.40625

    Source: Rajbhandari et al., ZeRO, SC 2020, arXiv:1910.02054, section 3.
    """
    plan = arrange(strategy, num_ranks) if isinstance(strategy, str) else strategy
    policy = MixedPrecision.of(precision)
    count = model_size(params).num_params
    tree = None if isinstance(params, (int, float)) else params
    known = isinstance(optimizer, BytesPerParam)
    cost = optimizer if known else bytes_per_param(optimizer, policy, tree)
    held = zip(dataclasses.astuple(cost), plan.shards_for(policy), strict=True)
    own, grads, state = (math.ceil(count * size / (plan.model_ranks * ways)) for size, ways in held)
    gathered = _gathered(plan, policy, count, layer_params)
    return MemoryEstimate(own, grads, state, activations, gathered)


def _gathered(plan: Arrangement, policy: MixedPrecision, count: int, layer_params: int) -> int:
    """Two layers as they travel, one used and one ahead; or all that a rank computes with."""
    if not layer_params or not (plan.splits_params or policy.is_mixed):
        return 0
    if plan.keeps_masters(policy) or (plan.pp > 1 and plan.splits_params):
        return math.ceil(count / plan.model_ranks) * policy.compute.itemsize
    return math.ceil(2 * layer_params / plan.tp) * policy.gather_itemsize


def _transformation(
    optimizer: str | optax.GradientTransformation,
) -> optax.GradientTransformation:
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {optimizer!r}.{did_you_mean(optimizer, OPTIMIZERS)}")
    return OPTIMIZERS[optimizer]()
