"""Elastic bits through kills: a run is killed again and again, and goes on on other ranks.

    python -m benchmarks.elastic --kills 11

`axon train` trains the transformer of `benchmarks.faults`, with dropout, with `deterministic:
elastic` and eight logical shards. It begins in the first of twelve layouts. At a random step it is
killed with SIGKILL, and `--resume auto` goes on in the next layout. In the end it has to have the
very losses and the very bits of the state of a run on one device that nobody disturbed. Exits with
1 where it has not.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .faults import CONFIG, final_bits, start
from .soak import last_step

STEPS = 48
FSDP = "parallel={fsdp: {min_elements: 8}}"
BOTH = "parallel={ddp: {}, fsdp: {min_elements: 8}}"
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp=2": ("mesh={dp: 2}", "parallel=ddp"),
    "fsdp=4": ("mesh={fsdp: 4}", FSDP),
    "dp=8": ("mesh={dp: 8}", "parallel=ddp"),
    "fsdp=2": ("mesh={fsdp: 2}", FSDP),
    "dp=2,fsdp=2": ("mesh={dp: 2, fsdp: 2}", "parallel={hybrid: {min_elements: 8}}"),
    "dp=1": ("mesh={dp: 1}", "parallel=ddp"),
    "dp=2 accumulate": ("mesh={dp: 2}", "parallel=ddp", "train.accumulate=4"),
    "fsdp=8": ("mesh={fsdp: 8}", FSDP),
    "dp=4": ("mesh={dp: 4}", "parallel=ddp"),
    "dp=2,fsdp=4": ("mesh={dp: 2, fsdp: 4}", BOTH),
    "dp=4 zero1 accumulate": ("mesh={dp: 4}", "parallel=zero1", "train.accumulate=2"),
    "fsdp=2,dp=4": ("mesh={fsdp: 2, dp: 4}", BOTH),
}
"""By its name what a layout changes in the config; a run goes through them in this order."""
ELASTIC = (
    *("deterministic=elastic", "logical_shards=8", f"train.steps={STEPS}", "train.eval_every=0"),
    *("model.width=16", "model.ffn_width=32", "model.max_length=16", "data.sequence_length=16"),
)


def overrides_of(layout: str) -> tuple[str, ...]:
    """All that a run in a layout changes in the config."""
    mesh = LAYOUTS[layout][0].removeprefix("mesh={").removesuffix("}")
    devices = 1
    for part in mesh.split(", "):
        devices *= int(part.split(": ")[1])
    return (*ELASTIC, *LAYOUTS[layout], f"devices={{emulate: {devices}}}")


def losses_of(folder: Path) -> set[tuple[int, float]]:
    """Steps with their losses; a step that was taken again with another loss is there twice."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {(row["step"], row["train/loss"]) for row in rows if "train/loss" in row}


def finish(process: subprocess.Popen, folder: Path) -> None:
    """Waits for the end of a run, which has to be a good one."""
    if process.wait():
        raise SystemExit(folder.with_suffix(".log").read_text()[-3000:])


def killed_run(config: Path, folder: Path, kills: int, chance: random.Random) -> list[str]:
    """Runs to the end; the layouts that it went through, each after a kill but the first.

    Args:
        config: of the run.
        folder: takes it.
        kills: how often it is killed.
        chance: of the moments.
    """
    names, went = list(LAYOUTS), []
    for number in range(kills + 1):
        layout = names[number % len(names)]
        went.append(layout)
        process = start(config, folder, *overrides_of(layout))
        if number == kills:
            finish(process, folder)
            break
        before = last_step(folder / "metrics.jsonl")
        # At least one checkpoint further on, and some steps for those to come.
        wanted = before + chance.randint(2, max(2, (STEPS - before) // (kills - number + 1)))
        while process.poll() is None and last_step(folder / "metrics.jsonl") < wanted:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.02)
        if process.poll() is not None:
            finish(process, folder)
            raise SystemExit(f"{layout} ended before it was killed: take more steps")
        process.kill()
        process.wait()
        print(f"killed in {layout} after step {last_step(folder / 'metrics.jsonl')}", flush=True)
    return went


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=11, help="the layouts follow in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for text in ("a.txt", "b.txt"):
            (folder / text).write_text(f"{text}: the quick brown fox jumps over the dog. " * 200)
        config = folder / "config.yaml"
        config.write_text(CONFIG.format(texts=folder, steps=STEPS))
        alone, killed = folder / "alone", folder / "killed"
        finish(start(config, alone, *overrides_of("dp=1")), alone)
        went = killed_run(config, killed, asked.kills, random.Random(asked.seed))
        same_losses = losses_of(killed) == losses_of(alone)
        same_bits = final_bits(killed, STEPS) == final_bits(alone, STEPS)
    print(f"{asked.kills} kills, {len(set(went))} layouts: losses of {STEPS} steps the same:")
    print(f"{same_losses}; bits of the state the same: {same_bits}")
    return 0 if same_losses and same_bits else 1


if __name__ == "__main__":
    sys.exit(main())
