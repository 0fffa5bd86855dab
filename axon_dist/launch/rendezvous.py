"""The rendezvous: every process reports to process 0 before JAX starts.

If a peer does not arrive, JAX aborts a process by `SIGABRT`, without an exception or the name of
the peer. So the processes first connect here and learn which one is missing. They use a plain
socket on the coordinator's port, which is free until JAX takes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import importlib
import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from ..core.arguments import check_fields
from ..core.errors import LaunchError, reworded
from ..core.typing import JsonDict
from ..core.words import first_few
from .environment import bind_address, split_address
from .settings import difference_text, read_settings

_HELLO_SECONDS = 5.0
_PAUSE_SECONDS = 0.2
_NOTE_SECONDS = 15.0
_HELLO_BYTES, _LINE_BYTES = 2**16, 2**24
_STRANGERS = 64
"""The most connections of other programs that are open at a time."""
TOKEN = "AXON_RUN_TOKEN"
"""The variable with the shared secret of a run's processes."""
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "axon_dist")
"""Libraries whose versions must be equal, because programs and numbers depend on them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A process's description of itself.

    Args:
        process: its index.
        num_processes: the number of processes that it expects.
        host: the name of its host.
        pid: its process id there.
        versions: the versions of `LIBRARIES`, by name.
        settings: the settings of JAX and the environment that change a program or its numbers.
    """

    process: int
    num_processes: int
    host: str
    pid: int
    versions: Mapping[str, str]
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def here(cls, process: int, num_processes: int) -> Peer:
        """Describes the process that calls."""
        return cls(
            process=process,
            num_processes=num_processes,
            host=socket.gethostname(),
            pid=os.getpid(),
            versions={name: importlib.import_module(name).__version__ for name in LIBRARIES},
            settings=read_settings(os.environ, jax.config.values),
        )

    def validate(self) -> None:
        """Checks the fields, because another program may send anything.

        Raises:
            ConfigError: if a field has the wrong type.
            ValueError: if there is no such process.
        """
        check_fields(self)
        if not 0 <= self.process < self.num_processes:
            raise ValueError(f"there is no process {self.process} of {self.num_processes}")

    def __str__(self) -> str:
        return f"process {self.process} (host {self.host}, pid {self.pid})"


def rendezvous(address: str, me: Peer, timeout: float, token: str = "") -> tuple[Peer, ...]:
    """Waits until all processes have arrived; every process must call it.

    Each process, including process 0, proves that it knows the token without sending it. The proof
    is an HMAC-SHA256 of its message and of a nonce that the other side has drawn.

    Args:
        address: `host:port` of process 0, which listens there during this call.
        me: this process.
        timeout: seconds to wait for the last one.
        token: the shared secret of the run's processes; "" admits everyone.

    Returns:
        All processes, in order.

    Raises:
        LaunchError: on every process that arrived, if a process is missing, arrived twice, expects
            another number of processes, or has other library versions or settings.
    """
    meet = _host if me.process == 0 else _attend
    return meet(address, me, timeout, token)


def find_mistake(present: Mapping[int, Peer], late: Peer) -> str | None:
    """Returns why a new process does not fit the others, or None if it does.

    Args:
        present: the processes that have arrived, including process 0.
        late: the new process.

    Example:
        >>> zero = Peer(process=0, num_processes=2, host="a", pid=1, versions={})
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
            f"{present[late.process]} and {late} have the same rank; give each process its own RANK"
        )
    for name, version in main.versions.items():
        other = late.versions.get(name)
        if other != version:
            return (
                f"{main} runs {name} {version} and {late} runs {name} {other}; install one "
                "version everywhere"
            )
    pair = (main.process, late.process)
    if differences := difference_text(main.settings, late.settings, pair):
        return (
            f"{main} and {late} would compute different results: {differences}; use the same "
            "settings everywhere, in the environment or by jax.config.update before World.init()"
        )
    return None


def _host(address: str, me: Peer, timeout: float, token: str) -> tuple[Peer, ...]:
    present = {0: me}
    waiting: list[_Connection] = []
    mistake = None
    deadline = time.monotonic() + timeout
    with contextlib.closing(_Listener(address, me.num_processes + _STRANGERS, token)) as listener:
        note = _Note()
        while mistake is None and len(present) < me.num_processes:
            missing = [p for p in range(me.num_processes) if p not in present]
            if time.monotonic() > deadline:
                mistake = _missing_text(missing, me.num_processes, timeout, listener.refused)
                break
            note.say(
                f"waiting for processes {first_few([*map(str, missing)], 8)} of {me.num_processes}"
            )
            for caller, late in listener.arrivals():
                waiting.append(caller)
                mistake = mistake or find_mistake(present, late)
                present.setdefault(late.process, late)
        ordered = tuple(present[p] for p in sorted(present))
        answer = {"mistake": mistake, "present": [*map(dataclasses.asdict, ordered)]}
        for caller in waiting:
            caller.connection.settimeout(_HELLO_SECONDS)
            proof = _proof(token, "answer", caller.drawn, answer)
            with contextlib.suppress(OSError):
                _send(caller.connection, {"said": answer, "proof": proof})
    if mistake is not None:
        raise LaunchError(mistake)
    return ordered


@dataclasses.dataclass(eq=False)
class _Connection:
    """A connection to process 0, from a process of the run or another program.

    Args:
        connection: a non-blocking socket.
        deadline: the time by which it must have identified itself.
        nonce: the nonce that its proof must cover.
        received: the bytes of the message so far.
        drawn: the nonce that the caller has drawn.
    """

    connection: socket.socket
    deadline: float
    nonce: str
    received: bytearray = dataclasses.field(default_factory=bytearray)
    drawn: str = ""


class _Listener:
    """Serves all connections concurrently, so a silent or slow one does not delay others.

    Args:
        address: `host:port` to listen on.
        most: the most connections at a time; further ones are closed at once.
        token: the secret that callers must prove to know.

    Attributes:
        refused: the number of callers whose proof was wrong.
    """

    def __init__(self, address: str, most: int, token: str):
        self.most = most
        self.token = token
        self.refused = 0
        self._server = listen(address)
        self._open: set[_Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)

    def close(self) -> None:
        """Closes all connections, including those of the run's processes."""
        self._selector.close()
        self._server.close()
        for caller in self._open:
            caller.connection.close()

    def arrivals(self) -> Iterator[tuple[_Connection, Peer]]:
        """Waits a moment; yields processes that have identified themselves since the last call."""
        for key, _ in self._selector.select(_PAUSE_SECONDS):
            if key.data is None:
                self._accept()
            elif (late := self._hear(key.data)) is not None:
                self._selector.unregister(key.data.connection)
                yield key.data, late
        for caller in [g for g in self._open if not g.drawn and time.monotonic() > g.deadline]:
            self._drop(caller)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._server.accept()
            connection.setblocking(False)
            caller = _Connection(
                connection, time.monotonic() + _HELLO_SECONDS, secrets.token_hex(16)
            )
            self._open.add(caller)
            if len(self._open) > self.most:
                self._drop(caller)
                return
            self._selector.register(connection, selectors.EVENT_READ, caller)
            try:
                _send(connection, {"nonce": caller.nonce})
            except OSError:
                self._drop(caller)

    def _hear(self, caller: _Connection) -> Peer | None:
        """Reads from a caller; returns its description once the message is complete, else None."""
        try:
            chunk = caller.connection.recv(_HELLO_BYTES)
            caller.received += chunk
            if b"\n" not in chunk:
                if not chunk or len(caller.received) > _HELLO_BYTES:
                    raise ConnectionError("it closed the connection, or its message is too long")
                return None
            message = json.loads(caller.received)
            fields = message["peer"]
            nonce = str(message["nonce"])
            proof = _proof(self.token, "peer", caller.nonce, nonce, fields)
            if not hmac.compare_digest(proof.encode(), str(message["proof"]).encode()):
                self.refused += 1
                _send(caller.connection, {"refused": True})
                raise ConnectionError("it does not know the token")
            late = Peer(**fields)
            late.validate()
        except BlockingIOError:
            return None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            self._drop(caller)
            return None
        caller.drawn = nonce or "-"
        return late

    def _drop(self, caller: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(caller.connection)
        caller.connection.close()
        self._open.discard(caller)


def listen(address: str) -> socket.socket:
    """Listens at the coordinator's address, and only there where possible.

    Raises:
        LaunchError: if the port is taken.
    """
    host, port = bind_address(address)
    what = f"process 0 cannot listen on port {port}"
    advice = (
        "another run, or another process with RANK=0, uses it: end it, or choose another "
        "MASTER_PORT"
    )
    with reworded(what, advice, LaunchError):
        has_both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both or ":" in host else socket.AF_INET
        server = socket.create_server((host, port), family=family, dualstack_ipv6=has_both)
    server.setblocking(False)
    return server


def _attend(address: str, me: Peer, timeout: float, token: str) -> tuple[Peer, ...]:
    deadline = time.monotonic() + timeout
    note = _Note()
    trouble = "it did not answer"
    while time.monotonic() < deadline:
        note.say(f"process {me.process} is waiting for process 0 at {address}: {trouble}")
        try:
            answer = _report(address, me, deadline, token)
            if answer["mistake"] is not None:
                raise LaunchError(answer["mistake"])
            return tuple(Peer(**row) for row in answer["present"])
        except LaunchError:
            raise
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            trouble = str(error) or type(error).__name__
            time.sleep(_PAUSE_SECONDS)
    raise LaunchError(
        f"process {me.process} found no process 0 at {address} within {timeout:g} s: {trouble}; "
        "check that it runs, and that MASTER_ADDR and MASTER_PORT name its host and a port that "
        "is open between the hosts"
    )


def _report(address: str, me: Peer, deadline: float, token: str) -> JsonDict:
    seconds = max(deadline - time.monotonic(), _PAUSE_SECONDS)
    with socket.create_connection(split_address(address), timeout=seconds) as connection:
        nonce = str(_receive(connection, time.monotonic() + _HELLO_SECONDS)["nonce"])
        drawn = secrets.token_hex(16)
        fields = dataclasses.asdict(me)
        proof = _proof(token, "peer", nonce, drawn, fields)
        _send(connection, {"peer": fields, "nonce": drawn, "proof": proof})
        # Process 0 may have started later, and then answers only at its own, later deadline.
        answer = _receive(connection, time.monotonic() + 2 * seconds + _HELLO_SECONDS)
    if answer.get("refused"):
        raise LaunchError(
            f"process 0 at {address} has another {TOKEN} than process {me.process}; set the same "
            "for all processes of a run, or for none"
        )
    proof = _proof(token, "answer", drawn, answer["said"])
    if not hmac.compare_digest(proof.encode(), str(answer["proof"]).encode()):
        raise ConnectionError(f"the program that answers has another {TOKEN}")
    return answer["said"]


def _proof(token: str, *parts: Any) -> str:
    """The HMAC of a message, which proves knowledge of the token."""
    text = json.dumps(parts, sort_keys=True).encode()
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline: float) -> JsonDict:
    """Receives one line, which must arrive completely before the deadline."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        chunk = connection.recv(_LINE_BYTES)
        line += chunk
        if not chunk:
            raise ConnectionError("process 0 closed the connection")
        if len(line) > _LINE_BYTES or time.monotonic() > deadline:
            raise ConnectionError("the program that answers is not process 0 of a run")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ConnectionError("the program that answers is not process 0 of a run")
    return message


def _missing_text(missing: Sequence[int], count: int, timeout: float, refused: int) -> str:
    strangers = f"; {refused} connections had another {TOKEN} or none" if refused else ""
    return (
        f"processes {first_few([*map(str, missing)], 8)} of {count} did not report within "
        f"{timeout:g} s; check that every host started them, that they reach process 0, and that "
        "WORLD_SIZE is right"
        f"{strangers}"
    )


class _Note:
    """Prints every `_NOTE_SECONDS` what this process waits for."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _NOTE_SECONDS

    def say(self, text: str) -> None:
        if time.monotonic() > self._next:
            print(f"axon: {text}", file=sys.stderr, flush=True)
            self._next = time.monotonic() + _NOTE_SECONDS
