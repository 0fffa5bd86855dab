"""Copies in host memory: whole or not there, checked, and restored onto any mesh, bit for bit."""

import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.checkpoint import HostCopies
from axon_dist.checkpoint.copy_files import CopyHeader, Pieces, copies_in, is_whole, write_copy
from axon_dist.checkpoint.host_copies import HostRing, _missing, _sender
from axon_dist.checkpoint.layout import LeafSpec
from axon_dist.core.errors import CheckpointError, ConfigError, DamagedCheckpointError
from axon_dist.mesh import World

SHAPES = {"w": ("float32", (8, 4)), "half": ("bfloat16", (4, 8)), "count": ("int32", ())}
SPLITS = {"w": ("fsdp", None), "half": (None, "fsdp"), "count": ()}


def state_on(world, value=0.0):
    """Leaves of several kinds, split and whole, with a random key and an array without elements."""
    state = {}
    for name, (dtype, shape) in SHAPES.items():
        values = (np.arange(np.prod(shape)).reshape(shape) + value).astype(jnp.dtype(dtype))
        split = PartitionSpec(*(a if a in world.mesh.axis_names else None for a in SPLITS[name]))
        state[name] = jax.device_put(values, NamedSharding(world.mesh, split))
    return state | {"key": jax.random.key(int(value)), "empty": jnp.zeros((0, 3))}


def bits(state):
    plain = {**state, "key": jax.random.key_data(state["key"])}
    return {name: np.asarray(leaf).tobytes() for name, leaf in plain.items()}


def complete_copies(folder):
    """The copies of which a folder has everything, newest first."""
    return [copy for copy in copies_in(folder).values() if is_whole(copy[1].parts, copy[0].leaves)]


@pytest.mark.parametrize("after", ["fsdp=8", "dp=8", "dp=2,fsdp=2"])
def test_a_copy_comes_back_on_another_mesh(tmp_path, after):
    state = state_on(World.emulate(8, "dp=2,fsdp=4"), 7)
    copies = HostCopies(tmp_path)
    copies.save(12, state, {"data": {"samples_seen": 96}})
    size = 4 if after == "dp=2,fsdp=2" else 8
    found = HostCopies(tmp_path).newest(state_on(World.emulate(size, after)))
    assert bits(found.state) == bits(state)
    assert (found.step, found.meta) == (12, {"data": {"samples_seen": 96}})
    assert found.state["w"].sharding.mesh.shape == World.emulate(size, after).mesh.shape


def test_the_newest_stays(tmp_path):
    world = World.emulate(4, "fsdp=4")
    copies = HostCopies(tmp_path)
    for step in (5, 10, 15):
        copies.save(step, state_on(world, step), {})
    assert [header.step for header, _ in complete_copies(tmp_path)] == [15]
    found = HostCopies(tmp_path).newest(state_on(world))
    assert (found.step, bits(found.state)) == (15, bits(state_on(world, 15)))


def test_nothing_is_found_where_nothing_is_or_was_forgotten(tmp_path):
    state = state_on(World.emulate(4, "fsdp=4"))
    copies = HostCopies(tmp_path)
    assert copies.newest(state) is None
    copies.save(1, state, {})
    copies.forget()
    assert copies.newest(state) is None


def test_a_start_that_went_on_replaces_what_an_earlier_one_left(tmp_path):
    world = World.emulate(4, "fsdp=4")
    HostCopies(tmp_path).save(30, state_on(world, 1), {})
    second = HostCopies(tmp_path)
    second.save(10, state_on(world, 2), {})
    assert [header.step for header, _ in complete_copies(tmp_path)] == [10]


def test_a_flipped_bit_is_noticed(tmp_path):
    state = state_on(World.emulate(4, "fsdp=4"), 3)
    HostCopies(tmp_path).save(2, state, {})
    (path,) = tmp_path.glob("*.copy")
    contents = bytearray(path.read_bytes())
    place = bytes(contents).index(np.asarray(state["w"])[:2].tobytes())
    contents[place] ^= 1
    path.write_bytes(contents)
    with pytest.raises(DamagedCheckpointError, match=r"copy of step 2 .* \[0\] was changed"):
        HostCopies(tmp_path).newest(state)


def test_a_copy_of_another_model_is_refused(tmp_path):
    state = state_on(World.emulate(4, "fsdp=4"))
    HostCopies(tmp_path).save(2, state, {})
    with pytest.raises(CheckpointError, match=r"step 2 .* does not fit: w is float32\[8,4\]"):
        HostCopies(tmp_path).newest({**state, "w": jnp.zeros((2, 2))})


def test_a_host_without_space_reports_it_and_keeps_the_previous_copy(tmp_path, monkeypatch):
    state, told = state_on(World.emulate(4, "fsdp=4")), []
    copies = HostCopies(tmp_path, told.append)
    copies.save(2, state, {})

    def refuse(path, *rest, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("axon_dist.checkpoint.copy_files.write_tensors", refuse)
    copies.save(4, state, {})
    assert "no copy of step 4: processes [0] could not write theirs" in told[0]
    assert "No space left on device" in told[0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".copy"]
    assert copies.newest(state).step == 2


HEADER = CopyHeader(
    step=4,
    generation="a",
    copy_number=1,
    process=0,
    writers=(0, 1),
    leaves={"w": LeafSpec("float32", (4,))},
    meta={},
)


def write_half(folder, process, **changes):
    """The file of one of two processes, each of which holds half of an array."""
    header = dataclasses.replace(HEADER, process=process, **changes)
    values = np.arange(2, dtype=np.float32) + 2 * process
    place = ((2 * process, 2 * process + 2),)
    write_copy(folder, header, [("w", place, np.dtype(np.float32))], [values])


def test_a_copy_counts_once_all_processes_have_written_theirs(tmp_path):
    write_half(tmp_path, 0)
    assert not list(complete_copies(tmp_path))
    write_half(tmp_path, 1)
    ((_, pieces),) = complete_copies(tmp_path)
    written = [((0, 2),), ((2, 4),)]
    assert pieces.read("w", np.float32, ((1, 4),), written).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("changes", [{"generation": "b"}, {"copy_number": 2}, {"step": 5}])
def test_pieces_of_different_moments_are_no_copy(tmp_path, changes):
    write_half(tmp_path, 0)
    write_half(tmp_path, 1, **changes)
    assert not list(complete_copies(tmp_path))


def test_a_copy_waits_for_a_process_that_has_nothing_to_add(tmp_path):
    values, place = np.arange(4, dtype=np.float32), ((0, 4),)
    write_copy(tmp_path, HEADER, [("w", place, np.dtype(np.float32))], [values])
    assert not list(complete_copies(tmp_path))
    write_copy(tmp_path, dataclasses.replace(HEADER, process=1), [], [])
    assert len(list(complete_copies(tmp_path))) == 1


def test_a_copy_that_lacks_a_shard_is_none(tmp_path):
    write_half(tmp_path, 0, writers=(0,))
    assert not list(complete_copies(tmp_path))


def test_a_header_comes_back():
    fields = json.loads(HEADER.to_json())
    assert fields["leaves"] == {"w": {"dtype": "float32", "shape": [4]}}
    assert CopyHeader.from_json(HEADER.to_json()) == HEADER
    assert not is_whole([], HEADER.leaves)


def test_each_process_keeps_the_pieces_of_the_one_in_its_place_of_the_host_before():
    ring = HostRing((7, 7, 5, 5, 9, 9))
    assert [ring.before(process) for process in range(6)] == [4, 5, 0, 1, 2, 3]
    assert ring.peers(3) == (2, 3)


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class Split:
    """How rows lie on devices of several processes, of which a test is one."""

    processes: tuple[int, ...]
    rows: tuple[int, ...]
    is_fully_addressable = False

    @property
    def device_set(self):
        return {Device(*pair) for pair in enumerate(self.processes)}

    def devices_indices_map(self, shape):
        return {
            Device(n, process): (slice(row, row + 1),)
            for n, (process, row) in enumerate(zip(self.processes, self.rows, strict=True))
        }


def leaf_on(processes, rows):
    return types.SimpleNamespace(shape=(max(rows) + 1,), sharding=Split(processes, rows))


def test_only_what_is_split_over_hosts_is_sent():
    leaves = {
        "whole": leaf_on((0, 1, 2, 3), (0, 0, 0, 0)),
        "in each host": leaf_on((0, 1, 2, 3), (0, 1, 0, 1)),
        "over hosts": leaf_on((0, 1, 2, 3), (0, 0, 1, 1)),
        "over all": leaf_on((0, 1, 2, 3), (0, 1, 2, 3)),
    }
    assert [*HostRing((7, 7, 5, 5)).spread(leaves)] == ["over hosts", "over all"]
    assert [*HostRing((7, 7, 7, 7)).spread(leaves)] == []


def test_hosts_that_differ_are_refused():
    wanted = (
        r"processes of the hosts have \[1\] and \[2\] devices, and w is split over hosts: .*"
        "same number of processes and devices on each host, or leave checkpoint.memory_every at"
    )
    with pytest.raises(ConfigError, match=wanted):
        HostRing((7, 5)).spread({"w": leaf_on((0, 1, 1), (0, 1, 2))})
    with pytest.raises(ConfigError, match=r"have \[1\] and \[1, 1\] devices"):
        HostRing((7, 5, 5)).spread({"w": leaf_on((0, 1, 2), (0, 1, 2))})


def test_each_device_gets_the_row_of_its_source():
    send, split = _sender(tuple(jax.devices()[:4]), (3, 0, 1, 2))
    rows = jax.device_put(np.arange(8, dtype=np.uint8).reshape(4, 2), split)
    assert np.asarray(send(rows))[:, 0].tolist() == [6, 0, 2, 4]


def test_a_new_host_asks_only_for_the_shards_of_its_devices():
    state = state_on(World.emulate(4, "fsdp=2,dp=2"))
    state.pop("key")
    halves = [((0, 4), (0, 4)), ((4, 8), (0, 4))]
    holders = {"w": dict.fromkeys(halves, 1), "count": {(): 0}, "empty": {}}
    assert _missing(Pieces({}), state, holders) == {("w", half) for half in halves} | {
        ("count", ())
    }
    local = Pieces({})
    local.add("w", halves[0], np.zeros(64, np.uint8))
    local.add("count", (), np.zeros(4, np.uint8))
    assert _missing(local, state, holders) == {("w", halves[1])}
