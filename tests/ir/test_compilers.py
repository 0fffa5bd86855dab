"""Decisions of compilers: updates in place, and the collectives they insert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from axon_dist.inspect import report
from axon_dist.planner.device import liveness_program
from axon_dist.planner.liveness import overwrites, peak_of, reused_operands
from axon_dist.planner.placement import NONE, unsplit

MATRIX = 64 * 64 * 4
X = W = jnp.asarray(np.ones((64, 64), np.float32))


def read(function, *args, splits=None, axes=None, platform="cpu"):
    program = jax.make_jaxpr(function)(*args)
    places = splits or [unsplit(v.aval.ndim) for v in program.jaxpr.invars]
    return liveness_program(program, places, axes or {}, platform)


def compiled(function, *args):
    """The bytes that XLA:CPU takes in addition to a program's arguments."""
    memory = jax.jit(function).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def accumulate(total, xs, flags):
    """Adds to a sum in one of two branches, in every turn of a loop."""

    def turn(carry, given):
        x, flag = given
        work = lambda total: (total + x @ x, jnp.sin(x))
        idle = lambda total: (total, x)
        return jax.lax.cond(flag, work, idle, carry[0]), None

    return jax.lax.scan(turn, (total, xs[0]), (xs, flags))[0]


def test_sums_inside_a_branch_stay_in_place():
    xs, flags = jnp.ones((4, 64, 64)), jnp.ones(4, bool)
    found = read(lambda xs, flags: accumulate(jnp.zeros((64, 64)), xs, flags), xs, flags)
    (loop,) = [node for node in found.nodes if node.name == "scan"]
    (branches,) = [node for node in loop.bodies[0].nodes if node.name == "cond"]
    assert 0 in reused_operands(branches)
    assert list(reused_operands(loop)) == [0]
    # The two carried values, the product, and what an iteration makes besides the sum.
    assert peak_of(found) <= 5 * MATRIX
    run = lambda xs, flags: accumulate(jnp.zeros((64, 64)), xs, flags)
    assert compiled(run, xs, flags) == pytest.approx(peak_of(found), rel=0.35)


def test_results_of_a_conditional_reuse_its_operands_memory():
    def run(x, w, flag):
        return jax.lax.cond(flag, lambda total: total + w @ x, lambda total: total, x @ w)

    # The sum, and the product that is added to it.
    assert peak_of(read(run, X, W, True)) == 2 * MATRIX


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: (x + y @ y, x @ y), [{0}, set()]),
        (lambda x, y: (x.at[0].set(0.0), y), [{0}, {1}]),
        (lambda x, y: (x * 2 + y, x + y), [{1}, {0, 1}]),
        (lambda x, y: (jax.lax.cond(x[0, 0] > 0, lambda a: a + y, lambda a: a, x), y), [{0}, {1}]),
        (
            lambda x, y: (jax.lax.cond(x[0, 0] > 0, lambda a: a @ y, lambda a: a, x), y),
            [set(), {1}],
        ),
    ],
)
def test_only_outputs_of_the_same_kind_may_be_overwritten(function, expected):
    assert [set(one) for one in overwrites(read(function, X, W))] == expected


def test_a_sum_that_starts_as_zeros_is_split_as_what_it_becomes():
    run = lambda rows, x: jnp.zeros((64, 64)).at[:, rows].add(x)
    rows = jnp.arange(64)
    splits = [unsplit(1), (frozenset({"dp"}), NONE)]
    found = read(run, rows, X, splits=splits, axes={"dp": 4})
    (scatter,) = [node for node in found.nodes if node.name.startswith("scatter")]
    assert found.sizes[scatter.reads[0]] == found.sizes[scatter.writes[0]] == MATRIX // 4


@pytest.mark.parametrize(("dtype", "wider"), [(jnp.float32, 1), (jnp.bfloat16, 2)])
def test_a_table_split_over_two_dims_is_gathered_one_after_another(dtype, wider):
    """The last dim first, and before the cast; the compiler casts before the last gather only."""
    axes = {"pp": 4, "fsdp": 2}
    mesh = AbstractMesh((4, 2), ("pp", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    ranks = lambda w: w @ w
    run = lambda w: jax.shard_map(
        ranks, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )(w.astype(dtype))
    splits = [(frozenset({"fsdp"}), frozenset({"pp"}))]
    found = read(run, W, splits=splits, axes=axes, platform="cuda")
    size = 64 * 64 * np.dtype(dtype).itemsize
    sent = [(one.kind, one.axes, one.num_bytes) for one, _ in found.sends()]
    assert sent == [
        ("all-gather", ("pp",), wider * size // 2),
        ("all-gather", ("fsdp",), size),
    ]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("tokens", [16, 64, 128])
def test_rows_are_gathered_where_they_are_fewer_than_the_tables(tokens, is_tied, platform):
    """A rank that keeps a part of a table adds to it what all have for it."""
    place = NamedSharding(
        AbstractMesh((4,), ("dp",), axis_types=(AxisType.Auto,)), PartitionSpec("dp")
    )

    def run(table, tokens):
        def loss(table):
            rows = jnp.tanh(table.at[tokens].get(mode="fill"))
            return jnp.sum(rows @ table.T) if is_tied else jnp.sum(rows)

        return jax.lax.with_sharding_constraint(jax.grad(loss)(table), place)

    splits = [unsplit(2), (frozenset({"dp"}),)]
    found = read(run, X, jnp.zeros(tokens, int), splits=splits, axes={"dp": 4}, platform=platform)
    (scatter,) = [node for node in found.nodes if node.name.startswith("scatter")]
    sent = [(one.kind, one.num_bytes) for one in scatter.sent]
    if tokens < 64:
        assert sent == [("all-gather", tokens * 64 * 4)]
        assert found.sizes[scatter.writes[0]] == MATRIX // 4
    else:
        assert sent == [("all-reduce" if platform == "cpu" else "reduce-scatter", MATRIX)]


def test_a_table_of_more_rows_than_tokens_compiled():
    """The bytes of the whole are those of the compiled program."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))
    place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))

    def run(table, tokens):
        grad = jax.grad(lambda table: jnp.sum(jnp.tanh(table[tokens])))(table)
        return jax.lax.with_sharding_constraint(grad, place("dp"))

    table = jax.ShapeDtypeStruct((512, 64), jnp.float32, sharding=place())
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=place("dp"))
    ledger = report(jax.jit(run).lower(table, tokens).compile(), mesh).collectives
    splits = [unsplit(2), (frozenset({"dp"}),)]
    program = jax.make_jaxpr(run)(table, tokens)
    found = liveness_program(program, splits, {"dp": 8}, "cpu")
    assert kinds_of(found) == {"all-gather"}
    assert ledger.by_kind()["all-gather"] == pytest.approx(
        sum(one.num_bytes for one, _ in found.sends()) * 7 / 8, rel=0.05
    )
    assert set(ledger.by_kind()) == {"all-gather"}


def kinds_of(found):
    return {one.kind for one, _ in found.sends()}


def test_a_loop_carry_keeps_its_sharding():
    """Zeros that shards are added to are shards."""
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))

    def run(xs):
        def add(total, x):
            return jax.lax.with_sharding_constraint(total + x @ x, split), None

        return jax.lax.scan(add, jnp.zeros((64, 64)), xs)[0]

    found = read(run, jnp.ones((3, 64, 64)), axes={"fsdp": 8}, platform="cuda")
    zeros = next(node for node in found.nodes if node.name == "broadcast_in_dim")
    assert found.sizes[zeros.writes[0]] == MATRIX // 8
    (loop,) = (node for node in found.nodes if node.name == "scan")
    assert found.sizes[loop.writes[0]] == MATRIX // 8
