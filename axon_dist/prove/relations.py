"""Finds how the ranks' values make up that of one device: equal, split, or terms of a reduction.

The value of one device is known, so a relation is found by trial. For each way in which the mesh
axes can split the dims of an array, the values along the remaining axes are compared, or reduced.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

Split: TypeAlias = tuple[str, ...]
"""The mesh axes that split a dim, the slowest first."""

ANY = ("*",)
"""The split of a dim along which all numbers are equal: any axes may split it."""

SUM, MEAN, MAX, MIN = "sum", "mean", "max", "min"

NOISY_RUNS = 3
"""How often a program runs with perturbed results, to measure what rounding changes."""

_TIMES = 16.0
"""The rounding bound is this many times the change seen in runs with perturbed results."""

_UNITS = 8.0
"""The bound adds this many units in the last place of the largest number, as a floor."""

_LINEAR = (SUM, MEAN)

_REDUCTIONS = {SUM: np.sum, MEAN: np.mean, MAX: np.max, MIN: np.min}


@dataclasses.dataclass(frozen=True)
class Relation:
    """How the values of the ranks make up that of one device.

    Args:
        splits: for each dim the axes that split it, or `ANY`.
        over: the axes over whose ranks a reduction gives the value; none where each rank has it.
        factor: the value on the mesh divided by that on one device.
        reduction: the reduction over these axes: sum, mean, maximum or minimum.
    """

    splits: tuple[Split, ...] = ()
    over: frozenset[str] = frozenset()
    factor: float = 1.0
    reduction: str = SUM

    @property
    def axes(self) -> list[str]:
        """All axes that split a dim."""
        return [axis for split in self.splits if split != ANY for axis in split]

    @property
    def is_whole(self) -> bool:
        """Whether each rank has the value or its part of it, except for the factor."""
        return not self.over

    @property
    def is_sum(self) -> bool:
        """Whether it is the value itself, or terms that add up to it."""
        return self.is_whole or self.reduction == SUM

    @property
    def is_exact(self) -> bool:
        """Whether it is the value of one device, or a part of it."""
        return self.is_whole and math.isclose(self.factor, 1.0, rel_tol=1e-5)

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has the whole value of one device."""
        return self.is_exact and not any(self.splits)


@dataclasses.dataclass(frozen=True)
class RankValues:
    """A value on all ranks of a mesh.

    Args:
        values: the ranks' values, with one leading dim per axis.
        axes: the mesh axes, in the order of the leading dims.
    """

    values: np.ndarray
    axes: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis."""
        return dict(zip(self.axes, self.values.shape, strict=False))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on one rank."""
        return self.values.shape[len(self.axes) :]

    def ranks(self) -> np.ndarray:
        """Returns the values with all axes merged into one leading dim."""
        return self.values.reshape(-1, *self.shape)


def names_of(part: Any) -> tuple[str, ...]:
    """Returns the axes in one entry of a `PartitionSpec`."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def splits_of(spec: Any, num_dims: int, sizes: Mapping[str, int]) -> tuple[Split, ...]:
    """Returns how a `PartitionSpec` splits the dims of an array, by axes with several ranks."""
    parts = (*spec, *(None,) * (num_dims - len(spec)))
    return tuple(tuple(n for n in names_of(part) if sizes.get(n, 1) > 1) for part in parts)


def wide(values: np.ndarray) -> np.ndarray:
    """Returns numbers in the widest dtype of their kind: float64, or complex128."""
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def differs(one: np.ndarray, other: np.ndarray, bound: float) -> float:
    """Returns the largest difference of two arrays if it exceeds a bound, else 0.0."""
    if one.shape != other.shape:
        return math.inf
    with np.errstate(all="ignore"):
        left, right = wide(one), wide(other)
        gap = np.abs(left - right)
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        gap = np.where(same, 0.0, np.where(np.isnan(gap), np.inf, gap))
    most = float(gap.max(initial=0.0))
    return most if most > bound else 0.0


def bound_of(runs: Sequence[np.ndarray], dtype: Any = None) -> float:
    """Returns by how much rounding may change a value, from runs with perturbed results.

    Args:
        runs: the unperturbed value, then the value of each perturbed run.
        dtype: the dtype in which the value was computed; by default that of the runs.
    """
    first = runs[0]
    dtype = first.dtype if dtype is None else dtype
    moved = max(differs(run, first, 0.0) for run in runs[1:])
    if not jnp.issubdtype(dtype, jnp.inexact):
        return moved
    sizes = np.abs(wide(first))
    largest = float(sizes[np.isfinite(sizes)].max(initial=0.0))
    return _TIMES * moved + _UNITS * float(jnp.finfo(dtype).eps) * largest


def ways_to_split(
    shape: Sequence[int], whole: Sequence[int], sizes: Mapping[str, int]
) -> Iterator[tuple[Split, ...]]:
    """Yields each way in which axes can split the dims of `whole` so that a rank has `shape`.

    Example:
        >>> list(ways_to_split((2, 3), (8, 3), {"dp": 4, "tp": 2}))
        [(('dp',), ())]
    """
    if not shape and not whole:
        yield ()
    if len(shape) != len(whole) or not shape:
        return
    several = {name: size for name, size in sizes.items() if size > 1}
    for count in range(len(several) + 1):
        for split in itertools.permutations(several, count):
            if math.prod(several[axis] for axis in split) * shape[0] == whole[0]:
                rest = {axis: size for axis, size in several.items() if axis not in split}
                for others in ways_to_split(shape[1:], whole[1:], rest):
                    yield (split, *others)


def assembled(by_rank: RankValues, splits: tuple[Split, ...]) -> RankValues:
    """Concatenates the ranks' parts along their split dims; the other axes stay leading dims."""
    used = {axis for split in splits for axis in split}
    rest = tuple(axis for axis in by_rank.axes if axis not in used)
    order = [by_rank.axes.index(axis) for axis in rest]
    shape = [by_rank.sizes[axis] for axis in rest]
    for dim, split in enumerate(splits):
        order += [*map(by_rank.axes.index, split), len(by_rank.axes) + dim]
        shape.append(math.prod(by_rank.sizes[axis] for axis in split) * by_rank.shape[dim])
    return RankValues(by_rank.values.transpose(order).reshape(shape), rest)


def _groups(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns all sets of axes that have several ranks, the smallest first."""
    axes = [name for name, size in sizes.items() if size > 1]
    counts = range(1, len(axes) + 1)
    return [group for count in counts for group in itertools.combinations(axes, count)]


def _parts(array: np.ndarray, length: int, dim: int) -> list[np.ndarray]:
    return np.split(array, array.shape[dim] // length, axis=dim)


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A value on all ranks of a mesh, and the value of one device.

    Args:
        by_rank: the values of all ranks.
        whole: the value of one device.
        bound: by how much rounding alone may change it.
        sizes: the sizes of the mesh axes.
    """

    by_rank: RankValues
    whole: np.ndarray
    bound: float
    sizes: Mapping[str, int]

    def relation(self) -> Relation | None:
        """Returns how the values of the ranks make up that of one device, or None."""
        pair = self._with_axes_of_dims()
        ranks = pair.by_rank
        for splits in ways_to_split(ranks.shape, pair.whole.shape, ranks.sizes):
            relation = pair._reduced(assembled(ranks, splits), splits)
            if relation is not None:
                return relation
        is_as_large = not self.by_rank.axes and self.by_rank.values.size == self.whole.size
        is_reshaped = is_as_large and self._are_whole(
            [self.by_rank.values.reshape(self.whole.shape)]
        )
        return Relation() if is_reshaped else None

    def _are_whole(self, arrays: Iterable[np.ndarray]) -> bool:
        """Whether all arrays equal the value of one device."""
        return not any(differs(one, self.whole, self.bound) for one in arrays)

    def _reduced(self, by_rank: RankValues, splits: tuple[Split, ...]) -> Relation | None:
        """Returns the relation of values with these splits that are equal, or to be reduced."""
        if self._are_whole(by_rank.ranks()):
            return Relation(splits)
        if self.whole.dtype.kind not in "fiuc":
            return None
        values = wide(by_rank.values)
        # Complex numbers have no largest one.
        known = {n: r for n, r in _REDUCTIONS.items() if values.dtype.kind == "f" or n in _LINEAR}
        for over, (name, reduce) in itertools.product(_groups(by_rank.sizes), known.items()):
            dims = tuple(by_rank.axes.index(axis) for axis in over)
            with np.errstate(all="ignore"):
                got = reduce(values, axis=dims).reshape(-1, *self.whole.shape)
            if self._are_whole(got):
                return Relation(splits, frozenset(over), reduction=name)
        return None

    def factor(self) -> float:
        """Returns the factor of all ranks' values to one device's: a size, or one by a size.

        Returns:
            A product of sizes of axes, or its inverse; 0.0 if none explains the values.
        """
        for group in _groups(self.sizes):
            times = math.prod(self.sizes[name] for name in group)
            for factor in (float(times), 1.0 / times):
                scaled_whole = wide(self.whole) * factor
                scaled = Pair(self.by_rank, scaled_whole, self.bound * max(factor, 1.0), self.sizes)
                relation = scaled.relation()
                if relation is not None and relation.is_whole:
                    return factor
        return 0.0

    def is_permuted(self) -> bool:
        """Whether each rank has parts of the value of one device, though not its own parts."""
        blocks = {math.prod(self.sizes[name] for name in group) for group in _groups(self.sizes)}
        pair = self._with_axes_of_dims()
        ranks, whole = pair.by_rank.ranks(), pair.whole
        if pair.by_rank.shape == whole.shape and whole.size > 8 and whole.dtype.kind == "f":
            ordered = dataclasses.replace(pair, whole=np.sort(whole, axis=None))
            if ordered._are_whole(np.sort(rank, axis=None) for rank in ranks):
                return True
        if ranks.ndim - 1 != whole.ndim:
            return False
        for dim, count in itertools.product(range(whole.ndim), sorted(blocks)):
            length, rest = divmod(whole.shape[dim], count)
            if rest or length == 0 or pair.by_rank.shape[dim] % length:
                continue
            parts = _parts(whole, length, dim)
            own = [part for rank in ranks for part in _parts(rank, length, dim)]
            if all(any(not differs(p, part, self.bound) for part in parts) for p in own):
                return True
        return False

    def is_first_part(self) -> bool:
        """Whether all ranks have the first part of the value of one device."""
        pair = self._with_axes_of_dims()
        shape = pair.by_rank.shape
        if shape == pair.whole.shape or len(shape) != pair.whole.ndim:
            return False
        first = pair.whole[tuple(slice(0, size) for size in shape)]
        return dataclasses.replace(pair, whole=first)._are_whole(pair.by_rank.ranks())

    def _with_axes_of_dims(self) -> Pair:
        """Treats array dims with one entry per rank as mesh axes, and drops them from `whole`.

        Programs outside a `shard_map` may write `x.reshape(mesh.shape["dp"], -1)` and map over the
        rows; on one device that dim has size 1.
        """
        values, whole = self.by_rank.values, self.whole
        axes = list(self.by_rank.axes)
        if len(self.by_rank.shape) != whole.ndim or self.by_rank.shape == whole.shape:
            return self
        for name, size in self.sizes.items():
            offset = len(axes)
            dims = zip(values.shape[offset:], whole.shape, strict=True)
            at = [d for d, (local, full) in enumerate(dims) if local == size and full == 1]
            if size == 1 or not at:
                continue
            if name in axes:
                # Every rank may hold the same stack of all ranks' parts.
                rank = axes.index(name)
                if not (values == np.take(values, [0], rank)).all():
                    continue
                values = np.take(values, 0, rank)
                axes.pop(rank)
                offset -= 1
            values = np.moveaxis(values, offset + at[0], 0)
            whole = np.squeeze(whole, at[0])
            axes.insert(0, name)
        return Pair(RankValues(values, tuple(axes)), whole, self.bound, self.sizes)
