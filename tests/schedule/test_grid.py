from axon_dist.schedule import Schedule, gpipe
from axon_dist.schedule.table import render_grid


def test_columns_are_aligned():
    lines = str(gpipe(12, 3)).splitlines()[1:]
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[0] == "tick"
    assert lines[12].startswith("device 11")


def test_a_marked_grid_is_cut_to_its_marks():
    rows = Schedule.from_csv(",".join(f"0F{m}" for m in range(40))).rows
    header, row = render_grid(rows, marks=[(0, 20)]).splitlines()
    assert header.split()[1:] == [str(tick) for tick in range(14, 27)]
    assert "[0F20]" in row
    assert len(render_grid(rows).splitlines()[0].split()) == 1 + 40


def test_rows_may_differ_in_length():
    first, second = Schedule.from_csv("0F0,0B0\n1F0,1B0").rows
    lines = render_grid([first, second[:1]]).splitlines()
    assert lines[2].split() == ["device", "1", "1F0", "."]
