"""Compares the program of a part with one sample with that of the whole batch.

With one sample per part, JAX drops the dim that counts samples: `x.sum(0)` of shape (1, 3) traces
to a reshape. The program of a part then differs from that of the whole batch: arrays lack this dim,
and an equation that would repeat or sum a single entry is missing. A *relay* is an equation that
only one of the programs has and that, for one sample, only changes the shape: a reshape, or a
broadcast or sum over the single sample. The value of its result is derived from the program of the
whole batch. The shape of the array in the part's program is checked when an operation reads it. An
array is *loose* if it has lost, in the part, the dim that counts samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from ..core.typing import Shape
from ..ir.factors import ELEMENTWISE, RESHAPES
from ..ir.walk import shape_of
from .abstract_values import Coupling, Kind, Value
from .indexing import with_own_index
from .operation import Operation, PairValues, Shapes
from .rules import SAMPLE_RULES, is_transposed

Aligned: TypeAlias = tuple[JaxprEqn | None, JaxprEqn | None]
"""An equation of the part and one of the whole; None on the side that lacks a relay."""


def aligned_equations(part: Jaxpr, whole: Jaxpr) -> Sequence[Aligned] | None:
    """Pairs the equations of two programs up to relays; returns None if other equations differ."""
    pairs: list[Aligned] = []
    part_eqns = list(part.eqns)
    whole_eqns = list(whole.eqns)
    while part_eqns or whole_eqns:
        one = part_eqns[:1]
        other = whole_eqns[:1]
        if one and other and one[0].primitive.name == other[0].primitive.name:
            pairs.append((part_eqns.pop(0), whole_eqns.pop(0)))
        elif other and other[0].primitive.name in RESHAPES | {"reduce_sum"}:
            pairs.append((None, whole_eqns.pop(0)))
        elif one and one[0].primitive.name in RESHAPES:
            pairs.append((part_eqns.pop(0), None))
        else:
            return None
    return pairs


def relay(known: PairValues, pair: Aligned, ratio: float) -> bool:
    """Sets the value of the result of an equation that only one of the programs has.

    Args:
        known: the values of the variables of both programs.
        pair: the equation in each of the two programs; None for the program that lacks it.
        ratio: the number of samples of the whole batch.

    Returns:
        Whether it is a relay.
    """
    part, whole = pair
    if part is not None:
        source = part.invars[0]
        result = part.outvars[0]
        sizes = {math.prod(shape_of(atom)) for atom in (source, result)}
        if isinstance(source, Literal) or source not in known.numbers:
            return False
        known.numbers[result] = known.numbers[source]
        if part.primitive.name == "reshape" and part.params["dimensions"]:
            return False
        return len(part.invars) == 1 == len(sizes)
    assert whole is not None
    operand = whole.invars[0]
    made = whole.outvars[0]
    source = known.mates.get(operand) if isinstance(operand, Var) else None
    if source is None or len(whole.invars) > 1:
        return False
    value = known.read(source, operand)
    small = shape_of(source)
    inputs = ((small, shape_of(operand)),)
    outputs = ((small, shape_of(made)),)
    params = whole.params
    op = Operation(whole.primitive.name, params, params, inputs, outputs, ("f", "f"))
    output = value if value.kind is Kind.COUPLED else relayed(op, value, ratio)
    if output is not None:
        known.write(source, made, dataclasses.replace(output, value_number=value.value_number))
    return output is not None


def is_loose(value: Value, small: Shape, large: Shape, ratio: float) -> bool:
    """Whether an array has lost, in the part, the dim that counts samples."""
    return value.kind is not Kind.COUPLED and canonical(value, small, large, ratio) != small


def canonical(value: Value, small: Shape, large: Shape, ratio: float) -> Shape | None:
    """Returns the shape of a part's array with all dims of the whole batch's array.

    Args:
        value: the abstract value of the array.
        small: its shape in the program of the part.
        large: its shape in the program of the whole.
        ratio: the number of samples of the whole batch.

    Returns:
        The shape; None if the part's array is not a reshape of it.
    """
    if value.dim is not None:
        size = large[value.dim] / ratio
        shape = (*large[: value.dim], int(size), *large[value.dim + 1 :])
        return shape if size.is_integer() and math.prod(shape) == math.prod(small) else None
    fits = len(small) == len(large) and all(
        a == b or (a == 1 and value.is_constant) for a, b in zip(small, large, strict=True)
    )
    if fits:
        return small
    return large if math.prod(small) == math.prod(large) else None


def relayed(op: Operation, value: Value, ratio: float) -> Value | None:
    """Returns the value of a result that is, in the part, a reshape of the operand.

    Args:
        op: the operation in the whole's program, with the operand's shape in the part's program.
        value: the value of the operand.
        ratio: the number of samples of the whole batch.

    Returns:
        The value; None if the equation is more than a relay.
    """
    small, large = op.inputs[0]
    _, result = op.outputs[0]
    source = canonical(value, small, large, ratio)
    if source is None or is_transposed(op):
        return None
    if value.dim is None:
        is_constant = value.is_constant and math.prod(small) == 1
        is_kept = is_constant or math.prod(large) == math.prod(result) == math.prod(small)
        if op.name == "reduce_sum" or not (is_kept or _repeats_samples(op, value, small)):
            return None
        return value
    for dim, size in enumerate(result):
        shape = (*result[:dim], int(size / ratio), *result[dim + 1 :])
        if size % ratio or math.prod(shape) != math.prod(small):
            continue
        moved = dataclasses.replace(op, inputs=((source, large),), outputs=((shape, result),))
        try:
            output = SAMPLE_RULES[op.name](moved, [value])
        except (Coupling, LookupError):
            continue
        if isinstance(output, Value) and (output.kind, output.dim) == (Kind.ROWS, dim):
            return output
    if op.name == "reduce_sum" and math.prod(small) == 1 == math.prod(result):
        return Value(Kind.TOTAL, value.scale * math.prod(large)) if not value.positions else None
    return None


def _repeats_samples(op: Operation, value: Value, small: Shape) -> bool:
    """Whether a constant is repeated once per sample, so that the part has it once."""
    if op.name != "broadcast_in_dim" or not value.is_constant:
        return False
    large = op.inputs[0][1]
    result = op.outputs[0][1]
    return small == large and math.prod(result) > math.prod(large)


def value_of_loose(op: Operation, values: list[Value], ratio: float) -> Value | None:
    """Returns the value of an operation on arrays of which some are loose.

    Args:
        op: the operation.
        values: the values of its operands.
        ratio: the number of samples of the whole batch.

    Returns:
        The value; None if it is unknown.

    Raises:
        Coupling: if the result depends on several samples.
    """
    shapes = [canonical(v, *s, ratio) for v, s in zip(values, op.inputs, strict=True)]
    if op.name == "gather":
        return _rows_in_windows(op, values)
    if op.name == "reduce_sum":
        ends = {math.prod(shape) for shape in op.outputs[0]}
        value = values[0]
        is_own = value.is_rows and not value.positions and shapes[0] is not None
        is_all = ends == {1} and math.prod(op.inputs[0][0]) * ratio == math.prod(op.inputs[0][1])
        return Value(Kind.TOTAL, value.scale * ratio) if is_own and is_all else None
    if op.name not in ELEMENTWISE or len(op.outputs) != 1:
        return None
    whole = op.outputs[0][1]
    inputs: list[Shapes] = []
    for shape, (small, large) in zip(shapes, op.inputs, strict=True):
        if shape is None or (small and (small, large) != op.outputs[0]):
            return None
        inputs.append((shape, large))
    forms = {shape for shape, large in inputs if large == whole and len(shape) == len(whole)}
    if len(forms) != 1:
        return None
    plain = dataclasses.replace(op, inputs=tuple(inputs), outputs=((forms.pop(), whole),))
    output = SAMPLE_RULES[op.name](plain, values)
    return output if isinstance(output, Value) else output[0]


def _rows_in_windows(op: Operation, values: list[Value]) -> Value | None:
    """The rule for a batched gather from each sample's row, which the part reads as a window."""
    table, indices = values[:2]
    one = op.part_params["dimension_numbers"]
    other = op.whole_params["dimension_numbers"]
    if not (table.is_rows and indices.is_rows and table.dim is not None) or indices.positions:
        return None
    dims = other.operand_batching_dims
    places = other.start_indices_batching_dims
    if table.dim not in dims or (table.outer, indices.outer) != (1, 1) or table.positions:
        return None
    place = places[dims.index(table.dim)]
    moved = op.moved(with_own_index(table, indices))
    # The other batching dims, as numbered in the part: its indices lack the dim `place`.
    others = [(d, p - (p > place)) for d, p in zip(dims, places, strict=True) if d != table.dim]
    hidden = (*other.collapsed_slice_dims, *dims)
    windows = [d for d in range(len(op.inputs[0][1])) if d not in hidden]
    out = moved.dim or 0
    offsets = sorted((*other.offset_dims, out))
    is_same = (
        place == indices.dim
        and [*zip(one.operand_batching_dims, one.start_indices_batching_dims, strict=True)]
        == others
        and (one.collapsed_slice_dims, one.start_index_map)
        == (other.collapsed_slice_dims, other.start_index_map)
        and list(one.offset_dims) == offsets
        and sorted((*windows, table.dim)).index(table.dim) == offsets.index(out)
        and op.part_params["slice_sizes"] == op.whole_params["slice_sizes"]
        and op.part_params["mode"] == op.whole_params["mode"]
        and op.inputs[1][0] == (*op.inputs[1][1][:place], *op.inputs[1][1][place + 1 :])
    )
    return moved if is_same else None
