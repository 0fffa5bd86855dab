import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

from axon_dist.core import tree
from axon_dist.core.errors import ConfigError, DTypeError
from axon_dist.models import PRESETS, ExpertConfig, Transformer, TransformerConfig, num_params


# One preset of each form, and what none has.
@pytest.mark.sample("tiny", "gpt2", "llama-8b", "own heads", "dropout")
@pytest.mark.parametrize(
    "config",
    [
        *(TransformerConfig.preset(name, scan_layers=True) for name in PRESETS),
        TransformerConfig(num_heads=4, num_kv_heads=1, head_dim=48, tied_head=True),
        TransformerConfig(width=64, num_heads=2, dropout=0.1),
    ],
    ids=[*PRESETS, "own heads", "dropout"],
)
def test_num_params_is_what_the_model_has(config):
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    assert num_params(config) == tree.num_params(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2-124m", 123.6e6),
        ("gpt2-medium", 355.1e6),
        ("gpt3-175b", 174.6e9),
        ("llama-8b", 8.03e9),
        ("llama-70b", 70.55e9),
        ("llama-405b", 405.85e9),
        ("8b", 8.03e9),
        ("7b", 6.74e9),
        ("1b", 1.345e9),
    ],
)
def test_presets_have_the_sizes_they_are_named_for(name, count):
    assert num_params(TransformerConfig.preset(name)) == pytest.approx(count, rel=1e-3)


def test_defaults_resolve():
    config = TransformerConfig(width=96, num_heads=6)
    assert (config.kv_heads, config.key_size, config.hidden_size) == (6, 16, 256)


def test_preset_changes_and_typos():
    assert TransformerConfig.preset("1b", dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"'llama8b'.*Did you mean 'llama-8b'\?"):
        TransformerConfig.preset("llama8b")
    with pytest.raises(ConfigError, match=r"no field 'num_layer'.*Did you mean 'num_layers'\?"):
        TransformerConfig.preset("tiny", num_layer=3)


def test_it_is_a_value():
    config = TransformerConfig.preset("tiny")
    assert hash(config) == hash(TransformerConfig.preset("tiny"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 3


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_layers": 0}, ConfigError, r"num_layers=0 must be at least 1"),
        ({"ffn_width": -4}, ConfigError, r"hidden_size=-4 must be at least 1"),
        ({"ffn_width": 0}, ConfigError, r"hidden_size=0 must be at least 1"),
        ({"experts": ExpertConfig(width=0)}, ConfigError, r"width=0 must be at least 1"),
        ({"width": 30}, ConfigError, r"width=30 does not divide by num_heads=4.*head_dim"),
        ({"num_kv_heads": 3}, ConfigError, r"num_heads=4.*num_kv_heads=3.*use a divisor"),
        ({"head_dim": 7}, ConfigError, r"heads of size 7 .*must be even"),
        ({"dropout": 1.0}, ConfigError, r"dropout=1.0 must be in \[0, 1\)"),
        ({"norm_eps": 0.0}, ConfigError, r"norm_eps=0.0 must be above 0"),
        ({"rope_theta": -1.0}, ConfigError, r"rope_theta=-1.0 must be above 0"),
        ({"attention": "flush"}, ConfigError, r"attention='flush'.*Did you mean 'flash'\?"),
        ({"logits": "hole"}, ConfigError, r"logits='hole' is not a way .*Did you mean 'whole'\?"),
        (
            {"logits_dtype": "bfloat16"},
            ConfigError,
            r"logits_dtype='bfloat16' is for chunked .* of 256 makes whole logits: set logits=",
        ),
        ({"dtype": "bfloat15"}, DTypeError, r"dtype='bfloat15' is not a dtype.*'bfloat16'"),
        ({"param_dtype": "int32"}, DTypeError, r"param_dtype='int32' must be a floating-point"),
    ],
)
def test_validate_names_value_and_remedy(fields, error, message):
    with pytest.raises(error, match=message):
        TransformerConfig(**fields).validate()


def test_logits_are_chunked_from_a_stated_size_on():
    assert not TransformerConfig(vocab_size=16_383).chunks_logits
    assert TransformerConfig(vocab_size=16_384).chunks_logits
    assert TransformerConfig(logits="chunked").chunks_logits
    assert not TransformerConfig(vocab_size=50_257, logits="whole").chunks_logits


def test_dtypes_may_be_given_as_jax_spells_them():
    TransformerConfig(dtype=jnp.bfloat16).validate()
