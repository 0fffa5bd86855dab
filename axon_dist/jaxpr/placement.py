"""Where the arrays of a traced program lie: which mesh axes split which of their dims.

The compiler lays intermediate values out as their operands lie: products keep the split dims that
they do not sum over, elementwise operations take what any operand has, reshapes keep the major
factor. What is summed over a split dim is a *partial* sum on every rank, until a collective adds it
up. One rule for each kind of operation; of what has none, dims of equal size keep their place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from .tape import ATTENTION, LINEAR, Node, Sent

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


ADDS = frozenset({"add", "add_any"})

SCATTERS = frozenset({"scatter-add", "scatter_add"})


@dataclasses.dataclass(eq=False)
class Value:
    """What is known of a variable.

    Args:
        buffer: where it is.
        splits: by its dims.
        partial: the sums that it is a part of, until a collective adds them up.
        known: its value, where it says which platform the program is for.
        is_carried: whether it is what a turn of a loop got from the one before.
    """

    buffer: int
    splits: Splits
    partial: tuple[Sum, ...] = ()
    known: int | None = None
    is_carried: bool = False


@dataclasses.dataclass(eq=False)
class Sum:
    """A sum of which every rank has a part.

    Args:
        node: what made it.
        axes: of the ranks.
        num_bytes: that a rank has of it.
        trips: turns of the loop that adds to it. Where it is scattered, every turn scatters its own
            part, for the compiler lays what a loop carries out as those lie who read it.
        is_whole: whether every rank has to have all of it before it is scattered.
        is_done: whether it was added up already, for another reader.
        is_base: whether a scatter of parts is added to it. XLA scatters onto it then, and of what
            it has added up and split, it gathers the whole for that.
    """

    node: Node
    axes: Axes
    num_bytes: int
    trips: int = 1
    is_whole: bool = False
    is_done: bool = False
    is_base: bool = False


def is_added_to(before: int, after: int, nodes: Sequence[Node]) -> bool:
    """Whether the turns of a loop do nothing with what they carry but add to it.

    Args:
        before: where it is when a turn begins; -1 for what is not carried.
        after: where it is when the turn ends.
        nodes: what a turn does.
    """
    if before < 0:
        return False
    if before == after:
        return not any(before in node.reads for node in nodes)
    readers = [node for node in nodes if before in node.reads]
    linear = all(node.name in LINEAR or node.name in ADDS for node in readers)
    return linear and all(is_added_to(w, after, nodes) for n in readers for w in n.writes)


def handed(name: str, operands: list[Value]) -> tuple[Sum, ...]:
    """The sums that the result of a linear operation is a part of, as its operands are."""
    # What was added up for another reader is a part no more.
    partial = [tuple(part for part in one.partial if not part.is_done) for one in operands]
    is_part = [bool(sums) for sums in partial]
    if name in SCATTERS and len(partial) > 2 and is_part[2]:
        # Into what every rank has the same of; the sum may as well be taken of the whole.
        return () if is_part[0] or is_part[1] else partial[2]
    if name in ADDS:
        # What a loop adds to what it carries is added up behind the loop; what is added to a sum,
        # before or behind it.
        return joined(tuple(sum(partial, ()))) if any(is_part) else ()
    if name == "mul" and sum(is_part) == 1:
        return partial[0] or partial[1]
    if name == "div":
        return () if is_part[1] else partial[0]
    return partial[0] if name in LINEAR else ()


def joined(sums: tuple[Sum, ...]) -> tuple[Sum, ...]:
    """Sums that are added: of products one collective adds up all, of others each its own."""
    if any(one.node.name in SCATTERS for one in sums):
        for one in sums:
            one.is_base = one.node.kind == "product"
    alike = {(one.node.kind, one.axes, one.num_bytes) for one in sums}
    if len(alike) > 1 or sums[0].node.kind != "product":
        return sums
    for one in sums[1:]:
        one.is_done = True
    return sums[:1]


def flops_of(
    equation: Any, splits: Sequence[Splits], result: Splits, axes: Mapping[str, int]
) -> float:
    """Multiplications and additions of one device; none where nothing is multiplied.

    Args:
        equation: of a traced program over global arrays.
        splits: where each operand lies.
        result: where the result lies.
        axes: the sizes of the mesh axes.
    """
    name = equation.primitive.name
    shapes: list[tuple[int, ...]] = [getattr(a.aval, "shape", ()) for a in equation.invars]
    ways = lambda names: math.prod(axes[axis] for axis in names)
    local = lambda shape, where: math.prod(
        -(-n // ways(a)) for n, a in zip(shape, where, strict=True)
    )
    out = equation.outvars[0].aval.shape
    if name == "dot_general":
        dims = equation.params["dimension_numbers"][0]
        summed = math.prod(shapes[0][dim] for dim in dims[0])
        over = [splits[0][a] | splits[1][b] for a, b in zip(*dims, strict=True)]
        shared = ways(frozenset().union(*over) - frozenset().union(*result))
        return 2.0 * local(out, result) * summed / shared
    if name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        summed = math.prod(shapes[1][dim] for dim in numbers.rhs_spec[1:])
        shared = ways(splits[0][numbers.lhs_spec[1]])
        return 2.0 * local(out, result) * summed / shared
    if name.startswith(ATTENTION):
        return (4.0 if "fwd" in name else 10.0) * local(shapes[0], splits[0]) * shapes[1][1]
    return 0.0


def gathers(
    nodes: Sequence[Node],
    buffer: int,
    splits: tuple[Splits, Splits],
    lost: Axes,
    bytes_of: Callable[[Splits], int],
    sizes: list[int],
) -> list[Node]:
    """Gathers a value before a program of ranks that is given it less split.

    XLA gathers dim by dim, the last one first; and a cast to fewer bytes it does before the last
    gather alone, so the others send what is cast.

    Args:
        nodes: what made the value, among others.
        buffer: where it is.
        splits: how it lies, and how it shall lie.
        lost: the axes that it shall not be split over any more.
        bytes_of: of the value on a device, by how it lies.
        sizes: bytes of each buffer; those of new ones are added.

    Returns:
        The gathers, one after another; or, of axes that are not lost, what cuts the value.
    """
    before, after = splits
    dims = [dim for dim in reversed(range(len(before))) if before[dim] & lost]
    wider, now, found = _narrowed(nodes, buffer, sizes), list(before), []
    for dim in dims:
        is_last = dim == dims[-1]
        over, now[dim] = before[dim] & lost, before[dim] - lost
        size = bytes_of(after) if is_last else int(bytes_of(tuple(now)) * wider)
        sizes.append(size)
        sent = Sent("all-gather", tuple(sorted(over)), size)
        read = found[-1].writes if found else (buffer,)
        found.append(Node("shard_map", "other", read, (len(sizes) - 1,), 0.0, (sent,)))
    if not dims:
        sizes.append(bytes_of(after))
        found.append(Node("shard_map", "fused", (buffer,), (len(sizes) - 1,)))
    return found


def gathers_rows(one: Sum, over: Axes, ways_of: Callable[[Axes], int], sizes: list[int]) -> bool:
    """Lets a rank gather what all scatter, and add what belongs to its own part of the table.

    XLA's partitioner does so where the rows of all ranks, as of a step's tokens, are fewer bytes
    than the table.

    Args:
        one: the sum of what ranks scatter into a table, of which each keeps a part.
        over: the axes over which the table is kept split.
        ways_of: how many ranks axes have.
        sizes: bytes of each buffer; the table's become those of a part.

    Returns:
        Whether it is so; if it is, nothing is left to be added up over these axes.
    """
    node = one.node
    rows = sizes[node.reads[2]] if node.name in SCATTERS else 0
    if not 0 < rows * ways_of(one.axes) < one.num_bytes:
        return False
    ways = ways_of(over)
    node.sent += (Sent("all-gather", tuple(sorted(over)), rows * ways),)
    for buffer in (*node.reads[:1], *node.writes):
        sizes[buffer] = one.num_bytes // ways
    return True


def _narrowed(nodes: Sequence[Node], buffer: int, sizes: Sequence[int]) -> float:
    """How many times as many bytes a value had before it was cast, if it was cast to fewer."""
    for node in reversed(nodes):
        if buffer in node.writes and node.name == "convert_element_type":
            return max(1.0, sizes[node.reads[0]] / sizes[buffer])
    return 1.0
