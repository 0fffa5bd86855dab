"""How a value of a program depends on the samples of a batch: what sums and products make of it.

A program is looked at for two numbers of samples, `B`. A dim that grows with them counts samples.
A value is described for all `B` by a kind and a degree: it is `B ** degree` times something that
does not depend on `B`. So `1 / B` is a constant of degree -1, the sum of the samples' losses a
total of degree 0, and their mean a total of degree -1.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from ..core.tree import is_key
from .factors import Factors, Role, factors_of


class Kind(enum.Enum):
    """What a value is to the samples.

    CONSTANT is the same whatever the samples are; where it has dims that grow, along them too.
    ROWS has a dim that counts samples, and what stands at one sample depends on no other.
    TOTAL is a sum over the samples of something that each gives for itself.
    RATIO is one total over another.
    CARRY is what a loop over the samples adds to.
    MIXED is a sum of terms that grow differently with the number of samples.
    COUPLED is all else.
    """

    CONSTANT = "constant"
    ROWS = "rows"
    TOTAL = "total"
    RATIO = "ratio"
    CARRY = "carry"
    MIXED = "mixed"
    COUPLED = "coupled"


@dataclasses.dataclass(frozen=True)
class Value:
    """How an array depends on the samples.

    Args:
        kind: see `Kind`.
        degree: how it grows with the number of samples, as a power.
        dim: of ROWS, the dim that counts samples; None where it is one sample of a loop over them.
        outer: of ROWS, how many blocks of all samples lie one after another in the dim.
        numbers: of ROWS, by column of the last dim, whether it holds the position of the sample;
            `(True,)` where all of it does, and empty where nothing does.
        over: of RATIO, the number of the total that it was divided by.
        known: the value of a scalar, or of an array of one value, where the program says it.
        made: whether it is a random key that was made on the way, which all ranks make alike.
        why: of MIXED and COUPLED, what made it so.
        where: the line of the user's that did.
        number: equal for equal computations.
    """

    kind: Kind = Kind.CONSTANT
    degree: float = 0.0
    dim: int | None = None
    outer: int = 1
    numbers: tuple[bool, ...] = ()
    over: int = 0
    known: Any = None
    made: bool = False
    why: str = ""
    where: str = ""
    number: int = dataclasses.field(default=0, compare=False)

    @property
    def is_constant(self) -> bool:
        """Whether it is the same whatever the samples are."""
        return self.kind is Kind.CONSTANT

    @property
    def is_rows(self) -> bool:
        """Whether it holds something for every sample."""
        return self.kind is Kind.ROWS

    @property
    def is_zero(self) -> bool:
        """Whether it is known to be 0, which is of any degree."""
        return self.known is not None and self.known == 0

    def at(self, dim: int | None, outer: int = 1) -> Value:
        """The same rows in another dim."""
        return dataclasses.replace(self, dim=dim, outer=outer)


CONSTANT = Value()


class Coupling(Exception):
    """An operation makes a result depend on several samples; says how."""


class Mixing(Coupling):
    """A sum of terms that grow differently with the number of samples."""


def coupled(why: str, where: str) -> Value:
    """A value of which nothing more is known."""
    return Value(Kind.COUPLED, why=why, where=where)


def total(degree: float) -> Value:
    """A sum over the samples."""
    return Value(Kind.TOTAL, degree)


def rows(dim: int | None, outer: int = 1, degree: float = 0.0) -> Value:
    """Something for every sample."""
    return Value(Kind.ROWS, degree, dim, outer)


def plus(left: Value, right: Value) -> Value:
    """A sum of two values, or one of them chosen by what does not depend on the samples.

    Raises:
        Coupling: when the result depends on several samples, and is no sum over them.
    """
    for one, other in ((left, right), (right, left)):
        if one.is_zero and not (other.is_rows and other.numbers):
            return dataclasses.replace(other, known=None) if other.is_constant else other
    kinds = {left.kind, right.kind}
    if kinds == {Kind.CONSTANT}:
        if left.degree != right.degree:
            raise Mixing(SIZES)
        return Value(Kind.CONSTANT, left.degree, made=left.made or right.made)
    if kinds <= {Kind.ROWS, Kind.CONSTANT}:
        return aligned([left, right], _one_degree(left, right))
    if kinds <= {Kind.TOTAL, Kind.CONSTANT}:
        degrees = {v.degree - (1 if v.is_constant else 0) for v in (left, right)}
        if len(degrees) > 1:
            raise Mixing(TERMS)
        return total(degrees.pop())
    return _plus_special(left, right, kinds)


def _plus_special(left: Value, right: Value, kinds: set[Kind]) -> Value:
    """Sums with what is already a ratio, a mixture or part of a loop."""
    if Kind.MIXED in kinds:
        first = left if left.kind is Kind.MIXED else right
        if kinds <= {Kind.MIXED, Kind.CONSTANT, Kind.TOTAL}:
            return first
        raise Coupling(first.why)
    if Kind.CARRY in kinds:
        other = right if left.kind is Kind.CARRY else left
        if other.is_rows and other.dim is None and not other.degree and not other.numbers:
            return Value(Kind.CARRY)
        raise Coupling(LOOPED)
    if kinds <= {Kind.RATIO, Kind.CONSTANT}:
        ratio = left if left.kind is Kind.RATIO else right
        if left.degree == right.degree and {left.over, right.over} <= {ratio.over, 0}:
            return ratio
    raise Coupling("puts a total over the samples together with each of them")


LOOPED = "goes through a loop over the samples that does more than add them up"
SIZES = "depends on how many samples there are in another way than by a power of their number"
TERMS = (
    "adds a sum over the samples and a term that does not grow with them; take the mean over the "
    "samples, or multiply the other term by their number"
)


def times(left: Value, right: Value) -> Value:
    """A product of two values.

    Raises:
        Coupling: when the result is no sum over the samples.
    """
    degree = left.degree + right.degree
    if left.is_constant and right.is_constant:
        return Value(Kind.CONSTANT, degree, known=0 if left.is_zero or right.is_zero else None)
    for one, other in ((left, right), (right, left)):
        if one.is_constant:
            return _scaled(other, degree)
    if left.is_rows and right.is_rows:
        return aligned([left, right], degree)
    raise Coupling(_product(left, right))


def over(left: Value, right: Value) -> Value:
    """A quotient of two values.

    Raises:
        Coupling: when the result is no sum over the samples.
    """
    degree = left.degree - right.degree
    if right.is_constant:
        if left.is_constant:
            return Value(Kind.CONSTANT, degree)
        return _scaled(left, degree)
    if right.is_rows and (left.is_rows or left.is_constant):
        return aligned([left, right], degree)
    if right.kind is Kind.TOTAL and left.kind in (Kind.TOTAL, Kind.CONSTANT):
        return Value(Kind.RATIO, degree, over=right.number, why=QUOTIENT)
    raise Coupling(_product(left, right))


QUOTIENT = (
    "divides one sum over the samples by another, and the quotients of parts of a batch do not "
    "average to that of the whole; return Weighted(total, weight) instead, which is divided last"
)


def _scaled(value: Value, degree: float) -> Value:
    if value.kind is Kind.CARRY:
        raise Coupling(LOOPED)
    if value.numbers:
        raise Coupling(NUMBERS)
    return dataclasses.replace(value, degree=degree, known=None)


NUMBERS = "numbers the samples, and what is first in a part of a batch is not first in the whole"


def _product(left: Value, right: Value) -> str:
    if left.is_rows or right.is_rows:
        return "puts a total over the samples together with each of them"
    return "multiplies or divides totals over the samples"


def _one_degree(*values: Value) -> float:
    degrees = {value.degree for value in values if not value.is_zero}
    if len(degrees) > 1:
        raise Coupling(SIZES)
    return degrees.pop() if degrees else 0.0


def aligned(values: list[Value], degree: float) -> Value:
    """Rows made of rows and constants, sample by sample.

    Raises:
        Coupling: when samples are put together with other samples.
    """
    if any(value.numbers for value in values):
        raise Coupling(NUMBERS)
    places = {(value.dim, value.outer) for value in values if value.is_rows}
    if len(places) != 1:
        raise Coupling("puts samples together with other samples")
    ((dim, outer),) = places
    return rows(dim, outer, degree)


def nonlinear(name: str, values: list[Value]) -> Value:
    """What a function that is not linear makes of values, element by element.

    Raises:
        Coupling: when one of them is a total, or depends on the number of samples.
    """
    for value in values:
        if value.kind in (Kind.TOTAL, Kind.CARRY):
            raise Coupling(f"takes `{name}` of a total over the samples, which is not linear")
        if value.kind in (Kind.RATIO, Kind.MIXED):
            raise Coupling(value.why)
    if any(value.degree and not value.is_zero for value in values):
        raise Coupling(SIZES)
    if not any(value.is_rows for value in values):
        return Value(made=any(value.made for value in values))
    return aligned(values, 0.0)


Shapes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of an array for the two numbers of samples."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An equation, in the programs for two numbers of samples.

    Args:
        name: of the primitive.
        params: its parameters in the first.
        others: those in the second.
        inputs: the shapes of its operands.
        outputs: the shapes of its results.
        dtypes: those of the first operand and the first result.
        generator: of a random key as the first operand, what draws with it.
    """

    name: str
    params: dict[str, Any]
    others: dict[str, Any]
    inputs: tuple[Shapes, ...]
    outputs: tuple[Shapes, ...]
    dtypes: tuple[Any, Any]
    generator: str = ""

    @cached_property
    def factors(self) -> Factors:
        """What it does with dims, where there are most samples.

        Raises:
            LookupError: when that is not known.
        """
        inputs, outputs = ([large for _, large in side] for side in (self.inputs, self.outputs))
        found = factors_of(self.name, self.others, inputs, outputs)
        if found is None:
            raise LookupError(self.name)
        return found

    @property
    def roles(self) -> set[Role | None]:
        """What it does along the dims of its operands that count samples."""
        return {
            self.factors.role(number, dim)
            for number, shapes in enumerate(self.inputs)
            for dim in grown(shapes)
        }

    def moved(self, value: Value, operand: int = 0) -> Value:
        """What is made of rows, in the dim of the results that counts their samples then.

        Raises:
            Coupling: when there is none.
        """
        if not value.is_rows or value.dim is None:
            return value
        dim = self.factors.result_dim(operand, value.dim)
        if dim is None:
            raise Coupling("puts samples together with other samples")
        return value.at(dim, value.outer)


Rule: TypeAlias = Callable[[Operation, list[Value]], "Value | list[Value]"]


def grown(shapes: Shapes) -> list[int]:
    """The dims of an array that count samples."""
    return [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]


def as_rows(value: Value, shapes: Shapes) -> Value:
    """A constant that is repeated for every sample, as rows."""
    dims = grown(shapes)
    if value.is_constant and len(dims) == 1:
        return rows(dims[0], 1, value.degree)
    return value


def all_constant(values: Sequence[Value]) -> bool:
    """Whether nothing depends on the samples."""
    return all(value.is_constant for value in values)


def only_numbers(value: Value) -> Value:
    """A value of which all is the position of its sample, or nothing."""
    if value.numbers not in ((), (True,)):
        raise Coupling(NUMBERS)
    return value


def not_numbered(value: Value) -> Value:
    """A value that is no position of a sample, and no sum that a loop is still at."""
    if value.numbers or value.kind is Kind.CARRY:
        raise Coupling(NUMBERS)
    return value


DIFFERS = "is another program for another number of samples"


def scalar(value: Any) -> Value:
    """A constant that is the same for any number of samples, its value known."""
    if is_key(value):
        return CONSTANT
    # Literals are Python's own numbers, too, which have no dtype.
    dtype = np.dtype(getattr(value, "dtype", type(value)))
    if dtype.kind in "biuf":
        return Value(known=np.asarray(value).item())
    # To NumPy, bfloat16 and its like are no floats.
    return Value(known=float(value)) if jnp.issubdtype(dtype, jnp.floating) else CONSTANT


def grown_constant(first: np.ndarray, second: np.ndarray, ratio: float) -> Value:
    """A constant that differs between two numbers of samples."""
    if first.shape != second.shape:
        flat = first.reshape(-1)
        if flat.size and (flat == flat[0]).all() and (second == flat[0]).all():
            return scalar(flat[0])
        return coupled("is an array with an entry of its own for every sample", "")
    if first.dtype.kind not in "iufV" or not first.size:
        return coupled(DIFFERS, "")
    a, b = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(all="ignore"):
        degrees = np.log(b / a) / math.log(ratio)
    degree = round(2 * float(np.ravel(degrees)[0])) / 2 if np.isfinite(degrees).all() else math.nan
    exact = first.dtype.kind in "iu"
    tolerance = 0.0 if exact else 4 * float(jnp.finfo(first.dtype).eps)
    if not np.allclose(b, a * ratio**degree, rtol=tolerance, atol=0):
        return coupled("is a number that " + SIZES, "")
    return Value(Kind.CONSTANT, degree)
