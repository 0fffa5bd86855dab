"""Proves which outputs of a program equal those of one device for every input, not only as tried.

Each value on the mesh has a description relative to its value on one device: which axes split which
dims, over which axes the ranks hold terms of a sum, and by which constant factor it is larger. A
rule per primitive derives a result's description from those of the operands, in real arithmetic.
Where no rule is known the value has no description, and the output only counts as tried.
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
"""The split of a dim along which all numbers are equal: any axes may split it."""

Split: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Description:
    """How a value on the ranks relates to the value on one device.

    Args:
        splits: for each dim the axes that split it, the slowest first, or `ANY`.
        over: axes whose ranks hold terms of the value.
        reduction: how the terms combine to the value: "sum", "max" or "min".
        factor: the value on the mesh divided by that on one device.
    """

    splits: tuple[Split, ...]
    over: frozenset[str] = frozenset()
    factor: float = 1.0
    reduction: str = "sum"

    @property
    def axes(self) -> list[str]:
        """All axes that split a dim."""
        return [axis for split in self.splits if split != ANY for axis in split]

    @property
    def is_sum(self) -> bool:
        """Whether it is the value itself, or terms that add up to it."""
        return not self.over or self.reduction == "sum"

    @property
    def is_exact(self) -> bool:
        """Whether it is the value of one device, or a slice of it."""
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
    """Returns the numbers of the outputs that equal those of one device for every input.

    Args:
        real: the program on a mesh.
        oracle: the same program on a mesh whose axes are all 1.
        sizes: the sizes of the mesh axes.
    """
    names = [operation.name for operation in real.operations]
    if names != [operation.name for operation in oracle.operations]:
        return set()
    # Regions that do not correspond raise a ValueError; such programs are not proven.
    with contextlib.suppress(ValueError):
        return _Proof(sizes).run(real.region, oracle.region)
    return set()


class _Proof:
    """The descriptions of all values of a program on one mesh."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self._known: dict[Value, Description | None] = {}

    def run(self, real: Region, oracle: Region) -> set[int]:
        """Returns the numbers of the outputs that are exact and replicated."""
        for on_mesh in real.inputs:
            self._known[on_mesh] = Description(((),) * len(on_mesh.shape))
        outputs = self._region(real, oracle)
        return {n for n, one in enumerate(outputs) if one is not None and one.is_replicated}

    def _region(self, real: Region, oracle: Region) -> list[Description | None]:
        for on_mesh, on_one in zip(real.constants, oracle.constants, strict=False):
            first, second = np.asarray(plain(on_mesh.constant)), np.asarray(plain(on_one.constant))
            if np.array_equal(first, second):
                self._known[on_mesh] = Description(((),) * len(on_mesh.shape))
        for on_mesh, on_one in zip(real.operations, oracle.operations, strict=True):
            results = self._results(on_mesh, on_one)
            self._known.update(zip(on_mesh.results, results, strict=True))
        pairs = zip(real.outputs, oracle.outputs, strict=True)
        return [self._read(on_mesh, on_one) for on_mesh, on_one in pairs]

    def _read(self, on_mesh: Read, on_one: Read) -> Description | None:
        if isinstance(on_mesh, Literal):
            if not isinstance(on_one, Literal):
                return None
            ratio = _ratio(on_mesh, on_one)
            return None if ratio is None else Description((), factor=ratio)
        return self._known.get(on_mesh)

    def _results(self, on_mesh: Operation, on_one: Operation) -> list[Description | None]:
        none: list[Description | None] = [None] * len(on_mesh.results)
        pairs = zip(on_mesh.reads, on_one.reads, strict=True)
        reads = [self._read(first, second) for first, second in pairs]
        if on_mesh.is_map:
            return self._map(on_mesh, on_one, reads)
        known = [read for read in reads if read is not None]
        if len(known) != len(reads) or on_mesh.regions:
            return none
        if on_mesh.name in _SUMS:
            return [self._psum(on_mesh, read) for read in known]
        if self._is_same_on_all(on_mesh, on_one, known):
            return [Description(((),) * len(value.shape)) for value in on_mesh.results]
        rule = _RULES.get(on_mesh.name)
        if rule is None or len(on_mesh.results) != 1 or not _is_same_kind(on_mesh, on_one):
            return none
        return [_checked(rule(self, on_mesh, on_one, known))]

    def _is_same_on_all(
        self, on_mesh: Operation, on_one: Operation, reads: Sequence[Description]
    ) -> bool:
        """Whether each rank does the same computation as one device, on the same numbers."""
        if on_mesh.name in _COLLECTIVES or not all(read.is_replicated for read in reads):
            return False
        if "callback" in on_mesh.name or any("jaxpr" in key for key in on_mesh.equation.params):
            return False
        shapes = [[value.shape for value in one.results] for one in (on_mesh, on_one)]
        return shapes[0] == shapes[1] and _options(on_mesh) == _options(on_one)

    def _map(
        self, on_mesh: Operation, on_one: Operation, reads: Sequence[Description | None]
    ) -> list[Description | None]:
        params = on_mesh.equation.params
        inside, outside = on_mesh.regions[0], on_one.regions[0]
        for value, read, spec in zip(inside.inputs, reads, params["in_specs"], strict=True):
            if read is not None and read.is_replicated:
                self._known[value] = Description(self._splits(spec, len(value.shape)))
        results: list[Description | None] = []
        outputs = self._region(inside, outside)
        for value, found, spec in zip(on_mesh.results, outputs, params["out_specs"], strict=True):
            splits = self._splits(spec, len(value.shape))
            is_right = found is not None and found.is_exact
            if found is not None and is_right and _merged(found.splits, splits) is not None:
                results.append(Description(((),) * len(value.shape)))
            else:
                results.append(None)
        shapes = [[value.shape for value in one.results] for one in (on_mesh, on_one)]
        return results if shapes[0] == shapes[1] else [None] * len(results)

    def _splits(self, spec: Any, count: int) -> tuple[Split, ...]:
        splits = []
        for part in (*spec, *(None,) * (count - len(spec))):
            names = (part,) if isinstance(part, str) else tuple(part or ())
            splits.append(tuple(name for name in names if name in self._sizes))
        return tuple(splits)

    def _named(self, operation: Operation, key: str) -> list[str] | None:
        """Returns the axes of a collective with several ranks; None where it works in groups."""
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

    def pmax(self, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
        """Describes `pmax` or `pmin` of such terms, or of values equal on all ranks."""
        (read,) = reads
        axes = self._named(on_mesh, "axes")
        if axes is None or set(axes) & set(read.axes):
            return None
        if read.is_exact:
            return read
        is_same = read.reduction == on_mesh.name.removeprefix("p") and read.factor == 1.0
        return dataclasses.replace(read, over=read.over - set(axes)) if is_same else None

    def all_gather(self, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
        """Describes the gather of a dim's parts, along the axes that split it fastest."""
        (read,) = reads
        params = on_mesh.equation.params
        axes = self._named(on_mesh, "axis_name")
        dim = params["all_gather_dimension"]
        if axes is None or not params["tiled"] or set(axes) & read.over:
            return None
        split = read.splits[dim]
        if split == ANY or split[len(split) - len(axes) :] != tuple(axes):
            return None
        rest = split[: len(split) - len(axes)]
        return dataclasses.replace(read, splits=_with(read.splits, dim, rest))

    def reduce_scatter(
        self, on_mesh: Operation, on_one: Operation, reads: list[Description]
    ) -> Any:
        """Describes a sum over ranks of which each keeps its part of a dim."""
        (read,) = reads
        params = on_mesh.equation.params
        axes = self._named(on_mesh, "axis_name")
        dim = params["scatter_dimension"]
        if axes is None or not params["tiled"] or set(axes) & set(read.axes):
            return None
        if read.splits[dim] == ANY or not read.is_sum:
            return None
        times = math.prod(self._sizes[axis] for axis in axes if axis not in read.over)
        splits = _with(read.splits, dim, (*read.splits[dim], *axes))
        return Description(splits, read.over - set(axes), read.factor * times)


def _shape(read: Read) -> Shape:
    return tuple(getattr(read.aval, "shape", ()))


def _is_same_kind(on_mesh: Operation, on_one: Operation) -> bool:
    """Whether two operations name the same dims, since a rule reads only one of them."""
    names = ("axes", "axis", "dimension_numbers", "permutation", "broadcast_dimensions")
    pairs = [(one.equation.params.get(name) for one in (on_mesh, on_one)) for name in names]
    return all(first == second for first, second in pairs)


def _with(splits: tuple[Split, ...], dim: int, split: Split) -> tuple[Split, ...]:
    return (*splits[:dim], split, *splits[dim + 1 :])


def _checked(found: Description | None) -> Description | None:
    """Returns the description, or None if an axis occurs in it twice."""
    if found is None:
        return None
    axes = [*found.axes, *found.over]
    return found if len(axes) == len(set(axes)) else None


def _ratio(on_mesh: Literal, on_one: Literal) -> float | None:
    if np.ndim(on_mesh.val) != 0:
        return None
    first, second = float(on_mesh.val), float(on_one.val)
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 1.0
    return first / second if first and second and math.isfinite(first / second) else None


def _options(operation: Operation) -> dict[str, str]:
    params = operation.equation.params
    return {key: str(value) for key, value in params.items() if "sharding" not in key}


def _merged(*all_splits: tuple[Split, ...]) -> tuple[Split, ...] | None:
    """Merges splits that agree; scalars agree with any split, and None means a conflict."""
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


def _of_all(on_one: Operation, reads: Sequence[Description]) -> tuple[Split, ...] | None:
    """Merges the splits of all operands; a broadcast dim of size 1 agrees with any split."""
    shape = on_one.results[0].shape
    all_splits = []
    for atom, read in zip(on_one.reads, reads, strict=True):
        pairs = zip(read.splits, _shape(atom), shape, strict=False)
        repeated = [ANY if on_mesh == 1 != whole else split for split, on_mesh, whole in pairs]
        all_splits.append(tuple(repeated))
    return _merged(*all_splits)


def _linear(proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
    kinds = [
        on_mesh.results[0].aval.dtype,
        *(getattr(r.aval, "dtype", None) for r in on_mesh.reads),
    ]
    is_real = all(kind is not None and jnp.issubdtype(kind, jnp.inexact) for kind in kinds)
    if len(reads) != 1 or not (is_real or reads[0].is_exact):
        return None
    return reads[0] if reads[0].is_sum or on_mesh.name != "neg" else None


def _elementwise(
    proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]
) -> Any:
    splits = _of_all(on_one, reads)
    if (
        splits is None
        or not all(read.is_exact for read in reads)
        or _options(on_mesh) != _options(on_one)
    ):
        return None
    return Description(splits)


def _add(proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
    splits = _of_all(on_one, reads)
    first, second = reads
    is_same = first.over == second.over and first.is_sum and second.is_sum
    is_same = is_same and math.isclose(first.factor, second.factor, rel_tol=1e-5)
    return Description(splits, first.over, first.factor) if splits is not None and is_same else None


def _mul(proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
    splits = _of_all(on_one, reads)
    first, second = reads
    if not (first.is_sum and second.is_sum):
        return None
    if splits is None or (first.over and second.over) or _is_integer(on_mesh, reads):
        return None
    return Description(splits, first.over | second.over, first.factor * second.factor)


def _div(proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
    splits = _of_all(on_one, reads)
    first, second = reads
    if splits is None or second.over or not first.is_sum or _is_integer(on_mesh, reads):
        return None
    return Description(splits, first.over, first.factor / second.factor)


def _is_integer(operation: Operation, reads: Sequence[Description]) -> bool:
    """Whether integer arithmetic rounds, which preserves neither terms of a sum nor factors."""
    is_real = jnp.issubdtype(operation.results[0].aval.dtype, jnp.inexact)
    return not is_real and not all(read.is_exact for read in reads)


def _reduce_sum(
    proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]
) -> Any:
    read, dims = reads[0], on_mesh.equation.params["axes"]
    over = set(read.over)
    factor = read.factor
    if not read.is_sum:
        return None
    for dim in dims:
        split = read.splits[dim]
        if split == ANY:
            factor *= _shape(on_mesh.reads[0])[dim] / _shape(on_one.reads[0])[dim]
        elif set(split) & over:
            return None
        else:
            over |= set(split)
    rest = [split for dim, split in enumerate(read.splits) if dim not in dims]
    return Description(tuple(rest), frozenset(over), factor)


def _reduce(proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
    read, dims = reads[0], on_mesh.equation.params["axes"]
    splits = [read.splits[dim] for dim in dims if read.splits[dim]]
    rest = tuple(split for dim, split in enumerate(read.splits) if dim not in dims)
    if not read.is_exact:
        return None
    if not splits:
        return Description(rest)
    if on_mesh.name not in ("reduce_max", "reduce_min") or ANY in splits:
        return None
    over = frozenset(axis for split in splits for axis in split)
    return Description(rest, over, 1.0, on_mesh.name.removeprefix("reduce_"))


def _broadcast(
    proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]
) -> Any:
    params = on_mesh.equation.params
    read = reads[0]
    places = params["broadcast_dimensions"]
    if len(reads) != 1:
        return None
    shapes = zip(params["shape"], on_one.equation.params["shape"], strict=True)
    splits: list[Split] = [() if local == whole else ANY for local, whole in shapes]
    for at, dim in enumerate(places):
        pairs = [
            (_shape(o.reads[0])[at], o.equation.params["shape"][dim]) for o in (on_mesh, on_one)
        ]
        if all(before == after for before, after in pairs):
            splits[dim] = read.splits[at]
        elif read.splits[at]:
            return None
    return dataclasses.replace(read, splits=tuple(splits))


def _dot(proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
    left, right = reads
    (of_left, of_right), (batch_left, batch_right) = on_mesh.equation.params["dimension_numbers"]
    if (left.over and right.over) or not (left.is_sum and right.is_sum):
        return None
    over = set(left.over | right.over)
    factor = left.factor * right.factor
    for a, b in zip(of_left, of_right, strict=True):
        merged = _merged((left.splits[a],), (right.splits[b],))
        if merged is None:
            return None
        if merged[0] == ANY:
            factor *= _shape(on_mesh.reads[0])[a] / _shape(on_one.reads[0])[a]
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


def _transpose(
    proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]
) -> Any:
    order = on_mesh.equation.params["permutation"]
    return dataclasses.replace(reads[0], splits=tuple(reads[0].splits[dim] for dim in order))


def _reshape(proof: _Proof, on_mesh: Operation, on_one: Operation, reads: list[Description]) -> Any:
    """Describes adding or dropping dims of size 1, or any reshape of an unsplit value."""
    read = reads[0]
    shapes = [one.results[0].shape for one in (on_mesh, on_one)]
    before = [_shape(one.reads[0]) for one in (on_mesh, on_one)]
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
