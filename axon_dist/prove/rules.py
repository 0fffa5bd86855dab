"""Proves which outputs of a program equal those of one device for every input, not only as tried.

Each value on the mesh has a relation to its value on one device: which axes split which dims, over
which axes the ranks hold terms of a sum, and by which constant factor it is larger. The table of
`ir.factors` says how the dims of a result come from those of the operands; a linear operation
passes terms and factors on. A loop is proven by induction over its turns. All is in real
arithmetic. Where no rule applies the value has no relation, and the output only counts as tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..ir.factors import FACTORS, KEEPS, RESHAPES, SCATTER_ADDS, Factors, Role, factors
from ..ir.walk import same
from .program import COPIES, RANK_SUMS, Operation, Region, Value, plain
from .relations import ANY, MAX, MIN, SUM, Relation, Split, names_of, splits_of


def proven_outputs(
    real: Region, oracle: Region, sizes: Mapping[str, int]
) -> dict[int, Operation | None]:
    """Returns the numbers of the outputs, each with the first operation that no rule describes.

    An output with None equals that of one device for every input.

    Args:
        real: the program on a mesh.
        oracle: the same program on a mesh whose axes are all 1.
        sizes: the sizes of the mesh axes.
    """
    if [operation.name for operation in real.walk()] != [o.name for o in oracle.walk()]:
        return {}
    # Regions that do not correspond raise a ValueError; such programs are not proven.
    with contextlib.suppress(ValueError):
        return _Relations(sizes).run(real, oracle)
    return {}


class _Unknown(Exception):
    """No rule describes a value."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """One operation on the mesh and on one device, with the relations of its operands."""

    on_mesh: Operation
    on_one: Operation
    reads: Sequence[Relation]
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        return self.on_mesh.name

    def axes(self, given: Any) -> tuple[str, ...]:
        """Returns those axes of a collective that have several ranks."""
        names = names_of(given)
        is_grouped = self.on_mesh.equation.params.get("axis_index_groups") is not None
        if is_grouped or not all(isinstance(name, str) for name in names):
            raise _Unknown
        return tuple(name for name in names if name in self.sizes)

    def times(self, axes: Iterable[str], read: Relation) -> float:
        """Returns how often a sum over axes counts a value that is the same along some of them."""
        return math.prod(self.sizes[axis] for axis in axes if axis not in read.over)


class _Relations:
    """The relations of all values of a program on one mesh."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self._known: dict[Value, Relation | None] = {}
        self._pairs: dict[Value, Value] = {}
        self._causes: dict[Value, Operation] = {}

    def run(self, real: Region, oracle: Region) -> dict[int, Operation | None]:
        """Returns None for each proven output, else the first operation without a rule."""
        outputs = self._inside(real, oracle, list(map(_whole, real.inputs)))
        found: dict[int, Operation | None] = {}
        for number, (one, value) in enumerate(zip(outputs, real.outputs, strict=True)):
            if one is not None and one.is_replicated:
                found[number] = None
            elif value.maker is not None:
                found[number] = self._causes.get(value, value.maker)
        return found

    def _note(self, operation: Operation, value: Value, inner: Sequence[Value]) -> None:
        """Notes which operation first has no rule on the way to a value without a relation."""
        known = [self._causes[read] for read in inner if read in self._causes]
        self._causes[value] = min(known, key=lambda o: o.number, default=operation)

    def _inside(
        self, real: Region, oracle: Region, inputs: Sequence[Relation | None]
    ) -> list[Relation | None]:
        """Returns the relations of the outputs of a program from those of its inputs."""
        self._known.update(zip(real.inputs, inputs, strict=True))
        self._pairs.update(zip(real.inputs, oracle.inputs, strict=True))
        for on_mesh, on_one in zip(real.operations, oracle.operations, strict=True):
            results = self._results(on_mesh, on_one)
            self._known.update(zip(on_mesh.results, results, strict=True))
            self._pairs.update(zip(on_mesh.results, on_one.results, strict=True))
            for number, (value, found) in enumerate(zip(on_mesh.results, results, strict=True)):
                if found is None:
                    inner = [region.outputs[number] for region in on_mesh.regions[-1:]]
                    self._note(on_mesh, value, [*on_mesh.reads, *inner])
        pairs = zip(real.outputs, oracle.outputs, strict=True)
        return [self._read(on_mesh, on_one) for on_mesh, on_one in pairs]

    def _read(self, on_mesh: Value, on_one: Value) -> Relation | None:
        if on_mesh.constant is not None:
            return _of_constants(on_mesh, on_one)
        # The Python code may have taken another value on one device.
        return self._known.get(on_mesh) if self._pairs.get(on_mesh) is on_one else None

    def _results(self, on_mesh: Operation, on_one: Operation) -> list[Relation | None]:
        pairs = zip(on_mesh.reads, on_one.reads, strict=True)
        reads = [self._read(first, second) for first, second in pairs]
        if on_mesh.is_map:
            return self._map(on_mesh, on_one, reads)
        if on_mesh.regions:
            return self._loop(on_mesh, on_one, reads)
        known = [read for read in reads if read is not None]
        if len(known) == len(reads):
            step = _Step(on_mesh, on_one, known, self._sizes)
            with contextlib.suppress(_Unknown):
                found = _described(step)
                each = zip(found, on_mesh.results, on_one.results, strict=True)
                return [self._checked(*one) for one in each]
        return [None] * len(on_mesh.results)

    def _loop(
        self, on_mesh: Operation, on_one: Operation, reads: Sequence[Relation | None]
    ) -> list[Relation | None]:
        """Describes the results of a loop whose carry keeps its relation, or of a branch.

        All ranks must take the same branch, and a `while` must end for all in the same turn.
        """
        unknown: list[Relation | None] = [None] * len(on_mesh.results)
        region, other = on_mesh.regions[-1], on_one.regions[-1]
        form = region.form
        if form is None or not _are_same_loops(on_mesh, on_one):
            return unknown
        if on_mesh.name == "cond":
            pairs = zip(on_mesh.regions, on_one.regions, strict=True)
            branches = [self._inside(*pair, form.inputs(reads)) for pair in pairs]
            results = [functools.reduce(_joined, each) for each in zip(*branches, strict=True)]
            return results if reads[0] is not None and reads[0].is_replicated else unknown
        shared, carry, stacked = form.split_operands(reads)
        rows = [_without_turns(relation) for relation in stacked]
        settled = form.settled(
            carry, lambda carry: self._inside(region, other, [*shared, *carry, *rows]), _joined
        )
        if settled is None:
            return unknown
        carry, results = settled
        if on_mesh.name == "while":
            test = on_mesh.regions[0]
            consts = test.form.split_operands(reads)[0] if test.form is not None else []
            (goes_on,) = self._inside(test, on_one.regions[0], [*consts, *carry])
            return carry if goes_on is not None and goes_on.is_replicated else unknown
        stacked = [one and dataclasses.replace(one, splits=((), *one.splits)) for one in results]
        return [*carry, *stacked]

    def _checked(self, found: Relation, on_mesh: Value, on_one: Value) -> Relation | None:
        """Returns the relation if no axis occurs twice and its parts have the right shape."""
        axes = [*found.axes, *found.over]
        shape = [
            full // math.prod(self._sizes[axis] for axis in split) if split != ANY else local
            for split, full, local in zip(found.splits, on_one.shape, on_mesh.shape, strict=True)
        ]
        return found if len(axes) == len(set(axes)) and (*shape,) == on_mesh.shape else None

    def _map(
        self, on_mesh: Operation, on_one: Operation, reads: Sequence[Relation | None]
    ) -> list[Relation | None]:
        params = on_mesh.equation.params
        inside, outside = on_mesh.regions[0], on_one.regions[0]
        inputs = [
            Relation(splits_of(spec, len(value.shape), self._sizes))
            if read is not None and read.is_replicated
            else None
            for value, read, spec in zip(inside.inputs, reads, params["in_specs"], strict=True)
        ]
        results: list[Relation | None] = []
        outputs = self._inside(inside, outside, inputs)
        for value, found, spec in zip(on_mesh.results, outputs, params["out_specs"], strict=True):
            splits = splits_of(spec, len(value.shape), self._sizes)
            is_proven = found is not None and found.is_exact and _agree(found.splits, splits)
            results.append(_whole(value) if is_proven else None)
        return results if _are_as_large(on_mesh, on_one) else [None] * len(results)


def _whole(value: Value) -> Relation:
    """Returns the relation of a value that each rank has whole."""
    return Relation(((),) * len(value.shape))


def _are_same_loops(on_mesh: Operation, on_one: Operation) -> bool:
    """Whether two operations run their regions equally often, in the same way."""
    forms = [[region.form for region in one.regions] for one in (on_mesh, on_one)]
    first, second = ([(form.form, form.times) for form in each if form] for each in forms)
    is_reversed = [one.equation.params.get("reverse") for one in (on_mesh, on_one)]
    return first == second and is_reversed[0] == is_reversed[1]


def _without_turns(stacked: Relation | None) -> Relation | None:
    """Returns the relation of one row of a stacked array; None if axes split the rows."""
    if stacked is None or stacked.splits[0] not in ((), ANY):
        return None
    return dataclasses.replace(stacked, splits=stacked.splits[1:])


def _joined(one: Relation | None, other: Relation | None) -> Relation | None:
    """Returns the relation of a value that has one of two relations; None if none covers both."""
    if one is None or other is None:
        return None
    pairs = zip(one.splits, other.splits, strict=True)
    splits = tuple(second if first == ANY else first for first, second in pairs)
    joined = dataclasses.replace(one, splits=splits)
    is_other = _agree(other.splits, splits) and joined == dataclasses.replace(other, splits=splits)
    return joined if is_other else None


def _described(step: _Step) -> list[Relation]:
    """Describes the results of an operation."""
    if step.name == "optimization_barrier":
        return list(step.reads)
    if step.name in _COLLECTIVES:
        return [_collective(step, read) for read in step.reads]
    if _is_same_on_all(step):
        return list(map(_whole, step.on_mesh.results))
    known = factors(step.on_one.equation)
    if known is None or len(step.on_mesh.results) != 1 or _differing_options(step) - _SIZES:
        raise _Unknown
    for read, dims in zip(step.reads, known.operands, strict=True):
        if any(split and not numbers for split, numbers in zip(read.splits, dims, strict=True)):
            raise _Unknown
    return [_by_factors(step, known)]


def _is_same_on_all(step: _Step) -> bool:
    """Whether each rank does the same computation as one device, on the same numbers."""
    name, params = step.name, step.on_mesh.equation.params
    if name in _BETWEEN_RANKS or not all(read.is_replicated for read in step.reads):
        return False
    # A kernel may read the rank.
    if "callback" in name or (name not in FACTORS and any("jaxpr" in key for key in params)):
        return False
    return _are_as_large(step.on_mesh, step.on_one) and not _differing_options(step)


def _are_as_large(on_mesh: Operation, on_one: Operation) -> bool:
    """Whether the results have the same shapes."""
    return [value.shape for value in on_mesh.results] == [value.shape for value in on_one.results]


def _differing_options(step: _Step) -> set[str]:
    """Returns the parameters that differ; those that only place the results do not count."""
    if step.name in KEEPS:
        return set()
    first, second = step.on_mesh.equation.params, step.on_one.equation.params
    keys = {key for key in first.keys() | second.keys() if "sharding" not in key}
    return {key for key in keys if not same(first.get(key), second.get(key))}


_SIZES = frozenset({"shape", "new_sizes", "reps", "slice_sizes", "limit_indices", "sizes"})
"""Parameters that follow from shapes, which are compared."""


def _by_factors(step: _Step, known: Factors) -> Relation:
    """Describes a result by the role of each factor that axes split."""
    start = _terms(step)
    over, factor, reduction = set(start.over), start.factor, start.reduction
    splits: list[Split] = [()] * len(step.on_one.results[0].shape)
    for number, role in enumerate(known.roles):
        split = _split_of(step, known, number)
        places = [dim for _, dim in known.dims(number, known.results)]
        if role is Role.PASSES:
            for dim in places:
                if split and known.results[0][dim][0] != number:
                    raise _Unknown
                splits[dim] = split or splits[dim]
        elif role is Role.NEW:
            splits[places[0]] = _new(step, places[0])
        elif split == ANY and role is Role.SUMMED:
            factor *= _growth(step, known, number)
        elif split and role is Role.SUMMED and not over & set(split) and _has_no_start(step):
            over |= set(split)
        elif split and split != ANY and step.name in _EXTREMES and start.is_exact:
            over, reduction = over | set(split), _EXTREMES[step.name]
        elif split:
            raise _Unknown
    return Relation(tuple(splits), frozenset(over), factor, reduction)


def _split_of(step: _Step, known: Factors, number: int) -> Split:
    """Returns the axes that split a factor, on which all operands that have it must agree."""
    found: set[Split] = set()
    for operand, dim in known.dims(number, known.operands):
        split = step.reads[operand].splits[dim]
        # Axes split a dim into blocks, so they split its slowest factor.
        is_slowest = known.operands[operand][dim][0] == number
        found.add(split if is_slowest or split == ANY else ())
    several = found - {ANY}
    if len(several) > 1:
        raise _Unknown
    return several.pop() if several else ANY if found else ()


def _new(step: _Step, dim: int) -> Split:
    """Returns the split of a dim that the operation makes; it may have a size of its own."""
    local, full = (one.results[0].shape[dim] for one in (step.on_mesh, step.on_one))
    if local != full and step.name not in _REPEATS:
        raise _Unknown
    return () if local == full else ANY


def _growth(step: _Step, known: Factors, number: int) -> float:
    """Returns how much longer a dim of equal numbers is on the mesh than on one device."""
    operand, dim = known.dims(number, known.operands)[0]
    local, full = (one.reads[operand].shape[dim] for one in (step.on_mesh, step.on_one))
    return local / full


def _has_no_start(step: _Step) -> bool:
    """Whether a sum starts from nothing, which would count once for each rank."""
    return step.name not in SCATTER_ADDS or _is_zero(step.on_mesh.reads[0])


def _terms(step: _Step) -> Relation:
    """Returns the terms and the factor of a result, without its splits."""
    name, reads = step.name, step.reads
    if all(read.is_exact for read in reads):
        return Relation(())
    if name in _MOVES and len(reads) == 1:
        return dataclasses.replace(reads[0], splits=())
    # Integer arithmetic rounds, which keeps neither terms nor factors.
    is_inexact = step.on_mesh.reads[0].is_inexact and step.on_mesh.results[0].is_inexact
    if not is_inexact or not all(read.is_sum for read in reads):
        raise _Unknown
    if name in _PRODUCTS:
        first, second = reads
        if second.over and (first.over or name == "div"):
            raise _Unknown
        factor = second.factor if name != "div" else 1 / second.factor
        return Relation((), first.over | second.over, first.factor * factor)
    if name not in _LINEAR:
        raise _Unknown
    linear = _LINEAR[name] or range(len(reads))
    counted = [n for n in linear if not _is_zero(step.on_mesh.reads[n])]
    if not all(read.is_exact for n, read in enumerate(reads) if n not in linear):
        raise _Unknown
    first, *others = (reads[n] for n in counted)
    for other in others:
        if other.over != first.over or not math.isclose(other.factor, first.factor, rel_tol=1e-5):
            raise _Unknown
    return Relation((), first.over, first.factor)


def _is_zero(value: Value) -> bool:
    """Whether an operand is zero, or an array of zeros: a term of any sum."""
    while value.maker is not None:
        if value.maker.name not in _MOVES | {"convert_element_type"}:
            return False
        value = value.maker.reads[0]
    number = value.constant
    return number is not None and not isinstance(number, jax.Array) and not np.any(number)


_EXTREMES = {"reduce_max": MAX, "reduce_min": MIN, "pmax": MAX, "pmin": MIN}
_COLLECTIVES = RANK_SUMS | {"pmax", "pmin", "all_gather", "all_gather_invariant", "all_to_all"}
_REPEATS = frozenset({"broadcast_in_dim", "tile"})
_MOVES = RESHAPES | COPIES | {"transpose", "tile"}
_PRODUCTS = frozenset({"mul", "div", "dot_general", "conv_general_dilated"})
_LINEAR: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("neg", "convert_element_type", "real", "reduce_precision"), (0,)),
    **dict.fromkeys(("reduce_sum", "cumsum", "reduce_window_sum", "slice", "rev"), (0,)),
    **dict.fromkeys(("gather", "dynamic_slice"), (0,)),
    **dict.fromkeys(("add", "sub", "add_any", "concatenate"), ()),
    **dict.fromkeys(("pad", "dynamic_update_slice"), (0, 1)),
    **dict.fromkeys(SCATTER_ADDS, (0, 2)),
    "select_n": (1, 2),
}
"""The operands in which an operation is linear, all together; () for all operands."""


def _collective(step: _Step, read: Relation) -> Relation:
    """Describes the result of a collective, which reduces over ranks, and joins or splits dims."""
    params = step.on_mesh.equation.params
    axes = step.axes(params.get("axes", params.get("axis_name")))
    over, factor, splits = read.over - set(axes), read.factor, read.splits
    if not params.get("tiled", True):
        raise _Unknown
    if step.name in RANK_SUMS:
        if not read.is_sum or set(axes) & set(read.axes):
            raise _Unknown
        factor *= step.times(axes, read)
    elif step.name in _EXTREMES:
        is_known = read.is_exact or (read.reduction, factor) == (_EXTREMES[step.name], 1.0)
        if not is_known or set(axes) & set(read.axes):
            raise _Unknown
    elif set(axes) & read.over:
        raise _Unknown
    for key in ("all_gather_dimension", "concat_axis"):
        splits = _without_fastest(splits, params[key], axes) if key in params else splits
    for key in ("scatter_dimension", "split_axis"):
        splits = _split_more(splits, params[key], axes) if key in params else splits
    return Relation(splits, over, factor, read.reduction if over else SUM)


def _without_fastest(splits: tuple[Split, ...], dim: int, axes: Split) -> tuple[Split, ...]:
    kept = len(splits[dim]) - len(axes)
    if splits[dim] == ANY or splits[dim][kept:] != axes:
        raise _Unknown
    return _with(splits, dim, splits[dim][:kept])


def _split_more(splits: tuple[Split, ...], dim: int, axes: Split) -> tuple[Split, ...]:
    if splits[dim] == ANY:
        raise _Unknown
    return _with(splits, dim, (*splits[dim], *axes))


def _with(splits: tuple[Split, ...], dim: int, split: Split) -> tuple[Split, ...]:
    return (*splits[:dim], split, *splits[dim + 1 :])


def _agree(found: tuple[Split, ...], wanted: tuple[Split, ...]) -> bool:
    return all(split in (ANY, other) for split, other in zip(found, wanted, strict=True))


def _of_constants(on_mesh: Value, on_one: Value) -> Relation | None:
    """Describes a constant, which may be the size of a part, by its quotient with that of one."""
    if on_one.constant is None:
        return None
    first, second = np.asarray(plain(on_mesh.constant)), np.asarray(plain(on_one.constant))
    if np.array_equal(first, second, equal_nan=on_mesh.is_inexact):
        return _whole(on_mesh)
    if first.ndim or second.ndim or not first or not second or not np.isfinite(first / second):
        return None
    return Relation((), factor=float(first) / float(second))


_BETWEEN_RANKS = _COLLECTIVES | {"ppermute", "axis_index", "pbroadcast", "ragged_all_to_all"}
