"""Starts a launcher on each of several hosts over ssh, and ends all of them together.

Secrets go through the standard input of ssh, not the command line. The input stays open during the
run: if it ends, the remote launcher has lost this one, and ends its ranks. So no process is left on
a host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..core.errors import LaunchError
from ..core.files import read_text
from ..core.words import printable
from .child import ignoring_closed_terminal
from .environment import DEFAULT_PORT, parse_host
from .local import INTERRUPTED, USER_ERROR, LaunchPlan, ReceivedSignals, handling_signals
from .rendezvous import TOKEN
from .watchdog import EXIT_PEER_LOST

_FORWARDED = ("AXON_", "JAX_", "XLA_", "NCCL_", "LIBTPU_", "FI_", "CUDA_", "HF_", "WANDB_", "AWS_")
"""Prefixes of variables that are sent to every host: settings of a run, and credentials."""

_UNREACHED = 255
"""The exit code of ssh when it cannot connect."""

_END, _POLL_SECONDS, _LAST_SECONDS = "TERM\n", 0.1, 30.0
_OURS = "axon launch: "


def read_hosts(text: str | None, file: Path | None) -> tuple[str, ...]:
    """Reads the hosts of `--hosts a,b` or of a file with one host per line.

    In a file `#` starts a comment, and words after a name, such as Open MPI's `slots=8`, are
    ignored.

    Raises:
        LaunchError: for no host, a repeated one, or an invalid name.

    Example:
        >>> read_hosts("node0,10.0.0.2", None)
        ('node0', '10.0.0.2')
    """
    if text is not None and file is not None:
        raise LaunchError("got --hosts and --hostfile; give one of them")
    if file is not None:
        lines = read_text(file, f"the host file {str(file)!r}").splitlines()
        words = [line.partition("#")[0].split() for line in lines]
        names = [first[0] for first in words if first]
    else:
        names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if not names:
        raise LaunchError("got no host; give --hosts node0,node1 or a file with one on each line")
    if len(set(names)) < len(names):
        raise LaunchError(f"got a host twice: {', '.join(names)}; name each host once")
    for name in names:
        parse_host(name.rpartition("@")[2], "a host")
    return tuple(names)


def launch_hosts(
    hosts: Sequence[str], plan: LaunchPlan, options: Sequence[str], tell: Callable[[str], None]
) -> int:
    """Runs a plan on several hosts to its end, with restarts.

    All hosts must have this folder and this Python at the same paths, for example on a shared disk
    or in the same image. Rank 0 runs on host 0; the others must reach it by the given name.

    Args:
        hosts: destinations for ssh; host 0 first.
        plan: what each host runs.
        options: further options of `axon launch` for each host.
        tell: called with a line about what happens.

    Returns:
        The exit code as from `launch`; 76 also if a host was lost.

    Raises:
        LaunchError: if there is no ssh, or a host cannot be reached.
    """
    if shutil.which("ssh") is None:
        raise LaunchError("there is no ssh on this machine; install it, or run axon launch "
                          "--nnodes N --node-rank R --master-addr HOST on each host")  # fmt: skip
    tell = ignoring_closed_terminal(tell)
    with handling_signals() as received:
        for attempt in range(plan.max_restarts + 1):
            code = _Attempt(tuple(hosts), plan, tuple(options), tell, received).run()
            # A run that was interrupted has saved, and is to end; the local launcher returns too.
            is_ended = code in (0, USER_ERROR, INTERRUPTED)
            if is_ended or received or attempt == plan.max_restarts:
                return code
            tell(f"restart {attempt + 1} of {plan.max_restarts}, on {len(hosts)} hosts")
    raise AssertionError("the loop returns")


@dataclasses.dataclass(eq=False)
class _Host:
    """One host of an attempt, and the ssh process for it."""

    name: str
    process: subprocess.Popen[str]
    tell: Callable[[str], None]
    has_begun: bool = False
    last: str = ""
    reader: threading.Thread | None = None

    def listen(self) -> None:
        """Forwards the output of its launcher."""
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError):
            for line in self.process.stderr:
                text = printable(line.strip())
                self.has_begun = self.has_begun or text.startswith(_OURS)
                self.last = text or self.last
                self.tell(f"{self.name}: {text.removeprefix(_OURS)}")

    def send(self, text: str) -> None:
        """Writes to its launcher if that still runs."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(text)
            self.process.stdin.flush()

    def close(self) -> None:
        """Closes the launcher's input, which ends it, and waits."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.close()
        try:
            self.process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self.tell(f"{self.name}: its launcher does not end; end it on that host")
            self.process.kill()
            self.process.wait()
        if self.reader is not None:
            self.reader.join(1.0)
            if not self.reader.is_alive() and self.process.stderr is not None:
                self.process.stderr.close()

    @property
    def code(self) -> int | None:
        """The exit code of its launcher; 76 if the host was lost."""
        code = self.process.poll()
        return EXIT_PEER_LOST if code is not None and (code < 0 or code == _UNREACHED) else code


@dataclasses.dataclass(eq=False)
class _Attempt:
    """One start on all hosts."""

    hosts: tuple[str, ...]
    plan: LaunchPlan
    options: tuple[str, ...]
    tell: Callable[[str], None]
    received: ReceivedSignals
    started: list[_Host] = dataclasses.field(default_factory=list)

    def run(self) -> int:
        token = os.environ.get(TOKEN) or secrets.token_hex(32)
        try:
            for rank, name in enumerate(self.hosts):
                self._start(rank, name, token)
            return self._wait()
        finally:
            for host in self.started:
                host.close()

    def _start(self, rank: int, name: str, token: str) -> None:
        process = subprocess.Popen(
            ["ssh", "-o", "BatchMode=yes", name, remote_command(self, rank)],
            stdin=subprocess.PIPE,
            # Only the output of rank 0 is shown, as on a single host.
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Keys pressed in the terminal reach only this launcher.
            start_new_session=True,
        )
        host = _Host(name, process, self.tell)
        host.reader = threading.Thread(target=host.listen, daemon=True)
        host.reader.start()
        self.started.append(host)
        shared = {k: v for k, v in os.environ.items() if k.startswith(_FORWARDED)}
        host.send(json.dumps({**shared, TOKEN: token}) + "\n")

    def _wait(self) -> int:
        sent = 0
        failed = None
        while True:
            for host in self.started if len(self.received.numbers) > sent else ():
                host.send(_END)
            sent = len(self.received.numbers)
            codes = [host.code for host in self.started]
            if failed is None:
                failed = next(
                    (h for h in self.started if h.code not in (None, 0, INTERRUPTED)), None
                )
                if failed is not None:
                    self._end_others(failed)
                    return failed.code or 0
            if None not in codes:
                return INTERRUPTED if INTERRUPTED in codes else 0
            time.sleep(_POLL_SECONDS)

    def _end_others(self, failed: _Host) -> None:
        if failed.reader is not None:
            failed.reader.join(1.0)
        if not failed.has_begun and failed.process.poll() == _UNREACHED:
            raise LaunchError(
                f"cannot start on {failed.name}: ssh says {failed.last!r:.200}; make "
                f"`ssh -o BatchMode=yes {failed.name} true` work, with a key and no password"
            )
        is_lost = failed.process.poll() in (_UNREACHED, -signal.SIGKILL)
        how = "was lost" if is_lost else f"ended with code {failed.code}"
        self.tell(f"{failed.name} {how}; ending the other hosts")
        self._wait_for(self.plan.grace)
        for _ in range(2):
            # The second signal ends at once those ranks that have nothing to save.
            for host in self.started:
                host.send(_END)
        self._wait_for(2 * self.plan.grace + 1)

    def _wait_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(h.code is None for h in self.started) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def remote_command(attempt: _Attempt, rank: int) -> str:
    """The command for ssh to run on a host, quoted for its shell."""
    plan = attempt.plan
    host = attempt.hosts[0].rpartition("@")[2]
    port = plan.master_port or DEFAULT_PORT
    path = os.environ.get("PYTHONPATH")
    command = [
        *(["env", f"PYTHONPATH={path}"] if path else []),
        *(sys.executable, "-m", "axon_dist.train.cli", "launch", "--attached"),
        *("-n", str(plan.num_processes), "--nnodes", str(len(attempt.hosts))),
        *("--node-rank", str(rank), "--master-addr", host, "--master-port", str(port)),
        *("--grace", f"{plan.grace:g}", "--log-dir", str(plan.log_dir)),
        *(*attempt.options, "--", *plan.command),
    ]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"


def attach() -> None:
    """Makes this launcher end with the one that started it over ssh.

    The first line of the standard input has environment variables for the ranks. Each further line,
    and the end of the input (a lost connection), ends the run as SIGTERM does.
    """
    variables: Mapping[str, str] = json.loads(sys.stdin.readline() or "{}")
    os.environ.update(variables)

    def follow() -> None:
        for _ in sys.stdin:
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, name="axon-attached", daemon=True).start()
