"""Host memory while weights are read: at most one shard in transfer and a piece of the file."""

import subprocess
import sys

import pytest

PROGRAM = r"""
import pathlib, sys
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from axon_dist import World, build_train_step, fsdp, load_weights
from axon_dist.checkpoint import write_tensors
from axon_dist.weights import Rule, WeightRules

ROWS, COLUMNS, LAYERS = 8192, 6144, 6  # 192 MiB each
path = pathlib.Path(sys.argv[1])
spec = jax.ShapeDtypeStruct((ROWS, COLUMNS), np.float32)
names = {f"layers.{i}.weight": spec for i in range(LAYERS)}
write_tensors(path, names, (np.full((ROWS, COLUMNS), i, np.float32) for i in range(LAYERS)))


def resident(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Tower(nnx.Module):
    def __init__(self):
        layer = lambda: nnx.Linear(COLUMNS, ROWS, use_bias=False, rngs=nnx.Rngs(0))
        self.layers = nnx.List(layer() for _ in range(LAYERS))

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x) @ jnp.ones((ROWS, COLUMNS))
        return x


world = World.emulate(8, "fsdp=8")
loss = lambda model, batch: jnp.mean(model(batch["x"]))
step = build_train_step(Tower, optax.sgd(0.1), loss, fsdp(), world)
rule = Rule(r"layers\.(?P<i>\d+)\.weight", "layers/{i}/kernel", "out in -> in out")
before = resident("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
state = load_weights(step, path, WeightRules((rule,)))
jax.block_until_ready(state)
kernels = jax.tree.leaves(state.params)
assert [float(k[3, 5]) for k in kernels] == list(range(LAYERS))
shard = max(k.addressable_shards[0].data.nbytes for k in kernels)
print(resident("VmHWM") - before, sum(k.nbytes for k in kernels), shard)
"""


@pytest.mark.full
def test_no_more_than_a_shard_and_a_piece_of_the_file_is_in_host_memory(tmp_path):
    """Arrays on emulated devices are memory of this process, so subtract them."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "w.safetensors")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    peak, on_devices, shard = map(int, done.stdout.split())
    assert (on_devices, shard) == (6 * 192 * 2**20, 24 * 2**20)
    assert peak - on_devices <= shard + 192 * 2**20
