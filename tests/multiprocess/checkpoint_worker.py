"""One of several processes that save together: rank, number of processes, port, folder."""

import os
import resource
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.checkpoint import (
    CheckpointManager,
    Retention,
    StateDictType,
    export_safetensors,
    load_checkpoint,
    save_checkpoint,
)
from axon_dist.core.errors import CheckpointError
from axon_dist.mesh import World

VALUES = {
    "rows": np.arange(64 * 16, dtype=np.float32).reshape(64, 16) / 7,
    "columns": np.arange(128, dtype=np.int8).reshape(8, 16),
    "whole": np.arange(5, dtype=np.float32),
    "scalar": np.array(3, np.int32),
}
SPECS = {"rows": PartitionSpec("fsdp"), "columns": PartitionSpec(None, "fsdp")}


def make_state(world):
    def place(name, values):
        sharding = NamedSharding(world.mesh, SPECS.get(name, PartitionSpec()))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    whole = NamedSharding(world.mesh, PartitionSpec())
    keys = jax.jit(lambda: jax.random.split(jax.random.key(5), 4), out_shardings=whole)()
    return {name: place(name, values) for name, values in VALUES.items()} | {"keys": keys}


def check(state):
    """Every shard of this process has the bits of its part."""
    for name, values in VALUES.items():
        for shard in state[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])
    keys = jax.random.key_data(jax.random.split(jax.random.key(5), 4))
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(state["keys"])), keys)


def damage(folder):
    file = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])


def main(rank, num_processes, port, folder):
    jax.config.update("jax_num_cpu_devices", 8 // num_processes)
    jax.distributed.initialize(f"localhost:{port}", num_processes, rank)
    world = World.init("fsdp=-1")
    state, told = make_state(world), []
    for type in StateDictType:
        with CheckpointManager(folder / type, Retention(last=2), type=type) as manager:
            for step in (1, 2, 3):
                manager.save(step, state, meta={"step": step})
        assert [entry.step for entry in manager.entries()] == [2, 3]
        check(load_checkpoint(folder / type / "step_00000003", state))
    with CheckpointManager(os.environ["BUCKET"], Retention(last=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state, meta={"step": step})
    assert [entry.step for entry in manager.entries()] == [2, 3]
    found = manager.restore_newest(state)
    assert found.step == 3
    check(found.state)
    export_safetensors(folder / "state.safetensors", state)
    if rank == 0:
        damage(folder / "sharded" / "step_00000003")
    found = CheckpointManager(folder / "sharded", tell=told.append).restore_newest(state)
    assert found.path.name == "step_00000002", "all processes go back together"
    assert len(told) == 1
    check(found.state)
    blocked = folder / "blocked"
    if rank == 0:
        blocked.write_text("a file where a folder should be")
    manager = CheckpointManager(blocked)
    manager.save(1, state)
    assert "could not save checkpoint" in manager.failure, "and all hear of a failure"
    occupied = folder / "occupied"
    if rank == 0:
        occupied.mkdir()
        (occupied / "thesis").write_text("")
    with pytest.raises(CheckpointError, match="a folder that holds 'thesis'"):
        save_checkpoint(occupied, state)
    check_full_disk_of_one(folder / "full_disk", state, rank)
    print(f"process {rank} done", flush=True)


def check_full_disk_of_one(path, state, rank):
    """Process 1 cannot write a byte: the others do not wait for it, and the next save is good."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"process 1 could not write: .*File too large"):
        save_checkpoint(path, state)
    assert time.monotonic() - started < 60
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save_checkpoint(path, state)
    check(load_checkpoint(path, state))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
