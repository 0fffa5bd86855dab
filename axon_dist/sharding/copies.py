"""Arrays of which every rank of an axis has a copy of its own, stacked in front."""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec

from ..core.typing import Path, Shape
from .policy import Decision, HasShape, Policy


@dataclasses.dataclass(frozen=True)
class Copies(Policy):
    """Gives each rank of an axis one row of dim 0, and decides about a row as another policy does.

    Args:
        policy: decides about one copy.
        axis: the mesh axis whose ranks have copies of their own.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> from axon_dist.sharding import LargestDim
        >>> rule = Copies(LargestDim(("fsdp",)), "nodes")
        >>> rule("kernel", (2, 64, 64), MeshSpec(nodes=2, fsdp=4))
        P('nodes', 'fsdp')
    """

    policy: Policy
    axis: str

    @property
    def name(self) -> str:
        """That of the policy."""
        return self.policy.name

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axis, and those of the policy."""
        return (self.axis, *self.policy.split_axes)

    @property
    def flexible_part(self) -> Policy:
        """Whatever it is, every rank has its own."""
        return Copies(self.policy.flexible_part, self.axis)

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one copy."""
        row = self.policy.decide(path, shape[1:], mesh, PartitionSpec(*tuple(taken)[1:]))
        why = f"a copy for each of {self.axis}={shape[0]}: {row.reason}"
        return Decision(PartitionSpec(self.axis, *row.spec), row.rule, why)
