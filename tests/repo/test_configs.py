"""Every config, shrunk, trains to the numbers of one device: what `axon verify` checks."""

import pathlib

import jax
import pytest

from axon_dist.config import load_config, verify
from axon_dist.train import global_view

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.yaml"))
SMALL = [
    "model.width=32",
    "model.num_heads=4",
    "model.ffn_width=64",
    "model.max_length=32",
    "model.vocab_size=64",
    "data.sequence_length=16",
]


ALWAYS = ("quickstart", "fsdp8", "tp4_sp", "pp4")
"""One config of each kind; the others are of the whole table."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[] if path.stem in ALWAYS else [pytest.mark.full])
        for path in CONFIGS
    ],
    ids=lambda p: p.stem,
)
def test_config_equals_one_device(path):
    layers = [] if path.stem.startswith("pp") else ["model.num_layers=2"]
    found = verify(load_config(path, [*SMALL, *layers]), steps=2)
    assert found.passed, f"{found.worst} is beyond {found.tolerance}"


def test_a_wrong_gradient_is_noticed(monkeypatch):
    """A step whose gradients are one percent too long is not equal to one device."""
    quickstart = CONFIGS[0].parent / "quickstart.yaml"
    config = load_config(quickstart, [*SMALL, "model.num_layers=1", "train.clip_norm=null"])
    honest = global_view.gradient_means
    wrong = iter([_too_long(honest)])
    monkeypatch.setattr(global_view, "gradient_means", lambda *args: next(wrong, honest)(*args))
    assert not verify(config, steps=2).passed


def _too_long(gradient_means):
    def build(*args):
        run = gradient_means(*args)

        def gradients(*values):
            grads, metrics, buffers = run(*values)
            return jax.tree.map(lambda g: g * 1.01, grads), metrics, buffers

        return gradients

    return build
