"""Recognizes which attention a user's function computes, from its jaxpr and from test inputs.

Ring attention computes `softmax(scale * q k^T) v`, full or causal, optionally in a sliding window
and with soft-capped scores. Before it replaces a user's function, that function is traced and run
on small inputs that reveal its mask, scale and cap. The attention found this way is then compared
with the function on random inputs. A function that differs is not replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from ..core.compat import eval_jaxpr, inner_programs
from ..core.typing import Array

MOST_SCORES = 2**22
"""The most attention scores of a test input, over all heads; longer sequences are halved."""

_CLOSE = 5e-5
"""The most that two float32 implementations of one function differ, for values of size 1."""

_LOW = {"bfloat16", "float16"}


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """`softmax(cap(scale * q k^T) + mask) v` per head; consecutive query heads share a key head.

    Args:
        causal: position t sees positions 0 to t; otherwise all.
        scale: the multiplier of scores.
        window: position t sees only positions after t - window; None for no window.
        softcap: c of `c tanh(score / c)`; None for no cap.
    """

    causal: bool
    scale: float
    window: int | None = None
    softcap: float | None = None

    def __str__(self) -> str:
        parts = ["causal" if self.causal else "without a mask", f"of scale {self.scale:.6g}"]
        parts += [f"in a window of {self.window}"] if self.window is not None else []
        parts += [f"capped at {self.softcap:.6g}"] if self.softcap is not None else []
        return ", ".join(parts)

    def __call__(
        self, query: Array, key: Array, value: Array, segments: Array | None = None
    ) -> Array:
        """Computes the attention with all scores in memory; arguments as for `ring_attention`."""
        shared = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, shared, axis=2) for x in (key, value))
        scores = jnp.einsum("bthk,bshk->bhts", query, key) * self.scale
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        distance = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])[None]
        visible = jnp.ones(distance.shape, bool)[None, None]
        if self.causal:
            visible &= distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        if segments is not None:
            visible &= (segments[:, :, None] == segments[:, None, :])[:, None]
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        return jnp.einsum("bhts,bshk->bthk", weights, value)


@dataclasses.dataclass(frozen=True)
class Unread:
    """Why a function is not one of the known attentions.

    Args:
        why: what the function does; completes a sentence whose subject is the function.
    """

    why: str


def kind_of(
    attend: Callable[..., Array],
    query: Any,
    key: Any,
    value: Any,
    has_segments: bool = False,
) -> AttentionKind | Unread:
    """Finds out which attention a function computes.

    Args:
        attend: (query, key, value[, segments]) -> results; may be called while JAX traces.
        query: `[B, T, H, K]`, arrays or shapes.
        key: `[B, T, N, K]`.
        value: `[B, T, N, K]`.
        has_segments: whether `attend` takes segments, integers `[B, T]`.

    Returns:
        The attention, or why it is not a known one.

    Example:
        >>> heads = jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.float32)
        >>> def attend(query, key, value):
        ...     return jax.nn.dot_product_attention(query, key, value, is_causal=True)
        >>> str(kind_of(attend, heads, heads, heads))
        'causal, of scale 0.25'
    """
    shapes = [tuple(x.shape[1:]) for x in (query, key, value)]
    (length, heads, size), (key_length, key_heads, key_size), (_, _, value_size) = shapes
    if key_length != length:
        return Unread(f"has {length} queries and {key_length} keys")
    if heads % key_heads or size != key_size or value_size != size:
        return Unread(f"has queries, keys and values of shapes {shapes}")
    tried = length
    while heads * tried * tried > MOST_SCORES and tried % 2 == 0:
        tried //= 2
    if heads * tried * tried > 4 * MOST_SCORES:
        return Unread(f"has {length} positions, which are too many to test and cannot be halved")
    program = _program(attend, tried, (heads, key_heads, size), has_segments)
    if isinstance(program, Unread):
        return program
    if tried < length:
        whole = _program(attend, length, (heads, key_heads, size), has_segments)
        if isinstance(whole, Unread):
            return whole
        if hidden := _unseen(whole, tried, length):
            return Unread(f"contains the number {hidden:g}, which may be a window as long as that")
        if changed := _changed_numbers(program, whole, tried, length):
            return Unread(
                f"contains the {changed[1]} for {length} positions, but the {changed[0]} for "
                f"{tried}, so that tests with fewer positions do not show what it computes"
            )
    return _read(_Key(program), tried, (heads, key_heads, size), has_segments)


def differs_by_heads(
    attend: Callable[..., Array],
    heads_of: tuple[Any, Any, Any],
    num_groups: int,
    has_segments: bool = False,
) -> str:
    """Returns how calling a function per group of heads changes its result; "" if it does not.

    Args:
        attend: a function as for `kind_of`; it may also close over the values of a module.
        heads_of: queries `[B, T, H, K]`, keys and values `[B, T, N, K]`, arrays or shapes.
        num_groups: the number of groups of heads.
        has_segments: whether `attend` takes segments, integers `[B, T]`.
    """
    shapes = [tuple(x.shape[1:]) for x in heads_of]
    (length, heads, _), (key_length, _, _), _ = shapes
    tried = length
    while heads * tried * tried > MOST_SCORES // 16 and tried % 2 == 0 and key_length == length:
        tried //= 2
    rng = np.random.default_rng(1)
    known: dict[int, np.ndarray] = {}

    def run(length: int, arrays: list[np.ndarray]) -> np.ndarray:
        more = [np.zeros((1, length), np.int32)] if has_segments else []
        with jax.default_matmul_precision("highest"):
            program = jax.make_jaxpr(attend)(*arrays, *more)
        for const in program.consts:
            if isinstance(const, Tracer) and id(const) not in known:
                if jnp.issubdtype(const.dtype, jax.dtypes.extended):
                    raise ValueError("it draws random numbers")
                numbers = np.abs(rng.normal(size=const.shape))
                known[id(const)] = np.asarray(numbers).astype(const.dtype)
        consts = [known.get(id(x), x) if isinstance(x, Tracer) else x for x in program.consts]
        closed = ClosedJaxpr(program.jaxpr, [np.asarray(x) for x in consts])
        return np.asarray(jax.jit(lambda *xs: eval_jaxpr(closed, xs)[0])(*arrays, *more))

    def compare(length: int) -> str:
        lengths = (length, key_length if length == shapes[0][0] else length)
        sizes = [(1, lengths[i > 0], *shape[1:]) for i, shape in enumerate(shapes)]
        arrays = [rng.normal(size=size).astype(np.float32) for size in sizes]
        whole = run(length, arrays)
        cuts = zip(*(np.split(x, num_groups, axis=2) for x in arrays), strict=True)
        pieces = np.concatenate([run(length, list(cut)) for cut in cuts], axis=2)
        worst = float(np.abs(whole - pieces).max())
        return "" if worst < 1e-3 else f"changes by {worst:.2g} when called with some of the heads"

    failed = ""
    with jax.ensure_compile_time_eval():
        for size in dict.fromkeys((tried, length)):
            try:
                return compare(size)
            except Exception as error:
                message = " ".join(str(error).split())
                failed = f"cannot be called with only some of the heads: {message:.200}"
    return failed


def _program(
    attend: Callable[..., Array], length: int, sizes: tuple[int, int, int], has_segments: bool
) -> ClosedJaxpr | Unread:
    """Traces the function on one float32 sample; returns `Unread` if it needs more inputs."""
    heads, key_heads, size = sizes
    shapes = [(1, length, n, size) for n in (heads, key_heads, key_heads)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    if has_segments:
        arrays.append(jax.ShapeDtypeStruct((1, length), jnp.int32))
    try:
        with jax.default_matmul_precision("highest"):
            program = jax.make_jaxpr(attend)(*arrays)
    except Exception as error:
        message = " ".join(str(error).split())
        return Unread(f"cannot be tried on one sample of {length} positions: {message:.200}")
    if any(isinstance(value, Tracer) for value in program.consts):
        return Unread(
            "depends on parameters, random numbers or other values besides queries, keys and values"
        )
    results: list[Any] = list(program.out_avals)
    if len(results) != 1 or results[0].shape != shapes[0]:
        return Unread("does not return one array with the shape of the queries")
    return program


class _Key:
    """A jaxpr with its constants, compared and hashed by its text and their values.

    Args:
        program: the jaxpr, without tracers.
    """

    def __init__(self, program: ClosedJaxpr):
        self.program = program
        self.consts = [np.asarray(value) for value in program.consts]
        contents = ((x.shape, str(x.dtype), x.tobytes()) for x in self.consts)
        self._contents = (str(program.jaxpr), *contents)

    def __hash__(self) -> int:
        return hash(self._contents)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._contents == other._contents


@functools.lru_cache(maxsize=64)
def _read(
    key: _Key, length: int, sizes: tuple[int, int, int], has_segments: bool
) -> AttentionKind | Unread:
    closed = ClosedJaxpr(key.program.jaxpr, key.consts)
    compiled = jax.jit(lambda *arrays: eval_jaxpr(closed, arrays)[0].astype(jnp.float32))
    zeros = np.zeros((1, length), np.int32)

    def run(*arrays: np.ndarray, segments: np.ndarray = zeros) -> np.ndarray:
        more = (segments,) if has_segments else ()
        return np.asarray(compiled(*arrays, *more))

    with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
        numbers = sorted(set(_numbers(closed)))
        found = _Trial(run, length, sizes, numbers, 6e-2 if _is_low(closed) else 5e-4).kind()
        if isinstance(found, Unread):
            return found
        return _compared(found, run, length, sizes, has_segments, closed)


@dataclasses.dataclass(frozen=True)
class _Trial:
    """Runs a function on inputs that reveal its mask, scale and cap.

    Args:
        run: (queries, keys, values) -> results.
        length: the number of positions.
        sizes: query heads, key heads, and head size.
        numbers: the numbers in its jaxpr.
        close: the relative tolerance between measured and explained scores.
    """

    run: Callable[..., np.ndarray]
    length: int
    sizes: tuple[int, int, int]
    numbers: Sequence[float]
    close: float

    def kind(self) -> AttentionKind | Unread:
        """Returns the attention that the function seems to compute."""
        query, key, value = self._inputs()
        value[:, 0] = 1
        # Queries are 0, so all visible keys get equal weight: 1 / the number of visible keys.
        share = self.run(query, key, value)[0, :, 0, 0]
        if not np.isfinite(share).all():
            return Unread("gives NaN or infinity for queries of 0")
        causal = self.length > 1 and share[0] > 1 - 1e-3
        blind = np.flatnonzero(share < 1e-3 / self.length)
        window = int(blind[0]) if causal and len(blind) else None
        row = 1 if causal else self.length - 1
        seen = 2 if causal else self.length
        if self.length < 2 or window == 1:
            return Unread("lets every position see only one key")
        fitted = self._fit(row, seen)
        if fitted is None:
            return Unread("has scores that are not q k^T times a number of its program")
        return AttentionKind(bool(causal), fitted[0], window, fitted[1])

    def _inputs(self) -> list[np.ndarray]:
        heads, key_heads, size = self.sizes
        shapes = [(1, self.length, n, size) for n in (heads, key_heads, key_heads)]
        return [np.zeros(shape, np.float32) for shape in shapes]

    def _score(self, product: float, row: int, seen: int) -> float:
        """Measures the score of key 0 for a given product `q k`; other keys score 0."""
        query, key, value = self._inputs()
        query[..., 0] = product
        key[:, 0, :, 0] = 1
        value[:, 0] = 1
        weight = float(self.run(query, key, value)[0, row, 0, 0])
        if not 0 < weight < 1:
            return math.nan
        return math.log(weight * (seen - 1) / (1 - weight))

    def _fit(self, row: int, seen: int) -> tuple[float, float | None] | None:
        """Finds a scale and a cap, among the numbers of the jaxpr, that explain two scores."""
        product = math.sqrt(self.sizes[2])
        for _ in range(8):
            score = self._score(product, row, seen)
            if not math.isfinite(score) or abs(score) > 2:
                product /= 4
            elif abs(score) < 0.4:
                product *= 4
            else:
                break
        # In low precision, large scores leave too few digits of the smaller softmax weight.
        products = product, product * (4 if self.close < 1e-2 else 2)
        scores = [self._score(x, row, seen) for x in products]
        if not all(map(math.isfinite, scores)) or not all(scores):
            return None
        estimate = scores[0] / product

        def error(scale: float, cap: float | None) -> float:
            made = [_cap(scale * x, cap) for x in products]
            return max(abs(x / y - 1) for x, y in zip(made, scores, strict=True))

        caps = [x for x in self.numbers if x > 0.1]
        for known in self._scales():
            scales = sorted(x for x in known if 0.9 < x / estimate < 3)
            for pairs in (itertools.product(scales, [None]), itertools.product(scales, caps)):
                best = min(pairs, key=lambda pair: error(*pair), default=None)
                if best is not None and error(*best) < self.close:
                    return best
        return None

    def _scales(self) -> Iterator[set[float]]:
        """Yields candidate scales: the numbers of the jaxpr, then products of two of them."""
        size = self.sizes[2]
        known = {1.0, size**-0.5, size**-0.25, *(x for x in self.numbers if x)}
        single = {z for x in known for z in (x, 1 / x)}
        yield {*single, *(-x for x in single)}
        products = {x * y for x, y in itertools.product(single, single)}
        yield {*products, *(-x for x in products)}


def _cap(score: float, cap: float | None) -> float:
    return score if cap is None else cap * math.tanh(score / cap)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Inputs of attention, on which a function is compared with the known one.

    Args:
        query: `[1, T, H, K]`.
        key: `[1, T, N, K]`.
        value: `[1, T, N, K]`.
        size: the size of the values.
        tolerance: by how much results for values of size 1 may differ.
        may_overflow: whether results that are not finite say nothing. A softmax may be written
            without subtracting the largest score, and then overflows for large ones.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    size: float
    tolerance: float
    may_overflow: bool = False


def _samples(
    kind: AttentionKind,
    length: int,
    sizes: tuple[int, int, int],
    closed: ClosedJaxpr,
    rng: np.random.Generator,
) -> Iterator[_Sample]:
    """Yields inputs that show a difference in masks, in scores and in the use of large numbers."""
    heads, key_heads, size = sizes
    shapes = [(1, length, n, size) for n in (heads, key_heads, key_heads)]
    is_low = _is_low(closed)
    close = 3e-2 if is_low else _CLOSE
    unit = 1 / (abs(kind.scale) * math.sqrt(size))

    def normal() -> list[np.ndarray]:
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    # Scores of about 0, 1 and 4. At 0 all weights are equal, so any difference in masks shows.
    for score in (0.0, 1.0, 4.0):
        query, key, value = normal()
        # One key more or fewer changes a mean of n values by about 1 / n.
        exact = close if is_low or score else min(_CLOSE, 0.05 / length)
        yield _Sample(query * np.float32(score * unit), key, value, 1, exact)
    bounds = sorted({x for x in map(abs, _bounds(closed)) if 4 < x < 1e6})
    # Half precision ends at 65504.
    most = 1e4 if is_low else math.inf
    for large in dict.fromkeys((64.0, *(4 * x for x in bounds))):
        if large > most / 4:
            continue
        factor = np.float32(large)
        query, key, value = normal()
        yield _Sample(query * np.float32(unit) * factor, key / factor, value, 1, close, True)
        query, key, value = normal()
        yield _Sample(query * np.float32(unit) / factor, key * factor, value * factor, large, close)
    for score in _large_scores(kind, closed, bounds, is_low):
        product = 2.0 ** round(math.log2(score / abs(kind.scale)))
        if 4 * product > most:
            continue
        # Products are +-1, 2 or 4 times one number. Rounding keeps equal scores equal, and unequal
        # scores differ by much. So weights are nearly exact, however large the scores are.
        query, key = (np.zeros(shape, np.float32) for shape in shapes[:2])
        signs = rng.choice([-1, 1], (*query.shape[:3], 1))
        query[..., :1] = product * signs
        key[..., :1] = rng.choice([1, 2, 4, -1, -2, -4], (*key.shape[:3], 1))
        yield _Sample(query, key, normal()[2], 1, close, True)


def _large_scores(
    kind: AttentionKind, closed: ClosedJaxpr, bounds: Sequence[float], is_low: bool
) -> list[float]:
    """Returns large scores to try; two scores of one input may differ by eight times as much.

    A finite mask such as -1e4 fails only for scores of its size, which models do not reach. So
    numbers from 500 on count as masks, unless the program bounds or compares with them, and test
    scores stay below them. A mask may also be the floor of a running maximum.
    """
    floors = {-x for x in _bounds(closed, {"max"}) if x < 0} & {*_set_numbers(closed.jaxpr)}
    limits = {*bounds} - floors
    masks = [x for x in _numbers(closed, is_float=True) if x >= 500 and x not in limits]
    most = min(masks, default=math.inf) / 9
    if is_low and kind.softcap is not None:
        # Capped scores that are nearly equal differ in half precision by chance.
        most = min(most, kind.softcap / 4)
    return [*dict.fromkeys(min(x, most) for x in (16.0, 64.0, 256.0, *bounds))]


def _compared(
    kind: AttentionKind,
    run: Callable[..., np.ndarray],
    length: int,
    sizes: tuple[int, int, int],
    has_segments: bool,
    closed: ClosedJaxpr,
) -> AttentionKind | Unread:
    """Returns `kind` if the function agrees with it on many inputs, else `Unread`."""
    rng = np.random.default_rng(0)
    reference = jax.jit(kind)
    for sample in _samples(kind, length, sizes, closed, rng):
        segments = np.sort(rng.integers(0, 3, (1, length))).astype(np.int32)
        if not has_segments:
            segments *= 0
        arrays = sample.query, sample.key, sample.value
        got = run(*arrays, segments=segments)
        want = np.asarray(reference(*arrays, segments if has_segments else None))
        unknown = -1.0 if sample.may_overflow else math.inf
        differences = np.where(np.isfinite(got), np.abs(got - want), unknown)
        worst = float(differences.max())
        if not worst <= sample.tolerance * sample.size:
            at = np.unravel_index(int(np.argmax(differences)), got.shape)
            return Unread(
                f"seems to be attention {kind}, but differs from it by {worst:.2g} on random "
                f"inputs with scores up to {_largest(kind, sample):.3g}, at position {at[1]} of "
                f"head {at[2]}{_weak_mask(closed)}"
            )
    return kind


def _largest(kind: AttentionKind, sample: _Sample) -> float:
    """Returns about the largest score of a sample."""
    norms = [np.linalg.norm(x, axis=-1).max() for x in (sample.query, sample.key)]
    return float(abs(kind.scale) * norms[0] * norms[1])


def _is_low(closed: ClosedJaxpr) -> bool:
    return any(str(value.aval.dtype) in _LOW for value in _values(closed.jaxpr))


def _weak_mask(closed: ClosedJaxpr) -> str:
    """Names a number that may mask scores of ordinary size only, or returns an empty text."""
    weak = [x for x in _set_numbers(closed.jaxpr) if 20 <= x < 500]
    return f"; if -{weak[0]:g} masks scores, mask them with -inf or -1e9" if weak else ""


_BOUNDING = frozenset({"max", "min", "clamp", "gt", "ge", "lt", "le"})


def _bounds(closed: ClosedJaxpr, names: Collection[str] = _BOUNDING) -> Iterator[float]:
    """Yields the finite numbers that floats are limited by or compared with."""
    scalars = {
        variable: value
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        if np.size(value) == 1
    }
    for operand in _bounding_operands(closed.jaxpr, names):
        value = operand.val if isinstance(operand, Literal) else scalars.get(operand)
        if value is not None and np.size(value) == 1:
            number = float(np.asarray(value).reshape(()))
            if math.isfinite(number):
                yield number


def _bounding_operands(jaxpr: Any, names: Collection[str]) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if _bounds_values(equation, names) and _has_floats(equation):
            yield from equation.invars
        for inner in inner_programs(equation):
            yield from _bounding_operands(inner, names)


def _bounds_values(equation: Any, names: Collection[str] = _BOUNDING) -> bool:
    """Whether an equation is one of these, or calls a program of them, as `jnp.clip` does."""
    equations = [equation, *(e for x in inner_programs(equation) for e in x.eqns)]
    return any(one.primitive.name in names for one in equations)


def _set_numbers(jaxpr: Any) -> Iterator[float]:
    """Yields the sizes of negative literals in equations of floats that limit no value."""
    for equation in jaxpr.eqns:
        if not _bounds_values(equation) and _has_floats(equation):
            scalars = (x.val for x in equation.invars if isinstance(x, Literal))
            numbers = (float(np.asarray(x).reshape(())) for x in scalars if np.size(x) == 1)
            yield from (-x for x in numbers if x < 0 and math.isfinite(x))
        for inner in inner_programs(equation):
            yield from _set_numbers(inner)


def _has_floats(equation: Any) -> bool:
    """Whether an equation reads floats; its integers may then be numbers that become floats."""
    return any(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in equation.invars)


def _values(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield from equation.outvars
        for inner in inner_programs(equation):
            yield from _values(inner)


def _numbers(closed: ClosedJaxpr, is_float: bool = False) -> Iterator[float]:
    """Yields the numbers in a jaxpr: literals, and constants of one element.

    With `is_float`, only those that are floats or are read with floats.
    """
    yield from _literals(closed.jaxpr, is_float)
    for value in closed.consts:
        kinds = "f" if is_float else "iuf"
        if np.size(value) == 1 and np.asarray(value).dtype.kind in kinds:
            yield abs(float(np.asarray(value).reshape(())))


def _literals(jaxpr: Any, is_float: bool) -> Iterator[float]:
    for equation in jaxpr.eqns:
        for operand in equation.invars:
            if isinstance(operand, Literal) and np.size(operand.val) == 1:
                number = abs(float(np.asarray(operand.val).reshape(())))
                is_wanted = not is_float or _has_floats(equation)
                if is_wanted and math.isfinite(number) and 1e-6 < number < 1e6:
                    yield number
        for inner in inner_programs(equation):
            yield from _literals(inner, is_float)


def _unseen(whole: ClosedJaxpr, tried: int, length: int) -> float:
    """Returns a number in the long sequence's jaxpr that shorter tests cannot reveal; else 0."""
    if any(np.size(value) >= tried for value in whole.consts):
        return max(float(np.size(value)) for value in whole.consts)
    return next((x for x in _numbers(whole) if tried <= x and x not in (length, length - 1)), 0)


def _changed_numbers(
    short: ClosedJaxpr, whole: ClosedJaxpr, tried: int, length: int
) -> tuple[str, str] | None:
    """Describes the first numbers that depend on the number of positions, but are not it."""
    before, after = [*_numbers(short)], [*_numbers(whole)]
    same = ((tried, length), (tried - 1, length - 1))
    for pair in zip(before, after, strict=False):
        if pair[0] != pair[1] and pair not in same:
            return f"number {pair[0]:g}", f"number {pair[1]:g}"
    if len(before) != len(after):
        return f"{len(before)} constants of a program", f"{len(after)} constants of a program"
    return None
