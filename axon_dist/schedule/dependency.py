"""What an action must wait for. Order, validity and simulation all follow from these few lines."""

from __future__ import annotations

from collections.abc import Container

from .action import Action, Phase


def dependencies(action: Action, num_stages: int, scheduled: Container[Action]) -> list[Action]:
    """Lists the actions whose results an action needs.

    The sequential program it equals: `F(k) <- F(k-1)`, `B(k) <- F(k), B(k+1)`, and with a split
    backward `I(k) <- F(k), I(k+1)`, `W(k) <- I(k)`. With a split vocabulary the first
    stage's `F` needs every `E`, every `V` the last stage's `F`, its `B` or `I` every `V`, and every
    `G` the first stage's `B` or `I`.

    Args:
        action: the action that waits.
        num_stages: stages through the whole model.
        scheduled: every action of the schedule. It tells whether the next stage's gradient comes
            from a whole backward `B` or from an `I`; a stage may split its backward while its
            neighbour does not.

    Returns:
        The direct dependencies, of the same stage first.

    Example:
        >>> [str(a) for a in dependencies(Action(1, Phase.B, 0), 4, {Action(2, Phase.I, 0)})]
        ['1F0', '2I0']
    """
    stage, phase, microbatch = action

    def of_all(phase: Phase) -> list[Action]:
        parts = (Action(each, phase, microbatch) for each in range(num_stages))
        return [part for part in parts if part in scheduled]

    def gradient_from(stage: int) -> Action:
        split = Action(stage, Phase.I, microbatch)
        return split if split in scheduled else Action(stage, Phase.B, microbatch)

    if phase is Phase.E:
        return []
    if phase is Phase.F:
        return [Action(stage - 1, Phase.F, microbatch)] if stage else of_all(Phase.E)
    if phase is Phase.V:
        return [Action(num_stages - 1, Phase.F, microbatch)]
    if phase is Phase.W:
        return [Action(stage, Phase.I, microbatch)]
    if phase is Phase.G:
        return [gradient_from(0)]
    own = Action(stage, Phase.F, microbatch)
    is_last = stage + 1 == num_stages
    return [own, *(of_all(Phase.V) if is_last else [gradient_from(stage + 1)])]
