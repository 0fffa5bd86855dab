"""`axon bisect` of configs, and with fingerprints in a file."""

import json

import pytest
import yaml

from axon_dist.train.cli.main import main


@pytest.fixture
def written(tiny, tmp_path):
    def write(name, **changes):
        file = tmp_path / f"{name}.yaml"
        train = tiny["train"] | {"global_batch": 8} | changes.pop("train", {})
        file.write_text(
            yaml.safe_dump(tiny | {"train": train, "devices": {"emulate": 2}} | changes)
        )
        return str(file)

    return write


@pytest.mark.full
def test_configs_that_differ_in_strategy_are_equal(written, capsys):
    one = written("ddp", mesh={"dp": 2})
    other = written("fsdp", mesh={"fsdp": 2}, parallel="full_shard")
    assert main(["bisect", one, other, "--steps", "2"]) == 0, capsys.readouterr().out


@pytest.mark.full
def test_configs_that_differ_part_at_an_operation(written, tmp_path, capsys):
    one = written("one", mesh={"dp": 2}, train={"clip_norm": 0.01})
    other = written("other", mesh={"dp": 2}, train={"clip_norm": 0.02})
    file = tmp_path / "found.json"
    assert main(["bisect", one, other, "--json", str(file)]) == 1
    found = json.loads(file.read_text())
    assert found["step"] == 1
    assert found["operation"]
    assert "the programs part at" in capsys.readouterr().out


PROGRAM = """
import jax, numpy as np

def old(x):
    return jax.numpy.tanh(x) * 2.0

def new(x):
    return jax.numpy.tanh(x) * 2.5

def arguments():
    return (np.arange(4, dtype=np.float32),)
"""


def test_fingerprints_are_written_and_compared(tmp_path, written, capsys):
    file, prints = tmp_path / "program.py", str(tmp_path / "old.npz")
    file.write_text(PROGRAM)
    assert main(["bisect", f"{file}:old", "--record", prints]) == 0
    assert main(["bisect", f"{file}:old", prints]) == 0
    assert main(["bisect", f"{file}:new", prints]) == 1
    assert "part at mul" in capsys.readouterr().out
    assert main(["bisect", f"{file}:old"]) == 2
    assert main(["bisect", written("one"), written("two"), "--mesh", "dp=2"]) == 2
    errors = capsys.readouterr().err
    assert "PROVE002" in errors
    assert "PROVE013" in errors
