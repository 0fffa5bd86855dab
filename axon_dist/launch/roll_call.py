"""The roll call: every process reports to process 0 before JAX starts, or all hear who is missing.

JAX ends the process when a peer does not come (`SIGABRT`, no exception, no name). So the processes
meet here first, over a plain socket on the coordinator's port, which is free until JAX takes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import LaunchError
from .spec import split_address

_HELLO_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_NOTE_SECONDS = 15.0
_LINE_BYTES = 2**20
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "axon_dist")
"""Two processes with different versions of one of these may compute different numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attendee:
    """What a process says of itself.

    Args:
        process: which it is.
        num_processes: how many it expects.
        host: where it runs.
        pid: its id there.
        versions: of the libraries that decide what is computed, by name.
    """

    process: int
    num_processes: int
    host: str
    pid: int
    versions: Mapping[str, str]

    @classmethod
    def here(cls, process: int, num_processes: int) -> Attendee:
        """Describes the process that calls."""
        return cls(
            process=process,
            num_processes=num_processes,
            host=socket.gethostname(),
            pid=os.getpid(),
            versions={name: importlib.import_module(name).__version__ for name in LIBRARIES},
        )

    def validate(self) -> None:
        """Raises `TypeError` unless every field has its type; a stranger may say anything."""
        for field, kind in (
            ("process", int),
            ("num_processes", int),
            ("host", str),
            ("pid", int),
            ("versions", dict),
        ):
            if not isinstance(getattr(self, field), kind):
                raise TypeError(f"{field} is no {kind.__name__}")

    def __str__(self) -> str:
        return f"process {self.process} (host {self.host}, pid {self.pid})"


def call_roll(address: str, me: Attendee, timeout: float) -> tuple[Attendee, ...]:
    """Returns when all processes are there; every one of them must call it.

    Args:
        address: `host:port` of process 0, which listens on the port while this runs.
        me: this process.
        timeout: seconds to wait for the last one.

    Returns:
        All processes, in order.

    Raises:
        LaunchError: on every process that came: who is missing, who came twice, who expects another
            number of processes or has another version of a library.
    """
    deadline = time.monotonic() + timeout
    if me.process == 0:
        return _host(split_address(address)[1], me, deadline, timeout)
    return _attend(address, me, deadline, timeout)


def find_mistake(present: Mapping[int, Attendee], late: Attendee) -> str | None:
    """Says what is wrong with one more process, if anything.

    Args:
        present: who is there, process 0 included.
        late: the next one.

    Example:
        >>> zero = Attendee(process=0, num_processes=2, host="a", pid=1, versions={})
        >>> find_mistake({0: zero}, dataclasses.replace(zero, pid=7))
        'process 0 (host a, pid 1) and process 0 (host a, pid 7) have the same rank; give each ...'
    """
    main = present[0]
    if late.num_processes != main.num_processes:
        return (
            f"{main} expects {main.num_processes} processes and {late} expects "
            f"{late.num_processes}; give all the same WORLD_SIZE"
        )
    if late.process in present:
        return (
            f"{present[late.process]} and {late} have the same rank; give each process a RANK of "
            "its own"
        )
    for name, version in main.versions.items():
        other = late.versions.get(name)
        if other != version:
            return (
                f"{main} runs {name} {version} and {late} runs {name} {other}; install one "
                "version everywhere"
            )
    return None


def _host(port: int, me: Attendee, deadline: float, timeout: float) -> tuple[Attendee, ...]:
    present, waiting = {0: me}, list[socket.socket]()
    mistake = None
    with _listen(port) as server, contextlib.ExitStack() as stack:
        note = _Note()
        while mistake is None and len(present) < me.num_processes:
            missing = [p for p in range(me.num_processes) if p not in present]
            if time.monotonic() > deadline:
                mistake = _missing_text(missing, me.num_processes, timeout)
                break
            note.say(f"waiting for processes {_listed(missing)} of {me.num_processes}")
            arrived = _accept(server, stack)
            if arrived is None:
                continue
            connection, late = arrived
            waiting.append(connection)
            mistake = find_mistake(present, late)
            present.setdefault(late.process, late)
        ordered = tuple(present[p] for p in sorted(present))
        _answer(waiting, mistake, ordered)
    if mistake is not None:
        raise LaunchError(mistake)
    return ordered


def _listen(port: int) -> socket.socket:
    try:
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        server = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as error:
        raise LaunchError(
            f"process 0 cannot listen on port {port}: {error.strerror}; another run, or another "
            "process with RANK=0, holds it: end that, or choose another MASTER_PORT"
        ) from error
    server.settimeout(_PAUSE_SECONDS)
    return server


def _accept(
    server: socket.socket, stack: contextlib.ExitStack
) -> tuple[socket.socket, Attendee] | None:
    """The next process, or None for nobody, or a stranger who knocked on the port."""
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return None
    connection.settimeout(_HELLO_SECONDS)
    try:
        late = Attendee(**_receive(connection))
        late.validate()
    except (OSError, ValueError, TypeError):
        connection.close()
        return None
    return stack.enter_context(connection), late


def _answer(
    waiting: Sequence[socket.socket], mistake: str | None, present: Sequence[Attendee]
) -> None:
    rows = [dataclasses.asdict(attendee) for attendee in present]
    for connection in waiting:
        with contextlib.suppress(OSError):
            _send(connection, {"mistake": mistake, "present": rows})


def _attend(address: str, me: Attendee, deadline: float, timeout: float) -> tuple[Attendee, ...]:
    note, trouble = _Note(), "it did not answer"
    while time.monotonic() < deadline:
        note.say(f"process {me.process} is waiting for process 0 at {address}: {trouble}")
        try:
            answer = _report(address, me, deadline)
        except (OSError, ValueError) as error:
            trouble = str(error) or type(error).__name__
            time.sleep(_PAUSE_SECONDS)
            continue
        if answer["mistake"] is not None:
            raise LaunchError(answer["mistake"])
        return tuple(Attendee(**row) for row in answer["present"])
    raise LaunchError(
        f"process {me.process} found no process 0 at {address} within {timeout:g} s: {trouble}; "
        "check that it runs, and that MASTER_ADDR and MASTER_PORT name its host and a port that "
        "is open between the hosts"
    )


def _report(address: str, me: Attendee, deadline: float) -> dict[str, Any]:
    seconds = max(deadline - time.monotonic(), _PAUSE_SECONDS)
    with socket.create_connection(split_address(address), timeout=seconds) as connection:
        _send(connection, dataclasses.asdict(me))
        # Process 0 may have started its clock later, and answers when its own time is up.
        connection.settimeout(2 * seconds + _HELLO_SECONDS)
        return _receive(connection)


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb") as lines:
        line = lines.readline(_LINE_BYTES)
    if not line:
        raise ConnectionError("process 0 closed the connection")
    return json.loads(line)


def _missing_text(missing: Sequence[int], count: int, timeout: float) -> str:
    return (
        f"processes {_listed(missing)} of {count} did not report within {timeout:g} s; check that "
        "every host started them, that they reach process 0, and that WORLD_SIZE is right"
    )


def _listed(processes: Sequence[int], most: int = 8) -> str:
    """Example: `_listed([1, 2])` is `1, 2`; a long list ends with how many more there are."""
    head = ", ".join(map(str, processes[:most]))
    return head if len(processes) <= most else f"{head} and {len(processes) - most} more"


class _Note:
    """Says what takes so long, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _NOTE_SECONDS

    def say(self, text: str) -> None:
        if time.monotonic() > self._next:
            print(f"axon: {text}", file=sys.stderr, flush=True)
            self._next = time.monotonic() + _NOTE_SECONDS
