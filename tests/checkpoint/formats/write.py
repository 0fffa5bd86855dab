"""Writes the checkpoints of this folder once a version: `python tests/checkpoint/formats/write.py`.

What a version wrote stays as it is, and every later one must read it; so a folder that is there is
not written again. Install the version that writes first, whose number the manifests name.
"""

import importlib.metadata
import pathlib
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.checkpoint import StateDictType, save_checkpoint

FOLDER = pathlib.Path(__file__).parent


def state():
    """Every kind of leaf, of numbers that no generator and no compiler decides."""
    return {
        "bfloat16": jnp.asarray(np.arange(6).reshape(2, 3) / 4, jnp.bfloat16),
        "bool": jnp.asarray([True, False, True]),
        "empty": jnp.zeros((0, 3)),
        "float32": jnp.asarray([np.nan, -0.0, np.inf, 1e-45, 0.1], jnp.float32),
        "int8": jnp.asarray([-128, 127], jnp.int8),
        "key": jax.random.wrap_key_data(jnp.asarray([7, 2**32 - 1], jnp.uint32)),
        "nested": [{"a": jnp.asarray([[1, 2], [3, 4]], jnp.uint32)}, (jnp.int32(-7),)],
        "split": jnp.asarray(np.arange(8).reshape(4, 2), jnp.float16),
    }


def split_state():
    """The state with one leaf split over two devices."""
    mesh = jax.make_mesh((2,), ("dp",))
    halves = NamedSharding(mesh, PartitionSpec("dp"))
    whole = jax.device_put(state(), NamedSharding(mesh, PartitionSpec()))
    return whole | {"split": jax.device_put(state()["split"], halves)}


def main():
    """Writes one checkpoint of each type."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_platforms", "cpu")
    version = importlib.metadata.version("axon_dist")
    target = FOLDER / version
    if target.exists():
        raise SystemExit(f"{target} is there; what a version wrote stays as it is")
    # Orbax writes down where it wrote, which is nobody's business.
    with tempfile.TemporaryDirectory() as folder:
        for type in StateDictType:
            meta = {"step": 12, "version": version}
            save_checkpoint(f"{folder}/{type.value}", split_state(), type=type, meta=meta)
        shutil.copytree(folder, target)


if __name__ == "__main__":
    main()
