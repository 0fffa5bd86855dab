"""Proves, for all inputs, which outputs of a program equal those on one device.

Each value on the mesh has a description relative to its value on one device: which axes split which
dims, over which axes the ranks hold terms of a sum, and by which constant factor it is larger. The
table of `ir.factors` says how the dims of a result come from those of the operands; what happens to
terms and factors follows from the operation being linear or not. All is in real arithmetic. Where
nothing is known the value has no description, and the output only counts as tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..core.typing import Shape
from ..ir.factors import KEEPS, RESHAPES, SCATTER_ADDS, Factors, Role, factors
from .program import Operation, Program, Read, Region, Value, plain, reads_of
from .relations import names_of

ANY = ("*",)
"""The split of a dim along which all numbers are equal: any axes may split it."""

Split: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Description:
    """How a value on the ranks relates to the value on one device.

    Args:
        splits: for each dim the axes that split it, the slowest first, or `ANY`.
        over: axes whose ranks hold terms of the value.
        factor: the value on the mesh divided by that on one device.
        reduction: how the terms combine to the value: "sum", "max" or "min".
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
        """Whether it is the value of one device, or a part of it."""
        return not self.over and math.isclose(self.factor, 1.0, rel_tol=1e-5)

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has the whole value of one device."""
        return self.is_exact and not any(self.splits)


def proven_outputs(
    real: Program, oracle: Program, sizes: Mapping[str, int]
) -> dict[int, Operation | None]:
    """Returns the numbers of the outputs, each with the first operation that no rule describes.

    An output with None equals that of one device for every input.

    Args:
        real: the program on a mesh.
        oracle: the same program on a mesh whose axes are all 1.
        sizes: the sizes of the mesh axes.
    """
    names = [operation.name for operation in real.operations]
    if names != [operation.name for operation in oracle.operations]:
        return {}
    # Regions that do not correspond raise a ValueError; such programs are not proven.
    with contextlib.suppress(ValueError):
        return _Proof(sizes).run(real.region, oracle.region)
    return {}


class _Unknown(Exception):
    """No rule describes a value."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """One operation on the mesh and on one device, with the descriptions of its operands."""

    on_mesh: Operation
    on_one: Operation
    reads: Sequence[Description]
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        return self.on_mesh.name

    def axes(self, key: str) -> tuple[str, ...]:
        """Returns the axes of a collective that have several ranks."""
        params = self.on_mesh.equation.params
        names = names_of(params[key])
        if params.get("axis_index_groups") is not None or not all(
            isinstance(name, str) for name in names
        ):
            raise _Unknown
        return tuple(name for name in names if name in self.sizes)

    def times(self, axes: Iterable[str], read: Description) -> float:
        """Returns how often a sum over axes counts a value that is the same along some of them."""
        return math.prod(self.sizes[axis] for axis in axes if axis not in read.over)


class _Proof:
    """The descriptions of all values of a program on one mesh."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = {axis: size for axis, size in sizes.items() if size > 1}
        self._known: dict[Value, Description | None] = {}
        self._causes: dict[Value, Operation] = {}

    def run(self, real: Region, oracle: Region) -> dict[int, Operation | None]:
        """Returns None for outputs that are exact and replicated, else what has no rule."""
        for on_mesh in real.inputs:
            self._known[on_mesh] = Description(((),) * len(on_mesh.shape))
        outputs = self._region(real, oracle)
        found: dict[int, Operation | None] = {}
        for number, (one, value) in enumerate(zip(outputs, real.outputs, strict=True)):
            if one is not None and one.is_replicated:
                found[number] = None
            elif isinstance(value, Value) and value.maker is not None:
                found[number] = self._causes.get(value, value.maker)
        return found

    def _note(self, operation: Operation, value: Value, inner: Sequence[Read]) -> None:
        """Notes which operation first has no rule on the way to a value without a description."""
        known = [self._causes[r] for r in reads_of(inner) if r in self._causes]
        self._causes[value] = min(known, key=lambda o: o.number, default=operation)

    def _region(self, real: Region, oracle: Region) -> list[Description | None]:
        for on_mesh, on_one in zip(real.constants, oracle.constants, strict=False):
            first, second = np.asarray(plain(on_mesh.constant)), np.asarray(plain(on_one.constant))
            if np.array_equal(first, second):
                self._known[on_mesh] = Description(((),) * len(on_mesh.shape))
        for on_mesh, on_one in zip(real.operations, oracle.operations, strict=True):
            results = self._results(on_mesh, on_one)
            self._known.update(zip(on_mesh.results, results, strict=True))
            for number, (value, found) in enumerate(zip(on_mesh.results, results, strict=True)):
                if found is None:
                    inner = [on_mesh.regions[0].outputs[number]] if on_mesh.is_map else []
                    self._note(on_mesh, value, [*on_mesh.reads, *inner])
        pairs = zip(real.outputs, oracle.outputs, strict=True)
        return [self._read(on_mesh, on_one) for on_mesh, on_one in pairs]

    def _read(self, on_mesh: Read, on_one: Read) -> Description | None:
        if not isinstance(on_mesh, Literal):
            return self._known.get(on_mesh)
        ratio = _ratio(on_mesh, on_one) if isinstance(on_one, Literal) else None
        return None if ratio is None else Description((), factor=ratio)

    def _results(self, on_mesh: Operation, on_one: Operation) -> list[Description | None]:
        pairs = zip(on_mesh.reads, on_one.reads, strict=True)
        reads = [self._read(first, second) for first, second in pairs]
        if on_mesh.is_map:
            return self._map(on_mesh, on_one, reads)
        known = [read for read in reads if read is not None]
        if len(known) == len(reads) and not on_mesh.regions:
            step = _Step(on_mesh, on_one, known, self._sizes)
            with contextlib.suppress(_Unknown):
                found = _described(step)
                each = zip(found, on_mesh.results, on_one.results, strict=True)
                return [self._checked(*one) for one in each]
        return [None] * len(on_mesh.results)

    def _checked(self, found: Description, on_mesh: Value, on_one: Value) -> Description | None:
        """Returns the description if no axis occurs twice and its parts have the right shape."""
        axes = [*found.axes, *found.over]
        shape = [
            full // math.prod(self._sizes[axis] for axis in split) if split != ANY else local
            for split, full, local in zip(found.splits, on_one.shape, on_mesh.shape, strict=True)
        ]
        return found if len(axes) == len(set(axes)) and (*shape,) == on_mesh.shape else None

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
            whole = Description(((),) * len(value.shape))
            splits = self._splits(spec, len(value.shape))
            is_proven = found is not None and found.is_exact and _agree(found.splits, splits)
            results.append(whole if is_proven else None)
        shapes = [[value.shape for value in one.results] for one in (on_mesh, on_one)]
        return results if shapes[0] == shapes[1] else [None] * len(results)

    def _splits(self, spec: Any, count: int) -> tuple[Split, ...]:
        parts = (*spec, *(None,) * (count - len(spec)))
        return tuple(tuple(n for n in names_of(part) if n in self._sizes) for part in parts)


def _described(step: _Step) -> list[Description]:
    """Describes the results of an operation."""
    collective = _COLLECTIVES.get(step.name)
    if collective is not None:
        return [collective(step, read) for read in step.reads]
    if _is_same_on_all(step):
        return [Description(((),) * len(value.shape)) for value in step.on_mesh.results]
    known = factors(step.on_one.equation)
    if known is None or len(step.on_mesh.results) != 1 or not _have_equal_options(step):
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
    if "callback" in name or any("jaxpr" in key for key in params):
        return False
    shapes = [[value.shape for value in one.results] for one in (step.on_mesh, step.on_one)]
    options = [_options(one) for one in (step.on_mesh, step.on_one)]
    return shapes[0] == shapes[1] and options[0] == options[1]


def _options(operation: Operation) -> dict[str, Any]:
    params = operation.equation.params
    return {key: value for key, value in params.items() if "sharding" not in key}


def _have_equal_options(step: _Step) -> bool:
    """Whether the parameters are equal but for the sizes of dims that axes split."""
    first, second = _options(step.on_mesh), _options(step.on_one)
    return first.keys() == second.keys() and all(
        str(first[key]) == str(second[key]) or key in _SIZES for key in first
    )


_SIZES = frozenset({"shape", "new_sizes", "slice_sizes", "limit_indices", "sizes"})
"""Parameters that follow from shapes, which are compared."""


def _by_factors(step: _Step, known: Factors) -> Description:
    """Describes a result by what becomes of each factor that axes split."""
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
    return Description(tuple(splits), frozenset(over), factor, reduction)


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
    if local != full and step.name != "broadcast_in_dim":
        raise _Unknown
    return () if local == full else ANY


def _growth(step: _Step, known: Factors, number: int) -> float:
    """Returns how much longer a dim of equal numbers is on the mesh than on one device."""
    operand, dim = known.dims(number, known.operands)[0]
    local, full = (_shape(one.reads[operand])[dim] for one in (step.on_mesh, step.on_one))
    return local / full


def _has_no_start(step: _Step) -> bool:
    """Whether a sum starts from nothing, which would count once for each rank."""
    return step.name not in SCATTER_ADDS or _is_zero(step.on_mesh.reads[0])


def _terms(step: _Step) -> Description:
    """Returns the terms and the factor of a result, without its splits."""
    name, reads = step.name, step.reads
    if all(read.is_exact for read in reads):
        return Description(())
    kinds = [
        getattr(one.aval, "dtype", None) for one in (*step.on_mesh.reads, *step.on_mesh.results)
    ]
    if name in RESHAPES | _COPIES and len(reads) == 1 and kinds[0] == kinds[-1]:
        return dataclasses.replace(reads[0], splits=())
    # Integer arithmetic rounds, which keeps neither terms nor factors.
    ends = (kinds[0], kinds[-1])
    is_real = all(kind is not None and jnp.issubdtype(kind, jnp.inexact) for kind in ends)
    if not is_real or not all(read.is_sum for read in reads):
        raise _Unknown
    if name in _PRODUCTS:
        first, second = reads
        if second.over and (first.over or name == "div"):
            raise _Unknown
        factor = second.factor if name != "div" else 1 / second.factor
        return Description((), first.over | second.over, first.factor * factor)
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
    return Description((), first.over, first.factor)


def _is_zero(read: Read) -> bool:
    """Whether an operand is zero, or an array of zeros: a term of any sum."""
    while isinstance(read, Value) and read.maker is not None:
        if read.maker.name not in RESHAPES | _COPIES | {"convert_element_type"}:
            return False
        read = read.maker.reads[0]
    number = read.val if isinstance(read, Literal) else read.constant
    return number is not None and not isinstance(number, jax.Array) and not np.any(number)


_EXTREMES = {"reduce_max": "max", "reduce_min": "min"}
_COPIES = KEEPS | {"copy", "copy_p", "name", "stop_gradient", "transpose"}
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


def _psum(step: _Step, read: Description) -> Description:
    axes = step.axes("axes")
    if set(axes) & set(read.axes) or not read.is_sum:
        raise _Unknown
    return Description(read.splits, read.over - set(axes), read.factor * step.times(axes, read))


def _pmax(step: _Step, read: Description) -> Description:
    axes = step.axes("axes")
    if set(axes) & set(read.axes):
        raise _Unknown
    if not read.is_exact and (read.reduction != step.name.removeprefix("p") or read.factor != 1.0):
        raise _Unknown
    return dataclasses.replace(read, over=read.over - set(axes))


def _all_gather(step: _Step, read: Description) -> Description:
    """Joins the parts of a dim along the axes that split it fastest."""
    params = step.on_mesh.equation.params
    axes = step.axes("axis_name")
    rest = _without_fastest(read, params["all_gather_dimension"], axes)
    if not params["tiled"] or set(axes) & read.over:
        raise _Unknown
    return dataclasses.replace(read, splits=rest)


def _reduce_scatter(step: _Step, read: Description) -> Description:
    """Sums over ranks, of which each keeps its part of a dim."""
    params = step.on_mesh.equation.params
    axes = step.axes("axis_name")
    dim = params["scatter_dimension"]
    if not params["tiled"] or set(axes) & set(read.axes) or not read.is_sum:
        raise _Unknown
    splits = _split_more(read.splits, dim, axes)
    return Description(splits, read.over - set(axes), read.factor * step.times(axes, read))


def _all_to_all(step: _Step, read: Description) -> Description:
    """Joins the parts of one dim, and splits another one."""
    params = step.on_mesh.equation.params
    axes = step.axes("axis_name")
    if not params["tiled"] or set(axes) & read.over:
        raise _Unknown
    rest = _without_fastest(read, params["concat_axis"], axes)
    return dataclasses.replace(read, splits=_split_more(rest, params["split_axis"], axes))


def _without_fastest(read: Description, dim: int, axes: Split) -> tuple[Split, ...]:
    split = read.splits[dim]
    kept = len(split) - len(axes)
    if split == ANY or split[kept:] != axes:
        raise _Unknown
    return _with(read.splits, dim, split[:kept])


def _split_more(splits: tuple[Split, ...], dim: int, axes: Split) -> tuple[Split, ...]:
    if splits[dim] == ANY:
        raise _Unknown
    return _with(splits, dim, (*splits[dim], *axes))


def _with(splits: tuple[Split, ...], dim: int, split: Split) -> tuple[Split, ...]:
    return (*splits[:dim], split, *splits[dim + 1 :])


def _agree(found: tuple[Split, ...], wanted: tuple[Split, ...]) -> bool:
    return all(split in (ANY, other) for split, other in zip(found, wanted, strict=True))


def _shape(read: Read) -> Shape:
    return tuple(getattr(read.aval, "shape", ()))


def _ratio(on_mesh: Literal, on_one: Literal) -> float | None:
    """Returns the quotient of two numbers in the program, such as the sizes of parts."""
    if np.ndim(on_mesh.val) != 0:
        return None
    first, second = float(on_mesh.val), float(on_one.val)
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 1.0
    return first / second if first and second and math.isfinite(first / second) else None


_COLLECTIVES: Mapping[str, Callable[[_Step, Description], Description]] = {
    **dict.fromkeys(("psum", "psum2", "psum_invariant"), _psum),
    **dict.fromkeys(("pmax", "pmin"), _pmax),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), _all_gather),
    **dict.fromkeys(("reduce_scatter", "psum_scatter"), _reduce_scatter),
    "all_to_all": _all_to_all,
    "optimization_barrier": lambda step, read: read,
}
_BETWEEN_RANKS = frozenset(
    {*_COLLECTIVES, "ppermute", "axis_index", "pbroadcast", "ragged_all_to_all"}
)
