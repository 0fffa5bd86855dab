"""Runs any valid pipeline schedule as one `lax.scan` over its ticks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.compat import RUN_TWICE
from ..core.reduction import mean_of_copies
from ..core.typing import Array, PyTree
from ..ir.pieces import unconstrained
from ..schedule import Phase, Schedule, Slots, assign_slots
from .stage import (
    Frozen,
    MicrobatchData,
    Rest,
    StageLoss,
    StageOperands,
    StagePasses,
    StageProgram,
    Start,
    Wire,
    pull_back,
)
from .tables import (
    NONE,
    GradientSums,
    LaneEntry,
    Packing,
    ScanTables,
    State,
    Totals,
    add,
    empty,
    from_rank,
    get,
    masked,
    outgoing,
    put,
    scan_tables_of,
    slots_by_name,
    zeros,
)
from .vocabulary import Embedding, Lookup


class BoundProgram(NamedTuple):
    """The program of some stages, bound to the parameters of this rank that it reads.

    Args:
        program: the program of the stages.
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

    In each tick a rank runs the actions of its cell. Each action is a conditional, which computes
    nothing if the cell does not contain it. Activations and gradients are sent after the actions,
    by `ppermute`s that every rank executes, outside the conditionals. A `ppermute` inside a
    conditional would hang, because ranks in the other branch would never join it. Values are kept
    in slots, as many as there are values of a kind that are live at the same time. With GPipe and
    looped BFS that is one per microbatch and chunk. With 1F1B and its relatives it does not depend
    on the number of microbatches.

    A backward pass either recomputes its stage from the stage's input, or reads the residuals of
    the forward pass. If it recomputes, the last stage's forward runs only within its backward,
    unless the vocabulary is split or buffers would be updated in another order.

    Args:
        schedule: a valid table.
        programs: the programs of its stages; one may run several.
        axis: the mesh axis of the pipeline.
        weights: the trained rows of this rank's block parameters.
        rest: the parameters outside the blocks; None in place of frozen ones.
        data: (index of a microbatch) -> its `MicrobatchData`.
        scale: the factor of the differentiated loss: the loss scale over the mean weight of a
            microbatch; None for 1.
        saves_residuals: whether forward passes save residuals; otherwise backward passes recompute.
        frozen_weights, frozen_rest: the parameters that are not trained.
        initial_buffers: the initial values of the buffers that stages update, by the numbers of the
            buffers. Microbatch m reads the value that microbatch m-1 wrote, except of the buffers
            in `reads_initial`.
        reads_initial: the numbers of the mutable buffers whose initial value every microbatch
            reads.
        averaged_buffers: the numbers in `reads_initial` whose new value is the mean over the
            microbatches.
        partitioned: the numbers of the parameters in `rest` that are split over the ranks by
            rows of the vocabulary.
        lookups: the lookups in partitioned tables, which all ranks run together in the ticks of `E`
            and `G`.

    Attributes:
        bound: the programs of the stages, with their parameters.
        all_rest: all parameters outside the blocks, by number.
        embedding: the lookups as actions.
        wire: the shapes of the values that stages send.
        passes: forward, input gradient and weight gradient of each program, if the backward
            pass is split or residuals are saved.
        stash: the packed form of the values that a forward pass saves: the stage's output and its
            residuals.
        held: the packed form of the intermediates that an input gradient saves for the weight
            gradient.
        slots: the slots of all values, by field of `State`.
        tables: the actions and transfers of every tick.
        fuse_last_forward: whether the last stage's forward pass runs only within its backward pass.
            Nothing reads the last stage's output before its backward pass, which recomputes it for
            the loss, so a separate forward pass would be wasted. Fusing must not change the order
            in which the stage updates its buffers.
    """

    schedule: Schedule
    programs: Sequence[StageProgram]
    axis: str
    weights: list[list[Any]]
    rest: list[Any]
    data: Callable[[Array], MicrobatchData]
    scale: Array | None = None
    saves_residuals: bool = False
    frozen_weights: list[list[Any]] = dataclasses.field(default_factory=list)
    frozen_rest: list[Any] = dataclasses.field(default_factory=list)
    initial_buffers: Mapping[int, Array] = dataclasses.field(default_factory=dict)
    reads_initial: Collection[int] = ()
    averaged_buffers: Collection[int] = ()
    partitioned: Collection[int] = ()
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
        for program in self.programs:
            numbers = program.rows
            frozen_rows = (
                [self.frozen_weights[row] for row in numbers] if self.frozen_weights else ()
            )
            rest, rest_frozen = read(program.middle_uses)
            bound = BoundProgram(
                program,
                weights=[self.weights[row] for row in numbers],
                rest=rest,
                frozen=Frozen(frozen_rows, rest_frozen),
                first=read(program.first_uses),
                last=read(program.last_uses),
            )
            self.bound.append(bound)
        first_rank = self.schedule.placement[0]
        example = self.data(jnp.int32(0))
        self.embedding: Embedding = Embedding(self.lookups, self.axis, first_rank, self.data)
        looked_up = zeros([each.shape for each in self.lookups])
        first_data = example._replace(looked_up=looked_up)
        self.wire: Wire = jax.eval_shape(lambda: self.programs[0].first(self.all_rest, first_data))
        saves_lookups = False
        if self.lookups:
            bound = next(bound for bound in self.bound if 0 in bound.program.stages)
            start = Start(bound.program.first, *bound.first, example)
            saves_lookups = start.reads_looked_up(looked_up, zeros(self.wire.floats))
        self.passes: list[StagePasses] = []
        if self.saves_residuals or self.schedule.splits_backward:
            shapes = jax.eval_shape(lambda: (example, jnp.int32(0), zeros(self.wire)))
            for bound in self.bound:
                operands = StageOperands(bound.weights, bound.rest, *shapes, frozen=bound.frozen)
                arguments = bound.program, operands, self.wire.floats
                self.passes.append(StagePasses.of(*arguments, self.saves_residuals))
        output = jax.tree.leaves(self.wire)
        residuals = [[*output, *b.shapes(b.residuals)] for b in self.passes if self.saves_residuals]
        self.stash: Packing = Packing(residuals or [()])
        self.held: Packing = Packing([p.shapes(p.intermediates) for p in self.passes] or [()])
        self.slots: dict[str, Slots] = slots_by_name(
            assign_slots(self.schedule), self.saves_residuals, saves_lookups
        )
        self.tables: ScanTables = scan_tables_of(self.schedule, self.slots)
        last = self.schedule.num_stages - 1
        self.fuse_last_forward: bool = not (
            self.saves_residuals or self.schedule.splits_vocabulary
        ) and (not self.initial_buffers or self.schedule.in_order(last, (Phase.B, Phase.I)))

    def run(self) -> Totals:
        """Runs the schedule inside `shard_map`; returns this rank's sums."""
        rank = jax.lax.axis_index(self.axis)
        # All ranks run the same program (SPMD); only their row of the tables differs.
        lanes = [
            {name: jnp.asarray(x)[rank] for name, x in lane.columns.items()}
            for lane in self.tables.lanes
        ]
        channels = [
            {lane: jnp.asarray(slot)[rank] for lane, slot in channel.slots.items()}
            for channel in self.tables.channels
        ]
        wire = zeros(self.wire)
        last = self.programs[-1].last
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
            buffer_histories={
                i: empty(x, self.schedule.num_microbatches + 1).at[0].set(x)
                for i, x in self.initial_buffers.items()
            },
        )
        # The scan itself is never differentiated: B, I and W are actions in the tables. So it saves
        # no residuals per tick, and its memory is that of the slots.
        state, _ = jax.lax.scan(self._tick, start, (lanes, channels))
        stages = {
            i: stage for program in self.programs for i, stage in program.buffer_stages.items()
        }
        ranks = {i: self.schedule.placement[stage] for i, stage in stages.items()}
        final = {
            i: mean_of_copies(history[1:]) if i in self.averaged_buffers else history[-1]
            for i, history in state.buffer_histories.items()
        }
        replicated = {i: from_rank(x, rank == ranks[i], self.axis) for i, x in final.items()}
        return state.sums._replace(final_buffers=replicated)

    def _tick(self, state: State, tables: tuple[list[LaneEntry], list[Any]]) -> tuple[State, None]:
        lanes, arrivals = tables
        embedding = self.embedding
        act: dict[Phase, Callable[[LaneEntry, State], tuple[State, Any]]] = {
            Phase.E: lambda entry, state: (embedding.look_up(entry, state, self.all_rest), None),
            Phase.F: self._forward,
            Phase.V: self._vocabulary,
            Phase.B: self._backward,
            Phase.I: self._input_gradient,
            Phase.W: self._weight_gradient,
            Phase.G: lambda entry, state: (embedding.scatter(entry, state), None),
        }
        sent = []
        for lane, entry in zip(self.tables.lanes, lanes, strict=True):
            with jax.named_scope(f"{lane.phase}"):
                state, result = act[lane.phase](entry, state)
            if (lane.columns["hand_over"] != NONE).any():
                state = self._receive(lane.phase, entry["hand_over"], result, state)
            sent.append(result)
        with jax.named_scope("transfer"):
            # Every rank executes every permutation in each tick, even if it has nothing to send. A
            # permutation inside a branch hangs if any rank takes another branch.
            for channel, slots in zip(self.tables.channels, arrivals, strict=True):
                send = partial(jax.lax.ppermute, axis_name=self.axis, perm=channel.pairs)
                arrived = jax.tree.map(send, outgoing(list(slots), lanes, sent))
                for lane, slot in slots.items():
                    state = self._receive(self.tables.lanes[lane].phase, slot, arrived, state)
        return state, None

    def _receive(self, phase: Phase, slot: Array, value: Wire, state: State) -> State:
        if phase is Phase.F:
            # A value that arrives with NONE is not for this rank and is dropped.
            return state._replace(inputs=put(state.inputs, slot, value, slot != NONE))
        return state._replace(gradients=put(state.gradients, slot, value.floats, slot != NONE))

    def _choose(
        self,
        entry: LaneEntry,
        active: Array,
        branch: Callable,
        result_shapes: Sequence[PyTree],
        operand: Any,
    ) -> PyTree:
        """Runs the branch for the stage of this tick.

        Args:
            entry: contains the stage.
            active: whether the tick has this action; otherwise the results are zeros and the state
                is unchanged.
            branch: (number of a program, the program, operand) -> results and the new state.
            result_shapes: the shapes of the results.
            operand: the values that the branch only reads, then the state that it updates.
        """
        branch_of_stage = np.zeros(self.schedule.num_stages, np.int32)
        for number, program in enumerate(self.programs):
            branch_of_stage[list(program.stages)] = number + 1
        # Branch 0 is idle; the programs are branches 1 and up.
        index = jnp.where(active, jnp.asarray(branch_of_stage)[entry["stage"]], 0)
        branches = [
            lambda operand: unconstrained((*map(zeros, result_shapes), *operand[1:])),
            *(
                lambda operand, i=i, bound=bound: unconstrained(branch(i, bound, operand))
                for i, bound in enumerate(self.bound)
            ),
        ]
        return jax.lax.switch(index, branches, operand)

    def _forward(self, entry: LaneEntry, state: State) -> tuple[State, Wire]:
        stage = entry["stage"]
        last = self.schedule.num_stages - 1

        def run(i: int, bound: BoundProgram, operand: Any) -> tuple[Wire, Wire, list, dict]:
            inputs, stash, histories = operand
            program = bound.program
            data = self._data(entry, histories)
            first_data = data._replace(looked_up=get(state.lookups, entry["lookups"]))
            first = partial(program.first, self.all_rest, first_data)
            x = program.at_stage(0, stage, first, lambda: get(inputs, entry["inputs"]))
            operands = StageOperands(bound.weights, bound.rest, data, stage, x, bound.frozen)
            if not self.saves_residuals:
                if self.fuse_last_forward and last == 0:
                    return x, x, stash, histories
                # The stage runs forward here, and again in its backward pass. `inspect.waterfall`
                # counts the run with this name as the extra one. A fused last stage runs forward
                # only in its backward pass and repeats nothing, so the run there has no such name.
                with jax.named_scope(RUN_TWICE):
                    y = operands.run(program)
                return x, y.sent, stash, self._updated_buffers(program, entry, y, histories)
            y, residuals = self.passes[i].forward(operands)
            values = self.stash.pack([*jax.tree.leaves(y.sent), *residuals])
            histories = self._updated_buffers(program, entry, y, histories)
            return x, y.sent, put(stash, entry["stash"], values), histories

        active = entry["active"] & ~((stage == last) & (stage > 0) & self.fuse_last_forward)
        operand = (state.inputs, state.stash, state.buffer_histories)
        x, y, stash, histories = self._choose(entry, active, run, (self.wire, self.wire), operand)
        state = state._replace(buffer_histories=histories)
        if self.schedule.splits_vocabulary:
            outputs = put(state.outputs, entry["outputs"], y, active & (stage == last))
            state = state._replace(outputs=outputs)
        if self.saves_residuals:
            return state._replace(stash=stash), y
        # Other stages received their input in this slot; the first stage has just computed its own.
        inputs = put(state.inputs, entry["inputs"], x, entry["active"] & (stage == 0))
        return state._replace(inputs=inputs), y

    def _vocabulary(self, entry: LaneEntry, state: State) -> tuple[State, list[Array]]:
        """Computes the loss split over all ranks.

        Each rank keeps the gradients of its share of the vocabulary; only the last stage's rank
        keeps the loss and the other gradients.
        """
        is_home = jax.lax.axis_index(self.axis) == self.schedule.placement[-1]

        def run(operand: tuple[Wire, Totals]) -> tuple[list[Array], Totals]:
            outputs, sums = operand
            y = from_rank(get(outputs, entry["outputs"]), is_home, self.axis)
            return self._loss(self.bound[-1], entry, y, sums, is_home)

        # All ranks take this branch in the same ticks, so its collectives do not hang.
        operand = state.outputs, state.sums
        result, sums = jax.lax.cond(
            entry["active"], run, lambda x: (zeros(self.wire.floats), x[1]), operand
        )
        gradients = put(state.gradients, entry["gradients"], result, entry["active"] & is_home)
        return state._replace(sums=sums, gradients=gradients), result

    def _backward(self, entry: LaneEntry, state: State) -> tuple[State, Wire]:
        def run(i: int, bound: BoundProgram, operand: Any) -> tuple:
            state, sums, scatters, histories = operand
            operands = self._operands(bound, entry, state, histories)
            if self.saves_residuals:
                y, residuals = self._stashed(i, entry, state)
                seed, sums = self._seed(bound, entry, y, state, sums)
                inputs, intermediates = self.passes[i].input_gradient(operands, residuals, seed)
                weights, rest = self.passes[i].weight_gradient(operands, intermediates)
            else:
                y, pull = pull_back(bound.program, operands)
                seed, sums = self._seed(bound, entry, y, state, sums)
                weights, rest, inputs = pull(seed)
                histories = self._updated_buffers(
                    bound.program, entry, y, histories, in_backward=True
                )
            sums = sums.add_rows(bound.program.rows, weights).add_rest(rest)
            back = self._backward_of_first_layers(bound, entry, inputs, state, (sums, scatters))
            return inputs, *back, histories

        # State that a branch updates is passed as its own operand: XLA then writes the buffer in
        # place. It would copy a buffer that is passed among read-only ones.
        read = state._replace(sums=None, scatters=[], buffer_histories={})
        operand = (read, state.sums, state.scatters, state.buffer_histories)
        result, sums, back, histories = self._choose(
            entry, entry["active"], run, (self.wire.floats,), operand
        )
        state = state._replace(sums=sums, scatters=back, buffer_histories=histories)
        return state, Wire(result, [])

    def _input_gradient(self, entry: LaneEntry, state: State) -> tuple[State, Wire]:
        def run(i: int, bound: BoundProgram, operand: Any) -> tuple:
            state, held, sums, scatters, histories = operand
            operands = self._operands(bound, entry, state, histories)
            if self.saves_residuals:
                y, residuals = self._stashed(i, entry, state)
            else:
                y, residuals = self.passes[i].forward(operands)
                histories = self._updated_buffers(
                    bound.program, entry, y, histories, in_backward=True
                )
            seed, sums = self._seed(bound, entry, y, state, sums)
            result, intermediates = self.passes[i].input_gradient(operands, residuals, seed)
            held = put(held, entry["held"], self.held.pack(intermediates))
            back = self._backward_of_first_layers(bound, entry, result, state, (sums, scatters))
            return result, held, *back, histories

        read = state._replace(sums=None, held=[], scatters=[], buffer_histories={})
        operand = (read, state.held, state.sums, state.scatters, state.buffer_histories)
        result, held, sums, back, histories = self._choose(
            entry, entry["active"], run, (self.wire.floats,), operand
        )
        state = state._replace(sums=sums, held=held, scatters=back, buffer_histories=histories)
        return state, Wire(result, [])

    def _weight_gradient(self, entry: LaneEntry, state: State) -> tuple[State, None]:
        def run(i: int, bound: BoundProgram, operand: Any) -> tuple[Totals]:
            state, sums = operand
            intermediates = self.held.unpack(i, get(state.held, entry["held"]))
            operands = self._operands(bound, entry, state, state.buffer_histories)
            grads = self.passes[i].weight_gradient(operands, intermediates)
            return (sums.add_rows(bound.program.rows, grads[0]).add_rest(grads[1]),)

        operand = (state._replace(sums=None), state.sums)
        (sums,) = self._choose(entry, entry["active"], run, (), operand)
        return state._replace(sums=sums), None

    def _operands(
        self,
        bound: BoundProgram,
        entry: LaneEntry,
        state: State,
        histories: Mapping[int, Array],
    ) -> StageOperands:
        """Returns the operands of a backward pass; the input is zeros if residuals replace it."""
        data = self._data(entry, histories)
        wire = zeros(self.wire) if self.saves_residuals else get(state.inputs, entry["inputs"])
        return StageOperands(bound.weights, bound.rest, data, entry["stage"], wire, bound.frozen)

    def _data(self, entry: LaneEntry, histories: Mapping[int, Array]) -> MicrobatchData:
        """Returns the data of a microbatch, with the current values of the buffers."""
        data = self.data(entry["microbatch"])
        buffers = list(data.buffers)
        for i, history in histories.items():
            reads_initial = i in self.reads_initial
            buffers[i] = history[0] if reads_initial else get(history, entry["microbatch"])
        return data._replace(buffers=buffers)

    def _updated_buffers(
        self,
        program: StageProgram,
        entry: LaneEntry,
        output: Wire,
        histories: Mapping[int, Array],
        in_backward: bool = False,
    ) -> dict[int, Array]:
        """Returns the buffers of all microbatches, with the values that a stage has just written.

        A backward pass that recomputes the stage writes nothing, unless the stage's forward pass
        is fused into it.
        """
        new = dict(histories)
        last = self.schedule.num_stages - 1
        for (i, home), value in zip(program.buffer_stages.items(), output.new_buffers, strict=True):
            if in_backward and not (self.fuse_last_forward and home == last):
                continue
            when = None if program.stages == (home,) else entry["stage"] == home
            new[i] = put(new[i], entry["microbatch"] + 1, value, when)
        return new

    def _stashed(self, i: int, entry: LaneEntry, state: State) -> tuple[Wire, list[Array]]:
        """Returns the output of a stage and the residuals that its forward pass saved."""
        values = self.stash.unpack(i, get(state.stash, entry["stash"]))
        leaves, structure = jax.tree.flatten(self.wire)
        count = len(leaves)
        return jax.tree.unflatten(structure, values[:count]), values[count:]

    def _seed(
        self, bound: BoundProgram, entry: LaneEntry, output: Wire, state: State, sums: Totals
    ) -> tuple[list[Array], Totals]:
        """Returns the gradient of a stage's output: received, or computed from the loss."""
        if self.schedule.splits_vocabulary:
            return get(state.gradients, entry["gradients"]), sums
        last = self.schedule.num_stages - 1
        from_loss = partial(self._loss, bound, entry, output, sums)

        def received() -> tuple[list[Array], Totals]:
            return get(state.gradients, entry["gradients"]), sums

        return bound.program.at_stage(last, entry["stage"], from_loss, received)

    def _loss(
        self,
        bound: BoundProgram,
        entry: LaneEntry,
        y: Wire,
        sums: Totals,
        is_counted: Array | None = None,
    ) -> tuple[list[Array], Totals]:
        """Returns the gradient of the loss with respect to the last stage's output.

        Adds the loss and the gradients of its parameters to the sums. If `is_counted` is given,
        only ranks where it is true add the loss and the gradients of parameters that are not
        partitioned.
        """
        data = self.data(entry["microbatch"])
        rest, frozen = bound.last

        def objective(rest: Rest, floats: list[Array]) -> tuple[Array, StageLoss]:
            loss = bound.program.last({**rest, **frozen}, data, Wire(floats, y.others))
            # The loss scale applies to the differentiated loss, not to the reported one.
            return loss.total if self.scale is None else loss.total * self.scale, loss

        grads, loss = jax.grad(objective, argnums=(0, 1), has_aux=True)(rest, y.floats)
        of_rest = grads[0]
        if is_counted is not None:
            of_rest = {
                i: x if i in self.partitioned else masked(is_counted, x) for i, x in of_rest.items()
            }
            loss = masked(is_counted, loss)
        sums = sums._replace(loss=add(sums.loss, loss)).add_rest(of_rest)
        return grads[1], sums

    def _backward_of_first_layers(
        self,
        bound: BoundProgram,
        entry: LaneEntry,
        gradient: list[Array],
        state: State,
        into: GradientSums,
    ) -> GradientSums:
        """Adds the gradients of the layers before the first block; only the first stage does."""
        if not (bound.first[0] or self.lookups):
            return into  # No layer before the first block is trained.
        looked_up = get(state.lookups, entry["lookups"])
        data = self.data(entry["microbatch"])._replace(looked_up=looked_up)
        start = Start(bound.program.first, *bound.first, data)

        def of_first() -> GradientSums:
            sums, scatters = into
            of_rest, of_rows = start.back(data.looked_up, gradient)
            return sums.add_rest(of_rest), put(scatters, entry["scatters"], of_rows)

        return bound.program.at_stage(0, entry["stage"], of_first, lambda: into)
