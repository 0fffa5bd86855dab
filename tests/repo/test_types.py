"""CI checks the types with pyrefly alone; pyright accepts them, too."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.full
def test_pyright_accepts_the_package():
    pytest.importorskip("pyright", reason="needs the extra 'dev'")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
