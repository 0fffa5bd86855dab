"""Products with joined rows: the same values and gradients, and sums over one dim."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.pipeline import with_merged_batch_dims


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def matmul(x, w):
    return jnp.tanh(x @ w)


def heads(x, w):
    return jnp.einsum("btd,dhk->bthk", x, w.reshape(8, 2, 3))


def merged_heads(x, w):
    split = x.reshape(*x.shape[:-1], 2, 4)
    return jnp.einsum("bthk,hkd->btd", split, w.reshape(2, 4, 6))


def in_calls(x, w):
    inner = jax.jit(lambda x: jax.nn.silu(x @ w) @ w.T)
    return jax.jit(inner)(x)


def recomputed(x, w):
    return jax.checkpoint(matmul, policy=jax.checkpoint_policies.dots_saveable)(x, w)


FUNCTIONS = [matmul, heads, merged_heads, in_calls, recomputed]


def equations(jaxpr):
    """All equations, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            if hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


def products(function, *args):
    found = equations(jax.make_jaxpr(function)(*args).jaxpr)
    return [e for e in found if e.primitive.name == "dot_general"]


def summed_dims(equation) -> int:
    return len(equation.params["dimension_numbers"][0][0])


def gradient_of(function):
    return jax.grad(lambda x, w: jnp.sum(jnp.sin(function(x, w))), argnums=(0, 1))


def close(one, other):
    """Sums in another order differ by rounding of the largest element, however small an element."""
    scale = np.abs(np.asarray(other)).max()
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * scale)


@pytest.mark.sample("heads", "merged_heads", "in_calls", "recomputed")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_and_gradients_are_the_same(function):
    x, w = normal(0, 2, 3, 8), normal(1, 8, 6)
    joined = with_merged_batch_dims(function)
    both = lambda f: lambda x, w: (f(x, w), gradient_of(f)(x, w))
    jax.tree.map(close, jax.jit(both(joined))(x, w), jax.jit(both(function))(x, w))


@pytest.mark.parametrize("function", [matmul, heads, in_calls, recomputed])
def test_gradients_of_weights_sum_over_one_dim(function):
    x, w = normal(0, 2, 3, 8), normal(1, 8, 6)
    weight_gradient = jax.grad(lambda w, f: jnp.sum(jnp.sin(f(x, w))))
    plain = products(functools.partial(weight_gradient, f=function), w)
    joined = products(functools.partial(weight_gradient, f=with_merged_batch_dims(function)), w)
    assert max(map(summed_dims, plain)) == 2
    assert max(map(summed_dims, joined)) == 1
    assert len(plain) == len(joined)


def test_recomputed_blocks_stay_recomputed():
    x, w = normal(0, 2, 3, 8), normal(1, 8, 6)
    remat = jax.checkpoint(matmul)
    counts = [
        len(products(gradient_of(f), x, w)) for f in (matmul, remat, with_merged_batch_dims(remat))
    ]
    assert counts[1] == counts[2] == counts[0] + 1


def test_batched_products_and_matrices_stay_as_they_are():
    attention = lambda q, k: jnp.einsum("bqd,bkd->bqk", q, k)
    q = normal(0, 2, 3, 8)
    assert "reshape" not in str(jax.make_jaxpr(with_merged_batch_dims(attention))(q, q))
    assert "reshape" not in str(jax.make_jaxpr(with_merged_batch_dims(jnp.dot))(q[0], q[1].T))


def test_trees_go_in_and_out():
    function = with_merged_batch_dims(lambda tree: {"y": tree["x"] @ tree["w"], "n": tree["n"] + 1})
    result = function({"x": normal(0, 2, 3, 8), "w": normal(1, 8, 6), "n": jnp.int32(1)})
    assert result["y"].shape == (2, 3, 6)
    assert result["n"] == 2


def test_shared_products_are_computed_once():
    shared = lambda x, w: x @ w + jnp.sin(x @ w) + x @ jnp.cos(w)
    x, w = normal(0, 2, 3, 8), normal(1, 8, 6)
    found = list(equations(jax.make_jaxpr(with_merged_batch_dims(shared))(x, w).jaxpr))
    assert [e.outvars[0].aval.shape for e in found].count((6, 8)) == 1
