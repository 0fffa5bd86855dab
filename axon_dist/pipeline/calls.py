"""What is wrong with the calls of a model's blocks, where a pipeline cannot cut between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

MUST = "A pipeline needs each block to be called once, in the order in which the model holds them"
"""What must hold."""


def why_not_in_order(
    blocks: Sequence[str], calls: Sequence[Collection[int]], readers: Mapping[int, Collection[str]]
) -> str:
    """Says why calls are not those of each block once, in order, and what to do.

    Args:
        blocks: the paths of the blocks, in the order in which the model holds them.
        calls: of each call in the loss, the blocks whose parameters it reads.
        readers: of each block, the names of the primitives that read its parameters.

    Returns:
        The message of an error.

    Example:
        >>> print(why_not_in_order(["blocks/0", "blocks/1"], [{1}, {0}], {}).split(".")[0])
        the model calls 'blocks/1' where it holds 'blocks/0'
    """
    if tied := next((owners for owners in calls if len(owners) > 1), None):
        shared = " and ".join(repr(blocks[number]) for number in sorted(tied))
        return (
            f"the blocks {shared} share a parameter, and each may lie on another "
            "rank. Give each block parameters of its own, or keep what is shared in a module "
            "outside the blocks and hand its value to them"
        )
    count = Counter(number for owners in calls for number in owners)
    if unseen := [number for number in range(len(blocks)) if not count[number]]:
        read = {name for number in unseen for name in readers.get(number, ())}
        return _unseen([blocks[number] for number in unseen], len(blocks), read)
    if several := [number for number, times in count.items() if times > 1]:
        return _repeated(blocks[several[0]], count[several[0]])
    if len(calls) != len(blocks):
        return f"the model calls its {len(blocks)} blocks {len(calls)} times. {MUST}"
    pairs = enumerate(calls)
    number, called = next((n, min(o)) for n, o in pairs if o and min(o) != n)
    return (
        f"the model calls {blocks[called]!r} where it holds {blocks[number]!r}. {MUST}: hold them "
        "in one list in the order of their calls, or name the class of the blocks, "
        'classes=("Block",), where other modules are taken for blocks too'
    )


def _unseen(paths: Sequence[str], num_blocks: int, readers: Collection[str]) -> str:
    some = ", ".join(map(repr, paths[:3])) + (", ..." if len(paths) > 3 else "")
    found = f"the loss has no call of {len(paths)} of the model's {num_blocks} blocks ({some})"
    rename = 'where these are not the blocks, name their class: classes=("Block",)'
    if not readers:
        return f"{found} and does not use their parameters. {MUST}. Take them out; {rename}"
    return (
        f"{found} that a pipeline could see; their parameters are read within: "
        f"{', '.join(sorted(readers))}. {MUST}. Calls are hidden by jit, remat, checkpoint, cond "
        "or scan around them. Call the blocks themselves, directly; a pipeline recomputes without "
        f"nnx.remat around them, and backward=... says what it keeps; {rename}"
    )


def _repeated(path: str, times: int) -> str:
    return (
        f"the model calls {path!r} {times} times. {MUST}. Weights that are used several times "
        "belong into a module that is no block, or the calls into one block that makes them all; "
        'name the class of the blocks, classes=("Block",), or call the model once per loss'
    )
