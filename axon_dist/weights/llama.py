"""Llama as hubs have it: names, transposes and `config.json`.

Rotary pairs are (i, i + K/2) there as here, so that queries and keys need no permutation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axon_dist.core.errors import UnsupportedError
from axon_dist.models import TransformerConfig

from .hub import block_rules, require, sizes_of
from .rule import WeightRule, WeightRules

_LINEAR = {
    "self_attn.q_proj": "attention/q",
    "self_attn.k_proj": "attention/k",
    "self_attn.v_proj": "attention/v",
    "self_attn.o_proj": "attention/out",
    "mlp.gate_proj": "mlp/gate",
    "mlp.up_proj": "mlp/up",
    "mlp.down_proj": "mlp/down",
}
_TURNED = "out in -> in out"
_SIZES = {
    "vocab_size": "vocab_size",
    "width": "hidden_size",
    "ffn_width": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}
_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def rules(config: TransformerConfig) -> WeightRules:
    """Which tensor of a Llama is which parameter of a `Transformer`."""
    layer = r"(?:model\.)?layers\.(?P<layer>\d+)\."
    blocks = [
        (rf"{layer}input_layernorm\.weight", "attention_norm/scale", ""),
        (rf"{layer}post_attention_layernorm\.weight", "mlp_norm/scale", ""),
    ]
    for theirs, ours in _LINEAR.items():
        name = layer + theirs.replace(".", r"\.")
        blocks.append((rf"{name}\.weight", f"{ours}/kernel", _TURNED))
        if config.bias:
            blocks.append((rf"{name}\.bias", f"{ours}/bias", ""))
    table = [
        WeightRule(r"(?:model\.)?embed_tokens\.weight", "token_embedding/embedding"),
        *block_rules(config, blocks),
        WeightRule(r"(?:model\.)?norm\.weight", "final_norm/scale"),
    ]
    if not config.tied_head:
        table.append(WeightRule(r"lm_head\.weight", "lm_head/kernel", _TURNED))
    copies = {r"lm_head\.weight": r"(?:model\.)?embed_tokens\.weight"} if config.tied_head else {}
    ignored = (r"(?:model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    return WeightRules(tuple(table), ignored, copies)


def to_hub(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a `Transformer` that is a Llama."""
    wanted = {"norm": "rms", "positions": "rotary", "gated": True, "activation": "silu"}
    require(config, "Llama", wanted)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes_of(config, _SIZES),
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "torch_dtype": config.param_dtype,
    }


def from_hub(data: Mapping[str, Any]) -> TransformerConfig:
    """The config of a Llama from its `config.json`."""
    data = {**_DEFAULTS, **data}
    scaling = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    biases = {data.get("attention_bias", False), data.get("mlp_bias", False)}
    for wrong, what in (
        (data.get("hidden_act", "silu") != "silu", f"hidden_act={data.get('hidden_act')!r}"),
        (kind != "default", f"rotary positions of the kind {kind!r}"),
        (len(biases) > 1, "biases in attention or feed-forward alone"),
    ):
        if wrong:
            raise UnsupportedError(
                f"this Llama has {what}, which a Transformer cannot have; its logits would be "
                "others. Take a model without"
            )
    return TransformerConfig(
        **{ours: data[theirs] for ours, theirs in _SIZES.items()},
        rope_theta=float(scaling.get("rope_theta", data.get("rope_theta", 10_000.0))),
        bias=biases.pop(),
    )
