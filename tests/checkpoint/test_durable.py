"""After a power cut, nothing has its name or replaces anything before the disk has it."""

import os
import pathlib
import random

import jax.numpy as jnp
import pytest

from axon_dist.checkpoint import CheckpointManager, Retention, load_checkpoint
from benchmarks.power import Disk, measure_power_cuts


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_everything_is_on_the_disk_before_it_counts(tmp_path, monkeypatch, kind):
    """Every file and folder of a checkpoint before its rename, that before an older one goes."""
    synced, events = set(), []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def watched_rename(old, new):
        old, new = pathlib.Path(old), pathlib.Path(new)
        if old.parent != tmp_path:
            # Orbax has names of its own within a checkpoint.
            return rename(old, new)
        below = [str(path) for path in old.rglob("*")]
        events.append((new.name, {str(old), *below} - synced))
        if events[-1][0].endswith(".tmp"):
            # An older one loses its name: that of the new one must have reached the disk.
            assert str(tmp_path) in synced
        synced.discard(str(tmp_path))
        return rename(old, new)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    state = {"w": jnp.arange(8.0), "more": {"b": jnp.ones(3)}}
    with CheckpointManager(tmp_path, Retention(last=1), type=kind, background=False) as manager:
        manager.save(1, state)
        manager.save(2, state)
    named = [(name, missing) for name, missing in events if not name.endswith(".tmp")]
    assert named == [("step_00000001", set()), ("step_00000002", set())]
    assert [name for name, _ in events][-1] == "step_00000001.tmp"
    assert load_checkpoint(tmp_path / "step_00000002", state)["w"].tolist() == list(range(8))


@pytest.mark.full
def test_a_power_cut_loses_no_save_that_had_ended(tmp_path):
    rows = measure_power_cuts(tmp_path, 8, random.Random(0))
    assert rows == [("power cut, sharded", 8, 8), ("power cut, full", 8, 8)]


@pytest.mark.full
@pytest.mark.parametrize(
    "lost",
    [*(pytest.param(x, marks=pytest.mark.full) for x in ("files", "folders")), "the folder of all"],
)
def test_a_power_cut_finds_what_was_not_synced(tmp_path, monkeypatch, lost):
    """The recorded disk proves nothing if it does not notice a missing sync."""
    sync = Disk.sync

    def forgetful(disk, descriptor):
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        kind = "files" if path.is_file() else "folders"
        if lost not in (kind, "the folder of all" if path == disk.root else kind):
            sync(disk, descriptor)

    monkeypatch.setattr(Disk, "sync", forgetful)
    for _, count, good in measure_power_cuts(tmp_path, 8, random.Random(0)):
        assert good < count
