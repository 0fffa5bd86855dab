"""`CheckpointManager`: writes a run's checkpoints in the background and deletes outdated ones."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.checks import COUNT, NUMBER, SIZE, ArgumentKind, is_whole
from ..core.errors import (
    CheckpointError,
    DamagedCheckpointError,
    StoreError,
    UnsupportedError,
    reworded,
)
from ..core.files import Address, Place, as_place, kind_at, sync_entries
from ..core.own_context import in_own_context
from ..core.typing import PyTree
from . import object_store
from .layout import (
    MARKER,
    OLD,
    SLOTS,
    UNFINISHED,
    Manifest,
    StateDictType,
    described,
    on_main,
    step_name,
    step_of,
    stored_target,
)
from .save import PendingSave, check_seen, check_type, load_checkpoint
from .seal import check_replaceable, foreign_in, is_checkpoint, put_back, read_manifest, remove
from .stores import check_dtypes


@dataclasses.dataclass(frozen=True)
class Entry:
    """A finished checkpoint in a folder.

    Args:
        step: how many steps its state had taken.
        serial: how many were written before it. After a run went back, steps are out of order.
        score: lower is better; None without one that is comparable with the others.
        lineage: the first and the last serial number of each series of checkpoints whose steps it
            continues, itself included. None where the manifest has none; see `ranked`.
    """

    step: int
    serial: int
    score: float | None = None
    lineage: tuple[tuple[int, int], ...] | None = None


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """The scored checkpoints whose steps the newest one continues, best first.

    Ties go to the newer. A checkpoint without a lineage continues those before it that have fewer
    steps: a run that repeats a step has gone back.

    Example:
        >>> entries = [Entry(2, 0, 0.5), Entry(6, 1, 0.1), Entry(4, 2, 0.9)]
        >>> [entry.step for entry in ranked(entries)]
        [2, 4]
    """
    counts = _continued(entries)
    scored = [x for x in counts if x.score is not None and not math.isnan(x.score)]
    return sorted(scored, key=lambda entry: (entry.score, -entry.serial))


def _continued(entries: Sequence[Entry]) -> list[Entry]:
    """The checkpoints whose steps the newest one continues, itself included, oldest first."""
    by_age = sorted(entries, key=lambda entry: entry.serial)
    line: list[Entry] = []
    for place, entry in enumerate(by_age):
        if entry.lineage is None:
            line = [other for other in line if other.step < entry.step]
        else:
            line = [other for other in by_age[:place] if _has(entry.lineage, other.serial)]
        line.append(entry)
    return line


def _has(lineage: Sequence[Sequence[int]], serial: int) -> bool:
    return any(first <= serial <= last for first, last in lineage)


def lineage_of(continued: Sequence[Entry], entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """The first and the last serial number of each series of some of the entries of a folder.

    Serial numbers without an entry belong to the series around them, so a run that never went back
    has one series from 0, whatever was deleted.

    Example:
        >>> entries = [Entry(6, 3), Entry(8, 4), Entry(9, 6), Entry(7, 7)]
        >>> lineage_of([entries[0], entries[1], entries[3]], entries)
        [(0, 4), (7, 7)]
    """
    series: list[tuple[int, int]] = []
    is_open = True
    for entry in sorted(entries, key=lambda entry: entry.serial):
        if entry not in continued:
            # It ends the series. A serial number without an entry does not.
            is_open = False
            continue
        first = entry.serial
        if is_open:
            first = series.pop()[0] if series else 0
        series.append((first, entry.serial))
        is_open = True
    return series


def next_lineage(
    lineage: Sequence[tuple[int, int]] | None, entries: Sequence[Entry], saved: Entry
) -> list[tuple[int, int]]:
    """The lineage of a checkpoint that is being saved.

    Args:
        lineage: that of the state that its steps follow; None for the newest checkpoint.
        entries: the checkpoints of the folder.
        saved: the checkpoint.

    Example:
        >>> next_lineage([(0, 0)], [Entry(2, 0), Entry(4, 1), Entry(6, 2)], Entry(8, 3))
        [(0, 0), (3, 3)]
    """
    continued = _continued(entries)
    if lineage is not None:
        continued = [entry for entry in entries if _has(lineage, entry.serial)]
    # A run that repeats a step has gone back, even if nothing told so.
    continued = [entry for entry in continued if entry.step < saved.step]
    return lineage_of([*continued, saved], [*entries, saved])


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one is complete.

    Args:
        last: the number of newest checkpoints to keep, at least 1.
        best: the number of lowest-scored checkpoints to keep, of those whose steps the newest one
            continues.
        every: also keep checkpoints whose step is a multiple of this; 0 disables.

    Raises:
        ConfigError: for a count out of range.

    Example:
        >>> entries = [Entry(step, serial=step) for step in (10, 20, 30, 40)]
        >>> [entry.step for entry in Retention(last=1, every=20).outdated(entries)]
        [10, 30]
    """

    last: int = 3
    best: int = 0
    every: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless at least one checkpoint stays."""
        for name, kind in (("last", COUNT), ("best", SIZE), ("every", SIZE)):
            kind.check("Retention", name, getattr(self, name))

    def outdated(self, entries: Sequence[Entry]) -> list[Entry]:
        """The checkpoints to delete, oldest first."""
        by_age = sorted(entries, key=lambda entry: entry.serial)
        retained = {*by_age[-self.last :], *ranked(entries)[: self.best]}
        if self.every:
            retained |= {entry for entry in by_age if entry.step % self.every == 0}
        return [entry for entry in by_age if entry not in retained]


_BEGIN = "CheckpointManager.begin_at"
_RETENTION = ArgumentKind(
    "a Retention, such as Retention(last=3)", lambda x: isinstance(x, Retention)
).or_none()


@dataclasses.dataclass(frozen=True)
class Restored:
    """The checkpoint from which a run continues.

    Args:
        path: the path of the checkpoint.
        state: its state.
        manifest: its metadata.
    """

    path: Place
    state: PyTree
    manifest: Manifest

    @property
    def step(self) -> int | None:
        """The step in the checkpoint's name, or None."""
        return step_of(self.path.name)


class CheckpointManager:
    """Manages the checkpoints of a run in one folder; every process makes a manager.

    A failed save does not end the run: it is reported, and existing checkpoints stay. After loading
    a checkpoint by its path, call `begin_at`; `restore_newest` and `restore_own` call it.

    Args:
        folder: created when needed; may be at `gs://` or `s3://`.
        retention: which checkpoints stay.
        type: how values are written.
        background: write while the run continues; a save then waits for the previous one.
        tell: called with a message when a save, restore or cleanup fails.
        has_scored: whether the score of a checkpoint with this `meta` is comparable with the
            others; a score that is not counts as none.
        load: restores a state like a target from the path of a checkpoint.

    Attributes:
        failure: the message of the last save that failed; None after one that succeeded.
        lineage: the `Entry.lineage` of the state that the next steps follow; None before the first
            save or `begin_at`. They then follow the newest checkpoint.

    Raises:
        ConfigError: for an unknown type, or one that the folder does not support.

    Example:
        >>> import jax.numpy as jnp, tempfile
        >>> with CheckpointManager(tempfile.mkdtemp(), Retention(last=2)) as manager:
        ...     for step in (1, 2, 3):
        ...         manager.save(step, {"w": jnp.full(2, step)})
        >>> [entry.step for entry in manager.entries()]
        [2, 3]
        >>> manager.restore_newest({"w": jnp.zeros(2, int)}).state["w"].tolist()
        [3, 3]
    """

    def __init__(
        self,
        folder: str | Place,
        retention: Retention | None = None,
        *,
        type: StateDictType | str = StateDictType.SHARDED,
        background: bool = True,
        tell: Callable[[str], None] = lambda text: None,
        has_scored: Callable[[Mapping[str, Any]], bool] = lambda meta: True,
        load: Callable[[Place, PyTree], PyTree] = load_checkpoint,
    ):
        self.folder: Place = as_place(folder, "the folder of checkpoints")
        _RETENTION.check("CheckpointManager", "retention", retention)
        self.retention: Retention = retention or Retention()
        self.type: StateDictType = StateDictType(type)
        check_type(self.folder, self.type)
        self.background: bool = background
        self.tell: Callable[[str], None] = tell
        self.has_scored: Callable[[Mapping[str, Any]], bool] = has_scored
        self.load: Callable[[Place, PyTree], PyTree] = load
        self.failure: str | None = None
        self._pending: PendingSave | None = None
        # The serial number of each step that was saved, successfully or not.
        self._saved: dict[int, int] = {}
        self.lineage: list[tuple[int, int]] | None = None

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.wait()
            return
        # The other processes may be gone, so this one waits only for its own part.
        failed = None if self._pending is None else self._pending.join()
        if failed is not None:
            self.tell(f"{failed}: this checkpoint is not complete")

    def check(self, target: PyTree) -> None:
        """Checks that the checkpoints can store a state, before there is one to save.

        Args:
            target: a tree like the state, of `ShapeDtypeStruct`s with shardings or of arrays.

        Raises:
            CheckpointError: if two leaves have one path, or one has no sharding.
            UnsupportedError: for a dtype that this type of checkpoint does not support.
        """
        leaves = described(target)
        check_dtypes(self.type, {path: stored_target(leaf) for path, leaf in leaves.items()})

    @in_own_context
    def save(
        self,
        step: int,
        state: PyTree,
        *,
        meta: Mapping[str, Any] | None = None,
        score: float | None = None,
    ) -> None:
        """Starts to save the state of a step; its arrays may be donated when this returns.

        Args:
            step: how many steps the state has taken.
            state: a pytree of arrays.
            meta: user data that JSON can represent. The key `"axon_dist.lineage"` is reserved.
            score: for `Retention.best`, lower is better.

        Raises:
            ConfigError: if the step is negative or not an integer, or at the first save if another
                process does not see the folder; other failures are reported.
            LaunchError: if a process does not come to the first save within 300 s; the others would
                wait for it without end.
        """
        path = self.folder / step_name(step)
        NUMBER.or_none().check("CheckpointManager.save", "score", score)
        self.wait()
        if not self._saved:
            check_seen(self.folder, self.type, "the folder of checkpoints")
        try:
            serial, lineage = on_main(lambda: self._prepare(int(step)))
            self._saved[int(step)] = serial
            self.lineage = [(first, last) for first, last in lineage]
            self._pending = PendingSave(
                path,
                state,
                self.type,
                self._with_lineage(meta or {}, serial),
                score=score,
                serial=serial,
                then=self._remove_outdated,
            )
        except (CheckpointError, StoreError, UnsupportedError) as error:
            self._fail(error)
            return
        if not self.background:
            self.wait()

    def begin_at(self, checkpoint: str | Place | None) -> None:
        """Tells that the next steps follow this checkpoint; every process calls this.

        Checkpoints of the folder that it does not follow are of steps that were given up. They stay
        as long as `Retention` keeps them, but none of them is the best.

        Args:
            checkpoint: the path of the checkpoint, here or elsewhere; None for a new state.

        Raises:
            CheckpointError: if the path is in the folder, which has no readable checkpoint there.
            ConfigError: if it is not a path.
        """
        # Every process reads the path: an argument that is none must not fail on process 0 alone.
        place = None if checkpoint is None else as_place(checkpoint, _BEGIN)
        self.lineage = [(first, last) for first, last in on_main(lambda: self._lineage_at(place))]

    def _lineage_at(self, checkpoint: Place | None) -> list[tuple[int, int]]:
        if checkpoint is None or not self._is_here(checkpoint):
            return []
        entries = self.entries()
        step = step_of(checkpoint.name)
        serial = max((entry.serial for entry in entries if entry.step == step), default=None)
        if serial is None:
            steps = ", ".join(str(entry.step) for entry in entries) or "none"
            raise CheckpointError(
                f"{_BEGIN}: there is no readable checkpoint {checkpoint.name!r} in "
                f"{str(self.folder)!r}, which has checkpoints of the steps {steps}; give the "
                "path of one of these or of one elsewhere, or None for a new state"
            )
        before = [entry for entry in entries if entry.serial <= serial]
        return lineage_of(_continued(before), before)

    def _is_here(self, checkpoint: Place) -> bool:
        return (self.folder / checkpoint.name).resolve() == checkpoint.resolve()

    def _with_lineage(self, meta: Mapping[str, Any], serial: int) -> Mapping[str, Any]:
        if not isinstance(meta, Mapping):
            # The save refuses it, on all processes together.
            return meta
        # A user may save the `meta` of another checkpoint again, with its lineage.
        own = {key: value for key, value in meta.items() if key != LINEAGE}
        # Without it the same is read, so most manifests have none.
        if not self.lineage or self.lineage == [(0, serial)]:
            return own
        return {**own, LINEAGE: self.lineage}

    def newest_continued(self) -> int | None:
        """The step of the newest finished checkpoint that the next steps follow, or None."""
        return max(((x.serial, x.step) for x in self._continued()), default=(0, None))[1]

    def _continued(self) -> list[Entry]:
        entries = self.entries()
        lineage = self.lineage
        if lineage is None:
            return _continued(entries)
        return [entry for entry in entries if _has(lineage, entry.serial)]

    def wait(self) -> None:
        """Waits until nothing is being written."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.wait()
            self.failure = None
        except CheckpointError as error:
            self._fail(error)

    def entries(self) -> list[Entry]:
        """The finished checkpoints with a readable manifest, oldest first."""
        entries = []
        for path in self._paths():
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(path)
                score = manifest.score if self.has_scored(manifest.meta) else None
                step, lineage = step_of(path.name) or 0, lineage_in(manifest.meta)
                entries.append(Entry(step, manifest.serial, score, lineage))
        return sorted(entries, key=lambda entry: entry.serial)

    def newest_step(self) -> int:
        """The step of the newest finished checkpoint, or -1."""
        return max((entry.step for entry in self.entries()[-1:]), default=-1)

    def passed_over(self) -> list[str]:
        """One message for each unreadable checkpoint newer than the newest readable one."""
        damages = []
        for path in self._newest_first():
            try:
                read_manifest(path)
                break
            except CheckpointError as error:
                damages.append(str(error))
        return damages

    @in_own_context
    def restore_newest(self, target: PyTree) -> Restored | None:
        """Restores the newest good checkpoint, and reports every newer one that is damaged.

        The next steps follow the one restored; see `begin_at`.

        Args:
            target: see `load_checkpoint`.

        Returns:
            The checkpoint and its state, or None in a folder without checkpoints.

        Raises:
            CheckpointError: if there are checkpoints and all are damaged, or one belongs to
                another model.
        """
        names = on_main(lambda: [path.name for path in self._newest_first()])
        paths = [self.folder / name for name in names]
        restored = self._first_good(
            paths,
            target,
            f"all {len(paths)} checkpoints in {str(self.folder)!r} are damaged; remove the folder "
            "to start from scratch",
        )
        if restored is not None:
            self.begin_at(restored.path)
        return restored

    @in_own_context
    def restore_own(self, target: PyTree, start: str | Place | None = None) -> Restored | None:
        """Restores the newest good checkpoint that this manager saved, or else that of the start.

        The folder may have others, of steps that were given up when a run went on from an older
        checkpoint. The next steps follow the one restored; see `begin_at`.

        Args:
            target: see `load_checkpoint`.
            start: the checkpoint that the run began from, here or elsewhere; None without one.

        Returns:
            The checkpoint and its state, or None if there is none.

        Raises:
            CheckpointError: if all of them are damaged, or one belongs to another model.
            ConfigError: if the start is not a path.
        """
        place = None if start is None else as_place(start, "CheckpointManager.restore_own")
        names, has_start = on_main(
            lambda: [self._own_names(), place is not None and is_checkpoint(place)]
        )
        paths: list[Place] = [self.folder / name for name in names]
        if place is not None and has_start:
            paths.append(place)
        restored = self._first_good(
            paths,
            target,
            f"{', '.join(map(str, paths))}: damaged, and this run may go back to no other "
            "checkpoint; resume from an older one by its path",
        )
        if restored is not None:
            self.begin_at(restored.path)
        return restored

    def own_steps(self) -> list[int]:
        """The steps of the finished checkpoints that this manager saved, oldest first."""
        return [
            entry.step for entry in self.entries() if self._saved.get(entry.step) == entry.serial
        ]

    def _own_names(self) -> list[str]:
        """The names of the checkpoints that this manager saved, newest first."""
        serials = {entry.step: entry.serial for entry in self.entries()}
        # A failed save leaves an older checkpoint of its step, which has another serial number.
        steps = {
            step for step, serial in self._saved.items() if serials.get(step, serial) == serial
        }
        return [path.name for path in self._newest_first() if step_of(path.name) in steps]

    def _first_good(
        self, paths: Sequence[Place], target: PyTree, all_damaged: str
    ) -> Restored | None:
        """Restores the first checkpoint that is not damaged; None without checkpoints.

        Raises `CheckpointError` with the text `all_damaged` if there are only damaged ones.
        """
        for path in paths:
            try:
                state = self.load(path, target)
            except DamagedCheckpointError as error:
                self.tell(f"{error}: going back to the previous one")
                continue
            return Restored(path, state, read_manifest(path))
        if paths:
            raise CheckpointError(all_damaged)
        return None

    def _prepare(self, step: int) -> tuple[int, list[tuple[int, int]]]:
        """Removes unfinished checkpoints of killed runs.

        Returns:
            The serial number of the next checkpoint, and its lineage.
        """
        if isinstance(self.folder, Address):
            self._tidy_bucket(self.folder)
        else:
            for leftover in self.folder.glob(f"step_*{UNFINISHED}"):
                with contextlib.suppress(OSError):
                    put_back(self.folder / _name_without(leftover))
                    # Sync first: the leftover may be all that the disk has of this checkpoint.
                    sync_entries(self.folder)
                    if foreign_in(leftover, may_be_partial=True) is None:
                        shutil.rmtree(leftover)
        entries = self.entries()
        serial = 1 + max((entry.serial for entry in entries), default=-1)
        return serial, next_lineage(self.lineage, entries, Entry(step, serial))

    def _tidy_bucket(self, folder: Address) -> None:
        """Removes leftovers of killed saves in a bucket, also inside finished checkpoints."""
        parts: dict[str, set[str]] = {}
        for name in folder.names():
            step, _, inside = name.partition("/")
            if step_of(step) is not None:
                parts.setdefault(step, set()).add(inside.split("/")[0])
        for step, found in parts.items():
            if MARKER not in found:
                check_replaceable(folder / step)
                remove(folder / step)
            elif all(not found.isdisjoint(slot) for slot in SLOTS):
                object_store.tidy(folder / step)

    def _remove_outdated(self) -> None:
        try:
            outdated = self.retention.outdated(self.entries())
        except (CheckpointError, StoreError) as error:
            self.tell(f"could not list old checkpoints: {error}")
            return
        for entry in outdated:
            path = self.folder / step_name(entry.step)
            try:
                remove(path)
            except (OSError, StoreError) as error:
                reason = getattr(error, "strerror", error)
                self.tell(f"could not remove the old checkpoint {str(path)!r}: {reason}")

    def _fail(self, error: CheckpointError | StoreError | UnsupportedError) -> None:
        self.failure = str(error)
        self.tell(str(error))

    def _paths(self) -> list[Place]:
        if isinstance(self.folder, Address):
            # Without a marker it is a leftover of a killed save, like `.tmp` on a disk.
            marked = [n.removesuffix(f"/{MARKER}") for n in self.folder.names() if "/" in n]
            return [self.folder / name for name in marked if step_of(name) is not None]
        if kind_at(self.folder) != "a folder":
            return []
        what = f"cannot list the folder {str(self.folder)!r}"
        with reworded(what, "allow this program to read it, or name another", CheckpointError):
            names = {_name_without(path) for path in self.folder.iterdir()}
        named = [self.folder / name for name in sorted(names) if step_of(name) is not None]
        # A checkpoint that was being replaced may exist only under its temporary name.
        return [path for path in named if os.path.lexists(path) or is_checkpoint(path)]

    def _newest_first(self) -> list[Place]:
        """All checkpoints; those without a readable manifest are placed by the step in the name."""
        entries = {entry.step: float(entry.serial) for entry in self.entries()}

        def age(path: Place) -> float:
            step = step_of(path.name) or 0
            before = [serial for other, serial in entries.items() if other < step]
            return entries.get(step, max(before, default=-1.0) + 0.5)

        # Serials can be equal if a manifest could not be read while the next one was saved.
        return sorted(self._paths(), key=lambda x: (age(x), step_of(x.name) or 0), reverse=True)


LINEAGE = "axon_dist.lineage"
"""The key, in the `meta` of a state, of `Entry.lineage`; other keys are of the user.

It is not a field of `Manifest`, because older versions refuse a manifest with one more.
"""


def lineage_in(meta: Mapping[str, Any]) -> tuple[tuple[int, int], ...] | None:
    """The `Entry.lineage` in the `meta` of a state; None if it tells none."""
    pairs = meta.get(LINEAGE)
    if not isinstance(pairs, (list, tuple)):
        return None
    for pair in pairs:
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(is_whole, pair))):
            return None
    return tuple((first, last) for first, last in pairs)


def _name_without(path: Path) -> str:
    """The checkpoint's name in the name of a finished, unfinished or replaced folder."""
    return path.name.removesuffix(UNFINISHED).removesuffix(OLD)
