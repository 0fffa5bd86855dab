"""Finds the state that a run starts from, and manages the cache of compiled programs.

A run starts from a new state, from a checkpoint, or from a copy in host memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import platform
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from axon_dist.checkpoint import (
    CheckpointManager,
    HostCopies,
    HostCopy,
    Restored,
    is_checkpoint,
    on_main,
    read_manifest,
    step_name,
    step_of,
)
from axon_dist.checkpoint.layout import installed_versions, mesh_shape
from axon_dist.checkpoint.manager import LINEAGE, lineage_in
from axon_dist.checkpoint.save import check_seen
from axon_dist.core.checks import is_whole
from axon_dist.core.compat import keep_executables
from axon_dist.core.errors import (
    AxonDistError,
    CheckpointError,
    ConfigError,
    DamagedCheckpointError,
    StoreError,
)
from axon_dist.core.files import (
    Address,
    Place,
    as_path,
    as_place,
    open_regular,
    remove_abandoned,
    replacing,
)
from axon_dist.core.heaps import trim_heaps
from axon_dist.core.typing import PyTree
from axon_dist.launch import MEMORY
from axon_dist.launch.settings import compare_settings, read_settings
from axon_dist.step import PortableForm, TrainState

from ..config import RunConfig
from .directory import AUTO, RunDirectory, changed_keys, flat
from .refit import load_state
from .runs import Run

MOST_BYTES = 4 * 2**30
"""The disk space for compiled programs, in bytes; the least recently used are removed first."""

_DIGEST, _NAME = 32, "-program"
_CPU = ("model name", "flags", "Features", "CPU part")


@dataclasses.dataclass
class SavedStates:
    """The states that a run saves and resumes from: checkpoints, and copies in host memory.

    Args:
        run: the run, with its loader.
        form: the portable form in which states are saved.
        checkpoints: the checkpoints on the disk.
        copies: the copies in host memory; None without `checkpoint.memory_every`.
        directory: the run's folder; its files are copied to a bucket before each checkpoint.
        start: the checkpoint that the run resumed from; `find_start` sets it. None for a new run.
        counts: the numbers of steps without an update, and the sums of the metrics since the last
            record, which are saved with each state; `find_start` sets them to those of the state
            that the run resumes from, and `go_back` to those of the state that it returns. See
            `Trainer.counts`.
    """

    run: Run
    form: PortableForm
    checkpoints: CheckpointManager
    copies: HostCopies | None
    directory: RunDirectory
    start: Place | None = None
    counts: dict[str, float] = dataclasses.field(default_factory=dict)

    def save(self, state: TrainState, number: int, loss: float | None) -> None:
        """Saves a state, with the config and the position in the data.

        Args:
            state: the state; its arrays may be donated when this returns.
            number: the number of steps taken.
            loss: the score by `train.best`, if it was measured.
        """
        run = self.run
        if isinstance(self.checkpoints.folder, Address) or self.directory.address is not None:
            on_main(self._copy_records)
        meta = {"step": number, "config": run.config.to_dict(), "data": run.loader.state()}
        meta["counts"] = dict(self.counts)
        meta["settings"] = read_settings(os.environ, jax.config.values)
        # Threads of earlier saves have ended and left their heaps fragmented.
        trim_heaps()
        self.checkpoints.save(number, self.form.to_canonical(state), meta=meta, score=loss)

    def take_counts(self, counts: Mapping[str, float]) -> None:
        """Replaces the counts; the sums of metrics that the run no longer has must not stay."""
        self.counts.clear()
        self.counts.update(counts)

    def _copy_records(self) -> None:
        try:
            self.directory.copy()
        except StoreError as error:
            self.checkpoints.tell(f"the records of the run are not copied to the bucket: {error}")

    def copy(self, state: TrainState, number: int) -> None:
        """Copies a state and the position in the data to host memory.

        The state's arrays may be donated when this returns.
        """
        assert self.copies is not None
        meta = {
            "data": self.run.loader.state(),
            "counts": dict(self.counts),
            LINEAGE: self.checkpoints.lineage,
            "start": None if self.start is None else str(self.start),
        }
        self.copies.save(number, self.form.to_canonical(state), meta)

    def go_back(self) -> TrainState | None:
        """Loads the newest good checkpoint that this `train` saved, or that of its start.

        Drops the copies in memory, because they may contain the steps to undo. Sets `counts` to
        those of the checkpoint. Returns None if there is no such checkpoint.
        """
        self.checkpoints.wait()
        if self.copies is not None:
            self.copies.forget()
        restored = self.checkpoints.restore_own(self.form.target, self.start)
        if restored is None:
            return None
        self.take_counts(_counts_in(restored.manifest.meta))
        return self.form.from_canonical(restored.state)

    def is_saved(self, number: int) -> bool:
        """Whether a checkpoint that this `train` saved or began from has the state after `number`.

        A copy in memory is none: it is lost with the launcher.
        """
        self.checkpoints.wait()

        def finds() -> bool:
            # Where it cannot be read, it is saved again.
            with contextlib.suppress(CheckpointError, StoreError):
                if number in self.checkpoints.own_steps():
                    return True
                return self.start is not None and number == _step_in(self.start)
            return False

        return on_main(finds)

    def find_start(self, resume: str | None, tell: Callable[[str], None]) -> TrainState | None:
        """Restores the state that a run resumes from, and moves its loader to the same step.

        Prefers a copy in memory if it is at least as new as the newest checkpoint.

        Args:
            resume: None for a new run; `"auto"` for the newest good checkpoint of the run, if
                there is one; or the path of a checkpoint, of a folder of checkpoints, or of a run.
            tell: called with messages for the user.

        Returns:
            The state, or None for a new run.

        Raises:
            CheckpointError: when there is no good checkpoint at the path, the checkpoint belongs to
                another model, all checkpoints of the run are damaged, or there is none and the copy
                in memory does not fit.
            ConfigError: when the checkpoint belongs to other data, or a new run would mix its
                checkpoints with those of another run.
        """
        checkpoints = self.checkpoints
        form = self.form
        if resume is None:
            if checkpoints.entries():
                raise ConfigError(
                    f"checkpoint.dir: {str(checkpoints.folder)!r} has the checkpoints of another "
                    "run; name another folder, or continue from them with --resume auto",
                    code="holds-checkpoints",
                )
            return None
        copy = self._newest_copy(resume, tell)
        if copy is not None and copy.step >= on_main(checkpoints.newest_step):
            self.run.loader.restore(copy.meta["data"])
            self.counts.update(_counts_in(copy.meta))
            tell(f"resuming after step {copy.step} from the copies in memory")
            self._follow(copy)
            return form.from_canonical(copy.state)
        if resume == AUTO:
            restored = checkpoints.restore_newest(form.target)
            if restored is None:
                tell(f"no checkpoint in {str(checkpoints.folder)!r}: beginning at step 0")
                return None
        else:
            path = as_place(resume, "--resume")
            restored = _restore_path(path, form.target, tell, checkpoints.load)
            checkpoints.begin_at(restored.path)
        if "data" not in restored.manifest.meta:
            raise CheckpointError(
                f"checkpoint {str(restored.path)!r} has no position in the data; name a "
                "checkpoint that axon train wrote",
                code="no-data-position",
            )
        self.run.loader.restore(restored.manifest.meta["data"])
        self.counts.update(_counts_in(restored.manifest.meta))
        self.start = restored.path
        state = form.from_canonical(restored.state)
        tell(f"resuming after step {int(state.step)} from {str(restored.path)!r}")
        for line in changes_since(restored.manifest.meta.get("config"), self.run.config, state):
            tell(f"config: {line}")
        for line in changes_around(restored):
            tell(f"changed since it was saved: {line}")
        return state

    def _follow(self, copy: HostCopy) -> None:
        """Finds the checkpoint that a copy followed; the copy is lost when a step is undone."""
        checkpoints = self.checkpoints
        if copy.step == on_main(checkpoints.newest_step):
            # A run that is told to stop copies its last state, then saves it. The copy cannot tell
            # of that checkpoint, which has the same state.
            checkpoints.begin_at(checkpoints.folder / step_name(copy.step))
        else:
            lineage = lineage_in(copy.meta)
            checkpoints.lineage = None if lineage is None else list(lineage)
        newest = on_main(checkpoints.newest_continued)
        start = copy.meta.get("start")
        if newest is not None:
            self.start = checkpoints.folder / step_name(newest)
        else:
            self.start = as_place(start, "the start of the run") if start else None

    def _newest_copy(self, resume: str | None, tell: Callable[[str], None]) -> HostCopy | None:
        """Returns the newest copy that is not damaged and fits, or None.

        Raises `CheckpointError` if it does not fit and the run has no checkpoint.
        """
        try:
            return None if self.copies is None else self.copies.newest(self.form.target)
        except DamagedCheckpointError as error:
            tell(str(error))
        except CheckpointError as error:
            # Without a checkpoint the run would begin at step 0, and replace the copy.
            if resume == AUTO and on_main(self.checkpoints.newest_step) < 0:
                raise
            # A changed config may give the state more or fewer parts. Only checkpoints are fitted,
            # and one that belongs to another model is refused there.
            tell(f"{error}, or let this run begin at a checkpoint, as it does now")
        return None


def _counts_in(meta: Mapping[str, Any]) -> dict[str, float]:
    """Returns the counts that a state was saved with; old checkpoints have none, or no sums."""
    counts = meta.get("counts")
    counts = counts if isinstance(counts, dict) else {}
    return {name: x for name, x in counts.items() if is_whole(x) or isinstance(x, float)}


def _step_in(checkpoint: Place) -> object:
    """Returns the number of steps that the state in a checkpoint of a run has taken."""
    return read_manifest(checkpoint).meta.get("step")


def open_states(
    run: Run, directory: RunDirectory, env: Mapping[str, str], tell: Callable[[str], None]
) -> SavedStates:
    """Opens the saved states of a run.

    Args:
        run: the run.
        directory: its folder.
        env: the environment, in which the launcher names a folder in memory that outlives a
            process.
        tell: called with a message when something fails.

    Raises:
        ConfigError: when the state is split over hosts that cannot keep copies for each other, or
            a process does not see the folder of the checkpoints.
        UnsupportedError: for a dtype that this type of checkpoint does not support.
    """
    options = run.config.checkpoint
    folder = directory.checkpoints
    # The folder of the run may be on one host if the checkpoints are elsewhere: the other processes
    # only write their traces there.
    key, seen = "run_dir", directory.place
    if options.dir is not None:
        folder = as_place(options.dir, "checkpoint.dir")
        key, seen = "checkpoint.dir", folder
    check_seen(seen, options.type, key)
    checkpoints = CheckpointManager(
        folder,
        options.retention,
        type=options.type,
        background=options.background,
        tell=tell,
        # A run may be resumed with another metric, whose scores are not comparable.
        has_scored=run.config.train.best.has_scored,
        load=functools.partial(
            load_state,
            scaler=run.step.options.scaler,
            changed=lambda manifest: changed_lines(manifest.meta.get("config"), run.config),
            tell=tell,
        ),
    )
    copies = HostCopies(Path(env[MEMORY]), tell) if options.memory_every else None
    form = PortableForm(run.step)
    checkpoints.check(form.target)
    if copies is not None:
        copies.check(form.target)
    return SavedStates(run, form, checkpoints, copies, directory)


_WITHOUT_EFFECT = (
    *("name", "run_dir", "loggers", "checkpoint", "data.num_ahead", "data.num_workers"),
    *("train.log_every", "train.eval_every", "train.eval_batches", "train.profile", "validation"),
    *("train.peak_flops", "train.norms_by_layer", "train.best"),
    *("unroll", "scan_layers", "axis_names"),
    # The name of `train.norms_by_layer` in the checkpoints of 0.2 and before.
    "train.layer_norms",
)
"""Keys and sections of a config that do not change the numbers of a step.

Some change how a program is compiled, and so may change the rounding. `train.best` may still change
how many steps a run takes.
"""


def changed_lines(saved: object, config: RunConfig) -> list[str]:
    """Lists the keys that affect the trained numbers and have changed; see `changes_since`."""
    if not isinstance(saved, dict):
        return []
    lines = changed_keys(flat(saved), flat(config.to_dict()))
    without_effect = tuple(key + end for key in _WITHOUT_EFFECT for end in (":", "."))
    return [line for line in lines if not line.startswith(without_effect)]


def changes_since(saved: object, config: RunConfig, state: TrainState) -> list[str]:
    """Lists how a resumed run differs from the run that saved its checkpoint.

    Args:
        saved: the config in the checkpoint, as plain data; anything else is ignored.
        config: the config of the resumed run.
        state: the state that it resumes from.

    Returns:
        A line for each changed key that affects the trained numbers, and a line for the learning
        rate if that of the next step changes.
    """
    lines = changed_lines(saved, config)
    if not lines or not isinstance(saved, dict):
        return []
    # The saved config may be from an older version or name code that is not here.
    with contextlib.suppress(AxonDistError):
        before = RunConfig.from_dict(saved)
        old = before.optimizer.rates(before.train.steps)
        new = config.optimizer.rates(config.train.steps)
        at = int(state.step)
        if old is not None and new is not None and 0 < at <= len(old) and at < len(new):
            rate = f"learning rate: {old[at - 1]:.4g} in step {at}, {new[at]:.4g} in step {at + 1}"
            is_longer = at >= len(old)
            planned = "ended there" if is_longer else f"had {old[at]:.4g} in step {at + 1}"
            if is_longer or not math.isclose(old[at], new[at], rel_tol=1e-6):
                lines.append(f"{rate}; the saved config {planned}")
    return lines


def changes_around(restored: Restored) -> list[str]:
    """Lists how the environment has changed since a checkpoint was saved.

    A run resumes in spite of these changes, but they may change the bits of its results.

    Args:
        restored: the checkpoint, with the state as placed in this run.

    Returns:
        A line for each library whose version has changed, for a different mesh, and for each
        changed setting of JAX or XLA. Checkpoints of older versions of this library do not contain
        all of these.
    """
    here = installed_versions()
    manifest = restored.manifest
    lines = [
        f"{name} {version} -> {here.get(name, 'not installed')}"
        for name, version in manifest.versions.items()
        if here.get(name) != version
    ]
    mesh = mesh_shape(jax.tree.leaves(restored.state))
    if dict(manifest.mesh) != mesh:
        lines.append(f"mesh {_shown(manifest.mesh)} -> {_shown(mesh)}")
    before = manifest.meta.get("settings")
    now = read_settings(os.environ, jax.config.values)
    if isinstance(before, dict):
        lines += [
            f"{name} {before.get(name, 'not set')} -> {now.get(name, 'not set')}"
            for name in compare_settings(before, now)
        ]
    return lines


def _shown(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items()) or "of one device"


def _restore_path(
    path: Place,
    target: PyTree,
    tell: Callable[[str], None],
    load: Callable[[Place, PyTree], PyTree],
) -> Restored:
    path = _step_at(path)
    if step_of(path.name) is not None or is_checkpoint(path):
        return Restored(path, load(path, target), read_manifest(path))
    folder = _folder_of(path)
    restored = CheckpointManager(folder, tell=tell, load=load).restore_newest(target)
    if restored is None:
        raise _none_in(folder)
    return restored


def _folder_of(path: Place) -> Place:
    inside = path / "checkpoints"
    exists = inside.names() if isinstance(inside, Address) else inside.is_dir()
    return inside if exists else path


def _none_in(folder: Place) -> CheckpointError:
    return CheckpointError(
        f"there is no checkpoint in {str(folder)!r}; name a checkpoint, or the folder of a run "
        "that saved one"
    )


def _step_at(path: Place) -> Place:
    """Returns the path, or on disk the checkpoint if the path ends in a bare step number.

    Raises:
        CheckpointError: when the folder has no checkpoint of that step; it lists the steps.
    """
    is_number = path.name.isascii() and path.name.isdigit()
    if isinstance(path, Address) or not (is_number or step_of(path.name) is not None):
        return path
    folder = path.parent
    steps = [entry.step for entry in CheckpointManager(folder).entries()]
    if is_number and not steps:
        return path
    number = int(path.name.removeprefix("step_"))
    if steps and number not in steps and not is_checkpoint(path):
        raise CheckpointError(
            f"there is no checkpoint {path.name!r} in {str(folder)!r}, which has checkpoints of "
            f"the steps {', '.join(map(str, steps))}; name one of these, or the folder for the "
            "newest",
            code="no-such-step",
        )
    return folder / step_name(number) if is_number else path


def check_resume(resume: str | None) -> None:
    """Raises if a path to resume from has no checkpoint, before the run's folder is made.

    A path that is named like a checkpoint, in a folder without any, is only found missing when it
    is loaded.

    Raises:
        CheckpointError: when there is none; whether it is intact and fits is checked later.
    """
    if resume is None or resume == AUTO:
        return
    path = _step_at(as_place(resume, "--resume"))
    if step_of(path.name) is not None or is_checkpoint(path):
        return
    folder = _folder_of(path)
    manager = CheckpointManager(folder)
    if not (manager.entries() or manager.passed_over()):
        raise _none_in(folder)


def check_copies(config: RunConfig, env: Mapping[str, str], resume: str | None) -> None:
    """Raises if `checkpoint.memory_every` would make copies that are lost or never used.

    Args:
        config: a run as YAML describes it.
        env: the environment.
        resume: the `resume` argument of the run.

    Raises:
        ConfigError: when copies would be lost or unused.
    """
    steps = config.checkpoint.memory_every
    if not steps:
        return
    folder = env.get(MEMORY)
    if folder is None:
        raise ConfigError(
            f"checkpoint.memory_every: got {steps}, but nothing keeps copies in the memory of this "
            "host; start the run with axon launch --max-restarts 3 -- axon train ... where "
            f"/dev/shm exists, set {MEMORY} to a folder in memory that outlives a process, or "
            "leave checkpoint.memory_every at 0. With axon launch --hosts, make that folder, such "
            "as /dev/shm/run, on every host: its launchers end with each attempt, and keep none",
            code="copies-not-kept",
        )
    if not Path(folder).is_dir():
        raise ConfigError(f"{MEMORY} names {folder!r}, which is not a folder; make it, or unset it")
    if resume != AUTO or config.run_dir is None:
        missing = "--resume auto" if resume != AUTO else "a run_dir"
        raise ConfigError(
            f"checkpoint.memory_every: got {steps}, but a restarted run resumes from its copies "
            f"only with {missing}; add it. If there is nothing to resume from, the run begins at "
            "step 0",
            code="copies-unused",
        )


def keep_programs(tell: Callable[[str], None]) -> None:
    """Keeps compiled programs in this user's cache folder, unless JAX has a cache folder already.

    An executable is code, and the folder of a run may come from another person, so programs are not
    kept in the folder of a run. They are kept in `$XDG_CACHE_HOME/axon_dist` or
    `~/.cache/axon_dist`, in a folder for each kind of host that only this user can write to. JAX
    finds them by a hash of the program, the versions, the devices, the flags and the compiler
    options. Set `JAX_ENABLE_COMPILATION_CACHE=0` to keep no programs, and
    `JAX_COMPILATION_CACHE_DIR` to name another folder.

    Args:
        tell: called with a message if no programs can be kept.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    try:
        home = as_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "XDG_CACHE_HOME")
        store = ProgramStore(home.absolute() / "axon_dist" / _host())
    except (OSError, ConfigError) as error:
        tell(f"compiled programs are not kept: {error}")
        return
    keep_executables(store.path, store.get, store.put)


class ProgramStore:
    """Compiled programs as files, in a folder that only this user may write to.

    Files are written atomically, even if the process is killed; corrupted ones are removed.

    Args:
        folder: the folder; made if it is missing.
        most_bytes: the maximum size of all files together.

    Raises:
        PermissionError: when the folder belongs to another user, or others may write to it.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES):
        # A user who may write to the parent could replace the folder, so check both.
        for one in (folder.parent, folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = one.stat()
            if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o022:
                raise PermissionError(
                    f"{str(one)!r} belongs to user {info.st_uid}, mode "
                    f"{stat.S_IMODE(info.st_mode):o}, and an executable is code; make it writable "
                    f"only by user {os.geteuid()}, or remove it"
                )
        self.path = folder
        self._drop_oldest(most_bytes)

    def get(self, key: str) -> bytes | None:
        """Returns the program of a key, or None."""
        file = self._file(key)
        try:
            with open(open_regular(file), "rb") as opened:
                contents = opened.read()
                with contextlib.suppress(OSError):  # The file system may be read-only.
                    os.utime(opened.fileno())
        except OSError:
            # There is no such file, or it cannot be read; JAX compiles the program.
            return None
        program = contents[_DIGEST:]
        if hashlib.sha256(program).digest() != contents[:_DIGEST]:
            with contextlib.suppress(OSError):
                file.unlink()
            return None
        return program

    def put(self, key: str, value: bytes) -> None:
        """Stores the program of a key."""
        with replacing(self._file(key), 0o600, durable=False) as file:
            file.write(hashlib.sha256(value).digest() + value)

    def _file(self, key: str) -> Path:
        return self.path / (key + _NAME)

    def _drop_oldest(self, most_bytes: int) -> None:
        remove_abandoned(self.path)
        entries = []
        for file in self.path.glob("*" + _NAME):
            with contextlib.suppress(FileNotFoundError):  # another run may do the same
                entries.append((file.stat().st_mtime, file.stat().st_size, file))
        for _, size, file in sorted(entries, reverse=True):
            most_bytes -= size
            if most_bytes < 0:
                file.unlink(missing_ok=True)


def _host() -> str:
    """Returns a name for the kind of this host.

    Hosts may share home folders, and code compiled for one CPU may fail on another. The cache key
    of JAX includes only the kind of the devices.
    """
    known = [platform.machine(), platform.system()]
    if (info := Path("/proc/cpuinfo")).exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        known += sorted({value for name, _, value in lines if name.strip() in _CPU})
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]
