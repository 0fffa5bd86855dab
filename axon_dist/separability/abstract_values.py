"""The abstract values of the separability analysis: how an array depends on the samples of a batch.

Two programs are compared: that of the whole batch, and that of one of its equal parts. A dim counts
samples if its size differs between them. A value of the whole batch is described relative to the
parts' values by a kind (how it is combined from them) and a scale (how many times larger it is).
For example, `1/B` is a constant that is 1/4 as large for the whole batch as for one of four parts;
the mean of the samples' losses is the mean of the parts' means, and their sum is 4 times the mean
of the parts' sums. Scales come from the constants of the two programs, and hold for these two sizes
alone. The kinds of the outputs decide how a loss is combined over parts: as a mean, a sum, a
weighted mean, or not at all.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import TypeAlias

from ..core.typing import Path

Number: TypeAlias = bool | int | float
"""A scalar as a Python number."""


class Kind(enum.Enum):
    """How the value of the whole batch follows from the values of its parts.

    It describes any array of the program; `Dependence` describes the outputs of a loss function.

    CONSTANT does not depend on the values of the samples, but may depend on their number. Along a
    dim that counts samples, all its entries are equal.
    ROWS has a dim that counts samples: the parts' values, concatenated along it, are the whole's.
    TOTAL is a sum over the samples of a term that depends on one sample each: the whole's value is
    the mean of the parts' values, times the scale.
    RATIO is the quotient of two totals, or of a constant and a total.
    CARRY is the carry of a loop over the samples that adds a term per sample.
    MIXED is a sum of terms that grow differently with the number of samples.
    COUPLED is every other value.
    """

    CONSTANT = "constant"
    ROWS = "rows"
    TOTAL = "total"
    RATIO = "ratio"
    CARRY = "carry"
    MIXED = "mixed"
    COUPLED = "coupled"


class Why(enum.StrEnum):
    """Why a value depends on several samples, or on their number.

    Each continues a sentence about the value; some continue another reason.
    """

    DIFFERS = (
        "traces to a different program for a different number of samples, for example because of a "
        "Python loop over them or an `if` on their number"
    )
    DIMS = "depends on the number of samples in more than one dim"
    SIZES = (
        "depends on the number of samples in a way that cannot be computed from parts of a batch"
    )
    TERMS = (
        "adds a sum over the samples and a term that does not grow with them; take the mean over "
        "the samples, or multiply the other term by their number"
    )
    LOOPED = "goes through a loop over the samples that does more than add them up"
    QUOTIENT = (
        "divides one sum over the samples by another, and the quotients of parts of a batch do not "
        "average to that of the whole; return Weighted(total, weight) instead, which is divided "
        "last"
    )
    FLOORED = (
        "; if it only guards against division by 0, return Weighted(total, weight) without it: a "
        "weight of 0 gives a loss of 0"
    )
    ADDS = "adds a sum over the samples to a value that does not grow with them"
    NONLINEAR = "of a total over the samples, which is not linear"
    PRODUCT = "multiplies or divides totals over the samples"
    EACH = "combines a sum over the samples with individual samples"
    NUMBERS = "depends on a sample's position in the batch, which is different in a part of it"
    STRAY = "puts samples together with other samples"
    RESHAPED = "is reshaped across the samples"
    WRITTEN = "is written where several samples may write"
    PICKED = "picks samples by an index"
    MOVING = "takes slices at offsets that differ from sample to sample"
    SOME = "takes some of the samples"
    UNEVEN = SOME + ", and different ones for a part of the batch than for the whole"
    TURNED = "reverses the order of the samples"
    JOINED = "concatenates samples with something else along the batch dim"
    OFTEN = "is computed in a loop whose number of iterations depends on the samples"
    ONE_EACH = "is an array with an entry of its own for every sample"


OF_SUMS = (Why.NONLINEAR, Why.PRODUCT, Why.QUOTIENT)
"""The reasons of functions of sums over the samples, which a step may compute from the sums."""


@dataclasses.dataclass(frozen=True)
class Value:
    """How an array depends on the samples.

    Args:
        kind: see `Kind`.
        scale: how many times larger it is for the whole batch than for a part.
        dim: for ROWS, the dim that counts samples; None for the one sample of a loop's iteration.
        outer: for ROWS, how many times the sequence of all samples is repeated along the dim, such
            as 3 after (3, B) was reshaped to (3 * B,).
        positions: for ROWS, a flag for each column of the last dim: whether it holds the sample's
            position in the batch; or the single flag `(True,)` if the whole value does. Empty if no
            column does.
        repeats: for ROWS, whether all samples have the same rows, such as those of a constant that
            is broadcast over the samples. Its sum over the samples is again a constant.
        divisor: for RATIO, the `value_number` of the divisor.
        loop_length: if the value is the index of a loop over the samples, the number of samples in
            a part.
        slot: for CARRY, its position among the loop's carries.
        known: the number that a scalar, or every element of an array, equals in the programs of a
            part and of the whole, if it is a constant there.
        from_own_key: whether it is a random key that the loss creates or closes over, hence equal
            on all ranks, or is computed from such a key.
        why: for RATIO, MIXED and COUPLED, the reason.
        line: the user's line that is the reason.
        value_number: its value number, equal for equal computations.
    """

    kind: Kind = Kind.CONSTANT
    scale: float = 1.0
    dim: int | None = None
    outer: int = 1
    positions: tuple[bool, ...] = ()
    repeats: bool = False
    divisor: int = 0
    loop_length: int = 0
    slot: int = 0
    known: tuple[Number, Number] | None = None
    from_own_key: bool = False
    why: str = ""
    line: str = ""
    value_number: int = dataclasses.field(default=0, compare=False)

    @property
    def is_constant(self) -> bool:
        """Whether it does not depend on the values of the samples."""
        return self.kind is Kind.CONSTANT

    @property
    def is_rows(self) -> bool:
        """Whether it has a row for every sample."""
        return self.kind is Kind.ROWS

    @property
    def is_zero(self) -> bool:
        """Whether it is known to be 0, which fits any scale."""
        return self.known is not None and self.known[0] == 0 == self.known[1]

    @property
    def is_scaled(self) -> bool:
        """Whether it has another scale for the whole batch than for a part."""
        return not same_scale(self.scale, 1.0)

    @property
    def same_number(self) -> Number | None:
        """The number that it equals both in a part and in the whole; None if there is none."""
        known = self.known
        return known[0] if known is not None and known[0] == known[1] else None

    def in_dim(self, dim: int | None, outer: int = 1) -> Value:
        """Returns the same rows in another dim."""
        return dataclasses.replace(self, dim=dim, outer=outer)


CONSTANT = Value()


def same_scale(left: float, right: float) -> bool:
    """Whether two scales are equal up to rounding."""
    return math.isclose(left, right, rel_tol=_ROUNDING)


_ROUNDING = 1e-6
"""The relative rounding error allowed for products of several float32 constants."""


class Coupling(Exception):
    """An operation makes a result depend on several samples; the message says how."""


class Mixing(Coupling):
    """A sum of terms that grow differently with the number of samples."""


def coupled(why: str, line: str) -> Value:
    """Returns a COUPLED value, with the reason and the user's line."""
    return Value(Kind.COUPLED, why=why, line=line)


def with_line(value: Value, line: str) -> Value:
    """Adds the user's line to a value that has a reason and no line yet."""
    if value.kind in (Kind.MIXED, Kind.RATIO, Kind.COUPLED) and not value.line:
        return dataclasses.replace(value, line=line)
    return value


def plus(left: Value, right: Value) -> Value:
    """Returns the value of a sum.

    Raises:
        Coupling: if the result depends on several samples and is not a sum over them.
        Mixing: if the terms grow differently with the number of samples.
    """
    for one, other in ((left, right), (right, left)):
        if one.is_zero and not (other.is_rows and other.positions):
            return dataclasses.replace(other, known=None) if other.is_constant else other
    kinds = {left.kind, right.kind}
    has_one_scale = same_scale(left.scale, right.scale)
    if kinds == {Kind.CONSTANT}:
        if not has_one_scale:
            raise Mixing(Why.SIZES)
        from_own_key = left.from_own_key or right.from_own_key
        return Value(Kind.CONSTANT, left.scale, from_own_key=from_own_key)
    if kinds <= {Kind.ROWS, Kind.CONSTANT}:
        if not has_one_scale:
            raise Coupling(Why.SIZES)
        return aligned([left, right], left.scale)
    if kinds <= {Kind.TOTAL, Kind.CONSTANT}:
        if not has_one_scale:
            raise Mixing(Why.TERMS)
        return Value(Kind.TOTAL, left.scale)
    return _plus_special(left, right, kinds, has_one_scale)


def either(left: Value, right: Value) -> Value:
    """Returns a value that stands for either of two, such as the results of a `cond`'s branches.

    Raises:
        Coupling: if the result depends on several samples and is not a sum over them.
    """
    if Kind.CARRY in (left.kind, right.kind):
        if (left.kind, left.slot) != (right.kind, right.slot):
            raise Coupling(Why.LOOPED)
        return left
    # A value that holds for the sum of both also holds for each of them.
    return plus(left, right)


def _plus_special(left: Value, right: Value, kinds: set[Kind], has_one_scale: bool) -> Value:
    """Returns the value of a sum in which a term is RATIO, MIXED or CARRY."""
    if Kind.MIXED in kinds:
        first = left if left.kind is Kind.MIXED else right
        if kinds <= {Kind.MIXED, Kind.CONSTANT, Kind.TOTAL}:
            return first
        raise Coupling(first.why)
    if Kind.CARRY in kinds:
        carry, other = (left, right) if left.kind is Kind.CARRY else (right, left)
        is_one = other.is_constant or (other.is_rows and other.dim is None and not other.positions)
        if is_one and not other.is_scaled:
            return carry
        raise Coupling(Why.LOOPED)
    if kinds <= {Kind.RATIO, Kind.CONSTANT}:
        ratio = left if left.kind is Kind.RATIO else right
        if has_one_scale and {left.divisor, right.divisor} <= {ratio.divisor, 0}:
            return ratio
    raise Coupling(Why.EACH)


def times(left: Value, right: Value) -> Value:
    """Returns the value of a product.

    Raises:
        Coupling: if the result has no abstract value, such as that of two sums.
    """
    scale = left.scale * right.scale
    if left.is_constant and right.is_constant:
        known = (0, 0) if left.is_zero or right.is_zero else None
        return Value(Kind.CONSTANT, scale, known=known)
    for one, other in ((left, right), (right, left)):
        if one.is_constant:
            return _scaled(other, scale)
    if left.is_rows and right.is_rows:
        return aligned([left, right], scale)
    raise Coupling(_product(left, right))


def over(left: Value, right: Value) -> Value:
    """Returns the value of a quotient.

    Raises:
        Coupling: if the result has no abstract value, such as that of rows and a sum.
    """
    scale = left.scale / right.scale
    if right.is_constant:
        return Value(Kind.CONSTANT, scale) if left.is_constant else _scaled(left, scale)
    if right.is_rows and (left.is_rows or left.is_constant):
        return aligned([left, right], scale)
    if right.kind is Kind.TOTAL and left.kind in (Kind.TOTAL, Kind.CONSTANT):
        return Value(Kind.RATIO, scale, divisor=right.value_number, why=Why.QUOTIENT)
    raise Coupling(_product(left, right))


def _scaled(value: Value, scale: float) -> Value:
    if value.kind is Kind.CARRY or value.positions:
        raise Coupling(Why.NUMBERS if value.positions else Why.LOOPED)
    return dataclasses.replace(value, scale=scale, known=None)


def _product(left: Value, right: Value) -> str:
    return Why.EACH if left.is_rows or right.is_rows else Why.PRODUCT


def aligned(values: list[Value], scale: float) -> Value:
    """Returns the value of rows that are made from rows and constants, sample by sample.

    Raises:
        Coupling: if samples are combined with other samples.
    """
    if any(value.positions for value in values):
        raise Coupling(Why.NUMBERS)
    if not all(value.is_rows or value.is_constant for value in values):
        raise Coupling(Why.EACH)
    places = {(value.dim, value.outer) for value in values if value.is_rows}
    if len(places) != 1:
        raise Coupling(Why.STRAY)
    ((dim, outer),) = places
    repeats = all(value.repeats for value in values if value.is_rows)
    return Value(Kind.ROWS, scale, dim, outer, repeats=repeats)


def nonlinear(name: str, values: list[Value]) -> Value:
    """Returns the value of a nonlinear elementwise function.

    Raises:
        Coupling: if an operand is a total, or depends on the number of samples.
    """
    for value in values:
        if value.kind is Kind.CARRY:
            raise Coupling(Why.LOOPED)
        if value.kind is Kind.TOTAL:
            also = Why.FLOORED if name == "max" else ""
            raise Coupling(f"takes `{name}` {Why.NONLINEAR}{also}")
        if value.kind in (Kind.RATIO, Kind.MIXED):
            raise Coupling(value.why)
    if any(value.is_scaled and not value.is_zero for value in values):
        raise Coupling(Why.SIZES)
    if any(value.is_rows for value in values):
        return aligned(values, 1.0)
    return Value(from_own_key=any(value.from_own_key for value in values))


class Dependence(enum.Enum):
    """How an output of a loss function relates to the samples.

    `Kind` describes any array of the program. This is the verdict on an output, from the kinds and
    the scales of its total and its divisor. So an array of kind CONSTANT that depends on the number
    of samples does not make an output CONSTANT.

    MEAN is a mean over samples; a loss that is the same for all parts counts as one.
    SUM is a sum over them.
    WEIGHTED is a sum divided by a sum: a loss by its weight, a metric by its own or the loss's.
    SCALED is a mean or sum over the samples times another factor that depends on their number.
    CONSTANT is a metric or a buffer that is the same for all parts of a batch.
    MIXED adds terms that grow differently with the number of samples.
    COUPLED cannot be computed from the values of the parts.
    """

    MEAN = "mean"
    SUM = "sum"
    WEIGHTED = "weighted"
    SCALED = "scaled"
    CONSTANT = "constant"
    MIXED = "mixed"
    COUPLED = "coupled"


@dataclasses.dataclass(frozen=True)
class OutputDependence:
    """How one output depends on the samples.

    Args:
        kind: see `Dependence`.
        factor: the value of the whole batch is this times the mean over equal parts: 1 for a mean,
            the number of parts for a sum.
        why: the reason, for MIXED, COUPLED and a buffer that is not CONSTANT.
        line: the user's line that is the reason.
    """

    kind: Dependence
    factor: float = 1.0
    why: str = ""
    line: str = ""

    @property
    def is_separable(self) -> bool:
        """Whether it can be combined from the values of the parts."""
        return self.kind not in (Dependence.MIXED, Dependence.COUPLED)

    @property
    def place(self) -> str:
        """The user's line in brackets, to end a sentence; "" if unknown."""
        return f" ({self.line})" if self.line else ""

    def __str__(self) -> str:
        return self.kind.value + (f": {self.why}{self.place}" if self.why else "")


@dataclasses.dataclass(frozen=True)
class LossDependence:
    """How the outputs of a loss function depend on the samples of its batch.

    Args:
        loss: the dependence of the loss; of total / weight if it has a weight.
        metrics: that of each metric, by name.
        buffers: that of the new value of each buffer, by path.
        is_plain: whether the loss is a number without its own weight.
        failure: the error of the loss function if it fails on a part of the batch.

    Example:
        >>> why = "takes `sort` along the samples"
        >>> coupled = OutputDependence(Dependence.COUPLED, why=why, line="a.py:3")
        >>> found = LossDependence(OutputDependence(Dependence.MEAN), {"median": coupled}, {})
        >>> print(found)
        loss: mean
        metric 'median': coupled: takes `sort` along the samples (a.py:3)
        >>> found.why_coupled
        "the metric 'median' takes `sort` along the samples (a.py:3)"
    """

    loss: OutputDependence
    metrics: Mapping[str, OutputDependence]
    buffers: Mapping[Path, OutputDependence]
    is_plain: bool = True
    failure: str = ""

    @property
    def is_separable(self) -> bool:
        """Whether the loss and all metrics can be combined from the values of the parts."""
        return all(dependence.is_separable for dependence in (self.loss, *self.metrics.values()))

    def outputs(self) -> dict[str, OutputDependence]:
        """Returns the dependence of each output, by the name to show to the user."""
        metrics = {f"metric {name!r}": dependence for name, dependence in self.metrics.items()}
        buffers = {f"buffer {path!r}": dependence for path, dependence in self.buffers.items()}
        return {"loss": self.loss, **metrics, **buffers}

    @property
    def is_of_buffers(self) -> bool:
        """Whether the parts give the loss and all metrics, but not all buffers."""
        outputs = (self.loss, *self.metrics.values())
        return self.why_coupled != "" and not any(output.why for output in outputs)

    @property
    def why_coupled(self) -> str:
        """The first output that does not follow from its values for the parts, and why, or "".

        A buffer counts even if it is the mean over the samples.
        """
        for name, dependence in self.outputs().items():
            if dependence.why:
                return f"the {name} {dependence.why}{dependence.place}"
        return ""

    def __str__(self) -> str:
        shown = {n: u for n, u in self.outputs().items() if u.kind is not Dependence.CONSTANT}
        return "\n".join(f"{name}: {dependence}" for name, dependence in shown.items())


def dependence_of(
    loss: Value,
    weight: Value,
    metrics: Mapping[str, tuple[Value, Value]],
    buffers: Mapping[Path, Value],
    is_plain: bool = True,
    num_parts: float = 1,
) -> LossDependence:
    """Summarises the abstract values of the outputs of a loss function.

    Args:
        loss: the value of the loss's total.
        weight: the value of its divisor.
        metrics: the value and the divisor of each metric, by name.
        buffers: the new values, by path.
        is_plain: whether the loss is a number without its own weight.
        num_parts: the number of equal parts of the batch.

    Returns:
        How each output depends on the samples.
    """
    return LossDependence(
        _loss(loss, weight, num_parts),
        {name: _metric(v, divisor, weight, num_parts) for name, (v, divisor) in metrics.items()},
        {path: _buffer(value) for path, value in buffers.items()},
        is_plain,
    )


OF_WEIGHT = "has a weight that "
"""The beginning of a reason that concerns the loss's weight."""


def _loss(loss: Value, weight: Value, num_parts: float) -> OutputDependence:
    for value, whose in ((loss, ""), (weight, OF_WEIGHT)):
        # The parts' values of a total can be summed; a constant is the mean of equal values.
        if value.kind not in (Kind.CONSTANT, Kind.TOTAL):
            kind = Dependence.MIXED if value.kind is Kind.MIXED else Dependence.COUPLED
            why = whose + (value.why or "is not a sum over the samples")
            return OutputDependence(kind, 1.0, why, value.line)
    factor = loss.scale / weight.scale
    if same_scale(factor, num_parts):
        return OutputDependence(Dependence.SUM, factor)
    if not same_scale(factor, 1.0):
        return OutputDependence(Dependence.SCALED, factor)
    is_plain = weight.is_constant and not weight.is_scaled
    return OutputDependence(Dependence.MEAN if is_plain else Dependence.WEIGHTED)


def _metric(value: Value, divisor: Value, weight: Value, num_parts: float) -> OutputDependence:
    if value.kind is Kind.RATIO and not value.is_scaled and value.divisor == weight.value_number:
        return OutputDependence(Dependence.WEIGHTED)
    if value.is_constant and divisor.is_constant and not (value.is_scaled or divisor.is_scaled):
        return OutputDependence(Dependence.CONSTANT)
    return _loss(value, divisor, num_parts)


def _buffer(value: Value) -> OutputDependence:
    if value.is_constant and not value.is_scaled:
        return OutputDependence(Dependence.CONSTANT)
    counts = "counts the samples of the batch" if value.kind is Kind.CONSTANT else ""
    # The advice of `TERMS` is for a loss: a buffer may keep a sum.
    reason = Why.ADDS if value.why == Why.TERMS else value.why
    why = counts or reason or "changes with the samples of the batch"
    kind = (
        Dependence.MEAN if value.kind is Kind.TOTAL and not value.is_scaled else Dependence.COUPLED
    )
    # The scale of other kinds, such as a quotient of sums, says nothing about the parts' mean.
    is_scaled_mean = value.kind in (Kind.CONSTANT, Kind.TOTAL)
    return OutputDependence(kind, value.scale if is_scaled_mean else 1.0, why, value.line)
