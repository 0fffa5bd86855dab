"""The one executor: any valid schedule as one `lax.scan` over its ticks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.typing import Array, PyTree
from ..jaxpr.pieces import as_it_lies
from ..schedule import Phase, Schedule, Slots, assign_slots
from .stage import (
    Data,
    DividedBackward,
    Frozen,
    Rest,
    StageLoss,
    StageOperands,
    StageProgram,
    Start,
    Wire,
    pull_back,
)
from .tables import (
    NONE,
    Into,
    Lane,
    Packing,
    State,
    Tick,
    TickProgram,
    Totals,
    buffers_of,
    empty,
    from_rank,
    get,
    outgoing,
    program_of,
    put,
    where,
    zeros,
)
from .vocabulary import Embedding, Lookup


@dataclasses.dataclass(frozen=True, eq=False)
class Executor:
    """Runs the forward and backward passes of all microbatches, in the order of a schedule.

    In each tick a rank does the actions of its cell, each a branch that nothing is computed in
    when the cell lacks it. What crosses between ranks is sent after them, by permutations that
    every rank takes part in: a permutation within a branch would wait for ranks that never come.
    Buffers have as many slots as values are alive at once, however many microbatches there are.

    A backward pass recomputes its stage from the input, or takes what the forward pass kept. When
    it recomputes, the forward pass of the last stage is left to it altogether.

    Args:
        schedule: a valid table.
        stages: the programs of its stages.
        axis: the mesh axis of the pipeline.
        weights: the rows of this rank's block parameters, those that are trained.
        rest: all other parameters; None at the places of frozen ones.
        data: (index of a microbatch) -> what is known of it.
        scale: what the loss is multiplied by on the way back.
        keeps: whether forward passes keep residuals; else backward passes recompute.
        frozen_weights, frozen_rest: those that are not trained.
        learned: by number, the first values of the buffers that stages change: those of a
            microbatch are what the one before has left, in the order of the table.
        once: those of them that every microbatch finds as they were at first.
        means: those of the latter that become the mean of what the microbatches make of them.
        parted: the numbers of the rest of which every rank has a part of the vocabulary.
        lookups: those in what is parted, which all ranks do together where the table says so.
    """

    schedule: Schedule
    stages: Sequence[StageProgram]
    axis: str
    weights: list[list[Any]]
    rest: list[Any]
    data: Callable[[Array], Data]
    scale: Array | None = None
    keeps: bool = False
    frozen_weights: list[list[Any]] = dataclasses.field(default_factory=list)
    frozen_rest: list[Any] = dataclasses.field(default_factory=list)
    learned: Mapping[int, Array] = dataclasses.field(default_factory=dict)
    once: Collection[int] = ()
    means: Collection[int] = ()
    parted: Collection[int] = ()
    lookups: Sequence[Lookup] = ()

    def run(self) -> Totals:
        """Runs the schedule inside `shard_map`; returns this rank's sums."""
        rank = jax.lax.axis_index(self.axis)
        # All ranks run one program; what differs between them is this row of the tables.
        lanes = [
            {name: jnp.asarray(x)[rank] for name, x in lane.columns.items()}
            for lane in self.program.lanes
        ]
        channels = [
            {lane: jnp.asarray(slot)[rank] for lane, slot in channel.slots.items()}
            for channel in self.program.channels
        ]
        # The scan itself is never differentiated: B, I and W are actions in the tables, so nothing
        # is kept per tick and memory is that of the slots.
        state, _ = jax.lax.scan(self._tick, self._start(), (lanes, channels))
        homes = {i: stage for program in self.stages for i, stage in program.learns.items()}
        ranks = {i: self.schedule.placement[stage] for i, stage in homes.items()}
        after = {i: x[1:].mean(0) if i in self.means else x[-1] for i, x in state.learned.items()}
        made = {i: from_rank(x, rank == ranks[i], self.axis) for i, x in after.items()}
        return state.sums._replace(learned=made)

    @cached_property
    def program(self) -> TickProgram:
        """The tables."""
        return program_of(self.schedule, self.slots)

    @cached_property
    def slots(self) -> dict[str, Slots]:
        """Where every value lies, by the names of the buffers."""
        return buffers_of(assign_slots(self.schedule), self.keeps, self._keeps_lookups)

    @cached_property
    def _wire(self) -> Wire:
        """The shapes of what stages pass on."""
        rows = zeros(self._embedding.shapes)
        example = self._example._replace(rows=rows)
        return jax.eval_shape(lambda: self.stages[0].first(self._all_rest, example))

    @cached_property
    def _embedding(self) -> Embedding:
        return Embedding(self.lookups, self.axis, self.schedule.placement[0], self.data)

    @property
    def _example(self) -> Data:
        return self.data(jnp.int32(0))

    @cached_property
    def _keeps_lookups(self) -> bool:
        program = next(program for program in self.stages if 0 in program.stages)
        start = self._start_of(program, self._example)
        return start.reads_rows(zeros(self._embedding.shapes), zeros(self._wire.floats))

    @cached_property
    def _parts(self) -> list[DividedBackward]:
        """Forward, input gradient and weight gradient of each program, where they are apart."""
        if not (self.keeps or self.schedule.splits_backward):
            return []
        shapes = jax.eval_shape(lambda: (self._example, jnp.int32(0), zeros(self._wire)))

        def divided(program: StageProgram) -> DividedBackward:
            rest, frozen = self._pick(program.middle_uses), self._frozen(program)
            at = StageOperands(self._rows(program), rest, *shapes, frozen=frozen)
            return DividedBackward.of(program, at, self._wire.floats, self.keeps)

        return list(map(divided, self.stages))

    @cached_property
    def _stash(self) -> Packing:
        """What a forward keeps: the output of the stage, and residuals."""
        output = jax.tree.leaves(self._wire)
        if not self.keeps:
            return Packing.of([()])
        return Packing.of([[*output, *part.shapes(part.kept)] for part in self._parts])

    @cached_property
    def _held(self) -> Packing:
        return Packing.of([part.shapes(part.held) for part in self._parts] or [()])

    def _start(self) -> State:
        shape, count = self._wire, self.schedule.num_microbatches + 1
        wire = zeros(shape)
        loss = jax.eval_shape(lambda: self.stages[-1].last(self._all_rest, self._example, wire))
        num = {name: slots.num_slots for name, slots in self.slots.items()}
        return State(
            inputs=empty(shape, max(num["inputs"], 1)),
            gradients=empty(shape.floats, max(num["gradients"], 1)),
            stash=empty(list(self._stash.packed), num["stash"]),
            held=empty(list(self._held.packed), num["held"]),
            outputs=empty(shape, num["outputs"]),
            lookups=empty(self._embedding.shapes, num["lookups"]),
            scatters=empty(self._embedding.shapes, num["scatters"]),
            sums=Totals(
                rows=zeros(self.weights, wide=True),
                rest={i: zeros(x, wide=True) for i, x in enumerate(self.rest) if _is_float(x)},
                loss=zeros(loss, wide=True),
            ),
            learned={i: empty(x, count).at[0].set(x) for i, x in self.learned.items()},
        )

    @cached_property
    def _all_rest(self) -> Rest:
        every = range(len(self.rest))
        return self._pick(every) | self._pick_frozen(every)

    def _tick(self, state: State, tables: tuple[list[Tick], list[Any]]) -> tuple[State, None]:
        lanes, arrivals = tables
        sent = []
        for lane, tick in zip(self.program.lanes, lanes, strict=True):
            state, result = self._do(lane, tick, state)
            sent.append(result)
        with jax.named_scope("transfer"):
            # Every rank takes part in every permutation, in each tick, whether it has something to
            # send or not: a permutation inside a branch would wait for ranks that take another.
            for channel, slots in zip(self.program.channels, arrivals, strict=True):
                send = partial(jax.lax.ppermute, axis_name=self.axis, perm=channel.pairs)
                arrived = jax.tree.map(send, outgoing(list(slots), lanes, sent))
                for lane, slot in slots.items():
                    state = self._receive(self.program.lanes[lane].phase, slot, arrived, state)
        return state, None

    def _receive(self, phase: Phase, slot: Array, value: Wire, state: State) -> State:
        if phase is Phase.F:
            # What arrives with NONE is zeros or another rank's leftovers: it is written nowhere.
            return state._replace(inputs=put(state.inputs, slot, value, slot != NONE))
        return state._replace(gradients=put(state.gradients, slot, value.floats, slot != NONE))

    def _do(self, lane: Lane, tick: Tick, state: State) -> tuple[State, Any]:
        """Runs one lane; returns the new state and what may be sent."""
        embedding = self._embedding
        act = {
            Phase.E: lambda tick, state: (embedding.look_up(tick, state, self._all_rest), None),
            Phase.F: self._forward,
            Phase.V: self._vocabulary,
            Phase.B: self._backward,
            Phase.I: self._input_gradient,
            Phase.W: self._weight_gradient,
            Phase.G: lambda tick, state: (embedding.scatter(tick, state), None),
        }[lane.phase]
        with jax.named_scope(f"{lane.phase}"):
            state, result = act(tick, state)
        if (lane.columns["hand_over"] != NONE).any():
            state = self._receive(lane.phase, tick["hand_over"], result, state)
        return state, result

    def _choose(
        self, tick: Tick, active: Array, branch: Callable, idle: Callable, operand: PyTree
    ) -> PyTree:
        """Runs the branch of the stage of this tick, or none."""
        number = np.zeros(self.schedule.num_stages, np.int32)
        for index, program in enumerate(self.stages):
            number[list(program.stages)] = index + 1
        # Branch 0 is the idle one; programs count from 1.
        index = jnp.where(active, jnp.asarray(number)[tick["stage"]], 0)
        branches = [
            lambda operand, i=i: as_it_lies(branch(i, self.stages[i], operand))
            for i in range(len(self.stages))
        ]
        return jax.lax.switch(index, [lambda x: as_it_lies(idle(x)), *branches], operand)

    def _no_gradient(self, operand: Sequence[Any]) -> tuple:
        return (zeros(self._wire.floats), *operand[1:])

    @cached_property
    def _leaves_last(self) -> bool:
        """Whether the last stage's forward pass is left to its backward pass.

        That mostly follows at once, and needs the output for the loss: run in its place, too, it
        would be computed twice for nothing. It must not change what the stage learns, from one
        microbatch to the next.
        """
        if self.keeps or self.schedule.splits_vocabulary:
            return False
        last = self.schedule.num_stages - 1
        return not self.learned or self.schedule.in_order(last, (Phase.B, Phase.I))

    def _forward(self, tick: Tick, state: State) -> tuple[State, Wire]:
        stage, last = tick["stage"], self.schedule.num_stages - 1

        def run(i: int, program: StageProgram, operand: Any) -> tuple[Wire, Wire, list, dict]:
            inputs, stash, learned = operand
            data = self._data(tick, learned)
            looked_up = data._replace(rows=get(state.lookups, tick["lookups"]))
            first = partial(program.first, self._all_rest, looked_up)
            x = program.at(0, stage, first, lambda: get(inputs, tick["inputs"]))
            rest = self._pick(program.middle_uses)
            at = StageOperands(self._rows(program), rest, data, stage, x, self._frozen(program))
            if not self.keeps:
                if self._leaves_last and last == 0:
                    return x, x, stash, learned
                y = at.run(program)
                return x, y.sent, stash, self._learned(program, tick, y, learned)
            y, kept = self._parts[i].forward(at)
            values = self._stash.pack(i, [*jax.tree.leaves(y.sent), *kept])
            learned = self._learned(program, tick, y, learned)
            return x, y.sent, put(stash, tick["stash"], values), learned

        active = tick["active"] & ~((stage == last) & (stage > 0) & self._leaves_last)
        operand = (state.inputs, state.stash, state.learned)

        def idle(operand: Sequence[Any]) -> tuple:
            return (zeros(self._wire), zeros(self._wire), *operand[1:])

        x, y, stash, learned = self._choose(tick, active, run, idle, operand)
        state = state._replace(learned=learned)
        if self.schedule.splits_vocabulary:
            kept = put(state.outputs, tick["outputs"], y, active & (stage == last))
            state = state._replace(outputs=kept)
        if self.keeps:
            return state._replace(stash=stash), y
        # Other stages find their input in the slot already; the first has just made its own.
        inputs = put(state.inputs, tick["inputs"], x, tick["active"] & (stage == 0))
        return state._replace(inputs=inputs), y

    def _vocabulary(self, tick: Tick, state: State) -> tuple[State, list[Array]]:
        """The loss by all ranks together; the last stage's one keeps it, and the gradient."""
        is_home = jax.lax.axis_index(self.axis) == self.schedule.placement[-1]

        def run(operand: tuple[Wire, Totals]) -> tuple[list[Array], Totals]:
            outputs, sums = operand
            y = from_rank(get(outputs, tick["outputs"]), is_home, self.axis)
            return self._loss(self.stages[-1], tick, y, sums, is_home)

        # All ranks take this branch in the same ticks: sums within it wait for nobody.
        operand = state.outputs, state.sums
        result, sums = jax.lax.cond(tick["active"], run, self._no_gradient, operand)
        gradients = put(state.gradients, tick["gradients"], result, tick["active"] & is_home)
        return state._replace(sums=sums, gradients=gradients), result

    def _backward(self, tick: Tick, state: State) -> tuple[State, Wire]:
        def run(i: int, program: StageProgram, operand: Any) -> tuple:
            state, sums, scatters, learned = operand
            at = self._operands(program, tick, state, learned)
            if self.keeps:
                y, kept = self._kept(i, tick, state)
                seed, sums = self._seed(program, tick, y, state, sums)
                inputs, held = self._parts[i].input_gradient(at, kept, seed)
                weights, rest = self._parts[i].weight_gradient(at, held)
            else:
                y, pull = pull_back(program, at)
                seed, sums = self._seed(program, tick, y, state, sums)
                weights, rest, inputs = pull(seed)
                learned = self._learned(program, tick, y, learned, in_backward=True)
            sums = sums.add_rows(program.rows, weights).add_rest(rest)
            back = self._before(program, tick, inputs, state, (sums, scatters))
            return inputs, *back, learned

        # A branch gets what it changes as an operand of its own: XLA writes such a buffer in place
        # and copies one that stands among others that are only read.
        read = state._replace(sums=None, scatters=[], learned={})
        operand = (read, state.sums, state.scatters, state.learned)
        result, sums, back, learned = self._choose(
            tick, tick["active"], run, self._no_gradient, operand
        )
        return state._replace(sums=sums, scatters=back, learned=learned), Wire(result, [])

    def _input_gradient(self, tick: Tick, state: State) -> tuple[State, Wire]:
        def run(i: int, program: StageProgram, operand: Any) -> tuple:
            state, buffers, sums, scatters, learned = operand
            at = self._operands(program, tick, state, learned)
            if self.keeps:
                y, kept = self._kept(i, tick, state)
            else:
                y, kept = self._parts[i].forward(at)
                learned = self._learned(program, tick, y, learned, in_backward=True)
            seed, sums = self._seed(program, tick, y, state, sums)
            result, held = self._parts[i].input_gradient(at, kept, seed)
            buffers = put(buffers, tick["held"], self._held.pack(i, held))
            back = self._before(program, tick, result, state, (sums, scatters))
            return result, buffers, *back, learned

        read = state._replace(sums=None, held=[], scatters=[], learned={})
        operand = (read, state.held, state.sums, state.scatters, state.learned)
        result, held, sums, back, learned = self._choose(
            tick, tick["active"], run, self._no_gradient, operand
        )
        state = state._replace(sums=sums, held=held, scatters=back, learned=learned)
        return state, Wire(result, [])

    def _weight_gradient(self, tick: Tick, state: State) -> tuple[State, None]:
        def run(i: int, program: StageProgram, operand: Any) -> Totals:
            state, sums = operand
            held = self._held.unpack(i, get(state.held, tick["held"]))
            at = self._operands(program, tick, state, state.learned)
            grads = self._parts[i].weight_gradient(at, held)
            return sums.add_rows(program.rows, grads[0]).add_rest(grads[1])

        operand = (state._replace(sums=None), state.sums)
        sums = self._choose(tick, tick["active"], run, lambda operand: operand[1], operand)
        return state._replace(sums=sums), None

    def _operands(
        self, program: StageProgram, tick: Tick, state: State, learned: Mapping[int, Array]
    ) -> StageOperands:
        """What a backward pass starts from; the input is a placeholder where it was kept."""
        rest = self._pick(program.middle_uses)
        data = self._data(tick, learned)
        wire = zeros(self._wire) if self.keeps else get(state.inputs, tick["inputs"])
        frozen = self._frozen(program)
        return StageOperands(self._rows(program), rest, data, tick["stage"], wire, frozen)

    def _data(self, tick: Tick, learned: Mapping[int, Array]) -> Data:
        """What the middle of a stage knows of a microbatch."""
        data = self.data(tick["microbatch"])
        buffers = list(data.buffers)
        for i, history in learned.items():
            buffers[i] = history[0] if i in self.once else get(history, tick["microbatch"])
        return data._replace(buffers=buffers)

    def _learned(
        self,
        program: StageProgram,
        tick: Tick,
        output: Wire,
        learned: Mapping[int, Array],
        in_backward: bool = False,
    ) -> dict[int, Array]:
        """The values of buffers over time, with those that a stage has left for what comes next.

        A backward pass that runs the stage again has nothing to add, unless it is the first to run
        it at all.
        """
        new, last = dict(learned), self.schedule.num_stages - 1
        for (i, home), value in zip(program.learns.items(), output.left, strict=True):
            if in_backward and not (self._leaves_last and home == last):
                continue
            when = None if program.stages == (home,) else tick["stage"] == home
            new[i] = put(new[i], tick["microbatch"] + 1, value, when)
        return new

    def _kept(self, i: int, tick: Tick, state: State) -> tuple[Wire, list[Array]]:
        """The output of a stage and the residuals that its forward pass kept."""
        values = self._stash.unpack(i, get(state.stash, tick["stash"]))
        leaves, structure = jax.tree.flatten(self._wire)
        count = len(leaves)
        return jax.tree.unflatten(structure, values[:count]), values[count:]

    def _seed(
        self, program: StageProgram, tick: Tick, output: Wire, state: State, sums: Totals
    ) -> tuple[list[Array], Totals]:
        """The gradient of a stage's output: received, or that of the loss at the last stage."""
        if self.schedule.splits_vocabulary:
            return get(state.gradients, tick["gradients"]), sums
        of_loss = partial(self._loss, program, tick, output, sums)
        last, slot = self.schedule.num_stages - 1, tick["gradients"]
        return program.at(last, tick["stage"], of_loss, lambda: (get(state.gradients, slot), sums))

    def _loss(
        self, at: StageProgram, tick: Tick, y: Wire, sums: Totals, counts: Array | None = None
    ) -> tuple[list[Array], Totals]:
        """The gradient of an output by the loss; of ranks that know all of it, one `counts`."""
        data = self.data(tick["microbatch"])

        def objective(rest: Rest, floats: list[Array]) -> tuple[Array, StageLoss]:
            loss = at.last({**rest, **frozen}, data, Wire(floats, y.others))
            # The loss scale multiplies what is differentiated, and not what is reported.
            return loss.total if self.scale is None else loss.total * self.scale, loss

        rest, frozen = self._pick(at.last_uses), self._pick_frozen(at.last_uses)
        grads, loss = jax.grad(objective, argnums=(0, 1), has_aux=True)(rest, y.floats)
        of_rest = {i: x if i in self.parted else where(counts, x) for i, x in grads[0].items()}
        return grads[1], sums.add_loss(where(counts, loss)).add_rest(of_rest)

    def _before(
        self, program: StageProgram, tick: Tick, gradient: list[Array], state: State, into: Into
    ) -> Into:
        """Adds the gradients of what stands before the first block, at the first stage."""
        data = self.data(tick["microbatch"])._replace(rows=get(state.lookups, tick["lookups"]))
        start = self._start_of(program, data)

        def of_first() -> Into:
            sums, scatters = into
            of_rest, of_rows = start.back(data.rows, gradient)
            return sums.add_rest(of_rest), put(scatters, tick["scatters"], of_rows)

        if start.is_frozen and not data.rows:
            return into
        return program.at(0, tick["stage"], of_first, lambda: into)

    def _start_of(self, program: StageProgram, data: Data) -> Start:
        uses = program.first_uses
        return Start(program.first, self._pick(uses), self._pick_frozen(uses), data)

    def _rows(self, program: StageProgram) -> list[list[Array]]:
        return [self.weights[row] for row in program.rows]

    def _frozen(self, program: StageProgram) -> Frozen:
        rest = self._pick_frozen(program.middle_uses)
        if not self.frozen_weights:
            return Frozen((), rest)
        return Frozen([self.frozen_weights[row] for row in program.rows], rest)

    def _pick(self, numbers: Sequence[int]) -> Rest:
        return {i: self.rest[i] for i in numbers if self.rest[i] is not None}

    def _pick_frozen(self, numbers: Sequence[int]) -> Rest:
        frozen = self.frozen_rest
        return {i: frozen[i] for i in numbers if frozen and frozen[i] is not None}


def _is_float(x: Array | None) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
