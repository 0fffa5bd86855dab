"""`RunDirectory`: the folder of a run, the names of its files, and the lock of its writer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from flax.traverse_util import flatten_dict

from axon_dist.core.checks import is_whole
from axon_dist.core.errors import ConfigError, StoreError, reworded
from axon_dist.core.files import (
    TEMPORARY,
    Address,
    Place,
    as_place,
    host_memory,
    json_section,
    kind_at,
    open_regular,
    read_bytes,
    remove_abandoned,
    replace_text,
    replacing,
    snapshot,
)
from axon_dist.core.typing import JsonDict
from axon_dist.core.words import AUTO

from ...core.plain_yaml import read_yaml, to_yaml
from ..config import LOGGERS, RunConfig
from .lock import LOCK, Lease, locked

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Descriptor of a file or folder of a run; on a `RunDirectory` it returns the path."""

    name: str

    def __get__(self, directory: RunDirectory, owner: object) -> Path:
        return directory.path / self.name


def changed_keys(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Returns a line for each key that differs between two flat configs, with both values.

    Example:
        >>> changed_keys({"train.steps": 100}, {"train.steps": 200})
        ['train.steps: 100 -> 200']
    """
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names]


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The files that a run writes.

    Args:
        path: the folder of the run. For a run in a bucket, a local folder that process 0 copies to
            the bucket, or that has copies of the bucket's files.
        address: the bucket address, if any. Complete files are copied there whenever the run saves,
            and at its end.
        leases: the leases of the run's folders in buckets; process 0 has them while the run writes.
    """

    path: Path
    address: Address | None = None
    leases: list[Lease] = dataclasses.field(default_factory=list, compare=False)
    _copied: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict, compare=False)

    config = _Entry("config.yaml")
    """The config with every default spelled out."""
    metrics = _Entry("metrics.jsonl")
    """Metrics, one JSON object per line."""
    summary = _Entry("summary.json")
    """The results of the run, as JSON."""
    program = _Entry("program.json")
    """Memory, collectives and FLOPs of the compiled step, as JSON."""
    profile = _Entry("profile")
    """Traces of the steps selected by `train.profile`."""
    waterfall = _Entry("waterfall.json")
    """Where the time of a step goes, measured by `axon profile`, as JSON."""
    trackers = _Entry("trackers.json")
    """The runs of trackers such as W&B that a resumed run continues, as JSON."""
    plot = _Entry("loss.png")
    """The loss curves."""
    memory = _Entry("memory.prof")
    """The contents of device memory when it ran out, for `pprof`."""

    @property
    def place(self) -> Place:
        """The path of the run, or its address if it is in a bucket."""
        return self.path if self.address is None else self.address

    @property
    def checkpoints(self) -> Place:
        """The checkpoint folder, unless the config names another one."""
        return self.place / "checkpoints"

    def fetch(self) -> None:
        """Copies the records of the run from the bucket to this machine."""
        if self.address is None:
            return
        for name in RECORDS:
            contents = (self.address / name).read()
            path = self.path / name
            if contents is not None:
                with (
                    reworded(f"cannot write {str(path)!r}", "free disk space there", StoreError),
                    replacing(path, durable=False) as file,
                ):
                    file.write(contents)
                self._copied[name] = path.stat().st_mtime_ns, path.stat().st_size

    def copy(self) -> None:
        """Writes the files that changed on this machine into the bucket, one by one.

        Raises:
            ConfigError: when another run has taken over the folder.
            StoreError: when the bucket cannot be written.
        """
        for lease in self.leases:
            lease.renew()
        if self.address is None:
            return
        local_files = {
            str(path.relative_to(self.path)): path
            for path in self.path.rglob("*")
            if path.is_file() and not path.is_symlink() and not path.name.endswith(TEMPORARY)
        }
        for name, path in local_files.items():
            with reworded(f"cannot read {str(path)!r}", "check the disk", StoreError):
                stamp = path.stat().st_mtime_ns, path.stat().st_size
                if self._copied.get(name) == stamp:
                    continue
                with open(open_regular(path), "rb") as file:
                    contents = file.read()
            (self.address / name).write(contents)
            self._copied[name] = stamp
        removed = self._copied.keys() - local_files.keys()
        self.address.remove(removed)
        for name in removed:
            del self._copied[name]

    @contextmanager
    def copied_to_bucket(self) -> Iterator[None]:
        """Copies files to the bucket on exit; files that cannot be copied stay on this machine.

        Raises:
            StoreError: when the copy fails, unless the `with` block itself raised an error.
        """
        try:
            yield
        except BaseException:
            with suppress(StoreError, ConfigError):
                self.copy()
                shutil.rmtree(self.path, ignore_errors=True)
            raise
        try:
            self.copy()
        except StoreError as error:
            raise StoreError(
                f"the last records of the run are only in {str(self.path)!r}: {error}; copy them "
                f"to {self.place}",
                code="records-not-copied",
            ) from error
        shutil.rmtree(self.path, ignore_errors=True)

    def check_files(self) -> None:
        """Checks that the run only replaces regular files and follows no links.

        Raises:
            ConfigError: when another kind of file is at such a path, for example a pipe.
        """
        files = (
            self.config,
            self.metrics,
            self.summary,
            self.program,
            self.plot,
            self.memory,
            self.trackers,
        )
        for path in files:
            if (kind := kind_at(path)) not in (None, "a file"):
                raise ConfigError(
                    f"run_dir: {str(path)!r} is {kind}, but the run writes a file there; "
                    "remove it, or name another folder",
                    code="not-a-file",
                )
        for path in (*files, *(self.path / name for name in (*_WRITTEN_INTO, LOCK))):
            if path.is_symlink():
                raise ConfigError(
                    f"run_dir: {str(path)!r} is a link, and the run would overwrite its target; "
                    "remove it, or name another folder. To put checkpoints elsewhere, set "
                    "checkpoint.dir",
                    code="is-a-link",
                )

    def begin_config(self, config: RunConfig) -> None:
        """Writes `config.yaml` of a new run.

        Raises:
            FileExistsError: when the file exists.
            OSError: when it cannot be written; a partial file is removed.
        """
        text = to_yaml(config.to_dict())
        descriptor = open_regular(self.config, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with open(descriptor, "wb") as file:
                file.write(text.encode())
        except OSError:
            # A partial config would make the folder look like that of a run.
            with suppress(OSError):
                self.config.unlink()
            raise

    def write_config(self, config: RunConfig) -> None:
        """Writes `config.yaml` atomically."""
        self._replace(self.config, to_yaml(config.to_dict()))

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Writes `summary.json` atomically."""
        self._replace(self.summary, json.dumps(summary, indent=2) + "\n")

    def write_missing(self, config: RunConfig, summary: Mapping[str, object]) -> None:
        """Writes `config.yaml` and `summary.json` if they are missing after an interrupted run."""
        if kind_at(self.config) is None:
            self.write_config(config)
        if kind_at(self.summary) is None:
            self.write_summary(summary)

    def tracker_runs(self) -> dict[str, str]:
        """Reads the runs of trackers by the tracker and its project; empty if there are none."""
        if kind_at(self.trackers) is None:
            return {}
        runs = json_section(read_bytes(self.trackers, str(self.trackers), links=False)) or {}
        return {key: run for key, run in runs.items() if isinstance(run, str)}

    def write_tracker_run(self, key: str, run: str) -> None:
        """Keeps the run of a tracker for a resumed run."""
        self._replace(self.trackers, json.dumps({**self.tracker_runs(), key: run}) + "\n")

    def write_program(self, program: Mapping[str, object]) -> None:
        """Writes `program.json` atomically."""
        self._replace(self.program, json.dumps(program) + "\n")

    def changes(self, config: RunConfig) -> list[str]:
        """Returns a line for each key in which a config differs from the one stored here.

        Args:
            config: the config that the run continues with.

        Returns:
            Lines such as `train.steps: 100 -> 200`; empty if no config is stored here yet.
        """
        try:
            if kind_at(self.config) is None:
                return []
            before = flat(read_yaml(self.config, links=False))
        except ConfigError as error:
            return [f"{self.config.name} cannot be read ({str(error).splitlines()[0]}): replaced"]
        after = flat(config.to_dict())
        return changed_keys(before, after)

    def take_metrics(self, step: int, tell: Callable[[str], None]) -> PastMetrics:
        """Removes the metrics of steps that will be repeated, and returns those up to a step.

        Args:
            step: the last step whose metrics are kept.
            tell: called with a message about lines that cannot be read; they are removed, too.
        """
        past = PastMetrics(self.metrics, step)
        contents = past.contents()
        lines, broken = past.lines(contents)
        # A killed run leaves a partial last line; that is expected, so it is not reported.
        count = len(contents.splitlines())
        broken = [number for number in broken if number < count]
        if broken:
            tell(
                f"{self.metrics.name}: {len(broken)} of {count} lines cannot be read and are "
                f"dropped; the first is line {broken[0]}"
            )
        kept = b"".join(lines)
        # A hard link is replaced by a file of its own, because a run does not add to one.
        if kept != contents or _is_hard_link(self.metrics):
            try:
                self._replace(self.metrics, kept.decode(errors="replace"))
            except OSError as error:
                tell(
                    f"{self.metrics.name} cannot be written ({error.strerror}), so lines of steps "
                    f"after {step} remain; if a step has two lines, the later one counts"
                )
        return past

    def _replace(self, path: Path, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


_WRITTEN_INTO = (
    "checkpoints",
    "profile",
    *(logger.entry for logger in LOGGERS.values() if logger.entry is not None),
)
"""Files and folders in a run's folder that checkpoints, traces and loggers write to."""


RECORDS = (
    "config.yaml",
    "metrics.jsonl",
    "summary.json",
    "program.json",
    "waterfall.json",
    "trackers.json",
)
"""The files that are read from a run; for a run in a bucket they are copied to this machine."""


def create_directory(config: RunConfig, resume: str | None = None) -> RunDirectory:
    """Makes the folder of a new run and writes its config, or opens the folder of a run to resume.

    The config of a resumed run is not written here, because a failed resume must not change any
    file.

    Args:
        config: a run; its folder is `run_dir`, or `runs/<name>-<time>` by default.
        resume: None for a new run, whose folder must not contain a run yet. `"auto"` resumes in the
            folder of the config, or in the newest folder of that name that has a folder of
            checkpoints. A path
            resumes from this path, in the folder of the config or in a new one.

    Raises:
        ConfigError: when the folder already contains a run, or cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    newest = _newest_run(config) if resume == AUTO else None
    place = as_place(config.run_dir or newest or f"runs/{config.name}-{stamp}", "run_dir")
    if isinstance(place, Address):
        if resume is None and _has_run(place):
            raise _holds_a_run(place)
        directory = RunDirectory(Path(tempfile.mkdtemp(prefix="axon-run-")), place)
        if resume is None:
            directory.write_config(config)
        return directory
    path = place
    directory = RunDirectory(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        directory.check_files()
        if resume is None:
            directory.begin_config(config)
        check_writable(path)
    except FileExistsError as error:
        _check_folder("run_dir", path)
        raise _holds_a_run(path) from error
    except OSError as error:
        raise _cannot_write("run_dir", path, error.strerror) from error
    return directory


def check_directory(config: RunConfig) -> None:
    """Checks that `create_directory` could make the folder of a new run, without making it.

    Raises:
        ConfigError: when the folder already contains a run, or cannot be made.
    """
    folders = {"run_dir": config.run_dir or "runs", "checkpoint.dir": config.checkpoint.dir}
    for key, folder in folders.items():
        if folder is not None:
            path = as_place(folder, key)
            if isinstance(path, Address):
                continue
            candidates = (path, *path.absolute().parents)
            existing = next(one for one in candidates if os.path.lexists(one))
            _check_folder(key, existing)
            if not os.access(existing, os.W_OK | os.X_OK):
                raise _cannot_write(key, path, f"{str(existing)!r} is not writable")
    place = as_place(config.run_dir, "run_dir") if config.run_dir else None
    if place is not None and _has_run(place):
        raise _holds_a_run(place)


def _check_folder(key: str, path: Path) -> None:
    if (kind := kind_at(path)) != "a folder":
        kind = kind or "a dangling link"
        raise ConfigError(
            f"{key}: {str(path)!r} is {kind} and must be a folder; name another",
            code="not-a-folder",
        )


def _cannot_write(key: str, path: Path, why: str | None) -> ConfigError:
    return ConfigError(f"{key}: cannot write to {str(path)!r}: {why}; name another")


def directory_at(path: Path, config: RunConfig) -> RunDirectory:
    """Returns the folder of a run on this host, with its address if `run_dir` is in a bucket."""
    place = None if config.run_dir is None else as_place(config.run_dir, "run_dir")
    return RunDirectory(path, place if isinstance(place, Address) else None)


def _has_run(place: Place) -> bool:
    if isinstance(place, Address):
        return (place / RECORDS[0]).read() is not None
    return kind_at(RunDirectory(place).config) is not None


def _holds_a_run(path: Place) -> ConfigError:
    return ConfigError(
        f"run_dir: {str(path)!r} already contains a run; name another folder, remove it, or "
        "continue the run with --resume auto",
        code="holds-a-run",
    )


def take_folders(
    config: RunConfig,
    directory: RunDirectory,
    stack: ExitStack,
    tell: Callable[[str], None],
) -> None:
    """Locks the folders that this run writes to, until `stack` is closed.

    Args:
        config: a run as YAML describes it.
        directory: the folder of the run.
        stack: releases the folders when it is closed.
        tell: called with a message if the file system has no locks.

    Raises:
        ConfigError: when another run uses one of the folders, or one is not writable.
    """
    _take_folder(directory, directory.place, "run_dir", stack, tell)
    remove_abandoned(directory.path)
    if directory.address is not None:
        directory.fetch()
        stack.enter_context(directory.copied_to_bucket())
    if config.checkpoint.dir is None:
        return
    folder = as_place(config.checkpoint.dir, "checkpoint.dir")
    if isinstance(folder, Path):
        with reworded(f"checkpoint.dir: cannot write to {str(folder)!r}", "name another"):
            check_writable(folder)
    if folder.resolve() != directory.place.resolve():
        _take_folder(directory, folder, "checkpoint.dir", stack, tell)


def _take_folder(
    directory: RunDirectory,
    folder: Place,
    key: str,
    stack: ExitStack,
    tell: Callable[[str], None],
) -> None:
    if isinstance(folder, Path):
        stack.enter_context(locked(folder, key, tell))
        return
    lease = Lease(folder, key, tell)
    stack.enter_context(lease.renewing())
    directory.leases.append(lease)


def open_directory(run: str | Place) -> RunDirectory:
    """Opens the folder of a run for reading; the records of a run in a bucket are copied here.

    Args:
        run: its path, or its address.

    Raises:
        ConfigError: when `run` is neither a valid path nor a valid address.
        StoreError: when the address is empty or cannot be read.
    """
    place = as_place(run, "the run")
    if isinstance(place, Address):
        return RunDirectory(snapshot(place, RECORDS.__contains__), place)
    return RunDirectory(place)


def check_writable(folder: Path) -> None:
    """Makes a folder, and checks that it is writable by making and removing a file.

    Raises:
        OSError: when the folder or the file cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
        pass


def _is_hard_link(path: Path) -> bool:
    """Whether a file has several names, as in a copy made by `cp -al`."""
    return path.is_file() and path.stat().st_nlink > 1


def _newest_run(config: RunConfig) -> Path | None:
    pattern = re.compile(re.escape(config.name) + r"-\d{8}-\d{6}")
    # A run whose checkpoints are elsewhere has its config alone.
    sign = "checkpoints" if config.checkpoint.dir is None else "config.yaml"
    runs = (path.parent for path in Path("runs").glob(f"*/{sign}"))
    return max((run for run in runs if pattern.fullmatch(run.name)), default=None)


@dataclasses.dataclass(frozen=True)
class PastMetrics:
    """The rows of `metrics.jsonl` up to a step, each a dict with its `step`.

    They are read from the file whenever they are iterated: as dicts in memory, those of a run of
    100 000 steps took 16 MB.

    Args:
        path: the file, which may be missing.
        step: the last step.
    """

    path: Path
    step: int

    def __iter__(self) -> Iterator[JsonDict]:
        lines, _ = self.lines(self.contents())
        return (row for row in map(_row, lines) if row is not None)

    def contents(self) -> bytes:
        """Reads the file; empty if it is missing."""
        if kind_at(self.path) is None:
            return b""
        return read_bytes(self.path, str(self.path), most=host_memory() // 8, links=False)

    def lines(self, contents: bytes) -> tuple[list[bytes], list[int]]:
        """Returns the lines that count, and the numbers of those that cannot be read.

        Lines of steps that were repeated do not count; see `without_repeated`.
        """
        broken: list[int] = []

        def readable() -> Iterator[tuple[JsonDict, bytes]]:
            for number, line in enumerate(contents.splitlines(keepends=True), 1):
                row = _row(line)
                if row is None:
                    broken.append(number)
                else:
                    yield row, line

        latest = without_repeated(readable())
        return [line for step, line in latest if step <= self.step], broken


def without_repeated(rows: Iterable[tuple[JsonDict, T]]) -> list[tuple[float, T]]:
    """Drops the records of steps that were undone and taken again.

    Args:
        rows: records in the order of writing, each with its `step`, and something to keep for it.

    Returns:
        The step and the kept value of each record that counts.

    Example:
        >>> rows = [{"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 2, "b": 3}]
        >>> [kept for _, kept in without_repeated((row, n) for n, row in enumerate(rows))]
        [0, 1, 2]
        >>> rows += [{"step": 2, "a": 4}]
        >>> [kept for _, kept in without_repeated((row, n) for n, row in enumerate(rows))]
        [0, 3]
    """
    latest: list[tuple[float, T]] = []
    names: set[str] = set()
    for row, kept in rows:
        step = row["step"]
        own = row.keys() - {"step"}
        last = latest[-1][0] if latest else -math.inf
        # A step has several records, such as that of a validation, but each metric only once.
        if last > step or (last == step and names & own):
            while latest and latest[-1][0] >= step:
                latest.pop()
            names = set()
        names = names | own if last == step else own
        latest.append((step, kept))
    return latest


def _row(line: bytes) -> JsonDict | None:
    """Parses a line of `metrics.jsonl`; None if it is not a complete record."""
    row = json_section(line.decode(errors="replace")) if line.endswith(b"\n") else None
    return row if row is not None and is_whole(row.get("step")) else None


_WHOLE = (("mesh",), ("parallel",))
"""Sections that are compared as one value, since their keys name axes and strategies."""


def flat(config: JsonDict) -> dict[str, object]:
    """Flattens nested dicts to values by dotted path.

    Example:
        >>> flat({"train": {"steps": 1}, "parallel": {"ddp": {}}})
        {'train.steps': 1, 'parallel': {'ddp': {}}}
    """
    values = flatten_dict(config, is_leaf=lambda path, value: not value or path in _WHOLE)
    return {".".join(map(str, path)): value for path, value in values.items()}
