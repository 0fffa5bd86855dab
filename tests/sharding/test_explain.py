"""The table shows each decision with its reason; the check compares it with real arrays."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import ClaimError
from axon_dist.mesh import MeshSpec
from axon_dist.sharding import LargestDim, explain, explain_optimizer, shard_bytes, shardings

SPLIT = LargestDim(("dp",), 64, "zero3")
PARAMS = {
    "embedding": jax.ShapeDtypeStruct((50, 16), jnp.float32),
    "scale": jax.ShapeDtypeStruct((16,), jnp.bfloat16),
    "odd": jax.ShapeDtypeStruct((7, 7, 2), jnp.float32),
}


def test_rows_and_totals_without_a_device():
    found = explain(SPLIT, PARAMS, MeshSpec(dp=8), title="parameters")
    rows = {row.path: (row.spec, row.bytes, row.bytes_per_device, row.dtype) for row in found.rows}
    assert rows == {
        "embedding": (P(None, "dp"), 3200, 400, "float32"),
        "odd": (P(), 392, 392, "float32"),
        "scale": (P(), 32, 32, "bfloat16"),
    }
    assert (found.bytes, found.bytes_per_device) == (3624, 824)
    assert [row.path for row in found.replicated] == ["odd", "scale"]
    with pytest.warns(DeprecationWarning, match=r"Explanation.whole is deprecated; use replicated"):
        assert found.whole == found.replicated


def test_it_prints_the_rule_and_the_reason():
    text = str(explain(SPLIT, PARAMS, MeshSpec(dp=8), title="parameters"))
    for part in (
        "parameters",
        "zero3",
        "no free dim of (7, 7, 2) has as many rows",
        "824",
        "22.7%",
    ):
        assert part in text


def test_the_optimizer_state_of_the_same_policy(world):
    state = jax.eval_shape(optax.adam(1e-3).init, PARAMS)
    found = explain_optimizer(SPLIT, PARAMS, state, world.mesh)
    moments = [row for row in found.rows if row.path.endswith("embedding")]
    assert [row.path for row in moments] == ["0/mu/embedding", "0/nu/embedding"]
    assert {row.bytes_per_device for row in moments} == {400}


def arrays(placed):
    return jax.tree.map(lambda x, s: jax.device_put(jnp.zeros(x.shape, x.dtype), s), PARAMS, placed)


def test_arrays_that_lie_as_decided_pass(world):
    found = explain(SPLIT, PARAMS, world.mesh)
    tree = arrays(shardings(SPLIT, PARAMS, world.mesh))
    found.check(tree)
    assert sum(map(shard_bytes, jax.tree.leaves(tree))) == found.bytes_per_device


@pytest.mark.parametrize("measured", [True, False], ids=["arrays", "shapes"])
def test_an_array_that_is_whole_breaks_the_claim(world, measured):
    whole = jax.tree.map(lambda _: NamedSharding(world.mesh, P()), PARAMS)
    tree = arrays(whole)
    if not measured:
        tree = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
        )
    with pytest.raises(
        ClaimError,
        match=r"holds 3,624 bytes, and 824 of 3,624 are claimed(.|\n)*embedding \(50, 16\) holds "
        r"3,200 bytes as P\(\) instead of 400",
    ):
        explain(SPLIT, PARAMS, world.mesh, "parameters").check(tree)


def test_a_long_list_of_breaches_is_cut(world):
    leaf = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(world.mesh, P()))
    tree = {f"w{index}": leaf for index in range(8)}
    with pytest.raises(ClaimError, match=r"and 3 more"):
        explain(SPLIT, tree, world.mesh).check(tree)
