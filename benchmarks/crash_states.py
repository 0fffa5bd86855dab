"""Every state in which a kill or a power cut can leave what is saved; nothing good may be lost.

    python -m benchmarks.crash_states            # all kinds
    python -m benchmarks.crash_states full export

The file operations of a save are watched. Before each of them the folder is copied as a kill would
leave it, and as power cuts would: what was not synced is lost, or only the contents of files, or
neither. Of every state the newest that had ended, or a newer one, has to be read, with the very
numbers that were saved; and another save has to succeed there. In a bucket the objects are copied
before each of them is written or removed. Exits with 1 if any state is bad.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from axon_dist.checkpoint import (
    CheckpointManager,
    HostCopies,
    Retention,
    export_safetensors,
    load_checkpoint,
    open_tensors,
    save_checkpoint,
)
from axon_dist.core.files import Place, as_place
from axon_dist.data.files import TextFile
from axon_dist.data.store import Indexed, TokenCache, stamp_of
from axon_dist.train.app.resume import ProgramStore

from . import power
from .object_server import ObjectServer, serving
from .watched_disk import READS, Tree, make, tree_of, watched

State = dict[str, Any]


def state_of(number: float) -> State:
    return {"w": jnp.arange(6.0) + number, "more": {"b": jnp.full((2, 3), number)}}


def is_state(state: Any, number: float) -> bool:
    expected = state_of(number)
    is_same = np.array_equal(state["w"], expected["w"])
    return is_same and np.array_equal(state["more"]["b"], expected["more"]["b"])


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to save.

    Args:
        save: saves the state of a number in a folder.
        read: the number of the state that is found there; raises where there is none.
        last: states are saved from 1 to this.
        is_on_disk: whether a power cut leaves anything of it.
        bucket: the name of the address in a bucket, in place of a folder; None for a folder.
    """

    save: Callable[[Any, int], object]
    read: Callable[[Any], int]
    last: int = 3
    is_on_disk: bool = True
    bucket: str | None = None


def _overwritten(type: str) -> Kind:
    def save(folder: Place, number: int) -> None:
        save_checkpoint(folder / "model", state_of(number), type=type)

    def read(folder: Place) -> int:
        state = load_checkpoint(folder / "model", state_of(0))
        return next(n for n in range(1, 9) if is_state(state, n))

    return Kind(save, read)


def _managed(type: str, steps: Callable[[int], int]) -> Kind:
    """The checkpoints of a run, of which the last two stay."""

    def manager(folder: Place) -> CheckpointManager:
        return CheckpointManager(folder / "saved", Retention(last=2), type=type, background=False)

    def save(folder: Place, number: int) -> None:
        with manager(folder) as saved:
            saved.save(steps(number), state_of(number))
        assert saved.failure is None, saved.failure

    def read(folder: Place) -> int:
        found = manager(folder).restore_newest(state_of(0))
        assert found is not None
        return next(n for n in range(1, 9) if is_state(found.state, n))

    return Kind(save, read, last=4)


def _in_bucket(kind: Kind, scheme: str) -> Kind:
    """The same in a bucket."""
    return dataclasses.replace(kind, bucket=f"{scheme}://bucket/saved", is_on_disk=False)


def _exported() -> Kind:
    def save(folder: Path, number: int) -> None:
        export_safetensors(folder / "model.safetensors", state_of(number))

    def read(folder: Path) -> int:
        return round(float(open_tensors(folder / "model.safetensors")["more/b"][0, 0]))

    return Kind(save, read)


REMADE = 9
"""Reads a cache, which is right in every state or is made again."""


def _cached() -> Kind:
    """Cached tokens of data: they are right, or are made again."""

    def tokens(folder: Path, number: int) -> np.ndarray:
        # A file outside of the folder that is watched; the cache knows it by its digest alone.
        file = Path(__file__)
        source = [Indexed(file, f"digest {number}", stamp_of(file), [(0, 8, 1, 0)])]
        ids = np.arange(40, dtype=np.uint16) * number

        def document(path: Path, span: Any) -> Any:
            return iter([(ids, None)])

        cache = TokenCache([TextFile("a.txt", folder / "a.txt")], str(folder / "cache"))
        return cache.tokens(source, [number], document).take(0)[0]

    def save(folder: Path, number: int) -> None:
        tokens(folder, number)

    def read(folder: Path) -> int:
        numbers = range(1, 4)
        if not all(np.array_equal(tokens(folder, n), np.arange(40) * n) for n in numbers):
            raise ValueError("other tokens")
        return REMADE

    return Kind(save, read)


def _samples_cached() -> Kind:
    """Where samples begin in packed documents, in a file of arrays."""

    def arrays(folder: Path, number: int) -> list[np.ndarray]:
        cache = TokenCache([TextFile("a.txt", folder / "a.txt")], str(folder / "cache"))
        return cache.cached(f"rows-{number}", lambda: [np.arange(30) * number, np.ones(number)])

    def save(folder: Path, number: int) -> None:
        arrays(folder, number)

    def read(folder: Path) -> int:
        for number in range(1, 4):
            first, second = arrays(folder, number)
            if not np.array_equal(first, np.arange(30) * number) or len(second) != number:
                raise ValueError("other samples")
        return REMADE

    return Kind(save, read)


def _indexed() -> Kind:
    """The index of a data file, which lies outside and stays as it is."""
    data = TextFile("data", Path(__file__))

    def spans(folder: Path, number: int) -> list[Any]:
        def scan(path: Path, digest: Callable[[bytes], None]) -> list[Any]:
            digest(path.read_bytes())
            return [(0, number, 1, 0)]

        cache = TokenCache([data], str(folder / "cache"))
        return cache.index([data], scan, f"kind {number}")[0].spans

    def save(folder: Path, number: int) -> None:
        spans(folder, number)

    def read(folder: Path) -> int:
        if any(spans(folder, n) != [(0, n, 1, 0)] for n in range(1, 4)):
            raise ValueError("another index")
        return REMADE

    return Kind(save, read)


def _programs() -> Kind:
    """Compiled programs: one that is torn is not given out."""

    def store(folder: Path) -> ProgramStore:
        return ProgramStore(folder / "programs" / "host")

    def value(number: int) -> bytes:
        return bytes([number]) * 300

    def save(folder: Path, number: int) -> None:
        programs = store(folder)
        programs.put(f"key-{number}", value(number))
        if programs.get(f"key-{number}") != value(number):
            raise ValueError("another program than was put")

    def read(folder: Path) -> int:
        programs = store(folder)
        if any(programs.get(f"key-{n}") not in (None, value(n)) for n in range(1, 9)):
            raise ValueError("another program")
        return REMADE

    return Kind(save, read)


def _copied() -> Kind:
    """Copies in the memory of a host."""

    def save(folder: Path, number: int) -> None:
        HostCopies(folder).save(number, state_of(number), {})

    def read(folder: Path) -> int:
        found = HostCopies(folder).newest(state_of(0))
        assert found is not None
        assert is_state(found.state, found.step)
        return found.step

    return Kind(save, read, is_on_disk=False)


KINDS: dict[str, Kind] = {
    "full": _overwritten("full"),
    "sharded": _overwritten("sharded"),
    "manager full": _managed("full", lambda number: number),
    "manager sharded": _managed("sharded", lambda number: number),
    "same step full": _managed("full", lambda number: 1),
    "same step sharded": _managed("sharded", lambda number: 1),
    "export": _exported(),
    "token cache": _cached(),
    "cache of samples": _samples_cached(),
    "cache of an index": _indexed(),
    "compiled programs": _programs(),
    "memory copies": _copied(),
    "bucket": _in_bucket(_overwritten("sharded"), "gs"),
    "bucket manager": _in_bucket(_managed("sharded", lambda number: number), "gs"),
    "bucket same step": _in_bucket(_managed("sharded", lambda number: 1), "gs"),
    "bucket same step s3": _in_bucket(_managed("sharded", lambda number: 1), "s3"),
}


class _Fixed:
    """Replaces chance: how much of the unsynced data reached the disk."""

    def __init__(self, value: float):
        self.value = value

    def random(self) -> float:
        return self.value


CUTS = {"kill": None, "nothing more": 0.9, "names, not contents": 0.4}
"""The data on the disk that was not synced; a kill loses none of it."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """A state of the folder.

    Args:
        before: the operation that was to come next.
        ended: the number of the last save that had ended.
        cut: what was lost; a key of `CUTS`.
        tree: what the folder holds.
    """

    before: str
    ended: int
    cut: str
    tree: Tree


def moments_of(kind: Kind, work: Path) -> list[Moment]:
    """Every different state of a folder in which a kind of save was made again and again."""
    root = work / "watched"
    root.mkdir()
    disk = power.Disk(root, _Fixed(0.0))  # pyright: ignore[reportArgumentType]
    moments: list[Moment] = []
    seen: set[tuple[int, str, tuple]] = set()
    ended = 0

    def add(name: str, cut: str, tree: Tree) -> None:
        key = (ended, "kill" if cut == "kill" else "cut", tuple(sorted(tree.items())))
        if key not in seen:
            seen.add(key)
            moments.append(Moment(name, ended, cut, tree))

    def look(name: str, path: Path) -> None:
        if name in READS:
            return
        shown = f"{name} {path.name}"
        add(shown, "kill", tree_of(root))
        for cut, value in CUTS.items():
            if value is not None and kind.is_on_disk:
                disk.chance.value = value  # pyright: ignore[reportAttributeAccessIssue]
                left = work / f"cut-{len(moments)}-{value}"
                disk.cut(left)
                add(shown, cut, tree_of(left))
                _remove(left)

    with power.watched(disk, lambda: None), watched(root, look):
        for number in range(1, kind.last + 1):
            kind.save(root, number)
            ended = number
            look("the end", root)
    return moments


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


@contextlib.contextmanager
def serving_buckets() -> Iterator[ObjectServer]:
    """Serves buckets to this process, whose environment says where."""
    with serving() as server:
        before = dict(os.environ)
        os.environ.update(server.env())
        try:
            yield server
        finally:
            os.environ.clear()
            os.environ.update(before)


Objects = dict[str, tuple[int, bytes]]


def bucket_moments_of(kind: Kind, server: ObjectServer) -> list[tuple[str, int, Objects]]:
    """Every different state of a bucket: before which object, what had ended, and the objects."""
    moments: list[tuple[str, int, Objects]] = []
    ended = 0
    address = as_place(kind.bucket, "the bucket")

    def look(name: str) -> None:
        moments.append((name, ended, dict(server.objects)))

    server.objects.clear()
    server.before_change = look
    try:
        for number in range(1, kind.last + 1):
            kind.save(address, number)
            ended = number
            look("the end")
    finally:
        server.before_change = lambda name: None
    return moments


def problem_with(kind: Kind, moment: Moment, folder: Path) -> str | None:
    """The faults of a state: older than a finished save, not readable, or not writable."""
    make(moment.tree, folder)
    return problem_at(kind, moment.ended, folder)


def problem_at(kind: Kind, ended: int, folder: Place) -> str | None:
    """As `problem_with`, of the state that a folder or a bucket is in."""
    try:
        if ended and (found := kind.read(folder)) < ended:
            return f"{found} was found, and {ended} had ended"
        kind.save(folder, kind.last + 1)
        if (found := kind.read(folder)) <= kind.last:
            return f"after another save {found} was found"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def measure_states(
    folder: Path, names: list[str], server: ObjectServer | None = None
) -> list[tuple[str, int, int]]:
    """Rows of a kind of save and of loss, how many states, and how many did no harm.

    Args:
        folder: an empty one.
        names: keys of `KINDS`.
        server: of the buckets; None starts one. A process can have one alone, since the address
            of GCS is read once.
    """
    rows = []
    with contextlib.ExitStack() as stack:
        for name in names:
            if KINDS[name].bucket is None:
                rows += _measure_folder(name, folder)
            else:
                server = server or stack.enter_context(serving_buckets())
                rows.append(_measure_bucket(name, server))
    return rows


def _measure_folder(name: str, folder: Path) -> list[tuple[str, int, int]]:
    work = folder / name.replace(" ", "-")
    work.mkdir()
    counts, good = {"kill": 0, "power cut": 0}, {"kill": 0, "power cut": 0}
    for number, moment in enumerate(moments_of(KINDS[name], work)):
        problem = problem_with(KINDS[name], moment, work / str(number))
        loss = "kill" if moment.cut == "kill" else "power cut"
        counts[loss] += 1
        good[loss] += problem is None
        if problem is not None:
            print(f"{name}: {moment.cut} before {moment.before}: {problem}", flush=True)
    return [(f"{name}: {loss}", counts[loss], good[loss]) for loss in counts if counts[loss]]


def _measure_bucket(name: str, server: ObjectServer) -> tuple[str, int, int]:
    kind, good = KINDS[name], 0
    address = as_place(kind.bucket, "the bucket")
    moments = bucket_moments_of(kind, server)
    for before, ended, objects in moments:
        server.objects.clear()
        server.objects.update(objects)
        problem = problem_at(kind, ended, address)
        good += problem is None
        if problem is not None:
            print(f"{name}: kill before {before}: {problem}", flush=True)
    return f"{name}: kill", len(moments), good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kinds", nargs="*", help=f"{', '.join(KINDS)}; or all")
    kinds = parser.parse_args().kinds or list(KINDS)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_states(Path(os.path.realpath(folder)), kinds)
    for name, count, good in rows:
        print(f"{name}: {good}/{count}")
    return 0 if all(count == good for _, count, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
