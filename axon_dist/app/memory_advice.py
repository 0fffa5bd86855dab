"""A device that runs out of memory: what was on it, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError

from axon_dist.core.errors import AxonDistError, OutOfMemoryError
from axon_dist.core.tree import num_bytes
from axon_dist.core.words import byte_size
from axon_dist.mesh.chips import hardware, machine_of

from .planned import plan_config
from .runs import Run

PROFILE = "memory.prof"
"""The file in the folder of a run that says what was in memory; `pprof` reads it."""


@contextmanager
def explained(run: Run, folder: Path) -> Iterator[None]:
    """Turns the error of a device without memory left into one that says what to change.

    Args:
        run: what is trained.
        folder: takes the memory profile.

    Raises:
        OutOfMemoryError: in its place.
    """
    try:
        yield
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        first = str(error).splitlines()[0]
        raise OutOfMemoryError(
            f"a device has no memory left ({first}); {'; '.join([*_kept(folder), *advice(run)])}"
        ) from error


def _kept(folder: Path) -> Iterator[str]:
    try:
        jax.profiler.save_device_memory_profile(str(folder / PROFILE))
    except (OSError, RuntimeError):
        return
    yield f"what it held is in {str(folder / PROFILE)!r}, for pprof"


def advice(run: Run) -> list[str]:
    """What would make a run smaller, in the order in which it helps.

    Args:
        run: what is trained.

    Returns:
        Clauses, each with keys of the config.
    """
    config, mesh = run.config, run.world.mesh
    found = list(_planned(run))
    held = sum(row.bytes_per_device for row in run.step.claims.params.rows)
    held += sum(row.bytes_per_device for row in run.step.claims.opt_state.rows)
    whole = num_bytes(run.step.abstract_state)
    if held * 2 > whole and mesh.size > 1:
        found.append(
            f"a device holds {byte_size(held)} of {byte_size(whole)} of the train state: split it, "
            "parallel=full_shard"
        )
    rows = config.train.global_batch // run.step.layout.divisor
    if rows > 1:
        more = config.train.accumulate * next(k for k in range(2, rows + 1) if rows % k == 0)
        found.append(f"take less at a time, train.accumulate={more}")
    if config.remat is None and run.step.strategy.remat is None:
        found.append("recompute blocks in the backward pass, 'remat={interval: 1}'")
    return found or ["take more devices, or a smaller train.global_batch"]


def _planned(run: Run) -> Iterator[str]:
    """The planner's choice for such a model, batch and machine, of whatever kind."""
    chip = machine_of(run.world.mesh)
    if chip is None:
        return
    try:
        found = plan_config(run.config, hardware(chip.name), run.world.size)
    except AxonDistError:
        return
    best = found.best
    if found.fits:
        yield (
            f"axon plan would take {best.arrangement.name} on mesh {best.arrangement.mesh}, "
            f"{byte_size(best.reading.peak)} of {byte_size(best.device_bytes)} on a {chip.name}"
        )
    else:
        yield f"by axon plan no strategy fits {run.world.size} x {chip.name}"
