"""User-defined rules: concatenating, splitting, stacking; all mismatches are named."""

import json
import re
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from axon_dist.core.errors import CheckpointError, ConfigError, UnsupportedError
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.models.weight_rules import shorten
from axon_dist.weights import (
    WeightRule,
    WeightRules,
    find_tensors,
    hub_config,
    load_weights,
    save_weights,
)

from . import hub


class Pair(nnx.Module):
    """Two layers; the first is fused."""

    def __init__(self, width=4):
        rngs = nnx.Rngs(0)
        self.both = nnx.Linear(3, 2 * width, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * width, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)


def arrays_of(model):
    state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))
    return {"both": np.asarray(state["both"]["kernel"]), **state["norm"]}


JOINED = WeightRules(
    (
        WeightRule(
            (r"a\.w", r"b\.w"), "both/kernel", "out in -> in out", dim=1, split_sizes=(3, 5)
        ),
        WeightRule(r"norm\.(?P<what>mean|var|scale|bias)", "norm/{what}"),
    )
)


def test_joined_parameters_are_split_again_with_their_statistics(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"a.w": rng.normal(size=(3, 3)), "b.w": rng.normal(size=(5, 3))}
    tensors |= {f"norm.{name}": rng.normal(size=8) for name in ("mean", "var", "scale", "bias")}
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    save_file(tensors, tmp_path / "in.safetensors")
    model = load_weights(Pair, tmp_path / "in.safetensors", JOINED)
    found = arrays_of(model)
    np.testing.assert_array_equal(found["both"], np.concatenate([tensors["a.w"], tensors["b.w"]]).T)
    np.testing.assert_array_equal(found["mean"], tensors["norm.mean"])
    save_weights(model, tmp_path / "out.safetensors", JOINED)
    again = {
        name: entry.open() for name, entry in find_tensors(tmp_path / "out.safetensors").items()
    }
    assert {name: x.tobytes() for name, x in again.items()} == {
        name: x.tobytes() for name, x in tensors.items()
    }


def llama(tmp_path, changed, cast=False, keep=(), differ=(), **fields):
    tensors = {name: x for name, x in hub.llama_tensors().items() if name not in changed}
    tensors |= {name: x for name, x in changed.items() if x is not None}
    folder = hub.write(tmp_path, hub.LLAMA, tensors)
    config = hub_config(folder, **fields)
    make = lambda: Transformer(config, rngs=nnx.Rngs(0))
    return load_weights(make, folder, "hf-llama", cast=cast, keep=keep, differ=differ)


UP = "model.layers.1.mlp.up_proj.weight"
NARROW = {name: x.astype(jnp.bfloat16) for name, x in hub.llama_tensors().items()}


@pytest.mark.parametrize(
    ("changed", "fields", "text"),
    [
        ({UP: None}, {}, "missing in the files: blocks/1/mlp/up/kernel."),
        ({}, {"num_layers": 3}, "missing in the files: blocks/2/"),
        ({}, {"num_layers": 1}, "left over: model.layers.1.input_layernorm.weight, "),
        ({"more": np.ones(1, np.float32)}, {}, "left over: more."),
        ({UP: np.ones((3, 2), np.float32)}, {},
         f"{UP} [3, 2] of the files as 'out in -> in out' cannot be blocks/1"),
        ({UP: np.ones(3, np.float32)}, {}, f"{UP} is [3]: the form 'out in -> in out' has 2"),
        ({UP: hub.llama_tensors()[UP].astype(np.float16)}, {},
         f"{UP} is float16 and blocks/1/mlp/up/kernel is float32 (cast=True converts)"),
        ({UP: np.ones((24, 16), np.int8)}, {}, "is int8 and blocks/1/mlp/up/kernel is float32 (on"),
        ({}, {"tied_head": True}, "lm_head.weight must equal model.embed_tokens.weight bit"),
        ({"layers.1.mlp.up_proj.weight": hub.llama_tensors()[UP]}, {},
         "are for blocks/1/mlp/up/kernel"),
        ({UP: None}, {"scan_layers": True}, f"missing in the files: {UP}."),
    ],
    ids=range(11),
)  # fmt: skip
def test_mismatches_are_named_before_an_array_is_made(changed, fields, text, tmp_path):
    with (
        mock.patch("axon_dist.weights.load.place", side_effect=AssertionError),
        pytest.raises(CheckpointError, match=re.escape(text)),
    ):
        llama(tmp_path, changed, differ=tuple(fields), **fields)


@pytest.mark.full
def test_casting_is_asked_for_and_kept_arrays_are_named(tmp_path):
    model = llama(tmp_path, NARROW, cast=True)
    assert model.lm_head.kernel[...].dtype == jnp.float32
    np.testing.assert_array_equal(
        model.lm_head.kernel[...], NARROW["lm_head.weight"].T.astype(np.float32)
    )
    first = Transformer(model.config, rngs=nnx.Rngs(0))
    kept = llama(tmp_path, {UP: None}, keep=r"blocks/1/mlp/up/.*")
    # Initialized in a compiled program, whose rounding differs in some versions of JAX.
    np.testing.assert_allclose(
        kept.blocks[1].mlp.up.kernel[...], first.blocks[1].mlp.up.kernel[...], rtol=1e-6
    )
    assert not np.array_equal(kept.lm_head.kernel[...], first.lm_head.kernel[...])


def test_a_head_that_repeats_the_embeddings_is_not_needed_twice(tmp_path):
    head = {"lm_head.weight": hub.llama_tensors()["model.embed_tokens.weight"]}
    model = llama(tmp_path, head, differ="tied_head", tied_head=True)
    assert not hasattr(model, "lm_head")


def test_names_in_few_words():
    names = ["norm", "ln_1", "ln_2", *(f"h.{i}.ln_1" for i in (0, 1, 2, 5)), "a.1.2", "a.2.3"]
    assert shorten(names) == "norm, ln_1, ln_2, h.*.ln_1 (0-2, 5), a.*.* (2 of them)"
    assert shorten(map(chr, range(97, 107))).endswith("h, and 2 more kinds")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (WeightRule(("a", "b"), ("c", "d")), "has 2 names and 2 paths; give one name, or one path"),
        (
            WeightRule(r"a(?P<i>\d+)", "b"),
            "the path 'b' has the fields [], but the name 'a(?P<i>\\\\d+)' has",
        ),
        (WeightRule("a", "b", stack="i"), "the name 'a' has no group 'i' to stack"),
        (WeightRule("a(", "b"), "'a(' is not a regular expression"),
        (WeightRule("a", "b", "x -> y"), "must name every dim once on each side"),
        (WeightRule("a", "b", dim=-1), "has dim=-1; count dims from 0"),
        (
            WeightRule("a", "b", split_sizes=(1, 2)),
            "has split_sizes=(1, 2); give a length for each name",
        ),
    ],
    ids=range(7),
)
def test_a_rule_that_means_nothing(rule, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        WeightRules((rule,)).validate()


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ((WeightRule("bias", "bias"),), "no rule gives a name for kernel"),
        (
            (WeightRule("x.y", "bias"), WeightRule("k", "kernel")),
            "'x.y' of a rule matches more than one text",
        ),
        (
            (WeightRule(".*", "bias"), WeightRule("k", "kernel")),
            "'.*' of a rule matches more than one text",
        ),
        (
            (
                WeightRule(r"(?P<n>[a-z]+)", "z{n}"),
                WeightRule("k", "kernel"),
                WeightRule("b", "bias"),
            ),
            "would write 'b', which the rule (?P<n>[a-z]+) -> z{n} reads",
        ),
        (
            (WeightRule("w", "kernel"), WeightRule("w", "bias")),
            "'w', which the rule w -> kernel reads",
        ),
        (
            (WeightRule("w", ("kernel", "more")), WeightRule("b", "bias")),
            "needs more, which the model does not have",
        ),
        (
            (WeightRule(("k", "l"), "kernel", dim=1), WeightRule("b", "bias")),
            "split_sizes [1, 1] do not add up to the length 3",
        ),
    ],
    ids=range(7),
)
def test_outputs_that_cannot_be_written_raise(rules, text, tmp_path):
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=re.escape(text)):
        save_weights(layer, tmp_path / "w.safetensors", WeightRules(rules))
    assert not list(tmp_path.iterdir())


def test_large_weights_are_cut_into_files_and_never_mixed(tmp_path):
    config = TransformerConfig(vocab_size=32, width=16, num_layers=2, num_heads=2, ffn_width=16)
    model = Transformer(config, rngs=nnx.Rngs(0))
    keys = {"eos_token_id": [2, 3]}
    save_weights(model, tmp_path / "hub", "hf-llama", max_file=3500, dtype="bfloat16", keys=keys)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["eos_token_id"] == [2, 3]
    with pytest.raises(ConfigError, match=r"got keys=.* without a hub format"):
        save_weights(model, tmp_path / "w.safetensors", keys=keys)
    names = sorted(path.name for path in (tmp_path / "hub").iterdir())
    assert names[:2] == ["config.json", "model-00001-of-00003.safetensors"]
    assert names[-1] == "model.safetensors.index.json"
    assert hub_config(tmp_path / "hub").param_dtype == "float32"
    back = load_weights(lambda: Transformer(config, rngs=nnx.Rngs(1)), tmp_path / "hub", "hf-llama",
                        cast=True)  # fmt: skip
    rounded = model.lm_head.kernel[...].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(back.lm_head.kernel[...], rounded)
    with pytest.raises(ConfigError, match=r"has other weights, model-00001-of-00003"):
        save_weights(model, tmp_path / "hub", "hf-llama")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config.json' exists, but is not the config of these"):
        save_weights(model, tmp_path / "w.safetensors", "hf-llama")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(CheckpointError, match=r"has 0 files \*.safetensors.index.json and 0 files"):
        find_tensors(tmp_path)
    save_file({"w": np.ones(4)}, tmp_path / "a.safetensors")
    save_file({"w": np.ones(4)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"w is in '.*a.safetensors' and in '.*b.safe"):
        find_tensors([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])
    with pytest.raises(CheckpointError, match=r"and 2 files \*.safetensors, of 2 files \(a.safet"):
        find_tensors(tmp_path)
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=r"arrays end at byte 96 of a file of 95, which"):
        find_tensors(tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"v": "b.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"has v in 'b.safetensors', which lacks it"):
        find_tensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"as the index of safetensors files: KeyError\('weight_map'"
    ):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {**hub.LLAMA, "rope_scaling": {"rope_type": "longrope"}},
            "RoPE scaling of the kind 'longrope'",
        ),
        ({**hub.LLAMA, "hidden_act": "mish"}, "hidden_act='mish'"),
        ({**hub.LLAMA, "attention_bias": True}, "attention_bias=True and mlp_bias=False"),
        (
            {**hub.GPT2, "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx",
        ),
        ({**hub.GPT2, "activation_function": "mish"}, "activation_function='mish'"),
        (
            {"model_type": "bert"},
            "is of the family 'bert'; the supported families are gpt2, llama, mistral, qwen2",
        ),
    ],
    ids=range(6),
)
def test_a_model_that_would_compute_something_else_is_refused(data, text, tmp_path):
    hub.write(tmp_path, data, {"w": np.ones(1)})
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        hub_config(tmp_path)


def test_a_format_is_of_a_transformer():
    with pytest.raises(ConfigError, match=r"'hf-llama' needs a Transformer, but the model is"):
        load_weights(Pair, "nowhere", "hf-llama")


@pytest.mark.parametrize("kind", [np.float32, jnp.float32, np.dtype("float32"), "f4"])
def test_a_config_names_dtypes_and_numbers_of_any_library(kind, tmp_path):
    config = TransformerConfig(
        vocab_size=32, width=16, num_layers=1, num_heads=2, ffn_width=16, param_dtype=kind
    )
    model = Transformer(config, rngs=nnx.Rngs(0))
    keys = {"eos_token_id": [np.int64(2), 3], "bos_token_id": jnp.int32(1)}
    save_weights(model, tmp_path / "kept", "hf-llama", keys=keys)
    save_weights(model, tmp_path / "narrow", "hf-llama", dtype=jnp.bfloat16, keys=keys)
    for name, dtype in (("kept", "float32"), ("narrow", "bfloat16")):
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert written["torch_dtype"] == dtype
        assert (written["eos_token_id"], written["bos_token_id"]) == ([2, 3], 1)


@pytest.mark.parametrize(
    ("kept", "dtype"), [("nothing", "bfloat16"), ("token_embedding", "float32")]
)
def test_a_config_names_the_dtype_that_most_bytes_of_the_weights_have(kept, dtype, tmp_path):
    config = TransformerConfig(vocab_size=256, width=16, num_layers=1, num_heads=2, ffn_width=16)
    model = Transformer(config, rngs=nnx.Rngs(0))
    for path, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param) and kept not in path:
            variable.set_value(variable[...].astype(jnp.bfloat16))
    save_weights(model, tmp_path, "hf-llama")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype


def test_a_config_that_cannot_be_written_leaves_no_weights(tmp_path):
    config = TransformerConfig(vocab_size=32, width=16, num_layers=1, num_heads=2, ffn_width=16)
    model = Transformer(config, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"config.json cannot hold keys=.* is a set"):
        save_weights(model, tmp_path, "hf-llama", keys={"eos_token_id": {2}})
    assert not list(tmp_path.iterdir())


class SlashInKey(nnx.Module):
    def __init__(self):
        one, other = nnx.Param(jnp.zeros(1)), nnx.Param(jnp.ones(1))
        self.p = nnx.Dict({"a/b": one, "a": nnx.Dict({"b": other})})


def test_two_arrays_of_one_path_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"two arrays have the path 'p/a/b'"):
        save_weights(SlashInKey(), tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
    save_weights(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"two arrays have the path 'p/a/b'"):
        load_weights(SlashInKey, tmp_path / "w.safetensors")
