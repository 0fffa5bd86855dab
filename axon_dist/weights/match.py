"""Matches tensors to parameters by name and shape; anything unmatched raises."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..checkpoint import TensorEntry
from ..core.checks import is_dtype
from ..core.errors import CheckpointError
from ..core.typing import Path, Shape
from ..core.words import first_few
from ..models.weight_rules import Form, WeightRule, WeightRules, shorten

CHUNK = 64 * 2**20
"""The maximum bytes of a file that are in memory at a time, unless a single row is larger."""


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """A part of a tensor that fills a part of a parameter.

    Args:
        entry: the tensor.
        form: maps the dims of the tensor to those of the parameter.
        row: the index in the leading (stacked) dims of the parameter, which the tensor lacks.
        dim: the dim, after `form`, along which tensor or parameter is cut; None if neither is cut.
        start: the start of the part along `dim` in the tensor.
        at: the start of the part along `dim` in the parameter.
        size: the length of the part along `dim`.
    """

    entry: TensorEntry
    form: Form = Form()
    row: tuple[int, ...] = ()
    dim: int | None = None
    start: int = 0
    at: int = 0
    size: int = 0

    def fill(self, out: np.ndarray, index: Sequence[slice]) -> None:
        """Reads the overlap of this part with a slice of the parameter.

        Args:
            out: the array of the slice, written in place.
            index: the slice of the parameter, with start and stop.
        """
        inner = list(index)
        for row in self.row:
            rows = inner.pop(0)
            if not rows.start <= row < rows.stop:
                return
            out = out[row - rows.start, ...]
        if self.dim is not None:
            wanted = inner[self.dim]
            low = max(wanted.start, self.at)
            high = min(wanted.stop, self.at + self.size)
            if low >= high:
                return
            here = slice(low - wanted.start, high - wanted.start)
            out = out[(slice(None),) * self.dim + (here, ...)]
            shift = self.start - self.at
            inner[self.dim] = slice(low + shift, high + shift)
        self._copy(out, inner)

    def _copy(self, out: np.ndarray, index: list[slice]) -> None:
        """Copies in chunks, each with a new memory map: a map keeps all pages that were read."""
        if not index:
            out[...] = self.form.take(self.entry.open(), ())
            return
        along = self.form.leading
        first = index[along].start
        last = index[along].stop
        length = self.form.shape_of(self.entry.shape)[along]
        step = max(1, CHUNK * length // max(1, self.entry.size))
        for low in range(first, last, step):
            high = min(last, low + step)
            index[along] = slice(low, high)
            here = (slice(None),) * along + (slice(low - first, high - first),)
            out[here] = self.form.take(self.entry.open(), index)


@dataclasses.dataclass(frozen=True)
class ParameterSource:
    """All parts of a parameter.

    Args:
        shape: the shape of the parameter.
        dtype: the dtype of the parameter, to which values are converted.
        pieces: the parts, which cover the parameter without gaps.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from axon_dist.checkpoint import list_tensors, write_tensors
        >>> path = Path(tempfile.mkdtemp(), "w.safetensors")
        >>> write_tensors(path, {"w": np.eye(2)}, [np.array([[1.0, 2.0], [3.0, 4.0]])])
        >>> turned = TensorPart(list_tensors(path)["w"], Form("out in -> in out"))
        >>> source = ParameterSource((2, 2), np.dtype("float32"), (turned,))
        >>> source.read((slice(0, 1), slice(None))).tolist()
        [[1.0, 3.0]]
    """

    shape: Shape
    dtype: np.dtype
    pieces: tuple[TensorPart, ...]

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Reads a slice into new memory; no other part of the files stays in memory."""
        bounds = [slice(*part.indices(n)[:2]) for part, n in zip(index, self.shape, strict=True)]
        out = np.empty([part.stop - part.start for part in bounds], self.dtype)
        for piece in self.pieces:
            piece.fill(out, bounds)
        return out


@dataclasses.dataclass(frozen=True)
class _Target:
    """The parameters of one rule match, and the names of the tensors that fill them."""

    rule: WeightRule
    paths: tuple[Path, ...]
    tensors: dict[tuple[int, tuple[int, ...]], str]
    groups: Mapping[str, str]


@dataclasses.dataclass
class _Matching:
    """Matches tensors to parameters and collects mismatches."""

    entries: Mapping[str, TensorEntry]
    rules: WeightRules
    missing: list[str] = dataclasses.field(default_factory=list)
    left_over: list[str] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)

    def check(self, files: str) -> None:
        texts = [
            f"missing in the files: {shorten(self.missing)}" if self.missing else "",
            f"left over: {shorten(self.left_over)}" if self.left_over else "",
            first_few(self.others, between="; ", more=" of this kind"),
        ]
        if any(texts):
            raise CheckpointError(
                f"the weights in {files} do not fit the model: "
                f"{'; '.join(filter(None, texts))}. Nothing was loaded: make the model with the "
                "sizes of these weights, or give rules that name these tensors; list unwanted "
                "tensors in the rules' `ignored`, and parameters that keep their initial values in "
                "keep=(...)",
                code="weights-do-not-fit",
            )

    def check_copies(self) -> None:
        for pattern, original in self.rules.copies.items():
            for name in filter(re.compile(pattern).fullmatch, self.entries):
                same = next(filter(re.compile(original).fullmatch, self.entries), None)
                if same is None or not _is_same(self.entries[name], self.entries[same]):
                    self.others.append(
                        f"{name} must equal {same or original} bit for bit, but does not: the "
                        "model has one array for both"
                    )

    def targets(self) -> list[_Target]:
        """Groups the tensors that fill the same parameters."""
        targets: dict[tuple[tuple[str, ...], tuple[Path, ...]], _Target] = {}
        unused = [*self.rules.ignored, *self.rules.copies]
        for name in self.entries:
            for rule in self.rules.rules:
                if hit := rule.match(name):
                    break
            else:
                if not any(re.fullmatch(pattern, name) for pattern in unused):
                    self.left_over.append(name)
                continue
            number, groups = hit
            row = tuple(int(groups.pop(group)) for group in rule.stacked)
            paths = rule.paths_of(groups)
            new = _Target(rule, paths, {}, groups)
            target = targets.setdefault((tuple(rule.names), paths), new)
            if other := target.tensors.get((number, row)):
                self.others.append(f"both {other} and {name} are for {' + '.join(paths)}")
            target.tensors[number, row] = name
        return list(targets.values())

    def pieces(self, target: _Target, shapes: Mapping[Path, Shape]) -> dict[Path, list[TensorPart]]:
        """Returns the parts of a target's parameters; records missing tensors."""
        rule = target.rule
        form = rule.as_form
        lead = len(rule.stacked)
        counts = [
            min(shape[dim : dim + 1] or (0,) for shape in shapes.values()) for dim in range(lead)
        ]
        rows = list(itertools.product(*(range(count) for (count,) in counts)))
        wanted = [(number, row) for row in rows for number in range(len(rule.names))]
        self.left_over += [n for key, n in target.tensors.items() if key not in wanted]
        self.missing += [_name(target, *key) for key in wanted if key not in target.tensors]
        parts: dict[Path, list[TensorPart]] = {path: [] for path in target.paths}
        inner = [shape[lead:] for shape in shapes.values()]
        for row in rows:
            names = [target.tensors.get((number, row)) for number in range(len(rule.names))]
            if None in names:
                continue
            formed = [self._formed(name, form) for name in names if name]
            if None in formed:
                continue
            if not _add_up([shape for shape in formed if shape is not None], inner, rule.dim):
                self.others.append(self._shape_text(target, [n for n in names if n], shapes))
                continue
            cuts = _cuts(formed, inner, rule.dim)
            for (path, tensor), (start, at, size, dim) in cuts.items():
                entry = self.entries[str(names[tensor])]
                parts[target.paths[path]].append(TensorPart(entry, form, row, dim, start, at, size))
        return parts

    def _formed(self, name: str, form: Form) -> Shape | None:
        """Returns the shape of a tensor after `form`; records a mismatch and returns None."""
        shape = self.entries[name].shape
        if fault := form.fault(shape):
            self.others.append(f"{name} is {list(shape)}: {fault}")
            return None
        return form.shape_of(shape)

    def _shape_text(self, target: _Target, names: list[str], shapes: Mapping[Path, Shape]) -> str:
        tensors = " + ".join(f"{name} {list(self.entries[name].shape)}" for name in names)
        form = f" as {target.rule.form!r}" if target.rule.form else ""
        params = " + ".join(f"{path} {list(shape)}" for path, shape in shapes.items())
        return f"{tensors} of the files{form} cannot be {params} of the model"

    def check_dtypes(
        self, path: Path, source: ParameterSource, target: _Target, cast: bool
    ) -> None:
        for dtype in {piece.entry.dtype for piece in source.pieces} - {source.dtype}:
            is_float = all(is_dtype(kind, jnp.floating) for kind in (dtype, source.dtype))
            if cast and is_float:
                continue
            name = next(iter(target.tensors.values()))
            advice = "cast=True converts" if is_float else "only floats can be converted"
            self.others.append(f"{name} is {dtype} and {path} is {source.dtype} ({advice})")


def match_weights(
    entries: Mapping[str, TensorEntry],
    targets: Mapping[Path, Any],
    rules: WeightRules,
    *,
    files: str,
    cast: bool = False,
    keep: Iterable[str] = (),
) -> dict[Path, ParameterSource]:
    """Finds the source of every parameter; reads values only to compare `rules.copies`.

    Args:
        entries: the tensors, by name.
        targets: the parameters by path, anything with shape and dtype.
        rules: the table that maps tensors to parameters.
        files: the description of the files in error messages.
        cast: whether floats of other dtypes are converted.
        keep: regular expressions of paths that may be missing.

    Returns:
        The sources by path, in the order of the targets, without missing ones that `keep` allows.

    Raises:
        CheckpointError: when tensors are missing, left over, or have the wrong shape or dtype.
    """
    matching = _Matching(entries, rules)
    matching.check_copies()
    sources: dict[Path, ParameterSource] = {}
    for target in matching.targets():
        if any(path not in targets for path in target.paths):
            matching.left_over += target.tensors.values()
            continue
        shapes = {path: tuple(targets[path].shape) for path in target.paths}
        for path, parts in matching.pieces(target, shapes).items():
            if path in sources:
                matching.others.append(f"two rules give {path}")
            sources[path] = ParameterSource(
                shapes[path], np.dtype(targets[path].dtype), tuple(parts)
            )
            matching.check_dtypes(path, sources[path], target, cast)
    for path in targets:
        if path not in sources and not any(re.fullmatch(pattern, path) for pattern in keep):
            matching.missing.append(path)
    matching.check(files)
    return {path: sources[path] for path in targets if path in sources}


def _add_up(tensors: list[Shape], params: list[Shape], dim: int) -> bool:
    """Whether the concatenated tensors are as large as the concatenated parameters."""
    if len(tensors) == len(params) == 1:
        return tensors == params
    if any(len(shape) <= dim for shape in (*tensors, *params)):
        return False
    rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in (*tensors, *params)}
    lengths = [sum(shape[dim] for shape in side) for side in (tensors, params)]
    return len(rest) == 1 and lengths[0] == lengths[1]


def _cuts(
    tensors: list[Any], params: list[Shape], dim: int
) -> dict[tuple[int, int], tuple[int, int, int, int | None]]:
    """Returns start, at, size and dim of each part, by the indices of parameter and tensor."""
    if len(tensors) == len(params) == 1:
        return {(0, 0): (0, 0, 0, None)}
    sizes = [shape[dim] for shape in (params if len(tensors) == 1 else tensors)]
    # `accumulate` yields one more number, the total.
    spans = enumerate(zip(itertools.accumulate([0, *sizes]), sizes, strict=False))
    if len(tensors) == 1:
        return {(number, 0): (start, 0, size, dim) for number, (start, size) in spans}
    return {(0, number): (0, at, size, dim) for number, (at, size) in spans}


def _name(target: _Target, number: int, row: tuple[int, ...]) -> str:
    """Returns the name of a missing tensor."""
    rule = target.rule
    groups = {**target.groups, **dict(zip(rule.stacked, map(str, row), strict=True))}
    return rule.name_of(number, groups)


def _is_same(one: TensorEntry, other: TensorEntry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    rows = range(0, max(one.shape[:1], default=0) or 1, 4096)

    def bits(entry, row):
        return np.ascontiguousarray(np.atleast_1d(entry.open())[row : row + 4096]).tobytes()

    return all(bits(one, row) == bits(other, row) for row in rows)
