import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.schedule import (
    SCHEDULES,
    STASH_ENDS,
    Phase,
    Schedule,
    assign_slots,
    build_schedule,
    one_f_one_b,
    peak_live,
    transfers,
    zero_bubble_h1,
)


class Buffers:
    """Slots that hold the name of their value: reading another value than expected fails."""

    def __init__(self, slots, num_devices):
        self.slots = slots
        self.cells = [[None] * count for count in slots.per_device]
        assert len(self.cells) == num_devices

    def write(self, device, value):
        self.cells[device][self.slots.slot[value]] = value

    def read(self, device, value):
        assert self.cells[device][self.slots.slot[value]] == value


def replay(schedule):
    """Runs a table with nothing but the plan's buffers: every value must survive until its use."""
    plan = assign_slots(schedule)
    buffers = {
        name: Buffers(getattr(plan, name), schedule.num_devices)
        for name in ("inputs", "stash", "activations", "gradients", "held")
    }
    sent = {}
    for transfer in transfers(schedule):
        sent.setdefault(transfer.tick, []).append(transfer)
    for tick in range(schedule.num_ticks):
        for device, row in enumerate(schedule.rows):
            for action in row[tick]:
                _act(schedule, buffers, device, action)
        for transfer in sent.get(tick, []):
            value = (transfer.stage, transfer.microbatch)
            for name in (
                ["gradients"] if transfer.payload == "gradient" else ["inputs", "activations"]
            ):
                buffers[name].write(transfer.target, value)
    return plan


def _act(schedule, buffers, device, action):
    stage, phase, m = action
    value, here = (stage, m), schedule.placement
    last = schedule.num_stages - 1
    split = action._replace(phase=Phase.W) in schedule.where
    if phase is Phase.F:
        if stage:
            buffers["activations"].read(device, value)
            buffers["inputs"].read(device, value)
        else:
            buffers["inputs"].write(device, value)
        buffers["stash"].write(device, value)
        if stage < last and here[stage + 1] == device:
            buffers["inputs"].write(device, (stage + 1, m))
            buffers["activations"].write(device, (stage + 1, m))
        return
    if phase is Phase.W:
        buffers["held"].read(device, value)
    elif stage < last:
        buffers["gradients"].read(device, value)
    buffers["stash"].read(device, value)
    buffers["inputs"].read(device, value)
    if phase is not Phase.W and stage and here[stage - 1] == device:
        buffers["gradients"].write(device, (stage - 1, m))
    if phase is Phase.I and split:
        buffers["held"].write(device, value)


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_value_is_overwritten_in_random_tables(seed, random_table):
    table = random_table(seed)
    plan = replay(table)
    assert plan.stash.per_device == peak_live(table, STASH_ENDS)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sizes", [(1, 3), (2, 4), (4, 8), (4, 12), (8, 16)])
def test_no_value_is_overwritten(name, sizes):
    table = build_schedule(name, *sizes)
    plan = replay(table)
    assert plan.stash.per_device == peak_live(table, STASH_ENDS)
    work = [(k, m) for k in range(table.num_stages) for m in range(table.num_microbatches)]
    assert set(plan.stash.slot) == set(plan.inputs.slot) == set(work)
    assert set(plan.activations.slot) == {(k, m) for k, m in work if k}
    assert set(plan.gradients.slot) == {(k, m) for k, m in work if k < table.num_stages - 1}
    split = {a[::2] for a, *_ in table.placed() if a.phase is Phase.I}
    assert set(plan.held.slot) == split


def all_forwards_come_first(table):
    phases = [[action.phase for cell in row for action in cell] for row in table.rows]
    return all(row == sorted(row, key=lambda phase: phase is not Phase.F) for row in phases)


@pytest.mark.parametrize("name", SCHEDULES)
def test_buffers_grow_with_the_microbatches_only_if_all_forwards_come_first(name):
    tables = [build_schedule(name, 4, m) for m in (16, 64)]
    few, many = map(assign_slots, tables)
    if all_forwards_come_first(tables[0]):
        assert [4 * slots for slots in few.stash.per_device] == list(many.stash.per_device)
        return
    for buffer in ("inputs", "stash", "activations", "gradients", "held"):
        assert getattr(few, buffer).per_device == getattr(many, buffer).per_device


def test_1f1b_keeps_the_papers_peak_with_waiting_inputs_included():
    plan = assign_slots(one_f_one_b(4, 8))
    assert plan.stash.per_device == (4, 3, 2, 1)
    assert plan.inputs.num_slots == 4
    assert plan.activations.per_device == (0, 1, 1, 1)
    assert plan.gradients.per_device == (1, 1, 1, 0)
    assert plan.held.num_slots == 0


def test_h1_holds_what_passes_from_i_to_w():
    assert assign_slots(zero_bubble_h1(4, 8)).held.per_device == (1, 2, 3, 4)


def test_a_slot_is_free_for_what_arrives_in_the_tick_of_its_last_use():
    table = Schedule.from_csv("0F0,0F1,,0B0,0B1\n,1F0+1B0,1F1+1B1,,")
    assert assign_slots(table).inputs.per_device == (2, 1)


def test_an_action_may_write_the_slot_that_it_reads_last():
    plan = assign_slots(Schedule.from_csv("0F0,1F0,2F0,2B0,1B0,0B0"))
    assert plan.activations.per_device == (1,)
    assert plan.gradients.per_device == (1,)
