"""A schedule as arrays for the scan over ticks, and the state that the scan carries."""

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

LaneEntry: TypeAlias = dict[str, Array]
"""A lane's entries for one rank in one tick."""

NONE = -1
"""Marks an entry without a slot in a table of slots."""


@dataclasses.dataclass(frozen=True)
class Lane:
    """A position in the program of a tick: there each rank runs an action of one phase, or none.

    The lanes of a tick run in order.

    Args:
        phase: of the action.
        columns: arrays [ranks, ticks], by name: `active`, whether the rank has an action; its
            `stage` and `microbatch`; the slot of each field of `State` that the action reads or
            writes; and `hand_over`, the slot from which the receiving stage, if it is on the same
            rank, reads the result.
    """

    phase: Phase
    columns: Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Channel:
    """One `ppermute` over the ranks, which transfers the results of one or several lanes.

    Args:
        pairs: (source, target), each rank at most once on either side.
        slots: for each lane, by its number, the slots [ranks, ticks] into which receivers write its
            results at the end of a tick; `NONE` for no transfer. In each tick a rank is active in
            at most one of these lanes.
    """

    pairs: tuple[tuple[int, int], ...]
    slots: Mapping[int, np.ndarray]


class _Sent(NamedTuple):
    source: int
    target: int
    tick: int
    slot: int


@dataclasses.dataclass(frozen=True)
class ScanTables:
    """A schedule as the tables that the executor reads.

    Args:
        lanes: in the order in which a tick runs them.
        channels: the transfers after the lanes.
    """

    lanes: tuple[Lane, ...]
    channels: tuple[Channel, ...]


def slots_by_name(
    slots: SlotPlan, saves_residuals: bool = False, saves_lookups: bool = False
) -> dict[str, Slots]:
    """Returns the slots of the values of a schedule, by the names of the fields of `State`.

    Args:
        slots: the slots of all values.
        saves_residuals: whether forward passes save residuals in the `stash`; a stage's input is
            then needed only until its forward pass.
        saves_lookups: whether the first stage's backward pass also reads the rows looked up.
    """
    return {
        "inputs": slots.activations if saves_residuals else slots.inputs,
        "gradients": slots.gradients,
        "stash": slots.stash,
        "held": slots.held,
        "outputs": slots.outputs,
        "lookups": slots.saved_lookups if saves_lookups else slots.lookups,
        "scatters": slots.scatters,
    }


def scan_tables_of(schedule: Schedule, slots: Mapping[str, Slots]) -> ScanTables:
    """Turns a valid schedule into the tables that one scan over ticks reads.

    Args:
        schedule: a valid table.
        slots: the slots of its values, by field of `State`.

    Returns:
        The tables.
    """
    phases = lane_phases(cell for row in schedule.rows for cell in row)
    shape = (schedule.num_devices, schedule.num_ticks)
    last = schedule.num_stages - 1
    lanes = [
        Lane(
            phase,
            {
                "active": np.zeros(shape, bool),
                **{n: np.zeros(shape, np.int32) for n in ("stage", "microbatch", *slots)},
                # Slot 0 is a valid slot, so NONE marks the absence of a transfer.
                "hand_over": np.full(shape, NONE, np.int32),
            },
        )
        for phase in phases
    ]
    sent: dict[tuple[int, int], list[_Sent]] = {}
    lane = 0
    for action, device, tick, place in schedule.placed():
        # The numbers of lanes increase within a cell.
        lane = phases.index(action.phase, lane + 1 if place else 0)
        stage, phase, microbatch = action
        at = (device, tick)
        columns = lanes[lane].columns
        columns["active"][at] = True
        columns["stage"][at] = stage
        columns["microbatch"][at] = microbatch
        # A vocabulary action uses the last stage's output and its gradient, whatever its rank.
        # Rows that are looked up enter the first stage.
        stage_of = dict.fromkeys(slots, last if phase is Phase.V else stage)
        for name, of_stage in {**stage_of, "lookups": 0, "scatters": 0}.items():
            columns[name][at] = slots[name].slot.get((of_stage, microbatch), 0)
        # The result goes to a slot on this rank or on another one.
        if (to := receiver(action, schedule.num_stages)) is None:
            continue
        name = "inputs" if phase is Phase.F else "gradients"
        slot = slots[name].slot[to.stage, microbatch]
        target = schedule.placement[to.stage]
        if target == device:
            columns["hand_over"][at] = slot
        else:
            # One permutation per lane and distance: all ranks that send over the same distance
            # share it, as in a ring.
            shift = (target - device) % schedule.num_devices
            sent.setdefault((lane, shift), []).append(_Sent(device, target, tick, slot))
    return ScanTables(tuple(lanes), _channels(sent, lanes))


def _channels(
    sent: Mapping[tuple[int, int], list[_Sent]], lanes: Sequence[Lane]
) -> tuple[Channel, ...]:
    """Groups transfers of the same distance into channels.

    Lanes of different phases share a channel if no rank is active in both in the same tick. In
    ZB-V, for example, a rank sends activations and gradients in both directions, but only one of
    the four in a tick.
    """

    def are_exclusive(lane: Lane, other: Lane) -> bool:
        if lane.phase is other.phase:
            return False
        return not (lane.columns["active"] & other.columns["active"]).any()

    groups: list[tuple[int, list[int]]] = []
    for lane, shift in sorted(sent):
        for group_shift, members in groups:
            if group_shift == shift and all(
                are_exclusive(lanes[lane], lanes[member]) for member in members
            ):
                members.append(lane)
                break
        else:
            groups.append((shift, [lane]))
    channels = []
    for shift, members in groups:
        slots = {
            lane: np.full(lanes[lane].columns["active"].shape, NONE, np.int32) for lane in members
        }
        pairs = set()
        for lane in members:
            for transfer in sent[lane, shift]:
                # Slots are in the receiver's row, because the receiver decides where to write.
                slots[lane][transfer.target, transfer.tick] = transfer.slot
                pairs.add((transfer.source, transfer.target))
        channels.append(Channel(tuple(sorted(pairs)), slots))
    return tuple(channels)


def lane_phases(cells: Iterable[Cell]) -> tuple[Phase, ...]:
    """Returns a short sequence of phases that contains every cell as a subsequence.

    It is the same on every process. Phases are in the order of `Phase` where cells do not determine
    it, so that a value is written by one lane and read by a later one. XLA updates such a buffer in
    place, but copies a buffer that is read before it is written.

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
    # Longest cells first, because most shorter cells are subsequences of them.
    for sequence in reversed(wanted):
        position = 0
        for phase in sequence:
            if phase not in lanes[position:]:
                lanes.insert(position, phase)
            position = lanes.index(phase, position) + 1
    return tuple(lanes)


class Totals(NamedTuple):
    """Sums over microbatches, in float32 or wider.

    Args:
        rows: gradients of the rows of block parameters.
        rest: gradients of the other parameters, by number.
        loss: sums of losses, of weights, and of weight x metric.
        final_buffers: the values of the buffers that stages update, by number, after the last
            microbatch; empty during the scan.
    """

    rows: list[list[Array]]
    rest: dict[int, Array]
    loss: StageLoss
    final_buffers: Mapping[int, Array] = {}

    def add_rows(self, numbers: Sequence[int], grads: Sequence[Sequence[Array | None]]) -> Totals:
        """Adds gradients of rows, by their numbers; None in place of frozen leaves."""
        rows = list(self.rows)
        for row, of_row in zip(numbers, grads, strict=True):
            rows[row] = add(list(rows[row]), list(of_row))
        return self._replace(rows=rows)

    def add_rest(self, grads: Rest) -> Totals:
        """Adds gradients of parameters outside the blocks."""
        return self._replace(rest={**self.rest, **add({i: self.rest[i] for i in grads}, grads)})


GradientSums: TypeAlias = tuple[Totals, list[Array]]
"""The sums that gradients of layers before the first block are added to, and the scatter slots."""


class State(NamedTuple):
    """The carry of the scan over ticks.

    Dim 0 of its arrays counts slots, except in `sums` and `buffer_histories`.

    Args:
        inputs: inputs of stages.
        gradients: gradients of the outputs of stages.
        stash: outputs and residuals that forwards save.
        held: intermediates that an action `I` saves for its `W`.
        outputs: outputs of the last stage, if the schedule has the action `V`.
        lookups: rows looked up for the first stage, if the schedule has the action `E`.
        scatters: the gradients of these rows.
        sums: the `Totals` so far; None in the copy that an action gets to read slots from.
        buffer_histories: the history of each buffer that stages update, by number: its values
            before each microbatch and after the last. Where another rank updates the buffer, only
            the first entry is set, to its initial value.
    """

    inputs: Wire
    gradients: list[Array]
    stash: list[Array]
    held: list[Array]
    outputs: Wire
    lookups: list[Array]
    scatters: list[Array]
    sums: Any
    buffer_histories: dict[int, Array]


def empty(shapes: PyTree, num_slots: int) -> PyTree:
    """Returns zeros: `num_slots` slots for values of the given shapes."""
    return jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape), x.dtype), shapes)


def zeros(shapes: PyTree, wide: bool = False) -> PyTree:
    """Returns zeros of the given shapes; `wide` is for sums, and makes floats float32 or wider."""

    def zero(x: Any) -> Array:
        # An integer is a count, and float32 would round it from 2^24 on.
        is_count = jnp.issubdtype(x.dtype, jnp.integer)
        widens = wide and not is_count
        return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32) if widens else x.dtype)

    return jax.tree.map(zero, shapes)


def get(arrays: PyTree, slot: Array) -> PyTree:
    """Returns the values in a slot."""
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, slot, keepdims=False), arrays
    )


def put(arrays: PyTree, slot: Array, values: PyTree, when: Array | None = None) -> PyTree:
    """Writes values into a slot, or leaves the slot unchanged.

    Args:
        arrays: leaves whose dim 0 counts slots.
        slot: the index of the slot; any number, also NONE, if `when` is false.
        values: leaves of one slot.
        when: whether to write; None always writes. If it is false, the old values of a slot are
            written back, which moves a whole slot in every tick. So large values are better
            written without `when`, inside the branch of `lax.switch` that computes them.

    Returns:
        The new arrays.
    """
    place = jnp.maximum(slot, 0)

    def write(array: Array, value: Array) -> Array:
        value = value.astype(array.dtype)
        if when is not None:
            old = jax.lax.dynamic_index_in_dim(array, place, keepdims=False)
            value = jnp.where(when, value, old)
        return jax.lax.dynamic_update_index_in_dim(array, value, place, 0)

    return jax.tree.map(write, arrays, values)


def outgoing(lanes: Sequence[int], entries: Sequence[LaneEntry], results: Sequence[Wire]) -> Wire:
    """Returns the result of the one lane of a channel in which this rank was active."""
    floats = results[lanes[0]].floats
    for lane in lanes[1:]:
        of_lane = partial(jnp.where, entries[lane]["active"])
        floats = jax.tree.map(of_lane, results[lane].floats, floats)
    # Gradients have no `others`.
    return Wire(floats, [x for lane in lanes for x in results[lane].others])


def from_rank(tree: PyTree, is_source: Array, axis: str) -> PyTree:
    """Broadcasts the values of one rank to all ranks."""

    def broadcast(x: Array) -> Array:
        # Booleans are summed as integers.
        value = x.astype(jnp.int32) if x.dtype == bool else x
        return all_sum(jnp.where(is_source, value, jnp.zeros_like(value)), axis).astype(x.dtype)

    return jax.tree.map(broadcast, tree)


def masked(is_counted: Array, tree: PyTree) -> PyTree:
    """Returns the values on ranks where `is_counted` is true, and zeros elsewhere."""
    return jax.tree.map(lambda x: jnp.where(is_counted, x, jnp.zeros_like(x)), tree)


def add(totals: PyTree, values: PyTree) -> Any:
    """Adds values to totals, in the dtype of the totals."""
    return jax.tree.map(lambda t, v: t + jnp.asarray(v, t.dtype), totals, values)


class Packing:
    """Packs lists of arrays, one list per variant, into a common form.

    If all variants have equal shapes, the common form is the list itself. Otherwise it is one
    vector per dtype, long enough for the longest variant; shorter ones are padded with zeros.
    Random keys are packed as their integer data.

    Args:
        variants: the list of each variant: arrays, or anything with shapes and dtypes.

    Attributes:
        is_uniform: whether all variants have equal shapes, so that packing is the identity.
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
        """Packs the list of a variant into the common form."""
        values = [plain(value) for value in values]
        if self.is_uniform:
            return values
        vectors = []
        for form in self.packed:
            # Replicated, because moving a sharded piece into place would need a permutation, which
            # hangs inside a branch.
            pieces = [replicated(x.reshape(-1)) for x in values if x.dtype == form.dtype]
            vector = jnp.concatenate(pieces) if pieces else jnp.zeros(0, form.dtype)
            vectors.append(jnp.pad(vector, (0, form.shape[0] - vector.shape[0])))
        return vectors

    def unpack(self, variant: int, packed: Sequence[Array]) -> list[Array]:
        """Returns the list of a variant; the inverse of `pack`."""
        values = packed
        shapes = self._plain[variant]
        if not self.is_uniform:
            pieces: dict[Any, Any] = {}
            for form, vector in zip(self.packed, packed, strict=True):
                sizes = (math.prod(x.shape) for x in shapes if x.dtype == form.dtype)
                ends = pairwise([0, *accumulate(sizes)])
                pieces[form.dtype] = iter([replicated(vector[a:b]) for a, b in ends])
            values = [next(pieces[x.dtype]).reshape(x.shape) for x in shapes]
        pairs = zip(values, self._variants[variant], strict=True)
        return [rewrap_key(value, shape.dtype) for value, shape in pairs]


def plain(value: Any) -> Array:
    """Returns the value; for random keys their integer data, which arrays of zeros can hold."""
    return jax.random.key_data(value) if is_key(value) else jnp.asarray(value)


def rewrap_key(value: Array, dtype: Any) -> Array:
    """Inverts `plain`: wraps random keys again if `dtype` is a key type."""
    has_keys = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(value, dtype=dtype) if has_keys else value
