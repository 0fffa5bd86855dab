"""`TransformerConfig`: the sizes of a decoder-only transformer, and its presets.

Most presets define only sizes. `"gpt2-124m"` and `"gpt2-medium"` have the width, depth, heads,
vocabulary, context and tied head of GPT-2 (Radford et al. 2019), and `"gpt3-175b"` those of GPT-3
(arXiv:2005.14165, table 2.1), but all with the layers of this library: RMSNorm, rotary positions
and a gated feed-forward, whose three kernels of 8/3 of the width have as many weights as two
kernels of 4 times the width. `"gpt2"` is GPT-2 of 124 M as published, including its layers.
`"llama-8b"`, `"llama-70b"` and `"llama-405b"` are Llama 3 (arXiv:2407.21783, table 3). `"1b"`,
`"7b"` and `"8b"` are the sizes that this library's benchmarks use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import ClassVar

from ..core.checks import WHOLE
from ..core.checks import check_fields as check_types
from ..core.errors import ConfigError
from .attention import ATTENTION_FORMS
from .config import (
    ACTIVATIONS,
    ExpertConfig,
    Presets,
    check_above_zero,
    check_at_least_one,
    check_choice,
    check_flags,
    check_floats,
    check_rate,
)
from .rotary import RopeScaling

_SIZES = (
    *("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "ffn_width", "max_length"),
)
"""The columns of the presets."""

_TIED = {"tied_head": True}
_LLAMA = {"rope_theta": 500_000.0}
_GPT2 = {
    **_TIED,
    "norm": "layer",
    "positions": "learned",
    "gated": False,
    "activation": "gelu",
    "bias": True,
}

_ROWS: Mapping[str, tuple[tuple[int | None, ...], Mapping[str, object]]] = {
    "tiny": ((256, 64, 2, 4, 2, 128, 128), {}),
    "quickstart": ((256, 128, 4, 4, 4, 384, 128), {}),
    "gpt2": ((50_257, 768, 12, 12, None, 3072, 1024), _GPT2),
    "gpt2-124m": ((50_257, 768, 12, 12, 12, 2048, 1024), _TIED),
    "gpt2-medium": ((50_257, 1024, 24, 16, 16, 2752, 1024), _TIED),
    "gpt3-175b": ((50_257, 12_288, 96, 96, 96, 32_768, 2048), _TIED),
    "1b": ((32_000, 2048, 24, 16, 16, 5504, 4096), {}),
    "7b": ((32_000, 4096, 32, 32, 32, 11_008, 4096), {}),
    "8b": ((128_256, 4096, 32, 32, 8, 14_336, 8192), _LLAMA),
    "llama-8b": ((128_256, 4096, 32, 32, 8, 14_336, 8192), _LLAMA),
    "llama-70b": ((128_256, 8192, 80, 64, 8, 28_672, 8192), _LLAMA),
    "llama-405b": ((128_256, 16_384, 126, 128, 8, 53_248, 8192), _LLAMA),
}

PRESETS: MappingProxyType[str, Mapping[str, object]] = MappingProxyType(
    {
        name: {
            **{field: size for field, size in zip(_SIZES, sizes, strict=True) if size is not None},
            **more,
        }
        for name, (sizes, more) in _ROWS.items()
    }
)


NORMS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {"rms": ("scale",), "rms_plus_one": ("scale",), "layer": ("scale", "bias")}
)
"""The norms of a decoder, each with the names of its parameters, which have `width` numbers.
`_norm` in `transformer.py` makes the layers; `family.py` reads the names of their parameters."""

_CHOICES: tuple[tuple[str, Collection[str], str], ...] = (
    ("attention", ATTENTION_FORMS, "a form of attention"),
    ("norm", NORMS, "a norm"),
    ("norms", ("before", "after", "both"), "a placement of norms"),
    ("qk_norm", ("none", "head", "all"), "a norm of queries and keys"),
    ("positions", ("rotary", "learned"), "a kind of positions"),
    ("activation", ACTIVATIONS, "an activation"),
    ("logits", ("auto", "whole", "chunked"), "a way to make logits"),
    ("logits_dtype", ("float32", "bfloat16"), "a dtype of logits"),
)
"""Fields with named choices: the field, its valid names, and a description of the choice."""

LARGE_VOCABULARY = 16_384
"""The vocabulary size from which `logits="auto"` makes logits in chunks."""

_OPTIONAL = ("local_rope_theta", "attention_scale", "attention_softcap", "logit_softcap")


@dataclasses.dataclass(frozen=True)
class TransformerConfig(Presets):
    """Sizes and numerics of a `Transformer`.

    Args:
        vocab_size: number of token ids; 256 for bytes.
        width: size of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads per block.
        num_kv_heads: key and value heads, each shared by `num_heads / num_kv_heads` query heads
            (grouped-query attention, arXiv:2305.13245); None for as many as query heads.
        head_dim: size of one head, an even number if it is rotated; None for `width / num_heads`.
        ffn_width: hidden size of the feed-forward; None for 4 x width, or for a gated one for 8/3
            of the width, rounded up to a multiple of 64, which has about as many weights.
        max_length: the longest sequence the model accepts.
        tied_head: the head reuses the embedding table instead of having its own kernel.
        dropout: rate on the embeddings and on the output of every residual branch, in [0, 1).
            Attention weights are never dropped, because fused kernels do not support it.
        norm_eps: added to the mean square, or to the variance, inside norms.
        rope_theta: base of the rotary wavelengths.
        param_dtype: dtype the parameters are created in.
        dtype: dtype of the matrix products; None for that of the parameters. Norms and softmax are
            float32 in either case, and so are logits, unless `logits_dtype` says otherwise.
        attention: how attention is computed, see `axon_dist.models.attention`.
        scan_layers: stack all blocks into one and run it in a `lax.scan`. The function and the
            initial weights are the same. Compile time does not grow with depth. Under remat, the
            intermediate values of only one block are in memory at a time. A list of blocks is
            easier to inspect.
        norm: `"rms"` for RMSNorm; `"rms_plus_one"` for RMSNorm that multiplies by 1 + scale, so
            that weight decay pulls towards the identity (Gemma); `"layer"` for LayerNorm with scale
            and bias.
        norms: where norms are: `"before"` attention and feed-forward; `"after"` them, before the
            residual sum (OLMo 2); or `"both"` (Gemma 2).
        qk_norm: RMSNorm of queries and keys before their rotation: `"head"` per head (Qwen3),
            `"all"` over the features of all heads together (OLMo 2), or `"none"`.
        positions: `"rotary"` rotates queries and keys by their position; `"learned"` adds a row of
            a trained table `[max_length, width]` to every embedding.
        rope_scaling: scales rotary positions for longer sequences; None for no scaling.
        rotary_fraction: the share of each head's features that is rotated, the first ones.
        local_rope_theta: base of the rotary wavelengths in layers with a window, which then ignore
            `rope_scaling` (Gemma 3); None for `rope_theta` in all layers.
        windows: the number of positions that each position sees, including itself; 0 for all. The
            list is repeated over the layers: `(4096,)` is a window in every layer, `(512, 0)` a
            window in every other layer. Windows are data of the blocks, so that all blocks run the
            same program.
        attention_scale: the multiplier of products of queries and keys; None for
            `head_dim ** -0.5`.
        attention_softcap: c of `c tanh(score / c)`, which caps scores (Gemma 2); None for no cap.
            With it, with `local_rope_theta`, or with windows shorter than `max_length`, no fused
            kernel runs.
        logit_softcap: the same for the logits, which are then not made in chunks.
        embedding_scale: the multiplier of embeddings (Gemma: the square root of the width).
        gated: the feed-forward is `down(act(gate(x)) * up(x))`; otherwise `down(act(up(x)))`.
        activation: the activation of the feed-forward, a key of `ACTIVATIONS`.
        bias: the linear layers of the blocks have biases. The bias of keys has no effect, because
            softmax is invariant to it; it exists so that weights with such a bias can be loaded.
        qkv_bias: only the linear layers of queries, keys and values have biases (Qwen2).
        logits: how a loss computes logits. `"whole"` makes all of them at once, `[B, T, V]`;
            `"chunked"` makes them one chunk of positions at a time, with the same FLOPs and less
            memory; `"auto"` chunks for vocabularies of 16 384 tokens and more.
        logits_dtype: the dtype of chunked logits. `"bfloat16"` halves the memory traffic of the
            loss and **changes its numbers**: logits are rounded to three digits, as by a head in
            bfloat16.
        experts: makes the feed-forward of every block a mixture of experts; None for a dense one.
            Experts have no biases.

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
    norms: str = "before"
    qk_norm: str = "none"
    positions: str = "rotary"
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 1.0
    local_rope_theta: float | None = None
    windows: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    gated: bool = True
    activation: str = "silu"
    bias: bool = False
    qkv_bias: bool = False
    logits: str = "auto"
    logits_dtype: str = "float32"
    experts: ExpertConfig | None = None

    presets: ClassVar[Mapping[str, Mapping[str, object]]] = PRESETS

    @property
    def chunks_logits(self) -> bool:
        """Whether a loss makes the logits one chunk of positions at a time."""
        is_large = self.vocab_size >= LARGE_VOCABULARY
        by_itself = self.logits == "auto" and is_large and self.logit_softcap is None
        return self.logits == "chunked" or by_itself

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads, with the default resolved."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def key_size(self) -> int:
        """The size of one head, with the default resolved."""
        return self.width // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def hidden_size(self) -> int:
        """The hidden size of the feed-forward, with the default resolved."""
        if self.ffn_width is not None:
            return self.ffn_width
        return -(-8 * self.width // (3 * 64)) * 64 if self.gated else 4 * self.width

    @property
    def expert_size(self) -> int:
        """The hidden size of one expert, with the default resolved."""
        own = None if self.experts is None else self.experts.width
        return self.hidden_size if own is None else own

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer; 0 for none."""
        return tuple(
            self.windows[layer % len(self.windows)] if self.windows else 0
            for layer in range(self.num_layers)
        )

    @property
    def has_windows(self) -> bool:
        """Whether any layer has a window shorter than the longest sequence."""
        # Not by `layer_windows`: every layer asks, so that would be quadratic.
        return any(0 < window < self.max_length for window in self.windows[: self.num_layers])

    @property
    def has_special_scores(self) -> bool:
        """Whether scores are capped, or windows are data: no fused kernel here supports either."""
        return self.attention_softcap is not None or self.layer_data is not None

    def _special_scores(self) -> list[tuple[str, str]]:
        """Returns what makes scores special, and for each setting how to do without it."""
        cap, theta = self.attention_softcap, self.local_rope_theta
        windows = f"windows={self.windows} with max_length={self.max_length}"
        settings = [
            (cap is not None, f"attention_softcap={cap}", "leave attention_softcap out"),
            (theta is not None, f"local_rope_theta={theta}", "leave local_rope_theta out"),
            (self.has_windows, windows, "lower max_length to the windows"),
        ]
        return [(what, cure) for is_set, what, cure in settings if is_set]

    @property
    def layer_data(self) -> tuple[int, ...] | None:
        """The windows that blocks store as data; None if no block needs one."""
        is_needed = self.local_rope_theta is not None or self.has_windows
        return self.layer_windows if is_needed else None

    @property
    def score_scale(self) -> float:
        """The multiplier of products of queries and keys, with the default resolved."""
        return self.key_size**-0.5 if self.attention_scale is None else self.attention_scale

    def validate(self) -> None:
        """Checks that the sizes are consistent.

        Raises:
            ConfigError: a size is not positive, heads do not divide, or a name is unknown.
            DTypeError: a dtype is not a floating-point one.
        """
        # Dtypes may be JAX types rather than names; `check_floats` checks them.
        check_types(self, but=("dtype", "param_dtype"))
        sizes = ("vocab_size", "width", "num_layers", "num_heads", "max_length")
        check_at_least_one(self, (*sizes, "kv_heads", "key_size", "hidden_size"))
        self._check_heads()
        check_flags(self)
        check_rate(self, "dropout")
        check_above_zero(self, ("norm_eps", "rope_theta", "rotary_fraction", "embedding_scale"))
        check_above_zero(self, tuple(n for n in _OPTIONAL if getattr(self, n) is not None))
        check_floats(self)
        for field, names, what in _CHOICES:
            check_choice(field, getattr(self, field), names, what)
        self._check_rotation()
        self._check_attention()
        self._check_biases()
        if self.logits_dtype != "float32" and not self.chunks_logits:
            raise ConfigError(
                f"logits_dtype={self.logits_dtype!r} is for chunked logits, but logits="
                f"{self.logits!r} with a vocabulary of {self.vocab_size} makes whole logits: set "
                "logits='chunked', or leave logits_dtype out.",
                code="logits-dtype-without-chunks",
            )

    def _check_biases(self) -> None:
        if self.experts is not None:
            self.experts.validate()
            if self.bias:
                raise ConfigError(
                    "bias=True gives the linear layers of the blocks biases, but experts have "
                    "none: leave bias out, or experts.",
                    code="bias-with-experts",
                )
        if self.bias and self.qkv_bias:
            raise ConfigError(
                "bias=True gives every linear layer of the blocks a bias, and qkv_bias=True only "
                "those of queries, keys and values: leave one of them out.",
                code="bias-and-qkv-bias",
            )

    def _check_rotation(self) -> None:
        if self.rope_scaling is not None:
            self.rope_scaling.validate()
        asked = self.rope_scaling, self.local_rope_theta, self.rotary_fraction
        if self.positions != "rotary" and asked != (None, None, 1.0):
            raise ConfigError(
                f"positions={self.positions!r} with rope_scaling, local_rope_theta or "
                "rotary_fraction, which define how queries and keys are rotated: leave these out, "
                "or set positions='rotary'.",
                code="rotation-without-rotary",
            )
        if self.rotary_fraction > 1 or int(self.key_size * self.rotary_fraction) % 2:
            raise ConfigError(
                f"rotary_fraction={self.rotary_fraction} of heads of size {self.key_size} must be "
                "an even number of features, at most all: change it.",
                code="rotary-fraction",
            )
        if self.local_rope_theta is not None and not any(self.windows):
            raise ConfigError(
                f"local_rope_theta={self.local_rope_theta} is for layers with a window, but no "
                "layer has one: set windows, or leave it out.",
                code="local-theta-without-windows",
            )

    def _check_attention(self) -> None:
        for window in self.windows:
            WHOLE.check("TransformerConfig", "windows", window)
            if window < 0:
                raise ConfigError(f"windows={self.windows} must be 0 or more each; 0 sees all.")
        if self.attention not in ("auto", "einsum") and self.has_special_scores:
            got, cures = zip(*self._special_scores(), strict=True)
            raise ConfigError(
                f"attention={self.attention!r} supports no softcap, no windows and no "
                f"local_rope_theta, but got {' and '.join(got)}: set attention='auto', or "
                f"{' and '.join(cures)}.",
                code="attention-without-windows",
            )
        if self.logit_softcap is not None and self.logits == "chunked":
            raise ConfigError(
                f"logit_softcap={self.logit_softcap} needs whole logits: set logits='auto', or "
                "leave it out.",
                code="softcap-with-chunks",
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
                "every key head is shared by the same number of query heads; use a divisor.",
                code="heads-divide",
            )
        if self.positions == "rotary" and self.key_size % 2:
            raise ConfigError(
                f"heads of size {self.key_size} cannot be rotated in pairs: head_dim must be even; "
                "set head_dim, change width or num_heads, or use learned positions.",
                code="odd-head-size",
            )


def num_params(config: TransformerConfig) -> int:
    """Counts the parameters of a `Transformer` without making it.

    With width D, layers L, heads H and kv heads N of size K, feed-forward F and vocabulary V:
    `V D (1 or 2) + L (2 D H K + 2 D N K + 3 D F + 2 D) + D`, where a tied table counts once. A
    plain feed-forward has `2 D F`; biases, LayerNorms and learned positions are added. A layer has
    `2 D` more with `norms="both"`, `2 K` more with `qk_norm="head"`, and `(H + N) K` more with
    `"all"`. With E experts and S shared experts of hidden size F, `3 D F (E + S) + D E` replaces
    `3 D F`.

    Args:
        config: a valid config.

    Returns:
        The number of trainable scalars.

    Example:
        >>> round(num_params(TransformerConfig.preset("llama-8b")) / 1e9, 2)
        8.03
    """
    width = config.width
    hidden = config.hidden_size
    router = 0
    experts = config.experts
    if experts is not None:
        hidden = (experts.count + experts.shared) * config.expert_size
        router = width * experts.count
    heads = config.num_heads + config.kv_heads
    kernels = 3 if config.gated else 2
    norm = width * len(NORMS[config.norm])
    num_norms = 4 if config.norms == "both" else 2
    block = 2 * width * config.key_size * heads + kernels * width * hidden
    block += num_norms * norm + router
    q_and_kv = config.key_size * (config.num_heads + 2 * config.kv_heads)
    block += config.key_size * {"none": 0, "head": 2, "all": heads}[config.qk_norm]
    if config.qkv_bias:
        block += q_and_kv
    if config.bias:
        block += q_and_kv + width + (kernels - 1) * hidden + width
    tables = config.vocab_size * width * (1 if config.tied_head else 2)
    tables += config.max_length * width if config.positions == "learned" else 0
    return tables + config.num_layers * block + norm
