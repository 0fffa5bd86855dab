"""`axon train` in an environment of a broken launch: one line with the reason, immediately."""

import os
import subprocess
import sys

import pytest

from axon_dist.train.cli.main import main

CONFIG = "devices: {{emulate: 8}}\nrun_dir: {folder}/run\n"
TORCH = {"MASTER_ADDR": "192.168.1.100", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "4"}
WRONG = [
    ({"RANK": "8", "WORLD_SIZE": "8"}, "got process 8 of 8; processes count from 0 to 7"),
    ({"RANK": "1"}, "RANK=1 is set, but WORLD_SIZE is not; set both for every process"),
    ({"WORLD_SIZE": "8"}, "WORLD_SIZE=8 is set, but RANK is not; set both for every process"),
    (TORCH | {"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc', which is not an integer"),
    (TORCH | {"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; set a port from 1 to 65535"),
    (TORCH | {"RANK": "-1"}, "RANK=-1 must be at least 0"),
    (TORCH | {"WORLD_SIZE": "3", "RANK": "0"}, "8 emulated devices"),
    ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "b"}, "SM_CURRENT_HOST=b is not one of"),
    ({"AXON_CLUSTER": "slrum"}, "AXON_CLUSTER names the unknown cluster 'slrum'"),
    (
        TORCH | {"AXON_LAUNCH_TIMEOUT": "soon"},
        "AXON_LAUNCH_TIMEOUT is 'soon'; set a number of seconds",
    ),
    (TORCH | {"AXON_STEP_TIMEOUT": "-1"}, "AXON_STEP_TIMEOUT=-1 must be more than 0 seconds"),
]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


@pytest.mark.parametrize(("env", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_environment_is_one_line(config, env, words, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(config)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("axon: error: ")
    assert words in err
    assert not (config.parent / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("env", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_process_of_its_own_does_not_wait_for_others(config, env, words):
    base = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    command = [sys.executable, "-m", "axon_dist.train.cli", "train", str(config)]
    # The timeout is for one that waits for others, which takes AXON_LAUNCH_TIMEOUT, 300 seconds.
    done = subprocess.run(command, env=base | env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
