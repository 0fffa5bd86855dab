"""What compilers do that a program does not say: their orders, copies, and updates in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from axon_dist.inspect import report
from axon_dist.program.breadth import in_breadth
from axon_dist.program.device import tape_of
from axon_dist.program.liveness import peak_of
from axon_dist.program.overwriting import overwrites, shared
from axon_dist.program.placement import NONE, whole

MATRIX = 64 * 64 * 4
X, W = jnp.ones((64, 64)), jnp.ones((64, 64))


def tape(function, *args, splits=None, axes=None, platform="cpu"):
    program = jax.make_jaxpr(function)(*args)
    places = splits or [whole(v.aval.ndim) for v in program.jaxpr.invars]
    return tape_of(program, places, axes or {}, platform)


def names(found):
    return [node.name for node in found.nodes]


def compiled(function, *args):
    """The bytes that XLA:CPU takes beside what a program is given."""
    memory = jax.jit(function).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.parametrize(
    ("function", "is_stored"),
    [
        (jnp.exp, False),
        (lambda x: 2 * jnp.tanh(x) + 1, False),
        (lambda x: jnp.where(x > 0, x, 0.5), True),
        (lambda x: jnp.exp(jnp.where(x > 0, x, 0.5)), True),
        (lambda x: jax.lax.clamp(0.0, x, 1.0), True),
    ],
)
def test_a_cpus_reductions_do_on_the_way_what_their_library_knows(function, is_stored):
    def run(x, w):
        product = x @ w
        return product, jnp.sum(function(product), 1)

    found = peak_of(tape(run, X, W)).num_bytes
    assert found == MATRIX * (1 + is_stored) + 64 * 4
    assert compiled(run, X, W) == pytest.approx(found, abs=128)
    assert peak_of(tape(run, X, W, platform="cuda")).num_bytes == MATRIX + 64 * 4


def test_a_reduction_reads_from_memory_what_others_read_too():
    def run(x, w):
        product = x @ w
        half = jnp.exp(product)
        return product, jnp.sum(half, 1), half @ w

    assert peak_of(tape(run, X, W)).num_bytes == 3 * MATRIX + 64 * 4


def test_a_cpu_computes_again_what_is_made_of_one_array():
    """It is in memory for the next product, and its own product stays for those who add again."""

    def run(x, w, b):
        y = x @ w
        z = y + b
        return z @ w, jnp.sin(jnp.cos(z) * (x + z))

    alive = lambda platform: peak_of(tape(run, X, W, jnp.ones(64), platform=platform)).num_bytes
    assert alive("cpu") == alive("tpu") + MATRIX


programs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9)), max_size=12)


@given(programs)
@settings(max_examples=40, deadline=None)
def test_breadth_keeps_every_node_behind_what_it_reads(steps):
    def run(x):
        made = [x]
        for kind, a, b in steps:
            one, other = made[a % len(made)], made[b % len(made)]
            made.append([one @ other, jnp.sin(one), one + other, jnp.cumsum(one, 0)][kind])
        return made[-3:]

    found = tape(run, X, platform="tpu")
    ordered = in_breadth(found)
    assert sorted(map(id, ordered.nodes)) == sorted(map(id, found.nodes))
    there = {*found.inputs}
    for node in ordered.nodes:
        assert {b for b in node.reads if b >= 0} <= there
        there.update(node.writes)


def test_a_cpu_runs_first_what_is_ready_first():
    """Both gathers come before the first product, and an update before the next gradient."""
    place = NamedSharding(AbstractMesh((4,), ("dp",), axis_types=(AxisType.Auto,)), PartitionSpec())
    gather = lambda w: jax.lax.with_sharding_constraint(w, place)
    run = lambda x, v, w: ((x @ gather(v)) @ gather(w),)
    splits = [whole(2), *[(frozenset({"dp"}), NONE)] * 2]
    order = lambda platform: names(
        tape(run, X, W, W, splits=splits, axes={"dp": 4}, platform=platform)
    )
    dot, gathered = "dot_general", "sharding_constraint"
    assert order("tpu") == [gathered, dot, gathered, dot]
    assert order("cpu") == [gathered, gathered, dot, dot]


def test_what_is_recomputed_waits_for_what_comes_back():
    """A barrier holds the inputs of a block back until its cotangent is there."""

    def run(w, x):
        block = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w))
        return jnp.sum(jnp.cos(block(w, block(w, x))) @ W)

    found = tape(jax.grad(run), W, X)
    made = {b: number for number, node in enumerate(found.nodes) for b in node.writes}
    barriers = [node for node in found.nodes if node.kind == "barrier"]
    assert barriers
    for barrier in barriers:
        assert len(barrier.after) > 1
        (behind,) = barrier.writes
        readers = [n for n, node in enumerate(found.nodes) if behind in node.reads]
        assert all(made.get(b, -1) < min(readers) for b in barrier.after)


def convolve(x, k):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)


def test_a_cpu_copies_what_the_gradient_of_a_kernel_reads():
    """It convolves samples as channels; XLA:CPU wants channels last."""
    x, k = jnp.ones((8, 16, 16, 4)), jnp.ones((3, 3, 4, 4))
    run = lambda x, k: jnp.sum(jnp.sin(convolve(x, k)))
    grads = jax.grad(run, argnums=1)
    size = x.size * 4
    found = tape(grads, x, k)
    large = [n for n in found.nodes if n.name == "transpose" and found.sizes[n.writes[0]] == size]
    assert len(large) == 2
    assert peak_of(found).num_bytes == pytest.approx(compiled(grads, x, k), rel=0.15)
    assert "transpose" not in names(tape(grads, x, k, platform="cuda"))
    assert "transpose" not in names(tape(convolve, x, k))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_max_pool_keeps_positions(dtype):
    """Of each maximum an int32 for each dim, and the maximum, in float32."""

    def run(x):
        window = (1, 2, 2, 1)
        pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
        return jnp.sum(jnp.sin(pooled.astype(jnp.float32)))

    x = jnp.ones((8, 16, 16, 4), dtype)
    for platform in ("cpu", "cuda"):
        found = tape(jax.grad(run), x, platform=platform)
        (positions,) = [node for node in found.nodes if node.name == "reduce_window"]
        assert [found.sizes[b] for b in positions.writes] == [8 * 8 * 8 * 4 * 4] * 5
        (scatter,) = [node for node in found.nodes if node.name == "select_and_scatter_add"]
        assert set(positions.writes[1:]) <= set(scatter.reads)
    assert "reduce_window" not in names(tape(jax.grad(run), x, platform="tpu"))
    if dtype == jnp.float32:
        text = jax.jit(jax.grad(run)).lower(x).compile().as_text()
        assert "s32[8,8,8,4]" in text
        assert "select-and-scatter(" not in text


def test_positions_hide_the_transfers_of_the_loop_before():
    """They need nothing of it, so a GPU finds them where they are, and waits no longer."""

    def run(x, ws):
        window = (1, 2, 2, 1)
        pooled = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
        turn = lambda y, w: (jnp.sin(y * jnp.sum(y) + w), None)
        return jnp.sum(jax.lax.scan(turn, pooled, ws)[0])

    x, ws = jnp.ones((8, 16, 16, 4)), jnp.ones((4, 4))
    order = lambda place: names(
        tape(jax.grad(run), x, ws, splits=[place, whole(2)], axes={"dp": 4}, platform="cuda")
    )
    last = lambda found: len(found) - 1 - found[::-1].index("scan")
    split, alone = order((frozenset({"dp"}), NONE, NONE, NONE)), order(whole(4))
    assert split.index("reduce_window") < last(split)
    assert alone.index("reduce_window") > last(alone)


def accumulate(total, xs, flags):
    """Adds to a sum in one of two branches, in every turn of a loop."""

    def turn(carry, given):
        x, flag = given
        work = lambda total: (total + x @ x, jnp.sin(x))
        idle = lambda total: (total, x)
        return jax.lax.cond(flag, work, idle, carry[0]), None

    return jax.lax.scan(turn, (total, xs[0]), (xs, flags))[0]


def test_what_a_branch_adds_to_stays_in_its_place():
    xs, flags = jnp.ones((4, 64, 64)), jnp.ones(4, bool)
    found = tape(lambda xs, flags: accumulate(jnp.zeros((64, 64)), xs, flags), xs, flags)
    (loop,) = [node for node in found.nodes if node.name == "scan"]
    (branches,) = [node for node in loop.bodies[0].nodes if node.name == "cond"]
    assert 0 in shared(branches)
    assert list(shared(loop)) == [0]
    # The two that are handed on, the product, and what a turn makes beside the sum.
    assert peak_of(found).num_bytes <= 5 * MATRIX
    run = lambda xs, flags: accumulate(jnp.zeros((64, 64)), xs, flags)
    assert compiled(run, xs, flags) == pytest.approx(peak_of(found).num_bytes, rel=0.35)


def test_what_a_conditional_gives_takes_the_place_of_what_it_is_given():
    def run(x, w, flag):
        return jax.lax.cond(flag, lambda total: total + w @ x, lambda total: total, x @ w)

    # The sum, and the product that is added to it.
    assert peak_of(tape(run, X, W, True)).num_bytes == 2 * MATRIX


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
def test_what_may_be_written_over_what(function, expected):
    assert [set(one) for one in overwrites(tape(function, X, W))] == expected


def test_a_sum_that_starts_as_zeros_is_split_as_what_it_becomes():
    run = lambda rows, x: jnp.zeros((64, 64)).at[:, rows].add(x)
    rows = jnp.arange(64)
    splits = [whole(1), (frozenset({"dp"}), NONE)]
    found = tape(run, rows, X, splits=splits, axes={"dp": 4})
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
    found = tape(run, W, splits=splits, axes=axes, platform="cuda")
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

    splits = [whole(2), (frozenset({"dp"}),)]
    found = tape(run, X, jnp.zeros(tokens, int), splits=splits, axes={"dp": 4}, platform=platform)
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
    splits = [whole(2), (frozenset({"dp"}),)]
    program = jax.make_jaxpr(run)(table, tokens)
    found = tape_of(program, splits, {"dp": 8}, "cpu")
    assert kinds_of(found) == {"all-gather"}
    assert ledger.by_kind()["all-gather"] == pytest.approx(
        sum(one.num_bytes for one, _ in found.sends()) * 7 / 8, rel=0.05
    )
    assert set(ledger.by_kind()) == {"all-gather"}


def kinds_of(found):
    return {one.kind for one, _ in found.sends()}


def test_what_a_loop_begins_with_lies_as_what_it_hands_on():
    """Zeros that shards are added to are shards."""
    mesh = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))

    def run(xs):
        def add(total, x):
            return jax.lax.with_sharding_constraint(total + x @ x, split), None

        return jax.lax.scan(add, jnp.zeros((64, 64)), xs)[0]

    found = tape(run, jnp.ones((3, 64, 64)), axes={"fsdp": 8}, platform="cuda")
    zeros = next(node for node in found.nodes if node.name == "broadcast_in_dim")
    assert found.sizes[zeros.writes[0]] == MATRIX // 8
    (loop,) = (node for node in found.nodes if node.name == "scan")
    assert found.sizes[loop.writes[0]] == MATRIX // 8
