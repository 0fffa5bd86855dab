"""A process of several is lost, and the run goes on from copies in memory, with the right bits."""

import random
import re

import pytest

from benchmarks.replicas import EVERY, FEWER, WHOLE, Runs, lose_one

pytestmark = pytest.mark.multiprocess

HOSTS = """
import os, pathlib, shutil, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from axon_dist.checkpoint import HostCopies, host_copies as copies
from axon_dist.checkpoint.pieces import write_copy
from axon_dist.mesh import World

world = World.emulate(4, "dp=2,fsdp=2")
me, root = world.process_index, pathlib.Path(sys.argv[1])
values = {"w": np.arange(8.0, dtype=np.float32), "b": np.arange(3, dtype=np.int32)}
split = {"w": PartitionSpec("fsdp"), "b": PartitionSpec()}

def put(value, spec):
    place = NamedSharding(world.mesh, spec)
    return jax.make_array_from_callback(value.shape, place, lambda index: value[index])

state = {name: put(values[name], split[name]) for name in values} | {"key": jax.random.key(7)}
both = {**state, "w": put(values["w"], PartitionSpec(("dp", "fsdp")))}

def check(folder, kept, lost=None):
    folder.mkdir(exist_ok=True)
    HostCopies(folder).save(5, kept, {"data": 40})
    written = len(list(folder.glob("*.copy")))
    if me == lost:
        shutil.rmtree(folder)
        folder.mkdir()
    found = HostCopies(folder).newest(kept)
    if found is None:
        return print(folder.name, "nothing", flush=True)
    shards = [s.data == values["w"][s.index] for s in found.state["w"].addressable_shards]
    good = np.all(shards) and np.array_equal(found.state["b"], values["b"])
    good = good and jnp.array_equal(*map(jax.random.key_data, (found.state["key"], state["key"])))
    print(folder.name, written, found.step, found.meta, bool(good), flush=True)

check(root / "shared", both)

def refuse(*given):
    raise OSError(28, "No space left on device")

if me == 1:
    copies.write_copy = refuse
HostCopies(root / "shared", lambda text: print("told", text, flush=True)).save(9, both, {})
print("kept", HostCopies(root / "shared").newest(both).step, flush=True)
copies.write_copy = write_copy
check(root / f"own-{me}", state, lost=1)
check(root / f"apart-{me}", both)
"""


def test_hosts_keep_whole_copies_and_give_them_to_one_that_has_none(start, tmp_path):
    processes = start(2, "-c", HOSTS, str(tmp_path))
    assert processes.wait([0, 1], timeout=120) == [0, 0], processes.text(0) + processes.text(1)
    for rank in (0, 1):
        lines = [line for line in processes.text(rank).splitlines() if "Gloo" not in line]
        first, told, kept, own, apart = lines
        assert re.fullmatch(r"shared [12] 5 \{'data': 40\} True", first)
        assert "no copy of step 9: processes [1] could not write theirs" in told
        assert ("No space left on device" in told) == (rank == 1)
        assert kept == "kept 5"
        assert re.fullmatch(rf"own-{rank} 1 5 \{{'data': 40\}} True", own)
        # Each host has half of the array, and no host has all of it.
        assert apart == f"apart-{rank} nothing"


SHARDED = ("mesh={fsdp: -1}", "parallel=full_shard")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"), [(FEWER, ()), (WHOLE, ()), (FEWER, SHARDED), (WHOLE, SHARDED)]
)
def test_a_killed_replica_costs_a_few_steps_and_no_bit(tmp_path, kind, overrides):
    loss = lose_one(Runs(tmp_path, overrides), "run", kind, random.Random(1))
    assert loss.has_same_bits
    assert 0 <= loss.at - loss.copied <= EVERY + 2
