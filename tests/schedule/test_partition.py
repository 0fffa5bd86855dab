from itertools import combinations, pairwise
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import partition, stage_ranges


def sizes(boundaries):
    return [len(layers) for layers in stage_ranges(boundaries)]


def test_stages_are_as_even_as_possible():
    assert sizes(partition(24, 4)) == [6, 6, 6, 6]
    assert sizes(partition(10, 4)) == [3, 3, 2, 2]
    assert partition(24, 4) == (0, 6, 12, 18, 24)
    assert stage_ranges((0, 2, 3)) == (range(0, 2), range(2, 3))


def test_a_long_chain_is_not_a_large_table():
    assert partition(20_000, 64)[-1] == 20_000
    assert partition(2**21, 2) == (0, 2**20, 2**21)


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([10, 20, 15, 5], 2, (0, 2, 4)),
        ([100, 200, 200], 2, (0, 2, 3)),
        ([50, 150, 200, 100], 2, (0, 2, 4)),
        ([100, 200, 200], 3, (0, 1, 2, 3)),
        ([1] * 10, 4, (0, 3, 6, 8, 10)),
        ([0, 0, 0], 2, (0, 2, 3)),
        ([9, 1, 1, 1, 1, 1], 3, (0, 1, 4, 6)),
    ],
)
def test_by_cost(costs, num_stages, expected):
    assert partition(len(costs), num_stages, costs) == expected


@settings(max_examples=300, deadline=None)
@given(data=st.data(), costs=st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_by_cost_is_the_best_of_all(data, costs):
    num_layers = len(costs)
    num_stages = data.draw(st.integers(1, num_layers))

    def price(boundaries):
        stages = [sum(costs[a:b]) for a, b in pairwise(boundaries)]
        return max(stages), sum(stage**2 for stage in stages)

    cuts = combinations(range(1, num_layers), num_stages - 1)
    best = min(price((0, *inner, num_layers)) for inner in cuts)
    found = partition(num_layers, num_stages, costs)
    assert price(found) == best
    assert min(sizes(found)) >= 1


@given(num_layers=st.integers(1, 60), data=st.data())
def test_equal_costs_are_the_even_partition(num_layers, data):
    num_stages = data.draw(st.integers(1, min(num_layers, 8)))
    assert partition(num_layers, num_stages, [2.5] * num_layers) == partition(
        num_layers, num_stages
    )


def test_explicit_boundaries_are_only_checked():
    assert partition(24, 4, boundaries=[0, 5, 12, 19, 24]) == (0, 5, 12, 19, 24)


@pytest.mark.parametrize(
    "boundaries", [[0, 12, 24], [0, 6, 6, 18, 24], [0, 6, 12, 18, 23], [1, 6, 12, 18, 24], []]
)
def test_boundaries_that_do_not_fit(boundaries):
    with pytest.raises(ScheduleError, match=r"boundaries \[.*5 rising.*from 0 to 24.*\[0, 6, 12"):
        partition(24, 4, boundaries=boundaries)


def test_more_stages_than_layers():
    with pytest.raises(ScheduleError, match=r"3 layers for 4 stages.*at most 3 stages"):
        partition(3, 4)


@pytest.mark.parametrize("costs", [[1, 2], [], [1, -1, 1], [1, 1, nan], [nan, -1, 1], [inf, 1, 1]])
def test_costs_that_do_not_fit(costs):
    with pytest.raises(
        ScheduleError, match=r"costs \[.*for 3 layers.*one cost per layer, each a fin"
    ):
        partition(3, 2, costs)


def test_costs_and_boundaries_exclude_each_other():
    with pytest.raises(ScheduleError, match=r"both costs and boundaries.*give one"):
        partition(3, 2, costs=[1, 1, 1], boundaries=[0, 1, 3])


def test_sizes_are_checked():
    with pytest.raises(ScheduleError, match="got num_stages=0"):
        partition(3, 0)
