"""Locates the first operation whose value is not that of one device, and classifies the mistake.

From a wrong output the search goes back through values that do not match those of one device. A
mismatch that later turns right again, as the blocks of a ring do, is never visited.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..core.compat import Frame, is_library_file, scan_counts, source_frames
from ..ir.factors import ALONG_ONE, RESHAPES, Role, factors
from .meshes import title_of
from .program import COPIES, DRAWS, RANK_SUMS, Operation, Region, Value, is_key
from .relations import MAX, MEAN, MIN, SUM, Pair, RankValues, Relation, names_of, splits_of
from .report import Finding, Kind, places_of
from .trace import Run

_PICKS = frozenset({"argmax", "argmin", "top_k", "approx_top_k", "sort"})
_SCANS = (ALONG_ONE - _PICKS) | {"scan"}
_ROOTS = frozenset({"sqrt", "rsqrt", "pow", "integer_pow", "cbrt"})
_SQUARES = frozenset({"square", "integer_pow", "pow", "abs"})
_TAKES = frozenset({"slice", "dynamic_slice", "gather", "squeeze", "dynamic_index_in_dim"})
_PLAIN = COPIES | RESHAPES | {"convert_element_type", "transpose", "neg", "reduce_precision"}
"""Operations that pass a value on."""

_ADDS = frozenset({"add", "add_any", "sub"})
_ADDED = RANK_SUMS | {"reduce_sum"}
_LINEAR = frozenset({"reduce_sum", "add", "mul"})
_EXPONENTS = frozenset({"exp", "exp2"})
_OF_SUMS = frozenset({"div", "log", "log1p", "max", "pow"})
"""Operations on the sum of a softmax."""

_GUARDS = frozenset({"max", "add", "clamp", "select_n", "eq", "gt", "ne"})
"""Operations that keep a count from being zero."""

_RANK = frozenset({"rank"})
_INPUT = frozenset({"input"})


def align(one: Region, other: Region) -> dict[Operation, Operation]:
    """Maps the operations of the first program to the corresponding ones of the second."""
    first, second = list(one.walk()), list(other.walk())
    if [o.name for o in first] == [o.name for o in second]:
        return dict(zip(first, second, strict=True))
    keys = [
        [(o.name, *(len(v.shape) for v in o.results)) for o in each] for each in (first, second)
    ]
    return {first[a]: second[b] for a, b in matched(*keys)}


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


def frames_of(operation: Operation, is_gradient: bool = False) -> tuple[Frame, ...]:
    """Returns the source lines of an operation, the most useful first.

    Args:
        operation: the operation.
        is_gradient: whether the call that asked for a gradient is more useful than the line of the
            forward pass.
    """
    inner, asked = source_frames(operation.equation, operation.callers)
    inner = [frame for frame in inner if not is_library_file(frame.file)] or inner
    if is_gradient and asked is not None and not is_library_file(asked.file):
        inner = [asked, *(frame for frame in inner if frame != asked)]
    return tuple(inner)


def finding(
    sizes: Mapping[str, int],
    kind: Kind,
    operation: Operation | None,
    axes: Collection[Any] = (),
    is_gradient: bool = False,
) -> Finding:
    """Returns the finding for a mistake at an operation, if that is known.

    Args:
        sizes: the sizes of the mesh axes.
        kind: the kind of mistake.
        operation: the operation with the first wrong value.
        axes: the mesh axes at fault; by default all that have several ranks.
        is_gradient: whether to give the call that asked for a gradient first.
    """
    places = () if operation is None else places_of(frames_of(operation, is_gradient))
    several = tuple(name for name, size in sizes.items() if size > 1)
    at_fault = tuple(name for name in sizes if name in axes) or several
    name = "" if operation is None else operation.name
    return Finding(kind, places, at_fault, title_of(sizes), name)


class Search:
    """One search, on one mesh.

    Args:
        program: the program on the mesh.
        values: the numbers that a run of it recorded.
        truth: a run on one device, which recorded all values.
        sizes: the sizes of the mesh axes.
        aligned: the operations of the program on one device that correspond to those on the mesh.
    """

    def __init__(
        self,
        program: Region,
        values: Mapping[Value, np.ndarray],
        truth: Run,
        sizes: Mapping[str, int],
        aligned: Mapping[Operation, Operation],
    ) -> None:
        self._operations = list(program.walk())
        self._values = values
        self._truth = truth
        self._sizes = dict(sizes)
        self._found = functools.partial(finding, sizes)
        self._aligned = aligned
        self._relation = functools.cache(self._find_relation)
        self._outer: dict[Value, Value] = {}
        self._specs: dict[Value, Any] = {}
        self._turns: dict[int, int] = {}
        self._sources: dict[Value, frozenset[str]] = {}
        self._users: dict[Value, list[Operation]] = {}
        for operation in self._operations:
            self._enter(operation)

    def _enter(self, operation: Operation) -> None:
        """Notes the users of its operands, and the outer values of the inputs of its region."""
        for value in operation.reads:
            self._users.setdefault(value, []).append(operation)
        found = frozenset[str]().union(*map(self._sources_of, operation.reads))
        found = _RANK if operation.name == "axis_index" else found
        found = _INPUT if operation.regions else found
        self._sources.update(dict.fromkeys(operation.results, found))
        region = operation.regions[0] if operation.is_map else operation.turn
        if region is not None and region.form is not None:
            for value, read in zip(region.inputs, region.form.inputs(operation.reads), strict=True):
                self._outer[value] = read
                self._sources[value] = self._sources_of(read)
        if operation.is_map:
            specs = operation.equation.params["in_specs"]
            self._specs.update(zip(operation.regions[0].inputs, specs, strict=True))

    def _sources_of(self, value: Value) -> frozenset[str]:
        """Returns which a value is computed from: the rank's index, inputs, both or neither."""
        return frozenset() if value.constant is not None else self._sources.get(value, _INPUT)

    def _is_coordinate(self, value: Value) -> bool:
        """Whether a value depends only on the rank's index and constants."""
        return self._sources_of(value) == _RANK

    def _pair(self, value: Value) -> Pair | None:
        """Returns the value on the mesh, on one device, and the bound; None if one is unknown.

        In a loop these are of one turn, the first unless that is right.
        """
        maker = value.maker
        other = self._aligned.get(maker) if maker is not None else None
        if maker is None or other is None:
            return None
        at = maker.results.index(value)
        true = other.results[at] if at < len(other.results) else None
        if true is None or true not in self._truth.values or value not in self._values:
            return None
        by_rank, whole = self._values[value], self._truth.values[true]
        turns = tuple(self._turns.get(id(loop), 0) for loop in maker.callers if _is_scan(loop))
        is_as_long = by_rank.shape[: len(turns)] == whole.shape[: len(turns)]
        if len(turns) != true.num_turns(whole) or (any(turns) and not is_as_long):
            return None
        whole = whole[(*turns, *(0,) * len(true.axes))]
        ranks = RankValues(by_rank[turns], value.axes)
        return Pair(ranks, whole, self._truth.bounds[true], self._sizes)

    def _find_relation(self, value: Value) -> Relation | None:
        """Returns how the ranks' values make up that of one device; None if nothing explains it."""
        if value.maker is None:
            known = self._relation(self._outer[value]) if value in self._outer else Relation()
            if known is None or value not in self._specs:
                return known
            return Relation(splits_of(self._specs[value], len(value.shape), self._sizes))
        pair = self._pair(value)
        found = None if pair is None else pair.relation()
        # The ranks' indices may add up to the index in the whole array by chance.
        is_chance = found is not None and not found.is_whole and value.maker.name in _PICKS
        return None if is_chance else found

    def blame(self, output: Value) -> Finding:
        """Returns the mistake that causes a wrong output of the program on the mesh."""
        frontier, visited, exits = self._back(output)
        # A rank's own indices, such as `labels - axis_index * size`, have no counterpart on one
        # device, and are right all the same. So they are blamed only if nothing else can be.
        doubtful = [operation for operation in frontier if self._is_index(operation)]
        found = [self._judge(o, visited) for o in frontier if o not in doubtful]
        found += [self._at_exit(operation, value) for operation, value in exits]
        found = found or [self._judge(operation, visited) for operation in doubtful]
        firsts = [one for one in found if one.kind in (Kind.POSITION, Kind.ONE_KEY)]
        known = [one for one in found if one.kind is not Kind.DIFFERS]
        return next(iter(firsts or known or found), self._found(Kind.DIFFERS, None))

    def _is_index(self, operation: Operation) -> bool:
        """Whether an operation only computes integers or booleans from the rank's index."""
        is_whole = not any(result.is_inexact for result in operation.results)
        return is_whole and any("rank" in self._sources_of(read) for read in operation.reads)

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
                waiting += [self._outer[value]] if value in self._outer else []
                continue
            operation = value.maker
            visited.add(operation)
            inside = self._inside(operation, value, exits)
            if inside is not None:
                waiting.append(inside)
                continue
            bad = [read for read in operation.reads if self._relation(read) is None]
            ahead = [read for read in bad if not self._is_coordinate(read)]
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
            if self._relation(inner) is None:
                return inner
            exits.append((operation, inner))
            return None
        turn = operation.turn
        if turn is None or at >= len(turn.outputs):
            return None
        if operation.name == "scan" and self._along_a_split(operation) is not None:
            return None
        loop = operation.equation
        for number in range(loop.params["length"] if _is_scan(loop) else 1):
            if number:
                self._turns[id(loop)] = number
                self._relation.cache_clear()
            # A row that is right in this turn may be wrong in the next if the carry is wrong.
            for inner in [turn.outputs[at], *turn.outputs]:
                if self._relation(inner) is None and not self._is_coordinate(inner):
                    return inner
        self._turns.pop(id(loop), None)
        self._relation.cache_clear()
        return None

    def _at_exit(self, operation: Operation, value: Value) -> Finding:
        """Judges a value that is right on each rank but combined wrongly by the `out_specs`."""
        relation = self._relation(value)
        assert relation is not None
        if relation.is_whole:
            return self._found(Kind.GATHER_ORDER, operation, relation.axes)
        start = self._origin(value, relation)
        return self._found(Kind.NOT_REDUCED, start, relation.over, is_gradient=True)

    def _origin(self, value: Value, relation: Relation) -> Operation | None:
        """Returns the operation that made a value a term of a reduction over some axes."""
        while True:
            while value.maker is None:
                if value not in self._outer:
                    return None
                value = self._outer[value]
            before = [(read, self._relation(read)) for read in value.maker.reads]
            parts = [
                r for r, known in before if known and known.over and known.over <= relation.over
            ]
            if not parts:
                return value.maker
            value = parts[0]

    def _judge(self, operation: Operation, visited: set[Operation]) -> Finding:
        """Classifies the mistake of the first wrong operation."""
        if operation.name in DRAWS:
            return self._found(Kind.ONE_KEY, operation)
        if operation.name == "iota":
            return self._found(Kind.POSITION, operation)
        known = [(read, self._relation(read)) for read in operation.reads]
        parts = [(r, relation) for r, relation in known if relation and not relation.is_whole]
        found = self._scaled(operation, bool(parts), visited) or self._along_a_split(operation)
        if found is None and parts:
            return self._of_parts(operation, parts, visited)
        return found or self._of_whole(operation)

    def _along_a_split(self, operation: Operation) -> Finding | None:
        """Judges an operation that needs all of a dim, of which each rank has a part."""
        axes: set[str] = set()
        for number, read in enumerate(operation.reads):
            relation = self._relation(read)
            if relation is None or not relation.is_whole:
                continue
            # A relation leaves out the dims that hold one row for each rank.
            is_same_rank = len(relation.splits) == len(read.shape)
            for dim, split in enumerate(relation.splits):
                if _needs_all(operation, number, dim if is_same_rank else None):
                    axes |= set(split)
        if not axes:
            return None
        is_order = operation.name == "sort" and len(operation.results) == 1
        kind = Kind.LOCAL_ORDER if is_order else Kind.LOCAL_ARGMAX
        return self._found(Kind.LOCAL_SCAN if operation.name in _SCANS else kind, operation, axes)

    def _scaled(
        self, operation: Operation, has_parts: bool, visited: set[Operation]
    ) -> Finding | None:
        """Judges a value that is wrong only by a factor, which is a size of the mesh."""
        pair = self._pair(operation.results[0])
        factor = pair.factor() if pair is not None and len(operation.results) == 1 else 0.0
        if not factor:
            return None
        size = round(max(factor, 1 / factor))
        axes = operation.equation.params.get("axes", ())
        axes = axes or [name for name, count in self._sizes.items() if count == size]
        kind, blamed = Kind.SUM_FOR_MEAN if factor > 1 else Kind.MEAN_FOR_SUM, operation
        if factor > 1 and (
            operation.name in RANK_SUMS or (operation.name == "reduce_sum" and has_parts)
        ):
            if self._is_transposed_sum(operation):
                return self._found(Kind.SUMMED_BY_GRAD, operation, axes)
            again = self._reduced_again(operation, visited)
            if again is not None or not has_parts:
                kind, blamed = Kind.TWICE, again or operation
        written = self._hard_coded(size, visited)
        if written is not None:
            message = f"the mesh size {size} is hard-coded, so the result differs on other meshes"
            return dataclasses.replace(self._found(kind, written, axes), kind=None, message=message)
        return self._found(kind, blamed, axes, is_gradient=True)

    def _is_transposed_sum(self, operation: Operation) -> bool:
        """Whether `jax.grad` made an operation from a sum of the user's own."""
        frames, asked = source_frames(operation.equation, operation.callers)
        if asked is None or not frames:
            return False
        sums = [o for o in self._operations if o.number < operation.number and o.name in RANK_SUMS]
        before = (source_frames(other.equation, other.callers) for other in sums)
        return any(asked is None and own[:1] == frames[:1] for own, asked in before)

    def _reduced_again(self, operation: Operation, visited: set[Operation]) -> Operation | None:
        axes = operation.equation.params.get("axes")
        later = [o for o in visited if o.number > operation.number and o.name in RANK_SUMS]
        again = [other for other in later if other.equation.params.get("axes") == axes]
        return min(again, key=lambda o: o.number, default=None)

    def _hard_coded(self, size: int, visited: set[Operation]) -> Operation | None:
        """Returns a visited operation that divides by a literal equal to the mesh's size."""
        for operation in sorted(visited, key=lambda o: o.number):
            other = self._aligned.get(operation)
            if other is None or operation.name not in ("div", "mul"):
                continue
            numbers = _numbers_in(operation)
            is_size = any(math.isclose(x, size) or math.isclose(x, 1 / size) for x in numbers)
            if is_size and numbers == _numbers_in(other):
                return operation
        return None

    def _of_parts(
        self, operation: Operation, parts: list[tuple[Value, Relation]], visited: set[Operation]
    ) -> Finding:
        """Judges an operation that reads terms of a reduction as if they were its result."""
        value, relation = parts[0]
        start = self._origin(value, relation)
        name = operation.name
        reductions = {relation.reduction for _, relation in parts}
        others = sum(_number(read) is None for read in operation.reads) - len(parts)
        later = {o.name for o in visited if o.number > operation.number}
        kind, at = Kind.NOT_REDUCED, start
        if reductions & {MAX, MIN}:
            is_softmax = any(o.name in _EXPONENTS for o in visited)
            kind = Kind.LOCAL_SOFTMAX if is_softmax else Kind.LOCAL_STATISTICS
        elif name in _ADDS and others == 1 and later & _ADDED and reductions == {SUM}:
            kind, at = Kind.BIAS, operation
        elif name in _OF_SUMS and _maker_of(value, _PLAIN | _LINEAR) in _EXPONENTS:
            kind = Kind.LOCAL_SOFTMAX
        elif reductions == {SUM} and (name == "div" or self._is_divisor(operation, visited)):
            kind, at = Kind.MEAN_OF_MEANS, operation
        elif reductions == {SUM} and name in _ROOTS and _is_of_squares(start):
            kind = Kind.LOCAL_NORM
        elif reductions == {MEAN} and name not in _TAKES and not _is_gradient(start):
            kind = Kind.LOCAL_STATISTICS
        return self._found(kind, at, relation.over, is_gradient=kind is Kind.NOT_REDUCED)

    def _is_divisor(self, operation: Operation, visited: set[Operation]) -> bool:
        """Whether the operation guards a count against zero, and the count divides later."""
        users = [operation] if operation.name in _GUARDS else []
        while len(users) == 1 and users[0].results:
            value = users[0].results[0]
            users = [o for o in self._users.get(value, []) if o in visited]
            if any(o.name == "div" and o.reads[-1] is value for o in users):
                return True
        return False

    def _of_whole(self, operation: Operation) -> Finding:
        """Judges an operation with right operands and a wrong result."""
        if operation.name == "slice" and self._aligned.get(operation) is None:
            # On one device the slice has the whole length, and JAX omits it.
            is_start = not any(operation.equation.params["start_indices"])
            return self._found(Kind.POSITION if is_start else Kind.DIFFERS, operation)
        for result in operation.results:
            pair = self._pair(result)
            if pair is None or self._relation(result) is not None:
                continue
            if pair.is_first_part():
                return self._found(Kind.POSITION, operation)
            if pair.is_permuted():
                axes = names_of(operation.equation.params.get("axis_name"))
                return self._found(Kind.GATHER_ORDER, operation, axes)
        wrong = [read for read in operation.reads if self._relation(read) is None]
        is_position = any(map(self._is_coordinate, wrong))
        return self._found(Kind.POSITION if is_position else Kind.DIFFERS, operation)


def _is_scan(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "scan"


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


def _number(value: Value) -> float | None:
    """Returns the number of the program that a value is; None if it is another value."""
    if value.constant is None or value.shape or is_key(value.aval):
        return None
    return float(value.constant)


def _origin_of(value: Value, through: Collection[str] = _PLAIN) -> Value:
    """Returns the value before the operations that only pass it on."""
    while value.maker is not None and value.maker.name in through and value.maker.reads:
        reads = value.maker.reads
        value = next((read for read in reads if _number(read) is None), reads[0])
    return value


def _maker_of(value: Value, through: Collection[str] = _PLAIN) -> str:
    """Returns the name of the operation that computes a value which others only pass on."""
    maker = _origin_of(value, through).maker
    return "" if maker is None else maker.name


def _is_gradient(operation: Operation | None) -> bool:
    return operation is not None and source_frames(operation.equation)[1] is not None


def _is_of_squares(start: Operation | None) -> bool:
    """Whether an operation sums squares."""
    if start is None:
        return False
    if start.name == "dot_general":
        return len({_origin_of(read) for read in start.reads}) == 1
    makers = [_origin_of(read, _PLAIN | {"real"}).maker for read in start.reads]
    return any(
        maker.name in _SQUARES or (maker.name == "mul" and len(set(maker.reads)) == 1)
        for maker in makers
        if maker is not None
    )


def _numbers_in(operation: Operation) -> list[float]:
    """Returns the numbers of the program that an operation reads."""
    numbers = [_number(_origin_of(read)) for read in operation.reads]
    return [number for number in numbers if number is not None]
