"""Stages of equal blocks: one program per chunk, whichever rank runs it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ..core.compat import eval_equation
from ..core.typing import Array
from ..ir.layer_scan import SHARED, Chain, find_chains
from ..ir.pieces import Piece, unconstrained
from ..ir.walk import made_by, variables
from .loss_trace import LossTrace
from .stage import MicrobatchData, Rest, StageLoss, StageProgram, Wire
from .storage import StageStorage
from .tables import plain, rewrap_key, zeros


@dataclasses.dataclass(frozen=True, eq=False)
class UniformStages:
    """The loss as a prologue, a chain of equal blocks, and an epilogue.

    It is equivalent to the sequential program:

        x = prologue(rest, batch)
        for n in range(num_blocks): x, report[n], new_buffers[n] = unit(weights(n), shared, x)
        loss = epilogue(rest, batch, x, report)

    Results of blocks that the loss reads, such as the load-balancing terms of experts, are sent
    along with x. The next microbatch reads the new values of the blocks' own buffers.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        storage: the stored form of the parameters.
        chain: the calls of the blocks.
        calls: the equations of these calls.
        weights: for each operand of a block that is one of its leaves, the number of the leaf.
        carried: the operands that are results of the previous block.
        shared: the program of the operands that all blocks have in common.
        by_block: the programs, one per block, of each operand that differs between blocks but is
            not a weight, such as a random key.
        reported: the results of blocks that the loss reads, and no other block.
        buffer_writers: the block and the result that update each buffer, by the buffer's number.
        prologue, epilogue: the programs before the first block and after the last.
    """

    trace: LossTrace
    storage: StageStorage
    chain: Chain
    calls: list[Any]
    weights: dict[int, int]
    carried: list[int]
    shared: Piece
    by_block: dict[int, list[Piece]]
    reported: list[int]
    buffer_writers: dict[int, tuple[int, int]]
    prologue: Piece
    epilogue: Piece

    @classmethod
    def find(cls, trace: LossTrace, storage: StageStorage) -> UniformStages | None:
        """Returns the stages of a trace, or None if its blocks are not such a chain."""
        if not storage.by_blocks or storage.stages.depths is not None:
            return None
        chains = find_chains(trace.jaxpr)
        if len(chains) != 1 or list(chains[0].calls) != trace.calls:
            return None
        if len(trace.calls) != len(storage.stages.blocks):
            return None  # Stages run all their rows, so a block that is not called would run too.
        chain = chains[0]
        calls = [trace.jaxpr.eqns[index] for index in chain.calls]
        weights = _weights(trace, storage, calls)
        buffer_writers = _buffer_writers(trace, calls)
        if weights is None or buffer_writers is None:
            return None
        first = calls[0].invars
        made = made_by(calls)
        carried = [i for i, role in enumerate(chain.roles) if isinstance(role, int)]
        common = [i for i, role in enumerate(chain.roles) if role == SHARED and i not in weights]
        free = [i for i in range(len(first)) if i not in {*weights, *carried, *common}]
        by_block = {i: [trace.cut([call.invars[i]]) for call in calls] for i in free}
        prologue = trace.cut([first[i] for i in carried])
        shared = trace.cut([first[i] for i in common])
        epilogue = trace.cut(trace.loss, known=made)
        reported = [
            r
            for r in range(len(calls[0].outvars))
            if r not in chain.carried and any(call.outvars[r] in epilogue.needs for call in calls)
        ]
        # The loss may read the last block's result, and results that no other block reads. It may
        # not read the carry between two blocks, which is no longer on its rank.
        between = {call.outvars[r] for call in calls[:-1] for r in chain.carried}
        operands = [shared, *(piece for pieces in by_block.values() for piece in pieces)]
        of_blocks = {v for keys, v in trace.params.items() if keys not in storage.rest}
        is_separate = all(made.isdisjoint(p.needs | p.made) for p in (prologue, *operands))
        # Only the first stage has the rows of split tables.
        is_undivided = all(p.needs.isdisjoint(trace.looked_up) for p in (*operands, epilogue))
        is_owned = all(of_blocks.isdisjoint(p.needs) for p in (prologue, *operands, epilogue))
        is_sent = between.isdisjoint(epilogue.needs)
        if not (is_separate and is_undivided and is_owned and is_sent):
            return None
        return cls(
            trace,
            storage,
            chain,
            calls,
            weights,
            carried,
            shared,
            by_block,
            reported,
            buffer_writers,
            prologue,
            epilogue,
        )

    def programs(self) -> list[StageProgram]:
        """Returns one program per chunk."""
        stages = self.storage.stages
        by_block = itertools.chain(*self.by_block.values())
        middle_uses = self.trace.uses(self.storage.rest, self.shared, *by_block)
        homes = {i: stages.stage_of(number) for i, (number, _) in self.buffer_writers.items()}
        return [
            StageProgram(
                stages=stages.stages_of(chunk),
                chunk=chunk,
                rows=self.storage.chunk_rows[chunk],
                first=self._first,
                middle=partial(self._middle, chunk),
                last=self._last,
                first_uses=self.trace.uses(self.storage.rest, self.prologue),
                middle_uses=middle_uses,
                last_uses=self.trace.uses(self.storage.rest, self.epilogue),
                buffer_stages={
                    i: home for i, home in homes.items() if home in stages.stages_of(chunk)
                },
            )
            for chunk in range(stages.num_chunks)
        ]

    @cached_property
    def _dtypes(self) -> list[Any]:
        """The dtypes of the values that are sent from block to block."""
        passed = [self.calls[0].invars[i] for i in self.carried]
        return [v.aval.dtype for v in (*passed, *(self.calls[0].outvars[r] for r in self.reported))]

    def _wire(self, values: Sequence[Any]) -> Wire:
        wire = Wire([], [])
        for value, dtype in zip(values, self._dtypes, strict=True):
            kind = wire.floats if jnp.issubdtype(dtype, jnp.inexact) else wire.others
            kind.append(plain(value))
        return wire

    def _unwire(self, wire: Wire) -> list[Any]:
        floats = iter(wire.floats)
        others = iter(wire.others)
        return [
            rewrap_key(next(floats if jnp.issubdtype(dtype, jnp.inexact) else others), dtype)
            for dtype in self._dtypes
        ]

    def _first(self, rest: Rest, data: MicrobatchData) -> Wire:
        count = len(self.calls)
        forms = [self.calls[0].outvars[r].aval for r in self.reported]
        none = [jnp.zeros((count, *form.shape), form.dtype) for form in forms]
        known = self.trace.known(data, self.storage.rest, rest)
        return self._wire([*self.prologue.run(known), *none])

    def _middle(
        self, chunk: int, weights: Any, rest: Rest, data: MicrobatchData, stage: Array, wire: Wire
    ):
        known = self.trace.known(data, self.storage.rest, rest)
        shared = self.shared.run(known)
        stages = self.storage.stages
        # `stage` is traced: all ranks run one program, and know their stage only when it runs.
        sizes = jnp.asarray([len(stages.blocks_of(s)) for s in range(stages.num_stages)])
        starts = jnp.asarray(stages.boundaries)
        always = min(len(stages.blocks_of(s)) for s in stages.stages_of(chunk))
        results_of_rows = []
        numbers = self.storage.chunk_rows[chunk]
        for row, values in enumerate(weights):
            leaves = self.storage.leaves_at(numbers[row], values, stage)

            def run(wire, row=row, leaves=leaves):
                return self._block(leaves, shared, known, starts[stage] + row, wire)

            # No branch for rows that every stage fills, because a conditional keeps XLA from fusing
            # and overlapping across it.
            if row < always:
                wire, results = run(wire)
            else:
                none = zeros(jax.eval_shape(run, wire)[1])
                branches = [run, lambda wire, none=none: (wire, none)]
                free = [lambda wire, do=do: unconstrained(do(wire)) for do in branches]
                wire, results = jax.lax.cond(row < sizes[stage], *free, wire)
            results_of_rows.append(results)
        homes = {number: stages.stage_of(number) for number, _ in self.buffer_writers.values()}
        return wire._replace(
            new_buffers=[
                results_of_rows[number - stages.boundaries[homes[number]]][result]
                for number, result in self.buffer_writers.values()
                if homes[number] in stages.stages_of(chunk)
            ]
        )

    def _block(
        self, leaves: Any, shared: list, known: dict, number: Array, wire: Wire
    ) -> tuple[Wire, dict[int, Any]]:
        """Runs a block; returns its wire, and its buffers' new values by their result positions."""
        values = self._unwire(wire)
        common = iter(shared)
        carried = iter(values)
        reports = values[len(self.carried) :]
        operands: list[Any] = []
        for position, role in enumerate(self.chain.roles):
            if position in self.weights:
                operands.append(leaves[self.weights[position]])
            elif isinstance(role, int):
                operands.append(next(carried))
            elif role == SHARED:
                operands.append(next(common))
            else:
                # Compute the operand for all blocks and select one: keys and numbers are too small
                # to be worth a branch.
                each = [piece.run(known)[0] for piece in self.by_block[position]]
                operands.append(jnp.stack([jnp.asarray(v) for v in each])[number])
        # `find_chains` has shown that all calls are equal, so the first one serves for all. It
        # remains a call, which is differentiated and lowered once for any number of blocks.
        results = eval_equation(self.calls[0], operands)
        pairs = zip(reports, self.reported, strict=True)
        reports = [x.at[number].set(results[r]) for x, r in pairs]
        new_buffers = {r: results[r] for _, r in self.buffer_writers.values()}
        return self._wire([*(results[role] for role in self.chain.carried), *reports]), new_buffers

    def _last(self, rest: Rest, data: MicrobatchData, wire: Wire) -> StageLoss:
        known = self.trace.known(data, self.storage.rest, rest)
        values = self._unwire(wire)
        outputs = self.calls[-1].outvars
        known.update(zip([outputs[r] for r in self.chain.carried], values, strict=False))
        for r, rows in zip(self.reported, values[len(self.carried) :], strict=True):
            known.update((call.outvars[r], rows[n]) for n, call in enumerate(self.calls))
        total, weight, *metrics = self.epilogue.run(known)
        return StageLoss(total, weight, metrics)


def _weights(
    trace: LossTrace, storage: StageStorage, calls: Sequence[Any]
) -> dict[int, int] | None:
    """Maps each operand that is a weight to the number of its leaf; None if blocks differ."""
    previous = {}
    for number, (block, call) in enumerate(zip(storage.stages.blocks, calls, strict=True)):
        leaf_of = {trace.params[block + leaf]: i for i, leaf in enumerate(storage.leaves)}
        # A scalar that the model makes, such as `jnp.float32(0)`, is a literal: it has no hash.
        operands = {
            i: leaf_of[v]
            for i, v in enumerate(call.invars)
            if not isinstance(v, Literal) and v in leaf_of
        }
        # A block that is called with its leaves in another order computes something else.
        if number and operands != previous:
            return None
        previous = operands
    return previous


def _buffer_writers(trace: LossTrace, calls: Sequence[Any]) -> dict[int, tuple[int, int]] | None:
    """Returns the block and the result that update each buffer; None if blocks share a buffer."""
    made = {v: (n, r) for n, call in enumerate(calls) for r, v in enumerate(call.outvars)}
    found = {}
    for i, new in trace.dependent_buffers.items():
        old = trace.buffers[i]
        readers = [e for e in trace.jaxpr.eqns if old in variables(e.invars)]
        if new not in made or readers not in ([], [calls[made[new][0]]]):
            return None
        found[i] = made[new]
    return found
