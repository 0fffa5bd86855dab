"""Figures of the package that may only shrink; `python -m benchmarks.house --write` pins them."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import house

PINNED = json.loads(house.PINS.read_text())


@pytest.fixture(scope="module")
def figures():
    """What the package is now; a step in a process of its own, where nothing is cached."""
    command = [sys.executable, "-m", "benchmarks.house", "--json"]
    bare = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    run = subprocess.run(command, capture_output=True, text=True, env=bare)
    assert run.returncode == 0, run.stderr
    return {**house.static_figures(), **json.loads(run.stdout)}


def test_nothing_has_grown(figures):
    assert set(figures) == set(PINNED)
    grown = {k: (PINNED[k], v) for k, v in figures.items() if v > PINNED[k]}
    assert not grown, f"grown, as (pinned, now); what is to go instead? {grown}"


def test_what_shrank_is_pinned(figures):
    """A ratchet that lags behind lets the next change grow for nothing."""
    least = {k: 0.98 * pinned for k, pinned in PINNED.items()}
    shrunk = {k: (PINNED[k], v) for k, v in figures.items() if v < least[k]}
    assert not shrunk, f"smaller than pinned; run `python -m benchmarks.house --write`: {shrunk}"
