"""Which outputs of a program are those of one device for every input, not only for those tried.

Each value on the mesh is described by how it follows from that of one device: which dims are split
by which axes, over which axes the ranks have terms of a sum, and by which constant factor it is
larger. The description follows from those of the operands, by the rules of real numbers. Where no
rule is known the value has no description, and the output counts as tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..core.typing import Shape
from .program import Operation, Program, Read, Region, Value, plain

ANY = ("*",)
"""Of a dim along which all numbers are equal: any axes may split it."""

Split: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Description:
    """How a value on the ranks follows from the value of one device.

    Args:
        splits: for each dim the axes that split it, the slowest first, or `ANY`.
        over: axes whose ranks have terms of the value.
        reduction: the value is their "sum", "max" or "min".
        factor: the value on the mesh is so many times that of one device.
    """

    splits: tuple[Split, ...]
    over: frozenset[str] = frozenset()
    factor: float = 1.0
    reduction: str = "sum"

    @property
    def axes(self) -> list[str]:
        """The axes that split a dim."""
        return [axis for split in self.splits if split != ANY for axis in split]

    @property
    def is_sum(self) -> bool:
        """Whether it is the value, or terms that add up to it."""
        return not self.over or self.reduction == "sum"

    @property
    def is_exact(self) -> bool:
        """Whether it is the value of one device or parts of that."""
        return not self.over and math.isclose(self.factor, 1.0, rel_tol=1e-5)

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has the whole value of one device."""
        return self.is_exact and not any(self.splits)


_LINEAR = frozenset(
    {"neg", "convert_element_type", "copy", "copy_p", "pvary", "pcast", "stop_gradient", "name",
     "reduce_precision", "optimization_barrier", "real"}
)  # fmt: skip
_ELEMENTWISE = frozenset(
    {"exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "max", "min", "rsqrt", "sqrt",
     "sin", "cos", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "abs", "sign",
     "square", "erf", "erf_inv", "erfc", "pow", "integer_pow", "is_finite", "select_n", "clamp",
     "floor", "ceil", "round", "rem", "cbrt", "atan2", "nextafter", "one_minus_square",
     "copysign", "tan", "asinh", "acosh", "atanh", "sinh", "cosh"}
)  # fmt: skip
_SUMS = frozenset({"psum", "psum2", "psum_invariant"})
_COLLECTIVES = _SUMS | {
    "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant", "all_to_all",
    "reduce_scatter", "psum_scatter", "axis_index", "pbroadcast", "ragged_all_to_all",
}  # fmt: skip
_REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"})


def proven_outputs(real: Program, oracle: Program, sizes: Mapping[str, int]) -> set[int]:
    """The outputs that are those of one device for every input.

    Args:
        real: the program on a mesh.
        oracle: the same on a mesh whose axes are all 1.
        sizes: of the axes of the mesh.

    Returns:
        Their numbers.
    """
    names = [operation.name for operation in real.operations]
    if names != [operation.name for operation in oracle.operations]:
        return set()
    # Programs whose regions do not correspond are not proven.
    with contextlib.suppress(ValueError):
        return _Proof(sizes).run(real.region, oracle.region)
    return set()


class _Proof:
    """The descriptions of all values of a program on one mesh."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self._known: dict[Value, Description | None] = {}

    def run(self, real: Region, oracle: Region) -> set[int]:
        """The numbers of the outputs that are exact."""
        for mine in real.inputs:
            self._known[mine] = Description(((),) * len(mine.shape))
        outputs = self._region(real, oracle)
        return {n for n, one in enumerate(outputs) if one is not None and one.is_replicated}

    def _region(self, real: Region, oracle: Region) -> list[Description | None]:
        for mine, its in zip(real.constants, oracle.constants, strict=False):
            first, second = np.asarray(plain(mine.constant)), np.asarray(plain(its.constant))
            if np.array_equal(first, second):
                self._known[mine] = Description(((),) * len(mine.shape))
        for mine, its in zip(real.operations, oracle.operations, strict=True):
            results = self._results(mine, its)
            self._known.update(zip(mine.results, results, strict=True))
        pairs = zip(real.outputs, oracle.outputs, strict=True)
        return [self._read(mine, its) for mine, its in pairs]

    def _read(self, mine: Read, its: Read) -> Description | None:
        if isinstance(mine, Literal):
            if not isinstance(its, Literal):
                return None
            ratio = _ratio(mine, its)
            return None if ratio is None else Description((), factor=ratio)
        return self._known.get(mine)

    def _results(self, mine: Operation, its: Operation) -> list[Description | None]:
        none: list[Description | None] = [None] * len(mine.results)
        pairs = zip(mine.reads, its.reads, strict=True)
        reads = [self._read(first, second) for first, second in pairs]
        if mine.is_map:
            return self._map(mine, its, reads)
        known = [read for read in reads if read is not None]
        if len(known) != len(reads) or mine.regions:
            return none
        if mine.name in _SUMS:
            return [self._psum(mine, read) for read in known]
        if self._is_same_on_all(mine, its, known):
            return [Description(((),) * len(value.shape)) for value in mine.results]
        rule = _RULES.get(mine.name)
        if rule is None or len(mine.results) != 1 or not _is_same_kind(mine, its):
            return none
        return [_checked(rule(self, mine, its, known))]

    def _is_same_on_all(
        self, mine: Operation, its: Operation, reads: Sequence[Description]
    ) -> bool:
        """Whether each rank computes what one device does, of the same numbers."""
        if mine.name in _COLLECTIVES or not all(read.is_replicated for read in reads):
            return False
        if "callback" in mine.name or any("jaxpr" in key for key in mine.equation.params):
            return False
        shapes = [[value.shape for value in one.results] for one in (mine, its)]
        return shapes[0] == shapes[1] and _options(mine) == _options(its)

    def _map(
        self, mine: Operation, its: Operation, reads: Sequence[Description | None]
    ) -> list[Description | None]:
        params = mine.equation.params
        inside, outside = mine.regions[0], its.regions[0]
        for value, read, spec in zip(inside.inputs, reads, params["in_specs"], strict=True):
            if read is not None and read.is_replicated:
                self._known[value] = Description(self._splits(spec, len(value.shape)))
        results: list[Description | None] = []
        outputs = self._region(inside, outside)
        for value, found, spec in zip(mine.results, outputs, params["out_specs"], strict=True):
            splits = self._splits(spec, len(value.shape))
            is_right = found is not None and found.is_exact
            if found is not None and is_right and _merged(found.splits, splits) is not None:
                results.append(Description(((),) * len(value.shape)))
            else:
                results.append(None)
        shapes = [[value.shape for value in one.results] for one in (mine, its)]
        return results if shapes[0] == shapes[1] else [None] * len(results)

    def _splits(self, spec: Any, count: int) -> tuple[Split, ...]:
        splits = []
        for part in (*spec, *(None,) * (count - len(spec))):
            names = (part,) if isinstance(part, str) else tuple(part or ())
            splits.append(tuple(name for name in names if name in self._sizes))
        return tuple(splits)

    def _named(self, operation: Operation, key: str) -> list[str] | None:
        """The axes of a collective that have several ranks; None where it works in groups."""
        if operation.equation.params.get("axis_index_groups") is not None:
            return None
        names = operation.equation.params[key]
        names = (names,) if isinstance(names, str) else tuple(names)
        if not all(isinstance(name, str) for name in names):
            return None
        return [name for name in names if name in self._sizes]

    def _psum(self, operation: Operation, read: Description) -> Description | None:
        axes = self._named(operation, "axes")
        if axes is None or set(axes) & set(read.axes) or not read.is_sum:
            return None
        times = math.prod(self._sizes[axis] for axis in axes if axis not in read.over)
        return Description(read.splits, read.over - set(axes), read.factor * times)

    def pmax(self, mine: Operation, its: Operation, reads: list[Description]) -> Any:
        """The maximum of terms that are maxima, or of what all ranks have the same."""
        (read,), axes = reads, self._named(mine, "axes")
        if axes is None or set(axes) & set(read.axes):
            return None
        if read.is_exact:
            return read
        is_same = read.reduction == mine.name.removeprefix("p") and read.factor == 1.0
        return dataclasses.replace(read, over=read.over - set(axes)) if is_same else None

    def all_gather(self, mine: Operation, its: Operation, reads: list[Description]) -> Any:
        """Parts of a dim put together again, from the axis that splits it fastest."""
        (read,), params = reads, mine.equation.params
        axes, dim = self._named(mine, "axis_name"), params["all_gather_dimension"]
        if axes is None or not params["tiled"] or set(axes) & read.over:
            return None
        split = read.splits[dim]
        if split == ANY or split[len(split) - len(axes) :] != tuple(axes):
            return None
        rest = split[: len(split) - len(axes)]
        return dataclasses.replace(read, splits=_with(read.splits, dim, rest))

    def reduce_scatter(self, mine: Operation, its: Operation, reads: list[Description]) -> Any:
        """A sum over ranks, each of which keeps its part of a dim."""
        (read,), params = reads, mine.equation.params
        axes, dim = self._named(mine, "axis_name"), params["scatter_dimension"]
        if axes is None or not params["tiled"] or set(axes) & set(read.axes):
            return None
        if read.splits[dim] == ANY or not read.is_sum:
            return None
        times = math.prod(self._sizes[axis] for axis in axes if axis not in read.over)
        splits = _with(read.splits, dim, (*read.splits[dim], *axes))
        return Description(splits, read.over - set(axes), read.factor * times)


def _shape(read: Read) -> Shape:
    return tuple(getattr(read.aval, "shape", ()))


def _is_same_kind(mine: Operation, its: Operation) -> bool:
    """Whether two operations name the same dims: a rule reads these of one."""
    names = ("axes", "axis", "dimension_numbers", "permutation", "broadcast_dimensions")
    pairs = [(one.equation.params.get(name) for one in (mine, its)) for name in names]
    return all(first == second for first, second in pairs)


def _with(splits: tuple[Split, ...], dim: int, split: Split) -> tuple[Split, ...]:
    return (*splits[:dim], split, *splits[dim + 1 :])


def _checked(found: Description | None) -> Description | None:
    """A description in which each axis stands once."""
    if found is None:
        return None
    axes = [*found.axes, *found.over]
    return found if len(axes) == len(set(axes)) else None


def _ratio(mine: Literal, its: Literal) -> float | None:
    if np.ndim(mine.val) != 0:
        return None
    first, second = float(mine.val), float(its.val)
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 1.0
    return first / second if first and second and math.isfinite(first / second) else None


def _options(operation: Operation) -> dict[str, str]:
    params = operation.equation.params
    return {key: str(value) for key, value in params.items() if "sharding" not in key}


def _merged(*all_splits: tuple[Split, ...]) -> tuple[Split, ...] | None:
    """One way to split the dims that all agree on; operands of no dims agree with any."""
    several = [splits for splits in all_splits if splits]
    if not several:
        return ()
    merged = []
    for dims in zip(*several, strict=True):
        found = {split for split in dims if split != ANY}
        if len(found) > 1:
            return None
        merged.append(found.pop() if found else ANY)
    return tuple(merged)


def _of_all(its: Operation, reads: Sequence[Description]) -> tuple[Split, ...] | None:
    """How all operands are split; a dim of one that is repeated agrees with any."""
    shape = its.results[0].shape
    all_splits = []
    for atom, read in zip(its.reads, reads, strict=True):
        pairs = zip(read.splits, _shape(atom), shape, strict=False)
        repeated = [ANY if mine == 1 != whole else split for split, mine, whole in pairs]
        all_splits.append(tuple(repeated))
    return _merged(*all_splits)


def _linear(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    kinds = [mine.results[0].aval.dtype, *(getattr(r.aval, "dtype", None) for r in mine.reads)]
    is_real = all(kind is not None and jnp.issubdtype(kind, jnp.inexact) for kind in kinds)
    if len(reads) != 1 or not (is_real or reads[0].is_exact):
        return None
    return reads[0] if reads[0].is_sum or mine.name != "neg" else None


def _elementwise(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    splits = _of_all(its, reads)
    if (
        splits is None
        or not all(read.is_exact for read in reads)
        or _options(mine) != _options(its)
    ):
        return None
    return Description(splits)


def _add(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    splits = _of_all(its, reads)
    first, second = reads
    is_same = first.over == second.over and first.is_sum and second.is_sum
    is_same = is_same and math.isclose(first.factor, second.factor, rel_tol=1e-5)
    return Description(splits, first.over, first.factor) if splits is not None and is_same else None


def _mul(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    splits = _of_all(its, reads)
    first, second = reads
    if not (first.is_sum and second.is_sum):
        return None
    if splits is None or (first.over and second.over) or _is_integer(mine, reads):
        return None
    return Description(splits, first.over | second.over, first.factor * second.factor)


def _div(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    splits = _of_all(its, reads)
    first, second = reads
    if splits is None or second.over or not first.is_sum or _is_integer(mine, reads):
        return None
    return Description(splits, first.over, first.factor / second.factor)


def _is_integer(operation: Operation, reads: Sequence[Description]) -> bool:
    """Whether a quotient is rounded down, which keeps neither terms of a sum nor factors."""
    is_real = jnp.issubdtype(operation.results[0].aval.dtype, jnp.inexact)
    return not is_real and not all(read.is_exact for read in reads)


def _reduce_sum(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    read, dims = reads[0], mine.equation.params["axes"]
    over, factor = set(read.over), read.factor
    if not read.is_sum:
        return None
    for dim in dims:
        split = read.splits[dim]
        if split == ANY:
            factor *= _shape(mine.reads[0])[dim] / _shape(its.reads[0])[dim]
        elif set(split) & over:
            return None
        else:
            over |= set(split)
    rest = [split for dim, split in enumerate(read.splits) if dim not in dims]
    return Description(tuple(rest), frozenset(over), factor)


def _reduce(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    read, dims = reads[0], mine.equation.params["axes"]
    splits = [read.splits[dim] for dim in dims if read.splits[dim]]
    rest = tuple(split for dim, split in enumerate(read.splits) if dim not in dims)
    if not read.is_exact:
        return None
    if not splits:
        return Description(rest)
    if mine.name not in ("reduce_max", "reduce_min") or ANY in splits:
        return None
    over = frozenset(axis for split in splits for axis in split)
    return Description(rest, over, 1.0, mine.name.removeprefix("reduce_"))


def _broadcast(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    params, read = mine.equation.params, reads[0]
    places = params["broadcast_dimensions"]
    if len(reads) != 1:
        return None
    shapes = zip(params["shape"], its.equation.params["shape"], strict=True)
    splits: list[Split] = [() if mine_ == its_ else ANY for mine_, its_ in shapes]
    for at, dim in enumerate(places):
        pairs = [(_shape(o.reads[0])[at], o.equation.params["shape"][dim]) for o in (mine, its)]
        if all(before == after for before, after in pairs):
            splits[dim] = read.splits[at]
        elif read.splits[at]:
            return None
    return dataclasses.replace(read, splits=tuple(splits))


def _dot(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    left, right = reads
    (of_left, of_right), (batch_left, batch_right) = mine.equation.params["dimension_numbers"]
    if (left.over and right.over) or not (left.is_sum and right.is_sum):
        return None
    over, factor = set(left.over | right.over), left.factor * right.factor
    for a, b in zip(of_left, of_right, strict=True):
        merged = _merged((left.splits[a],), (right.splits[b],))
        if merged is None:
            return None
        if merged[0] == ANY:
            factor *= _shape(mine.reads[0])[a] / _shape(its.reads[0])[a]
        elif set(merged[0]) & over:
            return None
        else:
            over |= set(merged[0])
    batch = _merged(
        tuple(left.splits[d] for d in batch_left), tuple(right.splits[d] for d in batch_right)
    )
    if batch is None:
        return None
    free = [s for d, s in enumerate(left.splits) if d not in (*of_left, *batch_left)]
    free += [s for d, s in enumerate(right.splits) if d not in (*of_right, *batch_right)]
    return Description((*batch, *free), frozenset(over), factor)


def _transpose(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    order = mine.equation.params["permutation"]
    return dataclasses.replace(reads[0], splits=tuple(reads[0].splits[dim] for dim in order))


def _reshape(proof: _Proof, mine: Operation, its: Operation, reads: list[Description]) -> Any:
    """Adding and dropping dims of one, or any reshape of what no axis splits."""
    read, shapes = reads[0], [one.results[0].shape for one in (mine, its)]
    before = [_shape(one.reads[0]) for one in (mine, its)]
    if not any(read.splits) and shapes[0] == shapes[1] and before[0] == before[1]:
        return dataclasses.replace(read, splits=((),) * len(shapes[0]))
    kept = [dim for dim, size in enumerate(before[1]) if size != 1]
    places = [dim for dim, size in enumerate(shapes[1]) if size != 1]
    if [before[1][dim] for dim in kept] != [shapes[1][dim] for dim in places]:
        return None
    if [before[0][dim] for dim in kept] != [shapes[0][dim] for dim in places]:
        return None
    splits: list[Split] = [()] * len(shapes[0])
    for old, new in zip(kept, places, strict=True):
        splits[new] = read.splits[old]
    lost = [s for dim, s in enumerate(read.splits) if dim not in kept]
    return dataclasses.replace(read, splits=tuple(splits)) if not any(lost) else None


_Rule: TypeAlias = Callable[[_Proof, Operation, Operation, list[Description]], Any]

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_LINEAR, _linear),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(("add", "sub", "add_any"), _add),
    **dict.fromkeys(("pmax", "pmin"), _Proof.pmax),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _Proof.all_gather),
    **dict.fromkeys(("reduce_scatter", "psum_scatter"), _Proof.reduce_scatter),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "mul": _mul,
    "div": _div,
    "reduce_sum": _reduce_sum,
    "broadcast_in_dim": _broadcast,
    "dot_general": _dot,
    "transpose": _transpose,
}
