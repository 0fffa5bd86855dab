"""Attention to a block of keys: every kernel equals the tiled products, and results merge."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import UnsupportedError
from axon_dist.models import einsum_attention
from axon_dist.ops import attention as block_attention
from axon_dist.ops import packed
from axon_dist.ops.attention import BLOCK_KERNELS, BlockAttention, Keys, Queries, merged

PLAIN = BLOCK_KERNELS["einsum"]
INTERPRETED = dataclasses.replace(BLOCK_KERNELS["flash"], interpret=True)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


@functools.partial(jax.jit, static_argnames=("length", "heads", "kv_heads", "size", "segmented"))
def arrays(length=128, heads=2, kv_heads=1, size=8, segmented=False):
    """Returns queries whose result covers further keys too, and a block of keys."""
    segments = jnp.arange(length)[None] // 48 if segmented else None
    shape = (1, length, heads, size)
    keys = Keys(*(random(n, 1, length, kv_heads, size) for n in (1, 2)), segments)
    queries = Queries(random(0, *shape), segments)
    out, log_weight = PLAIN.forward(queries, keys, False)
    other = (random(3, *shape), log_weight + random(4, 1, length, heads))
    out, log_weight = merged((out, log_weight), other)
    cotangent = random(5, *shape)
    delta = jnp.sum(out * cotangent, -1)
    return Queries(queries.query, segments, cotangent, log_weight, delta, out), keys


@pytest.mark.full
@pytest.mark.parametrize(("causal", "segmented"), [(True, False), (False, True)])
def test_the_kernel_for_tpus(causal, segmented):
    queries, keys = arrays(segmented=segmented)
    for mine in (queries, queries._replace(out=None)):
        got = INTERPRETED.forward(mine, keys, causal), INTERPRETED.backward(mine, keys, causal)
        want = PLAIN.forward(mine, keys, causal), PLAIN.backward(mine, keys, causal)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-5)
            assert ours.dtype == jnp.float32


@pytest.mark.full
def test_tiles_are_parts_of_one_softmax(monkeypatch):
    queries, keys = arrays(length=12, segmented=True)
    whole = PLAIN.forward(queries, keys, True), PLAIN.backward(queries, keys, True)
    monkeypatch.setattr(block_attention, "BLOCK", 5)  # 12 positions are tiles of 4
    tiled = PLAIN.forward(queries, keys, True), PLAIN.backward(queries, keys, True)
    for ours, theirs in zip(jax.tree.leaves(tiled), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.sample("False")
@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_a_packed_row_are_alone(causal, monkeypatch):
    """Attention piece by piece equals that of the whole row with other documents masked."""
    monkeypatch.setattr(packed, "PIECE", 8)
    query, key, value = (random(n, 2, 32, heads, 8) for n, heads in ((0, 4), (1, 2), (2, 2)))
    lengths = [[5, 3, 14, 10], [20, 1, 1, 10]]  # within pieces, over several, of one token
    segments = np.stack([np.repeat(np.array([3, 1, 2, 0]), x) for x in lengths])

    def results(attend):
        def both(cotangent, *qkv):
            out, pull = jax.vjp(attend, *qkv)
            return out, *pull(cotangent)

        return jax.jit(both)(random(3, *query.shape), query, key, value)

    got = results(lambda *qkv: packed.packed_attention(*qkv, segments, causal))
    want = results(lambda *qkv: einsum_attention(*qkv, causal, segments))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_pairs_without_a_common_document_are_left_out(monkeypatch):
    monkeypatch.setattr(packed, "PIECE", 8)
    visited = []

    def visit(state, mine, theirs):
        jax.debug.callback(lambda *pair: visited.append(tuple(map(int, pair))), mine, theirs)
        return state

    segments = jnp.array([[0] * 8 + [1] * 12 + [2] * 12])
    jax.block_until_ready(packed._over_pairs(visit, (jnp.zeros(1),), packed._cut(segments), True))
    jax.effects_barrier()
    assert visited == [(2, 1), (3, 2)]


@pytest.mark.sample("1e-25", "0.0")
@pytest.mark.parametrize("scale", [1.0, 1e-25, 0.0])
def test_stand_ins_of_a_result_have_its_delta(scale):
    queries, _ = arrays()
    cotangent = queries.cotangent * scale
    delta = jnp.sum(queries.out * cotangent, -1)
    stands = block_attention._result(queries._replace(out=None, cotangent=cotangent, delta=delta))
    got = jnp.sum(stands * cotangent, -1)
    np.testing.assert_allclose(got / (scale or 1), delta / (scale or 1), atol=1e-5)
    assert jnp.abs(stands).max() <= jnp.abs(queries.out).max() * queries.out.shape[-1]


@pytest.mark.full
def test_a_query_that_sees_no_key_of_a_block_takes_nothing_from_it():
    queries, keys = arrays(length=8)
    other_segment = Keys(keys.key, keys.value, jnp.full((1, 8), 7))
    mine = queries._replace(segments=jnp.zeros((1, 8), jnp.int32))
    state = (queries.out, queries.log_weight)
    got = merged(PLAIN.forward(mine, other_segment, False), state)
    for ours, theirs in zip(got, state, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for gradient in PLAIN.backward(mine, other_segment, False):
        np.testing.assert_array_equal(gradient, 0)


def test_a_form_that_cannot_run_says_why():
    queries, keys = arrays()
    with pytest.raises(UnsupportedError, match=r"attention='flash' around a ring, .*not a TPU"):
        BlockAttention("flash").forward(queries, keys)
    with pytest.raises(UnsupportedError, match=r"attention='cudnn' around a ring, blocks of"):
        BlockAttention("cudnn").forward(queries, keys)
