"""How each primitive relates the dims of its results to those of its operands, in one table.

An equation has *factors*, as in the op-sharding rules of Shardy: `dot_general` of `[i, k]` and
`[k, j]` has three. Each dim of an operand or a result is a product of factors, major factor first;
a dim that a reshape splits in two has two. Each factor has a `Role` in the equation: elements keep
their position along it, or are summed over it, or each result needs all of it, and so on. Every
analysis of dims uses this table: of shardings, of dims that need the same sharding, and of dims
that count samples.
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
"""(position of an operand or a result, one of its dims)."""


CHEAP_ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "clz", "complex", "convert_element_type", "copy", "cos", "cosh", "digamma", "div",
    "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or", "population_count",
    "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))  # fmt: skip
"""Cheap elementwise operations, which the backward pass may recompute.

Each element of a result depends only on the parameters and on the operands' elements at the same
place. `ELEMENTWISE` adds the other elementwise operations."""

ELEMENTWISE = CHEAP_ELEMENTWISE | frozenset((
    "add_any", "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "conj", "copy_p", "eq_to",
    "from_edtype", "igamma", "igamma_grad_a", "igammac", "le_to", "lt_to", "mulhi", "name",
    "polygamma", "polynomial", "random_clone", "random_fold_in", "random_gamma_grad",
    "random_unwrap", "regularized_incomplete_beta", "threefry2x32", "tie", "to_edtype", "zeta",
))  # fmt: skip
"""`CHEAP_ELEMENTWISE`, and elementwise operations that cost more, name values or work on keys."""

COMPARES = frozenset(("eq", "ge", "gt", "is_finite", "le", "lt", "ne"))
"""The operations of `CHEAP_ELEMENTWISE` whose results are booleans, of one byte per element."""

MOVES = frozenset((
    "broadcast_in_dim", "concatenate", "expand_dims", "iota", "pad", "reshape", "rev", "slice",
    "split", "squeeze", "tile", "transpose",
))  # fmt: skip
"""Operations that move elements and compute nothing."""

RESHAPES = frozenset(("broadcast_in_dim", "expand_dims", "reshape", "squeeze"))
"""The operations of `MOVES` that may keep the elements of an array in row-major order."""

KEEPS = frozenset((
    "device_put", "layout_constraint", "mesh_cast", "optimization_barrier", "pcast", "pvary",
    "reshard", "sharding_constraint",
))  # fmt: skip
"""Other operations that keep every element in its place."""


class Role(enum.Enum):
    """The effect of an equation along a factor.

    PASSES: an element of a result depends only on the operands' elements at the same place.
    SUMMED: results are sums over it.
    REDUCED: results reduce it in another way, such as by the maximum.
    ALONG: results have it, and each place may depend on all of it, as in a sort.
    WINDOW: results have it in another size, and each place depends on nearby places.
    PART: the result's dim is a part of the operand's, or the reverse.
    JOINED: operands are concatenated along it, or one is written into a part of another.
    INDEXED: a computed index selects the places along it that are read or written.
    NEW: only results have it.
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

    The rule of the primitive fills the last three lists in place, one factor at a time, through
    `add` and the methods that call it. The lists are complete when `factors` or `factors_of`
    returns; from then on they are only read.

    Args:
        name: the name of the primitive.
        params: the parameters of the equation.
        inputs: the shapes of its operands.
        outputs: the shapes of its results.
        roles: the role of each factor, indexed by factor number.
        operands: for each operand, the factors of each dim, major factor first. A dim of size 1
            that is broadcast or dropped has no factors.
        results: for each result, the factors of each dim, major factor first.

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
        """Returns the role of the major factor of an operand's dim; None if it has no factor."""
        numbers = self.operands[operand][dim]
        return self.roles[numbers[0]] if numbers else None

    def dims(self, factor: int, side: Sequence[Sequence[tuple[int, ...]]]) -> list[OperandDim]:
        """Returns the dims of `operands` or `results` that contain a factor."""
        return [
            (number, dim)
            for number, array in enumerate(side)
            for dim, numbers in enumerate(array)
            if factor in numbers
        ]

    def factor(self, operand: int, dim: int) -> int | None:
        """Returns the major factor of an operand's dim; None if it has no factor."""
        return next(iter(self.operands[operand][dim]), None)

    def result_dim(self, operand: int, dim: int) -> int | None:
        """Returns the first result's dim with the major factor of an operand's dim, or None."""
        numbers = self.operands[operand][dim]
        places = self.dims(numbers[0], self.results) if numbers else []
        return next((at for number, at in places if number == 0), None)

    def add(
        self, role: Role, ins: Iterable[OperandDim] = (), outs: Iterable[OperandDim] = ()
    ) -> None:
        """Adds a factor as the minor factor of the given dims."""
        number = len(self.roles)
        self.roles.append(role)
        for which, dim in ins:
            self.operands[which][dim] += (number,)
        for which, dim in outs:
            self.results[which][dim] += (number,)

    def move(self, pairs: Iterable[tuple[int, int]], operand: int = 0) -> None:
        """Maps dims of an operand to dims of all results; if sizes differ, the role is PART."""
        for source, target in pairs:
            outs = [(number, target) for number in range(len(self.outputs))]
            is_same = all(s[target] == self.inputs[operand][source] for s in self.outputs)
            self.add(Role.PASSES if is_same else Role.PART, [(operand, source)], outs)

    def keep(self) -> None:
        """Maps each dim of the operand to the same dim of the results, starting at dim 0."""
        self.move((dim, dim) for dim in range(min(len(self.inputs[0]), len(self.outputs[0]))))


def factors(equation: JaxprEqn) -> Factors | None:
    """Returns the factors of an equation without inner programs; None if they are unknown."""
    inputs = map(shape_of, equation.invars)
    outputs = map(shape_of, equation.outvars)
    return factors_of(equation.primitive.name, equation.params, [*inputs], [*outputs])


def factors_of(
    name: str,
    params: Mapping[str, Any],
    inputs: Sequence[Shape],
    outputs: Sequence[Shape],
    rule: Callable[[Factors], None] | None = None,
) -> Factors | None:
    """Returns the factors of an operation; None if they are unknown.

    Args:
        name: the name of the primitive.
        params: the parameters of the equation.
        inputs: the shapes of its operands.
        outputs: the shapes of its results.
        rule: fills in the factors; None uses the primitive's rule in `FACTORS`.
    """
    rule = rule or FACTORS.get(name)
    if rule is None or (rule is _along and len(_DIM & params.keys()) != 1):
        return None
    operands: list[list[tuple[int, ...]]] = [[()] * len(shape) for shape in inputs]
    results: list[list[tuple[int, ...]]] = [[()] * len(shape) for shape in outputs]
    factors = Factors(name, params, inputs, outputs, [], operands, results)
    rule(factors)
    for number, shape in enumerate(outputs):
        for dim, size in enumerate(shape):
            # A dim of a result that the rule gave no factor is new.
            if not results[number][dim] and size != 1:
                factors.add(Role.NEW, (), [(number, dim)])
    return factors


def guessed(equation: JaxprEqn) -> Factors:
    """Guesses factors from shapes: equal dims at the same place of arrays of equal rank match."""
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


def _tile(draft: Factors) -> None:
    """Repeats the whole array along each dim: the number of the copy is a new major factor."""
    for dim, (count, size) in enumerate(zip(draft.params["reps"], draft.inputs[0], strict=True)):
        if count != 1:
            draft.add(Role.NEW, (), [(0, dim)])
        if count == 1 or size != 1:
            draft.add(Role.PASSES, [(0, dim)], [(0, dim)])


def _reshape(draft: Factors) -> None:
    """Cuts both shapes into groups of equal size; within a group, one side's dims are factors."""
    before, *_ = draft.inputs
    (after,) = draft.outputs
    order = draft.params.get("dimensions") or range(len(before))
    old_dims = [dim for dim in order if before[dim] != 1]
    new_dims = [dim for dim, size in enumerate(after) if size != 1]

    def size(shape, dims):
        return math.prod(shape[dim] for dim in dims)

    while old_dims and new_dims:
        old_group = [old_dims.pop(0)]
        new_group = [new_dims.pop(0)]
        while size(before, old_group) != size(after, new_group):
            is_less = size(before, old_group) < size(after, new_group)
            group, rest = (old_group, old_dims) if is_less else (new_group, new_dims)
            if not rest:
                break
            group.append(rest.pop(0))
        ins = [(0, dim) for dim in old_group]
        outs = [(0, dim) for dim in new_group]
        if len(ins) > 1 and len(outs) > 1:
            draft.add(Role.ALONG, ins, outs)
        elif len(outs) == 1:
            for place in ins:
                draft.add(Role.PASSES, [place], outs)
        else:
            for place in outs:
                draft.add(Role.PASSES, ins, [place])


def _drop(draft: Factors, gone: Iterable[int], role: Role | None) -> None:
    """Drops some dims of all operands; the others keep their order."""
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
    """In all arrays, gives some dims ALONG or REDUCED, and the others PASSES."""
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
    """Keeps all dims; along some of them, the first `count` operands have the given role."""
    for dim, here in enumerate(has_role):
        ins = [(n, dim) for n, shape in enumerate(draft.inputs[:count]) if dim < len(shape)]
        outs = [(number, dim) for number in range(len(draft.outputs))]
        draft.add(role if here else Role.PASSES, ins, outs)


def _pad(draft: Factors) -> None:
    _stay(draft, Role.PART, [tuple(how) != (0, 0, 0) for how in draft.params["padding_config"]])


def _update(draft: Factors) -> None:
    _stay(draft, Role.JOINED, [a != b for a, b in zip(*draft.inputs[:2], strict=True)], 2)


def _concatenate(draft: Factors) -> None:
    at = draft.params["dimension"]
    is_joined = [dim == at for dim in range(len(draft.outputs[0]))]
    _stay(draft, Role.JOINED, is_joined, len(draft.inputs))


def _windows(draft: Factors) -> None:
    names = ("window_dimensions", "window_strides", "padding")
    windows = zip(*(draft.params[name] for name in names), strict=True)
    is_wide = [(size, stride, tuple(pads)) != (1, 1, (0, 0)) for size, stride, pads in windows]
    _stay(draft, Role.WINDOW, is_wide, len(draft.inputs))


def _dot(draft: Factors) -> None:
    (left, right), (left_batch, right_batch) = draft.params["dimension_numbers"]
    out = itertools.count()
    for left_dim, right_dim in zip(left_batch, right_batch, strict=True):
        draft.add(Role.PASSES, [(0, left_dim), (1, right_dim)], [(0, next(out))])
    for left_dim, right_dim in zip(left, right, strict=True):
        draft.add(Role.SUMMED, [(0, left_dim), (1, right_dim)])
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
    """Returns the dims of a table that span the windows of a gather or scatter."""
    return [dim for dim in range(rank) if not any(dim in dims for dims in hidden)]


def _take(draft: Factors) -> None:
    numbers = draft.params["dimension_numbers"]
    sizes = draft.params["slice_sizes"]
    table = draft.inputs[0]
    indices = draft.inputs[1]
    shape = draft.outputs[0]
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
"""Operations along one dim, named by a parameter in `_DIM`; the other dims pass."""

WINDOWS = frozenset({f"reduce_window{kind}" for kind in ("", "_sum", "_max", "_min")})
"""Operations on a window around each element."""

TRAILING: MappingProxyType[str, int] = MappingProxyType(
    {
        "cholesky": 2, "triangular_solve": 2, "lu": 2, "qr": 2, "geqrf": 2, "geqp3": 2, "eigh": 2,
        "householder_product": 2, "svd": 2, "eig": 2, "schur": 2, "hessenberg": 2, "tridiagonal": 2,
        "tridiagonal_solve": 2, "lu_pivots_to_permutation": 1, "fft": 1,
    }
)  # fmt: skip
"""How many trailing dims a linear algebra routine takes as one matrix or vector."""

SCATTER_ADDS = frozenset({"scatter-add", "scatter_add", "scatter-sub", "scatter_sub"})
"""Scatters that add all updates of one place."""

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
        "tile": _tile,
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
"""The rule of each primitive, by name."""
