"""The local launcher: starts the processes of a run on this host and waits for them."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
import signal
import socket
import stat
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from ..core.arguments import check_fields
from ..core.errors import LaunchError, reworded
from ..core.files import open_regular
from .child import Child, Reaper, ignoring_closed_terminal, start_child
from .distributed import MOST_DEVICES
from .environment import DEFAULT_PORT, parse_host, parse_port
from .rendezvous import TOKEN
from .watchdog import EXIT_PEER_LOST

MEMORY = "AXON_MEMORY"
"""The variable with a folder in host memory, for copies of the state of a run."""

_HOST_MEMORY = Path("/dev/shm")
_PREFIX, _LOCK, _MAKING_SECONDS = "axon-", "lock", 60.0


@contextlib.contextmanager
def host_folder(root: Path = _HOST_MEMORY) -> Iterator[Path | None]:
    """Makes a folder in the memory of this host for the duration of the context.

    Only its owner can access it. The launcher holds a lock in it, so the next launcher of the same
    user can recognize and remove a folder that was left behind because `Reaper` was killed too.

    Args:
        root: a memory file system.

    Yields:
        The folder; None on a host without such memory.

    Example:
        >>> with host_folder(Path(tempfile.mkdtemp())) as folder:
        ...     folder.is_dir()
        True
        >>> folder.exists()
        False
    """
    if not os.access(root, os.W_OK | os.X_OK):
        yield None
        return
    prefix = f"{_PREFIX}{os.getuid()}-"
    for leftover in root.glob(f"{prefix}*"):
        _remove_unless_locked(leftover)
    try:
        folder, lock = _locked_folder(prefix, root)
    except OSError:
        # Memory is full. A run that needs copies reports that; others do not need the folder.
        yield None
        return
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _locked_folder(prefix: str, root: Path) -> tuple[Path, BinaryIO]:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    try:
        made = folder / f"{_LOCK}.new"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        lock = os.fdopen(open_regular(made, flags, 0o600), "r+b")
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.replace(made, folder / _LOCK)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, lock


def _remove_unless_locked(folder: Path) -> None:
    """Removes a folder whose launcher is gone.

    A new folder without a lock is kept, because another launcher is just creating it. Folders and
    files of other users are ignored, even if they have such a name.
    """
    with contextlib.suppress(OSError):
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return
        is_old = time.time() - status.st_mtime > _MAKING_SECONDS
        flags = os.O_RDWR | (os.O_CREAT if is_old else 0)
        with open(open_regular(folder / _LOCK, flags), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


USER_ERROR = 2
"""The exit code of a user error. A restart would fail in the same way."""

INTERRUPTED = 75
"""The exit code of a run that a signal ended between two steps, after it saved its state.

It is `EX_TEMPFAIL` of `sysexits.h`, "try again later". A scheduler restarts the run with
`--resume auto`.
"""

PLANNED = "AXON_PLANNED_WORLD_SIZE"
"""The variable with the planned number of processes of a run, including lost ones."""

ELASTIC = "AXON_ELASTIC"
"""The variable that is set if a run continues without lost processes."""

_MOST_PROCESSES, _MOST_NODES = 4096, 2**20
_POLL_SECONDS = 0.1
_FOREIGN = frozenset({"AXON_CLUSTER", "TORCHELASTIC_USE_AGENT_STORE"})
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDING = (signal.SIGQUIT, signal.SIGUSR2, signal.SIGALRM, signal.SIGXCPU)
"""Signals that end a process which does not handle them."""
_STOPPING_SECONDS = 1800.0
"""Seconds that the ranks have after a signal to finish the step and save."""
_LAST_SECONDS = 15.0
"""Seconds that the other ranks have to end after one has saved and ended."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The processes that the local launcher starts.

    Args:
        command: the program and its arguments, the same for every rank.
        num_processes: the number of processes on this host.
        nnodes: the number of hosts that run a launcher.
        node_rank: the index of this host.
        master_addr: the host of rank 0.
        master_port: a free port on that host; None finds one, on a single host only.
        devices_per_process: CPU devices that each process emulates; None lets the command decide.
        max_restarts: how often a failed run restarts.
        elastic: restart without the lost processes.
        rejoin_after: seconds on fewer processes after which the run stops between two steps and
            starts again with all processes; None for never.
        grace: seconds that the other ranks have to end by themselves after one has failed.
        log_dir: the folder for `rank-<r>.log`.

    Raises:
        LaunchError: for an invalid plan.
    """

    command: tuple[str, ...]
    num_processes: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int | None = None
    devices_per_process: int | None = None
    max_restarts: int = 0
    elastic: bool = False
    rejoin_after: float | None = None
    grace: float = 5.0
    log_dir: Path = Path("runs/launch")

    def __post_init__(self) -> None:
        check_fields(self)
        self.validate()

    def validate(self) -> None:
        """Raises `LaunchError` for counts that are out of range or contradict each other."""
        if not self.command:
            raise LaunchError("got no command; give one after --, as in: axon launch -n 2 -- CMD")
        can_be = 1 <= self.num_processes <= _MOST_PROCESSES and 1 <= self.nnodes <= _MOST_NODES
        if not can_be or self.max_restarts < 0 or self.grace < 0:
            raise LaunchError(
                f"got {self.num_processes} processes on each of {self.nnodes} hosts, "
                f"{self.max_restarts} restarts and {self.grace:g} s of grace; processes must be "
                f"in 1..{_MOST_PROCESSES}, hosts in 1..{_MOST_NODES}, the others at least 0"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise LaunchError(
                f"got node rank {self.node_rank} of {self.nnodes} hosts; they count from 0 to "
                f"{self.nnodes - 1}"
            )
        devices = self.devices_per_process
        if devices is not None and not 1 <= devices <= MOST_DEVICES:
            raise LaunchError(
                f"got {devices} devices per process; a process can emulate 1 to {MOST_DEVICES}"
            )
        if self.master_port is not None:
            parse_port(str(self.master_port), "the master port")
        if self.rejoin_after is not None and not (self.elastic and self.rejoin_after > 0):
            raise LaunchError(
                f"got rejoin_after={self.rejoin_after:g} {'with' if self.elastic else 'without'} "
                "elastic; it needs elastic, and must be more than 0 seconds: give "
                "--elastic --rejoin-after 600, or neither"
            )
        parse_host(self.master_addr, "the master address")
        if self.nnodes > 1 and self.master_addr in ("localhost", "127.0.0.1", "::1"):
            raise LaunchError(
                f"{self.nnodes} hosts cannot connect to {self.master_addr}, which is a different "
                "machine for each; give the host of node 0 with --master-addr"
            )
        if self.nnodes > 1 and self.elastic:
            raise LaunchError(
                f"elastic runs must be on one host, and this one has {self.nnodes}; let the "
                "cluster's scheduler restart it with fewer hosts"
            )
        if self.elastic and not self.max_restarts:
            raise LaunchError(
                "got elastic with max_restarts=0, so the run would never restart without lost "
                "processes; give --max-restarts too, such as --elastic --max-restarts 9"
            )


def rank_environments(
    plan: LaunchPlan, base: Mapping[str, str], num_processes: int, port: int
) -> list[dict[str, str]]:
    """The environments of the ranks on this host: torchrun's variables, and the device count.

    The ranks of a single host share a secret token. Those of several hosts share one if
    `AXON_RUN_TOKEN` is the same for all launchers.

    Args:
        plan: the command, and the numbers of processes and hosts.
        base: the environment of the launcher.
        num_processes: how many to start on this host.
        port: the port on which rank 0 listens.

    Example:
        >>> plan = LaunchPlan(command=("true",), nnodes=2, node_rank=1, master_addr="node0")
        >>> [env["RANK"] for env in rank_environments(plan, {}, 4, 29500)]
        ['4', '5', '6', '7']
    """
    shared = {
        **{name: value for name, value in base.items() if name not in _FOREIGN},
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(plan.nnodes * num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        PLANNED: str(plan.nnodes * plan.num_processes),
    }
    if plan.elastic:
        shared[ELASTIC] = "1"
    if plan.nnodes == 1 and not shared.get(TOKEN):
        shared[TOKEN] = secrets.token_hex(32)
    if plan.devices_per_process is not None:
        shared["JAX_NUM_CPU_DEVICES"] = str(plan.devices_per_process)
    first = plan.node_rank * num_processes
    return [
        {**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)}
        for local in range(num_processes)
    ]


def launch(plan: LaunchPlan, tell: Callable[[str], None]) -> int:
    """Runs a plan to its end, with restarts.

    Args:
        plan: what to start.
        tell: called with a line about what happens.

    Returns:
        0; 75 if a signal ended the run, after it saved its state if it had one; 76 if a rank was
        killed or lost; 130 or 143 if a second SIGINT or SIGTERM ended it at once; or the exit code
        of the rank that failed first in the last attempt.

    Raises:
        LaunchError: if the command does not exist.
    """
    with handling_signals() as received:
        return _launch(plan, ignoring_closed_terminal(tell), received)


@dataclasses.dataclass(eq=False)
class ReceivedSignals:
    """The received signals, and the ranks to which they are forwarded."""

    numbers: list[int] = dataclasses.field(default_factory=list)
    children: Sequence[Child] = ()

    def __bool__(self) -> bool:
        return bool(self.numbers)

    def take(self, number: int, frame: FrameType | None) -> None:
        """Records a signal and forwards it; a signal handler."""
        self.numbers.append(number)
        for child in self.children:
            child.stop(number)

    @property
    def aborting(self) -> list[int]:
        """The received signals other than SIGHUP; the second of them ends a run at once."""
        return [number for number in self.numbers if number != signal.SIGHUP]


@contextlib.contextmanager
def handling_signals() -> Iterator[ReceivedSignals]:
    """Handles the signals that end a run, as long as its ranks live."""
    received = ReceivedSignals()
    # Under `nohup` SIGHUP stays ignored, here and in the ranks.
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():
        handled = []
    before = {number: signal.signal(number, received.take) for number in handled}
    if handled and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # SIGUSR1 asks a rank for a trace. Sent to a whole job, it must not kill the launcher, nor
        # a rank that has no handler yet: ranks inherit that the signal is ignored.
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield received
    finally:
        for number, handler in before.items():
            # A closing terminal sends SIGHUP twice; the second must not prevent the exit code.
            stays_ignored = number == signal.SIGHUP and received
            signal.signal(number, signal.SIG_IGN if stays_ignored else handler)


@contextlib.contextmanager
def _deferring_ends() -> Iterator[None]:
    """Defers signals that would end the launcher, for example before a new rank is watched."""
    numbers: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    ends = [x for x in _ENDING if is_main and signal.getsignal(x) is signal.SIG_DFL]
    for number in ends:
        # A handler, not a mask: the new process would inherit a mask.
        signal.signal(number, lambda number, frame: numbers.append(number))
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)
        for number in numbers:
            os.kill(os.getpid(), number)


def _launch(plan: LaunchPlan, tell: Callable[[str], None], received: ReceivedSignals) -> int:
    # On the PATH, or in the folder of the running Python, like `axon` itself.
    name, *arguments = plan.command
    path = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    path = path or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        raise LaunchError(f"there is no program {name!r}; give one that is on the PATH")
    plan = dataclasses.replace(plan, command=(path, *arguments))
    what = f"cannot make the folder {str(plan.log_dir)!r} for logs"
    with reworded(what, "name another with --log-dir", LaunchError):
        plan.log_dir.mkdir(parents=True, exist_ok=True)
    tell(f"{plan.num_processes} processes; their logs: {plan.log_dir}/rank-*.log")
    # If the ranks may restart, they get memory that outlives them.
    needs_memory = plan.max_restarts and not os.environ.get(MEMORY)
    with host_folder() if needs_memory else contextlib.nullcontext() as folder:
        memory = {} if folder is None else {MEMORY: str(folder)}
        return _run_attempts(plan, {**memory, **os.environ}, tell, received)


def _run_attempts(
    plan: LaunchPlan,
    base: Mapping[str, str],
    tell: Callable[[str], None],
    received: ReceivedSignals,
) -> int:
    count = plan.num_processes
    restarts = 0
    while True:
        may_restart = restarts < plan.max_restarts
        attempt = _Attempt(plan, count, tell, base, received, may_restart=may_restart)
        code = attempt.run()
        if attempt.stops_to_rejoin and not received and attempt.failed is None:
            count = plan.num_processes
            tell(f"continuing with all {count} processes")
            continue
        tried = count
        count = next_count(plan, count, attempt.failed)
        if code == 0 or received or not count:
            return code
        if code == USER_ERROR:
            tell(f"{tried} processes cannot continue this run; trying {count}")
            continue
        if restarts == plan.max_restarts:
            return code
        restarts += 1
        tell(f"restart {restarts} of {plan.max_restarts}, with {count} processes")


def next_count(plan: LaunchPlan, count: int, failed: Child | None) -> int:
    """The number of processes of the next attempt; 0 for no further attempt.

    Args:
        plan: the command, and the numbers of processes and hosts.
        count: the number of processes of the failed attempt.
        failed: the rank that failed first.
    """
    if failed is None:
        return 0
    has_shrunk = count < plan.num_processes
    if failed.code == USER_ERROR:
        # A user error, or sizes that do not divide by the smaller number of processes.
        return count - 1 if has_shrunk else 0
    is_lost = failed.was_killed or failed.code == EXIT_PEER_LOST
    return max(count - 1, 1) if plan.elastic and is_lost else count


def may_end_at_once(failed: Child, memory: str | None) -> bool:
    """Whether the other ranks can be killed at once, because they need not report or save.

    Args:
        failed: the rank that failed first.
        memory: the folder in host memory that may hold copies of the state.
    """
    # After an abort by JAX the other ranks may know more than the launcher.
    is_killed = failed.was_killed and failed.code != 128 + signal.SIGABRT
    return is_killed and memory is not None and any(Path(memory).glob("*.copy"))


def has_progressed(memory: str | None, since: float) -> bool:
    """Whether a run has copied its state to memory since a time; True if it makes no copies.

    Args:
        memory: the folder in host memory.
        since: seconds since the epoch.
    """
    copies = [] if memory is None else list(Path(memory).glob("*.copy"))
    with contextlib.suppress(FileNotFoundError):
        return not copies or any(path.stat().st_mtime > since for path in copies)
    return False


def free_port() -> int:
    """A free port of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass(eq=False)
class _Attempt:
    """One start of all ranks of this host."""

    plan: LaunchPlan
    count: int
    tell: Callable[[str], None]
    base: Mapping[str, str]
    received: ReceivedSignals
    may_restart: bool = False
    stops_to_rejoin: bool = False
    children: list[Child] = dataclasses.field(default_factory=list)
    late: list[Child] = dataclasses.field(default_factory=list)
    failed: Child | None = None
    _last: float | None = None

    def run(self) -> int:
        """Starts the ranks, waits for their end, and leaves none running."""
        remove_folder = "" if MEMORY in os.environ else self.base.get(MEMORY, "")
        self.received.children = self.children
        with contextlib.closing(Reaper(remove_folder)) as guard:
            try:
                self._start(guard)
                if self.received:
                    # Not all ranks may have got the signal, and none has taken a step.
                    self.late = [child for child in self.children if child.code is None]
                    self._end(self.late)
                else:
                    self.failed = self._wait()
                    if self.failed is not None:
                        self._end_others(self.failed)
            finally:
                for child in self.children:
                    if not child.kill():
                        pid = child.process.pid
                        self.tell(f"rank {child.rank}, process {pid}, cannot be killed")
        return self._code()

    def _code(self) -> int:
        """The exit code of the run, once all ranks have ended."""
        if self.failed is not None:
            # Without a launcher, the ranks that are left end with this code, too.
            return EXIT_PEER_LOST if self.failed.was_killed else self.failed.code or 0
        codes = [child.code or 0 for child in self.children if child not in self.late]
        if self.received:
            # A second signal has an effect only if a rank had not saved yet.
            aborting = self.received.aborting[1:]
            if aborting and (self.late or not {0, INTERRUPTED}.issuperset(codes)):
                return 128 + aborting[-1]
            return INTERRUPTED if any(codes) or len(codes) < self.count else 0
        return INTERRUPTED if INTERRUPTED in codes else max(codes, default=0)

    def _start(self, guard: Reaper) -> None:
        plan = self.plan
        port = plan.master_port or (free_port() if plan.nnodes == 1 else DEFAULT_PORT)
        for env in rank_environments(plan, self.base, self.count, port):
            if self.received:
                return
            rank = int(env["RANK"])
            log = plan.log_dir / f"rank-{rank}.log"
            what = f"cannot start {plan.command[0]!r} as rank {rank}"
            advice = "give a program that this host can run, with its arguments"
            with _deferring_ends():
                with reworded(what, advice, LaunchError, (OSError, ValueError)):
                    child = start_child(plan.command, env, rank, log, self.tell)
                self.children.append(child)
                guard.watch(child)

    def _wait(self) -> Child | None:
        """Returns the first rank that failed, or None when all have ended or stopped to rejoin."""
        started = time.time()
        while True:
            # A command that does not handle a signal was ended by it, with 128 + its number.
            sent = [*self.received.numbers, *([signal.SIGTERM] if self.stops_to_rejoin else [])]
            stopped = {INTERRUPTED, *(128 + number for number in sent)}
            codes = [child.code for child in self.children]
            for child, code in zip(self.children, codes, strict=True):
                if code and code not in stopped and not child.was_starting:
                    return child
            if None not in codes:
                # If all ranks ended by themselves in the meantime, there is nothing to rejoin.
                self.stops_to_rejoin = self.stops_to_rejoin and not stopped.isdisjoint(codes)
                return None
            if self._is_overdue(any(code in stopped for code in codes)):
                return self._end_late(stopped)
            if not self.stops_to_rejoin and self._is_time_to_rejoin(started):
                # The ranks stop between two steps, so that lost ones can rejoin.
                self.stops_to_rejoin = True
                self.tell(
                    f"stopping {self.count} processes after this step, so that others can rejoin"
                )
                for child in self.children:
                    child.send(signal.SIGTERM)
            time.sleep(_POLL_SECONDS)

    def _is_overdue(self, has_saved: bool) -> bool:
        """Whether ranks still run too long after a signal, or after another rank ended."""
        seconds = [_LAST_SECONDS] if has_saved else []
        if self.received or self.stops_to_rejoin:
            seconds.append(_STOPPING_SECONDS)
        if len(self.received.aborting) > 1:
            seconds.append(self.plan.grace)
        if not seconds:
            return False
        now = time.monotonic()
        self._last = min(now + min(seconds), self._last or now + min(seconds))
        return now >= self._last

    def _end_late(self, stopped: set[int]) -> Child | None:
        """Ends overdue ranks; returns the first that did not stop on request as failed."""
        late = [child for child in self.children if child.code is None]
        names = ", ".join(str(child.rank) for child in late)
        self.tell(f"ranks {names} did not end in time; ending them (log: {late[0].log})")
        self._end(late)
        if any(child.code in stopped for child in self.children if child not in late):
            # The run stopped as requested: saving needs all ranks, so the state is saved.
            self.late = [child for child in late if child.code not in stopped]
            return None
        if len(self.received.aborting) > 1:
            self.late = late
            return None
        return next((child for child in late if child.code and child.code not in stopped), None)

    def _end(self, children: Sequence[Child]) -> None:
        """Sends SIGTERM once, and kills ranks that still run after the grace period."""
        for child in children:
            child.send(signal.SIGTERM)
        self._wait_for_end(self.plan.grace)
        for child in children:
            child.kill()

    def _wait_for_end(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(child.code is None for child in self.children) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _is_time_to_rejoin(self, started: float) -> bool:
        """Whether lost ranks may rejoin: not before the others have made progress."""
        seconds = self.plan.rejoin_after
        if seconds is None or self.count == self.plan.num_processes:
            return False
        return time.time() - started > seconds and has_progressed(self.base.get(MEMORY), started)

    def _end_others(self, failed: Child) -> None:
        self.tell(f"{failed.describe_end()}; ending the other ranks (log: {failed.log})")
        is_at_once = self.may_restart and may_end_at_once(failed, self.base.get(MEMORY))
        if not is_at_once:
            self._wait_for_end(self.plan.grace)
            self._end([child for child in self.children if child.code is None])
