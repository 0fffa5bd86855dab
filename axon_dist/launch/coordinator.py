"""The coordination service of `jax.distributed`, as a separate program.

JAX runs it inside process 0, so it dies with that process, and the others abort without learning
which process was lost. Here it outlives process 0 until they have found out. It is run by its
path (`python -P coordinator.py ADDRESS PROCESSES HEARTBEAT SHUTDOWN LINGER`) and imports `jaxlib`
alone, so it starts at once. It says `ready`, reads its standard input until process 0 is gone, and
ends: at once if that said `bye`, `LINGER` seconds later if not.
"""

import os
import signal
import sys
import time

from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]


def main(address: str, count: int, heartbeat: int, shutdown: int, linger: float) -> None:
    """Serves until process 0 is gone.

    Args:
        address: `host:port` to listen on.
        count: how many processes take part.
        heartbeat: seconds without one after which the service gives a process up.
        shutdown: seconds that processes wait for each other in the end.
        linger: seconds to stay after process 0 was lost.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Process 0 gets these too; it may still have to save.
        signal.signal(number, signal.SIG_IGN)
    # It serves as long as this name refers to it.
    service = _jax.get_distributed_runtime_service(
        address, count, heartbeat_timeout=heartbeat, shutdown_timeout=shutdown
    )
    assert service is not None
    print("ready", flush=True)
    if sys.stdin.read() != "bye":
        time.sleep(linger)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
