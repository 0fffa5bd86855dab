"""`prove` and `assert_mesh_invariant`: compare a function on several meshes with one device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from ..core.arguments import COUNT
from ..core.compat import is_library_file
from ..core.errors import AxonDistError, MeshError
from .inputs import draws_of
from .locate import Search, align, finding, frames_of
from .meshes import build_mesh, family, find_mesh, sizes_of, title_of
from .program import DRAWS, Injected, Operation, Value
from .relations import Pair, RankValues, differs, names_of, ways_to_split
from .report import Finding, Kind, Output, Place, Report, places_of
from .rules import proven_outputs
from .trace import Run, Subject, Traced, array_leaves, mesh_in_context, subject_of


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
        >>> import jax
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
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
        ConfigError: when `function` is not a function, or for fewer than one draw.
    """
    COUNT.check("prove", "draws", draws)
    drawn = [tuple(inputs(number)) for number in range(draws)] if inputs is not None else []
    subject = subject_of(function, drawn[0] if drawn else arguments, name)
    own = find_mesh(function) or (mesh_in_context() if subject.is_in_context else None)
    return prove_subject(subject, own, meshes, draws, drawn)


def prove_subject(
    subject: Subject,
    own: Mesh | None,
    meshes: Any,
    draws: int,
    drawn: Sequence[tuple[Any, ...]] = (),
    tell: Callable[[str], None] = lambda title: None,
) -> Report:
    """Does the work of `prove` for a function with its arguments.

    Args:
        subject: the function and its arguments.
        own: the mesh for which it is written, whose axis types are used; None if that is unknown.
        meshes: the real sizes, as for `prove`; by default those of its own mesh.
        draws: how often shapes are drawn.
        drawn: the arguments to try instead of the subject's.
        tell: is called with the title of each mesh before it is tried.

    Raises:
        MeshError: when no mesh is known, its axes are not those of the function's own mesh, or
            there are too few devices.
        ConfigError: for fewer than one draw.
    """
    COUNT.check("prove", "draws", draws)
    tried = _tried(subject.name, own, meshes)
    tell(title_of(tried[0]))
    refused: Finding | None = None
    # Where JAX's `check_vma` refuses a program, it does not name the mistake. The proof without it
    # does, if there is one.
    for is_checked in (True, False):
        proof = _Proof(subject, own, tried, is_checked)
        oracle = proof.traced(tried[0])
        if isinstance(oracle, Finding):
            refused = refused or oracle
            continue
        inputs = [one for given in drawn for one in draws_of(array_leaves(given), 1)]
        with contextlib.nullcontext() if is_checked else contextlib.suppress(Exception):
            report = proof.run(oracle, inputs or draws_of(oracle.leaves, draws), tell)
            if is_checked or report.mistakes:
                return report
    titles = tuple(map(title_of, tried))
    return Report(subject.name, titles, 0, (), (refused,) if refused is not None else ())


def _tried(name: str, own: Mesh | None, meshes: Any) -> list[dict[str, int]]:
    """Returns the sizes of all meshes to try, those of one device first."""
    if not meshes and own is None:
        raise MeshError(
            f"[PROVE006] {name} has no mesh, and none is given; give the sizes to try, as in "
            "meshes='dp=4,tp=2' or --mesh dp=4,tp=2"
        )
    several = [meshes] if isinstance(meshes, (str, Mapping, Mesh)) else meshes
    found: list[dict[str, int]] = []
    for mesh in several or [own]:
        sizes = sizes_of(mesh)
        if own is not None and set(sizes) != set(own.axis_names):
            raise MeshError(
                f"[PROVE007] {name} has a mesh with the axes {sorted(own.axis_names)}, but the "
                f"mesh to try has {sorted(sizes)}; give a size for each axis of the former"
            )
        build_mesh(sizes, own)
        found += [one for one in family(sizes) if one not in found]
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Proof:
    """One proof: the subject and the meshes to try, the first of which is that of one device."""

    subject: Subject
    own: Mesh | None
    tried: list[dict[str, int]]
    is_checked: bool

    def traced(self, sizes: Mapping[str, int]) -> Traced | Finding:
        """Traces the function on a mesh, or says why it raises there."""
        try:
            return self.subject.on(sizes, self.own, self.is_checked)
        except AxonDistError:
            raise
        except Exception as error:
            return _refused(error, sizes, self.subject)

    def run(self, oracle: Traced, inputs: list[list[Any]], tell: Callable[[str], None]) -> Report:
        """Compares all meshes with the first."""
        others = self.tried[1:]
        truths: dict[Any, Run] = {}
        outputs = {name: Output(name, "tried") for name in oracle.names}
        findings: list[Finding] = []
        reasons: dict[str, str] = {}
        for sizes in others:
            title = title_of(sizes)
            alone = [axis for one in findings for axis in one.axes if one.mesh != title]
            if sum(size > 1 for size in sizes.values()) > 1 and alone:
                continue
            tell(title)
            traced = self.traced(sizes)
            if isinstance(traced, Finding):
                findings.append(traced)
                continue
            unproven = _unproven(traced, oracle)
            reasons = {**unproven, **reasons}
            if unproven or not any(_is_within(sizes, other) for other in others):
                aligned = align(traced.program, oracle.program)
                findings += _Comparison(oracle, traced, aligned, inputs, outputs, truths).run()
        if not findings:
            for name, output in outputs.items():
                if output.status == "tried" and name in reasons:
                    outputs[name] = dataclasses.replace(output, reason=reasons[name])
                elif output.status == "tried":
                    outputs[name] = dataclasses.replace(output, status="proven")
        titles = tuple(map(title_of, self.tried))
        unique = tuple(dict.fromkeys(findings))
        return Report(self.subject.name, titles, len(inputs), tuple(outputs.values()), unique)


def _unproven(traced: Traced, oracle: Traced) -> dict[str, str]:
    """Returns the outputs that are not proven for every input, each with the reason if known."""
    rules = proven_outputs(traced.program, oracle.program, traced.sizes)
    found = {}
    for number, name in enumerate(oracle.names):
        operation = rules.get(number)
        if operation is not None:
            places = places_of(frames_of(operation)[:1])
            at = f" at {places[0]}" if places else ""
            found[name] = f"{operation.name}{at} has no rule"
        elif number not in rules:
            found[name] = ""
    return found


def _refused(error: Exception, sizes: Mapping[str, int], subject: Subject) -> Finding:
    """Makes the finding for a mesh on which a function raises, with the user's line."""
    frames = [
        frame
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if _is_users_file(frame.filename)
    ]
    places = [
        Place(f.filename, f.lineno or 0, f.colno, f.end_colno if f.lineno == f.end_lineno else None,
              f.name)
        for f in frames
    ] or [Place(*place) for place in subject.place(build_mesh(sizes))]  # fmt: skip
    title = title_of(sizes)
    text = " ".join(str(error).split())
    message = f"on mesh {title} it raised {type(error).__name__}: {text:.300}"
    return Finding(None, tuple(places), tuple(sizes), title, message=message)


_PACKAGE = Path(__file__).parents[1]


def _is_users_file(name: str) -> bool:
    """Whether a file is neither of this package, nor of Python, nor installed.

    Whole folders are compared, because a user's folder may have the name of this package, too.
    """
    return not (is_library_file(name) or Path(name).is_relative_to(_PACKAGE))


def _is_within(sizes: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether another mesh is this mesh with further axes larger than 1."""
    if sizes == other or set(sizes) != set(other):
        return False
    return all(size in (1, other[name]) for name, size in sizes.items())


@dataclasses.dataclass(frozen=True, eq=False)
class _Comparison:
    """The comparison of one mesh with one device.

    Args:
        oracle: the function on one device.
        traced: the function on the mesh.
        aligned: the operations on one device that correspond to those on the mesh.
        inputs: the inputs to try.
        outputs: the result for each output so far.
        truths: the results on one device for each input and choice of bits, known so far.
    """

    oracle: Traced
    traced: Traced
    aligned: Mapping[Operation, Operation]
    inputs: list[list[Any]]
    outputs: dict[str, Output]
    truths: dict[Any, Run]

    def run(self) -> list[Finding]:
        """Returns the findings on this mesh."""
        counts = len(self.oracle.names), len(self.traced.names)
        title = self.traced.title
        if counts[0] != counts[1]:
            message = f"on mesh {title} it has {counts[1]} outputs, on one device {counts[0]}"
            return [Finding(None, (), tuple(self.traced.sizes), title, message=message)]
        ways, varied, findings = self._draws()
        if findings:
            return findings
        for choice in itertools.islice(itertools.product(*ways.values()), 4):
            findings = self._with_bits(dict(zip(ways, choice, strict=True)))
            if not findings:
                return self._copies(varied)
        return findings

    def _with_bits(self, choice: Mapping[Operation, Any]) -> list[Finding]:
        """Compares with the same bits for each draw, of which the ranks have their parts."""
        rng = np.random.default_rng(7)
        for_one: dict[int, Injected] = {}
        for_all: dict[int, Injected] = {}
        for operation, splits in choice.items():
            other = self.aligned[operation]
            aval = other.results[0].aval
            bits = rng.integers(0, 2**32, aval.shape, dtype=np.uint64).astype(aval.dtype)
            for_one[other.number] = Injected(bits, ((),) * len(aval.shape))
            for_all[operation.number] = Injected(bits, splits)
        for draw, inputs in enumerate(self.inputs):
            key = draw, tuple(for_one)
            if key not in self.truths:
                self.truths[key] = self.oracle.measured(inputs, injected=for_one)
            truth = self.truths[key]
            if draw and not all(
                np.isfinite(x).all() for x in truth.outputs if x.dtype.kind in "fc"
            ):
                # An empty mask may cause a division by zero, which is not the mesh's fault.
                continue
            got, _ = self.traced.run(inputs, injected=for_all)
            wrong = self._compare(got, truth)
            if wrong:
                return self._locate(inputs, wrong, for_one, for_all)
        return []

    def _compare(self, got: Sequence[np.ndarray], truth: Run) -> dict[int, tuple[float, float]]:
        """Returns the wrong outputs, with their difference and bound."""
        wrong: dict[int, tuple[float, float]] = {}
        pairs = zip(got, truth.outputs, truth.output_bounds, strict=True)
        for number, (value, true, bound) in enumerate(pairs):
            name = self.oracle.names[number]
            old = self.outputs[name]
            if value.shape != true.shape:
                flat = value.ravel()
                size = true.size
                if value.size > size and not differs(flat[:size], true.ravel(), bound):
                    continue
                reason = f"its shape is {value.shape} on {self.traced.title}, {true.shape} on one"
                self.outputs[name] = dataclasses.replace(old, status="unjudged", reason=reason)
                continue
            if gap := differs(value, true, bound):
                wrong[number] = gap, bound
            self.outputs[name] = dataclasses.replace(
                old,
                status="differs" if gap else old.status,
                difference=max(old.difference, differs(value, true, 0.0)),
                bound=max(old.bound, bound),
            )
        return wrong

    def _locate(
        self,
        inputs: list[Any],
        wrong: Mapping[int, tuple[float, float]],
        for_one: Mapping[int, Injected],
        for_all: Mapping[int, Injected],
    ) -> list[Finding]:
        """Finds the operations that cause wrong outputs."""
        traced = self.traced
        truth = self.oracle.measured(inputs, self.oracle.program.values(), for_one)
        _, values = traced.run(inputs, traced.program.values(), for_all)
        search = Search(traced.program, values, truth, traced.sizes, self.aligned)
        found: dict[Any, Finding] = {}
        for number in sorted(wrong, key=lambda number: -wrong[number][0]):
            blamed = search.blame(traced.program.outputs[number])
            gap, bound = wrong[number]
            worst = dataclasses.replace(blamed, difference=gap, bound=bound)
            first = found.setdefault((blamed.kind, blamed.places[:1]), worst)
            outputs = (*first.outputs, self.oracle.names[number])
            found[first.kind, first.places[:1]] = dataclasses.replace(first, outputs=outputs)
        return list(found.values())

    def _draws(
        self,
    ) -> tuple[dict[Operation, list[Any]], dict[Operation, set[str]], list[Finding]]:
        """Judges the draws of random bits.

        Returns:
            The draws whose bits must be replaced, each with the ways in which axes may split it;
            the further axes along which a draw varies; and the draws that are mistakes.
        """
        pairs = [
            (operation.results[0], other.results[0])
            for operation, other in self.aligned.items()
            if operation.name in DRAWS and operation.name == other.name
            if len(operation.results) == 1 and _shapes(operation) != _shapes(other)
        ]
        ways: dict[Operation, list[Any]] = {}
        varied: dict[Operation, set[str]] = {}
        findings: list[Finding] = []
        drawn = self._first_turns(self.traced, [value for value, _ in pairs])
        whole = self._first_turns(self.oracle, [other for _, other in pairs])
        for value, other in pairs:
            operation = value.maker
            if operation is None or value not in drawn or other not in whole:
                continue
            by_rank, true = drawn[value], whole[other].ranks()[0]
            if Pair(by_rank, true, 0.0, self.traced.sizes).relation() is not None:
                continue
            several = {axis for axis, size in by_rank.sizes.items() if size > 1}
            same = _same_along(by_rank)
            splits = ways_to_split(by_rank.shape, true.shape, by_rank.sizes)
            used = [(way, {axis for axes in way for axis in axes}) for way in splits]
            used = [(way, axes) for way, axes in used if not axes & same]
            if used:
                ways[operation] = [way for way, _ in used]
                varied[operation] = several - same - set().union(*(axes for _, axes in used))
            elif by_rank.shape != true.shape:
                at = finding(self.traced.sizes, Kind.ONE_KEY, operation, several & same)
                findings.append(at)
        return ways, varied, findings

    def _copies(self, varied: Mapping[Operation, set[str]]) -> list[Finding]:
        """Returns the draws that make copies differ: outputs that all ranks of an axis hold."""
        if not any(varied.values()):
            return []
        specs = {
            value: spec
            for operation in self.traced.program.walk()
            if operation.is_map
            for value, spec in zip(
                operation.regions[0].outputs, operation.equation.params["out_specs"], strict=True
            )
            if value.maker is not None
        }
        differing: set[str] = set()
        for value, by_rank in self._first_turns(self.traced, specs).items():
            split = {axis for part in specs[value] for axis in names_of(part)}
            differing |= set(by_rank.axes) - _same_along(by_rank) - split
        return [
            finding(self.traced.sizes, Kind.KEYS_OF_COPIES, operation, axes & differing)
            for operation, axes in varied.items()
            if axes & differing
        ]

    def _first_turns(self, traced: Traced, values: Iterable[Value]) -> dict[Value, RankValues]:
        """Returns values on all ranks for the first input, in the first turn of loops."""
        wanted = frozenset(values)
        recorded = traced.run(self.inputs[0], wanted)[1] if wanted else {}
        return {v: RankValues(x[(0,) * v.num_turns(x)], v.axes) for v, x in recorded.items()}


def _same_along(by_rank: RankValues) -> set[str]:
    """Returns the axes along which all ranks have the same values."""
    values = by_rank.values
    firsts = [np.take(values, [0], axis=at) for at in range(len(by_rank.axes))]
    return {
        axis for axis, first in zip(by_rank.axes, firsts, strict=True) if (values == first).all()
    }


def _shapes(operation: Operation) -> list[tuple[int, ...]]:
    return [value.shape for value in [*operation.results, *operation.reads]]
