"""An operation of a program, as it stands for two numbers of samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from .sample_values import NUMBERS, Coupling, Kind, Value, rows

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
