from itertools import pairwise
from xml.etree import ElementTree

import pytest

from axon_dist.schedule import SCHEDULES, Costs, build_schedule, one_f_one_b, simulate, to_svg

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg):
    """Title, x, y and width of each action's box."""
    rects = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [
        (title.text, *(float(rect.get(key)) for key in ("x", "y", "width")))
        for rect in rects
        if (title := rect.find(f"{SVG}title")) is not None
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("timed", [False, True])
def test_every_action_has_its_box_and_none_overlap(name, timed):
    table = build_schedule(name, 4, 8)
    found = boxes(to_svg(table, simulate(table) if timed else None))
    assert sorted(title for title, *_ in found) == sorted(str(p.action) for p in table.placed())
    for y in {y for _, _, y, _ in found}:
        row = sorted((x, width) for _, x, other, width in found if other == y)
        for (x, width), (after, _) in pairwise(row):
            assert x + width <= after + 0.11  # coordinates have one decimal


def test_time_is_to_scale():
    table = one_f_one_b(2, 2)
    widths = {title: width for title, _, _, width in boxes(to_svg(table, simulate(table)))}
    assert widths["0B0"] == pytest.approx(2 * widths["0F0"], abs=0.2)
    timeline = simulate(table, Costs(b=3))
    assert "makespan 12, bubble 33.3%" in to_svg(table, timeline)


def test_everything_lies_inside_the_picture():
    root = ElementTree.fromstring(to_svg(one_f_one_b(4, 8)))
    _, _, width, height = map(float, root.get("viewBox").split())
    for _, x, y, w in boxes(to_svg(one_f_one_b(4, 8))):
        assert 0 < x < x + w < width
        assert 0 < y < height


def test_axis_and_legend():
    svg = to_svg(one_f_one_b(2, 2))
    assert ">tick<" in svg
    assert "B backward" in svg
    assert "weight gradient" not in svg
    assert ">time<" in to_svg(one_f_one_b(2, 2), simulate(one_f_one_b(2, 2)))
    assert "every second chunk" in to_svg(build_schedule("zero_bubble_v", 2, 3))
