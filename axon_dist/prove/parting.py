"""Finds where two programs that should be equal diverge: the first step and its first operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import relations
from .check import bound_of, places_of
from .inputs import draws_of
from .locate import Recorded, Search, align
from .meshes import find_mesh, sizes_of
from .program import Operation, Value
from .report import Place, finite
from .trace import Subject, Traced, subject_of

_NOISY = 3


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where two programs diverge.

    Args:
        ok: whether they are equal up to rounding.
        outputs: the outputs that differ.
        step: the first step after which they differ, from 1; 0 if they never do.
        operation: the first JAX operation whose results differ; empty where an input of the step
            differs or none was found.
        places: its source lines, the innermost first.
        layer: its named scope, or the turn of its loop.
        time: which call of the outermost repeated line contains it, from 1. For layers in a Python
            loop, this is the number of the layer.
        difference: by how much its result differs.
        bound: how much of that rounding explains.
        runs: how often a step of both programs ran to find it, without runs that measure rounding.
        operations: how many operations a step has.
    """

    ok: bool
    outputs: tuple[str, ...] = ()
    step: int = 0
    operation: str = ""
    places: tuple[Place, ...] = ()
    layer: str = ""
    time: int = 0
    difference: float = 0.0
    bound: float = 0.0
    runs: int = 0
    operations: int = 0

    @property
    def place(self) -> Place | None:
        """The source line of the operation."""
        return self.places[0] if self.places else None

    def __str__(self) -> str:
        """Describes the divergence in a sentence, with its source line."""
        ran = f"({self.runs} runs of {self.operations} operations)"
        if self.ok:
            return f"equal but for rounding {ran}"
        where = f"{self.place}: " if self.place else ""
        outputs = ", ".join(self.outputs[:3])
        if not self.operation:
            return f"{outputs} differ after step {self.step}; no operation was found {ran}"
        gap = "" if math.isinf(self.difference) else f" by {self.difference:.3g}"
        text = f"{where}the programs part at {self.operation} in step {self.step}{gap}; rounding "
        text += f"explains {self.bound:.1g} {ran}\n"
        text += self.place.text() if self.place else ""
        layer = f"    {self.layer}, " if self.layer else "    "
        return f"{text}{layer}in the {_ordinal(self.time)} call of the line that repeats"

    def as_json(self) -> dict[str, Any]:
        """Returns the result as plain data."""
        return finite(dataclasses.asdict(self))


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ends.get(number % 10, 'th')}"


def bisect(
    one: Any,
    other: Any,
    *arguments: Any,
    mesh: Any = None,
    other_mesh: Any = None,
    steps: int = 1,
) -> Parting:
    """Finds the first step, and its first operation, at which two programs diverge.

    Args:
        one: a function, in any of the forms that `prove` accepts.
        other: a function that should equal it: another strategy, another version, or the same one
            on another mesh. If it computes in lower precision, that sets the rounding bound.
        *arguments: the arguments of both: arrays, or shapes to draw at random.
        mesh: the mesh of the first; by default the one in its closure.
        other_mesh: the mesh of the other; by default its own, or that of the first.
        steps: how many steps are compared. Leading outputs with the shapes of the leading arguments
            replace these in the next step.

    Returns:
        Where they diverge.

    Example:
        >>> def old(x):
        ...     return jnp.tanh(x) * 2.0
        >>> def new(x):
        ...     return jnp.tanh(x) * 2.5
        >>> bisect(old, new, np.ones(3, np.float32)).operation
        'mul'
    """
    subject, other_subject = subject_of(one, arguments), subject_of(other, arguments)
    return bisect_subjects(subject, other_subject, *_meshes(one, other, mesh, other_mesh), steps)


def _meshes(one: Any, other: Any, mesh: Any, other_mesh: Any) -> tuple[Any, Any]:
    first = mesh or find_mesh(one)
    second = other_mesh or find_mesh(other)
    none = {"device": 1}
    return first or second or none, second or first or none


def bisect_subjects(
    subject: Subject, other_subject: Subject, mesh: Any, other_mesh: Any, steps: int = 1
) -> Parting:
    """Does the work of `bisect` for two functions with their arguments, each on its mesh."""
    like = [m if isinstance(m, jax.sharding.Mesh) else None for m in (mesh, other_mesh)]
    first = subject.on(sizes_of(mesh), like[0])
    second = other_subject.on(sizes_of(other_mesh), like[1])
    inputs = draws_of(first.leaves, 1)[0]
    return _Bisection(first, second, inputs, steps).run()


class _Bisection:
    """Two traced programs, their inputs, and the number of runs made."""

    def __init__(self, one: Traced, other: Traced, inputs: list[Any], steps: int) -> None:
        self._one = one
        self._other = other
        self._inputs = inputs
        self._steps = steps
        self._aligned = align(other.program, one.program)
        self._runs = 0
        self._scale = self._coarseness()
        self._compiled: dict[Any, tuple[Any, Any]] = {}

    def _coarseness(self) -> float:
        """Returns the other program's unit in the last place in units of the first program."""
        most = 1.0
        for operation, known in self._aligned.items():
            for a, b in zip(operation.results, known.results, strict=False):
                kinds = [getattr(v.aval, "dtype", None) for v in (a, b)]
                if all(k is not None and jnp.issubdtype(k, jnp.floating) for k in kinds):
                    ends = [float(jnp.finfo(kind).eps) for kind in kinds]
                    most = max(most, ends[0] / ends[1])
        return most

    def run(self) -> Parting:
        """Compares step by step, then within the first step that differs."""
        count = len(self._other.program.operations)
        run_one, run_other = self._recording({})
        inputs, own = list(self._inputs), list(self._inputs)
        for step in range(1, self._steps + 1):
            runs = [run_one(inputs, n, self._scale * (n > 0))[0] for n in range(_NOISY + 1)]
            bounds = [bound_of(each, self._scale) for each in zip(*runs, strict=True)]
            got, _ = run_other(own)
            wrong = self._wrong(got, runs[0], bounds)
            if wrong:
                self._runs += 1
                return self._within(step, inputs, wrong, count)
            # Rounding errors accumulate over steps, so each step is compared from the same state.
            inputs = own = _next(inputs, runs[0])
        return Parting(True, runs=1, operations=count)

    def _wrong(
        self, got: Sequence[np.ndarray], truth: Sequence[np.ndarray], bounds: Sequence[float]
    ) -> list[int]:
        pairs = enumerate(zip(got, truth, bounds, strict=False))
        wrong = [number for number, (a, b, bound) in pairs if relations.differs(a, b, bound)]
        return wrong if wrong or len(got) == len(truth) else [min(len(got), len(truth)) - 1]

    def _within(self, step: int, inputs: list[Any], wrong: list[int], count: int) -> Parting:
        names = tuple(self._other.names[number] for number in wrong)
        blamed, search = self._blamed(inputs, wrong, {})
        turns: dict[Operation, int] = {}
        while blamed is not None and blamed.name == "scan" and blamed not in turns:
            # All of the recorded first turn is right, so a later turn must be wrong.
            turns[blamed] = self._turn(blamed, inputs)
            inner, deeper = self._blamed(inputs, wrong, turns)
            if inner is None or inner is blamed:
                break
            blamed, search = inner, deeper
        if blamed is None:
            return Parting(False, names, step, runs=self._runs, operations=count)
        found = search.found_at(blamed)
        layer = str(blamed.equation.source_info.name_stack)
        inside = [turn for loop, turn in turns.items() if loop.turn and _is_in(blamed, loop)]
        if inside:
            layer = f"{layer + ', ' if layer else ''}turn {inside[-1] + 1} of the loop"
        places = places_of(found.frames)
        ordinal = self._ordinal(blamed, search) + sum(inside)
        gap, bound = found.gap
        return Parting(
            False, names, step, blamed.name, places, layer, ordinal, gap, bound, self._runs, count
        )

    def _ordinal(self, blamed: Operation, search: Search) -> int:
        """Returns which call of a repeated line contains the operation, from 1.

        The line is the outermost one of the call stack that runs more than once: for layers in a
        Python loop, the call of the layer. The first operation of that line is counted, because the
        differing one may occur in one layer only.
        """
        forward = [o for o in self._other.program.operations if not _is_transposed(o)]
        stacks = {o: tuple(search.lines_of(o)) for o in forward}
        lines = search.lines_of(blamed)
        for depth in range(1, len(lines) + 1):
            outer = tuple(lines[-depth:])
            inside = [o for o in forward if stacks[o][-depth:] == outer]
            if not inside:
                continue
            first = inside[0]
            same = [o for o in inside if (o.name, stacks[o]) == (first.name, stacks[first])]
            if len(same) > 1:
                return max(1, sum(o.number <= blamed.number for o in same))
        return 1

    def _turn(self, loop: Operation, inputs: list[Any]) -> int:
        """Returns the first turn of a loop after which the values differ, by bisection."""
        low = 0
        high = int(loop.equation.params["length"]) - 1
        while low < high:
            middle = (low + high) // 2
            _, search = self._record(inputs, {loop: middle})
            turn = loop.turn
            outputs = [v for v in (turn.outputs if turn else []) if isinstance(v, Value)]
            if any(search.relation(value) is None for value in outputs):
                high = middle
            else:
                low = middle + 1
        return low

    def _blamed(
        self, inputs: list[Any], wrong: list[int], turns: Mapping[Operation, int]
    ) -> tuple[Operation | None, Search]:
        _, search = self._record(inputs, turns)
        starts = [search.start(self._other.program.region.outputs[number]) for number in wrong]
        starts = [start for start in starts if start is not None]
        return min(starts, key=lambda o: o.number, default=None), search

    def _recording(self, turns: Mapping[Operation, int]) -> tuple[Any, Any]:
        """Compiles both programs to record all values, loops at the given turns.

        Compilation takes most of the time, so the programs that compare steps are reused inside the
        first differing step.
        """
        key = frozenset(turns.items())
        if key not in self._compiled:
            aligned = self._aligned
            one = self._one.program
            other = self._other.program
            turns_of_one = {aligned[o].number: turn for o, turn in turns.items() if o in aligned}
            turns_of_other = {operation.number: turn for operation, turn in turns.items()}
            self._compiled[key] = (
                self._one.compiled(frozenset(one.values()), True, turns_of_one),
                self._other.compiled(frozenset(other.values()), False, turns_of_other),
            )
        return self._compiled[key]

    def _record(self, inputs: list[Any], turns: Mapping[Operation, int]) -> tuple[None, Search]:
        """Runs both programs and records all values, loops at the given turns."""
        self._runs += 1
        one, other = self._one, self._other
        run_one, run_other = self._recording(turns)
        noisy = range(_NOISY + 1)
        runs = [run_one(inputs, n, self._scale * (n > 0))[1] for n in noisy]
        bounds = {v: bound_of([run[v] for run in runs], self._scale) for v in runs[0]}
        _, values = run_other(inputs)
        search = Search(
            Recorded(other.program, values),
            Recorded(one.program, runs[0]),
            bounds,
            other.sizes,
            self._aligned,
        )
        return None, search


def _is_transposed(operation: Operation) -> bool:
    """Whether an operation belongs to the backward pass, which runs the layers in reverse."""
    return "transpose" in str(operation.equation.source_info.name_stack)


def _is_in(operation: Operation, loop: Operation) -> bool:
    regions = list(loop.regions)
    while regions:
        region = regions.pop()
        if operation in region.operations:
            return True
        regions += [inner for o in region.operations for inner in o.regions]
    return False


def _next(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs of the next step: leading outputs replace inputs of the same shape."""
    following = list(inputs)
    for number, (old, new) in enumerate(zip(inputs, outputs, strict=False)):
        if np.shape(old) != np.shape(new) or old.dtype != new.dtype:
            break
        following[number] = new
    return following
