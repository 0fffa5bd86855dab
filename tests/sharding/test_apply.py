"""Optimizer moments are sharded like their parameter, whatever transformation wraps them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist.sharding import (
    ByRule,
    LargestDim,
    Merge,
    optimizer_decisions,
    optimizer_shardings,
    put,
    shardings,
    specs,
)

PARAMS = {
    "blocks": {0: {"kernel": jax.ShapeDtypeStruct((16, 8), jnp.float32)}},
    "bias": jax.ShapeDtypeStruct((8,), jnp.float32),
}
SPLIT = LargestDim(("dp",), min_elements=64)
MASK = {"blocks": {0: {"kernel": True}}, "bias": False}


def test_specs_and_shardings_of_a_tree(world):
    assert specs(SPLIT, PARAMS, world.mesh) == {"blocks": {0: {"kernel": P("dp")}}, "bias": P()}
    placed = shardings(SPLIT, PARAMS, world.mesh, memory_kind="pinned_host")
    kernel = placed["blocks"][0]["kernel"]
    assert (kernel.spec, kernel.memory_kind) == (P("dp"), "pinned_host")


def test_an_array_of_another_mesh_is_put_into_the_memory_of_the_host(world, make_world):
    x = jax.device_put(np.ones((6, 4), np.float32), NamedSharding(world.mesh, P()))
    for spec in (P("fsdp"), P()):
        place = NamedSharding(make_world("fsdp=3").mesh, spec, memory_kind="pinned_host")
        moved = put(x, place)
        assert moved.sharding == place
        np.testing.assert_array_equal(moved, x)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(1e-3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        optax.masked(optax.adam(1e-3), MASK),
        optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.sgd(1e-3)},
            {"blocks": {0: {"kernel": "a"}}, "bias": "b"},
        ),
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    ],
    ids=["adam", "chain", "masked", "multi_transform", "inject_hyperparams"],
)
def test_moments_lie_as_their_parameter(world, optimizer):
    state = jax.eval_shape(optimizer.init, PARAMS)
    placed = optimizer_shardings(SPLIT, PARAMS, state, world.mesh)
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(placed), strict=True))
    assert {s.spec for leaf, s in pairs if leaf.shape == (16, 8)} == {P("dp")}
    assert {s.spec for leaf, s in pairs if leaf.shape != (16, 8)} <= {P()}


def test_moments_of_two_parameters_of_one_shape_are_distinguished(world):
    leaf = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    params = {"kernel": leaf, "up": {"kernel": leaf}}
    rule = ByRule(((r"^up/kernel$", P(None, "dp")), (r"^kernel$", P("dp"))))
    state = jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, params)
    trace = optimizer_shardings(rule, params, state, world.mesh)[0].trace
    assert trace["kernel"].spec == P("dp")
    assert trace["up"]["kernel"].spec == P(None, "dp")


def test_moments_like_no_parameter_are_split_by_what_looks_at_no_path(world):
    params = {"kernel": jax.ShapeDtypeStruct((256, 128), jnp.float32)}
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    rule = ByRule(((r"kernel", P(None, "dp")),))
    found = optimizer_decisions(Merge((rule, SPLIT)), params, state, world.mesh)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
    by_shape = {leaf.shape: decision.spec for leaf, decision in pairs}
    assert by_shape == {(): P(), (1,): P(), (256,): P("dp"), (128,): P("dp")}


def test_arrays_move_to_other_devices_and_host_memory_at_once(make_world):
    everywhere = jax.sharding.NamedSharding(make_world("dp=8").mesh, P())
    weight = jax.device_put(jnp.arange(9.0), everywhere)
    mesh = make_world("fsdp=3").mesh
    policy = LargestDim(("fsdp",), 1)
    moved = put({"w": weight}, shardings(policy, {"w": weight}, mesh, "pinned_host"))["w"]
    assert moved.sharding.memory_kind == "pinned_host"
    assert moved.sharding.device_set == set(mesh.devices.flat)
    assert (jax.device_get(moved) == jax.device_get(weight)).all()
