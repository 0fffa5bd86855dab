"""Where the arrays of a traced program lie: which mesh axes split which of their dims.

The compiler lays intermediate values out as their operands lie: products keep the split dims that
they do not sum over, elementwise operations take what any operand has, reshapes keep the major
factor. What is summed over a split dim is a *partial* sum on every rank, until a collective adds it
up. One rule for each kind of operation; of what has none, dims of equal size keep their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

Axes: TypeAlias = frozenset[str]
Splits: TypeAlias = tuple[Axes, ...]
"""For each dim of an array, the mesh axes that split it."""

NONE: Axes = frozenset()

Placed: TypeAlias = tuple[Splits, Axes]
"""Where a result lies, and over which axes every rank holds a part of a sum."""


def whole(ndim: int) -> Splits:
    """Nothing is split."""
    return (NONE,) * ndim


def of_spec(spec: Sequence[Any], ndim: int) -> Splits:
    """The splits that a `PartitionSpec` says.

    Example:
        >>> [sorted(axes) for axes in of_spec((None, ("dp", "tp")), 3)]
        [[], ['dp', 'tp'], []]
    """
    named = lambda entry: isinstance(entry, (str, tuple))
    one = lambda entry: frozenset([entry] if isinstance(entry, str) else entry)
    found = [one(entry) if named(entry) else NONE for entry in spec]
    return (*found, *whole(ndim - len(found)))


def once(splits: Sequence[Axes]) -> Splits:
    """Takes away what an earlier dim has already."""
    taken: set[str] = set()
    found = []
    for axes in splits:
        found.append(axes - taken)
        taken |= axes
    return tuple(found)


def either(one: Splits, other: Splits) -> Splits:
    """The axes that split the dims of one of two arrays, or else of the other."""
    return once([a or b for a, b in zip(one, other, strict=True)])


def placed(equation: Any, operands: Sequence[Splits]) -> list[Placed]:
    """Where the results of an equation lie that runs no program of its own.

    Args:
        equation: of a jaxpr.
        operands: where its operands lie.

    Returns:
        One for each result.
    """
    rule = RULES.get(equation.primitive.name)
    if rule is not None:
        return [rule(equation, operands)] * len(equation.outvars)
    return [(_alike(equation, operands, v.aval.shape), NONE) for v in equation.outvars]


def _shapes(equation: Any) -> list[tuple[int, ...]]:
    return [atom.aval.shape for atom in equation.invars]


def _alike(equation: Any, operands: Sequence[Splits], shape: tuple[int, ...]) -> Splits:
    """Every dim lies as the first operand that splits it in the same place."""
    found = [NONE] * len(shape)
    for own, splits in zip(_shapes(equation), operands, strict=True):
        if len(own) != len(shape):
            continue
        for dim, axes in enumerate(splits):
            if not found[dim] and axes and own[dim] == shape[dim]:
                found[dim] = axes
    return once(found)


def _broadcast(equation: Any, operands: Sequence[Splits]) -> Placed:
    shape, dims = equation.params["shape"], equation.params["broadcast_dimensions"]
    found = [NONE] * len(shape)
    own = _shapes(equation)[0]
    for dim, target in enumerate(dims):
        if own[dim] == shape[target]:
            found[target] = operands[0][dim]
    return tuple(found), NONE


def _reshape(equation: Any, operands: Sequence[Splits]) -> Placed:
    before, after = _shapes(equation)[0], equation.outvars[0].aval.shape
    return regrouped(before, after, operands[0]), NONE


def regrouped(before: Sequence[int], after: Sequence[int], splits: Splits) -> Splits:
    """Where an array lies after a reshape: the major factor of a dim stays split.

    Example:
        >>> regrouped((8, 4, 6), (8, 24), (frozenset("a"), NONE, NONE))[0]
        frozenset({'a'})
    """
    found = [NONE] * len(after)
    left, right = 0, 0
    while left < len(before) and right < len(after):
        ends, sizes = [left + 1, right + 1], [before[left], after[right]]
        while sizes[0] != sizes[1]:
            side = 0 if sizes[0] < sizes[1] else 1
            shape = (before, after)[side]
            if ends[side] == len(shape):
                break
            sizes[side] *= shape[ends[side]]
            ends[side] += 1
        axes = frozenset().union(*splits[left : ends[0]])
        large = [dim for dim in range(right, ends[1]) if after[dim] > 1]
        if axes and large:
            found[large[0]] = axes
        left, right = ends
    return once(found)


def _transpose(equation: Any, operands: Sequence[Splits]) -> Placed:
    return tuple(operands[0][dim] for dim in equation.params["permutation"]), NONE


def _squeeze(equation: Any, operands: Sequence[Splits]) -> Placed:
    gone = equation.params["dimensions"]
    return tuple(axes for dim, axes in enumerate(operands[0]) if dim not in gone), NONE


def _reduce(equation: Any, operands: Sequence[Splits]) -> Placed:
    gone = equation.params["axes"]
    kept = tuple(axes for dim, axes in enumerate(operands[0]) if dim not in gone)
    return kept, frozenset().union(*(operands[0][dim] for dim in gone))


def _dot(equation: Any, operands: Sequence[Splits]) -> Placed:
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    one, other = operands[:2]
    batch = [one[a] | other[b] for a, b in zip(left_batch, right_batch, strict=True)]
    free = lambda splits, *gone: [
        axes for dim, axes in enumerate(splits) if not any(dim in dims for dims in gone)
    ]
    # A dim that one operand alone has whole is sliced where it is summed.
    summed = frozenset().union(*(one[a] | other[b] for a, b in zip(left, right, strict=True)))
    found = once([*batch, *free(one, left, left_batch), *free(other, right, right_batch)])
    taken = frozenset().union(*found)
    return found, summed - taken


def _convolution(equation: Any, operands: Sequence[Splits]) -> Placed:
    numbers = equation.params["dimension_numbers"]
    left, right = operands[:2]
    found = [NONE] * len(left)
    found[numbers.out_spec[0]] = left[numbers.lhs_spec[0]]
    found[numbers.out_spec[1]] = right[numbers.rhs_spec[0]]
    summed = left[numbers.lhs_spec[1]] | right[numbers.rhs_spec[1]]
    splits = once(found)
    return splits, summed - frozenset().union(*splits)


def _gather(equation: Any, operands: Sequence[Splits]) -> Placed:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape, (table, indices) = equation.outvars[0].aval.shape, operands[:2]
    found, rows = [NONE] * len(shape), iter(indices[:-1])
    hidden = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = iter(dim for dim in range(len(table)) if dim not in hidden)
    summed = frozenset().union(*(table[dim] for dim in numbers.collapsed_slice_dims))
    for dim in range(len(shape)):
        if dim in numbers.offset_dims:
            source = next(windows)
            is_whole = sizes[source] == _shapes(equation)[0][source]
            found[dim] = table[source] if is_whole else NONE
        else:
            found[dim] = next(rows, NONE)
    splits = once(found)
    return splits, summed - frozenset().union(*splits)


def _scatter(equation: Any, operands: Sequence[Splits]) -> Placed:
    numbers = equation.params["dimension_numbers"]
    table, indices, updates = operands[:3]
    hidden = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [dim for dim in range(len(table)) if dim not in hidden]
    found = list(table)
    for target, source in zip(windows, numbers.update_window_dims, strict=False):
        found[target] = found[target] | updates[source]
    # What is counted alike in the table and in the indices stays with its rank.
    own, alike = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    for target, source in zip(own, alike, strict=True):
        found[target] = found[target] | indices[source]
    rows = [axes for dim, axes in enumerate(updates) if dim not in numbers.update_window_dims]
    splits = once(found)
    return splits, frozenset().union(*rows) - frozenset().union(*splits)


def _concatenate(equation: Any, operands: Sequence[Splits]) -> Placed:
    joined = [frozenset().union(*axes) for axes in zip(*operands, strict=True)]
    return once(joined), NONE


def _stack(equation: Any, operands: Sequence[Splits]) -> Placed:
    joined = [frozenset().union(*axes) for axes in zip(*operands, strict=True)]
    at = equation.params["axis"]
    return once([*joined[:at], NONE, *joined[at:]]), NONE


def _unstack(equation: Any, operands: Sequence[Splits]) -> Placed:
    at = equation.params["axis"]
    return (*operands[0][:at], *operands[0][at + 1 :]), NONE


def _update(equation: Any, operands: Sequence[Splits]) -> Placed:
    return once([a | b for a, b in zip(*operands[:2], strict=True)]), NONE


def _constraint(equation: Any, operands: Sequence[Splits]) -> Placed:
    sharding = equation.params["sharding"]
    spec = getattr(sharding, "spec", ())
    free = equation.params.get("unconstrained_dims") or ()
    said = of_spec(spec, len(operands[0]))
    return once([operands[0][d] if d in free else axes for d, axes in enumerate(said)]), NONE


RULES: MappingProxyType[str, Callable[[Any, Sequence[Splits]], Placed]] = MappingProxyType(
    {
        "broadcast_in_dim": _broadcast,
        "reshape": _reshape,
        "transpose": _transpose,
        "squeeze": _squeeze,
        "reduce_sum": _reduce,
        "dot_general": _dot,
        "conv_general_dilated": _convolution,
        "gather": _gather,
        "scatter-add": _scatter,
        "scatter_add": _scatter,
        "concatenate": _concatenate,
        "stack": _stack,
        "unstack": _unstack,
        "dynamic_update_slice": _update,
        "sharding_constraint": _constraint,
        **{
            name: lambda equation, operands: (_reduce(equation, operands)[0], NONE)
            for name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin")
        },
    }
)
"""The rules, by the name of the primitive."""
