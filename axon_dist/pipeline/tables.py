"""A schedule as arrays for the scan over ticks, and the buffers that the scan carries."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..core.reduction import all_sum
from ..core.tree import is_key, shapes_of
from ..core.typing import Array, PyTree
from ..ir.pieces import replicated
from ..schedule import Cell, Phase, Schedule, SlotPlan, Slots, receiver
from .stage import Rest, StageLoss, Wire

Tick: TypeAlias = dict[str, Array]
"""A lane's entries for one rank in one tick."""

NONE = -1
"""The entry for no slot in a table of slots."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """One action that every rank may run in a tick; the lanes of a tick run in order.

    Args:
        phase: of the action.
        columns: tables [D, T], by name: whether the rank is `active`, of which `stage` and
            `microbatch`; the slot of each buffer of `State` that it reads or writes; and
            `hand_over`, the slot from which the next stage on the same rank reads the result.
    """

    phase: Phase
    columns: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Channel:
    """The transfer of results of lanes by one `ppermute` of the ranks.

    Args:
        pairs: (source, target), each rank at most once on either side.
        slots: by the number of the lane that computes them, the slot [D, T] into which the receiver
            writes them at the end of a tick; `NONE` for no transfer. In each tick a rank is active
            in one of these lanes at most.
    """

    pairs: tuple[tuple[int, int], ...]
    slots: Mapping[int, np.ndarray]


class _Sent(NamedTuple):
    source: int
    target: int
    tick: int
    slot: int


@dataclasses.dataclass(frozen=True)
class TickProgram:
    """A schedule as the tables that the executor reads.

    Args:
        lanes: in the order in which a tick runs them.
        channels: the transfers after the lanes.
    """

    lanes: tuple[Lane, ...]
    channels: tuple[Channel, ...]


def buffers_of(
    plan: SlotPlan, stashes: bool = False, keeps_lookups: bool = False
) -> dict[str, Slots]:
    """The buffers that a schedule runs with, by the names that they have in `State`.

    Args:
        plan: the slots of all values.
        stashes: whether forwards save residuals in the `stash`; a stage's input is then needed
            only until its forward.
        keeps_lookups: whether the first stage's backward reads the rows that were looked up, too.
    """
    return {
        "inputs": plan.activations if stashes else plan.inputs,
        "gradients": plan.gradients,
        "stash": plan.stash,
        "held": plan.held,
        "outputs": plan.outputs,
        "lookups": plan.kept_lookups if keeps_lookups else plan.lookups,
        "scatters": plan.scatters,
    }


def program_of(schedule: Schedule, buffers: Mapping[str, Slots]) -> TickProgram:
    """Turns a valid schedule into the tables that one scan over ticks reads.

    Args:
        schedule: a valid table.
        buffers: the slots of its values, by buffer.

    Returns:
        The tables.
    """
    phases = lane_phases(cell for row in schedule.rows for cell in row)
    shape, last = (schedule.num_devices, schedule.num_ticks), schedule.num_stages - 1
    lanes = [
        Lane(
            phase,
            {
                "active": np.zeros(shape, bool),
                **{n: np.zeros(shape, np.int32) for n in ("stage", "microbatch", *buffers)},
                # Slot 0 is a valid slot, so NONE stands for no transfer.
                "hand_over": np.full(shape, NONE, np.int32),
            },
        )
        for phase in phases
    ]
    sent: dict[tuple[int, int], list[_Sent]] = {}
    position = 0
    for action, device, tick, place in schedule.placed():
        # The lanes of a cell rise.
        position = phases.index(action.phase, position + 1 if place else 0)
        stage, phase, microbatch = action
        at, columns = (device, tick), lanes[position].columns
        columns["active"][at] = True
        columns["stage"][at], columns["microbatch"][at] = stage, microbatch
        # A vocabulary action is about the last stage's output and its gradient, on whatever rank it
        # is; what is looked up enters the first stage.
        about = dict.fromkeys(buffers, last if phase is Phase.V else stage)
        for name, of in {**about, "lookups": 0, "scatters": 0}.items():
            columns[name][at] = buffers[name].slot.get((of, microbatch), 0)
        # Where the result goes: a slot here, or one on another rank.
        if (to := receiver(action, schedule.num_stages)) is None:
            continue
        name = "inputs" if phase is Phase.F else "gradients"
        slot, target = buffers[name].slot[to.stage, microbatch], schedule.placement[to.stage]
        if target == device:
            columns["hand_over"][at] = slot
        else:
            # One permutation per lane and distance: ranks that send equally far share it, as in a
            # ring.
            shift = (target - device) % schedule.num_devices
            sent.setdefault((position, shift), []).append(_Sent(device, target, tick, slot))
    return TickProgram(tuple(lanes), _channels(sent, lanes))


def _channels(
    sent: Mapping[tuple[int, int], list[_Sent]], lanes: Sequence[Lane]
) -> tuple[Channel, ...]:
    """What is sent of each lane and as far; lanes that no rank is at in one tick share a channel.

    A rank of a V sends forwards and gradients both ways, and one of the four in a tick.
    """
    shared: list[tuple[int, list[int]]] = []
    for lane, shift in sorted(sent):
        for far, others in shared:
            apart = (
                lanes[lane].phase is not lanes[other].phase
                and not (lanes[lane].columns["active"] & lanes[other].columns["active"]).any()
                for other in others
            )
            if far == shift and all(apart):
                others.append(lane)
                break
        else:
            shared.append((shift, [lane]))
    channels = []
    for shift, of in shared:
        slots = {lane: np.full(lanes[lane].columns["active"].shape, NONE, np.int32) for lane in of}
        pairs = set()
        for lane in of:
            for one in sent[lane, shift]:
                # The receiver's row: it has to know where to put what it did not ask for.
                slots[lane][one.target, one.tick] = one.slot
                pairs.add((one.source, one.target))
        channels.append(Channel(tuple(sorted(pairs)), slots))
    return tuple(channels)


def lane_phases(cells: Iterable[Cell]) -> tuple[Phase, ...]:
    """A short sequence of phases of which every cell is a subsequence.

    The same on every process, and in the order of `Phase` where cells leave it open: a value is
    then written by one lane and read by a later one. XLA updates such a buffer in place, and copies
    one that is read before it is written.

    Example:
        >>> from axon_dist.schedule import Action
        >>> parse = lambda *texts: tuple(map(Action.parse, texts))
        >>> [str(p) for p in lane_phases([parse("0F0"), parse("0B0"), parse("0F1", "0B1")])]
        ['F', 'B']
    """
    order = list(Phase)
    wanted = sorted(
        {tuple(action.phase for action in cell) for cell in cells},
        key=lambda cell: (len(cell), [order.index(phase) for phase in cell]),
    )
    lanes: list[Phase] = []
    # Longest cells first: shorter ones mostly are subsequences of these already.
    for sequence in reversed(wanted):
        position = 0
        for phase in sequence:
            if phase not in lanes[position:]:
                lanes.insert(position, phase)
            position = lanes.index(phase, position) + 1
    return tuple(lanes)


class Totals(NamedTuple):
    """What microbatches add up to, in float32.

    Args:
        rows: gradients of the rows of block parameters.
        rest: gradients of the other parameters, by number.
        loss: sums of losses, of weights, and of weight x metric.
        learned: the buffers that stages have changed, by number; the last microbatch's, and empty
            before it is through.
    """

    rows: list[list[Array]]
    rest: dict[int, Array]
    loss: StageLoss
    learned: Mapping[int, Array] = {}

    def add_rows(self, numbers: Sequence[int], grads: Sequence[Sequence[Array | None]]) -> Totals:
        """Adds gradients of rows, by their numbers; None at the places of frozen leaves."""
        rows = list(self.rows)
        for row, of_row in zip(numbers, grads, strict=True):
            rows[row] = add(list(rows[row]), list(of_row))
        return self._replace(rows=rows)

    def add_rest(self, grads: Rest) -> Totals:
        """Adds gradients of parameters outside the blocks."""
        return self._replace(rest={**self.rest, **add({i: self.rest[i] for i in grads}, grads)})


Into: TypeAlias = tuple[Totals, list[Array]]
"""The sums that the gradients before the first block are added to, and the slots of scatters."""


class State(NamedTuple):
    """The carry of the scan over ticks; buffers have a leading dim of slots.

    Args:
        inputs: inputs of stages.
        gradients: gradients of the outputs of stages.
        stash: outputs and residuals that forwards save.
        held: intermediates from input gradients to weight gradients.
        outputs: outputs of the last stage, where the schedule has the action `V`.
        lookups: rows looked up for the first stage, where the schedule has the action `E`.
        scatters: the gradients of these rows.
        sums: the `Totals` so far; None where an action only reads the buffers.
        learned: by number, the value of each buffer that stages change before each microbatch and
            after the last, for the stages of this rank; zeros where other ranks change it.
    """

    inputs: Wire
    gradients: list[Array]
    stash: list[Array]
    held: list[Array]
    outputs: Wire
    lookups: list[Array]
    scatters: list[Array]
    sums: Any
    learned: dict[int, Array]


def empty(shapes: PyTree, num_slots: int) -> PyTree:
    """Buffers of zeros for values of some shapes."""
    return jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), shapes)


def zeros(shapes: PyTree, wide: bool = False) -> PyTree:
    """Values of zeros of some shapes; `wide` makes sums that start there float32 at least."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32) if wide else x.dtype),
        shapes,
    )


def get(buffers: PyTree, slot: Array) -> PyTree:
    """The values in a slot."""
    return jax.tree.map(
        lambda buffer: jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False), buffers
    )


def put(buffers: PyTree, slot: Array, values: PyTree, when: Array | None = None) -> PyTree:
    """Writes values into a slot, or leaves it as it is.

    Args:
        buffers: leaves with a leading dim of slots.
        slot: which; ignored when nothing is written.
        values: leaves of one slot.
        when: whether to write; None always does. The slot is written in any case, with the old or
            the new value; large values are better written in the branch that computes them.

    Returns:
        The new buffers.
    """
    place = jnp.maximum(slot, 0)

    def write(buffer: Array, value: Array) -> Array:
        value = value.astype(buffer.dtype)
        if when is not None:
            old = jax.lax.dynamic_index_in_dim(buffer, place, keepdims=False)
            value = jnp.where(when, value, old)
        return jax.lax.dynamic_update_index_in_dim(buffer, value, place, 0)

    return jax.tree.map(write, buffers, values)


def outgoing(lanes: Sequence[int], ticks: Sequence[Tick], results: Sequence[Wire]) -> Wire:
    """The result of the one lane of a channel in which this rank was active."""
    floats = results[lanes[0]].floats
    for lane in lanes[1:]:
        of_lane = partial(jnp.where, ticks[lane]["active"])
        floats = jax.tree.map(of_lane, results[lane].floats, floats)
    # Gradients have no `others`.
    return Wire(floats, [x for lane in lanes for x in results[lane].others])


def from_rank(tree: PyTree, is_source: Array, axis: str) -> PyTree:
    """Broadcasts the values of one rank to all ranks."""

    def of(x: Array) -> Array:
        # Booleans are summed as integers.
        value = x.astype(jnp.int32) if x.dtype == bool else x
        return all_sum(jnp.where(is_source, value, jnp.zeros_like(value)), axis).astype(x.dtype)

    return jax.tree.map(of, tree)


def masked(counts: Array, tree: PyTree) -> PyTree:
    """The values on ranks where `counts` is true, and zeros elsewhere."""
    return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), tree)


def add(totals: PyTree, values: PyTree) -> Any:
    """Adds values to totals, in the dtype of the totals."""
    return jax.tree.map(lambda t, v: t + v.astype(t.dtype), totals, values)


class Packing:
    """Lists of arrays, one kind of list per variant, packed to one common form.

    Where all variants have equal shapes, the form is the list itself. Otherwise it is one vector
    per dtype, as long as that of the longest variant; shorter ones are padded with zeros. Random
    keys are packed as their integer data.

    Args:
        variants: per variant, the list: arrays, or anything with shapes and dtypes.

    Attributes:
        is_uniform: whether all variants are alike, so that packing is the identity.
        packed: the shapes and dtypes of the common form.

    Example:
        >>> shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
        >>> packing = Packing([[shape(2, 2)], [shape(3), shape(2)]])
        >>> packing.packed
        (ShapeDtypeStruct(shape=(5,), dtype=float32),)
        >>> [vector] = packing.pack([jnp.ones((2, 2))])
        >>> packing.unpack(0, [vector])[0].shape
        (2, 2)
    """

    def __init__(self, variants: Sequence[Sequence[Any]]):
        self._variants = [shapes_of(list(variant)) for variant in variants]
        self._plain = [
            [jax.eval_shape(plain, x) if is_key(x) else x for x in variant]
            for variant in self._variants
        ]
        self.is_uniform: bool = all(each == self._variants[0] for each in self._variants)
        forms = self._plain[0]
        if not self.is_uniform:
            dtypes = sorted({x.dtype for variant in self._plain for x in variant}, key=str)
            lengths = [
                max(
                    sum(math.prod(x.shape) for x in variant if x.dtype == dtype)
                    for variant in self._plain
                )
                for dtype in dtypes
            ]
            sizes = zip(lengths, dtypes, strict=True)
            forms = [jax.ShapeDtypeStruct((length,), dtype) for length, dtype in sizes]
        self.packed: tuple[jax.ShapeDtypeStruct, ...] = tuple(forms)

    def pack(self, values: Sequence[Array]) -> list[Array]:
        """Brings the list of a variant to the common form."""
        values = [plain(value) for value in values]
        if self.is_uniform:
            return values
        vectors = []
        for form in self.packed:
            # A split piece could only be shifted into its place by a permutation, in a branch.
            pieces = [replicated(x.reshape(-1)) for x in values if x.dtype == form.dtype]
            vector = jnp.concatenate(pieces) if pieces else jnp.zeros(0, form.dtype)
            vectors.append(jnp.pad(vector, (0, form.shape[0] - vector.shape[0])))
        return vectors

    def unpack(self, variant: int, packed: Sequence[Array]) -> list[Array]:
        """The list of a variant; the inverse of `pack`."""
        values, shapes = packed, self._plain[variant]
        if not self.is_uniform:
            pieces: dict[Any, Any] = {}
            for form, vector in zip(self.packed, packed, strict=True):
                sizes = (math.prod(x.shape) for x in shapes if x.dtype == form.dtype)
                ends = pairwise([0, *accumulate(sizes)])
                pieces[form.dtype] = iter([replicated(vector[a:b]) for a, b in ends])
            values = [next(pieces[x.dtype]).reshape(x.shape) for x in shapes]
        pairs = zip(values, self._variants[variant], strict=True)
        return [like(value, shape.dtype) for value, shape in pairs]


def plain(value: Any) -> Array:
    """The value, or the integers of random keys, which buffers of zeros can hold."""
    return jax.random.key_data(value) if is_key(value) else jnp.asarray(value)


def like(value: Array, dtype: Any) -> Array:
    """The inverse of `plain`: keys again where `dtype` is one of keys."""
    is_of_keys = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(value, dtype=dtype) if is_of_keys else value
