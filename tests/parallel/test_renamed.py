"""Fields by their old names: each still works, and warns."""

import dataclasses

import pytest

from axon_dist.models.weight_rules import WeightRule
from axon_dist.parallel import Reduction, Rule, Strategy, expert_parallel

RENAMED = {
    "by_hand": (Reduction, {}, "manual", True),
    "resident": (Strategy, {"name": "ep"}, "ungathered_axes", ("ep",)),
    "unit": (Rule, {"pattern": "q$", "mode": "column"}, "multiple_of", 16),
    "parts": (Rule, {"pattern": "qkv$", "mode": "column"}, "num_fused", 3),
    "parts of a weight": (
        WeightRule,
        {"names": ("a", "b"), "paths": "c"},
        "split_sizes",
        (1, 2),
    ),
}


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_field_name_warns_and_sets_the_new_field(name):
    cls, others, new, value = RENAMED[name]
    old = name.split()[0]
    expected = cls(**others, **{new: value})
    with pytest.warns(DeprecationWarning, match=f"{cls.__name__}.{old} is deprecated; use {new}"):
        made = cls(**others, **{old: value})
    assert made == expected
    with pytest.warns(DeprecationWarning, match=f"use {new}"):
        assert getattr(expected, old) == value
    with pytest.warns(DeprecationWarning, match=f"use {new}"):
        replaced = dataclasses.replace(cls(**others), **{old: value})
    assert replaced == expected


def test_experts_are_never_gathered_over_their_axis():
    assert expert_parallel(axis="ep").ungathered_axes == ("ep",)
