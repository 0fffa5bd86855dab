"""`Family`: converts a model family's hub configs and weights to and from those of a `Transformer`.

Models on the hub and this package both rotate the pairs (i, i + K/2), so the kernels of queries and
keys need no permutation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from ..core.errors import UnsupportedError
from .config import ExpertConfig
from .meaning import RESOLVED, meaning
from .rotary import RopeScaling
from .transformer_config import NORMS, TransformerConfig
from .weight_rules import WeightRule, WeightRules

TOKEN_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")
LAYER = "layer"
"""The regular-expression group of the layer index in a tensor name."""
EXPERT = "expert"
"""The regular-expression group of the expert index in a tensor name."""

HUB_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu_new": "gelu",
        "gelu_pytorch_tanh": "gelu",
        "gelu": "gelu_exact",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
        "tanh": "tanh",
    }
)
"""Maps hub names of activations to names of this package; if several fit, the first is written."""

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
    "rope_theta": 10_000.0,
}
_FIXED: Mapping[str, Any] = {
    "norm": "rms",
    "norms": "before",
    "qk_norm": "none",
    "positions": "rotary",
    "gated": True,
    "bias": False,
    "qkv_bias": False,
    "rotary_fraction": 1.0,
    "local_rope_theta": None,
    "attention_softcap": None,
    "logit_softcap": None,
}
"""Field values of every family, unless it overrides them or has a config key for the field."""

_TURNED = "out in -> in out"
_BEFORE = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
_AFTER = {
    "post_attention_layernorm": "attention_after_norm",
    "post_feedforward_layernorm": "mlp_after_norm",
}
_BOTH = {"input_layernorm": "attention_norm", **_AFTER, "pre_feedforward_layernorm": "mlp_norm"}
_NORMS = {"before": _BEFORE, "after": _AFTER, "both": _BOTH}


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """The tensor names of a family.

    Args:
        model: the optional prefix of all tensors except the head.
        layers: the list of blocks.
        tokens: the token embedding.
        positions: the table of learned positions, if the family has one.
        final: the last norm.
        norms: maps hub names of a block's norms to names in a `Block`; None for those of Llama.
        form: how to rearrange kernels, as in `WeightRule`.
        unused: a regular expression of tensors in a block that belong to no parameter.
    """

    model: str = "model"
    layers: str = "layers"
    tokens: str = "embed_tokens"
    positions: str = ""
    final: str = "norm"
    norms: Mapping[str, str] | None = None
    form: str = _TURNED
    unused: str = r"self_attn\.rotary_emb\.inv_freq"


LINEAR: MappingProxyType[str, str | tuple[str, ...]] = MappingProxyType(
    {
        "self_attn.q_proj": "attention/q",
        "self_attn.k_proj": "attention/k",
        "self_attn.v_proj": "attention/v",
        "self_attn.o_proj": "attention/out",
        "mlp.gate_proj": "mlp/gate",
        "mlp.up_proj": "mlp/up",
        "mlp.down_proj": "mlp/down",
    }
)
_EXPERT = rf"(?P<{EXPERT}>\d+)"
_UNSAVED = (r"blocks/(\d+/)?attention/window", r"blocks/(\d+/)?mlp/report")


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertKeys:
    """The config keys and tensor names of experts in a family.

    Args:
        count: the key of the number of experts.
        width: the key of their hidden size.
        module: the name of the layer, whose `gate` is the router.
        names: the names of the kernels `gate`, `up` and `down`.
        normalize: the key that says whether gates are divided by their sum; None if they always
            are.
    """

    count: str
    width: str
    module: str
    names: tuple[str, str, str]
    normalize: str | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """A family of decoders on the hub.

    Args:
        name: the name in messages.
        model_type: the `model_type` in `config.json`.
        architecture: the class of its models in `transformers`.
        fixed: fields of `TransformerConfig` with one value in this family; overrides `_FIXED`.
        keys: maps further fields of a `TransformerConfig` to keys of `config.json`.
        defaults: values of keys that a config may omit, None for no value. The family has an
            optional key only if it is listed here.
        only: keys, each with the values that a `Transformer` supports; other values raise.
        windows: `"all"` if all layers have a window, `"listed"` if the config lists the layers with
            one; empty if no layer has a window.
        activation: the key of the activation.
        scalings: the supported kinds of RoPE scaling.
        scales_embeddings: whether embeddings are scaled by the square root of the width.
        linear: maps hub names of linear layers to names in a `Block`; a fused layer has several.
        experts: the keys and names of experts, if the family has experts.
        sizes: maps fields of a `TransformerConfig` to keys of `config.json`.
        names: the names of its tensors.
        written: returns further entries of `config.json` for a config.
    """

    name: str
    model_type: str
    architecture: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    windows: str = ""
    activation: str = "hidden_act"
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn")
    scales_embeddings: bool = False
    linear: Mapping[str, str | tuple[str, ...]] = dataclasses.field(default_factory=LINEAR.copy)
    experts: ExpertKeys | None = None
    sizes: Mapping[str, str] = dataclasses.field(default_factory=_SIZES.copy)
    names: TensorNames = TensorNames()
    written: Callable[[TransformerConfig], dict[str, Any]] | None = None

    def rules(self, config: TransformerConfig) -> WeightRules:
        """Returns the rules that map tensors to parameters of a `Transformer`."""
        names = self.names
        start = rf"(?:{names.model}\.)?"
        layer = rf"{start}{names.layers}\.(?P<{LAYER}>\d+)\."
        tokens = rf"{start}{names.tokens}\.weight"
        table = [WeightRule(tokens, "token_embedding/embedding")]
        if names.positions:
            table.append(
                WeightRule(rf"{start}{names.positions}\.weight", "position_embedding/embedding")
            )
        table += block_rules(config, self._rows(config, layer))
        table += [
            WeightRule(rf"{start}{names.final}\.{hub_name}", f"final_norm/{own_name}")
            for hub_name, own_name in _norm_parts(config)
        ]
        copies = {r"lm_head\.weight": tokens} if config.tied_head else {}
        if not config.tied_head:
            table.append(WeightRule(r"lm_head\.weight", "lm_head/kernel", _TURNED))
        ignored = (rf"{start}{names.layers}\.\d+\.{names.unused}",)
        return WeightRules(tuple(table), ignored, copies, _UNSAVED)

    def _rows(self, config: TransformerConfig, layer: str) -> Iterator[tuple[Any, ...]]:
        form = self.names.form
        for name, norm in (self.names.norms or _NORMS[config.norms]).items():
            for hub_name, own_name in _norm_parts(config):
                yield rf"{layer}{name}\.{hub_name}", f"{norm}/{own_name}", ""
        if config.qk_norm != "none":
            for one in "qk":
                yield rf"{layer}self_attn\.{one}_norm\.weight", f"attention/{one}_norm/scale", ""
        for hub_name, own_name in self.linear.items():
            if self.experts is not None and hub_name.startswith("mlp."):
                continue
            name = layer + hub_name.replace(".", r"\.")
            paths = (own_name,) if isinstance(own_name, str) else own_name
            yield rf"{name}\.weight", tuple(f"{path}/kernel" for path in paths), form, 1
            is_input = hub_name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            if config.bias or (config.qkv_bias and is_input):
                yield rf"{name}\.bias", tuple(f"{path}/bias" for path in paths), ""
        if self.experts is not None:
            yield rf"{layer}{self.experts.module}\.gate\.weight", "mlp/router", form
            for hub_name, own_name in zip(self.experts.names, ("gate", "up", "down"), strict=True):
                name = rf"{layer}{self.experts.module}\.experts\.{_EXPERT}\.{hub_name}\.weight"
                yield name, f"mlp/{own_name}", form

    def from_hub(self, data: Mapping[str, Any]) -> TransformerConfig:
        """Converts a `config.json` to a `TransformerConfig`."""
        data = {**_DEFAULTS, **self.defaults, **data}
        for key, known in self.only.items():
            if data.get(key) not in known:
                raise self._beyond(f"{key}={data[key]!r}")
        activation = data.get(self.activation) or "silu"
        if activation not in HUB_ACTIVATIONS:
            raise self._beyond(f"{self.activation}={activation!r}")
        biases = {key: bool(data[key]) for key in self._bias_keys}
        if len({*biases.values()}) > 1:
            raise self._beyond(" and ".join(f"{key}={value}" for key, value in biases.items()))
        windows = self._windows(data)
        fields = {
            own_name: data[hub_name] for own_name, hub_name in {**self.sizes, **self.keys}.items()
        }
        fields |= {**self.fixed, **self._rotation(data, bool(windows))}
        if biases:
            fields["bias"] = any(biases.values())
        if self.scales_embeddings:
            fields["embedding_scale"] = data["hidden_size"] ** 0.5
        if (scalar := data.get("query_pre_attn_scalar")) and self._has("query_pre_attn_scalar"):
            fields["attention_scale"] = scalar**-0.5
        return TransformerConfig(
            **fields,
            activation=HUB_ACTIVATIONS[activation],
            windows=windows,
            experts=self._experts(data),
        )

    def to_hub(self, config: TransformerConfig) -> dict[str, Any]:
        """Converts the config of a `Transformer` of this family to a `config.json`."""
        fixed = {**_FIXED, **self.fixed}
        if self._has("rope_local_base_freq") and config.windows:
            del fixed["local_rope_theta"]
        if self._bias_keys:
            del fixed["bias"]
        fixed["embedding_scale"] = config.width**0.5 if self.scales_embeddings else 1.0
        if not self._has("query_pre_attn_scalar"):
            fixed["score_scale"] = config.key_size**-0.5
        if "num_kv_heads" not in self.sizes:
            fixed |= {"kv_heads": config.num_heads, "key_size": config.width // config.num_heads}
        require(config, self.name, {k: v for k, v in fixed.items() if k not in self.keys})
        names = {own_name: hub_name for hub_name, own_name in reversed([*HUB_ACTIVATIONS.items()])}
        entries = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **sizes_of(config, {**self.sizes, **self.keys}),
            self.activation: names[config.activation],
            **dict.fromkeys(self._bias_keys, config.bias),
            **self._rotation_keys(config),
            **self._window_keys(config),
            **self._expert_keys(config),
            **(self.written(config) if self.written else {}),
            # A `Transformer` has no special tokens. Without these entries, transformers would use
            # the family's default ids, which may exceed the vocabulary.
            **dict.fromkeys(TOKEN_IDS),
            "torch_dtype": jnp.dtype(config.param_dtype).name,
        }
        if self._has("query_pre_attn_scalar"):
            scalar = config.score_scale**-2
            is_whole = abs(scalar - round(scalar)) < 1e-6 * scalar
            entries["query_pre_attn_scalar"] = round(scalar) if is_whole else scalar
        self._check_written(config, entries)
        return entries

    def _check_written(self, config: TransformerConfig, entries: Mapping[str, Any]) -> None:
        """Raises `UnsupportedError` if a `config.json` leaves out a field of a config."""
        written = meaning(self.from_hub(entries))
        for field, value in meaning(config).items():
            is_number = isinstance(value, float) and isinstance(written[field], float)
            is_close = is_number and math.isclose(value, written[field], rel_tol=1e-6)
            if not is_close and value != written[field]:
                raise UnsupportedError(
                    f"a Transformer with {field}={value!r} cannot be saved as {self.name}, whose "
                    f"config.json would mean {field}={written[field]!r}; use another format, or "
                    "'native'",
                    code="field-not-in-format",
                )

    @property
    def _bias_keys(self) -> tuple[str, ...]:
        """The keys that enable biases, if the family may have them in all linear layers."""
        return tuple(key for key in ("attention_bias", "mlp_bias") if self._has(key))

    def _has(self, key: str) -> bool:
        return key in self.defaults

    def _beyond(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"this {self.name} model has {what}, which a Transformer does not support: its logits "
            "would differ. Use a model without it",
            code="model-not-supported",
        )

    @property
    def _is_rotary(self) -> bool:
        return self.fixed.get("positions", "rotary") == "rotary"

    def _rotation(self, data: Mapping[str, Any], has_windows: bool) -> dict[str, Any]:
        if not self._is_rotary:
            return {}
        rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
        local = rope.get("sliding_attention") or {}
        rope = rope.get("full_attention", rope) or {}
        fields: dict[str, Any] = {
            "rope_theta": float(rope.get("rope_theta") or data["rope_theta"]),
            "rope_scaling": self._scaling(rope, data),
        }
        fraction = _rotary_fraction(rope, data)
        if fraction != 1 and not self._has("partial_rotary_factor"):
            raise self._beyond(f"partial_rotary_factor={fraction}")
        fields["rotary_fraction"] = float(fraction)
        theta = local.get("rope_theta") or data.get("rope_local_base_freq")
        if self._has("rope_local_base_freq") and has_windows and theta:
            if self._scaling(local, data) is not None:
                raise self._beyond("RoPE scaling in layers with a window")
            if local and _rotary_fraction(local, data) != fraction:
                raise self._beyond("another partial_rotary_factor in layers with a window")
            fields["local_rope_theta"] = float(theta)
        elif local and local != rope and self._has_local_layers(data):
            raise self._beyond("separate rotary parameters for layers with a window")
        return fields

    def _scaling(self, rope: Mapping[str, Any], data: Mapping[str, Any]) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if kind == "default":
            return None
        odd = [key for key in ("mscale", "mscale_all_dim") if rope.get(key)]
        more = "".join(f" with {key}" for key in odd)
        if kind not in self.scalings or odd:
            raise self._beyond(f"RoPE scaling of the kind {kind!r}{more}")
        low, high = _TURNS.get(kind, ("low_freq_factor", "high_freq_factor"))
        before = rope.get("original_max_position_embeddings", data["max_position_embeddings"])
        if kind == "linear":
            return RopeScaling("linear", float(rope["factor"]))
        return RopeScaling(
            kind,
            float(rope["factor"]),
            int(before),
            float(rope.get(low) or 1.0),
            float(rope.get(high) or 32.0),
            rope.get("attention_factor"),
            bool(rope.get("truncate", True)) if kind == "yarn" else True,
        )

    def _rotation_keys(self, config: TransformerConfig) -> dict[str, Any]:
        if not self._is_rotary:
            return {}
        entries: dict[str, Any] = {"rope_theta": config.rope_theta}
        if self._has("rope_local_base_freq"):
            entries["rope_local_base_freq"] = config.local_rope_theta or config.rope_theta
        scaling = config.rope_scaling
        if scaling is None:
            return entries
        if scaling.kind not in self.scalings:
            require(config, self.name, {"rope_scaling": None})
        scaled: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            low, high = _TURNS[scaling.kind]
            scaled |= {low: scaling.low, high: scaling.high}
            scaled["original_max_position_embeddings"] = scaling.original_length
        if scaling.attention_factor is not None:
            scaled["attention_factor"] = scaling.attention_factor
        if not scaling.truncate:
            scaled["truncate"] = False
        return {**entries, "rope_scaling": scaled}

    def _windows(self, data: Mapping[str, Any]) -> tuple[int, ...]:
        size = data.get("sliding_window")
        if not self.windows or not size or not data.get("use_sliding_window", True):
            return ()
        if self.windows == "all":
            return (size,)
        kinds = data.get("layer_types")
        count = min(data["num_hidden_layers"], 2**14)
        pattern = data.get("sliding_window_pattern")
        first = data.get("max_window_layers", 0)
        if kinds is None:
            is_full = [(pattern and not (i + 1) % pattern) or i < first for i in range(count)]
        else:
            odd = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
            if odd or len(kinds) != count:
                raise self._beyond(f"{count} layers of the kind {[*odd, kinds][0]!r:.90}")
            is_full = [kind == "full_attention" for kind in kinds]
        each = tuple(0 if full else size for full in is_full)
        if not any(each):
            return ()
        # Find the shortest prefix that, repeated, gives the windows of all layers.
        periods = ((each[:p], count // p, each[: count % p]) for p in range(1, count + 1))
        return next(first for first, times, rest in periods if first * times + rest == each)

    def _has_local_layers(self, data: Mapping[str, Any]) -> bool:
        """Whether a layer is of the kind with a window, even if no size of one is given."""
        return bool(self._windows({**data, "sliding_window": data.get("sliding_window") or 1}))

    def _window_keys(self, config: TransformerConfig) -> dict[str, Any]:
        each = config.layer_windows
        sizes = {size for size in each if size}
        misses_some = self.windows == "all" and 0 in each
        if len(sizes) > 1 or (sizes and (misses_some or not self.windows)):
            raise UnsupportedError(
                f"a Transformer with windows={config.windows} cannot be saved as {self.name}, "
                f"which has {_WINDOWS[self.windows]}; use another format, or 'native'",
                code="windows-not-in-format",
            )
        entries: dict[str, Any] = {}
        if self.windows:
            entries["sliding_window"] = max(sizes, default=None)
        # Models without `use_sliding_window` (Gemma) make the mask of a window also where no layer
        # has one, and transformers then raises if there is no size.
        if not sizes and self.windows == "listed" and not self._has("use_sliding_window"):
            entries["sliding_window"] = self.defaults["sliding_window"]
        if self._has("use_sliding_window"):
            entries["use_sliding_window"] = bool(sizes)
        if self.windows == "listed":
            kinds = ("sliding_attention" if size else "full_attention" for size in each)
            entries["layer_types"] = list(kinds)
            if self._has("max_window_layers"):
                entries["max_window_layers"] = next((i for i, w in enumerate(each) if w), len(each))
        return entries

    def _experts(self, data: Mapping[str, Any]) -> ExpertConfig | None:
        keys = self.experts
        if keys is None:
            return None
        adds = data.get("output_router_logits")
        per_token = data["num_experts_per_tok"]
        normalize = bool(data[keys.normalize]) if keys.normalize else True
        if per_token == 1 and normalize:
            # Divided by its sum, a single gate is 1; that of a Transformer is the probability.
            raise self._beyond("num_experts_per_tok=1 and a gate that is divided by itself")
        ratio = _balance_ratio(per_token, data["num_hidden_layers"])
        return ExpertConfig(
            # Some versions write `num_local_experts` for every family.
            count=data.get(keys.count) or data["num_local_experts"],
            per_token=per_token,
            width=data[keys.width],
            normalize=normalize,
            balance=data["router_aux_loss_coef"] * ratio if adds else 0.0,
        )

    def _expert_keys(self, config: TransformerConfig) -> dict[str, Any]:
        keys = self.experts
        experts = config.experts
        if keys is None:
            require(config, self.name, {"experts": None})
            return {}
        if experts is None:
            raise UnsupportedError(
                f"a Transformer without experts cannot be saved as {self.name}; use another "
                "format, or 'native'",
                code="no-experts-for-format",
            )
        wanted = {"shared": 0, "bias_rate": 0.0, **({} if keys.normalize else {"normalize": True})}
        require(experts, self.name, wanted)
        if keys.normalize is None and experts.per_token == 1:
            raise UnsupportedError(
                f"a Transformer with experts.per_token=1 cannot be saved as {self.name}, which "
                "divides gates by their sum: a single gate would be 1, not its probability; use "
                "another format, or 'native'",
                code="field-not-in-format",
            )
        ratio = _balance_ratio(experts.per_token, config.num_layers)
        entries = {
            keys.count: experts.count,
            "num_experts_per_tok": experts.per_token,
            keys.width: config.expert_size,
            "output_router_logits": experts.balance > 0,
            "router_aux_loss_coef": experts.balance / ratio,
        }
        return entries | ({keys.normalize: experts.divides_gates} if keys.normalize else {})


_TURNS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast"),
}
_WINDOWS = {
    "": "no windows",
    "all": "a window in every layer",
    "listed": "windows of one size",
}


def _norm_parts(config: TransformerConfig) -> list[tuple[str, str]]:
    """Returns the parameters of a norm, as pairs (name in files, name in the model)."""
    return [({"scale": "weight"}.get(name, name), name) for name in NORMS[config.norm]]


def _rotary_fraction(rope: Mapping[str, Any], data: Mapping[str, Any]) -> float:
    """Returns the share of features that are rotated, by these parameters or else by the config."""
    share = rope.get("partial_rotary_factor", data.get("partial_rotary_factor"))
    return 1.0 if share is None else share


def _balance_ratio(per_token: int, num_layers: int) -> float:
    """Returns the ratio of the balance term of published models to that of a `Transformer`.

    Published models average over the tokens of all layers, and sum over the experts of a token: the
    term is `per_token` for balanced routing. A `Transformer` sums over layers, with 1 for each. So
    the weighted terms are equal for balanced routing, or if all layers have the same routing.
    """
    return per_token / num_layers


def block_rules(config: TransformerConfig, rows: Iterable[tuple[Any, ...]]) -> list[WeightRule]:
    """Makes the rules for the parameters of blocks, either a list of blocks or stacked blocks.

    Args:
        config: the config of the model; with `scan_layers`, blocks are stacked.
        rows: name, path or paths within a block, form, and the dim along which a fused tensor is
            split. The tensors of experts are stacked, after the dim of stacked layers.
    """
    start = "blocks/" if config.scan_layers else f"blocks/{{{LAYER}}}/"
    lead = (LAYER,) if config.scan_layers else ()
    rules = []
    for names, paths, form, *dim in rows:
        inside = (paths,) if isinstance(paths, str) else paths
        stack = (*lead, EXPERT) if f"(?P<{EXPERT}>" in names else lead
        inner = tuple(start + path for path in inside)
        rules.append(WeightRule(names, inner, form, dim=dim[0] if dim else 0, stack=stack))
    return rules


def sizes_of(config: TransformerConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Returns the sizes of a config by their keys in a family, with defaults resolved.

    Args:
        config: the config of the model.
        names: maps fields of a `TransformerConfig` to keys of `config.json`.
    """
    return {
        hub_name: getattr(config, RESOLVED.get(own_name, own_name))
        for own_name, hub_name in names.items()
    }


def require(config: object, family: str, wanted: Mapping[str, Any]) -> None:
    """Raises `UnsupportedError` unless fields or properties of a config have these values."""
    for field, value in wanted.items():
        if getattr(config, field) != value:
            raise UnsupportedError(
                f"a Transformer with {field}={getattr(config, field)!r} cannot be saved as "
                f"{family}, which has {field}={value!r}; use another format, or 'native'",
                code="field-not-in-format",
            )
