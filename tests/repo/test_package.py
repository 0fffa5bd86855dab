"""A wheel, installed where nothing else is, trains."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(*command, cwd, **env):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=900, cwd=cwd,
        env={k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")} | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_a_wheel_in_an_empty_environment_passes_the_quickstart(tmp_path):
    source = tmp_path / "source"
    run("git", "clone", "--quiet", "--shared", ROOT, source, cwd=tmp_path)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source, cwd="/")
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "axon_dist/py.typed" in names
    assert "axon_dist/mesh/h100.textproto" in names
    assert not any(name.startswith(("tests", "benchmarks", "docs")) for name in names)
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd="/")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel, cwd="/")
    small = ["train.steps=3", "train.eval_every=0", "optimizer.schedule.warmup_steps=1"]
    small += ["model.num_layers=1", "model.width=32", "data.max_bytes=200000"]
    out = run(
        tmp_path / "venv" / "bin" / "axon", "train", ROOT / "configs" / "quickstart.yaml",
        f"run_dir={tmp_path / 'run'}", *small, cwd=tmp_path,
    )  # fmt: skip
    assert "finished after 3 steps" in out
    run(tmp_path / "venv" / "bin" / "axon", "report", tmp_path / "run", cwd=tmp_path)
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


@pytest.mark.full
def test_the_types_of_the_public_surface_are_known(tmp_path):
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    command += ["--ignoreexternal", "--outputjson", "--verifytypes", "axon_dist"]
    # It ends with 1 for a single symbol of unknown type.
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, cwd=tmp_path, env=env
    )
    found = json.loads(done.stdout)["typeCompleteness"]
    assert found["completenessScore"] >= 0.95, found["exportedSymbolCounts"]
