"""Under every mesh context of a caller a step is the same as on one device."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from axon_dist import World, build_train_step, compose, ddp, fsdp, pipelined, zero
from axon_dist.core.errors import UnsupportedError

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


@pytest.mark.sample("fsdp-explicit")
@pytest.mark.parametrize("name", ["none", "explicit", "auto", "legacy"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_does_not_see_the_context(strategy, name):
    make, mesh = STRATEGIES[strategy]
    world = World.emulate(4, mesh)
    want, grads = nnx.value_and_grad(loss_fn)(Model(), BATCH)
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


def test_an_unknown_name_is_refused_and_a_table_maps_it():
    world = World.emulate(4, "dp=4")

    def build(**options):
        return build_train_step(
            lambda: Model("rows"), optax.sgd(0.1), loss_fn, ddp(), world, batch=BATCH, **options
        )

    with pytest.raises(UnsupportedError, match=r"called 'rows'.*axis_names=\{'rows': 'dp'\}"):
        build()
    build(axis_names={"rows": "dp"})
