"""The work of one device, read from a program: bytes, products, collectives."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from axon_dist.ops.attention import splash_kernel
from axon_dist.planner.device import liveness_program
from axon_dist.planner.kernel_work import kernel_work
from axon_dist.planner.liveness import peak_of
from axon_dist.planner.placement import NONE, placed, unsplit

DP = frozenset({"dp"})
MATRIX = 64 * 64 * 4


def read(function, *args, splits=None, axes=None, platform="cuda"):
    program = jax.make_jaxpr(function)(*args)
    places = splits or [unsplit(v.aval.ndim) for v in program.jaxpr.invars]
    return liveness_program(program, places, axes or {}, platform)


def kinds(found):
    return [(sent.kind, sent.num_bytes, times) for sent, times in found.sends()]


X, W = jnp.ones((64, 64)), jnp.ones((64, 64))


def test_elementwise_chains_are_written_out_once():
    run = lambda x, w: jnp.sum(jnp.sin(jnp.cos(x @ w) + 1) * 2)
    assert peak_of(read(run, X, W)) == MATRIX + 4


def test_values_that_the_backward_pass_reads_are_kept():
    def run(w, x):
        for _ in range(4):
            x = jnp.cos(x @ w)
        return jnp.sum(x)

    kept = peak_of(read(jax.grad(run), W, X))
    again = peak_of(read(jax.grad(jax.checkpoint(run)), W, X))
    one = peak_of(read(jax.grad(lambda w, x: jnp.sum(jnp.cos(x @ w))), W, X))
    assert kept >= 8 * MATRIX  # of each layer the product, and what the next one multiplies
    assert one < kept
    assert again >= kept - MATRIX  # the whole is recomputed as one, and lies there as a whole


def test_blocks_that_are_recomputed_keep_their_inputs():
    def run(w, x, remat):
        body = lambda x, _: (jnp.tanh(jnp.tanh(x @ w) @ w), None)
        body = jax.checkpoint(body) if remat else body
        return jnp.sum(jax.lax.scan(body, x, None, length=16)[0])

    sizes = [peak_of(read(jax.grad(lambda w, x, r=r: run(w, x, r)), W, X)) for r in (0, 1)]
    assert 16 * MATRIX < sizes[1] < 0.5 * sizes[0]


def test_splash_attention_multiplies_two_products_of_all_pairs_and_five_backward():
    attend = jax.vmap(splash_kernel(512, 2, causal=True))
    run = lambda q, k, v: jnp.sum(attend(q, k, v))
    queries = jnp.ones((4, 2, 512, 64), jnp.bfloat16)
    splits = [(DP, NONE, NONE, NONE)] * 3
    found = read(jax.grad(run), queries, queries, queries, splits=splits, axes={"dp": 2})
    # Besides, each query's gradient is multiplied with its output.
    assert found.flops == pytest.approx((2 + 5) * 2 * queries.size * 512 / 2, rel=1e-3)


def test_tanh_is_not_computed_twice():
    def run(function, w, x):
        for _ in range(4):
            x = 2 * function(x @ w)
        return jnp.sum(x)

    size = lambda f: peak_of(read(jax.grad(lambda w: run(f, w, X)), W))
    cheap, dear = size(lambda x: x * jnp.sin(x)), size(lambda x: x * jnp.tanh(x))
    assert dear > cheap


def test_outputs_in_place_take_no_memory():
    run = lambda x: (x * 2, jnp.sum(x))
    assert peak_of(read(run, X)) == MATRIX + 4
    assert peak_of(read(run, X), [0]) == 4


def test_a_constant_is_made_where_it_is_read():
    run = lambda x: jax.lax.scan(lambda c, row: (c @ x + row, None), x, jnp.ones((8, 64, 64)))[0]
    assert peak_of(read(run, X)) < 8 * MATRIX


def grads(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)


def test_gradients_of_split_samples_are_added_up():
    found = read(grads, W, X, splits=[unsplit(2), (DP, NONE)], axes={"dp": 4})
    assert kinds(found) == [("all-reduce", MATRIX, 1)]
    assert found.flops == 2 * 2 * 64**3 / 4
    assert read(grads, W, X).sends() == []


@pytest.mark.parametrize(
    ("platform", "kind"),
    [("cuda", "reduce-scatter"), ("tpu", "reduce-scatter"), ("cpu", "all-reduce")],
)
def test_where_a_gradient_is_kept_split_it_is_scattered(platform, kind):
    place = NamedSharding(
        AbstractMesh((4,), ("dp",), axis_types=(AxisType.Auto,)), PartitionSpec("dp")
    )
    run = lambda w, x: jax.lax.with_sharding_constraint(grads(w, x).astype(jnp.bfloat16), place)
    found = read(run, W, X, splits=[unsplit(2), (DP, NONE)], axes={"dp": 4}, platform=platform)
    assert kinds(found) == [(kind, MATRIX, 1)]  # as the product makes it, before the cast


def test_a_split_weight_is_gathered_where_it_is_used():
    place = NamedSharding(AbstractMesh((4,), ("dp",), axis_types=(AxisType.Auto,)), PartitionSpec())
    run = lambda w, x: jnp.sum(x @ jax.lax.with_sharding_constraint(w, place))
    found = read(run, W, X, splits=[(DP, NONE), unsplit(2)], axes={"dp": 4})
    assert kinds(found) == [("all-gather", MATRIX, 1)]


def test_a_loop_adds_up_behind_itself():
    def run(w, xs):
        loss = lambda w: jnp.sum(jax.lax.scan(lambda c, x: (jnp.tanh(x @ w), None), xs[0], xs)[0])
        return jax.grad(loss)(w)

    xs = jnp.ones((8, 64, 64))
    places = {"splits": [unsplit(2), (NONE, DP, NONE)], "axes": {"dp": 4}}
    # XLA:CPU adds up in every turn.
    assert kinds(read(run, W, xs, platform="cpu", **places)) == [("all-reduce", 8 * MATRIX, 1)]
    found = read(run, W, xs, **places)
    assert kinds(found) == [("all-reduce", MATRIX, 1)]
    assert found.flops == 8 * 2 * 2 * 64**3 / 4  # nothing is differentiated by xs


def test_a_row_layer_is_added_up_over_its_ranks():
    column, row = (NONE, frozenset({"tp"})), (frozenset({"tp"}), NONE)
    run = lambda x, up, down: x + jnp.tanh(x @ up) @ down
    found = read(run, X, W, W, splits=[unsplit(2), column, row], axes={"tp": 2})
    assert kinds(found) == [("all-reduce", MATRIX, 1)]
    assert found.flops == 2 * 2 * 64**3 / 2


TP = frozenset({"tp"})
COLUMN, ROW = (NONE, TP), (TP, NONE)


def test_a_row_layer_in_a_loop_is_added_up_in_every_turn():
    """The next turn reads what this one carries; a loop that only adds has one sum, behind it."""
    up, down = jnp.ones((64, 64)), jnp.ones((64, 64))

    def run(x, up, down):
        turn = lambda x, _: (x + jnp.tanh(jnp.tanh(x) @ up) @ down, None)
        return jax.lax.scan(turn, x, None, length=8)[0]

    found = read(run, X, up, down, splits=[unsplit(2), COLUMN, ROW], axes={"tp": 2})
    assert kinds(found) == [("all-reduce", MATRIX, 8)]


def test_a_sum_that_one_reader_has_added_up_is_whole_for_the_next():
    """As in a block: what attention gives is added up for the norm, and stays in the residual."""

    def run(x, up, down):
        first = x + (x @ up) @ down
        other = first.reshape(64, 64) * 1.0
        return jnp.tanh(first), other + (jnp.tanh(first) @ up) @ down

    found = read(run, X, W, W, splits=[unsplit(2), COLUMN, ROW], axes={"tp": 2})
    assert kinds(found) == [("all-reduce", MATRIX, 1)] * 2


def placing(shape, spec):
    types = (AxisType.Auto,) * len(shape)
    return NamedSharding(AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=types), spec)


@pytest.mark.parametrize(
    ("is_pinned", "axes", "expected"),
    [
        (False, {"dp": 4}, [("reduce-scatter", 8 * MATRIX, 1)]),
        (True, {"dp": 4}, [("reduce-scatter", MATRIX, 1)]),
        (True, {"dp": 4, "fsdp": 2}, [("all-reduce", MATRIX, 1)]),
    ],
)
def test_values_gathered_after_a_loop_are_scattered_once(is_pinned, axes, expected):
    pinned, owner = placing(axes, PartitionSpec()), placing(axes, PartitionSpec("dp"))

    def run(w, xs):
        loss = lambda w: jnp.sum(jax.lax.scan(lambda c, x: (jnp.tanh(x @ w), None), xs[0], xs)[0])
        grad = jax.grad(loss)(w)
        grad = jax.lax.with_sharding_constraint(grad, pinned) if is_pinned else grad
        return jax.lax.with_sharding_constraint(grad, owner)

    xs = jnp.ones((8, 64, 64))
    found = read(run, W, xs, splits=[unsplit(2), (NONE, frozenset(axes), NONE)], axes=axes)
    assert kinds(found) == expected


def test_a_state_stays_where_it_lies():
    """Parameters that are updated in shards are gathered if every rank has all of them."""
    place = placing({"dp": 4}, PartitionSpec("dp"))
    run = lambda w: w - 0.1 * jax.lax.with_sharding_constraint(w, place)
    program = jax.make_jaxpr(run)(W)
    sent = lambda kept: kinds(liveness_program(program, [unsplit(2)], {"dp": 4}, "cuda", kept))
    assert sent(1) == [("all-gather", MATRIX, 1)]
    assert sent(0) == []


def test_a_sum_is_scattered_behind_what_it_is_added_into():
    """The gradient of positions: a sum over samples, put in the rows of a table."""
    place = placing({"dp": 4}, PartitionSpec("dp"))

    def run(x):
        rows = jnp.zeros((64, 64)).at[jnp.arange(64)].add(jnp.sum(x, 0))
        return jax.lax.with_sharding_constraint(rows, place)

    found = read(run, jnp.ones((8, 64, 64)), splits=[(DP, NONE, NONE)], axes={"dp": 4})
    assert kinds(found) == [("reduce-scatter", MATRIX, 1)]


def test_branches_for_other_platforms_are_left_away():
    run = lambda x: jax.lax.platform_dependent(x, cpu=lambda x: x @ x, default=lambda x: x @ x @ x)
    assert read(run, X, platform="cpu").flops == 2 * 64**3
    assert read(run, X, platform="tpu").flops == 4 * 64**3


def test_a_loop_keeps_nothing_for_branches_of_other_platforms():
    def many(x):
        return jnp.tanh(x @ x) @ jnp.tanh(x * 2) + jnp.exp(x) @ jnp.sin(x)

    def run(x, branches):
        choose = lambda x, _: (jax.lax.platform_dependent(x, **branches), None)
        return jnp.sum(jax.lax.scan(choose, x, None, length=16)[0])

    def peak(**branches):
        return peak_of(read(jax.grad(lambda x: run(x, branches)), X, platform="cuda"))

    assert peak(cuda=jnp.sin, default=many) == peak(default=jnp.sin)
    assert peak(cuda=many, default=jnp.sin) > 2 * peak(default=jnp.sin)


def test_convolutions_count_their_products():
    images, kernel = jnp.ones((4, 8, 8, 3)), jnp.ones((3, 3, 3, 16))
    run = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    # Along each axis of 8 positions 3 x 8 - 2 products are inside.
    assert read(run, images, kernel).flops == 2 * 4 * 16 * 3 * 22**2


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_loop_multiplies_as_often_as_it_runs(times):
    run = lambda x, w: jax.lax.fori_loop(0, times, lambda _, h: jnp.tanh(h @ w), x)
    found = read(run, X, W)
    assert found.flops == times * 2 * 64**3
    assert sum(kernel_work(found).products.values()) == times


@pytest.mark.parametrize("times", [0, 2])
def test_a_loop_that_never_runs_sends_nothing(times):
    run = lambda x, w: jax.lax.fori_loop(0, times, lambda _, h: h + jnp.sum(x, 0) @ w, w[0])
    found = read(run, X, W, splits=[(DP, NONE), unsplit(2)], axes={"dp": 2})
    assert bool(sum(sent.num_bytes * count for sent, count in found.sends())) is bool(times)


def test_a_convolution_of_nothing_multiplies_nothing():
    run = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    )
    assert read(run, jnp.ones((4, 2, 3)), jnp.ones((3, 3, 5))).flops == 0


def test_the_gradient_of_a_strided_convolution_does_the_work_of_the_convolution():
    images, kernel, cotangent = (
        jnp.ones((4, 8, 8, 3)),
        jnp.ones((3, 3, 3, 16)),
        jnp.ones((4, 4, 4, 16)),
    )
    run = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    back = lambda x, k, g: jax.vjp(lambda x: run(x, k), x)[1](g)[0]
    # The last window along each axis lacks an element.
    work = 2 * 4 * 16 * 3 * (3 * 4 - 1) ** 2
    assert read(run, images, kernel).flops == work
    assert read(back, images, kernel, cotangent).flops == work


@pytest.mark.full
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_a_reshape_to_itself_changes_nothing(shape, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    splits = tuple(DP if place == dim and n > 1 else NONE for place, n in enumerate(shape))
    sizes = {"new_sizes": tuple(shape), "dimensions": None, "sharding": None}
    reshape = lambda x: jax.lax.reshape_p.bind(x, **sizes)
    (equation,) = jax.make_jaxpr(reshape)(jnp.zeros(shape)).eqns
    assert placed(equation, [splits]) == [(splits, NONE)]


def test_equal_constraints_on_one_value_are_one_transfer():
    """As for queries, keys and values of positions that lie split."""
    place = placing({"tp": 2}, PartitionSpec())
    gathered = lambda x: jax.lax.with_sharding_constraint(x, place)
    run = lambda x, w: jnp.sum((gathered(x) @ w) * (gathered(x) @ (w + 1)))
    found = read(run, X, W, splits=[(TP, NONE), unsplit(2)], axes={"tp": 2})
    assert kinds(found) == [("all-gather", MATRIX, 1)]


def test_a_scatter_onto_a_sum_that_was_split_gathers_it():
    """The gradient of a table that is looked up and multiplied: XLA scatters onto the product."""
    place = placing({"dp": 4}, PartitionSpec("dp"))

    def run(x, rows, is_tied):
        looked_up = jnp.zeros((64, 64)).at[jnp.arange(64)].add(rows)
        grad = jnp.tanh(x).T @ x + looked_up if is_tied else looked_up
        return jax.lax.with_sharding_constraint(grad, place)

    splits = [(DP, NONE), (DP, NONE)]
    sent = lambda is_tied: kinds(
        read(lambda x, r: run(x, r, is_tied), X, X, splits=splits, axes={"dp": 4})
    )
    assert sent(False) == [("reduce-scatter", MATRIX, 1)]
    assert sorted(sent(True)) == [("all-gather", MATRIX, 1), *2 * [("reduce-scatter", MATRIX, 1)]]


@pytest.mark.parametrize("has_product", [False, True])
def test_sums_over_two_axes_are_split_only_together_with_others(has_product):
    """AllReduceSplitter: a reduction has one collective, a product one for each axis."""
    axes = {"dp": 2, "fsdp": 4}
    owner = placing(axes, PartitionSpec("fsdp"))
    place = lambda x: jax.lax.with_sharding_constraint(x, owner)

    def run(x, y):
        summed = place(jnp.sum(x, 0))
        return summed, place(y.T @ y) if has_product else summed

    both = frozenset(axes)
    splits = [(both, NONE, NONE), (both, NONE)]
    found = read(run, jnp.ones((8, 64, 64)), X, splits=splits, axes=axes)
    apart = [("reduce-scatter", MATRIX, 1), ("all-reduce", MATRIX // 4, 1)]
    whole_sum = [("all-reduce", MATRIX, 1)]
    assert kinds(found) == (2 * apart if has_product else whole_sum)


def chain(depth):
    def run(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    return jax.grad(run), [W] * depth


def test_gradients_of_weights_come_behind_the_chain_on_gpus():
    """So what they are made of is there together: inputs and cotangents of all layers."""
    grads, ws = chain(8)
    size = lambda platform: peak_of(read(grads, ws, X, platform=platform))
    results = 8 * MATRIX
    assert size("cuda") >= 2 * 8 * MATRIX
    assert size("tpu") <= size("cuda") < size("tpu") + results
    names = lambda platform: [n.reads for n in read(grads, ws, X, platform=platform).nodes]
    assert sorted(names("cuda")) == sorted(names("tpu"))
    assert read(grads, ws, X).flops == read(grads, ws, X, platform="tpu").flops


def test_gradients_of_a_layer_come_behind_the_chain_of_its_turn():
    def run(ws, x):
        def turn(x, w):
            for _ in range(4):
                x = jnp.sin(x @ w)
            return x, None

        return jnp.sum(jax.lax.scan(turn, x, ws)[0])

    found = read(jax.grad(run), jnp.ones((8, 64, 64)), X)
    (turn,) = [n.bodies[0] for n in found.nodes if n.name == "scan"][1:]
    products = [n for n in turn.nodes if n.name == "dot_general"]
    carried = turn.outputs[0]
    behind = [p for p in products if carried not in reached(turn, p)]
    assert len(behind) == 4
    assert products[-4:] == behind


def reached(found, node):
    seen = set(node.writes)
    for other in found.nodes:
        if seen & set(other.reads):
            seen |= set(other.writes)
    return seen


@pytest.mark.parametrize("waits", [False, True])
def test_a_turn_gathers_for_the_next_what_does_not_depend_on_it(waits):
    place = placing({"dp": 4}, PartitionSpec())
    gather = lambda w: jax.lax.with_sharding_constraint(w, place)

    def run(ws, x):
        def turn(x, w):
            w = gather(w * x[0, 0]) if waits else gather(w)
            return jnp.sin(x @ w), None

        return jax.lax.scan(turn, x, ws)[0]

    splits = [(NONE, DP, NONE), unsplit(2)]
    found = read(run, jnp.ones((8, 64, 64)), X, splits=splits, axes={"dp": 4})
    (loop,) = [n for n in found.nodes if n.name == "scan"]
    assert loop.ahead == (0 if waits else MATRIX)
    loop.ahead = 0
    before = peak_of(found)
    loop.ahead = MATRIX
    assert peak_of(found) == before + MATRIX


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_sums_that_are_sliced_become_reduce_scatters(platform):
    """A sum that the program says, of which every rank keeps its shard."""
    owner = placing({"dp": 4}, PartitionSpec("dp"))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "dp"),
        mesh=AbstractMesh((4,), ("dp",), axis_types=(AxisType.Auto,)),
        in_specs=PartitionSpec("dp"),
        out_specs=PartitionSpec(),
    )

    def run(x, is_whole):
        total = summed(x)
        shard = jax.lax.with_sharding_constraint(total, owner)
        return shard, total * 2 if is_whole else shard

    x = jnp.ones((256, 64))
    sent = lambda is_whole: kinds(
        read(lambda x: run(x, is_whole), x, splits=[(DP, NONE)], axes={"dp": 4}, platform=platform)
    )
    assert sent(True) == [("all-reduce", MATRIX, 1)]
    assert sent(False) == [("reduce-scatter" if platform == "cuda" else "all-reduce", MATRIX, 1)]


@pytest.mark.parametrize(("kept", "rest"), [("dp", "fsdp"), ("fsdp", "dp")])
def test_a_sum_over_two_axes_of_one_size_is_scattered_over_the_one_that_splits_it(kept, rest):
    sizes = {"dp": 2, "fsdp": 2}
    mesh = AbstractMesh((2, 2), ("dp", "fsdp"), axis_types=(AxisType.Auto,) * 2)

    def summed(x, *axes):
        spec = PartitionSpec(axes)
        psum = lambda x: jax.lax.psum(x, axes)
        return jax.shard_map(psum, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())(x)

    def run(x):
        owner = placing(sizes, PartitionSpec(kept))
        shard = jax.lax.with_sharding_constraint(summed(x, "dp", "fsdp"), owner)
        # A sum is cut in two only where the program sums over either axis alone.
        return shard, summed(x, "dp"), summed(x, "fsdp")

    found = read(run, jnp.ones((8, 64)), axes=sizes)
    sent = [(one.kind, one.axes, one.num_bytes) for one, _ in found.sends()]
    assert sent[:2] == [("reduce-scatter", (kept,), 512), ("all-reduce", (rest,), 256)]


def test_the_gradient_of_what_each_row_chooses_stays_with_the_row():
    """Like the experts of a token: rows are counted the same in the table and in the indices."""
    chosen = lambda x, i: jnp.sum(jnp.take_along_axis(x, i, axis=1) ** 2)
    found = read(
        lambda x, i: jax.grad(chosen)(x, i), X, jnp.zeros((64, 2), int),
        splits=[(DP, NONE), (DP, NONE)], axes={"dp": 4},
    )  # fmt: skip
    assert kinds(found) == []
