"""The loss of one microbatch as a jaxpr with blocks as calls, and its weight.

Also matrix products with merged batch dims, which are faster on CPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from ..core.compat import CALLS, REMATS, eval_equation, eval_jaxpr
from ..core.errors import UnsupportedError
from ..core.reduction import all_mean
from ..core.typing import Array, Keys, Path, PyTree
from ..ir.pieces import Piece, backward_slice
from ..ir.units import is_unit
from ..ir.walk import (
    called,
    depends_on,
    inputs_with_gradient,
    interpret,
    made_by,
    needed_for,
    struct_of,
)
from ..schedule import Phase, Schedule
from .layout import buffer_paths, flatten
from .stage import MicrobatchData, Rest

Atom: TypeAlias = "Var | Literal"
"""A variable of a jaxpr, or a constant in it."""


@dataclasses.dataclass(frozen=True, eq=False)
class LossTrace:
    """A jaxpr (params, buffers, microbatch) -> (total, weight, metrics, new buffers).

    Args:
        jaxpr: the open jaxpr, its units as calls.
        consts: the values of its constvars.
        params: the variable of each parameter, by keys.
        buffers: the variables of the buffers.
        batch: the variables of the microbatch.
        loss: the atoms of total, weight and metrics.
        metrics: the names of the metrics.
        new_buffers: the atoms of the buffers' new values.
        calls: the positions of the equations that call a block.
        is_chain: whether each call reads a result of the previous one.
        changing: the numbers of the buffers that the loss updates.
        of_batch: the variables that depend on the batch, but on no parameter and no block.
        looked_up: the variables of the rows of split tables, which are looked up before the first
            stage.
        known_params: the keys of the parameters outside the blocks that every rank has in full.
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
    known_params: tuple[Keys, ...] = ()

    def cut(self, outputs: Sequence[Atom], known: Iterable[Var] = ()) -> Piece:
        """Returns the piece that computes some values from others.

        Values that depend on the batch alone are not split over the ranks of a stage. A shift of a
        split array, as in `tokens[:, 1:]`, is a permutation. In a branch that only one stage takes,
        it would wait for the other stages forever.
        """
        return backward_slice(self.jaxpr, outputs, {*known, *self.looked_up}, self.of_batch)

    def made_of(self, buffer: int) -> tuple[Jaxpr, list[Var]]:
        """Returns the program that computes a buffer's next value, and the inputs it reads."""
        part, inputs = needed_for(self.jaxpr, [len(self.loss) + buffer])
        return part, [self.jaxpr.invars[number] for number in inputs]

    @cached_property
    def known_ahead(self) -> set[Var]:
        """The inputs that every rank has before it runs a microbatch."""
        return {*self.buffers, *(self.params[keys] for keys in self.known_params)}

    @cached_property
    def dependent_buffers(self) -> dict[int, Atom]:
        """The new values, by number, of buffers that depend on inputs not in `known_ahead`."""
        return {
            i: self.new_buffers[i]
            for i in self.changing
            if not self.known_ahead.issuperset(self.made_of(i)[1])
        }

    def known(self, data: MicrobatchData, names: Sequence[Keys], rest: Rest) -> dict[Var, Array]:
        """Returns the values of the inputs, without the parameters of blocks.

        Args:
            data: the data of the microbatch.
            names: the keys of the parameters outside the blocks.
            rest: the values of some of these parameters, by number.
        """
        known = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        known.update(zip(self.buffers, data.buffers, strict=True))
        known.update(zip(self.batch, data.batch, strict=True))
        known.update((self.params[names[i]], value) for i, value in rest.items())
        # `data.looked_up` is empty on all stages but the first.
        known.update(zip(self.looked_up, data.looked_up, strict=False))
        return known

    def uses(self, names: Sequence[Keys], *pieces: Piece) -> tuple[int, ...]:
        """Returns the positions in `names` of the parameters that the pieces read."""
        needs = frozenset[Var]().union(*(piece.needs for piece in pieces))
        return tuple(i for i, keys in enumerate(names) if self.params[keys] in needs)


def trace_loss(
    forward: Callable[..., PyTree], params: PyTree, buffers: PyTree, batch: PyTree
) -> LossTrace:
    """Traces the loss of one microbatch.

    Args:
        forward: (params, buffers, microbatch) -> (total, weight, dict of metrics, new buffers),
            its blocks marked as units.
        params: shapes of the model's parameters, in the compute dtype.
        buffers: arrays or shapes.
        batch: arrays or shapes of one microbatch.

    Returns:
        The trace.
    """
    closed, shapes = jax.make_jaxpr(forward, return_shape=True)(params, buffers, batch)
    jaxpr = _forward_through_units(closed.jaxpr)
    inputs = list(jaxpr.invars)
    outputs = list(jaxpr.outvars)
    keys = list(flatten(params))
    num_buffers = len(jax.tree.leaves(buffers))
    num_loss = 2 + len(shapes[2])  # total, weight and metrics
    old_buffers = inputs[len(keys) : len(keys) + num_buffers]
    new_buffers = outputs[num_loss:]
    batch_inputs = inputs[len(keys) + num_buffers :]
    calls = [i for i, equation in enumerate(jaxpr.eqns) if is_unit(equation)]
    blocks = [jaxpr.eqns[call] for call in calls]
    pairs = itertools.pairwise(blocks)
    made = made_by(blocks)
    trained = depends_on(jaxpr, [*inputs[: len(keys)], *made])
    return LossTrace(
        jaxpr=jaxpr,
        consts=closed.consts,
        params=dict(zip(keys, inputs, strict=False)),
        buffers=old_buffers,
        batch=batch_inputs,
        loss=outputs[:num_loss],
        metrics=sorted(shapes[2]),
        new_buffers=new_buffers,
        calls=calls,
        is_chain=all(
            any(v in block.outvars for v in next_block.invars) for block, next_block in pairs
        ),
        changing=[i for i, v in enumerate(new_buffers) if v is not old_buffers[i]],
        of_batch=frozenset(depends_on(jaxpr, batch_inputs) - trained),
    )


def buffers_over_time(
    trace: LossTrace,
    buffers: PyTree,
    num_microbatches: int,
    mutable_buffers: Collection[int] = (),
    once_per_step: Collection[Path] = (),
    rest: Mapping[Keys, Array] = MappingProxyType({}),
) -> tuple[dict[int, Array], PyTree]:
    """Computes the values of the buffers before each microbatch and after the last.

    A table may run the microbatches of a stage in any order, and each of them several times. So a
    buffer's value must be known without running the model. This holds for the counts of random
    streams and the estimates of a spectral norm: their part of the program is cut out and run
    ahead. Buffers that only one stage updates and reads are kept by that stage.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        buffers: their values before the first microbatch.
        num_microbatches: the number of microbatches.
        mutable_buffers: the numbers of the buffers that stages keep; they are returned unchanged.
        once_per_step: the paths of the buffers that are updated only once per step, as on one
            device. Every microbatch reads their initial value.
        rest: the values of the parameters that are known ahead.

    Returns:
        The values of each changing leaf before every microbatch, by number, of shape
        [num_microbatches, ...], except for those in `mutable_buffers` or
        `once_per_step`; and the buffers after the last microbatch.

    Raises:
        UnsupportedError: if another buffer depends on the batch or the parameters of blocks.
    """
    leaves, structure = jax.tree.flatten(buffers)
    changing = [i for i in trace.changing if i not in mutable_buffers]
    if not changing:
        return {}, buffers
    paths = buffer_paths(buffers)
    advance = _advance(trace, paths, changing, rest)
    once = {i for i in changing if paths[i] in once_per_step}
    last, over_time = _over_time(advance, leaves, changing, once, num_microbatches)
    return over_time, structure.unflatten(last)


def _over_time(
    advance: Callable[[list[Array]], list[Array]],
    leaves: list[Array],
    changing: list[int],
    once_per_step: Collection[int],
    num_microbatches: int,
) -> tuple[list[Array], dict[int, Array]]:
    """Returns the leaves after the last microbatch, and the changing ones before each.

    The `once_per_step` leaves keep their initial value in all microbatches, and are updated once.
    """
    updated_once = advance(leaves)
    moving = [i for i in changing if i not in once_per_step]

    def body(now: list[Array], _: None) -> tuple[list[Array], list[Array]]:
        then = advance(now)
        for i in once_per_step:
            then[i] = now[i]
        return then, [now[i] for i in moving]

    last, before = jax.lax.scan(body, leaves, length=num_microbatches)
    for i in once_per_step:
        last[i] = updated_once[i]
    return last, dict(zip(moving, before, strict=True))


def check_order(
    trace: LossTrace, buffers: PyTree, schedule: Schedule, buffer_stages: Mapping[int, int]
) -> None:
    """Raises if a stage would read a buffer before the previous microbatch has written it.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        buffers: arrays or shapes.
        schedule: the table.
        buffer_stages: the stage of each buffer that stages keep, by the buffer's number.

    Raises:
        UnsupportedError: naming the buffer and the stage.
    """
    _, used = needed_for(trace.jaxpr, range(len(trace.jaxpr.outvars)))
    read = {trace.jaxpr.invars[number] for number in used}
    named = zip(buffer_paths(buffers), trace.buffers, strict=True)
    for i, (path, variable) in enumerate(named):
        if i not in buffer_stages or variable not in read:
            continue
        stage = buffer_stages[i]
        if not schedule.in_order(stage, [Phase.F]):
            raise UnsupportedError(
                f"the buffer {path!r} of stage {stage} is updated from one microbatch to the next, "
                f"but schedule {schedule.name!r} does not run the forward passes of this stage in "
                "the order of the microbatches. Use a table that does, as all named ones do",
                code="buffer-order",
            )


def _advance(
    trace: LossTrace, paths: list[Path], changing: list[int], rest: Mapping[Keys, Array]
) -> Callable[[list[Array]], list[Array]]:
    """Returns a function that computes the next buffers, if they depend only on known inputs."""
    pieces = {}
    for index in changing:
        part, needed = trace.made_of(index)
        if not trace.known_ahead.issuperset(needed):
            what = "the batch" if set(trace.batch) & set(needed) else "the parameters of blocks"
            raise UnsupportedError(
                f"the buffer {paths[index]!r} depends on {what}, and several stages read or update "
                "it, which run a microbatch at different times. "
                "Give each block its own buffer; or use a normalisation without statistics, such "
                "as nnx.LayerNorm or nnx.RMSNorm, or freeze them with use_running_average=True",
                code="shared-buffer",
            )
        pieces[index] = part, needed
    known = {trace.params[keys]: value for keys, value in rest.items()}

    def advance(now: list[Array]) -> list[Array]:
        after = list(now)
        values = {**known, **dict(zip(trace.buffers, now, strict=True))}
        for index, (part, needed) in pieces.items():
            closed = ClosedJaxpr(part, trace.consts)
            (after[index],) = eval_jaxpr(closed, [values[v] for v in needed])
        return after

    return advance


def _forward_through_units(jaxpr: Jaxpr) -> Jaxpr:
    """Replaces results that a unit passes through unchanged, such as random keys, by its inputs."""
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
            for outvar, result in zip(equation.outvars, inner.outvars, strict=True):
                if not isinstance(result, Literal) and result in positions:
                    source[outvar] = equation.invars[positions[result]]
    return jaxpr.replace(eqns=equations, outvars=[origin(atom) for atom in jaxpr.outvars])


def mean_microbatch_weight(
    trace: LossTrace,
    data: Callable[[Array], MicrobatchData],
    num_microbatches: int,
    axes: tuple[str, ...],
    rest: Mapping[Keys, Array] = MappingProxyType({}),
    frozen: Container[Keys] = (),
) -> Array | None:
    """Returns the mean weight of a microbatch, over all microbatches and all ranks of the batch.

    A pipeline adds up gradients of sums, not of means, because a stage runs a microbatch before the
    total weight is known. Dividing them by the mean weight in the backward pass gives them the size
    of gradients of a mean. Half precision needs this: with the loss scale of a mean, a sum over a
    thousand tokens would overflow.

    Args:
        trace: the jaxpr of the loss of one microbatch on one rank, blocks as calls.
        data: (index of a microbatch) -> its `MicrobatchData`.
        num_microbatches: the number of microbatches.
        axes: the manual axes that split the batch.
        rest: the values of the parameters that are known ahead.
        frozen: the keys of those that are not trained.

    Returns:
        A scalar in float32 or wider that is not zero, or None if the loss is a plain mean.

    Raises:
        UnsupportedError: if the weight depends on a parameter that is not known ahead, or
            has a gradient for a trained one.
    """
    if isinstance(trace.loss[1], Literal):
        return None
    part, inputs = needed_for(trace.jaxpr, [1])
    needed = [trace.jaxpr.invars[number] for number in inputs]
    read = [keys for keys, v in trace.params.items() if v in needed]
    _check_weight(ClosedJaxpr(part, trace.consts), read, rest, frozen)

    def weight_of(microbatch: Array) -> Array:
        known = trace.known(data(microbatch), tuple(rest), dict(enumerate(rest.values())))
        (weight,) = eval_jaxpr(ClosedJaxpr(part, trace.consts), [known[v] for v in needed])
        return weight

    weights = jax.lax.map(weight_of, jnp.arange(num_microbatches))
    mean = all_mean(jnp.mean(weights), axes) if axes else jnp.mean(weights)
    return jnp.where(mean == 0, 1.0, mean)


def _check_weight(
    program: ClosedJaxpr,
    read: Sequence[Keys],
    rest: Container[Keys],
    frozen: Container[Keys],
) -> None:
    """Raises if the weight of a loss is not known ahead, or has a gradient.

    Args:
        program: computes the weight; its first inputs are the parameters that it reads.
        read: the keys of these parameters.
        rest: the keys of the parameters that are known ahead.
        frozen: the keys of those that are not trained.
    """
    if split := [keys for keys in read if keys not in rest]:
        path = "/".join(map(str, split[0]))
        raise UnsupportedError(
            f"the weight of the loss depends on the parameter {path!r}, which the pipeline splits "
            "among its ranks; in Weighted(total, weight) let the weight depend on the batch alone, "
            "such as the number of its tokens, or on parameters that are outside the blocks, are "
            "not split over the vocabulary, and are frozen or wrapped in jax.lax.stop_gradient",
            code="weight-of-parameters",
        )
    inputs = program.jaxpr.invars
    trained = [number for number, keys in enumerate(read) if keys not in frozen]
    order = [*trained, *(number for number in range(len(inputs)) if number not in trained)]
    ordered = program.jaxpr.replace(invars=[inputs[number] for number in order])
    if moving := inputs_with_gradient(ClosedJaxpr(ordered, program.consts), 0, len(trained)):
        path = "/".join(map(str, read[trained[moving[0]]]))
        raise UnsupportedError(
            f"the weight of the loss depends on the parameter {path!r}; in Weighted(total, weight) "
            "the weight must depend on the batch alone, such as the number of its tokens, or the "
            "parameter must be frozen, or wrapped in jax.lax.stop_gradient",
            code="weight-of-parameters",
        )


def with_merged_batch_dims(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns the function with the batch dims of each matrix product merged into one.

        dot(x[batch, tokens, k], w[k, n])  ->  reshape(dot(reshape(x, [batch * tokens, k]), w))

    A reshape costs nothing, and the gradient of the weight then sums over one dim instead of two.
    XLA implements a sum over two dims as a sum over a transposed copy of the cotangent, and
    recomputes the operations that produce the cotangent for that copy, in an order that misses the
    cache. This costs a quarter of the backward pass of a transformer block on CPUs.

    Use it only if no dim is sharded by the compiler: dims that are split over different axes cannot
    be merged.

    Args:
        function: a function of arrays; its loops and custom derivatives are left unchanged.

    Returns:
        A function with the same arguments and results, up to the order of additions.

    Example:
        >>> x, w = jax.numpy.ones((2, 3, 4)), jax.numpy.ones((4, 5))
        >>> program = jax.make_jaxpr(with_merged_batch_dims(lambda x, w: x @ w))(x, w)
        >>> [(str(e.primitive), e.outvars[0].aval.shape) for e in program.eqns]
        [('reshape', (6, 4)), ('dot_general', (6, 5)), ('reshape', (2, 3, 5))]
    """

    @functools.wraps(function)
    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        values = jax.tree.leaves(args)
        results = interpret(closed.jaxpr, closed.consts, values, _MergedBatchDims().equation)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


class _MergedBatchDims:
    """Runs the equations of one program, with the batch dims of each product merged.

    An operand that several products share is reshaped only once, so that it is also saved once.
    """

    def __init__(self):
        self._combined: dict[int, tuple[Array, Array]] = {}
        self._units: dict[int, tuple[ClosedJaxpr, ClosedJaxpr]] = {}

    def equation(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array]:
        name = equation.primitive.name
        params = equation.params
        inner = called(equation)
        if is_unit(equation):
            # Equal blocks remain calls of one program, which is differentiated and lowered once.
            program = {"jaxpr": self._unit(params["jaxpr"])}
            return eval_equation(equation.replace(params={**params, **program}), operands)
        if name in CALLS and inner is not None:
            return interpret(inner.jaxpr, inner.consts, operands, self.equation)
        if name in REMATS and inner is not None:

            def again(*values):
                return interpret(inner.jaxpr, inner.consts, values, _MergedBatchDims().equation)

            policy = params["policy"]
            prevent_cse = params["prevent_cse"]
            return jax.checkpoint(again, policy=policy, prevent_cse=prevent_cse)(*operands)
        if name == "dot_general":
            return [self._product(equation, *operands)]
        return eval_equation(equation, operands)

    def _unit(self, program: ClosedJaxpr) -> ClosedJaxpr:
        """Returns the program of a block with merged dims, the same one for all its calls."""
        # An id is unique only while its program is alive, so the dict holds the program too.
        if id(program) not in self._units:

            def inside(*values):
                return interpret(program.jaxpr, program.consts, values, _MergedBatchDims().equation)

            structs = [
                struct_of(v).update(weak_type=getattr(v.aval, "weak_type", False))
                for v in program.jaxpr.invars
            ]
            self._units[id(program)] = program, jax.make_jaxpr(inside)(*structs)
        return self._units[id(program)][1]

    def _product(self, equation: JaxprEqn, x: Array, w: Array) -> Array:
        (of_x, of_w), batch = equation.params["dimension_numbers"]
        rows = x.ndim - len(of_x)
        # Only products that contract all trailing dims of x, and have at least 2 dims before them.
        if any(batch) or rows < 2 or tuple(of_x) != tuple(range(rows, x.ndim)):
            (result,) = eval_equation(equation, (x, w))
            return result
        # An id is unique only while its array is alive, so the dict holds the array too.
        _, combined = self._combined.get(id(x), (x, x))
        if combined.ndim != x.ndim - rows + 1:
            combined = x.reshape(math.prod(x.shape[:rows]), *x.shape[rows:])
            self._combined[id(x)] = x, combined
        dims = (tuple(range(1, combined.ndim)), of_w), batch
        matrices = equation.replace(params={**equation.params, "dimension_numbers": dims})
        (result,) = eval_equation(matrices, (combined, w))
        return result.reshape(struct_of(equation.outvars[0]).shape)
