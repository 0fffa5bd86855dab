"""Exports a run to plain Flax and to a hub format, with the command."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file

from axon_dist.models import Transformer
from axon_dist.train.app import train
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig
from tests.weights.hub import llama_forward

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 16))


@pytest.mark.full
def test_a_run_goes_out_to_plain_flax_and_to_a_hub(tiny, tmp_path, capsys):
    done = train(RunConfig.from_dict(tiny))
    run, native = str(done.directory.path), tmp_path / "out.safetensors"
    assert main(["export", run, str(native)]) == 0
    assert capsys.readouterr().out == f"12 tensors (native) in {native}\n"

    sizes = RunConfig.from_dict(yaml.safe_load((done.directory.config).read_text())).model
    model: Any = Transformer(sizes, rngs=nnx.Rngs(3))
    arrays = load_file(native)
    filled = jax.tree_util.tree_map_with_path(
        lambda path, _: arrays[jax.tree_util.keystr(path, simple=True, separator="/")],
        nnx.to_pure_dict(nnx.state(model)),
    )
    nnx.update(model, filled)
    trained = jax.tree.map(np.asarray, done.result.state.params)
    jax.tree.map(np.testing.assert_array_equal, filled, trained)
    logits = model(jnp.asarray(TOKENS))

    hub = tmp_path / "hub"
    assert main(["export", run, str(hub), "--format", "hf-llama"]) == 0
    config = json.loads((hub / "config.json").read_text())
    want = llama_forward(load_file(hub / "model.safetensors"), TOKENS, config)
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-5)

    assert main(["export", run, str(hub), "--format", "hf-gpt2"]) == 2
    assert "norm='rms' cannot be saved as GPT-2, which has norm='layer'" in capsys.readouterr().err
    assert main(["export", run, str(hub), "--format", "hf-lama"]) == 2
    assert "no format 'hf-lama'. Did you mean 'hf-llama'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["runs/none", "x.safetensors"], "there is no run in 'runs/none'"),
        (["runs/none", "x", "--max-file", "much"], "size in bytes"),
    ],
)
def test_mistakes_are_one_line(arguments, text, capsys):
    assert main(["export", *arguments]) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1
