"""Arrays that the state holds in place of a weight, laid out as the weight would be."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax.sharding import PartitionSpec

from ..core.typing import Path, Shape
from .policy import Decision, HasShape, Policy, axes_of


@dataclasses.dataclass(frozen=True)
class InPlaceOf(Policy):
    """Decides about the leaves of a dict that takes the place of a weight.

    Each lies as the weight would, and is whole along the dims in which it has one entry.

    Args:
        policy: about weights.
        shapes: of the weights, by path.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> from axon_dist.sharding import LargestDim
        >>> rule = InPlaceOf(LargestDim(("fsdp",)), {"up/kernel": (64, 256)})
        >>> [rule(f"up/kernel/{k}", s, MeshSpec(fsdp=4)) for k, s in
        ...  {"int8": (64, 256), "scale": (1, 256)}.items()]
        [P(None, 'fsdp'), P(None, 'fsdp')]
    """

    policy: Policy
    shapes: Mapping[Path, Shape]

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
        """That of the policy."""
        return self.policy.flexible_part

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about a weight, or about what is held in its place."""
        weight = path.rpartition("/")[0]
        if weight not in self.shapes:
            return self.policy.decide(path, shape, mesh, taken)
        found = self.policy.decide(weight, self.shapes[weight], mesh, taken)
        return dataclasses.replace(found, spec=spread(found.spec, shape))


def spread(spec: PartitionSpec, shape: Shape) -> PartitionSpec:
    """A spec of an array that others are broadcast to, for one of them.

    Args:
        spec: of the largest array.
        shape: of the other; a dim of size 1 is whole.

    Example:
        >>> spread(PartitionSpec("fsdp", "tp"), (1, 64))
        P(None, 'tp')
    """
    kept = [axes_of(spec, dim) if shape[dim] > 1 else () for dim in range(len(spec))]
    while kept and not kept[-1]:
        kept.pop()
    return PartitionSpec(*(entry[0] if len(entry) == 1 else (entry or None) for entry in kept))
