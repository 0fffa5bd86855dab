"""Checkpoints of earlier versions are read as they were written, on any mesh."""

import pathlib
import tomllib

import pytest

import axon_dist
from axon_dist.checkpoint import StateDictType, load_checkpoint, read_manifest
from tests.checkpoint.formats.write import FOLDER, state

ROOT = pathlib.Path(axon_dist.__file__).parents[1]
WRITTEN = sorted(path for path in FOLDER.glob("*/*") if path.parent.name != "__pycache__")


def test_there_is_one_checkpoint_of_each_type_of_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == axon_dist.__version__
    ours = {path.name for path in WRITTEN if path.parent.name == version}
    assert ours == {type.value for type in StateDictType}


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: f"{path.parent.name}-{path.name}")
@pytest.mark.parametrize("axes", ["dp=1", "dp=4"])
def test_it_loads_bit_for_bit(path, axes, place, bits, make_world):
    manifest = read_manifest(path)
    assert (manifest.format, manifest.type) == (1, StateDictType(path.name))
    assert manifest.versions["axon_dist"] == path.parent.name
    assert manifest.meta == {"step": 12, "version": path.parent.name}
    restored = load_checkpoint(path, place(state(), make_world(axes), abstract=True))
    assert bits(restored) == bits(state())
