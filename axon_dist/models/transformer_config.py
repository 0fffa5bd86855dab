"""The shape of a decoder-only transformer as an immutable value.

A preset fixes shapes only. `"gpt2-124m"` and `"gpt2-medium"` have the width, depth, heads,
vocabulary, context and tied head of GPT-2 (Radford et al. 2019), `"gpt3-175b"` those of GPT-3
(arXiv:2005.14165, table 2.1), but the layers of this library: RMSNorm, rotary positions and a gated
feed-forward, whose three kernels of 8/3 of the width hold what two of 4 hold. `"gpt2"` is GPT-2 of
124 M as published, its layers included, and `"llama-8b"`, `"llama-70b"` and `"llama-405b"` Llama 3
(arXiv:2407.21783, table 3). `"1b"`, `"7b"` and `"8b"` are the shapes that the benchmarks of this
library are quoted for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ..core.errors import ConfigError, did_you_mean
from .attention import ATTENTION_FORMS
from .config import check_above_zero, check_at_least_one, check_float, check_rate, from_preset
from .mlp import ACTIVATIONS

BALANCE = ("batch", "sequence")
"""Over what the balance term counts the tokens of each expert."""


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """The feed-forward of every block as a mixture of experts; says nothing of devices.

    A router gives each token a probability for every expert, `p = softmax(x W)`; the `per_token`
    most probable ones are chosen, and the token gets `sum g_e expert_e(x)` over these. Their gates
    `g` are the probabilities, divided by their sum where there are several.

    Args:
        count: how many experts there are, E.
        per_token: how many of them a token goes to, k.
        width: hidden size of one expert; None for that of the config's feed-forward.
        shared: how many further experts every token goes to, as one feed-forward of so many times
            the width (DeepSeekMoE, arXiv:2401.06066); 0 for none.
        balance: by how much the balance term counts, `E sum_e f_e P_e` with the share f of the
            assignments that expert e gets and its mean probability P (Switch Transformers,
            arXiv:2101.03961, equation 4); it is 1 where all experts get as much. 0 leaves it out.
        balance_per: `"batch"` counts over all tokens of a (micro)batch, on all devices, and
            therefore couples its samples: K microbatches have K such terms, and their mean;
            `"sequence"` counts in each sequence by itself and takes the mean, which is the same
            number however a batch is cut (DeepSeek-V3, arXiv:2412.19437, equation 17).
        z_loss: by how much `mean(logsumexp(x W)^2)` counts, which keeps the logits of the router
            small (ST-MoE, arXiv:2202.08906, equation 5). 0 leaves it out.
        bias_rate: by how much a bias of each expert moves after each (micro)batch, up where the
            expert got fewer tokens than the mean, else down. It is added to the probabilities for
            the choice alone, not to the gates, and has no gradient (DeepSeek-V3, section 2.1.2). It
            is a buffer of the model. 0 leaves it out.

    Example:
        >>> ExpertConfig(count=64, per_token=6, shared=2).validate()
    """

    count: int = 8
    per_token: int = 2
    width: int | None = None
    shared: int = 0
    balance: float = 0.01
    balance_per: str = "batch"
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def validate(self) -> None:
        """Checks that the numbers fit each other.

        Raises:
            ConfigError: a number is out of range, or a name is unknown.
        """
        check_at_least_one(self, ("count", "per_token", *(("width",) if self.width else ())))
        if self.per_token > self.count:
            raise ConfigError(
                f"experts.per_token={self.per_token} is more than experts.count={self.count}: a "
                "token goes to different experts; lower the one or raise the other."
            )
        for field in ("shared", "balance", "z_loss", "bias_rate"):
            if not 0 <= getattr(self, field) < float("inf"):
                raise ConfigError(
                    f"experts.{field}={getattr(self, field)} must be 0 or more; set it so."
                )
        if self.balance_per not in BALANCE:
            hint = did_you_mean(self.balance_per, BALANCE)
            raise ConfigError(f"experts.balance_per={self.balance_per!r} is not known.{hint}")


_LLAMA_8B = {
    "vocab_size": 128_256,
    "width": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn_width": 14_336,
    "max_length": 8192,
    "rope_theta": 500_000.0,
}

PRESETS: MappingProxyType[str, Mapping[str, object]] = MappingProxyType(
    {
        "tiny": {
            "vocab_size": 256,
            "width": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_width": 128,
            "max_length": 128,
        },
        "quickstart": {
            "vocab_size": 256,
            "width": 128,
            "num_layers": 4,
            "num_heads": 4,
            "num_kv_heads": 4,
            "ffn_width": 384,
            "max_length": 128,
        },
        "gpt2": {
            "vocab_size": 50_257,
            "width": 768,
            "num_layers": 12,
            "num_heads": 12,
            "ffn_width": 3072,
            "max_length": 1024,
            "tied_head": True,
            "norm": "layer",
            "positions": "learned",
            "gated": False,
            "activation": "gelu",
            "bias": True,
        },
        "gpt2-124m": {
            "vocab_size": 50_257,
            "width": 768,
            "num_layers": 12,
            "num_heads": 12,
            "num_kv_heads": 12,
            "ffn_width": 2048,
            "max_length": 1024,
            "tied_head": True,
        },
        "gpt2-medium": {
            "vocab_size": 50_257,
            "width": 1024,
            "num_layers": 24,
            "num_heads": 16,
            "num_kv_heads": 16,
            "ffn_width": 2752,
            "max_length": 1024,
            "tied_head": True,
        },
        "gpt3-175b": {
            "vocab_size": 50_257,
            "width": 12_288,
            "num_layers": 96,
            "num_heads": 96,
            "num_kv_heads": 96,
            "ffn_width": 32_768,
            "max_length": 2048,
            "tied_head": True,
        },
        "1b": {
            "vocab_size": 32_000,
            "width": 2048,
            "num_layers": 24,
            "num_heads": 16,
            "num_kv_heads": 16,
            "ffn_width": 5504,
            "max_length": 4096,
        },
        "7b": {
            "vocab_size": 32_000,
            "width": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "num_kv_heads": 32,
            "ffn_width": 11_008,
            "max_length": 4096,
        },
        "8b": _LLAMA_8B,
        "llama-8b": _LLAMA_8B,
        "llama-70b": {
            **_LLAMA_8B,
            "width": 8192,
            "num_layers": 80,
            "num_heads": 64,
            "ffn_width": 28_672,
        },
        "llama-405b": {
            **_LLAMA_8B,
            "width": 16_384,
            "num_layers": 126,
            "num_heads": 128,
            "ffn_width": 53_248,
        },
    }
)


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
    def preset(cls, name: str, **changes: object) -> TransformerConfig:
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
