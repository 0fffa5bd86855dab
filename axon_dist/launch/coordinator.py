"""The coordination service of `jax.distributed`, as a separate program.

JAX runs the service inside process 0. It then dies with that process, and the others abort without
learning which process was lost. This program outlives process 0 until they have found out. It is
run by its path (`python -P coordinator.py ADDRESS PROCESSES HEARTBEAT SHUTDOWN LINGER`) and imports
only `jaxlib`, so it starts quickly. It prints `ready` and reads its standard input until process 0
is gone. Then it ends: at once if process 0 sent `bye`, else `LINGER` seconds later.
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
        count: the number of processes.
        heartbeat: seconds without a heartbeat after which the service declares a process dead.
        shutdown: seconds that processes wait for each other at shutdown.
        linger: seconds to stay after process 0 was lost.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Process 0 gets these signals too and may still have to save.
        signal.signal(number, signal.SIG_IGN)
    # The service runs as long as this object lives.
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
