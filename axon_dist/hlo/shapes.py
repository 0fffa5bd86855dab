"""Types of HLO values: what `bf16[256,2048]{1,0}` weighs."""

from __future__ import annotations

import dataclasses
import math
import re

_SHAPE = re.compile(r"\b(pred|token|opaque|(?:bf|f|s|u|c)\d\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"\D+(\d+)")
_SPECIAL_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array type of a compiled program, by its XLA name such as `bf16` or `f8e4m3fn`."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """The bytes of all elements, without the padding that a tiled layout adds."""
        return math.ceil(self.size * dtype_bits(self.dtype) / 8)


def dtype_bits(dtype: str) -> int:
    """Reads the width of an element from the name of its XLA dtype.

    Example:
        >>> [dtype_bits(name) for name in ("bf16", "f32", "f8e4m3fn", "s4", "pred", "c64")]
        [16, 32, 8, 4, 8, 64]
    """
    if dtype in _SPECIAL_BITS:
        return _SPECIAL_BITS[dtype]
    match = _BITS.match(dtype)
    assert match, f"not an XLA dtype: {dtype!r}"
    return int(match.group(1))


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Lists the array types in the text of a type, the leaves of a tuple in order.

    Example:
        >>> parse_shapes("(f32[8,2]{1,0:T(8,128)}, (bf16[4]{0}))")
        (Shape(dtype='f32', dims=(8, 2)), Shape(dtype='bf16', dims=(4,)))
    """
    return tuple(
        Shape(dtype, tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _SHAPE.findall(text)
    )


def total_bytes(shapes: tuple[Shape, ...]) -> int:
    """Adds up the bytes of several values."""
    return sum(shape.bytes for shape in shapes)
