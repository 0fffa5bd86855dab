"""Adapters that peft made and a model here reads, and those that it wrote and peft reads.

Both ways the logits are equal, for every option of a `LoraConfig`; or the folder is refused, and
the error names the option and `merge_and_unload`.
"""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import AxonDistError
from axon_dist.models import Transformer
from axon_dist.nn import lora
from axon_dist.train.app import run_model
from axon_dist.train.app.steps import model_of
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig
from axon_dist.weights import hub_config, load_weights, save_adapters

families = pytest.importorskip("benchmarks.families")
peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
TIED = families.Row("hf-llama", "Llama", {"tie_word_embeddings": True, "num_hidden_layers": 2})
LLAMA = families.Row("hf-llama", "Llama", {"num_hidden_layers": 2})
BIASED = dataclasses.replace(
    LLAMA, changes={"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}
)
PHI = families.Row("hf-phi3", "Phi3", {"num_hidden_layers": 2})
GEMMA = families.Row("hf-gemma3", "Gemma3Text", {"num_hidden_layers": 2}, "Gemma3ForCausalLM")


@dataclasses.dataclass(frozen=True)
class Gpt2:
    """GPT-2, whose sizes have other names."""

    format: str = "hf-gpt2"

    def publish(self, folder):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).eval()
        model.save_pretrained(folder)
        return model


ATTENTION = ("attention/q", "attention/v")
QV = ["q_proj", "v_proj"]
RANKS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 7}}
FIRST = {"layers_to_transform": [0], "layers_pattern": "layers"}
OURS = {"alpha": 5}

# A model, options of peft, and those of `lora`: paths and more.
EQUAL = {
    "plain": (LLAMA, {"target_modules": QV}, ATTENTION, {}),
    "alpha here too": (LLAMA, {"target_modules": QV}, ATTENTION, OURS),
    "rslora": (LLAMA, {"target_modules": QV, "use_rslora": True}, ATTENTION, {}),
    "rslora here too": (
        LLAMA,
        {"target_modules": QV, "use_rslora": True},
        ATTENTION,
        {**OURS, "rslora": True},
    ),
    "patterns": (
        LLAMA,
        {"target_modules": QV, **RANKS},
        ATTENTION,
        {"rank_pattern": {"attention/q": 2}},
    ),
    "patterns here too": (
        LLAMA,
        {"target_modules": QV, **RANKS},
        ATTENTION,
        {**OURS, "rank_pattern": {"/q": 2}, "alpha_pattern": {"blocks/1/attention/v": 7}},
    ),
    "regex": (LLAMA, {"target_modules": r".*\.(q|v)_proj"}, ATTENTION, {}),
    "all-linear": (LLAMA, {"target_modules": "all-linear"}, ("attention", "mlp"), {}),
    "excluded": (
        LLAMA,
        {"target_modules": QV, "exclude_modules": r".*layers\.1.*"},
        ("blocks/0/attention/[qv]",),
        {},
    ),
    "one layer": (LLAMA, {"target_modules": QV, **FIRST}, ("blocks/0/attention/[qv]",), {}),
    "head": (LLAMA, {"target_modules": ["lm_head"]}, ("lm_head",), {}),
    "embeddings": (
        LLAMA,
        {"target_modules": ["embed_tokens", "q_proj"]},
        ("embedding", "/q"),
        OURS,
    ),
    "embeddings, tied": (TIED, {"target_modules": ["embed_tokens"]}, ("embedding",), {}),
    "embeddings, scaled": (GEMMA, {"target_modules": ["embed_tokens"]}, ("embedding",), {}),
    "modules": (
        LLAMA,
        {"target_modules": QV, "modules_to_save": ["lm_head", "embed_tokens", "norm"]},
        ATTENTION,
        {},
    ),
    "tokens": (LLAMA, {"target_modules": QV, "trainable_token_indices": [3, 40]}, ATTENTION, {}),
    "tokens, named": (
        LLAMA,
        {"target_modules": QV, "trainable_token_indices": {"embed_tokens": [3, 40]}},
        ATTENTION,
        {},
    ),
    "tokens, tied": (
        TIED,
        {"target_modules": QV, "trainable_token_indices": [3, 40]},
        ATTENTION,
        {},
    ),
    "biases of layers": (BIASED, {"target_modules": QV, "bias": "lora_only"}, ATTENTION, {}),
    "all biases": (BIASED, {"target_modules": QV, "bias": "all"}, ATTENTION, {}),
    "fused, phi3": (PHI, {"target_modules": ["qkv_proj", "o_proj"]}, ("attention",), {}),
    "fused, alpha": (PHI, {"target_modules": ["gate_up_proj"]}, ("mlp/(gate|up)",), OURS),
    "fused, gpt2": (
        Gpt2(),
        {"target_modules": ["c_attn"], "fan_in_fan_out": True},
        ("attention/[qkv]",),
        {},
    ),
    "fused, rslora": (
        Gpt2(),
        {"target_modules": ["c_attn"], "use_rslora": True, "fan_in_fan_out": True},
        ("attention/[qkv]",),
        {**OURS, "rslora": True},
    ),
    "gaussian": (LLAMA, {"target_modules": QV, "lora_dropout": 0.3}, ATTENTION, {}),
}


def moved(model):
    """Everything that peft trains, moved from its first values, which mostly change nothing."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def made(row, options, folder):
    """A snapshot, adapters of peft in a folder, and their logits."""
    base = row.publish(folder / "in")
    torch.manual_seed(1)
    adapted = moved(peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=5, **options)))
    adapted.save_pretrained(folder / "theirs")
    return families.logits_of(adapted)


def maker(folder, paths, options):
    config = hub_config(folder / "in")
    return lambda: lora(
        Transformer(config, rngs=nnx.Rngs(0)), 3, paths, rngs=nnx.Rngs(1), **options
    )


@pytest.mark.parametrize("name", EQUAL)
def test_both_ways_equal_logits(name, tmp_path):
    row, theirs, paths, ours = EQUAL[name]
    want = made(row, theirs, tmp_path)
    make = maker(tmp_path, paths, ours)
    model = load_weights(make, [tmp_path / "in", tmp_path / "theirs"], row.format)
    plain = load_weights(
        lambda: Transformer(hub_config(tmp_path / "in"), rngs=nnx.Rngs(0)),
        tmp_path / "in",
        row.format,
    )
    assert families.differ(model(families.TOKENS), want) < 1e-5
    assert families.differ(plain(families.TOKENS), want) > 1e-3
    # Of what peft trained besides, a plain model does not know that it was.
    more = {"modules": ("lm_head", "token_embedding", "norm")}.get(name, ())
    if name.startswith(("tokens", "biases", "all biases")):
        if name == "tokens, tied":
            return
        more = ("token_embedding",) if name.startswith("tokens") else ()
        if not more:
            return
    save_adapters(model, tmp_path / "ours", row.format, modules=more)
    auto = transformers.AutoModelForCausalLM
    base = auto.from_pretrained(tmp_path / "in", attn_implementation="eager").float()
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    assert families.differ(families.logits_of(again), want) < 1e-5
    read = load_weights(make, [tmp_path / "in", tmp_path / "ours"], row.format)
    assert families.differ(read(families.TOKENS), want) < 1e-5


def test_peft_reads_what_the_command_exports(tmp_path, monkeypatch):
    PHI.publish(tmp_path / "in")
    config = RunConfig.from_dict(
        {
            "model": {"hub": str(tmp_path / "in")},
            "lora": {"rank": 3, "alpha": 5, "paths": ["attention", "mlp/up"]},
            "trainable": ["final_norm"],
            "data": {"sequence_length": 16},
        }
    )
    make = lambda: model_of(config)
    model = load_weights(make, tmp_path / "in", PHI.format, keep=".*/lora/.*")
    rng = np.random.default_rng(0)
    for keys, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "lora" in keys or "final_norm" in keys:
            variable[...] = variable[...] + 0.1 * rng.normal(size=variable.shape)
    monkeypatch.setattr(run_model, "run_config", lambda *_, **__: config)
    monkeypatch.setattr(run_model, "load_model", lambda *_, **__: (model, config))
    assert main(["export", "run", str(tmp_path / "out"), "--adapters"]) == 0
    kept = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    auto = transformers.AutoModelForCausalLM
    base = auto.from_pretrained(
        kept["base_model_name_or_path"], attn_implementation="eager"
    ).float()
    plain = families.logits_of(base)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    want = model(families.TOKENS)
    assert families.differ(families.logits_of(again), want) < 1e-5
    assert families.differ(plain, want) > 1e-3


REFUSED = {
    "dora": ({"use_dora": True}, "use_dora"),
    "bias of B": ({"lora_bias": True}, "lora_bias"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights"),
    "replication": ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_adapter_settings_are_refused_by_name(name, tmp_path):
    options, key = REFUSED[name]
    made(LLAMA, {"target_modules": QV, **options}, tmp_path)
    with pytest.raises(AxonDistError, match=rf"{key}.*merge_and_unload"):
        load_weights(
            maker(tmp_path, ATTENTION, {}), [tmp_path / "in", tmp_path / "theirs"], "hf-llama"
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("megatron_config", {"a": 1}),
        ("use_qalora", True),
        ("alora_invocation_tokens", [1]),
        ("arrow_config", {"a": 1}),
        ("peft_type", "IA3"),
        ("some_key_of_tomorrow", 3),
    ],
)
def test_a_key_that_nobody_follows_is_refused(key, value, tmp_path):
    made(LLAMA, {"target_modules": QV}, tmp_path)
    file = tmp_path / "theirs" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(AxonDistError, match=rf"{key}.*merge_and_unload"):
        load_weights(
            maker(tmp_path, ATTENTION, {}), [tmp_path / "in", tmp_path / "theirs"], "hf-llama"
        )


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_head_that_is_tied_no_more_is_refused(module, tmp_path):
    made(TIED, {"target_modules": QV, "modules_to_save": [module]}, tmp_path)
    with pytest.raises(AxonDistError, match=r"no longer tied to the embeddings.*merge_and_unload"):
        load_weights(
            maker(tmp_path, ATTENTION, {}), [tmp_path / "in", tmp_path / "theirs"], "hf-llama"
        )


def test_a_layer_without_an_adapter_here_is_named(tmp_path):
    made(LLAMA, {"target_modules": ["q_proj", "o_proj"]}, tmp_path)
    with pytest.raises(AxonDistError, match=r"o_proj.*lora\(model, 3.*merge_and_unload"):
        load_weights(
            maker(tmp_path, ("attention/q",), {}),
            [tmp_path / "in", tmp_path / "theirs"],
            "hf-llama",
        )
