"""The separability rules for operations that gather, scatter, slice, split, pad and reverse."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from types import MappingProxyType

from ..ir.factors import SCATTERS, Role
from .abstract_values import Coupling, Kind, Value, Why, aligned, either, nonlinear, plus
from .operation import (
    Operation,
    Rule,
    Shapes,
    all_constant,
    as_rows,
    grown,
    is_loop_index,
    not_numbered,
)


def _take(op: Operation, values: list[Value]) -> Value:
    table, indices = (as_rows(v, s) for v, s in zip(values, op.inputs, strict=True))
    cuts = [
        [(size,) for size in params["slice_sizes"]] for params in (op.part_params, op.whole_params)
    ]
    _check_cuts(op, values[_TABLE], cuts)
    if indices.is_scaled:
        raise Coupling(Why.SIZES)
    if not (indices.is_constant or indices.is_rows):
        raise Coupling("is an index that depends on several samples")
    if table.kind is Kind.CARRY:
        # A loop's running sum must keep its elements in place.
        raise Coupling(Why.LOOPED)
    if not table.is_rows:
        if indices.is_constant:
            return table
        _check_index(indices)
        # The index is that of a sample, also in a loop over samples, where it has no dim of them.
        if not table.is_constant:
            raise Coupling("looks up a total over the samples for each of them")
        return dataclasses.replace(op.moved(indices, _INDICES), scale=table.scale)
    if table.positions:
        raise Coupling(Why.NUMBERS)
    if table.dim is None:
        return aligned([table, indices], table.scale)
    if is_loop_index(indices, op.inputs[_TABLE][0][table.dim]) and table.outer == 1:
        numbers = op.part_params["dimension_numbers"]
        is_row = numbers.start_index_map == (table.dim,) == numbers.collapsed_slice_dims
        if not is_row:
            raise Coupling(Why.STRAY)
        return table.in_dim(None)
    return _take_rows(op, with_own_index(table, indices), indices)


_TABLE, _INDICES, _UPDATES = range(3)
"""The positions of the operands of a gather or scatter."""


def _check_index(value: Value) -> None:
    if value.positions:
        raise Coupling(Why.NUMBERS)


def with_own_index(rows: Value, indices: Value) -> Value:
    """Returns rows of which an index reads or writes some places.

    Rows that are equal for all samples may differ once each sample has its own index.
    """
    is_same = indices.is_constant or indices.repeats
    return dataclasses.replace(rows, repeats=rows.repeats and is_same)


def _factor(op: Operation, value: Value, operand: int) -> int | None:
    return None if value.dim is None else op.factors.factor(operand, value.dim)


def _has_own_index(op: Operation, table: Value, indices: Value) -> bool | None:
    """Whether each sample has its own index; None if table and indices do not share a factor."""
    factor = _factor(op, table, _TABLE)
    places = op.factors.dims(factor, op.factors.operands) if factor is not None else []
    if not any(operand == _INDICES for operand, _ in places):
        return None
    _check_index(indices)
    return _factor(op, indices, _INDICES) == factor and indices.outer == table.outer


def _take_rows(op: Operation, table: Value, indices: Value) -> Value:
    numbers = op.part_params["dimension_numbers"]
    dim = table.dim
    is_own = _has_own_index(op, table, indices)
    if is_own is not None:
        if is_own:
            return op.moved(table)
    elif dim in numbers.start_index_map and dim in numbers.collapsed_slice_dims:
        # x[arange(B), labels]: every sample takes from its own row.
        column = tuple(numbers.start_index_map).index(dim)
        repeated = indices.positions * len(numbers.start_index_map)
        flags = repeated if len(indices.positions) == 1 else indices.positions
        others = [flag for number, flag in enumerate(flags) if number != column]
        is_own = _is_of_all(op, table, indices)
        if flags and flags[column] and not any(others) and is_own:
            return table.in_dim(op.moved(indices.in_dim(indices.dim or 0), _INDICES).dim, 1)
    elif dim not in numbers.start_index_map:
        is_fixed = indices.is_constant and not grown(op.inputs[_INDICES])
        if is_fixed and op.factors.role(_TABLE, dim or 0) is Role.PASSES:
            return op.moved(table)
    raise Coupling(Why.PICKED)


def _is_of_all(op: Operation, table: Value, indices: Value) -> bool:
    """Whether there is one index for each of the samples' entries, not for some of them."""
    if table.dim is None or indices.dim is None or not table.outer == indices.outer == 1:
        return False
    pairs = zip(op.inputs[_TABLE], op.inputs[_INDICES], strict=True)
    return all(entries[table.dim] == places[indices.dim] for entries, places in pairs)


def _scatter(op: Operation, values: list[Value]) -> Value:
    table, indices, updates = (as_rows(v, s) for v, s in zip(values, op.inputs, strict=True))
    if all_constant((table, indices, updates)):
        if any(map(grown, op.inputs)):
            # Some of the equal entries would change, or there are more of them in the whole.
            raise Coupling(Why.WRITTEN)
        return nonlinear(op.name, [table, indices, updates])
    if indices.is_scaled:
        raise Coupling(Why.SIZES)
    if table.dim is None:
        outers = {value.outer for value in values[_INDICES:] if value.is_rows}
        if len(outers) > 1:
            # An index would meet the update of another sample.
            raise Coupling(Why.STRAY)
        return _scatter_total(op, table, indices, updates)
    factor = _written(op, table, indices)
    if factor is None:
        raise Coupling("writes to samples by an index")
    if op.name.endswith(("mul", "min", "max")) and (table.is_scaled or updates.is_scaled):
        raise Coupling(Why.SIZES)
    table = with_own_index(table, indices)
    if updates.is_rows:
        if _factor(op, updates, _UPDATES) != factor:
            raise Coupling(Why.STRAY)
        return either(table, updates.in_dim(table.dim, updates.outer))
    return either(table, updates)


def _written(op: Operation, table: Value, indices: Value) -> int | None:
    """Returns the factor of the updates that counts the samples they are written to, or None."""
    numbers = op.part_params["dimension_numbers"]
    dim = table.dim or 0
    is_own = _has_own_index(op, table, indices)
    if is_own is not None:
        return _factor(op, table, _TABLE) if is_own else None
    targets = tuple(numbers.scatter_dims_to_operand_dims)
    if dim in targets and dim in numbers.inserted_window_dims:
        column = targets.index(dim)
        flags = indices.positions
        is_own = _is_of_all(op, table, indices)
        if len(flags) > column and flags[column] and sum(flags) == 1 and is_own:
            return op.factors.factor(_INDICES, indices.dim or 0)
    elif dim not in targets:
        is_fixed = indices.is_constant and not grown(op.inputs[_INDICES])
        if is_fixed and op.factors.role(_TABLE, dim) is Role.PASSES:
            return _factor(op, table, _TABLE)
    return None


def _scatter_total(op: Operation, table: Value, indices: Value, updates: Value) -> Value:
    """The rule for counts and segment sums: every sample adds to places that it chooses."""
    _check_index(indices)
    _check_index(updates)
    ok = op.name in ("scatter-add", "scatter_add")
    pairs = (indices, _INDICES), (updates, _UPDATES)
    factors = {_factor(op, value, operand) for value, operand in pairs if value.is_rows}
    known = {indices.kind, updates.kind} <= {Kind.CONSTANT, Kind.ROWS}
    # Along a window, rows go to places that follow from their position in the batch.
    is_summed = len(factors) == 1 and all(
        factor is not None and op.factors.roles[factor] is Role.SUMMED for factor in factors
    )
    if ok and known and is_summed:
        operand, value = next((o, v) for v, o in pairs if v.is_rows)
        small, large = (shape[value.dim or 0] for shape in op.inputs[operand])
        return plus(table, Value(Kind.TOTAL, updates.scale * large / small))
    is_fixed = not any(map(grown, op.inputs))
    if ok and is_fixed and indices.is_constant and updates.kind in (Kind.TOTAL, Kind.CONSTANT):
        return plus(table, updates)
    raise Coupling(Why.WRITTEN)


def _dynamic_slice(op: Operation, values: list[Value]) -> Value:
    if not all_constant(values[1:]):
        return _own_row(op, values) or _moving(op, values)
    if Role.PART in op.roles:
        raise Coupling(Why.SOME)
    # A place with a scale is another one in the whole.
    moves = [[False for _ in values[1:]], [place.is_scaled for place in values[1:]]]
    sizes = op.part_params["slice_sizes"], op.whole_params["slice_sizes"]
    cuts = [[*zip(*both, strict=True)] for both in zip(moves, sizes, strict=True)]
    _check_cuts(op, values[0], cuts)
    return not_numbered(values[0])


def _own_row(op: Operation, values: list[Value]) -> Value | None:
    """Returns the row of the current sample in a loop over all samples, or None."""
    table, *places = values
    dim = table.dim
    if not table.is_rows or dim is None or table.outer != 1 or table.positions:
        return None
    rest = [*places[:dim], *places[dim + 1 :]]
    is_one = op.part_params["slice_sizes"][dim] == 1 == op.whole_params["slice_sizes"][dim]
    is_own = is_one and is_loop_index(places[dim], op.inputs[0][0][dim])
    return table.in_dim(None) if is_own and all_constant(rest) else None


def _moving(op: Operation, values: list[Value]) -> Value:
    """The rule for slices at places that depend on the current sample of a loop."""
    if any(v.dim is not None for v in values):
        raise Coupling(Why.MOVING)
    return nonlinear(op.name, values)


def _dynamic_update(op: Operation, values: list[Value]) -> Value:
    if not all_constant(values[2:]):
        return _moving(op, values)
    if any(place.is_scaled for place in values[2:]):
        raise Coupling(Why.SIZES)
    table, new = (as_rows(v, s) for v, s in zip(values[:2], op.inputs[:2], strict=True))
    if Role.JOINED in op.roles:
        raise Coupling("writes over some of the samples")
    return either(table, new)


def _slice(op: Operation, values: list[Value]) -> Value:
    cuts = []
    for params in (op.part_params, op.whole_params):
        starts = params["start_indices"]
        ends = params["limit_indices"]
        strides = params["strides"] or (1,) * len(starts)
        cuts.append([*zip(starts, ends, strides, strict=True)])
    _check_cuts(op, values[0], cuts)
    return _sliced(values[0], op.inputs[0], op.outputs[0], cuts)


def _check_cuts(op: Operation, value: Value, cuts: Sequence[Sequence[Hashable]]) -> None:
    """Checks that a part and the whole take the same entries from dims that count no samples.

    Args:
        op: the operation.
        value: its first operand, which is cut.
        cuts: for each dim in each of the two programs what is taken; equal for the same entries.

    Raises:
        Coupling: if they take others, and the entries may be unequal.
    """
    if value.known is not None:
        return
    counting = grown(op.inputs[0])
    pairs = enumerate(zip(*cuts, strict=True))
    if any(one != other for dim, (one, other) in pairs if dim not in counting):
        raise Coupling(Why.NUMBERS if any(map(grown, op.outputs)) else Why.SIZES)


def _sliced(
    value: Value, shapes: Shapes, new: Shapes, cuts: Sequence[Sequence[tuple[int, ...]]]
) -> Value:
    dim = value.dim
    if dim is None:
        return not_numbered(value)
    spans = [cut[dim] for cut in cuts]
    sizes = [shape[dim] for shape in shapes]
    if all(span == (0, size, 1) for span, size in zip(spans, sizes, strict=True)):
        return value
    not_numbered(value)
    blocks = [size // value.outer for size in sizes]
    bounds = [(a / n, b / n) for (a, b, _), n in zip(spans, blocks, strict=True)]
    if bounds[0] == bounds[1] and all(x.is_integer() for x in bounds[0]) and spans[0][2] == 1:
        return value.in_dim(dim, int(bounds[0][1] - bounds[0][0]))
    start, _, stride = spans[0]
    even = [shape[dim] * stride == size for shape, size in zip(new, sizes, strict=True)]
    if value.outer == 1 and all(even) and start < stride and spans[1][::2] == (start, stride):
        return value
    ends = [[cut[0] for cut in spans], [cut[1] for cut in spans]]
    # A fixed count from either end is the same for all batch sizes; a fraction of them is not.
    is_fixed = all(a == b or sizes[0] - a == sizes[1] - b for a, b in ends)
    is_fixed = is_fixed and all(new[0]) and {cut[2] for cut in spans} == {1}
    raise Coupling(Why.SOME if is_fixed else Why.UNEVEN)


def _split(op: Operation, values: list[Value]) -> list[Value]:
    value = values[0]
    axis = op.part_params["axis"]
    cuts = [[()] * axis + [tuple(params["sizes"])] for params in (op.part_params, op.whole_params)]
    _check_cuts(op, value, cuts)
    if value.dim != axis or not value.is_rows:
        return [not_numbered(value)] * len(op.outputs)
    pieces = []
    starts = [0, 0]
    for one, two, new in zip(
        op.part_params["sizes"], op.whole_params["sizes"], op.outputs, strict=True
    ):
        spans = [
            [(a, a + n, 1) if d == axis else () for d in range(axis + 1)]
            for a, n in zip(starts, (one, two), strict=True)
        ]
        pieces.append(_sliced(value, op.inputs[0], new, spans))
        starts = [starts[0] + one, starts[1] + two]
    return pieces


def _pad(op: Operation, values: list[Value]) -> Value:
    value, filling = values
    if Role.PART in op.roles:
        raise Coupling("is padded along the samples")
    if filling.is_zero:
        known = value.known if value.is_zero else None
        return dataclasses.replace(not_numbered(value), known=known)
    return either(value, filling) if value.is_rows else nonlinear(op.name, values)


def _reverse(op: Operation, values: list[Value]) -> Value:
    if Role.ALONG in op.roles:
        raise Coupling(Why.TURNED)
    return not_numbered(values[0])


INDEXING: MappingProxyType[str, Rule] = MappingProxyType(
    {
        "gather": _take,
        **dict.fromkeys(SCATTERS, _scatter),
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update,
        "slice": _slice,
        "split": _split,
        "pad": _pad,
        "rev": _reverse,
    }
)
"""The rule of each primitive, by name."""
