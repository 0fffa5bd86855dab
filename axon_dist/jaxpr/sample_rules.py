"""What each operation does to the dependence on samples: one small rule for every family.

A rule gets the operation as it stands in the programs for two numbers of samples, so that the dims
that count samples are those whose size differs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from types import MappingProxyType

from ..ops.linear_loss import LINEAR_CROSS_ENTROPY
from .sample_indexing import INDEXING
from .sample_values import (
    CONSTANT,
    LOOPED,
    NUMBERS,
    Coupling,
    Kind,
    Operation,
    Rule,
    Value,
    aligned,
    all_constant,
    as_rows,
    grown,
    nonlinear,
    not_numbered,
    only_numbers,
    over,
    plus,
    rows,
    times,
    total,
)


def _linear(op: Operation, values: list[Value]) -> Value:
    """One array, changed element by element in a way that keeps sums."""
    value = values[0]
    if value.kind is Kind.CARRY and op.name in ("neg", "real", "imag"):
        raise Coupling(LOOPED)
    if value.numbers and op.name == "neg":
        raise Coupling(NUMBERS)
    return dataclasses.replace(value, known=None) if op.name == "neg" else value


def _convert(op: Operation, values: list[Value]) -> Value:
    old, new = (dtype.kind for dtype in op.dtypes)
    narrows = new == "b" or (new in "iu" and old not in "iub")
    if narrows and values[0].kind is not Kind.CARRY and not values[0].numbers:
        return nonlinear(op.name, values)
    return values[0]


def _same(op: Operation, values: list[Value]) -> list[Value]:
    return list(values)


def _compare(op: Operation, values: list[Value]) -> Value:
    # Indexing asks whether positions are negative, to count them from the end.
    if op.name == "lt" and values[0].numbers == (True,) and values[1].is_zero:
        return Value(known=False)
    return nonlinear(op.name, values)


def _power(op: Operation, values: list[Value]) -> Value:
    powers = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}
    power = powers[op.name] if op.name in powers else float(op.params["y"])
    degree = values[0].degree
    if values[0].is_constant and values[0].known is None and degree is not None:
        return dataclasses.replace(values[0], degree=degree * power)
    return nonlinear(op.name, values)


def _nonlinear(op: Operation, values: list[Value]) -> Value:
    return nonlinear(op.name, values)


def _broadcast(op: Operation, values: list[Value]) -> Value:
    value, dims = values[0], grown(op.outputs[0])
    if value.is_rows and value.dim is not None:
        dim = int(op.params["broadcast_dimensions"][value.dim])
        if dims != [dim]:
            raise Coupling("puts every sample beside every other")
        if op.inputs[0][0][value.dim] != op.outputs[0][0][dim]:
            raise Coupling("puts samples together with other samples")
        return only_numbers(value).at(dim, value.outer)
    if dims and not value.is_constant:
        raise Coupling("gives a total over the samples back to each of them")
    return value


def _reshape(op: Operation, values: list[Value]) -> Value:
    value = values[0]
    if not value.is_rows or value.dim is None:
        return value
    shape, new = op.inputs[0][0], op.outputs[0][0]
    dims = grown(op.outputs[0])
    blocks = math.prod(shape[: value.dim]) * value.outer
    if len(dims) != 1 or blocks % math.prod(new[: dims[0]]):
        raise Coupling("is reshaped across the samples")
    outer = blocks // math.prod(new[: dims[0]])
    if new[dims[0]] % outer:
        raise Coupling("is reshaped across the samples")
    return only_numbers(value).at(dims[0], outer)


def _transpose(op: Operation, values: list[Value]) -> Value:
    value = values[0]
    if value.is_rows and value.dim is not None:
        dim = tuple(op.params["permutation"]).index(value.dim)
        return only_numbers(value).at(dim, value.outer)
    return value


def _without(dim: int, axes: Sequence[int]) -> int:
    return dim - sum(axis < dim for axis in axes)


def _reduce_sum(op: Operation, values: list[Value]) -> Value:
    value, axes = values[0], op.params["axes"]
    if value.is_constant:
        count = sum(dim in axes for dim in grown(op.inputs[0]))
        known = 0 if value.is_zero else None
        return dataclasses.replace(value, degree=value.degree + count, known=known)
    if value.kind is Kind.CARRY:
        raise Coupling(LOOPED)
    if value.is_rows and value.numbers:
        raise Coupling(NUMBERS)
    if value.is_rows and value.dim is not None:
        return total(value.degree) if value.dim in axes else _shifted(value, axes)
    return value


def _shifted(value: Value, axes: Sequence[int]) -> Value:
    return value.at(_without(value.dim or 0, axes), value.outer)


def _reduce(op: Operation, values: list[Value]) -> list[Value]:
    """Largest, smallest, product, all, any, and their positions."""
    axes = op.params["axes"] if "axes" in op.params else op.params["dimensions"]
    result = nonlinear(op.name, values)
    spans = any(dim in axes for shapes in op.inputs for dim in grown(shapes))
    if spans and op.name in ("reduce_prod", "reduce_xor", "reduce"):
        raise Coupling(f"takes `{op.name}` over the samples")
    if result.is_rows and result.dim is not None:
        if result.dim in axes:
            raise Coupling(f"takes `{op.name}` over the samples")
        result = _shifted(result, axes)
    return [result] * len(op.outputs)


def _along(op: Operation, values: list[Value]) -> list[Value]:
    """Operations along one dim, or the last few, which keep the others."""
    rank = len(op.inputs[0][0])
    if op.name in _TRAILING:
        count = _TRAILING[op.name]
        spanned = range(rank - (len(op.params["fft_lengths"]) if op.name == "fft" else count), rank)
    else:
        found = op.params.get("axis", op.params.get("dimension", op.params.get("operand_axis", -1)))
        spanned = (found % rank,)
    # Indices along a dim that counts samples differ between a part of a batch and the whole.
    if any(dim in spanned for shapes in op.inputs for dim in grown(shapes)):
        raise Coupling(f"takes `{op.name}` along the samples")
    result = values[0] if op.name == "cumsum" else nonlinear(op.name, values)
    if result.numbers or result.kind is Kind.CARRY:
        raise Coupling(NUMBERS)
    return [result] * len(op.outputs)


_TRAILING = MappingProxyType(
    {
        "cholesky": 2, "triangular_solve": 2, "lu": 2, "qr": 2, "geqrf": 2, "geqp3": 2, "eigh": 2,
        "householder_product": 2, "svd": 2, "eig": 2, "schur": 2, "hessenberg": 2, "tridiagonal": 2,
        "tridiagonal_solve": 2, "lu_pivots_to_permutation": 1, "fft": 1,
    }
)  # fmt: skip
"""How many dims at the end a linear algebra routine takes as one matrix or vector."""


def _window(op: Operation, values: list[Value]) -> Value:
    result = values[0] if op.name == "reduce_window_sum" else nonlinear(op.name, values)
    for dim in grown(op.inputs[0]):
        window, stride = op.params["window_dimensions"][dim], op.params["window_strides"][dim]
        if (window, stride, tuple(op.params["padding"][dim])) != (1, 1, (0, 0)):
            raise Coupling(f"takes `{op.name}` along the samples")
    return result


def _dot(op: Operation, values: list[Value]) -> Value:
    (contract, batch) = op.params["dimension_numbers"]
    left, right = (as_rows(v, s) for v, s in zip(values, op.inputs, strict=True))
    if all_constant(values):
        count = sum(dim in contract[0] for dim in grown(op.inputs[0]))
        return Value(Kind.CONSTANT, left.degree + right.degree + count)
    places = [
        _place(v, own, shared)
        for v, own, shared in zip((left, right), contract, batch, strict=True)
    ]
    if all(v.is_rows and v.dim is not None for v in (left, right)):
        if places[0] != places[1] or places[0][0] == "free" or left.outer != right.outer:
            raise Coupling("multiplies every sample with every other")
        aligned([dataclasses.replace(v, dim=0) for v in (left, right)], 0.0)
    result = times(
        *(dataclasses.replace(v, dim=0) if v.is_rows and v.dim is not None else v
          for v in (left, right))
    )  # fmt: skip
    where, index = next((p for p in places if p[0] != "none"), ("none", 0))
    if where == "contracted":
        return total(result.degree)
    if where == "batch":
        return result.at(index, result.outer)
    if where == "free":
        return result.at(grown(op.outputs[0])[0], result.outer)
    return result


def _place(value: Value, contracted: Sequence[int], batch: Sequence[int]) -> tuple[str, int]:
    """What a product does with the dim that counts samples."""
    if not value.is_rows or value.dim is None:
        return "none", 0
    if value.dim in contracted:
        return "contracted", tuple(contracted).index(value.dim)
    return ("batch", tuple(batch).index(value.dim)) if value.dim in batch else ("free", 0)


def _conv(op: Operation, values: list[Value]) -> Value:
    image, kernel = values
    numbers = op.params["dimension_numbers"]
    result = times(image, kernel)
    if all_constant(values) or not image.is_rows or image.dim is None:
        if grown(op.outputs[0]):
            raise Coupling("goes through a convolution along the samples")
        return result
    ok = kernel.is_constant and image.dim == numbers.lhs_spec[0]
    if not ok or op.params["batch_group_count"] != 1:
        raise Coupling("goes through a convolution along the samples")
    return result.at(numbers.out_spec[0], image.outer)


def _concatenate(op: Operation, values: list[Value]) -> Value:
    dim = op.params["dimension"]
    beside = [as_rows(v, s) for v, s in zip(values, op.inputs, strict=True)]
    if any(dim in grown(shapes) for shapes in op.inputs):
        if len({shapes[0][dim] for shapes in op.inputs}) > 1:
            raise Coupling("joins samples with something else along their dim")
        first = functools.reduce(plus, map(not_numbered, beside))
        if not first.is_rows:
            raise Coupling("joins samples with something else along their dim")
        return first.at(dim, first.outer * len(values))
    if any(value.numbers for value in beside):
        flags = tuple(value.numbers == (True,) for value in beside)
        plain = aligned([dataclasses.replace(v, numbers=()) for v in beside], 0.0)
        last = dim == len(op.outputs[0][0]) - 1 and all(s[0][dim] == 1 for s in op.inputs)
        if not last or any(value.numbers not in ((), (True,)) for value in beside):
            raise Coupling(NUMBERS)
        return dataclasses.replace(plain, numbers=flags)
    return functools.reduce(plus, beside)


def _stack(op: Operation, values: list[Value]) -> Value:
    axis = op.params["axis"]
    result = functools.reduce(plus, (not_numbered(v) for v in values))
    if result.is_rows and result.dim is not None:
        return result.at(result.dim + (axis <= result.dim), result.outer)
    return result


def _unstack(op: Operation, values: list[Value]) -> list[Value]:
    value, axis = not_numbered(values[0]), op.params["axis"]
    if axis in grown(op.inputs[0]):
        raise Coupling("takes the samples apart")
    if value.is_rows and value.dim is not None:
        value = _shifted(value, (axis,))
    return [value] * len(op.outputs)


def _select(op: Operation, values: list[Value]) -> Value:
    which, *cases = values
    if which.known is not None:
        return cases[int(which.known)]
    if which.is_constant and not which.degree:
        chosen = functools.reduce(plus, cases)
        return dataclasses.replace(chosen, known=None)
    if which.kind not in (Kind.ROWS, Kind.CONSTANT) or which.degree:
        return nonlinear(op.name, values)
    beside = functools.reduce(plus, cases)
    if beside.is_constant or beside.is_rows:
        return aligned([which, beside], beside.degree)
    raise Coupling("puts a total over the samples together with each of them")


def _iota(op: Operation, values: list[Value]) -> Value:
    if op.params["dimension"] in grown(op.outputs[0]):
        return dataclasses.replace(rows(op.params["dimension"]), numbers=(True,))
    return CONSTANT


def _draw(op: Operation, values: list[Value]) -> Value:
    """Random bits, or keys split off another: with a row for every sample."""
    key = values[0]
    nonlinear(op.name, values)
    if key.is_rows and "rbg" in op.generator and op.name == "random_bits":
        raise Coupling(FIRST_KEY)
    if key.is_rows:
        return key
    own = len(op.inputs[0][0])
    dims = [dim for dim in grown(op.outputs[0]) if dim >= own]
    if not dims:
        return Value(made=key.made)
    if len(dims) > 1 or grown(op.inputs[0]):
        raise Coupling("draws random numbers for pairs of samples")
    if key.made:
        raise Coupling(MADE)
    return rows(dims[0])


FIRST_KEY = (
    "draws with keys of the samples' own by the generator rbg, which under vmap takes the first "
    "key for all; make the keys with impl='threefry2x32'"
)
MADE = (
    "is drawn with a row for every sample from a key that is made on the way, such as "
    "jax.random.key(0) within the model or the loss, so that every rank would draw the same; keep "
    "the key in the model, as nnx.Rngs(0) does"
)


def _make_key(op: Operation, values: list[Value]) -> Value:
    return dataclasses.replace(nonlinear(op.name, values), made=True, known=None)


def _attention(op: Operation, values: list[Value]) -> list[Value]:
    """Fused kernels whose arrays have the samples in front, or nothing of them."""
    beside = [as_rows(v, s) for v, s in zip(values, op.inputs, strict=True)]
    # The backward pass is linear in what comes back, alone.
    returned = beside[_RETURNED] if "_bwd_" in op.name else CONSTANT
    if returned.degree:
        beside[_RETURNED] = dataclasses.replace(returned, degree=0.0)
    result = nonlinear(op.name, beside)
    if result.is_rows or result.is_constant:
        result = dataclasses.replace(result, degree=returned.degree)
    if not result.is_rows:
        return [result] * len(op.outputs)
    if (result.dim, result.outer) != (0, 1):
        raise Coupling(f"goes through `{op.name}` in a dim that is not the first")
    # What has no samples is the gradient of a bias that all of them share.
    return [result if grown(shapes) else total(returned.degree) for shapes in op.outputs]


def _linear_loss(op: Operation, values: list[Value]) -> list[Value]:
    """A weighted sum of losses, each of one position."""
    hidden, kernel, labels, weights, *bias = (not_numbered(value) for value in values)
    if any(v.is_rows or v.kind is Kind.TOTAL for v in (kernel, *bias)):
        raise Coupling("has a head that depends on the samples")
    if hidden.is_rows and hidden.dim == len(op.inputs[0][0]) - 1:
        raise Coupling("multiplies every sample with every other")
    each = [as_rows(v, s) for v, s in zip((hidden, labels), op.inputs[::2], strict=False)]
    losses = nonlinear(op.name, [each[0], kernel, each[1], *bias])
    result = times(losses, as_rows(weights, op.inputs[3]))
    if result.is_rows and result.dim is not None:
        result = total(result.degree)
    return [result] * len(op.outputs)


_RETURNED = 12
"""Of the operands of `dot_product_attention_bwd`, the gradient that comes back."""


_NONLINEAR = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type
    cbrt ceil clamp clz complex cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igamma_grad_a igammac is_finite le le_to lgamma log log1p log2 logistic lt_to
    max min mulhi ne nextafter not one_minus_square or polygamma polynomial population_count
    pow random_clone random_fold_in random_gamma_grad random_unwrap regularized_incomplete_beta
    rem round shift_left shift_right_arithmetic shift_right_logical sign sin sinh tan tanh
    threefry2x32 xor zeta
"""
_LINEAR = (
    "neg copy copy_p real imag conj reduce_precision stop_gradient name to_edtype from_edtype tie"
)
_PLACING = "sharding_constraint mesh_cast pvary pcast layout_constraint reshard"
_POWERS = "sqrt rsqrt square integer_pow"
_ARITHMETIC = "add sub add_any mul div lt convert_element_type select_n"

ELEMENTWISE: frozenset[str] = frozenset(
    " ".join((_NONLINEAR, _LINEAR, _POWERS, _ARITHMETIC)).split()
)
"""Operations that make every element of the elements at its place, or of numbers."""

RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_NONLINEAR.split(), _nonlinear),
        **dict.fromkeys(_LINEAR.split(), _linear),
        **dict.fromkeys(_PLACING.split(), _linear),
        **dict.fromkeys(("optimization_barrier", "device_put"), _same),
        **dict.fromkeys(("add", "sub", "add_any"), lambda op, v: plus(*_signed(op, v))),
        "mul": lambda op, v: times(*v),
        "div": lambda op, v: over(*v),
        "lt": _compare,
        "convert_element_type": _convert,
        **dict.fromkeys(_POWERS.split(), _power),
        "broadcast_in_dim": _broadcast,
        **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
        "transpose": _transpose,
        "reduce_sum": _reduce_sum,
        **{f"reduce_{kind}": _reduce for kind in ("max", "min", "prod", "and", "or", "xor")},
        **dict.fromkeys(("argmax", "argmin", "reduce"), _reduce),
        **dict.fromkeys(_TRAILING, _along),
        **{f"cum{kind}": _along for kind in ("sum", "prod", "max", "min", "logsumexp")},
        **dict.fromkeys(("sort", "top_k", "approx_top_k"), _along),
        **{f"reduce_window_{kind}": _window for kind in ("sum", "max", "min")},
        "reduce_window": _window,
        "dot_general": _dot,
        "conv_general_dilated": _conv,
        **INDEXING,
        "concatenate": _concatenate,
        "stack": _stack,
        "unstack": _unstack,
        "select_n": _select,
        "iota": _iota,
        **dict.fromkeys(("random_bits", "random_split"), _draw),
        **dict.fromkeys(("random_seed", "random_wrap"), _make_key),
        **{f"dot_product_attention_{way}_wrapper": _attention
           for way in ("fwd", "bwd", "fp8_fwd", "fp8_bwd")},
        LINEAR_CROSS_ENTROPY: _linear_loss,
    }
)  # fmt: skip
"""By the name of the primitive."""


def _signed(op: Operation, values: list[Value]) -> list[Value]:
    if op.name == "sub" and values[1].kind is Kind.CARRY:
        raise Coupling(LOOPED)
    return values
