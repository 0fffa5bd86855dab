"""Optimizers that would notice the stacking of blocks are refused; others are not."""

import functools

import jax
import optax
import pytest
from flax import nnx

from axon_dist.core.errors import UnsupportedError
from axon_dist.models import MLP
from axon_dist.parallel import pipelined
from axon_dist.pipeline.rowwise import check_rowwise
from axon_dist.step.parts import take_apart
from axon_dist.step.storage import storage_of


@pytest.fixture(params=[(8, 8, 8), (8, 4, 2)], ids=["rows", "vectors"])
def rows(request):
    parts, _ = take_apart(MLP(request.param, rngs=nnx.Rngs(0)))
    return storage_of(parts, pipelined(2, 2)).rows


def each(update):
    """A transformation of every leaf by itself."""
    return optax.stateless_with_tree_map(lambda g, p: update(g))


@functools.partial(jax.jit, inline=True)
def halved(tree):
    """One call over all leaves, as optax.tree.bias_correction is one."""
    return jax.tree.map(lambda g: g / 2, tree)


def matrices_only(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
        optax.lion(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
        each(lambda g: jax.numpy.sign(g) * 0.1),
        each(jax.jit(lambda g: g / 3)),
        optax.stateless(lambda updates, params: halved(updates)),
    ],
)
def test_element_by_element_is_allowed(optimizer, rows):
    check_rowwise(optimizer, rows)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.lamb(1e-3),
        optax.adafactor(1e-3, min_dim_size_to_factor=2),
        optax.adamw(1e-3, mask=matrices_only),
        optax.add_noise(0.1, 0.55, 0),
        each(lambda g: g / g.shape[0]),
        each(jax.jit(lambda g: g / g.shape[0])),
        each(lambda g: jax.numpy.cumsum(g, axis=0)),
        each(lambda g: jax.numpy.flip(g, axis=0)),
    ],
)
def test_by_shape_or_leaf_is_refused(optimizer, rows):
    with pytest.raises(UnsupportedError, match=r"'layers/.*stacked.*masks that decide by path"):
        check_rowwise(optimizer, rows)
