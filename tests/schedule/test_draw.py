import re

import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import (
    SCHEDULES,
    Costs,
    build_schedule,
    draw,
    eager_1f1b,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
    zero_bubble_v,
)


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_drawing_by_ticks():
    assert draw(eager_1f1b(2, 2)).splitlines() == [
        "eager_1f1b: 2 stages on 2 devices, 2 microbatches, 4 ticks",
        "         0     1     2     3",
        "device 0 |F0   |F1   |B0   |B1   |",
        "device 1       |F0|B0|F1|B1|",
        "F forward   B backward",
    ]


def test_time_is_to_scale():
    table = one_f_one_b(2, 2)
    lines = draw(table, simulate(table, Costs(b=3))).splitlines()
    assert lines[0].endswith("makespan 12, bubble 33.3%")
    assert lines[3].rstrip() == "device 1    |F0|B0      |F1|B1      |"


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("timed", [False, True])
def test_every_action_is_drawn_once(name, timed):
    table = build_schedule(name, 4, 8)
    text = draw(table, simulate(table) if timed else None)
    rows = [line for line in text.splitlines() if line.startswith("device")]
    for device, row in enumerate(rows):
        drawn = re.findall(r"\|([0-9]*[EFVBIWG][0-9]+)", row)
        actions = [str(a) if table.chunks > 1 else str(a)[1:] for a in table.order(device)]
        assert drawn == actions


def test_color_changes_nothing_but_the_color():
    table = zero_bubble_v(2, 3)
    assert plain(draw(table, color=True)) == draw(table)
    assert "\x1b[" not in draw(table)
    # The two chunks of one phase have two shades.
    assert len(set(re.findall(r"\x1b\[30;48;5;(\d+)m", draw(table, color=True)))) == 6


def test_long_rows_continue_below():
    table = zero_bubble_h1(2, 16)
    text = draw(table, width=60)
    # 12 ticks of 4 columns each.
    assert max(map(len, text.splitlines()[1:])) == 9 + 48
    rows = [line[9:].ljust(48) for line in text.splitlines() if line.startswith("device 0")]
    whole = next(line[9:] for line in draw(table).splitlines() if line.startswith("device 0"))
    assert "".join(rows).rstrip() == whole


def test_the_legend_names_only_what_is_used():
    assert draw(one_f_one_b(2, 2)).splitlines()[-1] == "F forward   B backward"
    last = draw(zero_bubble_h1(2, 2)).splitlines()[-1]
    assert last == "F forward   I input gradient   W weight gradient"


def test_actions_without_time_take_no_width():
    table = zero_bubble_h1(2, 2)
    assert "|W" not in draw(table, simulate(table, Costs(w=0)))


def test_rows_break_where_the_ruler_has_a_number():
    table = one_f_one_b(4, 8)
    lines = draw(table, simulate(table), width=80).splitlines()
    rulers = [
        line.split() for line in lines if line.lstrip()[:1].isdigit() and "device" not in line
    ]
    assert [int(number) for ruler in rulers[:2] for number in ruler] == list(range(33))
    assert max(map(len, lines)) <= 80


def test_a_terminal_too_narrow():
    with pytest.raises(ScheduleError, match=r"got width=10.*at least 40 columns"):
        draw(one_f_one_b(2, 2), width=10)
