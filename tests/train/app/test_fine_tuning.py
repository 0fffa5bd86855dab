"""Adapters on weights from files: from a config to the exported weights."""

import io
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from rich.console import Console

from axon_dist import merge_lora
from axon_dist.core.errors import CheckpointError, ConfigError
from axon_dist.models import Transformer
from axon_dist.ops.int8 import int8_form
from axon_dist.train.app import evaluate, generate_text, load_model, train
from axon_dist.train.app.evaluate import _placed_model
from axon_dist.train.app.run_model import find_checkpoint
from axon_dist.train.app.runs import Run
from axon_dist.train.app.steps import build_world
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig
from axon_dist.weights import load_weights, save_weights
from tests.drawn import drawn

MESH = {
    "mesh": "fsdp=2",
    "devices": {"emulate": 2},
    "parallel": {"full_shard": {"min_elements": 8}},
}


def tuned(tiny, tmp_path, **changes):
    """Returns a config with initial weights from a file, and the model with these weights."""
    tiny["model"] |= {"width": 16, "ffn_width": 32}
    sizes = RunConfig.from_dict(tiny).model
    base = drawn(lambda: Transformer(sizes, rngs=nnx.Rngs(7)))
    save_weights(base, tmp_path / "base.safetensors")
    lora = {"rank": 2, "paths": ["attention"]}
    weights = {"files": [str(tmp_path / "base.safetensors")]}
    train = tiny["train"] | {"ema": 0.5, "eval_every": 0, "global_batch": 4}
    plain = {**tiny, **MESH, "lora": lora, "weights": weights, "trainable": ["norm"]}
    return {**plain, "frozen_dtype": "int8", "train": train} | changes, base


def by_path(model):
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, keys)): np.asarray(x[...]) for keys, x in flat}


@pytest.mark.full
@pytest.mark.parametrize("is_measured", [False, True], ids=["", "and measured"])
def test_a_run_from_weights_to_weights(is_measured, tiny, tmp_path):
    plain, base = tuned(tiny, tmp_path)
    console = Console(file=io.StringIO(), width=200)
    first = {**plain, "train": plain["train"] | {"steps": 3}}
    train(RunConfig.from_dict(first), console)
    said = console.file.getvalue()
    assert "parameters (" in said
    assert "frozen in int8" in said
    assert "weights: from" in said
    run = train(RunConfig.from_dict(plain), resume="auto").directory.path

    model, config = load_model(run)
    assert yaml.safe_load((run / "config.yaml").read_text())["lora"]["rank"] == 2
    assert config == RunConfig.from_dict(plain)
    before, after = by_path(base), by_path(model)
    moved = {
        path
        for path in after
        if path not in before or not np.array_equal(before[path], after[path])
    }
    for path, leaf in before.items():
        form = int8_form(path, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        if "norm" not in path and form is not None:
            kept = form.narrow(jnp.asarray(leaf))
            np.testing.assert_array_equal(after[path], form.widen(kept["int8"], kept["scale"]))
            moved.discard(path)
    assert moved == {path for path in after if "norm" in path or "lora" in path}

    if is_measured:
        here, alone = evaluate(run), evaluate(run, one_device=True)
        np.testing.assert_allclose(here.metrics["loss"], alone.metrics["loss"], rtol=1e-5)
        texts = [generate_text(run, ["the quick"], 6, temperature=0, one_device=o) for o in (0, 1)]
        assert texts[0] == texts[1]

    out = tmp_path / "out.safetensors"
    assert main(["export", str(run), str(out)]) == 0
    exported = load_weights(lambda: Transformer(config.model, rngs=nnx.Rngs(0)), out)
    merged = merge_lora(model)
    jax.tree.map(np.testing.assert_array_equal, by_path(exported), by_path(merged))
    tokens = np.frombuffer(b"the quick brown ", np.uint8).astype(np.int32)[None]
    np.testing.assert_allclose(exported(tokens), model(tokens), rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_texts_are_drawn_in_the_precision_of_the_run(tiny):
    tiny |= {"precision": "bf16", "train": tiny["train"] | {"steps": 1, "eval_every": 0}}
    run = train(RunConfig.from_dict(tiny)).directory.path
    config = RunConfig.from_dict(tiny)
    model = _placed_model(find_checkpoint(run, config), config, build_world(config))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {
        jnp.dtype("bfloat16")
    }
    cache = model.start_cache(jnp.zeros(1, jnp.int32), 8)
    logits, cache = model.decode(jnp.ones((1, 3), jnp.int32), cache)
    assert {x.dtype for x in jax.tree.leaves(cache) if x.dtype.kind == "V"} == {
        jnp.dtype("bfloat16")
    }
    plain, _ = load_model(run)
    want = plain(jnp.ones((1, 3), jnp.int32))[:, -1]
    np.testing.assert_allclose(np.asarray(logits, np.float32), want, rtol=0.1, atol=0.02)


@pytest.mark.sample(
    "changes0-ConfigError-lora.rnk: there is no such key. Did you mean 'rank'",
    "changes7-ConfigError-lora.dropout: there is no such key",
    "changes1-ConfigError-the path 'attn', which finds none",
    "changes2-ConfigError-weights.file: there is no such key. .*'files'",
    "changes3-ConfigError-weights.files names no file",
    "changes4-ConfigError-no format 'hf-lama'.",
    "changes5-ConfigError-trainable='nrm' finds nothing in the model",
    "changes6-ConfigError-frozen dtype is 'int7'; it must be",
)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lora": {"rnk": 2}}, ConfigError, r"lora.rnk: there is no such key. Did you mean 'rank'"),
        ({"lora": {"paths": ["attn"]}}, ConfigError, r"the path 'attn', which finds none"),
        ({"weights": {"file": "a"}}, ConfigError, r"weights.file: there is no such key. .*'files'"),
        ({"weights": {"files": []}}, ConfigError, r"weights.files names no file"),
        ({"weights": {"files": "a", "format": "hf-lama"}}, ConfigError, r"no format 'hf-lama'."),
        ({"trainable": ["nrm"]}, ConfigError, r"trainable='nrm' finds nothing in the model"),
        ({"frozen_dtype": "int7"}, ConfigError, r"frozen dtype is 'int7'; it must be"),
        ({"lora": {"dropout": 0.1}}, ConfigError, r"lora.dropout: there is no such key"),
        ({"model": {"width": 32, "num_heads": 2}}, CheckpointError, r"do not fit the model"),
    ],
)
def test_unsupported_settings_are_refused_before_training(tiny, tmp_path, changes, error, message):
    plain, _ = tuned(tiny, tmp_path, **changes)
    with pytest.raises(error, match=message):
        train(RunConfig.from_dict(plain))


def test_files_with_fewer_bytes_than_what_is_frozen(tmp_path):
    file = str(tmp_path / "narrow.safetensors")
    save_weights(drawn(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))), file, dtype="bfloat16")
    said = []
    for dtype, asked in (("float32", None), ("bfloat16", None), ("float32", "float32")):
        model_spec = types.SimpleNamespace(
            frozen={"w": jax.ShapeDtypeStruct((2,), jnp.dtype(dtype))}
        )
        step: Any = types.SimpleNamespace(model_spec=model_spec)
        config: Any = types.SimpleNamespace(frozen_dtype=asked)
        said.append(Run(config, step, step, step)._dtype_line([file]))
    line = "the files are bfloat16; frozen_dtype: bfloat16 keeps frozen weights in it"
    assert said == [line, None, None]
