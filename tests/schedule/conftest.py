"""A second opinion: an executor of tables that knows nothing of `axon_dist.schedule`'s code.

It passes tokens between devices as the definition of a table says, tick by tick, and is slow and
plain on purpose. `random_table` builds tables with it, `executes` judges tables.
"""

import itertools
import random

import pytest

from axon_dist.schedule import Action, Phase, Schedule


class Machine:
    """Devices with a memory of tokens; `run` does one action or says that it cannot."""

    def __init__(self, placement, splits=""):
        self.placement, self.splits = placement, splits
        self.memory = {device: set() for device in placement}
        self.sent = []  # (device, token), delivered by end_of_tick

    def can(self, device, action):
        stage, phase, m = action
        have = self.memory.get(device, set())
        if self.placement[stage] != device:
            return False
        if phase == "E":
            return ("ran E", m) not in have
        if phase == "F":
            x = ("x", stage, m) in have if stage else self._all("rows", device, m, "E")
            return x and ("ran F", stage, m) not in have
        if phase == "G":
            return ("dx", m) in have and ("ran G", m) not in have
        if phase == "W":
            return ("cross", stage, m) in have
        if phase == "V":
            return ("y", m) in have and ("ran V", m) not in have
        last = stage + 1 == len(self.placement)
        if last and not self._all("part", device, m, "V"):
            return False
        return ("saved", stage, m) in have and (last or ("dy", stage, m) in have)

    def _all(self, what, device, m, phase):
        """Whether a device has got what every device makes in a phase, where there is such."""
        parts = ((what, each, m) for each in self.memory)
        return phase not in self.splits or all(part in self.memory[device] for part in parts)

    def run(self, device, action):
        stage, phase, m = action
        have = self.memory[device]
        if phase == "F":
            have |= {("saved", stage, m), ("ran F", stage, m)}
            self._send(device, stage + 1, ("x", stage + 1, m))
            if stage + 1 == len(self.placement):
                have.add(("y", m))
                self.sent += [(other, ("y", m)) for other in self.memory]
        elif phase in ("E", "V"):
            have.add((f"ran {phase}", m))
            what, to = ("rows", 0) if phase == "E" else ("part", len(self.placement) - 1)
            self._send(device, to, (what, device, m))
        elif phase == "G":
            have.add(("ran G", m))
        elif phase == "W":
            have.remove(("cross", stage, m))
            have.add(("done", stage, m))
        else:
            have.remove(("saved", stage, m))
            have.add(("cross" if phase == "I" else "done", stage, m))
            self._send(device, stage - 1, ("dy", stage - 1, m))
            if stage == 0:
                have.add(("dx", m))
                self.sent += [(other, ("dx", m)) for other in self.memory]

    def _send(self, device, stage, token):
        if 0 <= stage < len(self.placement):
            home = self.placement[stage]
            if home == device:
                self.memory[home].add(token)
            else:
                self.sent.append((home, token))

    def end_of_tick(self):
        for device, token in self.sent:
            self.memory[device].add(token)
        self.sent.clear()

    def finished(self, num_microbatches):
        return all(
            ("done", stage, m) in self.memory[device]
            for stage, device in enumerate(self.placement)
            for m in range(num_microbatches)
        )


def _is_together(schedule, splits):
    """Whether devices do what they do together in one tick, by first stages, in one place."""
    if splits not in ("V", "EVG"):
        return False
    for phase, m in itertools.product(splits, range(schedule.num_microbatches)):
        ticks = []
        for device, row in enumerate(schedule.rows):
            own = [stage for stage, home in enumerate(schedule.placement) if home == device][:1]
            found = [(t, a.stage) for t, c in enumerate(row) for a in c if a[1:] == (phase, m)]
            if [stage for _, stage in found] != own or not own:
                return False
            ticks += [tick for tick, _ in found]
        if len(set(ticks)) != 1:
            return False
    place = lambda a: ("EFVBIWG".index(a.phase), a.microbatch * (a.phase in splits))
    return all(list(cell) == sorted(cell, key=place) for row in schedule.rows for cell in row)


def _executes(schedule):
    used = {action.phase for action, *_ in schedule.placed()}
    splits = "".join(phase for phase in "EVG" if phase in used)
    if splits and not _is_together(schedule, splits):
        return False
    machine = Machine(schedule.placement, splits)
    for tick in range(schedule.num_ticks):
        for device, row in enumerate(schedule.rows):
            for action in row[tick]:
                inside = action.stage < schedule.num_stages
                inside = inside and action.microbatch < schedule.num_microbatches
                if not inside or not machine.can(device, action):
                    return False
                machine.run(device, action)
        machine.end_of_tick()
    return machine.finished(schedule.num_microbatches)


def _runs_freely(schedule):
    """Whether every device gets through its own order when all results are sent at once."""
    machine = Machine(schedule.placement)
    orders = [list(schedule.order(device)) for device in range(schedule.num_devices)]
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while order and machine.can(device, order[0]):
                machine.run(device, order.pop(0))
                machine.end_of_tick()
                moved = True
    return not any(orders)


def _random_table(seed):
    """A valid table: any placement, any topological order, whole and split backwards mixed."""
    rng = random.Random(seed)
    num_stages, num_microbatches = rng.randint(1, 5), rng.randint(1, 4)
    num_devices = rng.randint(1, num_stages)
    placement = [*range(num_devices)]
    placement += [rng.randrange(num_devices) for _ in range(num_stages - num_devices)]
    rng.shuffle(placement)
    todo = []
    for stage in range(num_stages):
        for m in range(num_microbatches):
            phases = rng.choice(["FB", "FIW"])
            todo += [Action(stage, Phase(phase), m) for phase in phases]
    machine, columns = Machine(placement), []
    while todo:
        column = []
        for device in range(num_devices):
            cell = []
            for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
                ready = [action for action in todo if machine.can(device, action)]
                if ready:
                    cell.append(rng.choice(ready))
                    todo.remove(cell[-1])
                    machine.run(device, cell[-1])
            column.append(tuple(cell))
        machine.end_of_tick()
        columns.append(column)
    rows = tuple(tuple(column[device] for column in columns) for device in range(num_devices))
    return Schedule("random", num_microbatches, tuple(placement), rows)


@pytest.fixture(scope="session")
def executes():
    return _executes


@pytest.fixture(scope="session")
def runs_freely():
    return _runs_freely


@pytest.fixture(scope="session")
def random_table():
    return _random_table
