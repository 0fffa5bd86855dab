"""The commands of the quickstart, with fewer steps and a smaller model."""

import json
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file

from axon_dist.models import Transformer
from axon_dist.train.cli.main import main
from axon_dist.train.config import RunConfig

QUICKSTART = pathlib.Path(__file__).parents[3] / "configs" / "quickstart.yaml"
SMALL = (
    "model.width=16", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2",
    "model.ffn_width=32", "optimizer.schedule.warmup_steps=1",
    "data.sequence_length=32", "train.steps=2", "train.global_batch=8", "train.eval_every=0",
)  # fmt: skip
PROMPT, COUNT = "def main(", 12


@pytest.mark.full
def test_quickstart_eval_generate_export_and_plain_flax(tmp_path):
    run, out = str(tmp_path / "run"), tmp_path / "out.safetensors"
    measured, written = tmp_path / "eval.json", tmp_path / "text.json"
    assert main(["train", str(QUICKSTART), *SMALL, f"run_dir={run}"]) == 0
    assert main(["eval", run, "--batches", "1", "--json", str(measured)]) == 0
    greedy = ["--tokens", str(COUNT), "--temperature", "0", "--json", str(written)]
    assert main(["generate", run, "--prompt", PROMPT, *greedy]) == 0
    assert main(["export", run, str(out)]) == 0

    found = json.loads(measured.read_text())["metrics"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))

    sizes = RunConfig.from_dict(
        yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    ).model
    model: Any = Transformer(sizes, rngs=nnx.Rngs(7))
    arrays = load_file(out)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    params = nnx.to_pure_dict(nnx.state(model))
    nnx.update(model, jax.tree_util.tree_map_with_path(lambda path, _: arrays[name(path)], params))
    tokens = list(PROMPT.encode())
    for _ in range(COUNT):
        tokens.append(int(np.argmax(model(jnp.asarray([tokens]))[0, -1])))
    (completion,) = json.loads(written.read_text())
    assert completion["prompt"] + completion["text"] == bytes(tokens).decode(errors="replace")
