"""A weight that a loop reads in every turn is gathered once a step, and its gradient scattered."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, ddp
from axon_dist.inspect import collectives, target_devices, trace_step
from axon_dist.ir.pieces import read_in_loops
from axon_dist.ir.units import mark_units
from axon_dist.mesh import abstract_world
from axon_dist.mesh.targets import missing_compiler
from axon_dist.parallel import STRATEGIES
from axon_dist.planner import read_program

WIDTH, STEPS = 64, 6


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        cell = lambda: nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.RNN(cell(), rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make():
    return Recurrent(nnx.Rngs(0))


def loss_fn(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


BATCH = {"x": np.random.default_rng(0).normal(size=(16, STEPS, WIDTH)).astype(np.float32)}


def build(world, name, **options):
    strategy = ddp() if name == "ddp" else STRATEGIES[name](make, world, min_elements=64)
    return build_train_step(make, optax.sgd(0.1), loss_fn, strategy, world, **options)


@pytest.mark.full
@pytest.mark.sample("full_shard-fsdp=4-1")
@pytest.mark.parametrize(
    ("name", "mesh", "count"),
    [("full_shard", "fsdp=4", 1), ("zero1", "dp=4", 2), ("hybrid_shard", "dp=2,fsdp=2", 1)],
)
def test_gradients_equal_one_device(name, mesh, count):
    step = build(World.emulate(4, mesh), name, accumulate=count)
    alone = build(World.emulate(1, "dp=1"), "ddp")
    got, _ = step.gradients(step.init(), BATCH)
    want, _ = alone.gradients(alone.init(), BATCH)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def theory(step):
    """Bytes of the weights that are split, once gathered and once scattered over 4 ranks.

    Where blocks free their weights, they are gathered once more for the backward pass.
    """
    sizes = [leaf.size * 4 for leaf in jax.tree.leaves(step.model_spec.params) if leaf.size >= 64]
    return 2 * 3 / 4 * sum(sizes)


@pytest.mark.parametrize(("name", "mesh"), [("full_shard", "fsdp=4"), ("zero1", "dp=4")])
def test_the_traced_step_sends_them_once(name, mesh):
    step = build(abstract_world(mesh, 4, "gpu"), name)
    shapes = {"x": jax.ShapeDtypeStruct(BATCH["x"].shape, jnp.float32)}
    program, arguments = trace_step(step, shapes)
    count = len(jax.tree.leaves(step.abstract_state))
    reading = read_program(program, arguments, count, dict(step.world.mesh.shape), "gpu")
    assert 0.98 * theory(step) <= reading.wire_bytes
    assert reading.wire_bytes <= (1.5 if name == "full_shard" else 1.02) * theory(step)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["h100:4", "v5p:2x2x1"])
def test_the_compiled_step_sends_them_once(target):
    if missing := missing_compiler(target):
        pytest.skip(missing)
    step = build(World.init("fsdp=4", devices=list(target_devices(target))), "full_shard")
    shapes = {"x": jax.ShapeDtypeStruct(BATCH["x"].shape, jnp.float32)}
    sent = collectives(step.lower(shapes).compile(), step.world.mesh).total_wire_bytes()
    assert 0.98 * theory(step) <= sent <= 1.5 * theory(step)


def named(function, weights, *rest):
    jaxpr = jax.make_jaxpr(function)(weights, *rest).jaxpr
    return read_in_loops(jaxpr, sorted(weights))


W = {name: jnp.asarray(np.ones((4, 4), np.float32)) for name in "ab"}


def test_values_that_loops_read_are_listed():
    x = jnp.ones((4, 4))

    def scanned(w, x):
        turn = lambda c, _: (c @ w["a"].astype(jnp.bfloat16).astype(c.dtype), None)
        return jax.lax.scan(jax.checkpoint(turn), x, None, length=3)[0] @ w["b"]

    assert named(scanned, W, x) == {"a"}
    until = lambda w, x: jax.lax.while_loop(
        lambda c: (c @ w["b"]).sum() < 3, lambda c: c @ w["a"].T, x
    )
    assert named(jax.jit(until), W, x) == {"a", "b"}


def test_scanned_rows_and_unit_arguments_are_not_read_by_loops():
    stack = {"a": jnp.ones((3, 4, 4)), "b": jnp.ones((4, 4))}
    layer = nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0))
    mark_units(layer, lambda path, module: not path)
    graphdef, _ = nnx.split(layer)

    def run(w, x):
        unit = nnx.merge(graphdef, nnx.State({"kernel": nnx.Param(w["b"])}))
        by_rows = lambda i, c: c @ jax.lax.dynamic_index_in_dim(w["a"], i, keepdims=False)
        x = jax.lax.fori_loop(0, 3, by_rows, x)
        x = jax.lax.scan(lambda c, row: (c @ row, None), x, w["a"])[0]
        return jax.lax.scan(lambda c, _: (unit(c), None), x, None, length=2)[0]

    assert named(run, stack, jnp.ones((2, 4))) == frozenset()
