"""`RunDirectory`: the folder of a run, the names of its files, and the lock of its writer."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

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

from ...core.plain_yaml import read_yaml, to_yaml
from ..config import RunConfig
from .lock import LOCK, Lease, locked

AUTO = "auto"
"""Where to resume from: the newest good checkpoint of the run itself, if there is one."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A file or folder of a run by its name; read on a `RunDirectory` it is the path."""

    name: str

    def __get__(self, directory: RunDirectory, owner: object) -> Path:
        return directory.path / self.name


def changed_keys(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The keys of two flat configs that differ, with both values, a line each.

    Example:
        >>> changed_keys({"train.steps": 100}, {"train.steps": 200})
        ['train.steps: 100 -> 200']
    """
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name)!r} -> {after.get(name)!r}" for name in names]


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """What a run leaves behind.

    Args:
        path: the folder of the run; of a run in a bucket, the local folder that process 0 copies
            to the bucket, or that has copies from there.
        address: of a run in a bucket, to which files are copied whole whenever the run saves, and
            at its end.
        leases: of its folders in buckets, which process 0 holds while the run writes.
    """

    path: Path
    address: Address | None = None
    leases: list[Lease] = dataclasses.field(default_factory=list, compare=False)
    _copied: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict, compare=False)

    config = _Entry("config.yaml")
    """The config, every default spelled out."""
    metrics = _Entry("metrics.jsonl")
    """Metrics, a JSON object a line."""
    summary = _Entry("summary.json")
    """What the run came to, as JSON."""
    program = _Entry("program.json")
    """What the compiled step is made of, as JSON."""
    profile = _Entry("profile")
    """Traces of the steps that `train.profile` asks for."""
    waterfall = _Entry("waterfall.json")
    """Where the time of a step goes, as `axon profile` measured it, as JSON."""
    plot = _Entry("loss.png")
    """The loss curves."""
    memory = _Entry("memory.prof")
    """What was in the memory of the devices when it was full; `pprof` reads it."""

    @property
    def place(self) -> Place:
        """The path or address of the run, as users name it."""
        return self.path if self.address is None else self.address

    @property
    def checkpoints(self) -> Place:
        """The checkpoints, where the config does not put them elsewhere."""
        return self.place / "checkpoints"

    def fetch(self) -> None:
        """Copies the records of the run from the bucket to this machine."""
        if self.address is None:
            return
        for name in RECORDS:
            contents, path = (self.address / name).read(), self.path / name
            if contents is not None:
                with (
                    reworded(f"cannot write {str(path)!r}", "make room there", StoreError),
                    replacing(path, durable=False) as file,
                ):
                    file.write(contents)
                self._copied[name] = path.stat().st_mtime_ns, path.stat().st_size

    def copy(self) -> None:
        """Writes what has changed on this machine into the bucket, file by file.

        Raises:
            ConfigError: when another run has taken the folder over.
            StoreError: when the bucket cannot be written.
        """
        for lease in self.leases:
            lease.check()
        if self.address is None:
            return
        there = {
            str(path.relative_to(self.path)): path
            for path in self.path.rglob("*")
            if path.is_file() and not path.is_symlink() and not path.name.endswith(TEMPORARY)
        }
        for name, path in there.items():
            with reworded(f"cannot read {str(path)!r}", "look at the disk", StoreError):
                stamp = path.stat().st_mtime_ns, path.stat().st_size
                if self._copied.get(name) == stamp:
                    continue
                with open(open_regular(path), "rb") as file:
                    contents = file.read()
            (self.address / name).write(contents)
            self._copied[name] = stamp
        self.address.remove(gone := self._copied.keys() - there.keys())
        for name in gone:
            del self._copied[name]

    @contextmanager
    def copied_to_bucket(self) -> Iterator[None]:
        """Copies to the bucket in the end; what cannot be copied stays on this machine.

        Raises:
            StoreError: when it cannot; not in place of another error.
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
                f"the last records of the run are in {str(self.path)!r} alone, for {error}; copy "
                f"them to {self.place}"
            ) from error
        shutil.rmtree(self.path, ignore_errors=True)

    def check_files(self) -> None:
        """Checks that what a run writes replaces nothing but files, and follows no link.

        Raises:
            ConfigError: naming what is there instead, such as a pipe that nobody reads.
        """
        files = (self.config, self.metrics, self.summary, self.program, self.plot, self.memory)
        for path in files:
            if (kind := kind_at(path)) not in (None, "a file"):
                raise ConfigError(
                    f"run_dir: {str(path)!r} is {kind} and no file, and a run writes it: "
                    "remove it, or name another folder"
                )
        for path in (*files, *(self.path / name for name in (*_WRITTEN_INTO, LOCK))):
            if path.is_symlink():
                raise ConfigError(
                    f"run_dir: {str(path)!r} is a link, and a run writes there: what it leads to "
                    "would be overwritten. Remove it, or name another folder; checkpoint.dir puts "
                    "checkpoints elsewhere"
                )

    def begin_config(self, config: RunConfig) -> None:
        """Writes `config.yaml` of a new run.

        Raises:
            FileExistsError: when there is one.
            OSError: when it cannot be written; nothing of it stays.
        """
        text = to_yaml(config.to_dict())
        descriptor = open_regular(self.config, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with open(descriptor, "wb") as file:
                file.write(text.encode())
        except OSError:
            # Else half a config would say that there is a run already.
            with suppress(OSError):
                self.config.unlink()
            raise

    def write_config(self, config: RunConfig) -> None:
        """Writes `config.yaml`, whole or not at all."""
        self._replace(self.config, to_yaml(config.to_dict()))

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Writes `summary.json`, whole or not at all."""
        self._replace(self.summary, json.dumps(summary, indent=2) + "\n")

    def write_missing(self, config: RunConfig, summary: Mapping[str, object]) -> None:
        """Writes `config.yaml` and `summary.json` where a run that was cut off left none."""
        if kind_at(self.config) is None:
            self.write_config(config)
        if kind_at(self.summary) is None:
            self.write_summary(summary)

    def write_program(self, program: Mapping[str, object]) -> None:
        """Writes `program.json`, whole or not at all."""
        self._replace(self.program, json.dumps(program) + "\n")

    def changes(self, config: RunConfig) -> list[str]:
        """The keys in which a config differs from the one stored here, a line each.

        Args:
            config: the one that the run continues with.

        Returns:
            Such as `train.steps: 100 -> 200`; empty where no config is stored here yet.
        """
        try:
            if kind_at(self.config) is None:
                return []
            before = flat(read_yaml(self.config, links=False))
        except ConfigError as error:
            return [f"{self.config.name} cannot be read ({str(error).splitlines()[0]}): replaced"]
        after = flat(config.to_dict())
        return changed_keys(before, after)

    def take_metrics(self, step: int, tell: Callable[[str], None]) -> list[JsonDict]:
        """Reads the metrics up to a step, and drops those of steps that are to be taken again.

        Args:
            step: the last one whose metrics stay.
            tell: takes a sentence about lines that cannot be read; they are dropped, too.

        Returns:
            A dict per line, with its `step`.
        """
        if kind_at(self.metrics) is None:
            return []
        most = host_memory() // 8
        contents = read_bytes(self.metrics, str(self.metrics), most=most, links=False)
        lines = contents.decode(errors="replace").splitlines(keepends=True)
        rows = [_row(line) for line in lines]
        # A run that was killed leaves half a last line, which is no damage.
        broken = [number for number, row in enumerate(rows[:-1], 1) if row is None]
        if broken:
            tell(
                f"{self.metrics.name}: {len(broken)} of {len(lines)} lines cannot be read and are "
                f"dropped, the first is line {broken[0]}"
            )
        pairs = [(line, row) for line, row in zip(lines, rows, strict=True) if row is not None]
        pairs = _without_retaken(pairs)
        pairs = [(line, row) for line, row in pairs if row["step"] <= step]
        text = "".join(line for line, _ in pairs)
        if text.encode() != contents:
            try:
                self._replace(self.metrics, text)
            except OSError as error:
                tell(
                    f"{self.metrics.name}: the lines of steps after {step} stay, for it cannot be "
                    f"written ({error.strerror}); of two lines of a step the later one counts"
                )
        return [row for _, row in pairs]

    def _replace(self, path: Path, text: str) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)


_WRITTEN_INTO = ("checkpoints", "profile", "tensorboard", "wandb", "mlflow.db")
"""Folders and files in that of a run that checkpoints, traces and loggers write to."""


RECORDS = ("config.yaml", "metrics.jsonl", "summary.json", "program.json", "waterfall.json")
"""What is read of a run, and copied from a bucket before."""


def create_directory(config: RunConfig, resume: str | None = None) -> RunDirectory:
    """Makes the folder of a new run, with its config in it, or opens that of a run to resume.

    The config of a resumed run is not written here: a refused resume must change nothing.

    Args:
        config: where `run_dir` says so, or as `runs/<name>-<time>` where it does not.
        resume: None for a new run, whose folder must not hold one; `"auto"` to resume in the folder
            of the config, or in the newest of that name with a checkpoint; a path to resume from
            there, in the folder of the config or in a new one.

    Raises:
        ConfigError: when there is a run in it already, or it cannot be made.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    newest = _newest_run(config.name) if resume == AUTO else None
    place = as_place(config.run_dir or newest or f"runs/{config.name}-{stamp}", "run_dir")
    if isinstance(place, Address):
        if resume is None and _has_run(place):
            raise _holds_a_run(place)
        directory = RunDirectory(Path(tempfile.mkdtemp(prefix="axon-run-")), place)
        if resume is None:
            directory.write_config(config)
        return directory
    path, directory = place, RunDirectory(place)
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
    """Checks that `create_directory` could make the folder of a new run, and makes nothing.

    Raises:
        ConfigError: when there is a run in it already, or it cannot be made.
    """
    folders = {"run_dir": config.run_dir or "runs", "checkpoint.dir": config.checkpoint.dir}
    for key, folder in folders.items():
        if folder is not None:
            path = as_place(folder, key)
            if isinstance(path, Address):
                continue
            places = (path, *path.absolute().parents)
            there = next(place for place in places if os.path.lexists(place))
            _check_folder(key, there)
            if not os.access(there, os.W_OK | os.X_OK):
                raise _cannot_write(key, path, f"{str(there)!r} may not be written to")
    place = as_place(config.run_dir, "run_dir") if config.run_dir else None
    if place is not None and _has_run(place):
        raise _holds_a_run(place)


def _check_folder(key: str, path: Path) -> None:
    if (kind := kind_at(path)) != "a folder":
        kind = kind or "a link to nothing"
        raise ConfigError(f"{key}: {str(path)!r} is {kind} and no folder; name another")


def _cannot_write(key: str, path: Path, why: str | None) -> ConfigError:
    return ConfigError(f"{key}: cannot write to {str(path)!r}: {why}; name another")


def directory_at(path: Path, config: RunConfig) -> RunDirectory:
    """The folder of a run on this host, and its address where `run_dir` names a bucket."""
    place = None if config.run_dir is None else as_place(config.run_dir, "run_dir")
    return RunDirectory(path, place if isinstance(place, Address) else None)


def _has_run(place: Place) -> bool:
    if isinstance(place, Address):
        return (place / RECORDS[0]).read() is not None
    return kind_at(RunDirectory(place).config) is not None


def _holds_a_run(path: Place) -> ConfigError:
    return ConfigError(
        f"run_dir: {str(path)!r} holds a run already; name another, remove it, or go on with it: "
        "--resume auto"
    )


def take_folders(
    config: RunConfig,
    directory: RunDirectory,
    stack: ExitStack,
    tell: Callable[[str], None],
) -> None:
    """Keeps other runs out of the folders that this one writes to, for as long as a stack is open.

    Args:
        config: a run as YAML describes it.
        directory: of the run.
        stack: releases the folders when it closes.
        tell: takes a sentence where the file system has no locks.

    Raises:
        ConfigError: when another run is at work in one of them, or it cannot be written.
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
    """The folder of a run, to read it: of one in a bucket, copies of its records.

    Args:
        run: its path, or its address.

    Raises:
        ConfigError: when it can be neither.
        StoreError: when there is nothing at the address, or it cannot be read.
    """
    place = as_place(run, "the run")
    if isinstance(place, Address):
        return RunDirectory(snapshot(place, RECORDS.__contains__), place)
    return RunDirectory(place)


def check_writable(folder: Path) -> None:
    """Makes a folder and a file in it, which is removed again.

    Raises:
        OSError: when either cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
        pass


def _newest_run(name: str) -> Path | None:
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
    runs = (folder.parent for folder in Path("runs").glob("*/checkpoints"))
    return max((run for run in runs if pattern.fullmatch(run.name)), default=None)


def _row(line: str) -> JsonDict | None:
    """One line of `metrics.jsonl`, or None where it is none."""
    row = json_section(line) if line.endswith("\n") else None
    return row if row is not None and is_whole(row.get("step")) else None


def _without_retaken(pairs: list[tuple[str, JsonDict]]) -> list[tuple[str, JsonDict]]:
    """Lines and rows without those of steps that were taken again, by lines behind them."""
    last: list[tuple[str, JsonDict]] = []
    for line, row in pairs:
        while last and last[-1][1]["step"] > row["step"]:
            last.pop()
        last.append((line, row))
    return last


_WHOLE = (("mesh",), ("parallel",))
"""Sections that are compared as one value: their keys are names of axes and strategies."""


def flat(config: JsonDict) -> dict[str, object]:
    """The values of nested dicts by dotted path.

    Example:
        >>> flat({"train": {"steps": 1}, "parallel": {"ddp": {}}})
        {'train.steps': 1, 'parallel': {'ddp': {}}}
    """
    values = flatten_dict(config, is_leaf=lambda path, value: not value or path in _WHOLE)
    return {".".join(map(str, path)): value for path, value in values.items()}
