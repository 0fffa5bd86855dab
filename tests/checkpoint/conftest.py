import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.checkpoint import target_of


@pytest.fixture
def values():
    """Every kind of leaf, on no mesh; numpy's but for keys, placed without a program."""
    return {
        "float": np.arange(64, dtype=np.float32).reshape(8, 8) / 7,
        "half": np.linspace(0, 1, 16).astype(jnp.bfloat16),
        "int": np.arange(8, dtype=np.int8) - 4,
        "bool": np.arange(8) % 3 == 0,
        "scalar": np.int32(-7),
        "empty": np.zeros((0, 3), np.float32),
        "key": jax.random.split(jax.random.key(3), 8),
        "nested": [{"nan": np.array([np.nan, -0.0, np.inf] * 8, np.float32)}],
    }


@pytest.fixture
def place():
    """Puts values on a mesh: dim 0 split over its axes where it divides, in the order given."""

    def shardings(values, world):
        axes = world.mesh.axis_names

        def sharding(leaf):
            splits = leaf.ndim > 0 and leaf.shape[0] % world.size == 0
            return NamedSharding(world.mesh, PartitionSpec(axes if splits else None))

        return jax.tree.map(lambda x: sharding(x) if x.ndim else on_all(world), values)

    def on_all(world):
        return NamedSharding(world.mesh, PartitionSpec())

    def placed(values, world, abstract=False):
        where = shardings(values, world)
        return target_of(values, where) if abstract else jax.device_put(values, where)

    return placed


def bits(tree):
    """The bytes of every leaf, so that NaN equals NaN and 0 does not equal -0."""
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(lambda x: jax.device_get(plain(x)).tobytes(), tree)


@pytest.fixture(name="bits")
def bits_fixture():
    return bits
