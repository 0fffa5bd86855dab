"""`prove` and `assert_mesh_invariant`: compare a function on several meshes with one device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..core.compat import Frame, source_frames
from ..core.errors import AxonDistError, MeshError
from . import relations
from .inputs import draws_of
from .lattice import proven_outputs
from .locate import Found, Recorded, Search, align
from .meshes import build_mesh, family, find_mesh, sizes_of
from .program import DRAWS, Injected, Operation, Value, reads_of, same_operations
from .relations import RankValues
from .report import Finding, Kind, Output, Place, Report
from .runs import Perturbed, Run
from .trace import Subject, Traced, array_leaves, subject_of

_HERE = os.path.dirname(__file__)


class MeshVariant(AxonDistError, AssertionError):
    """A function is not the same on every mesh; `report` says where and why.

    Args:
        report: the report of the proof.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(f"\n{report}")
        self.report = report


def assert_mesh_invariant(
    function: Any,
    *arguments: Any,
    meshes: Any = None,
    inputs: Callable[[int], tuple[Any, ...]] | None = None,
    draws: int = 2,
) -> Report:
    """Asserts, for pytest, that a function computes the same on every mesh as on one device.

    The arguments are those of `prove`.

    Returns:
        The report, if the assertion holds.

    Raises:
        MeshVariant: an `AssertionError`, if it does not hold or a mesh cannot be tried.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> import numpy as np
        >>> def make(mesh):
        ...     def mean(x):
        ...         return jax.lax.pmean(x.mean(), "dp")
        ...     return jax.shard_map(mean, mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> assert_mesh_invariant(make, np.arange(8.0, dtype=np.float32), meshes="dp=4").ok
        True
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    report = prove(function, *arguments, meshes=meshes, inputs=inputs, draws=draws)
    if not report.ok:
        raise MeshVariant(report)
    return report


def prove(
    function: Any,
    *arguments: Any,
    meshes: Any = None,
    inputs: Callable[[int], tuple[Any, ...]] | None = None,
    draws: int = 2,
    name: str | None = None,
) -> Report:
    """Compares a function on several meshes with itself on a mesh whose axes are all 1.

    Args:
        function: any JAX program: a `shard_map`, a `jit` with shardings, an NNX train step. If
            `mesh` is its only parameter, it is called with a mesh and must return the function to
            prove, or a pair of that function and its arguments. If `mesh` is one of several
            parameters, it is passed by name. Otherwise each mesh in its closure is replaced.
        *arguments: the function's arguments: arrays, `jax.ShapeDtypeStruct`s to draw at random, NNX
            modules; anything else is passed on unchanged.
        meshes: the real sizes, as `"dp=4,tp=2"`, a dict, a `Mesh`, or a list of these. Each is
            tried whole and with each axis alone. By default the mesh in the function's closure.
        inputs: a function from the number of a draw to the arguments, instead of `arguments`.
        draws: how often shapes are drawn, or `inputs` is called.
        name: the name of the function in the report.

    Returns:
        The report.

    Raises:
        MeshError: when no mesh is found, or there are too few devices.
        ConfigError: when `function` is not a function.
    """
    drawn = [tuple(inputs(number)) for number in range(draws)] if inputs is not None else []
    subject = subject_of(function, drawn[0] if drawn else arguments, name)
    like, wanted = _wanted(function, subject, meshes)
    return prove_subject(subject, like, wanted, draws, drawn)


def prove_subject(
    subject: Subject,
    like: Any,
    wanted: Sequence[Mapping[str, int]],
    draws: int,
    drawn: Sequence[tuple[Any, ...]] = (),
    tell: Callable[[str], None] = lambda title: None,
) -> Report:
    """Compares a function on all meshes of some families with one device.

    Args:
        subject: the function and its arguments.
        like: a mesh whose axis types are used, or None.
        wanted: the real sizes of each family.
        draws: how often shapes are drawn.
        drawn: the arguments to try instead of the subject's.
        tell: is called with the title of each mesh before it is tried.
    """
    tried: list[dict[str, int]] = []
    for sizes in wanted:
        tried += [one for one in family(sizes) if one not in tried]
    return _Proof(subject, like, tried, list(drawn), draws, tell).run()


def _wanted(function: Any, subject: Subject, meshes: Any) -> tuple[Any, list[dict[str, int]]]:
    found = find_mesh(function) or subject.context
    if meshes is None and found is None:
        raise MeshError(
            f"[PROVE006] {subject.name} closes over no mesh, and none is given; give the sizes to "
            "try, as in meshes='dp=4,tp=2'"
        )
    if meshes is None:
        return found, [sizes_of(found)]
    several = [meshes] if isinstance(meshes, (str, Mapping, jax.sharding.Mesh)) else list(meshes)
    wanted = [sizes_of(mesh) for mesh in several]
    check_axes(subject.name, found, wanted)
    return found, wanted


def check_axes(name: str, own: Any, wanted: Sequence[Mapping[str, int]]) -> None:
    """Checks that meshes have the axes of the mesh of a function, if that has one.

    Raises:
        MeshError: if they have not, or there are too few devices for one.
    """
    for sizes in wanted:
        if own is not None and set(sizes) != set(own.axis_names):
            raise MeshError(
                f"[PROVE007] {name} has a mesh with the axes {sorted(own.axis_names)}, but the "
                f"mesh to try has {sorted(sizes)}; give a size for each axis of the former"
            )
        build_mesh(sizes, own)


@dataclasses.dataclass(eq=False)
class _Proof:
    """One proof: the subject, its inputs, and the meshes to try."""

    subject: Subject
    like: Any
    tried: list[dict[str, int]]
    drawn: list[tuple[Any, ...]]
    count: int
    tell: Callable[[str], None]
    checked: bool = True

    def run(self) -> Report:
        """Compares all meshes with the first."""
        findings: list[Finding] = []
        ones = self.tried[0]
        titles = tuple(",".join(f"{n}={s}" for n, s in sizes.items()) for sizes in self.tried)
        self.tell(titles[0])
        try:
            oracle = self.subject.on(ones, self.like, self.checked)
        except AxonDistError:
            raise
        except Exception as error:
            return self._refused(error, titles)
        return self._compared(oracle, titles, findings)

    def _refused(self, error: Exception, titles: tuple[str, ...]) -> Report:
        """Reports on a program that JAX refuses.

        JAX's `check_vma` does not name the mistake. The proof is run again without it, and its
        report is used if it finds mistakes.
        """
        refused = _refused(error, titles[0], self.tried[0], self.subject)
        if self.checked and "check_vma" in str(error):
            with contextlib.suppress(Exception):
                report = dataclasses.replace(self, checked=False).run()
                if report.mistakes:
                    return report
        return Report(self.subject.name, titles, 0, (), (refused,))

    def _compared(self, oracle: Traced, titles: tuple[str, ...], findings: list[Finding]) -> Report:
        others = self.tried[1:]
        inputs = self._inputs(oracle)
        truths = _Truths(oracle, inputs)
        outputs = {name: Output(name, "tried") for name in oracle.names}
        is_one_program = True
        proven = set(range(len(oracle.names)))
        reasons: dict[str, str] = {}
        for sizes, title in zip(others, titles[1:], strict=True):
            alone = [a for f in findings for a in f.axes if f.mesh != title]
            if sum(size > 1 for size in sizes.values()) > 1 and alone:
                continue
            self.tell(title)
            try:
                traced = self.subject.on(sizes, self.like, self.checked)
            except AxonDistError:
                raise
            except Exception as error:
                findings.append(_refused(error, title, sizes, self.subject))
                continue
            is_same = same_operations(traced.program, oracle.program)
            is_one_program &= is_same
            if is_same and any(_is_within(sizes, other) for other in others):
                # Partitioning of this axis is tried with that of the others.
                continue
            findings += _Comparison(oracle, traced, truths, inputs, outputs).run()
            rules = proven_outputs(traced.program, oracle.program, sizes)
            proven &= {number for number, without in rules.items() if without is None}
            for number, without in rules.items():
                if without is not None:
                    reasons.setdefault(oracle.names[number], _without_rule(without))
        if not findings:
            # The mesh changes only where numbers are placed, not the operations, so outputs are
            # equal for every input.
            names = set(oracle.names) if is_one_program else {oracle.names[n] for n in proven}
            outputs = {
                name: _with_reason(output, name in names, reasons.get(name, ""))
                for name, output in outputs.items()
            }
        findings = list(dict.fromkeys(findings))
        return Report(
            self.subject.name, titles, len(inputs), tuple(outputs.values()), tuple(findings)
        )

    def _inputs(self, oracle: Traced) -> list[list[Any]]:
        if not self.drawn:
            return draws_of(oracle.leaves, self.count)
        return [draw for one in self.drawn for draw in draws_of(array_leaves(one), 1)]


def _with_reason(output: Output, is_proven: bool, reason: str) -> Output:
    if output.status != "tried":
        return output
    if is_proven:
        return dataclasses.replace(output, status="proven")
    return dataclasses.replace(output, reason=reason)


def _without_rule(operation: Operation) -> str:
    """Says which operation has no rule, and where it is."""
    places = places_of(source_frames(operation.equation, operation.callers)[0][:1])
    at = f" at {places[0]}" if places else ""
    return f"{operation.name}{at} has no rule"


def _refused(error: Exception, title: str, sizes: Mapping[str, int], subject: Subject) -> Finding:
    """Makes the finding for a mesh on which a function raises, with the user's line."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and "/axon_dist/" not in frame.filename
    ]
    places = [
        Place(f.filename, f.lineno or 0, f.colno, f.end_colno if f.lineno == f.end_lineno else None,
              f.name)
        for f in reversed(frames)
    ]  # fmt: skip
    if not places:
        places = [Place(*place) for place in subject.place(build_mesh(sizes))]
    text = " ".join(str(error).split())
    message = f"on mesh {title} it raised {type(error).__name__}: {text:.300}"
    return Finding(None, tuple(places), tuple(sizes), title, message=message)


def _is_within(sizes: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether another mesh has the same axes, at these sizes where they are not 1, and more."""
    if sizes == other or set(sizes) != set(other):
        return False
    return all(size in (1, other[name]) for name, size in sizes.items())


class _Truths:
    """The results on one device for each input, and the bounds of their rounding errors."""

    def __init__(self, oracle: Traced, inputs: list[list[Any]]) -> None:
        self._oracle = Perturbed(oracle)
        self._inputs = inputs
        self._known: dict[Any, Run] = {}

    def outputs(self, draw: int, bits: Mapping[int, Injected]) -> Run:
        """Returns the outputs for an input; they are the same for all meshes."""
        key = draw, tuple(bits)
        if key not in self._known:
            self._known[key] = self._oracle.run(self._inputs[draw], records=False, bits=bits)
        return self._known[key]

    def values(self, draw: int, bits: Mapping[int, Injected]) -> Run:
        """Returns all values for an input."""
        return self._oracle.run(self._inputs[draw], bits=bits)


class _Comparison:
    """The comparison of one mesh with one device."""

    def __init__(
        self,
        oracle: Traced,
        traced: Traced,
        truths: _Truths,
        inputs: list[list[Any]],
        outputs: dict[str, Output],
    ) -> None:
        self._oracle = oracle
        self._traced = traced
        self._truths = truths
        self._inputs = inputs
        self._outputs = outputs
        self._aligned = align(traced.program, oracle.program)
        self._varied: dict[Operation, set[str]] = {}
        self._run = traced.compiled(frozenset(), with_noise=False)

    def run(self) -> list[Finding]:
        """Returns the findings on this mesh."""
        if len(self._traced.names) != len(self._oracle.names):
            return [self._structure()]
        keys = self._draws()
        if isinstance(keys, list):
            return keys
        choices = [dict(zip(keys, splits, strict=True)) for splits in _product(keys.values())]
        found: list[Finding] = []
        for choice in choices[:4]:
            found = self._with_bits(choice)
            if not found:
                return self._copies() if self._varied else []
        return found

    def _structure(self) -> Finding:
        names = len(self._oracle.names), len(self._traced.names)
        message = (
            f"on mesh {self._traced.title} it has {names[1]} outputs, on one device {names[0]}"
        )
        return Finding(None, (), tuple(self._traced.sizes), self._traced.title, message=message)

    def _with_bits(self, choice: Mapping[Operation, Any]) -> list[Finding]:
        rng = np.random.default_rng(7)
        for_one: dict[int, Injected] = {}
        for_all: dict[int, Injected] = {}
        for operation, splits in choice.items():
            other = self._aligned[operation]
            aval = other.results[0].aval
            bits = rng.integers(0, 2**32, aval.shape, dtype=np.uint64).astype(aval.dtype)
            whole = ((),) * len(aval.shape)
            for_one[other.number] = Injected(bits, whole)
            for_all[operation.number] = Injected(bits, splits)
        for draw, inputs in enumerate(self._inputs):
            truth = self._truths.outputs(draw, for_one)
            if draw and not all(np.isfinite(x).all() for x in truth.outputs if x.dtype.kind == "f"):
                # An empty mask may cause a division by zero, which is not the mesh's fault.
                continue
            got, _ = self._run(inputs, injected=for_all)
            wrong = self._compare(got, truth.outputs, truth.output_bounds)
            if wrong:
                return self._locate(draw, wrong, for_one, for_all)
        return []

    def _compare(
        self, got: Sequence[np.ndarray], truth: Sequence[np.ndarray], bounds: Sequence[float]
    ) -> dict[int, tuple[float, float]]:
        """Returns the wrong outputs, with their difference and bound."""
        wrong: dict[int, tuple[float, float]] = {}
        for number, (value, true, bound) in enumerate(zip(got, truth, bounds, strict=True)):
            name = self._oracle.names[number]
            old = self._outputs[name]
            if value.shape != true.shape:
                flat = value.ravel()
                size = true.size
                if value.size > size and not relations.differs(flat[:size], true.ravel(), bound):
                    continue
                reason = f"its shape is {value.shape} on {self._traced.title}, {true.shape} on one"
                self._outputs[name] = dataclasses.replace(old, status="unjudged", reason=reason)
                continue
            gap = relations.differs(value, true, bound)
            if gap:
                wrong[number] = gap, bound
                old = dataclasses.replace(old, status="differs")
            most = max(old.difference, relations.differs(value, true, 0.0))
            self._outputs[name] = dataclasses.replace(
                old, difference=most, bound=max(old.bound, bound)
            )
        return wrong

    def _locate(
        self,
        draw: int,
        wrong: Mapping[int, tuple[float, float]],
        for_one: Mapping[int, Injected],
        for_all: Mapping[int, Injected],
    ) -> list[Finding]:
        truth = self._truths.values(draw, for_one)
        recording = self._traced.compiled(
            frozenset(self._traced.program.values()), with_noise=bool(for_all)
        )
        _, values = recording(self._inputs[draw], injected=for_all)
        search = Search(
            Recorded(self._traced.program, values),
            Recorded(self._oracle.program, truth.values),
            truth.bounds,
            self._traced.sizes,
            self._aligned,
        )
        found: dict[Any, tuple[Found | None, list[int]]] = {}
        for number in wrong:
            blamed = search.blame(self._traced.program.region.outputs[number])
            place = blamed.frames[:1] if blamed else ()
            key = (blamed.kind if blamed else None, place)
            found.setdefault(key, (blamed, []))[1].append(number)
        return [self._finding(blamed, numbers, wrong) for blamed, numbers in found.values()]

    def _finding(
        self, blamed: Found | None, numbers: list[int], wrong: Mapping[int, tuple[float, float]]
    ) -> Finding:
        worst = max(numbers, key=lambda number: wrong[number][0])
        largest = sorted(numbers, key=lambda number: -wrong[number][0])
        names = tuple(self._oracle.names[number] for number in largest)
        gap, bound = wrong[worst]
        traced = self._traced
        if blamed is None:
            axes = tuple(name for name, size in traced.sizes.items() if size > 1)
            return Finding(Kind.DIFFERS, (), axes, traced.title, "", names, gap, bound)
        places = places_of(blamed.frames)
        operation = blamed.operation.name if blamed.operation is not None else ""
        if blamed.hard_coded is not None:
            message = (
                f"the mesh size {blamed.hard_coded} is hard-coded, so the result differs on other "
                "meshes"
            )
            return Finding(None, places, blamed.axes, traced.title, operation, names, 0, 0, message)
        return Finding(blamed.kind, places, blamed.axes, traced.title, operation, names, gap, bound)

    def _draws(self) -> list[Finding] | dict[Operation, list[Any]]:
        """Returns draws whose bits must be replaced, with their possible splits; or findings."""
        pairs = []
        for operation, other in self._aligned.items():
            if operation.name not in DRAWS or operation.name != other.name:
                continue
            if len(operation.results) == 1 and _shapes(operation) != _shapes(other):
                pairs.append((operation, other))
        if not pairs:
            return {}
        run = self._traced.compiled(frozenset(o.results[0] for o, _ in pairs), False)
        run_oracle = self._oracle.compiled(frozenset(o.results[0] for _, o in pairs), False)
        values = run(self._inputs[0])[1]
        whole = run_oracle(self._inputs[0])[1]
        findings: list[Finding] = []
        found: dict[Operation, list[Any]] = {}
        for operation, other in pairs:
            true = whole.get(other.results[0])
            bits = values.get(operation.results[0])
            if true is None or bits is None:
                continue
            true = true.reshape(true.shape[len(other.results[0].axes) :])
            by_rank = RankValues(bits, operation.results[0].axes)
            if relations.find(by_rank, true, 0.0, self._traced.sizes) is not None:
                continue
            same = self._same_along(by_rank)
            ways = [
                way
                for way in relations.ways_to_split(by_rank.shape, true.shape, by_rank.sizes)
                if not any(axis in same for axes in way for axis in axes)
            ]
            if ways:
                found[operation] = ways
                used = {axis for way in ways for axes in way for axis in axes}
                varied = {a for a, size in by_rank.sizes.items() if size > 1} - same - used
                if varied:
                    self._varied[operation] = varied
            elif by_rank.shape != true.shape:
                several = {axis for axis in same if by_rank.sizes[axis] > 1}
                findings.append(self._at_draw(Kind.ONE_KEY, operation, several))
        return findings or found

    def _copies(self) -> list[Finding]:
        """Returns the draws that make copies differ: outputs that all ranks of an axis hold."""
        outputs = [
            (value, spec)
            for operation in self._traced.program.operations
            if operation.is_map
            for value, spec in zip(
                operation.regions[0].outputs, operation.equation.params["out_specs"], strict=True
            )
            if isinstance(value, Value) and value.maker is not None
        ]
        run = self._traced.compiled(frozenset(value for value, _ in outputs), False)
        _, values = run(self._inputs[0])
        differing: set[str] = set()
        for value, spec in outputs:
            by_rank = RankValues(values[value], value.axes)
            split = {axis for part in spec for axis in relations.names_of(part)}
            differing |= set(by_rank.axes) - self._same_along(by_rank) - split
        pairs = [(operation, axes & differing) for operation, axes in self._varied.items()]
        return [self._at_draw(Kind.KEYS_OF_COPIES, o, axes) for o, axes in pairs if axes]

    def _same_along(self, by_rank: RankValues) -> set[str]:
        """Returns the axes along which all ranks have the same values."""
        found = set()
        for at, axis in enumerate(by_rank.axes):
            first = np.take(by_rank.values, [0], axis=at)
            if (by_rank.values == first).all():
                found.add(axis)
        return found

    def _at_draw(self, kind: Kind, operation: Operation, axes: set[str]) -> Finding:
        search = Search(
            Recorded(self._traced.program, {}), Recorded(self._oracle.program, {}), {},
            self._traced.sizes, self._aligned,
        )  # fmt: skip
        blamed = search.found_at(operation, kind, tuple(sorted(axes)))
        places = places_of(blamed.frames)
        return Finding(kind, places, blamed.axes, self._traced.title, operation.name)


def places_of(frames: Iterable[Frame]) -> tuple[Place, ...]:
    """Converts frames to places of a report, without those in which this package calls a user."""
    return tuple(
        Place(f.file, f.line, f.column, f.end_column, f.function.rpartition(".")[2])
        for f in frames
        if os.path.dirname(f.file) != _HERE
    )


def _shapes(operation: Operation) -> list[tuple[int, ...]]:
    return [value.shape for value in [*operation.results, *reads_of(operation.reads)]]


def _product(ways: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    return list(itertools.islice(itertools.product(*ways), 4))
