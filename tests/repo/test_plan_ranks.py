"""The plans of configs are the pinned ones, in their order, with the same bytes.

Where an estimator was meant to change, `python -m tests.repo.plan_ranks --write` pins anew.
"""

import pytest

from axon_dist.train.app import config_plans
from tests.repo.digests import jax_minor, read_pins, reason_to_skip
from tests.repo.plan_ranks import CONFIGS, PINS, ROOT, SMALLEST, ranks

REASON = reason_to_skip(PINS)
ADVICE = (
    "the plans are others than the pinned ones; if that was the aim, run "
    "python -m tests.repo.plan_ranks --write and say in the commit why"
)


@pytest.mark.full
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_plans_are_the_pinned_ones(name):
    assert ranks(name) == read_pins(PINS)["pins"][name][jax_minor()], ADVICE


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_the_simplest_plans_are_pinned_ones_in_their_order(monkeypatch):
    monkeypatch.setattr(config_plans, "MOST", 2)
    monkeypatch.setattr(config_plans, "FEW", 0)
    found = ranks(SMALLEST)
    assert len(found) == 2
    pinned = read_pins(PINS)["pins"][SMALLEST][jax_minor()]
    assert found == [line for line in pinned if line in found], ADVICE


def test_every_config_is_pinned_for_every_version():
    pins = read_pins(PINS)
    assert sorted(pins["pins"]) == sorted(CONFIGS)
    assert {tuple(row) for row in pins["pins"].values()} == {tuple(sorted(pins["made with"]))}
    assert all((ROOT / "configs" / f"{file}.yaml").is_file() for file, _, _ in CONFIGS.values())
