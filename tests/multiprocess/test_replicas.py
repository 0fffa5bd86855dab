"""A process of several is lost, and the run goes on from copies in memory, with the right bits."""

import os
import random
import re
import signal
import time

import pytest

from axon_dist.launch import INTERRUPTED
from benchmarks.faults import final_bits
from benchmarks.replicas import EVERY, FEWER, SHARDED, WHOLE, Runs, lose_one, pid_of

pytestmark = pytest.mark.multiprocess

HOSTS = """
import os, pathlib, shutil, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from axon_dist.checkpoint import HostCopies, host_copies as copies
from axon_dist.checkpoint.copy_files import write_copy
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
check(root / f"apart-{me}", both, lost=1)
"""

LOST = """
import pathlib, shutil, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from axon_dist.checkpoint import HostCopies
from axon_dist.mesh import World

world = World.emulate(3, "fsdp=3")
me, folder = world.process_index, pathlib.Path(sys.argv[1]) / sys.argv[-1]
folder.mkdir()
kinds = {"float32": 6, "bfloat16": 3, "float8_e4m3fn": 9, "int8": 6, "bool": 3, "uint32": 12}
values = {name: np.arange(n).astype(jnp.dtype(name)) for name, n in kinds.items()}
split = NamedSharding(world.mesh, PartitionSpec("fsdp"))

def put(value):
    return jax.make_array_from_callback(value.shape, split, lambda index: value[index])

def is_right(found):
    shards = [(s.data, values[x][s.index]) for x in values for s in found[x].addressable_shards]
    return all(np.asarray(got).tobytes() == value.tobytes() for got, value in shards)

state = {name: put(value) for name, value in values.items()}
values["step"] = np.int32(7)
whole = NamedSharding(world.mesh, PartitionSpec())
state["step"] = jax.make_array_from_callback((), whole, lambda index: values["step"])
for lost in ((0,), (1,), (2,), (0, 2)):
    HostCopies(folder).save(5, state, {"data": len(lost)})
    if me in lost:
        shutil.rmtree(folder)
        folder.mkdir()
    found = HostCopies(folder).newest(state)
    right = found and (found.step, found.meta, is_right(found.state))
    print("lost", lost, len(list(folder.glob("*.copy"))), right, flush=True)
"""


@pytest.mark.full
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
        # Each host has half of the array, and a copy of the other's.
        assert apart == f"apart-{rank} 2 5 {{'data': 40}} True"


@pytest.mark.full
def test_state_split_over_hosts_outlives_any_one_of_them(start, tmp_path):
    processes = start(3, "-c", f"import os; import sys; sys.argv.append(os.environ['RANK']){LOST}",
                      str(tmp_path))  # fmt: skip
    assert processes.wait([0, 1, 2], timeout=120) == [0, 0, 0], processes.text(0)
    for rank in range(3):
        lines = [line for line in processes.text(rank).splitlines() if line.startswith("lost")]
        for lost, line in enumerate(lines[:3]):
            files = 0 if lost == rank else 2
            assert line == f"lost ({lost},) {files} (5, {{'data': 1}}, True)"
        # Two in a row took both copies of what the first of them had.
        assert lines[3].endswith(" None")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"), [(FEWER, ()), (WHOLE, ()), (FEWER, SHARDED), (WHOLE, SHARDED)]
)
def test_a_killed_replica_costs_a_few_steps_and_no_bit(tmp_path, kind, overrides):
    loss = lose_one(Runs(tmp_path, overrides), "run", kind, random.Random(1))
    assert loss.has_same_bits
    assert 0 <= loss.at - loss.copied <= EVERY + 2


@pytest.mark.full
def test_elastic_bits_go_on_with_as_many_as_divide_the_logical_shards(tmp_path):
    runs = Runs(tmp_path, ("deterministic=elastic", "logical_shards=4"))
    launcher = runs.start("run", 4, "--elastic")
    wait_for(launcher, runs, lambda log, rows: len(rows) > EVERY + 1)
    os.kill(pid_of(launcher, 2), signal.SIGKILL)
    assert launcher.wait(300) == 0, runs.log("run")
    assert runs.log("run").count("3 processes cannot continue this run; trying 2") == 1
    assert "2 of 4 processes: 2 microbatches" in runs.log("run")
    assert "resuming after step" in runs.log("run")
    assert final_bits(tmp_path / "run") == runs.finish("alone", 4)


def wait_for(launcher, runs, is_there):
    """Waits until something is true of the log and the records of a run."""
    deadline = time.monotonic() + 300
    while not is_there(runs.log("run"), runs.records("run")):
        assert launcher.poll() is None, runs.log("run")
        assert time.monotonic() < deadline, runs.log("run")
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_shrinks_onto_a_program_compiled_ahead_and_grows_again(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DEBUG_LOG_MODULES", "jax._src.compiler")
    runs = Runs(tmp_path, ("train.steps=100000",))
    launcher = runs.start("run", 4, "--elastic", "--rejoin-after", "10")
    try:
        kept = "'jit_train_step' took at least"
        wait_for(launcher, runs, lambda log, rows: log.count(kept) == 2 and len(rows) > 10)
        os.kill(pid_of(launcher, 1), signal.SIGKILL)
        wait_for(launcher, runs, lambda log, rows: "continuing with all 4 processes" in log)
        seen = len(runs.records("run"))
        wait_for(launcher, runs, lambda log, rows: len(rows) > seen + 5)
        launcher.terminate()
        assert launcher.wait(120) == INTERRUPTED, runs.log("run")
    finally:
        launcher.kill()
    steps = [record["step"] for record in runs.records("run")]
    assert steps == list(range(1, len(steps) + 1))
    alone, fewer, whole = re.split(r"restart 1 of 3|continuing with all", runs.log("run"))
    assert "microbatches" not in alone + whole
    assert "3 of 4 processes: 2 microbatches per step instead of 1" in fewer
    assert "cache hit for 'jit_train_step'" in fewer
    # What was stopped between two steps goes on after the very step.
    ended = re.search(r"ended +SIGTERM after (\d+) steps", fewer)
    assert f"resuming after step {ended[1]} from the copies in memory" in whole
