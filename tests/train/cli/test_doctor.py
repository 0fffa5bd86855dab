import os
import subprocess
import sys
from unittest import mock

import jax
import pytest

from axon_dist.core.errors import install_command
from axon_dist.train.cli import machine
from axon_dist.train.cli.main import main


def test_says_what_is_here(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for words in (
        "Versions",
        jax.__version__,
        "emulated",
        "dp=8",
        "pp=2,dp=2,tp=2",
        "Extras",
        "no fused kernel",
    ):
        assert words in text


def test_says_whether_the_chip_is_known(capsys, chip, monkeypatch):
    told = "emulated: steps are compiled with 1 XLA option for this chip"
    assert machine.devices()["chip"] == told
    monkeypatch.setattr("axon_dist.mesh.chips.HARDWARE", {})
    assert machine.devices()["chip"] == "CPU: steps are compiled with the defaults of XLA"


def test_the_network_of_emulated_devices(capsys, chip, monkeypatch):
    # A collective of eight devices on a few cores mostly waits, and waiting takes CPU time.
    monkeypatch.setattr("axon_dist.train.app.network._WARM_UP", 0)
    monkeypatch.setattr("axon_dist.train.app.network._ROUNDS", 1)
    monkeypatch.setattr("axon_dist.train.app.network.ACCELERATOR_BYTES", 2**16)
    assert main(["doctor", "--network", "dp=4,tp=2"]) == 0
    text = capsys.readouterr().out
    rows = text.partition("Network (")[2]
    assert rows, text
    for axis, ranks in (("dp", 4), ("tp", 2)):
        (row,) = [line for line in rows.splitlines() if line.split()[0] == axis]
        assert f"{ranks} ranks, " in row
        assert row.count("(planned ") == 2


@pytest.mark.full
@pytest.mark.multiprocess
def test_the_network_between_two_processes(tmp_path):
    doctor = [sys.executable, "-m", "axon_dist.train.cli", "doctor", "--network", "nodes=2,dp=2"]
    launch = ["launch", "-n", "2", "--devices-per-process", "2", "--log-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "axon_dist.train.cli", *launch, "--", *doctor],
        capture_output=True,
        text=True,
        timeout=300,
    )
    # On a busy machine, one of two equal processes may look slow.
    assert done.returncode in (0, 1), done.stderr
    text = (tmp_path / "rank-0.log").read_text()
    assert "nodes    2 ranks, " in text
    assert "hosts    2 compared" in text
    assert "Network" not in (tmp_path / "rank-1.log").read_text()


def test_emulated_devices_for_checks_hide_no_gpus(monkeypatch):
    asked = []
    monkeypatch.setattr(
        machine, "prepare_emulation", lambda n, only_cpu: asked.append((n, only_cpu))
    )
    for axes in (None, "dp=-1,tp=2", "dp=8,tp=2"):
        machine._add_devices(axes)
    assert asked == [(4, False), (4, False), (16, False)]


@pytest.mark.full
def test_a_backend_that_does_not_start_is_told_and_exit_code_1():
    done = subprocess.run(
        [sys.executable, "-m", "axon_dist.train.cli", "doctor"],
        env=os.environ | {"JAX_PLATFORMS": "none_such"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "does not start: Unable to initialize backend 'none_such'" in done.stdout
    assert done.stderr == ""


REQUIRES = {
    "axon_dist": [
        "jax>=0.10",
        "there>=1; extra == 'a'",
        "jax[gpu]>=1; extra == 'b'",
        "gone; extra == 'c'",
        'there; extra == "c"',
    ],
    "jax": ["plug-in[deep]==1; extra == 'gpu'", "other; extra == 'tpu'"],
    "plug-in": ["driver; extra == 'deep'"],
}


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"axon_dist", "jax", "there", "plug-in", "driver", "gone"}, {}),
        ({"axon_dist", "jax", "there", "plug-in"}, {"b": ("driver",), "c": ("gone",)}),
        ({"axon_dist", "jax"}, {"a": ("there",), "b": ("plug-in",), "c": ("gone", "there")}),
    ],
)
def test_extras_are_followed_into_extras_of_others(installed, missing):
    with (
        mock.patch.object(machine, "_version", lambda name: "1" if name in installed else None),
        mock.patch("importlib.metadata.requires", REQUIRES.get),
        mock.patch("importlib.metadata.metadata") as metadata,
    ):
        metadata.return_value.get_all.return_value = ["b", "a", "c"]
        found = machine.extras()
    assert list(found) == ["a", "b", "c"]
    assert {name: lacks for name, lacks in found.items() if lacks} == missing


def test_extras_of_a_package_that_is_not_installed(capsys):
    with mock.patch.object(machine, "_version", return_value=None):
        assert machine.extras() == {}
        main(["doctor"])
    assert "axon_dist is not installed: pip install ." in capsys.readouterr().out


def test_the_command_that_installs_what_is_missing(capsys):
    with mock.patch("axon_dist.train.cli.machine.extras", return_value={"loggers": ("wandb",)}):
        main(["doctor"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["loggers", "lacks wandb"] in lines
    assert any(install_command("loggers") in " ".join(line) for line in lines)
