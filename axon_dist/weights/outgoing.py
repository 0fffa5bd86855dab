"""`Outgoing`: a tensor to be written, and how it is made of parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from axon_dist.checkpoint import gather
from axon_dist.core.errors import ConfigError
from axon_dist.core.typing import Array, Path, Shape

from .names import shorten
from .rule import Rule, WeightRules


@dataclasses.dataclass(frozen=True)
class Outgoing:
    """A tensor of a file: the inverse of what a rule does when it is read.

    Args:
        name: of the tensor.
        rule: the rule that reads it.
        paths: the parameters that it is made of.
        dtype: of the tensor.
        shape: of the tensor.
        row: of dim 0 of the parameter; None takes all.
        cut: start and stop along `rule.dim` of the parameter; None takes all.
    """

    name: str
    rule: Rule
    paths: tuple[Path, ...]
    dtype: np.dtype
    shape: Shape
    row: int | None = None
    cut: tuple[int, int] | None = None

    @property
    def size(self) -> int:
        """In bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def values(self, weights: Mapping[Path, Array]) -> Iterator[np.ndarray]:
        """Yields the tensor on process 0, and nothing on the others; all must go through it."""
        leaves = [
            weights[path] if self.row is None else weights[path][self.row] for path in self.paths
        ]
        if self.cut is not None:
            along = (slice(None),) * self.rule.dim + (slice(*self.cut),)
            leaves = [leaf[along] for leaf in leaves]
        arrays = list(gather(leaves))
        if arrays:
            joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, self.rule.dim)
            yield self.rule.as_form.inverse.apply(joined).astype(self.dtype)


def outgoing(
    weights: Mapping[Path, Any], rules: WeightRules, dtype: np.dtype | None = None
) -> list[Outgoing]:
    """What is written of the arrays of a model: each of them once.

    Args:
        weights: anything with shape and dtype, by path.
        rules: which tensor is which array.
        dtype: in place of other dtypes of floats; None keeps them.

    Raises:
        ConfigError: when no rule names an array, the name is not unique, or it would be read back
            by another rule.
    """
    found: dict[str, Outgoing] = {}
    unnamed, done = [], set()
    for path in weights:
        if path in done:
            continue
        hit = next(((r, groups) for r in rules.rules if (groups := r.groups_of(path))), None)
        if hit is None:
            unnamed.append(path)
            continue
        rule, (_, groups) = hit
        paths = rule.paths_of(groups)
        if absent := [other for other in paths if other not in weights]:
            raise ConfigError(f"{rule} needs {shorten(absent)}, which the model lacks")
        done.update(paths)
        for tensor in _tensors(rule, groups, {p: weights[p] for p in paths}, dtype):
            _check_read_back(tensor, rules, groups)
            if tensor.name in found:
                raise ConfigError(f"{rule} gives the name {tensor.name!r} a second time")
            found[tensor.name] = tensor
    if unnamed:
        raise ConfigError(
            f"no rule says under which name to write {shorten(unnamed)}; add rules, or write "
            "native names"
        )
    return list(found.values())


def _tensors(
    rule: Rule, groups: Mapping[str, str], leaves: Mapping[Path, Any], dtype: np.dtype | None
) -> Iterator[Outgoing]:
    first, *others = leaves.values()
    kept = np.dtype(first.dtype)
    is_float = kept.kind == "f" or "float" in kept.name
    kind = dtype if dtype is not None and is_float else kept
    rows: list[int | None] = [None] if rule.stack is None else list(range(first.shape[0]))
    shape = list(first.shape if rule.stack is None else first.shape[1:])
    if others:
        shape[rule.dim] = sum(leaf.shape[rule.dim - len(shape)] for leaf in leaves.values())
    cuts = _cuts(rule, shape)
    for row in rows:
        for number, cut in enumerate(cuts):
            whole = [*shape]
            if cut is not None:
                whole[rule.dim] = cut[1] - cut[0]
            name = rule.name_of(
                number, {**groups, **({} if row is None else {str(rule.stack): str(row)})}
            )
            form = rule.as_form.inverse
            if fault := form.fault(tuple(whole)):
                raise ConfigError(f"{rule} cannot write {' + '.join(leaves)}: {fault}")
            yield Outgoing(name, rule, tuple(leaves), kind, form.shape_of(tuple(whole)), row, cut)


def _cuts(rule: Rule, shape: list[int]) -> list[tuple[int, int] | None]:
    count = len(rule.names)
    if count == 1:
        return [None]
    length = shape[rule.dim]
    parts = rule.parts or (length // count,) * count
    if sum(parts) != length:
        raise ConfigError(
            f"{rule}: parts {list(parts)} are not the length {length} of dim {rule.dim}"
        )
    ends = [sum(parts[: i + 1]) for i in range(count)]
    return [(end - size, end) for end, size in zip(ends, parts, strict=True)]


def _check_read_back(tensor: Outgoing, rules: WeightRules, groups: Mapping[str, str]) -> None:
    """Whether the first rule that fits the name is the one that wrote it."""
    reader, hit = next(
        ((r, hit) for r in rules.rules if (hit := r.match(tensor.name))), (None, None)
    )
    if reader is None or hit is None or reader.paths_of({**hit[1]}) != tensor.paths:
        raise ConfigError(
            f"{tensor.rule} would write {tensor.name!r}, which {reader or 'no rule'} reads; put "
            "rules with longer names first"
        )
