"""The families of decoders that hubs know, one row each; whether a model is that of a snapshot.

Names and shapes of tensors say nothing of the base of rotary positions, of the number of heads, of
what is added inside norms: weights that fit may still belong to another function.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flax import nnx

from axon_dist.core.checks import TEXTS
from axon_dist.core.errors import (
    AxonDistError,
    CheckpointError,
    ConfigError,
    UnsupportedError,
    did_you_mean,
)
from axon_dist.core.files import as_path, read_text
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.models.config import check_fields

from .family import RESOLVED, TOKEN_IDS, ExpertKeys, Family, TensorNames
from .files import CONFIG_FILE, Files, configs_beside, fetched
from .rule import NATIVE, WeightRules

_FUSED: Mapping[str, str | tuple[str, ...]] = {
    "self_attn.qkv_proj": ("attention/q", "attention/k", "attention/v"),
    "self_attn.o_proj": "attention/out",
    "mlp.gate_up_proj": ("mlp/gate", "mlp/up"),
    "mlp.down_proj": "mlp/down",
}
_QWEN_WINDOWS = {"sliding_window": 4096, "use_sliding_window": False}
_GEMMA_PARTS = {"norm": "rms_plus_one", "norms": "both"}
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
            parts={"norm": "layer", "positions": "learned", "gated": False, "bias": True},
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
            # Its kernels are `[in, out]`, as those here.
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
            parts={"qkv_bias": True},
            defaults={**_QWEN_WINDOWS, "max_window_layers": 28, "max_position_embeddings": 32_768},
            windows="listed",
        ),
        "qwen3": Family(
            "Qwen3",
            "qwen3",
            "Qwen3ForCausalLM",
            parts={"qk_norm": "head"},
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
            parts=_GEMMA_PARTS,
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
            parts={**_GEMMA_PARTS, "qk_norm": "head"},
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
            parts={"norms": "after", "qk_norm": "all"},
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
            parts={"qk_norm": "head"},
            defaults={
                **_QWEN_WINDOWS,
                "num_key_value_heads": 4,
                "max_position_embeddings": 32_768,
                "num_experts_per_tok": 8,
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
"""By the name that follows `hf-` in the name of a format."""

NATIVE_NAME = "native"


FORMATS: MappingProxyType[str, Family] = MappingProxyType(
    {f"hf-{name}": row for name, row in FAMILIES.items()}
)
"""By the name that `load_weights`, `save_weights` and `axon export` take."""


def hub_config(path: str | Path, **changes: Any) -> TransformerConfig:
    """The sizes of a `Transformer` that takes up the weights of a hub's repository.

    Args:
        path: a local snapshot with a `config.json`, or that file; or `hf://org/name`.
        **changes: fields to set besides, such as `dtype="bfloat16"`.

    Returns:
        The config.

    Raises:
        CheckpointError: when it cannot be read.
        UnsupportedError: for a family without a row in `FORMATS`, or a model of one that a
            `Transformer` cannot be.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "config.json")
        >>> sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        >>> _ = path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
        >>> hub_config(path.parent).positions
        'learned'
    """
    name, data, file = _read_config(path)
    check_fields(TransformerConfig, changes)
    config = dataclasses.replace(_from_hub(FORMATS[name], data, file), **changes)
    config.validate()
    return config


def format_name(path: str | Path) -> str:
    """The key of `FORMATS` that a snapshot's weights have.

    Args:
        path: as of `hub_config`.

    Raises:
        CheckpointError: as `hub_config` does.
        UnsupportedError: likewise.
    """
    return _read_config(path)[0]


def _read_config(path: str | Path) -> tuple[str, Mapping[str, Any], Path]:
    """The format of a snapshot, its config, and where that lies."""
    path = as_path(fetched(path, (CONFIG_FILE,)), "the config of a model", CheckpointError)
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        data = json.loads(
            read_text(file, f"{str(file)!r} as the config of a model", CheckpointError)
        )
        kind = data["model_type"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"cannot read {str(file)!r} as the config of a model: {error!r}; name the folder of a "
            f"snapshot with its {CONFIG_FILE}"
        ) from error
    for name, row in FORMATS.items():
        if row.model_type == kind:
            return name, data, file
    known = ", ".join(row.model_type for row in FORMATS.values())
    raise UnsupportedError(
        f"{str(file)!r} is of the family {kind!r:.80}; those known here are {known}. Make the "
        "model yourself, and give load_weights rules of your own"
    )


def _from_hub(row: Family, data: Mapping[str, Any], file: Path) -> TransformerConfig:
    try:
        return row.from_hub(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, AxonDistError):
            raise
        raise CheckpointError(
            f"{str(file)!r} is no config of the family {row.model_type!r}: {error!r:.200}; take "
            "that of the snapshot as it was published"
        ) from error


def rules_for(rules: WeightRules | str | None, model: nnx.Module) -> WeightRules:
    """The table that rules given by name, or not at all, stand for.

    Args:
        rules: a table; a name; None for the native one.
        model: its arrays may be shapes.

    Raises:
        ConfigError: for an unknown name, or a model that is no `Transformer`.
        UnsupportedError: for a `Transformer` of another family.
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
    """The row of a name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ConfigError(
            f"no format {name!r:.80}.{did_you_mean(str(name), [NATIVE_NAME, *FORMATS])}"
        )
    return FORMATS[name]


def config_of(model: nnx.Module, name: str) -> TransformerConfig:
    """The config of a `Transformer`.

    Raises:
        ConfigError: when the model is another one.
    """
    if not isinstance(model, Transformer):
        raise ConfigError(
            f"the format {name!r} is one of a Transformer, and the model is a "
            f"{type(model).__name__}; give rules of its own: WeightRules((WeightRule(...), ...))"
        )
    return model.config


FREE = frozenset(
    (
        *("max_length", "dropout", "param_dtype", "dtype", "attention", "scan_layers"),
        *("logits", "logits_dtype", "experts"),
    )
)
"""The fields that change neither the function of a model nor the meaning of its weights."""

_OF_EXPERTS = ("count", "per_token", "width", "shared", "normalize")


def check_snapshot(
    files: Files,
    model: nnx.Module,
    rules: WeightRules | str | None = None,
    differ: str | Iterable[str] = (),
) -> None:
    """Compares a `Transformer` with the `config.json` that lies beside weights, where one does.

    Args:
        files: as of `load_weights`.
        model: its arrays may be shapes; models of other classes are taken as they are.
        rules: as of `load_weights`. With the name of a hub's format the config must be one that
            can be compared; with rules of one's own, one that cannot is left alone.
        differ: fields of a `TransformerConfig` in which the model is to be another, such as
            `rope_theta` where it is to learn longer sequences.

    Raises:
        ConfigError: naming every field that differs, with both values.
        CheckpointError: when the file cannot be read, with a hub's format.
        UnsupportedError: when a `Transformer` cannot be what it describes, with a hub's format.

    Example:
        >>> import json, tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32}
        >>> _ = (path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
        >>> config = hub_config(path, num_heads=8)
        >>> check_snapshot(path, Transformer(config, rngs=nnx.Rngs(0)), "hf-gpt2")
        Traceback (most recent call last):
        axon_dist.core.errors.ConfigError: the model is not the one of '...config.json': num_heads
        is 8 and 4 there, num_kv_heads is 8 and 4 there, head_dim is 8 and 16 there. Its weights ...
    """
    differ = (differ,) if isinstance(differ, str) else differ
    TEXTS.check("load_weights", "differ", differ)
    check_fields(TransformerConfig, dict.fromkeys(differ := tuple(differ)))
    if not isinstance(model, Transformer):
        return
    for file in configs_beside(files):
        try:
            theirs = hub_config(file)
        except (CheckpointError, UnsupportedError):
            if rules in FORMATS:
                raise
            continue
        found = list(_differences(model.config, theirs, differ))
        if found:
            raise ConfigError(
                f"the model is not the one of {str(file)!r}: {', '.join(found)}. Its weights would "
                "be those of another function: take the sizes from there, in a config by "
                f"model: {{hub: {file.parent}}}, in Python by hub_config({str(file.parent)!r})"
                "; or name in differ=(...) what is to differ"
            )


def token_ids(files: Files) -> dict[str, Any]:
    """The ids of special tokens that the `config.json` beside weights names; else none.

    Args:
        files: as of `load_weights`.

    Raises:
        CheckpointError: when it cannot be read.
        UnsupportedError: when it is of a family without a row in `FORMATS`.
    """
    found = {key: x for file in configs_beside(files) for key, x in _read_config(file)[1].items()}
    return {key: found[key] for key in TOKEN_IDS if key in found}


def _differences(
    ours: TransformerConfig, theirs: TransformerConfig, differ: Iterable[str]
) -> Iterator[str]:
    # Windows count as far as the model sees.
    mine, wanted = meaning(ours), meaning(dataclasses.replace(theirs, max_length=ours.max_length))
    for field in wanted:
        if mine[field] != wanted[field] and field.partition(".")[0] not in differ:
            yield f"{field} is {mine[field]!r} and {wanted[field]!r} there"


def meaning(config: TransformerConfig) -> Mapping[str, Any]:
    """What a config says of the function of a model, every default resolved.

    Args:
        config: of the model.

    Returns:
        Values by field; those of experts as `experts.count`.
    """
    names = [field.name for field in dataclasses.fields(config) if field.name not in FREE]
    found = {name: getattr(config, RESOLVED.get(name, name)) for name in names}
    if config.positions == "learned":
        del found["rope_theta"]
    is_usual = abs(config.score_scale * config.key_size**0.5 - 1) < 1e-9
    found["attention_scale"] = None if is_usual else config.score_scale
    far = config.max_length if config.local_rope_theta is None else float("inf")
    each = tuple(0 if window >= far else window for window in config.layer_windows)
    found["windows"] = each if any(each) else ()
    experts = config.experts
    for name in _OF_EXPERTS:
        value = None if experts is None else getattr(experts, name)
        is_default = name == "width" and experts is not None and value is None
        found[f"experts.{name}"] = config.hidden_size if is_default else value
    return found
