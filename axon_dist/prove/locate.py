"""Locates the first operation whose value is not that of one device, and classifies the mistake.

From a wrong output the search goes back through values that do not match those of one device. A
mismatch that later turns right again, as the blocks of a ring do, is never visited.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..core.compat import Frame, scan_counts, source_frames
from ..ir.factors import Role, factors
from . import relations
from .program import DRAWS, Operation, Program, Value, reads_of
from .relations import MAX, MEAN, MIN, SUM, RankValues, Relation
from .report import Kind

_SUMS = frozenset({"psum", "psum_invariant", "psum2", "reduce_scatter", "psum_scatter"})
_PICKS = frozenset({"argmax", "argmin", "top_k", "approx_top_k", "sort"})
_SCANS = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "scan"})
_ROOTS = frozenset({"sqrt", "rsqrt", "pow", "integer_pow", "cbrt"})
_SQUARES = frozenset({"square", "integer_pow", "pow", "abs"})
_TAKES = frozenset({"slice", "dynamic_slice", "gather", "squeeze", "dynamic_index_in_dim"})
_PLAIN = frozenset(
    {
        "convert_element_type", "reshape", "broadcast_in_dim", "squeeze", "pvary", "pcast", "copy",
        "stop_gradient", "transpose", "neg", "reduce_precision", "name", "expand_dims",
    }
)  # fmt: skip
"""Operations that pass a value on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A program with the values that one run of it recorded.

    Args:
        program: the program that ran.
        values: the numbers of each recorded value, with the ranks as leading dims.
    """

    program: Program
    values: Mapping[Value, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The operation to blame.

    Args:
        kind: the kind of mistake.
        operation: the operation with the first wrong value; None if an output itself is wrong.
        axes: the mesh axes at fault, if known.
        frames: the source lines of the operation, the most useful first.
        gap: by how much its value differs, and by how much rounding explains.
        hard_coded: a mesh size that the program hard-codes, if that is the cause.
    """

    kind: Kind
    operation: Operation | None
    axes: tuple[str, ...]
    frames: tuple[Frame, ...]
    gap: tuple[float, float] = (math.inf, 0.0)
    hard_coded: int | None = None


def align(one: Program, other: Program) -> dict[Operation, Operation]:
    """Maps the operations of the first program to the corresponding ones of the second."""

    def key(operation: Operation) -> tuple[str, tuple[int, ...]]:
        return operation.name, tuple(len(value.shape) for value in operation.results)

    names = [operation.name for operation in one.operations]
    if names == [operation.name for operation in other.operations]:
        return dict(zip(one.operations, other.operations, strict=True))
    pairs = matched(list(map(key, one.operations)), list(map(key, other.operations)))
    return {one.operations[first]: other.operations[second] for first, second in pairs}


def matched(keys: Sequence[Hashable], others: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Returns the positions at which two sequences agree, as a difference of two texts does.

    Example:
        >>> matched("abc", "axc")
        [(0, 0), (2, 2)]
    """
    if keys == others:
        return [(number, number) for number in range(len(keys))]
    blocks = difflib.SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks()
    return [(b.a + step, b.b + step) for b in blocks for step in range(b.size)]


class Search:
    """One search, on one mesh.

    Args:
        real: the program on the mesh, and its values.
        oracle: the program on one device, and its values.
        bounds: by how much rounding may change each value of one device.
        sizes: the sizes of the mesh axes.
        aligned: the corresponding operations of the two programs.
    """

    def __init__(
        self,
        real: Recorded,
        oracle: Recorded,
        bounds: Mapping[Value, float],
        sizes: Mapping[str, int],
        aligned: Mapping[Operation, Operation],
    ) -> None:
        self._real = real
        self._oracle = oracle
        self._bounds = bounds
        self._sizes = dict(sizes)
        self._aligned = aligned
        self._outer: dict[Value, Any] = {}
        self._specs: dict[Value, Any] = {}
        self._users: dict[Value, list[Operation]] = {}
        for operation in real.program.operations:
            for value in reads_of(operation.reads):
                self._users.setdefault(value, []).append(operation)
            self._enter(operation)

    def _enter(self, operation: Operation) -> None:
        """Records which outer value is the input of a region."""
        if operation.is_map:
            region = operation.regions[0]
            specs = operation.equation.params["in_specs"]
            for value, read, spec in zip(region.inputs, operation.reads, specs, strict=True):
                self._outer[value] = read
                self._specs[value] = spec
        turn = operation.turn
        if turn is not None:
            given = operation.first_turn(operation.reads, lambda read: read)
            for value, read in zip(turn.inputs, given or [], strict=True):
                self._outer[value] = read

    def _numbers(self, value: Value) -> tuple[RankValues, np.ndarray, float] | None:
        """Returns the value on the mesh, on one device, and the bound; None if one is unknown."""
        maker = value.maker
        other = self._aligned.get(maker) if maker is not None else None
        if maker is None or other is None:
            return None
        at = next(n for n, result in enumerate(maker.results) if result is value)
        if at >= len(other.results):
            return None
        whole = self._oracle.values.get(other.results[at])
        by_rank = self._real.values.get(value)
        if whole is None or by_rank is None:
            return None
        bound = self._bounds[other.results[at]]
        axes = other.results[at].axes
        if math.prod(whole.shape[: len(axes)]) > 1:
            # Both meshes have several devices, so they are compared rank by rank.
            return (RankValues(by_rank, ()), whole, bound) if whole.shape == by_rank.shape else None
        return RankValues(by_rank, value.axes), whole.reshape(whole.shape[len(axes) :]), bound

    @functools.cache  # noqa: B019
    def relation(self, value: Value) -> Relation | None:
        """Returns how the ranks' values make up that of one device; None if nothing explains it."""
        if value.maker is None:
            outer = self._outer.get(value)
            known = Relation() if not isinstance(outer, Value) else self.relation(outer)
            is_split = known is not None and value in self._specs
            return self._by_spec(value) if is_split else known
        numbers = self._numbers(value)
        if numbers is None:
            return None
        by_rank, whole, bound = numbers
        found = relations.find(by_rank, whole, bound, self._sizes)
        # The ranks' indices may add up to the index in the whole array by chance.
        is_chance = found is not None and not found.is_whole and value.maker.name in _PICKS
        return None if is_chance else found

    def _by_spec(self, value: Value) -> Relation:
        """Returns the relation of a right value that the `in_specs` of a `shard_map` split."""
        splits = []
        for part in self._specs[value]:
            names = relations.names_of(part)
            splits.append(tuple(name for name in names if self._sizes.get(name, 1) > 1))
        return Relation(tuple(splits))

    @functools.cache  # noqa: B019
    def is_coordinate(self, value: Value) -> bool:
        """Whether a value depends only on the rank's index and constants."""
        if value.maker is None:
            outer = self._outer.get(value)
            return isinstance(outer, Value) and self.is_coordinate(outer)
        if value.maker.name == "axis_index":
            return True
        reads = reads_of(value.maker.reads)
        if not reads or value.maker.regions:
            return False
        kinds = [self.is_coordinate(read) for read in reads]
        return any(kinds) and all(
            kind or self._is_fixed(read) for kind, read in zip(kinds, reads, strict=True)
        )

    @functools.cache  # noqa: B019
    def _is_fixed(self, value: Value) -> bool:
        if value.maker is None:
            return value.constant is not None
        return not value.maker.regions and all(map(self._is_fixed, reads_of(value.maker.reads)))

    def blame(self, output: Any, is_whole: bool = False) -> Found | None:
        """Returns the operation that causes a wrong output.

        Args:
            output: the value of the program's output on the mesh.
            is_whole: whether the value itself is right; then no operation is to blame.
        """
        if not isinstance(output, Value) or is_whole:
            return None
        frontier, visited, exits = self._back(output)
        # A rank's own indices, such as `labels - axis_index * size`, have no counterpart on one
        # device, and are right all the same. So they are blamed only if nothing else can be.
        doubtful = [operation for operation in frontier if self._is_index(operation)]
        certain = [operation for operation in frontier if operation not in doubtful]
        found = self._judged(certain, exits, visited) or self._judged(doubtful, [], visited)
        firsts = [o for o in found if o.kind in (Kind.POSITION, Kind.ONE_KEY)]
        known = [o for o in found if o.kind is not Kind.DIFFERS]
        return next(iter(firsts or known or found), None)

    def _judged(
        self,
        frontier: Sequence[Operation],
        exits: Sequence[tuple[Operation, Value]],
        visited: set[Operation],
    ) -> list[Found]:
        found = [self._judge(operation, visited) for operation in frontier]
        found += [self._at_exit(at, inner, visited) for at, inner in exits]
        return [one for one in found if one is not None]

    def _is_index(self, operation: Operation) -> bool:
        """Whether an operation only computes integers or booleans from the rank's index."""
        dtypes = [getattr(result.aval, "dtype", np.float32) for result in operation.results]
        if any(jnp.issubdtype(dtype, np.inexact) for dtype in dtypes):
            return False
        return any(self._depends_on_rank(read) for read in reads_of(operation.reads))

    @functools.cache  # noqa: B019
    def _depends_on_rank(self, value: Value) -> bool:
        """Whether the rank's index is among the values that a value is computed from."""
        if value.maker is None:
            outer = self._outer.get(value)
            return isinstance(outer, Value) and self._depends_on_rank(outer)
        if value.maker.name == "axis_index":
            return True
        if value.maker.regions:
            return False
        return any(map(self._depends_on_rank, reads_of(value.maker.reads)))

    def start(self, output: Any) -> Operation | None:
        """Returns the first operation with differing results on the way to an output, or None."""
        if not isinstance(output, Value):
            return None
        frontier, _, exits = self._back(output)
        found = [*frontier, *(operation for operation, _ in exits)]
        return min(found, key=lambda o: o.number, default=None)

    def lines_of(self, operation: Operation) -> list[Frame]:
        """Returns the source lines of an operation, the innermost first."""
        return source_frames(operation.equation, operation.callers)[0]

    def found_at(
        self, operation: Operation, kind: Kind = Kind.DIFFERS, axes: Sequence[str] = ()
    ) -> Found:
        """Returns an operation with its source lines, and by how much its value differs."""
        return self._found(kind, operation, axes)

    def _back(
        self, output: Value
    ) -> tuple[list[Operation], set[Operation], list[tuple[Operation, Value]]]:
        """Walks back from a wrong value.

        Returns:
            The operations at which the mistake starts, all operations visited, and the regions
            whose outputs are right inside but wrong outside.
        """
        frontier: set[Operation] = set()
        visited: set[Operation] = set()
        exits: list[tuple[Operation, Value]] = []
        waiting = [output]
        seen: set[Value] = set()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            if value.maker is None:
                outer = self._outer.get(value)
                if isinstance(outer, Value):
                    waiting.append(outer)
                continue
            operation = value.maker
            visited.add(operation)
            inside = self._inside(operation, value, exits)
            if inside is not None:
                waiting.append(inside)
                continue
            bad = [r for r in reads_of(operation.reads) if self.relation(r) is None]
            ahead = [read for read in bad if not self.is_coordinate(read)]
            if ahead:
                waiting += ahead
            elif not any(operation is one[0] for one in exits):
                frontier.add(operation)
        return sorted(frontier, key=lambda o: o.number), visited, exits

    def _inside(
        self, operation: Operation, value: Value, exits: list[tuple[Operation, Value]]
    ) -> Value | None:
        """Returns the value inside a region from which a wrong result comes."""
        at = operation.results.index(value)
        if operation.is_map:
            inner = operation.regions[0].outputs[at]
            if not isinstance(inner, Value):
                return None
            if self.relation(inner) is None:
                return inner
            exits.append((operation, inner))
            return None
        turn = operation.turn
        if turn is None or at >= len(turn.outputs):
            return None
        if operation.name == "scan" and self._along_a_split(operation) is not None:
            return None
        # A row that is right in this turn may be wrong in the next if the carry is wrong.
        for inner in (turn.outputs[at], *turn.outputs):
            if not isinstance(inner, Value) or self.relation(inner) is not None:
                continue
            if not self.is_coordinate(inner):
                return inner
        return None

    def _at_exit(self, operation: Operation, value: Value, visited: set[Operation]) -> Found | None:
        """Judges a value that is right on each rank but combined wrongly by the `out_specs`."""
        relation = self.relation(value)
        if relation is None:
            return None
        if not relation.is_whole:
            kind = Kind.NOT_REDUCED
            start = self._origin(value, relation)
            return self._found(kind, start, relation.over, gradient=True)
        if self._outer_bad(operation, value):
            return None
        axes = tuple(relation.split_axes)
        return self._found(Kind.GATHER_ORDER, operation, axes)

    def _outer_bad(self, operation: Operation, value: Value) -> bool:
        return (
            value.maker is None
            and isinstance(self._outer.get(value), Value)
            and (self.relation(value) is None)
        )

    def _origin(self, value: Value, relation: Relation) -> Operation | None:
        """Returns the operation that made a value a term of a reduction over some axes."""
        while True:
            while value.maker is None:
                outer = self._outer.get(value)
                if not isinstance(outer, Value):
                    return None
                value = outer
            follows = [r for r in reads_of(value.maker.reads) if self._is_part(r, relation)]
            if not follows:
                return value.maker
            value = follows[0]

    def _is_part(self, value: Value, relation: Relation) -> bool:
        found = self.relation(value)
        if found is None or found.reduction is None:
            return False
        return set(found.over) <= set(relation.over)

    def _judge(self, operation: Operation, visited: set[Operation]) -> Found | None:
        """Classifies the mistake of the first wrong operation."""
        reads = reads_of(operation.reads)
        known = [(r, relation) for r in reads if (relation := self.relation(r)) is not None]
        parts = [(read, relation) for read, relation in known if not relation.is_whole]
        name = operation.name
        if name in DRAWS:
            return self._found(Kind.ONE_KEY, operation, ())
        if name == "iota":
            return self._found(Kind.POSITION, operation, ())
        if (scaled := self._scaled(operation, parts, visited)) is not None:
            return scaled
        if (ordered := self._along_a_split(operation)) is not None:
            return ordered
        if parts:
            return self._of_parts(operation, parts, visited)
        return self._of_whole(operation, reads)

    def _along_a_split(self, operation: Operation) -> Found | None:
        """Judges an operation that needs all of a dim, of which each rank has a part."""
        axes: set[str] = set()
        for number, read in enumerate(operation.reads):
            if not isinstance(read, Value):
                continue
            relation = self.relation(read)
            if relation is None or not relation.is_whole:
                continue
            # A relation leaves out the dims that hold one row for each rank.
            is_same_rank = len(relation.splits) == len(read.shape)
            for dim, split in enumerate(relation.splits):
                is_needed = _needs_all(operation, number, dim if is_same_rank else None)
                axes |= set(split) if is_needed else set()
        if not axes:
            return None
        if operation.name in _SCANS:
            kind = Kind.LOCAL_SCAN
        else:
            is_plain_sort = operation.name == "sort" and len(operation.results) == 1
            kind = Kind.LOCAL_ORDER if is_plain_sort else Kind.LOCAL_ARGMAX
        return self._found(kind, operation, tuple(sorted(axes)))

    def _scaled(
        self, operation: Operation, parts: list[tuple], visited: set[Operation]
    ) -> Found | None:
        """Judges a value that is wrong only by a factor, which is a size of the mesh."""
        numbers = self._numbers(operation.results[0])
        if numbers is None or len(operation.results) != 1:
            return None
        factor = relations.scaled_by(*numbers, self._sizes)
        if not factor:
            return None
        size = round(max(factor, 1 / factor))
        axes = tuple(operation.equation.params.get("axes", ())) or tuple(
            name for name, count in self._sizes.items() if count == size
        )
        axes = tuple(axis for axis in axes if isinstance(axis, str))
        written = self._hard_coded(size, visited)
        sums = operation.name in _SUMS or (operation.name == "reduce_sum" and parts)
        kind = Kind.SUM_FOR_MEAN if factor > 1 else Kind.MEAN_FOR_SUM
        blamed = operation
        if sums and factor > 1 and self._is_transposed_sum(operation):
            return self._found(Kind.SUMMED_BY_GRAD, operation, axes)
        if sums and factor > 1:
            again = self._reduced_again(operation, visited)
            if again is not None:
                kind, blamed = Kind.TWICE, again
            elif not parts:
                kind = Kind.TWICE
        if written is not None:
            return dataclasses.replace(self._found(kind, written, axes), hard_coded=size)
        return self._found(kind, blamed, axes, gradient=True)

    def _is_transposed_sum(self, operation: Operation) -> bool:
        """Whether `jax.grad` made an operation from a sum of the user's own."""
        frames, asked = source_frames(operation.equation, operation.callers)
        if asked is None or not frames:
            return False
        for other in self._real.program.operations:
            if other.number < operation.number and other.name in _SUMS:
                own, differentiated = source_frames(other.equation, other.callers)
                if differentiated is None and own[:1] == frames[:1]:
                    return True
        return False

    def _reduced_again(self, operation: Operation, visited: set[Operation]) -> Operation | None:
        axes = operation.equation.params.get("axes")
        for other in sorted(visited, key=lambda o: o.number):
            is_later = other.number > operation.number and other.name in _SUMS
            if is_later and other.equation.params.get("axes") == axes:
                return other
        return None

    def _hard_coded(self, size: int, visited: set[Operation]) -> Operation | None:
        """Returns a visited operation that divides by a literal equal to the mesh's size."""
        for operation in visited:
            other = self._aligned.get(operation)
            if other is None or operation.name not in ("div", "mul"):
                continue
            numbers = _numbers_in(operation)
            if numbers == _numbers_in(other) and any(
                math.isclose(x, size) or math.isclose(x, 1 / size) for x in numbers
            ):
                return operation
        return None

    def _of_parts(
        self, operation: Operation, parts: list[tuple], visited: set[Operation]
    ) -> Found | None:
        """Judges an operation that reads terms of a reduction as if they were its result."""
        value, relation = parts[0]
        start = self._origin(value, relation)
        name = operation.name
        reductions = {relation.reduction for _, relation in parts}
        others = len(reads_of(operation.reads)) - len(parts)
        is_summed = any(
            o.number > operation.number and (o.name in _SUMS or o.name == "reduce_sum")
            for o in visited
        )
        is_addition = name in ("add", "add_any", "sub") and others == 1
        if is_addition and is_summed and reductions == {SUM}:
            return self._found(Kind.BIAS, operation, relation.over)
        if reductions & {MAX, MIN}:
            is_softmax = any(o.name in ("exp", "exp2") for o in visited)
            kind = Kind.LOCAL_SOFTMAX if is_softmax else Kind.LOCAL_STATISTICS
            return self._found(kind, start, relation.over)
        if self._comes_from(value, "exp") and name in ("div", "log", "log1p", "max", "pow"):
            return self._found(Kind.LOCAL_SOFTMAX, start, relation.over)
        if reductions == {SUM} and (name == "div" or self._is_divisor(operation, visited)):
            return self._found(Kind.MEAN_OF_MEANS, operation, relation.over)
        if name in _ROOTS and reductions == {SUM} and self._is_of_squares(start):
            return self._found(Kind.LOCAL_NORM, start, relation.over)
        is_gradient = start is not None and source_frames(start.equation)[1] is not None
        if reductions == {MEAN} and not is_gradient and name not in _TAKES:
            return self._found(Kind.LOCAL_STATISTICS, start, relation.over)
        return self._found(Kind.NOT_REDUCED, start, relation.over, gradient=True)

    def _is_divisor(self, operation: Operation, visited: set[Operation]) -> bool:
        """Whether the operation guards a count against zero, and the count divides later."""
        if operation.name not in ("max", "add", "clamp", "select_n", "eq", "gt", "ne"):
            return False
        value = operation.results[0]
        for _ in range(8):
            users = [o for o in self._users.get(value, []) if o in visited]
            if any(o.name == "div" and o.reads[-1] is value for o in users):
                return True
            if len(users) != 1 or not users[0].results:
                return False
            value = users[0].results[0]
        return False

    def _comes_from(self, value: Value, name: str, depth: int = 6) -> bool:
        """Whether a value comes from an operation of this name, at most a few steps back."""
        for _ in range(depth):
            maker = value.maker
            if maker is None:
                return False
            if maker.name == name:
                return True
            reads = reads_of(maker.reads)
            if not reads or maker.name not in _PLAIN | {"reduce_sum", "add", "mul"}:
                return False
            value = reads[0]
        return False

    def _is_of_squares(self, start: Operation | None) -> bool:
        if start is None:
            return False
        if start.name == "dot_general":
            return len({_origin_of(read) for read in reads_of(start.reads)}) == 1
        makers = [read.maker for read in reads_of(start.reads)]
        return any(maker is not None and _is_square(maker) for maker in makers)

    def _of_whole(self, operation: Operation, reads: Sequence[Value]) -> Found | None:
        """Judges an operation with right operands and a wrong result."""
        coordinates = [r for r in reads if self.relation(r) is None and self.is_coordinate(r)]
        if operation.name == "slice" and self._aligned.get(operation) is None:
            # On one device the slice has the whole length, and JAX omits it.
            is_start = not any(operation.equation.params["start_indices"])
            return self._found(Kind.POSITION if is_start else Kind.DIFFERS, operation, ())
        for result in operation.results:
            numbers = self._numbers(result)
            if numbers is None or self.relation(result) is not None:
                continue
            if relations.is_first_part(*numbers, self._sizes):
                return self._found(Kind.POSITION, operation, ())
            if relations.is_permuted(*numbers, self._sizes):
                axes = operation.equation.params.get("axis_name", ())
                axes = (axes,) if isinstance(axes, str) else tuple(axes)
                return self._found(Kind.GATHER_ORDER, operation, axes)
        if coordinates:
            return self._found(Kind.POSITION, operation, ())
        return self._found(Kind.DIFFERS, operation, ())

    def _found(
        self,
        kind: Kind,
        operation: Operation | None,
        axes: Sequence[str],
        gradient: bool = False,
    ) -> Found:
        frames: tuple[Frame, ...] = ()
        if operation is not None:
            inner, asked = source_frames(operation.equation, operation.callers)
            inner = [frame for frame in inner if "site-packages" not in frame.file] or inner
            if gradient and asked is not None and "site-packages" not in asked.file:
                inner = [asked, *(frame for frame in inner if frame != asked)]
            frames = tuple(inner)
        if not axes:
            axes = [name for name, size in self._sizes.items() if size > 1]
        gap = (math.inf, 0.0)
        if operation is not None and operation.results:
            numbers = self._numbers(operation.results[0])
            if numbers is not None:
                by_rank, whole, bound = numbers
                if by_rank.shape == whole.shape:
                    gap = max(relations.differs(r, whole, 0.0) for r in by_rank.ranks()), bound
                else:
                    gap = math.inf, bound
        return Found(kind, operation, tuple(axes), frames, gap)


def _needs_all(operation: Operation, number: int, dim: int | None) -> bool:
    """Whether a result of a scan, sort or argmax depends on all places along an operand's dim.

    If the dim is not known, it is taken for the one in question.
    """
    if operation.name == "scan":
        return dim == 0 and number >= sum(scan_counts(operation.equation))
    known = factors(operation.equation) if operation.name in _SCANS | _PICKS else None
    if known is None or dim is None:
        return known is not None
    return known.role(number, dim) in (Role.ALONG, Role.REDUCED)


def _origin_of(value: Value) -> Value:
    """Returns the value before the operations that only pass it on."""
    while value.maker is not None and value.maker.name in _PLAIN:
        before = reads_of(value.maker.reads)
        if not before:
            break
        value = before[0]
    return value


def _is_square(maker: Operation) -> bool:
    while maker.name in _PLAIN | {"real"}:
        inner = next((read.maker for read in reads_of(maker.reads)), None)
        if inner is None:
            return False
        maker = inner
    return maker.name in _SQUARES or (maker.name == "mul" and len(set(maker.reads)) == 1)


def _numbers_in(operation: Operation) -> list[float]:
    found = []
    for read in operation.reads:
        number = read.val if isinstance(read, Literal) else None
        if number is None and isinstance(read, Value):
            maker = read.maker
            while maker is not None and maker.name in _PLAIN and maker.reads:
                inner = maker.reads[0]
                if isinstance(inner, Literal):
                    number = inner.val
                    break
                maker = inner.maker
        if number is not None and np.ndim(number) == 0:
            found.append(float(number))
    return found
