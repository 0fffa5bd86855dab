"""Families of decoders as transformers makes them: the same logits, the same training, and back.

Each family is a tiny random snapshot of the torch model there. Needs the extra `foreign`.
"""

import dataclasses

import numpy as np
import pytest

from axon_dist.weights import hub_config

families = pytest.importorskip("benchmarks.families")
MESHES, ROWS, TOKENS = families.MESHES, families.ROWS, families.TOKENS
differ, logits_of = families.differ, families.logits_of
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def published(request, tmp_path):
    """A name, a snapshot, and the torch model that it is of."""
    return request.param, tmp_path / "in", ROWS[request.param].publish(tmp_path / "in")


@pytest.mark.parametrize("published", ROWS, indirect=True)
@pytest.mark.parametrize("scan_layers", [False, True], ids=["listed", "stacked"])
def test_logits_and_the_way_back(published, scan_layers, tmp_path):
    name, folder, theirs = published
    model = families.loaded(name, folder, scan_layers)
    want = logits_of(theirs)
    assert np.abs(want).max() > 0.3
    assert differ(model(TOKENS), want) < 1e-4
    again = families.exported(name, model, tmp_path / "out")
    config = hub_config(folder, scan_layers=scan_layers)
    assert hub_config(tmp_path / "out") == dataclasses.replace(config, scan_layers=False)
    assert type(again) is type(theirs)
    assert differ(logits_of(again), want) < 1e-5


@pytest.mark.parametrize("published", ROWS, indirect=True)
def test_adapters_of_peft_and_for_peft(published, tmp_path):
    name, folder, theirs = published
    assert max(families.adapters(name, folder, tmp_path, theirs)) < 1e-5


@pytest.mark.parametrize("published", ROWS, indirect=True)
@pytest.mark.parametrize("mesh", MESHES)
def test_five_steps_are_those_of_torch(published, mesh, make_world):
    name, folder, theirs = published
    losses, logits = families.steps(name, mesh, folder, make_world)
    wanted = families.train(theirs)
    assert differ(losses, wanted) < 1e-4
    assert wanted[-1] < wanted[0]
    assert differ(logits, logits_of(theirs)) < 1e-4
