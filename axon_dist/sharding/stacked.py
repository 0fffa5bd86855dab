"""Layers stacked in one array, each laid out as it would be by itself."""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec

from ..core.typing import Path, Shape
from .policy import Decision, HasShape, Merge, Policy


@dataclasses.dataclass(frozen=True)
class RowsAlike(Policy):
    """Leaves the leading dim of stacked layers whole, and decides about one layer's row.

    A loop over the layers then finds its share of every row on each rank, and gathers one row at a
    time; split along the layers, all of them would have to be gathered before it.

    Args:
        policy: a flexible policy.
        stacks: the paths of the stacked modules.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> from axon_dist.sharding import LargestDim
        >>> rule = RowsAlike(LargestDim(("fsdp",)), frozenset({"blocks"}))
        >>> rule("blocks/up/kernel", (512, 64, 64), MeshSpec(fsdp=4))
        P(None, 'fsdp')
        >>> rule("head/kernel", (64, 512), MeshSpec(fsdp=4))
        P(None, 'fsdp')
    """

    policy: Policy
    stacks: frozenset[Path]

    @property
    def name(self) -> str:
        """That of the policy."""
        return self.policy.name

    @property
    def flexible(self) -> bool:
        """That of the policy."""
        return self.policy.flexible

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Those of the policy."""
        return self.policy.split_axes

    @property
    def flexible_part(self) -> Policy:
        """Alike for stacked layers."""
        return RowsAlike(self.policy.flexible_part, self.stacks)

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one row, or about a leaf of no stack as the policy does."""
        if not any(path.startswith(f"{stack}/") for stack in self.stacks):
            return self.policy.decide(path, shape, mesh, taken)
        row = self.policy.decide(path, shape[1:], mesh, PartitionSpec(*tuple(taken)[1:]))
        spec = PartitionSpec(None, *row.spec) if tuple(row.spec) else PartitionSpec()
        return Decision(spec, row.rule, f"of each of {shape[0]} stacked layers: {row.reason}")


def rows_alike(policy: Policy, stacks: frozenset[Path]) -> Policy:
    """A policy whose flexible parts lay out stacked layers one by one.

    Args:
        policy: any; what it fixes by path stays.
        stacks: the paths of the stacked modules.

    Returns:
        The policy.
    """
    if isinstance(policy, Merge):
        return Merge(tuple(rows_alike(part, stacks) for part in policy.policies))
    return RowsAlike(policy, stacks) if policy.flexible else policy
