import gc
import logging
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.checkpoint import (
    CheckpointManager,
    DamagedCheckpointError,
    Retention,
    StateDictType,
    load_checkpoint,
    read_manifest,
)
from axon_dist.checkpoint import stores as store
from axon_dist.checkpoint.manager import ranked
from axon_dist.core.errors import CheckpointError, ConfigError, UnsupportedError

KINDS = pytest.mark.parametrize("type", list(StateDictType))
SIZE = 20_000


def state(step):
    """Random, so that no compression makes it small."""
    values = np.random.default_rng(step).standard_normal(SIZE, np.float32)
    return {"w": jnp.asarray(values), "step": jnp.int32(step)}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def step_names(*steps):
    return [f"step_{step:08d}" for step in steps]


@KINDS
@pytest.mark.parametrize("background", [True, False])
def test_the_last_the_best_and_every_nth_stay(type, background, tmp_path):
    retention = Retention(last=2, best=1, every=3)
    with CheckpointManager(tmp_path, retention, type=type, background=background) as manager:
        for step, score in enumerate([5.0, 1.0, 4.0, 3.0, 2.0, 6.0, 7.0, 8.0], start=1):
            manager.save(step, state(step), score=score, meta={"step": step})
    assert names(tmp_path) == step_names(2, 3, 6, 7, 8)
    restored = CheckpointManager(tmp_path).restore_newest(state(0))
    assert (restored.step, restored.manifest.meta, restored.manifest.score) == (8, {"step": 8}, 8.0)
    np.testing.assert_array_equal(restored.state["w"], state(8)["w"])


@KINDS
def test_checkpoints_are_saved_to_a_folder_that_is_a_link(type, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    for _ in range(2):
        with CheckpointManager(tmp_path / "link", Retention(last=1), type=type) as manager:
            manager.save(1, state(1))
            manager.save(2, state(2))
    assert names(tmp_path / "disk") == step_names(2)
    assert CheckpointManager(tmp_path / "link").restore_newest(state(0)).step == 2


def test_a_save_in_the_background_returns_before_it_is_written(tmp_path, monkeypatch):
    go, begin = threading.Event(), store.OrbaxStore.begin

    def slow(self, folder, leaves, save):
        write = begin(self, folder, leaves, save)
        return lambda: (go.wait(60), write())

    monkeypatch.setattr(store.OrbaxStore, "begin", slow)
    manager = CheckpointManager(tmp_path)
    values = state(1)
    manager.save(1, values)
    assert names(tmp_path) == ["step_00000001.tmp"]
    values["w"].delete()  # as a step does that takes it as a donation
    go.set()
    manager.wait()
    assert names(tmp_path) == step_names(1)
    np.testing.assert_array_equal(manager.restore_newest(state(0)).state["w"], state(1)["w"])


@pytest.mark.full
@pytest.mark.parametrize("saves", [10, pytest.param(200, marks=pytest.mark.full)])
def test_many_saves_leave_nothing_in_memory(saves, tmp_path):
    """A leak of TensorStore left 24 objects a save, and 10 more blocks of memory for each leaf."""
    values = {f"layer{n}": jnp.ones(4) for n in range(4)}
    counts = []
    with CheckpointManager(tmp_path, Retention(last=1)) as manager:
        for step in range(1, 3 * saves + 1):
            manager.save(step, values)
            if step % saves == 0:
                manager.wait()
                gc.collect()
                counts.append([len(gc.get_objects()), sys.getallocatedblocks()])
    # What is made once may come in either part; what leaks comes in both.
    objects, blocks = np.diff(counts, axis=0).min(0)
    assert objects < 4 * saves
    assert blocks < 40 * saves


def test_nothing_to_restore(tmp_path):
    assert CheckpointManager(tmp_path / "none").restore_newest(state(0)) is None
    assert CheckpointManager(tmp_path).restore_newest(state(0)) is None


def damage(folder):
    file = max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)


def test_damaged_checkpoints_are_passed_over_and_said(tmp_path):
    told = []
    with CheckpointManager(tmp_path, tell=told.append) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.wait()
        damage(tmp_path / "step_00000003")
        (tmp_path / "step_00000002" / "manifest.json").unlink()
        assert manager.restore_newest(state(0)).step == 1
        assert ["step_00000003" in told[0], "step_00000002" in told[1]] == [True, True]
        assert "its bytes changed; use another checkpoint: going back" in told[0]
        manager.save(3, state(3))  # over the damaged one
    assert manager.restore_newest(state(0)).step == 3
    assert len(told) == 2


def test_when_all_are_damaged_nothing_starts_anew_by_itself(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.wait()
        damage(tmp_path / "step_00000001")
        with pytest.raises(CheckpointError, match=r"all 1 checkpoints in .* remove the folder"):
            manager.restore_newest(state(0))


def test_a_score_that_is_not_comparable_is_none(tmp_path):
    scores = {1: ("loss", 0.5), 2: ("accuracy", -0.9), 3: ("accuracy", -0.7), 4: ("loss", 0.1)}
    accuracy = lambda meta: meta.get("metric") == "accuracy"
    with CheckpointManager(tmp_path, Retention(1, best=1), has_scored=accuracy) as manager:
        for step, (metric, score) in scores.items():
            manager.save(step, state(step), meta={"metric": metric}, score=score)
    assert [(entry.step, entry.score) for entry in manager.entries()] == [(2, -0.9), (4, None)]
    assert [entry.score for entry in CheckpointManager(tmp_path).entries()] == [-0.9, 0.1]


def test_own_checkpoints_and_that_of_the_start_are_told_from_others(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    for folder in (tmp_path / "here", elsewhere):
        with CheckpointManager(folder) as earlier:
            for step in (2, 4, 6):
                earlier.save(step, state(step))
    told = []
    with CheckpointManager(tmp_path / "here", Retention(last=9), tell=told.append) as manager:
        assert manager.restore_own(state(0)) is None
        for folder in (manager.folder, elsewhere):
            found = manager.restore_own(state(0), folder / "step_00000002")
            assert (found.step, found.path.parent) == (2, folder)
        manager.save(3, state(3))
        manager.save(4, state(5))
        manager.wait()
        np.testing.assert_array_equal(manager.restore_own(state(0)).state["w"], state(5)["w"])
        damage(manager.folder / "step_00000004")
        assert manager.restore_own(state(0), manager.folder / "step_00000002").step == 3
        assert len(told) == 1


def save_scored(folder, start, keep=9, **scores):
    """Saves steps with scores, after those of a checkpoint; keeps the best."""
    with CheckpointManager(folder, Retention(last=keep, best=1)) as manager:
        if start is not None:
            manager.restore_own(state(0), start)
        for step, score in scores.items():
            manager.save(int(step[1:]), state(0), score=score)


def test_a_run_that_went_on_elsewhere_tells_nothing_of_the_folder_of_a_fork(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    save_scored(there, None, s2=0.5, s4=0.2, s6=0.1)
    save_scored(there, there / "step_00000002", s8=0.9)
    save_scored(here, there / "step_00000008", keep=1, s10=0.1, s12=0.9)
    assert names(here) == step_names(10, 12)
    assert [entry.step for entry in ranked(CheckpointManager(here).entries())] == [10, 12]


def test_going_back_to_a_checkpoint_that_was_given_up_keeps_what_it_followed(tmp_path):
    save_scored(tmp_path, None, s2=0.5, s4=0.2, s6=0.1)
    save_scored(tmp_path, tmp_path / "step_00000002", s8=0.05)
    save_scored(tmp_path, tmp_path / "step_00000006", s10=0.3)
    assert [entry.step for entry in ranked(CheckpointManager(tmp_path).entries())] == [6, 4, 10, 2]
    save_scored(tmp_path, tmp_path / "step_00000010", keep=1, s12=0.4)
    assert names(tmp_path) == step_names(6, 12)


def test_a_damaged_checkpoint_that_was_passed_over_is_not_the_best(tmp_path):
    save_scored(tmp_path, None, s2=0.5, s4=0.2, s6=0.1)
    damage(tmp_path / "step_00000006")
    with CheckpointManager(tmp_path, Retention(last=1, best=1)) as manager:
        assert manager.restore_newest(state(0)).step == 4
        manager.save(8, state(0), score=0.9)
    assert names(tmp_path) == step_names(4, 8)


@pytest.mark.parametrize("as_given", [str, lambda path: path])
def test_a_run_begins_at_a_checkpoint_that_is_named_by_text_or_by_a_path(as_given, tmp_path):
    save_scored(tmp_path, None, s2=0.5, s4=0.2, s6=0.1)
    start = as_given(tmp_path / "step_00000002")
    with CheckpointManager(tmp_path, Retention(last=9)) as manager:
        manager.begin_at(start)
        assert manager.newest_continued() == 2
        manager.save(8, state(0), score=0.9)
        manager.wait()
        assert [entry.step for entry in ranked(manager.entries())] == [2, 8]
    assert CheckpointManager(tmp_path).restore_own(state(0), start).step == 2


def test_a_run_cannot_begin_at_a_checkpoint_that_is_not_there(tmp_path):
    save_scored(tmp_path, None, s2=0.5, s4=0.2)
    manager = CheckpointManager(tmp_path)
    for name in ("step_00000003", "other"):
        with pytest.raises(
            CheckpointError, match=f"{name}' in .* of the steps 2, 4; give the path"
        ):
            manager.begin_at(tmp_path / name)
    assert (manager.lineage, manager.newest_continued()) == (None, 4)
    for call in (manager.begin_at, lambda start: manager.restore_own(state(0), start)):
        with pytest.raises(ConfigError, match="got 3"):
            call(3)


def test_a_run_that_never_goes_back_writes_no_lineage(tmp_path):
    for step in range(1, 6):
        with CheckpointManager(tmp_path, Retention(last=2)) as manager:
            manager.restore_newest(state(0))
            manager.save(step, state(0), meta={"mine": step})
    assert read_manifest(tmp_path / "step_00000005").meta == {"mine": 5}


@pytest.mark.parametrize("mine", ["gpt-a", [[0, 0]]])
def test_the_lineage_in_the_meta_of_a_user_stays_theirs(mine, tmp_path):
    with CheckpointManager(tmp_path, Retention(last=9), background=False) as manager:
        for step in (2, 4, 6):
            manager.save(step, state(0), score=step, meta={"lineage": mine})
        assert [entry.step for entry in ranked(manager.entries())] == [2, 4, 6]
        manager.begin_at(tmp_path / "step_00000002")
        manager.save(8, state(0), score=8, meta={"lineage": mine})
        assert read_manifest(tmp_path / "step_00000008").meta["lineage"] == mine
        assert [entry.step for entry in ranked(manager.entries())] == [2, 8]


def test_the_meta_of_a_checkpoint_can_be_saved_again_in_another_folder(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    save_scored(there, None, s2=0.5, s4=0.2)
    save_scored(there, there / "step_00000002", s8=0.9)
    meta = read_manifest(there / "step_00000008").meta
    with CheckpointManager(here, Retention(last=9), background=False) as manager:
        for step in (2, 4, 6):
            manager.save(step, state(0), score=step, meta=meta)
        assert [entry.step for entry in ranked(manager.entries())] == [2, 4, 6]


def test_meta_that_is_no_mapping_is_told_also_after_going_back(tmp_path):
    save_scored(tmp_path, None, s2=0.5, s4=0.2)
    manager = CheckpointManager(tmp_path)
    for begin in (None, tmp_path / "step_00000002"):
        if begin is not None:
            manager.begin_at(begin)
        manager.save(6, state(0), meta=["mine"])
        assert "meta is of type list" in manager.failure


def test_a_run_whose_own_checkpoints_are_damaged_is_not_told_to_remove_others(tmp_path):
    with CheckpointManager(tmp_path, Retention(last=9)) as manager:
        manager.save(1, state(1))
    with CheckpointManager(tmp_path, Retention(last=9)) as manager:
        manager.save(2, state(2))
        manager.wait()
        damage(tmp_path / "step_00000002")
        with pytest.raises(CheckpointError, match=r"step_00000002: damaged.*resume from an older"):
            manager.restore_own(state(0))


def test_a_save_that_failed_does_not_make_an_older_checkpoint_ones_own(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path) as earlier:
        earlier.save(4, state(4))
    with CheckpointManager(tmp_path, background=False) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(store.OrbaxStore, "begin", lambda *given: 1 / 0)
            manager.save(4, state(5))
        assert manager.failure is not None
        assert manager.restore_own(state(0)) is None


def test_another_model_is_no_reason_to_go_back(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2) | {"more": jnp.ones(1)})
    with pytest.raises(CheckpointError, match="step_00000002' does not fit: more") as info:
        manager.restore_newest(state(0))
    assert not isinstance(info.value, DamagedCheckpointError)


def test_the_newest_is_the_last_written(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in (10, 30, 20):
            manager.save(step, state(step))
    assert manager.restore_newest(state(0)).step == 20


@contextmanager
def full_disk(limit):
    """Lets no file grow beyond the limit, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("module", "is_news"), [("orbax.checkpoint", False), ("mine", True)])
def test_only_errors_of_orbax_are_not_logged_whatever_a_folder_is_called(module, is_news):
    program = compile("1 / 0", "/home/me/orbax/train.py", "exec")
    with pytest.raises(ZeroDivisionError) as raised:
        exec(program, {"__name__": module})
    error = raised.value
    assert error.__traceback__ is not None
    told = type(error), error, error.__traceback__.tb_next
    record = logging.LogRecord("absl", logging.ERROR, "", 1, "", None, told)
    assert store._is_news(record) is is_news


@KINDS
@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_said_once_and_the_old_checkpoint_stays(
    type, background, tmp_path, caplog, capfd
):
    told = []
    retention = Retention(last=1)
    manager = CheckpointManager(
        tmp_path, retention, type=type, background=background, tell=told.append
    )
    manager.save(1, state(1))
    manager.wait()
    with full_disk(limit=SIZE):
        manager.save(2, state(2))
        manager.wait()
    assert "could not save checkpoint" in manager.failure
    assert told == [manager.failure]
    gc.collect()  # of what has failed and nobody has asked for
    assert (caplog.records, "".join(capfd.readouterr())) == ([], "")
    assert "earlier checkpoints stay. Free space there" in told[0]
    assert names(tmp_path) == step_names(1)
    assert manager.restore_newest(state(0)).step == 1

    manager.save(3, state(3))
    manager.wait()
    assert manager.failure is None
    assert names(tmp_path) == step_names(3)


@KINDS
def test_a_full_disk_is_reported_before_the_first_byte(type, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.delattr(store.OrbaxStore, "begin")
    monkeypatch.delattr(store.FullStore, "begin")
    manager = CheckpointManager(tmp_path, type=type, tell=lambda text: None)
    manager.save(1, state(1))
    assert re.search(
        r"needs [\d.]+ [kM]B and the disk has 1 kB free; earlier checkpoints", manager.failure
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", [-1, 2.0, "3", None])
def test_a_step_that_is_none(step, tmp_path):
    with pytest.raises(ConfigError, match=rf"step={step!r}; .* an integer of at least 0"):
        CheckpointManager(tmp_path).save(step, state(1))
    assert names(tmp_path) == []


@pytest.mark.parametrize("step", [0, np.int64(0), jnp.int32(0)])
def test_any_integer_is_a_step(step, tmp_path):
    with CheckpointManager(tmp_path) as manager:
        manager.save(step, state(1))
    assert names(tmp_path) == step_names(0)


def test_folders_that_are_not_checkpoints_stay_and_are_named(tmp_path):
    for name in ("step_00000001", "step_notes.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text("")
    told = []
    manager = CheckpointManager(tmp_path, tell=told.append)
    manager.save(1, state(1))
    assert "step_00000001' there is a folder that holds 'thesis'" in manager.failure
    assert told == [manager.failure]
    assert [path.name for path in tmp_path.rglob("thesis")] == ["thesis"] * 2


@pytest.mark.parametrize(
    ("type", "dtype", "advice"),
    [
        ("full", jnp.complex64, "safetensors has no name.*a checkpoint of a state can keep"),
        ("sharded", jnp.uint4, "tensorstore cannot write; convert it"),
    ],
)
def test_a_dtype_that_cannot_be_stored_is_reported_with_the_leaf(type, dtype, advice, tmp_path):
    told = []
    manager = CheckpointManager(tmp_path, type=type, tell=told.append)
    values = {"w": jnp.ones(8, dtype)}
    with pytest.raises(UnsupportedError, match=f"w .*is {jnp.dtype(dtype)}, .*{advice}"):
        manager.check(values)
    for step in (1, 2):
        manager.save(step, values)
    manager.wait()
    assert len(told) == 2
    assert "Free space" not in told[0]
    assert re.search(advice, told[0])
    assert manager.failure == told[1]
    manager.check({"w": jnp.ones(8), "key": jax.random.key(0)})
    manager.save(3, {"w": jnp.ones(8)})
    manager.wait()
    assert (manager.failure, [entry.step for entry in manager.entries()]) == (None, [3])


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    told = []
    manager = CheckpointManager(tmp_path / "file" / "checkpoints", tell=told.append)
    manager.save(1, state(1))
    assert "could not save checkpoint" in manager.failure
    assert "Not a directory" in manager.failure
    assert told == [manager.failure]


KILLED = """
import os, sys
import jax.numpy as jnp
from axon_dist.checkpoint import CheckpointManager, StateDictType

def save():
    manager = CheckpointManager(sys.argv[1], type=StateDictType(sys.argv[2]))
    for step in range(1, 1000):
        manager.save(step, {"w": jnp.full(500_000, float(step)), "step": jnp.int32(step)})
        print(step, flush=True)

for line in sys.stdin:
    process = os.fork() or save()
    print(process, flush=True)
    os.waitpid(process, 0)
    print("gone", flush=True)
"""
"""For every line of its input a process that saves, forked after imports and before JAX starts."""


@pytest.mark.sample("sharded")
@KINDS
def test_a_killed_save_is_never_restored(type, tmp_path):
    """Killed at growing distances after a save began; what is left is whole, and one goes on."""
    target = {"w": jnp.zeros(500_000), "step": jnp.int32(0)}
    command = [sys.executable, "-c", KILLED, str(tmp_path), type]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as parent:
        for tries in (0, 2):
            print("go", file=parent.stdin, flush=True)
            child = int(parent.stdout.readline())
            for _ in range(3 + tries):
                assert parent.stdout.readline().strip().isdigit()
            time.sleep(0.01 * tries)
            os.kill(child, signal.SIGKILL)
            assert "gone\n" in parent.stdout
            restored = CheckpointManager(tmp_path, tell=pytest.fail).restore_newest(target)
            assert int(restored.state["step"]) == restored.step
            np.testing.assert_array_equal(restored.state["w"], np.full(500_000, restored.step))
    with CheckpointManager(tmp_path) as manager:
        manager.save(5000, target)
    assert not list(tmp_path.glob("*.tmp"))


def test_an_error_of_the_run_does_not_lose_the_save_under_way(tmp_path):
    def run():
        with CheckpointManager(tmp_path) as manager:
            manager.save(1, state(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert names(tmp_path) == step_names(1)


def test_a_checkpoint_that_cannot_be_removed_is_said(tmp_path, monkeypatch):
    told = []

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("axon_dist.checkpoint.manager.remove", refuse)
    with CheckpointManager(tmp_path, Retention(last=1), tell=told.append) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    assert manager.failure is None
    assert told == [f"could not remove the old checkpoint '{tmp_path}/step_00000001': "
                    "Permission denied"]  # fmt: skip
    assert read_manifest(tmp_path / "step_00000002").serial == 1


def test_a_moved_folder_of_checkpoints_still_loads(tmp_path):
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, state(1))
    shutil.move(tmp_path / "a", tmp_path / "b")
    restored = load_checkpoint(tmp_path / "b" / "step_00000001", state(0))
    np.testing.assert_array_equal(restored["w"], state(1)["w"])
