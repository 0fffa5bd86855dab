"""Where the stored parameters of a pipeline lie: rows by stage, the rest spread over the stages."""

from __future__ import annotations

import dataclasses

from jax.sharding import PartitionSpec

from ..core.typing import Path, Shape
from ..sharding import Decision, HasShape, LargestDim, Merge, Policy, Replicate


@dataclasses.dataclass(frozen=True)
class Staged(Policy):
    """Lays dim 0 of every row over the pipeline axis, and its other dims as another policy says.

    What is in no block (embedding, final norm, head) is used at one end of the pipeline, but a
    program that is the same on all ranks reserves its memory on all of them. So it is split over
    the stages, and gathered for the step.

    Args:
        inner: decides about a leaf as the model has it.
        axis: the mesh axis of the pipeline.
        rows: the paths of all rows.
        min_elements: leaves outside the blocks with fewer elements stay whole.
        state_rows: the paths of the rows in the state of the optimizer, whatever their shapes.
        label: what the rows are of, in tables: stages of a `pipeline`, or experts.
        spreads: whether what is in no row is split over the axis, too.
    """

    inner: Policy
    axis: str
    rows: frozenset[Path]
    min_elements: int = 1024
    state_rows: frozenset[Path] = frozenset()
    label: str = "pipeline"
    spreads: bool = True

    @property
    def name(self) -> str:
        """The label, and the inner policy's name."""
        return self.label if self.inner == Replicate() else f"{self.label} + {self.inner.name}"

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes of the inner policy."""
        return self.inner.split_axes

    @property
    def flexible_part(self) -> Policy:
        """What it decides about a state's leaves that are not like their parameters."""
        return dataclasses.replace(self, inner=self.inner.flexible_part, rows=self.state_rows)

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one leaf of the stored tree."""
        if path in self.rows:
            own = self.inner.decide(path, shape[1:], mesh)
            return Decision(PartitionSpec(self.axis, *own.spec), self.name, "one row of blocks")
        if not self.spreads:
            return self.inner.decide(path, shape, mesh, taken)
        spread = LargestDim((self.axis,), self.min_elements, "pipeline")
        both = spread if self.inner == Replicate() else Merge((self.inner, spread))
        return both.decide(path, shape, mesh, taken)
