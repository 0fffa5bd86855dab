"""The cost of saving in the background: 50 steps of the quickstart with one save, and without.

    python -m benchmarks.checkpoint [--rounds 5] [--steps 50] [--type sharded]

Rounds alternate, so that a busy machine is busy for both. CPU-seconds count every thread, the
writing ones too: on a machine whose cores are all computing they are what a save takes from steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console

from axon_dist.checkpoint import CheckpointManager, Retention, StateDictType
from axon_dist.train.app.runs import build_run
from axon_dist.train.config import load_config

from .timing import alternate

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50, help="steps per save")
    parser.add_argument("--type", type=StateDictType, default=StateDictType.SHARDED)
    args = parser.parse_args()

    run = build_run(load_config(CONFIG, ["devices.emulate=8"]))
    state, blocked = run.step.init(), []

    def steps():
        nonlocal state
        for _ in range(args.steps):
            state, metrics = run.step(state, next(run.loader))
        return metrics["loss"]

    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(folder, Retention(last=1), type=args.type)

        def steps_with_a_save():
            begin = time.perf_counter()
            manager.save(int(state.step), state, meta={"data": run.loader.state()})
            blocked.append(time.perf_counter() - begin)
            loss = steps()
            manager.wait()
            return loss

        programs = {"none": steps, "saving": steps_with_a_save}
        timings = alternate(programs, args.rounds, calls=1)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())

    cpu = timings["saving"].best_cpu / timings["none"].best_cpu - 1
    wall = timings["saving"].median_wall / timings["none"].median_wall - 1
    Console().print(
        f"one {args.type} save of {size / 1e6:.1f} MB per {args.steps} steps of "
        f"{1e3 * timings['none'].median_wall / args.steps:.0f} ms: CPU {cpu:+.1%}, "
        f"wall {wall:+.1%}; the loop waits for {1e3 * statistics.median(blocked):.0f} ms",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
