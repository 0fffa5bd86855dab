"""Which dims of a traced model must be split the same way: how its kernels feed each other.

Every dim of every array of a jaxpr belongs to a *segment*: a set of dims that must all be split the
same way for the program to need no communication. Elementwise operations join the dims of their
operands, products join the dims they contract, and so on. A reshape that cuts a dim into factors
links its segment to those of the factors. An operation that cannot work on a part of a dim spoils
the segment: it cannot be split, and the reason is recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn

from ..core.typing import Path
from ..ir.factors import RESHAPES, SCATTERS, Factors, Role, factors, guessed
from ..ir.walk import Inner, inners, interpret, shape_of

Dims: TypeAlias = list[int]
"""The nodes of an array's dims."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dim cut into blocks of the size of a piece, or into the factors of a reshape.

    Args:
        dim: node of the dim.
        piece: node of the part or factor.
        num_fused: how many equal blocks the dim holds one after another, each in the piece's
            order; 1 for the major factor.
        by_reshape: whether a reshape separates the blocks, rather than slices.
        repeats: whether the dim repeats every element of the piece, such as key heads that several
            query heads share.
    """

    dim: int
    piece: int
    num_fused: int
    by_reshape: bool
    repeats: bool = False


@dataclasses.dataclass(frozen=True)
class Product:
    """A kernel multiplied with activations.

    Args:
        path: the parameter's path in the model.
        contracted: nodes of the kernel's contracted dims.
        free: nodes of the kernel's other dims.
        order: the product's position in the program.
        batched: nodes of the kernel's batch dims, such as the experts of a stack of matrices.
    """

    path: Path
    contracted: tuple[int, ...]
    free: tuple[int, ...]
    order: int
    batched: tuple[int, ...] = ()


class Flow:
    """The segments of a program, filled by `follow`.

    Attributes:
        products: the products of kernels with activations, in order.
        lookups: parameters that inputs index, with the node of the rows.
        outputs: nodes of the features that the model returns.
        repeated: nodes of dims that a broadcast made.
        cuts: dims made of parts.
        spoiled: per node, the reason why its segment cannot be split.
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
            # Path halving keeps later walks short.
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, one: int, other: int) -> None:
        """Joins the segments of two dims, unless they have size 1 or different sizes."""
        # A broadcast dim of size 1 meets dims of every size and would join them all.
        if self.sizes[one] == self.sizes[other] != 1:
            self._parent[self.find(other)] = self.find(one)

    def spoil(self, node: int, why: str) -> None:
        """Records why a dim cannot be split; the first reason is kept."""
        if self.sizes[node] > 1:
            self.spoiled.setdefault(node, why)

    def reasons(self) -> dict[int, str]:
        """Returns, per spoiled segment, why it cannot be split."""
        reasons: dict[int, str] = {}
        for node, why in self.spoiled.items():
            reasons.setdefault(self.find(node), why)
        return reasons


@dataclasses.dataclass
class FlowValue:
    """The known facts about an array.

    Args:
        dims: the nodes of its dims.
        origin: the parameter of which it is a cast, reshape or transpose; None for others.
        from_input: whether it depends on an input of the model.
    """

    dims: Dims
    origin: Path | None = None
    from_input: bool = False


def follow(flow: Flow, jaxpr: Jaxpr, values: Sequence[FlowValue]) -> list[FlowValue]:
    """Follows a jaxpr equation by equation.

    Args:
        flow: collects the segments.
        jaxpr: an open jaxpr.
        values: the facts about its inputs.

    Returns:
        The facts about its outputs.
    """

    def unknown(atom):
        return FlowValue(flow.new(shape_of(atom)))

    def run(equation: JaxprEqn, operands: Sequence[FlowValue]) -> list[FlowValue]:
        flow.order += 1
        programs = [] if equation.primitive.name == "while" else inners(equation)
        if programs:
            return _follow_inner(flow, equation, programs[-1], operands)
        return _follow_equation(flow, equation, operands)

    consts = [unknown(variable) for variable in jaxpr.constvars]
    return interpret(jaxpr, consts, values, run, literal=unknown)


def _results(flow: Flow, equation: JaxprEqn, operands: Sequence[FlowValue]) -> list[FlowValue]:
    is_fed = any(operand.from_input for operand in operands)
    return [FlowValue(flow.new(shape_of(v)), from_input=is_fed) for v in equation.outvars]


def _follow_inner(
    flow: Flow, equation: JaxprEqn, inner: Inner, operands: Sequence[FlowValue]
) -> list[FlowValue]:
    """Follows the inner program of a call, a loop or a conditional.

    Of a conditional the last branch is followed, the default of `jax.lax.platform_dependent`.
    """
    shared, carry, stacked = inner.split_operands(operands)
    rows = [dataclasses.replace(value, dims=value.dims[1:]) for value in stacked]
    outputs = follow(flow, inner.program.jaxpr, [*shared, *carry, *rows])
    if equation.primitive.name not in ("scan", "cond"):
        return outputs[: len(equation.outvars)]
    results = _results(flow, equation, operands)
    is_loop = equation.primitive.name == "scan"
    for number, (value, result) in enumerate(zip(outputs, results, strict=True)):
        is_row = is_loop and number >= inner.num_carried
        _join_all(flow, value.dims, result.dims[1:] if is_row else result.dims)
    for value, start in zip(outputs, carry, strict=False):
        _join_all(flow, value.dims, start.dims)
    return results


def _join_all(flow: Flow, dims: Dims, others: Dims) -> None:
    for one, other in zip(dims, others, strict=True):
        flow.join(one, other)


def _is_elementwise(equation: JaxprEqn) -> bool:
    """Whether every operand has the results' shape, or size 1 in the dims that broadcast."""
    results = {shape_of(variable) for variable in equation.outvars}
    if len(results) != 1:
        return False
    (shape,) = results

    def repeats(sizes):
        return len(sizes) == len(shape) and all(
            size in (full, 1) for size, full in zip(sizes, shape, strict=True)
        )

    return all(not shape_of(v) or repeats(shape_of(v)) for v in equation.invars)


def _follow_equation(
    flow: Flow, equation: JaxprEqn, operands: Sequence[FlowValue]
) -> list[FlowValue]:
    name = equation.primitive.name
    results = _results(flow, equation, operands)
    known = factors(equation)
    if known is None and _is_elementwise(equation):
        known = guessed(equation)
    if known is None or name in SCATTERS or Role.WINDOW in known.roles:
        for value in (*operands, *results):
            for node in value.dims:
                flow.spoil(node, f"goes through {name}")
        return results
    # The indices of a gather share no batch dim with its result.
    sources = operands[:1] if name == "gather" else operands
    step = _Step(flow, equation, known, list(sources), results)
    step.repeat()
    for factor, role in enumerate(known.roles):
        step.follow_factor(factor, role)
    if name == "dot_general":
        step.multiply()
    is_lookup = name == "gather" and step.look_up(operands[1])
    for result in results:
        result.origin = None if is_lookup else step.origin_of(result)
    return results


@dataclasses.dataclass
class _Step:
    """One equation without an inner program."""

    flow: Flow
    equation: JaxprEqn
    factors: Factors
    operands: list[FlowValue]
    results: list[FlowValue]

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    def follow_factor(self, factor: int, role: Role) -> None:
        """Joins dims that are split together, records cuts, and spoils unsplittable dims."""
        ins = self._nodes(factor, self.factors.operands, self.operands)
        outs = self._nodes(factor, self.factors.results, self.results)
        if role is Role.PASSES and not self._cut(factor, ins, outs):
            self._join(ins + outs)
        elif role is Role.SUMMED and self.name == "dot_general":
            self._join(ins)
            # A product of two activations is not a row-parallel layer. Attention scores, for
            # example, need the whole sum.
            if all(operand.origin is None for operand in self.operands):
                self.flow.spoil(ins[0], "is summed over between activations")
        elif role in (Role.SUMMED, Role.REDUCED):
            self._spoil(ins, f"is normalised or reduced by {self.name}")
        elif role is Role.ALONG:
            is_reshape = self.name == "reshape"
            why = "is reshaped across its neighbours" if is_reshape else f"goes through {self.name}"
            self._spoil(ins + outs, why)
        elif role is Role.PART:
            self._take_part(ins[0], outs)
        elif role is Role.JOINED:
            self._align(ins, outs[0])

    def repeat(self) -> None:
        """Records the dims that a broadcast makes."""
        dims = self.equation.params.get("broadcast_dimensions", ())
        if self.name == "broadcast_in_dim":
            new = [node for dim, node in enumerate(self.results[0].dims) if dim not in dims]
            self.flow.repeated.update(new)

    def multiply(self) -> None:
        """Records the products of parameters."""
        for number, operand in enumerate(self.operands):
            if operand.origin is None:
                continue
            kinds: tuple[Dims, Dims, Dims] = [], [], []
            for factor, role in enumerate(self.factors.roles):
                places = self.factors.dims(factor, self.factors.operands)
                nodes = [operand.dims[dim] for which, dim in places if which == number]
                kinds[0 if role is Role.SUMMED else 1 + (len(places) > 1)].extend(nodes)
            summed, free, shared = map(tuple, kinds)
            product = Product(operand.origin, summed, free, self.flow.order, shared)
            self.flow.products.append(product)

    def look_up(self, indices: FlowValue) -> bool:
        """Records a parameter whose rows the model's input looks up."""
        table = self.operands[0]
        rows = self.equation.params["dimension_numbers"].start_index_map
        is_lookup = table.origin is not None and indices.from_input and len(rows) == 1
        for dim in rows:
            if is_lookup:
                self.flow.lookups[table.origin or ""] = table.dims[dim]
            else:
                self.flow.spoil(table.dims[dim], "is indexed")
        return is_lookup

    def origin_of(self, result: FlowValue) -> Path | None:
        """Returns the parameter of which a result is a reshape, cast or row; None for others."""
        first = self.operands[0] if self.operands else result
        if self.name in RESHAPES or self.name in ("transpose", "unstack"):
            return first.origin
        if self.name in ("slice", "split", "dynamic_slice"):
            return first.origin if _is_row(self.flow, first, result) else None
        if self.name == "gather":
            return first.origin if self._takes_rows() else None
        arrays = [operand for operand in self.operands if operand.dims]

        # A kernel scaled, cast or negated is still that kernel; a sum of two kernels is neither.
        def shape(value):
            return [self.flow.sizes[node] for node in value.dims]

        is_same = len(arrays) == 1 and shape(arrays[0]) == shape(result)
        return arrays[0].origin if is_same else None

    def _takes_rows(self) -> bool:
        numbers = self.equation.params["dimension_numbers"]
        sizes = self.equation.params["slice_sizes"]
        rows = numbers.collapsed_slice_dims
        table = self.operands[0].dims
        fits = [sizes[d] == self.flow.sizes[node] for d, node in enumerate(table) if d not in rows]
        return all(fits) and rows == numbers.start_index_map

    def _nodes(
        self, factor: int, side: Sequence[Sequence[tuple[int, ...]]], values: Sequence[FlowValue]
    ) -> Dims:
        places = self.factors.dims(factor, side)
        return [values[number].dims[dim] for number, dim in places if number < len(values)]

    def _join(self, nodes: Dims) -> None:
        for node in nodes[1:]:
            self.flow.join(nodes[0], node)

    def _spoil(self, nodes: Dims, why: str) -> None:
        for node in nodes:
            self.flow.spoil(node, why)

    def _cut(self, factor: int, ins: Dims, outs: Dims) -> bool:
        """Records that a dim is a factor of another; returns False where it is the same dim."""
        for side, wholes, pieces in (
            (self.factors.operands, ins, outs),
            (self.factors.results, outs, ins),
        ):
            numbers = next((n for array in side for n in array if factor in n and len(n) > 1), ())
            if not numbers:
                continue
            if self.factors.roles[numbers[0]] is Role.NEW:
                # The copies of a tiled dim are in no other array whose dim could be split.
                self._spoil(ins + outs, f"goes through {self.name}")
                return True
            at = numbers.index(factor)
            # Only the first two factors can be split; the others need no `Cut`.
            if at < _CUT:
                num_fused = 1 if at == 0 else self.flow.sizes[self._piece(numbers[0])]
                repeats = at == 0 and self._piece(numbers[1]) in self.flow.repeated
                self.flow.cuts.append(Cut(wholes[0], pieces[0], num_fused, True, repeats))
            return True
        return False

    def _piece(self, factor: int) -> int:
        """Returns the dim that consists of one factor alone."""
        sides = (self.factors.operands, self.operands), (self.factors.results, self.results)
        return next(
            values[number].dims[dim]
            for side, values in sides
            for number, array in enumerate(side)
            for dim, numbers in enumerate(array)
            if numbers == (factor,)
        )

    def _take_part(self, source: int, outs: Dims) -> None:
        sizes = self.flow.sizes
        for node in outs:
            if self.name == "pad":
                self._spoil([source, node], "goes through pad")
            elif sizes[node] > 1 and sizes[source] % sizes[node] == 0:
                num_fused = sizes[source] // sizes[node]
                self.flow.cuts.append(Cut(source, node, num_fused, False))
            else:
                self.flow.spoil(source, f"is indexed by {self.name}")
        if not outs:
            self.flow.spoil(source, f"is indexed by {self.name}")

    def _align(self, ins: Dims, out: int) -> None:
        for node in ins:
            if self.flow.sizes[node] == self.flow.sizes[out]:
                self.flow.join(out, node)
            else:
                self._spoil([out, node], f"goes through {self.name}")


_CUT = 2


def _is_row(flow: Flow, source: FlowValue, result: FlowValue) -> bool:
    """Whether the result is one of the matrices that the source stacks, such as an expert's."""
    pairs = zip(result.dims, source.dims, strict=True)
    return all(flow.sizes[taken] in (1, flow.sizes[whole]) for taken, whole in pairs)
