"""In what order a loss calls the blocks of a model, and what is wrong where that cannot be cut."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..program import variables

BATCH = (
    "Give build_train_step a batch, of arrays or shapes, batch=...: it then finds the calls in the "
    "loss before it lays out parameters, and keeps what several ranks call on each of them"
)
"""What finds the order of calls."""


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls of blocks in a loss, in the order of its program.

    Args:
        owners: of each call, the numbers of the blocks whose parameters it reads.
        behind: of each call, the numbers of the calls whose results go into it.

    Example:
        >>> calls = Calls(({0}, {1}, {0}), ((), (0,), (1,)))
        >>> calls.depths, calls.late([0, 1, 0])
        ((0, 1, 2), (2, 1))
    """

    owners: tuple[Collection[int], ...]
    behind: tuple[Collection[int], ...]

    @classmethod
    def of(cls, jaxpr: Any, calls: Iterable[int], block_of: Mapping[Any, int]) -> Calls:
        """The calls of a program.

        Args:
            jaxpr: open, its units as calls.
            calls: the positions of the calls.
            block_of: the number of the block that a variable is a parameter of.
        """
        numbers = {index: number for number, index in enumerate(calls)}
        owners, behind = [], []
        sources: dict[Any, frozenset[int]] = {}
        for index, equation in enumerate(jaxpr.eqns):
            read = variables(equation.invars)
            found = frozenset().union(*(sources.get(v, ()) for v in read))
            if index in numbers:
                owners.append(frozenset(block_of[v] for v in read if v in block_of))
                behind.append(found)
                found = frozenset({numbers[index]})
            sources.update((v, found) for v in equation.outvars)
        return cls(tuple(owners), tuple(behind))

    @property
    def depths(self) -> tuple[int, ...]:
        """How many calls lie in front of each on the longest way to it.

        Calls of one depth do not depend on each other: the two passes of a loss that calls its
        model twice, or two towers side by side, go through the stages together.
        """
        found: list[int] = []
        for behind in self.behind:
            found.append(max((found[call] + 1 for call in behind), default=0))
        return tuple(found)

    @property
    def called(self) -> set[int]:
        """The blocks that are called at all."""
        return set().union(*self.owners)

    def late(self, homes: Sequence[int]) -> tuple[int, int] | None:
        """The first call whose operands are made in a later stage than its own, and that stage.

        Args:
            homes: the stage of each call.
        """
        last = [max((homes[call] for call in behind), default=0) for behind in self.behind]
        pairs = enumerate(zip(last, homes, strict=True))
        return next(((call, at) for call, (at, home) in pairs if at > home), None)

    def fits(self, stage_of: Sequence[int]) -> bool:
        """Whether each block may be called in a stage of its own.

        Args:
            stage_of: the stage of each block.
        """
        homes = [{stage_of[number] for number in owners} for owners in self.owners]
        return all(len(stages) == 1 for stages in homes) and not self.late(list(map(min, homes)))


def levels_of(jaxpr: Any, homes: Mapping[int, int], given: Collection[Any] = ()) -> dict[Any, int]:
    """The stage in which every value that depends on a call is made.

    Args:
        jaxpr: an open jaxpr.
        homes: the stage of each call, by its position; a call waits for its operands all the same.
        given: variables that the first stage has, as if it made them.
    """
    levels: dict[Any, int] = dict.fromkeys(given, 0)
    for index, equation in enumerate(jaxpr.eqns):
        level = max((levels.get(v, -1) for v in variables(equation.invars)), default=-1)
        # A value made beside the blocks belongs to the earliest stage that can make it.
        level = max(level, homes.get(index, -1))
        if level >= 0:
            levels.update((v, level) for v in equation.outvars)
    return levels


def why_not_seen(
    blocks: Sequence[str], calls: Sequence[Collection[int]], readers: Mapping[int, Collection[str]]
) -> str | None:
    """Says which blocks no call shows, and what to do; None where all are called.

    Args:
        blocks: the paths of the blocks, in the order in which the model holds them.
        calls: of each call in the loss, the blocks whose parameters it reads.
        readers: of each block, the names of the primitives that read its parameters.

    Returns:
        The message of an error.

    Example:
        >>> print(why_not_seen(["blocks/0", "blocks/1"], [{1}], {}).split(" and")[0])
        the loss has no call of 1 of the model's 2 blocks ('blocks/0')
    """
    count = Counter(number for owners in calls for number in owners)
    unseen = [number for number in range(len(blocks)) if not count[number]]
    if not unseen:
        return None
    read = {name for number in unseen for name in readers.get(number, ())}
    return _unseen([blocks[number] for number in unseen], len(blocks), read)


def why_not_alone(blocks: Sequence[str]) -> str:
    """Says why a call is no stage's, and what to do.

    Args:
        blocks: the paths of the blocks whose parameters it reads, of several stages, or none.
    """
    if not blocks:
        return f"the loss calls a block that shares all its parameters with others. {BATCH}"
    names = " and ".join(map(repr, blocks))
    return (
        f"one call reads parameters of the blocks {names}, and each may lie on another rank. "
        f"{BATCH}"
    )


def why_not_in_order(path: str, home: int, late: int) -> str:
    """Says why a block cannot be called in its stage, and what to do.

    Args:
        path: of the block.
        home: its stage.
        late: the stage that makes its operands.
    """
    return (
        f"the model calls {path!r}, a block of stage {home} in the order in which the model holds "
        f"them, behind blocks of stage {late}. {BATCH}; where other modules are taken for blocks, "
        'name the class of the blocks: classes=("Block",)'
    )


def _unseen(paths: Sequence[str], num_blocks: int, readers: Collection[str]) -> str:
    some = ", ".join(map(repr, paths[:3])) + (", ..." if len(paths) > 3 else "")
    found = f"the loss has no call of {len(paths)} of the model's {num_blocks} blocks ({some})"
    must = "A pipeline needs a call of each block"
    rename = 'where these are not the blocks, name their class: classes=("Block",)'
    if not readers:
        return f"{found} and does not use their parameters. {must}. Take them out; {rename}"
    return (
        f"{found} that a pipeline could see; their parameters are read within: "
        f"{', '.join(sorted(readers))}. {must}. Calls are hidden by jit, remat, checkpoint, cond "
        "or scan around them. Call the blocks themselves, directly; a pipeline recomputes without "
        f"nnx.remat around them, and backward=... says what it keeps; {rename}"
    )
