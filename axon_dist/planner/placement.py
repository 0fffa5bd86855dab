"""Layouts of arrays over mesh axes, partial sums, and the `LivenessProgram` of one device.

A liveness program is a list of operations with their bytes, FLOPs and collectives; `device.py`
writes it. The layout of an array is the mesh axes that split each of its dims.

The compiler derives the layouts of intermediate values from those of their operands: products keep
the split dims that they do not sum over, elementwise operations take the splits of any operand, and
reshapes keep the major factor. A sum over a split dim is a *partial* sum on every rank until a
collective adds it up. All this follows from the `factors` of operations; where an operation has
none, dims of equal size correspond by position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from ..core.compat import RARE, splash_flops
from ..core.convolution import products_along
from ..ir.factors import ELEMENTWISE, Factors, Role, factors, guessed

Axes: TypeAlias = frozenset[str]
Splits: TypeAlias = tuple[Axes, ...]
"""For each dim of an array, the mesh axes that split it."""

NONE: Axes = frozenset()

ResultLayout: TypeAlias = tuple[Splits, Axes]
"""The layout of a result, and the axes over which every rank holds a partial sum."""


def unsplit(ndim: int) -> Splits:
    """Returns the layout of an array that is not split."""
    return (NONE,) * ndim


def of_spec(spec: PartitionSpec | Sequence[object], ndim: int) -> Splits:
    """Returns the splits of a `PartitionSpec`.

    Example:
        >>> [sorted(axes) for axes in of_spec((None, ("dp", "tp")), 3)]
        [[], ['dp', 'tp'], []]
    """

    def named(entry):
        return isinstance(entry, (str, tuple))

    def one(entry):
        return frozenset([entry] if isinstance(entry, str) else entry)

    splits = [one(entry) if named(entry) else NONE for entry in tuple(spec)]
    return (*splits, *unsplit(ndim - len(splits)))


def without_repeats(splits: Sequence[Axes]) -> Splits:
    """Removes axes that already split an earlier dim."""
    used: set[str] = set()
    remaining = []
    for axes in splits:
        remaining.append(axes - used)
        used |= axes
    return tuple(remaining)


def either(one: Splits, other: Splits) -> Splits:
    """Returns, per dim, the axes that split the first array, or else those of the second."""
    return without_repeats([a or b for a, b in zip(one, other, strict=True)])


def placed(equation: JaxprEqn, operands: Sequence[Splits]) -> list[ResultLayout]:
    """Returns the layouts of the results of an equation without an inner program.

    Args:
        equation: an equation of a jaxpr.
        operands: the layouts of its operands.

    Returns:
        One layout per result.
    """
    if equation.primitive.name == "sharding_constraint":
        return [(_constrained(equation, operands[0]), NONE)]
    known = factors(equation)
    rule = known or guessed(equation)
    # An elementwise operation whose operands disagree follows the first one.
    is_first = known is None or equation.primitive.name in ELEMENTWISE
    axes_of = _axes(rule, operands, is_first)
    split = [[_split(rule, numbers, axes_of) for numbers in dims] for dims in rule.results]
    results = [without_repeats(splits) for splits in split]
    summed = union(axes_of[n] for n, role in enumerate(rule.roles) if role in ADDED_UP)
    return [(splits, summed - union(splits)) for splits in results]


SPLIT_TOGETHER = frozenset({Role.PASSES, Role.ALONG, Role.JOINED, Role.INDEXED})
"""Along these factors a result is split like the operands."""

ADDED_UP = frozenset({Role.SUMMED, Role.INDEXED})
"""Along these factors every rank has a partial sum, where the result has no such dim. In a lookup,
for example, a rank returns the rows that it has, and zeros for the others."""


def union(axes: Iterable[Axes]) -> Axes:
    """Returns the union of the axes of some dims."""
    return NONE.union(*axes)


def _axes(rule: Factors, operands: Sequence[Splits], is_first: bool) -> list[Axes]:
    """Returns the axes that split each factor: those of the dims whose major factor it is."""
    axes_of = [NONE] * len(rule.roles)
    for array, splits in zip(rule.operands, operands, strict=True):
        for numbers, axes in zip(array, splits, strict=True):
            if numbers and not (is_first and axes_of[numbers[0]]):
                axes_of[numbers[0]] |= axes
    return axes_of


def _split(rule: Factors, numbers: Sequence[int], axes_of: Sequence[Axes]) -> Axes:
    return union(axes_of[number] for number in numbers if rule.roles[number] in SPLIT_TOGETHER)


def _constrained(equation: JaxprEqn, operand: Splits) -> Splits:
    sharding = equation.params["sharding"]
    free = equation.params.get("unconstrained_dims") or ()
    wanted = of_spec(getattr(sharding, "spec", ()), len(operand))
    return without_repeats([operand[d] if d in free else axes for d, axes in enumerate(wanted)])


VIEWS = frozenset(
    {"reshape", "squeeze", "expand_dims", "stop_gradient", "pvary", "name", "reshard", "copy_p"}
    | {"bitcast_convert_type", "optimization_barrier", "sharding_constraint"}
)
"""Operations that copy no data. A matrix transpose is one too, as products read it directly."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "pallas_call", "ragged_dot_general"})
"""Operations with operands and results in memory."""

ATTENTION = "dot_product_attention"
"""The prefix of the primitive names of fused attention."""

OTHERS = frozenset(
    {"gather", "scatter-add", "scatter_add", "scatter", "sort", "top_k", "fft", "cholesky"}
    | {"reduce_window", "reduce_window_max", "reduce_window_sum", "select_and_scatter_add"}
    | {"select_and_gather_add", "dynamic_update_slice", "cumsum", "cumlogsumexp", "cumprod"}
)
"""Operations with results in memory."""

LINEAR = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "neg", "copy", "reduce_sum"}
    | {"slice", "pad", "name", "reduce_precision"}
)
"""Linear operations on one operand, which may as well run before its sum over ranks."""

COLLECTIVES: Mapping[str, tuple[str, str]] = {
    "psum": ("all-reduce", "axes"),
    "psum_invariant": ("all-reduce", "axes"),
    "all_gather": ("all-gather", "axis_name"),
    "all_gather_invariant": ("all-gather", "axis_name"),
    "reduce_scatter": ("reduce-scatter", "axis_name"),
    "ppermute": ("collective-permute", "axis_name"),
    "all_to_all": ("all-to-all", "axis_name"),
}
"""The collective primitives of `shard_map`: their kind, and the parameter that names the axes."""

SUMS = frozenset({"psum", "psum_invariant"})
"""The `COLLECTIVES` that give every rank the whole sum."""

SPREAD = frozenset({"broadcast_in_dim", "iota", "tile"})
"""Operations whose results are larger than all that they read."""

IN_PLACE = frozenset({"scatter-add", "scatter_add", "scatter", "dynamic_update_slice"})
"""Operations that overwrite their first operand where nothing else reads it."""


@dataclasses.dataclass(frozen=True)
class Sent:
    """One collective.

    Args:
        kind: the compiler's name for it.
        axes: the mesh axes.
        num_bytes: bytes of the full array: the result of an all-gather, or the operand of others.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class ProductDims:
    """The sizes of the products of one kernel on a device.

    Args:
        kind: `"product"`, `"forward"` or `"backward"`; the latter two are fused attention.
        rows: rows of the result; for attention, the number of key positions.
        columns: columns of the result; for attention, the width of a head.
        summed: the contracted size; 0 for attention.
        batch: the number of independent products.
        written: bytes per element of the result.
        read: bytes per element of the operands.
        flops: FLOPs of all of them.
        is_causal: whether later positions are masked.
    """

    kind: str
    rows: int
    columns: int
    summed: int
    batch: int
    written: int
    read: int
    flops: float
    is_causal: bool = False


@dataclasses.dataclass(eq=False)
class Node:
    """One operation on one device.

    Args:
        name: the name of the primitive.
        kind: `"fused"`, `"reduction"`, `"product"`, `"other"`, `"barrier"` or `"loop"`.
        reads: the buffers that it reads.
        writes: the buffers that it writes.
        flops: FLOPs of its products.
        sent: its collectives.
        bodies: the body of a loop; all branches of a conditional.
        trips: the number of iterations.
        num_consts: how many of the first buffers read are the same in every iteration.
        num_carry: how many of the next are carried from one iteration to the next.
        ahead: bytes that every iteration gathers for the next one.
        dims: the sizes of its product; None where there is none, or they are not known.
    """

    name: str
    kind: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    sent: tuple[Sent, ...] = ()
    bodies: tuple[LivenessProgram, ...] = ()
    trips: int = 1
    num_consts: int = 0
    num_carry: int = 0
    ahead: int = 0
    dims: ProductDims | None = None


@dataclasses.dataclass(eq=False)
class LivenessProgram:
    """A program of one device.

    Args:
        nodes: its operations, in program order.
        sizes: bytes of each buffer.
        inputs: buffers that exist before it runs.
        outputs: buffers that exist after it ran.
        is_rare: whether it is a branch that hardly ever runs.
    """

    nodes: list[Node]
    sizes: list[int]
    inputs: list[int]
    outputs: list[int]
    is_rare: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of all products; a conditional counts its costliest branch that is not rare."""
        return sum(
            node.flops
            + node.trips * max((b.flops for b in node.bodies if not b.is_rare), default=0.0)
            for node in self.nodes
        )

    def sends(self, times: int = 1) -> list[tuple[Sent, int]]:
        """Returns every collective, in all branches, and how often it runs."""
        collectives = [(sent, times) for node in self.nodes for sent in node.sent]
        for node in self.nodes:
            for body in node.bodies:
                collectives += body.sends(times * node.trips)
        return collectives


def is_rare(branch: ClosedJaxpr) -> bool:
    """Whether a branch of a conditional was traced in the scope of branches that rarely run."""
    return any(RARE in str(equation.source_info.name_stack) for equation in branch.jaxpr.eqns)


def kind_of(name: str) -> str:
    """Returns the node kind of a primitive without an inner program."""
    if name in PRODUCTS or name.startswith(ATTENTION):
        return "product"
    if name in OTHERS or name in COLLECTIVES:
        return "other"
    if name.startswith(("reduce_", "arg")) and name != "reduce_precision":
        return "reduction"
    return "fused"


ADDS = frozenset({"add", "add_any"})

SCATTERS = frozenset({"scatter-add", "scatter_add"})


@dataclasses.dataclass(eq=False)
class Sharded:
    """A variable with its layout.

    Args:
        buffer: the buffer that holds it.
        splits: the axes that split each of its dims.
        partial: the sums of which it is a part, until a collective adds them up.
        known: its value, where it selects a branch by platform.
    """

    buffer: int
    splits: Splits
    partial: tuple[Sum, ...] = ()
    known: int | None = None


@dataclasses.dataclass(eq=False)
class Sum:
    """A sum of which every rank has a part.

    Args:
        node: the node that made it.
        axes: the mesh axes of the ranks.
        num_bytes: the bytes of a rank's part.
        trips: iterations of the loop that adds to it. If it is scattered, every iteration scatters
            its part, because the compiler gives a loop's carry the layout of its readers.
        is_replicated: whether every rank must have all of it before it is scattered.
        is_done: whether it was already added up for another reader.
        is_base: whether a scatter-add of parts is added to it. XLA then scatters onto this sum, and
            must gather it first if it was reduce-scattered.
    """

    node: Node
    axes: Axes
    num_bytes: int
    trips: int = 1
    is_replicated: bool = False
    is_done: bool = False
    is_base: bool = False


def is_running_sum(before: int, after: int, nodes: Sequence[Node]) -> bool:
    """Whether a loop only adds to a value that it carries.

    Args:
        before: its buffer at the begin of an iteration; -1 for a value that is not carried.
        after: its buffer at the end of the iteration.
        nodes: the nodes of an iteration.
    """
    if before < 0:
        return False
    if before == after:
        return not any(before in node.reads for node in nodes)
    readers = [node for node in nodes if before in node.reads]
    linear = all(node.name in LINEAR or node.name in ADDS for node in readers)
    return linear and all(is_running_sum(w, after, nodes) for n in readers for w in n.writes)


def handed(name: str, operands: list[Sharded]) -> tuple[Sum, ...]:
    """Returns the sums of which the result of a linear operation is a part, like its operands."""
    # A sum that was completed for another reader is no longer partial.
    partial = [tuple(part for part in one.partial if not part.is_done) for one in operands]
    is_part = [bool(sums) for sums in partial]
    if name in SCATTERS and len(partial) > 2 and is_part[2]:
        # The updates go to a replicated array, so the sum over ranks may follow the scatter.
        return () if is_part[0] or is_part[1] else partial[2]
    if name in ADDS:
        # Values that a loop adds to its carry are summed over ranks after the loop. Other addends
        # may be summed before or after the addition.
        return join_sums(tuple(sum(partial, ()))) if any(is_part) else ()
    if name == "mul" and sum(is_part) == 1:
        return partial[0] or partial[1]
    if name == "div":
        return () if is_part[1] else partial[0]
    return partial[0] if name in LINEAR else ()


def join_sums(sums: tuple[Sum, ...]) -> tuple[Sum, ...]:
    """Joins partial sums that are added, and returns those that are left.

    If all are equal products, only the first is left, and the others are marked as done. Products
    to which a scatter-add of parts is added are marked as its base.
    """
    if any(one.node.name in SCATTERS for one in sums):
        for one in sums:
            one.is_base = one.node.kind == "product"
    kinds = {(one.node.kind, one.axes, one.num_bytes) for one in sums}
    if len(kinds) > 1 or sums[0].node.kind != "product":
        return sums
    for one in sums[1:]:
        one.is_done = True
    return sums[:1]


def flops_of(
    equation: Any, splits: Sequence[Splits], result: Splits, axes: Mapping[str, int], platform: str
) -> float:
    """Returns the FLOPs of one device; 0 where nothing is multiplied.

    Args:
        equation: an equation of a traced program over global arrays.
        splits: the layout of each operand.
        result: the layout of the result.
        axes: the sizes of the mesh axes.
        platform: for grouped products, only TPUs multiply each row by its own group's matrix alone.
    """
    name = equation.primitive.name
    shapes: list[tuple[int, ...]] = [getattr(a.aval, "shape", ()) for a in equation.invars]

    def ways(names):
        return math.prod(axes[axis] for axis in names)

    def local(shape, layout):
        return math.prod(-(-n // ways(a)) for n, a in zip(shape, layout, strict=True))

    out = equation.outvars[0].aval.shape
    known = factors(equation) if name in ("dot_general", "conv_general_dilated") else None
    if known is not None:
        roles = enumerate(known.roles)
        of_kernel = [n for n, role in roles if role in (Role.SUMMED, Role.REDUCED)]
        places = [at for n in of_kernel for at in known.dims(n, known.operands)]
        summed = math.prod(shapes[1][dim] for operand, dim in places if operand == 1)
        shared = ways(union(splits[operand][dim] for operand, dim in places) - union(result))
        share = _share_inside(equation) if name == "conv_general_dilated" else 1
        return float(2 * local(out, result) * summed * share) / shared
    if name == "ragged_dot_general":
        numbers = equation.params["ragged_dot_dimension_numbers"]
        summed = numbers.dot_dimension_numbers[0][0]
        (ragged,) = numbers.lhs_ragged_dimensions
        products = 2.0 * local(out, result) * math.prod(shapes[0][dim] for dim in summed)
        num_groups = shapes[2][-1]  # Each batch may have its own sizes of groups.
        dense = products * (1 if ragged in summed else num_groups)
        return dense / max(1, num_groups) if platform == "tpu" else dense
    if name == "pallas_call":
        queries = max(range(len(shapes)), key=lambda at: math.prod(shapes[at]))
        results = [each.aval.shape for each in equation.outvars]
        count = splash_flops(equation.params["name"] or "", shapes, results)
        return count / ways(union(splits[queries]))
    if name.startswith(ATTENTION):
        return (4.0 if "fwd" in name else 10.0) * local(shapes[0], splits[0]) * shapes[1][1]
    return 0.0


def _share_inside(equation: Any) -> Fraction:
    """The share of a convolution's products that meet neither padding nor holes."""
    params = equation.params
    shapes = [atom.aval.shape for atom in (*equation.invars, *equation.outvars)]
    pairs = zip(shapes, params["dimension_numbers"], strict=True)
    spatial = [[shape[dim] for dim in dims[2:]] for shape, dims in pairs]
    share = Fraction(1)
    for axis, (size, kernel, output) in enumerate(zip(*spatial, strict=True)):
        products = products_along(
            size,
            kernel,
            output,
            low=params["padding"][axis][0],
            stride=params["window_strides"][axis],
            dilation=params["lhs_dilation"][axis],
            kernel_dilation=params["rhs_dilation"][axis],
        )
        share *= Fraction(products, max(1, kernel * output))
    return share


def product_dims(
    equation: Any, result: Splits, axes: Mapping[str, int], flops: float
) -> ProductDims | None:
    """Returns the sizes of a product or fused attention on one device; None for other operations.

    Args:
        equation: an equation of a traced program over global arrays.
        result: the layout of the result.
        axes: the sizes of the mesh axes.
        flops: FLOPs of a device, by `flops_of`.
    """
    name = equation.primitive.name
    operands = [atom.aval for atom in equation.invars]
    if not flops or not (name == "dot_general" or name.startswith(ATTENTION)):
        return None
    out = equation.outvars[0].aval
    if name != "dot_general":
        kind = "forward" if "fwd" in name else "backward"
        length = operands[1].shape[1]
        width = operands[0].shape[-1]
        is_causal = "CAUSAL" in str(equation.params.get("mask_type"))
        size = out.dtype.itemsize
        return ProductDims(kind, length, width, 0, 1, size, size, flops, is_causal)
    (left, _), (batch_dims, _) = equation.params["dimension_numbers"]
    sizes = [
        -(-size // math.prod(axes[axis] for axis in names))
        for size, names in zip(out.shape, result, strict=True)
    ]
    first = len(batch_dims)
    after = first + len(operands[0].shape) - first - len(left)
    rows = math.prod(sizes[first:after])
    columns = math.prod(sizes[after:])
    batch = math.prod(sizes[:first])
    return ProductDims(
        kind="product",
        rows=rows,
        columns=columns,
        summed=max(1, round(flops / (2 * max(1, math.prod(sizes))))),
        batch=batch,
        written=out.dtype.itemsize,
        read=max(one.dtype.itemsize for one in operands[:2]),
        flops=flops,
    )
