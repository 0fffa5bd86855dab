"""Where two programs part that should be equal: the first step, and in it the first operation."""

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
    """Where two programs part.

    Args:
        ok: whether they are equal but for rounding.
        outputs: the outputs that differ.
        step: the first step after which they do, from 1; 0 where none does.
        operation: the first JAX operation whose results differ; empty where an input of the step
            differs or none was found.
        places: its lines, the innermost first.
        layer: the named scope that it stands in, or the turn of its loop.
        time: which call of the outermost repeated line it stands in, from 1: of layers written in
            a loop of Python the number of the layer.
        difference: by how much its result differs.
        bound: how much of that rounding explains.
        runs: how often a step of both programs ran to find it, but for runs that measure rounding.
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
        """The line of the operation."""
        return self.places[0] if self.places else None

    def __str__(self) -> str:
        """A sentence with the line."""
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
        """What was found as plain data."""
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
    """Finds the first step, and the first operation of it, at which two programs part.

    Args:
        one: a function, in any of the forms that `prove` takes.
        other: one that should be equal to it: another strategy, another version, or the same on
            another mesh. Where it computes in fewer bits, these bound what rounding explains.
        *arguments: of both: arrays, or shapes to draw at random.
        mesh: the mesh of the first; by default the one that it closes over.
        other_mesh: the mesh of the other; by default its own, or that of the first.
        steps: how many steps are compared. The outputs of a step that have the shapes of the first
            arguments take their place in the next.

    Returns:
        Where they part.

    Example:
        >>> def old(x):
        ...     return jnp.tanh(x) * 2.0
        >>> def new(x):
        ...     return jnp.tanh(x) * 2.5
        >>> bisect(old, new, np.ones(3, np.float32)).operation
        'mul'
    """
    mine, theirs = subject_of(one, arguments), subject_of(other, arguments)
    return bisect_subjects(mine, theirs, *_meshes(one, other, mesh, other_mesh), steps)


def _meshes(one: Any, other: Any, mesh: Any, other_mesh: Any) -> tuple[Any, Any]:
    mine, theirs = mesh or find_mesh(one), other_mesh or find_mesh(other)
    none = {"device": 1}
    return mine or theirs or none, theirs or mine or none


def bisect_subjects(
    mine: Subject, theirs: Subject, mesh: Any, other_mesh: Any, steps: int = 1
) -> Parting:
    """`bisect` of functions with their arguments, each on its mesh."""
    like = [m if isinstance(m, jax.sharding.Mesh) else None for m in (mesh, other_mesh)]
    first = mine.on(sizes_of(mesh), like[0])
    second = theirs.on(sizes_of(other_mesh), like[1])
    inputs = draws_of(mine.leaves(first.mesh), 1)[0]
    return _Bisection(first, second, inputs, steps).run()


class _Bisection:
    """Two traced programs, their inputs, and the runs that were made."""

    def __init__(self, one: Traced, other: Traced, inputs: list[Any], steps: int) -> None:
        self._one, self._other, self._inputs, self._steps = one, other, inputs, steps
        self._aligned = align(other.program, one.program)
        self._runs = 0
        self._scale = self._coarseness()
        self._compiled: dict[Any, tuple[Any, Any]] = {}

    def _coarseness(self) -> float:
        """How many units in the last place of the first program one of the other is."""
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
            # Rounding adds up over steps; each is compared from the same state.
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
            # All of the first turn is right: a later one is not.
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
        """Which call of a repeated line the operation stands in, from 1.

        The line is the outermost of the call stack that runs more than once: of layers written
        in a loop of Python the call of the layer. The first operation that the line makes is
        counted, for the one that differs may stand in one layer only.
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
        """The first turn of a loop after which the values differ, by halving."""
        low, high = 0, int(loop.equation.params["length"]) - 1
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
        """Both programs compiled to record all values, the loops at some turns.

        Compiling takes most of the time, so what compares the steps is used again within one.
        """
        key = frozenset(turns.items())
        if key not in self._compiled:
            aligned, one, other = self._aligned, self._one.program, self._other.program
            mine = {aligned[o].number: turn for o, turn in turns.items() if o in aligned}
            theirs = {operation.number: turn for operation, turn in turns.items()}
            self._compiled[key] = (
                self._one.compiled(frozenset(one.values()), True, mine),
                self._other.compiled(frozenset(other.values()), False, theirs),
            )
        return self._compiled[key]

    def _record(self, inputs: list[Any], turns: Mapping[Operation, int]) -> tuple[None, Search]:
        """Both programs with all values, the loops at the turns that are asked for."""
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
    """The inputs of the next step: leading outputs take the place of inputs of their shape."""
    following = list(inputs)
    for number, (old, new) in enumerate(zip(inputs, outputs, strict=False)):
        if np.shape(old) != np.shape(new) or old.dtype != new.dtype:
            break
        following[number] = new
    return following
