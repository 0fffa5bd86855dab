"""What a loss is to the samples of a batch: a mean, a sum, weighted, or what couples them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from ..core.typing import Path
from .sample_values import Kind, Value, same_scale


class Use(enum.Enum):
    """What a number that a loss function gives is to the samples.

    MEAN is a mean over samples, or the same for all batches. SUM is a sum over them. WEIGHTED is a
    sum divided by a sum: of a loss, its own weight; of a metric, the weight of the loss. SCALED is
    a mean or sum over the samples times something else that follows from their number. CONSTANT,
    of a buffer or a metric, is the same for all parts of a batch, as what is added up over all
    ranks is. MIXED adds terms that grow differently with the number of samples, and COUPLED is
    what the parts of a batch cannot give on their own.
    """

    MEAN = "mean"
    SUM = "sum"
    WEIGHTED = "weighted"
    SCALED = "scaled"
    CONSTANT = "constant"
    MIXED = "mixed"
    COUPLED = "coupled"


@dataclasses.dataclass(frozen=True)
class OutputUse:
    """What one number is to the samples.

    Args:
        kind: see `Use`.
        factor: what the mean over equal parts of a batch is multiplied by to give the number of the
            whole batch: 1 for a mean, the number of parts for a sum.
        why: of MIXED and COUPLED, what is done to the samples.
        where: the line of the user's that does it.
    """

    kind: Use
    factor: float = 1.0
    why: str = ""
    where: str = ""

    @property
    def is_separable(self) -> bool:
        """Whether the parts of a batch give it, each on its own."""
        return self.kind not in (Use.MIXED, Use.COUPLED)

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return self.kind.value + (f": {self.why}{place}" if self.why else "")


@dataclasses.dataclass(frozen=True)
class SampleUse:
    """What one evaluation of a loss makes of the samples.

    Args:
        loss: the loss; where it has a weight, their quotient.
        metrics: by name.
        buffers: the new values, by path.
        is_plain: whether the loss is a number without a weight of its own.
        failure: what the loss function says where it cannot be computed of a part of the batch.

    Example:
        >>> coupled = OutputUse(Use.COUPLED, why="takes `sort` along the samples", where="a.py:3")
        >>> use = SampleUse(OutputUse(Use.MEAN), {"median": coupled}, {})
        >>> print(use)
        loss: mean
        metric 'median': coupled: takes `sort` along the samples (a.py:3)
        >>> use.coupled
        "the metric 'median' takes `sort` along the samples (a.py:3)"
    """

    loss: OutputUse
    metrics: Mapping[str, OutputUse]
    buffers: Mapping[Path, OutputUse]
    is_plain: bool = True
    failure: str = ""

    def outputs(self) -> dict[str, OutputUse]:
        """Everything, by what to call it."""
        metrics = {f"metric {name!r}": use for name, use in self.metrics.items()}
        buffers = {f"buffer {path!r}": use for path, use in self.buffers.items()}
        return {"loss": self.loss, **metrics, **buffers}

    @property
    def coupled(self) -> str:
        """What the parts of a batch cannot give, in words; "" where they can give everything."""
        for name, use in self.outputs().items():
            if not use.is_separable:
                return f"the {name} {use.why}" + (f" ({use.where})" if use.where else "")
        return ""

    def __str__(self) -> str:
        shown = {n: u for n, u in self.outputs().items() if u.kind is not Use.CONSTANT}
        return "\n".join(f"{name}: {use}" for name, use in shown.items())


def use_of(
    loss: Value,
    weight: Value,
    metrics: Mapping[str, tuple[Value, Value]],
    buffers: Mapping[Path, Value],
    is_plain: bool = True,
    parts: float = 1,
) -> SampleUse:
    """Reads off what was found out about the outputs of a loss function.

    Args:
        loss: what the total of the loss is to the samples.
        weight: what it is divided by.
        metrics: by name, with what each is divided by.
        buffers: the new values, by path.
        is_plain: whether the loss is a number without a weight of its own.
        parts: into how many the batch is cut.

    Returns:
        The uses.
    """
    return SampleUse(
        _loss(loss, weight, parts),
        {name: _metric(value, own, weight, parts) for name, (value, own) in metrics.items()},
        {path: _buffer(value) for path, value in buffers.items()},
        is_plain,
    )


OF_WEIGHT = "has a weight that "
"""How a reason begins that is the weight's."""


def _failed(value: Value, whose: str = "") -> OutputUse:
    kind = Use.MIXED if value.kind is Kind.MIXED else Use.COUPLED
    return OutputUse(kind, 1.0, whose + (value.why or "is no sum over the samples"), value.where)


def _is_sum(value: Value) -> bool:
    """Whether the numbers of the parts give it; a constant is the mean of as many."""
    return value.kind in (Kind.CONSTANT, Kind.TOTAL)


def _loss(loss: Value, weight: Value, parts: float) -> OutputUse:
    if not _is_sum(loss) or not _is_sum(weight):
        return _failed(weight, OF_WEIGHT) if _is_sum(loss) else _failed(loss)
    factor = loss.scale / weight.scale
    if same_scale(factor, parts):
        return OutputUse(Use.SUM, factor)
    if not same_scale(factor, 1.0):
        return OutputUse(Use.SCALED, factor)
    is_plain = weight.is_constant and not weight.is_scaled
    return OutputUse(Use.MEAN if is_plain else Use.WEIGHTED)


def _metric(value: Value, own: Value, weight: Value, parts: float) -> OutputUse:
    if value.kind is Kind.RATIO and not value.is_scaled and value.over == weight.number:
        return OutputUse(Use.WEIGHTED)
    is_fixed = value.is_constant and own.is_constant
    if is_fixed and not value.is_scaled and not own.is_scaled:
        return OutputUse(Use.CONSTANT)
    return _loss(value, own, parts)


def _buffer(value: Value) -> OutputUse:
    if value.is_constant and not value.is_scaled:
        return OutputUse(Use.CONSTANT)
    why = value.why or "changes with the samples of the batch"
    if value.kind is Kind.CONSTANT:
        why = "counts the samples of the batch"
    return OutputUse(Use.COUPLED, 1.0, why, value.where)
