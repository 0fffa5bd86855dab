"""What one device does in a traced program: a tape of operations, their bytes, products and sends.

A traced step is a program over global arrays. Where its inputs lie says where everything else lies
(`placement`), and so how many bytes of each value a device has, how many products it multiplies and
what it sends. Calls are written out, branches for other platforms left away, and so is what nothing
reads; loops keep their body as a tape of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal

from ..core.compat import called_program, scan_counts
from ..core.typing import Array
from .liveness import postponed
from .placement import (
    ADDS,
    NONE,
    Axes,
    Sharded,
    Splits,
    Sum,
    either,
    flops_of,
    gathers,
    gathers_rows,
    handed,
    is_added_to,
    of_spec,
    once,
    placed,
    whole,
)
from .tape import COLLECTIVES, IN_PLACE, SPREAD, SUMS, VIEWS, Node, Sent, Tape, kind_of, live
from .walk import LOOPS


def tape_of(
    closed: ClosedJaxpr,
    splits: Sequence[Splits],
    sizes: Mapping[str, int],
    platform: str,
    num_kept: int = 0,
) -> Tape:
    """Reads what one device does.

    Args:
        closed: a closed jaxpr over global arrays.
        splits: where each input lies.
        sizes: the sizes of the mesh axes.
        platform: `"cpu"`, `"cuda"` or `"tpu"`, which branches are taken for.
        num_kept: how many of the first results lie where the inputs before them did, whatever the
            program says, as a state does.

    Returns:
        The tape, without what nothing reads.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 2))
        >>> program = jax.make_jaxpr(lambda x, w: jnp.sum(x @ w))(x, w)
        >>> tape = tape_of(program, [(frozenset({"dp"}), NONE), whole(2)], {"dp": 2}, "cpu")
        >>> tape.flops, [sent.kind for sent, _ in tape.sends()]
        (64.0, ['all-reduce'])
    """
    reader = _Reader(sizes, platform)
    inputs = [reader.input(v.aval, s) for v, s in zip(closed.jaxpr.invars, splits, strict=True)]
    outputs = reader.run(closed.jaxpr, closed.consts, inputs)
    outputs = [reader.resolved(value) for value in outputs]
    for place, variable in enumerate(closed.jaxpr.outvars[:num_kept]):
        outputs[place] = reader.placed(outputs[place], splits[place], variable.aval)
    reader.finish()
    places = [one.buffer for one in inputs], [one.buffer for one in outputs]
    tape = Tape(reader.nodes, reader.sizes, *places)
    tape = live(tape, range(len(tape.outputs)))
    return postponed(tape) if platform == "cuda" else tape


class _Reader:
    """Goes through a program and writes its tape."""

    def __init__(self, axes: Mapping[str, int], platform: str):
        self.axes, self.platform = axes, platform
        self.nodes: list[Node] = []
        self.sizes: list[int] = []
        self.spread: set[int] = {-1}
        self.wholes: dict[tuple[int, Splits], Sharded] = {}
        self.joint: list[tuple[Sum, Axes, Axes]] = []

    def input(self, aval: Any, splits: Splits) -> Sharded:
        return Sharded(self.buffer(aval, splits), splits)

    def buffer(self, aval: Any, splits: Splits) -> int:
        self.sizes.append(self.local_bytes(aval, splits))
        return len(self.sizes) - 1

    def ways(self, axes: Axes) -> int:
        return math.prod(self.axes[axis] for axis in axes)

    def local_bytes(self, aval: Any, splits: Splits) -> int:
        shape = getattr(aval, "shape", ())
        count = math.prod(-(-n // self.ways(a)) for n, a in zip(shape, splits, strict=True))
        return count * getattr(getattr(aval, "dtype", None), "itemsize", 8)

    def run(self, jaxpr: Any, consts: Sequence[Array], values: Sequence[Sharded]) -> list[Sharded]:
        known: dict[Any, Sharded] = {}
        for variable in jaxpr.constvars:
            known[variable] = self.input(variable.aval, whole(variable.aval.ndim))
        known.update(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> Sharded:
            if isinstance(atom, Literal):
                return Sharded(-1, whole(getattr(atom.aval, "ndim", 0)))
            return known[atom]

        for equation in jaxpr.eqns:
            results = self.equation(equation, [read(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[Sharded]) -> list[Sharded]:
        name = equation.primitive.name
        if name == "platform_index":
            return [Sharded(-1, (), known=self._platform(equation.params["platforms"]))]
        if name == "cond":
            return self._cond(equation, operands)
        if name == "scan":
            return self._scan(equation, operands)
        if name == "while":
            return self._while(equation, operands)
        if name == "shard_map":
            return self._mapped(equation, operands)
        inner = None if name in LOOPS or name == "pallas_call" else called_program(equation)
        if inner is not None:
            apart = equation.params.get("prevent_cse", False)
            apart = any(apart) if isinstance(apart, tuple) else apart
            if equation.params.get("differentiated") and apart:
                operands = self._behind_barrier(operands)
            return self.run(inner.jaxpr, inner.consts, operands[-len(inner.jaxpr.invars) :])
        if name == "optimization_barrier":
            return self._behind_barrier(operands)
        if name == "sharding_constraint":
            return [self._constrained(equation, operands[0])]
        return self._operation(equation, operands)

    def _behind_barrier(self, operands: list[Sharded]) -> list[Sharded]:
        """The same values, which are in memory before and cannot be computed again behind."""
        operands = [self.resolved(one) for one in operands]
        results = []
        for one in operands:
            if one.buffer >= 0:
                self.sizes.append(0)
                made = Sharded(len(self.sizes) - 1, one.splits)
                node = Node("barrier", "barrier", (one.buffer,), (made.buffer,))
                self.nodes.append(node)
                one = made
            results.append(one)
        return results

    def _platform(self, platforms: Any) -> int:
        for number, names in enumerate(platforms):
            if names is None or self.platform in names:
                return number
        return 0

    def resolved(self, value: Sharded, scatter: Axes = NONE) -> Sharded:
        """The whole sum where a value is a part of one; over some axes only a shard of it."""
        for one in value.partial:
            if not one.is_done:
                one.is_done = True
                self._add_up(one, scatter)
        value.partial = ()
        return value

    def placed(self, value: Sharded, splits: Splits, aval: Any) -> Sharded:
        """The value where it has to lie in the end; what is split and shall not be is gathered."""
        lost = frozenset().union(*value.splits) - frozenset().union(*splits)
        if not lost or value.buffer < 0:
            return value
        whole = self.input(aval, splits)
        sent = Sent("all-gather", tuple(sorted(lost)), self.sizes[whole.buffer])
        reads, writes = (value.buffer,), (whole.buffer,)
        self.nodes.append(Node("sharding_constraint", "other", reads, writes, 0.0, (sent,)))
        return whole

    def _add_up(self, one: Sum, scatter: Axes) -> None:
        shard, rest = one.axes & scatter, one.axes - scatter
        if shard and gathers_rows(one, shard, self.ways, self.sizes):
            self._send_sum(one, NONE, rest, one.num_bytes // self.ways(shard))
            return
        # XLA:CPU has no reduce-scatter, and takes a slice of the whole sum.
        # And of a sum that has to be whole none makes a scatter over some of its axes.
        if shard and (self.platform == "cpu" or (rest and one.is_whole)):
            shard, rest = NONE, one.axes
        if shard and rest and one.node.kind != "product":
            self.joint.append((one, shard, rest))
            return
        self._send_sum(one, shard, rest, one.num_bytes)

    def finish(self) -> None:
        """Adds up what is summed over all axes at once, if the compiler does not take them apart.

        XLA takes an all-reduce of which a rank keeps a shard apart into a scatter and an all-reduce
        of the shards only where the program has all-reduces over the same ranks as the latter
        already (AllReduceSplitter); a product has them, for its sums are one axis after another.
        """
        found = {s.axes for node in self.nodes for s in node.sent if s.kind == "all-reduce"}
        for one, shard, rest in self.joint:
            is_apart = tuple(sorted(rest)) in found
            split = (shard, rest) if is_apart else (NONE, shard | rest)
            self._send_sum(one, *split, one.num_bytes)
        self.joint.clear()
        self._scatter_what_is_sliced()

    def _scatter_what_is_sliced(self) -> None:
        """Of an all-reduce that is said, of which a rank reads its slice alone, is made a scatter.

        XLA does that (ReduceScatterCreator) where it has reduce-scatters.
        """
        if self.platform == "cpu":
            return
        for node in self.nodes:
            whole = [sent for sent in node.sent if sent.kind == "all-reduce"]
            if node.name not in SUMS or len(whole) != 1 or len(node.writes) != 1:
                continue
            readers = [other for other in self.nodes if node.writes[0] in other.reads]
            share = whole[0].num_bytes // self.ways(frozenset(whole[0].axes))
            if readers and all(
                other.name == "sharding_constraint" and self.sizes[other.writes[0]] == share
                for other in readers
            ):
                node.sent = (dataclasses.replace(whole[0], kind="reduce-scatter"),)

    def _send_sum(self, one: Sum, shard: Axes, rest: Axes, size: int) -> None:
        if shard:
            one.node.sent += (Sent("reduce-scatter", tuple(sorted(shard)), size * one.trips),)
            if one.is_base:
                one.node.sent += (Sent("all-gather", tuple(sorted(shard)), size),)
            size //= self.ways(shard)
        if rest:
            size *= one.trips if self.platform == "cpu" else 1
            one.node.sent += (Sent("all-reduce", tuple(sorted(rest)), size),)

    def _operation(self, equation: Any, operands: list[Sharded]) -> list[Sharded]:
        name = equation.primitive.name
        if name in ADDS:
            # Where the other summand lies split over the ranks, each needs its share of the sum.
            split = frozenset().union(
                *(a for one in operands if not one.partial for a in one.splits)
            )
            for one in operands:
                if any(part.axes & split for part in one.partial):
                    self.resolved(one, scatter=split)
        parts = handed(name, operands)
        if not parts:
            operands = [self.resolved(one) for one in operands]
        if name == "dot_general":
            operands = self._met(equation, operands)
        found = placed(equation, [one.splits for one in operands])
        if self._is_view(equation) and operands[0].buffer >= 0:
            return [Sharded(operands[0].buffer, found[0][0], parts)]
        kind = kind_of(name)
        node = Node(name, kind, tuple(one.buffer for one in operands), ())
        results = []
        for variable, (splits, summed) in zip(equation.outvars, found, strict=True):
            value = self.input(variable.aval, splits)
            value.partial = parts
            if summed and not parts:
                value.partial = (Sum(node, summed, self.sizes[value.buffer]),)
            results.append(value)
        node.writes = tuple(value.buffer for value in results)
        self._describe(node, equation, operands, results)
        if name in COLLECTIVES:
            node.sent = tuple(self._sent(equation, operands, results))
        self.nodes.append(node)
        return results

    def _describe(
        self, node: Node, equation: Any, operands: list[Sharded], results: list[Sharded]
    ) -> None:
        places = [one.splits for one in operands], results[0].splits
        node.flops = flops_of(equation, *places, self.axes, self.platform)
        if node.name in SPREAD:
            self.spread.update(node.writes)
        if node.name in IN_PLACE and operands[0].buffer in self.spread:
            # What starts as zeros is split as what it becomes.
            self.sizes[operands[0].buffer] = self.sizes[node.writes[0]]

    def _met(self, equation: Any, operands: list[Sharded]) -> list[Sharded]:
        """The operands of a product; where both are split by one axis, one of them is gathered.

        Of activations and a kernel these are the activations, as for sequence parallelism.
        """
        (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
        one, other = (operand.splits for operand in operands)
        paired = {*zip(left, right, strict=True), *zip(left_batch, right_batch, strict=True)}
        clash = {
            axis
            for a, axes in enumerate(one)
            for b, others in enumerate(other)
            if (a, b) not in paired
            for axis in axes & others
        }
        if not clash:
            return operands
        at = 0 if len(one) >= len(other) else 1
        splits = tuple(axes - clash for axes in operands[at].splits)
        key = operands[at].buffer, splits
        if key not in self.wholes:
            value = self.input(equation.invars[at].aval, splits)
            sent = Sent("all-gather", tuple(sorted(clash)), self.sizes[value.buffer])
            reads, writes = (operands[at].buffer,), (value.buffer,)
            self.nodes.append(Node("sharding_constraint", "other", reads, writes, 0.0, (sent,)))
            self.wholes[key] = value
        kept = list(operands)
        kept[at] = self.wholes[key]
        return kept

    @staticmethod
    def _is_view(equation: Any) -> bool:
        name = equation.primitive.name
        return name in VIEWS or (name == "transpose" and equation.outvars[0].aval.ndim <= 2)

    def _sent(self, equation: Any, operands: list[Sharded], results: list[Sharded]) -> list[Sent]:
        kind, parameter = COLLECTIVES[equation.primitive.name]
        axes = equation.params[parameter]
        axes = (axes,) if isinstance(axes, str) else tuple(a for a in axes if isinstance(a, str))
        sides = results if kind == "all-gather" else operands
        sizes = [self.sizes[one.buffer] for one in sides if one.buffer >= 0]
        return [Sent(kind, axes, sum(sizes))] if axes and self.ways(frozenset(axes)) > 1 else []

    def _constrained(self, equation: Any, operand: Sharded) -> Sharded:
        ((splits, _),) = placed(equation, [operand.splits])
        axes = frozenset().union(*splits)
        summed = frozenset().union(*(one.axes for one in operand.partial))
        if not summed & axes:
            # What has to be whole behind a loop is added up there, and scattered once.
            for one in operand.partial:
                one.is_whole = True
                # XLA:CPU adds up in every turn what a loop adds to; the others behind the loop
                # (WhileLoopAllReduceCodeMotion).
                one.trips = one.trips if self.platform == "cpu" else 1
        if splits != operand.splits or summed & axes:
            self.resolved(operand, scatter=axes)
        before = frozenset().union(*operand.splits)
        gathered, moved = (
            before - axes,
            {
                axis
                for dim, one in enumerate(splits)
                for axis in one & before
                if axis not in operand.splits[dim]
            },
        )
        if splits == operand.splits or operand.buffer < 0:
            return Sharded(operand.buffer, splits, operand.partial)
        # Equal constraints on one value are one transfer, as for queries, keys and values.
        key = operand.buffer, splits
        if key in self.wholes:
            return self.wholes[key]
        value = self.input(equation.outvars[0].aval, splits)
        node = Node("sharding_constraint", "fused", (operand.buffer,), (value.buffer,))
        if gathered or moved:
            self.wholes[key] = value
            node.kind = "other"
            kind = "all-gather" if gathered else "all-to-all"
            over = tuple(sorted(gathered or moved))
            node.sent = (Sent(kind, over, self.sizes[value.buffer]),)
        self.nodes.append(node)
        return value

    def _mapped(self, equation: Any, operands: list[Sharded]) -> list[Sharded]:
        params = equation.params
        manual = params.get("newly_manual_axes", params.get("manual_axes"))
        inner: list[Sharded] = []
        for variable, operand, spec in zip(
            equation.invars, operands, params["in_specs"], strict=True
        ):
            said = of_spec(spec, variable.aval.ndim)
            self.resolved(operand, scatter=frozenset().union(*said))
            keep = once([(a - manual) | s for a, s in zip(operand.splits, said, strict=True)])
            lost = frozenset().union(*operand.splits) & manual - frozenset().union(*said)
            value = operand
            if keep != operand.splits and operand.buffer >= 0:
                places = operand.splits, keep
                size = functools.partial(self.local_bytes, variable.aval)
                self.nodes += gathers(self.nodes, operand.buffer, places, lost, size, self.sizes)
                value = Sharded(self.nodes[-1].writes[0], keep)
            inner.append(Sharded(value.buffer, tuple(axes - manual for axes in keep)))
        program = params["jaxpr"]
        results = self.run(getattr(program, "jaxpr", program), (), inner)
        found = []
        for variable, value, spec in zip(
            equation.outvars, results, params["out_specs"], strict=True
        ):
            self.resolved(value)
            said = of_spec(spec, variable.aval.ndim)
            splits = once([a | s for a, s in zip(value.splits, said, strict=True)])
            found.append(Sharded(value.buffer, splits))
        return found

    def _cond(self, equation: Any, operands: list[Sharded]) -> list[Sharded]:
        branches, which = equation.params["branches"], operands[0].known
        if which is None and equation.params.get("branches_platforms") is not None:
            which = self._platform(equation.params["branches_platforms"])
        if which is not None:
            chosen = branches[which]
            return self.run(chosen.jaxpr, chosen.consts, operands[1:])
        operands = [self.resolved(one) for one in operands]
        bodies, splits = [], None
        for branch in branches:
            body, results = self._body(branch, [one.splits for one in operands[1:]])
            bodies.append(body)
            own = [one.splits for one in results]
            joined = own if splits is None else list(map(either, splits, own))
            splits = joined
        return self._loop(equation, operands[1:], tuple(bodies), splits or [], 1, 0, 0)

    def _body(
        self, closed: ClosedJaxpr, splits: Sequence[Splits], carry: range = range(0)
    ) -> tuple[Tape, list[Sharded]]:
        reader = _Reader(self.axes, self.platform)
        inputs = [reader.input(v.aval, s) for v, s in zip(closed.jaxpr.invars, splits, strict=True)]
        results = reader.run(closed.jaxpr, closed.consts, inputs)
        for place, value in enumerate(results):
            own = inputs[carry[place]].buffer if place < len(carry) else -1
            if not is_added_to(own, value.buffer, reader.nodes):
                reader.resolved(value)
        reader.finish()
        places = [one.buffer for one in inputs], [one.buffer for one in results]
        return Tape(reader.nodes, reader.sizes, *places), results

    def _scan(self, equation: Any, operands: list[Sharded]) -> list[Sharded]:
        consts, carry = scan_counts(equation)
        operands = [self.resolved(one) for one in operands]
        inner = equation.params["jaxpr"]
        splits = [one.splits for one in operands]
        rows = [s[1:] for s in splits[consts + carry :]]
        while True:
            carries = range(consts, consts + carry)
            body, results = self._body(inner, [*splits[: consts + carry], *rows], carries)
            found = [one.splits for one in results]
            carried = list(map(either, splits[consts : consts + carry], found[:carry]))
            if carried == splits[consts : consts + carry]:
                break
            splits[consts : consts + carry] = carried
        self._lay_out(equation.invars[consts:], operands[consts:], carried)
        stacked = [(NONE, *s) for s in found[carry:]]
        length = equation.params["length"]
        places = [*carried, *stacked]
        values = self._loop(equation, operands, (body,), places, length, consts, carry)
        for value, result in zip(values, results, strict=True):
            axes = frozenset().union(*(one.axes for one in result.partial))
            if axes:
                sums = (Sum(self.nodes[-1], axes, self.sizes[value.buffer], length),)
                value.partial = sums
        return values

    def _lay_out(self, given: Sequence[Any], values: list[Sharded], splits: list[Splits]) -> None:
        """Splits what a loop begins with as what it hands on, where that is one number repeated."""
        repeated = {n.writes[0] for n in self.nodes if n.name == "broadcast_in_dim"}
        for variable, value, split in zip(given, values, splits, strict=False):
            if value.buffer in repeated:
                self.sizes[value.buffer] = self.local_bytes(variable.aval, split)
                value.splits = split

    def _while(self, equation: Any, operands: list[Sharded]) -> list[Sharded]:
        params = equation.params
        operands = [self.resolved(one) for one in operands][params["cond_nconsts"] :]
        consts = params["body_nconsts"]
        carry = len(operands) - consts
        body, results = self._body(params["body_jaxpr"], [one.splits for one in operands])
        found = [one.splits for one in results]
        return self._loop(equation, operands, (body,), found, 1, consts, carry)

    def _loop(
        self,
        equation: Any,
        operands: list[Sharded],
        bodies: tuple[Tape, ...],
        splits: Sequence[Splits],
        trips: int,
        consts: int,
        carry: int,
    ) -> list[Sharded]:
        results = [self.input(v.aval, s) for v, s in zip(equation.outvars, splits, strict=True)]
        reads, writes = (tuple(one.buffer for one in side) for side in (operands, results))
        name = equation.primitive.name
        node = Node(name, "loop", reads, writes, 0.0, (), bodies, trips, consts, carry)
        self.nodes.append(node)
        return results
