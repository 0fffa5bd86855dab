"""Two processes fine-tune to the state of one, frozen weights and averages to the bit."""

import functools
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from axon_dist.checkpoint import load_checkpoint

from .tuning_worker import tune, write_weights

WORKER = pathlib.Path(__file__).with_name("tuning_worker.py")

pytestmark = pytest.mark.multiprocess


def run_two(folder):
    """The losses that both processes tell, for each dtype."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = str(listener.getsockname()[1])
    plain = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment = plain | {"JAX_PLATFORMS": "cpu", "NPROC": "16"}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, str(rank), "2", port, folder],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        found = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, found, strict=True):
        assert process.returncode == 0, error
    told = [[line for line in out.splitlines() if line.startswith("losses")] for out, _ in found]
    assert told[0] == told[1]
    return [line.split()[1:] for line in told[0]]


@pytest.mark.full
def test_two_processes_fine_tune_as_one(tmp_path, make_world):
    write_weights(tmp_path)
    found = run_two(tmp_path)
    assert [dtype for dtype, *_ in found] == ["bfloat16", "int8"]
    for dtype, *losses in found:
        expected, state = tune(make_world("fsdp=4"), tmp_path, dtype)
        np.testing.assert_allclose([float(x) for x in losses], expected, rtol=1e-6)
        saved = load_checkpoint(tmp_path / f"2 {dtype}", state)
        jax.tree.map(np.testing.assert_array_equal, saved.frozen, state.frozen)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
        for part in ("params", "ema", "opt_state"):
            jax.tree.map(close, getattr(saved, part), getattr(state, part))
