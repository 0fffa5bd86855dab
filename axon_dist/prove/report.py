"""The report of a proof: findings with their source lines, as text, JSON and SARIF."""

from __future__ import annotations

import dataclasses
import enum
import json
import linecache
import math
import os
import urllib.parse
from collections.abc import Iterable
from typing import Any

from ..core.compat import Frame


class Kind(enum.StrEnum):
    """The kind of mistake of a finding: its name, what is wrong, and what to do.

    The sentences have {axes} for the mesh axes. The order gives the codes, so a new kind is last.
    """

    says: str
    repair: str

    def __new__(cls, name: str, says: str, repair: str) -> Kind:
        """Makes a member, which is its name as a string."""
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.says = says
        kind.repair = repair
        return kind

    MEAN_OF_MEANS = (
        "mean of means",
        "each rank of {axes} divides by its own count, and the counts differ",
        "sum numerator and denominator over {axes} by jax.lax.psum, then divide once",
    )
    NOT_REDUCED = (
        "not reduced",
        "each rank of {axes} has only its part of a sum or mean, but it is used as the whole",
        "reduce it over {axes}: jax.lax.psum for a sum, jax.lax.pmean for a mean",
    )
    TWICE = (
        "reduced twice",
        "this is reduced over {axes} although it was reduced already",
        "reduce once: leave out this reduction, or the one before it; under check_vma=True "
        "jax.grad sums over {axes} by itself where the parameters do not vary over it",
    )
    SUM_FOR_MEAN = (
        "sum for mean",
        "the ranks of {axes} have means, but these are summed",
        "use jax.lax.pmean over {axes}, or divide by jax.lax.axis_size",
    )
    MEAN_FOR_SUM = (
        "mean for sum",
        "the ranks of {axes} have parts of a sum, but it is divided by the number of ranks",
        "use jax.lax.psum over {axes} without dividing",
    )
    BIAS = (
        "bias before the sum",
        "this is added on every rank of {axes} to a part of a sum, so it counts once for each rank",
        "add it after the jax.lax.psum over {axes}",
    )
    ONE_KEY = (
        "one key for all",
        "all ranks of {axes} draw the same random bits for different samples",
        "fold the rank into the key: jax.random.fold_in(key, jax.lax.axis_index({axes}))",
    )
    POSITION = (
        "position not offset",
        "all ranks of {axes} count from the same start, although they hold different parts",
        "add the offset of the rank's part: jax.lax.axis_index({axes}) times its length",
    )
    LOCAL_STATISTICS = (
        "local statistics",
        "the statistics are only over the samples of one rank of {axes}",
        "take jax.lax.pmean of the statistics over {axes} before using them",
    )
    LOCAL_NORM = (
        "local norm",
        "the norm is only over one rank's part along {axes}",
        "take jax.lax.psum of the squares over {axes} before the root",
    )
    GATHER_ORDER = (
        "gather order",
        "the parts are in the wrong order, or come from the wrong rank of {axes}",
        "gather over the axes in the order of the PartitionSpec that split them, and check the "
        "pairs of jax.lax.ppermute",
    )
    LOCAL_ARGMAX = (
        "local argmax",
        "the index is relative to one rank's part along {axes}",
        "add the offset of the part, and compare the values of all ranks of {axes}",
    )
    LOCAL_SOFTMAX = (
        "local softmax",
        "the maximum or the sum of a softmax is only over one rank's part along {axes}",
        "take jax.lax.pmax of the maximum and jax.lax.psum of the sum over {axes}",
    )
    DIFFERS = (
        "differs",
        "its value is neither that of one device nor a part of it",
        "compare its operands with those on one device",
    )
    KEYS_OF_COPIES = (
        "other keys for copies",
        "the ranks of {axes} have the same values, but draw other random bits for them",
        "leave jax.lax.axis_index({axes}) out of the key where the values do not vary over it",
    )
    LOCAL_SCAN = (
        "local scan",
        "each rank of {axes} starts anew, although its part follows that of the rank before",
        "add what the ranks before have: gather their totals over {axes}, or gather the dim first",
    )
    LOCAL_ORDER = (
        "local order",
        "only one rank's part along {axes} is sorted",
        "gather the parts over {axes} by jax.lax.all_gather before sorting",
    )
    SUMMED_BY_GRAD = (
        "summed again by grad",
        "jax.grad transposes this sum over {axes} to a second sum, of gradients that every rank "
        "has whole already",
        "under check_vma=False give the sum a jax.custom_vjp that hands its gradient back as it "
        "is, or use check_vma=True",
    )

    @property
    def code(self) -> str:
        """A stable short name."""
        return f"PROVE1{list(Kind).index(self):02d}"


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a program.

    Args:
        file: its path.
        line: from 1.
        column: the column of the first character, from 0, or None.
        end_column: the column after the last character, or None.
        function: the qualified name of the enclosing function.
    """

    file: str
    line: int
    column: int | None = None
    end_column: int | None = None
    function: str = ""

    def __str__(self) -> str:
        """Formats it as `file.py:12`, relative to the working directory if it is inside."""
        path = os.path.relpath(self.file)
        return f"{self.file if path.startswith('..') else path}:{self.line}"

    def text(self) -> str:
        """Returns the indented source line, with carets below the columns."""
        line = linecache.getline(self.file, self.line).rstrip()
        if not line:
            return ""
        start = len(line) - len(line.lstrip()) if self.column is None else self.column
        end = len(line) if self.end_column is None else self.end_column
        shown = line.lstrip()
        cut = len(line) - len(shown)
        carets = " " * max(0, start - cut) + "^" * max(1, min(end, len(line)) - start)
        return f"    {shown}\n    {carets}\n"

    def as_sarif(self) -> dict[str, Any]:
        """Returns it as a location in SARIF, whose columns count from 1."""
        columns = {"startColumn": self.column, "endColumn": self.end_column}
        columns = {name: number + 1 for name, number in columns.items() if number is not None}
        region = {"startLine": max(1, self.line), **columns}
        uri = urllib.parse.quote(os.path.relpath(self.file).replace(os.sep, "/"))
        return {"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}


def places_of(frames: Iterable[Frame]) -> tuple[Place, ...]:
    """Converts frames to places, without those in which this package calls a user's function."""
    return tuple(
        Place(f.file, f.line, f.column, f.end_column, f.function.rpartition(".")[2])
        for f in frames
        if os.path.dirname(f.file) != os.path.dirname(__file__)
    )


@dataclasses.dataclass(frozen=True)
class Finding:
    """One mistake, or one reason why the function has no result for other meshes.

    Args:
        kind: the kind of mistake; None where the function cannot be tried on a mesh, or divides by
            a hard-coded mesh size, which may be right on the function's own mesh.
        places: its source lines, the most useful first.
        axes: the mesh axes at fault.
        mesh: the mesh on which it occurs.
        operation: the JAX operation with the first differing value.
        outputs: the outputs that are wrong because of it.
        difference: by how much the worst of them differs.
        bound: how much of that rounding explains.
        message: what could not be tried and why, or which size is hard-coded; empty for a mistake.
    """

    kind: Kind | None
    places: tuple[Place, ...]
    axes: tuple[str, ...]
    mesh: str
    operation: str = ""
    outputs: tuple[str, ...] = ()
    difference: float = 0.0
    bound: float = 0.0
    message: str = ""

    @property
    def code(self) -> str:
        """A stable short name."""
        return "PROVE010" if self.kind is None else self.kind.code

    @property
    def title(self) -> str:
        """The kind of mistake as text."""
        return "cannot be tried" if self.kind is None else str(self.kind)

    @property
    def place(self) -> Place | None:
        """The line to look at."""
        return self.places[0] if self.places else None

    @property
    def sentence(self) -> str:
        """What is wrong."""
        if self.kind is None:
            return self.message
        return self.kind.says.format(axes=_axes(self.axes))

    @property
    def repair(self) -> str:
        """What to do."""
        if self.kind is None:
            return (
                "run the function by itself first: it may fail without `prove`, too, as with the "
                "explicit axes that jax.make_mesh gives by default; if it runs, take sizes from "
                "the mesh, as jax.lax.axis_size does, or give make(mesh)"
            )
        return self.kind.repair.format(axes=_axes(self.axes))

    def __str__(self) -> str:
        """Formats the finding as a compiler would print it."""
        where = f"{self.place}: " if self.place else ""
        text = f"{where}{self.title} [{self.code}]: {self.sentence}\n"
        if self.place is not None:
            text += self.place.text()
        for place in self.places[1:]:
            text += f"    called from {place} in {place.function}\n"
        if self.kind is not None and self.outputs:
            outputs = ", ".join(self.outputs[:3]) + (" …" if len(self.outputs) > 3 else "")
            gap = "not a number" if math.isinf(self.difference) else f"{self.difference:.3g}"
            text += (
                f"    on mesh {self.mesh}, operation {self.operation}: {outputs} differs from one "
                f"device by {gap}; rounding explains {self.bound:.1g}\n"
            )
        return f"{text}    repair: {self.repair}"


def _axes(axes: tuple[str, ...]) -> str:
    names = [repr(axis) for axis in axes]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


@dataclasses.dataclass(frozen=True)
class Output:
    """The result for one output of the function.

    Args:
        name: its path in the function's return value.
        status: "proven" if it is equal for every input, "tried" if it was equal for all inputs that
            were drawn, "differs", or "unjudged" if the two cannot be compared.
        difference: the largest difference from one device.
        bound: how much of that rounding explains.
        reason: why it is unjudged; or, if it is only tried, the first operation without a rule.
    """

    name: str
    status: str
    difference: float = 0.0
    bound: float = 0.0
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a proof.

    Args:
        function: the name of the function.
        meshes: the meshes to compare, the first of which is that of one device. A mesh of several
            axes is skipped once another mesh has a finding, and one is not compared if the
            function cannot be traced on it.
        draws: how many inputs were tried.
        outputs: the result for each output.
        findings: the mistakes, and the findings without a kind.
    """

    function: str
    meshes: tuple[str, ...]
    draws: int
    outputs: tuple[Output, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def mistakes(self) -> tuple[Finding, ...]:
        """The findings that are mistakes."""
        return tuple(one for one in self.findings if one.kind is not None)

    @property
    def ok(self) -> bool:
        """Whether every mesh was tried, no mistake was found, and an output could be compared."""
        is_compared = any(output.status != "unjudged" for output in self.outputs)
        return not self.findings and is_compared

    @property
    def exit_code(self) -> int:
        """0 if all is well, 1 if a mistake was found, 2 if a mesh or output could not be tried."""
        return 0 if self.ok else 1 if self.mistakes else 2

    def __str__(self) -> str:
        """Formats the findings, followed by a summary line."""
        return "\n".join([*map(str, self.findings), self.summary()])

    def summary(self) -> str:
        """Returns one line: what was tried, and the result."""
        meshes = ", ".join(self.meshes[1:])
        draws = f"{self.draws} input{'s' * (self.draws != 1)}"
        if self.mistakes:
            count = len(self.mistakes)
            return f"{self.function}: {count} mistake{'s' * (count != 1)} on {meshes} ({draws})"
        if self.findings:
            return f"{self.function}: not all could be tried on {meshes} ({draws})"
        named = {s: [o for o in self.outputs if o.status == s] for s in ("proven", "tried")}
        unjudged = [output for output in self.outputs if output.status == "unjudged"]
        if len(unjudged) == len(self.outputs):
            return f"{self.function}: no output can be compared; {unjudged[0].reason}"
        text = (
            f"{self.function}: the same on {meshes} as on one device: of {len(self.outputs)} "
            f"output{'s' * (len(self.outputs) != 1)} {len(named['proven'])} proven for every "
            f"input, {len(named['tried'])} equal for {draws} tried"
        )
        reasons = [output.reason for output in named["tried"] if output.reason]
        text += f" ({reasons[0]})" if reasons else ""
        names = ", ".join(output.name for output in unjudged)
        return f"{text}; not compared: {names}" if unjudged else text

    def as_json(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        findings = [
            {
                **dataclasses.asdict(finding),
                "kind": finding.kind and str(finding.kind),
                "code": finding.code,
                "sentence": finding.sentence,
                "repair": finding.repair,
            }
            for finding in self.findings
        ]
        return finite({**dataclasses.asdict(self), "ok": self.ok, "findings": findings})

    def as_sarif(self) -> dict[str, Any]:
        """Returns the report in SARIF 2.1.0, which code review tools read."""
        rules = [
            {
                "id": code,
                "name": finding.title,
                "shortDescription": {"text": finding.title},
                "help": {"text": finding.repair},
            }
            for code, finding in {finding.code: finding for finding in self.findings}.items()
        ]
        results = [
            {
                "ruleId": finding.code,
                "level": "warning" if finding.kind is None else "error",
                "message": {"text": f"{finding.sentence}; {finding.repair}"},
                "locations": [place.as_sarif() for place in finding.places[:1]],
                "relatedLocations": [place.as_sarif() for place in finding.places[1:]],
            }
            for finding in self.findings
        ]
        return {
            "version": "2.1.0",
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "runs": [
                {"tool": {"driver": {"name": "axon prove", "rules": rules}}, "results": results}
            ],
        }

    def dumps(self, form: str) -> str:
        """Serializes the report as `json` or `sarif`."""
        return json.dumps(self.as_json() if form == "json" else self.as_sarif(), indent=1)


def finite(data: Any) -> Any:
    """Replaces infinities and NaN by None, which JSON writes as null, at any depth."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
