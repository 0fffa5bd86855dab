"""A run of several ranks ends: the launcher names rank and reason in one line."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = """
import itertools, sys, time
import jax.numpy as jnp, numpy as np, optax
from flax import nnx
from axon_dist import World, build_train_step, ddp
from axon_dist.train.loop import LoopOptions, Trainer

kind, world = sys.argv[1], World.init("dp=-1")
me = world.process_index

def loss(model, batch):
    if kind == "loss" and me == 1:
        raise ValueError("my loss is broken\\nas I say on two lines")
    return jnp.mean((model(batch["x"]) - 1.0) ** 2)

def batches():
    for number in itertools.count():
        print("batch", number, flush=True)
        if kind == "end" and me == 1 and number == 3:
            return
        if kind == "data" and me == 1 and number == 3:
            raise OSError("the disk is gone")
        if kind == "coordinator":
            time.sleep(0.1)
        value = np.nan if kind == "nan" and number == 3 else 1
        yield {"x": np.full((4, 2), value, np.float32)}

model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
step = build_train_step(model, optax.sgd(0.1), loss, ddp(), world, nonfinite="stop")
Trainer(step=step, batches=batches(), options=LoopOptions(num_steps=600, log_every=1)).fit()
"""
REASONS = {
    "loss": r"rank 1 exited with code 1: ValueError: my loss is broken; ending",
    "end": r"the batches of process 1 ended after step 3 of 600, but the other processes have more",
    "data": r"rank 1 exited with code 1: OSError: the disk is gone; ending",
    "nan": r"rank [01] exited with code 1: .*NonfiniteError: step 4: the loss is nan",
    "coordinator": r"rank [01] was killed by SIGABRT: it lost the coordination service",
}
SLOW = ("end", "data", "nan", "coordinator")


def coordinator_of(launcher):
    """The coordination service, which is a grandchild of the launcher."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline") as line:
                    parents[int(entry)] = (
                        int(stat.read().rpartition(")")[2].split()[1]),
                        line.read(),
                    )
            except OSError:
                continue
    ranks = [pid for pid, (parent, _) in parents.items() if parent == launcher]
    return [p for p, (up, line) in parents.items() if up in ranks and "coordinator.py" in line]


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] if k in SLOW else []) for k in REASONS]
)
def test_the_launcher_names_rank_and_reason_in_one_line(tmp_path, kind):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if k != "NPROC"}
    env |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    env |= {"AXON_SILENCE_TIMEOUT": "20"}
    command = [
        sys.executable,
        "-m",
        "axon_dist.train.cli",
        "launch",
        "-n",
        "2",
        "--devices-per-process",
    ]
    command += ["1", "--log-dir", str(tmp_path), "--", sys.executable, str(program), kind]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as launcher:
        if kind == "coordinator":
            log, deadline = tmp_path / "rank-1.log", time.monotonic() + 60
            while not log.exists() or "batch 9" not in log.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            (service,) = coordinator_of(launcher.pid)
            os.kill(service, signal.SIGKILL)
        _, told = launcher.communicate(timeout=240)
    assert launcher.returncode not in (0, None)
    ends = [line for line in told.splitlines() if "; ending the other ranks" in line]
    assert len(ends) == 1, told

    assert re.search(REASONS[kind], ends[0]), told
