import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.collectives import (
    ReduceOp,
    all_reduce,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_product,
    all_reduce_sum,
    reduce_slices,
)
from axon_dist.core.errors import ConfigError, DTypeError, GroupError

from .dense import in_shard_map


def filled(values, size):
    return np.tile(np.array(values, np.float32)[:, None], (1, size))


@pytest.mark.parametrize(
    ("collective", "values", "expected"),
    [
        (all_reduce_sum, [1, 2, 3, 4], 10),
        (all_reduce_sum, [1, 2, 3], 6),
        (all_reduce_mean, [0, 3, 6], 3),
        (all_reduce_mean, [2, 4], 3),
        (all_reduce_min, [10, 9, 8, 7], 7),
        (all_reduce_max, [0, 1, 2, 3], 3),
        (all_reduce_product, [1, 2, 3, 4], 24),
        (all_reduce_product, [-1, 2, 0, 4], 0),
        (all_reduce_product, [-1, 2, -3, -4], -24),
    ],
)
def test_numbers(collective, values, expected, make_world):
    group = make_world(f"dp={len(values)}").default_group
    result = collective(filled(values, 5), group)
    np.testing.assert_array_equal(result, filled([expected] * len(values), 5))


def test_mean_of_vectors(make_world):
    x = jnp.array([[1.0, 2.0, 3.0], [1.5, 2.5, 3.5], [0.5, 1.5, 2.5]])
    result = all_reduce_mean(x, make_world("dp=3").default_group)
    np.testing.assert_allclose(result, np.tile([1.0, 2.0, 3.0], (3, 1)), rtol=1e-6)


def test_ranks_outside_the_list_keep_their_value(make_world):
    world = make_world("dp=4")
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    assert all_reduce_sum(x, world.new_group([0, 2])).tolist() == [4, 2, 4, 4]
    assert all_reduce_max(x, world.new_group([0, 2])).tolist() == [3, 2, 3, 4]
    assert all_reduce_product(x, world.new_group([1, 3])).tolist() == [1, 8, 3, 8]
    assert all_reduce_mean(x, world.new_group([1])).tolist() == [1, 2, 3, 4]


def test_names_of_the_operations(make_world):
    assert [op.name for op in ReduceOp] == ["SUM", "PRODUCT", "MIN", "MAX", "AVERAGE"]
    assert [ReduceOp(name) for name in ("SUM", "prod", "mean", "avg", "Max")] == [
        ReduceOp.SUM,
        ReduceOp.PRODUCT,
        ReduceOp.AVERAGE,
        ReduceOp.AVERAGE,
        ReduceOp.MAX,
    ]
    group = make_world("dp=2").default_group
    assert all_reduce(jnp.array([2.0, 4.0]), group, "average").tolist() == [3, 3]
    with pytest.raises(
        ConfigError, match=r"ReduceOp got 'summ', and has no such member. Did you mean 'sum'\?"
    ):
        all_reduce(jnp.array([2.0, 4.0]), group, "summ")


OPS = ["sum", "product", "min", "max", "average"]
DTYPES = ["bfloat16", "float16", "complex64", "int8", "int32", "bool"]


# Two operations on every dtype, the others on half of them; for groups by ranks, every operation
# once and every dtype once.
@pytest.mark.sample(
    *(f"None-{dtype}-{op}" for dtype in DTYPES for op in ("sum", "average")),
    *(f"None-{dtype}-product" for dtype in ("float16", "int8", "bool")),
    *(f"None-{dtype}-min" for dtype in ("bfloat16", "complex64", "bool")),
    *(f"None-{dtype}-max" for dtype in ("float16", "complex64", "int32")),
    *("ranks1-bfloat16-average", "ranks1-float16-min", "ranks1-complex64-product"),
    *("ranks1-int8-max", "ranks1-int32-min", "ranks1-bool-sum"),
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [None, [1, 3]])
def test_dtypes(op, dtype, ranks, make_world):
    world = make_world("dp=4")
    group = world.default_group if ranks is None else world.new_group(ranks)
    x = np.array([[1, 0], [1, 1], [0, 0], [1, 3]]).astype(jnp.dtype(dtype))
    refused = (op == "average" and dtype in ("int8", "int32", "bool")) or (
        op in ("min", "max") and dtype == "complex64"
    )
    if refused:
        with pytest.raises(DTypeError, match=dtype):
            all_reduce(x, group, op)
        return
    result = all_reduce(x, group, op)
    counts = dtype == "bool" and op in ("sum", "product")
    assert result.dtype == (jnp.int32 if counts else x.dtype)
    members = ranks or [0, 1, 2, 3]
    expected = reduce_slices([np.asarray(x[r], np.complex64) for r in members], op)
    for rank in range(4):
        wanted = expected if rank in members else x[rank].astype(np.complex64)
        np.testing.assert_array_equal(np.asarray(result)[rank].astype(np.complex64), wanted)


def test_integer_mean_says_what_to_do(make_world):
    with pytest.raises(DTypeError, match=r"dtype int32 .* x\.astype\(jnp\.float32\)"):
        all_reduce_mean(jnp.array([1, 2]), make_world("dp=2").default_group)


@pytest.mark.parametrize("op", list(ReduceOp))
@pytest.mark.parametrize("check_vma", [True, False])
def test_nan_and_infinity_propagate(op, check_vma, make_world):
    world = make_world("dp=4")
    x = np.float32([[1, 2, -np.inf], [np.nan, 3, 1], [5, np.nan, 1], [1, 2, 0.5]])
    reduce = in_shard_map(lambda v: all_reduce(v, world.default_group, op), world.mesh, check_vma)
    expected = reduce_slices(np.asarray(x), op)
    np.testing.assert_array_equal(reduce(x), np.tile(expected, (4, 1)))


def test_nan_outside_the_group_stays_there(make_world):
    world = make_world("dp=4")
    x = np.float32([1, np.nan, 3, np.nan])
    for op in ReduceOp:
        result = all_reduce(x, world.new_group([0, 2]), op)
        np.testing.assert_array_equal(np.isnan(result), [False, True, False, True])


@pytest.mark.parametrize("op", list(ReduceOp))
def test_result_is_typed_invariant(op, make_world):
    """`out_specs=P()` under `check_vma=True` accepts only values that are equal on all ranks."""
    world = make_world("dp=2,tp=2")
    group = world.default_group
    reduce = in_shard_map(lambda v: all_reduce(v, group, op), world.mesh, True, replicated=True)
    assert reduce(jnp.array([1.0, 2.0, 3.0, 4.0])).shape == ()


def test_replicated_values_count_once_per_rank(make_world):
    world = make_world("dp=4")

    def body(w):
        return all_reduce_sum(w, world.default_group), all_reduce_max(w, world.default_group)

    for check_vma in (True, False):
        mapped = jax.shard_map(
            body, mesh=world.mesh, in_specs=P(), out_specs=P(), check_vma=check_vma
        )
        assert [float(v) for v in jax.jit(mapped)(3.0)] == [12, 3]


def test_ties_share_the_gradient(make_world):
    group = make_world("dp=4").default_group
    x = jnp.array([2.0, 5.0, 5.0, 1.0])
    gradient = jax.grad(lambda v: all_reduce_max(v, group)[0])(x)
    assert gradient.tolist() == [0, 0.5, 0.5, 0]
    _, tangent = jax.jvp(lambda v: all_reduce_max(v, group), (x,), (jnp.arange(4.0),))
    assert tangent.tolist() == [1.5] * 4


def test_bfloat16_in_a_partly_manual_shard_map(make_world):
    """XLA:CPU aborts the process on a plain psum here; min, max and gradients use the same code."""
    world = make_world("dp=2,tp=2")
    group = world.group("dp")
    x = np.arange(4).astype(jnp.bfloat16)

    def body(v):
        total = all_reduce_sum(v * v, group) + all_reduce_max(v, group)
        return total + all_reduce_mean(v, group)

    mapped = jax.shard_map(
        body, mesh=world.mesh, axis_names={"dp"}, in_specs=P("dp"), out_specs=P()
    )
    value, gradient = jax.jit(jax.value_and_grad(lambda v: mapped(v).sum()))(x)
    assert value.dtype == gradient.dtype == jnp.bfloat16
    assert float(value) == (0 + 4 + 1 + 9) + (2 + 3) + 3
    assert gradient.tolist() == [0.5, 2.5, 5.5, 7.5]


def test_rank_stacking_is_checked(make_world):
    group = make_world("dp=4").default_group
    with pytest.raises(GroupError, match=r"shape \(3, 4\) outside shard_map.*world size 4"):
        all_reduce_sum(jnp.zeros((3, 4)), group)


def test_repeated_calls_compile_once(make_world, caplog):
    group = make_world("dp=4").default_group
    with jax.log_compiles():
        all_reduce_sum(jnp.arange(20.0).reshape(4, 5), group)
        assert "Compiling" in caplog.text
        caplog.clear()
        all_reduce_sum(jnp.ones((4, 5)), group)
        assert "Compiling jit(run)" not in caplog.text


def test_reduce_slices():
    assert reduce_slices([[1, 2], [3, 4], [5, 6]], ReduceOp.SUM).tolist() == [9, 12]
    assert reduce_slices([[1, 2], [3, 4]], "Average").tolist() == [2, 3]
    assert reduce_slices([[-1.0], [2.0], [0.0]], "product").tolist() == [0]
    assert reduce_slices([[4, 1], [3, 2]], "min").tolist() == [3, 1]
    with pytest.raises(GroupError, match=r"shapes \[\(1,\), \(2,\)\].* all of the same shape"):
        reduce_slices([[1, 2], [3]])
    with pytest.raises(GroupError, match="0 slices"):
        reduce_slices([])
