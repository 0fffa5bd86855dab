import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import ClaimError
from axon_dist.inspect import expect_bytes, expect_collectives


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def compiled(mesh):
    def loss(w, x):
        full = lax.all_gather(w, "fsdp", tiled=True)
        return lax.pmean(jnp.sum(x @ full), ("fsdp", "tp"))

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P("fsdp"), P(("fsdp", "tp"))), out_specs=P())
    w = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=NamedSharding(mesh, P(("fsdp", "tp"))))
    step = jax.jit(mapped)
    return step.lower(w, x).compile()


GATHERED = 64 * 8 * 4 * 3 // 4


def test_true_claims_return_the_ledger(compiled, mesh):
    ledger = expect_collectives(compiled, mesh, all_gather=1, all_reduce=None)
    assert ledger.total_wire_bytes("all-gather") == GATHERED
    expect_collectives(compiled, mesh, all_gather=range(1, 3), min_bytes=1000)
    expect_collectives(compiled, mesh, all_gather=1, axis="fsdp")
    expect_bytes(compiled, mesh, kind="all-gather", axis="fsdp", bytes=GATHERED, tolerance=0)


def test_a_kind_that_is_not_named_must_not_occur(compiled, mesh):
    with pytest.raises(ClaimError, match=r"executes 1 all-gather instead of 0.*change the claim"):
        expect_collectives(compiled, mesh, all_reduce=None)


def test_a_wrong_number_shows_the_ledger(compiled, mesh):
    with pytest.raises(ClaimError, match=r"1 all-gather instead of 2 over axis 'fsdp'") as error:
        expect_collectives(compiled, mesh, all_gather=2, axis="fsdp")
    assert "collectives per device and step" in str(error.value)
    assert "test_expect.py:" in str(error.value)
    with pytest.raises(ClaimError, match=r"instead of range\(2, 4\)"):
        expect_collectives(compiled, mesh, all_gather=range(2, 4), all_reduce=None)


def test_wrong_bytes_show_the_ledger(compiled, mesh):
    claim = GATHERED * 1.5
    with pytest.raises(
        ClaimError, match=r"1,536 bytes per step by all-gather over fsdp instead of 2,304 within 2%"
    ):
        expect_bytes(compiled, mesh, kind="all-gather", axis="fsdp", bytes=claim)
    expect_bytes(compiled, mesh, kind="all-gather", axis="fsdp", bytes=claim, tolerance=0.34)
