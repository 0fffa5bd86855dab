"""Where XLA gathers in a way of its own: dim by dim, and rows in place of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .partial import SCATTERS, Sum
from .placement import Axes, Splits
from .tape import Node, Sent


def gathers(
    nodes: Sequence[Node],
    buffer: int,
    splits: tuple[Splits, Splits],
    lost: Axes,
    bytes_of: Callable[[Splits], int],
    sizes: list[int],
) -> list[Node]:
    """Gathers a value before a program of ranks that is given it less split.

    XLA gathers dim by dim, the last one first; and a cast to fewer bytes it does before the last
    gather alone, so the others send what is cast.

    Args:
        nodes: what made the value, among others.
        buffer: where it is.
        splits: how it lies, and how it shall lie.
        lost: the axes that it shall not be split over any more.
        bytes_of: of the value on a device, by how it lies.
        sizes: bytes of each buffer; those of new ones are added.

    Returns:
        The gathers, one after another; or, of axes that are not lost, what cuts the value.
    """
    before, after = splits
    dims = [dim for dim in reversed(range(len(before))) if before[dim] & lost]
    wider, now, found = _narrowed(nodes, buffer, sizes), list(before), []
    for dim in dims:
        is_last = dim == dims[-1]
        over, now[dim] = before[dim] & lost, before[dim] - lost
        size = bytes_of(after) if is_last else int(bytes_of(tuple(now)) * wider)
        sizes.append(size)
        sent = Sent("all-gather", tuple(sorted(over)), size)
        read = found[-1].writes if found else (buffer,)
        found.append(Node("shard_map", "other", read, (len(sizes) - 1,), 0.0, (sent,)))
    if not dims:
        sizes.append(bytes_of(after))
        found.append(Node("shard_map", "fused", (buffer,), (len(sizes) - 1,)))
    return found


def gathers_rows(one: Sum, over: Axes, ways_of: Callable[[Axes], int], sizes: list[int]) -> bool:
    """Lets a rank gather what all scatter, and add what belongs to its own part of the table.

    XLA's partitioner does so where the rows of all ranks, as of a step's tokens, are fewer bytes
    than the table.

    Args:
        one: the sum of what ranks scatter into a table, of which each keeps a part.
        over: the axes over which the table is kept split.
        ways_of: how many ranks axes have.
        sizes: bytes of each buffer; the table's become those of a part.

    Returns:
        Whether it is so; if it is, nothing is left to be added up over these axes.
    """
    node = one.node
    rows = sizes[node.reads[2]] if node.name in SCATTERS else 0
    if not 0 < rows * ways_of(one.axes) < one.num_bytes:
        return False
    ways = ways_of(over)
    node.sent += (Sent("all-gather", tuple(sorted(over)), rows * ways),)
    for buffer in (*node.reads[:1], *node.writes):
        sizes[buffer] = one.num_bytes // ways
    return True


def _narrowed(nodes: Sequence[Node], buffer: int, sizes: Sequence[int]) -> float:
    """How many times as many bytes a value had before it was cast, if it was cast to fewer."""
    for node in reversed(nodes):
        if buffer in node.writes and node.name == "convert_element_type":
            return max(1.0, sizes[node.reads[0]] / sizes[buffer])
    return 1.0
