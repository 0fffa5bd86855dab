"""Checkpoints in a bucket: the promises of those on a disk, with a marker in place of a name."""

import jax.numpy as jnp
import pytest

from axon_dist.checkpoint import (
    CheckpointManager,
    Retention,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
)
from axon_dist.checkpoint.seal import stray_in
from axon_dist.core.errors import CheckpointError, ConfigError, DamagedCheckpointError, StoreError
from axon_dist.core.files import as_place
from axon_dist.mesh import World


@pytest.fixture
def server(store):
    return store


@pytest.fixture(params=["gs", "s3"])
def folder(store, request):
    return f"{request.param}://bucket/runs/one"


@pytest.mark.sample("s3")
def test_it_comes_back_bit_for_bit_on_another_mesh(folder, values, place, bits):
    on_eight = place(values, World.emulate(8))
    save_checkpoint(f"{folder}/step", on_eight, meta={"seen": 7})
    found = load_checkpoint(f"{folder}/step", place(values, World.emulate(2), abstract=True))
    assert bits(found) == bits(values)
    assert read_manifest(f"{folder}/step").meta == {"seen": 7}


@pytest.mark.sample("gs")
def test_a_store_that_fails_half_the_time_changes_no_bit(folder, server, values, place, bits):
    server.faults = 0.4
    save_checkpoint(f"{folder}/step", place(values, World.emulate(4)))
    target = place(values, World.emulate(8), abstract=True)
    assert bits(load_checkpoint(f"{folder}/step", target)) == bits(values)


def test_a_copy_on_a_disk_is_a_checkpoint_and_back_again(
    folder, server, tmp_path, values, place, bits
):
    save_checkpoint(f"{folder}/step", place(values, World.emulate(2)))
    for name in server.names():
        path = tmp_path / name.removeprefix("bucket/runs/one/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.objects[name][1])
    target = place(values, World.emulate(1), abstract=True)
    assert bits(load_checkpoint(tmp_path / "step", target)) == bits(values)
    name = next(name for name in read_manifest(tmp_path / "step").files if name.endswith("/0"))
    (tmp_path / "step" / name).write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=f"file {name} has 0 bytes"):
        load_checkpoint(tmp_path / "step", target)


@pytest.mark.sample("gs")
def test_no_file_of_a_copy_on_a_disk_counts_as_added(folder, server, tmp_path, values, place):
    """Also where the checkpoint had replaced another, so that its manifest has the second name."""
    save_checkpoint(f"{folder}/step", place(values, World.emulate(2)))
    save_checkpoint(f"{folder}/step", place(values, World.emulate(2)))
    for name in server.names():
        path = tmp_path / name.removeprefix("bucket/runs/one/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.objects[name][1])
    copy = tmp_path / "step"
    assert (copy / "manifest.2.json").exists()
    assert stray_in(copy, read_manifest(copy)) is None
    (copy / "notes").write_text("")
    assert stray_in(copy, read_manifest(copy)) == "notes"


@pytest.mark.parametrize("type", ["sharded", "full"])
def test_a_checkpoint_of_a_disk_is_read_in_a_bucket(
    folder, server, tmp_path, monkeypatch, type, values, place, bits
):
    values.pop("empty")
    save_checkpoint(tmp_path / "step", place(values, World.emulate(2)), type=type)
    for path in (tmp_path / "step").rglob("*"):
        if path.is_file():
            name = path.relative_to(tmp_path)
            (as_place(folder, "here") / str(name)).write(path.read_bytes())
    target = place(values, World.emulate(1), abstract=True)
    assert bits(load_checkpoint(f"{folder}/step", target)) == bits(values)


def damage(server, name, change):
    name = f"bucket/runs/one/step_00000002/{name}"
    generation, contents = server.objects.pop(name)
    if (changed := change(contents)) is not None:
        server.objects[name] = generation + 10_000, changed


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("COMMITTED", lambda x: b"0", "do not match, so"),
        ("manifest.json", lambda x: x.replace(b'"seen": 1', b'"seen": 2'), "do not match, so"),
        ("zarr/w/0", lambda x: None, "file zarr/w/0 is missing"),
        ("zarr/w/0", lambda x: bytes([x[0] ^ 1]) + x[1:], "leaf w has checksum"),
        ("zarr/w/0", lambda x: x[:5], "cannot be read"),
    ],
)  # fmt: skip
def test_damage_is_seen_and_passed_over(server, folder, name, change, said):
    told = []
    with CheckpointManager(folder, tell=told.append) as manager:
        for step in (1, 2):
            manager.save(step, {"w": jnp.full(8, step)}, meta={"seen": 1})
    damage(server, name, change)
    found = manager.restore_newest({"w": jnp.zeros(8, int)})
    assert found is not None
    assert found.step == 1
    assert found.state["w"].tolist() == [1] * 8
    assert said in told[0]


def test_leftovers_of_a_killed_save_are_ignored_and_removed(server, folder):
    with CheckpointManager(folder, Retention(last=2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": jnp.full(2, step)})
    assert [entry.step for entry in manager.entries()] == [2, 3]
    (as_place(folder, "here") / "step_00000004/zarr/w/0").write(b"half")
    assert [entry.step for entry in manager.entries()] == [2, 3]
    with manager:
        manager.save(5, {"w": jnp.full(2, 5)})
    assert [entry.step for entry in manager.entries()] == [3, 5]
    assert {name.split("/")[3] for name in server.names()} == {"step_00000003", "step_00000005"}
    assert not [name for name in server.names() if name.endswith("/zarr/.0.json")]


def test_a_checkpoint_that_is_replaced_stays_until_the_marker_is_that_of_the_new_one(
    server, folder, tmp_path
):
    server.requests.clear()
    for number in range(2):
        save_checkpoint(f"{folder}/step", {"w": jnp.full(2, number)})
    writes = ("PUT ", "POST ", "DELETE ")
    asked = [one for one in server.requests if one.startswith(writes)]
    changes = [one.split("/one/")[1].split("&")[0] for one in asked]
    marker = changes.index("step/COMMITTED")
    first = {"step/zarr/w/.zarray", "step/zarr/w/0", "step/zarr/.0.json", "step/manifest.json"}
    second = {name.replace("zarr", "zarr.2").replace("t.j", "t.2.j") for name in first}
    second = {name.replace(".zarr.2ay", ".zarray") for name in second}
    assert set(changes[:marker]) == first
    again = changes.index("step/COMMITTED", marker + 1)
    assert set(changes[marker + 1 : again]) == second
    assert set(changes[again + 1 :]) == first - {"step/zarr/.0.json"}
    # A copy on a disk is a checkpoint, whichever names it has.
    for name in server.names():
        path = tmp_path / name.removeprefix("bucket/runs/one/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.objects[name][1])
    assert load_checkpoint(tmp_path / "step", {"w": jnp.zeros(2, int)})["w"].tolist() == [1, 1]


def test_where_nobody_answers_no_older_checkpoint_is_taken(server, folder, monkeypatch):
    with CheckpointManager(folder) as manager:
        manager.save(1, {"w": jnp.ones(2)})
    monkeypatch.setattr(type(server), "fault", lambda self: "forbid")
    with pytest.raises(StoreError, match=r"bucket/runs/one.*: .*; check the name, that these"):
        manager.restore_newest({"w": jnp.ones(2)})


def test_the_first_save_was_killed(server, folder):
    (as_place(folder, "here") / "step_00000004/zarr/w/0").write(b"half")
    with CheckpointManager(folder) as manager:
        assert manager.restore_newest({"w": jnp.ones(2)}) is None
        assert manager.newest_step() == -1
    with pytest.raises(DamagedCheckpointError, match="has no COMMITTED: it was never finished"):
        load_checkpoint(f"{folder}/step_00000004", {"w": jnp.ones(2)})
    with pytest.raises(CheckpointError, match=r"there is no checkpoint '.*step_00000005'"):
        load_checkpoint(f"{folder}/step_00000005", {"w": jnp.ones(2)})


def test_other_objects_stay(server, folder):
    (as_place(folder, "here") / "step/thesis.pdf").write(b"x")
    with pytest.raises(CheckpointError, match=r"a folder that holds .thesis.pdf., which saving"):
        save_checkpoint(f"{folder}/step", {"w": jnp.ones(2)})
    assert server.names() == ["bucket/runs/one/step/thesis.pdf"]


def test_a_full_checkpoint_is_refused_before_anything_runs(folder):
    with pytest.raises(
        ConfigError, match=r"checkpoint.type: full is not.*Use sharded, or a folder"
    ):
        CheckpointManager(folder, type="full")


def test_a_file_with_a_name_of_a_bucket_counts_as_added_to_a_checkpoint_of_a_disk(
    tmp_path, values, place
):
    save_checkpoint(tmp_path / "step", place(values, World.emulate(2)))
    manifest = read_manifest(tmp_path / "step")
    assert stray_in(tmp_path / "step", manifest) is None
    (tmp_path / "step" / "zarr.2").mkdir()
    (tmp_path / "step" / "zarr.2" / ".zarray").write_text("")
    assert stray_in(tmp_path / "step", manifest) == "zarr.2/.zarray"
