"""The loss of one microbatch as a traced program, its inputs and outputs told apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from ..core.compat import eval_jaxpr
from ..core.errors import UnsupportedError
from ..core.tree import leaves_with_paths
from ..core.typing import Array, PyTree
from ..program import Piece, cut, depends_on, is_unit, made_by, needed_for
from ..schedule import Phase, Schedule
from .layout import Keys, flatten


@dataclasses.dataclass(frozen=True, eq=False)
class LossTrace:
    """A jaxpr (params, buffers, microbatch) -> (total, weight, metrics, new buffers).

    Args:
        jaxpr: open, its units as calls.
        consts: values of its constvars.
        params: the variable of each parameter, by keys.
        buffers: the variables of the buffers.
        batch: the variables of the microbatch.
        loss: the atoms of total, weight and metrics.
        metrics: the names of the metrics.
        new_buffers: the atoms of the buffers afterwards.
        buffer_tree: the structure of the buffers.
        looked_up: the variables that are known ahead of the first stage, of rows of tables that lie
            in parts over the ranks.
    """

    jaxpr: Any
    consts: Sequence[Any]
    params: dict[Keys, Any]
    buffers: list[Any]
    batch: list[Any]
    loss: list[Any]
    metrics: list[str]
    new_buffers: list[Any]
    buffer_tree: Any
    looked_up: tuple[Any, ...] = ()

    @property
    def calls(self) -> list[int]:
        """The positions of the equations that call a block."""
        return [i for i, equation in enumerate(self.jaxpr.eqns) if is_unit(equation)]

    def cut(self, outputs: Sequence[Any], known: Iterable[Any] = ()) -> Piece:
        """The piece that computes some values from others.

        What it makes of the batch alone is not split over the ranks of a stage. A shift of a split
        array is a permutation, as in `tokens[:, 1:]`, and in a branch that only one stage takes it
        would wait for the other stages forever.
        """
        return cut(self.jaxpr, outputs, {*known, *self.looked_up}, self._of_batch)

    @cached_property
    def _of_batch(self) -> frozenset[Any]:
        """The variables that depend on the batch, and on no parameter and no block."""
        made = made_by(self.jaxpr.eqns[call] for call in self.calls)
        trained = depends_on(self.jaxpr, [*self.params.values(), *made])
        return frozenset(depends_on(self.jaxpr, self.batch) - trained)

    @property
    def changing(self) -> list[int]:
        """The numbers of the buffers that the loss changes."""
        return [i for i, v in enumerate(self.new_buffers) if v is not self.buffers[i]]

    def made_of(self, buffer: int) -> tuple[Any, list[Any]]:
        """The program that makes a buffer's next value, and the inputs that it reads."""
        part, inputs = needed_for(self.jaxpr, [len(self.loss) + buffer])
        return part, [self.jaxpr.invars[number] for number in inputs]

    @cached_property
    def learned(self) -> dict[int, Any]:
        """The next values of the buffers that follow from more than buffers, by number."""
        own = set(self.buffers)
        found = [i for i in self.changing if not own.issuperset(self.made_of(i)[1])]
        return {i: self.new_buffers[i] for i in found}

    def known(
        self,
        rest: dict[Keys, Any],
        buffers: Sequence[Any],
        batch: Sequence[Any],
        rows: Sequence[Any] = (),
    ) -> dict:
        """The values of the inputs, without the parameters of blocks."""
        known = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        known.update(zip(self.buffers, buffers, strict=True))
        known.update(zip(self.batch, batch, strict=True))
        known.update((self.params[keys], value) for keys, value in rest.items())
        # Only the first stage knows them.
        known.update(zip(self.looked_up, rows, strict=False))
        return known


def trace_loss(
    forward: Callable[..., Any], params: PyTree, buffers: PyTree, batch: PyTree
) -> LossTrace:
    """Traces the loss of one microbatch.

    Args:
        forward: (params, buffers, microbatch) -> (total, weight, dict of metrics, new buffers),
            its blocks marked as units.
        params: shapes of the model's parameters in the dtype of the compute.
        buffers: arrays or shapes.
        batch: arrays or shapes of one microbatch.

    Returns:
        The program.
    """
    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(params, buffers, batch)
    jaxpr = _forward_through_units(closed.jaxpr)
    inputs, outputs = list(jaxpr.invars), list(jaxpr.outvars)
    keys = list(flatten(params))
    num_buffers = len(jax.tree.leaves(buffers))
    num_loss = 2 + len(shapes[2])
    return LossTrace(
        jaxpr=jaxpr,
        consts=closed.consts,
        params=dict(zip(keys, inputs, strict=False)),
        buffers=inputs[len(keys) : len(keys) + num_buffers],
        batch=inputs[len(keys) + num_buffers :],
        loss=outputs[:num_loss],
        metrics=sorted(shapes[2]),
        new_buffers=outputs[num_loss:],
        buffer_tree=jax.tree.structure(shapes[3]),
    )


def buffers_over_time(
    trace: LossTrace, buffers: PyTree, num_microbatches: int, learned: Collection[int] = ()
) -> tuple[Callable[[Array], list[Any]], PyTree]:
    """What the buffers are before each microbatch, and after the last.

    A schedule runs microbatches of a stage in any order and each several times, so that a buffer
    must be known without running the model. The counts of random streams are: their part of the
    program is cut out and run ahead. What a stage alone changes and reads, it keeps itself.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        buffers: before the first microbatch.
        num_microbatches: how many.
        learned: the numbers of the buffers that stages keep, which stay here as they are.

    Returns:
        A function from the index of a microbatch to the leaves of the buffers before it, and the
        buffers after the last.

    Raises:
        UnsupportedError: when another buffer depends on the batch or the parameters, as those of a
            BatchNorm behind the last block do.
    """
    leaves = jax.tree.leaves(buffers)
    changing = [i for i in trace.changing if i not in learned]
    advance = _advance(trace, buffers, changing)

    def body(now: list[Any], _: None) -> tuple[list[Any], list[Any]]:
        return advance(now), [now[i] for i in changing]

    last, before = jax.lax.scan(body, leaves, length=num_microbatches)

    def at(microbatch: Array) -> list[Any]:
        found = list(leaves)
        for i, stacked in zip(changing, before, strict=True):
            found[i] = jax.lax.dynamic_index_in_dim(stacked, microbatch, keepdims=False)
        return found

    return at, jax.tree.unflatten(jax.tree.structure(buffers), last)


def check_order(
    trace: LossTrace, buffers: PyTree, schedule: Schedule, learned: Mapping[int, int]
) -> None:
    """Raises where a stage would not find in a buffer what the microbatch before has left.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        buffers: arrays or shapes.
        schedule: the table.
        learned: the buffers that stages keep, and the stage of each.

    Raises:
        UnsupportedError: naming the buffer and the stage.
    """
    _, used = needed_for(trace.jaxpr, range(len(trace.jaxpr.outvars)))
    read = {trace.jaxpr.invars[number] for number in used}
    named = zip(leaves_with_paths(buffers), trace.buffers, strict=True)
    for i, ((path, _), variable) in enumerate(named):
        if i in learned and variable in read and not schedule.in_order(learned[i], [Phase.F]):
            raise UnsupportedError(
                f"the buffer {path!r} of stage {learned[i]} follows from one microbatch to the "
                f"next, and schedule {schedule.name!r} runs the forward passes of this stage in "
                "another order than theirs. Use a table that keeps to it, as all named ones do"
            )


def _advance(trace: LossTrace, buffers: PyTree, changing: list[int]) -> Callable:
    """The part of the program that makes the next buffers, if nothing else goes into it."""
    paths = [path for path, _ in leaves_with_paths(buffers)]
    pieces = {}
    for index in changing:
        part, needed = trace.made_of(index)
        if not set(trace.buffers).issuperset(needed):
            raise UnsupportedError(
                f"the buffer {paths[index]!r} depends on the batch, as the statistics of BatchNorm "
                "do, and is not one stage's alone. Stages keep what their own blocks change; of "
                "the rest of a model only counters may change, for microbatches run out of order. "
                "Let each block have its own; or use a normalisation without statistics, such as "
                "nnx.LayerNorm or nnx.RMSNorm, or freeze them with use_running_average=True"
            )
        pieces[index] = part, [trace.buffers.index(v) for v in needed]

    def advance(now: list[Any]) -> list[Any]:
        after = list(now)
        for index, (part, sources) in pieces.items():
            closed = ClosedJaxpr(part, trace.consts)
            (after[index],) = eval_jaxpr(closed, [now[i] for i in sources])
        return after

    return advance


def _forward_through_units(jaxpr: Any) -> Any:
    """Reads what a unit hands through, such as a random key, from where it came."""
    source: dict[Any, Any] = {}
    origin = lambda atom: atom if isinstance(atom, Literal) else source.get(atom, atom)
    equations = []
    for equation in jaxpr.eqns:
        equation = equation.replace(invars=[origin(atom) for atom in equation.invars])
        equations.append(equation)
        if is_unit(equation):
            inner = equation.params["jaxpr"].jaxpr
            positions = {variable: i for i, variable in enumerate(inner.invars)}
            for made, result in zip(equation.outvars, inner.outvars, strict=True):
                if not isinstance(result, Literal) and result in positions:
                    source[made] = equation.invars[positions[result]]
    return jaxpr.replace(eqns=equations, outvars=[origin(atom) for atom in jaxpr.outvars])
