"""Compressed means: the bytes sent, the error kept for the next step, and that nothing is lost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist import World
from axon_dist.collectives import Quantized, TopK, compression_of
from axon_dist.core.errors import ConfigError
from axon_dist.inspect import collectives

RANKS = 4
SHAPES = ((7, 9), (300,), ())
KINDS = [Quantized("int8", 16), Quantized("fp8", 16), Quantized("int8", 256), TopK(0.1), TopK(1.0)]


def values(seed=0):
    """Rank-stacked leaves whose scales differ by four orders of magnitude."""
    rng = np.random.default_rng(seed)
    draw = lambda n, shape: rng.normal(size=(RANKS, *shape)) * 10.0 ** (-n) * 3
    return [jnp.asarray(draw(n, shape), jnp.float32) for n, shape in enumerate(SHAPES)]


@functools.cache
def mapped(kind):
    mesh = World.emulate(RANKS, f"nodes={RANKS}").mesh

    def local(rows):
        mean, missing = kind.mean([row[0] for row in rows], "nodes", RANKS)
        return [x[None] for x in mean], [x[None] for x in missing]

    rows = P("nodes")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(rows,), out_specs=(rows, rows))), mesh


def rounded(blocks, kind):
    """Rounds to the nearest 8-bit numbers in numpy."""
    largest = {"int8": 127.0, "fp8": 448.0}[kind]
    top = np.abs(blocks).max(-1, keepdims=True)
    scale = np.where(top > 0, top / np.float32(largest), 1).astype(np.float32)
    scaled = np.clip(blocks / scale, -largest, largest)
    narrow = np.round(scaled) if kind == "int8" else scaled.astype(jnp.float8_e4m3fn)
    return narrow.astype(np.float32) * scale


def expected_mean(rows, kind):
    """The mean of rounded values, rounded again, block by block of each leaf."""
    if isinstance(kind, TopK):
        flat = rows.reshape(RANKS, -1)
        count = max(1, int(np.ceil(kind.share * flat.shape[1])))
        sent = np.zeros_like(flat)
        for rank in range(RANKS):
            places = np.argsort(-np.abs(flat[rank]), kind="stable")[:count]
            sent[rank, places] = flat[rank, places]
        return sent.mean(0).reshape(rows.shape[1:])
    flat = rows.reshape(RANKS, -1)
    size = flat.shape[1]
    blocks = np.pad(flat, ((0, 0), (0, -size % kind.block))).reshape(RANKS, -1, kind.block)
    mean = rounded(rounded(blocks, kind.kind).mean(0), kind.kind)
    return mean.reshape(-1)[:size].reshape(rows.shape[1:])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mean_is_what_was_sent_and_the_rest_is_kept(kind):
    run, mesh = mapped(kind)
    rows = values()
    mean, missing = run(rows)
    for leaf, found, left in zip(rows, mean, missing, strict=True):
        leaf, found, left = map(np.asarray, (leaf, found, left))
        for rank in range(1, RANKS):
            np.testing.assert_array_equal(found[rank], found[0])
        np.testing.assert_allclose(found[0], expected_mean(leaf, kind), rtol=2e-6, atol=1e-7)
        # Nothing is lost: the mean of the inputs is the result plus the mean of the kept errors.
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(found[0] + left.mean(0), leaf.mean(0), atol=2e-6 * scale)
    ledger = collectives(run.lower(rows).compile(), mesh)
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    assert ledger.total_wire_bytes() == kind.wire_bytes(sizes, RANKS)


@pytest.mark.parametrize("kind", [Quantized("int8"), TopK(0.05)], ids=str)
def test_feedback_brings_everything_in_the_end(kind):
    run, _ = mapped(kind)
    rows = list(map(np.asarray, values(1)))
    missing, total = list(map(np.zeros_like, rows)), 0.0
    for _ in range(40):
        mean, missing = run([x + np.asarray(e) for x, e in zip(rows, missing, strict=True)])
        total = total + np.asarray(mean[1])[0]
    want = np.asarray(rows[1]).mean(0)
    assert np.abs(total / 40 - want).max() < 0.5 * np.abs(want).max()
    without = np.asarray(run(rows)[0][1])[0]
    assert np.abs(total / 40 - want).mean() < np.abs(without - want).mean()


@pytest.mark.parametrize("kind", [Quantized("int8", 16), Quantized("fp8", 16)], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_stays_visible_on_all_ranks(kind, bad):
    rows = values()
    rows[1] = rows[1].at[2, 5].set(bad)
    run, _ = mapped(kind)
    mean, _ = run(rows)
    assert not np.isfinite(np.asarray(mean[1])[:, 5]).any()
    assert np.isfinite(np.asarray(mean[1])[:, 16:]).all()


@pytest.mark.parametrize("kind", [Quantized("int8", 16), Quantized("fp8", 16)], ids=str)
@pytest.mark.parametrize("size", [1e-36, 1e-38, 3e-39, 1e-44])
def test_the_last_rest_of_an_error_is_no_nan(kind, size):
    """The error of values that no longer change shrinks at each step, below what a scale holds."""
    run, _ = mapped(kind)
    rows = jnp.full((RANKS, 32), size, jnp.float32).at[:, ::2].set(0)
    mean, missing = run([rows])
    for found in (*mean, *missing):
        assert np.isfinite(found).all()
        assert np.abs(found).max() <= 1.1 * size


@pytest.mark.parametrize("kind", [Quantized("fp8", 16), TopK(0.1)], ids=str)
def test_a_leaf_without_numbers_sends_none(kind):
    run, _ = mapped(kind)
    mean, missing = run([jnp.zeros((RANKS, 0, 3)), jnp.ones((RANKS, 2))])
    assert mean[0].shape == missing[0].shape == (RANKS, 0, 3)
    assert kind.wire_bytes([0], RANKS) == 0


def test_wrong_compressions_are_refused():
    with pytest.raises(ConfigError, match=r"there is no compression 'int9'\. Did you mean 'int8'"):
        compression_of("int9")
    with pytest.raises(ConfigError, match="unknown kind 'int4'"):
        Quantized("int4")
    with pytest.raises(ConfigError, match="block is 0; give the number of values"):
        Quantized("int8", 0)
    with pytest.raises(ConfigError, match=r"share is 1\.5; give the fraction"):
        TopK(1.5)
    assert compression_of("top_k") == TopK()
    assert compression_of(None) is None
