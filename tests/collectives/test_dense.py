"""Every collective: values and gradients equal the dense expression, inside and outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist import World
from axon_dist import collectives as c

from .dense import GROUPS, dense, in_shard_map, value_and_vjp

SHAPE = (24, 2)


def everyone(value, rows):
    return jnp.broadcast_to(value, (len(rows), *value.shape))


def slices(value, rows):
    return value.reshape(len(rows), -1, *value.shape[1:])


def exchanged(rows):
    parts = [slices(row, rows) for row in rows]
    return jnp.stack([jnp.concatenate([p[i] for p in parts], 1) for i in range(len(rows))])


TABLE = {
    "sum": (c.all_reduce_sum, lambda r: everyone(r.sum(0), r)),
    "mean": (c.all_reduce_mean, lambda r: everyone(r.mean(0), r)),
    "min": (c.all_reduce_min, lambda r: everyone(r.min(0), r)),
    "max": (c.all_reduce_max, lambda r: everyone(r.max(0), r)),
    "product": (c.all_reduce_product, lambda r: everyone(r.prod(0), r)),
    "ring": (c.ring_all_reduce, lambda r: everyone(r.sum(0), r)),
    "broadcast": (c.broadcast, lambda r: everyone(r[0], r)),
    "broadcast_from": (
        functools.partial(c.broadcast_from, src=1),
        lambda r: everyone(r[1], r),
    ),
    "all_gather": (c.all_gather, lambda r: everyone(r, r)),
    "all_gather tiled": (
        functools.partial(c.all_gather, tiled=True, dim=1),
        lambda r: everyone(jnp.concatenate(list(r), 1), r),
    ),
    "gather": (
        functools.partial(c.gather_tensor, dst=1),
        lambda r: jnp.zeros((len(r), *r.shape)).at[1].set(r),
    ),
    "scatter": (functools.partial(c.scatter_tensor, src=1), lambda r: slices(r[1], r)),
    "reduce_scatter_sum": (c.reduce_scatter_sum, lambda r: slices(r.sum(0), r)),
    "reduce_scatter_mean": (c.reduce_scatter_mean, lambda r: slices(r.mean(0), r)),
    "all_to_all": (functools.partial(c.all_to_all, split_dim=0, concat_dim=1), exchanged),
    "send_recv": (
        functools.partial(c.send_recv, perm=[(0, 2), (1, 0)]),
        lambda r: jnp.zeros_like(r).at[2].set(r[0]).at[0].set(r[1]),
    ),
    "shift ring": (functools.partial(c.shift, offset=1), lambda r: jnp.roll(r, 1, 0)),
    "shift line": (
        functools.partial(c.shift, offset=-1, wrap=False),
        lambda r: jnp.roll(r, -1, 0).at[-1].set(0),
    ),
    "sync_gradients": (c.sync_gradients, lambda r: everyone(r.mean(0), r)),
}


def numbers():
    """Small whole numbers: ties, zeros and negatives, and sums that are exact."""
    return np.random.default_rng(0).integers(-2, 3, (8, *SHAPE)).astype(np.float32)


@pytest.fixture
def x():
    return numbers()


def cotangent_of(shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@functools.cache
def expectations(kind):
    """Computes value and gradient of every dense expression for a kind of group in one program."""
    group = GROUPS[kind](World.emulate(8, "dp=2,tp=4"))

    @jax.jit
    def all_of(x):
        found = {}
        for name, (_, meaning) in TABLE.items():
            value, vjp = jax.vjp(functools.partial(dense, meaning, group=group), x)
            found[name] = value, vjp(cotangent_of(value.shape))[0]
        return found

    return all_of(numbers())


def check(collective, name, kind, x):
    wanted, wanted_gradient = expectations(kind)[name]
    value, gradient = value_and_vjp(collective, x, cotangent_of(wanted.shape))
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-5, atol=1e-5)


PLACES = [
    ("one of two axes", True),
    ("list of ranks", False),
    *(
        pytest.param(*place, marks=pytest.mark.full)
        for place in (("one of two axes", False), ("both axes", True), ("list of ranks", True))
    ),
]


@pytest.mark.parametrize(("kind", "check_vma"), PLACES)
@pytest.mark.parametrize("name", TABLE)
def test_inside_shard_map(name, kind, check_vma, make_world, x):
    collective, _ = TABLE[name]
    world = make_world("dp=2,tp=4")
    group = GROUPS[kind](world)
    inside = in_shard_map(lambda v: collective(v, group), world.mesh, check_vma)
    check(inside, name, kind, x)


# All share the same code there; one sums, one grows, one shrinks, and one excludes some ranks.
@pytest.mark.sample("sum", "all_gather", "reduce_scatter_sum", "send_recv")
@pytest.mark.parametrize("name", TABLE)
def test_on_rank_stacked_arrays(name, make_world, x):
    collective, _ = TABLE[name]
    group = make_world("dp=2,tp=4").group("tp")
    check(functools.partial(collective, group=group), name, "one of two axes", x)


@pytest.mark.parametrize("name", TABLE)
def test_on_one_rank_is_the_identity(name, make_world, x):
    group = make_world("dp=1").default_group
    collective = {
        "send_recv": functools.partial(c.send_recv, perm=[(0, 0)]),
        "shift line": functools.partial(c.shift, offset=0, wrap=False),
        "broadcast_from": functools.partial(c.broadcast_from, src=0),
        "gather": c.gather_tensor,
        "scatter": c.scatter_tensor,
    }.get(name, TABLE[name][0])
    value = collective(x[:1], group)
    np.testing.assert_array_equal(value.reshape(SHAPE), x[0])


@pytest.mark.parametrize("name", ["sum", "max", "all_gather", "shift ring", "reduce_scatter_sum"])
def test_pytrees_keep_their_structure(name, make_world, x):
    collective, _ = TABLE[name]
    group = make_world("dp=8").default_group
    tree = {"a": [x], "b": (x + 1, None)}
    result = collective(tree, group)
    assert jax.tree.structure(result) == jax.tree.structure(tree)
    np.testing.assert_array_equal(result["b"][0], collective(x + 1, group))
