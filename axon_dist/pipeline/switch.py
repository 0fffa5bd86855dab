"""Cuts a loss into stages that have different programs, by the data flow of its jaxpr.

`Calls` records the order in which a loss calls the blocks of a model. It determines the stages
where the order of the model does not fit, and errors name the calls that make it impossible to cut
a loss.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var

from ..core.errors import UnsupportedError
from ..core.typing import Array, Keys
from ..ir.pieces import Piece
from ..ir.walk import depends_on, struct_of, variables
from ..schedule import Schedule
from .layout import Stages
from .loss_trace import LossTrace
from .stage import MicrobatchData, Rest, StageLoss, StageProgram, Weights, Wire
from .storage import StageStorage
from .tables import Packing, zeros

PASS_A_BATCH = (
    "Pass a batch of arrays or shapes to build_train_step(batch=...): it then reads the calls from "
    "the loss before it lays out parameters, and stores on all ranks a block that several ranks "
    "call"
)
"""The advice in errors about the order of calls."""


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls of blocks in a loss, in the order of its program.

    Args:
        owners: for each call, the numbers of the blocks whose parameters it reads.
        behind: for each call, the numbers of the calls that its operands depend on.

    Example:
        >>> calls = Calls(({0}, {1}, {0}), ((), (0,), (1,)))
        >>> calls.depths, calls.late([0, 1, 0])
        ((0, 1, 2), (2, 1))
    """

    owners: tuple[Collection[int], ...]
    behind: tuple[Collection[int], ...]

    @classmethod
    def of(cls, jaxpr: Jaxpr, calls: Iterable[int], block_of: Mapping[Var, int]) -> Calls:
        """Returns the calls of a program.

        Args:
            jaxpr: an open jaxpr, its units as calls.
            calls: the positions of the calls.
            block_of: for each variable of a parameter, the number of its block.
        """
        numbers = {index: number for number, index in enumerate(calls)}
        owners = []
        behind = []
        sources: dict[Var, frozenset[int]] = {}
        for index, equation in enumerate(jaxpr.eqns):
            read = variables(equation.invars)
            reached = frozenset().union(*(sources.get(v, ()) for v in read))
            if index in numbers:
                owners.append(frozenset(block_of[v] for v in read if v in block_of))
                behind.append(reached)
                reached = frozenset({numbers[index]})
            sources.update((v, reached) for v in equation.outvars)
        return cls(tuple(owners), tuple(behind))

    @property
    def depths(self) -> tuple[int, ...]:
        """The length of the longest chain of calls that each call depends on.

        Calls of the same depth do not depend on each other. So the two passes of a loss that calls
        its model twice, or two parallel towers, run through the stages together.
        """
        depths: list[int] = []
        for behind in self.behind:
            depths.append(max((depths[call] + 1 for call in behind), default=0))
        return tuple(depths)

    @property
    def called(self) -> set[int]:
        """The blocks that are called."""
        return set().union(*self.owners)

    def late(self, homes: Sequence[int]) -> tuple[int, int] | None:
        """Returns the first call that needs the result of a later stage, and that stage.

        Args:
            homes: the stage of each call.
        """
        last = [max((homes[call] for call in behind), default=0) for behind in self.behind]
        pairs = enumerate(zip(last, homes, strict=True))
        return next(((call, at) for call, (at, home) in pairs if at > home), None)

    def fits(self, stage_of: Sequence[int]) -> bool:
        """Whether every call can run in the stage of its block.

        Args:
            stage_of: the stage of each block.
        """
        homes = [{stage_of[number] for number in owners} for owners in self.owners]
        return all(len(stages) == 1 for stages in homes) and not self.late(list(map(min, homes)))


def levels_of(
    jaxpr: Jaxpr, homes: Mapping[int, int], initial: Collection[Var] = ()
) -> dict[Var, int]:
    """Returns the stage that computes each value that depends on a call.

    Args:
        jaxpr: an open jaxpr.
        homes: the stage of each call, by its position; a call runs later if its operands do.
        initial: variables that count as computed by the first stage.
    """
    levels: dict[Var, int] = dict.fromkeys(initial, 0)
    for index, equation in enumerate(jaxpr.eqns):
        level = max((levels.get(v, -1) for v in variables(equation.invars)), default=-1)
        # An equation outside the blocks belongs to the earliest stage that has its operands.
        level = max(level, homes.get(index, -1))
        if level >= 0:
            levels.update((v, level) for v in equation.outvars)
    return levels


def why_not_seen(
    blocks: Sequence[str], calls: Sequence[Collection[int]], readers: Mapping[int, Collection[str]]
) -> str | None:
    """Explains which blocks have no visible call, and what to do; None if all are called.

    Args:
        blocks: the paths of the blocks, in the order of the model.
        calls: for each call in the loss, the blocks whose parameters it reads.
        readers: for each block, the names of the primitives that read its parameters.

    Returns:
        An error message.

    Example:
        >>> print(why_not_seen(["blocks/0", "blocks/1"], [{1}], {}).split(" and")[0])
        the loss has no call of 1 of the model's 2 blocks ('blocks/0')
    """
    unseen = [n for n in range(len(blocks)) if not any(n in owners for owners in calls)]
    if not unseen:
        return None
    read = {name for number in unseen for name in readers.get(number, ())}
    paths = [blocks[number] for number in unseen]
    some = ", ".join(map(repr, paths[:3])) + (", ..." if len(paths) > 3 else "")
    missing = f"the loss has no call of {len(paths)} of the model's {len(blocks)} blocks ({some})"
    must = "A pipeline needs a call of each block"
    rename = 'where these are not the blocks, name their class: classes=("Block",)'
    if not read:
        return f"{missing} and does not use their parameters. {must}. Take them out; {rename}"
    return (
        f"{missing} that a pipeline could see; their parameters are read within: "
        f"{', '.join(sorted(read))}. {must}. Calls are hidden by jit, remat, checkpoint, cond "
        "or scan around them. Call the blocks themselves, directly; a pipeline recomputes without "
        f"nnx.remat around them, and backward=... says what it keeps; {rename}"
    )


def stages_by_calls(
    schedule: Schedule, blocks: tuple[Keys, ...], calls: Calls, depths: tuple[int, ...]
) -> Stages:
    """Returns the stages of a schedule, with each block in the stage that calls it.

    Args:
        schedule: contains the rank of each stage.
        blocks: the keys of every block, in the order of the model.
        calls: the calls of the blocks.
        depths: the first depth of each stage, then the number of depths.

    Returns:
        The stages.
    """
    used = [set[int]() for _ in blocks]
    for owners, depth in zip(calls.owners, calls.depths, strict=True):
        for number in owners:
            used[number].add(bisect.bisect_right(depths, depth) - 1)
    ranks = [{schedule.placement[stage] for stage in stages} for stages in used]
    single = [number for number, devices in enumerate(ranks) if len(devices) == 1]
    single.sort(key=lambda number: min(used[number]))
    counts = [sum(min(used[n]) == stage for n in single) for stage in range(len(depths) - 1)]
    return Stages(
        blocks=tuple(blocks[n] for n in single),
        boundaries=(0, *accumulate(counts)),
        placement=schedule.placement,
        num_devices=schedule.num_devices,
        shared=tuple(block for n, block in enumerate(blocks) if n not in single),
        depths=depths,
    )


class SwitchStages:
    """The loss as one program per stage, with any computation between its blocks.

    An equation belongs to the stage of the last block that it depends on. An equation that depends
    on no block is recomputed in each stage that needs it. A stage sends every value that is live
    across its end: computed in it or before it, and read after it. All stages send vectors of one
    length, the longest that is needed. So the output of an encoder, or the skip connections of a
    U-Net, pass through the stages in between, and their gradients pass back.

    The loss may call a block any number of times within its stage. A block that is stored on one
    rank may be called in several of its stages (`Stages.depths`). A block that several ranks call
    is replicated on all ranks (`Stages.shared`).

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        storage: the stored form of the parameters.

    Attributes:
        crossing: the values that are live at each cut: before each stage and after the last.
        buffer_stages: the stage of each buffer that only one stage updates, by the buffer's number.
        pieces: the program of every stage, then that of the loss after the last block.
        rows: for each stage, the stages on its rank whose blocks it calls, with their rows.
        packings: the packings of the values that cross a cut: of those with gradients, and of the
            others.

    Raises:
        UnsupportedError: if a block is not called, or not in the order of the stages, or if a stage
            reads the parameters of another rank's blocks.
    """

    def __init__(self, trace: LossTrace, storage: StageStorage):
        self.trace = trace
        self.storage = storage
        stages = storage.stages
        count = stages.num_stages
        blocks = ((v, storage.block_of.get(keys)) for keys, v in trace.params.items())
        block_of = {variable: number for variable, number in blocks if number is not None}
        levels, crossing = _cuts(trace, _homes(trace, stages, block_of), count)
        self.crossing: list[list[Var]] = crossing
        self.buffer_stages: dict[int, int] = {}
        if trace.dependent_buffers:
            self.buffer_stages = _buffer_stages(trace, levels, crossing)
        new = trace.new_buffers
        homes = self.buffer_stages.items()
        new_of_stage = [[new[i] for i, home in homes if home == stage] for stage in range(count)]
        results = zip(self.crossing[1:], new_of_stage, strict=False)
        outputs = [*([*sent, *kept] for sent, kept in results), trace.loss]
        pairs = zip(self.crossing, outputs, strict=True)
        self.pieces: list[Piece] = [trace.cut(output, known=start) for start, output in pairs]
        self.rows: list[list[tuple[int, range]]] = []
        for stage, piece in enumerate(self.pieces):
            owners = {block_of[v] for v in piece.needs if v in block_of}
            rank = stages.placement[stage] if stage < count else None
            if foreign := {n for n in owners if stages.placement[stages.stage_of(n)] != rank}:
                raise _foreign(stages, stage, min(foreign))
            calls = sorted({stages.stage_of(number) for number in owners})
            self.rows.append([(at, storage.chunk_rows[stages.chunk_of(at)]) for at in calls])
        split = [_by_kind(values, values) for values in self.crossing]
        floats, others = ([list(map(struct_of, wire[i])) for wire in split] for i in range(2))
        self.packings: tuple[Packing, Packing] = Packing(floats), Packing(others)

    def programs(self) -> list[StageProgram]:
        """Returns one program per stage."""
        outside = self.storage.rest
        return [
            StageProgram(
                stages=(stage,),
                chunk=self.storage.stages.chunk_of(stage),
                rows=[row for _, rows in self.rows[stage] for row in rows],
                # Only rows of split tables enter the first stage. The layers before the first block
                # are part of its piece.
                first=self._first,
                middle=partial(self._middle, stage),
                last=self._last,
                first_uses=(),
                middle_uses=self.trace.uses(outside, self.pieces[stage]),
                last_uses=self.trace.uses(outside, self.pieces[-1]),
                buffer_stages={i: home for i, home in self.buffer_stages.items() if home == stage},
            )
            for stage in range(self.storage.stages.num_stages)
        ]

    def _first(self, rest: Rest, data: MicrobatchData) -> Wire:
        if not self.trace.looked_up:
            return Wire(*(zeros(list(packing.packed)) for packing in self.packings))
        rows = dict(zip(self.trace.looked_up, data.looked_up, strict=True))
        return self._pack(0, [rows[v] for v in self.crossing[0]])

    def _middle(
        self, stage: int, weights: Weights, rest: Rest, data: MicrobatchData, _: Array, wire: Wire
    ) -> Wire:
        known = self.trace.known(data, self.storage.rest, rest) | self._unpack(stage, wire)
        rows = iter(weights)
        for home, numbers in self.rows[stage]:
            of_home = [next(rows) for _ in numbers]
            for keys, value in self.storage.block_weights(home, of_home).items():
                known[self.trace.params[keys]] = value
        results = self.pieces[stage].run(known)
        count = len(self.crossing[stage + 1])
        return self._pack(stage + 1, results[:count])._replace(new_buffers=results[count:])

    def _last(self, rest: Rest, data: MicrobatchData, wire: Wire) -> StageLoss:
        known = self.trace.known(data, self.storage.rest, rest)
        known |= self._unpack(len(self.crossing) - 1, wire)
        total, weight, *metrics = self.pieces[-1].run(known)
        return StageLoss(total, weight, metrics)

    def _pack(self, at: int, values: Sequence[Array]) -> Wire:
        # All cuts have the same form, the longest vector of each dtype, because `ppermute` needs
        # the same shape on all ranks.
        kinds = _by_kind(self.crossing[at], [jnp.asarray(value) for value in values])
        return Wire(
            *(packing.pack(kind) for packing, kind in zip(self.packings, kinds, strict=True))
        )

    def _unpack(self, at: int, wire: Wire) -> dict[Var, Array]:
        floats, others = _by_kind(self.crossing[at], self.crossing[at])
        known = dict(zip(floats, self.packings[0].unpack(at, wire.floats), strict=True))
        return known | dict(zip(others, self.packings[1].unpack(at, wire.others), strict=True))


def _cuts(
    trace: LossTrace, homes: Mapping[int, int], count: int
) -> tuple[dict[Var, int], list[list[Var]]]:
    """Finds the stage that computes each value, and the values that are live at each cut.

    Returns:
        The stage of each value that depends on a block: `count` for the loss after the last stage,
        and -1 for rows of split tables, which are looked up before the first stage. And for each
        cut, the values that are computed before it and read after it.
    """
    last = trace.jaxpr.eqns[trace.calls[-1]]
    after = depends_on(trace.jaxpr, last.outvars) - set(last.outvars)
    # Values that depend on the last call's results belong to the loss, after the last stage.
    levels = levels_of(trace.jaxpr, homes, trace.looked_up)
    levels |= {v: count for v in levels if v in after}
    levels |= dict.fromkeys(trace.looked_up, -1)
    read_at: dict[Var, int] = {v: count for v in variables(trace.loss)}
    for equation in trace.jaxpr.eqns:
        at = max((levels.get(v, -1) for v in equation.outvars), default=-1)
        for v in variables(equation.invars):
            read_at[v] = max(read_at.get(v, -1), at)
    crossing = [
        [v for v, level in levels.items() if level < stage <= read_at.get(v, -1)]
        for stage in range(count + 1)
    ]
    return levels, crossing


def _buffer_stages(
    trace: LossTrace, levels: Mapping[Var, int], crossing: Sequence[Sequence[Var]]
) -> dict[int, int]:
    """Returns the stage of each buffer that only one stage updates and reads, by buffer number.

    A buffer that depends on no block belongs to the first stage. One that depends on the last
    block's result, such as the statistics of a norm before the head, belongs to the last stage.
    """
    last = len(crossing) - 2
    made = {
        i: min(max(levels.get(v, -1), 0), last)  # type: ignore[arg-type]
        for i, v in trace.dependent_buffers.items()
    }
    ends = enumerate([*crossing[1:], trace.loss])
    readers = [(at, trace.cut(end, known=crossing[at]).needs) for at, end in ends]
    for i in trace.changing:
        if i in made:
            piece = trace.cut([trace.new_buffers[i]], known=crossing[made[i]])
            readers.append((made[i], piece.needs))
        else:
            # This buffer, such as the count of a random stream, is computed before the microbatches
            # run, even if a block updates it. That computation reads fewer buffers than the block.
            readers.append((-1, frozenset(trace.made_of(i)[1])))
    return {
        i: home
        for i, home in made.items()
        if all(at == home for at, needs in readers if trace.buffers[i] in needs)
    }


def _homes(trace: LossTrace, stages: Stages, block_of: Mapping[Var, int]) -> dict[int, int]:
    """Returns the stage of every call, by its position."""
    calls = Calls.of(trace.jaxpr, trace.calls, block_of)
    paths = ["/".join(map(str, keys)) for keys in stages.blocks]
    if not calls.called.issuperset(range(len(paths))):
        readers: dict[int, set[str]] = {}
        for equation in trace.jaxpr.eqns:
            for v in variables(equation.invars) & block_of.keys():
                readers.setdefault(block_of[v], set()).add(equation.primitive.name)
        raise UnsupportedError(why_not_seen(paths, calls.owners, readers))
    if stages.depths is not None:
        return dict(zip(trace.calls, map(stages.stage_at, calls.depths), strict=True))
    for owners in calls.owners:
        if not owners:
            raise UnsupportedError(
                f"the loss calls a block that shares all its parameters with others. {PASS_A_BATCH}"
            )
        if len({stages.stage_of(number) for number in owners}) != 1:
            names = " and ".join(sorted(repr(paths[number]) for number in owners))
            raise UnsupportedError(
                f"one call reads parameters of the blocks {names}, and each may lie on another "
                f"rank. {PASS_A_BATCH}"
            )
    homes = [stages.stage_of(min(owners)) for owners in calls.owners]
    if late := calls.late(homes):
        call, at = late
        raise UnsupportedError(
            f"the model calls {paths[min(calls.owners[call])]!r}, a block of stage {homes[call]}, "
            f"after blocks of stage {at}: stages have the blocks in the order in which the model "
            f"holds them. {PASS_A_BATCH}; if these are not the blocks that you mean, name their "
            'class: classes=("Block",)'
        )
    return dict(zip(trace.calls, homes, strict=True))


def _foreign(stages: Stages, stage: int, block: int) -> UnsupportedError:
    """Returns the error for a stage, or the loss, that reads another rank's block."""
    path = "/".join(map(str, stages.blocks[block]))
    is_loss = stage == stages.num_stages
    reader = "the loss" if is_loss else f"stage {stage}"
    advice = (
        "Tie parameters outside the blocks, or choose boundaries that keep the two together"
        if not is_loss
        else "Tie parameters outside the blocks; let the optimizer apply penalties on weights, "
        "such as optax.add_decayed_weights"
    )
    return UnsupportedError(
        f"{reader} reads a parameter of {path!r}, which only stage {stages.stage_of(block)} has. "
        f"{advice}"
    )


def _by_kind(atoms: Sequence[Var], values: Sequence[T]) -> tuple[list[T], list[T]]:
    """Splits values into those with gradients and those without."""
    is_float = [jnp.issubdtype(struct_of(atom).dtype, jnp.inexact) for atom in atoms]
    pairs = list(zip(values, is_float, strict=True))
    return [v for v, f in pairs if f], [v for v, f in pairs if not f]
