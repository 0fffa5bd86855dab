"""What a strategy says about its pipeline: the schedule, and how the model is cut."""

from __future__ import annotations

import dataclasses

from ..core.errors import MeshError, did_you_mean
from ..mesh import World
from ..schedule import Schedule


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A pipeline as a value: which table runs, on which axis, with the model cut where.

    Args:
        schedule: the table; its microbatches are those of a step.
        axis: the mesh axis along which stages lie.
        classes: names of the block classes; empty for the blocks that the model keeps in lists.
        boundaries: the first block of each stage and the number of blocks; None for equal stages.
        costs: the cost of each block, to balance the stages by; None for equal ones.
        keeps_residuals: whether a forward pass keeps what its backward pass needs; else the
            backward pass recomputes the stage from its input.
    """

    schedule: Schedule
    axis: str = "pp"
    classes: tuple[str, ...] = ()
    boundaries: tuple[int, ...] | None = None
    costs: tuple[float, ...] | None = None
    keeps_residuals: bool = False

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step."""
        return self.schedule.num_microbatches

    def validate(self, world: World) -> None:
        """Checks the plan against a world.

        Raises:
            MeshError: when the mesh lacks the axis, or has another number of ranks on it.
        """
        if self.axis not in world.mesh.axis_names:
            raise MeshError(
                f"the pipeline lies along axis {self.axis!r}, which mesh {world.spec} lacks."
                f"{did_you_mean(self.axis, world.mesh.axis_names)}"
            )
        size = world.mesh.shape[self.axis]
        if size != self.schedule.num_devices:
            raise MeshError(
                f"schedule {self.schedule.name!r} is for {self.schedule.num_devices} devices, and "
                f"mesh {world.spec} has {size} along {self.axis!r}; make them equal"
            )
