"""Arrays whose dims do not divide are stored padded, and unpadded for every reader."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist import World
from axon_dist.sharding.padding import (
    EvenShards,
    even_spec,
    model_tree,
    padded,
    padding_of,
    stored_shape,
    stored_tree,
    unpad,
)


def placed(mesh: str, spec: P) -> NamedSharding:
    size = int(np.prod([int(part.split("=")[1]) for part in mesh.split(",")]))
    return NamedSharding(World.emulate(size, mesh).mesh, spec)


CASES = [
    ("fsdp=5", P("fsdp"), (512, 2)),
    ("fsdp=6", P(None, "fsdp"), (3, 100)),
    ("fsdp=7", P("fsdp"), (11,)),
    ("dp=2,fsdp=3", P("fsdp"), (7, 4)),
    ("dp=2,fsdp=3", P(None, ("dp", "fsdp")), (7, 44)),
    ("dp=2,fsdp=3", P("dp", "fsdp"), (7, 44)),
]


@pytest.mark.parametrize(("mesh", "spec", "shape"), CASES, ids=str)
def test_there_and_back(mesh, spec, shape):
    place = placed(mesh, spec)
    values = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    tree, places = {"w": jnp.asarray(values)}, {"w": place}
    stored = jax.jit(lambda tree: stored_tree(tree, places), out_shardings=places)(tree)
    whole = np.asarray(stored["w"])
    assert whole.shape == stored_shape(shape, spec, place.mesh)
    assert whole.sum() == values.sum()  # The padding is zero.
    assert padding_of(tree, places).shapes == {"w": shape}
    whole = NamedSharding(place.mesh, P())
    back = jax.jit(lambda stored: model_tree(stored, tree, places), out_shardings=whole)(stored)
    np.testing.assert_array_equal(back["w"], values)


@pytest.mark.parametrize(("mesh", "spec", "shape"), CASES, ids=str)
def test_shards_that_divide_the_shape_of_the_model(mesh, spec, shape):
    place = placed(mesh, spec)
    values = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    stored = jax.device_put(padded(values, stored_shape(shape, spec, place.mesh)), place)
    even = EvenShards(shape, place)
    array = even.of(stored)
    np.testing.assert_array_equal(array, values)
    again = even.stored(array)
    np.testing.assert_array_equal(again, stored)
    assert again.sharding == place


def test_arrays_that_divide_are_not_padded():
    place = placed("fsdp=4", P("fsdp"))
    assert padding_of({"w": jnp.ones((8, 3))}, {"w": place}) is None
    assert unpad(values := jnp.ones(3), (3,)) is values


def test_a_spec_keeps_the_axes_that_divide():
    mesh = placed("dp=2,fsdp=3", P()).mesh
    assert even_spec(P(("dp", "fsdp")), (8,), mesh) == P("dp")
    assert even_spec(P(("dp", "fsdp")), (9,), mesh) == P()
