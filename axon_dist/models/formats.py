"""The table of decoder families on the hub, and the weight formats named after them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from flax import nnx

from ..core.errors import ConfigError, did_you_mean
from .family import ExpertKeys, Family, TensorNames
from .transformer import Transformer
from .transformer_config import TransformerConfig
from .weight_rules import NATIVE, WeightRules

_FUSED: Mapping[str, str | tuple[str, ...]] = {
    "self_attn.qkv_proj": ("attention/q", "attention/k", "attention/v"),
    "self_attn.o_proj": "attention/out",
    "mlp.gate_up_proj": ("mlp/gate", "mlp/up"),
    "mlp.down_proj": "mlp/down",
}
_QWEN_WINDOWS = {"sliding_window": 4096, "use_sliding_window": False}
_GEMMA_FIXED = {"norm": "rms_plus_one", "norms": "both"}
_GEMMA = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
_NO_BIAS = {"attention_bias": (None, False)}
_ONE_WAY = {"use_bidirectional_attention": (None, False)}
_CAPS = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}

_GPT2_SIZES = {
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "ffn_width": "n_inner",
    "max_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
}

FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "gpt2": Family(
            "GPT-2",
            "gpt2",
            "GPT2LMHeadModel",
            fixed={"norm": "layer", "positions": "learned", "gated": False, "bias": True},
            defaults={
                "vocab_size": 50_257,
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_inner": None,
                "n_positions": 1024,
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
                "activation_function": "gelu_new",
            },
            only={
                "scale_attn_by_inverse_layer_idx": (None, False),
                "scale_attn_weights": (None, True),
                "add_cross_attention": (None, False),
            },
            activation="activation_function",
            linear={
                "attn.c_attn": ("attention/q", "attention/k", "attention/v"),
                "attn.c_proj": "attention/out",
                "mlp.c_fc": "mlp/up",
                "mlp.c_proj": "mlp/down",
            },
            sizes=_GPT2_SIZES,
            # GPT-2's kernels are `[in, out]`, as in this package.
            names=TensorNames(
                *("transformer", "h", "wte", "wpe", "ln_f"),
                norms={"ln_1": "attention_norm", "ln_2": "mlp_norm"},
                form="",
                unused=r"attn\.(masked_)?bias",
            ),
            written=lambda config: {
                "resid_pdrop": config.dropout,
                "embd_pdrop": config.dropout,
                "attn_pdrop": 0.0,
            },
        ),
        "llama": Family(
            "Llama",
            "llama",
            "LlamaForCausalLM",
            defaults={"attention_bias": False, "mlp_bias": False},
        ),
        "mistral": Family(
            "Mistral",
            "mistral",
            "MistralForCausalLM",
            defaults={
                "num_key_value_heads": 8,
                "sliding_window": 4096,
                "max_position_embeddings": 131_072,
            },
            windows="all",
        ),
        "qwen2": Family(
            "Qwen2",
            "qwen2",
            "Qwen2ForCausalLM",
            fixed={"qkv_bias": True},
            defaults={**_QWEN_WINDOWS, "max_window_layers": 28, "max_position_embeddings": 32_768},
            windows="listed",
        ),
        "qwen3": Family(
            "Qwen3",
            "qwen3",
            "Qwen3ForCausalLM",
            fixed={"qk_norm": "head"},
            defaults={
                **_QWEN_WINDOWS,
                "max_window_layers": 28,
                "head_dim": 128,
                "max_position_embeddings": 32_768,
            },
            only=_NO_BIAS,
            windows="listed",
        ),
        "gemma2": Family(
            "Gemma 2",
            "gemma2",
            "Gemma2ForCausalLM",
            fixed=_GEMMA_FIXED,
            keys=_CAPS,
            defaults={
                **_GEMMA,
                "sliding_window_pattern": 2,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "max_position_embeddings": 8192,
            },
            only={**_NO_BIAS, **_ONE_WAY},
            windows="listed",
            activation="hidden_activation",
            scales_embeddings=True,
        ),
        "gemma3": Family(
            "Gemma 3 (text)",
            "gemma3_text",
            "Gemma3ForCausalLM",
            fixed={**_GEMMA_FIXED, "qk_norm": "head"},
            keys=_CAPS,
            defaults={
                **_GEMMA,
                "sliding_window_pattern": 6,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "max_position_embeddings": 131_072,
            },
            only={**_NO_BIAS, **_ONE_WAY},
            windows="listed",
            activation="hidden_activation",
            scales_embeddings=True,
        ),
        "phi3": Family(
            "Phi-3",
            "phi3",
            "Phi3ForCausalLM",
            keys={"rotary_fraction": "partial_rotary_factor"},
            defaults={
                "rms_norm_eps": 1e-5,
                "max_position_embeddings": 4096,
                "partial_rotary_factor": 1.0,
            },
            windows="all",
            scalings=(),
            linear=_FUSED,
        ),
        "olmo2": Family(
            "OLMo 2",
            "olmo2",
            "Olmo2ForCausalLM",
            fixed={"norms": "after", "qk_norm": "all"},
            defaults={"rms_norm_eps": 1e-5},
            only=_NO_BIAS,
        ),
        "mixtral": Family(
            "Mixtral",
            "mixtral",
            "MixtralForCausalLM",
            defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "max_position_embeddings": 131_072,
                "num_experts_per_tok": 2,
                "router_aux_loss_coef": 0.001,
                "num_local_experts": 8,
            },
            only={"router_jitter_noise": (None, 0.0)},
            windows="all",
            experts=ExpertKeys(
                "num_local_experts",
                "intermediate_size",
                r"block_sparse_moe",
                ("w1", "w3", "w2"),
            ),
        ),
        "qwen3-moe": Family(
            "Qwen3-MoE",
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            fixed={"qk_norm": "head"},
            defaults={
                **_QWEN_WINDOWS,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32_768,
                "num_experts_per_tok": 8,
                "router_aux_loss_coef": 0.001,
                "num_local_experts": 128,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
            },
            only={**_NO_BIAS, "decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [])},
            windows="all",
            experts=ExpertKeys(
                "num_experts",
                "moe_intermediate_size",
                "mlp",
                ("gate_proj", "up_proj", "down_proj"),
                "norm_topk_prob",
            ),
        ),
    }
)
"""The families by name; the format of a family is called `hf-` and this name."""

NATIVE_NAME = "native"


FORMATS: MappingProxyType[str, Family] = MappingProxyType(
    {f"hf-{name}": row for name, row in FAMILIES.items()}
)
"""The families by the format names that `load_weights`, `save_weights` and `axon export` take."""


def rules_for(rules: WeightRules | str | None, model: nnx.Module) -> WeightRules:
    """Returns the table of rules for a model.

    Args:
        rules: a table; the name of a format; or None for the native format.
        model: the model; its arrays may be shapes.

    Raises:
        ConfigError: the format is unknown, or it needs a `Transformer` and the model is not one.
        UnsupportedError: the `Transformer` is not of the family of the format.
    """
    if isinstance(rules, WeightRules):
        return rules
    if rules is None or rules == NATIVE_NAME:
        return NATIVE
    row = format_of(rules)
    config = config_of(model, rules)
    row.to_hub(config)
    return row.rules(config)


def format_of(name: str) -> Family:
    """Returns the family of a format name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ConfigError(
            f"no format {name!r:.80}.{did_you_mean(str(name), [NATIVE_NAME, *FORMATS])}"
        )
    return FORMATS[name]


def config_of(model: nnx.Module, name: str) -> TransformerConfig:
    """Returns the config of a `Transformer`.

    Raises:
        ConfigError: when the model is not a `Transformer`.
    """
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"the format {name!r} needs a Transformer, but the model is a "
            f"{type(model).__name__}; give rules for it: WeightRules((WeightRule(...), ...))",
            code="format-needs-transformer",
        )
    return model.config
