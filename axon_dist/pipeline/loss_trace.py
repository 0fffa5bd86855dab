"""The loss of one microbatch as a program: its blocks as calls, its weight and its products."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..core.compat import CALLS, REMATS, eval_equation, eval_jaxpr
from ..core.errors import UnsupportedError
from ..core.reduction import all_mean
from ..core.tree import leaves_with_paths
from ..core.typing import Array, Keys, Path, PyTree
from ..ir.pieces import Piece, cut
from ..ir.units import is_unit
from ..ir.walk import called, depends_on, interpret, made_by, needed_for, struct_of
from ..schedule import Phase, Schedule
from .layout import flatten
from .stage import Data, Rest

Atom: TypeAlias = "Var | Literal"
"""A variable of a program, or a constant in it."""


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
        calls: the positions of the equations that call a block.
        is_chain: whether each of them reads a result of the one before.
        changing: the numbers of the buffers that the loss changes.
        of_batch: the variables that depend on the batch, and on no parameter and no block.
        looked_up: the variables of rows of tables that are split over the ranks; they are looked up
            before the first stage.
        rest: the keys of the parameters outside the blocks that are replicated on every rank.
    """

    jaxpr: Jaxpr
    consts: Sequence[Array]
    params: dict[Keys, Var]
    buffers: list[Var]
    batch: list[Var]
    loss: list[Atom]
    metrics: list[str]
    new_buffers: list[Atom]
    calls: list[int]
    is_chain: bool
    changing: list[int]
    of_batch: frozenset[Var]
    looked_up: tuple[Var, ...] = ()
    rest: tuple[Keys, ...] = ()

    def cut(self, outputs: Sequence[Atom], known: Iterable[Var] = ()) -> Piece:
        """The piece that computes some values from others.

        What it makes of the batch alone is not split over the ranks of a stage. A shift of a split
        array is a permutation, as in `tokens[:, 1:]`, and in a branch that only one stage takes it
        would wait for the other stages forever.
        """
        return cut(self.jaxpr, outputs, {*known, *self.looked_up}, self.of_batch)

    def made_of(self, buffer: int) -> tuple[Jaxpr, list[Var]]:
        """The program that makes a buffer's next value, and the inputs that it reads."""
        part, inputs = needed_for(self.jaxpr, [len(self.loss) + buffer])
        return part, [self.jaxpr.invars[number] for number in inputs]

    @cached_property
    def known_ahead(self) -> set[Var]:
        """The inputs that every rank has before a microbatch is run."""
        return {*self.buffers, *(self.params[keys] for keys in self.rest)}

    @cached_property
    def learned(self) -> dict[int, Atom]:
        """The next values of the buffers that follow from what is not known ahead, by number."""
        return {
            i: self.new_buffers[i]
            for i in self.changing
            if not self.known_ahead.issuperset(self.made_of(i)[1])
        }

    def known(self, data: Data, names: Sequence[Keys], rest: Rest) -> dict[Var, Array]:
        """The values of the inputs, without the parameters of blocks.

        Args:
            data: of the microbatch.
            names: the keys of the parameters outside the blocks.
            rest: the values of some of these, by number.
        """
        known = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        known.update(zip(self.buffers, data.buffers, strict=True))
        known.update(zip(self.batch, data.batch, strict=True))
        known.update((self.params[names[i]], value) for i, value in rest.items())
        # Only the first stage knows them.
        known.update(zip(self.looked_up, data.rows, strict=False))
        return known

    def uses(self, names: Sequence[Keys], *pieces: Piece) -> tuple[int, ...]:
        """The numbers of the parameters outside the blocks, of these keys, that pieces read."""
        needs = frozenset[Var]().union(*(piece.needs for piece in pieces))
        return tuple(i for i, keys in enumerate(names) if self.params[keys] in needs)


def trace_loss(
    forward: Callable[..., PyTree], params: PyTree, buffers: PyTree, batch: PyTree
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
    num_buffers, num_loss = len(jax.tree.leaves(buffers)), 2 + len(shapes[2])
    before, after = inputs[len(keys) : len(keys) + num_buffers], outputs[num_loss:]
    of_batch = inputs[len(keys) + num_buffers :]
    calls = [i for i, equation in enumerate(jaxpr.eqns) if is_unit(equation)]
    blocks = [jaxpr.eqns[call] for call in calls]
    pairs = itertools.pairwise(blocks)
    made = made_by(blocks)
    trained = depends_on(jaxpr, [*inputs[: len(keys)], *made])
    return LossTrace(
        jaxpr=jaxpr,
        consts=closed.consts,
        params=dict(zip(keys, inputs, strict=False)),
        buffers=before,
        batch=of_batch,
        loss=outputs[:num_loss],
        metrics=sorted(shapes[2]),
        new_buffers=after,
        calls=calls,
        is_chain=all(any(v in one.outvars for v in other.invars) for one, other in pairs),
        changing=[i for i, v in enumerate(after) if v is not before[i]],
        of_batch=frozenset(depends_on(jaxpr, of_batch) - trained),
    )


def buffers_over_time(
    trace: LossTrace,
    buffers: PyTree,
    num_microbatches: int,
    learned: Collection[int] = (),
    once: Collection[Path] = (),
    rest: Mapping[Keys, Array] = MappingProxyType({}),
) -> tuple[dict[int, Array], PyTree]:
    """What the buffers are before each microbatch, and after the last.

    A schedule runs microbatches of a stage in any order and each several times, so that a buffer
    must be known without running the model. The counts of random streams are, and the estimates of
    a spectral norm: their part of the program is cut out and run ahead. What a stage alone changes
    and reads, it keeps itself.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        buffers: before the first microbatch.
        num_microbatches: how many.
        learned: the numbers of the buffers that stages keep, which stay here as they are.
        once: the paths of the buffers that change once, as on one device, and that every microbatch
            finds as they were at first.
        rest: the values of the parameters that are known ahead.

    Returns:
        By the number of each leaf that changes, its values before every microbatch, of shape
        [num_microbatches, ...]; and the buffers after the last.

    Raises:
        UnsupportedError: when another buffer depends on the batch or the parameters of blocks.
    """
    leaves, structure = jax.tree.flatten(buffers)
    changing = [i for i in trace.changing if i not in learned]
    if not changing:
        return {}, buffers
    paths = [path for path, _ in leaves_with_paths(buffers)]
    advance = _advance(trace, paths, changing, rest)
    stay = {i for i in changing if paths[i] in once}
    last, over_time = _over_time(advance, leaves, changing, stay, num_microbatches)
    return over_time, structure.unflatten(last)


def _over_time(
    advance: Callable[[list[Array]], list[Array]],
    leaves: list[Array],
    changing: list[int],
    stay: Collection[int],
    num_microbatches: int,
) -> tuple[list[Array], dict[int, Array]]:
    """The leaves after the last microbatch, and the changing ones before each; some change once."""
    after = advance(leaves)
    moving = [i for i in changing if i not in stay]

    def body(now: list[Array], _: None) -> tuple[list[Array], list[Array]]:
        then = advance(now)
        for i in stay:
            then[i] = now[i]
        return then, [now[i] for i in moving]

    last, before = jax.lax.scan(body, leaves, length=num_microbatches)
    for i in stay:
        last[i] = after[i]
    return last, dict(zip(moving, before, strict=True))


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


def _advance(
    trace: LossTrace, paths: list[Path], changing: list[int], rest: Mapping[Keys, Array]
) -> Callable[[list[Array]], list[Array]]:
    """The part of the program that makes the next buffers, if only what is known goes into it."""
    pieces = {}
    for index in changing:
        part, needed = trace.made_of(index)
        if not trace.known_ahead.issuperset(needed):
            what = "the batch" if set(trace.batch) & set(needed) else "the parameters of blocks"
            raise UnsupportedError(
                f"the buffer {paths[index]!r} follows from {what}, and is not one stage's alone: "
                "several stages read or change it, and they run microbatches at different times. "
                "Let each block have its own; or use a normalisation without statistics, such as "
                "nnx.LayerNorm or nnx.RMSNorm, or freeze them with use_running_average=True"
            )
        pieces[index] = part, needed
    known = {trace.params[keys]: value for keys, value in rest.items()}

    def advance(now: list[Array]) -> list[Array]:
        after, values = list(now), {**known, **dict(zip(trace.buffers, now, strict=True))}
        for index, (part, needed) in pieces.items():
            closed = ClosedJaxpr(part, trace.consts)
            (after[index],) = eval_jaxpr(closed, [values[v] for v in needed])
        return after

    return advance


def _forward_through_units(jaxpr: Jaxpr) -> Jaxpr:
    """Reads what a unit hands through, such as a random key, from where it came."""
    source: dict[Var, Atom] = {}

    def origin(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else source.get(atom, atom)

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


def mean_weight(
    trace: LossTrace, data: Callable[[Array], Data], num_microbatches: int, axes: tuple[str, ...]
) -> Array | None:
    """The mean weight of a microbatch, over all of them and all ranks that share the batch.

    A pipeline adds up gradients of sums, not of means, since a stage meets a microbatch before its
    weight is known at the end. Divided by the mean weight on the way back, they have the size that
    gradients of a mean have, which half precision needs: a sum over a thousand tokens, scaled as a
    mean is, would overflow.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        data: (index of a microbatch) -> what is known of it.
        num_microbatches: how many.
        axes: the manual axes that split the batch.

    Returns:
        A float32 scalar that is not zero, or None where the loss is a plain mean.

    Raises:
        UnsupportedError: when the weight depends on a parameter.
    """
    if isinstance(trace.loss[1], Literal):
        return None
    part, inputs = needed_for(trace.jaxpr, [1])
    needed = [trace.jaxpr.invars[number] for number in inputs]
    if foreign := [keys for keys, v in trace.params.items() if v in needed]:
        path = "/".join(map(str, foreign[0]))
        raise UnsupportedError(
            f"the weight of the loss depends on the parameter {path!r}; in Weighted(total, weight) "
            "the weight must follow from the batch alone, such as the number of its tokens"
        )

    def weight_of(microbatch: Array) -> Array:
        known = trace.known(data(microbatch), (), {})
        (weight,) = eval_jaxpr(ClosedJaxpr(part, trace.consts), [known[v] for v in needed])
        return weight

    weights = jax.lax.map(weight_of, jnp.arange(num_microbatches))
    mean = all_mean(jnp.mean(weights), axes) if axes else jnp.mean(weights)
    return jnp.where(mean == 0, 1.0, mean)


def with_combined_rows(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """The same function, whose products see all dims before the contracted ones as one.

        dot(x[batch, tokens, k], w[k, n])  ->  reshape(dot(reshape(x, [batch * tokens, k]), w))

    A reshape costs nothing, and the gradient of the weight then sums over one dim instead of two.
    XLA writes a sum over two dims as one over a transposed copy of the cotangent, and computes what
    leads to the cotangent again for that copy, in an order that misses the cache: a quarter of the
    backward pass of a transformer block on CPUs.

    Only where every dim is whole on its device: dims that the compiler splits over different axes
    do not join.

    Args:
        function: of arrays; loops and functions with own derivatives are left as they are.

    Returns:
        A function of the same arguments and results, up to the order of additions.

    Example:
        >>> x, w = jax.numpy.ones((2, 3, 4)), jax.numpy.ones((4, 5))
        >>> program = jax.make_jaxpr(with_combined_rows(lambda x, w: x @ w))(x, w)
        >>> [(str(e.primitive), e.outvars[0].aval.shape) for e in program.eqns]
        [('reshape', (6, 4)), ('dot_general', (6, 5)), ('reshape', (2, 3, 5))]
    """

    @functools.wraps(function)
    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        values, by_rows = jax.tree.leaves(args), _JoinedRows().equation
        results = interpret(closed.jaxpr, closed.consts, values, by_rows)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


class _JoinedRows:
    """Runs one program's equations; what several products share is joined once, and kept once."""

    def __init__(self):
        self._combined: dict[int, tuple[Array, Array]] = {}
        self._units: dict[int, tuple[ClosedJaxpr, ClosedJaxpr]] = {}

    def equation(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array]:
        name, params = equation.primitive.name, equation.params
        inner = called(equation)
        if is_unit(equation):
            # Equal blocks stay calls of one program, differentiated and lowered once for all.
            program = {"jaxpr": self._unit(equation.params["jaxpr"])}
            return eval_equation(equation.replace(params={**equation.params, **program}), operands)
        if name in CALLS and inner is not None:
            return interpret(inner.jaxpr, inner.consts, operands, self.equation)
        if name in REMATS and inner is not None:

            def again(*values):
                return interpret(inner.jaxpr, inner.consts, values, _JoinedRows().equation)

            policy, barrier = params["policy"], params["prevent_cse"]
            return jax.checkpoint(again, policy=policy, prevent_cse=barrier)(*operands)
        if name == "dot_general":
            return [self._product(equation, *operands)]
        return eval_equation(equation, operands)

    def _unit(self, program: ClosedJaxpr) -> ClosedJaxpr:
        """The program of a block with its products so seen, the same one for each of its calls."""
        # An id is of one program for as long as the program is held.
        if id(program) not in self._units:

            def inside(*values):
                return interpret(program.jaxpr, program.consts, values, _JoinedRows().equation)

            kinds = [
                struct_of(v).update(weak_type=getattr(v.aval, "weak_type", False))
                for v in program.jaxpr.invars
            ]
            self._units[id(program)] = program, jax.make_jaxpr(inside)(*kinds)
        return self._units[id(program)][1]

    def _product(self, equation: JaxprEqn, x: Array, w: Array) -> Array:
        (of_x, of_w), batch = equation.params["dimension_numbers"]
        rows = x.ndim - len(of_x)
        if any(batch) or rows < 2 or tuple(of_x) != tuple(range(rows, x.ndim)):
            (result,) = eval_equation(equation, (x, w))
            return result
        # An id is of one array for as long as the array is held.
        _, joined = self._combined.get(id(x), (x, x))
        if joined.ndim != x.ndim - rows + 1:
            joined = x.reshape(math.prod(x.shape[:rows]), *x.shape[rows:])
            self._combined[id(x)] = x, joined
        dims = (tuple(range(1, joined.ndim)), of_w), batch
        matrices = equation.replace(params={**equation.params, "dimension_numbers": dims})
        (result,) = eval_equation(matrices, (joined, w))
        return result.reshape(struct_of(equation.outvars[0]).shape)
