"""`Workload`: what is to be trained, whatever it is trained on."""

from __future__ import annotations

import dataclasses
import functools

import optax

from ..core.errors import ConfigError
from ..precision import MixedPrecision
from .memory import BytesPerParam, bytes_per_param
from .shape import TransformerShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, a batch and the numbers they are in.

    Args:
        shape: the sizes of the model.
        global_batch: samples of a step, over all devices and microbatches.
        optimizer: a name of `OPTIMIZERS`, or an optax transformation.
        precision: a policy or a preset's name; None is float32.
        flash: whether attention is fused and keeps no scores.

    Raises:
        ConfigError: for an empty batch or an unknown precision.

    Example:
        >>> from axon_dist.planner import guess_shape
        >>> work = Workload(shape=guess_shape(7e9), global_batch=64, precision="bf16")
        >>> work.policy.compute.itemsize, work.residual_bytes(1)
        (2, 16777216)
    """

    shape: TransformerShape
    global_batch: int
    optimizer: str | optax.GradientTransformation = "adam"
    precision: MixedPrecision | str | bool | None = None
    flash: bool = True

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise ConfigError(f"global_batch={self.global_batch} must be at least 1 sample")
        MixedPrecision.of(self.precision)

    @functools.cached_property
    def cost(self) -> BytesPerParam:
        """What a parameter holds in the training state."""
        return bytes_per_param(self.optimizer, self.precision)

    @property
    def policy(self) -> MixedPrecision:
        """The dtypes."""
        return MixedPrecision.of(self.precision)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.shape.sequence_length

    def residual_bytes(self, microbatch: int) -> int:
        """Bytes of the residual stream of some samples, in the compute dtype."""
        shape = self.shape
        return microbatch * shape.sequence_length * shape.width * self.policy.compute.itemsize
