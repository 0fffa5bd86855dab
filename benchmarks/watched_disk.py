"""A disk that is watched: every file operation of a program, counted, and failed on request.

`Watched` stands in for the calls of the operating system through which Python changes a folder:
opening to write, writing, syncing, naming, removing. Before each it calls a function, which may
look at the folder as a kill would leave it, or raise what a disk that is full would raise.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CALLS = (
    "fsync",
    "ftruncate",
    "link",
    "listdir",
    "mkdir",
    "open",
    "remove",
    "rename",
    "replace",
    "rmdir",
    "scandir",
    "unlink",
    "utime",
    "write",
)
"""Functions of `os`, whose first argument is a path or a descriptor."""

Before = Callable[[str, Path], None]
"""Gets the name of an operation, and the path that it is about."""


class _File:
    """A file whose writes are seen; everything else is that of the file."""

    def __init__(self, file: Any, see: Callable[[str], None]):
        self._file, self._see = file, see

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)

    def write(self, data: Any) -> int:
        self._see("write to a file")
        written = self._file.write(data)
        # Each write is a state of its own.
        self._file.flush()
        return written


def _path_of(thing: Any, folder: Any = None) -> Path:
    if isinstance(thing, int):
        try:
            return Path(os.readlink(f"/proc/self/fd/{thing}"))
        except OSError:
            return Path("/")
    name = os.fsdecode(thing)
    # shutil removes what is in a folder by names in an open folder.
    return Path(os.path.join(_path_of(folder), name)) if folder is not None else Path(name)


@contextlib.contextmanager
def watched(root: Path, before: Before) -> Iterator[None]:
    """Calls a function before every operation on what lies in a folder.

    Args:
        root: the folder.
        before: it may raise the error of the operation.
    """
    kept = {name: getattr(os, name) for name in CALLS}
    kept_open, mutex = builtins.open, threading.RLock()
    busy = threading.local()

    def see(name: str, path: Path) -> None:
        if getattr(busy, "is_so", False) or not (path == root or root in path.parents):
            return
        with mutex:
            busy.is_so = True
            try:
                before(name, path)
            finally:
                busy.is_so = False

    def watching(name: str) -> Callable[..., Any]:
        def call(first: Any = ".", *rest: Any, **more: Any) -> Any:
            folder = more.get("dir_fd", more.get("src_dir_fd"))
            see(name, _path_of(first, folder))
            return kept[name](first, *rest, **more)

        return call

    def opening(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        there = _path_of(path)
        if not isinstance(path, int):
            see("open", there)
        file = kept_open(path, mode, *rest, **more)
        is_written = set(mode) & set("wax+") and (there == root or root in there.parents)
        return _File(file, lambda name: see(name, there)) if is_written else file

    for name in CALLS:
        setattr(os, name, watching(name))
    builtins.open = opening
    try:
        yield
    finally:
        builtins.open = kept_open
        for name, call in kept.items():
            setattr(os, name, call)


Tree = dict[str, bytes | None]
"""The contents of a folder by path: bytes of files, and None for folders."""


def tree_of(root: Path) -> Tree:
    """The contents of a folder now.

    Other threads go on writing meanwhile, so a file is left out if its folder was gone already.
    """
    tree: Tree = {}
    for path in sorted(root.rglob("*")):
        folder = path.relative_to(root).parent
        if folder != Path() and tree.get(str(folder), b"") is not None:
            continue
        with contextlib.suppress(OSError):
            tree[str(path.relative_to(root))] = None if path.is_dir() else path.read_bytes()
    return tree


def make(tree: Tree, root: Path) -> Path:
    """Makes a folder that holds a tree."""
    root.mkdir(parents=True)
    for name, contents in sorted(tree.items()):
        if contents is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(contents)
    return root


READS = frozenset({"listdir", "scandir"})
