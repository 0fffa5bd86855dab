"""CPU devices that processes make up: how many each, and what XLA needs for them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib
import numpy as np

from ..core.compat import (
    backend_started,
    rendezvous_flags,
    runs_cached_collectives_in_order,
    turn_cache_off,
)
from ..core.errors import LaunchError, MeshError
from .environment import LaunchSpec, parse_count

_FEWEST_THREADS = 16
_MOST_THREADS = 2**14
MOST_DEVICES = 1024
"""Emulated devices of a run."""
_VARIABLE = "JAX_NUM_CPU_DEVICES"


def stated_share(env: Mapping[str, str]) -> int | None:
    """How many CPU devices `JAX_NUM_CPU_DEVICES` tells each process to make up; None for no word.

    Raises:
        LaunchError: when it is not a number.
    """
    stated = env.get(_VARIABLE)
    return None if stated is None else parse_count(stated, _VARIABLE)


def share_of(num_devices: int, spec: LaunchSpec, stated: int | None = None) -> int:
    """Says how many of the emulated devices of a run one process makes up.

    Args:
        num_devices: over all processes.
        spec: how this process was launched.
        stated: how many the environment says that each of several processes makes up.

    Raises:
        LaunchError: when the processes cannot share them evenly.
        MeshError: when there are none.

    Example:
        >>> share_of(8, LaunchSpec(num_processes=4, process_id=1))
        2
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, (int, np.integer)):
        raise MeshError(
            f"cannot emulate {num_devices!r:.80} devices, a {type(num_devices).__name__}; give a "
            "number, as in World.emulate(8)"
        )
    if num_devices < 1:
        raise MeshError(f"cannot emulate {num_devices} devices; ask for at least one")
    if num_devices > MOST_DEVICES:
        raise MeshError(
            f"cannot emulate {num_devices} devices, each with threads of its own; ask for at most "
            f"{MOST_DEVICES}"
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
    """Makes up CPU devices in this process, once its backend starts; does nothing after that.

    With as many threads as cores, a loop that never waits fills XLA's pool with devices that wait
    for each other, and the process dies; so the pool gets room for every device.
    """
    if backend_started():
        return
    fewest = _FEWEST_THREADS if jax.distributed.is_initialized() else 2 * num_devices
    stated = parse_count(os.environ.get("NPROC") or "0", "NPROC")
    threads = max(fewest, 2 * num_devices, min(stated, _MOST_THREADS), os.cpu_count() or 1)
    os.environ["NPROC"] = str(threads)
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in rendezvous_flags() if flag.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    jax.config.update("jax_num_cpu_devices", num_devices)
    if not getattr(jax.config, "jax_platforms"):  # noqa: B009
        jax.config.update("jax_platforms", "cpu")


def keep_collectives_in_order(devices: Sequence[Any]) -> None:
    """Turns JAX's compilation cache off for CPU devices whose collectives it would mix up.

    Args:
        devices: of a world; those of other platforms, or one alone, may use the cache.

    Warns:
        UserWarning: where a cache was to be used.
    """
    is_at_risk = len(devices) > 1 and devices[0].platform == "cpu"
    if not is_at_risk or runs_cached_collectives_in_order():
        return
    if getattr(jax.config, "jax_enable_compilation_cache"):  # noqa: B009
        turn_cache_off()
        if folder := getattr(jax.config, "jax_compilation_cache_dir"):  # noqa: B009
            warnings.warn(
                f"the compilation cache {str(folder)!r:.200} is not used: XLA:CPU of jaxlib "
                f"{jaxlib.__version__} runs the collectives of programs that it loads out of "
                f"order, which {len(devices)} CPU devices would abort or hang at",
                stacklevel=4,
            )
