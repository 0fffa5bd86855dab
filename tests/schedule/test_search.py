"""The search under lock step: valid, within memory, and never slower than what has a name."""

from contextlib import suppress
from itertools import chain
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import (
    SCHEDULES,
    STASH_ENDS,
    Costs,
    Phase,
    Schedule,
    build_schedule,
    for_stages,
    one_f_one_b,
    peak_live,
    search,
    simulate,
    summarize,
    validate,
)
from axon_dist.schedule.search import FillRule, greedy, retimed
from axon_dist.schedule.simulate import times_of

TIMES = st.sampled_from([0.5, 1.0, 1.2, 2.0, 3.0])


def memory_of(table):
    return max(peak_live(table, STASH_ENDS)) / table.chunks


def named(num_stages, num_microbatches):
    """The tables of all names that can be built, apart from the search's own list."""
    for name in SCHEDULES:
        with suppress(ScheduleError):
            yield build_schedule(name, num_stages, num_microbatches)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([(1, 2), (2, 2), (2, 5), (3, 3), (3, 4)]),
    costs=st.builds(Costs, f=TIMES, i=TIMES, w=TIMES, b=st.none() | TIMES),
    memory=st.sampled_from([2.0, 2.5, 3.0, inf]),
)
def test_never_slower_than_a_named_one(size, costs, memory):
    allowed = [table for table in named(*size) if memory_of(table) <= memory]
    if not allowed:
        with pytest.raises(ScheduleError, match=r"got memory=.*give at least that"):
            search(*size, costs, memory)
        return
    found = search(*size, costs, memory)
    validate(found.schedule)
    assert memory_of(found.schedule) == found.memory <= memory
    assert found.makespan == simulate(found.schedule, costs, lockstep=True).makespan
    fastest = min(simulate(table, costs, lockstep=True).makespan for table in allowed)
    assert found.makespan <= fastest * (1 + 1e-9)


def test_it_beats_the_named_ones_where_times_differ():
    costs, size = Costs(f=1, i=2, w=1), (4, 8)
    fastest = min(simulate(table, costs, lockstep=True).makespan for table in named(*size))
    found = search(*size, costs)
    assert found.makespan < fastest
    assert found.schedule.name == "searched"


def test_a_slow_last_stage_changes_what_is_best():
    # Two pieces per rank; the last is as slow as three others.
    costs = Costs(stage_weights=(1.0,) * 7 + (3.0,))
    found = search(4, 8, costs, chunks=2)
    own = for_stages(costs, found.schedule.num_stages)
    assert found.makespan == simulate(found.schedule, own, lockstep=True).makespan
    assert found.makespan >= max(simulate(found.schedule, own).work)
    with pytest.raises(ScheduleError, match="7 weights"):
        search(4, 8, Costs(stage_weights=(1.0,) * 7))


@pytest.mark.full
def test_less_memory_is_slower_and_too_little_is_refused():
    costs = Costs(f=1, i=1.2, w=0.8)
    spans = [search(4, 8, costs, memory).makespan for memory in (inf, 4, 3, 2)]
    assert spans == sorted(spans)
    with pytest.raises(ScheduleError, match=r"memory=0\.5 .* fewer than 2 microbatches"):
        search(4, 8, costs, memory=0.5)


def test_a_found_table_is_a_table_like_any_other():
    found = search(2, 4, Costs(f=1, i=2, w=1)).schedule
    again = Schedule.from_csv(found.to_csv(), found.name)
    assert (again.rows, again.placement) == (found.rows, found.placement)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 2) * 2, (0, 1, 2, 2, 1, 0), (0, 1) * 3])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_a_greedy_table_ends_with_as_little_memory_as_its_chunks(placement, splits, group):
    count = placement.count(0)
    shape = Schedule("x", 5, placement, ((),) * (1 + max(placement)))
    times = times_of(shape, Costs())
    for most in (count, count + 1, 2 * count):
        for forward_first in (False, True):
            rule = FillRule(placement, splits, 1.0, forward_first, group, most)
            table = greedy("x", 5, rule, times, inf)
            assert table is not None
            validate(table, max_live=most)
            assert all(
                len({action.phase for action in cell}) == len(cell) for cell in chain(*table.rows)
            )


@pytest.mark.parametrize("name", SCHEDULES)
def test_retiming_keeps_the_order_and_evens_the_cells(name):
    costs = Costs(f=1, i=2, w=1)
    table = build_schedule(name, 4, 8)
    for span in (1.0, 2.0, 4.0):
        other = retimed(table, times_of(table, costs), span)
        validate(other, max_live=peak_live(table, STASH_ENDS))
        assert all(other.order(d) == table.order(d) for d in range(4))


def test_the_best_executes_close_to_the_busiest_ranks_work():
    for costs in (Costs(), Costs(f=1, i=1.2, w=0.8), Costs(f=1, i=2, w=1)):
        assert summarize(build_schedule("interleaved_1f1b", 8, 64), costs).lockstep_slowdown <= 1.06
        # The flat default is what one stage per rank allows: M + S - 1 over M.
        assert summarize(build_schedule("eager_1f1b", 8, 64), costs).lockstep_slowdown == 71 / 64


@pytest.mark.full
def test_the_search_is_as_fast_within_1f1bs_memory():
    for costs in (Costs(), Costs(f=1, i=1.2, w=0.8), Costs(f=1, i=2, w=1)):
        found = search(8, 64, costs, memory=8)
        work = 64 * (costs.f + costs.of(Phase.B))
        assert found.makespan / work <= 1.13
        assert found.memory <= 8
        paper = simulate(one_f_one_b(8, 64), costs, lockstep=True).makespan
        assert found.makespan < 0.8 * paper
