import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import (
    SCHEDULES,
    Action,
    Phase,
    PlacedAction,
    Schedule,
    build_schedule,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)


def test_sizes_and_stages_of_a_chunked_table():
    table = interleaved_1f1b(4, 8, chunks=2)
    assert (table.num_stages, table.num_devices, table.chunks) == (8, 4, 2)
    assert table.stages_of(1) == (1, 5)
    assert zero_bubble_v(4, 8).stages_of(1) == (1, 6)
    assert one_f_one_b(4, 8).chunks == 1


def test_splits_backward():
    assert zero_bubble_h1(2, 2).splits_backward
    assert not one_f_one_b(2, 2).splits_backward


def test_the_forward_ticks_of_gpipe():
    table = gpipe(4, 4)
    tick = [(action.stage, action.microbatch) for cell in table.tick(3) for action in cell]
    assert tick == [(0, 3), (1, 2), (2, 1), (3, 0)]
    for num_microbatches, num_forward_ticks in [(4, 7), (8, 11)]:
        cells = map(gpipe(4, num_microbatches).tick, range(2 * num_forward_ticks))
        kinds = [{a.phase for cell in tick for a in cell} for tick in cells]
        assert kinds == [{Phase.F}] * num_forward_ticks + [{Phase.B}] * num_forward_ticks


def test_where_and_order():
    table = eager_1f1b(2, 3)
    assert table.where[Action.parse("1B0")] == PlacedAction(Action(1, Phase.B, 0), 1, 1, 1)
    assert " ".join(map(str, table.order(1))) == "1F0 1B0 1F1 1B1 1F2 1B2"
    assert len([*table.placed()]) == 12


def test_a_table_prints_its_sizes_and_its_grid():
    lines = str(one_f_one_b(2, 2)).splitlines()
    assert lines[0] == "1f1b: 2 stages on 2 devices, 2 microbatches, 6 ticks"
    assert lines[2].split() == ["device", "0", "0F0", "0F1", ".", "0B0", ".", "0B1"]
    assert lines[3].split() == ["device", "1", ".", "1F0", "1B0", "1F1", "1B1", "."]


def test_equal_tables_have_the_same_hash():
    assert gpipe(3, 4) == gpipe(3, 4)
    assert hash(gpipe(3, 4)) == hash(gpipe(3, 4))
    assert gpipe(3, 4) != gpipe(3, 5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip(name):
    table = build_schedule(name, 4, 8)
    assert Schedule.from_csv(table.to_csv(), name=name) == table


def test_csv_of_random_tables(random_table):
    for seed in range(200):
        table = random_table(seed)
        assert Schedule.from_csv(table.to_csv(), name="random") == table


def test_csv_is_one_line_per_device_and_joins_a_tick_by_plus():
    assert eager_1f1b(2, 2).to_csv() == "0F0,0F1,0B0,0B1\n,1F0+1B0,1F1+1B1,\n"


def test_csv_by_hand_may_have_blanks_and_short_lines():
    table = Schedule.from_csv("\n0F0, 0F1 ,,0B0,0B1\r\n \n,1F0 + 1B0,1F1+1B1\n\n")
    assert table.rows[1][3:] == ((), ())
    assert table.num_microbatches == 2
    assert table.placement == (0, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "without any action.*one line per device"),
        (",,\n,,\n", "without any action"),
        ("0F0,0X0", r"row 1, cell 2 of the CSV: got '0X0'.*such as 2F0"),
        ("0F0,0B0\n,1F0+", r"row 2, cell 2 of the CSV: got ''"),
        ("0F0,0B0\n,2F0", "stage 1 of 0..2 runs on no device"),
    ],
)
def test_csv_that_cannot_be_read(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(text)


def test_a_stage_on_two_devices_is_marked_in_the_grid():
    with pytest.raises(
        ScheduleError, match=r"stage 0 of 0\.\.0 runs on devices.*exactly one"
    ) as error:
        Schedule.from_csv("0F0,\n,0B0")
    assert "[0F0]" in str(error.value)
    assert "[0B0]" in str(error.value)


def test_rows_must_have_one_length_and_a_device_for_each_stage():
    with pytest.raises(ScheduleError, match=r"rows of \[1, 2\] ticks.*same length"):
        Schedule("odd", 1, (0, 1), (((),), ((), ())))
    with pytest.raises(ScheduleError, match=r"'odd' has 1 stages and 0 microbatches.*at least one"):
        Schedule("odd", 0, (0,), (((),),))
    with pytest.raises(ScheduleError, match=r"'odd' has 0 stages and 1 microbatches.*at least one"):
        Schedule("odd", 1, (), (((),),))
    with pytest.raises(ScheduleError, match=r"stage 1 on device 2.*has 1 rows.*0\.\.0"):
        Schedule("odd", 1, (0, 2), (((),),))
