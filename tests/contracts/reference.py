"""The oracle: the same model on one device, in plain JAX, with none of our code in the way."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist.core.weighted import Weighted


@dataclasses.dataclass(frozen=True)
class Trace:
    """What a training run did: numbers per step, and the arrays at its end."""

    losses: list
    grads: list
    params: dict
    buffers: dict


def split(leaf, count: int) -> list:
    """Consecutive microbatches of an array."""
    return np.split(np.asarray(leaf), count)


def train(case, optimizer, num_steps: int, accumulate: int = 1, clip_norm=None) -> Trace:
    """Trains on one device: microbatches in a Python loop, sums divided by the total weight."""
    graphdef, params, buffers = nnx.split(case.make(), nnx.Param, ...)
    params, buffers = nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)
    opt_state = optimizer.init(params)

    def total_of(params, buffers, batch):
        model = nnx.merge(graphdef, params, buffers, copy=True)
        value = case.loss_fn(model, batch)
        loss = value[0] if isinstance(value, tuple) else value
        loss = loss if isinstance(loss, Weighted) else Weighted(loss, 1.0)
        buffers = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        return loss.total, (loss.weight, buffers)

    gradient = jax.jit(jax.value_and_grad(total_of, has_aux=True))
    losses, all_grads = [], []
    for step in range(num_steps):
        pieces = {name: split(leaf, accumulate) for name, leaf in case.batch(step).items()}
        total = weight = 0.0
        grads = jax.tree.map(jnp.zeros_like, params)
        for index in range(accumulate):
            piece = {name: leaf[index] for name, leaf in pieces.items()}
            (value, (size, buffers)), grad = gradient(params, buffers, piece)
            total, weight = total + value, weight + size
            grads = jax.tree.map(jnp.add, grads, grad)
        grads = jax.tree.map(lambda g, weight=weight: g / weight, grads)
        if clip_norm is not None:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            factor = jnp.minimum(1.0, clip_norm / (norm + 1e-6))
            all_grads.append(grads)
            grads = jax.tree.map(lambda g, factor=factor: g * factor, grads)
        else:
            all_grads.append(grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(total / weight))
    return Trace(losses, all_grads, params, buffers)


def assert_close(actual, expected, tolerance: float, what: str) -> None:
    """Compares trees leaf by leaf, relative to the largest element of each expected leaf."""
    expected_leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), got in zip(expected_leaves, jax.tree.leaves(actual), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            want, got = jax.random.key_data(want), jax.random.key_data(got)
        want, got = np.asarray(want), np.asarray(got)
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        scale = max(np.abs(want.astype(wide)).max(initial=0), 1e-3)
        worst = np.abs(got.astype(wide) - want).max(initial=0) / scale
        where = jax.tree_util.keystr(path)
        assert worst <= tolerance, (
            f"{what}{where} differs by {worst:.2e}, more than {tolerance:.0e}"
        )
