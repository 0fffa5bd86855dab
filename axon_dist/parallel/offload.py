"""What lives in host memory between steps."""

from __future__ import annotations

from ..core.choice import Choice
from ..core.errors import UnsupportedError
from ..mesh import World

HOST = "pinned_host"
"""The memory kind of the host that devices can copy from and to."""


class CPUOffload(Choice):
    """Which arrays of the training state live in host memory between steps.

    Gradients do not outlive a step, so there is nothing of them to offload.
    """

    NONE = "none"
    PARAMS = "params"
    OPTIMIZER = "optimizer"
    FULL = "full"

    @property
    def params(self) -> str | None:
        """The memory kind of the parameters; None is the device's own."""
        return HOST if self in (CPUOffload.PARAMS, CPUOffload.FULL) else None

    @property
    def opt_state(self) -> str | None:
        """The memory kind of the optimizer state; None is the device's own."""
        return HOST if self in (CPUOffload.OPTIMIZER, CPUOffload.FULL) else None


def check_offload(offload: CPUOffload, world: World) -> None:
    """Raises where the devices cannot reach host memory.

    Raises:
        UnsupportedError: naming the platform and the kinds of memory it has.
    """
    if offload is CPUOffload.NONE:
        return
    kinds = world.memory_kinds()
    if HOST not in kinds:
        raise UnsupportedError(
            f"offload {offload.value!r} needs memory of kind {HOST!r}, and {world.backend.value} "
            f"devices have {sorted(kinds)}; use CPUOffload.NONE"
        )
