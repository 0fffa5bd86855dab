import dataclasses
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from axon_dist.core.errors import LaunchError
from axon_dist.launch.local import free_port
from axon_dist.launch.roll_call import Attendee, call_roll

LATE_OPTAX = {**Attendee.here(0, 1).versions, "optax": "0.0"}


def call(attendees, timeout=5.0):
    """The answer that each gets, or its error."""
    address = f"localhost:{free_port()}"

    def one(me):
        try:
            return call_roll(address, me, timeout)
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(attendees)) as pool:
        return list(pool.map(one, attendees))


def attendees(count, expected=None):
    return [Attendee.here(process, expected or count) for process in range(count)]


def test_all_learn_of_all():
    everyone = attendees(3)
    assert call(everyone) == [tuple(everyone)] * 3


def test_the_missing_are_named_to_all_who_came():
    started = time.monotonic()
    for answer in call(attendees(2, expected=4), timeout=1.0):
        assert "processes 2, 3 of 4 did not report within 1 s" in answer
        assert "WORLD_SIZE" in answer
    assert time.monotonic() - started < 10


def test_no_process_0():
    with pytest.raises(LaunchError, match=r"process 1 found no process 0 at localhost:\d+ within "
                       r"0.5 s: .*refused.*MASTER_ADDR"):  # fmt: skip
        call_roll(f"localhost:{free_port()}", Attendee.here(1, 2), timeout=0.5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"process": 1, "pid": 7}, "have the same rank; give each process a RANK of its own"),
        ({"num_processes": 4}, "expects 4; give all the same WORLD_SIZE"),
        ({"versions": {"jax": "0.1"}}, "runs jax 0.1; install one version everywhere"),
        ({"versions": LATE_OPTAX}, "runs optax 0.0; install one version everywhere"),
    ],
)
def test_processes_that_do_not_fit(fields, words):
    zero, one, two = attendees(3)
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
            call_roll(f"localhost:{port}", Attendee.here(0, 2), timeout=1.0)


def test_strangers_on_the_port_are_ignored():
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(call_roll, f"localhost:{port}", Attendee.here(0, 2), 10.0)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"process": 1}\n'):
            while True:
                try:
                    stranger = socket.create_connection(("localhost", port), timeout=5)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            with stranger:
                stranger.sendall(words)
        joined = pool.submit(call_roll, f"localhost:{port}", Attendee.here(1, 2), 10.0)
        assert host.result() == joined.result() == tuple(attendees(2))
