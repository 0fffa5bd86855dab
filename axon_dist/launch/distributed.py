"""`initialize`: from a `LaunchSpec` to processes that know each other, and their devices."""

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
from typing import Any, NoReturn

import jax

from ..core.arguments import check_fields, is_whole
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
from .environment import LaunchSpec, bind_address, parse_count
from .rendezvous import TOKEN, Peer, rendezvous
from .watchdog import Watchdog, post_failure

_CONNECT_SECONDS = 60
_SHUTDOWN_SECONDS = 120
_LINGER_SECONDS = 10


def check_settings() -> None:
    """Raises where JAX is set to authenticate the processes of a run, which is not done here.

    Raises:
        LaunchError: naming the settings.
    """
    secure = ("mtls_", "verify_secure_credentials")
    stated = {name: v for name, v in jax.config.values.items() if any(s in name for s in secure)}
    if refused := [name for name, value in stated.items() if value]:
        raise LaunchError(
            f"{', '.join(refused)} would have JAX authenticate the processes of a run to each "
            "other; their coordination service is started by axon_dist, in the clear. Leave the "
            "setting out and let no one but the run reach the port, or call "
            "jax.distributed.initialize before World.init()"
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
        endpoint = f"[{host or '::'}]:{port}" if ":" in host or not host else f"{host}:{port}"
        numbers = (num_processes, _heartbeat(silence), _SHUTDOWN_SECONDS, linger)
        self._process = subprocess.Popen(
            [sys.executable, "-P", coordinator.__file__, endpoint, *map(str, numbers)],
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


LAUNCH_TIMEOUT, SILENCE_TIMEOUT = "AXON_LAUNCH_TIMEOUT", "AXON_SILENCE_TIMEOUT"
STEP_TIMEOUT = "AXON_STEP_TIMEOUT"
_TIMEOUTS = LAUNCH_TIMEOUT, SILENCE_TIMEOUT, STEP_TIMEOUT

_MOST_SECONDS = 30 * 24 * 3600
_PEER_WORDS = ("Gloo", "NCCL")


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long processes wait for each other.

    Args:
        launch: seconds until all have reported, and until a collective got through.
        silence: seconds without a sign of life after which a process counts as lost.
        step: seconds within which some process has to take a step, compiling and saving included.

    Raises:
        LaunchError: when one is not positive.
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
                raise LaunchError(
                    f"{name}={seconds:g} must be more than 0 seconds and at most {_MOST_SECONDS}, "
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
    """Brings the processes of a run together; nothing happens for a single one, or twice.

    In turn: the cluster is asked for what the spec leaves open, every process reports to process 0,
    `jax.distributed` starts, and from then on a watchdog ends all when one is lost. An exception
    that ends this process ends it at once, and the others hear of it. SIGTERM keeps its meaning.

    Args:
        spec: how this process was launched.
        timeouts: how long to wait; None for the defaults.
        devices_per_process: CPU devices that each process makes up; None takes the devices that
            there are.

    Raises:
        BackendStartedError: when JAX has started its backend already.
        LaunchError: when the processes do not come together; the message names who is missing.
    """
    if not spec.is_distributed or jax.distributed.is_initialized():
        return
    if backend_started():
        raise BackendStartedError(
            f"process {spec.process_id} of {spec.num_processes} has started its JAX backend "
            "before it met the others; call World.init() before anything makes an array"
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
    # Longer than our own watchdogs, which name the process that is lost.
    _add_flags(watchdog_flags(int(timeouts.step + timeouts.silence)))
    coordinator = join(spec, timeouts.silence)
    watchdog = Watchdog(me.process, present, SharedStore(), timeouts.silence)
    watchdog.start()
    # At an ordinary exit the last one runs first, before JAX waits for the others.
    if coordinator is not None:
        atexit.register(coordinator.dismiss)
    atexit.register(watchdog.stop)
    sys.excepthook = _OnException(watchdog)


def complete(spec: LaunchSpec, timeouts: Timeouts) -> LaunchSpec:
    """Asks the cluster for what a spec leaves open.

    Raises:
        LaunchError: when the cluster does not say.
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
    return dataclasses.replace(
        spec,
        coordinator_address=address,
        num_processes=count,
        process_id=process,
        local_device_ids=None if devices is None else tuple(devices),
    )


def leave(code: int, reason: str) -> int:
    """Ends this process if it is one of several; returns the code if it is alone.

    An ordinary exit would wait for the others, which wait for this process in a collective. They
    hear the reason from the watchdog, and end too.

    Args:
        code: the exit code.
        reason: why, in a line.
    """
    if not jax.distributed.is_initialized():
        return code
    _end_at_once(code, reason)


def leave_after(error: BaseException) -> int:
    """As `leave` with code 1, after an exception that the caller has reported to the user."""
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
        sys.__excepthook__(kind, error, trace)
        self.leave(error)

    def leave(self, error: BaseException) -> NoReturn:
        if any(word in str(error) for word in _PEER_WORDS):
            # A symptom: a collective failed because a peer is gone. The watchdog knows which.
            self.watchdog.wait_for_verdict()
        first_line = (str(error).splitlines() or [""])[0]
        _end_at_once(1, f"{type(error).__name__}: {first_line}")


def _end_at_once(code: int, reason: str) -> NoReturn:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
        post_failure(SharedStore(), process_id(), reason)
    os._exit(code)


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(env.get(name, default))
    except ValueError:
        raise LaunchError(
            f"{name} is {env[name]!r:.80}, which is not a number of seconds; set one, or nothing"
        ) from None


_FEWEST_THREADS = 16
_MOST_THREADS = 2**12
MOST_DEVICES = 1024
"""Emulated devices of a run."""
_VARIABLE = "JAX_NUM_CPU_DEVICES"


def stated_share(env: Mapping[str, str]) -> int | None:
    """How many CPU devices a process emulates by `JAX_NUM_CPU_DEVICES`; None where it is not set.

    Raises:
        LaunchError: when it is no number of devices.
    """
    if _VARIABLE not in env:
        return None
    # JAX treats -1 as not set.
    stated = _within(env[_VARIABLE], _VARIABLE, -1, MOST_DEVICES)
    return None if stated == -1 else stated


def _within(text: str, name: str, least: int, most: int) -> int:
    stated = parse_count(text, name)
    if not least <= stated <= most:
        raise LaunchError(f"{name} is {stated}; set a number from {least} to {most}, or nothing")
    return stated


def share_of(num_devices: int, spec: LaunchSpec, stated: int | None = None) -> int:
    """The number of a run's emulated devices that one process has.

    Args:
        num_devices: over all processes.
        spec: how this process was launched.
        stated: how many each process has by the environment.

    Raises:
        LaunchError: when the processes cannot share them evenly.
        MeshError: when there are none.

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
            f"cannot share {num_devices} emulated devices among processes that {spec.source} alone "
            "counts; leave out devices.emulate there"
        )
    if num_devices % count:
        raise LaunchError(
            f"cannot share {num_devices} emulated devices evenly among {count} processes; emulate "
            f"a multiple of {count}, or start another number of processes"
        )
    share = num_devices // count
    if count > 1 and stated not in (None, share):
        raise LaunchError(
            f"{num_devices} emulated devices over {count} processes make {share} each, but "
            f"{_VARIABLE}={stated}; leave out --devices-per-process, or emulate {count * stated}"
        )
    return share


def prepare_emulation(num_devices: int) -> None:
    """Sets up emulated CPU devices before the backend starts; does nothing after that.

    With as many threads as cores, a loop that never waits fills XLA's pool with devices that wait
    for each other, and the process dies; so the pool gets room for every device.
    """
    if backend_started():
        return
    fewest = _FEWEST_THREADS if jax.distributed.is_initialized() else 2 * num_devices
    stated = _within(os.environ.get("NPROC") or "0", "NPROC", 0, _MOST_THREADS)
    threads = max(fewest, 2 * num_devices, stated, os.cpu_count() or 1)
    os.environ["NPROC"] = str(threads)
    _add_flags(rendezvous_flags())
    # The environment may ask for more, for another world that comes later in this process.
    asked = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009
    jax.config.update("jax_num_cpu_devices", max(num_devices, asked))
    if not getattr(jax.config, "jax_platforms"):  # noqa: B009
        jax.config.update("jax_platforms", "cpu")


def _add_flags(wanted: Sequence[str]) -> None:
    """Adds flags of XLA to the environment; those that the user has set stay as they are."""
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in wanted if flag.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()


def keep_collectives_in_order(devices: Sequence[Any]) -> None:
    """Keeps programs whose collectives XLA:CPU would mix up out of JAX's compilation cache.

    Args:
        devices: of a world; those of other platforms, or one alone, may use the cache as it is.
    """
    is_at_risk = len(devices) > 1 and devices[0].platform == "cpu"
    if is_at_risk and not runs_cached_collectives_in_order():
        keep_only(orders_collectives)


_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
)
_CHANNEL = re.compile(r"channel_id=(\d+)")


def orders_collectives(hlo: str) -> bool:
    """Whether no two collectives of a program can be confused, whatever their order.

    XLA:CPU matches the devices of a collective by its kind and channel, and orders collectives of
    one list of operations; loops and branches lose that order when a program is loaded from the
    cache. So each must have its own channel, and be outside of all loops.

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
