"""`LaunchSpec`: which of how many processes this is, and where they meet; a plain value."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import socket

from ..core.errors import LaunchError

DEFAULT_HOST = "localhost"
DEFAULT_PORT = 29500


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """How the environment launched this process.

    Args:
        coordinator_address: `host:port` where process 0 listens; None lets JAX ask the cluster.
        num_processes: how many processes make up the run; None lets JAX ask the cluster.
        process_id: which of them this is; None lets JAX ask the cluster.
        local_rank: which of the processes on this host this is.
        local_device_ids: the accelerators of this host that the process takes; None takes all.
        source: who said so: `default`, `torchrun`, `sagemaker`, `jax`, or the name that
            `jax.distributed` has for a cluster, such as `slurm`.

    Raises:
        LaunchError: when there cannot be such a process.

    Example:
        >>> LaunchSpec().is_distributed
        False
        >>> LaunchSpec(num_processes=2, process_id=2)
        Traceback (most recent call last):
            ...
        axon_dist.core.errors.LaunchError: process 2 of 2 cannot be: processes count from 0 to 1...
    """

    coordinator_address: str | None = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    num_processes: int | None = 1
    process_id: int | None = 0
    local_rank: int = 0
    local_device_ids: tuple[int, ...] | None = None
    source: str = "default"

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `LaunchError` unless the process exists and the address is one."""
        if self.num_processes is not None and self.num_processes < 1:
            raise LaunchError(f"{self.num_processes} processes cannot run; start at least one")
        if self.process_id is not None and self.num_processes is not None:
            _check_process(self.process_id, self.num_processes)
        if self.coordinator_address is not None:
            split_address(self.coordinator_address)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to ask the cluster for."""
        return None not in (self.coordinator_address, self.num_processes, self.process_id)

    @property
    def is_distributed(self) -> bool:
        """Whether there are, or may be, other processes."""
        return self.num_processes != 1


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`, also `[::1]:port`.

    Raises:
        LaunchError: when it is not of that form, or the port is not one.

    Example:
        >>> split_address("10.0.0.1:29500")
        ('10.0.0.1', 29500)
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise LaunchError(f"the coordinator address {address!r:.80} is not host:port; give both")
    named = parse_host(host, "the coordinator's host")
    return named.strip("[]"), parse_port(port, "the coordinator's port")


def bind_address(address: str) -> tuple[str, int]:
    """Where process 0 listens: at the address where it is looked for, if that is one of this host.

    Args:
        address: `host:port`.

    Returns:
        Host and port to listen at; no host for all addresses, where the name leads to another
        machine that hands connections on, as a service of Kubernetes does.

    Example:
        >>> bind_address("localhost:29500")[0] in ("127.0.0.1", "::1")
        True
    """
    host, port = split_address(address)
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                # Any free port will do to learn whether the address is one of this host.
                probe.bind((where[0], 0))
                return str(where[0]), port
    return "", port


def parse_host(text: str, name: str) -> str:
    """Reads the name or the address of a host, as it stands before `:port`.

    Args:
        text: such as `node0`, `10.0.0.1`, `::1` or `[::1]`.
        name: where it was said.

    Returns:
        The same; an IPv6 address within brackets.

    Raises:
        LaunchError: for a URL, a host with its port, or what no host is called.

    Example:
        >>> parse_host("::1", "MASTER_ADDR")
        '[::1]'
    """
    host = text.strip()
    if re.fullmatch(r"[\w.-]{1,253}", host):
        return host
    address = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        # A link's name may follow, fe80::1%eth0.
        ipaddress.IPv6Address(address)
    except ValueError:
        what = f"{host!r:.80}" if host else "empty"
        raise LaunchError(
            f"{name} is {what}; give the name or the address of a host alone, such as localhost "
            "or 10.0.0.1, without a scheme, a port or a path"
        ) from None
    return f"[{address}]"


def parse_port(text: str, name: str) -> int:
    """Reads a TCP port.

    Raises:
        LaunchError: naming the variable, when it is not a number from 1 to 65535.
    """
    port = parse_count(text, name)
    if not 1 <= port <= 65535:
        raise LaunchError(f"{name} is {port}; a port lies in 1..65535, for example {DEFAULT_PORT}")
    return port


def parse_count(text: str, name: str) -> int:
    """Reads an integer of an environment variable.

    Raises:
        LaunchError: naming the variable, when it is not one.
    """
    # `int` would take digits of every script, and underscores between them.
    if not text.isascii() or re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text) is None:
        raise LaunchError(f"{name} is {text!r:.80}, which is not an integer; set a number")
    return int(text)


def _check_process(process: int, count: int) -> None:
    if not 0 <= process < count:
        raise LaunchError(
            f"process {process} of {count} cannot be: processes count from 0 to {count - 1}; "
            "check RANK and WORLD_SIZE, or what your launcher sets in their place"
        )
