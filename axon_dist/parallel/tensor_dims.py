"""Where the split dim of a layer's kernel stands in the layer's input, output and bias."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import flax.linen as nn
from flax import nnx

from ..core.typing import Array, Function
from ..nn import ColumnParallelLinear, ParallelMode
from ..nn.lora import LoRALinearGeneral
from .tensor_plan import Rule

Module: TypeAlias = nnx.Module | nn.Module
"""A layer, of NNX or within a bridged module."""

LINEAR: tuple[Function, ...] = (
    nnx.Linear.__call__,
    nnx.LoRALinear.__call__,
    ColumnParallelLinear.__call__,
    nn.Dense.__call__,
)
"""The calls of layers whose kernel is `[inputs, outputs]`."""

GENERAL: tuple[Function, ...] = (
    nnx.LinearGeneral.__call__,
    LoRALinearGeneral.__call__,
    nn.DenseGeneral.__call__,
)
"""The calls of layers whose kernel is `[*batch, *inputs, *outputs]`."""

EINSUM: tuple[Function, ...] = (nnx.Einsum.__call__, nn.Einsum.__call__)
"""The calls of layers whose kernel has the dims that an equation names, in any order."""


@dataclasses.dataclass(frozen=True)
class SplitDims:
    """The split dim of a kernel in the arrays around it, counted from the end.

    Args:
        kernel: the dim of the kernel; used only where a layer's outputs are split.
        input: its dim in the input; None where the layer does not sum over it, or not known.
        output: its dim in the output; None where the output does not have it, or not known.
        bias: its dim in a bias; None where the bias does not have it.
        num_bias: how many dims a bias has; None where that is not known.
        is_known: whether the class of the layer is one whose dims are known. Otherwise the dims are
            those that a kernel `[inputs, outputs]` would have.
        input_leads: whether the input begins with its samples and positions.
        output_leads: whether the output begins with them.
    """

    kernel: int
    input: int | None
    output: int | None
    bias: int | None
    num_bias: int | None = None
    is_known: bool = False
    input_leads: bool = True
    output_leads: bool = True


def split_dims(
    rule: Rule, call: Function, module: Module, x: Array, args: tuple[Any, ...], kwargs: Any
) -> SplitDims:
    """Finds the split dim of a layer's kernel in the arrays of one call.

    Args:
        rule: the rule of the layer.
        call: the method that is called.
        module: the layer.
        x: its input.
        args: further arguments of the call.
        kwargs: keyword arguments of the call.
    """
    labels = _labels(_original(call, module), module, x, args, kwargs)
    dim = rule.split_dim("kernel")
    if labels is not None and dim is not None:
        return labels.dims(dim)
    kernel = rule.dim or -1
    # Where a kernel of the user's has another layout, the compiler chooses that of its activations.
    by_columns = rule.dim in (None, -1) or rule.mode is ParallelMode.VOCAB
    by_rows = rule.dim in (None, -2)
    return SplitDims(kernel, -1 if by_rows else None, -1 if by_columns else None, kernel)


def _original(call: Function, module: Module) -> Function | None:
    """Returns the method of the layer's class, below the wrappers of this library."""
    if isinstance(module, nn.Module):
        return type(module).__call__
    return getattr(call, "__wrapped__", None)


@dataclasses.dataclass(frozen=True)
class _Labels:
    """A letter for each dim of the arrays of a product, as in an equation of `einsum`."""

    input: str
    kernel: str
    output: str

    def dims(self, kernel: int) -> SplitDims:
        """Returns where a dim of the kernel stands in the other arrays."""
        if -kernel > len(self.kernel):
            return SplitDims(kernel, None, None, None, is_known=True)
        label = self.kernel[kernel]
        # A bias has one dim for each dim of the kernel that the output keeps, in its order.
        bias = "".join(each for each in self.output if each in self.kernel)
        lead = "".join(each for each in self.input if each not in self.kernel)[:2]
        return SplitDims(
            kernel,
            *(_from_end(label, labels) for labels in (self.input, self.output, bias)),
            num_bias=len(bias),
            is_known=True,
            input_leads=self.input.startswith(lead),
            output_leads=self.output.startswith(lead),
        )


def _from_end(label: str, labels: str) -> int | None:
    return labels.index(label) - len(labels) if label in labels else None


def _labels(
    original: Function | None, module: Any, x: Array, args: tuple[Any, ...], kwargs: Mapping
) -> _Labels | None:
    """Labels the dims of one call of a layer; returns None for a class that is not known."""
    if original in LINEAR:
        return _labels_of_axes(x.ndim, (), (-1,), 1)
    if original in GENERAL:
        batch = getattr(module, "batch_axis", None) or getattr(module, "batch_dims", ())
        outputs = getattr(module, "out_features", None) or getattr(module, "features", 1)
        return _labels_of_axes(x.ndim, _ints(batch), _ints(module.axis), len(_ints(outputs)))
    if original in EINSUM:
        given = args[0] if args else kwargs.get("einsum_str")
        return _labels_of_equation(str(given or module.einsum_str), x.ndim)
    return None


def _ints(value: int | Iterable[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Iterable) else (value,)


def _labels_of_axes(
    ndim: int, batch: tuple[int, ...], axes: tuple[int, ...], num_outputs: int
) -> _Labels:
    """Labels a product over some axes of the input, whose outputs are the last dims."""
    letters = string.ascii_letters
    # Flax sorts the axes, and the dims of the kernel are in that order.
    batch, axes = (tuple(sorted(axis % ndim for axis in some)) for some in (batch, axes))
    inputs, outputs = letters[:ndim], letters[ndim : ndim + num_outputs]
    batched, summed = ("".join(inputs[axis] for axis in some) for some in (batch, axes))
    free = "".join(label for label in inputs if label not in batched + summed)
    return _Labels(inputs, batched + summed + outputs, batched + free + outputs)


def _labels_of_equation(equation: str, ndim: int) -> _Labels | None:
    """Labels the dims that an equation names; those of an ellipsis get letters of their own."""
    operands, _, output = equation.replace(" ", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    if "..." in kernel:
        return None
    unused = "".join(label for label in string.ascii_letters if label not in equation)
    between = unused[: ndim - len(inputs.replace("...", ""))] if "..." in inputs else ""
    return _Labels(inputs.replace("...", between), kernel, output.replace("...", between))
