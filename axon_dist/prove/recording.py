"""Fingerprints of a program's values over some steps, in a file, to compare two environments.

A fingerprint is the norm of a value and its product with an array of random signs. With those of
every value, and with the change of each that rounding explains, two programs are compared that
cannot run in one process: versions of JAX in two virtual environments. Two configs that should be
equal are compared by their results on their own meshes, and located by a reading on one device,
where they have the same form whatever their strategies are.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..core.compat import source_frames
from ..core.errors import ConfigError
from ..core.files import host_memory
from .check import places_of
from .inputs import draws_of
from .locate import matched
from .parting import Parting, following, traced_on
from .program import EXACT, Operation, Region, Value, plain, reads_of
from .relations import NOISY_RUNS, bound_of, differs
from .report import Place
from .trace import Subject, Traced

_FORMAT = 1
_DIGITS = 9
_FRAMES = 4
"""How many source lines of an operation's call stack are kept."""

LAYER = "@"
"""A named scope that begins with this is the path of a module."""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The norm of a value and its product with random signs, for each turn of the loops around it.

    Args:
        numbers: the norm and the product of each turn, one after the other.
        bound: by how much rounding may change them.
    """

    numbers: tuple[float, ...]
    bound: float = 0.0

    def gap(self, other: Fingerprint) -> tuple[float, float, int] | None:
        """Returns the difference, its bound and the first turn that differs; None if it is equal.

        Values of other loops or ranks have no common fingerprint, and count as equal.
        """
        if len(self.numbers) != len(other.numbers):
            return None
        bound = self.bound + other.bound
        here, there = (np.asarray(one.numbers).reshape(-1, 2) for one in (self, other))
        gaps = [differs(a, b, bound) for a, b in zip(here, there, strict=True)]
        if not any(gaps):
            return None
        return max(gaps), bound, next(turn for turn, gap in enumerate(gaps) if gap)

    @classmethod
    def of(cls, numbers: np.ndarray, bound: float = 0.0) -> Fingerprint:
        """Rounds to the digits that a file has, so that one from a file is equal."""
        return cls(tuple(_round(x) for x in numbers.tolist()), _round(bound))

    @property
    def norm(self) -> float:
        """The largest norm of a turn."""
        return max(self.numbers[::2], default=0.0)


def fingerprint(values: np.ndarray, num_leading: int = 0) -> np.ndarray:
    """Returns the norm of an array and its product with random signs.

    Args:
        values: the array.
        num_leading: how many leading dims have a fingerprint for each of their entries.

    Example:
        >>> fingerprint(np.array([3.0, 4.0]))[0].item()
        5.0
    """
    flat = values.reshape(math.prod(values.shape[:num_leading]), -1).astype(np.float64)
    with np.errstate(all="ignore"):
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
        frames: its source lines in `Recording.places`, the innermost first.
        reads: the values that it is computed from.
    """

    operation: str
    num_dims: int
    layer: str
    loop: int
    frames: tuple[int, ...]
    reads: tuple[int, ...]

    @property
    def key(self) -> Hashable:
        """What two programs must agree on where they compute the same value."""
        return self.operation, self.num_dims, self.layer


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """The fingerprints of one step.

    Args:
        inputs: of the inputs by name: the batch, and in the first step the state.
        outputs: of the results by name, on the program's own mesh.
        alone: of the results on one device; empty if that is the program's own mesh.
        values: of all values, on one device if there is such a reading.
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
    steps: tuple[RecordedStep, ...]

    def save(self, path: str | Path) -> None:
        """Writes it to a JSON file."""
        plain = {"format": _FORMAT, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(_rounded(plain), separators=(",", ":")))

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
            plain["values"] = tuple(
                dataclasses.replace(v, frames=tuple(v.frames), reads=tuple(v.reads))
                for v in plain["values"]
            )
            plain["steps"] = tuple(_step(one) for one in plain["steps"])
            return cls(**plain)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else repr(error)
            raise ConfigError(
                f"[PROVE009] {str(path)!r} holds no fingerprints ({why:.80}); write them anew by "
                f"axon bisect --record {path} A"
            ) from error


def _step(plain: Mapping[str, Any]) -> RecordedStep:
    def read(one: Mapping[str, Any]) -> Fingerprint:
        return Fingerprint(tuple(one["numbers"]), one["bound"])

    def named(name: str) -> dict[str, Fingerprint]:
        return {key: read(one) for key, one in plain[name].items()}

    values = [read(one) for one in plain["values"]]
    return RecordedStep(named("inputs"), named("outputs"), named("alone"), values)


def _round(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def _rounded(plain: Any) -> Any:
    if isinstance(plain, float):
        return _round(plain)
    if isinstance(plain, dict):
        return {key: _rounded(value) for key, value in plain.items()}
    return [_rounded(one) for one in plain] if isinstance(plain, (list, tuple)) else plain


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """A traced program with the fingerprints of all its values in each step.

    Args:
        places: the source lines.
        values: where each value is computed.
        outputs: the fingerprints of the outputs in each step.
        prints: the fingerprints of the values in each step.
    """

    places: tuple[Place, ...]
    values: tuple[RecordedValue, ...]
    outputs: list[list[Fingerprint]]
    prints: list[list[Fingerprint]]


def read(traced: Traced, state: Sequence[Any], batches: Sequence[Sequence[Any]]) -> Reading:
    """Runs a traced program and records all its values.

    Several runs go over all steps, perturbed but for the first. So what rounding explains grows
    over the steps as the runs diverge, and is that of the dtype in which each value is computed.

    Args:
        traced: the program.
        state: its first inputs, which the first outputs of a step replace.
        batches: the other inputs, for each step.

    Raises:
        ConfigError: when its values do not fit in the memory of this machine.
    """
    order = list(_in_order(traced.program.region, -1))
    _check_size(traced.program.region)
    run = traced.compiled(frozenset(v for v, _ in order), with_noise=True, all_turns=True)
    states = [list(state) for _ in range(NOISY_RUNS + 1)]
    outputs: list[list[Fingerprint]] = []
    prints: list[list[Fingerprint]] = []
    for batch in batches:
        runs = [run([*one, *batch], n, float(n > 0)) for n, one in enumerate(states)]
        outputs.append([_print(each) for each in zip(*(r[0] for r in runs), strict=True)])
        prints.append([_print_of(value, [r[1] for r in runs]) for value, _ in order])
        states = [following(s, r[0]) for s, r in zip(states, runs, strict=True)]
    places, recorded = _described(order)
    return Reading(places, recorded, outputs, prints)


def _print(runs: Sequence[np.ndarray], num_leading: int = 0) -> Fingerprint:
    """Returns the fingerprint of the first run, and its bound from the perturbed ones."""
    prints = [fingerprint(run, num_leading) for run in runs]
    return Fingerprint.of(prints[0], bound_of(prints, dtype=runs[0].dtype))


def _print_of(value: Value, runs: Sequence[Mapping[Value, np.ndarray]]) -> Fingerprint:
    if value not in runs[0]:
        # A value in a branch of a `cond` is not recorded.
        return Fingerprint(())
    arrays = [run[value] for run in runs]
    return _print(arrays, max(0, arrays[0].ndim - len(value.shape)))


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
            f"the values of a step have {need / 1e9:.3g} GB, and this machine has "
            f"{host_memory() / 1e9:.3g} GB of memory for several runs of it; compare a smaller "
            "model, such as by model.num_layers=2 train.global_batch=8",
            code="too-large-to-record",
        )


def _described(
    order: Sequence[tuple[Value, int]],
) -> tuple[tuple[Place, ...], tuple[RecordedValue, ...]]:
    numbers = {value: number for number, (value, _) in enumerate(order)}
    places: dict[Place, int] = {}
    known: dict[Operation, tuple[str, tuple[int, ...], tuple[int, ...]]] = {}
    found = []
    for value, loop in order:
        operation = value.maker
        assert operation is not None
        if operation not in known:
            frames = source_frames(operation.equation, operation.callers)[0]
            lines = [places.setdefault(p, len(places)) for p in places_of(frames[:_FRAMES])]
            reads = [numbers[read] for read in reads_of(operation.reads) if read in numbers]
            known[operation] = layer_of(operation), tuple(lines), tuple(reads)
        layer, frames, reads = known[operation]
        found.append(RecordedValue(operation.name, len(value.shape), layer, loop, frames, reads))
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
    """Records a function on a mesh.

    Args:
        subject: the function with its arguments; shapes are drawn.
        mesh: the mesh, or its sizes.
        steps: the number of steps; leading outputs replace leading arguments of the same shape.
    """
    traced = traced_on(subject, mesh)
    inputs = draws_of(traced.leaves, 1)[0]
    reading = read(traced, inputs, [[]] * steps)
    given = {f"argument {n}": _print([np.asarray(plain(x))] * 2) for n, x in enumerate(inputs)}
    return Recording(
        subject.name, f"on {traced.title}", versions(), reading.places, reading.values,
        tuple(
            RecordedStep({} if step else given, dict(zip(traced.names, now, strict=True)), {}, each)
            for step, (now, each) in enumerate(zip(reading.outputs, reading.prints, strict=True))
        ),
    )  # fmt: skip


def compare(one: Recording, other: Recording) -> Parting:
    """Finds the first step at which two recorded programs diverge, and in it the first operation.

    The results of their steps are compared first. Where these differ, the values of that step name
    the first operation that differs. If both agree on one device, it is a strategy that is wrong.

    Args:
        one: the recording of a program.
        other: that of one that should equal it.

    Raises:
        ConfigError: when they have no results in common.
    """
    pairs = matched([v.key for v in one.values], [v.key for v in other.values])
    for number, (first, second) in enumerate(zip(one.steps, other.steps, strict=False), 1):
        for what in ("inputs", "outputs"):
            here, there = getattr(first, what), getattr(second, what)
            names = tuple(_differing(here, there))
            found = Parting(False, names, number, runs=number, operations=len(one.values))
            if names and what == "inputs":
                return dataclasses.replace(found, note="these are inputs of the step")
            if names:
                return _located(found, one, other, pairs)
    return Parting(True, operations=len(one.values), runs=len(one.steps))


def _located(
    found: Parting, one: Recording, other: Recording, pairs: Sequence[tuple[int, int]]
) -> Parting:
    """Adds the first operation that differs in a step, or what is known where none does."""
    first, second = one.steps[found.step - 1], other.steps[found.step - 1]
    each = {(a, b): first.values[a].gap(second.values[b]) for a, b in pairs}
    gaps = {pair: gap for pair, gap in each.items() if gap is not None}
    if not gaps or (first.alone and not _differing(first.alone, second.alone)):
        return dataclasses.replace(found, note=_of_strategies(one, other, found.step))
    at = min(gaps)
    loop = one.values[at[0]].loop
    if loop >= 0:
        # All turns of a loop are recorded, and an early turn runs before the later lines of it.
        inside = [pair for pair in gaps if one.values[pair[0]].loop == loop]
        at = min(inside, key=lambda pair: (gaps[pair][2], pair))
    gap, bound, turn = gaps[at]
    value, place_of, number = one.values[at[0]], one.places, at[0]
    for side, recording, known in (
        (0, one, {a for a, _ in pairs}),
        (1, other, {b for _, b in pairs}),
    ):
        extra = _only_here(recording.values, at[side], known)
        if extra is not None:
            value, place_of, number = recording.values[extra], recording.places, extra
    layer = [value.layer] if value.layer else []
    layer += [f"turn {turn + 1} of the loop"] if loop >= 0 and turn else []
    before = (one if place_of is one.places else other).values[: number + 1]
    same = [v for v in before if (v.operation, v.frames) == (value.operation, value.frames)]
    return dataclasses.replace(
        found, operation=value.operation, places=tuple(place_of[n] for n in value.frames),
        layer=", ".join(layer), time=len(same), difference=gap, bound=bound,
    )  # fmt: skip


def _only_here(values: Sequence[RecordedValue], start: int, known: Collection[int]) -> int | None:
    """Returns the first operation that only this program has, on the way to a value; or None."""
    found = None
    waiting = list(values[start].reads)
    while waiting:
        number = waiting.pop()
        if number in known:
            continue
        if values[number].operation not in EXACT | {"convert_element_type"}:
            found = number if found is None else min(found, number)
        waiting += values[number].reads
    return found


def _of_strategies(one: Recording, other: Recording, step: int) -> str:
    """Says which program differs from its own reading on one device."""
    if not one.steps[step - 1].alone:
        return "no operation that both have differs"
    pairs = [(r, r.steps[step - 1]) for r in (one, other)]
    wrong = [r.title for r, now in pairs if _differing(now.outputs, now.alone)]
    text = "on one device both are equal"
    if len(wrong) == 1:
        return f"{text}, and {wrong[0]} differs from that"
    return text


def _differing(one: Mapping[str, Fingerprint], other: Mapping[str, Fingerprint]) -> list[str]:
    """Returns the names whose fingerprints differ, the largest relative difference first."""
    gaps: dict[str, float] = {name: math.inf for name in one.keys() ^ other.keys()}
    for name in one.keys() & other.keys():
        found = one[name].gap(other[name])
        if len(one[name].numbers) != len(other[name].numbers):
            gaps[name] = math.inf
        elif found is not None:
            gaps[name] = found[0] / max(one[name].norm, 1e-30)
    return sorted(gaps, key=lambda name: (-gaps[name], name))
