"""Kills runs in a bucket at random moments, and resumes them; the store fails now and then.

    python -m benchmarks.bucket --kills 100 --faults 0.1

A run takes the lease of its folder, reads samples in the order of a seed, and saves after every
second step; its state is a number that depends on every sample and on their order. It is killed
with SIGKILL at a random moment, begins again in a new process, and so on until it has come to its
end, where the state has to be that of a run that nobody disturbed; then the next one begins. The
server of objects throttles, fails, cuts answers short, hangs up, and does what it was asked without
saying so. `--command` kills `axon train` of a small transformer instead. Exits with 1 if a state
differs, or a checkpoint was called damaged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from axon_dist.checkpoint import CheckpointManager, Retention
from axon_dist.core.files import Address
from axon_dist.train.app.lock import Lease

from .object_server import ObjectServer, serving

STEPS, SAMPLES, BATCH = 40, 1000, 4
ORDER = np.random.default_rng(7).permutation(SAMPLES)


def run(address: str) -> None:
    """One leg of a run, from the newest checkpoint to the end, in a process of its own."""
    scheme, _, name = address.partition("://bucket/")
    folder = Address(scheme, "bucket", name)
    told: list[str] = []
    with (
        Lease(folder, "run_dir", told.append, seconds=30.0).renewing(),
        CheckpointManager(folder / "checkpoints", Retention(last=2), tell=told.append) as manager,
    ):
        found = manager.restore_newest({"seen": jnp.zeros(64, jnp.uint32)})
        seen = jnp.zeros(64, jnp.uint32) if found is None else found.state["seen"]
        first = 0 if found is None else found.manifest.meta["next"]
        for step in range(first // BATCH, STEPS):
            for sample in ORDER[step * BATCH : (step + 1) * BATCH]:
                seen = seen * np.uint32(1664525) + np.uint32(sample + 1)
            time.sleep(0.005)
            if (step + 1) % 2 == 0:
                manager.save(step + 1, {"seen": seen}, meta={"next": (step + 1) * BATCH})
    if damages := [line for line in told if "damaged" in line or "going back" in line]:
        raise SystemExit("\n".join(damages))


def in_python() -> bytes:
    """The state of a run that nobody disturbed, in plain Python."""
    seen = 0
    for sample in ORDER[: STEPS * BATCH]:
        seen = (seen * 1664525 + int(sample) + 1) % 2**32
    return np.full(64, seen, np.uint32).tobytes()


def start(address: str, log: Path, config: Path | None) -> int:
    """A leg on its way: a copy of this process, which has asked for no device yet, or `axon train`.

    Returns:
        The number of its process.
    """
    if config is not None:
        command = [sys.executable, "-m", "axon_dist.train.cli", "train", str(config)]
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(config.parent / "cache")}
        with open(log, "a") as file:
            words = [*command, f"run_dir={address}", "--resume", "auto"]
            return subprocess.Popen(words, stdout=file, stderr=file, env=env).pid
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(log, "a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                run(address)
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def wait(child: int) -> int:
    """The exit status of a leg, or the signal that ended it."""
    found = os.waitid(os.P_PID, child, os.WEXITED)
    assert found is not None
    return found.si_status


def leg(server: ObjectServer, child: int, chance: random.Random, may_kill: bool) -> int:
    """Waits for a leg, or kills it; returns its exit status, or the signal that ended it."""
    begun, wanted = len(server.requests), chance.randrange(1, 160)
    # As many requests further on, and a moment, whatever the machine is doing.
    while len(server.requests) < begun + wanted and not _is_over(child):
        time.sleep(0.001)
    time.sleep(chance.random() * 0.01)
    if may_kill and not _is_over(child):
        os.kill(child, signal.SIGKILL)
    return wait(child)


def main() -> None:
    """Kills runs until there were enough kills, and says what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--faults", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="store_true")
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    kills = runs = wrong = 0
    with serving(0.0, asked.seed) as server, tempfile.TemporaryDirectory() as scratch:
        os.environ.update(server.env())
        config = write_config(Path(scratch)) if asked.command else None
        log = Path(scratch, "log")
        wrong += wait(start("gs://bucket/whole", log, config))
        expected = last_state(server, "whole")
        wrong += config is None and expected.get("seen/0") != in_python()
        server.faults = asked.faults
        while kills < asked.kills and not wrong:
            address, status = f"{('gs', 's3')[runs % 2]}://bucket/run{runs}", -1
            while status != 0 and not wrong:
                status = leg(server, start(address, log, config), chance, kills < asked.kills)
                kills += status == signal.SIGKILL
                wrong += status not in (0, signal.SIGKILL)
            wrong += last_state(server, f"run{runs}") != expected
            wrong += steps_of(server, f"run{runs}") != steps_of(server, "whole")
            runs += 1
            print(f"{kills} kills, {runs} runs, {wrong} wrong", flush=True)
        told = log.read_text()
        wrong += any(word in told for word in ("damaged", "going back", "checksum"))
        print(told[-3000:] if wrong else "", file=sys.stderr)
    print(f"{len(server.requests)} requests, {asked.faults:.0%} of them refused or cut")
    raise SystemExit(wrong > 0)


def write_config(scratch: Path) -> Path:
    """A transformer with dropout, ten steps, each of them saved."""
    (scratch / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (scratch / "b.txt").write_text("a lazy dog jumps over the quick brown fox. " * 10)
    config = {
        "name": "killed",
        "model": {"width": 8, "num_layers": 1, "num_heads": 2, "ffn_width": 16, "max_length": 16},
        "devices": {"emulate": 2},
        "mesh": {"fsdp": 2},
        "parallel": "fsdp",
        "data": {
            "files": [str(scratch / "a.txt")],
            "validation_files": [str(scratch / "b.txt")],
            "sequence_length": 16,
        },
        "optimizer": {"name": "adamw", "learning_rate": 0.01},
        "train": {"steps": STEPS, "global_batch": 8, "eval_every": 0, "log_every": 1},
        "checkpoint": {"every": 2, "keep": 2},
    }
    config["model"]["dropout"] = 0.1
    path = scratch / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def steps_of(server: ObjectServer, run: str) -> list[tuple[int, float]]:
    """The step and the loss of every line of the metrics, where there are some."""
    _, lines = server.objects.get(f"bucket/{run}/metrics.jsonl", (0, b""))
    rows = map(json.loads, lines.decode().splitlines())
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


def _is_over(child: int) -> bool:
    found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None


def last_state(server: ObjectServer, run: str) -> dict[str, bytes]:
    """The content of the last checkpoint on the server; empty without its marker."""
    folder = f"bucket/{run}/checkpoints/step_{STEPS:08d}"
    if f"{folder}/COMMITTED" not in server.objects:
        return {}
    names = server.names(f"{folder}/zarr/")
    return {name.removeprefix(f"{folder}/zarr/"): server.objects[name][1] for name in names}


if __name__ == "__main__":
    main()
