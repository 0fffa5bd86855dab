"""Fingerprints of a program's values in a file, to compare with a run in another environment.

A fingerprint is the norm of a value and its products with three arrays of signs. A file holds those
of every value in every step, the changes of each that rounding explains, and the inputs of each
step. With it, another version of JAX runs the same steps and finds the first operation that
differs, although the two versions cannot be imported in one process.
"""

from __future__ import annotations

import dataclasses
import json
import types
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError
from .program import Operation, Program, Region, Value, is_key, plain
from .relations import NOISY_RUNS, bound_of
from .trace import Traced

_FORMAT = 1
_PROJECTIONS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What one step of a program computed.

    Args:
        outputs: its outputs, or their fingerprints.
        output_bounds: by how much rounding may change each.
        values: the recorded values by `Value`, or their fingerprints.
        bounds: by how much rounding may change each.
    """

    outputs: list[np.ndarray]
    output_bounds: list[float]
    values: Mapping[Value, np.ndarray]
    bounds: Mapping[Value, float]

    def times(self, scale: float) -> Run:
        """Returns the run with all bounds multiplied."""
        bounds = {value: bound * scale for value, bound in self.bounds.items()}
        output_bounds = [bound * scale for bound in self.output_bounds]
        return dataclasses.replace(self, output_bounds=output_bounds, bounds=bounds)


def noisy_run(run: Any, inputs: Sequence[Any], scale: float, with_prints: bool = False) -> Run:
    """Runs a step a few times, perturbed but for the first time, and returns results with bounds.

    Args:
        run: a compiled program, as `Traced.compiled` returns it, with noise.
        inputs: its inputs.
        scale: by how many units in the last place results are perturbed.
        with_prints: whether fingerprints are compared, not the values.
    """
    runs = [run(inputs, n, scale * (n > 0)) for n in range(NOISY_RUNS + 1)]
    first_outputs, first = runs[0]
    dtypes = [x.dtype for x in first_outputs]
    outputs = [outputs for outputs, _ in runs]
    values = [values for _, values in runs]
    of = {value: x.dtype for value, x in first.items()}
    if with_prints:
        outputs = [prints_of(each) for each in outputs]
        values = [value_prints(each) for each in values]
    several = zip(dtypes, zip(*outputs, strict=True), strict=True)
    return Run(
        outputs[0],
        [bound_of(each, scale, dtype) for dtype, each in several],
        values[0],
        {v: bound_of([each[v] for each in values], scale, of[v]) for v in values[0]},
    )


def prints_of(outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the fingerprints of outputs."""
    return [fingerprint(x, 0) for x in outputs]


def value_prints(values: Mapping[Value, np.ndarray]) -> dict[Value, np.ndarray]:
    """Returns the fingerprints of recorded values, one for each rank."""
    return {value: fingerprint(x, len(value.axes)) for value, x in values.items()}


def fingerprint(values: np.ndarray, num_axes: int) -> np.ndarray:
    """Returns the norm of an array and its products with arrays of signs.

    Args:
        values: the array, with one leading dim per mesh axis around it.
        num_axes: how many of these there are; each rank has its own fingerprint.

    Example:
        >>> fingerprint(np.array([3.0, 4.0]), 0).shape
        (4,)
    """
    flat = values.reshape(*values.shape[:num_axes], -1).astype(np.float64)
    index = np.arange(1, flat.shape[-1] + 1, dtype=np.uint64)
    rows = []
    for number in range(1, _PROJECTIONS + 1):
        mixed = index * np.uint64(0x9E3779B97F4A7C15) * np.uint64(2 * number + 1)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        rows.append(1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64))
    with np.errstate(all="ignore"):
        norm = np.sqrt((flat * flat).sum(-1, keepdims=True))
        return np.concatenate([norm, flat @ np.stack(rows, -1)], -1)


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """The fingerprints of a program.

    Args:
        program: its operations, without operands or inner programs.
        names: the names of its outputs.
        sizes: the sizes of its mesh.
        inputs: the inputs of each step.
        runs: the fingerprints of each step.
        made_by: the versions that made it.
    """

    program: Program
    names: tuple[str, ...]
    sizes: Mapping[str, int]
    inputs: Sequence[Sequence[Any]]
    runs: Sequence[Run]
    made_by: str

    def save(self, path: str | Path) -> None:
        """Writes it to a file in NumPy's npz format."""
        arrays: dict[str, np.ndarray] = {}
        kinds = [[_kind(x) for x in inputs] for inputs in self.inputs]
        for step, (inputs, run) in enumerate(zip(self.inputs, self.runs, strict=True)):
            for number, x in enumerate(inputs):
                data = np.ascontiguousarray(plain(x))
                arrays[f"input{step}_{number}"] = data.reshape(-1).view(np.uint8)
            values = list(self.program.values())
            arrays[f"outputs{step}"] = np.array(run.outputs)
            arrays[f"output_bounds{step}"] = np.array(run.output_bounds)
            arrays[f"values{step}"] = np.concatenate(
                [run.values[v].ravel() if v in run.values else np.zeros(0) for v in values]
            )
            arrays[f"sizes{step}"] = np.array(
                [run.values[v].size if v in run.values else 0 for v in values]
            )
            arrays[f"bounds{step}"] = np.array([run.bounds.get(v, 0.0) for v in values])
        described = {
            "format": _FORMAT,
            "made_by": self.made_by,
            "names": self.names,
            "sizes": self.sizes,
            "inputs": kinds,
            "operations": [
                [o.name, [[v.shape, _dtype(v.aval), v.axes] for v in o.results]]
                for o in self.program.operations
            ],
        }
        with open(path, "wb") as file:
            np.savez_compressed(file, described=json.dumps(described), **arrays)  # pyright: ignore

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Reads a file.

        Raises:
            ConfigError: when the file is not one that `save` wrote.
        """
        try:
            with np.load(path) as file:
                described = json.loads(str(file["described"]))
                if described["format"] != _FORMAT:
                    raise KeyError(f"format {described['format']}")
                return cls._read(described, file)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"[PROVE009] {str(path)!r} holds no fingerprints ({error}); write them anew by "
                "axon bisect FILE:NAME --record PATH"
            ) from error

    @classmethod
    def _read(cls, described: Mapping[str, Any], file: Mapping[str, np.ndarray]) -> Recording:
        program = _program(described["operations"])
        sizes = described["sizes"]
        values = list(program.values())
        inputs, runs = [], []
        for step, kinds in enumerate(described["inputs"]):
            inputs.append([_array(file[f"input{step}_{n}"], *k) for n, k in enumerate(kinds)])
            counts = file[f"sizes{step}"]
            parts = np.split(file[f"values{step}"], np.cumsum(counts)[:-1])
            prints: dict[Value, np.ndarray] = {}
            bounds: dict[Value, float] = {}
            bound_of_value = file[f"bounds{step}"]
            for number, value in enumerate(values):
                if counts[number]:
                    ranks = [sizes[axis] for axis in value.axes]
                    prints[value] = parts[number].reshape(*ranks, -1)
                    bounds[value] = float(bound_of_value[number])
            outputs, limits = list(file[f"outputs{step}"]), file[f"output_bounds{step}"].tolist()
            runs.append(Run(outputs, limits, prints, bounds))
        return cls(program, tuple(described["names"]), sizes, inputs, runs, described["made_by"])


def _program(operations: Sequence[Any]) -> Program:
    region = Region([], [], [], [])
    for number, (name, results) in enumerate(operations):
        equation: Any = types.SimpleNamespace(
            primitive=types.SimpleNamespace(name=name), params={}, source_info=None
        )
        operation = Operation(number, equation, [], [], [])
        for shape, dtype, axes in results:
            aval = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
            operation.results.append(Value(aval, tuple(axes), operation))
        region.operations.append(operation)
    return Program(region, region.operations)


def _dtype(aval: Any) -> str:
    dtype = getattr(aval, "dtype", np.dtype(np.uint32))
    return "uint32" if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else str(dtype)


def _kind(x: Any) -> tuple[str, list[int], str]:
    """Returns the dtype and shape of an input, and the generator if it holds random keys."""
    data = np.asarray(plain(x))
    return str(data.dtype), list(data.shape), str(jax.random.key_impl(x)) if is_key(x) else ""


def _array(data: np.ndarray, dtype: str, shape: Sequence[int], generator: str) -> Any:
    array = data.view(jnp.dtype(dtype)).reshape(shape)
    return jax.random.wrap_key_data(jnp.asarray(array), impl=generator) if generator else array


def fingerprints_of(traced: Traced, inputs: Sequence[Sequence[Any]], runs: Sequence[Run]) -> Any:
    """Returns the recording of a program, from the inputs and the fingerprints of its steps."""
    from .. import __version__  # noqa: PLC0415

    made_by = f"axon_dist {__version__}, jax {jax.__version__}, numpy {np.__version__}"
    return Recording(traced.program, traced.names, traced.sizes, inputs, runs, made_by)
