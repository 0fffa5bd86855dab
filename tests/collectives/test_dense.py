"""Every collective: values and gradients equal the dense expression, inside and outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist import World
from axon_dist import collectives as c

from .dense import GROUPS, in_shard_map, value_and_vjp

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
    """Value and gradient of every dense expression for a kind of group.

    One program computes those of the members; all others keep their rows, or get zeros.
    """
    ranks = np.array(GROUPS[kind](World.emulate(8, "dp=2,tp=4")).partition())
    x = numbers()

    @jax.jit
    def of_members(rows):
        found = {}
        for name, (_, meaning) in TABLE.items():
            value, vjp = jax.vjp(jax.vmap(meaning), rows)
            found[name] = value, vjp(cotangent_of((8, *value.shape[2:]))[ranks])[0]
        return found

    def of_all(members, others):
        result = np.array(others)
        result[ranks] = members
        return result

    found = {}
    for name, (value, gradient) in of_members(x[ranks]).items():
        shape = (8, *value.shape[2:])
        keeps = shape == x.shape
        found[name] = (
            of_all(value, x if keeps else np.zeros(shape)),
            of_all(gradient, cotangent_of(shape) if keeps else np.zeros(x.shape)),
        )
    return found


def check(found, name, kind):
    (value, gradient), (wanted, wanted_gradient) = found, expectations(kind)[name]
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


@functools.cache
def found_inside(kind, check_vma):
    """Computes value and gradient of every collective inside shard_map in one program."""
    world = World.emulate(8, "dp=2,tp=4")
    group = GROUPS[kind](world)

    @jax.jit
    def all_of(x):
        found = {}
        for name, (collective, _) in TABLE.items():
            inside = in_shard_map(functools.partial(collective, group=group), world.mesh, check_vma)
            found[name] = value_and_vjp(inside, x, cotangent_of(jax.eval_shape(inside, x).shape))
        return found

    return all_of(numbers())


@pytest.mark.parametrize(("kind", "check_vma"), PLACES)
@pytest.mark.parametrize("name", TABLE)
def test_inside_shard_map(name, kind, check_vma):
    check(found_inside(kind, check_vma)[name], name, kind)


# All share the same code there; one sums, one grows, one shrinks, and one excludes some ranks.
@pytest.mark.sample("sum", "all_gather", "reduce_scatter_sum", "send_recv")
@pytest.mark.parametrize("name", TABLE)
def test_on_rank_stacked_arrays(name, make_world, x):
    collective, _ = TABLE[name]
    group = make_world("dp=2,tp=4").group("tp")
    stacked = functools.partial(collective, group=group)
    cotangent = cotangent_of(jax.eval_shape(stacked, x).shape)
    check(value_and_vjp(stacked, x, cotangent), name, "one of two axes")


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
