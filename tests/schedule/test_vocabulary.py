"""Head and loss as separate actions: their place, what they wait for, what they save."""

import dataclasses
import random

import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import (
    SCHEDULES,
    Action,
    Costs,
    Phase,
    Schedule,
    assign_slots,
    build_schedule,
    draw,
    eager_1f1b,
    one_f_one_b,
    peak_live,
    simulate,
    to_svg,
    validate,
    with_vocabulary,
)

from .test_validate import accepts, mutate

SIZES = [(1, 1), (2, 2), (3, 6), (4, 8)]


def first_back(table, m):
    """The action in which the first stage makes the gradient of its input."""
    return next(a for p in (Phase.I, Phase.B) if (a := Action(0, p, m)) in table.where)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_named_schedule_has_a_place_for_it(name, sizes, executes):
    plain = build_schedule(name, *sizes)
    table = with_vocabulary(plain)
    validate(table)
    assert executes(table)
    assert with_vocabulary(table) is table
    assert Schedule.from_csv(table.to_csv(), table.name) == table
    last, where = table.num_stages - 1, table.where
    for action, placed in plain.where.items():
        if action.phase is Phase.F:
            # One of these actions comes before everything else.
            assert where[action].tick == placed.tick + 1
    together = {
        Phase.E: lambda m: where[Action(0, Phase.F, m)].tick - 1,
        Phase.V: lambda m: where[Action(last, Phase.F, m)].tick + 1,
        Phase.G: lambda m: where[first_back(table, m)].tick + 1,
    }
    for phase, tick_of in together.items():
        for m in range(table.num_microbatches):
            parts = [p for a, p in where.items() if a[1:] == (phase, m)]
            assert sorted(part.device for part in parts) == list(range(table.num_devices))
            assert {part.tick for part in parts} == {tick_of(m)}
    others = {action for action in where if action.phase not in together}
    assert others == set(plain.where)


def test_a_table_with_a_split_head_gets_a_split_embedding():
    both = with_vocabulary(eager_1f1b(2, 2))
    head = lambda cell: tuple(action for action in cell if action.phase not in (Phase.E, Phase.G))
    rows = tuple(tuple(map(head, row[1:-1])) for row in both.rows)
    table = dataclasses.replace(both, rows=rows)
    assert table.splits_vocabulary
    assert not table.splits_embedding
    assert with_vocabulary(table) == both


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_the_validator_agrees_with_brute_force_on_mutants(name, executes):
    rng = random.Random(name)
    table = with_vocabulary(build_schedule(name, 3, 3))
    mutants = [mutate(table, rng) for _ in range(150)]
    assert [accepts(mutant) for mutant in mutants] == [executes(mutant) for mutant in mutants]


def test_it_costs_less_than_a_head_on_the_last_stage():
    size, count, head = 4, 16, 2.0
    # The same work: on the last stage in its backward pass, or a quarter of it on each rank.
    at_end = Costs(stage_weights=(1.0, 1.0, 1.0, 1.0 + head / 3))
    plain = simulate(eager_1f1b(size, count), at_end, lockstep=True)
    costs = Costs(v=head / size)
    split = with_vocabulary(eager_1f1b(size, count), costs)
    assert simulate(split, costs, lockstep=True).makespan < 0.8 * plain.makespan
    assert sum(simulate(split, costs).work) == pytest.approx(sum(plain.work))


def test_a_stage_keeps_one_input_more_in_1f1b_and_two_in_eager_1f1b():
    for build, more in ((one_f_one_b, 1), (eager_1f1b, 2)):
        table = build(4, 16)
        assert peak_live(with_vocabulary(table))[-1] == peak_live(table)[-1] + more


@pytest.mark.parametrize("name", SCHEDULES)
def test_outputs_and_their_gradients_outlive_no_slot(name):
    table = with_vocabulary(build_schedule(name, 2, 8))
    plan, last, where = assign_slots(table), table.num_stages - 1, table.where
    everything = {(last, m) for m in range(8)}
    assert set(plan.outputs.slot) == everything
    assert everything <= set(plan.gradients.slot)
    home, place = table.placement[last], lambda action: where[action][2:]
    part = lambda m: place(Action(table.stages_of(home)[0], Phase.V, m))
    back = lambda m: min(place(a) for p in (Phase.B, Phase.I) if (a := Action(last, p, m)) in where)
    first = lambda phase, m: place(Action(0, phase, m))
    begin = lambda m: place(first_back(table, m))
    lives = {
        ("outputs", last): {m: (place(Action(last, Phase.F, m)), part(m)) for m in range(8)},
        ("gradients", last): {m: (part(m), back(m)) for m in range(8)},
        ("lookups", 0): {m: (first(Phase.E, m), first(Phase.F, m)) for m in range(8)},
        ("saved_lookups", 0): {m: (first(Phase.E, m), begin(m)) for m in range(8)},
        ("scatters", 0): {m: (begin(m), first(Phase.G, m)) for m in range(8)},
    }
    for (buffer, stage), spans in lives.items():
        slot = getattr(plan, buffer).slot
        for m, (start, end) in spans.items():
            clash = [n for n in range(8) if n != m and slot[stage, n] == slot[stage, m]]
            assert not any(start < spans[n][1] and spans[n][0] < end for n in clash)


def test_buffers_do_not_grow_with_the_number_of_microbatches():
    few, many = (assign_slots(with_vocabulary(eager_1f1b(4, m))) for m in (16, 64))
    for buffer in dataclasses.fields(few):
        assert getattr(few, buffer.name).per_device == getattr(many, buffer.name).per_device


def test_it_is_drawn():
    table = with_vocabulary(one_f_one_b(2, 2))
    assert "E embedding   F forward   V vocabulary" in draw(table)
    assert "<title>0V1</title>" in to_svg(table)
    assert "<title>0G1</title>" in to_svg(table)


def test_instant_actions_are_not_drawn_on_a_time_axis():
    table = with_vocabulary(one_f_one_b(2, 2))
    for costs, is_drawn in ((Costs(), False), (Costs(e=0.5), True)):
        timeline = simulate(table, costs, lockstep=True)
        assert ("E embedding" in draw(table, timeline)) is is_drawn
        assert ("<title>0E1</title>" in to_svg(table, timeline)) is is_drawn


def test_lookups_cost_what_is_said_of_them_and_the_transfers():
    plain, table = one_f_one_b(1, 1), with_vocabulary(one_f_one_b(1, 1))
    base = simulate(plain, lockstep=True).makespan
    assert simulate(table, Costs(v=0, e=0.25), lockstep=True).makespan == base + 2 * 0.25
    # One for each of E, V and G, in which devices wait for each other.
    assert simulate(table, Costs(v=0, transfer=1), lockstep=True).makespan == base + 3


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        (
            "0F0,,0V0,,0B0\n,1F0,,1B0,",
            "microbatch 0 has 0V0, but all devices must run V",
            "It needs 0V0, 1V0",
        ),
        (
            "0F0,,0V0,,,0B0\n,1F0,,1V0,1B0,",
            "the V of microbatch 0 are in the ticks [2, 3]",
            "put them in one tick",
        ),
        (
            "0F0,,0V0,,0B0\n,1F0,1V0,1B0,\n,,,,",
            "device 2 has no stage, but all devices must run V",
            "place a stage on every device",
        ),
        (
            "0F0,0F1,0V0,0V1,,0B0,0B1\n,1F0,1F1+1V0,1V1,1B0,1B1,",
            "",
            "",
        ),
        (
            "0F0,0F1,0V0,0V1,,0B0,0B1\n,1F0,1V0+1F1,1V1,1B0,1B1,",
            "device 1 runs 1V0+1F1 in tick 2",
            "must be in the order E, F, V, B, I, W, G",
        ),
        (
            "0F0,0V0,,0B0\n,1F0+1V0,1B0,",
            "0V0 (device 0, tick 1) needs 1F0 (device 1, tick 1)",
            "Delay the action",
        ),
        (
            "0E0,0F0,,0V0,,0B0\n1E0,,1F0,1V0,1B0,",
            "has E and V. A table must split",
            "head and embedding, E, V and G",
        ),
        (
            "0E0,0F0,,0V0,,0B0,0G0\n,1E0,1F0,1V0,1B0,,1G0",
            "the E of microbatch 0 are in the ticks [0, 1]",
            "put them in one tick",
        ),
        (
            "0E0+0F0,,0V0,,0B0,0G0\n1E0,1F0,1V0,1B0,,1G0",
            "0F0 (device 0, tick 0) needs 1E0 (device 1, tick 0)",
            "Delay the action",
        ),
        (
            "0E0,0F0,,0V0,,0B0+0G0\n1E0,,1F0,1V0,1B0,1G0",
            "1G0 (device 1, tick 5) needs 0B0 (device 0, tick 5)",
            "Delay the action",
        ),
        (
            "0E0+0E1,0F0,0F1,0V0,0V1,,0B0,0B1,0G0+0G1\n"
            "1E1+1E0,,1F0,1F1+1V0,1V1,1B0,1B1,,1G0+1G1",
            "device 1 runs 1E1+1E0 in tick 0",
            "so that all devices reach it together",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_reported(text, what, remedy):
    table = Schedule.from_csv(text)
    if not what:
        validate(table)
        return
    with pytest.raises(ScheduleError) as error:
        validate(table)
    assert what in str(error.value)
    assert remedy in str(error.value)
