"""The ledger against real programs on eight emulated devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import UnsupportedError
from axon_dist.inspect import collectives


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def compile_spmd(mesh, body, shape=(64, 16), in_spec=None, out_spec=None, dtype=jnp.float32):
    in_spec = P(("dp", "tp")) if in_spec is None else in_spec
    out_spec = in_spec if out_spec is None else out_spec
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_spec, out_specs=out_spec, check_vma=False)
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, in_spec))
    return jax.jit(mapped).lower(x).compile()


LOCAL = 64 * 16 * 4 // 8
"""Bytes of the (64, 16) float32 operand on each of eight devices."""

ring = functools.partial(lax.ppermute, axis_name="dp", perm=[(i, (i + 1) % 4) for i in range(4)])


@pytest.mark.parametrize(
    ("body", "out_spec", "expected"),
    [
        (lambda x: lax.psum(x, "dp"), None, ("all-reduce", "dp", 4, 2 * LOCAL * 3 // 4)),
        (lambda x: lax.psum(x, "tp"), None, ("all-reduce", "tp", 2, LOCAL)),
        (
            lambda x: lax.psum(x, ("dp", "tp")),
            None,
            ("all-reduce", "dp,tp", 8, 2 * LOCAL * 7 // 8),
        ),
        (
            lambda x: lax.all_gather(x, "dp", tiled=True),
            None,
            ("all-gather", "dp", 4, 3 * LOCAL),
        ),
        (
            lambda x: lax.psum_scatter(x, "tp", tiled=True),
            None,
            ("reduce-scatter", "tp", 2, LOCAL // 2),
        ),
        (
            lambda x: lax.all_to_all(x, "dp", 0, 1, tiled=True),
            None,
            ("all-to-all", "dp", 4, LOCAL * 3 // 4),
        ),
        (ring, None, ("collective-permute", "dp", 2, LOCAL)),
        (
            lambda x: lax.psum(x, "dp", axis_index_groups=[[0, 1], [2, 3]]),
            None,
            ("all-reduce", "?", 2, LOCAL),
        ),
    ],
)
def test_each_collective_with_its_axis_and_bytes(mesh, body, out_spec, expected):
    ledger = collectives(compile_spmd(mesh, body, out_spec=out_spec), mesh)
    (row,) = ledger.rows
    assert (row.kind, row.axis, row.group_size, row.wire_bytes) == expected
    assert row.count == 1
    assert not row.in_conditional
    assert not row.unknown_trip
    assert row.exposure == "exposed"
    assert row.dtypes == ("f32",)


def test_the_source_line_and_operation_are_named(mesh):
    (row,) = collectives(compile_spmd(mesh, lambda x: lax.psum(x, "dp")), mesh).rows
    assert row.source.startswith("test_hlo.py:")
    assert "psum" in row.op_name


def scan(x, length, body):
    return lax.scan(lambda carry, _: (body(carry), None), x, length=length)[0]


def reduce_dp(x):
    return lax.psum(x, "dp") * 0.25


def test_a_loop_multiplies(mesh):
    ledger = collectives(compile_spmd(mesh, lambda x: scan(x, 7, reduce_dp)), mesh)
    assert [row.count for row in ledger] == [7]
    assert ledger.total_wire_bytes("all-reduce", "dp") == 7 * 2 * LOCAL * 3 // 4


def test_nested_loops_multiply(mesh):
    nested = lambda x: scan(x, 3, lambda y: scan(y, 7, reduce_dp))
    ledger = collectives(compile_spmd(mesh, nested), mesh)
    assert [row.count for row in ledger] == [21]


def test_a_loop_that_data_decide_is_flagged_and_counted_once(mesh):
    def body(x):
        return lax.while_loop(lambda y: jnp.sum(y) < 1e3, reduce_dp, x)

    ledger = collectives(compile_spmd(mesh, body), mesh)
    assert [(row.count, row.unknown_trip) for row in ledger] == [(1, True)]
    assert "only the data decide" in ledger.lint()[0]


def test_collectives_in_branches_are_flagged(mesh):
    def body(x):
        return lax.cond(lax.axis_index("dp") == 0, reduce_dp, lambda y: y, x)

    ledger = collectives(compile_spmd(mesh, body), mesh)
    assert [(row.kind, row.in_conditional) for row in ledger] == [("all-reduce", True)]
    assert ledger.lint() == []


def test_a_permute_in_a_branch_is_linted(mesh):
    def body(x):
        return lax.cond(x[0, 0] > 0, ring, lambda y: y, x)

    ledger = collectives(compile_spmd(mesh, body), mesh)
    (finding,) = ledger.lint()
    assert "collective-permute inside a conditional" in finding
    assert "jnp.where" in finding


def put(shape, mesh, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def test_automatic_matmul_and_gradient(mesh):
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    w, x = put((32, 64), mesh, None, "tp"), put((64, 32), mesh, "dp", None)
    step = jax.jit(jax.grad(loss), out_shardings=w.sharding)
    ledger = collectives(step.lower(w, x).compile(), mesh)
    gradient = 32 * 64 * 4 // 2
    assert ledger.total_wire_bytes("all-reduce", "dp") == 2 * gradient * 3 // 4
    assert ledger.by_axis() == {"dp": 2 * gradient * 3 // 4}


def test_combined_collectives_add_up(mesh):
    params = {"a": put((8, 8), mesh), "b": put((16,), mesh), "c": put((4, 4), mesh)}
    x = put((64, 8), mesh, "dp")

    def loss(p, x):
        return (
            jnp.sum((x @ p["a"]) ** 2)
            + jnp.sum(x[:, :4] @ p["c"])
            + jnp.sum(x[:, 0]) * jnp.sum(p["b"])
        )

    ledger = collectives(jax.jit(jax.grad(loss)).lower(params, x).compile(), mesh)
    num_arrays = sum(row.num_arrays for row in ledger)
    assert num_arrays >= 3
    per_device = sum(row.bytes_in for row in ledger)
    assert ledger.total_wire_bytes() == pytest.approx(per_device * 2 * 3 / 4, abs=len(ledger))
    assert set(ledger.by_axis()) == {"dp"}


def test_resharding_is_seen(mesh):
    x = put((32, 32), mesh, "dp", "tp")
    moved = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(mesh, P("tp", "dp")))
    ledger = collectives(moved.lower(x).compile(), mesh)
    assert ledger.total_wire_bytes() > 0
    assert {row.kind for row in ledger} <= {"all-to-all", "collective-permute", "all-gather"}
    # Swapping axes of unlike sizes moves data inside halves of dp, which are no axis of the mesh.
    assert {row.axis for row in ledger if row.kind == "all-to-all"} == {"?"}


def test_without_a_mesh_bytes_are_known_and_axes_are_not(mesh):
    text = compile_spmd(mesh, lambda x: lax.psum(x, "dp")).as_text()
    (row,) = collectives(text).rows
    assert row.axes is None
    assert row.wire_bytes == 2 * LOCAL * 3 // 4


def test_a_program_that_is_not_compiled_is_refused(mesh):
    lowered = jax.jit(jnp.sin).lower(1.0)
    with pytest.raises(UnsupportedError, match=r"got 'module @jit.*compile\(\)"):
        collectives(lowered, mesh)


def test_an_empty_module_is_refused():
    with pytest.raises(UnsupportedError, match="no computation: 'HloModule empty'"):
        collectives("HloModule empty")
