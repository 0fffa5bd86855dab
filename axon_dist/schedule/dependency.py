"""What an action must wait for. Order, validity and simulation all follow from these few lines."""

from __future__ import annotations

from collections.abc import Container

from .action import Action, Phase


def dependencies(action: Action, num_stages: int, scheduled: Container[Action]) -> list[Action]:
    """Lists the actions whose results an action needs.

    The sequential program it equals: `F(k) <- F(k-1)`, `B(k) <- F(k), B(k+1)`, and with a split
    backward `I(k) <- F(k), I(k+1)`, `W(k) <- I(k)`. With a split vocabulary every `V` needs the
    last stage's `F`, and its `B` or `I` every `V`.

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
    if phase is Phase.F:
        return [Action(stage - 1, Phase.F, microbatch)] if stage else []
    if phase is Phase.W:
        return [Action(stage, Phase.I, microbatch)]
    if phase is Phase.V:
        return [Action(num_stages - 1, Phase.F, microbatch)]
    needed = [Action(stage, Phase.F, microbatch)]
    if stage + 1 == num_stages:
        parts = (Action(each, Phase.V, microbatch) for each in range(num_stages))
        needed += [part for part in parts if part in scheduled]
    else:
        split = Action(stage + 1, Phase.I, microbatch)
        whole = Action(stage + 1, Phase.B, microbatch)
        needed.append(split if split in scheduled else whole)
    return needed
