"""How replicas over a slow axis train apart and meet: when, what of them, in how many bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import optax

from ..collectives import Compression
from ..core.typing import Path

APART = ("diloco", "local_sgd")
"""The strategies whose replicas train on their own, by name."""

USUAL_EVERY = 100
"""The steps between two meetings where none are said; DiLoCo trains with 500 (arXiv:2311.08105)."""


@dataclasses.dataclass(frozen=True)
class SlowPlan:
    """How the replicas along a slow mesh axis train apart and meet.

    Each has parameters, moments and statistics of its own. With the outer parameters θ, and θ_r
    those of replica r after H steps on its share of the batches,

        Δ = mean_r(θ - θ_r);    θ = θ + outer.update(Δ);    θ_r = θ

    Args:
        axis: the mesh axis; nothing else may be split over it.
        every: H, the steps between two meetings.
        outer: the transformation that takes Δ for a gradient.
        compression: how Δ travels; None as it is, in float32.
        fragments: into how many parts the parameters are cut; part p meets H·(p+1)/P steps after
            the first of every H, so that the link has a part to carry at a time.
    """

    axis: str
    every: int
    outer: optax.GradientTransformationExtraArgs
    compression: Compression | None = None
    fragments: int = 1

    def due(self, step: int) -> tuple[int, ...]:
        """Which fragments meet after so many steps.

        Example:
            >>> plan = SlowPlan("nodes", 4, optax.with_extra_args_support(optax.sgd(1.0)), None, 2)
            >>> [plan.due(step) for step in range(1, 5)]
            [(), (0,), (), (1,)]
        """
        at = lambda part: (self.every * (part + 1) // self.fragments) % self.every
        return tuple(part for part in range(self.fragments) if step % self.every == at(part))

    def parts(self, sizes: Mapping[Path, int]) -> tuple[frozenset[Path], ...]:
        """Cuts the parameters into the fragments, in their order and about equally large.

        Args:
            sizes: the elements of every parameter, by path.

        Returns:
            The paths of each fragment.

        Example:
            >>> plan = SlowPlan("nodes", 4, optax.with_extra_args_support(optax.sgd(1.0)), None, 2)
            >>> [sorted(part) for part in plan.parts({"a": 4, "b": 4, "c": 8})]
            [['a', 'b'], ['c']]
        """
        found: list[set[Path]] = [set() for _ in range(self.fragments)]
        total, before = sum(sizes.values()), 0
        for path, size in sizes.items():
            # By the middle of each: what is large does not drag its neighbours along.
            found[min((2 * before + size) * self.fragments // (2 * total), len(found) - 1)].add(
                path
            )
            before += size
        return tuple(map(frozenset, found))

    def wire_bytes(self, sizes: Mapping[Path, int], ranks: int) -> int:
        """Bytes that one device sends over the axis in H steps, all fragments together.

        Without compression `2(R-1)/R · 4` bytes a parameter, the ring all-reduce of float32.

        Args:
            sizes: the elements of its shard of every parameter, by path.
            ranks: R.
        """
        if self.compression is None:
            return math.floor(2 * (ranks - 1) * 4 * sum(sizes.values()) / ranks)
        parts = [[sizes[path] for path in sizes if path in part] for part in self.parts(sizes)]
        return sum(self.compression.wire_bytes(part, ranks) for part in parts)
