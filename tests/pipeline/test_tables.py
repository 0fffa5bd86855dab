"""The tables of every schedule, run by a few lines of Python, move every value to its reader."""

import pytest

from axon_dist.pipeline.tables import NONE, lane_phases, scan_tables_of, slots_by_name
from axon_dist.schedule import SCHEDULES, Action, Phase, assign_slots, build_schedule, transfers


class Replay:
    """Runs the tables on names instead of arrays; fails where a name is not where it is read."""

    def __init__(self, schedule, program):
        self.schedule, self.program, self.done = schedule, program, []
        devices = range(schedule.num_devices)
        self.inputs, self.gradients, self.held = ([{} for _ in devices] for _ in range(3))
        for tick in range(schedule.num_ticks):
            sent = [
                {d: self.act(lane, d, tick) for d in devices if lane.columns["active"][d, tick]}
                for lane in program.lanes
            ]
            for channel in program.channels:
                self.receive(channel, tick, sent)

    def act(self, lane, d, tick):
        """Does an action; returns the name of its result, as the receiver calls it."""
        stage, m = int(lane.columns["stage"][d, tick]), int(lane.columns["microbatch"][d, tick])
        self.done.append(Action(stage, lane.phase, m))
        if lane.phase is Phase.W:
            assert self.held[d][lane.columns["held"][d, tick]] == (stage, m)
            return None
        if lane.phase is Phase.F and stage == 0:
            self.inputs[d][lane.columns["inputs"][d, tick]] = (stage, m)
        assert self.inputs[d][lane.columns["inputs"][d, tick]] == (stage, m)
        if lane.phase is not Phase.F and stage + 1 < self.schedule.num_stages:
            assert self.gradients[d][lane.columns["gradients"][d, tick]] == (stage, m)
        if lane.phase is Phase.I:
            self.held[d][lane.columns["held"][d, tick]] = (stage, m)
        result = (stage + 1 if lane.phase is Phase.F else stage - 1, m)
        if lane.columns["hand_over"][d, tick] != NONE:
            self.buffer(lane)[d][lane.columns["hand_over"][d, tick]] = result
        return result

    def receive(self, channel, tick, sent):
        """Puts what arrives where the tables say."""
        for source, target in channel.pairs:
            results = [sent[lane][source] for lane in channel.slots if source in sent[lane]]
            assert len(results) < 2
            for lane, slot in channel.slots.items():
                if slot[target, tick] != NONE:
                    [result] = results
                    self.buffer(self.program.lanes[lane])[target][slot[target, tick]] = result

    def buffer(self, lane):
        """Where the results of a lane go."""
        return self.inputs if lane.phase is Phase.F else self.gradients


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_values_are_where_they_are_read(name, size):
    schedule = build_schedule(name, size, 2 * size)
    slots = assign_slots(schedule)
    replay = Replay(schedule, scan_tables_of(schedule, slots_by_name(slots)))
    assert sorted(replay.done) == sorted(schedule.where)
    assert max(len(used) for used in replay.inputs) <= slots.inputs.num_slots


@pytest.mark.parametrize("name", SCHEDULES)
def test_channels_carry_exactly_the_transfers(name):
    schedule = build_schedule(name, 4, 8)
    program = scan_tables_of(schedule, slots_by_name(assign_slots(schedule)))
    slots = [slot for channel in program.channels for slot in channel.slots.values()]
    assert sum(int((slot != NONE).sum()) for slot in slots) == len(transfers(schedule))
    for channel in program.channels:
        sources, targets = zip(*channel.pairs, strict=True)
        assert len(set(sources)) == len(sources)
        assert len(set(targets)) == len(targets)


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_more_than_3_3_times_the_least_is_sent(name):
    schedule = build_schedule(name, 8, 64)
    program = scan_tables_of(schedule, slots_by_name(assign_slots(schedule)))
    sent = schedule.num_ticks * sum(len(channel.pairs) for channel in program.channels)
    assert sent <= 3.3 * len(transfers(schedule))


def test_lanes_hold_every_order_within_a_cell():
    cells = [("0F0", "0B0"), ("0B0", "0F1"), ("0W0",), ()]
    phases = lane_phases(tuple(map(Action.parse, cell)) for cell in cells)
    text = "".join(phases)
    assert all(_is_subsequence("".join(cell[1] for cell in c), text) for c in cells if c)


def _is_subsequence(short, long):
    letters = iter(long)
    return all(letter in letters for letter in short)


def test_lanes_are_the_same_on_every_process_and_readers_come_last():
    cells = [(Action(0, phase, 0),) for phase in (Phase.W, Phase.F, Phase.I)]
    assert lane_phases(cells) == lane_phases(reversed(cells)) == (Phase.F, Phase.I, Phase.W)
