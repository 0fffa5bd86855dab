"""`Reading`: what a traced step needs of one device, before anything is compiled."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..jaxpr.device import tape_of
from ..jaxpr.liveness import peak_of
from ..jaxpr.placement import Splits, of_spec
from ..jaxpr.tape import Sent
from ..mesh.chips import Hardware
from .cost import EFFICIENCY, StepCost

ROUNDS: Mapping[str, float] = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
}
"""How often a ring passes the share `(N-1)/N` of an array on, by the kind of the collective."""

COMBINED = 30e6
"""The bytes up to which compilers join collectives that nothing waits for into one."""

WAITED = frozenset({"tp", "pp"})
"""The axes whose collectives the next product waits for; others hide behind compute."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What one device holds, computes and sends in a step, read from the step's own program.

    Args:
        state: bytes of the train state between steps.
        batch: bytes of its samples.
        temporaries: bytes at the peak, beside these.
        flops: operations of its products; of branches of a conditional the dearest.
        sends: collectives, and how often each runs; of branches all.
        mesh: the axes and their sizes, outer to inner.
    """

    state: int
    batch: int
    temporaries: int
    flops: float
    sends: tuple[tuple[Sent, int], ...]
    mesh: Mapping[str, int]

    @property
    def peak(self) -> int:
        """All that a device has to hold at once."""
        return self.state + self.batch + self.temporaries

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends in a step."""
        return sum(self.by_axes.values())

    @property
    def by_axes(self) -> dict[str, float]:
        """The same, by the axes that they travel over."""
        found: dict[str, float] = defaultdict(float)
        for sent, times in self.sends:
            found[",".join(sent.axes)] += self._wire(sent) * times
        return {axes: size for axes, size in found.items() if size}

    def _wire(self, sent: Sent) -> float:
        if sent.kind == "collective-permute":
            return sent.num_bytes
        return ROUNDS[sent.kind] * (1 - 1 / self._ranks(sent)) * sent.num_bytes

    def _joined(self) -> dict[tuple[str, tuple[str, ...], int], list[int]]:
        """The sizes of the collectives of a kind over the same axes that run equally often."""
        found: dict[tuple[str, tuple[str, ...], int], list[int]] = {}
        for sent, times in self.sends:
            found.setdefault((sent.kind, sent.axes, times), []).append(sent.num_bytes)
        return found

    def _ranks(self, sent: Sent) -> int:
        return math.prod(self.mesh[axis] for axis in sent.axes)

    def _stride(self, sent: Sent) -> int:
        """How many devices apart neighbours on the innermost of the axes are."""
        names = list(self.mesh)
        innermost = max(names.index(axis) for axis in sent.axes)
        return math.prod(self.mesh[name] for name in names[innermost + 1 :])

    def step_time(
        self,
        hardware: Hardware,
        compute: Any,
        *,
        flops: float | None = None,
        idle: float = 0.0,
        efficiency: float = EFFICIENCY,
    ) -> StepCost:
        """The time of a step: products at the rate of the chip, transfers, and the update.

        Args:
            hardware: FLOP/s by dtype, bytes/s of memory and links of one chip.
            compute: the dtype of the products.
            flops: in place of those read, for a pipeline, whose ranks take turns.
            idle: what a pipeline waits, as a share of what a rank computes.
            efficiency: the share of peak FLOP/s that compute alone reaches.

        Returns:
            The parts. Collectives over `tp` and `pp` are waited for; others hide behind compute,
            which is the best case.
        """
        busy = (self.flops if flops is None else flops) / (hardware.rate(compute) * efficiency)
        hidden, waited = 0.0, 0.0
        for (kind, axes, times), sizes in self._joined().items():
            one = Sent(kind, axes, sum(sizes))
            ranks, stride = self._ranks(one), self._stride(one)
            if ranks == 1:
                continue
            is_waited = not WAITED.isdisjoint(axes)
            calls = len(sizes) if is_waited else math.ceil(one.num_bytes / COMBINED)
            calls *= max(1, round(ROUNDS.get(kind, 1.0)))
            latency = calls * hardware.ring_latency(ranks, stride)
            took = times * (latency + self._wire(one) / hardware.bandwidth(ranks, stride))
            hidden, waited = hidden + took * (not is_waited), waited + took * is_waited
        return StepCost(
            compute=busy,
            bubble=busy * idle,
            update=2 * self.state / hardware.memory_bandwidth,
            communication=hidden + waited,
            exposed=waited + max(0.0, hidden - busy),
        )


def read_program(
    program: ClosedJaxpr,
    arguments: Sequence[Any],
    num_state: int,
    mesh: Mapping[str, int],
    platform: str,
) -> Reading:
    """Reads a traced train step.

    Args:
        program: the closed jaxpr of a step, over global arrays.
        arguments: its arguments in order, shapes with shardings.
        num_state: how many of the first of them are the train state, which is returned first and
            overwrites what was given.
        mesh: the sizes of the axes.
        platform: `cpu`, `gpu` or `tpu`, which branches are taken for.

    Returns:
        The reading.
    """
    compiler = {"gpu": "cuda"}.get(platform, platform)
    tape = tape_of(program, [_splits(leaf) for leaf in arguments], mesh, compiler, num_state)
    sizes = [tape.sizes[buffer] for buffer in tape.inputs]
    return Reading(
        state=sum(sizes[:num_state]),
        batch=sum(sizes[num_state:]),
        temporaries=peak_of(tape, range(num_state)).num_bytes,
        flops=tape.flops,
        sends=tuple(tape.sends()),
        mesh=dict(mesh),
    )


def _splits(leaf: jax.ShapeDtypeStruct) -> Splits:
    return of_spec(getattr(leaf.sharding, "spec", ()), len(leaf.shape))
