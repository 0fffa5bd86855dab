import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import (
    SCHEDULES,
    Costs,
    ScheduleSummary,
    Unavailable,
    compare,
    eager_1f1b,
    summarize,
)


def test_one_row_per_schedule():
    rows = compare(4, 8)
    assert [row.name for row in rows] == [str(name) for name in SCHEDULES]
    bubbles = {row.name: round(row.bubble, 3) for row in rows if isinstance(row, ScheduleSummary)}
    assert bubbles == {
        "gpipe": 0.273,
        "1f1b": 0.273,
        "eager_1f1b": 0.273,
        "interleaved_1f1b": 0.158,
        "looped_bfs": 0.158,
        "zero_bubble_h1": 0.111,
        "zero_bubble_h2": 0.111,
        "zero_bubble_v": 0.059,
        "interleaved_zero_bubble": 0.059,
        "dual_pipe_v": 0.059,
        "v_half": 0.143,
        "v_min": 0.186,
    }


def test_memory_is_in_whole_microbatches_and_slots_in_chunks():
    rows = {row.name: row for row in compare(4, 8)}
    assert rows["interleaved_1f1b"].peak_live == 5.5
    assert rows["interleaved_1f1b"].num_inputs == 11
    assert rows["zero_bubble_v"].peak_live == 4
    assert rows["zero_bubble_h1"].num_held == 4
    assert rows["1f1b"].num_held == 0


def test_a_schedule_that_cannot_be_built_says_why():
    rows = {row.name: row for row in compare(4, 6)}
    for name in ("interleaved_1f1b", "interleaved_zero_bubble"):
        row = rows[name]
        assert isinstance(row, Unavailable)
        assert "6 microbatches for 4 devices" in row.reason


def test_chunks_and_costs_reach_the_rows():
    rows = {row.name: row for row in compare(4, 8, chunks=4, costs=Costs(b=3))}
    assert rows["looped_bfs"].chunks == rows["interleaved_1f1b"].chunks == 4
    assert rows["zero_bubble_v"].chunks == 2
    assert rows["looped_bfs"].makespan == 8 * 4 + 3 * 4 / 4


def test_a_summary_has_both_readings():
    row = summarize(eager_1f1b(4, 8))
    assert (row.makespan, row.lockstep_makespan) == (33, 33)
    assert row.bubble == row.lockstep_bubble
    assert row.num_transfers == 48
    assert row.num_ticks == 14


def test_sizes_are_checked():
    with pytest.raises(ScheduleError, match="got num_devices=0"):
        compare(0, 8)
    with pytest.raises(ScheduleError, match="got chunks=0"):
        compare(4, 8, chunks=0)
