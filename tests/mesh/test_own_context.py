"""Under every mesh context of a caller a step is the same as on one device."""

import contextlib
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from axon_dist import (
    World,
    build_train_step,
    compose,
    context_parallel,
    ddp,
    diloco,
    expert_parallel,
    fsdp,
    load_checkpoint,
    pipelined,
    save_checkpoint,
    tensor_parallel,
    zero,
)
from axon_dist.core.errors import UnsupportedError
from axon_dist.core.own_context import AxisNames, own_context
from axon_dist.mesh import SLOW_AXES
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.models.experts import ExpertConfig
from axon_dist.models.loss import next_token_loss

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X)}


class Model(nnx.Module):
    def __init__(self, axis=None):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.axis = axis

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
            if self.axis:
                x = jax.lax.with_sharding_constraint(x, P(self.axis, None))
        return x


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@contextlib.contextmanager
def legacy(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh:
            yield


def context(name):
    if name == "none":
        return contextlib.nullcontext()
    types = (AxisType.Explicit if name == "explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=types, devices=jax.devices()[:4])
    return legacy(mesh) if name == "legacy" else jax.set_mesh(mesh)


STRATEGIES = {
    "fsdp": (lambda: fsdp(min_elements=8), "fsdp=4"),
    "ddp": (ddp, "dp=4"),
    "zero1": (lambda: zero(1), "dp=4"),
    "pipeline": (lambda: compose(ddp(), pipelined(2, 2)), "dp=2,pp=2"),
}


@pytest.mark.sample("fsdp-explicit", "pipeline-explicit")
@pytest.mark.parametrize("name", ["none", "explicit", "auto", "legacy"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_does_not_see_the_context(strategy, name):
    make, mesh = STRATEGIES[strategy]
    world = World.emulate(4, mesh)
    want, grads = nnx.jit(nnx.value_and_grad(loss_fn))(Model(), BATCH)
    with context(name):
        step = build_train_step(
            lambda: Model("data"), optax.sgd(0.1), loss_fn, make(), world, batch=BATCH
        )
        state, metrics = step(step.init(), BATCH)
        # A caller computes with metrics, whatever mesh is in context.
        assert float(metrics["loss"] * 1) == pytest.approx(float(want), rel=1e-6)
    updated = jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(Model(), nnx.Param), grads)
    got = step.weights(state)
    for path, value in nnx.to_flat_state(updated):
        name_of = "/".join(map(str, path))
        np.testing.assert_allclose(got[name_of], value.get_value(), atol=1e-6)


@pytest.mark.parametrize("name", ["data", "batch"])
@pytest.mark.parametrize("slow", SLOW_AXES)
def test_a_models_name_for_the_batch_means_slow_axes_too(slow, name):
    mesh = AbstractMesh((2, 2, 2, 2), (slow, "dp", "fsdp", "tp"))
    assert AxisNames(mesh).meant(name) == (slow, "dp", "fsdp")


TOKENS = {"tokens": np.random.default_rng(0).integers(0, 32, (4, 9)).astype(np.int32)}
SIZES = dict(vocab_size=32, width=8, num_heads=2, ffn_width=8, max_length=8)
PLAN = "transformer"
WHOLE = {
    "sequence": (lambda: tensor_parallel(PLAN, sequence=True), "tp=2"),
    "rings": (lambda: tensor_parallel(PLAN, sequence=True, rings=True), "tp=2"),
    "context": (lambda: context_parallel("ring"), "cp=2"),
    "ulysses": (lambda: context_parallel("ulysses"), "cp=2"),
    "expert": (lambda: compose(ddp(), expert_parallel()), "dp=1,ep=2"),
    "hybrid": (lambda: fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8), "dp=2,fsdp=2"),
    "diloco": (lambda: compose(diloco("nodes", every=2), fsdp(min_elements=8)), "nodes=2,fsdp=2"),
    "pipeline": (lambda: compose(ddp(), pipelined(2, 2)), "dp=2,pp=2"),
}


def named_as(world, axis_type):
    """A mesh of other devices in another order, whose axes have the names of the world's."""
    sizes = tuple(world.mesh.shape.values())
    types = (axis_type,) * len(sizes)
    devices = jax.devices()[: math.prod(sizes)][::-1]
    return jax.make_mesh(sizes, tuple(world.mesh.axis_names), axis_types=types, devices=devices)


CONTEXTS = {
    **{name: lambda _, name=name: context(name) for name in ("explicit", "auto", "legacy")},
    "world": lambda world: jax.set_mesh(world.mesh),
    "same names": lambda world: jax.set_mesh(named_as(world, AxisType.Explicit)),
    "abstract": lambda world: jax.sharding.use_abstract_mesh(
        named_as(world, AxisType.Explicit).abstract_mesh
    ),
}


def trained(strategy, path, enter):
    """Two steps, an evaluation, and a third step of a state that was saved and loaded."""
    make, mesh = WHOLE[strategy]
    world = World.emulate(math.prod(int(part[-1]) for part in mesh.split(",")), mesh)
    experts = ExpertConfig(count=2, per_token=1) if strategy == "expert" else None
    num_layers = 2 if strategy == "pipeline" else 1
    config = TransformerConfig(**SIZES, num_layers=num_layers, experts=experts)
    with enter(world):
        step = build_train_step(
            lambda: Transformer(config, rngs=nnx.Rngs(0)),
            optax.sgd(0.1),
            next_token_loss,
            make(),
            world,
            batch=TOKENS,
        )
        state = step.init()
        losses = []
        for _ in range(2):
            state, metrics = step(state, TOKENS)
            losses.append(float(metrics["loss"] * 1))
        losses.append(float(step.evaluate(state, TOKENS)["loss"] * 1))
        save_checkpoint(path, state)
        state, metrics = step(load_checkpoint(path, step), TOKENS)
        losses.append(float(metrics["loss"] * 1))
    return losses, {name: np.asarray(x) for name, x in step.weights(state).items()}


@functools.cache
def expected(strategy, path):
    return trained(strategy, path / strategy, lambda _: contextlib.nullcontext())


@pytest.mark.full
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("strategy", WHOLE)
def test_training_evaluating_and_loading_do_not_see_the_context(
    strategy, name, tmp_path, tmp_path_factory
):
    losses, weights = trained(strategy, tmp_path / "saved", CONTEXTS[name])
    want, expected_weights = expected(strategy, tmp_path_factory.getbasetemp())
    assert losses == pytest.approx(want, rel=1e-6)
    for path, value in expected_weights.items():
        np.testing.assert_allclose(weights[path], value, atol=1e-6, err_msg=path)


def test_an_unknown_name_is_refused_and_a_table_maps_it():
    world = World.emulate(4, "dp=4")

    def build(**options):
        return build_train_step(
            lambda: Model("rows"), optax.sgd(0.1), loss_fn, ddp(), world, batch=BATCH, **options
        )

    with pytest.raises(UnsupportedError, match=r"'rows' is neither.*axis_names=\{'rows': 'dp'\}"):
        build()
    build(axis_names={"rows": "dp"})


def test_code_that_sets_a_mesh_inside_the_context_has_its_shardings():
    """As `multihost_utils.process_allgather` does, on which copies in memory depend."""
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.arange(4), jax.NamedSharding(mesh, P("rows")))
    with own_context(), jax.set_mesh(mesh):
        whole = jax.jit(lambda x: x, out_shardings=P())(x)
        split = jax.jit(lambda x: x, in_shardings=P("rows"))(x)
    assert whole.addressable_data(0).tolist() == [0, 1, 2, 3]
    assert split.addressable_data(0).tolist() == [0]
