"""What is said of a value, compared with the numbers that the whole batch and its parts give."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from axon_dist import per_sample
from axon_dist.separability.abstract_values import Kind, Value
from axon_dist.separability.interpret import follow_samples

NUM_CLASSES = 3


def batch_of(count):
    """Features, labels and weights of the first samples of one batch."""
    random = np.random.default_rng(0)
    x, w = random.normal(size=(8, 3)), random.uniform(0.2, 1, size=8)
    return tuple(
        np.asarray(a[:count], kind)
        for a, kind in ((x, "float32"), (np.arange(8) ** 2 % 5 % 3, "int32"), (w, "float32"))
    )


def value_of(function, sizes) -> Value:
    """What is said of the function's result."""
    shapes = lambda count: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in batch_of(count)]
    trace = lambda count: jax.make_jaxpr(function)(*shapes(count))
    (value,) = follow_samples(trace, sizes, num_batch=3)
    return value


def check(value: Value, function, sizes):
    """Checks that the whole follows from the parts as the value says."""
    if value.kind is Kind.COUPLED:
        return
    part, whole = sizes
    batch, run = batch_of(whole), jax.jit(function)
    cuts = [slice(start, start + part) for start in range(0, whole, part)]
    parts = [np.asarray(run(*(a[cut] for a in batch))) for cut in cuts]
    whole = np.asarray(run(*batch))
    if value.kind is Kind.TOTAL:
        np.testing.assert_allclose(whole, value.scale * np.mean(parts, 0), rtol=1e-4, atol=1e-6)
    elif value.kind is Kind.CONSTANT:
        for one in parts:
            np.testing.assert_allclose(whole, value.scale * one, rtol=1e-4, atol=1e-6)
    elif value.kind is Kind.ROWS and value.dim is not None and not value.positions:
        blocks = [np.split(one, value.outer, value.dim) for one in parts]
        rows = [np.concatenate(block, value.dim) for block in zip(*blocks, strict=True)]
        joined = value.scale * np.concatenate(rows, value.dim)
        np.testing.assert_allclose(whole, joined, rtol=1e-4, atol=1e-6)


def pairs(y):
    """Two labels for each sample."""
    return jnp.stack([y, (y + 1) % NUM_CLASSES], 1)


def one_hot(y):
    """The labels written into zeros."""
    return jnp.zeros((len(y), NUM_CLASSES)).at[jnp.arange(len(y)), y].set(1.0)


def spread(x):
    """A table of numbers for each sample, the same for all."""
    return jnp.broadcast_to(jnp.arange(1.0, 4.0), x.shape)


def of_column(x, y):
    """Numbers at columns that grow with the batch, by unsigned indices, which are not checked."""
    columns = y.astype(jnp.uint32) * jnp.uint32(len(x))
    samples = jnp.arange(len(x), dtype=jnp.uint32)
    places = jnp.concatenate([samples[:, None], columns[:, None]], 1)
    numbers = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    return lax.gather(x, places, numbers, (1, 1), mode="clip")


def foreign(x):
    """A function that is not of JAX, by an operation without a rule."""
    return jax.pure_callback(lambda x: np.tanh(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def times_of(count, x):
    """Multiplies by a number that only the function of a callback has."""
    like = jax.ShapeDtypeStruct(np.shape(x), jnp.float32)
    return jax.pure_callback(lambda x: np.float32(x * count), like, x)


def remade(x):
    """A foreign function that is an object without equality, which each trace makes."""
    return jax.pure_callback(np.vectorize(np.tanh), jax.ShapeDtypeStruct(np.shape(x), "float32"), x)


HALVED = Primitive("halved")
HALVED.def_abstract_eval(lambda x, made: x)
HALVED.def_impl(lambda x, made: x / 2)
mlir.register_lowering(HALVED, mlir.lower_fun(lambda x, made: x / 2, multiple_results=False))


def halved_of(count):
    """An operation without a rule that has a function of a number."""
    return lambda row: HALVED.bind(row, made=(lambda x: x * count,)).sum()


SUM = jax.ops.segment_sum
CLAIMS = {
    "a total looked up in a loop over the samples": (
        lambda x, y, w: lax.map(lambda label: x.mean(0)[label], pairs(y)).mean(),
        "looks up a total over the samples",
    ),
    "a constant looked up in a loop over the samples": (
        lambda x, y, w: lax.map(lambda label: jnp.arange(3.0)[label].sum(), pairs(y)).mean(),
        "total",
    ),
    "the sums of the positions of each class": (
        lambda x, y, w: SUM(jnp.arange(len(x), dtype=jnp.float32), y, NUM_CLASSES),
        "depends on a sample's position",
    ),
    "the sums of repeated samples at repeated batches of labels": (
        lambda x, y, w: SUM(jnp.repeat(w, 2), jnp.concatenate([y, y]), NUM_CLASSES),
        "with other samples",
    ),
    "the sums of two batches at two batches of labels": (
        lambda x, y, w: SUM(jnp.concatenate([w, w]), jnp.concatenate([y, y]), NUM_CLASSES),
        "total",
    ),
    "the counts of two batches": (
        lambda x, y, w: jnp.bincount(jnp.concatenate([y, y]), length=NUM_CLASSES),
        "total",
    ),
    "a foreign call of a sample over the number of samples": (
        lambda x, y, w: lax.map(lambda row: foreign(row / len(x)).sum(), x).sum(),
        "whose effect on samples is unknown",
    ),
    "a foreign call that multiplies a constant by the number of samples": (
        lambda x, y, w: x.mean() * times_of(len(x), 2.0),
        "`pure_callback` of a Python function that is another one in each trace",
    ),
    "a foreign call that multiplies a constant by a number": (
        lambda x, y, w: x.mean() * times_of(3, 2.0),
        "total",
    ),
    "a foreign call that multiplies a sample by the number of samples": (
        lambda x, y, w: lax.map(lambda row: times_of(len(x), row).sum(), x).sum(),
        "`pure_callback` of a Python function that is another one in each trace",
    ),
    "a foreign call of an object that each trace makes": (
        lambda x, y, w: x.mean() * remade(2.0),
        "`pure_callback` of a Python function that is another one in each trace",
    ),
    "a foreign call of a sample to an object that each trace makes": (
        lambda x, y, w: lax.map(lambda row: remade(row).sum(), x).sum(),
        "`pure_callback` of a Python function that is another one in each trace",
    ),
    "an unknown operation of a sample that has functions of each trace": (
        lambda x, y, w: lax.map(lambda row: HALVED.bind(row, made=(lambda x: x,)).sum(), x).sum(),
        "total",
    ),
    "an unknown operation of a sample that has functions of the number of samples": (
        lambda x, y, w: lax.map(halved_of(len(x)), x).sum(),
        "`halved` with sizes or other parameters that differ",
    ),
    "a foreign call of a sample": (
        lambda x, y, w: lax.map(lambda row: foreign(row).sum(), x).sum(),
        "total",
    ),
    "a foreign call of the number of the iteration": (
        lambda x, y, w: lax.scan(lambda i, row: (i + 1, row * foreign(i * 1.0)), 0, x)[1].sum(),
        "depends on a sample's position|whose effect on samples is unknown",
    ),
    "a loop over the rows of a square of ones": (
        lambda x, y, w: lax.map(lambda row: row.sum(), jnp.ones((len(x), len(x)))) * w,
        "loop over the samples that does more",
    ),
    "a loop over ones": (
        lambda x, y, w: lax.map(lambda row: row.sum(), jnp.ones((len(x), 5))) * w,
        "rows",
    ),
    "a function of the frequencies of labels that are written": (
        lambda x, y, w: jnp.log1p(one_hot(y).mean(0)),
        "takes `log1p` of a total",
    ),
    "the frequencies of labels that are written": (lambda x, y, w: one_hot(y).mean(0), "total"),
    "a function of the mean of what each label picks": (
        lambda x, y, w: jnp.log(spread(x)[jnp.arange(len(x)), y].mean()),
        "takes `log` of a total",
    ),
    "a function of the mean of what each label takes": (
        lambda x, y, w: jnp.log(jnp.take_along_axis(spread(x), y[:, None], 1).mean()),
        "takes `log` of a total|a different program",
    ),
    "the mean of what each label takes": (
        lambda x, y, w: (spread(x)[jnp.arange(len(x)), y] * w).mean(),
        "total",
    ),
    "columns that grow with the batch": (
        lambda x, y, w: of_column(x, y).sum(),
        "depends on the number of samples",
    ),
    "a marked function of a sample over the number of samples": (
        lambda x, y, w: per_sample(jnp.tanh)(x / len(x)).sum(),
        "depends on the number of samples",
    ),
    "a marked function of a sample and a total": (
        lambda x, y, w: per_sample(lambda x, mean: x * mean)(x, x.mean(0)).sum(),
        "sum over the samples with individual samples",
    ),
    "a marked function in a loop over the samples": (
        lambda x, y, w: jnp.log(lax.map(per_sample(lambda row: (row**2).sum()), x).mean()),
        "takes `log` of a total",
    ),
    "the mean of a marked function in a loop over the samples": (
        lambda x, y, w: lax.map(per_sample(lambda row: (row**2).sum()), x).mean(),
        "total",
    ),
    "features twice": (lambda x, y, w: jnp.tanh(jnp.tile(x, (1, 2))), "rows"),
    "copies in a new dim": (lambda x, y, w: jnp.tanh(jnp.tile(x, (2, 1, 2))), "rows"),
    "the batch twice": (lambda x, y, w: jnp.tile(x, (2, 1)), "rows"),
    "sums of the batch twice": (
        lambda x, y, w: SUM(jnp.tile(w, 2), jnp.tile(y, 2), NUM_CLASSES),
        "total",
    ),
    "each sample twice and the batch twice": (
        lambda x, y, w: (jnp.tile(w, 2) * jnp.repeat(w, 2)).sum(),
        "with other samples",
    ),
    "numbers copied for each sample": (
        lambda x, y, w: (jnp.tile(jnp.arange(3.0)[None], (len(x), 1)) * x).sum(),
        "total",
    ),
    "numbers copied for each sample, flat": (
        lambda x, y, w: (jnp.tile(jnp.arange(3.0), len(x)) * x.reshape(-1)).sum(),
        "total",
    ),
    "the batch as often as it has samples": (
        lambda x, y, w: jnp.tile(w, len(x)).sum(),
        "every sample with every other",
    ),
    "a total copied for each sample": (
        lambda x, y, w: (jnp.tile(x.mean(0)[None], (len(x), 1)) * x).sum(),
        "gives a total over the samples back",
    ),
    "positions twice": (
        lambda x, y, w: x[jnp.tile(jnp.arange(len(x)), 2)].sum(),
        "depends on a sample's position",
    ),
    "numbers between those of a table": (
        lambda x, y, w: jnp.interp(w, jnp.arange(4.0), jnp.arange(4.0) ** 2).mean(),
        "total",
    ),
    "a histogram of the samples": (
        lambda x, y, w: jnp.histogram(w, bins=4, range=(0, 1))[0],
        "total",
    ),
    "a function of a histogram of the samples": (
        lambda x, y, w: jnp.log1p(jnp.histogram(w, bins=4, range=(0, 1))[0] / len(x)),
        "takes `log1p` of a total",
    ),
    "places of samples among themselves": (
        lambda x, y, w: jnp.searchsorted(w, w).sum(),
        "sample|loop",
    ),
    "a matrix of each sample, divided by": (
        lambda x, y, w: jnp.linalg.solve(x[:, :, None] * x[:, None] + jnp.eye(3), x[..., None]),
        "rows",
    ),
    "a matrix of all samples, divided by": (
        lambda x, y, w: jnp.linalg.solve(x.T @ x + jnp.eye(3), jnp.ones(3)),
        "sum over the samples",
    ),
    "copies in a loop over the samples": (
        lambda x, y, w: lax.map(lambda row: jnp.tile(row / len(x), 2).sum(), x).sum(),
        "total",
    ),
}  # fmt: skip


# Of a single sample the same rules speak, so every run tries a total, rows, a constant, and values
# that depend on several samples.
OF_ONE_SAMPLE = (
    "a total looked up in a loop over the samples",
    "a constant looked up in a loop over the samples",
    "the sums of the positions of each class",
    "the counts of two batches",
    "a loop over ones",
    "features twice",
    "the batch as often as it has samples",
    "places of samples among themselves",
)


@pytest.mark.sample(*(f"{name}-(2, 8)" for name in CLAIMS), *(f"{n}-(1, 4)" for n in OF_ONE_SAMPLE))
@pytest.mark.parametrize("sizes", [(2, 8), (1, 4)], ids=str)
@pytest.mark.parametrize("name", CLAIMS)
def test_the_numbers_of_parts_give_those_of_the_whole(name, sizes):
    function, expected = CLAIMS[name]
    value = value_of(function, sizes)
    check(value, function, sizes)
    if value.kind is Kind.COUPLED:
        # JAX traces another program for a single sample, which need not be understood.
        is_one = sizes[0] == 1
        assert re.search(expected, value.why) or (is_one and "different program" in value.why)
    else:
        assert value.kind.value == expected
