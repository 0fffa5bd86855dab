"""Runs any valid pipeline schedule as one `lax.scan` over its ticks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.typing import Array, PyTree
from ..ir.pieces import unconstrained
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
    Packing,
    State,
    Tick,
    TickProgram,
    Totals,
    add,
    buffers_of,
    empty,
    from_rank,
    get,
    masked,
    outgoing,
    program_of,
    put,
    zeros,
)
from .vocabulary import Embedding, Lookup


class BoundProgram(NamedTuple):
    """The program of some stages, bound to the parameters of this rank that it reads.

    Args:
        program: of the stages.
        weights: the trained rows of the blocks' parameters.
        rest: the trained parameters outside the blocks that `program.middle` reads.
        frozen: the frozen parameters that `program.middle` reads.
        first: the parameters that `program.first` reads, trained and frozen.
        last: the parameters that `program.last` reads, trained and frozen.
    """

    program: StageProgram
    weights: list[list[Array]]
    rest: Rest
    frozen: Frozen
    first: tuple[Rest, Rest]
    last: tuple[Rest, Rest]


@dataclasses.dataclass(eq=False)
class Executor:
    """Runs the forward and backward passes of all microbatches, in the order of a schedule.

    In each tick a rank runs the actions of its cell: each is a conditional, and computes nothing
    where the cell lacks it. Activations and gradients are sent after the actions, by `ppermute`s
    outside the conditionals, in which every rank takes part; inside, ranks that take the other
    branch would never join, and the rest would hang. Buffers have as many slots as values are live
    at once, however many microbatches there are.

    A backward pass recomputes its stage from the stage's input, or reads the residuals of the
    forward pass. Where it recomputes, the last stage's forward runs only within its backward.

    Args:
        schedule: a valid table.
        stages: the programs of its stages.
        axis: the mesh axis of the pipeline.
        weights: the rows of this rank's block parameters, those that are trained.
        rest: all other parameters; None at the places of frozen ones.
        data: (index of a microbatch) -> its `Data`.
        scale: the loss scale of the backward passes.
        keeps: whether forward passes save residuals; else backward passes recompute.
        frozen_weights, frozen_rest: the parameters that are not trained.
        learned: by number, the first values of the buffers that stages change; each microbatch
            reads what the one before it has written, in the order of the table.
        once: the numbers of those whose first value every microbatch reads.
        means: the numbers in `once` whose new value is the mean over the microbatches.
        parted: the numbers of parameters in `rest` that are split over the ranks by tokens.
        lookups: the lookups in these, which all ranks run together in the ticks of `E` and `G`.

    Attributes:
        bound: the programs of the stages, with their parameters.
        all_rest: all parameters outside the blocks, by number.
        embedding: the lookups as actions.
        wire: the shapes of the values that stages send.
        parts: forward, input gradient and weight gradient of each program, where they are split.
        stash: the packed form of what a forward pass saves: the stage's output and its residuals.
        held: the packed form of the intermediates from an input gradient to a weight gradient.
        slots: the slot of every value, by buffer.
        tables: the actions and transfers of every tick.
        leaves_last: whether the last stage's forward pass runs only within its backward pass. The
            backward mostly follows in the next tick and computes the output again for the loss, so
            that a forward pass before it would be wasted. This must not change the order in which
            the stage updates its buffers.
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

    def __post_init__(self) -> None:
        trained = {i: x for i, x in enumerate(self.rest) if x is not None}
        frozen = {i: x for i, x in enumerate(self.frozen_rest) if x is not None}

        def read(numbers: Sequence[int]) -> tuple[Rest, Rest]:
            return (
                {i: trained[i] for i in numbers if i in trained},
                {i: frozen[i] for i in numbers if i in frozen},
            )

        self.all_rest: Rest = {**trained, **frozen}
        self.bound: list[BoundProgram] = []
        for each in self.stages:
            weights = [self.weights[row] for row in each.rows]
            others = [self.frozen_weights[row] for row in each.rows] if self.frozen_weights else ()
            rest, rest_frozen = read(each.middle_uses)
            of_middle = weights, rest, Frozen(others, rest_frozen)
            ends = read(each.first_uses), read(each.last_uses)
            self.bound.append(BoundProgram(each, *of_middle, *ends))
        home, example = self.schedule.placement[0], self.data(jnp.int32(0))
        self.embedding: Embedding = Embedding(self.lookups, self.axis, home, self.data)
        rows = zeros([each.shape for each in self.lookups])
        looked_up = example._replace(rows=rows)
        self.wire: Wire = jax.eval_shape(lambda: self.stages[0].first(self.all_rest, looked_up))
        keeps_lookups = False
        if self.lookups:
            bound = next(bound for bound in self.bound if 0 in bound.program.stages)
            start = Start(bound.program.first, *bound.first, example)
            keeps_lookups = start.reads_rows(rows, zeros(self.wire.floats))
        self.parts: list[DividedBackward] = []
        if self.keeps or self.schedule.splits_backward:
            shapes = jax.eval_shape(lambda: (example, jnp.int32(0), zeros(self.wire)))
            for bound in self.bound:
                at = StageOperands(bound.weights, bound.rest, *shapes, frozen=bound.frozen)
                self.parts.append(
                    DividedBackward.of(bound.program, at, self.wire.floats, self.keeps)
                )
        output = jax.tree.leaves(self.wire)
        residuals = [[*output, *part.shapes(part.residuals)] for part in self.parts if self.keeps]
        self.stash: Packing = Packing(residuals or [()])
        self.held: Packing = Packing([p.shapes(p.intermediates) for p in self.parts] or [()])
        self.slots: dict[str, Slots] = buffers_of(
            assign_slots(self.schedule), self.keeps, keeps_lookups
        )
        self.tables: TickProgram = program_of(self.schedule, self.slots)
        last = self.schedule.num_stages - 1
        self.leaves_last: bool = not (self.keeps or self.schedule.splits_vocabulary) and (
            not self.learned or self.schedule.in_order(last, (Phase.B, Phase.I))
        )

    def run(self) -> Totals:
        """Runs the schedule inside `shard_map`; returns this rank's sums."""
        rank = jax.lax.axis_index(self.axis)
        # All ranks run one program (SPMD); only this row of the tables differs between them.
        lanes = [
            {name: jnp.asarray(x)[rank] for name, x in lane.columns.items()}
            for lane in self.tables.lanes
        ]
        channels = [
            {lane: jnp.asarray(slot)[rank] for lane, slot in channel.slots.items()}
            for channel in self.tables.channels
        ]
        wire, last = zeros(self.wire), self.stages[-1].last
        lookups = [each.shape for each in self.lookups]
        loss = jax.eval_shape(lambda: last(self.all_rest, self.data(jnp.int32(0)), wire))
        num = {name: slots.num_slots for name, slots in self.slots.items()}
        rest = {i: x for i, x in enumerate(self.rest) if x is not None}
        start = State(
            inputs=empty(self.wire, max(num["inputs"], 1)),
            gradients=empty(self.wire.floats, max(num["gradients"], 1)),
            stash=empty(list(self.stash.packed), num["stash"]),
            held=empty(list(self.held.packed), num["held"]),
            outputs=empty(self.wire, num["outputs"]),
            lookups=empty(lookups, num["lookups"]),
            scatters=empty(lookups, num["scatters"]),
            sums=Totals(
                rows=zeros(self.weights, wide=True),
                rest={
                    i: zeros(x, wide=True)
                    for i, x in rest.items()
                    if jnp.issubdtype(x.dtype, jnp.inexact)
                },
                loss=zeros(loss, wide=True),
            ),
            learned={
                i: empty(x, self.schedule.num_microbatches + 1).at[0].set(x)
                for i, x in self.learned.items()
            },
        )
        # The scan itself is never differentiated: B, I and W are actions in the tables, so it saves
        # no residuals per tick, and its memory is that of the slots.
        state, _ = jax.lax.scan(self._tick, start, (lanes, channels))
        homes = {i: stage for program in self.stages for i, stage in program.learns.items()}
        ranks = {i: self.schedule.placement[stage] for i, stage in homes.items()}
        after = {i: x[1:].mean(0) if i in self.means else x[-1] for i, x in state.learned.items()}
        made = {i: from_rank(x, rank == ranks[i], self.axis) for i, x in after.items()}
        return state.sums._replace(learned=made)

    def _tick(self, state: State, tables: tuple[list[Tick], list[Any]]) -> tuple[State, None]:
        embedding, (lanes, arrivals) = self.embedding, tables
        act = {
            Phase.E: lambda tick, state: (embedding.look_up(tick, state, self.all_rest), None),
            Phase.F: self._forward,
            Phase.V: self._vocabulary,
            Phase.B: self._backward,
            Phase.I: self._input_gradient,
            Phase.W: self._weight_gradient,
            Phase.G: lambda tick, state: (embedding.scatter(tick, state), None),
        }
        sent = []
        for lane, tick in zip(self.tables.lanes, lanes, strict=True):
            with jax.named_scope(f"{lane.phase}"):
                state, result = act[lane.phase](tick, state)
            if (lane.columns["hand_over"] != NONE).any():
                state = self._receive(lane.phase, tick["hand_over"], result, state)
            sent.append(result)
        with jax.named_scope("transfer"):
            # Every rank takes part in every permutation, in each tick, whether it has something to
            # send or not: inside a branch a permutation hangs where a rank takes another branch.
            for channel, slots in zip(self.tables.channels, arrivals, strict=True):
                send = partial(jax.lax.ppermute, axis_name=self.axis, perm=channel.pairs)
                arrived = jax.tree.map(send, outgoing(list(slots), lanes, sent))
                for lane, slot in slots.items():
                    state = self._receive(self.tables.lanes[lane].phase, slot, arrived, state)
        return state, None

    def _receive(self, phase: Phase, slot: Array, value: Wire, state: State) -> State:
        if phase is Phase.F:
            # A value that arrives with NONE is not for this rank, and is dropped.
            return state._replace(inputs=put(state.inputs, slot, value, slot != NONE))
        return state._replace(gradients=put(state.gradients, slot, value.floats, slot != NONE))

    def _choose(
        self, tick: Tick, active: Array, branch: Callable, made: Sequence[PyTree], operand: Any
    ) -> PyTree:
        """Runs the branch for the stage of this tick.

        Args:
            tick: has the stage.
            active: whether the tick has this action; else the results are zeros, and the state
                stays as it is.
            branch: (number of a program, the program, operand) -> results, and the new state.
            made: the shapes of the results.
            operand: the values that it only reads, and after them the state that it updates.
        """
        number = np.zeros(self.schedule.num_stages, np.int32)
        for index, program in enumerate(self.stages):
            number[list(program.stages)] = index + 1
        # Branch 0 is the idle one; programs count from 1.
        index = jnp.where(active, jnp.asarray(number)[tick["stage"]], 0)
        branches = [
            lambda operand: unconstrained((*map(zeros, made), *operand[1:])),
            *(
                lambda operand, i=i, bound=bound: unconstrained(branch(i, bound, operand))
                for i, bound in enumerate(self.bound)
            ),
        ]
        return jax.lax.switch(index, branches, operand)

    def _forward(self, tick: Tick, state: State) -> tuple[State, Wire]:
        stage, last = tick["stage"], self.schedule.num_stages - 1

        def run(i: int, bound: BoundProgram, operand: Any) -> tuple[Wire, Wire, list, dict]:
            inputs, stash, learned = operand
            program, data = bound.program, self._data(tick, learned)
            looked_up = data._replace(rows=get(state.lookups, tick["lookups"]))
            first = partial(program.first, self.all_rest, looked_up)
            x = program.at(0, stage, first, lambda: get(inputs, tick["inputs"]))
            at = StageOperands(bound.weights, bound.rest, data, stage, x, bound.frozen)
            if not self.keeps:
                if self.leaves_last and last == 0:
                    return x, x, stash, learned
                y = at.run(program)
                return x, y.sent, stash, self._learned(program, tick, y, learned)
            y, residuals = self.parts[i].forward(at)
            values = self.stash.pack([*jax.tree.leaves(y.sent), *residuals])
            learned = self._learned(program, tick, y, learned)
            return x, y.sent, put(stash, tick["stash"], values), learned

        active = tick["active"] & ~((stage == last) & (stage > 0) & self.leaves_last)
        operand = (state.inputs, state.stash, state.learned)
        x, y, stash, learned = self._choose(tick, active, run, (self.wire, self.wire), operand)
        state = state._replace(learned=learned)
        if self.schedule.splits_vocabulary:
            outputs = put(state.outputs, tick["outputs"], y, active & (stage == last))
            state = state._replace(outputs=outputs)
        if self.keeps:
            return state._replace(stash=stash), y
        # Other stages find their input in the slot already; the first has just made its own.
        inputs = put(state.inputs, tick["inputs"], x, tick["active"] & (stage == 0))
        return state._replace(inputs=inputs), y

    def _vocabulary(self, tick: Tick, state: State) -> tuple[State, list[Array]]:
        """The loss, split over all ranks; the last stage's rank keeps it and the gradient."""
        is_home = jax.lax.axis_index(self.axis) == self.schedule.placement[-1]

        def run(operand: tuple[Wire, Totals]) -> tuple[list[Array], Totals]:
            outputs, sums = operand
            y = from_rank(get(outputs, tick["outputs"]), is_home, self.axis)
            return self._loss(self.bound[-1], tick, y, sums, is_home)

        # All ranks take this branch in the same ticks, so that collectives in it do not hang.
        operand = state.outputs, state.sums
        result, sums = jax.lax.cond(
            tick["active"], run, lambda x: (zeros(self.wire.floats), x[1]), operand
        )
        gradients = put(state.gradients, tick["gradients"], result, tick["active"] & is_home)
        return state._replace(sums=sums, gradients=gradients), result

    def _backward(self, tick: Tick, state: State) -> tuple[State, Wire]:
        def run(i: int, bound: BoundProgram, operand: Any) -> tuple:
            state, sums, scatters, learned = operand
            at = self._operands(bound, tick, state, learned)
            if self.keeps:
                y, residuals = self._stashed(i, tick, state)
                seed, sums = self._seed(bound, tick, y, state, sums)
                inputs, intermediates = self.parts[i].input_gradient(at, residuals, seed)
                weights, rest = self.parts[i].weight_gradient(at, intermediates)
            else:
                y, pull = pull_back(bound.program, at)
                seed, sums = self._seed(bound, tick, y, state, sums)
                weights, rest, inputs = pull(seed)
                learned = self._learned(bound.program, tick, y, learned, in_backward=True)
            sums = sums.add_rows(bound.program.rows, weights).add_rest(rest)
            back = self._before(bound, tick, inputs, state, (sums, scatters))
            return inputs, *back, learned

        # A branch gets what it changes as an operand of its own: XLA writes such a buffer in place
        # and copies one that stands among others that are only read.
        read = state._replace(sums=None, scatters=[], learned={})
        operand = (read, state.sums, state.scatters, state.learned)
        result, sums, back, learned = self._choose(
            tick, tick["active"], run, (self.wire.floats,), operand
        )
        return state._replace(sums=sums, scatters=back, learned=learned), Wire(result, [])

    def _input_gradient(self, tick: Tick, state: State) -> tuple[State, Wire]:
        def run(i: int, bound: BoundProgram, operand: Any) -> tuple:
            state, buffers, sums, scatters, learned = operand
            at = self._operands(bound, tick, state, learned)
            if self.keeps:
                y, residuals = self._stashed(i, tick, state)
            else:
                y, residuals = self.parts[i].forward(at)
                learned = self._learned(bound.program, tick, y, learned, in_backward=True)
            seed, sums = self._seed(bound, tick, y, state, sums)
            result, intermediates = self.parts[i].input_gradient(at, residuals, seed)
            buffers = put(buffers, tick["held"], self.held.pack(intermediates))
            back = self._before(bound, tick, result, state, (sums, scatters))
            return result, buffers, *back, learned

        read = state._replace(sums=None, held=[], scatters=[], learned={})
        operand = (read, state.held, state.sums, state.scatters, state.learned)
        result, intermediates, sums, back, learned = self._choose(
            tick, tick["active"], run, (self.wire.floats,), operand
        )
        state = state._replace(sums=sums, held=intermediates, scatters=back, learned=learned)
        return state, Wire(result, [])

    def _weight_gradient(self, tick: Tick, state: State) -> tuple[State, None]:
        def run(i: int, bound: BoundProgram, operand: Any) -> tuple[Totals]:
            state, sums = operand
            intermediates = self.held.unpack(i, get(state.held, tick["held"]))
            at = self._operands(bound, tick, state, state.learned)
            grads = self.parts[i].weight_gradient(at, intermediates)
            return (sums.add_rows(bound.program.rows, grads[0]).add_rest(grads[1]),)

        operand = (state._replace(sums=None), state.sums)
        (sums,) = self._choose(tick, tick["active"], run, (), operand)
        return state._replace(sums=sums), None

    def _operands(
        self, bound: BoundProgram, tick: Tick, state: State, learned: Mapping[int, Array]
    ) -> StageOperands:
        """The operands of a backward pass; the input is zeros where residuals replace it."""
        data = self._data(tick, learned)
        wire = zeros(self.wire) if self.keeps else get(state.inputs, tick["inputs"])
        return StageOperands(bound.weights, bound.rest, data, tick["stage"], wire, bound.frozen)

    def _data(self, tick: Tick, learned: Mapping[int, Array]) -> Data:
        """The data of a microbatch, with the current values of the buffers."""
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
        """The buffers of all microbatches, with the values that a stage has just written.

        A backward pass that recomputes the stage writes nothing, unless the stage's forward pass
        runs only there.
        """
        new, last = dict(learned), self.schedule.num_stages - 1
        for (i, home), value in zip(program.learns.items(), output.left, strict=True):
            if in_backward and not (self.leaves_last and home == last):
                continue
            when = None if program.stages == (home,) else tick["stage"] == home
            new[i] = put(new[i], tick["microbatch"] + 1, value, when)
        return new

    def _stashed(self, i: int, tick: Tick, state: State) -> tuple[Wire, list[Array]]:
        """The output of a stage and the residuals that its forward pass saved."""
        values = self.stash.unpack(i, get(state.stash, tick["stash"]))
        leaves, structure = jax.tree.flatten(self.wire)
        count = len(leaves)
        return jax.tree.unflatten(structure, values[:count]), values[count:]

    def _seed(
        self, bound: BoundProgram, tick: Tick, output: Wire, state: State, sums: Totals
    ) -> tuple[list[Array], Totals]:
        """The gradient of a stage's output: received, or that of the loss at the last stage."""
        if self.schedule.splits_vocabulary:
            return get(state.gradients, tick["gradients"]), sums
        of_loss = partial(self._loss, bound, tick, output, sums)
        last, slot, at = self.schedule.num_stages - 1, tick["gradients"], bound.program.at
        return at(last, tick["stage"], of_loss, lambda: (get(state.gradients, slot), sums))

    def _loss(
        self, bound: BoundProgram, tick: Tick, y: Wire, sums: Totals, counts: Array | None = None
    ) -> tuple[list[Array], Totals]:
        """The gradient of the loss by the last output; only the rank with `counts` adds it up."""
        data, (rest, frozen) = self.data(tick["microbatch"]), bound.last

        def objective(rest: Rest, floats: list[Array]) -> tuple[Array, StageLoss]:
            loss = bound.program.last({**rest, **frozen}, data, Wire(floats, y.others))
            # The loss scale multiplies what is differentiated, and not what is reported.
            return loss.total if self.scale is None else loss.total * self.scale, loss

        grads, loss = jax.grad(objective, argnums=(0, 1), has_aux=True)(rest, y.floats)
        of_rest = grads[0]
        if counts is not None:
            of_rest = {i: x if i in self.parted else masked(counts, x) for i, x in of_rest.items()}
            loss = masked(counts, loss)
        sums = sums._replace(loss=add(sums.loss, loss)).add_rest(of_rest)
        return grads[1], sums

    def _before(
        self, bound: BoundProgram, tick: Tick, gradient: list[Array], state: State, into: Into
    ) -> Into:
        """Adds the gradients of the layers before the first block, at the first stage."""
        if not (bound.first[0] or self.lookups):
            return into  # No layer before it is trained.
        data = self.data(tick["microbatch"])._replace(rows=get(state.lookups, tick["lookups"]))
        start = Start(bound.program.first, *bound.first, data)

        def of_first() -> Into:
            sums, scatters = into
            of_rest, of_rows = start.back(data.rows, gradient)
            return sums.add_rest(of_rest), put(scatters, tick["scatters"], of_rows)

        return bound.program.at(0, tick["stage"], of_first, lambda: into)
