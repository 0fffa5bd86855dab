"""Tests checkpoints after a power cut: synced data is there, of the rest whatever is worst.

Saves run while every `fsync` is watched. At random moments a disk is made up that holds of every
file what it held when it was last synced, or nothing, and of every folder the names that it had
then; each of both may have got further by itself. The newest checkpoint whose save had ended by
then, or a newer one, has to be restored from that disk, with the very numbers that were saved.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from axon_dist.checkpoint import CheckpointManager, Retention
from axon_dist.core.errors import CheckpointError

SAVES = 6


class Disk:
    """The contents of a folder after a power cut.

    Args:
        root: the folder, whose own name is taken to be safe.
        chance: which of what was not synced has got there all the same.
    """

    def __init__(self, root: Path, chance: random.Random):
        self.root, self.chance = root, chance
        self.contents: dict[int, bytes] = {}
        self.names: dict[int, dict[str, int]] = {}
        self.kinds: dict[int, bool] = {}
        # Open files keep the numbers of removed ones from being given away again.
        self.held: list[int] = []

    def sync(self, descriptor: int) -> None:
        """Notes what is safe once an `fsync` has returned."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path != self.root and self.root not in path.parents:
            return
        number = os.fstat(descriptor).st_ino
        self.held.append(os.dup(descriptor))
        if path.is_dir():
            self.names[number] = self._listing(path)
        else:
            # By its descriptor: its name may be gone.
            self.contents[number] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def cut(self, to: Path) -> None:
        """Makes the folder as it may be found afterwards."""
        to.mkdir()
        self._fill(to, self.root.stat().st_ino, self.root)

    def _listing(self, folder: Path) -> dict[str, int]:
        found = {}
        for path in folder.iterdir():
            number = _number(path)
            # TensorStore's threads remove their lock files meanwhile.
            if number is not None:
                self.kinds[number] = path.is_dir()
                found[path.name] = number
        return found

    def _fill(self, to: Path, number: int, now: Path | None) -> None:
        names = self.names.get(number, {})
        if now is not None and self.chance.random() < 0.5:
            names = self._listing(now)
        for name, inner in names.items():
            path = None if now is None else now / name
            there = path if path is not None and _number(path) == inner else None
            if self.kinds[inner]:
                (to / name).mkdir()
                self._fill(to / name, inner, there)
                continue
            safe = self.contents.get(inner, b"")
            contents = safe
            if there is not None and self.chance.random() < 0.3:
                with contextlib.suppress(FileNotFoundError):
                    contents = there.read_bytes()
            (to / name).write_bytes(contents)


def _number(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


@contextlib.contextmanager
def watched(disk: Disk, before: Callable[[], None]) -> Iterator[None]:
    """Has a disk see every sync, and calls a function before each, and before each rename."""
    lock, kept = threading.RLock(), (os.fsync, os.rename, os.replace)

    def fsync(descriptor: int) -> None:
        with lock:
            before()
            kept[0](descriptor)
            disk.sync(descriptor)

    def moving(move: Callable[..., None]) -> Callable[..., None]:
        def moved(*args, **kwargs):
            with lock:
                before()
                move(*args, **kwargs)

        return moved

    os.fsync, os.rename, os.replace = fsync, moving(kept[1]), moving(kept[2])
    try:
        yield
    finally:
        os.fsync, os.rename, os.replace = kept
        for descriptor in disk.held:
            os.close(descriptor)


def state_of(step: int) -> dict:
    return {"w": jnp.arange(64.0) + step, "more": {"b": jnp.full((3, 5), float(step))}}


def save_all(folder: Path, kind: str, disk: Disk, before: Callable[[int], None]) -> None:
    """Saves some steps; `before` gets the newest whose save has ended."""
    ended = 0
    folder.mkdir()
    with (
        watched(disk, lambda: before(ended)),
        CheckpointManager(folder, Retention(last=2), type=kind, background=False) as manager,
    ):
        for step in range(1, SAVES + 1):
            manager.save(step, state_of(step))
            ended = step


def is_whole(found: Path, ended: int) -> bool:
    """Whether the newest checkpoint whose save had ended, or a newer one, comes back."""
    if not ended:
        return True
    try:
        restored = CheckpointManager(found).restore_newest(state_of(0))
    except CheckpointError:
        return False
    if restored is None:
        return False
    step = int(restored.path.name.removeprefix("step_"))
    expected = state_of(step)
    same = np.array_equal(restored.state["w"], expected["w"])
    return (
        step >= ended
        and same
        and np.array_equal(restored.state["more"]["b"], expected["more"]["b"])
    )


def measure_power_cuts(
    folder: Path, cuts: int, chance: random.Random
) -> list[tuple[str, int, int]]:
    """Rows of fault, how often, and how often it did no harm."""
    rows = []
    for kind in ("sharded", "full"):
        count = 0

        def tick(ended: int) -> None:
            nonlocal count
            count += 1

        first = folder / f"counted-{kind}"
        save_all(first, kind, Disk(first, chance), tick)
        moments = sorted(chance.sample(range(1, count), min(cuts, count - 1)))
        source = folder / f"cut-{kind}"
        disk, seen, good = Disk(source, chance), 0, []

        def look(ended: int, disk=disk, moments=moments, good=good, kind=kind) -> None:
            nonlocal seen
            seen += 1
            if seen in moments:
                good.append((folder / f"left-{kind}-{seen}", ended))
                disk.cut(good[-1][0])

        save_all(source, kind, disk, look)
        survived = sum(is_whole(found, ended) for found, ended in good)
        rows.append((f"power cut, {kind}", len(good), survived))
        for found, _ in good:
            shutil.rmtree(found)
    return rows
