"""Operations that a compiler makes several of, each with a result in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .tape import Node


def lowered(
    node: Node, equation: Any, given: Sequence[int], sizes: list[int], platform: str
) -> list[Node]:
    """What a compiler makes of an operation.

    Args:
        node: the operation.
        equation: that it stands for.
        given: bytes of each operand on a device.
        sizes: bytes of each buffer; those of new ones are added.
        platform: `cpu`, `cuda` or `tpu`.

    Returns:
        The nodes in its place.
    """
    if platform == "cpu" and node.name == "conv_general_dilated":
        return _with_channels_last(node, equation.params["dimension_numbers"], given, sizes)
    if platform != "tpu" and node.name == "select_and_scatter_add":
        return _by_positions(node, equation, given, sizes)
    return [node]


def _with_channels_last(
    node: Node, dims: Any, given: Sequence[int], sizes: list[int]
) -> list[Node]:
    """A convolution of transposed copies, for XLA:CPU wants channels last (ConvCanonicalization).

    So it is where a kernel's gradient is one, which has samples for channels.
    """
    samples, kernel = (0, -1), (-1, -2)
    before, after = [], []
    reads = list(node.reads)
    for place, (spec, last) in enumerate(((dims.lhs_spec, samples), (dims.rhs_spec, kernel))):
        if reads[place] >= 0 and not _lies(spec, last):
            reads[place] = _new(sizes, given[place])
            before.append(Node("transpose", "fused", (node.reads[place],), (reads[place],)))
    if not _lies(dims.out_spec, samples):
        made = _new(sizes, sizes[node.writes[0]])
        after.append(Node("transpose", "fused", (made,), node.writes))
        node.writes = (made,)
    node.reads = tuple(reads)
    return [*before, node, *after]


def _lies(spec: tuple[int, ...], ends: tuple[int, int]) -> bool:
    """Whether the first two of an operand's dims are where they shall be, and the rest in order."""
    wanted = tuple(end % len(spec) for end in ends)
    rest = tuple(dim for dim in range(len(spec)) if dim not in wanted)
    return tuple(spec) == (*wanted, *rest)


def _by_positions(node: Node, equation: Any, given: Sequence[int], sizes: list[int]) -> list[Node]:
    """The gradient of a max-pool: where each maximum was found, and a scatter to there.

    XLA:CPU and XLA:GPU compute the window again with the position as an int32 for each dim
    (SelectAndScatterExpander), and the maximum, as float32 at least.
    """
    source, operand = node.reads[:2]
    of_source = equation.invars[0].aval
    count = given[0] // of_source.dtype.itemsize
    value = _new(sizes, count * max(4, of_source.dtype.itemsize))
    places = tuple(_new(sizes, 4 * count) for _ in range(of_source.ndim))
    node.reads = (source, *places)
    return [Node("reduce_window", "reduction", (operand,), (value, *places)), node]


def _new(sizes: list[int], num_bytes: int) -> int:
    sizes.append(num_bytes)
    return len(sizes) - 1
