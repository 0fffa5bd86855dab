"""Kills runs at random moments, damages their checkpoints, and resumes them.

    python -m benchmarks.faults --runs 100 --corruptions 100 --losses 20 --others 20 --kinds 16
    python -m benchmarks.faults kills disk --runs 10 --out kills.txt

Every run trains a small transformer in a process of its own, which is killed with SIGKILL, half of
the time in the middle of a save, and resumed with `--resume auto`. It has to end with the very bits
of the run that nobody disturbed. Copies of a good checkpoint, sharded and full, are damaged (bytes
flipped, files cut short or removed, every kind of file as often), each of which has to be noticed
and passed over for the one before it. The power is cut (see `power`), every state of a save is
looked at (`crash_states`), file operations fail (`disk_errors`), links and pipes lie in the place
of files (`links`), strangers connect to its port (`strangers`), a second run starts in the
folder of the first, and the disk fills up and is emptied again, which takes root. At last one of
four processes of a run is killed or stopped, and the others have to name it and to end within the
time set. The kinds of run in `faults_launched` meet every kind of fault there, under the launcher.
Exits with 1 if anything did harm.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from axon_dist.checkpoint import CheckpointManager, load_checkpoint, read_manifest

from .crash_states import KINDS, measure_states
from .disk_errors import measure_errors
from .faults_launched import measure_launched
from .links import measure_links
from .peers import measure_losses
from .power import measure_power_cuts
from .strangers import measure_strangers

STEPS = 40
CONFIG = """
name: faults
devices: {{emulate: 4}}
mesh: {{fsdp: 4}}
parallel: fsdp
model: {{width: 64, num_layers: 2, num_heads: 2, ffn_width: 128, max_length: 32, dropout: 0.1}}
data: {{files: [{texts}/a.txt], validation_files: [{texts}/b.txt], sequence_length: 32}}
optimizer: {{name: adamw, learning_rate: 0.003}}
train: {{steps: {steps}, global_batch: 8, eval_every: 20, eval_batches: 1, log_every: 1}}
checkpoint:
  every: 2
  keep: 3
"""


def start(config: Path, folder: Path, *overrides: str) -> subprocess.Popen:
    """`axon train` on its way; a compilation cache spares every process but the first the wait."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(config.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [
        sys.executable,
        "-m",
        "axon_dist.train.cli",
        "train",
        str(config),
        f"run_dir={folder}",
    ]
    log = open(folder.with_suffix(".log"), "a")  # noqa: SIM115 (the process keeps it open)
    return subprocess.Popen(
        [*command, *overrides, "--resume", "auto"],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def finish(config: Path, folder: Path) -> bool:
    """Runs, or goes on, to the end; whether it got there."""
    return start(config, folder).wait() == 0


def final_bits(folder: Path, steps: int = STEPS) -> dict[str, bytes]:
    """Every leaf of the last checkpoint of a finished run of so many steps."""
    path = folder / "checkpoints" / f"step_{steps:08d}"
    state = load_checkpoint(path, target_of_manifest(path))
    is_key = lambda x: jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    plain = {name: jax.random.key_data(x) if is_key(x) else x for name, x in state.items()}
    return {name: np.asarray(values).tobytes() for name, values in plain.items()}


def target_of_manifest(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """All that a checkpoint holds, onto one device; random keys are left as their kind."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = read_manifest(path).leaves
    return {name: describe(spec.dtype, spec.shape, one) for name, spec in leaves.items()}


def describe(dtype: str, shape: tuple[int, ...], sharding) -> jax.ShapeDtypeStruct:
    kind = jax.random.key(0).dtype if dtype.startswith("key<") else jax.numpy.dtype(dtype)
    return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)


def wait_for_steps(process: subprocess.Popen, folder: Path, chance: random.Random) -> None:
    """Until a random moment between the first steps and the last."""
    first = folder / "metrics.jsonl"
    wanted = chance.randrange(1, STEPS)
    while process.poll() is None:
        if first.exists() and first.read_text().count("train/loss") >= wanted:
            break
        time.sleep(0.002)
    time.sleep(chance.random() * 0.03)


def wait_for_a_save(process: subprocess.Popen, folder: Path, chance: random.Random) -> None:
    """Until one of the saves is under way, and a random moment further into it."""
    seen: set[str] = set()
    wanted = chance.randrange(1, STEPS // 2)
    while process.poll() is None:
        under_way = {path.name for path in (folder / "checkpoints").glob("step_*.tmp")}
        seen |= under_way
        if under_way and len(seen) >= wanted:
            break
        time.sleep(0.0005)
    time.sleep(chance.random() * 0.02)


SAVING = "killed while saving"
WAITS: dict[str, Callable] = {"killed": wait_for_steps, SAVING: wait_for_a_save}


def kill(config: Path, folder: Path, kind: str, chance: random.Random) -> bool:
    """Starts a run and kills it; whether it died as it was meant to."""
    shutil.rmtree(folder, ignore_errors=True)
    process = start(config, folder)
    WAITS[kind](process, folder, chance)
    process.kill()
    was_alive = process.wait() == -signal.SIGKILL
    half_written = any((folder / "checkpoints").glob("step_*.tmp"))
    return was_alive and (half_written or kind != SAVING)


def survives(
    config: Path, folder: Path, kind: str, chance: random.Random, expected: dict[str, bytes]
) -> bool:
    """Kills a run, resumes it, and compares its end with that of the undisturbed one."""
    while not kill(config, folder, kind, chance):
        pass
    return finish(config, folder) and final_bits(folder) == expected


def flip(path: Path, chance: random.Random) -> None:
    contents = bytearray(path.read_bytes())
    contents[chance.randrange(len(contents))] ^= 1 << chance.randrange(8)
    path.write_bytes(contents)


def cut(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


DAMAGES: dict[str, Callable] = {"flipped bit": flip, "truncated file": cut, "missing file": remove}


def kind_of(path: Path, checkpoint: Path) -> str:
    """What a file of a checkpoint is for; the many of one kind have names of hexadecimal digits."""
    name = str(path.relative_to(checkpoint))
    return re.sub(r"[0-9a-f]{32}$", "...", name)


def files_of(checkpoint: Path) -> dict[str, list[Path]]:
    """The files of a checkpoint that are not empty, by kind."""
    found: dict[str, list[Path]] = {}
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path.stat().st_size:
            found.setdefault(kind_of(path, checkpoint), []).append(path)
    return found


def is_noticed(good: Path, work: Path, file: str, kind: str, chance: random.Random) -> bool:
    """Damages the newest of two checkpoints; the one before it has to be the one that is found."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(good, work)
    newest = max(work.iterdir())
    DAMAGES[kind](chance.choice(files_of(newest)[file]), chance)
    told: list[str] = []
    manager = CheckpointManager(work, tell=told.append)
    found = manager.restore_newest(target_of_manifest(good / newest.name))
    return len(told) == 1 and newest.name in told[0] and found.path.name < newest.name


def measure_kills(
    folder: Path, config: Path, runs: int, chance: random.Random, expected: dict[str, bytes]
) -> list[tuple[str, int, int]]:
    """Kills runs, the kinds in turn; rows of fault, how often, and how often it was survived."""
    good = dict.fromkeys(WAITS, 0)
    for number in range(runs):
        kind = list(WAITS)[number % len(WAITS)]
        good[kind] += survives(config, folder / f"killed-{number}", kind, chance, expected)
        print(
            f"run {number + 1} of {runs}, {kind}: {sum(good.values())} ended with the same bits",
            flush=True,
        )
    counts = {kind: len(range(number, runs, len(WAITS))) for number, kind in enumerate(WAITS)}
    return [(f"{kind}, resumed", counts[kind], good[kind]) for kind in WAITS]


def measure_damages(
    folder: Path, checkpoints: Path, label: str, corruptions: int, chance: random.Random
) -> list[tuple[str, int, int]]:
    """Damages every kind of file; rows of file, how often, and how often it was noticed."""
    rows = []
    for file in files_of(max(checkpoints.iterdir())):
        kinds = [list(DAMAGES)[number % len(DAMAGES)] for number in range(corruptions)]
        noticed = [is_noticed(checkpoints, folder / "damaged", file, k, chance) for k in kinds]
        missed = [k for k, seen in zip(kinds, noticed, strict=True) if not seen]
        but = f", not {', '.join(sorted(set(missed)))}" if missed else ""
        print(f"{label}: {file}: {sum(noticed)} of {corruptions} noticed{but}", flush=True)
        rows.append((f"{label}: {file} damaged", corruptions, sum(noticed)))
    return rows


def measure_two(
    folder: Path, config: Path, runs: int, expected: dict[str, bytes]
) -> tuple[str, int, int]:
    """Starts a second run in the folder of one that is at work: it has to leave, and do no harm."""
    good = 0
    for number in range(runs):
        shared = folder / f"two-{number}"
        first = start(config, shared)
        wait_for_steps(first, shared, random.Random(number))
        # On a slow machine it would have ended before the second has started.
        first.send_signal(signal.SIGSTOP)
        second = start(config, shared).wait()
        first.send_signal(signal.SIGCONT)
        good += second == 2 and first.wait() == 0 and final_bits(shared) == expected
    return "two runs in one folder", runs, good


def measure_full_disk(
    folder: Path, config: Path, runs: int, expected: dict[str, bytes]
) -> tuple[str, int, int]:
    """Fills the disk under a run and frees it again: the run continues from its last checkpoint."""
    good = 0
    for number in range(runs):
        disk = folder / f"disk-{number}"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            print("no disk could be made up, which takes the rights of root: none was filled")
            return "full disk", 0, 0
        try:
            good += outlives_a_full_disk(config, disk, random.Random(number), expected)
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return "full disk", runs, good


def outlives_a_full_disk(
    config: Path, disk: Path, chance: random.Random, expected: dict[str, bytes]
) -> bool:
    """Fills a disk while a run writes to it; whether the run says so, and goes on to its bits."""
    run, filler = disk / "run", disk / "filler"
    process = start(config, run)
    wait_for_steps(process, run, chance)
    with contextlib.suppress(OSError), open(filler, "wb") as file:
        while True:
            file.write(bytes(2**16))
            file.flush()
    said = process.wait() != 0
    filler.unlink()
    return said and finish(config, run) and final_bits(run) == expected


@dataclasses.dataclass(frozen=True)
class Ground:
    """What the parts share; an undisturbed run is made when a part asks for one.

    Args:
        folder: an empty one, in which all runs lie.
        seed: of the moments and the places.
    """

    folder: Path
    seed: int

    def chance(self, part: str) -> random.Random:
        """The same for a part by itself as for all of them."""
        return random.Random(f"{self.seed} {part}")

    @functools.cached_property
    def config(self) -> Path:
        for name in ("a.txt", "b.txt"):
            text = f"{name}: the quick brown fox jumps over the lazy dog. " * 200
            (self.folder / name).write_text(text)
        path = self.folder / "config.yaml"
        path.write_text(CONFIG.format(texts=self.folder, steps=STEPS))
        return path

    @functools.cached_property
    def expected(self) -> dict[str, bytes]:
        return final_bits(self._finished("sharded"))

    def checkpoints(self, type: str) -> Path:
        return self._finished(type) / "checkpoints"

    def _finished(self, type: str) -> Path:
        run = self.folder / f"undisturbed-{type}"
        config = self.config.with_name(f"{type}.yaml")
        config.write_text(self.config.read_text() + f"  type: {type}\n")
        if not run.exists() and not finish(config, run):
            raise SystemExit(run.with_suffix(".log").read_text())
        return run


Rows = list[tuple[str, int, int]]
"""Of each fault how often it was made, and how often it did no harm."""


def damages_of(type: str) -> Callable[[Ground, int], Rows]:
    return lambda on, times: measure_damages(
        on.folder, on.checkpoints(type), type, times, on.chance(type)
    )


def _new(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


PARTS: dict[str, tuple[str, Callable[[Ground, int], Rows]]] = {
    "sharded": ("corruptions", damages_of("sharded")),
    "full": ("corruptions", damages_of("full")),
    "power": ("others", lambda on, times: measure_power_cuts(on.folder, times, on.chance("power"))),
    "states": (
        "others",
        lambda on, times: measure_states(_new(on.folder / "states"), [*KINDS][: 3 * times]),
    ),
    "errors": (
        "others",
        lambda on, times: measure_errors(_new(on.folder / "errors"), max(1, 128 // times)),
    ),
    "links": ("others", lambda on, times: measure_links(_new(on.folder / "links"))),
    "strangers": ("others", lambda on, times: measure_strangers()),
    "two": ("others", lambda on, times: [measure_two(on.folder, on.config, times, on.expected)]),
    "disk": (
        "others",
        lambda on, times: [measure_full_disk(on.folder, on.config, times, on.expected)],
    ),
    "kills": (
        "runs",
        lambda on, times: measure_kills(
            on.folder, on.config, times, on.chance("kills"), on.expected
        ),
    ),
    "launched": (
        "kinds",
        lambda on, times: measure_launched(
            on.folder, on.config, times, f"{on.seed} launched", final_bits
        ),
    ),
    "losses": (
        "losses",
        lambda on, times: measure_losses(
            _new(on.folder / "losses"), on.config, times, on.chance("losses")
        ),
    ),
}
"""By its name each part, after the option that says how often."""


def table_of(rows: Rows) -> Table:
    table = Table("fault", title="faults")
    table.add_column("times", justify="right")
    table.add_column("no harm done", justify="right")
    for name, count, good in rows:
        table.add_row(name, str(count), f"{good}/{count}" if count else "not tried")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or all")
    parser.add_argument("--runs", type=int, default=4, help="runs to kill")
    parser.add_argument("--corruptions", type=int, default=20, help="of each kind of file")
    parser.add_argument("--losses", type=int, default=2, help="runs that lose a process of four")
    parser.add_argument("--kinds", type=int, default=1, help="runs that meet all faults, by kind")
    parser.add_argument("--others", type=int, default=2, help="power cuts, full disks, two runs")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the places")
    parser.add_argument("--out", type=Path, help="a file that gets the table, part by part")
    parser.add_argument("--keep", type=Path, help="a folder to work in, and to go on in")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    rows: Rows = []
    with contextlib.ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        on = Ground(folder, arguments.seed)
        for part, (option, measure) in PARTS.items():
            if part in (arguments.parts or PARTS):
                rows += measure(on, getattr(arguments, option))
                if arguments.out:
                    with open(arguments.out, "w") as file:
                        Console(file=file, width=100).print(table_of(rows))
    Console().print(table_of(rows))
    return 0 if all(count == good for _, count, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
