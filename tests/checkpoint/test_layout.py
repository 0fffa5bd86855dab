from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.checkpoint.layout import (
    LeafSpec,
    differences,
    saved_names,
    staging_of,
    step_name,
    step_of,
)
from axon_dist.core.words import first_few

specs = st.builds(LeafSpec, st.sampled_from(["float32", "bfloat16"]), st.tuples(st.integers(0, 3)))
leaves = st.dictionaries(st.sampled_from("abcdef"), specs)


@given(st.integers(0, 10**12), st.integers(0, 10**7))
def test_names_say_their_step_and_sort_by_it(far, near):
    assert step_of(step_name(far)) == far
    assert (step_name(near) < step_name(near + 1)) is True


@pytest.mark.parametrize("name", ["step_", "step_1.tmp", "step_1.old.tmp", "xstep_1", "step_1x"])
def test_other_names_have_no_step(name):
    assert step_of(name) is None


def test_the_staging_folder_is_a_sibling_and_has_no_step():
    assert staging_of(Path("runs/a/step_00000001")) == Path("runs/a/step_00000001.tmp")


@given(leaves, leaves)
def test_every_leaf_that_differs_is_named_once(saved, wanted):
    found = differences(saved, wanted)
    paths = {path for path in saved | wanted if saved.get(path) != wanted.get(path)}
    assert sorted(sentence.split()[0] for sentence in found) == sorted(paths)
    assert not differences(saved, saved)


def test_a_list_counts_what_it_leaves_out():
    assert first_few(["a"]) == "a"
    assert first_few(list("abcd"), between="; ") == "a; b; c; and 1 more"


def test_a_chain_that_nothing_watched_is_not_renamed():
    """Only a watched optimizer had a clip, which has no leaves, before it in its chain."""
    wanted = ["opt_state/inner/0/mu", "params/inner/0/w"]
    watched = ["opt_state/inner/1/mu", "opt_state/steps", "params/inner/1/w"]
    assert saved_names(watched, wanted) == {
        "opt_state/inner/0/mu": "opt_state/inner/1/mu",
        "params/inner/0/w": "params/inner/0/w",
    }
    for saved in (["opt_state/inner/1/mu"], [*watched, "opt_state/inner/0/count"]):
        assert saved_names(saved, wanted) == {path: path for path in wanted}
