"""What a run in a bucket survives: killed at random moments, at a store that fails now and then.

    python -m benchmarks.bucket --kills 100 --faults 0.1

A run takes the lease of its folder, reads samples in the order of a seed, and saves after every
second step; its state is a number that depends on every sample and on their order. It is killed
with SIGKILL at a random moment, begins again in a new process, and so on until it has come to its
end, where the state has to be that of a run that nobody disturbed; then the next one begins. The
server of objects throttles, fails, cuts answers short, hangs up, and does what it was asked without
saying so. Exits with 1 if a state differs, or a checkpoint
was called damaged.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from axon_dist.app.lock import Lease
from axon_dist.checkpoint import CheckpointManager, Retention
from axon_dist.core.objects import as_place

from .object_server import ObjectServer, serving

STEPS, SAMPLES, BATCH = 40, 1000, 4
ORDER = np.random.default_rng(7).permutation(SAMPLES)


def run(address: str) -> None:
    """One leg of a run, from the newest checkpoint to the end, in a process of its own."""
    folder = as_place(address, "the run")
    told: list[str] = []
    with (
        Lease(folder, "run_dir", told.append, seconds=30.0).kept(),
        CheckpointManager(f"{address}/checkpoints", Retention(last=2), tell=told.append) as manager,
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


def expected() -> list[int]:
    """The state of a run that nobody disturbed, in plain Python."""
    seen = 0
    for sample in ORDER[: STEPS * BATCH]:
        seen = (seen * 1664525 + int(sample) + 1) % 2**32
    return [seen] * 64


def start(address: str, log: Path) -> int:
    """A leg on its way: a copy of this process, in which no device was asked for yet."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(log, "a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                run(address)
            code = 0
        finally:
            os._exit(code)
    return child


def main() -> None:
    """Kills runs until there were enough kills, and says what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--faults", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    chance = random.Random(asked.seed)
    kills = runs = legs = wrong = 0
    with serving(asked.faults, asked.seed) as server, tempfile.TemporaryDirectory() as scratch:
        os.environ.update(server.env())
        while kills < asked.kills:
            scheme = ("gs", "s3")[runs % 2]
            address, log = f"{scheme}://bucket/run{runs}", Path(scratch, f"{runs}.log")
            ended = False
            while not ended:
                legs += 1
                child, begun = start(address, log), len(server.requests)
                # As many requests further on, and a moment, whatever the machine is doing.
                wanted = chance.randrange(1, 160)
                while len(server.requests) < begun + wanted and not _is_over(child):
                    time.sleep(0.001)
                time.sleep(chance.random() * 0.01)
                if kills < asked.kills and not _is_over(child):
                    os.kill(child, signal.SIGKILL)
                    kills += 1
                ended = os.waitid(os.P_PID, child, os.WEXITED).si_status == 0
                if not ended and (text := log.read_text()).strip():
                    print(text[-2000:], file=sys.stderr)
                    wrong += "Error" in text or "damaged" in text
                    log.write_text("")
                if wrong > 5:
                    raise SystemExit(1)
            runs += 1
            wrong += _last_state(server, address) != expected()
            print(f"{kills} kills, {runs} runs, {legs} legs, {wrong} wrong", flush=True)
    print(f"{len(server.requests)} requests, {asked.faults:.0%} of them refused or cut")
    raise SystemExit(wrong > 0)


def _is_over(child: int) -> bool:
    found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None


def _last_state(server: ObjectServer, address: str) -> list[int]:
    """What the last checkpoint holds, read from the memory of the server."""
    folder = f"{address.partition('://')[2]}/checkpoints/step_{STEPS:08d}"
    if f"{folder}/COMMITTED" not in server.objects:
        return []
    return np.frombuffer(server.objects[f"{folder}/zarr/seen/0"][1], np.uint32).tolist()


if __name__ == "__main__":
    main()
