"""Kinds of run under `axon launch`, each of which meets every kind of fault, one after the other.

    python -m benchmarks.faults launched --kinds 16 --keep /tmp/launched --out table.txt

Two processes of two devices train. At random steps one is killed, one is stopped, the launcher gets
SIGHUP, the launcher is killed, the coordination service is killed, the disk fills up, and a second
run starts in the same folder. Each loss has to be named in the log, and what it hit has to be gone,
within `IN_TIME` seconds; the run goes on, by the launcher or as a scheduler would have it, and has
to end with the bits of one that nobody disturbed, and to leave no process behind. Called again with
the same folder, it goes on with the runs that are not in its `launched.jsonl`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

PROCESSES, SILENCE_SECONDS, IN_TIME, MARK = 2, 10, 30.0, "AXON_FAULTS_MARK"
STEPS = 120
"""So many that every fault finds a run at work."""
KINDS: dict[str, tuple[str, ...]] = {
    "elastic": ("deterministic=elastic", "logical_shards=8"),
    "memory copies": ("checkpoint.every=10", "checkpoint.memory_every=2"),
    "LoRA, ema, int8": (
        "lora={rank: 2, paths: [attention]}",
        "frozen_dtype=int8",
        "train.ema=0.9",
    ),
    "pipeline": (
        "mesh={pp: 2, dp: 2}",
        "parallel={pipeline: {num_microbatches: 2}, ddp: {}}",
        "model.num_layers=2",
    ),
    "DiLoCo": (
        "mesh={nodes: 2, fsdp: 2}",
        "parallel={diloco: {every: 5}, fsdp: {}}",
        "train.nonfinite=skip",
    ),
    "zero1, accumulate": ("mesh={dp: 4}", "parallel=zero1", "train.accumulate=2"),
    "experts": (
        "mesh={ep: 4}",
        "parallel={expert: {capacity: null}}",
        "model.experts={count: 4, per_token: 2, balance: 0.01}",
    ),
    "fsdp": (),
}
"""The overrides of each kind of run to the config of `benchmarks.faults`; a new kind is a row."""
SMALL = (
    *("model.width=16", "model.ffn_width=32", "model.max_length=16", "data.sequence_length=16"),
    *("model.num_layers=1", "train.eval_every=0", f"train.steps={STEPS}"),
)
"""Of every kind: nearly all of a fault's price is the start after it."""


def marked(mark: str) -> dict[int, str]:
    """The command lines of all processes that a run has started, by number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # It may be gone, or not be ours.
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found[int(folder.name)] = line
    return found


class Launched:
    """A run under the launcher, which may be started again.

    Args:
        config: of `benchmarks.faults`.
        disk: the folder in which it writes, on a disk of its own where root may make one.
        overrides: of the config.
    """

    def __init__(self, config: Path, disk: Path, overrides: tuple[str, ...]):
        self.disk, self.folder, self.log = disk, disk / "run", disk.with_suffix(".log")
        self.config, self.overrides, self.mark = config, overrides, uuid.uuid4().hex
        self.launcher = self.start()

    def start(self) -> subprocess.Popen:
        axon = [sys.executable, "-m", "axon_dist.train.cli"]
        launch = [*axon, "launch", "-n", str(PROCESSES), "--max-restarts", "9"]
        launch += ["--log-dir", str(self.disk.with_suffix(".logs"))]
        train = [*axon, "train", str(self.config), f"run_dir={self.folder}", "--resume", "auto"]
        hidden = ("XLA_FLAGS", "NPROC", "AXON_MEMORY", "PYTHONDONTWRITEBYTECODE")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env |= {MARK: self.mark, "AXON_SILENCE_TIMEOUT": str(SILENCE_SECONDS)}
        env |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [*launch, "--", *train, *SMALL, *self.overrides], env=env, stdout=log, stderr=log
            )

    def step(self) -> int:
        """The newest step in its metrics."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return max(map(int, re.findall(r'"step": (\d+),.*"train/loss"', text)), default=0)

    def is_at(self, step: int) -> bool:
        """Whether it has taken a step; the folder is its own before the first."""
        return self.step() >= step and self.has_said("beginning at step 0", 0)

    def ranks(self) -> list[int]:
        """The processes that train, in any order."""
        lines = marked(self.mark).items()
        return [pid for pid, line in lines if "cli train" in line and "cli launch" not in line]

    def has_said(self, words: str, since: int) -> bool:
        return re.search(words, self.log.read_text(errors="replace")[since:]) is not None


Fault = Callable[[Launched, random.Random], bool]
"""Makes a fault and waits for what must come of it; whether it came, in time."""


def within(seconds: float, is_there: Callable[[], bool]) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def ended(run: Launched, hit: Callable[[], None], words: str = "") -> bool:
    """Hits a run; whether all of its processes are gone in time, and the log has the words."""
    before, since = run.ranks(), len(run.log.read_text(errors="replace"))
    hit()
    are_gone = within(IN_TIME, lambda: not set(before) & set(run.ranks()))
    return are_gone and within(5, lambda: run.has_said(words, since))


def lose_rank(number: int, words: str) -> Fault:
    return lambda run, chance: ended(
        run, lambda: os.kill(chance.choice(run.ranks()), number), words
    )


def lose_coordinator(run: Launched, chance: random.Random) -> bool:
    pid = next(pid for pid, line in marked(run.mark).items() if "coordinator.py" in line)
    return ended(run, lambda: os.kill(pid, signal.SIGKILL), "lost the coordination service")


def end_launcher(number: int, code: int, words: str = "") -> Fault:
    def fault(run: Launched, chance: random.Random) -> bool:
        are_gone = ended(run, lambda: run.launcher.send_signal(number), words)
        is_right = run.launcher.wait() == code
        are_gone = are_gone and within(5, lambda: not marked(run.mark))
        run.launcher = run.start()
        return are_gone and is_right

    return fault


def fill_disk(run: Launched, chance: random.Random) -> bool:
    """The run reports it, and continues or starts again once there is space."""
    since = len(run.log.read_text(errors="replace"))
    filler = run.disk / "filler"
    with contextlib.suppress(OSError), open(filler, "wb") as file:
        while True:
            file.write(bytes(2**16))
            file.flush()
    words = r"could not save checkpoint|No space left|disk .*(full|left)"
    is_said = within(IN_TIME, lambda: run.has_said(words, since))
    filler.unlink()
    return is_said


def start_twice(run: Launched, chance: random.Random) -> bool:
    """Two that start at the same time, of which one has to leave; the other goes on."""
    both = [run.launcher, run.start()]
    within(300, lambda: any(one.poll() is not None for one in both))
    both.sort(key=lambda one: one.poll() is not None)
    run.launcher = both[0]
    return [one.poll() for one in both] == [None, 2]


Bits = Callable[[Path, int], dict[str, bytes]]
"""The step of the last checkpoint of a run of so many steps."""

TWO = "two runs"
FAULTS: dict[str, Fault] = {
    "one killed": lose_rank(signal.SIGKILL, r"rank \d was killed by SIGKILL"),
    "one stopped": lose_rank(signal.SIGSTOP, r"lost process \d \(host "),
    "SIGHUP": end_launcher(signal.SIGHUP, 75, "SIGHUP"),
    "launcher killed": end_launcher(signal.SIGKILL, -signal.SIGKILL),
    "coordinator killed": lose_coordinator,
    "disk full": fill_disk,
    TWO: start_twice,
}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk of 32 MB at a folder; whether there is one, which takes the rights of root."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)]
    is_there = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield is_there
    finally:
        if is_there:
            subprocess.run(["umount", str(folder)], check=True)


@dataclasses.dataclass(frozen=True)
class Cell:
    """The effect of a fault on a run.

    Args:
        number: of the run.
        kind: of the run.
        fault: its name.
        step: after which it was made.
        seconds: until what it hit was gone, or had said so.
        is_in_time: whether that was named, and in time.
        is_good: that, and the run ended with the right bits, and left no process behind.
    """

    number: int
    kind: str
    fault: str
    step: int
    seconds: float
    is_in_time: bool
    is_good: bool = False


def undisturbed(folder: Path, config: Path, kind: str) -> Path:
    """The folder of a run of a kind that nobody disturbs; made once."""
    mark = folder / f"alone-{kind}.done"
    if not mark.exists():
        alone = Launched(config, folder / f"alone-{kind}", KINDS[kind])
        if alone.launcher.wait():
            raise SystemExit(alone.log.read_text())
        mark.touch()
    return folder / f"alone-{kind}" / "run"


def measure_run(
    folder: Path,
    config: Path,
    number: int,
    kind: str,
    chance: random.Random,
    bits: Bits,
) -> list[Cell]:
    """Every fault in one run, and what came of it."""
    expected, cells = bits(undisturbed(folder, config, kind), STEPS), []
    disk = folder / f"hit-{kind}-{uuid.uuid4().hex[:8]}"
    with small_disk(disk) as has_disk:
        run = Launched(config, disk, KINDS[kind])
        faults = [name for name in FAULTS if has_disk or name != "disk full"]
        chance.shuffle(faults)
        # The second run starts with the first, whose steps would be over before it has started.
        faults.sort(key=TWO.__ne__)
        for turn, name in enumerate(faults):
            least = max(run.step(), turn * (STEPS - 2) // len(faults))
            wanted = 0 if name == TWO else least + chance.randrange(1, 4)
            is_there = lambda n=wanted: run.is_at(n) or run.launcher.poll() is not None
            if name != TWO and not within(600, is_there):
                run.launcher.kill()
                run.launcher.wait()
            started = time.monotonic()
            in_time = run.launcher.poll() is None and FAULTS[name](run, chance)
            seconds = round(time.monotonic() - started, 1)
            cells.append(Cell(number, kind, name, wanted, seconds, in_time))
            print(f"{kind}: {name} at step {wanted}: {in_time}, {seconds} s", flush=True)
        is_same = run.launcher.wait() == 0 and bits(run.folder, STEPS) == expected
        is_same = is_same and within(5, lambda: not marked(run.mark))
    print(f"{kind}: {'the same bits' if is_same else run.log.read_text()[-4000:]}", flush=True)
    return [dataclasses.replace(cell, is_good=cell.is_in_time and is_same) for cell in cells]


def measure_launched(
    folder: Path, config: Path, runs: int, seed: str, bits: Bits
) -> list[tuple[str, int, int]]:
    """Runs of each kind in turn; rows of kind and fault, how often, and how often no harm was done.

    What a run gave is kept in the folder, and one that is there is not made again.
    """
    kept = folder / "launched.jsonl"
    cells = [Cell(**json.loads(x)) for x in kept.read_text().splitlines()] if kept.exists() else []
    for number in range(runs):
        if number not in {cell.number for cell in cells}:
            kind = list(KINDS)[number % len(KINDS)]
            chance = random.Random(f"{seed} {number}")
            found = measure_run(folder, config, number, kind, chance, bits)
            with open(kept, "a") as file:
                file.writelines(json.dumps(dataclasses.asdict(cell)) + "\n" for cell in found)
            cells += found
    rows: dict[str, list[bool]] = {}
    for cell in cells:
        rows.setdefault(f"{cell.kind}: {cell.fault}", []).append(cell.is_good)
    return [(name, len(good), sum(good)) for name, good in rows.items()]
