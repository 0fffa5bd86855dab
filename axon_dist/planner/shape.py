"""`TransformerShape`: the few sizes of a transformer that memory, traffic and FLOPs depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..core.errors import ConfigError
from .activations import step_activations

_HEAD_DIM = 128
_ASPECT = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes of a decoder-only transformer and of its input.

    Args:
        num_params: trainable scalars, embeddings included.
        num_layers: blocks.
        width: size of the residual stream.
        num_heads: query heads per block.
        sequence_length: tokens of a sample.
        vocab_size: token ids.
        num_experts: experts of the mixture in every block; 1 without any.
        expert_params: parameters of all experts of all blocks together, out of `num_params`.

    Raises:
        ConfigError: for a size that is not positive.

    Example:
        >>> shape = guess_shape(175e9)
        >>> shape.num_layers, shape.width, shape.num_heads  # GPT-3's
        (96, 12288, 96)
    """

    num_params: int
    num_layers: int
    width: int
    num_heads: int
    sequence_length: int = 2048
    vocab_size: int = 32_000
    num_experts: int = 1
    expert_params: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless all sizes are positive."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1 and field.name != "expert_params":
                raise ConfigError(
                    f"{field.name} of the transformer is {getattr(self, field.name)}; it must be "
                    "at least 1"
                )

    @property
    def layer_params(self) -> int:
        """Parameters of a block, as an equal share of all; what FSDP gathers as one."""
        return -(-self.num_params // self.num_layers)

    @property
    def product_params(self) -> int:
        """Weights of the dense layers within blocks: all but the tables of tokens and experts."""
        tables = self.vocab_size * self.width
        return max(self.num_params - self.expert_params - tables, 0)

    @property
    def words(self) -> str:
        """What sizes of axes have to divide, in words."""
        return f"{self.num_heads} heads and {self.num_layers} layers"

    def divides(self, tp: int, pp: int, cp: int, ep: int = 1) -> bool:
        """Whether the heads, the layers, the positions and the experts divide."""
        if self.num_experts % ep:
            return False
        by_heads = self.num_heads % tp == 0 and self.num_layers % pp == 0
        return by_heads and self.sequence_length % cp == 0

    def flops(self, samples: int, recomputed: int = 0) -> float:
        """Operations of a step of so many samples."""
        return samples * self.sequence_length * self.flops_per_token(recomputed)

    def stream(self, samples: int, itemsize: int) -> int:
        """Bytes of the residual stream."""
        return samples * self.sequence_length * self.width * itemsize

    def activations(self, samples: int, **how: Any) -> int:
        """Bytes at the peak, see `step_activations`."""
        return step_activations(self, samples, **how)

    def flops_per_token(self, recomputed: int = 0) -> float:
        """Operations of a training step per token: `6 P + 12 L h s`.

        A forward pass takes a third of it; each recomputation in the backward pass takes one more.

        Args:
            recomputed: how many times the forward pass is repeated.

        Source: Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
        """
        attention = 12 * self.num_layers * self.width * self.sequence_length
        return (6 * self.num_params + attention) * (3 + recomputed) / 3


def guess_shape(num_params: float, sequence_length: int = 2048) -> TransformerShape:
    """The shape that a transformer of some size usually has, where only the size is known.

    `P = 12 L h**2` with a width of about 128 per layer and heads of 128, as GPT-3 and LLaMA have.

    Args:
        num_params: trainable scalars.
        sequence_length: tokens of a sample.

    Returns:
        A shape; its number of parameters is the one given.

    Raises:
        ConfigError: for a number that is not positive.

    Source: Kaplan et al., Scaling Laws for Neural Language Models, arXiv:2001.08361, section 2.1.
    """
    if num_params < 1:
        raise ConfigError(f"got num_params={num_params}; a model has at least one parameter")
    depth = (num_params / (12 * _ASPECT**2)) ** (1 / 3)
    heads = _nearest(depth * _ASPECT / _HEAD_DIM, 8 if depth >= 16 else 4)
    width = heads * _HEAD_DIM
    return TransformerShape(
        num_params=int(num_params),
        num_layers=_nearest(num_params / (12 * width**2), 4),
        width=width,
        num_heads=heads,
        sequence_length=sequence_length,
    )


def _nearest(value: float, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple
