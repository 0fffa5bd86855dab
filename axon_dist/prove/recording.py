"""Fingerprints of a program's values over some steps, in a file, to compare two environments.

A fingerprint is the norm of a value and its product with an array of random signs. With those of
every value, and with the change of each that rounding explains, two programs are compared that
cannot run in one process: versions of JAX in two virtual environments. Two configs that should be
equal are compared by their results on their own meshes; where they differ is found from a recording
on one device, on which they have the same form whatever their strategies are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core.arguments import COUNT
from ..core.compat import source_frames
from ..core.errors import ConfigError
from ..core.files import host_memory
from ..core.words import byte_size
from .inputs import draws_of
from .meshes import sizes_of
from .program import Operation, Region, Value, is_key, plain
from .relations import NOISY_RUNS, bound_of, differs, wide
from .report import Place, places_of
from .trace import Subject, Traced

_FORMAT = 2
_FRAMES = 16
"""How many source lines of an operation's call stack are kept."""

_HUGE = 1e6
"""Numbers above this count by their logarithm."""

_SUMMED = 1e-9
"""By how much, relative to it, a fingerprint depends on the order in which NumPy sums."""

LAYER = "@"
"""A named scope that begins with this is the path of a module."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The norm of a value and its product with random signs, for each turn of the loops around it.

    Args:
        numbers: the norm and the product of each turn, one after the other.
        bound: by how much rounding may change them.
    """

    numbers: Sequence[float]
    bound: float = 0.0

    def gap(self, other: Fingerprint) -> tuple[float, float, int] | None:
        """Returns the difference, its bound and the first turn that differs; None if it is equal.

        Values of other loops or ranks have no common fingerprint, and count as equal.
        """
        if len(self.numbers) != len(other.numbers):
            return None
        bound = self.bound + other.bound + _SUMMED * self.norm
        here, there = (np.asarray(one.numbers).reshape(-1, 2) for one in (self, other))
        gaps = [differs(a, b, bound) for a, b in zip(here, there, strict=True)]
        turn = next((turn for turn, gap in enumerate(gaps) if gap), None)
        return None if turn is None else (max(gaps), bound, turn)

    @property
    def norm(self) -> float:
        """The largest norm of a turn that is finite."""
        return max(filter(math.isfinite, self.numbers[::2]), default=0.0)


def fingerprint(values: np.ndarray, num_leading: int = 0) -> np.ndarray:
    """Returns the norm of an array and its product with random signs.

    Args:
        values: the array.
        num_leading: how many leading dims have a fingerprint for each of their entries.

    Example:
        >>> fingerprint(np.array([3.0, 4.0]))[0].item()
        5.0
    """
    # A complex number counts as two: its real and its imaginary part.
    flat = wide(values.reshape(math.prod(values.shape[:num_leading]), -1)).view(np.float64)
    with np.errstate(all="ignore"):
        if values.dtype.kind not in "iub":
            # Masks are written as huge numbers, next to which rounding would hide all others.
            huge = np.sign(flat) * np.log(np.minimum(np.abs(flat), np.finfo(np.float64).max))
            flat = np.where(np.abs(flat) > _HUGE, huge, flat)
        norms = np.sqrt((flat * flat).sum(-1))
        return np.stack([norms, flat @ _signs(flat.shape[-1])], -1).ravel()


@functools.lru_cache(maxsize=64)
def _signs(count: int) -> np.ndarray:
    # An own hash: NumPy may change what its generators draw.
    index = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (index ^ (index >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return 1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64)


@dataclasses.dataclass(frozen=True)
class RecordedValue:
    """Where a value is computed.

    Args:
        operation: the name of the JAX operation.
        num_dims: how many dims it has.
        layer: the path of the module that computes it, or its named scope.
        loop: the number of the outermost loop around it; -1 if there is none.
        is_backward: whether it belongs to a backward pass, which runs the layers in reverse.
        frames: its source lines in `Recording.places`, the innermost first.
        reads: the values that it is computed from.
    """

    operation: str
    num_dims: int
    layer: str
    loop: int
    is_backward: bool
    frames: Sequence[int]
    reads: Sequence[int]

    @property
    def key(self) -> Hashable:
        """The properties on which two programs agree where they compute the same value."""
        return self.operation, self.num_dims, self.layer


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """The fingerprints of one step.

    Args:
        inputs: of the inputs by name: the batch, and in the first step the state.
        outputs: of the results by name, on the program's own mesh.
        alone: of the results on one device.
        values: of all values, on one device.
    """

    inputs: Mapping[str, Fingerprint]
    outputs: Mapping[str, Fingerprint]
    alone: Mapping[str, Fingerprint]
    values: Sequence[Fingerprint]


@dataclasses.dataclass(frozen=True)
class Recording:
    """The fingerprints of a program over some steps.

    Args:
        name: the name of the program.
        title: its mesh, strategy and precision as text.
        made_by: the versions that made it.
        places: the source lines.
        values: where each value is computed, in the order of the program.
        steps: the fingerprints.
    """

    name: str
    title: str
    made_by: str
    places: tuple[Place, ...]
    values: tuple[RecordedValue, ...]
    steps: Iterable[RecordedStep]

    def save(self, path: str | Path) -> None:
        """Writes it to a JSON file."""
        plain = {"format": _FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(plain, separators=(",", ":")))

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Reads a file.

        Raises:
            ConfigError: when the file is not one that `save` wrote.
        """
        try:
            plain = json.loads(Path(path).read_text())
            if plain.pop("format") != _FORMAT:
                raise KeyError("another format")
            plain["places"] = tuple(Place(**one) for one in plain["places"])
            plain["values"] = tuple(RecordedValue(**one) for one in plain["values"])
            plain["steps"] = tuple(map(_step, plain["steps"]))
            return cls(**plain)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else repr(error)
            raise ConfigError(
                f"[PROVE009] {str(path)!r} holds no fingerprints ({why:.80}); write them anew by "
                f"axon bisect --record {path} A"
            ) from error


def _step(plain: dict[str, Any]) -> RecordedStep:
    values = [Fingerprint(**one) for one in plain.pop("values")]
    named = {
        field: {name: Fingerprint(**one) for name, one in each.items()}
        for field, each in plain.items()
    }
    return RecordedStep(**named, values=values)


def read(
    traced: Traced, state: Sequence[Any], batches: Iterable[Sequence[Any]]
) -> Iterator[tuple[list[Fingerprint], list[Fingerprint]]]:
    """Runs the steps of a traced program; yields the prints of the outputs and of all values.

    Several runs go over all steps, perturbed but for the first. So the bounds
    grow over the steps as the runs diverge, and are those of the dtype in which each value is
    computed.

    Args:
        traced: the program.
        state: its first inputs, which the first outputs of a step replace.
        batches: the other inputs, for each step.

    Raises:
        ConfigError: when its values do not fit in the memory of this machine.
    """
    _check_size(traced.program)
    order = [value for value, _ in _in_order(traced.program, -1)]
    states = [list(state) for _ in range(NOISY_RUNS + 1)]
    for batch in batches:
        runs = [traced.run([*one, *batch], order, noise=n) for n, one in enumerate(states)]
        outputs = [_fingerprint_of(each) for each in zip(*(r[0] for r in runs), strict=True)]
        yield outputs, [_fingerprint_of_value(value, [r[1] for r in runs]) for value in order]
        states = [following(s, r[0]) for s, r in zip(states, runs, strict=True)]


def _fingerprint_of(runs: Sequence[np.ndarray], num_leading: int = 0) -> Fingerprint:
    """Returns the fingerprint of the first run, and its bound from the perturbed ones."""
    prints = [fingerprint(run, num_leading) for run in runs]
    return Fingerprint(prints[0].tolist(), bound_of(prints, dtype=runs[0].dtype))


def _fingerprint_of_value(value: Value, runs: Sequence[Mapping[Value, np.ndarray]]) -> Fingerprint:
    if value not in runs[0]:
        # A value in a branch of a `cond` is not recorded.
        return Fingerprint([])
    arrays = [run[value] for run in runs]
    return _fingerprint_of(arrays, value.num_turns(arrays[0]))


def _in_order(region: Region, loop: int) -> Iterator[tuple[Value, int]]:
    """Yields all values with the outermost loop around each, and those in it before its results."""
    for operation in region.operations:
        inside = operation.number if loop < 0 and operation.turn is not None else loop
        for inner in operation.regions:
            yield from _in_order(inner, inside)
        yield from ((value, loop) for value in operation.results)


def _bytes(region: Region) -> int:
    """Returns the bytes of all values of a region, about, with those of each turn of its loops."""
    total = 0
    for operation in region.operations:
        total += sum(4 * math.prod(value.shape) for value in operation.results)
        times = operation.equation.params.get("length", 1)
        total += sum(times * _bytes(inner) for inner in operation.regions)
    return total


def _check_size(region: Region) -> None:
    need = _bytes(region)
    if need > host_memory() / 4:
        raise ConfigError(
            f"the values of a step have {byte_size(need)}, and this machine has "
            f"{byte_size(host_memory())} of memory for several runs of it; compare a smaller "
            "model, such as by model.num_layers=2 train.global_batch=8",
            code="too-large-to-record",
        )


def described(program: Region) -> tuple[tuple[Place, ...], tuple[RecordedValue, ...]]:
    """Returns the source lines of a program, and where each of its values is computed."""
    order = list(_in_order(program, -1))
    numbers = {value: number for number, (value, _) in enumerate(order)}
    places: dict[Place, int] = {}
    found = []
    for value, loop in order:
        operation = value.maker
        assert operation is not None
        frames = source_frames(operation.equation, operation.callers)[0]
        lines = [places.setdefault(p, len(places)) for p in places_of(frames[:_FRAMES])]
        reads = [numbers[read] for read in operation.reads if read in numbers]
        is_backward = "transpose" in str(operation.equation.source_info.name_stack)
        at = operation.name, len(value.shape), layer_of(operation), loop
        found.append(RecordedValue(*at, is_backward, lines, reads))
    return tuple(places), tuple(found)


def layer_of(operation: Operation) -> str:
    """Returns the path of the module that an operation belongs to; else its named scope."""
    scopes = [str(e.source_info.name_stack) for e in (*operation.callers, operation.equation)]
    paths = re.findall(rf"{LAYER}([\w.]+)", "/".join(scopes))
    return paths[-1] if paths else scopes[-1]


def versions() -> str:
    """Returns the versions that made a recording."""
    from .. import __version__  # noqa: PLC0415

    return f"axon_dist {__version__}, jax {jax.__version__}, numpy {np.__version__}"


def record(subject: Subject, mesh: Any, steps: int = 1) -> Recording:
    """Records a function: its results on a mesh, and all values on one device.

    Args:
        subject: the function with its arguments; shapes are drawn.
        mesh: the mesh, or its sizes.
        steps: the number of steps; leading outputs replace leading arguments of the same shape.
    """
    recording = lazy_recording(subject, mesh, steps)
    return dataclasses.replace(recording, steps=tuple(recording.steps))


def lazy_recording(subject: Subject, mesh: Any, steps: int) -> Recording:
    """Returns a recording whose steps run when they are taken, which they can be once."""
    # Without a step, any two programs would be equal.
    COUNT.check("bisect", "steps", steps)
    sizes = sizes_of(mesh)
    own = alone = subject.on(sizes, mesh)
    if own.mesh.size > 1:
        # A program that is written for one mesh has only the values of its ranks.
        with contextlib.suppress(Exception):
            found = subject.on(dict.fromkeys(sizes, 1), mesh)
            alone = found if found.names == own.names else own
    title = f"on {own.title}"
    ran = _steps(own, alone, steps)
    return Recording(subject.name, title, versions(), *described(alone.program), ran)


def _steps(own: Traced, alone: Traced, steps: int) -> Iterator[RecordedStep]:
    inputs = draws_of(own.leaves, 1)[0]
    given = {
        f"argument {n}": _fingerprint_of([np.asarray(plain(x))] * 2) for n, x in enumerate(inputs)
    }
    for number, (prints, values) in enumerate(read(alone, inputs, [[]] * steps)):
        outputs = results = dict(zip(own.names, prints, strict=True))
        if own is not alone:
            step, _ = own.run(inputs)
            outputs = {
                name: dataclasses.replace(results[name], numbers=fingerprint(x).tolist())
                for name, x in zip(own.names, step, strict=True)
            }
            inputs = following(inputs, step)
        yield RecordedStep({} if number else given, outputs, results, values)


def following(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs of the next step: leading outputs replace inputs of the same shape."""
    new = list(inputs)
    for number, (old, output) in enumerate(zip(inputs, outputs, strict=False)):
        if np.shape(plain(old)) != np.shape(output) or plain(old).dtype != output.dtype:
            break
        impl = jax.random.key_impl(old) if is_key(old) else None
        new[number] = output if impl is None else jax.random.wrap_key_data(output, impl=impl)
    return new
