"""What a compiler computes where it is read, and what it writes to memory first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .tape import Node

WINDOWS = frozenset({"reduce_window", "reduce_window_max", "reduce_window_sum"})
"""Reductions over windows, which XLA:GPU makes loops of, as of elementwise operations."""


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The habits of a compiler.

    Args:
        dear: elementwise operations that are not done twice.
        inside: operations that compute what they read while they read it, beside elementwise ones.
        absorbed: operations that reductions do on the way where nothing else reads their results;
            None where reductions are as elementwise operations.
        is_doubled: whether what is made of a single array is computed again where that can be, even
            if it has to be in memory for others.
    """

    dear: frozenset[str]
    inside: frozenset[str]
    absorbed: frozenset[str] | None = None
    is_doubled: bool = False

    def reads_memory(self, node: Node) -> bool:
        """Whether what a node reads is written to memory before."""
        if node.kind == "reduction":
            return self.absorbed is not None
        if node.kind == "other":
            return node.name not in self.inside
        return node.kind != "fused"


_INSIDE = frozenset({"gather", "scatter-add", "scatter_add"})
_DEAR = frozenset({"tanh", "erf", "erfc", "erf_inv", "atan2", "lgamma", "digamma"})

_LIBRARY = frozenset(
    {"abs", "ceil", "convert_element_type", "erf", "exp", "exp2", "expm1", "floor", "log", "log1p"}
    | {"logistic", "neg", "round", "rsqrt", "sign", "sqrt", "tanh", "square", "integer_pow"}
    | {"sin", "cos", "tan"}  # jaxlib 0.12; 0.10 writes these out
    | {"add", "add_any", "div", "max", "min", "mul", "pow", "sub"}
    | {"broadcast_in_dim", "transpose", "iota"}
)
"""What the library knows that XLA:CPU leaves reductions to (YnnMatcher)."""

FUSIONS: Mapping[str, Fusion] = {
    "cuda": Fusion(_DEAR, _INSIDE | WINDOWS),
    "tpu": Fusion(_DEAR, _INSIDE),
    # InstructionFusion: what is expensive is not done twice, and of the rest what is made of one
    # array only (`effectively_at_most_unary`) wherever it can be.
    "cpu": Fusion(
        _DEAR
        | {"exp", "exp2", "expm1", "log", "log1p", "logistic", "sqrt", "rsqrt", "cbrt"}
        | {"pow", "div", "rem", "sin", "cos", "tan"},
        _INSIDE,
        _LIBRARY,
        is_doubled=True,
    ),
}
"""By the platform."""
