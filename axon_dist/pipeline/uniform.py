"""Stages of equal blocks: one program per chunk, whichever rank runs it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ..core.compat import eval_equation
from ..core.typing import Array
from ..jaxpr.layer_scan import SHARED, Chain, find_chains
from ..jaxpr.pieces import Piece, as_it_lies
from ..jaxpr.walk import made_by, variables
from .loss_trace import LossTrace
from .stage import Data, Rest, StageLoss, StageProgram, Wire
from .storage import ModelStorage
from .switch import CutLoss
from .tables import like, plain, zeros


@dataclasses.dataclass(frozen=True, eq=False)
class UniformStages(CutLoss):
    """The loss as prologue, a chain of equal blocks, and epilogue.

    The sequential program it equals:

        x = prologue(rest, batch)
        for block in blocks: x, found[number], left[number] = unit(block, own(number), shared, x)
        loss = epilogue(rest, batch, x, found)

    What blocks find out for the loss, as experts about their balance, goes along with x; what they
    leave in buffers of their own is that of the next microbatch.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        storage: where parameters lie.
        chain: the calls of the blocks.
    """

    trace: LossTrace
    storage: ModelStorage
    chain: Chain

    @classmethod
    def find(cls, trace: LossTrace, storage: ModelStorage) -> UniformStages | None:
        """The stages of a trace, or None where its blocks are not such a chain."""
        if not storage.by_blocks or storage.stages.depths is not None:
            return None
        chains = find_chains(trace.jaxpr)
        if len(chains) != 1 or list(chains[0].calls) != trace.calls:
            return None
        if len(trace.calls) != len(storage.stages.blocks):
            return None  # A block that is not called would run: rows are counted, and not calls.
        found = cls(trace, storage, chains[0])
        return found if found.is_chain else None

    @property
    def is_chain(self) -> bool:
        """Whether blocks have the parameters of their row, and only the last result is read."""
        made = made_by(self._calls)
        # The loss may read the last block's result, and of each block what no other reads: what
        # lies between two blocks is on another rank by then.
        between = {call.outvars[r] for call in self._calls[:-1] for r in self.chain.carried}
        free = [piece for pieces in self._own.values() for piece in pieces]
        before = [self._prologue, self._shared, *free]
        block_params = {
            self.trace.params[k] for k in self.trace.params if k not in self.storage.rest
        }
        separate = all(made.isdisjoint(p.needs | p.made) for p in before)
        # What is looked up in parts is there for the first stage alone.
        looked_up = set(self.trace.looked_up)
        behind = (*before[1:], self._epilogue)
        separate = separate and all(looked_up.isdisjoint(p.needs) for p in behind)
        separate = separate and between.isdisjoint(self._epilogue.needs)
        owned = all(block_params.isdisjoint(p.needs) for p in (*before, self._epilogue))
        return separate and owned and self._weights is not None and self._learned is not None

    def programs(self) -> list[StageProgram]:
        """One program per chunk."""
        stages = self.storage.stages
        return [
            StageProgram(
                stages=stages.stages_of(chunk),
                chunk=chunk,
                rows=self.storage.chunk_rows[chunk],
                first=self._first,
                middle=lambda *operands, chunk=chunk: self._middle(chunk, *operands),
                last=self._last,
                first_uses=self.uses(self._prologue),
                middle_uses=self.uses(self._shared, *itertools.chain(*self._own.values())),
                last_uses=self.uses(self._epilogue),
                learns={
                    i: home for i, home in self._homes.items() if home in stages.stages_of(chunk)
                },
            )
            for chunk in range(stages.num_chunks)
        ]

    @cached_property
    def _calls(self) -> list[Any]:
        return [self.trace.jaxpr.eqns[index] for index in self.chain.calls]

    @cached_property
    def _weights(self) -> dict[int, int] | None:
        """Operand of a block -> which leaf of the block it is; None where blocks differ."""
        leaves, found = self.storage.leaves, {}
        for number, call in enumerate(self._calls):
            block = self.storage.stages.blocks[number]
            own = {self.trace.params[block + leaf]: i for i, leaf in enumerate(leaves)}
            weights = variables(call.invars) & own.keys()
            operands = {i: own[v] for i, v in enumerate(call.invars) if v in weights}
            # A block that is called with its leaves in other places computes something else with
            # them.
            if number and operands != found:
                return None
            found = operands
        return found

    @cached_property
    def _prologue(self) -> Piece:
        first = self._calls[0].invars
        return self.trace.cut([first[i] for i in self._carried])

    @cached_property
    def _shared(self) -> Piece:
        return self.trace.cut([self._calls[0].invars[i] for i in self._shared_operands])

    @cached_property
    def _own(self) -> dict[int, list[Piece]]:
        """Operands that differ from block to block and are no weights, such as random keys."""
        weights = self._weights or {}
        taken = {*weights, *self._carried, *self._shared_operands}
        free = [i for i in range(len(self.chain.roles)) if i not in taken]
        return {i: [self.trace.cut([c.invars[i]]) for c in self._calls] for i in free}

    @cached_property
    def _epilogue(self) -> Piece:
        return self.trace.cut(self.trace.loss, known=made_by(self._calls))

    @cached_property
    def _found(self) -> list[int]:
        """The results of blocks that the loss reads of each, and no other block."""

        def read(r):
            return any(call.outvars[r] in self._epilogue.needs for call in self._calls)

        count = len(self._calls[0].outvars)
        return [r for r in range(count) if r not in self.chain.carried and read(r)]

    @cached_property
    def _learned(self) -> dict[int, tuple[int, int]] | None:
        """Of buffers that blocks change, block and result; None where one is no block's own."""
        made = {v: (n, r) for n, call in enumerate(self._calls) for r, v in enumerate(call.outvars)}
        found = {}
        for i, new in self.trace.learned.items():
            old = self.trace.buffers[i]
            readers = [e for e in self.trace.jaxpr.eqns if old in variables(e.invars)]
            if new not in made or readers not in ([], [self._calls[made[new][0]]]):
                return None
            found[i] = made[new]
        return found

    @cached_property
    def _homes(self) -> dict[int, int]:
        """The stage of every buffer that blocks change."""
        learned = (self._learned or {}).items()
        return {i: self.storage.stages.stage_of(number) for i, (number, _) in learned}

    @cached_property
    def _carried(self) -> list[int]:
        return [i for i, role in enumerate(self.chain.roles) if isinstance(role, int)]

    @cached_property
    def _shared_operands(self) -> list[int]:
        weights = self._weights or {}
        roles = self.chain.roles
        return [i for i, role in enumerate(roles) if role == SHARED and i not in weights]

    @cached_property
    def _dtypes(self) -> list[Any]:
        passed = [self._calls[0].invars[i] for i in self._carried]
        return [v.aval.dtype for v in (*passed, *(self._calls[0].outvars[r] for r in self._found))]

    @property
    def _is_float(self) -> list[bool]:
        return [jnp.issubdtype(dtype, jnp.inexact) for dtype in self._dtypes]

    def _wire(self, values: Sequence[Any]) -> Wire:
        pairs = list(zip(values, self._is_float, strict=True))
        return Wire([plain(v) for v, f in pairs if f], [plain(v) for v, f in pairs if not f])

    def _unwire(self, wire: Wire) -> list[Any]:
        floats, others = iter(wire.floats), iter(wire.others)
        values = [next(floats if is_float else others) for is_float in self._is_float]
        return [like(value, dtype) for value, dtype in zip(values, self._dtypes, strict=True)]

    def _first(self, rest: Rest, data: Data) -> Wire:
        count = len(self._calls)
        forms = [self._calls[0].outvars[r].aval for r in self._found]
        none = [jnp.zeros((count, *form.shape), form.dtype) for form in forms]
        return self._wire([*self._prologue.run(self.known(rest, data)), *none])

    def _middle(self, chunk: int, weights: Any, rest: Rest, data: Data, stage: Array, wire: Wire):
        known = self.known(rest, data)
        shared = self._shared.run(known)
        stages = self.storage.stages
        # `stage` is traced: the same program runs on all ranks, each knows its stage at run time.
        sizes = jnp.asarray([len(stages.blocks_of(s)) for s in range(stages.num_stages)])
        starts = jnp.asarray(stages.boundaries)
        always = min(len(stages.blocks_of(s)) for s in stages.stages_of(chunk))
        left = []
        numbers = self.storage.chunk_rows[chunk]
        for row, values in enumerate(weights):
            leaves = self.storage.leaves_at(numbers[row], values, stage)

            def run(wire, row=row, leaves=leaves):
                return self._block(leaves, shared, known, starts[stage] + row, wire)

            # No branch for rows that every stage fills: a conditional would keep XLA from fusing
            # and from overlapping across it.
            if row < always:
                wire, own = run(wire)
            else:
                none = zeros(jax.eval_shape(run, wire)[1])
                branches = [run, lambda wire, none=none: (wire, none)]
                laid = [lambda wire, do=do: as_it_lies(do(wire)) for do in branches]
                wire, own = jax.lax.cond(row < sizes[stage], *laid, wire)
            left.append(own)
        own_stages = stages.stages_of(chunk)
        of_chunk = [at for i, at in (self._learned or {}).items() if self._homes[i] in own_stages]

        def row_of(number):
            return number - stages.boundaries[stages.stage_of(number)]

        return wire._replace(left=[left[row_of(number)][r] for number, r in of_chunk])

    def _block(
        self, leaves: Any, shared: list, known: dict, number: Array, wire: Wire
    ) -> tuple[Wire, dict[int, Any]]:
        """What a block passes on, and the results that it leaves, by their positions."""
        values, common = self._unwire(wire), iter(shared)
        carried, found = iter(values), values[len(self._carried) :]
        operands: list[Any] = []
        weights = self._weights or {}
        for position, role in enumerate(self.chain.roles):
            if position in weights:
                operands.append(leaves[weights[position]])
            elif isinstance(role, int):
                operands.append(next(carried))
            elif role == SHARED:
                operands.append(next(common))
            else:
                # Made for all blocks, and one is taken: these are keys and numbers, too small for a
                # branch.
                each = [piece.run(known)[0] for piece in self._own[position]]
                operands.append(jnp.stack([jnp.asarray(v) for v in each])[number])
        # The first call stands for all: `find_chains` has shown that they are equal. It stays a
        # call, which is differentiated and lowered once however many blocks there are.
        results = eval_equation(self._calls[0], operands)
        beside = zip(found, self._found, strict=True)
        found = [x.at[number].set(results[r]) for x, r in beside]
        left = {r: results[r] for _, r in (self._learned or {}).values()}
        return self._wire([*(results[role] for role in self.chain.carried), *found]), left

    def _last(self, rest: Rest, data: Data, wire: Wire) -> StageLoss:
        known = self.known(rest, data)
        values, outputs = self._unwire(wire), self._calls[-1].outvars
        known.update(zip([outputs[r] for r in self.chain.carried], values, strict=False))
        for r, found in zip(self._found, values[len(self._carried) :], strict=True):
            known.update((call.outvars[r], found[n]) for n, call in enumerate(self._calls))
        total, weight, *metrics = self._epilogue.run(known)
        return StageLoss(total, weight, metrics)
