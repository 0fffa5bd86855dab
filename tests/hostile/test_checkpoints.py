"""Checkpoints that somebody has tampered with: gone back from, whatever was done to them.

The default run tries what a full disk or a half copy leaves: an empty or a missing file, a
wrong checksum; `-m full` tries the forged ones.
"""

import json
import os
import zlib

import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.checkpoint import CheckpointManager, load_checkpoint
from axon_dist.core.errors import CheckpointError

STATE = {"w": jnp.asarray(np.arange(3, dtype=np.float32))}


def forge(folder, change):
    """Changes the manifest, and the marker so that it fits."""
    file = folder / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    write(folder, json.dumps(data))


def write(folder, text):
    text = text if isinstance(text, bytes) else text.encode()
    (folder / "manifest.json").write_bytes(text)
    (folder / "COMMITTED").write_text(f"{zlib.crc32(text):08x}\n")


def replace(folder, make):
    os.rename(folder, folder.with_name("away"))
    make(folder)


FORGED = {
    "format": lambda m: m.update(format="one"),
    "format true": lambda m: m.update(format=True),
    "no format": lambda m: m.pop("format"),
    "type": lambda m: m.update(type="half"),
    "leaves": lambda m: m.update(leaves=[]),
    "a leaf": lambda m: m["leaves"].update(w=3),
    "shape": lambda m: m["leaves"]["w"].update(shape=["3"]),
    "negative shape": lambda m: m["leaves"]["w"].update(shape=[-3]),
    "serial": lambda m: m.update(serial="newest"),
    "serial below 0": lambda m: m.update(serial=-1),
    "serial beyond": lambda m: m.update(serial=10**400),
    "score": lambda m: m.update(score="best"),
    "score NaN": lambda m: m.update(score=float("nan")),
    "meta": lambda m: m.update(meta=[1]),
    "checksums": lambda m: m.update(checksums={}),
    "a checksum": lambda m: m["checksums"].update(w="abc"),
    "files": lambda m: m.update(files=7),
    "a file": lambda m: m["files"].update({"x": {"size": 3}}),
    "a file elsewhere": lambda m: m["files"].update({"../x": {"size": 3, "crc32": 3}}),
    "an absolute file": lambda m: m["files"].update({"/dev/zero": {"size": 3, "crc32": 3}}),
    "one key more": lambda m: m.update(extra=1),
}
TEXTS = {
    "empty": "",
    "list": "[]",
    "number": "9" * 5000,
    "deep": "[" * 20_000,
    "not UTF-8": b"\xff\xfe",
    "null": "null",
}
INSTEAD = {
    "file": lambda path: path.write_text("hello"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "empty folder": lambda path: path.mkdir(),
}
INSIDE = {
    "marker is a folder": ("COMMITTED", lambda path: path.mkdir()),
    "manifest is a pipe": ("manifest.json", os.mkfifo),
    "manifest is a device": ("manifest.json", lambda path: path.symlink_to("/dev/zero")),
    "manifest is gone": ("manifest.json", lambda path: None),
    "arrays are gone": ("arrays/state.safetensors", lambda path: None),
    "arrays are a pipe": ("arrays/state.safetensors", os.mkfifo),
}


def inside(folder, name, make):
    (folder / name).unlink()
    make(folder / name)


DAMAGES = {
    **{f"forged {k}": lambda folder, change=v: forge(folder, change) for k, v in FORGED.items()},
    **{f"manifest {k}": lambda folder, text=v: write(folder, text) for k, v in TEXTS.items()},
    **{f"instead {k}": lambda folder, make=v: replace(folder, make) for k, v in INSTEAD.items()},
    **{k: lambda folder, row=v: inside(folder, *row) for k, v in INSIDE.items()},
}


@pytest.fixture
def saved(tmp_path):
    with CheckpointManager(tmp_path / "saved", type="full", background=False) as manager:
        for step in (1, 2):
            manager.save(step, {"w": STATE["w"] + step})
    return tmp_path / "saved"


@pytest.mark.sample("manifest empty", "manifest is gone", "arrays are gone", "forged a checksum")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_one_before_is_taken(saved, damage):
    damage(saved / "step_00000002")
    told = []
    found = CheckpointManager(saved, tell=told.append).restore_newest(STATE)
    assert found.step == 1
    assert found.state["w"].tolist() == [1, 2, 3]
    assert len(told) == 1
    assert "step_00000002" in told[0]
    assert "going back" in told[0]
    with pytest.raises(CheckpointError):
        load_checkpoint(saved / "step_00000002", STATE)


@pytest.mark.full
def test_names_that_are_no_steps_are_left_alone(saved):
    for name in (
        "step_3",
        "step_\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668",
        "step_" + "9" * 200,
        "step_000000003",
    ):
        (saved / name).mkdir()
    assert CheckpointManager(saved).restore_newest(STATE).step == 2


def test_a_checkpoint_with_a_stray_file_among_its_shards_is_skipped(tmp_path):
    with CheckpointManager(tmp_path / "s", background=False) as manager:
        manager.save(1, STATE)
        manager.save(2, STATE)
    newest = tmp_path / "s" / "step_00000002"
    (newest / "arrays" / "ocdbt.process_9").write_text("stray")
    (newest / "arrays" / "ocdbt.process_0" / "stray").write_text("stray")
    found = CheckpointManager(tmp_path / "s").restore_newest(STATE)
    # One that is read all the same is as good as it was: its values are compared.
    assert found.state["w"].tolist() == [0, 1, 2]
