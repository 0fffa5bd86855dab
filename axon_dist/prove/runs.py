"""One step of a program with the values that it computed, and how much rounding may change each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .program import Value
from .relations import NOISY_RUNS, bound_of


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


def noisy_run(run: Any, inputs: Sequence[Any], scale: float) -> Run:
    """Runs a step a few times, perturbed but for the first time, and returns results with bounds.

    Args:
        run: a compiled program, as `Traced.compiled` returns it, with noise.
        inputs: its inputs.
        scale: by how many units in the last place results are perturbed.
    """
    runs = [run(inputs, n, scale * (n > 0)) for n in range(NOISY_RUNS + 1)]
    first_outputs, first = runs[0]
    dtypes = [x.dtype for x in first_outputs]
    outputs = [outputs for outputs, _ in runs]
    values = [values for _, values in runs]
    of = {value: x.dtype for value, x in first.items()}
    several = zip(dtypes, zip(*outputs, strict=True), strict=True)
    return Run(
        outputs[0],
        [bound_of(each, scale, dtype) for dtype, each in several],
        values[0],
        {v: bound_of([each[v] for each in values], scale, of[v]) for v in values[0]},
    )
