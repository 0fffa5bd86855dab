"""Finds where two programs that should be equal diverge: the first step and its first operation.

Both are recorded: their results on their own meshes, and all values on one device, where they have
the same form whatever their meshes and strategies are. The results of the steps are compared first.
Where these differ, the values of that step name the first operation that differs. Where both agree
on one device, it is the mesh that changes a result, and `prove` finds the line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from .check import prove_subject
from .locate import matched
from .meshes import find_mesh, mesh_of_other
from .program import EXACT
from .recording import Fingerprint, RecordedStep, RecordedValue, Recording, lazy_recording
from .report import Place, finite
from .trace import Subject, subject_of

ONE_DEVICE = {"device": 1}
"""The mesh of a program that has none."""


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
        note: a further fact, or the reason why no operation is named.
        titles: the mesh of each program; for a config also its strategy and precision.
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
    titles: tuple[str, ...] = ()

    @property
    def place(self) -> Place | None:
        """The source line of the operation."""
        return self.places[0] if self.places else None

    def __str__(self) -> str:
        """Describes the divergence in a sentence, with its source line."""
        runs = f"{self.runs} run{'s' * (self.runs != 1)}"
        # The same program on two meshes may differ because of a mesh that nobody asked for.
        several = len(set(self.titles)) > 1
        on = f"; A {self.titles[0]}, B {self.titles[1]}" if several else ""
        ran = f"({self.operations} operations compared, in {runs}{on})"
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
        time = f"the {_ordinal(self.time)} time that this line runs" if self.time else ""
        return f"{text}    {', '.join(filter(None, [self.layer, self.note, time]))}"

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
            on another mesh. If it computes in lower precision, it may differ by what that rounds.
        *arguments: the arguments of both: arrays, or shapes to draw at random.
        mesh: the mesh of the first; by default the one in its closure.
        other_mesh: the mesh of the other; by default `mesh`, unless that lacks axes of its own;
            without `mesh` its own, or that of the first.
        steps: how many steps are compared. Leading outputs with the shapes of the leading arguments
            replace these in the next step.

    Returns:
        Where they diverge.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> def old(x):
        ...     return jnp.tanh(x) * 2.0
        >>> def new(x):
        ...     return jnp.tanh(x) * 2.5
        >>> bisect(old, new, np.ones(3, np.float32)).operation
        'mul'
    """
    meshes = mesh or find_mesh(one), other_mesh or mesh_of_other(mesh, find_mesh(other))
    sides = (subject_of(one, arguments), subject_of(other, arguments))
    return bisect_subjects(*sides, *meshes, steps)


def bisect_subjects(
    subject: Subject, other_subject: Subject, mesh: Any, other_mesh: Any, steps: int = 1
) -> Parting:
    """Does the work of `bisect` for two functions with their arguments.

    A mesh that is None is like the other; if both are, the functions run on one device.
    """
    sides = (
        (subject, mesh or other_mesh or ONE_DEVICE),
        (other_subject, other_mesh or mesh or ONE_DEVICE),
    )
    recordings = [lazy_recording(side, on, steps) for side, on in sides]
    parting, changed = _compared(*recordings)
    for number in changed:
        side, on = sides[number]
        own = on if isinstance(on, Mesh) else None
        for found in prove_subject(side, own, on, draws=1).mistakes[:1]:
            note = f"{recordings[number].title} it differs from one device: {found.kind}"
            return dataclasses.replace(
                parting, operation=found.operation, places=found.places, note=note,
                difference=found.difference, bound=found.bound,
            )  # fmt: skip
    return parting


def compare(one: Recording, other: Recording) -> Parting:
    """Finds the first step at which two recorded programs diverge, and in it the first operation.

    Args:
        one: the recording of a program.
        other: that of one that should equal it.
    """
    return _compared(one, other)[0]


def _compared(one: Recording, other: Recording) -> tuple[Parting, list[int]]:
    """Compares step by step; also returns which programs a mesh changes, if that is the cause."""

    def ran(number: int) -> dict[str, Any]:
        return {
            "runs": number,
            "operations": len(one.values),
            "titles": (one.title, other.title),
        }

    number = 0
    for number, (first, second) in enumerate(zip(one.steps, other.steps, strict=False), 1):
        if names := _differing(first.inputs, second.inputs):
            note = "these are inputs of the step"
            return Parting(False, names, number, note=note, **ran(number)), []
        if names := _differing(first.outputs, second.outputs):
            found = Parting(False, names, number, **ran(number))
            if _differing(first.alone, second.alone):
                return _located(found, (one, first), (other, second)), []
            pairs = ((one, first), (other, second))
            changed = [n for n, (_, s) in enumerate(pairs) if _differing(s.outputs, s.alone)]
            note = "on one device both are equal"
            if len(changed) == 1:
                note += f", and {pairs[changed[0]][0].title} differs from that"
            return dataclasses.replace(found, note=note), changed
    return Parting(True, **ran(number)), []


def _located(
    found: Parting, one: tuple[Recording, RecordedStep], other: tuple[Recording, RecordedStep]
) -> Parting:
    """Adds the first operation that differs in a step, or a note if none does."""
    (first, here), (second, there) = one, other
    pairs = matched([value.key for value in first.values], [value.key for value in second.values])
    each = {(a, b): here.values[a].gap(there.values[b]) for a, b in pairs}
    gaps = {pair: gap for pair, gap in each.items() if gap is not None}
    if not gaps:
        return dataclasses.replace(found, note="no operation that both have differs")
    at = min(gaps)
    loop = first.values[at[0]].loop
    if loop >= 0:
        # All turns of a loop are recorded, and an early turn runs before the later lines of it.
        inside = [pair for pair in gaps if first.values[pair[0]].loop == loop]
        at = min(inside, key=lambda pair: (gaps[pair][2], pair))
    gap, bound, turn = gaps[at]
    recording, number = first, at[0]
    for side, known, start in zip((first, second), zip(*pairs, strict=True), at, strict=True):
        extra = _only_here(side.values, start, set(known))
        if extra is not None:
            recording, number = side, extra
    value = recording.values[number]
    layer = [value.layer] if value.layer else []
    layer += [f"turn {turn + 1} of the loop"] if loop >= 0 and turn else []
    return dataclasses.replace(
        found, operation=value.operation, places=tuple(recording.places[n] for n in value.frames),
        layer=", ".join(layer), time=_time(recording.values, number) + turn, difference=gap,
        bound=bound,
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


def _time(values: Sequence[RecordedValue], number: int) -> int:
    """Returns which call of the outermost repeated line contains a value, from 1.

    For layers in a Python loop, it is the call of the layer. The first operation of that line is
    counted, because the differing one may occur in one layer only.
    """
    forward = [n for n, v in enumerate(values) if not v.is_backward and v != values[n - 1]]
    lines = values[number].frames
    for depth in range(1, len(lines) + 1):
        inside = [n for n in forward if values[n].frames[-depth:] == lines[-depth:]]
        first = values[inside[0]] if inside else None
        same = [
            n for n in inside
            if first and (values[n].operation, values[n].frames) == (first.operation, first.frames)
        ]  # fmt: skip
        if len(same) > 1:
            return max(1, sum(n <= number for n in same))
    return 1


def _differing(one: Mapping[str, Fingerprint], other: Mapping[str, Fingerprint]) -> tuple[str, ...]:
    """Returns the names whose fingerprints differ, the largest relative difference first."""
    if one.keys() != other.keys() and len(one) == len(other):
        # Results with other names are compared in their order.
        other = dict(zip(one, other.values(), strict=True))
    gaps: dict[str, float] = {name: math.inf for name in one.keys() ^ other.keys()}
    for name in one.keys() & other.keys():
        found = one[name].gap(other[name])
        if len(one[name].numbers) != len(other[name].numbers):
            gaps[name] = math.inf
        elif found is not None:
            gaps[name] = found[0] / max(one[name].norm, 1e-30)
    return tuple(sorted(gaps, key=lambda name: (-gaps[name], name)))
