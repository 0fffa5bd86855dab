"""GPT-2 as hubs have it: names, the fused projection of queries, keys and values, `config.json`.

Its linear layers keep kernels `[in, out]` as this library does, so that nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axon_dist.core.errors import UnsupportedError
from axon_dist.models import TransformerConfig

from .hub import ACTIVATIONS, block_rules, require, sizes_of
from .rule import WeightRule, WeightRules

_SIZES = {
    "vocab_size": "vocab_size",
    "width": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "ffn_width": "n_inner",
    "max_length": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "tied_head": "tie_word_embeddings",
}
_DEFAULTS = {
    "vocab_size": 50_257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def rules(config: TransformerConfig) -> WeightRules:
    """Which tensor of a GPT-2 is which parameter of a `Transformer`."""
    layer, start = r"(?:transformer\.)?h\.(?P<layer>\d+)\.", r"(?:transformer\.)?"
    blocks: list[tuple[Any, ...]] = []
    for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
        blocks += [(rf"{layer}{theirs}\.weight", f"{ours}/scale", "")]
        blocks += [(rf"{layer}{theirs}\.bias", f"{ours}/bias", "")]
    heads = ("attention/q", "attention/k", "attention/v")
    for theirs, ours, dim in (("weight", "kernel", 1), ("bias", "bias", 0)):
        fused = rf"{layer}attn\.c_attn\.{theirs}"
        blocks += [(fused, tuple(f"{name}/{ours}" for name in heads), "", dim)]
        blocks += [(rf"{layer}attn\.c_proj\.{theirs}", f"attention/out/{ours}", "")]
        blocks += [(rf"{layer}mlp\.c_fc\.{theirs}", f"mlp/up/{ours}", "")]
        blocks += [(rf"{layer}mlp\.c_proj\.{theirs}", f"mlp/down/{ours}", "")]
    table = [
        WeightRule(rf"{start}wte\.weight", "token_embedding/embedding"),
        WeightRule(rf"{start}wpe\.weight", "position_embedding/embedding"),
        *block_rules(config, blocks),
        WeightRule(rf"{start}ln_f\.weight", "final_norm/scale"),
        WeightRule(rf"{start}ln_f\.bias", "final_norm/bias"),
    ]
    if not config.tied_head:
        table.append(WeightRule(r"lm_head\.weight", "lm_head/kernel", "out in -> in out"))
    copies = {r"lm_head\.weight": rf"{start}wte\.weight"} if config.tied_head else {}
    masks = (r"(?:transformer\.)?h\.\d+\.attn\.(masked_)?bias",)
    return WeightRules(tuple(table), masks, copies)


def to_hub(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of a `Transformer` that is a GPT-2."""
    wanted = {"norm": "layer", "positions": "learned", "gated": False, "bias": True}
    require(config, "GPT-2", wanted)
    heads = {"kv_heads": config.num_heads, "key_size": config.width // config.num_heads}
    plain = {"norms": "before", "qk_norm": "none", "windows": (), "attention_softcap": None,
             "logit_softcap": None, "embedding_scale": 1.0, "experts": None,
             "score_scale": config.key_size**-0.5}  # fmt: skip
    require(config, "GPT-2", {**heads, **plain})
    names = {ours: theirs for theirs, ours in reversed([*ACTIVATIONS.items()])}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **sizes_of(config, _SIZES),
        "activation_function": names[config.activation],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": config.param_dtype,
    }


def from_hub(data: Mapping[str, Any]) -> TransformerConfig:
    """The config of a GPT-2 from its `config.json`."""
    data = {**_DEFAULTS, **data}
    act = data.get("activation_function", "gelu_new")
    for wrong, what in (
        (act not in ACTIVATIONS, f"activation_function={act!r}"),
        (data.get("scale_attn_by_inverse_layer_idx"), "scale_attn_by_inverse_layer_idx=true"),
        (not data.get("scale_attn_weights", True), "scale_attn_weights=false"),
        (data.get("add_cross_attention"), "add_cross_attention=true"),
    ):
        if wrong:
            raise UnsupportedError(
                f"this GPT-2 has {what}, which a Transformer cannot have; its logits would be "
                "others. Take a model without"
            )
    return TransformerConfig(
        **{ours: data[theirs] for ours, theirs in _SIZES.items()},
        norm="layer",
        positions="learned",
        gated=False,
        activation=ACTIVATIONS[act],
        bias=True,
    )
