"""Runs a program with perturbed results too, to measure how much rounding may change each value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .program import Injected, Value
from .relations import NOISY_RUNS, bound_of
from .trace import Traced


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What one step of a program computed.

    Args:
        outputs: its outputs.
        output_bounds: by how much rounding may change each.
        values: the recorded values by `Value`.
        bounds: by how much rounding may change each.
    """

    outputs: list[np.ndarray]
    output_bounds: list[float]
    values: Mapping[Value, np.ndarray]
    bounds: Mapping[Value, float]


class Perturbed:
    """A traced program, compiled once for each choice of what is recorded.

    Compiling takes most of the time, so keep this for as long as the program is run.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def run(
        self,
        inputs: Sequence[Any],
        records: bool = True,
        bits: Mapping[int, Injected] | None = None,
        turns: Mapping[int, int] | None = None,
        scale: float = 1.0,
    ) -> Run:
        """Runs a step once as it is, and a few times perturbed.

        Args:
            inputs: its inputs.
            records: whether all values are recorded, or only the outputs.
            bits: bits that replace those of draws, by the number of the operation.
            turns: the turns of loops whose values are recorded, by the number of the loop.
            scale: by how many units in the last place results are perturbed.
        """
        key = records, frozenset((turns or {}).items())
        if key not in self._compiled:
            wanted = frozenset(self.traced.program.values() if records else ())
            self._compiled[key] = self.traced.compiled(wanted, True, turns)
        run = self._compiled[key]
        several = [run(inputs, n, scale * (n > 0), bits) for n in range(NOISY_RUNS + 1)]
        outputs, values = zip(*several, strict=True)
        return Run(
            outputs[0],
            [bound_of(each, scale) for each in zip(*outputs, strict=True)],
            values[0],
            {value: bound_of([one[value] for one in values], scale) for value in values[0]},
        )
