"""What every primitive does with dims: one table, from which all analyses of dims are derived.

An equation has *factors*, as in the op-sharding rules of Shardy: `dot_general` of `[i, k]` and
`[k, j]` has three. Each dim of an operand or a result is made of factors, the major one first; a
dim that a reshape cuts in two has two. Each equation has a `Role` for each of its factors:
whether elements stay at their place along it, are summed over, are needed all together, and so on.
All analyses of dims use it: of layouts, of dims that are split alike, and of what counts samples.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn

from ..core.typing import Shape
from .walk import shape_of

OperandDim: TypeAlias = tuple[int, int]
"""(the number of an operand or a result, one of its dims)."""


EACH = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "clz", "complex", "convert_element_type", "copy", "cos", "cosh", "digamma", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "population_count",
    "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))  # fmt: skip
"""Cheap elementwise operations, which the backward pass may compute again.

Each element of their results depends on the elements of operands at the same place, and on
parameters. Other elementwise operations are in `ELEMENTWISE`."""

ELEMENTWISE = EACH | frozenset((
    "add_any", "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "conj", "copy_p", "eq_to",
    "from_edtype", "igamma", "igamma_grad_a", "igammac", "le_to", "lt_to", "mulhi", "name",
    "polygamma", "polynomial", "random_clone", "random_fold_in", "random_gamma_grad",
    "random_unwrap", "regularized_incomplete_beta", "threefry2x32", "tie", "to_edtype", "zeta",
))  # fmt: skip
"""`EACH`, and elementwise operations that cost more, give names, or work on random keys."""

COMPARES = frozenset(("eq", "ge", "gt", "is_finite", "le", "lt", "ne"))
"""Those of `EACH` whose results take a byte per element, whatever the dtype of the operands."""

MOVES = frozenset((
    "broadcast_in_dim", "concatenate", "expand_dims", "iota", "pad", "reshape", "rev", "slice",
    "split", "squeeze", "transpose",
))  # fmt: skip
"""Operations that move elements, and compute nothing."""

RESHAPES = frozenset(("broadcast_in_dim", "expand_dims", "reshape", "squeeze"))
"""Those of `MOVES` that may keep the entries of an array in their order."""

KEEPS = frozenset((
    "device_put", "layout_constraint", "mesh_cast", "optimization_barrier", "pcast", "pvary",
    "reshard", "sharding_constraint",
))  # fmt: skip
"""Other operations that keep every element at its place."""


class Role(enum.Enum):
    """What an equation does along a factor.

    PASSES: an element of results depends on the elements of operands at its place alone.
    SUMMED: results are sums over it.
    REDUCED: results are made of all of it in another way, such as the largest.
    ALONG: results have it, and each place may depend on all of it, as in a sort.
    WINDOW: results have it in another size, and each place depends on places around it.
    PART: results have a part of it, or it is a part of theirs.
    JOINED: operands are concatenated along it, or one is written into a part of another.
    INDEXED: a computed index selects the places of it that are read or written.
    NEW: results alone have it.
    """

    PASSES = "passes"
    SUMMED = "summed"
    REDUCED = "reduced"
    ALONG = "along"
    WINDOW = "window"
    PART = "part"
    JOINED = "joined"
    INDEXED = "indexed"
    NEW = "new"


@dataclasses.dataclass(eq=False)
class Factors:
    """The factors of an equation.

    The rule of the primitive fills the last three lists in place, one factor at a time, by `add`
    and what calls it; when `factors` or `factors_of` returns, they are complete, and are only read.

    Args:
        name: of its primitive.
        params: of the equation.
        inputs: the shapes of its operands.
        outputs: the shapes of its results.
        roles: of each factor, by its number.
        operands: for each operand and each of its dims the factors, the major one first. None for
            a dim that is repeated or dropped, of size 1.
        results: likewise.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> program = jax.make_jaxpr(jnp.dot)(jnp.ones((2, 3)), jnp.ones((3, 4)))
        >>> found = factors(program.jaxpr.eqns[0])
        >>> found.operands, found.results
        ([[(1,), (0,)], [(0,), (2,)]], [[(1,), (2,)]])
        >>> [role.value for role in found.roles]
        ['summed', 'passes', 'passes']
    """

    name: str
    params: Mapping[str, Any]
    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    roles: list[Role]
    operands: list[list[tuple[int, ...]]]
    results: list[list[tuple[int, ...]]]

    def role(self, operand: int, dim: int) -> Role | None:
        """What happens along the major factor of a dim of an operand; None where it has none."""
        numbers = self.operands[operand][dim]
        return self.roles[numbers[0]] if numbers else None

    def dims(self, factor: int, side: Sequence[Sequence[tuple[int, ...]]]) -> list[OperandDim]:
        """Where a factor is, among the dims of `operands` or `results`."""
        return [
            (number, dim)
            for number, array in enumerate(side)
            for dim, numbers in enumerate(array)
            if factor in numbers
        ]

    def factor(self, operand: int, dim: int) -> int | None:
        """The major factor of a dim of an operand."""
        return next(iter(self.operands[operand][dim]), None)

    def result_dim(self, operand: int, dim: int) -> int | None:
        """The dim of the first result that has the major factor of a dim of an operand."""
        numbers = self.operands[operand][dim]
        places = self.dims(numbers[0], self.results) if numbers else []
        return next((at for number, at in places if number == 0), None)

    def add(
        self, role: Role, ins: Iterable[OperandDim] = (), outs: Iterable[OperandDim] = ()
    ) -> None:
        """Adds a factor, behind those that its dims have already."""
        number = len(self.roles)
        self.roles.append(role)
        for which, dim in ins:
            self.operands[which][dim] += (number,)
        for which, dim in outs:
            self.results[which][dim] += (number,)

    def move(self, pairs: Iterable[tuple[int, int]], operand: int = 0) -> None:
        """Dims of an operand become dims of all results; where sizes differ, one is a part."""
        for source, target in pairs:
            outs = [(number, target) for number in range(len(self.outputs))]
            is_same = all(s[target] == self.inputs[operand][source] for s in self.outputs)
            self.add(Role.PASSES if is_same else Role.PART, [(operand, source)], outs)

    def keep(self) -> None:
        """Dims of the operand become those of the results, from the first on."""
        self.move((dim, dim) for dim in range(min(len(self.inputs[0]), len(self.outputs[0]))))


def factors(equation: JaxprEqn) -> Factors | None:
    """The factors of an equation that runs no inner program; None where they are unknown."""
    inputs, outputs = map(shape_of, equation.invars), map(shape_of, equation.outvars)
    return factors_of(equation.primitive.name, equation.params, [*inputs], [*outputs])


def factors_of(
    name: str,
    params: Mapping[str, Any],
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    rule: Callable[[Factors], None] | None = None,
) -> Factors | None:
    """The factors of an operation.

    Args:
        name: of its primitive.
        params: of the equation.
        inputs: the shapes of its operands.
        outputs: the shapes of its results.
        rule: says them; None takes that of the primitive.
    """
    rule = rule or FACTORS.get(name)
    if rule is None or (rule is _along and len(_DIM & params.keys()) != 1):
        return None
    operands, results = ([[()] * len(shape) for shape in side] for side in (inputs, outputs))
    factors = Factors(name, params, inputs, outputs, [], operands, results)
    rule(factors)
    for number, shape in enumerate(outputs):
        for dim, size in enumerate(shape):
            # What has no factor in a result is new.
            if not results[number][dim] and size != 1:
                factors.add(Role.NEW, (), [(number, dim)])
    return factors


def guessed(equation: JaxprEqn) -> Factors:
    """Factors by shapes alone: dims of one size, at one place in arrays of one rank, are one."""
    inputs, outputs = ([*map(shape_of, side)] for side in (equation.invars, equation.outvars))
    factors = factors_of(equation.primitive.name, equation.params, inputs, outputs, _each)
    assert factors is not None, "a rule is given"
    return factors


def _each(draft: Factors) -> None:
    places: dict[tuple[int, int, int], tuple[list[OperandDim], list[OperandDim]]] = {}
    for side, shapes in enumerate((draft.inputs, draft.outputs)):
        for number, shape in enumerate(shapes):
            for dim, size in enumerate(shape):
                key = len(shape), dim, size
                places.setdefault(key, ([], []))[side].append((number, dim))
    for ins, outs in places.values():
        if ins and outs:
            draft.add(Role.PASSES, ins, outs)


def _broadcast(draft: Factors) -> None:
    pairs = enumerate(draft.params["broadcast_dimensions"])
    draft.move((s, t) for s, t in pairs if draft.inputs[0][s] == draft.outputs[0][t])


def _reshape(draft: Factors) -> None:
    """Cuts both shapes into groups of equal size, in which the dims of one side are the factors."""
    (before, *_), (after,) = draft.inputs, draft.outputs
    order = draft.params.get("dimensions") or range(len(before))
    left = [dim for dim in order if before[dim] != 1]
    right = [dim for dim, size in enumerate(after) if size != 1]

    def size(shape, dims):
        return math.prod(shape[dim] for dim in dims)

    while left and right:
        mine, theirs = [left.pop(0)], [right.pop(0)]
        while size(before, mine) != size(after, theirs):
            is_less = size(before, mine) < size(after, theirs)
            group, rest = (mine, left) if is_less else (theirs, right)
            if not rest:
                break
            group.append(rest.pop(0))
        ins, outs = [(0, dim) for dim in mine], [(0, dim) for dim in theirs]
        if len(ins) > 1 and len(outs) > 1:
            draft.add(Role.ALONG, ins, outs)
        elif len(outs) == 1:
            for place in ins:
                draft.add(Role.PASSES, [place], outs)
        else:
            for place in outs:
                draft.add(Role.PASSES, ins, [place])


def _drop(draft: Factors, gone: Iterable[int], role: Role | None) -> None:
    """Some dims of all operands are dropped, and the others keep their order."""
    gone = {*gone}
    for rank in sorted({len(shape) for shape in draft.inputs}):
        numbers = [n for n, shape in enumerate(draft.inputs) if len(shape) == rank]
        left = itertools.count()
        for dim in range(rank):
            ins = [(number, dim) for number in numbers]
            if dim not in gone:
                at = next(left)
                outs = [(n, at) for n, shape in enumerate(draft.outputs) if at < len(shape)]
                draft.add(Role.PASSES, ins, outs)
            elif role is not None:
                draft.add(role, ins)


def _reduce(draft: Factors) -> None:
    _drop(draft, draft.params.get("axes", draft.params.get("dimensions")), Role.REDUCED)


def _stack(draft: Factors) -> None:
    axis = draft.params["axis"]
    for dim in range(len(draft.inputs[0])):
        ins = [(number, dim) for number in range(len(draft.inputs))]
        draft.add(Role.PASSES, ins, [(0, dim + (dim >= axis))])


def _need_all(draft: Factors, dims: Iterable[int]) -> None:
    """Some dims, counted from the front, are needed in full; the others pass, in all arrays."""
    spanned = {*dims}
    rank = max(map(len, (*draft.inputs, *draft.outputs)))
    for dim in range(rank):
        sides = [
            [(n, dim, shape[dim]) for n, shape in enumerate(shapes) if dim < len(shape)]
            for shapes in (draft.inputs, draft.outputs)
        ]
        ins, outs = ([(number, at) for number, at, _ in side] for side in sides)
        sizes = {size for side in sides for _, _, size in side}
        if dim not in spanned:
            draft.add(Role.PASSES, ins, outs)
        elif len(sizes) == 1 and outs:
            draft.add(Role.ALONG, ins, outs)
        else:
            draft.add(Role.REDUCED, ins)


_DIM = frozenset({"axis", "dimension", "operand_axis", "reduction_dimension"})


def _along(draft: Factors) -> None:
    (name,) = _DIM & draft.params.keys()
    _need_all(draft, [draft.params[name] % len(draft.inputs[0])])


def _trailing(draft: Factors) -> None:
    rank = len(draft.inputs[0])
    count = len(draft.params["fft_lengths"]) if draft.name == "fft" else TRAILING[draft.name]
    _need_all(draft, range(rank - count, max(map(len, (*draft.inputs, *draft.outputs)))))


def _stay(draft: Factors, role: Role, has_role: Sequence[bool], count: int = 1) -> None:
    """All dims stay; along some, elements of the first operands do not keep their place."""
    for dim, here in enumerate(has_role):
        ins = [(n, dim) for n, shape in enumerate(draft.inputs[:count]) if dim < len(shape)]
        outs = [(number, dim) for number in range(len(draft.outputs))]
        draft.add(role if here else Role.PASSES, ins, outs)


def _pad(draft: Factors) -> None:
    _stay(draft, Role.PART, [tuple(how) != (0, 0, 0) for how in draft.params["padding_config"]])


def _update(draft: Factors) -> None:
    _stay(draft, Role.JOINED, [a != b for a, b in zip(*draft.inputs[:2], strict=True)], 2)


def _concatenate(draft: Factors) -> None:
    dims, at = range(len(draft.outputs[0])), draft.params["dimension"]
    _stay(draft, Role.JOINED, [dim == at for dim in dims], len(draft.inputs))


def _windows(draft: Factors) -> None:
    names = ("window_dimensions", "window_strides", "padding")
    windows = zip(*(draft.params[name] for name in names), strict=True)
    is_wide = [(size, stride, tuple(pads)) != (1, 1, (0, 0)) for size, stride, pads in windows]
    _stay(draft, Role.WINDOW, is_wide, len(draft.inputs))


def _dot(draft: Factors) -> None:
    (left, right), (left_batch, right_batch) = draft.params["dimension_numbers"]
    out = itertools.count()
    for mine, theirs in zip(left_batch, right_batch, strict=True):
        draft.add(Role.PASSES, [(0, mine), (1, theirs)], [(0, next(out))])
    for mine, theirs in zip(left, right, strict=True):
        draft.add(Role.SUMMED, [(0, mine), (1, theirs)])
    for operand, paired in enumerate(((*left, *left_batch), (*right, *right_batch))):
        for dim in range(len(draft.inputs[operand])):
            if dim not in paired:
                draft.add(Role.PASSES, [(operand, dim)], [(0, next(out))])


def _convolution(draft: Factors) -> None:
    left, right, out = draft.params["dimension_numbers"]
    is_grouped = draft.params["batch_group_count"] > 1
    draft.add(Role.WINDOW if is_grouped else Role.PASSES, [(0, left[0])], [(0, out[0])])
    draft.add(Role.PASSES, [(1, right[0])], [(0, out[1])])
    draft.add(Role.SUMMED, [(0, left[1]), (1, right[1])])
    for image, kernel, result in zip(left[2:], right[2:], out[2:], strict=True):
        draft.add(Role.WINDOW, [(0, image)], [(0, result)])
        draft.add(Role.REDUCED, [(1, kernel)])


def _windows_of(rank: int, *hidden: Sequence[int]) -> list[int]:
    """The dims of a table that are dims of the windows which a gather or scatter moves."""
    return [dim for dim in range(rank) if not any(dim in dims for dims in hidden)]


def _take(draft: Factors) -> None:
    numbers, sizes = draft.params["dimension_numbers"], draft.params["slice_sizes"]
    table, indices, shape = draft.inputs[0], draft.inputs[1], draft.outputs[0]
    batching = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    rows = [dim for dim in range(len(shape)) if dim not in numbers.offset_dims]
    for dim, out in enumerate(rows):
        shared = [(0, batching[dim])] if dim in batching else []
        draft.add(Role.PASSES, [*shared, (1, dim)], [(0, out)])
    if len(rows) < len(indices):
        draft.add(Role.REDUCED, [(1, len(rows))])
    for dim in numbers.collapsed_slice_dims:
        draft.add(Role.INDEXED, [(0, dim)])
    dims = _windows_of(len(table), numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    for dim, out in zip(dims, numbers.offset_dims, strict=True):
        if sizes[dim] == table[dim]:
            draft.add(Role.PASSES, [(0, dim)], [(0, out)])
        else:
            draft.add(Role.INDEXED, [(0, dim)])


def _scatter(draft: Factors) -> None:
    numbers = draft.params["dimension_numbers"]
    table, indices, updates = draft.inputs[:3]
    batching = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    rows = [dim for dim in range(len(updates)) if dim not in numbers.update_window_dims]
    for dim, row in enumerate(rows):
        if dim in batching:
            at = batching[dim]
            draft.add(Role.PASSES, [(0, at), (1, dim), (2, row)], [(0, at)])
        else:
            is_sum = draft.name in SCATTER_ADDS
            draft.add(Role.SUMMED if is_sum else Role.REDUCED, [(1, dim), (2, row)])
    if len(rows) < len(indices):
        draft.add(Role.REDUCED, [(1, len(rows))])
    dims = _windows_of(len(table), numbers.inserted_window_dims, numbers.operand_batching_dims)
    windows = dict(zip(dims, numbers.update_window_dims, strict=True))
    for dim, size in enumerate(table):
        if dim in numbers.operand_batching_dims:
            continue
        window = windows.get(dim)
        if window is None:
            draft.add(Role.INDEXED, [(0, dim)], [(0, dim)])
        else:
            role = Role.PASSES if updates[window] == size else Role.JOINED
            draft.add(role, [(0, dim), (2, window)], [(0, dim)])


REDUCTIONS = frozenset({f"reduce_{kind}" for kind in ("max", "min", "prod", "and", "or", "xor")})
REDUCTIONS |= {"argmax", "argmin", "reduce"}
"""Reductions other than sums."""

ALONG_ONE = frozenset({f"cum{kind}" for kind in ("sum", "prod", "max", "min", "logsumexp")})
ALONG_ONE |= {"sort", "top_k", "approx_top_k"}
"""Operations along one dim, which a parameter of `_DIM` names; the other dims pass."""

WINDOWS = frozenset({f"reduce_window{kind}" for kind in ("", "_sum", "_max", "_min")})
"""Operations on the neighbourhood of each element."""

TRAILING: MappingProxyType[str, int] = MappingProxyType(
    {
        "cholesky": 2, "triangular_solve": 2, "lu": 2, "qr": 2, "geqrf": 2, "geqp3": 2, "eigh": 2,
        "householder_product": 2, "svd": 2, "eig": 2, "schur": 2, "hessenberg": 2, "tridiagonal": 2,
        "tridiagonal_solve": 2, "lu_pivots_to_permutation": 1, "fft": 1,
    }
)  # fmt: skip
"""How many dims at the end a linear algebra routine takes as one matrix or vector."""

SCATTER_ADDS = frozenset({"scatter-add", "scatter_add", "scatter-sub", "scatter_sub"})
"""Scatters that add what falls on one place."""

SCATTERS = SCATTER_ADDS | frozenset(
    {"scatter"} | {f"scatter{dash}{kind}" for kind in ("mul", "min", "max") for dash in "-_"}
)

FACTORS: MappingProxyType[str, Callable[[Factors], None]] = MappingProxyType(
    {
        **dict.fromkeys((*ELEMENTWISE, *KEEPS), _each),
        **dict.fromkeys(TRAILING, _trailing),
        **dict.fromkeys(SCATTERS, _scatter),
        **dict.fromkeys(REDUCTIONS, _reduce),
        "reduce_sum": lambda d: _drop(d, d.params["axes"], Role.SUMMED),
        **dict.fromkeys(ALONG_ONE, _along),
        **dict.fromkeys(WINDOWS, _windows),
        "broadcast_in_dim": _broadcast,
        **dict.fromkeys(("reshape", "expand_dims"), _reshape),
        "squeeze": lambda d: _drop(d, d.params["dimensions"], None),
        "transpose": lambda d: d.move(
            (old, new) for new, old in enumerate(d.params["permutation"])
        ),
        "rev": lambda d: _need_all(d, d.params["dimensions"]),
        **dict.fromkeys(("slice", "split", "dynamic_slice"), Factors.keep),
        "pad": _pad,
        "dynamic_update_slice": _update,
        "concatenate": _concatenate,
        "stack": _stack,
        "unstack": lambda d: _drop(d, [d.params["axis"]], Role.PART),
        "dot_general": _dot,
        "conv_general_dilated": _convolution,
        "gather": _take,
        **dict.fromkeys(
            ("random_bits", "random_split", "random_wrap", "random_unwrap"), Factors.keep
        ),
        **dict.fromkeys(("iota", "random_seed"), lambda _: None),
        "matrixwise": lambda d: _stay(
            d, Role.ALONG, [dim >= d.params["lead"] for dim in range(len(d.inputs[0]))]
        ),
    }
)
"""The rules, by the name of the primitive."""
