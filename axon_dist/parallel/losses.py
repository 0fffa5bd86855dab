"""The loss of a linear head on a mesh: each rank goes over its own positions and tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from ..core.reduction import all_sum
from ..core.typing import Array, PyTree
from ..nn import Axes, Layout, manual_axes
from ..ops.linear_loss import (
    LINEAR_CROSS_ENTROPY,
    Found,
    HeadLoss,
    Operands,
    Wants,
    differentiable,
    find,
)
from ..program import Rewriting


@dataclasses.dataclass(frozen=True)
class LossOverMesh:
    """Computes the cross-entropies of linear heads in a traced program rank by rank.

    Left to itself the compiler would gather the head, and reduce its gradient, once per chunk of
    positions. Here the head is whole before the chunks, and its gradient summed after them.

    Args:
        layout: where activations lie; its `vocabulary` splits the tokens where they divide.
    """

    layout: Layout

    @classmethod
    def rewriting(cls, layout: Layout) -> Rewriting | None:
        """The rewriting of a program on a mesh, or None on one device.

        Within a function whose derivative is its own the loss stays as it is: right, and slower.
        """
        if layout.mesh.size == 1:
            return None
        return Rewriting({LINEAR_CROSS_ENTROPY: cls(layout)}, lambda equation: None)

    def __call__(self, equation: JaxprEqn, operands: Sequence[Array]) -> list[Array] | None:
        """Computes one loss; None where nothing is left to divide."""
        manual = manual_axes()
        mesh = self.layout.mesh
        if all(mesh.shape[axis] == 1 for axis in mesh.axis_names if axis not in manual):
            return None
        spread = Spread.of(self.layout, Operands(*operands), manual)
        how = equation.params["how"]
        run = lambda given, wants: spread.run(self.layout, how, given, wants)
        return list(differentiable(run)(*operands))


@dataclasses.dataclass(frozen=True)
class Spread:
    """Which mesh axes split what of a loss; those that are manual already are left out.

    Args:
        samples: dim 0 of the positions.
        sequence: dim 1.
        vocabulary: the columns of the kernel.
    """

    samples: Axes
    sequence: Axes
    vocabulary: Axes

    @classmethod
    def of(cls, layout: Layout, operands: Operands, manual: Axes) -> Spread:
        """The axes of a layout, each where sizes divide."""
        shape, classes = operands.labels.shape, operands.kernel.shape[1]
        left = lambda axes: tuple(axis for axis in axes if axis not in manual)
        fits = lambda axes, size: left(axes) if size % layout.size(axes) == 0 else ()
        return cls(
            samples=fits(layout.batch, shape[0]) if shape else (),
            sequence=fits(layout.sequence, shape[1]) if len(shape) > 1 else (),
            vocabulary=fits(layout.vocabulary, classes),
        )

    def run(self, layout: Layout, how: HeadLoss, given: Operands, wants: Wants) -> Found:
        """Computes the loss and the gradients asked for."""
        ranks, columns = (*self.samples, *self.sequence), self.vocabulary or None
        positions = PartitionSpec(self.samples or None, self.sequence or None)
        positions = PartitionSpec(*positions[: given.labels.ndim])
        whole, kernel, bias = PartitionSpec(), PartitionSpec(None, columns), PartitionSpec(columns)
        # Outside of manual regions the addends of the ranks leave side by side, and the compiler
        # adds them up, which gives every owner its shard at once.
        beside = bool(ranks) and not manual_axes()
        axis = self.vocabulary[0] if self.vocabulary else None

        def summed(grad: Array | None, operand: Array | None) -> Array | None:
            if grad is None or operand is None or not ranks:
                return grad
            # On the wire as in the plain program: in the dtype of the product.
            is_narrow = operand.dtype == jax.numpy.float16
            grad = grad if is_narrow else grad.astype(operand.dtype)
            return grad[None] if beside else all_sum(grad, ranks)

        def local(*operands: Array) -> PyTree:
            found = find(how, Operands(*operands), wants, axis)
            total, hits = (all_sum(x, ranks) if ranks else x for x in (found.total, found.hits))
            of_hidden, *of_head = found.grads
            of_kernel, of_bias = map(summed, of_head, (operands[1], operands[4]))
            return total, hits, found.losses, (of_hidden, of_kernel, of_bias)

        lead = (ranks,) if beside else ()
        of_head = PartitionSpec(*lead, None, columns), PartitionSpec(*lead, columns)
        specs = positions, kernel, positions, positions, bias
        results = (whole, whole, positions, (positions, *of_head))
        found = Found(*layout.mapped(local, specs, results, check_vma=False)(*given))
        if not beside:
            return found
        add = lambda x: None if x is None else jax.lax.reduce_sum(x, (0,))
        return found._replace(grads=(found.grads[0], *map(add, found.grads[1:])))
