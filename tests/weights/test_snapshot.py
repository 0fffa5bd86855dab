"""Weights belong to one function: the `config.json` beside them is compared with the model."""

import dataclasses
import json

import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist.core.errors import CheckpointError, ConfigError, UnsupportedError
from axon_dist.models import Transformer, next_token_loss
from axon_dist.parallel import fsdp
from axon_dist.step import build_train_step
from axon_dist.weights import hub_config, load_weights, save_weights
from axon_dist.weights.formats import FORMATS

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
              r"hub_config\('.*'\); or name in differ=")  # fmt: skip
    for files in (folder, folder / "model.safetensors", [str(folder / "model.safetensors")]):
        with pytest.raises(ConfigError, match=wanted):
            load_weights(factory(config), files, "hf-llama")


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


def test_what_changes_no_function_may_differ(folder):
    config = hub_config(
        folder, max_length=8, logits="chunked", scan_layers=True, attention="einsum"
    )
    config = dataclasses.replace(config, head_dim=None)
    load_weights(factory(config), folder, "hf-llama")


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
        load_weights(factory(config), folder, rules)  # whose author says what the tensors are
    file.unlink()
    load_weights(factory(config), folder, "hf-llama")


def test_native_weights_know_no_config(folder, tmp_path):
    model = factory(hub_config(folder))()
    save_weights(model, tmp_path / "native")
    load_weights(factory(hub_config(folder, rope_theta=7.0)), tmp_path / "native")
