"""Processes whose user has set JAX or XLA differently are told so before they meet in JAX."""

import pytest

PROGRAM = """
import os, sys

kind, rank = sys.argv[1], int(os.environ["RANK"])
if kind == "differ" and rank == 1:
    os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["XLA_FLAGS"] += " --xla_cpu_enable_fast_math=true"
if kind == "own":
    os.environ["XLA_FLAGS"] += f" --xla_dump_to={sys.argv[2]}/{rank}"

import jax
from axon_dist import World

assert jax.config.values["jax_enable_x64"] == (kind == "differ" and rank == 1)
print("met", World.emulate(2).num_processes, flush=True)
"""
WORDS = (
    "would compute different results: jax_enable_x64 is 'False' in process 0 and 'True' in process "
    "1, XLA_FLAGS --xla_cpu_enable_fast_math is not set in process 0 and 'true' in process 1; use "
    "the same settings everywhere"
)


@pytest.mark.multiprocess
def test_a_difference_is_refused_by_all_in_one_line(start):
    processes = start(2, "-c", PROGRAM, "differ")
    assert processes.wait((0, 1), timeout=60) == [1, 1]
    for rank in (0, 1):
        *_, line = processes.text(rank).splitlines()
        assert line.startswith("axon_dist.core.errors.LaunchError: process 0 (host ")
        assert WORDS in line
        assert "met 2" not in processes.text(rank)


@pytest.mark.full
@pytest.mark.multiprocess
def test_settings_of_one_process_may_differ(start, tmp_path):
    processes = start(2, "-c", PROGRAM, "own", str(tmp_path))
    assert processes.wait((0, 1), timeout=60) == [0, 0]
    assert all("met 2" in processes.text(rank) for rank in (0, 1))
