"""Ring and Ulysses attention on split sequences against attention on whole ones in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.inspect import collectives
from axon_dist.models import einsum_attention
from axon_dist.nn import ring_attention, ulysses_attention
from axon_dist.ops.packed import num_pieces, packed_attention
from axon_dist.ops.ring import Ring

RNG = np.random.default_rng(0)
STATE = RNG.bit_generator.state
SPEC = P(None, "cp")


@pytest.fixture(autouse=True)
def same_numbers_in_any_order():
    RNG.bit_generator.state = STATE


def heads(length, num, size=4):
    return RNG.normal(size=(2, length, num, size)).astype(np.float32)


def whole(query, key, value, causal):
    """Softmax attention over the whole sequence, with grouped heads."""
    share = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, share, axis=2) for x in (key, value))
    scores = jnp.einsum("bthk,bshk->bhts", query, key) * query.shape[-1] ** -0.5
    if causal:
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(visible, scores, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores), value)


def split(function, mesh):
    return jax.shard_map(function, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=SPEC)


def compare(attend, causal, arrays):
    """Outputs and gradients against `whole`."""
    weigh = RNG.normal(size=arrays[0].shape).astype(np.float32)

    def results(f):
        def loss(*arrays):
            out = f(*arrays)
            return jnp.sum(out * weigh), out

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)

    (want, out), grads = results(functools.partial(whole, causal=causal))
    (got, mine), found = results(attend)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for ours, theirs in zip(found, grads, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(mine, out, atol=1e-5)


# Every run compares a causal ring of four in float64, below, which sends keys around, not queries.
@pytest.mark.sample("2-4-False")
@pytest.mark.parametrize(
    ("size", "kv_heads", "causal"),
    [
        (1, 4, False),
        (2, 2, True),
        (2, 4, False),
        (4, 1, False),
        (8, 4, True),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in [(1, 4, True), (2, 2, False), (4, 1, True), (8, 4, False)]
        ),
    ],
)
def test_ring_equals_whole_attention(make_world, size, kv_heads, causal):
    mesh = make_world(f"cp={size}").mesh
    attend = split(functools.partial(ring_attention, axis="cp", causal=causal), mesh)
    compare(attend, causal, (heads(16, 4), heads(16, kv_heads), heads(16, kv_heads)))


def outputs_and_gradients(attend, arrays):
    """Those of causal attention, in one program; all must be float64."""

    def loss(*arrays):
        out = attend(*arrays)
        return jnp.sum(jnp.sin(out)), out

    grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    results = (out, *grads)
    assert all(x.dtype == jnp.float64 for x in results)
    return results


@functools.cache
def float64_arrays_and_results(kv_heads):
    """Arrays in float64, and what attention over whole sequences makes of them."""
    arrays = [RNG.normal(size=(2, 16, heads, 4)) for heads in (4, kv_heads, kv_heads)]
    plain = functools.partial(whole, causal=True)
    return arrays, outputs_and_gradients(plain, arrays)


def difference(attend, kv_heads):
    """The largest difference of outputs and gradients from those over whole sequences."""
    arrays, want = float64_arrays_and_results(kv_heads)
    got = outputs_and_gradients(attend, arrays)
    return max(np.abs(np.asarray(x) - y).max() for x, y in zip(got, want, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("kv_heads", [4, 2])  # sends queries around, or keys
def test_float64_is_as_precise_around_a_ring(make_world, kv_heads):
    mesh = make_world("cp=4").mesh
    attend = split(functools.partial(ring_attention, axis="cp", causal=True), mesh)
    with jax.enable_x64(True):
        assert difference(attend, kv_heads) < 1e-13


@pytest.mark.full
def test_float64_is_as_precise_in_packed_rows_and_with_scores_in_memory(monkeypatch):
    monkeypatch.setattr("axon_dist.ops.packed.PIECE", 8)
    with jax.enable_x64(True):
        one_document = jnp.zeros((2, 16), jnp.int32)
        pieces = lambda *x: packed_attention(*x, one_document, True)
        assert num_pieces(16) == 2
        for attend in (pieces, lambda *x: einsum_attention(*x, causal=True)):
            assert difference(attend, kv_heads=2) < 1e-13


@pytest.mark.full
def test_keys_in_blocks_are_the_same_keys(make_world, monkeypatch):
    monkeypatch.setattr("axon_dist.ops.attention.BLOCK", 2)
    mesh = make_world("cp=2").mesh
    attend = split(functools.partial(ring_attention, axis="cp", causal=True), mesh)
    compare(attend, True, (heads(16, 2), heads(16, 2), heads(16, 2)))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_ulysses_equals_whole_attention(make_world, size):
    mesh = make_world(f"cp={size}").mesh
    inner = functools.partial(whole, causal=True)
    attend = split(functools.partial(ulysses_attention, axis="cp", attend=inner), mesh)
    compare(attend, True, (heads(16, 4), heads(16, 4), heads(16, 4)))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_has_the_same_work(size):
    """The causal mask allows exactly two pairs of pieces per rank and step."""
    mask = np.tril(np.ones((2 * size, 2 * size), int))
    seen = np.zeros_like(mask)
    for rank in range(size):
        pieces = (rank, 2 * size - 1 - rank)
        seen[np.ix_(pieces, pieces)] += np.tril(np.ones((2, 2), int))
        for other in set(range(size)) - {rank}:
            keys = (other, 2 * size - 1 - other)
            pairs = Ring("cp", size, True).pairs(other < rank)
            assert len(pairs) == 2
            for mine, theirs in pairs:
                seen[pieces[int(mine)], keys[int(theirs)]] += 1
    np.testing.assert_array_equal(seen, mask)


@pytest.mark.sample("2")
@pytest.mark.parametrize("size", [2, 5])
def test_dealing_is_undone(make_world, size):
    mesh = make_world(f"cp={size}").mesh
    ring = Ring("cp", size, True)
    x = np.arange(4 * size).reshape(1, 4 * size)
    over = lambda f: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=SPEC, out_specs=SPEC))
    np.testing.assert_array_equal(over(ring.distribute)(x)[0], ring.positions(4 * size))
    pieces = np.asarray(ring.positions(4 * size)).reshape(size, 2, 2)
    whole = np.arange(4 * size).reshape(2 * size, 2)
    np.testing.assert_array_equal(pieces[:, 0], whole[:size])
    np.testing.assert_array_equal(pieces[:, 1], whole[: size - 1 : -1])
    np.testing.assert_array_equal(over(lambda x: ring.restore(ring.distribute(x)))(x), x)


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_backwards_the_lighter_half_goes_around(make_world, kv_heads):
    """Sends keys, values and their gradients, or queries, cotangents, gradients and two numbers."""
    world = make_world("cp=2")
    attend = split(functools.partial(ring_attention, axis="cp", causal=False), world.mesh)
    arrays = [heads(16, 4, 8), heads(16, kv_heads, 8), heads(16, kv_heads, 8)]
    gradients = jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), argnums=(0, 1, 2))
    ledger = collectives(jax.jit(gradients).lower(*arrays).compile(), world.mesh)
    query, key = arrays[0].nbytes // 2, arrays[1].nbytes // 2
    numbers = 2 * 4 * query // 8 // 4
    # In a program this small the compiler sees that keys go around twice, and sends them once.
    sent = 4 * key if kv_heads == 1 else 2 * key + 3 * query + numbers
    assert ledger.by_kind() == {"collective-permute": sent}


def test_the_ring_sends_keys_and_values_and_nothing_else(make_world):
    world = make_world("cp=4")
    attend = split(functools.partial(ring_attention, axis="cp", causal=False), world.mesh)
    arrays = [heads(16, 2) for _ in range(3)]
    ledger = collectives(jax.jit(attend).lower(*arrays).compile(), world.mesh)
    assert ledger.by_kind() == {"collective-permute": 3 * 2 * arrays[0].nbytes // 4}
