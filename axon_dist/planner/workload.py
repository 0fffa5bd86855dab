"""`Workload`: what is to be trained, whatever it is trained on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import optax

from ..core.errors import ConfigError
from ..ops.precision import MixedPrecision
from .memory import BytesPerParam, bytes_per_param


class ModelCost(Protocol):
    """What a model costs, by formula (`TransformerShape`) or by its own program (`Profile`)."""

    @property
    def num_params(self) -> int:
        """Trainable scalars."""
        ...

    @property
    def num_layers(self) -> int:
        """Blocks that the model repeats."""
        ...

    @property
    def layer_params(self) -> int:
        """Parameters of a block, which FSDP gathers as one."""
        ...

    @property
    def num_experts(self) -> int:
        """Experts of a mixture, which the ranks of an axis may share; 1 without any."""
        ...

    @property
    def expert_params(self) -> int:
        """Parameters of all experts of all blocks together."""
        ...

    @property
    def words(self) -> str:
        """What sizes of axes have to divide, in words."""
        ...

    @property
    def product_params(self) -> int:
        """Weights of the dense layers within blocks, whose products may be in fp8."""
        ...

    def flops(self, samples: int, recomputed: int = 0) -> float:
        """Operations of a step of so many samples."""
        ...

    def stream(self, samples: int, itemsize: int) -> int:
        """Bytes that a block hands to the next."""
        ...

    def activations(self, samples: int, **how: Any) -> int:
        """Bytes at the peak of a step of so many samples on a device."""
        ...

    def divides(self, tp: int, pp: int, cp: int, ep: int = 1) -> bool:
        """Whether such sizes of axes can split it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, a batch and the numbers they are in.

    Args:
        shape: what the model costs.
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

    shape: ModelCost
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

    def flops(self, recomputed: int = 0) -> float:
        """Operations of a step over all devices."""
        return self.shape.flops(self.global_batch, recomputed)

    def params_beside(self, ep: int) -> float:
        """Parameters that a rank of so many has which share the experts."""
        shared = self.shape.expert_params
        return self.shape.num_params - shared + shared / ep

    @property
    def weight_bytes(self) -> float:
        """Bytes of a parameter where units gather it, on average over all."""
        wide, narrow = self.policy.compute.itemsize, self.policy.gather_itemsize
        share = self.shape.product_params / self.shape.num_params
        return wide + (narrow - wide) * share

    def residual_bytes(self, microbatch: int) -> int:
        """Bytes of the residual stream of some samples, in the compute dtype."""
        return self.shape.stream(microbatch, self.policy.compute.itemsize)
