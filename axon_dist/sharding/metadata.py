"""The layout that a model's author has written on its parameters, in Flax's own metadata."""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.tree import path_str
from ..core.typing import Path, Shape
from .policy import Decision, HasShape, Policy, axes_of, check_divides


@dataclasses.dataclass(frozen=True)
class FromMetadata(Policy):
    """Lays parameters out as their `nnx.with_partitioning` annotations say.

    Names of axes that the mesh lacks split nothing, for the same model also runs on smaller
    meshes.

    Args:
        annotations: pairs of a path and the PartitionSpec written on its parameter.

    Raises:
        DivisibilityError: when an annotated dim does not divide by its axes.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> policy = FromMetadata((("kernel", PartitionSpec("tp", "fsdp")),))
        >>> policy("kernel", (8, 4), MeshSpec(fsdp=4))
        P(None, 'fsdp')
    """

    annotations: tuple[tuple[Path, PartitionSpec], ...]

    @property
    def name(self) -> str:
        """`flax metadata`."""
        return "flax metadata"

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides by the annotation of the path, as far as the mesh has its axes."""
        written = dict(self.annotations).get(path, PartitionSpec())
        entries = [_on_mesh(axes_of(written, dim), mesh) for dim in range(len(written))]
        while entries and entries[-1] is None:
            entries.pop()
        spec = PartitionSpec(*entries)
        check_divides(path, shape, spec, mesh)
        return Decision(spec, self.name, f"annotated {written}" if written else "not annotated")


def annotations_of(model: nnx.Module) -> tuple[tuple[Path, PartitionSpec], ...]:
    """The annotated parameters of a model, logical names translated by Flax's rules.

    Args:
        model: any NNX module, also one whose arrays are `ShapeDtypeStruct`s.

    Returns:
        Pairs of a path and the spec written on it; empty where the author wrote none.

    Example:
        >>> init = nnx.with_partitioning(nnx.initializers.ones, ("in", None))
        >>> with nnx.use_eager_sharding(False):
        ...     annotations_of(nnx.Linear(2, 3, kernel_init=init, rngs=nnx.Rngs(0)))
        (('kernel', P('in', None)),)
    """
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    leaves = jax.tree_util.tree_leaves_with_path(
        specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return tuple((path_str(path), spec) for path, spec in leaves if any(spec))


def _on_mesh(axes: tuple[str, ...], mesh: HasShape) -> str | tuple[str, ...] | None:
    kept = tuple(axis for axis in axes if axis in mesh.shape)
    return kept[0] if len(kept) == 1 else (kept or None)
