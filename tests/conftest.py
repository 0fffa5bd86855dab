import dataclasses
import types

import pytest

from axon_dist.mesh import World
from axon_dist.mesh.chips import HARDWARE, hardware
from benchmarks.object_server import serving


@pytest.fixture(scope="session")
def object_server():
    """An object server that all tests share."""
    with serving() as server:
        yield server


@pytest.fixture
def store(object_server, monkeypatch, tmp_path):
    """Empty buckets, reachable by both kinds of address; no faults are injected yet."""
    for name, value in object_server.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    object_server.objects.clear()
    object_server.faults = 0.0
    return object_server


@pytest.fixture
def texts(tmp_path):
    """A folder with a small text for training and one for validation."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("train", "validation"):
        (folder / f"{name}.txt").write_text(f"{name}: the quick brown fox jumps. " * 40)
    return folder


@pytest.fixture
def tiny(texts, tmp_path):
    """The smallest config that trains, as plain data."""
    return {
        "name": "tiny",
        "run_dir": str(tmp_path / "run"),
        "mesh": "dp=8",
        "devices": {"emulate": 8},
        "model": {"width": 8, "num_layers": 1, "num_heads": 2, "ffn_width": 16, "max_length": 16},
        "data": {
            "files": [str(texts / "train.txt")],
            "validation_files": [str(texts / "validation.txt")],
            "sequence_length": 16,
        },
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {
            "steps": 6, "global_batch": 8, "eval_every": 3, "eval_batches": 2, "log_every": 2,
        },
    }  # fmt: skip


@pytest.fixture
def chip(monkeypatch):
    """Makes the devices of this process a chip of the table, whose options skip one XLA pass."""
    options = (("xla_disable_hlo_passes", "algsimp"),)
    row = dataclasses.replace(hardware("v5p"), name="emulated", kinds=("cpu",), options=options)
    rows = types.MappingProxyType({**HARDWARE, row.name: row})
    monkeypatch.setattr("axon_dist.mesh.chips.HARDWARE", rows)
    monkeypatch.setattr(World, "is_cpu", False)
    return row
