"""Strangers on the port where the processes of a run meet: none joins, and none keeps others out.

Process 0 of two waits; strangers connect and say nothing, half a line, too much, what is no JSON,
or what a process would say with another token, and hundreds of them stay connected. Then process 1
comes, and both have to meet within seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import socket
import threading
import time

from axon_dist.core.errors import LaunchError
from axon_dist.launch.local import free_port
from axon_dist.launch.rendezvous import Peer, rendezvous

_SECONDS = 30.0


def sayings() -> dict[str, bytes]:
    """What a stranger says, by what it is."""
    peer = dataclasses.asdict(Peer.here(1, 2))
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
        "a process of other types": json.dumps({**wrong, "peer": {"process": []}}).encode() + b"\n",
    }


def outlives(said: bytes, connections: int) -> bool:
    """Whether two processes meet where so many strangers say something and stay."""
    port, token = free_port(), secrets.token_hex(16)
    address, met = f"127.0.0.1:{port}", list[int]()

    def come(process: int) -> None:
        with contextlib.suppress(LaunchError):
            met.append(len(rendezvous(address, Peer.here(process, 2), _SECONDS, token)))

    host = threading.Thread(target=come, args=(0,))
    host.start()
    with contextlib.ExitStack() as stack:
        _connect(port, stack).sendall(said)
        for _ in range(connections - 1):
            with contextlib.suppress(OSError):
                _connect(port, stack).sendall(said)
        come(1)
        host.join()
    return met == [2, 2]


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
    """One row: how many kinds of strangers came, alone and many, and how many did no harm."""
    good, tried = 0, 0
    for name, said in sayings().items():
        for connections in (1, 200):
            is_good = outlives(said, connections)
            tried += 1
            good += is_good
            if not is_good:
                print(f"{connections} strangers that say {name}: the processes did not meet")
    return [("strangers on the port of a run", tried, good)]
