"""The transfer functions of the separability analysis: one rule for each family of operations.

A rule gets an operation, with its shapes in the programs of a part and of the whole batch, and the
abstract values of the operands. It returns the abstract values of the results, or raises
`Coupling`. The dims that count samples are those whose sizes differ.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import MappingProxyType

from ..core.typing import Shape
from ..ir.factors import ALONG_ONE, ELEMENTWISE, KEEPS, REDUCTIONS, TRAILING, WINDOWS, Role
from ..ir.randomness import FIRST_KEY
from ..ops.linear_loss import LINEAR_CROSS_ENTROPY
from .abstract_values import (
    CONSTANT,
    Coupling,
    Kind,
    Value,
    Why,
    aligned,
    coupled,
    either,
    nonlinear,
    over,
    plus,
    times,
)
from .indexing import INDEXING
from .operation import (
    Operation,
    Rule,
    all_constant,
    as_rows,
    grown,
    not_numbered,
    only_numbers,
    why_unequal,
)


def _linear(op: Operation, values: list[Value]) -> Value:
    """The rule for elementwise operations of one array that are linear."""
    value = values[0]
    if value.kind is Kind.CARRY and op.name in ("neg", "real", "imag", "conj"):
        raise Coupling(Why.LOOPED)
    if value.positions and op.name == "neg":
        raise Coupling(Why.NUMBERS)
    return dataclasses.replace(value, known=None) if op.name == "neg" else value


def _add(op: Operation, values: list[Value]) -> Value:
    if op.name == "sub" and values[1].kind is Kind.CARRY:
        raise Coupling(Why.LOOPED)
    return plus(*values)


def _divide(op: Operation, values: list[Value]) -> Value:
    # Integers are rounded: the quotients of two sums do not add up to that of their sum.
    return nonlinear(op.name, values) if op.kinds[0] in "iu" else over(*values)


def _convert(op: Operation, values: list[Value]) -> Value:
    # A position stays a position if it is converted to a float, but not if to a boolean.
    if narrows(op) and (op.kinds[1] == "b" or not values[0].positions):
        return nonlinear(op.name, values)
    return values[0]


def narrows(op: Operation) -> bool:
    """Whether a conversion of dtypes changes numbers by more than rounding of floats."""
    old, new = op.kinds
    return old != new and (new == "b" or (new in "iu" and old not in "iub"))


def _compare(op: Operation, values: list[Value]) -> Value:
    # jnp indexing checks whether an index is negative; a sample's position never is.
    if op.name == "lt" and values[0].positions == (True,) and values[1].is_zero:
        return Value(known=(False, False))
    return nonlinear(op.name, values)


def _power(op: Operation, values: list[Value]) -> Value:
    powers = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}
    power = powers[op.name] if op.name in powers else float(op.part_params["y"])
    value = values[0]
    if value.is_constant and value.is_scaled and (value.scale > 0 or power.is_integer()):
        return Value(Kind.CONSTANT, value.scale**power)
    return nonlinear(op.name, values)


def _broadcast(op: Operation, values: list[Value]) -> Value:
    value = values[0]
    dims = grown(op.outputs[0])
    if value.kind is Kind.CARRY and op.inputs[0] != op.outputs[0]:
        raise Coupling(Why.LOOPED)
    if value.dim is not None:
        value = op.moved(only_numbers(value))
        if dims != [value.dim]:
            raise Coupling("pairs every sample with every other")
        return value
    if dims and not value.is_constant:
        raise Coupling("gives a total over the samples back to each of them")
    return value


def _reshape(op: Operation, values: list[Value]) -> Value:
    value = values[0]
    is_turned = is_transposed(op)
    if value.kind is Kind.CARRY and (op.inputs[0] != op.outputs[0] or is_turned):
        raise Coupling(Why.LOOPED)
    if value.is_constant and not _stays_constant(op, value):
        # Merged with another dim, the dim that counts samples has unequal entries.
        value = as_rows(value, op.inputs[0])
        if value.is_constant:
            raise Coupling(Why.RESHAPED)
    if value.dim is None:
        return value
    if is_turned:
        raise Coupling(Why.RESHAPED)
    shape = op.inputs[0][0]
    new = op.outputs[0][0]
    dims = grown(op.outputs[0])
    if value.positions and len(dims) == 1 and op.inputs[0] != op.outputs[0]:
        sizes = zip(op.inputs[0], op.outputs[0], strict=True)
        if any(old[value.dim] != after[dims[0]] for old, after in sizes):
            # An entry would no longer be at the place that it names.
            raise Coupling(Why.NUMBERS)
    blocks = math.prod(shape[: value.dim]) * value.outer
    if len(dims) != 1 or blocks % math.prod(new[: dims[0]]):
        raise Coupling(Why.RESHAPED)
    outer = blocks // math.prod(new[: dims[0]])
    if new[dims[0]] % outer:
        raise Coupling(Why.RESHAPED)
    return only_numbers(value).in_dim(dims[0], outer)


def _tile(op: Operation, values: list[Value]) -> Value:
    """The rule for `tile`: a broadcast to a new dim before each dim, with which it then merges."""
    repeats = op.part_params["reps"], op.whole_params["reps"]
    small, large = (
        tuple(size for pair in zip(counts, shape, strict=True) for size in pair)
        for counts, shape in zip(repeats, op.inputs[0], strict=True)
    )
    dims = {"broadcast_dimensions": tuple(range(1, len(small), 2))}
    wide = ((small, large),)
    spread = dataclasses.replace(
        op, name="broadcast_in_dim", part_params=dims, whole_params=dims, outputs=wide
    )
    merged = dataclasses.replace(op, name="reshape", part_params={}, whole_params={}, inputs=wide)
    return _reshape(merged, [_broadcast(spread, values)])


def _stays_constant(op: Operation, value: Value) -> bool:
    """Whether a reshaped constant has equal entries along each dim that counts samples."""
    counting = grown(op.inputs[0])
    others = (size for d, size in enumerate(op.inputs[0][0]) if d not in counting)
    if value.known is not None or not counting or all(size == 1 for size in others):
        return True
    sides = zip(op.inputs[0], op.outputs[0], strict=True)
    return not is_transposed(op) and all(
        any(_is_within(old, dim, new, result) for dim in counting)
        for old, new in sides
        for result in grown(op.outputs[0])
    )


def _is_within(shape: Shape, dim: int, new: Shape, result: int) -> bool:
    """Whether a dim of a reshaped array is a dim of the array, or a part of that dim."""
    old_step, step = math.prod(shape[dim + 1 :]), math.prod(new[result + 1 :])
    if not math.prod(shape):
        return True
    return step % old_step == 0 and shape[dim] * old_step % (new[result] * step) == 0


def is_transposed(op: Operation) -> bool:
    """Whether a reshape first permutes the dims (the `dimensions` of `lax.reshape`)."""
    orders = (params.get("dimensions") for params in (op.part_params, op.whole_params))
    return op.name == "reshape" and any(orders)


def _transpose(op: Operation, values: list[Value]) -> Value:
    value = values[0]
    if value.kind is Kind.CARRY:
        raise Coupling(Why.LOOPED)
    return value if value.dim is None else op.moved(only_numbers(value))


def _times_more(op: Operation) -> float:
    """Returns how many entries of the first operand the whole sums, divided by those of a part."""
    small, large = op.inputs[0]
    summed = (dim for dim in grown(op.inputs[0]) if op.factors.role(0, dim) is Role.SUMMED)
    return math.prod(large[dim] / small[dim] for dim in summed)


def _reduce_sum(op: Operation, values: list[Value]) -> Value:
    value = values[0]
    if value.is_constant:
        known = (0, 0) if value.is_zero else None
        return dataclasses.replace(value, scale=value.scale * _times_more(op), known=known)
    if value.kind is Kind.CARRY:
        raise Coupling(Why.LOOPED)
    if value.is_rows and value.positions:
        raise Coupling(Why.NUMBERS)
    is_summed = value.dim is not None and Role.SUMMED in op.roles
    return _summed(value, _times_more(op)) if is_summed else op.moved(value)


def _summed(value: Value, times_more: float) -> Value:
    """Returns the sum of rows over the samples."""
    kind = Kind.CONSTANT if value.repeats else Kind.TOTAL
    return Value(kind, value.scale * times_more)


def _reduce(op: Operation, values: list[Value]) -> list[Value]:
    """The rule for reductions other than sums: max, min, product, and, or, argmax and so on."""
    result = nonlinear(op.name, values)
    # The product of equal factors depends on how many there are; their maximum does not.
    depends_on_count = op.name in ("reduce_prod", "reduce_xor", "reduce")
    if result.repeats and Role.REDUCED in op.roles and op.name in _OF_REPEATED:
        return [CONSTANT]
    if Role.REDUCED in op.roles and (depends_on_count or (result.dim is not None)):
        raise Coupling(f"takes `{op.name}` over the samples")
    return [op.moved(result)] * len(op.outputs)


_OF_REPEATED = frozenset({"reduce_max", "reduce_min", "reduce_and", "reduce_or"})
"""Reductions of equal rows that do not depend on how many there are, or on their order."""


def _along(op: Operation, values: list[Value]) -> list[Value]:
    """The rule for operations along some dims, or on windows, that keep the other dims."""
    # Indices along a dim that counts samples differ between a part of a batch and the whole.
    if op.roles - {Role.PASSES}:
        raise Coupling(f"takes `{op.name}` along the samples")
    is_sum = op.name in ("cumsum", "reduce_window_sum")
    result = values[0] if is_sum else nonlinear(op.name, values)
    result = not_numbered(result)
    known = result.known if result.is_zero else None
    return [dataclasses.replace(result, known=known)] * len(op.outputs)


def _solve(op: Operation, values: list[Value]) -> list[Value]:
    """The rule for `triangular_solve`, which is linear in its second operand."""
    matrix, right = values
    # A backward pass gives it a cotangent, which has a scale.
    solved = _along(op, [matrix, dataclasses.replace(right, scale=1.0)])
    return [dataclasses.replace(value, scale=right.scale) for value in solved]


def _dot(op: Operation, values: list[Value]) -> Value:
    if op.kinds[1] == "b" and Role.SUMMED in op.roles:
        # Products of booleans are not added: the result is whether any of them is true.
        raise Coupling(f"takes `{op.name}` of booleans over the samples")
    left, right = (as_rows(v, s) for v, s in zip(values, op.inputs, strict=True))
    if all_constant(values):
        return Value(Kind.CONSTANT, left.scale * right.scale * _times_more(op))
    factors = [
        None if v.dim is None else op.factors.factor(number, v.dim)
        for number, v in enumerate((left, right))
    ]
    pairs = zip((left, right), factors, strict=True)
    sides = [v if factor is None else v.in_dim(0, v.outer) for v, factor in pairs]
    if None not in factors:
        if factors[0] != factors[1] or left.outer != right.outer:
            raise Coupling("multiplies every sample with every other")
        aligned(sides, 1.0)
    result = times(*sides)
    number = 0 if factors[0] is not None else 1
    factor = factors[number]
    counting = (left, right)[number]
    if factor is None:
        return result
    if op.factors.roles[factor] is Role.SUMMED:
        return _summed(result, _times_more(op))
    return op.moved(result.in_dim(counting.dim, result.outer), number)


def _conv(op: Operation, values: list[Value]) -> Value:
    image, kernel = values
    result = times(image, kernel)
    if all_constant(values) or image.dim is None:
        if any(map(grown, (*op.inputs, *op.outputs))):
            raise Coupling("goes through a convolution along the samples")
        return result
    if not kernel.is_constant or op.factors.role(0, image.dim) is not Role.PASSES:
        raise Coupling("goes through a convolution along the samples")
    return op.moved(result.in_dim(image.dim, image.outer))


def _concatenate(op: Operation, values: list[Value]) -> Value:
    dim = op.part_params["dimension"]
    parts = [as_rows(v, s) for v, s in zip(values, op.inputs, strict=True)]
    if any(dim in grown(shapes) for shapes in op.inputs):
        first = functools.reduce(either, map(not_numbered, parts))
        sizes = {tuple(shape[dim] for shape in shapes) for shapes in op.inputs}
        if not first.is_rows or len(sizes) > 1:
            raise Coupling(Why.JOINED)
        return first.in_dim(dim, first.outer * len(values))
    if not any(value.positions for value in parts):
        return functools.reduce(either, parts)
    # Columns of indices: remember which of them are the sample's position.
    if any(value.is_scaled for value in parts):
        raise Coupling(Why.SIZES)
    plain = aligned([dataclasses.replace(v, positions=()) for v in parts], 1.0)
    last = dim == len(op.outputs[0][0]) - 1 and all(s[0][dim] == 1 for s in op.inputs)
    if not last or any(value.positions not in ((), (True,)) for value in parts):
        raise Coupling(Why.NUMBERS)
    return dataclasses.replace(plain, positions=tuple(v.positions == (True,) for v in parts))


def _stack(op: Operation, values: list[Value]) -> Value:
    return op.moved(functools.reduce(either, (not_numbered(v) for v in values)))


def _unstack(op: Operation, values: list[Value]) -> list[Value]:
    if Role.PART in op.roles:
        raise Coupling("splits an array along the samples")
    return [op.moved(not_numbered(values[0]))] * len(op.outputs)


def _select(op: Operation, values: list[Value]) -> Value:
    which, *cases = values
    if which.same_number is not None:
        return cases[int(which.same_number)]
    if which.is_constant and not which.is_scaled:
        joined = functools.reduce(either, cases)
        return dataclasses.replace(joined, known=None)
    if which.kind not in (Kind.ROWS, Kind.CONSTANT) or which.is_scaled:
        return nonlinear(op.name, values)
    joined = functools.reduce(either, cases)
    if joined.kind is Kind.CARRY and which.dim is None and not which.positions:
        return joined
    if joined.is_constant or joined.is_rows:
        return aligned([which, joined], joined.scale)
    raise Coupling(Why.EACH)


def _iota(op: Operation, values: list[Value]) -> Value:
    if op.part_params["dimension"] in grown(op.outputs[0]):
        return Value(Kind.ROWS, dim=op.part_params["dimension"], positions=(True,))
    return CONSTANT


def _draw(op: Operation, values: list[Value]) -> Value:
    """The rule for random bits and for splitting keys: results may have a row per sample."""
    key = values[0]
    nonlinear(op.name, values)
    if key.is_rows and "rbg" in op.generator and op.name == "random_bits":
        raise Coupling(FIRST_KEY)
    key_ndim = len(op.inputs[0][0])
    return key if key.is_rows else _of_one_key(op, key, key_ndim)


def _of_one_key(op: Operation, key: Value, key_ndim: int = 0) -> Value:
    """Returns the value of a draw from one key; the key's own dims come first in the result."""
    dims = [dim for dim in grown(op.outputs[0]) if dim >= key_ndim]
    if not dims:
        return Value(from_own_key=key.from_own_key)
    if len(dims) > 1 or grown(op.inputs[0]):
        raise Coupling(PAIRS)
    if key.from_own_key:
        raise Coupling(MADE)
    return Value(Kind.ROWS, dim=dims[0])


def _gamma(op: Operation, values: list[Value]) -> Value:
    """The rule for gamma noise: each element has its own key, split from one or one per sample."""
    key = values[0]
    shape_of_it = as_rows(values[1], op.inputs[1])
    nonlinear(op.name, [key, shape_of_it])
    if key.is_rows:
        if "rbg" in op.generator:
            raise Coupling(FIRST_KEY)
        return aligned([key, shape_of_it], 1.0)
    drawn = _of_one_key(op, key)
    if drawn.dim != shape_of_it.dim:
        raise Coupling(PAIRS)
    return drawn


PAIRS = "draws random numbers for pairs of samples"

MADE = (
    "is drawn with a row for every sample from a key that the loss creates itself or closes over, "
    "such as jax.random.key(0) within the model or the loss, so that every rank would draw the "
    "same; keep the key in the model, as nnx.Rngs(0) does"
)


def _make_key(op: Operation, values: list[Value]) -> Value:
    return dataclasses.replace(nonlinear(op.name, values), from_own_key=True, known=None)


def _attention(op: Operation, values: list[Value]) -> list[Value]:
    """The rule for fused attention kernels: arrays have the samples in dim 0, or not at all."""
    operands = [as_rows(v, s) for v, s in zip(values, op.inputs, strict=True)]
    # The backward pass is linear in the cotangent, and in nothing else.
    place = _RETURNED.get(op.name)
    returned = CONSTANT if place is None else operands[place]
    if place is not None:
        operands[place] = dataclasses.replace(returned, scale=1.0)
    result = nonlinear(op.name, operands)
    if result.is_rows or result.is_constant:
        result = dataclasses.replace(result, scale=returned.scale)
    if not result.is_rows:
        return [result] * len(op.outputs)
    if (result.dim, result.outer) != (0, 1):
        raise Coupling(f"goes through `{op.name}` in a dim that is not the first")
    # A result without a samples' dim is the gradient of a bias that all samples share. The kernels
    # in eight bits take no bias; such results of them are the largest values, for later scales.
    more = returned.scale * op.inputs[0][1][0] / op.inputs[0][0][0]
    largest = coupled("takes the largest value over the samples", "")
    of_all = largest if "_fp8_" in op.name else Value(Kind.TOTAL, more)
    return [result if grown(shapes) else of_all for shapes in op.outputs]


def _linear_loss(op: Operation, values: list[Value]) -> list[Value]:
    """The rule for the fused head loss: a weighted sum of the losses of single positions."""
    hidden, kernel, labels, weights, *bias = (not_numbered(value) for value in values)
    if any(v.is_rows or v.kind is Kind.TOTAL for v in (kernel, *bias)):
        raise Coupling("has a head that depends on the samples")
    if hidden.is_rows and hidden.dim == len(op.inputs[0][0]) - 1:
        raise Coupling("multiplies every sample with every other")
    each = [as_rows(v, s) for v, s in zip((hidden, labels), op.inputs[::2], strict=False)]
    losses = nonlinear(op.name, [each[0], kernel, each[1], *bias])
    result = times(losses, as_rows(weights, op.inputs[3]))
    if result.dim is not None:
        small, large = (shape[result.dim] for shape in op.inputs[0])
        result = Value(Kind.TOTAL, result.scale * large / small)
    return [result] * len(op.outputs)


_RETURNED: MappingProxyType[str, int] = MappingProxyType(
    {"dot_product_attention_bwd_wrapper": 12, "dot_product_attention_fp8_bwd_wrapper": 4}
)
"""The position of the cotangent among the operands of a backward kernel, by its name."""


_LINEAR = (
    "neg copy copy_p real imag conj reduce_precision stop_gradient name to_edtype from_edtype tie"
)
_POWERS = "sqrt rsqrt square integer_pow"
SAMPLE_RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(ELEMENTWISE, lambda op, v: nonlinear(op.name, v)),
        **dict.fromkeys(_LINEAR.split(), _linear),
        **dict.fromkeys(KEEPS, lambda op, v: list(v)),
        **dict.fromkeys(("add", "sub", "add_any"), _add),
        "mul": lambda op, v: times(*v),
        "div": _divide,
        "lt": _compare,
        "convert_element_type": _convert,
        **dict.fromkeys(_POWERS.split(), _power),
        "broadcast_in_dim": _broadcast,
        "tile": _tile,
        **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
        "transpose": _transpose,
        "reduce_sum": _reduce_sum,
        **dict.fromkeys(REDUCTIONS, _reduce),
        **dict.fromkeys((*TRAILING, *ALONG_ONE, *WINDOWS), _along),
        "triangular_solve": _solve,
        "dot_general": _dot,
        "conv_general_dilated": _conv,
        **INDEXING,
        "concatenate": _concatenate,
        "stack": _stack,
        "unstack": _unstack,
        "select_n": _select,
        "iota": _iota,
        **dict.fromkeys(("random_bits", "random_split"), _draw),
        "random_gamma": _gamma,
        **dict.fromkeys(("random_seed", "random_wrap"), _make_key),
        **{f"dot_product_attention_{way}_wrapper": _attention
           for way in ("fwd", "bwd", "fp8_fwd", "fp8_bwd")},
        LINEAR_CROSS_ENTROPY: _linear_loss,
    }
)  # fmt: skip
"""The rule of each primitive, by name."""


def unknown(op: Operation, values: list[Value]) -> Value:
    """The rule for operations without one.

    Allows operands that are independent of the samples, or one sample in the body of a loop over
    samples, if no dim grows with the batch.
    """
    fixed = not any(grown(shapes) for shapes in (*op.inputs, *op.outputs))
    # Of a number that differs between a part and the whole, the result may differ in any way.
    fixed = fixed and not any(v.is_scaled or v.positions for v in values)
    if values and all_constant(values) and fixed:
        return CONSTANT
    if not op.outputs:
        return CONSTANT
    if not values and op.name in ("platform_index", "empty", "create_token"):
        return CONSTANT
    if values and all(v.is_constant or (v.is_rows and v.dim is None) for v in values) and fixed:
        if why := why_unequal(op):
            raise Coupling(why)
        return Value(Kind.ROWS)
    raise Coupling(unread(op.name))


def unread(name: str) -> str:
    """Returns the reason for an operation that no rule covers."""
    return (
        f"goes through `{name}`, whose effect on samples is unknown; "
        "axon_dist.per_sample marks a function that treats them one by one"
    )
