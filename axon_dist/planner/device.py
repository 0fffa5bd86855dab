"""Reads one device's liveness program from a traced program: operations, bytes, collectives.

A traced step is a program over global arrays. The layouts of its inputs determine those of all
other values (`placement`), and with them the bytes that a device holds of each value, the FLOPs
that it computes and the bytes that it sends. Calls are inlined. Branches for other platforms and
dead code are removed. The body of a loop is a nested program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..core.typing import Array
from ..ir.rewrite import for_platform
from ..ir.walk import Atom, called, dtype_of, inners, interpret, needed_for, shape_of
from .liveness import postponed
from .placement import (
    ADDS,
    COLLECTIVES,
    IN_PLACE,
    NONE,
    SCATTERS,
    SPREAD,
    SUMS,
    VIEWS,
    Axes,
    LivenessProgram,
    Node,
    Sent,
    Sharded,
    Splits,
    Sum,
    either,
    flops_of,
    handed,
    is_rare,
    is_running_sum,
    kind_of,
    of_spec,
    placed,
    product_dims,
    union,
    unsplit,
    without_repeats,
)


def liveness_program(
    closed: ClosedJaxpr,
    splits: Sequence[Splits],
    sizes: Mapping[str, int],
    platform: str,
    num_state: int = 0,
) -> LivenessProgram:
    """Reads the operations of one device from a traced program.

    Args:
        closed: a closed jaxpr over global arrays.
        splits: the layout of each input.
        sizes: the sizes of the mesh axes.
        platform: `"cpu"`, `"gpu"` (or `"cuda"`) or `"tpu"`, whose branches are read.
        num_state: how many of the first results are the state, laid out like the first inputs.

    Returns:
        The program, without dead code.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> program = jax.make_jaxpr(lambda x, w: (x @ w).sum())(jnp.ones((8, 4)), jnp.ones((4, 2)))
        >>> splits = [(frozenset({"dp"}), NONE), unsplit(2)]
        >>> liveness = liveness_program(program, splits, {"dp": 2}, "cpu")
        >>> liveness.flops, [sent.kind for sent, _ in liveness.sends()]
        (64.0, ['all-reduce'])
    """
    reader = _Reader(sizes, {"gpu": "cuda"}.get(platform, platform))
    jaxpr = closed.jaxpr
    inputs = [reader.input(v, s) for v, s in zip(jaxpr.invars, splits, strict=True)]
    specialized = for_platform(jaxpr, reader.branch_of)
    needed, read = needed_for(specialized, range(len(jaxpr.outvars)))
    outputs = reader.run(needed, closed.consts, [inputs[place] for place in read])
    outputs = [reader.resolve(value) for value in outputs]
    for place, variable in enumerate(jaxpr.outvars[:num_state]):
        outputs[place] = reader.placed(outputs[place], splits[place], variable)
    program = reader.read(inputs, outputs)
    return postponed(program) if reader.platform == "cuda" else program


class _Reader:
    """Interprets a traced program and writes its liveness program."""

    def __init__(self, axes: Mapping[str, int], platform: str):
        self.axes = axes
        self.platform = platform
        self.nodes: list[Node] = []
        self.sizes: list[int] = []
        self.spread: set[int] = {-1}
        self.wholes: dict[tuple[int, Splits], Sharded] = {}
        self.joint: list[tuple[Sum, Axes, Axes]] = []
        # Per written buffer, the axes along which a constraint slices it without communication.
        self.slices: dict[tuple[int, ...], Axes] = {}

    def input(self, atom: Atom, splits: Splits) -> Sharded:
        return self.buffer(self.local_bytes(atom, splits), splits)

    def buffer(self, num_bytes: int, splits: Splits) -> Sharded:
        self.sizes.append(num_bytes)
        return Sharded(len(self.sizes) - 1, splits)

    def ways(self, axes: Axes) -> int:
        return math.prod(self.axes[axis] for axis in axes)

    def local_bytes(self, atom: Atom, splits: Splits) -> int:
        pairs = zip(shape_of(atom), splits, strict=True)
        count = math.prod(-(-size // self.ways(axes)) for size, axes in pairs)
        return count * getattr(dtype_of(atom), "itemsize", 8)

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Array], values: Sequence[Sharded]
    ) -> list[Sharded]:
        stored = [self.input(v, unsplit(len(shape_of(v)))) for v in jaxpr.constvars]
        return interpret(
            jaxpr, stored, values, self.equation, lambda a: Sharded(-1, unsplit(len(shape_of(a))))
        )

    def equation(self, equation: JaxprEqn, operands: Sequence[Sharded]) -> list[Sharded]:
        name = equation.primitive.name
        if name in _SPECIAL:
            return _SPECIAL[name](self, equation, operands)
        inner = called(equation)
        if inner is None:
            return self._operation(equation, operands)
        if equation.params.get("differentiated") and np.any(equation.params["prevent_cse"]):
            operands = self.behind_barrier(equation, operands)
        return self.run(inner.jaxpr, inner.consts, inners(equation)[0].inputs(operands))

    def behind_barrier(self, equation: JaxprEqn, operands: Sequence[Sharded]) -> list[Sharded]:
        """Returns the same values after a barrier: kept in memory, never recomputed after it."""
        values = [self.resolve(one) for one in operands]
        for number, one in enumerate(values):
            if one.buffer >= 0:
                behind = self.buffer(0, one.splits)
                values[number] = self._after(one, behind, "barrier", "barrier")
        return values

    def _after(
        self, value: Sharded, made: Sharded, name: str, kind: str, sent: tuple[Sent, ...] = ()
    ) -> Sharded:
        """Adds a node that computes one value from another."""
        self.nodes.append(Node(name, kind, (value.buffer,), (made.buffer,), 0.0, sent))
        return made

    def _sent_to(
        self, value: Sharded, splits: Splits, atom: Atom, axes: Axes, kind: str = "all-gather"
    ) -> Sharded:
        """Returns the value in another layout, after a collective over some axes."""
        made = self.input(atom, splits)
        sent = Sent(kind, tuple(sorted(axes)), self.sizes[made.buffer])
        return self._after(value, made, "sharding_constraint", "other", (sent,))

    def platform_of(self, equation: JaxprEqn, operands: Sequence[Sharded]) -> list[Sharded]:
        return [Sharded(-1, (), known=self.branch_of(equation.params["platforms"]))]

    def branch_of(self, platforms: Sequence[Sequence[str] | None]) -> int:
        ours = (n for n, names in enumerate(platforms) if names is None or self.platform in names)
        return next(ours, 0)

    def resolve(self, value: Sharded, scatter: Axes = NONE) -> Sharded:
        """Completes the sums of a value, and returns it; over `scatter` each rank keeps a shard."""
        for one in value.partial:
            if not one.is_done:
                one.is_done = True
                self._add_up(one, scatter)
        value.partial = ()
        return value

    def placed(self, value: Sharded, splits: Splits, atom: Atom) -> Sharded:
        """Returns the value in its final layout; axes that no longer split it are gathered."""
        lost = union(value.splits) - union(splits)
        if not lost or value.buffer < 0:
            return value
        return self._sent_to(value, splits, atom, lost)

    def _add_up(self, one: Sum, scatter: Axes) -> None:
        shard = one.axes & scatter
        rest = one.axes - scatter
        if shard and self._send_rows(one, shard):
            self._send_sum(one, NONE, rest, one.num_bytes // self.ways(shard))
            return
        # XLA:CPU all-reduces and then slices. On no platform is a replicated sum scattered over
        # only some of its axes.
        if shard and (self.platform == "cpu" or (rest and one.is_replicated)):
            shard = NONE
            rest = one.axes
        if shard and rest and one.node.kind != "product":
            self.joint.append((one, shard, rest))
            return
        self._send_sum(one, shard, rest, one.num_bytes)

    def _send_rows(self, one: Sum, over: Axes) -> bool:
        """Gathers the updates of all ranks if that is cheaper, and returns whether it is.

        Each rank then adds the updates of its shard.

        XLA's partitioner does so where the rows of all ranks, such as those of a step's tokens, are
        fewer bytes than the table. No sum over these axes is then left.
        """
        node = one.node
        rows = self.sizes[node.reads[2]] if node.name in SCATTERS else 0
        if not 0 < rows * self.ways(one.axes) < one.num_bytes:
            return False
        ways = self.ways(over)
        node.sent += (Sent("all-gather", tuple(sorted(over)), rows * ways),)
        for buffer in (*node.reads[:1], *node.writes):
            self.sizes[buffer] = one.num_bytes // ways
        return True

    def finish(self) -> None:
        """Completes sums over several axes by one all-reduce, unless the compiler splits it.

        Where a rank keeps only a shard of an all-reduce, XLA's AllReduceSplitter may split it into
        a reduce-scatter and an all-reduce of the shards. It does so only if the program already has
        an all-reduce over the same ranks as the latter. A product has one, because it is summed
        over one axis after another.
        """
        sent = [one for node in self.nodes for one in node.sent if one.kind == "all-reduce"]
        summed = {NONE, *(frozenset(one.axes) for one in sent)}
        for one, shard, rest in self.joint:
            split = (shard, rest) if rest in summed else (NONE, shard | rest)
            self._send_sum(one, *split, one.num_bytes)
        self.joint.clear()
        if self.platform != "cpu":
            self._scatter_what_is_sliced(summed)

    def _scatter_what_is_sliced(self, summed: set[Axes]) -> None:
        """Scatters sums of which each rank reads only a slice, like XLA's ReduceScatterCreator."""
        for node in self.nodes:
            all_reduces = [one for one in node.sent if one.kind == "all-reduce"]
            if node.name not in SUMS or (len(all_reduces), len(node.writes)) != (1, 1):
                continue
            readers = [other for other in self.nodes if node.writes[0] in other.reads]
            shards = {self.slices.get(other.writes, NONE) for other in readers}
            axes = frozenset(all_reduces[0].axes)
            size = all_reduces[0].num_bytes
            shard = shards.pop() if len(shards) == 1 else NONE
            if shard and shard <= axes and axes - shard in summed:
                node.sent = ()
                self._send_sum(Sum(node, axes, size), shard, axes - shard, size)

    def _send_sum(self, one: Sum, shard: Axes, rest: Axes, size: int) -> None:
        if shard:
            one.node.sent += (Sent("reduce-scatter", tuple(sorted(shard)), size * one.trips),)
            if one.is_base:
                one.node.sent += (Sent("all-gather", tuple(sorted(shard)), size),)
            size //= self.ways(shard)
        if rest:
            size *= one.trips if self.platform == "cpu" else 1
            one.node.sent += (Sent("all-reduce", tuple(sorted(rest)), size),)

    def _operation(self, equation: JaxprEqn, inputs: Sequence[Sharded]) -> list[Sharded]:
        name = equation.primitive.name
        operands = list(inputs)
        if name in ADDS:
            # If the other summand is split over the ranks, each needs only its shard of the sum.
            split = union(axes for one in operands if not one.partial for axes in one.splits)
            for one in operands:
                if any(part.axes & split for part in one.partial):
                    self.resolve(one, scatter=split)
        parts = handed(name, operands)
        if not parts:
            operands = [self.resolve(one) for one in operands]
        if name == "dot_general":
            operands = self._met(equation, operands)
        layouts = placed(equation, [one.splits for one in operands])
        is_view = name in VIEWS or (name == "transpose" and len(layouts[0][0]) <= 2)
        if is_view and operands[0].buffer >= 0:
            return [Sharded(operands[0].buffer, layouts[0][0], parts)]
        node = Node(name, kind_of(name), tuple(one.buffer for one in operands), ())
        results = []
        for variable, (splits, summed) in zip(equation.outvars, layouts, strict=True):
            value = self.input(variable, splits)
            value.partial = parts
            if summed and not parts:
                value.partial = (Sum(node, summed, self.sizes[value.buffer]),)
            results.append(value)
        node.writes = tuple(value.buffer for value in results)
        places = [one.splits for one in operands], results[0].splits
        node.flops = flops_of(equation, *places, self.axes, self.platform)
        node.dims = product_dims(equation, places[1], self.axes, node.flops)
        if name in SPREAD:
            self.spread.update(node.writes)
        if name in IN_PLACE and operands[0].buffer in self.spread:
            # A buffer that starts as zeros gets the layout of the values written into it.
            self.sizes[operands[0].buffer] = self.sizes[node.writes[0]]
        if name in COLLECTIVES:
            node.sent = tuple(self._sent(equation, operands, results))
        self.nodes.append(node)
        return results

    def _met(self, equation: JaxprEqn, operands: list[Sharded]) -> list[Sharded]:
        """Returns the operands of a product, one of them gathered where one axis splits both.

        Of activations and a kernel, the activations are gathered, as in sequence parallelism.
        """
        (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
        one, other = (operand.splits for operand in operands)
        paired = {*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)}
        clash = union(
            axes & others
            for a, axes in enumerate(one)
            for b, others in enumerate(other)
            if (a, b) not in paired
        )
        if not clash:
            return operands
        at = 0 if len(one) >= len(other) else 1
        splits = tuple(axes - clash for axes in operands[at].splits)
        key = operands[at].buffer, splits
        if key not in self.wholes:
            self.wholes[key] = self._sent_to(operands[at], splits, equation.invars[at], clash)
        operands[at] = self.wholes[key]
        return operands

    def _sent(
        self, equation: JaxprEqn, operands: list[Sharded], results: list[Sharded]
    ) -> list[Sent]:
        kind, parameter = COLLECTIVES[equation.primitive.name]
        axes = equation.params[parameter]
        axes = (axes,) if isinstance(axes, str) else tuple(a for a in axes if isinstance(a, str))
        sides = results if kind == "all-gather" else operands
        sizes = [self.sizes[one.buffer] for one in sides if one.buffer >= 0]
        return [Sent(kind, axes, sum(sizes))] if axes and self.ways(frozenset(axes)) > 1 else []

    def constrained(self, equation: JaxprEqn, operands: Sequence[Sharded]) -> list[Sharded]:
        """Returns the value in the layout of a sharding constraint."""
        (operand,) = operands
        atom = equation.outvars[0]
        ((splits, _),) = placed(equation, [operand.splits])
        axes = union(splits)
        summed = union(one.axes for one in operand.partial)
        if not summed & axes:
            # A sum that must be replicated after a loop is completed there, and scattered once.
            for one in operand.partial:
                one.is_replicated = True
                # XLA:CPU reduces in every iteration, other platforms after the loop
                # (WhileLoopAllReduceCodeMotion).
                one.trips = one.trips if self.platform == "cpu" else 1
        if splits != operand.splits or summed & axes:
            self.resolve(operand, scatter=axes)
        if splits == operand.splits or operand.buffer < 0:
            return [Sharded(operand.buffer, splits, operand.partial)]
        before = union(operand.splits)
        pairs = zip(splits, operand.splits, strict=True)
        gathered = before - axes
        moved = union((new & before) - old for new, old in pairs)
        # Equal constraints on one value share a transfer, as for queries, keys and values.
        key = operand.buffer, splits
        if key in self.wholes:
            return [self.wholes[key]]
        if not gathered and not moved:
            made = self.input(atom, splits)
            self.slices[made.buffer,] = axes - before
            return [self._after(operand, made, "sharding_constraint", "fused")]
        kind = "all-gather" if gathered else "all-to-all"
        self.wholes[key] = self._sent_to(operand, splits, atom, gathered or moved, kind)
        return [self.wholes[key]]

    def mapped(self, equation: JaxprEqn, operands: Sequence[Sharded]) -> list[Sharded]:
        """Reads the program inside a `shard_map`."""
        params = equation.params
        manual: Axes = params.get("newly_manual_axes", params.get("manual_axes", NONE))
        inputs = []
        for atom, value, spec in zip(equation.invars, operands, params["in_specs"], strict=True):
            wanted = of_spec(spec, len(value.splits))
            self.resolve(value, scatter=union(wanted))
            keep = without_repeats(
                [(a - manual) | s for a, s in zip(value.splits, wanted, strict=True)]
            )
            if keep != value.splits and value.buffer >= 0:
                lost = union(value.splits) & manual - union(wanted)
                value = self._resplit(value, keep, lost, atom)
            inputs.append(Sharded(value.buffer, tuple(axes - manual for axes in keep)))
        program = params["jaxpr"]
        results = self.run(getattr(program, "jaxpr", program), (), inputs)
        outputs = []
        for value, spec in zip(results, params["out_specs"], strict=True):
            pairs = zip(value.splits, of_spec(spec, len(value.splits)), strict=True)
            outputs.append(
                Sharded(self.resolve(value).buffer, without_repeats([a | s for a, s in pairs]))
            )
        return outputs

    def _resplit(self, value: Sharded, splits: Splits, lost: Axes, atom: Atom) -> Sharded:
        """Gathers or slices a value as the `in_specs` of a `shard_map` require.

        XLA gathers dim by dim, the last dim first. It moves a cast to fewer bytes before the last
        gather only, so the earlier gathers send the uncast values.
        """
        dims = [dim for dim in reversed(range(len(splits))) if value.splits[dim] & lost]
        if not dims:
            return self._after(value, self.input(atom, splits), "shard_map", "fused")
        wider = self._narrowed(value.buffer)
        now = list(value.splits)
        for dim in dims:
            over = now[dim] & lost
            now[dim] -= lost
            size = self.local_bytes(atom, splits)
            if dim != dims[-1]:
                size = int(self.local_bytes(atom, tuple(now)) * wider)
            sent = Sent("all-gather", tuple(sorted(over)), size)
            made = self.buffer(size, splits)
            value = self._after(value, made, "shard_map", "other", (sent,))
        return value

    def _narrowed(self, buffer: int) -> float:
        """Returns the factor by which a cast made a value smaller; 1 where none did."""
        for node in reversed(self.nodes):
            if buffer in node.writes and node.name == "convert_element_type":
                return max(1.0, self.sizes[node.reads[0]] / self.sizes[buffer])
        return 1.0

    def choose(self, equation: JaxprEqn, operands: Sequence[Sharded]) -> list[Sharded]:
        """Reads a conditional: the platform's branch, or all branches as bodies."""
        which = operands[0].known
        platforms = equation.params.get("branches_platforms")
        if which is None and platforms is not None:
            which = self.branch_of(platforms)
        if which is not None:
            selected = equation.params["branches"][which]
            return self.run(selected.jaxpr, selected.consts, operands[1:])
        operands = [self.resolve(one) for one in operands][1:]
        each = [
            self._body(branch, [one.splits for one in operands])
            for branch in equation.params["branches"]
        ]
        places = [[one.splits for one in results] for _, results in each]
        splits = [functools.reduce(either, layouts) for layouts in zip(*places, strict=True)]
        return self._run_bodies(equation, operands, [body for body, _ in each], splits)

    def _body(
        self, closed: ClosedJaxpr, splits: Sequence[Splits], carry: range = range(0)
    ) -> tuple[LivenessProgram, list[Sharded]]:
        reader = _Reader(self.axes, self.platform)
        inputs = [reader.input(v, s) for v, s in zip(closed.jaxpr.invars, splits, strict=True)]
        results = reader.run(closed.jaxpr, closed.consts, inputs)
        for place, value in enumerate(results):
            before = inputs[carry[place]].buffer if place < len(carry) else -1
            if not is_running_sum(before, value.buffer, reader.nodes):
                reader.resolve(value)
        return dataclasses.replace(reader.read(inputs, results), is_rare=is_rare(closed)), results

    def read(self, inputs: Sequence[Sharded], outputs: Sequence[Sharded]) -> LivenessProgram:
        self.finish()
        reads, writes = ([x.buffer for x in side] for side in (inputs, outputs))
        return LivenessProgram(self.nodes, self.sizes, reads, writes)

    def loop(self, equation: JaxprEqn, operands: Sequence[Sharded]) -> list[Sharded]:
        """Reads a loop; its carry has the layout that another iteration leaves unchanged."""
        loop = inners(equation)[-1]
        operands = [self.resolve(one) for one in operands]
        shared, carried, rows = ([x.splits for x in part] for part in loop.split_operands(operands))
        counts = loop.num_shared, loop.num_carried
        while True:
            inside = [*shared, *carried, *(splits[1:] for splits in rows)]
            body, results = self._body(loop.program, inside, range(counts[0], sum(counts)))
            layouts = [one.splits for one in results]
            settled = list(map(either, carried, layouts))
            if settled == carried:
                break
            carried = settled
        # An initial carry that is a broadcast number takes the layout of the later carries.
        repeated = {n.writes[0] for n in self.nodes if n.name == "broadcast_in_dim"}
        begins = loop.split_operands(equation.invars)[1], loop.split_operands(operands)[1], carried
        for atom, value, splits in zip(*begins, strict=True):
            if value.buffer in repeated:
                self.sizes[value.buffer] = self.local_bytes(atom, splits)
                value.splits = splits
        places = [*carried, *((NONE, *splits) for splits in layouts[counts[1] :])]
        trips = 1 if loop.times is None else loop.times
        operands = loop.inputs(operands)
        values = self._run_bodies(equation, operands, [body], places, trips, counts)
        for value, result in zip(values, results, strict=True):
            if axes := union(one.axes for one in result.partial):
                value.partial = (Sum(self.nodes[-1], axes, self.sizes[value.buffer], trips),)
        return values

    def _run_bodies(
        self,
        equation: JaxprEqn,
        operands: Sequence[Sharded],
        bodies: Sequence[LivenessProgram],
        splits: Sequence[Splits],
        trips: int = 1,
        counts: tuple[int, int] = (0, 0),
    ) -> list[Sharded]:
        results = [self.input(v, s) for v, s in zip(equation.outvars, splits, strict=True)]
        reads, writes = (tuple(one.buffer for one in side) for side in (operands, results))
        name = equation.primitive.name
        node = Node(name, "loop", reads, writes, 0.0, (), tuple(bodies), trips, *counts)
        self.nodes.append(node)
        return results


_SPECIAL: MappingProxyType[str, Callable[[_Reader, JaxprEqn, Sequence[Sharded]], list[Sharded]]] = (
    MappingProxyType(
        {
            "platform_index": _Reader.platform_of,
            "cond": _Reader.choose,
            "scan": _Reader.loop,
            "while": _Reader.loop,
            "shard_map": _Reader.mapped,
            "optimization_barrier": _Reader.behind_barrier,
            "sharding_constraint": _Reader.constrained,
        }
    )
)
"""Primitives that need their own treatment, by name."""
