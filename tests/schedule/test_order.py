import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import SCHEDULES, Action, build_schedule, order_to_table, simulate


def actions(text):
    return [Action.parse(word) for word in text.split()]


def all_of_the_first_chunk_first(num_devices, num_microbatches):
    """Forward and backward of virtual stage 0, then of virtual stage 1: it cannot run."""
    return [
        [
            Action.parse(f"{stage}{phase}{m}")
            for stage in (device, device + num_devices)
            for phase in "FB"
            for m in range(num_microbatches)
        ]
        for device in range(num_devices)
    ]


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_chunk_by_chunk_with_the_backward_deadlocks(num_devices):
    order = all_of_the_first_chunk_first(num_devices, 8)
    placement = [*range(num_devices)] * 2
    with pytest.raises(ScheduleError, match=r"'naive' deadlocks.*wait for each other") as error:
        order_to_table("naive", order, placement, 8)
    last = num_devices - 1
    message = str(error.value)
    assert f"device 0 waits at 0B0 for 1B0, of device {1 % num_devices}" in message
    assert f"device {last} waits at {last}B0 for {num_devices}B0, of device 0" in message
    assert "[0B0]" in message


def test_crossed_orders_deadlock():
    order = [actions("0F0 0B0 0F1 0B1"), actions("1F0 1F1 1B1 1B0")]
    with pytest.raises(ScheduleError, match="device 1 waits at 1F1 for 0F1, of device 0"):
        order_to_table("crossed", order, [0, 1], 2)


def test_an_action_that_no_device_has():
    with pytest.raises(ScheduleError, match="device 0 waits at 0B0 for 1B0, which no device has"):
        order_to_table("half", [actions("0F0 0B0"), actions("1F0")], [0, 1], 1)


def test_a_cell_in_the_wrong_order_waits_for_itself():
    with pytest.raises(ScheduleError, match=r"device 0 waits at 0B0\+0F0 for 0F0, of device 0"):
        order_to_table("self", [[tuple(actions("0B0 0F0"))]], [0], 1)


def test_ticks_are_the_earliest():
    order = [actions("0F0 0F1 0B0 0B1"), [tuple(actions("1F0 1B0")), tuple(actions("1F1 1B1"))]]
    table = order_to_table("pair", order, [0, 1], 2)
    assert table.to_csv() == "0F0,0F1,0B0,0B1\n,1F0+1B0,1F1+1B1,\n"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_of_a_table_gives_no_longer_table(name):
    table = build_schedule(name, 4, 8)
    cells = [[cell for cell in row if cell] for row in table.rows]
    assert order_to_table(name, cells, table.placement, 8) == table


def test_random_tables_are_never_shorter_than_their_order(random_table, executes):
    for seed in range(300):
        table = random_table(seed)
        cells = [[cell for cell in row if cell] for row in table.rows]
        again = order_to_table("again", cells, table.placement, table.num_microbatches)
        assert executes(again)
        assert again.num_ticks <= table.num_ticks
        assert simulate(table).makespan <= simulate(table, lockstep=True).makespan
