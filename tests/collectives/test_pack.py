import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.collectives import plan_buckets, reduce_buckets
from axon_dist.collectives.buckets import SMALL, pack, unpack


@pytest.mark.parametrize(
    ("shapes", "packed"),
    [
        ([], []),
        ([(3,)], [(3,)]),
        ([(SMALL,), (3,)], [(SMALL,), (3,)]),
        ([(2,), (3, 2), ()], [(9,)]),
        ([(3,), (2, SMALL), (0, 7), (4, 1)], [(2, SMALL), (7,)]),
        ([(SMALL,), (SMALL, 2)], [(SMALL,), (SMALL, 2)]),
    ],
)
def test_small_arrays_are_joined_and_come_back(shapes, packed):
    random = np.random.default_rng(0)
    leaves = [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes]
    operands = pack(leaves)
    assert [operand.shape for operand in operands] == packed
    for leaf, back in zip(leaves, unpack(operands, leaves), strict=True):
        assert (back.shape, back.dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(back, leaf)


def test_large_and_small_gradients_share_one_reduction(make_world):
    mesh = make_world("dp=2").mesh
    tree = [jnp.ones(3), jnp.ones((4, SMALL // 2)), jnp.ones((2, 2)), jnp.ones(SMALL)]
    plan = plan_buckets(tree, 3 * SMALL)
    body = lambda tree: reduce_buckets(tree, plan, lambda x: jax.lax.psum(x, "dp"))
    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    compiled = mapped.lower(tree).compile()
    reductions = [line for line in compiled.as_text().splitlines() if " all-reduce(" in line]
    assert len(reductions) == len(plan) == 2
    for leaf, got in zip(tree, compiled(tree), strict=True):
        np.testing.assert_array_equal(got, 2 * leaf)


def test_arrays_with_compiler_shardings_are_left_alone(make_world):
    mesh = make_world("dp=2,tp=2").mesh
    shapes = []

    def body(x):
        shapes.extend(operand.shape for operand in pack([x, x + 1]))
        return x

    for axes, expected in (({"dp"}, [(3,), (3,)]), ({"dp", "tp"}, [(6,)])):
        shapes.clear()
        mapped = jax.shard_map(body, mesh=mesh, axis_names=axes, in_specs=P(), out_specs=P())
        jax.eval_shape(mapped, jnp.ones(3))
        assert shapes == expected
