"""Fields by their old names: each still works, and warns."""

import dataclasses
import pickle

import pytest
from flax import nnx

from axon_dist import Pipeline
from axon_dist.models.weight_rules import WeightRule
from axon_dist.parallel import (
    PipelinePlan,
    Reduction,
    Rule,
    Strategy,
    diloco,
    expert_parallel,
    pipelined,
)
from axon_dist.schedule import build_schedule, compare, search

RENAMED = {
    "by_hand": (Reduction, {}, "manual", True),
    "resident": (Strategy, {"name": "ep"}, "ungathered_axes", ("ep",)),
    "slow": (Strategy, {"name": "diloco"}, "outer_loop", diloco("nodes", every=2).outer_loop),
    "keeps_residuals": (
        PipelinePlan,
        {"schedule": build_schedule("1f1b", 2, 2)},
        "saves_residuals",
        True,
    ),
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


@pytest.mark.parametrize("name", RENAMED)
def test_a_pickle_from_before_the_rename_loads(name):
    cls, others, new, value = RENAMED[name]
    expected = cls(**others, **{new: value})
    make, arguments, fields = expected.__reduce_ex__(4)[:3]
    of_old_class = {name.split()[0] if field == new else field: x for field, x in fields.items()}
    loaded = make(*arguments)
    loaded.__setstate__(of_old_class)
    assert loaded == expected
    assert pickle.loads(pickle.dumps(cls(**others))) == cls(**others)


@pytest.mark.parametrize("make", [pipelined, build_schedule, compare, search])
def test_an_old_keyword_of_a_function_warns_and_works(make):
    named = {"name": "1f1b"} if make is build_schedule else {}
    expected = make(**named, **_new_keywords(make), num_microbatches=4)
    with pytest.warns(DeprecationWarning, match=rf"{make.__name__}\(num_stages=...\) is depr"):
        assert make(**named, num_stages=2, num_microbatches=4) == expected
    with pytest.raises(TypeError, match=r"got num_\w+= and num_stages=, its old name"):
        make(**named, **_new_keywords(make), num_stages=2, num_microbatches=4)


def _new_keywords(make):
    return {"num_ranks": 2} if make is pipelined else {"num_devices": 2}


def test_the_old_keyword_of_a_pipeline_warns_and_works():
    net = nnx.Sequential(*(nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(2)))
    expected = Pipeline(net, num_ranks=2, num_microbatches=4).strategy
    with pytest.warns(DeprecationWarning, match=r"^Pipeline\(num_stages=...\) is deprecated; use"):
        pipe = Pipeline(net, num_stages=2, num_microbatches=4)
    assert pipe.strategy == expected
    assert pipe.num_stages() == 2
    with pytest.raises(TypeError, match=r"Pipeline\(\) got num_ranks= and num_stages="):
        Pipeline(net, num_ranks=2, num_stages=2)


def test_experts_are_never_gathered_over_their_axis():
    assert expert_parallel(axis="ep").ungathered_axes == ("ep",)
