"""The step for one process less, compiled while the run still trains with all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import jax

from axon_dist.core.errors import AxonDistError
from axon_dist.launch import ELASTIC
from axon_dist.mesh import World, build_mesh

from ..config.build import Run, abstract_batch, step_for

_CACHE = ("jax_compilation_cache_dir", "jax_enable_compilation_cache")


@contextlib.contextmanager
def compiling_ahead(
    run: Run, env: Mapping[str, str], tell: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Lets process 0 compile the step of a run that has lost a process into the cache of JAX.

    Which process is lost does not matter: those that are left count from 0 again, so that they run
    the program of the first ones. JAX looks into the cache when they start.

    Args:
        run: of all processes.
        env: the environment, in which an elastic launcher says so; nothing is compiled elsewhere,
            nor without a cache that outlives the processes.
        tell: takes a sentence when fewer processes could not go on.

    Yields:
        Starts the compilation, once the step of the run is compiled; the context waits for it.
    """
    begun: list[threading.Thread] = []

    def begin() -> None:
        if _can_shrink(run, env):
            begun.append(threading.Thread(target=_compile, args=(run, tell), name="axon-ahead"))
            begun[0].start()

    try:
        yield begin
    finally:
        for thread in begun:
            thread.join()


def _can_shrink(run: Run, env: Mapping[str, str]) -> bool:
    """Whether a run on fewer processes would have another mesh, whose program can be kept."""
    shrinks = -1 in run.config.mesh.shape.values() and run.config.devices.emulate is None
    has_cache = all(getattr(jax.config, name) for name in _CACHE)
    return shrinks and has_cache and bool(env.get(ELASTIC)) and run.world.num_processes > 1


def _compile(run: Run, tell: Callable[[str], None]) -> None:
    fewer = run.world.num_processes - 1
    try:
        step, _ = step_for(run.config, world_of_first(run, fewer))
        step.lower(abstract_batch(run.config)).compile()
    except AxonDistError as error:
        tell(f"{fewer} processes could not go on if one were lost: {error}")


def world_of_first(run: Run, count: int) -> World:
    """The world that the first processes of a run would make up without the others.

    Args:
        run: of all processes.
        count: how many of them.
    """
    devices = [d for d in run.world.mesh.devices.flat if d.process_index < count]
    devices.sort(key=lambda device: device.id)
    return World(build_mesh(run.config.mesh.resolve(len(devices)), devices), run.world.backend)
