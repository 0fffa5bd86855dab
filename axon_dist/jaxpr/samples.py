"""What a program makes of the samples of its batch: followed equation by equation, for all sizes.

The program is traced for two numbers of samples. Both traces must be the same operations; the dims
and constants in which they differ are those that depend on the number of samples. From the inputs,
whose dim 0 counts samples, every value is followed by the rules of `sample_rules`, until it is
known of each output whether it is a mean over the samples, a sum, one row for each, the same for
all batches, or something that the parts of a batch cannot give on their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from ..core.compat import source_line
from ..core.tree import is_key
from ..core.weighted import PER_SAMPLE
from .sample_indexing import Pair, inner, is_float, is_of_jax, operation, parting, pullback
from .sample_rules import RULES
from .sample_values import (
    CONSTANT,
    DIFFERS,
    LOOPED,
    SIZES,
    Coupling,
    Kind,
    Mixing,
    Operation,
    Value,
    all_constant,
    coupled,
    grown,
    grown_constant,
    plus,
    rows,
    scalar,
    total,
)
from .walk import Atom, Inner, equations, inners

RANKS = "samples_of_all_ranks"
"""The mesh axis over which an analysed program may add up what all ranks know then."""


def follow_samples(
    trace: Callable[[int], ClosedJaxpr], sizes: tuple[int, int], num_batch: int
) -> list[Value]:
    """Follows the samples through a program.

    Args:
        trace: `trace(samples)` gives the closed jaxpr for a batch of so many samples.
        sizes: two numbers of samples, the larger a multiple of the smaller.
        num_batch: how many of its last inputs are leaves of the batch, samples in dim 0.

    Returns:
        How each output depends on the samples.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> shape = lambda count: jax.ShapeDtypeStruct((count, 3), jnp.float32)
        >>> loss = lambda x: (jnp.mean(x**2), jnp.max(x))
        >>> mean, largest = follow_samples(
        ...     lambda count: jax.make_jaxpr(loss)(shape(count)), (2, 4), num_batch=1
        ... )
        >>> mean.kind.value, mean.degree, largest.why
        ('total', -1.0, 'takes `reduce_max` over the samples')
    """
    first, second = (trace(size) for size in sizes)
    count = len(first.jaxpr.invars)
    values = [CONSTANT] * (count - num_batch) + [rows(0)] * num_batch
    return Walk(sizes[1] / sizes[0]).program((first, second), values, "")


class Walk:
    """The following of a pair of programs.

    Args:
        ratio: how many times more samples the second has.
    """

    def __init__(self, ratio: float):
        self._ratio = ratio
        self._numbers: dict[Any, int] = {}
        self._in_backward = False

    def program(
        self, programs: tuple[ClosedJaxpr, ClosedJaxpr], values: Sequence[Value], where: str
    ) -> list[Value]:
        """Follows a pair of programs.

        Args:
            programs: the same for two numbers of samples.
            values: of their inputs.
            where: the line of the user's that calls them, or "" to look for lines within.

        Returns:
            The values of their outputs.
        """
        env: dict[Var, Value] = {}
        jaxprs = programs[0].jaxpr, programs[1].jaxpr
        consts = (program.consts for program in programs)
        for variable, a, b in zip(jaxprs[0].constvars, *consts, strict=True):
            env[variable] = self._constant(a, b)
        for variable, value in zip(jaxprs[0].invars, values, strict=True):
            env[variable] = value if value.number else self._named(value, object())
        if len(jaxprs[0].eqns) != len(jaxprs[1].eqns):
            return [coupled(DIFFERS, where or parting(jaxprs))] * len(jaxprs[0].outvars)
        for pair in zip(jaxprs[0].eqns, jaxprs[1].eqns, strict=True):
            operands = [
                self._read(env, a, b) for a, b in zip(pair[0].invars, pair[1].invars, strict=False)
            ]
            results = self._equation(pair, operands, where)
            env.update(zip(pair[0].outvars, results, strict=True))
        outputs = zip(jaxprs[0].outvars, jaxprs[1].outvars, strict=True)
        return [self._read(env, a, b) for a, b in outputs]

    def _read(self, env: dict[Var, Value], first: Atom, second: Atom) -> Value:
        if not isinstance(first, Literal):
            return env[first]
        if not isinstance(second, Literal):
            return coupled(DIFFERS, "")
        return self._constant(first.val, second.val)

    def _constant(self, first: Any, second: Any) -> Value:
        """A constant of the program, which may depend on the number of samples."""
        if first is second and not np.ndim(first):
            return self._named(scalar(first), ("constant", str(first)))
        if first is second or is_key(first):
            return self._named(CONSTANT, ("constant", id(first)))
        a, b = np.asarray(first), np.asarray(second)
        if a.shape == b.shape and np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
            value = scalar(first) if not a.ndim else CONSTANT
            return self._named(value, ("constant", a.dtype.str, a.tobytes()))
        return grown_constant(a, b, self._ratio)

    def _named(self, value: Value, key: Any) -> Value:
        """The value with the number of its computation."""
        number = self._numbers.setdefault(key, len(self._numbers) + 1)
        return dataclasses.replace(value, number=number)

    def _equation(self, pair: Pair, operands: list[Value], where: str) -> list[Value]:
        one, two = pair
        name, count = one.primitive.name, len(one.outvars)
        at = where or source_line(one)
        if name != two.primitive.name or len(one.invars) != len(two.invars):
            return [coupled(DIFFERS, at)] * count
        special = _SPECIAL.get(name)
        if special is not None:
            found = special(self, pair, operands, at)
            return _checked(pair, [self._named(value, object()) for value in found], at)
        if (called := inner(pair)) is not None:
            results = self._call(pair, called, operands, where)
            own = name.startswith("custom_") and not self._in_backward
            return self._backward(pair, operands, results, at) if own else results
        return self._primitive(pair, operands, at)

    def _primitive(self, pair: Pair, operands: list[Value], at: str) -> list[Value]:
        one, count = pair[0], len(pair[0].outvars)
        name, op = one.primitive.name, operation(pair)
        decided = name == "select_n" and operands[0].known is not None
        spoiled = [v for v in operands if v.kind is Kind.COUPLED]
        if spoiled and not decided:
            return [_told(min(spoiled, key=lambda v: SIZES in v.why), at)] * count
        rule = RULES.get(name, _unknown)
        try:
            result = rule(op, operands)
        except (AttributeError, LookupError, TypeError, ValueError):
            # Versions of JAX differ in the parameters of operations.
            return [coupled(unread(name), at)] * count
        except Mixing as problem:
            return [Value(Kind.MIXED, why=str(problem), where=at)] * count
        except Coupling as problem:
            mixed = next((v for v in operands if v.kind is Kind.MIXED), None)
            return [coupled(str(problem), mixed.where if mixed else at)] * count
        results = result if isinstance(result, list) else [result] * count
        results = [_told(value, at) for value in results]
        return _checked(pair, self._numbered(one, operands, results), at)

    def _numbered(
        self, equation: JaxprEqn, operands: list[Value], results: list[Value]
    ) -> list[Value]:
        """Results with the numbers of their computations: equal ones for equal ones."""
        name = equation.primitive.name
        if name in _KEEPS_NUMBER and results[0].kind is operands[0].kind:
            return [dataclasses.replace(results[0], number=operands[0].number)]
        params = str(sorted(equation.params.items(), key=str))
        key = (name, params, *(value.number for value in operands))
        return [self._named(value, (*key, i)) for i, value in enumerate(results)]

    def _call(
        self, pair: Pair, called: tuple[ClosedJaxpr, ClosedJaxpr], operands: list[Value], where: str
    ) -> list[Value]:
        name = str(pair[0].params.get("name", ""))
        if name == PER_SAMPLE:
            if draws := _draws(called[0]):
                why = f"draws random numbers (`{draws}`) {WITHIN}"
                return [coupled(why, source_line(pair[0]))] * len(pair[0].outvars)
            return _checked(pair, _promised(pair, operands), source_line(pair[0]))
        # JAX traces its own functions once: lines within them are those of the first who called.
        at = where or (source_line(pair[0]) if is_of_jax(name) else "")
        own = operands[len(operands) - len(called[0].jaxpr.invars) :]
        return self.program(called, own, at)[: len(pair[0].outvars)]

    def _backward(
        self, pair: Pair, operands: list[Value], results: list[Value], at: str
    ) -> list[Value]:
        """What a function with a backward pass of its own gives, if that keeps samples apart."""
        given = [*operands, *results]
        if any(v.kind not in (Kind.CONSTANT, Kind.ROWS, Kind.TOTAL) for v in given):
            return results
        floats = [i for i, v in enumerate(pair[0].invars) if is_float(v.aval)]

        # The cotangent is smaller, the more samples there are; only what is linear in it stays so.
        def smaller(v):
            return dataclasses.replace(v, degree=v.degree - 1, known=None, number=0)

        seeds = [smaller(CONSTANT if v.kind is Kind.TOTAL else v) for v in results]
        seeds = [v for v, out in zip(seeds, pair[0].outvars, strict=True) if is_float(out.aval)]
        programs = pullback(pair[0], floats), pullback(pair[1], floats)
        # No one differentiates a backward pass, so the functions in it have none of their own.
        self._in_backward = True
        found = self.program(programs, [*operands, *seeds], at)
        self._in_backward = False
        degrees = {v.degree - 1 for v in results if not v.is_constant} or {-1.0}
        varies = any(not v.is_constant for v in results)
        for index, value in zip(floats, found, strict=True):
            same = Kind.CONSTANT if operands[index].is_rows or not varies else Kind.TOTAL
            kinds = (same, Kind.ROWS if operands[index].is_rows else Kind.TOTAL)
            if not value.is_zero and (value.kind not in kinds or {value.degree} != degrees):
                bent = "mixes the samples, or is not linear in what comes back to it"
                why = bent if SIZES in value.why else value.why or bent
                why = f"has a backward pass of its own that {why}"
                return [coupled(why, value.where or at)] * len(results)
        return results

    def scan(self, pair: Pair, operands: list[Value], at: str) -> list[Value]:
        """A loop; over the samples, where its length grows with them."""
        loop, other = (inners(equation)[0] for equation in pair)
        consts, carry, stacked = loop.parts(operands)
        bodies = loop.program, other.program
        if loop.times != other.times:
            return self._scan_samples(pair, bodies, consts, carry, stacked, at)
        each = []
        for value in stacked:
            if value.is_rows and value.dim is not None:
                value = value.at(value.dim - 1, value.outer)
            each.append(value if not value.numbers else coupled(LOOPED, at))

        def run(carry):
            return self._body(bodies, [*consts, *carry, *each])

        carry, outputs = _settled(loop, run, carry, at)
        for number, value in enumerate(outputs):
            if value.is_rows and value.dim is not None:
                outputs[number] = value.at(value.dim + 1, value.outer)
        return [*carry, *outputs]

    def _body(self, bodies: tuple[ClosedJaxpr, ClosedJaxpr], values: list[Value]) -> list[Value]:
        fresh = [dataclasses.replace(value, number=0) for value in values]
        return self.program(bodies, fresh, "")

    def _scan_samples(
        self,
        pair: Pair,
        bodies: tuple[ClosedJaxpr, ClosedJaxpr],
        consts: list[Value],
        carry: list[Value],
        stacked: list[Value],
        at: str,
    ) -> list[Value]:
        """A loop over the samples may add them up, or hand values through."""
        count, bad = len(pair[0].outvars), coupled(LOOPED, at)
        if not all(value.is_constant or (value.dim, value.outer) == (0, 1) for value in stacked):
            return [bad] * count
        each = [v.at(None) if v.is_rows else rows(None, 1, v.degree) for v in stacked]
        each = [bad if v.numbers else v for v in each]
        start = [Value(Kind.CARRY)] * len(carry)
        body = bodies[0].jaxpr
        own = body.invars[len(consts) :][: len(carry)]
        # What is handed through does not have to be a sum.
        through = [body.outvars[i] is own[i] for i in range(len(carry))]
        start = [v if kept else s for v, s, kept in zip(carry, start, through, strict=True)]
        found = self._body(bodies, [*consts, *start, *each])
        results = []
        for value, first, kept in zip(found, carry, through, strict=False):
            if kept:
                results.append(first)
            elif value.kind is Kind.CARRY and first.kind in (Kind.CONSTANT, Kind.TOTAL):
                results.append(_sum_or(first, total(0.0), at))
            else:
                results.append(value if value.kind is Kind.COUPLED else bad)
        for value in found[len(carry) :]:
            if value.is_rows and value.dim is None:
                value = value.at(0)
            is_bad = value.kind not in (Kind.ROWS, Kind.CONSTANT, Kind.COUPLED)
            results.append(bad if is_bad else value)
        return results

    def loop(self, pair: Pair, operands: list[Value], at: str) -> list[Value]:
        """A `while`: how often it runs must not depend on the samples."""
        (test, body), (other_test, other_body) = map(inners, pair)
        shared, carry, _ = body.parts(operands)
        bodies = body.program, other_body.program
        carry, _ = _settled(body, lambda carry: self._body(bodies, [*shared, *carry]), carry, at)
        given, _, _ = test.parts(operands)
        (runs,) = self._body((test.program, other_test.program), [*given, *carry])
        if runs.is_constant and not runs.degree:
            return carry
        why = "is part of a loop that runs as often as the samples make it"
        return [coupled(runs.why or why, runs.where or at)] * len(carry)

    def branch(self, pair: Pair, operands: list[Value], at: str) -> list[Value]:
        """A `cond` or `switch`: which branch runs must not depend on the samples."""
        which, *given = operands
        if not (which.is_constant or (which.is_rows and which.dim is None)) or which.degree:
            why = "is part of a branch that the samples choose"
            return [coupled(which.why or why, which.where or at)] * len(pair[0].outvars)
        branches = zip(*map(inners, pair), strict=True)
        found = [self._body((one.program, two.program), given) for one, two in branches]
        results = found[0]
        for others in found[1:]:
            pairs = zip(results, others, strict=True)
            results = [_sum_or(a, b, at) for a, b in pairs]
        if which.is_rows:
            results = [_sum_or(rows(None), value, at) for value in results]
        return results

    def average(self, pair: Pair, operands: list[Value], at: str) -> list[Value]:
        """A sum over all ranks, which they all know then: of a total, as if by their samples."""
        axes = pair[0].params["axes"]
        results = []
        for value in operands:
            if axes == (RANKS,) and value.kind in (Kind.CONSTANT, Kind.TOTAL):
                degree = value.degree + (value.kind is Kind.TOTAL)
                results.append(Value(Kind.CONSTANT, degree))
            else:
                results.append(coupled(value.why or "is summed over ranks", value.where or at))
        return results


_KEEPS_NUMBER = frozenset(
    {
        "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "expand_dims",
        "reduce_precision", "reshape", "squeeze", "stop_gradient",
    }
)  # fmt: skip
"""What changes nothing about what a value is."""


def _told(value: Value, at: str) -> Value:
    """The value with the line that it comes from, where it is one to complain of."""
    if value.kind in (Kind.MIXED, Kind.RATIO, Kind.COUPLED) and not value.where:
        return dataclasses.replace(value, where=at)
    return value


def _unknown(op: Operation, values: list[Value]) -> Value:
    fixed = not any(grown(shapes) for shapes in (*op.inputs, *op.outputs))
    if values and all_constant(values) and fixed and not any(v.degree for v in values):
        return CONSTANT
    if not op.outputs:
        return CONSTANT
    if not values and op.name in ("platform_index", "empty", "create_token"):
        return CONSTANT
    if values and all(v.is_constant or (v.is_rows and v.dim is None) for v in values) and fixed:
        return rows(None)
    raise Coupling(unread(op.name))


def unread(name: str) -> str:
    """What to say of an operation that no rule can read."""
    return (
        f"goes through `{name}`, of which it is not known what it does to samples; "
        "axon_dist.per_sample marks a function that treats them one by one"
    )


WITHIN = (
    "within a function that axon_dist.per_sample marks, where every rank would draw the same; draw "
    "them before it, by jax.random.uniform, normal, bernoulli and the like"
)


def _draws(called: ClosedJaxpr) -> str:
    """The operation by which a marked function draws random numbers; "" where none does."""
    names = (e.primitive.name for e in equations(called.jaxpr))
    return next((name for name in names if name.startswith(("random_", "rng_", "threefry"))), "")


def _promised(pair: Pair, operands: list[Value]) -> list[Value]:
    found = next((v for v in operands if v.kind is Kind.COUPLED), None)
    results = []
    for shapes in operation(pair).outputs:
        if found is not None:
            results.append(found)
        elif grown(shapes) == [0]:
            results.append(rows(0))
        else:
            results.append(CONSTANT if not grown(shapes) else coupled("has no samples first", ""))
    return results


def _checked(pair: Pair, values: list[Value], at: str) -> list[Value]:
    """Values whose dims that count samples are those that grow."""
    results = []
    for value, shapes in zip(values, operation(pair).outputs, strict=True):
        dims = grown(shapes)
        fits = {
            Kind.CONSTANT: True,
            Kind.ROWS: dims == ([] if value.dim is None else [value.dim]),
            Kind.COUPLED: True,
        }.get(value.kind, not dims)
        why = "depends on the number of samples in more than one dim"
        results.append(value if fits else coupled(why, at))
    return results


def _sum_or(left: Value, right: Value, at: str) -> Value:
    """Either of two values, as a loop or branch leaves it."""
    for value in (left, right):
        if value.kind is Kind.COUPLED:
            return value
    if left == right:
        return left
    try:
        chosen = plus(left, right)
    except Mixing as problem:
        return Value(Kind.MIXED, why=str(problem), where=at)
    except Coupling as problem:
        return coupled(str(problem), at)
    return dataclasses.replace(chosen, known=None) if chosen.known is not None else chosen


def _settled(
    loop: Inner, run: Callable[[list[Value]], list[Value]], carry: list[Value], at: str
) -> tuple[list[Value], list[Value]]:
    """What is carried around a loop, once it no longer changes; and the other results."""
    found = loop.settled(carry, run, lambda one, other: _sum_or(one, other, at))
    if found is not None:
        return found
    bad = [coupled("changes its dependence on the samples all the time", at)] * len(carry)
    return bad, loop.outputs(run(bad))[1]


_SPECIAL: MappingProxyType[str, Callable[..., list[Value]]] = MappingProxyType(
    {
        "scan": Walk.scan,
        "while": Walk.loop,
        "cond": Walk.branch,
        "psum": Walk.average,
        "psum_invariant": Walk.average,
        "axis_index": lambda walk, pair, operands, at: [coupled("asks for its rank", at)],
    }
)
