"""Joining `jax.distributed`, with its service in a process of its own beside process 0."""

from __future__ import annotations

import subprocess
import sys

import jax

from ..core.compat import join_service
from ..core.errors import LaunchError
from . import coordinator
from .spec import LaunchSpec, bind_address

_CONNECT_SECONDS = 60
_SHUTDOWN_SECONDS = 120
_LINGER_SECONDS = 10


def check_settings() -> None:
    """Raises where JAX is told to authenticate the processes of a run, which is not done here.

    Raises:
        LaunchError: naming the settings.
    """
    secure = ("mtls_", "verify_secure_credentials")
    stated = {name: v for name, v in jax.config.values.items() if any(s in name for s in secure)}
    if found := [name for name, value in stated.items() if value]:
        raise LaunchError(
            f"{', '.join(found)} would have JAX authenticate the processes of a run to each other; "
            "their coordination service is started by axon_dist, in the clear. Leave the setting "
            "out and let no one but the run reach the port, or call jax.distributed.initialize "
            "before World.init()"
        )


class Coordinator:
    """The process that runs the coordination service; process 0 owns it.

    Args:
        address: `host:port` where processes look for it.
        num_processes: how many processes take part.
        silence: seconds after which the watchdog of a process counts another one as lost.

    Raises:
        LaunchError: when it does not start.
    """

    def __init__(self, address: str, num_processes: int, silence: float):
        linger = int(silence) + _LINGER_SECONDS
        host, port = bind_address(address)
        where = f"[{host or '::'}]:{port}" if ":" in host or not host else f"{host}:{port}"
        numbers = (num_processes, _heartbeat(silence), _SHUTDOWN_SECONDS, linger)
        self._process = subprocess.Popen(
            [sys.executable, "-P", coordinator.__file__, where, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It outlives this process, so it must not hold on to its output.
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as answer:
            if answer.readline().strip() != "ready":
                raise LaunchError(
                    f"the coordination service did not start on port {port}; another program may "
                    "have taken it: choose another MASTER_PORT"
                )

    def dismiss(self) -> None:
        """Tells it that this process ends well, so that it need not stay for the others."""
        assert self._process.stdin is not None
        self._process.stdin.write("bye")
        self._process.stdin.flush()


def join(spec: LaunchSpec, silence: float) -> Coordinator | None:
    """Starts `jax.distributed` in this process.

    Args:
        spec: a complete spec.
        silence: seconds after which the watchdog counts a process as lost.

    Returns:
        The service, on process 0.
    """
    assert spec.coordinator_address is not None
    assert spec.num_processes is not None
    # JAX's notice of preemption would swallow SIGTERM, which means "save and stop" here.
    jax.config.update("jax_enable_preemption_service", False)
    is_main = spec.process_id == 0
    service = (
        Coordinator(spec.coordinator_address, spec.num_processes, silence) if is_main else None
    )
    join_service(
        spec.coordinator_address,
        spec.num_processes,
        spec.process_id,
        spec.local_device_ids,
        connect_timeout=_CONNECT_SECONDS,
        heartbeat_timeout=_heartbeat(silence),
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    return service


def _heartbeat(silence: float) -> int:
    """JAX's own timeout: the second line of defence, as it aborts processes without a name."""
    return int(2 * silence) + 10
