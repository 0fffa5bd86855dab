"""Gathers: right values and gradients, and one block's weights at a time in the compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist import build_train_step, fsdp
from axon_dist.inspect import collectives, memory
from axon_dist.parallel import Reduction
from axon_dist.step.gather import (
    GlobalGather,
    LocalGather,
    all_gather_by,
    only_axes,
    reduce_by,
    save_all_but_gathers_policy,
    save_products_policy,
)

from ..parallel import tower


@pytest.mark.parametrize(
    ("spec", "axes", "expected"),
    [
        (P("fsdp", "tp"), ("tp",), P(None, "tp")),
        (P(("dp", "fsdp"), None), ("fsdp",), P("fsdp")),
        (P(("dp", "fsdp")), ("dp", "fsdp"), P(("dp", "fsdp"))),
        (P("tp"), ("dp",), P()),
    ],
)
def test_only_some_axes_of_a_spec(spec, axes, expected):
    assert only_axes(spec, axes) == expected


WEIGHT = np.arange(32, dtype=np.float32).reshape(8, 4)


@pytest.mark.parametrize(
    "spec", [P("dp"), P(None, "fsdp"), P(("dp", "fsdp")), P("dp", "fsdp"), P()]
)
def test_shards_become_whole_and_sums_go_to_their_owners(make_world, spec):
    world = make_world("dp=2,fsdp=2")
    axes = ("dp", "fsdp")

    def per_rank(shard):
        whole = all_gather_by(shard, spec)
        addend = whole * (1.0 + jax.lax.axis_index(axes))
        return whole, reduce_by(addend, spec, axes)

    mapped = jax.shard_map(
        per_rank, mesh=world.mesh, in_specs=spec, out_specs=(P(), spec), check_vma=False
    )
    whole, total = jax.jit(mapped)(WEIGHT)
    np.testing.assert_array_equal(whole, WEIGHT)
    np.testing.assert_array_equal(total, WEIGHT * (1 + 2 + 3 + 4))


def test_the_wire_has_a_dtype_of_its_own(make_world):
    world = make_world("dp=2")
    run = jax.shard_map(
        lambda x: reduce_by(x, P("dp"), ("dp",), jnp.float16),
        mesh=world.mesh,
        in_specs=P(),
        out_specs=P("dp"),
        check_vma=False,
    )
    jaxpr = str(jax.make_jaxpr(run)(WEIGHT))
    (line,) = [line for line in jaxpr.splitlines() if "reduce_scatter[" in line]
    assert "f16[" in line
    assert jax.jit(run)(WEIGHT).dtype == WEIGHT.dtype


@pytest.mark.parametrize("kind", ["global", "local"])
def test_gradients_of_a_gathered_weight_are_those_of_a_whole_one(world, kind):
    own, rows = P("dp"), P("dp")
    x = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)
    dense = jax.jit(jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2)))(WEIGHT)
    if kind == "global":
        gather = GlobalGather(world.mesh, own, own, P(), 2)
        run = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ gather(w)) ** 2))
    else:
        gather = LocalGather(own, ("dp",), None, WEIGHT.shape)
        local = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ gather(w)) ** 2) / 8)
        run = jax.shard_map(
            local, mesh=world.mesh, in_specs=(own, rows), out_specs=own, check_vma=False
        )
    place = lambda value: jax.device_put(value, NamedSharding(world.mesh, own))
    grads = jax.jit(run)(place(WEIGHT), place(x))
    np.testing.assert_allclose(grads, dense, rtol=1e-5, atol=1e-7)
    assert grads.sharding.spec == own


def test_a_row_of_stacked_layers_is_gathered_by_the_dims_that_are_left(world):
    """In a scan over layers a weight of spec P(None, "dp") appears as a row of spec P("dp")."""
    stacked = np.arange(48, dtype=np.float32).reshape(3, 8, 2)
    gather = GlobalGather(world.mesh, P(None, "dp"), P(None, "dp"), P(), 3)
    run = jax.jit(lambda w: jax.lax.scan(lambda c, row: (c + gather(row), None), 0.0 * w[0], w)[0])
    placed = jax.device_put(stacked, NamedSharding(world.mesh, P(None, "dp")))
    np.testing.assert_array_equal(run(placed), stacked.sum(0))


def test_the_policy_keeps_all_but_gathered_weights(world):
    gather = GlobalGather(world.mesh, P("dp"), P("dp"), P(), 2)
    x = jnp.ones((2, 8))
    block = lambda x, w: jnp.sin(x @ gather(w)).sum()

    def names(policy):
        grad = jax.grad(jax.checkpoint(block, policy=policy), argnums=(0, 1))
        return str(jax.make_jaxpr(grad)(x, WEIGHT))

    gathers = lambda policy: names(policy).count("= sharding_constraint")
    products = lambda policy: names(policy).count("dot_general")
    everything = jax.checkpoint_policies.everything_saveable
    assert gathers(save_all_but_gathers_policy) > gathers(everything)
    assert products(save_all_but_gathers_policy) == products(everything)


def test_elementwise_results_are_recomputed(world):
    """Kept values: an array per product and reduction, and a byte per compared number."""
    gather = GlobalGather(world.mesh, P("dp"), P("dp"), P(), 2)
    x, w, key = jnp.ones((4, 8)), jnp.ones((8, 8)), jax.random.key(0)

    def block(w, x, key):
        kept = jax.random.bernoulli(key, 0.5, (4, 8))
        y = jnp.where(kept, jnp.tanh(x @ gather(w)) * 2.0 + 1.0, 0.0)
        return (jnp.exp(y) / jnp.exp(y).sum(-1, keepdims=True)).sum()

    def kept(policy):
        protected = jax.checkpoint(block, policy=policy)
        pulled = jax.eval_shape(lambda *args: jax.vjp(protected, *args)[1], w, x, key)
        return sorted(
            f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(pulled) if leaf.ndim
        )

    made, given = ["bool[4, 8]", "float32[4]", "float32[4, 8]"], ["float32[4, 8]", "float32[8, 8]"]
    assert kept(save_products_policy) == sorted(made + given)
    assert len(kept(save_all_but_gathers_policy)) > len(made + given)
    products = lambda policy: str(
        jax.make_jaxpr(jax.grad(jax.checkpoint(block, policy=policy)))(w, x, key)
    ).count("dot_general")
    assert products(save_products_policy) == products(save_all_but_gathers_policy)


def compiled(world, num_blocks, unroll=None, **options):
    strategy = fsdp(axes=("dp",), min_elements=8, **options)
    model, optimizer = tower.make(num_blocks), optax.sgd(0.1)
    step = build_train_step(model, optimizer, tower.loss_fn, strategy, world, unroll=unroll)
    return step.lower(tower.batch()).compile()


BLOCK_BYTES = 4 * (2 * 32 * 64 + 32 + 64)


@pytest.mark.sample("reduction1")
@pytest.mark.parametrize("reduction", [None, Reduction(per="microbatch", dtype="float16")])
def test_blocks_are_gathered_forward_and_again_backward(world, reduction):
    """Per block and pass an all-gather of its weights, inside the loop over layers."""
    program = compiled(world, 2, unroll=1, reduction=reduction)
    gathered = collectives(program, world.mesh).select("all-gather")
    looped = [row for row in gathered if row.count == 2]
    expected = 2 * 2 * BLOCK_BYTES * 7 / 8
    assert sum(row.total_bytes for row in looped) == pytest.approx(expected, rel=0.02)


@pytest.mark.full
@pytest.mark.parametrize("reduction", [None, Reduction(per="microbatch", dtype="float16")])
def test_blocks_that_are_written_out_are_gathered_as_in_a_loop(world, reduction):
    gathered, written = (
        collectives(compiled(world, 2, unroll=unroll, reduction=reduction), world.mesh).select(
            "all-gather"
        )
        for unroll in (1, None)
    )
    assert all(row.count == 1 for row in written)
    assert sum(row.total_bytes for row in written) == sum(row.total_bytes for row in gathered)


@pytest.mark.full
def test_memory_grows_by_shards_and_activations_not_by_gathered_blocks(world):
    """Eight more blocks cost less than one of them whole, shards and gradients included."""
    few, many = (memory(compiled(world, n)).peak for n in (4, 12))
    shards, activations = 8 * BLOCK_BYTES / 8, 8 * 2 * 4 * (32 + 2 * 64) * 4
    assert many - few < 3 * shards + 2 * activations < 8 * BLOCK_BYTES


@pytest.mark.full
def test_where_weights_stay_whole_a_block_keeps_no_second_copy_of_them(world):
    """A block more costs its whole weights once, its shards and little of its activations."""
    program = lambda n: compiled(world, n, sharding_strategy="shard_grad_op")
    few, many = (memory(program(n)).temporaries for n in (4, 12))
    assert 8 * BLOCK_BYTES < many - few < 1.5 * 8 * BLOCK_BYTES
