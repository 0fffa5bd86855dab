"""Policies follow their rule on every shape and mesh, and conflicts name both policies."""

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import DivisibilityError, StrategyConflictError
from axon_dist.mesh import MeshSpec
from axon_dist.sharding import ByRule, LargestDim, Merge, Replicate, axes_of, shard_count, spec_axes

MESH = MeshSpec(dp=2, fsdp=4, tp=2)
# Fewer than 2^20 elements: larger leaves prefer a dim of whole tiles.
SHAPES = st.lists(st.integers(1, 31), max_size=4).map(tuple)


def test_replicate_keeps_every_leaf_whole():
    decision = Replicate().decide("kernel", (8, 4), MESH)
    assert (decision.spec, decision.rule, decision.reason) == (P(), "replicate", "replicated")


@given(shape=SHAPES, min_elements=st.integers(1, 200))
def test_largest_dim_splits_the_largest_that_divides(shape, min_elements):
    spec = LargestDim(("fsdp",), min_elements)("w", shape, MESH)
    divisible = [size for size in shape if size % 4 == 0]
    only_even = LargestDim(("fsdp",), min_elements, pads=False)("w", shape, MESH)
    assert only_even == (spec if divisible else P())
    if math.prod(shape) < min_elements or max(shape, default=0) < 4:
        assert spec == P()
        return
    if not divisible:
        # At most one more row on each device, along the dim with the least padding.
        (dim,) = [dim for dim in range(len(spec)) if axes_of(spec, dim)]
        waste = {d: (-size % 4) / size for d, size in enumerate(shape) if size >= 4}
        assert waste[dim] == min(waste.values())
        return
    (dim,) = [dim for dim in range(len(spec)) if axes_of(spec, dim)]
    assert shape[dim] == max(divisible)
    assert shape[dim] not in shape[:dim]
    assert spec_axes(spec) == ("fsdp",)


@given(tiles=st.integers(32, 64), rows=st.integers(520, 600).map(lambda rows: 4 * rows))
def test_a_dim_of_whole_tiles_goes_before_a_larger_one(tiles, rows):
    """A tile has 8 rows, and there are 4 ranks; a small leaf is split along its largest dim."""
    rule = LargestDim(("fsdp",))
    for shape in ((rows, 32 * tiles), (32 * tiles, rows)):
        large = math.prod(shape) >= 2**20 and rows % 32
        of = 32 * tiles if large else max(shape)
        assert rule("w", shape, MESH) == (P("fsdp") if shape[0] == of else P(None, "fsdp"))
    assert rule("w", (rows, 32), MESH) == P("fsdp")


def test_a_claimed_dim_of_whole_tiles_is_left_to_its_owner():
    rule = LargestDim(("fsdp",), 1)
    assert rule("w", (2048, 2052), MESH) == P("fsdp")
    assert rule.decide("w", (2048, 2052), MESH, P("tp")).spec == P(None, "fsdp")


@given(shape=SHAPES)
def test_two_axes_split_one_dim_together(shape):
    spec = LargestDim(("dp", "fsdp"), 1)("w", shape, MESH)
    assert shard_count(spec, MESH) == (8 if any(size >= 8 for size in shape) else 1)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((4, 4), "stays whole: 16 elements are fewer than min_elements=100"),
        ((25, 9), "dim 0 of (25, 9) padded to 28 and split 4 ways"),
        ((1000, 1001), "dim 0 of (1000, 1001) split 4 ways"),
        ((9, 1001), "dim 1 of (9, 1001) padded to 1004 and split 4 ways"),
        ((3, 3, 3, 3, 2), "stays whole: no free dim of (3, 3, 3, 3, 2) has as many rows as fsdp=4"),
        ((100, 64), "dim 0 of (100, 64) split 4 ways"),
        ((2052, 2048), "dim 1 of (2052, 2048) split 4 ways"),
    ],
)
def test_the_reason_is_said(shape, reason):
    assert LargestDim(("fsdp",), 100).decide("w", shape, MESH).reason == reason


def test_a_dim_that_another_claims_is_not_free():
    assert LargestDim(("fsdp",), 1).decide("w", (64, 8), MESH, P("tp")).spec == P(None, "fsdp")


def test_an_axis_splits_an_array_once():
    decision = LargestDim(("fsdp",), 1).decide("w", (64, 8), MESH, P(None, "fsdp"))
    assert decision.spec == P()
    assert "over fsdp already" in decision.reason


def test_the_first_rule_that_matches_decides():
    rule = ByRule(((r"up/kernel$", P(None, "tp")), (r"kernel$", P("tp"))), label="tp")
    assert rule("0/up/kernel", (8, 8), MESH) == P(None, "tp")
    assert rule("0/down/kernel", (8, 8), MESH) == P("tp")
    assert rule.decide("0/up/bias", (8,), MESH).reason == "no rule matches"


def test_a_rule_for_a_dim_that_does_not_divide():
    rule = ByRule(((r"up", P(None, "tp")),))
    with pytest.raises(DivisibilityError, match=r"up: dim 1 of \(8, 9\).*tp=2.*among \[1, 3, 9\]"):
        rule("up", (8, 9), MESH)


def test_a_rule_with_more_dims_than_the_array():
    with pytest.raises(
        StrategyConflictError, match=r"names 2 dims, but the array of shape .8,. has"
    ):
        ByRule(((r"b", P(None, "tp")),))("b", (8,), MESH)


def test_a_rule_with_an_axis_that_the_mesh_lacks():
    said = r"b: .*'ep'.* names the axis 'ep', but the mesh has only .*fsdp.*; add this axis to"
    with pytest.raises(StrategyConflictError, match=said):
        ByRule(((r"b", P("ep")),))("b", (8,), MESH)


def test_flexible_policies_fill_what_fixed_ones_leave_free_in_any_order():
    tp = ByRule(((r"w", P(None, "tp")),), label="tp")
    data = LargestDim(("fsdp",), 1, "full_shard")
    for both in (Merge((tp, data)), Merge((data, tp))):
        decision = both.decide("w", (8, 64), MESH)
        assert decision.spec == P("fsdp", "tp")
        assert decision.rule == "tp + full_shard"
        assert both.split_axes == ("fsdp",)


def test_two_policies_on_one_dim_conflict():
    both = Merge((ByRule(((r"w", P("tp")),), "tensor"), ByRule(((r"w", P("dp")),), "rows")))
    with pytest.raises(
        StrategyConflictError,
        match=r"w: dim 0 of \(8, 8\) is claimed by 'tensor' \(tp\) and 'rows' \(dp\); leave the",
    ):
        both("w", (8, 8), MESH)


def test_one_axis_on_two_dims_conflicts():
    both = Merge((ByRule(((r"w", P("tp")),), "a"), ByRule(((r"w", P(None, "tp")),), "b")))
    with pytest.raises(StrategyConflictError, match=r"axis 'tp' is claimed for two dims.*by 'b'"):
        both("w", (8, 8), MESH)


def test_a_merge_that_splits_nothing_gives_the_last_reason():
    decision = Merge((Replicate(), LargestDim(("fsdp",), 100))).decide("w", (4,), MESH)
    assert decision.spec == P()
    assert "fewer than min_elements=100" in decision.reason


def test_the_flexible_part_looks_at_no_path():
    tp, data = ByRule(((r"w", P("tp")),)), LargestDim(("fsdp",), 1)
    assert Merge((tp, data)).flexible_part("w", (8, 8), MESH) == P("fsdp")
    assert tp.flexible_part("w", (8, 8), MESH) == P()


def test_specs_in_words():
    spec = P("dp", None, ("fsdp", "tp"))
    assert [axes_of(spec, dim) for dim in range(4)] == [("dp",), (), ("fsdp", "tp"), ()]
    assert spec_axes(spec) == ("dp", "fsdp", "tp")
    assert shard_count(spec, MESH) == 16
