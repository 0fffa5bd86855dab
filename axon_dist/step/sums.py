"""Numbers of a whole batch that its parts do not give, but sums over its samples do.

The last operations of a loss such as `sqrt(mean)` or `sum / maximum(count, 1)` act on scalars. The
parts of a batch then give the scalars in front of them, which add up, and these operations run
once, on what they are of the whole batch. The gradient is that of the one sum that moves with the
parameters, times the derivative of the loss by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.typing import ArrayLike, DTypeLike

from ..core.compat import CALLS, eval_equation, inner_programs
from ..core.typing import Array, Batch, LossFn, PyTree
from ..core.weighted import PER_SAMPLE, Weighted
from ..jaxpr.factors import EACH
from ..jaxpr.sample_use import SampleUse, Use
from ..jaxpr.units import UNIT_NAME
from ..jaxpr.walk import (
    called,
    dtype_of,
    equations,
    interpret,
    moves_with,
    shape_of,
    sources_of,
)
from .objective import Forward, GradientResult, Outcome, PartLoss, mean_loss

LOSS = ""
"""The name of the loss among those of the metrics."""


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """A value of a program that is run.

    Args:
        value: what it is.
        equation: which made it, of scalars; None where it was made otherwise.
        operands: of the equation.
        index: which of its results it is.
    """

    value: Any
    equation: JaxprEqn | None = None
    operands: tuple[Term, ...] = ()
    index: int = 0


Operation: TypeAlias = tuple[JaxprEqn | None, Any, int]
"""(equation, the numbers of its operands, which result), or (None, a constant, 0)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Ending:
    """The last operations of a program: scalars of scalars.

    Args:
        operations: in order; those before an operation are its operands by number, and the sums
            that the program begins with by the complements of theirs.
        results: the numbers of the results.
        dtypes: of the sums.
    """

    operations: tuple[Operation, ...]
    results: tuple[int, ...]
    dtypes: tuple[DTypeLike, ...]

    @classmethod
    def of(cls, results: Sequence[Term]) -> tuple[Ending, list[Term]]:
        """The last operations that lead to results, and the sums that they begin with."""
        numbers: dict[int, int] = {}
        sums: list[Term] = []
        operations: list[Operation] = []
        for term in _in_order(results):
            if term.equation is None and isinstance(term.value, Tracer):
                numbers[id(term)] = ~len(sums)
                sums.append(term)
                continue
            given = term.value
            if term.equation is not None:
                given = [numbers[id(operand)] for operand in term.operands]
            numbers[id(term)] = len(operations)
            operations.append((term.equation, given, term.index))
        found = tuple(numbers[id(term)] for term in results)
        return cls(tuple(operations), found, tuple(jnp.result_type(s.value) for s in sums)), sums

    def __call__(self, sums: Sequence[Array]) -> list[Array]:
        """Runs them.

        Args:
            sums: those of the whole batch.
        """
        given = [jnp.asarray(x).astype(t) for x, t in zip(sums, self.dtypes, strict=True)]
        values: list[Any] = []

        def read(number: int) -> Any:
            return given[~number] if number < 0 else values[number]

        for equation, operands, index in self.operations:
            if equation is None:
                values.append(operands)
            else:
                values.append(eval_equation(equation, [read(n) for n in operands])[index])
        return [jnp.asarray(read(number)) for number in self.results]


def _in_order(results: Sequence[Term]) -> Iterator[Term]:
    """All terms that lead to some, each behind those that it is made of."""
    known: set[int] = set()
    waiting = [*reversed(results)]
    while waiting:
        term = waiting[-1]
        missing = [operand for operand in term.operands if id(operand) not in known]
        if missing and id(term) not in known:
            waiting += reversed(missing)
            continue
        waiting.pop()
        if id(term) not in known:
            known.add(id(term))
            yield term


def _is_number(atom: Any) -> bool:
    kinds = (jnp.number, jnp.bool_)
    return shape_of(atom) == () and any(jnp.issubdtype(dtype_of(atom), kind) for kind in kinds)


_OF_SCALARS = EACH | CALLS | {
    "broadcast_in_dim", "copy_p", "custom_jvp_call", "reshape", "select_n", "squeeze",
    "stop_gradient",
}  # fmt: skip
"""What may stand in an ending: it computes of scalars whatever device it runs on."""


def _is_ending(equation: JaxprEqn) -> bool:
    atoms = (*equation.invars, *equation.outvars)
    inside = (e for program in inner_programs(equation) for e in equations(program))
    names = {e.primitive.name for e in (equation, *inside)}
    return names <= _OF_SCALARS and all(map(_is_number, atoms))


def _run(equation: JaxprEqn, operands: Sequence[Term]) -> list[Term]:
    """Runs an equation; a call that gives scalars of arrays is run equation by equation."""
    is_scalar = _is_ending(equation)
    if not is_scalar and any(map(_is_number, equation.outvars)) and _is_plain_call(equation):
        program: Any = called(equation)
        return _interpreted(program, operands)
    results = eval_equation(equation, [operand.value for operand in operands])
    if not is_scalar:
        return [Term(result) for result in results]
    return [Term(result, equation, tuple(operands), i) for i, result in enumerate(results)]


def _is_plain_call(equation: JaxprEqn) -> bool:
    name = equation.params.get("name")
    return equation.primitive.name in CALLS and name not in (UNIT_NAME, PER_SAMPLE)


def _interpreted(program: ClosedJaxpr, operands: Sequence[Term]) -> list[Term]:
    def literal(atom: Literal) -> Term:
        return Term(atom.val)

    consts = [Term(value) for value in program.consts]
    return interpret(program.jaxpr, consts, operands, _run, literal)


@dataclasses.dataclass(frozen=True, eq=False)
class OfSums(PartLoss):
    """A loss function of which some numbers are replaced by the sums that they are computed of.

    Args:
        loss_fn: the user's, with its other numbers as the parts of a batch give them.
        names: of the metrics that are replaced, and `LOSS`.
        leads: where the loss is replaced, what is differentiated of a part in its place: each sum
            that moves with the parameters, by its number, times this.
        factors: what the mean of each sum over the parts is multiplied by to give that of the
            whole.
    """

    loss_fn: LossFn
    names: frozenset[str]
    leads: tuple[tuple[int, float], ...] = ()
    factors: tuple[float, ...] | None = None

    def outcome(
        self, forward: Forward, params: PyTree, buffers: PyTree, batch: Batch
    ) -> tuple[Outcome, Ending]:
        """Evaluates the loss of a part.

        Args:
            forward: evaluates the user's loss.
            params: nested dict of arrays, trained and frozen.
            buffers: nested dict of arrays.
            batch: the part.

        Returns:
            The outcome, with sums for metrics in place of the numbers that are replaced; and how
            these are computed of them.
        """
        ones: set[str] = set()

        def run(*given: Any) -> tuple[dict[str, Any], PyTree]:
            found = forward(*given)
            numbers = {**found.metrics, LOSS: found.loss}
            ones.update(n for n, x in numbers.items() if isinstance(x, Weighted) and _is_one(x))
            return numbers, found.buffers

        program, shapes = jax.make_jaxpr(run, return_shape=True)(params, buffers, batch)
        given = [Term(x) for x in jax.tree.leaves((params, buffers, batch))]
        results = _interpreted(program, given)
        numbers, changed = jax.tree.unflatten(jax.tree.structure(shapes), results)
        ending, sums = Ending.of([*self._replaced(numbers)])
        values = [jnp.asarray(term.value, jnp.float32) for term in sums]
        factors = self.factors or (1.0,) * len(sums)
        kept = {n: _values(x, n in ones) for n, x in numbers.items() if n not in self.names}
        pairs = zip(values, factors, strict=True)
        # While factors are not known, what is asked is what the sums are to the samples.
        named = [x if self.factors is None else Weighted(x, 1 / factor) for x, factor in pairs]
        kept |= {sum_name(number): value for number, value in enumerate(named)}
        lead = [values[n] * (slope * factors[n]) for n, slope in self.leads]
        loss = kept.pop(LOSS, None) or Weighted(sum(lead, jnp.zeros(())), 1.0)
        buffers = jax.tree.map(lambda term: term.value, changed)
        return Outcome(loss, kept, buffers), ending

    def _replaced(self, numbers: dict[str, Any]) -> Iterator[Any]:
        """Total and weight of each number that is replaced, by name."""
        for name in sorted(self.names):
            found: Any = numbers[name]
            pair = isinstance(found, Weighted)
            yield from (found.total, found.weight) if pair else (found, Term(1.0))


def sum_name(number: int) -> str:
    """The name of a sum among the metrics."""
    return f"axon_sum_{number}"


def _is_one(pair: Weighted) -> bool:
    return isinstance(pair.weight, (int, float)) and pair.weight == 1


def _values(number: Any, is_one: bool) -> Any:
    found = jax.tree.map(lambda term: term.value, number)
    return Weighted(found.total, 1.0) if is_one else found


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """Computes what a loss function of sums lacks, once these are of the whole batch.

    Args:
        ending: of the program for the whole batch.
        loss_fn: of its parts.
    """

    ending: Ending
    loss_fn: OfSums

    def numbers(self, sums: Sequence[Array]) -> dict[str, Array]:
        """What is computed of the sums of the whole batch, by name."""
        parts = iter(self.ending(sums))
        names = sorted(self.loss_fn.names)
        return {name: mean_loss(Weighted(next(parts), next(parts))) for name in names}

    def slopes(self, sums: Sequence[ArrayLike]) -> list[Array]:
        """The derivatives of the loss by the sums."""

        def loss(sums: Sequence[Array]) -> Array:
            return self.numbers(sums)[LOSS]

        return jax.grad(loss)([jnp.asarray(x, jnp.float32) for x in sums])

    def leads(self, moving: Callable[[int], bool]) -> tuple[tuple[int, float], ...] | None:
        """What is differentiated of a part in place of the loss; see `OfSums.leads`.

        Args:
            moving: whether a sum moves with the parameters, by its number.

        Returns:
            The sum that moves, or several, of which the loss is a combination whose factors are
            constants; None where there are several and it is not.
        """
        ones = [np.float32(1)] * len(self.ending.dtypes)
        by_sum = jax.make_jaxpr(lambda *sums: self.numbers(sums)[LOSS])(*ones)
        found = [number for number in moves_with(by_sum, 0, len(ones)) if moving(number)]
        if len(found) < 2:
            return tuple((number, 1.0) for number in found)
        slopes = sources_of(jax.make_jaxpr(self.slopes)(ones).jaxpr)
        if any(slopes[number] for number in found):
            return None
        with jax.ensure_compile_time_eval():
            values = self.slopes(ones)
        return tuple((number, float(values[number])) for number in found)

    def __call__(self, found: GradientResult) -> GradientResult:
        """Replaces the sums among the metrics by the numbers, and multiplies the gradients."""
        count = len(self.ending.dtypes)
        rest = dict(found.metrics)
        sums = [rest.pop(sum_name(number)) for number in range(count)]
        numbers = self.numbers(sums)
        numbers = {"loss" if name == LOSS else name: x for name, x in numbers.items()}
        grads = found.grads
        if len(self.loss_fn.leads) == 1:
            ((lead, _),) = self.loss_fn.leads
            slope = self.slopes(sums)[lead]
            grads = jax.tree.map(lambda g: g * slope.astype(g.dtype), grads)
        return found._replace(grads=grads, metrics=rest | numbers)


def in_parts(loss_fn: LossFn, use: SampleUse) -> LossFn:
    """A loss of parts whose sums of totals and weights make that of the whole.

    Neither microbatches nor ranks are to be noticed: a sum, and a `Weighted` whose weight is the
    same for any batch, become those of the whole batch.

    Args:
        loss_fn: the user's loss.
        use: what it is to the samples.

    Returns:
        The loss function; the same where nothing is to be changed.
    """
    factors = {n: m.factor for n, m in use.metrics.items() if m.kind in _SUMMED}
    if use.loss.kind is Use.MEAN:
        factors = {name: factor for name, factor in factors.items() if factor != 1}
    if use.loss.factor == 1 and not factors:
        return loss_fn

    def weighed(value: Any, factor: float) -> Weighted:
        if isinstance(value, Weighted):
            return Weighted(value.total, value.weight / factor)
        return Weighted(value, 1 / factor)

    def run(model: nnx.Module, batch: Batch, **told: Any) -> Any:
        returned = loss_fn(model, batch, **told)
        loss, *rest = returned if isinstance(returned, tuple) else (returned,)
        if use.loss.factor != 1:
            loss = weighed(loss, use.loss.factor)
        if not rest:
            return loss
        metrics = {n: weighed(m, factors[n]) if n in factors else m for n, m in rest[0].items()}
        return loss, metrics

    return run


_SUMMED = (Use.MEAN, Use.SUM, Use.SCALED)


_SUMMED = (Use.MEAN, Use.SUM, Use.SCALED)
