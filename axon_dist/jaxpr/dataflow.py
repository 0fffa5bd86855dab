"""Which dims of a traced model are one and the same: how its kernels feed each other.

Every dim of every array of a jaxpr belongs to a *segment*: the dims that must lie alike for a
program to need no communication. Elementwise operations join the dims of their operands, products
join the dims they contract, and so on. A reshape that cuts a dim in factors links its segment to
those of the factors. What an operation cannot do on a part of a dim spoils the segment, with the
reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from ..core.compat import scan_counts
from ..core.typing import Path
from .walk import called, interpret

Dims: TypeAlias = list[int]
"""The nodes of an array's dims."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dim made of parts: `size = parts * inner`, or the factors of a reshape.

    Args:
        whole: node of the dim.
        piece: node of the part or factor.
        parts: how many equal blocks lie side by side before the piece's own order; 1 for the
            major factor.
        by_reshape: whether a reshape tells the blocks apart, rather than slices.
        repeats: whether the dim is its piece with every element repeated, such as key heads that
            several query heads share.
    """

    whole: int
    piece: int
    parts: int
    by_reshape: bool
    repeats: bool = False


@dataclasses.dataclass(frozen=True)
class Product:
    """A kernel multiplied with activations.

    Args:
        path: of the parameter in the model.
        contracted: nodes of the kernel's contracted dims.
        free: nodes of the kernel's other dims.
        order: position in the program.
        batched: nodes of the kernel's batch dims: a matrix for each, such as those of experts.
    """

    path: Path
    contracted: tuple[int, ...]
    free: tuple[int, ...]
    order: int
    batched: tuple[int, ...] = ()


class Flow:
    """The segments of a program, filled by `follow`.

    Attributes:
        products: the kernels and what they are multiplied with, in order.
        lookups: parameters that are indexed by inputs, with the node of the rows.
        outputs: nodes of the features that the model returns.
        repeated: nodes of dims that a broadcast made.
        cuts: dims made of parts.
        spoiled: by node, why a segment cannot be split.
    """

    def __init__(self):
        self.sizes: list[int] = []
        self._parent: list[int] = []
        self.products: list[Product] = []
        self.lookups: dict[Path, int] = {}
        self.outputs: set[int] = set()
        self.repeated: set[int] = set()
        self.cuts: list[Cut] = []
        self.spoiled: dict[int, str] = {}
        self.order = 0

    def new(self, shape: Sequence[int]) -> Dims:
        """Fresh nodes for the dims of an array."""
        start = len(self.sizes)
        self.sizes += list(shape)
        self._parent += range(start, start + len(shape))
        return list(range(start, start + len(shape)))

    def find(self, node: int) -> int:
        """The segment of a node."""
        while self._parent[node] != node:
            # Halving the way while walking it keeps later walks short.
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, one: int, other: int) -> None:
        """Two dims are the same; dims of size 1 say nothing."""
        # A broadcast dim meets every size, and would make one segment of all that it meets.
        if self.sizes[one] == self.sizes[other] != 1:
            self._parent[self.find(other)] = self.find(one)

    def spoil(self, node: int, why: str) -> None:
        """The dim cannot be split, for a reason; the first reason stays."""
        if self.sizes[node] > 1:
            self.spoiled.setdefault(node, why)

    def reasons(self) -> dict[int, str]:
        """Why each spoiled segment is."""
        found: dict[int, str] = {}
        for node, why in self.spoiled.items():
            found.setdefault(self.find(node), why)
        return found


@dataclasses.dataclass
class Value:
    """What is known about an array.

    Args:
        dims: the nodes of its dims.
        origin: the parameter that it is, cast or transposed, or None.
        from_input: whether it depends on an input of the model.
    """

    dims: Dims
    origin: Path | None = None
    from_input: bool = False


def follow(flow: Flow, jaxpr: Any, values: Sequence[Value]) -> list[Value]:
    """Follows a jaxpr equation by equation.

    Args:
        flow: receives what is found.
        jaxpr: an open jaxpr.
        values: what is known about its inputs.

    Returns:
        What is known about its outputs.
    """
    unknown = lambda atom: Value(flow.new(getattr(atom.aval, "shape", ())))

    def run(equation: Any, operands: Sequence[Value]) -> list[Value]:
        flow.order += 1
        return _follow_equation(flow, equation, list(operands))

    consts = [unknown(variable) for variable in jaxpr.constvars]
    return interpret(jaxpr, consts, values, run, literal=unknown)


def _follow_equation(flow: Flow, equation: Any, operands: list[Value]) -> list[Value]:
    name = equation.primitive.name
    results = [Value(flow.new(variable.aval.shape)) for variable in equation.outvars]
    for result in results:
        result.from_input = any(operand.from_input for operand in operands)
    handler = _HANDLERS.get(name)
    if handler is not None:
        handler(flow, equation, operands, results)
    elif (inner := called(equation)) is not None:
        # Of a function with its own derivative the first operands may be for that alone.
        found = follow(flow, inner.jaxpr, operands[len(operands) - len(inner.jaxpr.invars) :])
        return found[: len(results)]
    elif _is_elementwise(equation):
        _elementwise(flow, equation, operands, results)
    else:
        for value in (*operands, *results):
            for node in value.dims:
                flow.spoil(node, f"goes through {name}")
    return results


def _is_elementwise(equation: Any) -> bool:
    """Whether all arrays have the shape of the results, or size 1 where they are repeated."""
    results = {variable.aval.shape for variable in equation.outvars}
    if len(results) != 1:
        return False
    (shape,) = results
    repeats = lambda given: (
        len(given) == len(shape)
        and all(size in (full, 1) for size, full in zip(given, shape, strict=True))
    )
    return all(not v.aval.shape or repeats(v.aval.shape) for v in equation.invars)


def _elementwise(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    arrays = [operand for operand in operands if operand.dims]
    for result in results:
        for operand in arrays:
            for mine, theirs in zip(result.dims, operand.dims, strict=True):
                flow.join(mine, theirs)
        # A kernel times a scalar, cast or negated is that kernel; a sum of two is neither.
        result.origin = arrays[0].origin if len(arrays) == 1 else None


def _transpose(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    for out, source in enumerate(equation.params["permutation"]):
        flow.join(results[0].dims[out], operands[0].dims[source])
    results[0].origin = operands[0].origin


def _broadcast(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    kept = set(equation.params["broadcast_dimensions"])
    flow.repeated.update(node for dim, node in enumerate(results[0].dims) if dim not in kept)
    for source, out in enumerate(equation.params["broadcast_dimensions"]):
        flow.join(results[0].dims[out], operands[0].dims[source])
    results[0].origin = operands[0].origin


def _reshape(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    results[0].origin = operands[0].origin
    before = [node for node in operands[0].dims if flow.sizes[node] != 1]
    after = [node for node in results[0].dims if flow.sizes[node] != 1]
    while before and after:
        left, right = [before.pop(0)], [after.pop(0)]
        product = lambda nodes: math.prod(flow.sizes[node] for node in nodes)
        while product(left) != product(right):
            smaller, rest = (left, before) if product(left) < product(right) else (right, after)
            smaller.append(rest.pop(0))
        _regroup(flow, left, right)


def _regroup(flow: Flow, left: Dims, right: Dims) -> None:
    """Dims `left` become dims `right` of the same product."""
    if len(left) == len(right) == 1:
        flow.join(left[0], right[0])
    elif len(left) == 1 or len(right) == 1:
        # Of three and more factors the last ones cannot be split, and need no cut of their own.
        whole, factors = (left[0], right) if len(left) == 1 else (right[0], left)
        flow.cuts.append(Cut(whole, factors[0], 1, True, factors[1] in flow.repeated))
        flow.cuts.append(Cut(whole, factors[1], flow.sizes[factors[0]], True))
    else:
        for node in (*left, *right):
            flow.spoil(node, "is reshaped across its neighbours")


def _dot(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    (contract, batch), out = equation.params["dimension_numbers"], list(results[0].dims)
    left, right = operands
    for mine, theirs in zip(*contract, strict=True):
        flow.join(left.dims[mine], right.dims[theirs])
        # Between activations a sum over ranks is not what a row layer's is: scores need all of it.
        if left.origin is None and right.origin is None:
            flow.spoil(left.dims[mine], "is summed over between activations")
    for mine, theirs in zip(*batch, strict=True):
        node = out.pop(0)
        flow.join(node, left.dims[mine])
        flow.join(node, right.dims[theirs])
    for operand, summed, shared in zip(operands, contract, batch, strict=True):
        free = [dim for dim in range(len(operand.dims)) if dim not in (*summed, *shared)]
        for dim in free:
            flow.join(out.pop(0), operand.dims[dim])
        if operand.origin is not None:
            pick = lambda dims, operand=operand: tuple(operand.dims[dim] for dim in dims)
            kinds = (pick(summed), pick(free), flow.order, pick(shared))
            flow.products.append(Product(operand.origin, *kinds))


def _reduce(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    axes = equation.params["axes"]
    for operand in operands:
        kept = [node for dim, node in enumerate(operand.dims) if dim not in axes]
        for dim in axes:
            flow.spoil(operand.dims[dim], f"is normalised or reduced by {equation.primitive.name}")
        for result in results:
            for mine, theirs in zip(result.dims, kept, strict=True):
                flow.join(mine, theirs)


def _keep_equal_dims(
    flow: Flow, equation: Any, operands: list[Value], results: list[Value]
) -> None:
    """Slices and the like: dims of unchanged size are the same, the others are cut."""
    source = operands[0]
    for result in results:
        result.origin = source.origin if _is_row(flow, source, result) else None
        for mine, theirs in zip(result.dims, source.dims, strict=True):
            if flow.sizes[mine] == flow.sizes[theirs]:
                flow.join(mine, theirs)
            elif flow.sizes[mine] > 1 and flow.sizes[theirs] % flow.sizes[mine] == 0:
                flow.cuts.append(Cut(theirs, mine, flow.sizes[theirs] // flow.sizes[mine], False))
            else:
                flow.spoil(theirs, f"is indexed by {equation.primitive.name}")


def _is_row(flow: Flow, source: Value, result: Value) -> bool:
    """Whether an array is one of the matrices that another stacks, such as those of experts."""
    pairs = zip(result.dims, source.dims, strict=True)
    return all(flow.sizes[mine] in (1, flow.sizes[theirs]) for mine, theirs in pairs)


def _unstack(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    """All rows of a dim, each by itself."""
    source, axis = operands[0], equation.params["axis"]
    flow.spoil(source.dims[axis], "is indexed by unstack")
    for result in results:
        result.origin = source.origin
        for mine, theirs in zip(result.dims, _without(source.dims, axis), strict=True):
            flow.join(mine, theirs)


def _without(dims: Dims, axis: int) -> Dims:
    return [node for dim, node in enumerate(dims) if dim != axis]


def _join_whole(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    """Concatenations: dims of unchanged size are the same, the others spoil."""
    for operand in (operand for operand in operands if operand.dims):
        for mine, theirs in zip(results[0].dims, operand.dims, strict=True):
            if flow.sizes[mine] == flow.sizes[theirs]:
                flow.join(mine, theirs)
            else:
                flow.spoil(mine, f"goes through {equation.primitive.name}")
                flow.spoil(theirs, f"goes through {equation.primitive.name}")


def _gather(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    table, indices = operands[:2]
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    kept = [dim for dim in range(len(table.dims)) if dim not in numbers.collapsed_slice_dims]
    for out, dim in zip(numbers.offset_dims, kept, strict=False):
        if sizes[dim] == flow.sizes[table.dims[dim]]:
            flow.join(results[0].dims[out], table.dims[dim])
    rows = numbers.start_index_map
    is_lookup = table.origin is not None and indices.from_input and len(rows) == 1
    for dim in rows:
        if is_lookup:
            flow.lookups[table.origin or ""] = table.dims[dim]
        else:
            flow.spoil(table.dims[dim], "is indexed")
    taken = [sizes[dim] == flow.sizes[table.dims[dim]] for dim in kept]
    if not is_lookup and all(taken) and numbers.collapsed_slice_dims == rows:
        results[0].origin = table.origin


def _scan(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    body = equation.params["jaxpr"].jaxpr
    num_consts, num_carry = scan_counts(equation)
    inputs = list(operands[: num_consts + num_carry])
    for operand in operands[num_consts + num_carry :]:
        inputs.append(Value(operand.dims[1:], operand.origin, operand.from_input))
    outputs = follow(flow, body, inputs)
    carried = inputs[num_consts:][:num_carry]
    # The carried values are the first of both outputs and results, which go on with the stacked.
    for value, start, end in zip(outputs, carried, results, strict=False):
        for a, b, c in zip(value.dims, start.dims, end.dims, strict=True):
            flow.join(a, b)
            flow.join(a, c)
    for value, stacked in zip(outputs[num_carry:], results[num_carry:], strict=True):
        for a, b in zip(value.dims, stacked.dims[1:], strict=True):
            flow.join(a, b)


def _cond(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    """The last branch stands for all: it is the one of any platform."""
    branch = equation.params["branches"][-1].jaxpr
    for value, result in zip(follow(flow, branch, operands[1:]), results, strict=True):
        for a, b in zip(value.dims, result.dims, strict=True):
            flow.join(a, b)


def _nothing(flow: Flow, equation: Any, operands: list[Value], results: list[Value]) -> None:
    """Results that have no dims in common with the operands."""


Handler: TypeAlias = Callable[[Flow, Any, list[Value], list[Value]], None]

_HANDLERS: MappingProxyType[str, Handler] = MappingProxyType(
    {
        "transpose": _transpose,
        "broadcast_in_dim": _broadcast,
        "reshape": _reshape,
        "squeeze": _reshape,
        "expand_dims": _reshape,
        "dot_general": _dot,
        **{f"reduce_{kind}": _reduce for kind in ("sum", "max", "min", "prod", "and", "or")},
        "argmax": _reduce,
        "argmin": _reduce,
        "slice": _keep_equal_dims,
        "split": _keep_equal_dims,
        "dynamic_slice": _keep_equal_dims,
        "unstack": _unstack,
        "concatenate": _join_whole,
        "pad": _join_whole,
        "gather": _gather,
        "scan": _scan,
        "cond": _cond,
        "iota": _nothing,
        "random_bits": _nothing,
        "random_wrap": _nothing,
        "random_unwrap": _nothing,
        "random_fold_in": _nothing,
        "random_split": _nothing,
        "random_seed": _nothing,
        "threefry2x32": _nothing,
    }
)
