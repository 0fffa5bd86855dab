"""Draws a part's rows of the random numbers that a single device would draw for the batch.

Inside `shard_map` a key is the same on every rank, so `bernoulli(key, shape=(rows, ...))` would
give every rank the same mask. Folding the rank into the key would make the masks depend on the
mesh. Instead, the keys get a PRNG implementation that draws only the rank's rows of the global
draw. So dropout has the same bits on one device and on many.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..core.errors import UnsupportedError
from ..core.tree import is_key, map_with_path
from ..core.typing import Array, Path, PyTree, Shape
from .walk import dtype_of, equations, inners, interpret, shape_of


@dataclasses.dataclass(frozen=True)
class SampleRows:
    """Which dim of a drawn array counts samples, and its global size.

    Args:
        dim: the dim that the parts of the batch split.
        global_size: its size in the whole batch.
    """

    dim: int
    global_size: int


Drawn: TypeAlias = tuple[Any, ...]
"""The shape of drawn bits; or "split" or "gamma", followed by the shape of the result."""

MAKERS = frozenset({"random_seed", "random_wrap"})
"""Primitives that make a key from numbers."""

FIRST_KEY = (
    "draws with one key per sample by the generator rbg, which under vmap uses the first key for "
    "all samples; make the keys with impl='threefry2x32'"
)

TAG = "rows"
"""The tag of the PRNG implementation whose keys draw rows."""


def find_rows(
    trace: Callable[[int], ClosedJaxpr], local: int, num_parts: int
) -> dict[Drawn, SampleRows] | None:
    """Learns from two traces which drawn shapes grow with the number of samples.

    Draws from one key per sample, as with `vmap` over `split(key, samples)`, are correct once the
    keys are: only the split has to return the rows of the part.

    Args:
        trace: `trace(num_samples)` gives the jaxpr of the forward pass on that many samples.
        local: the number of samples of a part: one rank's share of one microbatch.
        num_parts: how many such parts a batch has.

    Returns:
        For every drawn shape that counts samples, the rows of the part; None if nothing is drawn.

    Raises:
        UnsupportedError: if shapes are ambiguous, or if the forward pass creates the key of such a
            draw, which would then be the same on every rank.
    """
    program = trace(local)
    part = list(_drawn(program))
    if not part:
        return None
    batch = list(_drawn(trace(local * num_parts)))
    if len(part) != len(batch):
        raise UnsupportedError(
            f"the model draws {len(part)} random arrays for {local} samples and {len(batch)} for "
            f"{local * num_parts}; random draws must not depend on the batch size"
        )
    rows: dict[Drawn, SampleRows | None] = {}
    for (drawn, key), (full, full_key) in zip(part, batch, strict=True):
        sampled = None if key != full_key else _compare(drawn, full)
        if key != full_key and "rbg" in key[1] and drawn[:1] != ("split",):
            raise UnsupportedError(f"the model {FIRST_KEY}")
        if drawn[:1] == ("gamma",):
            # The gamma sampler splits one key per element off its operand, and then splits each of
            # these keys into 2 and into 3.
            single = None if key[0] else sampled
            sampled = None if single is None else _key_rows(drawn[1:], full[1:], single.dim)
            drawn = "split", math.prod(drawn[1 + len(key[0]) :])
            _note(rows, ("split", 2), None)
            _note(rows, ("split", 3), None)
        _note(rows, drawn, sampled)
    counting = {drawn: sampled for drawn, sampled in rows.items() if sampled is not None}
    _check_keys(program.jaxpr, [False] * len(program.jaxpr.invars), counting)
    return counting


def _note(rows: dict[Drawn, SampleRows | None], drawn: Drawn, sampled: SampleRows | None) -> None:
    """Records the rows of a drawn shape; raises if the shape is drawn with and without rows."""
    if rows.setdefault(drawn, sampled) != sampled:
        what = f"random arrays of shape {drawn}"
        if drawn[:1] == ("split",):
            what = f"random keys of shape {drawn[1:]}"
        raise UnsupportedError(
            f"the model draws {what} both with and without a batch dim, and the shapes are equal; "
            "change the local batch size"
        )


def _key_rows(part: Shape, full: Shape, dim: int) -> SampleRows:
    """Returns which keys, among those of all elements of gamma noise, belong to a part."""
    if math.prod(part[:dim]) > 1:
        raise UnsupportedError(
            f"the model draws gamma noise of shape {part} from one key, in which dim {dim} counts "
            "samples, so that the keys of a part of the samples are not contiguous; draw it with "
            "the samples in dim 0, and transpose it"
        )
    return SampleRows(0, math.prod(full))


def _check_keys(jaxpr: Jaxpr, made: Sequence[bool], rows: Mapping[Drawn, SampleRows]) -> list[bool]:
    """Raises if samples' rows are drawn from a key that the program creates itself.

    Args:
        jaxpr: an open jaxpr; its inner programs are checked too.
        made: for each input, whether it is a key that the program creates or closes over.
        rows: the shapes that count samples.

    Returns:
        For every output, whether it is such a key.
    """

    def run(equation: JaxprEqn, operands: Sequence[bool]) -> list[bool]:
        name = equation.primitive.name
        if name in DRAWS and any(operands) and _drawn_by(equation) in rows:
            shape = shape_of(equation.outvars[0])
            raise UnsupportedError(
                f"the model draws a random array of shape {shape}, a row for every sample, from a "
                "key that it creates itself or closes over, such as jax.random.key(0) within the "
                "model or the loss; every rank would draw the same. Keep the key in the model, as "
                "nnx.Rngs(0) does"
            )
        flags = [name in MAKERS or any(operands)] * len(equation.outvars)
        for inner in inners(equation):
            results = _check_keys(inner.program.jaxpr, inner.inputs(operands), rows)
            flags = results if len(results) == len(flags) else [any(results)] * len(flags)
        # Numbers drawn from such a key are not keys.
        return [flag and is_key(v.aval) for v, flag in zip(equation.outvars, flags, strict=True)]

    # A key that the program closes over is the same on every rank too.
    consts = [is_key(v.aval) for v in jaxpr.constvars]
    return interpret(jaxpr, consts, made, run, literal=lambda _: False)


def with_part(buffers: PyTree, rows: Mapping[Drawn, SampleRows], part: Array) -> PyTree:
    """Replaces every key in the buffers by one that draws the rows of one part of the batch.

    Args:
        buffers: nested dict with typed keys among its leaves.
        rows: the result of `find_rows`.
        part: its number among the parts, a scalar.

    Returns:
        The same buffers with their keys replaced.
    """

    def replace(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        impl = _row_impl(jax.random.key_impl(leaf), tuple(sorted(rows.items(), key=str)))
        data = jax.random.key_data(leaf)
        number = jnp.broadcast_to(part.astype(data.dtype), (*data.shape[:-1], 1))
        return jax.random.wrap_key_data(jnp.concatenate([data, number], -1), impl=impl)

    return jax.tree.map(replace, buffers)


def at_part(leaf: Array, part: Array) -> Array:
    """Changes a key that draws rows to another part; returns any other array unchanged."""
    if not is_key(leaf) or str(jax.random.key_impl(leaf)) != TAG:
        return leaf
    data = jax.random.key_data(leaf)
    moved = data.at[..., -1].set(part.astype(data.dtype))
    return jax.random.wrap_key_data(moved, impl=jax.random.key_impl(leaf))


def without_part(
    buffers: PyTree, original: PyTree, advanced: Collection[Path] = frozenset()
) -> PyTree:
    """Undoes `with_part`; counts and statistics keep their new values.

    Args:
        buffers: nested dict, after a part of the step.
        original: the same buffers before `with_part`.
        advanced: the paths of the keys that the model replaces by others, made from them.
    """

    def restore(path: Path, new: Any, old: Any) -> Any:
        if not is_key(old):
            return new
        if path not in advanced:
            return old
        if str(jax.random.key_impl(new)) != TAG:
            return new
        words = jax.random.key_data(new)[..., :-1]
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(old))

    return map_with_path(restore, buffers, original)


def _compare(part: Drawn, full: Drawn) -> SampleRows | None:
    lead = len([size for size in part if isinstance(size, str)])
    part = part[lead:]
    full = full[lead:]
    differing = [dim for dim, (a, b) in enumerate(zip(part, full, strict=True)) if a != b]
    if not differing:
        return None
    if len(differing) > 1:
        raise UnsupportedError(
            f"a random array of shape {part} grows to {full} with the batch in {len(differing)} "
            "dims; only one dim may count samples"
        )
    return SampleRows(differing[0], full[differing[0]])


DRAWS = frozenset({"random_bits", "random_split"})
"""Primitives that draw random numbers or keys from a key."""


def _drawn_by(equation: JaxprEqn) -> Drawn:
    kind = equation.primitive.name.removeprefix("random_")
    shape = shape_of(equation.outvars[0]) if kind == "gamma" else equation.params["shape"]
    return tuple(shape) if kind == "bits" else (kind, *shape)


def _drawn(program: ClosedJaxpr) -> Iterator[tuple[Drawn, tuple[Shape, str]]]:
    """Yields each draw, with the shape and the generator of its keys."""
    for equation in equations(program.jaxpr):
        if equation.primitive.name in DRAWS | {"random_gamma"}:
            keys = equation.invars[0]
            yield _drawn_by(equation), (shape_of(keys), str(dtype_of(keys)))


@functools.lru_cache(maxsize=64)
def _row_impl(base: Any, rows: tuple[tuple[Drawn, SampleRows], ...]) -> Any:
    """Makes a PRNG like `base` whose keys carry the number of a part, and whose draws are its rows.

    Args:
        base: the name of a PRNG, or the implementation of one that has none.
        rows: the draws whose rows are split, and how.
    """
    table = dict(rows)
    seeded = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=base)))
    words = seeded.shape[-1]

    def key_of(data: Array) -> Array:
        return jax.random.wrap_key_data(data[:words], impl=base)

    def full_shape(shape: Shape, sampled: SampleRows) -> Shape:
        return (*shape[: sampled.dim], sampled.global_size, *shape[sampled.dim + 1 :])

    def append_part(keys: Array, data: Array) -> Array:
        new = jax.random.key_data(keys)
        return jnp.concatenate([new, jnp.broadcast_to(data[words:], (*new.shape[:-1], 1))], -1)

    def seed(value: Array) -> Array:
        return jnp.pad(jax.random.key_data(jax.random.key(value, impl=base)), (0, 1))

    def split(data: Array, shape: Shape) -> Array:
        sampled = table.get(("split", *shape))
        if sampled is None:
            return append_part(jax.random.split(key_of(data), shape), data)
        keys = jax.random.key_data(jax.random.split(key_of(data), full_shape(shape, sampled)))
        start = data[words].astype(jnp.int32) * shape[sampled.dim]
        part = jax.lax.dynamic_slice_in_dim(keys, start, shape[sampled.dim], sampled.dim)
        return append_part(jax.random.wrap_key_data(part, impl=base), data)

    def fold_in(data: Array, value: int) -> Array:
        return append_part(jax.random.fold_in(key_of(data), value), data)

    def random_bits(data: Array, bit_width: int, shape: Shape) -> Array:
        dtype = jnp.dtype(f"uint{bit_width}")
        sampled = table.get(tuple(shape))
        if sampled is None:
            return jax.random.bits(key_of(data), shape, dtype)
        full = full_shape(shape, sampled)
        start = data[words].astype(jnp.int32) * shape[sampled.dim]
        if _counts_elements(base) and bit_width == 32 and math.prod(full) < 2**32:
            return _threefry_rows(data, full, shape, sampled.dim, start)
        bits = jax.random.bits(key_of(data), full, dtype)
        return jax.lax.dynamic_slice_in_dim(bits, start, shape[sampled.dim], sampled.dim)

    return jax.extend.random.define_prng_impl(
        key_shape=(words + 1,),
        seed=seed,
        split=split,
        random_bits=random_bits,
        fold_in=fold_in,
        name=f"{base}_rows",
        tag=TAG,
    )


def _counts_elements(base: Any) -> bool:
    """Whether each element of a draw depends only on its index, as in partitionable threefry."""
    return str(base) == "threefry2x32" and bool(getattr(jax.config, "jax_threefry_partitionable"))  # noqa: B009


def _threefry_rows(data: Array, full: Shape, shape: Shape, dim: int, start: Array) -> Array:
    """Draws only some rows: partitionable threefry encrypts the index of each element."""
    strides = [math.prod(full[axis + 1 :]) for axis in range(len(full))]
    index = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(strides):
        position = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        offset = start.astype(jnp.uint32) if axis == dim else jnp.uint32(0)
        index = index + (position + offset) * jnp.uint32(stride)
    high, low = jax.extend.random.threefry2x32_p.bind(
        data[0], data[1], jnp.zeros_like(index), index
    )
    return high ^ low
