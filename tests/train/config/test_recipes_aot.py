"""The recipes at full size, compiled for the machines that they are for: memory and bytes.

With P parameters, float32 parameters and two moments are 12 P bytes, and with the gradients 16 P,
over as many devices as the strategy splits them.
"""

import pathlib

import pytest

from axon_dist.mesh.targets import missing_compiler
from axon_dist.train.app import examine
from axon_dist.train.config import load_config

pytestmark = pytest.mark.aot
RECIPES = pathlib.Path(__file__).parents[3] / "configs" / "recipes"


def compiled(recipe, target):
    if missing := missing_compiler(target):
        pytest.skip(missing)
    found = examine(load_config(RECIPES / f"{recipe}.yaml"), target).report
    assert found.fits
    return found


def test_resnet50_reduces_its_gradients_once():
    """In addition only the statistics of BatchNorm are sent, and these are small."""
    found = compiled("resnet50_ddp8", "v5p:2x2x2")
    gradients = 2 * 7 / 8 * 2 * 25_557_032
    sent = found.collectives.total_wire_bytes()
    assert gradients <= sent <= 1.03 * gradients
    assert set(found.collectives.by_kind()) == {"all-reduce"}
    # Parameters and momentum, 4 bytes each, and a batch of bytes.
    assert found.memory.arguments == pytest.approx(8 * 25_557_032 + 32 * 224**2 * 3, rel=0.05)


@pytest.mark.parametrize(
    ("recipe", "target", "parameters", "ways"),
    [
        ("gpt2_medium_dp4_tp2", "h100:8", 355.1e6, 2),
        ("vit_1b_fsdp16", "h100:2x8", 1012.6e6, 16),
        pytest.param("vit_1b_pp4", "h100:8", 1012.6e6, 4, marks=pytest.mark.slow),
        pytest.param(
            "gpt3_175b_pp8_tp4_fsdp32", "v5p:8x8x16", 174.6e9, 1024, marks=pytest.mark.slow
        ),
    ],
)
def test_the_state_is_split_as_stated(recipe, target, parameters, ways):
    found = compiled(recipe, target)
    assert found.memory.arguments == pytest.approx(12 * parameters / ways, rel=0.03)
