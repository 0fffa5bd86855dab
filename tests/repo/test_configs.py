"""Every config, shrunk, trains to the numbers of one device: what `axon verify` checks."""

import pathlib

import jax
import pytest

from axon_dist.core.plain_yaml import read_yaml
from axon_dist.step import global_view
from axon_dist.train.app import verify
from axon_dist.train.app.verify import EXACT
from axon_dist.train.config import load_config

FOLDER = pathlib.Path(__file__).parents[2] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
RECIPES = sorted((FOLDER / "recipes").glob("*.yaml"))
SMALL = {
    "transformer": [
        "model.width=32",
        "model.num_heads=4",
        "model.num_kv_heads=4",
        "model.ffn_width=64",
        "model.max_length=32",
        "model.vocab_size=64",
        "data.sequence_length=16",
    ],
    "vit": [
        "model.width=32",
        "model.num_heads=4",
        "model.ffn_width=64",
        "model.num_classes=10",
        "model.patch_size=4",
        "model.image_size=8",
        "data.image_size=8",
    ],
    "resnet": [
        "model.stage_sizes=[2, 1]",
        "model.width=8",
        "model.num_classes=10",
        "data.image_size=32",
    ],
}
"""The sizes to which a model of each kind is shrunk."""
EIGHT_DEVICES = {
    "gpt3_175b_pp8_tp4_fsdp32": "mesh={pp: 2, fsdp: 2, tp: 2}",
    "vit_1b_fsdp16": "mesh={fsdp: 8}",
}
"""The meshes of recipes for more devices, the same axes; the others fit."""


def cases(paths):
    return [pytest.param(path, id=path.stem) for path in paths]


def small(path, *more):
    kind = read_yaml(path)["model"]["kind"]
    pipelined = "pipeline" in path.read_text()
    count = 4 if pipelined else 2
    layers = [] if kind == "resnet" else [f"model.num_layers={count}"]
    return load_config(path, [*SMALL[kind], *layers, *more])


@pytest.mark.parametrize("path", cases([*CONFIGS, *RECIPES]))
def test_config_is_accepted_as_it_is_and_shrunk(path):
    assert load_config(path).model is not None
    assert small(path).name == load_config(path).name


# The default run verifies a small model on text in `tests/train/config/test_user_code.py`, and
# compares every strategy with one device in `tests/contracts`.
@pytest.mark.full
@pytest.mark.parametrize("path", cases(p for p in CONFIGS if p.stem != "pp4_interleaved"))
def test_config_equals_one_device(path):
    found = verify(small(path), steps=2)
    assert found.passed, f"{found.worst} is beyond {found.tolerance}"


@pytest.mark.full
def test_interleaved_config_equals_one_device():
    found = verify(small(FOLDER / "pp4_interleaved.yaml", "model.num_layers=8"), steps=2)
    assert found.passed, f"{found.worst} is beyond {found.tolerance}"


@pytest.mark.full
@pytest.mark.parametrize("path", cases(RECIPES))
def test_recipe_equals_one_device(path):
    """The strategies and the axes of the recipe on eight devices, in float32."""
    mesh = [EIGHT_DEVICES[path.stem]] if path.stem in EIGHT_DEVICES else []
    more = ["devices.emulate=8", "precision=float32", "train.global_batch=32", *mesh]
    if "num_microbatches" in path.read_text():
        more.append("parallel.pipeline.num_microbatches=4")
    found = verify(small(path, *more), steps=2)
    assert found.tolerance == EXACT
    assert found.passed, f"{found.worst} is beyond {found.tolerance}"


@pytest.mark.full
def test_a_wrong_gradient_is_noticed(monkeypatch):
    """A step whose gradients are one percent too long is not equal to one device."""
    config = small(FOLDER / "quickstart.yaml", "model.num_layers=1", "train.clip_norm=null")
    honest = global_view.gradient_means
    wrong = iter([_too_long(honest)])
    monkeypatch.setattr(global_view, "gradient_means", lambda *args: next(wrong, honest)(*args))
    found = verify(config, steps=2)
    assert not found.passed
    assert 0 < max(row.rounding for row in found.params) < 1e-4


def _too_long(gradient_means):
    def build(*args):
        run = gradient_means(*args)

        def gradients(*values):
            found = run(*values)
            return found._replace(grads=jax.tree.map(lambda g: g * 1.01, found.grads))

        return gradients

    return build
