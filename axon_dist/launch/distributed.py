"""`initialize`: connects the processes of a `LaunchSpec`, and sets up their devices."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import jax

from ..core.arguments import check_fields, is_number, is_whole
from ..core.compat import (
    SharedStore,
    backend_started,
    detect_cluster,
    join_service,
    keep_only,
    process_id,
    rendezvous_flags,
    runs_cached_collectives_in_order,
    watchdog_flags,
)
from ..core.errors import BackendStartedError, LaunchError, MeshError, reworded
from . import coordinator
from .environment import (
    LaunchSpec,
    bind_address,
    local_devices,
    parse_count,
    processes_here,
    slurm_devices,
)
from .rendezvous import TOKEN, Peer, rendezvous
from .watchdog import Watchdog, post_failure

_CONNECT_SECONDS = 60
_SHUTDOWN_SECONDS = 120
_LINGER_SECONDS = 10


def check_settings() -> None:
    """Raises if JAX is set to authenticate the processes of a run, which is not supported.

    Raises:
        LaunchError: with the names of the settings.
    """
    words = ("mtls_", "verify_secure_credentials")
    secure = {name: v for name, v in jax.config.values.items() if any(w in name for w in words)}
    if refused := [name for name, value in secure.items() if value]:
        raise LaunchError(
            f"{', '.join(refused)} would have JAX authenticate the processes of a run to each "
            "other, but axon_dist starts their coordination service without encryption. Remove the "
            "setting and make the port reachable only for the run, or call "
            "jax.distributed.initialize before World.init()"
        )


class Coordinator:
    """The process that runs the coordination service; process 0 owns it.

    Args:
        address: `host:port` to which processes connect.
        num_processes: the number of processes.
        silence: seconds after which the watchdog of a process counts another one as lost.

    Raises:
        LaunchError: if it does not start.
    """

    def __init__(self, address: str, num_processes: int, silence: float):
        linger = int(silence) + _LINGER_SECONDS
        host, port = bind_address(address)
        endpoint = f"[{host or '::'}]:{port}" if ":" in host or not host else f"{host}:{port}"
        numbers = (num_processes, _heartbeat(silence), _SHUTDOWN_SECONDS, linger)
        self._process = subprocess.Popen(
            [sys.executable, "-P", coordinator.__file__, endpoint, *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The service outlives this process, so it must not keep this process's stderr open.
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
        """Tells the service that this process ends normally, so it need not outlive it."""
        assert self._process.stdin is not None
        self._process.stdin.write("bye")
        self._process.stdin.flush()


def join(spec: LaunchSpec, silence: float) -> Coordinator | None:
    """Starts `jax.distributed` in this process.

    Args:
        spec: a complete spec.
        silence: seconds after which the watchdog counts a process as lost.

    Returns:
        The service on process 0, None on others.
    """
    assert spec.coordinator_address is not None
    assert spec.num_processes is not None
    # JAX's preemption service would swallow SIGTERM, which means "save and stop" here.
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
    """JAX's own timeout, longer than the watchdog's: JAX aborts without naming the lost process."""
    return int(2 * silence) + 10


LAUNCH_TIMEOUT, SILENCE_TIMEOUT = "AXON_LAUNCH_TIMEOUT", "AXON_SILENCE_TIMEOUT"
STEP_TIMEOUT = "AXON_STEP_TIMEOUT"
_TIMEOUTS = LAUNCH_TIMEOUT, SILENCE_TIMEOUT, STEP_TIMEOUT

_MOST_SECONDS = 30 * 24 * 3600
_PEER_WORDS = ("Gloo", "NCCL")


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long processes wait for each other.

    Args:
        launch: seconds until all processes have reported, and until the first collective is done.
        silence: seconds without a heartbeat after which a process counts as lost.
        step: seconds within which some process must finish a step, with compilation and saving.

    Raises:
        LaunchError: if one is not positive.
    """

    launch: float = 300.0
    silence: float = 60.0
    step: float = 1800.0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless all are numbers, `LaunchError` unless they are positive."""
        check_fields(self)
        for name, seconds in zip(_TIMEOUTS, dataclasses.astuple(self), strict=True):
            if not 0 < seconds <= _MOST_SECONDS:
                given = f"{seconds:g}" if is_number(seconds) else f"{seconds!s:.60}"
                raise LaunchError(
                    f"{name}={given} must be more than 0 seconds and at most {_MOST_SECONDS}, "
                    "a month; change it"
                )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Timeouts:
        """Reads `AXON_LAUNCH_TIMEOUT`, `AXON_SILENCE_TIMEOUT` and `AXON_STEP_TIMEOUT`, in seconds.

        Example:
            >>> Timeouts.from_env({"AXON_SILENCE_TIMEOUT": "10"})
            Timeouts(launch=300.0, silence=10.0, step=1800.0)
        """
        defaults = zip(_TIMEOUTS, dataclasses.astuple(cls()), strict=True)
        return cls(*(_seconds(env, name, default) for name, default in defaults))


def initialize(
    spec: LaunchSpec, timeouts: Timeouts | None = None, devices_per_process: int | None = None
) -> None:
    """Connects the processes of a run; does nothing for a single process, or the second time.

    It asks the cluster for fields that the spec lacks, lets every process report to process 0, and
    starts `jax.distributed` and a watchdog that ends all processes when one is lost. After that, an
    uncaught exception ends this process at once and is reported to the others. SIGTERM keeps its
    meaning.

    Args:
        spec: how this process was launched.
        timeouts: how long to wait; None for the defaults.
        devices_per_process: CPU devices that each process emulates; None uses the existing
            devices.

    Raises:
        BackendStartedError: if JAX has already started its backend.
        LaunchError: if processes do not arrive; the message names the missing ones.
    """
    if not spec.is_distributed or jax.distributed.is_initialized():
        return
    if backend_started():
        raise BackendStartedError(
            f"process {spec.process_id} of {spec.num_processes} has started its JAX backend "
            "before it joined the others; call World.init() before creating any array"
        )
    timeouts = timeouts or Timeouts()
    spec = complete(spec, timeouts)
    if spec.num_processes == 1:
        return
    check_settings()
    parse_count(os.environ.get("JAX_PARTITION_INDEX", "0"), "JAX_PARTITION_INDEX")
    assert spec.coordinator_address
    assert spec.num_processes
    assert spec.process_id is not None
    me = Peer.here(spec.process_id, spec.num_processes)
    token = os.environ.get(TOKEN, "")
    present = rendezvous(spec.coordinator_address, me, timeouts.launch, token)
    if devices_per_process is not None:
        prepare_emulation(devices_per_process)
    # This timeout is longer than those of our own watchdogs, which can name the lost process.
    _add_flags(watchdog_flags(int(timeouts.step + timeouts.silence)))
    coordinator = join(spec, timeouts.silence)
    watchdog = Watchdog(me.process, present, SharedStore(), timeouts.silence)
    watchdog.start()
    # Exit handlers run in reverse order: these run before JAX waits for the other processes.
    if coordinator is not None:
        atexit.register(coordinator.dismiss)
    atexit.register(watchdog.stop)
    sys.excepthook = _OnException(watchdog)


def complete(spec: LaunchSpec, timeouts: Timeouts) -> LaunchSpec:
    """Asks the cluster for the fields that a spec lacks.

    Raises:
        LaunchError: if the cluster does not answer.
    """
    if spec.is_complete:
        return spec
    what = f"asking the cluster {spec.source!r} for the processes of this run failed"
    advice = (
        "set MASTER_ADDR, MASTER_PORT, WORLD_SIZE and RANK instead, or AXON_CLUSTER=none for a "
        "single process"
    )
    with reworded(what, advice, LaunchError, Exception):
        address, count, process, devices = detect_cluster(spec.source, timeouts.launch)
    if spec.process_id is None and devices:
        # JAX gives a process the device of its local rank even if it is alone on its host.
        local = devices[0]
        if spec.source == "slurm":
            own = slurm_devices(os.environ, local)
        else:
            own = local_devices(os.environ, local, processes_here(os.environ))
        spec = dataclasses.replace(spec, local_rank=local, local_device_ids=own)
    return dataclasses.replace(
        spec, coordinator_address=address, num_processes=count, process_id=process
    )


def leave(code: int, reason: str) -> int:
    """Ends this process if it is one of several; returns the code if it is the only one.

    A normal exit would wait for the other processes, while they wait for this one in a collective.
    The watchdog instead posts the reason, and they end too.

    Args:
        code: the exit code.
        reason: why the process ends, in one line.
    """
    if not jax.distributed.is_initialized():
        return code
    _end_at_once(code, reason)


def leave_after(error: BaseException) -> int:
    """Ends this process with code 1 after an exception that the user has seen; see `leave`."""
    hook = sys.excepthook
    if isinstance(hook, _OnException):
        hook.leave(error)
    return leave(1, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


@dataclasses.dataclass(frozen=True)
class _OnException:
    """The `sys.excepthook` of one process of several."""

    watchdog: Watchdog

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        if _is_of_peer(error):
            # First, because a busy machine may take seconds to format and print the traceback.
            self.watchdog.report_broken()
        sys.__excepthook__(kind, error, trace)
        self.leave(error)

    def leave(self, error: BaseException) -> NoReturn:
        if _is_of_peer(error):
            self.watchdog.wait_for_verdict()
        first_line = (str(error).splitlines() or [""])[0]
        _end_at_once(1, f"{type(error).__name__}: {first_line}")


def _is_of_peer(error: BaseException) -> bool:
    """Whether a collective failed because a peer is gone; the watchdog knows which one."""
    return any(word in str(error) for word in _PEER_WORDS)


def _end_at_once(code: int, reason: str) -> NoReturn:
    # A stream is None if its descriptor was closed when Python started; the peers must still learn.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        post_failure(SharedStore(), process_id(), reason)
    os._exit(code)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(env.get(name, default))
    except ValueError:
        raise LaunchError(
            f"{name} is {env[name]!r:.80}; set a number of seconds, or unset it"
        ) from None


_FEWEST_THREADS = 16
_MOST_THREADS = 2**12
MOST_DEVICES = 1024
"""The most emulated devices of a run."""
_VARIABLE = "JAX_NUM_CPU_DEVICES"
_COUNT_FLAG = r"--xla_force_host_platform_device_count=([0-9]{1,9})\b"


def stated_share(env: Mapping[str, str]) -> int | None:
    """The number of CPU devices in `JAX_NUM_CPU_DEVICES`; None if it is not set.

    Raises:
        LaunchError: if it is not a valid number of devices.
    """
    if _VARIABLE not in env:
        return None
    # JAX treats -1 as unset.
    number = _within(env[_VARIABLE], _VARIABLE, -1, MOST_DEVICES)
    return None if number == -1 else number


def flagged_devices(env: Mapping[str, str]) -> int:
    """The number of CPU devices that `XLA_FLAGS` asks for, up to `MOST_DEVICES`; 0 if none.

    Example:
        >>> flagged_devices({"XLA_FLAGS": "--xla_force_host_platform_device_count=16"})
        16
    """
    counts = re.findall(_COUNT_FLAG, env.get("XLA_FLAGS", ""))
    # XLA reads the last one.
    return min(int(counts[-1]), MOST_DEVICES) if counts else 0


def _within(text: str, name: str, least: int, most: int) -> int:
    number = parse_count(text, name)
    if not least <= number <= most:
        raise LaunchError(f"{name} is {number}; set a number from {least} to {most}, or unset it")
    return number


def share_of(num_devices: int, spec: LaunchSpec, stated: int | None = None) -> int:
    """How many of a run's emulated devices each process has.

    Args:
        num_devices: the number of devices over all processes.
        spec: how this process was launched.
        stated: the number per process that the environment sets; None if it sets none.

    Raises:
        LaunchError: if the processes cannot share them evenly.
        MeshError: if the number of devices is out of range.

    Example:
        >>> share_of(8, LaunchSpec(num_processes=4, process_id=1))
        2
    """
    if not is_whole(num_devices) or not 1 <= num_devices <= MOST_DEVICES:
        raise MeshError(
            f"cannot emulate {num_devices!r:.80} devices; ask for a whole number from 1 to "
            f"{MOST_DEVICES}, as in World.emulate(8)"
        )
    count = spec.num_processes
    if count is None:
        raise LaunchError(
            f"cannot share {num_devices} emulated devices among the processes of {spec.source}, "
            "whose number is not known yet; remove devices.emulate there"
        )
    if num_devices % count:
        raise LaunchError(
            f"cannot share {num_devices} emulated devices evenly among {count} processes; emulate "
            f"a multiple of {count}, or start another number of processes"
        )
    share = num_devices // count
    if count > 1 and stated is not None and stated != share:
        raise LaunchError(
            f"{num_devices} emulated devices over {count} processes are {share} for each, but "
            f"{_VARIABLE}={stated}; remove --devices-per-process, or emulate {count * stated}"
        )
    return share


class EmulatedDevices:
    """How the CPU devices of this process were started.

    Attributes:
        are_ours: whether `prepare_emulation` set them up before the backend started. XLA reads its
            flags only once, so a backend that was started otherwise lacks the flags set there.
    """

    are_ours: ClassVar[bool] = False


def prepare_emulation(num_devices: int, only_cpu: bool = True, reads_flag: bool = False) -> None:
    """Sets up emulated CPU devices before the backend starts; does nothing afterwards.

    Args:
        num_devices: the number of CPU devices of this process.
        only_cpu: whether JAX starts only the CPU backend, unless `jax_platforms` is set.
        reads_flag: whether `XLA_FLAGS` may ask for more devices. Not for one of several processes,
            because all must have equal shares of the devices.

    With one thread per core, a loop that never blocks fills XLA's thread pool with devices that
    wait for each other, and the process dies. So the pool gets enough threads for all devices.
    """
    if backend_started():
        return
    # The environment may ask for more devices, for a later world in this process. JAX reads the
    # flag only if the variable is not set; the option, which is set below, replaces both.
    asked = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009
    if asked < 1 and reads_flag:
        asked = flagged_devices(os.environ)
    num_devices = max(num_devices, asked)
    fewest = _FEWEST_THREADS if jax.distributed.is_initialized() else 2 * num_devices
    requested = _within(os.environ.get("NPROC") or "0", "NPROC", 0, _MOST_THREADS)
    threads = max(fewest, 2 * num_devices, requested, os.cpu_count() or 1)
    os.environ["NPROC"] = str(threads)
    _add_flags(rendezvous_flags())
    jax.config.update("jax_num_cpu_devices", num_devices)
    if only_cpu and not getattr(jax.config, "jax_platforms"):  # noqa: B009
        jax.config.update("jax_platforms", "cpu")
    EmulatedDevices.are_ours = True


def can_restart() -> bool:
    """Whether the running backend has only CPU devices that this single process set up."""
    is_ours = backend_started() and EmulatedDevices.are_ours
    return is_ours and jax.default_backend() == "cpu" and not jax.distributed.is_initialized()


def _add_flags(wanted: Sequence[str]) -> None:
    """Adds XLA flags to the environment, except those that the user has set."""
    flags = os.environ.get("XLA_FLAGS", "")
    given = {flag.partition("=")[0] for flag in flags.split()}
    missing = [flag for flag in wanted if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()


def keep_collectives_in_order(devices: Sequence[Any]) -> None:
    """Keeps programs whose collectives XLA:CPU could confuse out of JAX's compilation cache.

    Args:
        devices: the devices of a world; a single device and other platforms are not affected.
    """
    is_at_risk = len(devices) > 1 and devices[0].platform == "cpu"
    if is_at_risk and not runs_cached_collectives_in_order():
        keep_only(orders_collectives)


_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
)
_CHANNEL = re.compile(r"channel_id=(\d+)")


def orders_collectives(hlo: str) -> bool:
    """Whether XLA:CPU distinguishes all collectives of a program, in whatever order they run.

    XLA:CPU matches devices in a collective by its kind and channel, and runs the collectives of one
    computation in order. In a program loaded from the cache, loops and branches lose that order. So
    each collective must have its own channel, and be outside loops and branches.

    Args:
        hlo: the text of an optimised module.

    Example:
        >>> line = "%a = f32[] collective-permute(%x), channel_id=1\\n"
        >>> [orders_collectives(f"ENTRY %main {{\\n{lines}}}") for lines in (line, 2 * line)]
        [True, False]
    """
    before, _, entry = hlo.rpartition("ENTRY ")
    lines = [line for line in entry.splitlines() if _COLLECTIVE.search(line)]
    keys = {(_COLLECTIVE.findall(line)[0], *_CHANNEL.findall(line)) for line in lines}
    return not _COLLECTIVE.search(before) and len(keys) == len(lines)
