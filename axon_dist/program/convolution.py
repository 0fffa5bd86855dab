"""Convolutions computed rank by rank, where the compiler would get their gradients wrong.

XLA's partitioner (jax 0.10 to 0.12) makes the gradient of the kernel of a grouped or depthwise
convolution as many times too large as the axis is long that does not split the batch, and gets
that of any convolution wrong where a spatial dim is split over one axis of two. It says nothing,
and a mesh with a single axis is right. So where a mesh has two, the compiler is not asked: each
rank convolves its own samples with the whole kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from ..core.errors import UnsupportedError
from ..core.typing import Array
from .rewrite import Rewriting

CONVOLUTION = "conv_general_dilated"
"""The primitive that every convolution is."""


@dataclasses.dataclass(frozen=True)
class ByRank:
    """Computes convolutions of a traced program on each rank's samples alone.

    Args:
        mesh: names and sizes of its axes, over all devices.
        batch: the axes that split samples.
    """

    mesh: Mesh
    batch: tuple[str, ...]

    @classmethod
    def rewriting(cls, mesh: Mesh, batch: tuple[str, ...]) -> Rewriting | None:
        """The rewriting of a program on a mesh, or None where the compiler is right."""
        if sum(size > 1 for size in mesh.shape.values()) < 2:
            return None
        return Rewriting({CONVOLUTION: cls(mesh, batch)}, refuse)

    def __call__(self, equation: Any, operands: Sequence[Array]) -> list[Array] | None:
        """Computes one convolution; None where nothing is left to the compiler."""
        here = jax.sharding.get_abstract_mesh()
        manual = () if here.empty else tuple(here.manual_axes)
        left = tuple(axis for axis in self.mesh.axis_names if axis not in manual)
        if all(self.mesh.shape[axis] == 1 for axis in left):
            return None
        dims = equation.params["dimension_numbers"]
        batch = self._splitting(equation, operands[0].shape[dims.lhs_spec[0]], manual)
        samples, results = _at(dims.lhs_spec[0], batch), _at(dims.out_spec[0], batch)
        mesh = here if manual else self.mesh
        mapped = lambda function, ins, outs: jax.shard_map(
            function, mesh=mesh, axis_names={*left}, in_specs=ins, out_specs=outs, check_vma=False
        )
        whole, run = PartitionSpec(), lambda x, k: equation.primitive.bind(x, k, **equation.params)

        def backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
            def local(x: Array, k: Array, cotangent: Array) -> tuple[Array, Array]:
                _, pull = jax.vjp(run, x, k)
                of_samples, of_kernel = pull(cotangent)
                return of_samples, of_kernel[None]

            ins, addends = (samples, whole, results), _at(0, batch)
            pull = mapped(local, ins, (samples, addends))
            of_samples, of_kernel = pull(*saved, cotangent)
            # Added up by the compiler, which gives every owner its shard at once.
            return of_samples, jax.lax.reduce_sum(of_kernel, (0,))

        forward = mapped(run, (samples, whole), results)
        convolve = jax.custom_vjp(forward)
        convolve.defvjp(lambda x, k: (forward(x, k), (x, k)), backward)
        return [convolve(*operands)]

    def _splitting(self, equation: Any, samples: int, manual: Sequence[str]) -> tuple[str, ...]:
        """The axes that split the samples of a convolution."""
        batch = tuple(axis for axis in self.batch if axis not in manual)
        ways = math.prod(self.mesh.shape[axis] for axis in batch)
        divides = samples % ways == 0 and equation.params["batch_group_count"] == 1
        return batch if divides else ()


def refuse(equation: Any) -> None:
    """Raises for a convolution that stands where it cannot be rewritten.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"the model convolves inside {equation.primitive.name!r}, whose derivative is its own, on "
        "a mesh with two or more axes, where the compiler can get the gradients of convolutions "
        "wrong and cannot be told better in there. Call the convolution outside of such a "
        "function, or use a mesh with one axis, such as dp=8"
    )


def _at(dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(None,) * dim, axes or None)
