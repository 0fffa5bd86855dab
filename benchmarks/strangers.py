"""Strangers on the port where the processes of a run meet: none joins, and none keeps others out.

    python -m benchmarks.strangers

Process 0 of two waits; strangers connect and say nothing, half a line, too much, invalid JSON,
what a process would say with another token, or what one has said before with the right token. They
say it at once or byte by byte, hang up with a reset, and hundreds of them stay connected. Then
process 1 comes, and both have to meet within seconds. At last both meet in a network of their own,
as `SECURITY.md` advises on a host that is shared: nobody else reaches the port. Root also tries
its rule of the firewall, in a network that is made for it: one user alone reaches the port.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from axon_dist.core.errors import LaunchError
from axon_dist.launch.local import free_port
from axon_dist.launch.rendezvous import Peer, _proof, rendezvous

_SECONDS = 30.0


def sayings(token: str) -> dict[str, bytes]:
    """The messages of strangers, by kind.

    Args:
        token: of the run, with which one of the sayings was once right.
    """
    peer = dataclasses.asdict(Peer.here(1, 2))
    nonce, drawn = secrets.token_hex(16), secrets.token_hex(16)
    replayed = {"peer": peer, "nonce": drawn, "proof": _proof(token, "peer", nonce, drawn, peer)}
    without = replayed | {"proof": _proof("", "peer", nonce, drawn, peer)}
    wrong = {"peer": peer, "nonce": secrets.token_hex(16), "proof": secrets.token_hex(32)}
    return {
        "nothing": b"",
        "an empty line": b"\n",
        "half a line": b'{"peer": ',
        "HTTP": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        "an empty object": b"{}\n",
        "a list": b"[]\n",
        "no object": b"null\n",
        "a number without end": b"1" * 60_000 + b"\n",
        "a number that is infinite": b"1e999\n",
        "endless depth": b"[" * 60_000 + b"\n",
        "too much": b'"' + b"a" * 2**20,
        "no text": b"\xff\xfe\x00\n",
        "another token": json.dumps(wrong).encode() + b"\n",
        "what a process has said before": json.dumps(replayed).encode() + b"\n",
        "no token": json.dumps(without).encode() + b"\n",
        "to be process 0": json.dumps({**wrong, "peer": peer | {"process": 0}}).encode() + b"\n",
        "no such process": json.dumps({**wrong, "peer": peer | {"process": -1}}).encode() + b"\n",
        "a run of other size": (
            json.dumps({**wrong, "peer": peer | {"num_processes": 2**40}}).encode() + b"\n"
        ),
        "a proof that is no text": json.dumps({**wrong, "proof": [1]}).encode() + b"\n",
        "an answer of process 0": b'{"said": {"mistake": "end", "present": []}, "proof": ""}\n',
        "a process of other types": json.dumps({**wrong, "peer": {"process": []}}).encode() + b"\n",
    }


def outlives(name: str, connections: int, way: str = "at once") -> bool:
    """Whether two processes meet where so many strangers say something and stay.

    Args:
        name: a key of `sayings`.
        connections: how many strangers.
        way: a key of `WAYS`.
    """
    port, token = free_port(), secrets.token_hex(16)
    said = sayings(token)[name]
    address, met = f"127.0.0.1:{port}", list[int]()

    def come(process: int) -> None:
        with contextlib.suppress(LaunchError):
            met.append(len(rendezvous(address, Peer.here(process, 2), _SECONDS, token)))

    host = threading.Thread(target=come, args=(0,))
    host.start()
    with contextlib.ExitStack() as stack:
        WAYS[way](_connect(port, stack), said)
        for _ in range(connections - 1):
            with contextlib.suppress(OSError):
                WAYS[way](_connect(port, stack), said)
        come(1)
        host.join()
    return met == [2, 2]


def _byte_by_byte(connection: socket.socket, said: bytes) -> None:
    def drip() -> None:
        with contextlib.suppress(OSError):
            for place in range(len(said)):
                connection.sendall(said[place : place + 1])
                time.sleep(0.05)

    threading.Thread(target=drip, daemon=True).start()


def _with_a_reset(connection: socket.socket, said: bytes) -> None:
    connection.sendall(said)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


WAYS: dict[str, Callable[[socket.socket, bytes], None]] = {
    "at once": lambda connection, said: connection.sendall(said),
    "byte by byte": _byte_by_byte,
    "with a reset": _with_a_reset,
}
"""By its name how a stranger says something."""

_ALONE = "ip link set lo up; exec {python} -m benchmarks.strangers --meet {port}"
"""The command of `SECURITY.md`, of a network that has nobody else in it."""


def meets_alone() -> bool | None:
    """Whether two processes meet in a network of their own, and nobody here reaches the port.

    Returns:
        None where this host makes no such network.
    """
    port = free_port()
    command = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    try:
        subprocess.run([*command, "ip link set lo up"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    inside = subprocess.Popen([*command, _ALONE.format(python=sys.executable, port=port)])
    has_reached = False
    while inside.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            has_reached = True
        time.sleep(0.02)
    return inside.returncode == 0 and not has_reached


USER, STRANGER = 1000, 1001
RULE = "iptables -A OUTPUT -o lo -p tcp --dport {port} -m owner ! --uid-owner {user} -j REJECT"
"""The rule of `SECURITY.md`."""


def admits_one_user() -> bool | None:
    """Whether with the rule of the firewall a user reaches their port, and nobody else does.

    Returns:
        None where this takes rights or programs that are not here.
    """
    programs = ("unshare", "ip", "iptables")
    if os.geteuid() or not all(map(shutil.which, programs)):
        return None
    command = ["unshare", "--net", sys.executable, "-m", "benchmarks.strangers", "--firewall"]
    return subprocess.run(command, check=False).returncode == 0


def _firewall() -> int:
    """Tries the rule in this network, which has nobody else in it; an exit code."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = [_reaches(user, port) for user in (USER, STRANGER)]
        subprocess.run(RULE.format(port=port, user=USER).split(), check=True)
        after = [_reaches(user, port) for user in (USER, STRANGER)]
    print(f"user and stranger reach the port: {before} without the rule, {after} with it")
    return 0 if (before, after) == ([True, True], [True, False]) else 1


def _reaches(user: int, port: int) -> bool:
    """Whether a user can connect to a port."""
    child = os.fork()
    if child == 0:
        # Nothing is imported any more, which the user may not read.
        code = 1
        try:
            os.setuid(user)
            socket.socket().connect(("127.0.0.1", port))
            code = 0
        except OSError as error:
            print(f"user {user}: {error}", flush=True)
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _meet(port: int) -> int:
    """Two processes meet, the second a while after the first; an exit code."""
    token, met = secrets.token_hex(16), list[int]()

    def come(process: int) -> None:
        address = f"127.0.0.1:{port}"
        met.append(len(rendezvous(address, Peer.here(process, 2), _SECONDS, token)))

    host = threading.Thread(target=come, args=(0,))
    host.start()
    time.sleep(1)
    come(1)
    host.join()
    return 0 if met == [2, 2] else 1


def _connect(port: int, stack: contextlib.ExitStack) -> socket.socket:
    end = time.monotonic() + _SECONDS
    while True:
        try:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=3))
        except ConnectionRefusedError:
            # Process 0 does not listen yet.
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def measure_strangers() -> list[tuple[str, int, int]]:
    """Rows of strangers, alone and many, and of a network without any; how many did no harm."""
    good, tried = 0, 0
    attacks = [(name, count, "at once") for name in sayings("") for count in (1, 200)]
    for way in (name for name in WAYS if name != "at once"):
        attacks += [(name, 50, way) for name in ("half a line", "another token", "HTTP")]
    for name, connections, way in attacks:
        is_good = outlives(name, connections, way)
        tried += 1
        good += is_good
        if not is_good:
            print(f"{connections} strangers that say {name} {way}: the processes did not meet")
    rows = [("strangers on the port of a run", tried, good)]
    if (is_alone := meets_alone()) is not None:
        rows.append(("a network of the run's own", 1, int(is_alone)))
    if (is_admitted := admits_one_user()) is not None:
        rows.append(("a rule of the firewall", 1, int(is_admitted)))
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--meet"]:
        return _meet(int(sys.argv[2]))
    if sys.argv[1:2] == ["--firewall"]:
        return _firewall()
    rows = measure_strangers()
    for name, count, good in rows:
        print(f"{name}: {good}/{count}")
    return 0 if all(count == good for _, count, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
