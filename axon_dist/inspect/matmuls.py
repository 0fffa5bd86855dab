"""Floating point operations of one instruction, as far as it multiplies matrices.

A multiplication and an addition are two operations. Elementwise work is not counted: it is bound by
memory, and no accelerator's peak is stated for it. A causal mask is not discounted, as in the usual
`6 * parameters * tokens + attention` accounting.
"""

from __future__ import annotations

import json
import math
import re

import numpy as np

from ..hlo.parse import Computation, Instruction

_DOTS = ("dot", "ragged-dot", "scaled-dot")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_GEMM_LHS = re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_SCORES = re.compile(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]')
_COST = re.compile(r'"cost_estimate":\s*(\{[^}]*\})')
_NO_FLOPS = re.compile(
    r"Async|AllocateBuffer|AssumeGather|GatherScatter|Sharding|annotate|TopK|[Pp]refix|Sort"
    r"|MoveTo|LayoutConstraint|SliceToDynamic|PadToStatic"
)


def matmul_flops(computation: Computation, instruction: Instruction) -> int:
    """Counts the matrix operations of one instruction, not of what it calls.

    Args:
        computation: the computation that holds it, where its operands are found.
        instruction: a `dot`, a `convolution`, or a custom call to cuBLAS, cuDNN or a kernel that
            states its cost; anything else counts nothing.

    Returns:
        Twice the number of multiplications.
    """
    if instruction.opcode in _DOTS:
        contracted = _dims(instruction.attribute("lhs_contracting_dims"))
        return _gemm(computation, instruction, contracted)
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode == "custom-call":
        return _custom_call(computation, instruction)
    return 0


def opaque_target(instruction: Instruction) -> str | None:
    """Names a custom call that may do matrix work that nothing in the text tells."""
    if instruction.opcode != "custom-call":
        return None
    target = _target(instruction)
    if _splash_products(instruction):
        return None
    known = "matmul" in target or "gemm" in target or "fmha" in target or "$conv" in target
    if known or _NO_FLOPS.search(target) or _COST.search(instruction.attributes):
        return None
    return target


def _target(instruction: Instruction) -> str:
    match = _TARGET.search(instruction.attributes)
    return match.group(1) if match else ""


def _gemm(computation: Computation, instruction: Instruction, contracted: tuple[int, ...]) -> int:
    lhs = computation.operand_shapes(instruction)[0]
    return 2 * instruction.shapes[0].size * math.prod(lhs.dims[dim] for dim in contracted)


def _custom_call(computation: Computation, instruction: Instruction) -> int:
    target, attributes = _target(instruction), instruction.attributes
    if "matmul" in target or "gemm" in target:
        match = _GEMM_LHS.search(attributes)
        return _gemm(computation, instruction, _dims(match.group(1))) if match else 0
    if "fmha" in target:
        return _attention(computation, instruction, backward="Backward" in target)
    if "$conv" in target:
        return _convolution(computation, instruction)
    if products := _splash_products(instruction):
        return _splash(computation, instruction, products)
    match = _COST.search(attributes)
    return int(json.loads(match.group(1)).get("flops", 0)) if match else 0


def _attention(computation: Computation, instruction: Instruction, backward: bool) -> int:
    # Flash attention forms the scores again in its backward pass: five products instead of four
    # (Dao et al., arXiv:2205.14135).
    match = _SCORES.search(instruction.attributes)
    if match is None:
        return 0
    head_dim = computation.operand_shapes(instruction)[0].dims[-1]
    return (5 if backward else 2) * 2 * math.prod(_dims(match.group(1))) * head_dim


def _splash_products(instruction: Instruction) -> int:
    """How many products of all pairs a splash attention kernel of TPUs forms; 0 for others.

    Its backward pass is one kernel of five, or two of four and of three.
    """
    if "splash_m" not in instruction.name:
        return 0
    if "_dkv" not in instruction.name:
        return 3 if "_dq" in instruction.name else 2
    # The one kernel leaves an addend of the queries' gradient for every block of keys.
    return 5 if len({len(shape.dims) for shape in instruction.shapes}) > 1 else 4


def _splash(computation: Computation, instruction: Instruction, products: int) -> int:
    """Of queries `[..., T, K]`, the largest operand, against as many keys."""
    shapes = computation.operand_shapes(instruction)
    queries = max((s for s in shapes if len(s.dims) > 2), key=lambda shape: shape.size)
    return products * 2 * queries.size * queries.dims[-2]


def _convolution(computation: Computation, instruction: Instruction) -> int:
    # On TPU every matrix product is a convolution, and batch dims become spatial ones with base
    # dilation, where most positions of the window fall on holes and cost nothing.
    lhs, kernel, *_ = computation.operand_shapes(instruction)
    output = instruction.shapes[0]
    labels = re.split(r"_|->", instruction.attribute("dim_labels") or "")
    lhs_dims, kernel_dims, output_dims = (
        dict(zip(text, shape.dims, strict=True))
        for text, shape in zip(labels, (lhs, kernel, output), strict=True)
    )
    window = _window(instruction.attribute("window") or "{}")
    positions = math.prod(
        _valid_positions(lhs_dims[axis], kernel_dims[axis], output_dims[axis], window, index)
        for index, axis in enumerate(sorted(filter(str.isdigit, labels[0])))
    )
    return 2 * output_dims["b"] * output_dims["f"] * kernel_dims["i"] * positions


def _window(text: str) -> dict[str, list[str]]:
    fields = (field.split("=") for field in text.strip("{}").split())
    return {key: value.split("x") for key, value in fields}


def _valid_positions(
    lhs: int, kernel: int, output: int, window: dict[str, list[str]], index: int
) -> int:
    def field(key: str, default: str) -> str:
        return window[key][index] if key in window else default

    low = int(field("pad", "0_0").split("_")[0])
    stride, hole = int(field("stride", "1")), int(field("lhs_dilate", "1"))
    at = np.arange(output)[:, None] * stride - low
    at = at + np.arange(kernel)[None, :] * int(field("rhs_dilate", "1"))
    return int(np.sum((at >= 0) & (at <= (lhs - 1) * hole) & (at % hole == 0)))


def _dims(text: str | None) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text or ""))
