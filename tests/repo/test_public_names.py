"""Names that programs import stay where they were, wherever the code behind them moves."""

import importlib
import pathlib
import subprocess
import sys
import types

import pytest

import axon_dist

NAMES = [
    line.split()
    for line in pathlib.Path(__file__).with_name("public_names.txt").read_text().splitlines()
]
PLACES = sorted({place for place, _ in NAMES})
MOVED = [
    ("axon_dist.app", "train", "axon_dist.train.app"),
    ("axon_dist.cli.main", "main", "axon_dist.train.cli.main"),
    ("axon_dist.config", "load_config", "axon_dist.train.config"),
    ("axon_dist.loop", "Trainer", "axon_dist.train.loop"),
    ("axon_dist.loop", "byte_size", "axon_dist.train"),
    ("axon_dist.parallel", "LocalGather", "axon_dist.step.gather"),
    *(
        ("axon_dist.parallel", name, "axon_dist.wrappers")
        for name in ("DDP", "FSDP", "Pipeline", "PipelineStage", "StageChain", "ZeROOptimizer")
    ),
    ("axon_dist.parallel.wrappers", "DDP", "axon_dist.wrappers"),
    ("axon_dist.parallel.wrappers", "estimate", "axon_dist.parallel.memory"),
]
"""Old places that still have their names, a name each, and the places that have them now."""

RENAMED = [
    ("axon_dist.optim", "matrices", "decayed"),
    ("axon_dist.planner", "Arrangement", "Candidate"),
    ("axon_dist.optim", "matrices", "decayed"),
    ("axon_dist.planner", "StepTime", "StepCost"),
    ("axon_dist.planner", "arrange", "candidate_for"),
]
"""Places with names that are renamed, the old names and the new ones."""


@pytest.mark.parametrize("place", PLACES)
def test_every_public_name_is_found(place):
    module = importlib.import_module(place)
    names = [name for where, name in NAMES if where == place]
    assert names
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize(("old", "name", "new"), MOVED)
def test_an_old_place_forwards_its_names_and_warns(old, name, new):
    with pytest.warns(DeprecationWarning, match=f"{old}.{name} is found in {new} now"):
        value = getattr(importlib.import_module(old), name)
    assert value is getattr(importlib.import_module(new), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(importlib.import_module(old), "noth" + "ing")


@pytest.mark.parametrize(("place", "old", "new"), RENAMED)
def test_an_old_name_works_and_warns(place, old, new):
    module = importlib.import_module(place)
    with pytest.warns(DeprecationWarning, match=f"{place}.{old} is deprecated; use {new}"):
        value = getattr(module, old)
    assert value is getattr(module, new)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(module, "noth" + "ing")


@pytest.mark.parametrize("place", sorted({place for place, _, _ in RENAMED}))
def test_a_place_with_old_names_offers_no_name_of_how_they_are_kept(place):
    module = importlib.import_module(place)
    assert not hasattr(module, "renamed_names")


def test_the_top_lists_what_most_programs_need():
    kept = {name for place, name in NAMES if place == "axon_dist"}
    assert set(axon_dist.__all__) < kept
    assert dir(axon_dist) == sorted(axon_dist.__all__)


@pytest.mark.parametrize("package", ["axon_dist", "axon_dist.prove", "axon_dist.train"])
def test_a_stub_names_what_a_program_finds(package):
    """The stub is the list that type checkers read and that names are found by."""
    module = importlib.import_module(package)
    stub = pathlib.Path(module.__file__).with_suffix(".pyi").read_text()
    for name in {name for place, name in NAMES if place == package}:
        assert f" as {name}\n" in stub, name
        assert not isinstance(getattr(module, name), types.ModuleType)


IMPORTING = """
import os, sys
before = dict(os.environ)
import axon_dist
assert "jax" not in sys.modules, "importing the top imports JAX"
axon_dist.parallel.ddp
from axon_dist import schedule, World
import axon_dist.mesh
assert axon_dist.mesh.World is World
import axon_dist.train.cli.main
from axon_dist.core.compat import backend_started
assert not backend_started(), "importing starts a backend"
assert dict(os.environ) == before, "importing sets a variable"
"""


def test_importing_the_top_imports_no_other_module_and_importing_all_starts_nothing():
    """Neither a backend is started nor a variable of the environment set."""
    subprocess.run([sys.executable, "-c", IMPORTING], check=True, timeout=120)
    with pytest.raises(AttributeError, match="'axon_dist' has no attribute 'Wrold'"):
        getattr(axon_dist, "Wro" + "ld")
