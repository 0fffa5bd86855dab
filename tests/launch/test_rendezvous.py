import contextlib
import dataclasses
import pathlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from axon_dist.core.errors import LaunchError
from axon_dist.launch.distributed import Coordinator
from axon_dist.launch.environment import bind_address
from axon_dist.launch.local import free_port
from axon_dist.launch.rendezvous import Peer, listen, rendezvous

LATE_OPTAX = {**Peer.here(0, 1).versions, "optax": "0.0"}


def call(peers, timeout=5.0):
    """Returns the answer that each process gets, or its error."""
    address = f"localhost:{free_port()}"

    def one(me):
        try:
            return rendezvous(address, me, timeout)
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(peers)) as pool:
        return list(pool.map(one, peers))


def peers(count, expected=None):
    return [Peer.here(process, expected or count) for process in range(count)]


def test_all_learn_of_all():
    everyone = peers(3)
    assert call(everyone) == [tuple(everyone)] * 3


def test_the_missing_are_named_to_all_who_came():
    started = time.monotonic()
    for answer in call(peers(2, expected=4), timeout=1.0):
        assert "processes 2, 3 of 4 did not report within 1 s" in answer
        assert "WORLD_SIZE" in answer
    assert time.monotonic() - started < 10


def test_no_process_0():
    with pytest.raises(LaunchError, match=r"process 1 found no process 0 at localhost:\d+ within "
                       r"0.5 s: .*refused.*MASTER_ADDR"):  # fmt: skip
        rendezvous(f"localhost:{free_port()}", Peer.here(1, 2), timeout=0.5)


@pytest.mark.sample(
    "fields0-have the same rank; give each process its own RANK",
    "fields1-expects 4; give all the same WORLD_SIZE",
    "fields2-runs jax 0.1; install one version everywhere",
    "fields4-words4",
)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"process": 1, "pid": 7}, "have the same rank; give each process its own RANK"),
        ({"num_processes": 4}, "expects 4; give all the same WORLD_SIZE"),
        ({"versions": {"jax": "0.1"}}, "runs jax 0.1; install one version everywhere"),
        ({"versions": LATE_OPTAX}, "runs optax 0.0; install one version everywhere"),
        (
            {"settings": {**Peer.here(0, 1).settings, "jax_enable_x64": "True"}},
            "compute different results: jax_enable_x64 is 'False' in process 0 and 'True' in "
            "process 2; use the same settings everywhere",
        ),
    ],
)
def test_processes_that_do_not_fit(fields, words):
    zero, one, two = peers(3)
    late = dataclasses.replace(two, **fields)
    if "num_processes" in fields:
        words = "processes and process 2"
    answers = call([zero, one, late], timeout=3.0)
    assert words in answers[0]
    assert len({answer for answer in answers if words in answer}) == 1


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"cannot listen on port {port}: .*MASTER_PORT"):
            rendezvous(f"localhost:{port}", Peer.here(0, 2), timeout=1.0)


def test_strangers_on_the_port_are_ignored():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(rendezvous, f"localhost:{port}", Peer.here(0, 2), 10.0)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"process": 1}\n'):
            while True:
                try:
                    stranger = socket.create_connection(("localhost", port), timeout=5)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            with stranger:
                stranger.sendall(words)
        joined = pool.submit(rendezvous, f"localhost:{port}", Peer.here(1, 2), 10.0)
        assert host.result() == joined.result() == tuple(peers(2))


@contextlib.contextmanager
def hosted(count=2, timeout=20.0, token=""):
    """Runs process 0 in a thread; yields its address and the future of its result."""
    address = f"localhost:{free_port()}"
    with ThreadPoolExecutor(1) as pool:
        yield address, pool.submit(rendezvous, address, Peer.here(0, count), timeout, token)


def knock(address):
    """Connects to process 0 as soon as it listens."""
    host, port = address.split(":")
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


NOISE = {
    "silent": b"",
    "nested": b"[" * 10_000 + b"\n",
    "endless": b"x" * 100_000,
    "no text": bytes(range(256)) + b"\n",
    "no object": b"7\n",
    "odd fields": b'{"peer": {"process": true}, "nonce": [], "proof": {}}\n',
    "no proof": b'{"peer": {}, "nonce": "a", "proof": "\xc3\xa9"}\n',
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_strangers_keep_nobody_waiting(noise):
    with hosted() as (address, host), contextlib.ExitStack() as stack:
        for _ in range(30):
            stranger = stack.enter_context(knock(address))
            with contextlib.suppress(OSError):
                stranger.sendall(noise)
        started = time.monotonic()
        joined = rendezvous(address, Peer.here(1, 2), 10.0)
        assert joined == host.result() == tuple(peers(2))
        assert time.monotonic() - started < 4


def test_more_strangers_than_are_listened_to_are_let_go(monkeypatch):
    monkeypatch.setattr("axon_dist.launch.rendezvous._STRANGERS", 3)
    monkeypatch.setattr("axon_dist.launch.rendezvous._HELLO_SECONDS", 1.0)
    with hosted() as (address, host), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(knock(address)) for _ in range(12)]
        # Accepted connections receive a nonce, the others nothing.
        heard = [connection.recv(1000) for connection in silent]
        assert sum(not text for text in heard) >= 12 - 5
        assert rendezvous(address, Peer.here(1, 2), 10.0) == host.result()


@pytest.mark.full
def test_a_byte_now_and_then_is_no_way_to_stay(monkeypatch):
    monkeypatch.setattr("axon_dist.launch.rendezvous._HELLO_SECONDS", 0.6)
    with hosted(timeout=4.0) as (address, host), knock(address) as dripping:
        started = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 4:
                dripping.sendall(b"{")
                time.sleep(0.1)
        assert time.monotonic() - started < 3
        with pytest.raises(LaunchError, match="processes 1 of 2 did not report within 4 s"):
            host.result()


def test_process_0_that_drips_is_none(monkeypatch):
    monkeypatch.setattr("axon_dist.launch.rendezvous._HELLO_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def drip():
            while not stop.is_set():
                with contextlib.suppress(OSError), server.accept()[0] as connection:
                    while not stop.wait(0.1):
                        connection.sendall(b" ")

        thread = threading.Thread(target=drip, daemon=True)
        server.settimeout(0.2)
        thread.start()
        started = time.monotonic()
        with pytest.raises(LaunchError, match="process 1 found no process 0"):
            rendezvous(f"localhost:{server.getsockname()[1]}", Peer.here(1, 2), 1.0)
        assert time.monotonic() - started < 5
        stop.set()
        thread.join(5)


@pytest.mark.full
def test_who_has_another_token_is_refused_and_named_to_both():
    with hosted(timeout=2.0, token="secret-one") as (address, host):
        with pytest.raises(LaunchError, match="has another AXON_RUN_TOKEN than process 1") as mine:
            rendezvous(address, Peer.here(1, 2), 5.0, "secret-two")
        with pytest.raises(LaunchError, match="1 connections had another AXON_RUN_TOKEN") as theirs:
            host.result()
    assert "secret-" not in f"{mine.value} {theirs.value}"


def test_a_process_0_with_another_token_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def lie():
            with server.accept()[0] as connection:
                connection.sendall(b'{"nonce": "1"}\n')
                assert b"secret-one" not in connection.recv(10_000)
                connection.sendall(b'{"said": {"mistake": null, "present": []}, "proof": "1"}\n')

        threading.Thread(target=lie, daemon=True).start()
        with pytest.raises(
            LaunchError, match="the program that answers has another AXON_RUN_TOKEN"
        ):
            rendezvous(f"localhost:{server.getsockname()[1]}", Peer.here(1, 2), 0.2, "secret-one")


def test_with_one_token_all_learn_of_all():
    with hosted(token="both") as (address, host):
        assert rendezvous(address, Peer.here(1, 2), 10.0, "both") == host.result()


def test_it_listens_where_it_is_looked_for_alone():
    with listen(f"localhost:{free_port()}") as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")
    # An address of another machine, which forwards connections.
    with listen(f"192.0.2.1:{free_port()}") as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_the_service_of_a_local_run_is_on_this_host_alone():
    port = free_port()
    service = Coordinator(f"localhost:{port}", 1, 1.0)
    try:
        places = [
            line.split()[1]
            for table in ("/proc/net/tcp", "/proc/net/tcp6")
            for line in pathlib.Path(table).read_text().splitlines()[1:]
            if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        ]
        # 127.0.0.1, ::1, and 127.0.0.1 as gRPC spells it.
        loopback = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}
        assert {place.split(":")[0] for place in places} <= loopback
        assert places
    finally:
        service._process.kill()
        service._process.communicate()


@pytest.mark.parametrize(
    ("host", "resolved", "expected"),
    [
        # Debian's /etc/hosts maps the name of a machine to 127.0.1.1, for this machine only.
        ("node0", "127.0.1.1", ""),
        ("node0", "127.0.0.1", ""),
        ("node0", "0.0.0.0", "0.0.0.0"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1", "127.0.1.1"),
    ],
)
def test_a_name_that_only_this_host_resolves_to_loopback_is_listened_for_everywhere(
    monkeypatch, host, resolved, expected
):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (resolved, 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    assert bind_address(f"{host}:29500") == (expected, 29500)
