"""Products whose positions go round a ring of ranks, against the product of whole arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist import World
from axon_dist.ops.ring_product import MatmulRing, into_columns, into_rows, pieces_of

RNG = np.random.default_rng(0)
X, UP, GATE, DOWN = (
    RNG.normal(size=size).astype(np.float32) for size in ((2, 16, 8), (8, 24), (8, 24), (24, 8))
)
POSITIONS, FEATURES = P(None, "tp"), P(None, None, "tp")


def dense(x, up, gate, down):
    return (jnp.tanh(x @ up) * (x @ gate)) @ down


def ringed(size):
    mesh = World.emulate(size, f"tp={size}").mesh
    ring = MatmulRing("tp", size)

    def local(x, up, gate, down):
        pieces = pieces_of(ring, x)
        hidden, gates = (into_columns(ring, jnp.matmul, pieces, kernel) for kernel in (up, gate))
        return into_rows(ring, jnp.matmul, jnp.tanh(hidden) * gates, down)

    columns, rows = P(None, "tp"), P("tp")
    specs = (POSITIONS, columns, columns, rows)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=POSITIONS, check_vma=False)
    )


@pytest.mark.sample("4")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_values_and_gradients_are_those_of_the_product(size):
    arrays = tuple(map(jnp.asarray, (X, UP, GATE, DOWN)))
    weigh = jnp.asarray(RNG.normal(size=X.shape), jnp.float32)
    loss = lambda f: lambda *a: jnp.sum(f(*a) * weigh)
    want, got = (
        jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1, 2, 3)))(*arrays)
        for f in (dense, ringed(size))
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for ours, theirs in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_nothing_travels_but_single_pieces():
    program = jax.make_jaxpr(lambda *a: ringed(4)(*a))(X, UP, GATE, DOWN)
    text = str(program)
    # One ring sends the input pieces for both kernels, and one sums the outputs.
    assert text.count("ppermute[") == 3 + 3
    assert "all_gather" not in text
    assert "psum" not in text
