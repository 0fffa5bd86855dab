"""Checks that all processes run the same program, and finds a process that hangs.

Every process of a run executes the same program on its own part of the data. A process with another
learning rate, other files or other initial parameters would train without an error, because no
later exchange shows the difference. So before training each process writes its arguments, as named
facts, to the shared store, and all compare them.

During training, a process may be alive but take no step. The watchdog does not notice it: its
heartbeat comes from a thread, which continues while the main thread hangs in a lock, in a file
system that does not answer, or in a batch that never comes. The others then wait for it in a
collective for ever. So the loop reports its step. If no step has changed for too long, the process
behind the others is named, and all processes end.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from ..core.compat import SharedStore
from ..core.errors import ConfigError, LaunchError
from ..core.files import TEMPORARY, make_folder
from ..core.tree import is_key, leaves_with_paths
from ..core.typing import PyTree
from ..core.words import first_few, ranges
from ..launch.distributed import STEP_TIMEOUT, Timeouts
from ..launch.rendezvous import Peer
from ..launch.watchdog import EXIT_PEER_LOST, KeyValueStore, Silences, post_verdict, say
from .world import World, process_index

_PREFIX = "axon/agree/"
_PAUSE_SECONDS = 0.05
_MOST_LINES = 8


_SAME = "Give every process the same config, data, seed and code"


def agree(
    world: World,
    topic: str,
    facts: Mapping[str, Any],
    timeout: float = 300.0,
    *,
    advice: str = _SAME,
    code: str = "processes-disagree",
) -> None:
    """Checks that all processes have the same facts; every process must call it.

    Args:
        world: the processes to compare; a single one always agrees.
        topic: the subject of the facts, such as `"config"`.
        facts: JSON values by name. Facts that only one process has are not compared, because
            processes may hold different shards.
        timeout: seconds to wait for the last process.
        advice: what to do if they differ.
        code: the code of the error if they differ.

    Raises:
        LaunchError: on every process, about the facts that differ or the processes that did not
            arrive.

    Example:
        >>> agree(World.emulate(2), "config", {"seed": 0})
    """
    if world.num_processes == 1:
        return
    answers = _exchange(world.num_processes, topic, json.dumps(dict(facts)), timeout)
    if lines := differences({process: json.loads(text) for process, text in answers.items()}):
        raise LaunchError(
            f"the processes disagree about {topic!r}: {first_few(lines, _MOST_LINES, '; ')}. "
            f"{advice}",
            code=code,
        )


def differences(facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Compares each fact with that of the first process that has it.

    Args:
        facts: facts by name, by process.

    Returns:
        A line for every difference, ordered by process.

    Example:
        >>> differences({0: {"seed": 0}, 1: {"seed": 1}})
        ['process 1 has seed=1 where process 0 has seed=0']
    """
    first: dict[str, tuple[int, Any]] = {}
    lines = []
    for process, values in sorted(facts.items()):
        for name, value in values.items():
            holder, expected = first.setdefault(name, (process, value))
            if value != expected:
                lines.append(
                    f"process {process} has {name}={_brief(value)} where process {holder} has "
                    f"{name}={_brief(expected)}"
                )
    return lines


def from_main(tree: PyTree) -> PyTree:
    """Broadcasts a tree from process 0; every process must call it with the same shapes.

    Args:
        tree: arrays that each process holds in full.

    Returns:
        The tree of process 0, on every process.

    Example:
        >>> from_main({"w": 1.0})
        {'w': 1.0}
    """
    if jax.process_count() == 1:
        return tree
    # Typed random keys cannot be broadcast, so their key data is.
    words = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
    sent = multihost_utils.broadcast_one_to_all(words)

    def wrap(new, old):
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(old))

    return jax.tree.map(lambda new, old: wrap(new, old) if is_key(old) else new, sent, tree)


def checksums(tree: PyTree) -> dict[str, str]:
    """Checksums of all shards that this process holds, by path and index of the shard.

    Args:
        tree: arrays, on one device or many.

    Returns:
        CRC-32 by `path` for whole arrays, by `path[start:stop, ...]` for shards.

    Example:
        >>> checksums({"b": np.zeros(2, np.float32)})
        {'b': '6522df69'}
    """
    checksums: dict[str, str] = {}
    for path, leaf in leaves_with_paths(tree):
        array = jax.random.key_data(leaf) if is_key(leaf) else leaf
        for place, data in _shards(array):
            name = f"{path}{place}"
            if name not in checksums:
                checksums[name] = f"{zlib.crc32(np.ascontiguousarray(data).tobytes()):08x}"
    return checksums


def digest(lowered: jax.stages.Lowered) -> str:
    """A short hash of a lowered program, including its constants.

    Example:
        >>> len(digest(jax.jit(lambda x: x + 1).lower(1.0)))
        16
    """
    return hashlib.blake2b(lowered.as_text().encode(), digest_size=8).hexdigest()


def _shards(array: Any) -> list[tuple[str, Any]]:
    if not isinstance(array, jax.Array):
        return [("", np.asarray(array))]
    return [(_place(shard.index, array.shape), shard.data) for shard in array.addressable_shards]


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """The index of a shard, as `[0:4, 0:2]` for rows 0 to 3 of an array [8, 2]; "" for all."""
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    if all(bound == (0, size) for bound, size in zip(bounds, shape, strict=True)):
        return ""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in bounds)}]"


_SEEN_SECONDS = 30.0
"""Seconds for which a client of NFS may go on with the names that it knows of a folder."""


def check_shared(folder: Path, key: str) -> None:
    """Checks that a folder is the same one on all hosts; every process must call it.

    Every process writes its part of a checkpoint into the folder. If each host has a folder of its
    own at the path, they wait for each other's files until a timeout, which names no folder.

    Args:
        folder: a folder on a disk; process 0 makes it if it is missing.
        key: what the folder is, such as its config key or `"the folder of checkpoints"`, for the
            beginning of messages; every process must give the same.

    Raises:
        ConfigError: on every process; the message names the processes that do not see what process
            0 writes there.
        LaunchError: if a process does not call it in time.

    Example:
        >>> check_shared(Path("/tmp"), "run_dir")
    """
    count = jax.process_count()
    if count == 1:
        return
    topic = f"view of {key}"
    with _new_file(folder) as name:
        # Not by a collective: Gloo waits no longer than a process may look for the file.
        first = _exchange(count, topic, json.dumps([name, str(folder.absolute())]))[0]
        name, path = json.loads(first)
        if name is None:
            # Process 0 cannot write there, which is reported where it writes something of value.
            return
        answer = [_appears(folder / name), socket.gethostname()]
        answers = _exchange(count, topic, json.dumps(answer))
    found = {process: json.loads(text) for process, text in sorted(answers.items())}
    blind = [f"process {p} (host {host})" for p, (sees, host) in found.items() if not sees]
    if blind:
        raise ConfigError(
            f"{key}: {path!r} is not one folder for all {count} processes: a file that process 0 "
            f"(host {found[0][1]}) writes there is not seen by {first_few(blind, _MOST_LINES)} "
            f"within {_SEEN_SECONDS:g} s. Every process writes its part of a checkpoint there: "
            "name a folder that all hosts share, by its absolute path, or one at gs:// or s3://",
            code="folder-not-shared",
        )


@contextlib.contextmanager
def _new_file(folder: Path) -> Iterator[str | None]:
    """Writes an empty file on process 0, which exists inside the body.

    It yields the name of the file; None if it cannot be written, and on the other processes.
    """
    path = folder / f".{secrets.token_hex(8)}{TEMPORARY}"
    is_written = False
    if process_index() == 0:
        with contextlib.suppress(OSError):
            make_folder(folder)
            path.touch(exist_ok=False)
            is_written = True
    try:
        yield path.name if is_written else None
    finally:
        if is_written:
            with contextlib.suppress(OSError):
                path.unlink()


def _appears(path: Path) -> bool:
    """Whether a file of another host is seen here before long."""
    deadline = time.monotonic() + _SEEN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


def _exchange(count: int, topic: str, value: str, timeout: float = 300.0) -> dict[int, str]:
    """Writes a value and returns the values of all processes in the same round of this topic."""
    store = SharedStore()
    me = process_index()
    prefix = f"{_PREFIX}{topic}/{me}/"
    # A process's number of values so far is the round, and must be the same for all.
    number = len(store.items(prefix))
    store.set(f"{prefix}{number}", value)
    deadline = time.monotonic() + timeout
    while True:
        values = store.items(f"{_PREFIX}{topic}/")
        answers = {
            int(key.split("/")[0]): text
            for key, text in values.items()
            if key.split("/")[1] == str(number)
        }
        if len(answers) == count:
            return answers
        if time.monotonic() > deadline:
            missing = sorted(set(range(count)) - set(answers))
            raise LaunchError(
                f"processes {', '.join(map(str, missing))} of {count} did not "
                f"report their {topic} within {timeout:g} s; all must run the same "
                "program in the same order"
            )
        time.sleep(_PAUSE_SECONDS)


def _brief(value: object, most: int = 80) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]}..."


_ARRIVED, _PASSED = "axon/test/arrived/", "axon/test/passed/"


def rank_table(world: World) -> list[str]:
    """Lists the processes of a world, each with its host and its ranks; all must call it.

    Returns:
        One line per process, for process 0 to print.

    Example:
        >>> rank_table(World.emulate(4))
        ['process 0  host ...  ranks 0-3  4 x cpu']
    """
    hostname = socket.gethostname()
    alone = {world.process_index: hostname}
    hosts = alone if world.num_processes == 1 else _exchange(world.num_processes, "hosts", hostname)
    lines = []
    for process, host in sorted(hosts.items()):
        owned = [
            (rank, device)
            for rank, device in enumerate(world.mesh.devices.flat)
            if device.process_index == process
        ]
        ranks = ranges([rank for rank, _ in owned])
        kind = owned[0][1].device_kind if owned else "none"
        lines.append(f"process {process}  host {host}  ranks {ranks}  {len(owned)} x {kind}")
    return lines


def self_test(world: World, timeout: float) -> None:
    """Sums the ranks over all devices, to test at the start whether they can communicate.

    Args:
        world: the devices; every process must call it.
        timeout: seconds after which it names the processes that did not finish, and ends this one.

    Raises:
        LaunchError: when the sum is wrong.

    Example:
        >>> self_test(World.emulate(4), timeout=60)
    """
    split = NamedSharding(world.mesh, PartitionSpec(world.mesh.axis_names))
    numbers = np.arange(world.size, dtype=np.int32)
    with _deadline(world, timeout):
        placed = jax.make_array_from_callback(numbers.shape, split, lambda index: numbers[index])
        replicated = NamedSharding(world.mesh, PartitionSpec())
        total = int(jax.jit(jnp.sum, out_shardings=replicated)(placed))
    if total != numbers.sum():
        raise LaunchError(
            f"the self-test summed the ranks 0 to {world.size - 1} over all devices and got "
            f"{total} instead of {numbers.sum()}; the transport {world.backend} is broken"
        )


@contextlib.contextmanager
def _deadline(world: World, timeout: float) -> Iterator[None]:
    """Names the late processes and ends this one, unless the body finishes in time."""
    if world.num_processes == 1:
        yield
        return
    store = SharedStore()
    me = world.process_index
    store.set(f"{_ARRIVED}{me}", "")
    timer = threading.Timer(timeout, _give_up, (world, store, timeout))
    timer.daemon = True
    timer.start()
    try:
        yield
        store.set(f"{_PASSED}{me}", "")
    finally:
        timer.cancel()


def _give_up(world: World, store: SharedStore, timeout: float) -> None:
    everyone = {device.process_index for device in world.mesh.devices.flat}
    absent = sorted(everyone - {int(process) for process in store.items(_ARRIVED)})
    stuck = sorted(everyone - {int(process) for process in store.items(_PASSED)} - set(absent))
    say(
        f"axon: the collective self-test did not end within {timeout:g} s: processes "
        f"{ranges(absent) or 'none'} did not begin it, processes {ranges(stuck) or 'none'} wait "
        f"in it; check the network between their hosts. Ending process {world.process_index}\n"
    )
    os._exit(EXIT_PEER_LOST)


_STEPS = "axon/watch/step/"
_MEASURED = 5
"""The number of measured signs from which on the timeout follows them."""
_LEAST = 300.0
"""The shortest timeout that follows signs, in seconds."""
_SHORTEST, _LONGEST = 0.2, 5.0
"""The bounds of the seconds between two reports."""


class StepWatch:
    """Reports the step of this process to the others; process 0 finds a process that hangs.

    Args:
        me: this process.
        store: the store that all processes share.
        timeout: seconds within which some process must make progress.
        follows: whether the timeout applies only to the first steps, and is afterwards derived from
            the measured times of steps, validations and saves.
    """

    def __init__(self, me: Peer, store: KeyValueStore, timeout: float, follows: bool = False):
        self.me: Peer = me
        self.store: KeyValueStore = store
        self.timeout: float = timeout
        self.follows: bool = follows
        self._last = self._began = time.monotonic()
        self._first = self._longest = 0.0
        self.period = min(max(timeout / 20, _SHORTEST), _LONGEST)
        self._silences = Silences(range(me.num_processes))
        self._stopped = threading.Event()
        self._step = 0
        self._signs = 0

    def __call__(self, step: int) -> None:
        """Counts a sign of progress; all processes must give the same signs in the same order."""
        now = time.monotonic()
        if self._signs:
            self._longest = max(self._longest, now - self._last)
        else:
            self._first = now - self._began
        self._last = now
        self._step = step
        self._signs += 1

    @property
    def limit(self) -> float:
        """The current timeout in seconds.

        It is at least twice the time until the first sign, because a validation is compiled too,
        and at least 20 times the longest time between later signs.
        """
        if not self.follows or self._signs < _MEASURED:
            return self.timeout
        return max(_LEAST, 2 * self._first, 20 * self._longest)

    def run(self) -> None:
        """Reports and checks until it is stopped; the body of a thread."""
        while not self._stopped.wait(self.period):
            try:
                self._exchange()
            except Exception:
                # The store is gone; JAX reports that and ends the process.
                return

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def _exchange(self) -> None:
        report = {"who": str(self.me), "step": self._step, "signs": self._signs}
        self.store.set(f"{_STEPS}{self.me.process}", json.dumps(report))
        if self.me.process == 0:
            reports = {int(name): text for name, text in self.store.items(_STEPS).items()}
            self._silences.hear(reports)
            self._silences.tick(self.period)
            limit = self.limit
            if len(self._silences.longer_than(limit)) == self.me.num_processes:
                post_verdict(self.store, find_culprit(reports, limit))


def find_culprit(reports: Mapping[int, str], timeout: float) -> str:
    """Names the process that hangs, given that none has made progress for too long.

    Args:
        reports: the last report of each process, as JSON.
        timeout: seconds without progress.

    Example:
        >>> signs = '{"who": "a", "step": 5, "signs": 9}', '{"who": "b", "step": 5, "signs": 8}'
        >>> find_culprit(dict(enumerate(signs)), 60)
        'b hangs: no sign for 60 s after step 5, and the others wait for it; see where its main ...'
    """
    rows = [json.loads(text) for text in reports.values()]
    least = min(row["signs"] for row in rows)
    most = max(row["signs"] for row in rows)
    behind = [row for row in rows if row["signs"] == least]
    after = f"for {timeout:g} s after step {behind[0]['step']}"
    if least == most:
        return (
            f"no process made progress {after}: the devices hang, or something takes that long; "
            "raise AXON_STEP_TIMEOUT if it does"
        )
    return (
        f"{', '.join(row['who'] for row in behind)} hangs: no sign {after}, and the others wait "
        "for it; see where its main thread is in its own log, or raise AXON_STEP_TIMEOUT"
    )


@contextlib.contextmanager
def watch_steps(world: World) -> Iterator[Callable[[int], None]]:
    """Watches inside its body that all processes of a world make progress.

    `AXON_STEP_TIMEOUT` sets the timeout in seconds. A process that compiles or saves gives no sign,
    so the timeout must be longer than these take. If it is not set, the timeout starts at 1800 and
    follows the time of steps. When one process hangs, every process ends and prints where its main
    thread was.

    Args:
        world: the processes to watch; a single one is not watched.

    Yields:
        A function to call with the number of steps taken: after every step, validation and save.

    Example:
        >>> with watch_steps(World.emulate(2)) as sign:
        ...     sign(1)
    """
    if world.num_processes == 1:
        yield lambda step: None
        return
    me = Peer.here(world.process_index, world.num_processes)
    timeout = Timeouts.from_env(os.environ).step
    watch = StepWatch(me, SharedStore(), timeout, follows=STEP_TIMEOUT not in os.environ)
    threading.Thread(target=watch.run, name="axon-step-watch", daemon=True).start()
    try:
        yield watch
    finally:
        watch.stop()
