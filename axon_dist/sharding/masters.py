"""Parameters that lie where their moments lie, and frozen ones where they would lie anyway."""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec

from ..core.typing import Path, Shape
from .policy import Decision, HasShape, Policy


@dataclasses.dataclass(frozen=True)
class WithMoments(Policy):
    """Lays trained parameters out as their moments, and leaves all else to another policy.

    Args:
        moments: where moments lie.
        otherwise: for frozen parameters, and for what has no path of a parameter.
        frozen: the paths of the frozen parameters.
    """

    moments: Policy
    otherwise: Policy
    frozen: frozenset[Path]

    @property
    def name(self) -> str:
        """That of the policy about moments."""
        return self.moments.name

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Those of the moments."""
        return self.moments.split_axes

    @property
    def flexible_part(self) -> Policy:
        """What is no parameter has no moments."""
        return self.otherwise.flexible_part

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides as the one or the other."""
        policy = self.otherwise if path in self.frozen else self.moments
        return policy.decide(path, shape, mesh, taken)
