"""Proves how the outputs of a program depend on the samples of its batch.

This is an abstract interpretation of two traces of the program: for the whole batch, and for one of
the equal parts that the batch is split into. Both traces must have the same operations with the
same data flow. If a part is one sample, they may also differ in reshapes, broadcasts and sums that
JAX adds or leaves out there (relays, see `one_sample.py`). The dims and constants that differ
between the traces are those that depend on the number of samples. Dim 0 of the batch counts
samples. The rules in `rules.py` derive the abstract value (`abstract_values.Value`) of each result
from those of the operands. This shows whether each output is a mean over the samples, a sum, one
row per sample, independent of the samples, or a value that cannot be combined from those of the
parts.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..core.compat import expanded, source_line
from ..core.tree import is_key
from ..core.weighted import PER_SAMPLE
from ..ir.factors import RESHAPES
from ..ir.walk import Inner, called, inners, shape_of
from .abstract_values import (
    CONSTANT,
    Coupling,
    Kind,
    Mixing,
    Value,
    Why,
    coupled,
    either,
    plus,
    same_scale,
    with_line,
)
from .one_sample import Aligned, aligned_equations, is_loose, relay, relayed, value_of_loose
from .operation import (
    RUN_ONCE,
    WITHIN,
    Constant,
    Operation,
    Pair,
    PairValues,
    Shapes,
    all_constant,
    are_equal_keys,
    constant,
    counts,
    differing,
    draws,
    folded,
    grown,
    grown_scalar,
    have_one_form,
    is_float,
    is_of_jax,
    operation,
    promised,
    pullback,
    why_unequal,
)
from .rules import SAMPLE_RULES, is_transposed, narrows, unknown, unread

RANKS = "samples_of_all_ranks"
"""The mesh axis over which an analysed program may sum values of all ranks."""


def follow_samples(
    trace: Callable[[int], ClosedJaxpr],
    sizes: tuple[int, int],
    num_batch: int,
    zeros: Container[int] = (),
) -> list[Value]:
    """Derives how each output of a program depends on the samples of its batch.

    Args:
        trace: `trace(samples)` gives the closed jaxpr for a batch of that many samples.
        sizes: the numbers of samples of a part and of the whole, which is a multiple of it.
        num_batch: how many of the last inputs are leaves of the batch, with samples in dim 0.
        zeros: the positions of inputs that are taken as 0. The outputs then show what the program
            adds to a count that is among its inputs.

    Returns:
        How each output depends on the samples.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> shape = lambda count: jax.ShapeDtypeStruct((count, 3), jnp.float32)
        >>> loss = lambda x: (jnp.mean(x**2), jnp.max(x))
        >>> mean, largest = follow_samples(
        ...     lambda count: jax.make_jaxpr(loss)(shape(count)), (2, 4), num_batch=1
        ... )
        >>> mean.kind.value, mean.scale, largest.why
        ('total', 1.0, 'takes `reduce_max` over the samples')
    """
    first, second = (trace(size) for size in sizes)
    others = range(len(first.jaxpr.invars) - num_batch)
    values = [Value(known=(0, 0)) if n in zeros else CONSTANT for n in others]
    values += [Value(Kind.ROWS, dim=0)] * num_batch
    walk = Walk(sizes[1] / sizes[0], is_single=sizes[0] == 1)
    return walk.program((first, second), values, "")


class Walk:
    """The abstract interpreter of a pair of programs.

    Args:
        ratio: the number of samples of the whole batch, divided by that of a part.
        is_single: whether a part has exactly one sample.
    """

    def __init__(self, ratio: float, is_single: bool = False):
        self._ratio = ratio
        self._is_single = is_single
        self._value_numbers: dict[Hashable, int] = {}
        self._in_backward = False

    def program(
        self, programs: tuple[ClosedJaxpr, ClosedJaxpr], values: Sequence[Value], call_line: str
    ) -> list[Value]:
        """Derives the values of the outputs of a pair of programs.

        Args:
            programs: the programs of a part and of the whole batch.
            values: the values of their inputs.
            call_line: the user's line that calls them; "" to use the lines of their equations.

        Returns:
            The values of their outputs.
        """
        part = programs[0].jaxpr
        whole = programs[1].jaxpr
        is_same = have_one_form(part, whole, "constvars", "invars", "outvars")
        pairs: Iterable[Aligned] | None = None
        if self._is_single:
            pairs = aligned_equations(part, whole)
        elif have_one_form(part, whole, "eqns"):
            pairs = zip(part.eqns, whole.eqns, strict=True)
        if pairs is None or not is_same:
            return differing(part, whole, call_line)
        known = PairValues(self._constant)
        consts = map(self._constant, programs[0].consts, programs[1].consts)
        for one, two, value in zip(part.constvars, whole.constvars, consts, strict=True):
            known.write(one, two, value)
        for one, two, value in zip(part.invars, whole.invars, values, strict=True):
            known.write(
                one, two, value if value.value_number else self._with_number(value, object())
            )
        for one, two in pairs:
            if one is None or two is None:
                if not relay(known, (one, two), self._ratio):
                    return differing(part, whole, call_line)
                continue
            if not have_one_form(one, two, "invars", "outvars"):
                return differing(part, whole, call_line)
            operands = [known.read(*atoms) for atoms in zip(one.invars, two.invars, strict=True)]
            results = self._equation((one, two), operands, call_line)
            for var, whole_var, value in zip(one.outvars, two.outvars, results, strict=True):
                known.write(
                    var,
                    whole_var,
                    value if value.value_number else self._with_number(value, object()),
                )
        return [known.read(*atoms) for atoms in zip(part.outvars, whole.outvars, strict=True)]

    def _constant(self, first: Constant, second: Constant) -> Value:
        """Returns the value of a constant, which may depend on the number of samples."""
        if is_key(first) or is_key(second):
            # All ranks have the same key, whether the loss makes it or closes over it.
            value = dataclasses.replace(CONSTANT, from_own_key=True)
            is_equal = first is second or are_equal_keys(first, second)
            return self._with_number(value if is_equal else coupled(Why.DIFFERS, ""), object())
        if first is second and np.ndim(first):
            return self._with_number(CONSTANT, ("constant", id(first)))
        a = np.asarray(first)
        b = np.asarray(second)
        key = ("constants", a.dtype.str, a.tobytes(), b.tobytes())
        return self._with_number(constant(a, b, self._ratio), key)

    def _with_number(self, value: Value, key: Hashable) -> Value:
        """Gives a value its value number; equal keys get equal numbers."""
        number = self._value_numbers.setdefault(key, len(self._value_numbers) + 1)
        return dataclasses.replace(value, value_number=number)

    def _equation(self, pair: Pair, operands: list[Value], call_line: str) -> list[Value]:
        one, two = pair
        name = one.primitive.name
        count = len(one.outvars)
        line = call_line or source_line(one)
        if name != two.primitive.name:
            return [coupled(Why.DIFFERS, line)] * count
        op = operation(pair)
        if (special := _SPECIAL.get(name)) is not None:
            results = [
                self._with_number(value, object()) for value in special(self, pair, operands, line)
            ]
            return self._checked(op.outputs, results, line)
        part, whole = (called(one), called(two)) if name in RUN_ONCE else (None, None)
        if part is not None and whole is not None:
            results = self._call(op, (part, whole), operands, call_line, one)
            has_vjp = name.startswith("custom_") and not self._in_backward
            return self._backward(pair, operands, results, line) if has_vjp else results
        is_opaque = name not in SAMPLE_RULES and not all_constant(operands)
        results = self._expanded(pair, operands, line) if is_opaque else None
        return self._primitive(op, operands, line) if results is None else results

    def _expanded(self, pair: Pair, operands: list[Value], line: str) -> list[Value] | None:
        """Returns the results of an operation that JAX expands only when it compiles.

        Also those of `custom_linear_solve`; None for other operations.
        """
        try:
            part, whole = map(expanded, pair)
        except (AttributeError, LookupError, TypeError, ValueError):
            # Another version of JAX may describe such an operation in another way.
            return None
        if part is None or whole is None:
            return None
        results = self.program((part[0], whole[0]), [operands[n] for n in part[1]], line)
        has_gradient = any(is_float(v.aval) for v in pair[0].outvars)
        if self._in_backward or not has_gradient:
            return results
        return self._backward(pair, operands, results, line)

    def _primitive(self, op: Operation, operands: list[Value], line: str) -> list[Value]:
        name = op.name
        count = len(op.outputs)
        known = [value.known for value in operands if value.known is not None]
        if len(known) == len(operands) and (number := folded(op, known)) is not None:
            key = (name, str(op.part_params), *known)
            return [self._with_number(grown_scalar(*number, self._ratio), key)]
        decided = name == "select_n" and operands[0].same_number is not None
        spoiled = [v for v in operands if v.kind is Kind.COUPLED]
        if spoiled and not decided:
            # Any other reason is preferred to SIZES, which often follows from it.
            return [with_line(min(spoiled, key=lambda v: Why.SIZES in v.why), line)] * count
        rule = SAMPLE_RULES.get(name, unknown)
        try:
            result = self._loose(op, operands) if self._is_single else None
            is_known = name in SAMPLE_RULES or all_constant(operands)
            if result is None and is_known and (why := why_unequal(op)):
                result = coupled(why, "")
            if result is not None:
                return self._numbered(op, operands, [with_line(result, line)] * count)
            result = rule(op, operands)
        except (AttributeError, LookupError, TypeError, ValueError):
            # A rule may fail because versions of JAX differ in the parameters of operations.
            return [coupled(unread(name), line)] * count
        except Mixing as problem:
            return [Value(Kind.MIXED, why=str(problem), line=line)] * count
        except Coupling as problem:
            mixed = next((v for v in operands if v.kind is Kind.MIXED), None)
            return [coupled(str(problem), mixed.line if mixed else line)] * count
        results = result if isinstance(result, list) else [result] * count
        results = [with_line(value, line) for value in results]
        return self._checked(op.outputs, self._numbered(op, operands, results), line)

    def _checked(self, outputs: Sequence[Shapes], values: list[Value], line: str) -> list[Value]:
        """Makes a value COUPLED if other dims than `value.dim` differ between the two programs.

        Any dim of a constant may differ.
        """
        results = []
        for value, shapes in zip(values, outputs, strict=True):
            if value.kind is not Kind.COUPLED and len(shapes[0]) != len(shapes[1]):
                value = coupled(Why.DIFFERS, line)
            if value.kind in (Kind.CONSTANT, Kind.COUPLED):
                results.append(value)
                continue
            dims = grown(shapes)
            expected = [value.dim] if value.dim is not None else []
            fits = dims == expected and all(
                shapes[1][dim] == shapes[0][dim] * self._ratio for dim in dims
            )
            results.append(value if fits else coupled(Why.DIMS, line))
        return results

    def _loose(self, op: Operation, operands: list[Value]) -> Value | None:
        """Returns the result if the part has one sample and an operand has lost its dim of size 1.

        Otherwise returns None.
        """
        if op.name in RESHAPES and math.prod(op.inputs[0][0]) == math.prod(op.outputs[0][0]):
            value = relayed(op, operands[0], self._ratio)
            if value is not None:
                return value
        shapes = zip(operands, op.inputs, strict=True)
        if any(is_loose(v, *pair, self._ratio) for v, pair in shapes):
            value = value_of_loose(op, operands, self._ratio)
            return coupled(Why.DIFFERS, "") if value is None else value
        return None

    def _numbered(self, op: Operation, operands: list[Value], results: list[Value]) -> list[Value]:
        """Gives results their value numbers: equal computations get equal numbers."""
        if _keeps_number(op) and results[0].kind is operands[0].kind:
            return [dataclasses.replace(results[0], value_number=operands[0].value_number)]
        params = str(
            [sorted(params.items(), key=str) for params in (op.part_params, op.whole_params)]
        )
        # The shapes are in the key, because a reshape keeps the number of its operand.
        key = (op.name, params, op.inputs, *(value.value_number for value in operands))
        return [self._with_number(value, (*key, i)) for i, value in enumerate(results)]

    def _call(
        self,
        op: Operation,
        programs: tuple[ClosedJaxpr, ClosedJaxpr],
        operands: list[Value],
        call_line: str,
        equation: JaxprEqn,
    ) -> list[Value]:
        name = str(op.part_params.get("name", ""))
        if name == PER_SAMPLE:
            if primitive := draws(programs[0]):
                why = f"draws random numbers (`{primitive}`) {WITHIN}"
                return [coupled(why, source_line(equation))] * len(op.outputs)
            results = promised(op.outputs, operands)
            return self._checked(op.outputs, results, source_line(equation))
        # JAX traces its own functions once, so lines within them name their first caller.
        line = call_line or (source_line(equation) if is_of_jax(name) else "")
        inputs = operands[len(operands) - len(programs[0].jaxpr.invars) :]
        return self.program(programs, inputs, line)[: len(op.outputs)]

    def _backward(
        self, pair: Pair, operands: list[Value], results: list[Value], line: str
    ) -> list[Value]:
        """Checks that the backward pass of a custom derivative does not mix samples either."""
        values = [*operands, *results]
        if any(v.kind is Kind.CARRY for v in values):
            return [coupled(Why.LOOPED, line)] * len(results)
        if any(v.kind not in (Kind.CONSTANT, Kind.ROWS, Kind.TOTAL) for v in values):
            return results
        floats = [i for i, v in enumerate(pair[0].invars) if is_float(v.aval)]

        # As in the derivative of a number of scale a (`_ANY`), the cotangent of a value of scale s
        # has the scale a / s. That of rows is smaller by the ratio of the sizes: the mean of B rows
        # gives each 1/B. A linear backward pass preserves this.
        def returned(v: Value) -> Value:
            scale = _ANY / v.scale / (self._ratio if v.is_rows else 1.0)
            v = CONSTANT if v.kind is Kind.TOTAL else v
            return dataclasses.replace(v, scale=scale, known=None, value_number=0)

        seeds = zip(results, pair[0].outvars, strict=True)
        seeds = [returned(v) for v, out in seeds if is_float(out.aval)]
        programs = pullback(pair[0], floats), pullback(pair[1], floats)
        # A backward pass is not differentiated again, so custom derivatives in it are not checked.
        self._in_backward = True
        cotangents = self.program(programs, [*operands, *seeds], line)
        self._in_backward = False
        varies = any(not v.is_constant for v in results)
        for index, value in zip(floats, cotangents, strict=True):
            operand = operands[index]
            same = Kind.CONSTANT if operand.is_rows or not varies else Kind.TOTAL
            kinds = (same, Kind.ROWS if operand.is_rows else Kind.TOTAL)
            fits = value.kind in kinds and same_scale(value.scale, returned(operand).scale)
            if not value.is_zero and not fits:
                bent = "mixes the samples, or is not linear in its cotangent"
                why = bent if Why.SIZES in value.why else value.why or bent
                why = f"has a custom backward pass that {why}"
                return [coupled(why, value.line or line)] * len(results)
        return results

    def scan(self, pair: Pair, operands: list[Value], line: str) -> list[Value]:
        """The rule for `scan`; the scan is over the samples if its length grows with them."""
        loop, other = (inners(equation)[0] for equation in pair)
        if pair[0].params["reverse"] != pair[1].params["reverse"] or loop.form != other.form:
            return [coupled(Why.DIFFERS, line)] * len(pair[0].outvars)
        consts, carry, stacked = loop.split_operands(operands)
        bodies = loop.program, other.program
        if loop.times != other.times:
            # In reverse, iteration k has the k-th sample from the end.
            is_numbered = not pair[0].params["reverse"]
            return self._scan_samples((loop, other), operands, line, is_numbered)
        has_rows = any(v.kind is Kind.CARRY for v in stacked)
        if has_rows and any(v.kind is Kind.CARRY for v in (*consts, *carry)):
            # The loop could then move rows of a running sum to the places of other rows.
            return [coupled(Why.LOOPED, line)] * len(pair[0].outvars)
        each = [v if v.dim is None else v.in_dim(v.dim - 1, v.outer) for v in stacked]
        each = [coupled(Why.LOOPED, line) if v.positions else v for v in each]

        def run(carry):
            return self._body(bodies, [*consts, *carry, *each])

        carry, outputs = _settled(loop, run, carry, line)
        for number, value in enumerate(outputs):
            if value.dim is not None:
                outputs[number] = value.in_dim(value.dim + 1, value.outer)
            elif value.kind is Kind.CARRY and not has_rows:
                outputs[number] = coupled(Why.LOOPED, line)
        return [*carry, *outputs]

    def _body(self, bodies: tuple[ClosedJaxpr, ClosedJaxpr], values: list[Value]) -> list[Value]:
        fresh = [dataclasses.replace(value, value_number=0) for value in values]
        return self.program(bodies, fresh, "")

    def _scan_samples(
        self, loops: tuple[Inner, Inner], operands: list[Value], line: str, is_numbered: bool
    ) -> list[Value]:
        """The rule for a scan over the samples.

        One iteration is interpreted, with the slices of one sample. Each carry must stay as it is,
        count the iterations, or be a sum to which each iteration adds rows of its sample. The
        stacked outputs are rows of the samples. If `is_numbered`, the number of an iteration is the
        position of its sample.
        """
        consts, carry, stacked = loops[0].split_operands(operands)
        bodies = loops[0].program, loops[1].program
        bad = coupled(Why.LOOPED, line)
        if not all(value.is_constant or (value.dim, value.outer) == (0, 1) for value in stacked):
            return [bad] * len(bodies[0].jaxpr.outvars)
        slices = [v.in_dim(None) if v.is_rows else Value(Kind.ROWS, v.scale) for v in stacked]
        inputs = (body.jaxpr.invars[len(consts) + len(carry) :] for body in bodies)
        # A slice that grows with the samples depends on their number, such as a row of (B, B).
        slices = [
            bad if v.positions or shape_of(one) != shape_of(other) else v
            for v, one, other in zip(slices, *inputs, strict=True)
        ]
        lengths: tuple[Any, Any] = (loops[0].times, loops[1].times)
        if not lengths[0]:
            # A part whose loop runs no iteration does not show what an iteration of the whole does.
            return [bad] * len(bodies[0].jaxpr.outvars)
        is_numbered &= lengths[1] == lengths[0] * self._ratio
        roles = [
            _role_of_carry(bodies, len(consts) + slot, slot, first.is_zero and is_numbered)
            for slot, first in enumerate(carry)
        ]
        starts = [
            _first_carry(role, slot, first, lengths[0])
            for slot, (role, first) in enumerate(zip(roles, carry, strict=True))
        ]
        outputs = self._body(bodies, [*consts, *starts, *slices])
        # The whole has more iterations, so its sum grows by their number over that of a part.
        added = Value(Kind.TOTAL, lengths[1] / lengths[0])
        results = []
        for slot, (role, first) in enumerate(zip(roles, carry, strict=True)):
            last = outputs[slot]
            if role is CarryRole.UNCHANGED:
                results.append(first)
            elif role is CarryRole.COUNTER:
                results.append(grown_scalar(lengths[0], lengths[1], self._ratio))
            elif last == starts[slot] and first.kind in (Kind.CONSTANT, Kind.TOTAL):
                results.append(_combined(plus, first, added, line))
            else:
                results.append(last if last.kind is Kind.COUPLED else bad)
        for value in outputs[len(carry) :]:
            rows = value.in_dim(0) if value.is_rows and value.dim is None else value
            is_known = rows.kind in (Kind.ROWS, Kind.CONSTANT, Kind.COUPLED)
            results.append(rows if is_known else bad)
        return results

    def loop(self, pair: Pair, operands: list[Value], line: str) -> list[Value]:
        """The rule for `while`: the number of iterations must not depend on the samples."""
        (test, body), (other_test, other_body) = map(inners, pair)
        shared, carry, _ = body.split_operands(operands)
        bodies = body.program, other_body.program
        carry, _ = _settled(body, lambda carry: self._body(bodies, [*shared, *carry]), carry, line)
        consts, _, _ = test.split_operands(operands)
        (runs,) = self._body((test.program, other_test.program), [*consts, *carry])
        if runs.is_constant and not runs.is_scaled:
            return carry
        return [coupled(runs.why or Why.OFTEN, runs.line or line)] * len(carry)

    def branch(self, pair: Pair, operands: list[Value], line: str) -> list[Value]:
        """The rule for `cond` and `switch`: the choice must not depend on several samples."""
        which, *inputs = operands
        is_own = which.is_constant or (which.is_rows and which.dim is None)
        if not is_own or which.is_scaled:
            why = "is computed in a `cond` whose predicate depends on several samples"
            return [coupled(which.why or why, which.line or line)] * len(pair[0].outvars)
        branches = zip(*map(inners, pair), strict=True)
        by_branch = [self._body((one.program, two.program), inputs) for one, two in branches]
        results = by_branch[0]
        for others in by_branch[1:]:
            pairs = zip(results, others, strict=True)
            results = [_combined(either, a, b, line) for a, b in pairs]
        if which.is_rows:
            carried = [value.kind is Kind.CARRY for value in results]
            pairs = zip(results, carried, strict=True)
            results = [
                v if acc else _combined(either, Value(Kind.ROWS), v, line) for v, acc in pairs
            ]
        return results

    def psum(self, pair: Pair, operands: list[Value], line: str) -> list[Value]:
        """The rule for `psum`: a sum over all ranks is the same on each of them."""
        is_over_all = pair[0].params["axes"] == (RANKS,)
        # The sum of the totals of all ranks is CONSTANT: each rank gets the same number. Both
        # traces have equally many ranks, so it keeps the scale of one total.
        return [
            Value(Kind.CONSTANT, value.scale)
            if is_over_all and value.kind in (Kind.CONSTANT, Kind.TOTAL)
            else coupled(value.why or "is summed over ranks", value.line or line)
            for value in operands
        ]


_ANY = 0.37
"""The scale of the number that is differentiated, which is no ratio of sample counts."""

_COPIES = frozenset({"copy", "copy_p", "reduce_precision", "stop_gradient"})
"""Operations whose result is the operand, except for rounding."""


def _keeps_number(op: Operation) -> bool:
    """Whether a result keeps the value number of the operand.

    It has the operand's elements in row-major order, or is filled with its only element.
    """
    if op.name == "convert_element_type":
        return not narrows(op)
    if op.name in RESHAPES:
        sizes = {(math.prod(a), math.prod(b)) for a, b in (op.inputs[0], op.outputs[0])}
        return not is_transposed(op) and (len(sizes) == 1 or math.prod(op.inputs[0][1]) == 1)
    return op.name in _COPIES


def _combined(join: Callable[[Value, Value], Value], left: Value, right: Value, line: str) -> Value:
    """Joins two values: of two branches, or from before and after an iteration."""
    for value in (left, right):
        if value.kind is Kind.COUPLED:
            return value
    if left == right:
        return left
    try:
        joined = join(left, right)
    except Mixing as problem:
        return Value(Kind.MIXED, why=str(problem), line=line)
    except Coupling as problem:
        return coupled(str(problem), line)
    return dataclasses.replace(joined, known=None) if joined.known is not None else joined


class CarryRole(enum.Enum):
    """What a scan over the samples does with a carry."""

    UNCHANGED = "passes it on"
    COUNTER = "counts its iterations in it, from 0"
    OTHER = "does anything else; accepted if it adds a term per sample, else COUPLED"


def _role_of_carry(
    bodies: tuple[ClosedJaxpr, ClosedJaxpr], operand: int, slot: int, may_count: bool
) -> CarryRole:
    """Returns the role of the carry that is input `operand` and output `slot` of the bodies.

    A carry is a counter only if `may_count`: it starts at 0, and counts the samples in their order.
    """
    if all(body.jaxpr.outvars[slot] is body.jaxpr.invars[operand] for body in bodies):
        return CarryRole.UNCHANGED
    if may_count and all(counts(body.jaxpr, operand, slot) for body in bodies):
        return CarryRole.COUNTER
    return CarryRole.OTHER


def _first_carry(role: CarryRole, slot: int, first: Value, length: int) -> Value:
    """Returns the value of a carry in the iteration that is interpreted."""
    if role is CarryRole.UNCHANGED:
        return first
    if role is CarryRole.COUNTER:
        return Value(Kind.ROWS, positions=(True,), loop_length=length)
    return Value(Kind.CARRY, slot=slot)


def _settled(
    loop: Inner, run: Callable[[list[Value]], list[Value]], carry: list[Value], line: str
) -> tuple[list[Value], list[Value]]:
    """Returns the fixed point of a loop's carry, and the loop's other results."""
    fixed = loop.settled(carry, run, lambda one, other: _combined(either, one, other, line))
    if fixed is not None:
        return fixed
    bad = [
        coupled("depends on the samples in another way in each iteration of a loop", line)
    ] * len(carry)
    return bad, loop.outputs(run(bad))[1]


_SPECIAL: MappingProxyType[str, Callable[..., list[Value]]] = MappingProxyType(
    {
        "scan": Walk.scan,
        "while": Walk.loop,
        "cond": Walk.branch,
        "psum": Walk.psum,
        "psum_invariant": Walk.psum,
        "axis_index": lambda walk, pair, operands, line: [coupled("calls `axis_index`", line)],
    }
)
