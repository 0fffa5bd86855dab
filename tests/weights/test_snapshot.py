"""Weights belong to one function: the `config.json` next to them is compared with the model."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist.core.errors import CheckpointError, ConfigError, UnsupportedError
from axon_dist.core.tree import leaves_with_paths
from axon_dist.models import (
    ExpertConfig,
    RopeScaling,
    Transformer,
    TransformerConfig,
    next_token_loss,
)
from axon_dist.models.formats import FORMATS
from axon_dist.models.meaning import meaning
from axon_dist.parallel import fsdp
from axon_dist.step import build_train_step
from axon_dist.weights import hub_config, load_weights, save_weights
from axon_dist.weights.files import find_tensors
from tests.drawn import drawn

from . import hub

OTHERS = {
    "rope_theta": 10_000.0,
    "norm_eps": 0.1,
    "num_heads": 8,
    "tied_head": True,
    "activation": "gelu",
    "norm": "layer",
    "bias": True,
    "vocab_size": 64,
    "num_layers": 1,
}


def factory(config):
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


@pytest.fixture
def folder(tmp_path):
    return hub.write(tmp_path, hub.LLAMA, hub.llama_tensors())


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_of_the_function_is_compared(field, folder):
    config = hub_config(folder, **{field: OTHERS[field]})
    with pytest.raises(ConfigError, match=rf"config.json': .*{field} is .* there"):
        load_weights(factory(config), folder, FORMATS["hf-llama"].rules(config))


def test_all_that_differs_is_said_and_what_to_do(folder):
    config = hub_config(folder, rope_theta=10_000.0, norm_eps=0.1)
    wanted = (r"norm_eps is 0.1 and 1e-05 there, rope_theta is 10000.0 and 500.0 there\. .*"
              r"model: {hub: .*}, in Python with hub_config\('.*'\); or list the f")  # fmt: skip
    for files in (folder, folder / "model.safetensors", [str(folder / "model.safetensors")]):
        with pytest.raises(ConfigError, match=wanted):
            load_weights(factory(config), files, "hf-llama")


@pytest.mark.full
def test_a_step_is_compared_too_and_what_is_to_differ_may(folder, make_world):
    config = hub_config(folder, rope_theta=10_000.0)
    step = build_train_step(
        factory(config), optax.sgd(0.1), next_token_loss, fsdp(), make_world("fsdp=2")
    )
    with pytest.raises(ConfigError, match="rope_theta is"):
        load_weights(step, folder, "hf-llama")
    state = load_weights(step, folder, "hf-llama", differ="rope_theta")
    np.testing.assert_array_equal(
        step.weights(state)["final_norm/scale"], hub.llama_tensors()["model.norm.weight"]
    )
    with pytest.raises(ConfigError, match=r"has no field 'rope_thetas'. Did you mean 'rope_theta'"):
        load_weights(step, folder, "hf-llama", differ="rope_thetas")


def test_differences_without_effect_are_allowed(folder):
    config = hub_config(
        folder, max_length=8, logits="chunked", scan_layers=True, attention="einsum"
    )
    config = dataclasses.replace(config, head_dim=None)
    load_weights(factory(config), folder, "hf-llama")


@pytest.mark.full
def test_a_config_that_cannot_be_compared(folder):
    config = hub_config(folder)
    file = folder / "config.json"
    rules = FORMATS["hf-llama"].rules(config)
    for text, error in (
        (json.dumps({**hub.LLAMA, "model_type": "granite"}), UnsupportedError),
        ("{", CheckpointError),
    ):
        file.write_text(text)
        with pytest.raises(error, match=r"config\.json"):
            load_weights(factory(config), folder, "hf-llama")
        load_weights(factory(config), folder, rules)  # the user defines what the tensors are
    file.unlink()
    load_weights(factory(config), folder, "hf-llama")


def test_native_weights_know_no_config(folder, tmp_path):
    model = drawn(factory(hub_config(folder)))
    save_weights(model, tmp_path / "native")
    load_weights(factory(hub_config(folder, rope_theta=7.0)), tmp_path / "native")


PLAIN = ("hf-llama", "hf-mistral", "hf-phi3")
"""The families whose files can store a plain Llama."""

PARTS = {
    "hf-llama": {"rope_scaling": RopeScaling("llama3")},
    "hf-mistral": {"windows": (4,)},
    "hf-qwen2": {"qkv_bias": True, "windows": (0, 4), "rope_scaling": RopeScaling("yarn")},
    "hf-qwen3": {"qk_norm": "head"},
    "hf-gemma2": {"norm": "rms_plus_one", "norms": "both", "windows": (4, 0), "tied_head": True,
                  "attention_softcap": 50.0, "logit_softcap": 30.0, "embedding_scale": 4.0,
                  "attention_scale": 0.3, "activation": "gelu"},
    "hf-gemma3": {"norm": "rms_plus_one", "norms": "both", "qk_norm": "head", "windows": (4, 0),
                  "local_rope_theta": 100.0, "embedding_scale": 4.0, "activation": "gelu",
                  "tied_head": True, "rope_scaling": RopeScaling("linear", 8.0)},
    "hf-phi3": {"rotary_fraction": 0.5},
    "hf-olmo2": {"norms": "after", "qk_norm": "all"},
    "hf-mixtral": {"experts": ExpertConfig(4, 2, balance=0.0)},
    "hf-qwen3-moe": {"qk_norm": "head", "experts": ExpertConfig(4, 2, 24, normalize=False)},
}  # fmt: skip


def of_family(name, **changes):
    sizes = TransformerConfig(vocab_size=48, width=16, num_layers=2, num_heads=4, num_kv_heads=2,
                              head_dim=8, ffn_width=24, max_length=32)  # fmt: skip
    return dataclasses.replace(sizes, **{**PARTS[name], **changes})


# Every family once. Whether layers are stacked is the model's, not the family's: both forms are
# tried with and without experts.
@pytest.mark.sample(
    *("hf-llama-stacked", "hf-mistral-listed", "hf-qwen2-stacked", "hf-qwen3-listed"),
    *("hf-gemma2-stacked", "hf-gemma3-listed", "hf-phi3-listed", "hf-olmo2-stacked"),
    *("hf-mixtral-listed", "hf-qwen3-moe-stacked"),
)
@pytest.mark.parametrize("scan_layers", [False, True], ids=["listed", "stacked"])
@pytest.mark.parametrize("name", PARTS)
def test_a_family_is_written_and_read_again(name, scan_layers, tmp_path):
    config = of_family(name, scan_layers=scan_layers)
    model = drawn(factory(config))
    save_weights(model, tmp_path, name)
    found = hub_config(tmp_path, scan_layers=scan_layers)
    assert meaning(found) == meaning(config)
    again = load_weights(lambda: Transformer(found, rngs=nnx.Rngs(1)), tmp_path, name)
    ours, theirs = (dict(leaves_with_paths(nnx.to_pure_dict(nnx.state(m)))) for m in (model, again))
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        np.testing.assert_array_equal(leaf, theirs[path], err_msg=path)
    assert set(PARTS) | {"hf-gpt2"} == set(FORMATS)


@pytest.mark.full
def test_a_model_of_one_family_is_not_loaded_nor_written_as_another(tmp_path):
    plain = of_family("hf-llama", rope_scaling=None)
    for name in ("hf-mistral", "hf-gemma2", "hf-llama", "hf-qwen3"):
        folder = tmp_path / name
        save_weights(factory(of_family(name))(), folder, name)
        with pytest.raises(ConfigError, match=r"(windows|norms|rope_scaling|qk_norm) is"):
            load_weights(factory(plain), folder, "hf-llama")
    for name in PARTS:
        if name not in PLAIN:
            with pytest.raises(
                UnsupportedError, match=r"cannot be saved as .*, which has|experts cannot be"
            ):
                save_weights(factory(plain)(), tmp_path / "out", name)
    with pytest.raises(
        UnsupportedError, match=r"with windows=\(4, 0\) cannot be saved as Mistral, which has"
    ):
        save_weights(factory(of_family("hf-mistral", windows=(4, 0)))(), tmp_path / "out",
                     "hf-mistral")  # fmt: skip


def gemma3(**fields):
    return dataclasses.replace(
        FORMATS["hf-gemma3"].from_hub(
            {
                "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                "head_dim": 8, "max_position_embeddings": 64,
            }
        ),
        **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"windows": (8, 0), "local_rope_theta": None, "rope_theta": 10_000.0},
        {"windows": (512, 0), "local_rope_theta": None, "rope_theta": 10_000.0},
        {"rope_scaling": RopeScaling("linear", 2.0, original_length=4096, low=2.0)},
    ],
)
def test_other_spellings_of_one_function_are_written(fields):
    config = gemma3(**{"windows": (0, 0), "local_rope_theta": None, **fields})
    family = FORMATS["hf-gemma3"]
    assert meaning(family.from_hub(family.to_hub(config))) == meaning(config)


def test_a_field_that_a_family_does_not_write_is_refused():
    """So a field that is added to the config cannot be lost in silence."""
    family = FORMATS["hf-llama"]
    config = TransformerConfig(vocab_size=32, width=16, num_layers=1, num_heads=2, norm_eps=0.5)
    family.to_hub(config)
    sizes = {name: key for name, key in family.sizes.items() if name != "norm_eps"}
    forgetful = dataclasses.replace(family, sizes=sizes)
    with pytest.raises(UnsupportedError, match=r"with norm_eps=0\.5 cannot be saved as") as error:
        forgetful.to_hub(config)
    assert error.value.code == "field-not-in-format"


def test_a_single_gate_is_a_probability_and_no_family_that_divides_it_stands_for_it():
    """Published models that divide gates by their sum have a gate of 1 with one expert each."""
    single = ExpertConfig(4, 1, 24)
    with pytest.raises(UnsupportedError, match=r"per_token=1 cannot be saved as Mixtral") as error:
        FORMATS["hf-mixtral"].to_hub(of_family("hf-mixtral", experts=single))
    assert error.value.code == "field-not-in-format"
    config = of_family("hf-qwen3-moe", experts=single)
    entries = FORMATS["hf-qwen3-moe"].to_hub(config)
    assert entries["norm_topk_prob"] is False
    assert meaning(FORMATS["hf-qwen3-moe"].from_hub(entries)) == meaning(config)


def test_experts_may_have_a_width_of_their_own():
    config = TransformerConfig(experts=ExpertConfig(4, 2, width=64))
    entries = FORMATS["hf-mixtral"].to_hub(config)
    assert entries["intermediate_size"] == 64
    again = FORMATS["hf-mixtral"].from_hub(entries)
    assert again.experts.width == 64
    assert meaning(again) == meaning(config)
    model, found = (nnx.eval_shape(factory(each)) for each in (config, again))
    assert jax.tree.map(jnp.shape, nnx.state(model)) == jax.tree.map(jnp.shape, nnx.state(found))


def test_a_model_of_another_kind_than_the_files_is_compared_too(folder, tmp_path):
    """Also where one of the two has no rotation, or no dense feed-forward."""
    plain = hub_config(folder)
    learned = dataclasses.replace(plain, positions="learned")
    with pytest.raises(ConfigError, match=r"rope_theta is None and 500.0 there, positions is"):
        load_weights(factory(learned), folder, FORMATS["hf-llama"].rules(plain))
    mixed = dataclasses.replace(plain, experts=ExpertConfig(4, 2))
    with pytest.raises(ConfigError, match=r"experts.count is 4 and None there"):
        load_weights(factory(mixed), folder, FORMATS["hf-llama"].rules(plain))


def test_a_window_beyond_the_longest_sequence_is_none(tmp_path):
    save_weights(drawn(factory(of_family("hf-mistral", windows=(16,)))), tmp_path, "hf-mistral")
    short = of_family("hf-mistral", windows=(), max_length=16)
    load_weights(factory(short), tmp_path, "hf-llama")
    with pytest.raises(ConfigError, match=r"windows is \(\) and \(16, 16\) there"):
        load_weights(factory(dataclasses.replace(short, max_length=17)), tmp_path, "hf-llama")


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("hf-gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("hf-qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("hf-qwen3-moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("hf-mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 and a gate"),
        ("hf-qwen3-moe", {"num_experts_per_tok": 1, "norm_topk_prob": True},
         "num_experts_per_tok=1 and a gate"),
        ("hf-gemma3", {"rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
        }}, "RoPE scaling in layers with a window"),
        ("hf-gemma3", {"rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        }}, "another partial_rotary_factor in layers with a window"),
        ("hf-phi3", {"rope_scaling": {"type": "longrope"}}, "of the kind 'longrope'"),
        ("hf-llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("hf-qwen2", {"use_sliding_window": True, "sliding_window": 4,
                      "layer_types": ["chunked_attention"] * 2}, "kind 'chunked_attention'"),
        ("hf-llama", {"partial_rotary_factor": 0}, "partial_rotary_factor=0"),
    ],
    ids=range(11),
)  # fmt: skip
def test_unsupported_hub_configs_are_refused(name, data, text, tmp_path):
    entries = FORMATS[name].to_hub(of_family(name))
    (tmp_path / "config.json").write_text(json.dumps(entries | data))
    with pytest.raises(UnsupportedError, match=text):
        hub_config(tmp_path)


def test_rotary_parameters_of_both_kinds_of_layers():
    family = FORMATS["hf-gemma3"]
    entries = family.to_hub(of_family("hf-gemma3", rope_scaling=None, local_rope_theta=5.0))
    for key in ("rope_theta", "rope_local_base_freq"):
        del entries[key]
    entries["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
    }
    found = family.from_hub(entries)
    assert (found.rope_theta, found.local_rope_theta) == (300.0, 7.0)
    assert found.rope_scaling == RopeScaling("linear", 8.0)


@pytest.mark.parametrize(
    ("name", "written"), [("hf-gemma2", 4096), ("hf-gemma3", 4096), ("hf-qwen3", None)]
)
def test_a_size_of_windows_is_written_where_transformers_needs_it_without_a_window(name, written):
    family = FORMATS[name]
    whole = of_family(name, rope_scaling=None, windows=(), local_rope_theta=None)
    entries = family.to_hub(whole)
    assert entries["sliding_window"] == written
    assert set(entries["layer_types"]) == {"full_attention"}
    assert family.from_hub(entries).windows == ()


def test_rotary_parameters_of_layers_with_a_window_are_ignored_where_there_is_no_such_layer():
    family = FORMATS["hf-gemma3"]
    whole = of_family("hf-gemma3", rope_scaling=None, windows=(), local_rope_theta=None)
    entries = family.to_hub(whole)
    for key in ("rope_theta", "rope_local_base_freq"):
        del entries[key]
    entries["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
    }
    found = family.from_hub(entries)
    assert (found.rope_theta, found.local_rope_theta, found.windows) == (300.0, None, ())
    kinds = ["sliding_attention"] * whole.num_layers
    with pytest.raises(UnsupportedError, match="separate rotary parameters for layers with"):
        family.from_hub({**entries, "layer_types": kinds, "sliding_window": None})


def test_two_sets_of_weights_in_a_folder_are_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    one, other = ({"w": np.full(2, x, np.float32)} for x in (1, 2))
    safetensors.save_file(one, tmp_path / "model.safetensors")
    safetensors.save_file(other, tmp_path / "model.fp16.safetensors")
    assert find_tensors(tmp_path)["w"].open()[0] == 1  # by name, as the hub's library does
    safetensors.save_file(other, tmp_path / "model-00001-of-00001.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(CheckpointError, match="two sets of weights") as caught:
        find_tensors(tmp_path)
    assert caught.value.code == "two-sets-of-weights"
    index.write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    assert find_tensors(tmp_path)["w"].open()[0] == 1
    index.unlink()
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"two sets of weights: model.safetensors and adap"):
        find_tensors(tmp_path)
