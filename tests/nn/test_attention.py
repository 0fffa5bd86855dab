"""Attention split by heads against the same layer on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import DivisibilityError
from axon_dist.inspect import collectives
from axon_dist.nn import ParallelMLP, TensorParallelAttention

from .test_linear import ALL_REDUCES, per_rank

X = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)


def reference(layer, x, causal):
    """Computes attention head by head in NumPy."""
    q, k, v = (np.asarray(x @ w.kernel[...] + w.bias[...]) for w in (layer.q, layer.k, layer.v))
    size, share = layer.head_dim, layer.num_heads // layer.num_kv_heads
    mixed = []
    for head in range(layer.num_heads):
        own, shared = (slice(n * size, (n + 1) * size) for n in (head, head // share))
        scores = q[..., own] @ k[..., shared].swapaxes(-1, -2) / np.sqrt(size)
        if causal:
            scores = np.where(np.tril(np.ones(scores.shape[-2:])), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed.append(weights / weights.sum(-1, keepdims=True) @ v[..., shared])
    out = np.concatenate(mixed, -1)
    return out @ np.asarray(layer.out.kernel[...]) + np.asarray(layer.out.bias[...])


MORE = [(1, 4, False), (2, 4, False), (4, 4, True), (2, 2, True), (4, 2, False), (4, 1, False)]


@pytest.mark.full
@pytest.mark.sample("2-2-False")
@pytest.mark.parametrize(
    ("size", "kv_heads", "causal"),
    [
        (1, 4, True),
        (2, 4, True),
        (4, 4, False),
        (2, 2, False),
        (4, 2, True),
        (4, 1, True),
        *(pytest.param(*row, marks=pytest.mark.full) for row in MORE),
    ],
)
def test_both_views_equal_heads_one_by_one(make_world, causal, size, kv_heads):
    group = make_world(f"tp={size}").group("tp")
    options = {"num_kv_heads": kv_heads, "causal": causal, "rngs": nnx.Rngs(0)}
    layer = TensorParallelAttention(16, 4, group=group, **options)
    want = reference(layer, X, causal)
    np.testing.assert_allclose(jax.jit(layer)(X), want, atol=1e-5)
    stacked = np.asarray(per_rank(layer, group, P("tp"))(X))
    for rank in np.split(stacked, size):
        np.testing.assert_allclose(rank, want, atol=1e-5)


@pytest.mark.full
def test_gradients_equal_one_device(make_world):
    group = make_world("tp=4").group("tp")

    def gradients(group):
        layer = TensorParallelAttention(16, 4, num_kv_heads=2, group=group, rngs=nnx.Rngs(0))
        graphdef, params = nnx.split(layer)
        loss = lambda p, x: jnp.sum(jnp.sin(nnx.merge(graphdef, p)(x)))
        return jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1)))(params, X))

    for got, want in zip(gradients(group), gradients(None), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


class Block(nnx.Module):
    """Attention and feed-forward on a residual stream."""

    def __init__(self, group, rngs):
        self.attention = TensorParallelAttention(16, 4, group=group, rngs=rngs)
        self.mlp = ParallelMLP(16, 32, group=group, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


@pytest.mark.full
def test_a_block_has_two_sums_forward(make_world):
    world = make_world("tp=4")
    block = Block(world.group("tp"), nnx.Rngs(0))
    jaxpr = str(jax.make_jaxpr(per_rank(block, world.group("tp"), P()))(X))
    assert sum(jaxpr.count(f" {name}[") for name in ALL_REDUCES) == 2
    graphdef, params = nnx.split(block)
    forward = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))
    ledger = collectives(forward.lower(params, X).compile(), world.mesh)
    assert [row.kind for row in ledger] == ["all-reduce"] * 2


def test_heads_that_do_not_divide_name_axis_and_valid_sizes(make_world):
    make = lambda mesh, **options: TensorParallelAttention(
        48, group=make_world(mesh).group("tp"), rngs=nnx.Rngs(0), **options
    )
    with pytest.raises(DivisibilityError, match=r"4 heads .* tp=3; .*\[1, 2, 4\]"):
        make("tp=3", num_heads=4)
    with pytest.raises(DivisibilityError, match=r"6 heads and 3 key heads .* tp=2; .*\[1, 3, 6\]"):
        make("tp=2", num_heads=6, num_kv_heads=3)
    with pytest.raises(DivisibilityError, match=r"num_heads=6 .* num_kv_heads=4"):
        make("tp=2", num_heads=6, num_kv_heads=4)
    with pytest.raises(DivisibilityError, match=r"features=48 .* num_heads=5; .*head_dim"):
        make("tp=2", num_heads=5)
