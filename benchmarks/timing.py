"""Alternating rounds of two programs, so that a busy machine is busy for both."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call of one program, one entry per round."""

    wall: list[float]
    cpu: list[float]

    @property
    def best_cpu(self) -> float:
        """The least CPU-seconds per call: what the program needs when nothing disturbs it."""
        return min(self.cpu)

    @property
    def median_wall(self) -> float:
        """The median wall seconds per call."""
        return statistics.median(self.wall)


def alternate(programs: dict[str, Callable], rounds: int, calls: int) -> dict[str, Timing]:
    """Times programs in turn; each call's result is waited for at the end of its round."""
    timings = {name: Timing([], []) for name in programs}
    for call in programs.values():
        jax.block_until_ready(call())
    for index in range(rounds):
        names = list(programs) if index % 2 == 0 else list(reversed(programs))
        for name in names:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(calls):
                result = programs[name]()
            jax.block_until_ready(result)
            timings[name].wall.append((time.perf_counter() - wall) / calls)
            timings[name].cpu.append((time.process_time() - cpu) / calls)
    return timings
