"""Every schedule against its paper's closed forms, over the sizes."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import (
    SCHEDULES,
    STASH_ENDS,
    Costs,
    Phase,
    Schedule,
    build_schedule,
    dual_pipe_v,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    peak_live,
    simulate,
    transfers,
    v_half,
    v_min,
    validate,
    with_vocabulary,
    zero_bubble_h1,
    zero_bubble_h2,
    zero_bubble_v,
)

GRID = [(s, m) for s in range(1, 17) for m in range(1, 65)]
FEW = sorted(
    {
        (s, m)
        for s in (1, 2, 3, 4, 5)
        for m in (1, s - 1, s, s + 1, 2 * s - 2, 2 * s - 1, 2 * s, 4 * s)
        if 1 <= m <= 64
    }
)
# Multiples of 12, so that a division by 1 to 4 chunks is exact and equality means equality.
EQUAL = Costs(f=12, i=12, w=12)
REAL = Costs(f=120, i=144, w=96)  # T_W < T_F < T_B, as measured in practice


class Law(NamedTuple):
    """A paper's claims: the bubble in time, and each device's microbatches or chunks in flight."""

    build: Callable[..., Schedule]
    bubble: Callable[[int, int, Costs], float]
    peak: Callable[[int, int], list[int]]
    stash: Callable[[int, int], list[int]] | None = None  # where it is not the peak
    costs: tuple[Costs, ...] = (EQUAL, REAL)
    sizes: Callable[[int, int], bool] = lambda s, m: True


def flush(s, m, c):
    return (s - 1) * (c.f + c.of(Phase.B))


def interleaved_law(v):
    return Law(
        lambda s, m: interleaved_1f1b(s, m, v),
        lambda s, m, c: flush(s, m, c) / v,
        lambda s, m: [min(2 * (s - d - 1) + (v - 1) * s + 1, v * m) for d in range(s)],
        sizes=lambda s, m: m % s == 0,
    )


def looped_law(v):
    return Law(
        lambda s, m: looped_bfs(s, m, v),
        # With fewer microbatches than devices, each chunk but the last waits for the first device.
        lambda s, m, c: (s - 1 + (v - 1) * max(0, s - m)) * (c.f + c.of(Phase.B)) / v,
        lambda s, m: [v * m] * s,
    )


def interleaved_zero_bubble_law(v):
    # PyTorch's ScheduleInterleavedZeroBubble: ZB-H1's bubble over the chunks, and 1F1B's memory.
    return Law(
        lambda s, m: interleaved_zero_bubble(s, m, v),
        lambda s, m, c: (s - 1) * (c.f + c.i - c.w) / v,
        lambda s, m: [min(v * s - d, v * m) for d in range(s)],
        stash=lambda s, m: [v * s] * s,
        sizes=lambda s, m: m % s == 0,
    )


LAWS = {
    "interleaved_zero_bubble of 2": interleaved_zero_bubble_law(2),
    "interleaved_zero_bubble of 3": interleaved_zero_bubble_law(3),
    "interleaved_zero_bubble of 4": interleaved_zero_bubble_law(4),
    "gpipe": Law(gpipe, flush, lambda s, m: [m] * s),
    "1f1b": Law(one_f_one_b, flush, lambda s, m: [min(s - d, m) for d in range(s)]),
    "eager_1f1b": Law(eager_1f1b, flush, lambda s, m: [min(2 * (s - d) - 1, m) for d in range(s)]),
    "interleaved_1f1b of 2": interleaved_law(2),
    "interleaved_1f1b of 3": interleaved_law(3),
    "interleaved_1f1b of 4": interleaved_law(4),
    "looped_bfs of 1": looped_law(1),
    "looped_bfs of 2": looped_law(2),
    "looped_bfs of 4": looped_law(4),
    "zero_bubble_h1": Law(
        zero_bubble_h1,
        lambda s, m, c: (s - 1) * (c.f + c.i) - (min(s, m) - 1) * c.w,
        lambda s, m: [min(s - d, m) for d in range(s)],
        stash=lambda s, m: [min(s, m)] * s,
    ),
    "zero_bubble_h2": Law(
        zero_bubble_h2,
        lambda s, m, c: max((s - 1) * c.f, (s - 1) * (c.f + c.i) - (min(2 * s - 1, m) - 1) * c.w),
        lambda s, m: [min(2 * (s - d) - 1, m) for d in range(s)],
        stash=lambda s, m: [min(2 * s - 1, m)] * s,
    ),
    "zero_bubble_v": Law(
        zero_bubble_v,
        lambda s, m, c: (s - 1) * c.f / 2,
        lambda s, m: [2 * s] * s,
        costs=(EQUAL,),
        sizes=lambda s, m: m >= 2 * s - 1,
    ),
    "zero_bubble_v at real costs": Law(
        zero_bubble_v,
        lambda s, m, c: 0.5 * (s - 1) * c.i,
        lambda s, m: [2 * s] * s,
        costs=(REAL,),
        sizes=lambda s, m: m >= 2 * s,
    ),
}


def check(law, num_devices, num_microbatches):
    table = law.build(num_devices, num_microbatches)
    for costs in law.costs:
        work = num_microbatches * (costs.f + costs.of(Phase.B))
        bubble = law.bubble(num_devices, num_microbatches, costs)
        timeline = simulate(table, costs)
        assert timeline.makespan == work + bubble
        assert timeline.bubble_fraction == bubble / (work + bubble)
        assert timeline.work == (work,) * num_devices
    peak = law.peak(num_devices, num_microbatches)
    assert [*peak_live(table)] == peak
    stash = peak if law.stash is None else law.stash(num_devices, num_microbatches)
    assert [*peak_live(table, STASH_ENDS)] == stash
    return table


@pytest.mark.sample(*(name for name in LAWS if not name.endswith(("of 3", "of 4"))))
@pytest.mark.parametrize("name", LAWS)
def test_bubble_and_peak_are_the_papers(name, executes):
    law = LAWS[name]
    for size in FEW:
        if law.sizes(*size):
            table = check(law, *size)
            validate(table, max_live=peak_live(table, STASH_ENDS))
            assert table.num_microbatches > 8 or executes(table)


@pytest.mark.full
@pytest.mark.parametrize("name", LAWS)
def test_bubble_and_peak_are_the_papers_for_all_sizes(name):
    law = LAWS[name]
    for size in GRID:
        if law.sizes(*size):
            validate(check(law, *size))


@pytest.mark.parametrize(
    ("build", "chunks"),
    [(gpipe, 1), (eager_1f1b, 1), (interleaved_1f1b, 2), (interleaved_1f1b, 4), (looped_bfs, 2)],
)
def test_devices_in_step_lose_nothing(build, chunks):
    for s, m in [(1, 2), (2, 2), (2, 6), (4, 4), (4, 16), (8, 8), (8, 32)]:
        table = build(s, m, chunks) if chunks > 1 else build(s, m)
        work = m * (REAL.f + REAL.of(Phase.B))
        assert simulate(table, REAL, lockstep=True).makespan == work + flush(s, m, REAL) / chunks


def test_eager_is_the_fastest_of_the_flat_schedules_in_step():
    for s, m in [(2, 4), (4, 8), (8, 16), (8, 64)]:
        paper = simulate(one_f_one_b(s, m), lockstep=True).makespan
        assert simulate(eager_1f1b(s, m), lockstep=True).makespan < paper
        assert eager_1f1b(s, m).num_ticks == m + 2 * (s - 1)


def test_zero_bubble_v_with_few_microbatches(executes):
    for s, m in (size for size in FEW if size[1] < 2 * size[0] - 1):
        table = zero_bubble_v(s, m)
        bubble = max((s - 1) * EQUAL.f / 2, (2 * (s - 1) - (m - 1)) * EQUAL.f)
        assert simulate(table, EQUAL).makespan == m * 3 * EQUAL.f + bubble
        assert bubble <= max((s - 1) * EQUAL.f / 2, LAWS["zero_bubble_h1"].bubble(s, m, EQUAL))
        validate(table, max_live=2 * min(s, m))
        assert executes(table)


@pytest.mark.parametrize("sizes", [FEW, pytest.param(GRID, marks=pytest.mark.full)])
def test_dual_pipe_v_keeps_its_papers_limits(sizes, executes):
    for s, m in (size for size in sizes if size[0] <= 8):
        table = dual_pipe_v(s, m)
        assert max(peak_live(table)) == min(2 * s + 1, 2 * m)  # PP + 1, for PP = 2s stages
        assert max(peak_live(table, STASH_ENDS)) == min(2 * s + 1, 2 * m)
        if m >= 2 * s:
            # DeepSeek's README gives (PP/2-1)(F&B + B - 3W) for devices in step with each other,
            # in times of chunks; the table read freely has ZB-V's bubble where all are equal.
            assert simulate(table, EQUAL).makespan == (3 * m + (s - 1) / 2) * EQUAL.f
            work = m * (REAL.f + REAL.i + REAL.w)
            paper = (s - 1) * (REAL.f + 2 * REAL.i - REAL.w) / 2
            assert simulate(table, REAL).makespan <= work + paper
        validate(table)
        assert m > 8 or executes(table)


def v_min_bubble(s):
    return 2 * s - 1.5 if s % 3 == 0 else 2 * s - 2.5


def v_half_bubble(s):
    return 1.5 if s == 2 else 1.5 * s - 2


@pytest.mark.parametrize(
    ("build", "most", "bubble", "paper"),
    [
        (v_min, lambda s: (s + 4) // 3, v_min_bubble, 2 / 3),
        (v_half, lambda s: (s + 2) // 2, v_half_bubble, 1 / 2),
    ],
)
@pytest.mark.parametrize("sizes", [FEW, pytest.param(GRID, marks=pytest.mark.full)])
def test_controllable_memory_is_the_papers(build, most, bubble, paper, sizes, executes):
    for s, m in (size for size in sizes if 2 <= size[0] <= 8 and size[1] >= size[0]):
        table = build(s, m)
        # The paper's table: floor((p+4)/3) and floor((p+2)/2) microbatches, W included.
        assert max(peak_live(table, STASH_ENDS)) <= 2 * most(s)
        if m >= 2 * s:
            assert max(peak_live(table, STASH_ENDS)) == 2 * most(s)
        # It says "about 2p/3m" and "about p/2m" of the work; ours are exact and below that.
        assert simulate(table, EQUAL).makespan == (3 * m + bubble(s)) * EQUAL.f
        assert bubble(s) <= paper * 3 * s
        validate(table, max_live=2 * most(s))
        assert m > 8 or executes(table)


def test_unequal_times_cost_v_min_every_microbatch_and_v_half_none():
    bubble = lambda build, m: simulate(build(7, m), REAL).makespan - 360 * m
    assert bubble(v_half, 64) == bubble(v_half, 32)
    assert bubble(v_min, 64) > bubble(v_min, 32) + 32 * 30


def test_h2_has_no_bubble_in_a_devices_own_span():
    for s, m in FEW:
        timeline = simulate(zero_bubble_h2(s, m), REAL)
        lost = max(0, (s - 1) * (REAL.f + REAL.i) - (min(2 * s - 1, m) - 1) * REAL.w)
        assert timeline.span_bubble == lost / (lost + m * (REAL.f + REAL.i + REAL.w))
        if m >= 2 * s - 1:
            assert simulate(zero_bubble_h2(s, m), EQUAL).span_bubble == 0
            assert simulate(zero_bubble_v(s, m), EQUAL).span_bubble == 0


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches", "makespan", "bubble"),
    [
        ("gpipe", 4, 8, 33, 0.2727),
        ("1f1b", 4, 8, 33, 0.2727),
        ("1f1b", 4, 4, 21, 0.4286),
        ("1f1b", 4, 16, 57, 0.1579),
        ("1f1b", 8, 32, 117, 0.1795),
        ("1f1b", 2, 4, 15, 0.2),
        ("1f1b", 8, 16, 69, 0.3043),
        ("interleaved_1f1b", 4, 8, 28.5, 0.1579),
        ("interleaved_1f1b", 4, 4, 16.5, 0.2727),
        ("interleaved_1f1b", 4, 16, 52.5, 0.0857),
        ("interleaved_1f1b", 8, 16, 58.5, 0.1795),
        ("zero_bubble_h1", 4, 8, 27, 0.1111),
        ("zero_bubble_h1", 8, 32, 103, 0.068),
        ("zero_bubble_h1", 8, 16, 55, 0.1273),
        ("zero_bubble_h2", 4, 8, 27, 0.1111),
        ("zero_bubble_v", 4, 8, 25.5, 0.0588),
        ("zero_bubble_v", 8, 16, 51.5, 0.068),
        ("interleaved_zero_bubble", 4, 8, 25.5, 0.0588),
        ("interleaved_zero_bubble", 8, 16, 51.5, 0.068),
        ("dual_pipe_v", 4, 8, 25.5, 0.0588),
        ("dual_pipe_v", 8, 16, 51.5, 0.068),
    ],
)
def test_published_numbers(name, num_devices, num_microbatches, makespan, bubble):
    timeline = simulate(build_schedule(name, num_devices, num_microbatches))
    assert timeline.makespan == makespan
    assert round(timeline.bubble_fraction, 4) == bubble


@pytest.mark.parametrize(
    ("name", "bubble"),
    [
        ("zero_bubble_v", 0.080),
        ("zero_bubble_h1", 0.170),
        ("interleaved_zero_bubble", 0.093),
        ("dual_pipe_v", 0.096),
    ],
)
def test_published_numbers_at_measured_costs(name, bubble):
    timeline = simulate(build_schedule(name, 8, 16), Costs(f=1, i=1.2, w=0.8))
    assert round(timeline.bubble_fraction, 3) == bubble


def test_peaks_at_four_devices():
    assert peak_live(gpipe(4, 8)) == (8, 8, 8, 8)
    assert peak_live(one_f_one_b(4, 8)) == (4, 3, 2, 1)
    assert peak_live(interleaved_1f1b(4, 8)) == (11, 9, 7, 5)
    assert peak_live(zero_bubble_h1(4, 8)) == (4, 3, 2, 1)
    assert peak_live(zero_bubble_h2(4, 8)) == (7, 5, 3, 1)


def test_the_order_of_1f1b():
    table = one_f_one_b(4, 8)
    first, last = (" ".join(str(a)[1:] for a in table.order(d)) for d in (0, 3))
    assert first == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert last == " ".join(f"F{m} B{m}" for m in range(8))
    warmups = [[a.phase for a in table.order(d)].index(Phase.B) - 1 for d in range(4)]
    assert warmups == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("zero_bubble_h2", 1),
        ("interleaved_1f1b", 7 / 3),
        ("looped_bfs", 7 / 3),
        ("zero_bubble_v", 2),
        ("interleaved_zero_bubble", 7 / 3),
        *((name, 2) for name in ("dual_pipe_v", "v_half", "v_min")),
    ],
)
def test_what_crosses_between_devices(name, times):
    # A ring of P devices with V chunks has PV - 1 boundaries, a V has 2P - 2, a line P - 1.
    assert len(transfers(build_schedule(name, 4, 8))) == times * 2 * 3 * 8


def test_interleaved_microbatches_come_in_groups():
    with pytest.raises(
        ScheduleError, match=r"6 microbatches for 4 devices.*use 4 or 8.*looped_bfs"
    ):
        interleaved_1f1b(4, 6)
    with pytest.raises(ScheduleError, match=r"3 microbatches for 4 devices.*use 4 microbatches"):
        interleaved_1f1b(4, 3)
    with pytest.raises(ScheduleError, match=r"chunks=1.*at least 2.*use 1f1b"):
        interleaved_1f1b(4, 8, chunks=1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_runs_forwards_in_the_order_of_the_microbatches(name):
    """So a buffer that a stage updates in turn works under every schedule with a name."""
    for sizes in [(1, 3), (2, 2), (2, 6), (3, 9), (4, 4), (4, 12)]:
        table = build_schedule(name, *sizes)
        for schedule in (table, with_vocabulary(table)):
            stages = range(schedule.num_stages)
            assert all(schedule.in_order(stage, [Phase.F]) for stage in stages), sizes


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4), (2.5, 4), (True, 4)])
def test_sizes_are_positive_integers(name, sizes):
    with pytest.raises(ScheduleError, match=r"got num_\w+=(0|-1|2.5|True)\. .*at least 1"):
        build_schedule(name, *sizes)
