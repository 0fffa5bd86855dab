"""The shape of a decoder-only transformer as an immutable value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from axon_dist.core.errors import ConfigError, did_you_mean

from .attention import ATTENTION_FORMS
from .config import check_above_zero, check_at_least_one, check_float, check_rate, from_preset
from .expert_config import ExpertConfig
from .mlp import ACTIVATIONS
from .presets import PRESETS

NORMS = ("rms", "layer")
"""Kinds of normalisation."""

LOGITS = ("auto", "whole", "chunked")
"""How a loss takes the logits."""

LARGE_VOCABULARY = 16_384
"""From how many tokens on logits are made in chunks, where the config does not say."""

POSITIONS = ("rotary", "learned")
"""How a model knows the order of its tokens."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and numerics of a `Transformer`; says nothing of devices.

    Args:
        vocab_size: number of token ids; 256 for bytes.
        width: size of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads per block.
        num_kv_heads: key and value heads, each shared by `num_heads / num_kv_heads` query heads
            (grouped-query attention, arXiv:2305.13245); None for as many as query heads.
        head_dim: size of one head, even where it is rotated; None for `width / num_heads`.
        ffn_width: hidden size of the feed-forward; None for 4 x width, or where it is gated for
            8/3 of the width, rounded up to a multiple of 64, which holds as many weights.
        max_length: the longest sequence the model accepts.
        tied_head: the head reuses the embedding table instead of a kernel of its own.
        dropout: rate on the embeddings and on the output of every residual branch, in [0, 1).
            Attention weights are never dropped: the fused kernels have no place for it.
        norm_eps: added to the mean square, or to the variance, inside norms.
        rope_theta: base of the rotary wavelengths.
        param_dtype: dtype the parameters are created in.
        dtype: dtype of the matrix products; None for whatever the parameters have. Norms, softmax
            and logits are float32 in either case.
        attention: how attention is computed, see `axon_dist.models.attention`.
        scan_layers: keep all blocks in one stacked block and run it in a `lax.scan`. The function
            and the initial weights are the same, compile time and memory under remat do not grow
            with depth; a list is easier to look into.
        norm: `"rms"` for RMSNorm, `"layer"` for LayerNorm with scale and bias.
        positions: `"rotary"` turns queries and keys by their position; `"learned"` adds a row of a
            trained table `[max_length, width]` to every embedding.
        gated: the feed-forward is `down(act(gate(x)) * up(x))`; otherwise `down(act(up(x)))`.
        activation: of the feed-forward, a key of `ACTIVATIONS`.
        bias: the linear layers of the blocks have biases. That of the keys changes nothing, for
            softmax does not see what is added to all keys; it is there for weights that have it.
        logits: how a loss takes the logits. `"whole"` makes all of them, `[B, T, V]`; `"chunked"`
            a chunk of the positions at a time, at the same FLOPs, without ever holding them all;
            `"auto"` chunks those of vocabularies of 16 384 tokens and more.
        logits_dtype: of chunked logits. `"bfloat16"` halves the traffic of the loss and **changes
            its numbers**: logits are rounded to three digits, as a head in bfloat16 rounds its own.
        experts: makes the feed-forward of every block a mixture of experts; None for one of its
            own. Experts have no biases.

    Example:
        >>> config = TransformerConfig.preset("tiny", num_layers=3)
        >>> config.num_layers, config.key_size, num_params(config) > 100_000
        (3, 16, True)
    """

    vocab_size: int = 256
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ffn_width: int | None = None
    max_length: int = 1024
    tied_head: bool = False
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    param_dtype: str = "float32"
    dtype: str | None = None
    attention: str = "auto"
    scan_layers: bool = False
    norm: str = "rms"
    positions: str = "rotary"
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    logits: str = "auto"
    logits_dtype: str = "float32"
    experts: ExpertConfig | None = None

    @classmethod
    def preset(cls, name: str, **changes: Any) -> TransformerConfig:
        """Returns a named size, with some of its fields changed.

        Args:
            name: a key of `PRESETS`, for example `"gpt2-124m"` or `"llama-8b"`.
            **changes: fields to set after the preset.

        Raises:
            ConfigError: there is no such preset or no such field.
        """
        return from_preset(cls, PRESETS, name, changes)

    @property
    def chunks_logits(self) -> bool:
        """Whether a loss makes the logits a chunk of positions at a time."""
        is_large = self.vocab_size >= LARGE_VOCABULARY
        return self.logits == "chunked" or (self.logits == "auto" and is_large)

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_size(self) -> int:
        """Size of one head, the default resolved."""
        return self.width // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def hidden_size(self) -> int:
        """Hidden size of the feed-forward, the default resolved."""
        if self.ffn_width is not None:
            return self.ffn_width
        return -(-8 * self.width // (3 * 64)) * 64 if self.gated else 4 * self.width

    def validate(self) -> None:
        """Checks that the sizes fit each other.

        Raises:
            ConfigError: a size is not positive, heads do not divide, or a name is unknown.
            DTypeError: a dtype is not a floating-point one.
        """
        sizes = ("vocab_size", "width", "num_layers", "num_heads", "max_length")
        check_at_least_one(self, (*sizes, "kv_heads", "key_size", "hidden_size"))
        self._check_heads()
        check_rate(self, "dropout")
        check_above_zero(self, ("norm_eps", "rope_theta"))
        for field in ("param_dtype", "dtype"):
            check_float(self, field)
        self._check_name("attention", ATTENTION_FORMS, "form of attention")
        self._check_name("norm", NORMS, "norm")
        self._check_name("positions", POSITIONS, "kind of positions")
        self._check_name("activation", ACTIVATIONS, "activation")
        self._check_name("logits", LOGITS, "way to make logits")
        self._check_name("logits_dtype", ("float32", "bfloat16"), "dtype of logits")
        if self.experts is not None:
            self.experts.validate()
            if self.bias:
                raise ConfigError(
                    "bias=True gives the linear layers of the blocks biases, and experts have "
                    "none: leave bias out, or experts."
                )
        if self.logits_dtype != "float32" and not self.chunks_logits:
            raise ConfigError(
                f"logits_dtype={self.logits_dtype!r} is for chunked logits, and logits="
                f"{self.logits!r} makes those of {self.vocab_size} tokens whole: set "
                "logits='chunked', or leave logits_dtype out."
            )

    def _check_name(self, field: str, known: Iterable[str], what: str) -> None:
        name = getattr(self, field)
        if name not in known:
            article = "an" if what[0] in "aeiou" else "a"
            raise ConfigError(
                f"{field}={name!r} is not {article} {what}.{did_you_mean(name, known)}"
            )

    def _check_heads(self) -> None:
        if self.head_dim is None and self.width % self.num_heads:
            raise ConfigError(
                f"width={self.width} does not divide by num_heads={self.num_heads}: "
                "change one of them, or set head_dim."
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} does not divide by num_kv_heads={self.kv_heads}: "
                "every key head serves the same number of query heads; choose a divisor."
            )
        if self.positions == "rotary" and self.key_size % 2:
            raise ConfigError(
                f"heads of {self.key_size} cannot be rotated in pairs: head_dim must be even; "
                "set head_dim, change width or num_heads, or take learned positions."
            )


def num_params(config: TransformerConfig) -> int:
    """Counts the parameters of a `Transformer` without making it.

    With width D, layers L, heads H and kv heads N of size K, feed-forward F and vocabulary V:
    `V D (1 or 2) + L (2 D H K + 2 D N K + 3 D F + 2 D) + D`, the table counted once if tied; a
    plain feed-forward has `2 D F`, biases, LayerNorms and learned positions count besides. With E
    experts and S shared ones of hidden size F, `3 D F (E + S) + D E` take the place of `3 D F`.

    Args:
        config: a valid config.

    Returns:
        The number of trainable scalars.

    Example:
        >>> round(num_params(TransformerConfig.preset("llama-8b")) / 1e9, 2)
        8.03
    """
    width, hidden, router, experts = config.width, config.hidden_size, 0, config.experts
    if experts is not None:
        hidden = (experts.count + experts.shared) * (experts.width or hidden)
        router = width * experts.count
    heads, kernels = config.num_heads + config.kv_heads, 3 if config.gated else 2
    norm = width * (1 if config.norm == "rms" else 2)
    block = 2 * width * config.key_size * heads + kernels * width * hidden + 2 * norm + router
    if config.bias:
        q_and_kv = config.key_size * (config.num_heads + 2 * config.kv_heads)
        block += q_and_kv + width + (kernels - 1) * hidden + width
    tables = config.vocab_size * width * (1 if config.tied_head else 2)
    tables += config.max_length * width if config.positions == "learned" else 0
    return tables + config.num_layers * block + norm
