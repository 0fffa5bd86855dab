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
from .check import places_of
from .inputs import draws_of
from .locate import Recorded, Search, align
from .meshes import find_mesh, sizes_of
from .program import Operation, Value, is_key, plain
from .report import Place, finite
from .runs import Perturbed, Run
from .trace import Subject, Traced, subject_of


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
        note: what is known where no operation was found.
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
    note: str = ""

    @property
    def place(self) -> Place | None:
        """The source line of the operation."""
        return self.places[0] if self.places else None

    def __str__(self) -> str:
        """Describes the divergence in a sentence, with its source line."""
        runs = f"{self.runs} run{'s' * (self.runs != 1)}"
        ran = f"({self.operations} operations compared, in {runs})"
        if self.ok:
            return f"equal but for rounding {ran}"
        where = f"{self.place}: " if self.place else ""
        outputs = ", ".join(self.outputs[:3])
        if not self.operation:
            note = self.note or "no operation was found"
            return f"{outputs} differ in step {self.step}; {note} {ran}"
        gap = "" if math.isinf(self.difference) else f" by {self.difference:.3g}"
        text = f"{where}the programs part at {self.operation} in step {self.step}{gap}; rounding "
        text += f"explains {self.bound:.1g} {ran}\n"
        text += self.place.text() if self.place else ""
        layer = f"    {self.layer}, " if self.layer else "    "
        return f"{text}{layer}the {_ordinal(self.time)} time that this line runs"

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
    meshes = paired(mesh or find_mesh(one), other_mesh or find_mesh(other))
    sides = (subject_of(one, arguments), subject_of(other, arguments))
    return bisect_subjects(*sides, *meshes, steps)


def paired(mesh: Any, other_mesh: Any) -> tuple[Any, Any]:
    """Returns two meshes, if known; an unknown one is like the other, or has one device."""
    none = {"device": 1}
    return mesh or other_mesh or none, other_mesh or mesh or none


def bisect_subjects(
    subject: Subject, other_subject: Subject, mesh: Any, other_mesh: Any, steps: int = 1
) -> Parting:
    """Does the work of `bisect` for two functions with their arguments, each on its mesh."""
    first, second = traced_on(subject, mesh), traced_on(other_subject, other_mesh)
    return _Bisection(Perturbed(first), second, draws_of(first.leaves, 1)[0], steps).run()


def traced_on(subject: Subject, mesh: Any) -> Traced:
    """Traces a function on a mesh, or on one of the given sizes."""
    return subject.on(sizes_of(mesh), mesh if isinstance(mesh, jax.sharding.Mesh) else None)


class _Bisection:
    """Two programs, their inputs, and the number of runs made."""

    def __init__(self, one: Perturbed, other: Traced, inputs: list[Any], steps: int) -> None:
        self._one = one
        self._other = other
        self._inputs = inputs
        self._steps = steps
        self._aligned = align(other.program, one.traced.program)
        self._runs = 0
        self._scale = self._coarseness()
        self._compiled: dict[Any, Any] = {}

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
        inputs = list(self._inputs)
        for step in range(1, self._steps + 1):
            truth, outputs, search = self._record(inputs, {})
            wrong = self._wrong(outputs, truth)
            if wrong:
                return self._within(step, inputs, wrong, count, search)
            # Rounding errors accumulate over steps, so each step is compared from the same state.
            inputs = following(inputs, truth.outputs)
        return Parting(True, runs=self._runs, operations=count)

    def _wrong(self, got: Sequence[np.ndarray], truth: Run) -> list[int]:
        wanted = truth.outputs
        pairs = enumerate(zip(got, wanted, truth.output_bounds, strict=False))
        wrong = [number for number, (a, b, bound) in pairs if relations.differs(a, b, bound)]
        counts = len(got), len(wanted)
        return wrong if wrong or counts[0] == counts[1] else [min(counts) - 1]

    def _within(
        self, step: int, inputs: list[Any], wrong: list[int], count: int, search: Search
    ) -> Parting:
        names = tuple(self._other.names[number] for number in wrong)
        blamed = self._blamed(search, wrong)
        turns: dict[Operation, int] = {}
        while blamed is not None and blamed.name == "scan" and blamed not in turns:
            # All of the recorded first turn is right, so a later turn must be wrong.
            turns[blamed] = self._turn(blamed, inputs)
            deeper = self._record(inputs, turns)[2]
            inner = self._blamed(deeper, wrong)
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
            _, _, search = self._record(inputs, {loop: middle})
            turn = loop.turn
            outputs = [v for v in (turn.outputs if turn else []) if isinstance(v, Value)]
            if any(search.relation(value) is None for value in outputs):
                high = middle
            else:
                low = middle + 1
        return low

    def _blamed(self, search: Search, wrong: list[int]) -> Operation | None:
        starts = [search.start(self._other.program.region.outputs[number]) for number in wrong]
        starts = [start for start in starts if start is not None]
        return min(starts, key=lambda o: o.number, default=None)

    def _record(
        self, inputs: list[Any], turns: Mapping[Operation, int]
    ) -> tuple[Run, list[np.ndarray], Search]:
        """Runs both programs and records all values, loops at the given turns."""
        self._runs += 1
        aligned, other = self._aligned, self._other
        turns_of_one = {aligned[o].number: turn for o, turn in turns.items() if o in aligned}
        truth = self._one.run(inputs, turns=turns_of_one, scale=self._scale)
        key = frozenset(turns.items())
        if key not in self._compiled:
            numbered = {operation.number: turn for operation, turn in turns.items()}
            all_values = frozenset(other.program.values())
            self._compiled[key] = other.compiled(all_values, False, numbered)
        outputs, values = self._compiled[key](inputs)
        search = Search(
            Recorded(other.program, values),
            Recorded(self._one.traced.program, truth.values),
            truth.bounds,
            other.sizes,
            aligned,
        )
        return truth, outputs, search


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


def following(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Returns the inputs of the next step: leading outputs replace inputs of the same shape."""
    new = list(inputs)
    for number, (old, output) in enumerate(zip(inputs, outputs, strict=False)):
        if np.shape(plain(old)) != np.shape(output) or plain(old).dtype != output.dtype:
            break
        impl = jax.random.key_impl(old) if is_key(old) else None
        new[number] = output if impl is None else jax.random.wrap_key_data(output, impl=impl)
    return new
