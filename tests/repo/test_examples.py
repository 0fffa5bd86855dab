"""Every example runs from start to end, as a user would run it."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


def cache():
    """The settings of the cache of these tests, for another process."""
    names = [name for name in jax.config.values if "compilation_cache_dir" in name]
    names += [name for name in jax.config.values if "persistent_cache_min" in name]
    return {name.upper(): str(jax.config.values[name]) for name in names}


@pytest.mark.sample("07_your_own_schedule.py")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_runs(path):
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "120", **cache()},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), f"{path.name} shows nothing"
    if path.name == "02_fsdp.py":
        (picture,) = re.findall(r"## One picture.*?```text\n(.*?)```", README, re.DOTALL)
        assert done.stdout.startswith(picture)


@pytest.mark.full
def test_the_sweep_of_the_guide_runs(tmp_path):
    guide = (ROOT / "docs" / "guides" / "loop.md").read_text()
    (sweep,) = re.findall(r"## A sweep.*?```sh\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    done = subprocess.run(
        ["bash", "-e", "-c", sweep],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    page = (tmp_path / "rates.html").read_text()
    assert "optimizer.learning_rate" in page
    assert all(f"rate-{rate}" in page for rate in ("1e-3", "3e-3", "1e-2"))
