import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import (
    SCHEDULES,
    Action,
    Phase,
    Schedule,
    build_schedule,
    gpipe,
    one_f_one_b,
    order_to_table,
    validate,
    zero_bubble_h1,
)

SEEDS = st.integers(0, 2**32 - 1)


def accepts(schedule):
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


def deadlocks(schedule):
    orders = [schedule.order(device) for device in range(schedule.num_devices)]
    try:
        order_to_table("again", orders, schedule.placement, schedule.num_microbatches)
    except ScheduleError:
        return True
    return False


def mutate(schedule, rng):
    """Changes one thing somewhere: a place, an order, a name, or the placement."""
    rows = [[list(cell) for cell in row] for row in schedule.rows]
    placement = list(schedule.placement)
    placed = rng.choice([*schedule.placed()])
    source = rows[placed.device][placed.tick]
    other = rng.choice(rng.choice(rows))
    kind = rng.choice(["move", "move", "swap cells", "swap", "drop", "copy", "rename", "home"])
    if kind in ("move", "drop"):
        source.remove(placed.action)
    if kind in ("move", "copy"):
        other.insert(rng.randint(0, len(other)), placed.action)
    if kind == "swap cells":
        near = rows[placed.device][min(placed.tick + 1, schedule.num_ticks - 1)]
        source[:], near[:] = near[:], source[:]
    if kind == "swap":
        rng.shuffle(source)
    if kind == "rename":
        field, value = rng.choice(
            [
                ("stage", rng.randint(0, schedule.num_stages)),
                ("phase", rng.choice([*Phase])),
                ("microbatch", rng.randint(0, schedule.num_microbatches)),
            ]
        )
        source[placed.position] = placed.action._replace(**{field: value})
    if kind == "home":
        placement[placed.action.stage] = rng.randrange(schedule.num_devices)
    cells = tuple(tuple(tuple(cell) for cell in row) for row in rows)
    return Schedule("mutated", schedule.num_microbatches, tuple(placement), cells)


@settings(max_examples=400, deadline=None)
@given(seed=SEEDS)
def test_random_valid_tables_are_accepted(seed, random_table):
    validate(random_table(seed))


@pytest.mark.full
@settings(max_examples=800, deadline=None)
@given(seed=SEEDS)
def test_the_validator_agrees_with_brute_force_on_mutants(
    seed, random_table, executes, runs_freely
):
    rng = random.Random(seed)
    table = random_table(seed)
    for _ in range(4):
        mutant = mutate(table, rng)
        assert accepts(mutant) == executes(mutant), mutant
        inside = all(a.stage < mutant.num_stages for a, *_ in mutant.placed())
        unique = len({a for a, *_ in mutant.placed()}) == len([*mutant.placed()])
        home = all(p.device == mutant.placement[p.action.stage] for p in mutant.placed() if inside)
        if inside and unique and home and _phases_fit(mutant):
            assert deadlocks(mutant) != runs_freely(mutant), mutant


def _phases_fit(schedule):
    """Whether every stage and microbatch has F and B, or F, I and W: then only order is left."""
    phases = {}
    for action, *_ in schedule.placed():
        phases.setdefault((action.stage, action.microbatch), []).append(action.phase)
    return all(sorted(found) in (["B", "F"], ["F", "I", "W"]) for found in phases.values())


def test_mutants_come_in_both_kinds(random_table):
    rng = random.Random(0)
    verdicts = [accepts(mutate(random_table(seed), rng)) for seed in range(400)]
    assert 20 < sum(verdicts) < 380


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 6), (4, 8), (8, 8)])
def test_all_named_schedules_are_valid(name, sizes, executes):
    table = build_schedule(name, *sizes)
    validate(table)
    assert executes(table)


def rejected(text, max_live=None, placement=None):
    table = Schedule.from_csv(text)
    if placement is not None:
        table = Schedule("custom", table.num_microbatches, placement, table.rows)
    with pytest.raises(ScheduleError) as error:
        validate(table, max_live)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "what", "remedy", "marked"),
    [
        (
            "0F0,,,0B0,0B0\n,1F0,1B0,,",
            "0B0 is scheduled twice: on device 0 in tick 3, and on device 0 in tick 4",
            "remove one of them",
            "[0B0]  [0B0]",
        ),
        ("0F0,,,0B0\n,,1B0,", "stage 1, microbatch 0 has no 1F0", "F, and then either B", "[1B0]"),
        ("0F0,,\n,1F0,1B0", "has no backward: neither 0B0 nor 0I0 and 0W0", "both I", "[0F0]"),
        ("0F0,0I0", "has 0I0 but no 0W0", "both I and W", "[0I0]"),
        ("0F0,0W0", "has 0W0 but no 0I0", "both I and W", "[0W0]"),
        ("0F0,0B0,0I0,0W0", "has a whole backward 0B0 and a split one (0I0) too", "B or", "[0B0]"),
        ("0F0,0B0,0W0", "has a whole backward 0B0 and a split one (0W0) too", "B or", "[0W0]"),
        (
            "0B0,0F0",
            "0B0 (device 0, tick 0) runs before 0F0 (device 0, tick 1)",
            "F comes before B",
            "[0B0]  [0F0]",
        ),
        ("0B0+0F0", "0B0 (device 0, tick 0) runs before 0F0", "left to right", "[0B0+0F0]"),
        ("0F0,0W0,0I0", "0W0 (device 0, tick 1) runs before 0I0", "I before W", "[0W0]  [0I0]"),
        (
            "0F0,0B0\n1F0,1B0",
            "1F0 (device 1, tick 0) needs 0F0 (device 0, tick 0), whose result arrives for tick 1",
            "Delay the action, or let order_to_table",
            "[1F0]",
        ),
        (
            "0F0,,0B0\n,1F0,1B0",
            "0B0 (device 0, tick 2) needs 1B0 (device 1, tick 2), whose result arrives for tick 3",
            "one tick later",
            "[0B0]",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0",
            "schedule 'custom' deadlocks",
            "Move the action that is waited for",
            "[0B0]",
        ),
    ],
)
def test_mistakes_are_reported_and_marked(text, what, remedy, marked):
    message = rejected(text)
    assert what in message
    assert remedy in message
    assert marked in message


def test_an_action_on_another_stages_device():
    message = rejected("0F0,,,0B0\n,1F0,1B0,", placement=(0, 0))
    assert "1F0 (device 1, tick 1) is on the wrong device: stage 1 is on device 0" in message
    assert "Move the action, or change the placement" in message
    assert "[1F0]" in message


def test_an_action_of_a_stage_or_microbatch_that_does_not_exist():
    rows = gpipe(2, 2).rows
    with pytest.raises(ScheduleError, match=r"1F0 .*does not exist. Stages run from 0 to 0"):
        validate(Schedule("short", 2, (0,), rows))
    with pytest.raises(ScheduleError, match=r"0F1 .*does not exist.*microbatches from 0 to 0"):
        validate(Schedule("short", 1, (0, 1), rows))


def test_the_memory_limit_marks_the_forward_that_breaks_it():
    validate(one_f_one_b(4, 8), max_live=[4, 3, 2, 1])
    with pytest.raises(
        ScheduleError, match=r"0F4.*one stage input too many.*keep 5.*allows 4"
    ) as e:
        validate(gpipe(4, 8), max_live=4)
    assert "[0F4]" in str(e.value)
    with pytest.raises(ScheduleError, match="got 2 limits in max_live for 4 devices"):
        validate(gpipe(4, 8), max_live=[4, 4])


def test_the_memory_limit_counts_until_the_weight_gradient():
    validate(zero_bubble_h1(4, 8), max_live=4)
    with pytest.raises(ScheduleError, match="raise max_live"):
        validate(zero_bubble_h1(4, 8), max_live=[4, 3, 2, 1])


def test_the_error_of_a_long_table_shows_the_ticks_around_the_fault():
    table = one_f_one_b(4, 64)
    rows = [list(row) for row in table.rows]
    tick = table.where[Action.parse("2B30")].tick
    rows[2][tick] = ()
    with pytest.raises(ScheduleError, match="neither 2B30 nor 2I30 and 2W30") as error:
        validate(Schedule("holed", 64, table.placement, tuple(map(tuple, rows))))
    grid = str(error.value).splitlines()[1:]
    assert max(map(len, grid)) < 120
    assert "[2F30]" in grid[3]
    assert grid[3].endswith("<-- here")


def test_an_order_that_chunks_run_one_after_the_other_is_a_deadlock():
    # All of the first chunk, backward included, before the second: seen in the wild.
    order = [
        [f"{stage}{phase}{m}" for stage in (d, d + 4) for phase in "FB" for m in range(8)]
        for d in range(4)
    ]
    message = rejected("\n".join(map(",".join, order)))
    assert "deadlocks" in message
    assert "device 0 waits at 0B0 for 1B0, of device 1" in message
    assert "device 3 waits at 3B0 for 4B0, of device 0" in message
