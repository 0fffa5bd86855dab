"""Eight mistakes of public history, each rebuilt as a small program of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .parts import BATCH, DATA, MASK, SEQUENCE, TARGETS, WEIGHTS, net, normal, placed, sharded

HISTORIC = {}


def known(name):
    def add(make):
        HISTORIC[name] = make
        return make

    return add


@known("Megatron-LM 7452")
def router_gradient_of_sequence_parts(mesh):
    """A weight that all ranks hold sees a part of the sequence: its gradient is a part too."""

    def step(router, x):
        def loss(router):
            scores = jax.nn.softmax(x @ router)
            return jnp.sum(scores**2)

        grad = jax.grad(loss)(router)  # wrong
        return router - 0.1 * grad

    spec = P(None, "dp")
    run = sharded(mesh, step, (P(), spec), P(), check=False)
    return run, (normal(8, 4), SEQUENCE)


@known("torchtitan 4245")
def loss_divided_by_local_tokens(mesh):
    def loss(w, x, y, m):
        errors = jnp.sum((net(w, x) - y) ** 2, -1) * m
        mean = errors.sum() / m.sum()  # wrong
        return lax.pmean(mean, "dp")

    run = sharded(mesh, loss, (P(), DATA, DATA, DATA), P())
    return run, (WEIGHTS, BATCH, TARGETS, MASK)


@known("torchtitan 4154")
def gradient_norm_without_the_tensor_axis(mesh):
    def clip(g):
        squares = lax.psum(jnp.sum(g * g), "dp")  # wrong
        norm = jnp.sqrt(squares)
        return g / norm

    spec = P("dp", "tp")
    return sharded(mesh, clip, (spec,), spec), (BATCH,)


@known("torchtitan 4054")
def positions_under_context_parallel(mesh):
    table = normal(16, 8)

    def body(table, x):
        positions = jnp.arange(x.shape[1])  # wrong
        return x + table[positions]

    spec = P(None, "dp")
    return sharded(mesh, body, (P(), spec), spec, check=False), (table, SEQUENCE)


@known("MaxText PR 4959")
def cotangent_of_tiles_counted_again(mesh):
    """A derivative written by hand sums a cotangent that is whole on every rank already."""

    @jax.custom_vjp
    def scores(x, w):
        return x @ w

    def forward(x, w):
        return x @ w, (x, w)

    def backward(saved, cotangent):
        x, w = saved
        cotangent = lax.psum(cotangent, "tp")  # wrong
        return cotangent @ w.T, x.T @ cotangent

    scores.defvjp(forward, backward)

    def step(w, x):
        return jax.grad(lambda w: jnp.sum(scores(x, w) ** 2))(w)

    return sharded(mesh, step, (P(), P()), P(), check=False), (WEIGHTS["up"], BATCH)


@known("MaxText PR 4525")
def auxiliary_loss_of_the_first_rank(mesh):
    """A loss that is returned as if all ranks had it, and is that of the first."""

    def loss(w, x):
        extra = jnp.mean((x @ w) ** 2)  # wrong
        return lax.pmean(jnp.mean(x**2), "dp"), extra

    return sharded(mesh, loss, (P(), DATA), P(), check=False), (WEIGHTS["up"], BATCH)


@known("jax 36886")
def draws_that_ranks_share(mesh):
    key = jax.random.key(1)

    def body(x):
        noise = jax.random.uniform(key, x.shape)  # wrong
        return x + noise

    return sharded(mesh, body, (DATA,), DATA), (BATCH,)


@known("axolotl 3867")
def packed_loss_under_context_parallel(mesh):
    """Each rank's sum of token losses is divided by the tokens of one, and the parts are added."""
    mask = np.ones((2, 16), np.float32)
    mask[:, 9:] = 0

    def loss(x, w, m):
        losses = jnp.sum((x @ w) ** 2, -1)
        mean = (losses * m).sum() / jnp.maximum(m.sum(), 1.0)  # wrong
        return lax.psum(mean, "dp")  # wrong

    spec = P(None, "dp")
    run = sharded(mesh, loss, (spec, P(), spec), P())
    return run, (SEQUENCE, WEIGHTS["down"], mask)


@known("groups by jit")
def statistics_of_ghost_batches(mesh):
    """Not of the eight: the same class without a `shard_map`."""
    groups = mesh.shape["dp"]

    def norm(x):
        parts = x.reshape(groups, -1, 8)
        centre = parts.mean(1, keepdims=True)  # wrong
        return (parts - centre).reshape(x.shape)

    return jax.jit(norm, in_shardings=placed(mesh, DATA)), (BATCH,)
