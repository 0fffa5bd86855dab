"""Policies: pure functions (path, shape, mesh) -> PartitionSpec, and their composition."""

from __future__ import annotations

import abc
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.checks import SIZE
from ..core.errors import DivisibilityError, StrategyConflictError
from ..core.tree import path_str
from ..core.typing import Path, Shape

HasShape: TypeAlias = Any
"""Anything whose `.shape` maps axis names to sizes: a Mesh, an AbstractMesh or a MeshSpec."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """A policy's decision about one leaf.

    Args:
        spec: the PartitionSpec.
        rule: the name of the policy that decided.
        reason: a short explanation, for `explain`.
    """

    spec: PartitionSpec
    rule: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """Decides how each array of a tree is sharded over a mesh.

    A policy is an immutable value and a pure function: `policy(path, shape, mesh)` returns the
    same `PartitionSpec` on every process, and needs no device.
    """

    # Subclasses override this by a frozen field; pyrefly takes it for writable and rejects that.
    label = ""
    flexible = False
    """Whether the policy chooses among the dims that other policies leave free."""

    @property
    def name(self) -> str:
        """The name in conflict messages and tables; by default the label."""
        return self.label

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The mesh axes over which ranks with different samples split arrays.

        Empty for policies of tensor parallelism, whose ranks compute from the same samples.
        """
        return ()

    @property
    def flexible_part(self) -> Policy:
        """The part that applies to any array, whatever its path; `Replicate` for a fixed policy."""
        return self if self.flexible else Replicate()

    @abc.abstractmethod
    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one leaf.

        Args:
            path: the path of the leaf, such as `"blocks/0/attn/kernel"`.
            shape: its global shape.
            mesh: anything with `.shape`, axis name to size.
            taken: the dims that earlier policies claim; used by flexible policies and `Merge`.

        Returns:
            The spec of this policy alone, and the reason; `Merge` includes `taken` in the spec.
        """

    def __call__(self, path: Path, shape: Shape, mesh: HasShape) -> PartitionSpec:
        """Returns only the spec."""
        return self.decide(path, shape, mesh).spec


@dataclasses.dataclass(frozen=True)
class Replicate(Policy):
    """Keeps every leaf whole on every device.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> Replicate()("kernel", (8, 4), MeshSpec(fsdp=4))
        P()
    """

    label = "replicate"

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides `PartitionSpec()`."""
        return Decision(PartitionSpec(), self.label, "replicated")


TILE = 8
"""The rows of a tile in TPU memory."""

LARGE = 2**20
"""For arrays of at least this many elements, shards of whole tiles are preferred.

A shard that ends inside a tile is padded for a reduce-scatter. The compute units then run that
reduce-scatter themselves, so it does not overlap with compute.
"""


NO_DIM = "no free dim of"
"""The start of the reason for a leaf that is large enough to split and still stays whole."""


@dataclasses.dataclass(frozen=True)
class LargestDim(Policy):
    """Splits the largest free dim that divides by the size of the axes; the FSDP and ZeRO rule.

    For large leaves, a dim that splits into whole tiles is preferred to a larger one that does not.

    If no free dim divides, the dim with the least padding is split: every shard then has
    `ceil(size / count)` rows, and the last ones end in zeros. A dim with fewer rows than shards is
    never padded.

    Args:
        axes: the mesh axes over which the dim is split, jointly.
        min_elements: leaves with fewer elements stay whole, because gathering them costs more than
            sharding saves.
        label: the name in tables.
        pads: whether a dim may be padded; otherwise a leaf without a dim that divides stays whole.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> rule = LargestDim(("fsdp",))
        >>> rule("kernel", (100, 4096), MeshSpec(fsdp=4))
        P(None, 'fsdp')
        >>> rule.decide("kernel", (4096, 11008), MeshSpec(fsdp=64)).reason
        'dim 0 of (4096, 11008) split 64 ways'
        >>> rule.decide("scale", (64,), MeshSpec(fsdp=4)).reason
        'stays whole: 64 elements are fewer than min_elements=1024'
        >>> rule.decide("kernel", (512, 512), MeshSpec(fsdp=5)).reason
        'dim 0 of (512, 512) padded to 515 and split 5 ways'

    Raises:
        ConfigError: if `min_elements` is not a whole number of at least 0.
    """

    axes: tuple[str, ...]
    min_elements: int = 1024
    label: str = "largest_dim"  # pyrefly: ignore[bad-override]
    pads: bool = True
    flexible = True

    def __post_init__(self) -> None:
        SIZE.check(self.label, "min_elements", self.min_elements)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes."""
        return self.axes

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Splits the largest free dim that divides, else the one with the least padding."""
        count = math.prod(mesh.shape[axis] for axis in self.axes)
        elements = math.prod(shape)
        if elements < self.min_elements:
            why = f"{elements} elements are fewer than min_elements={self.min_elements}"
            return Decision(PartitionSpec(), self.label, f"stays whole: {why}")
        used = [axis for axis in self.axes if axis in spec_axes(taken)]
        if used:
            why = f"{taken} splits it over {'×'.join(used)} already"
            return Decision(PartitionSpec(), self.label, why)
        free = [dim for dim in range(len(shape)) if not axes_of(taken, dim)]
        divisible = [dim for dim in free if shape[dim] % count == 0]
        if not divisible:
            return self._padded(shape, free, count)
        tiled = {d for d in divisible if elements >= LARGE and shape[d] // count % TILE == 0}
        dim = max(divisible, key=lambda d: (d in tiled, shape[d], -d))
        spec = PartitionSpec(*(None,) * dim, self.axes)
        return Decision(spec, self.label, f"dim {dim} of {shape} split {count} ways")

    def _padded(self, shape: Shape, free: list[int], count: int) -> Decision:
        """Decides if no free dim divides."""
        padded = {d: -(-shape[d] // count) * count for d in free if shape[d] >= count}
        if not self.pads or not padded:
            has = "has as many rows as" if self.pads else "divides by"
            why = f"{NO_DIM} {shape} {has} {'×'.join(self.axes)}={count}"
            return Decision(PartitionSpec(), self.label, f"stays whole: {why}")
        dim = min(padded, key=lambda d: ((padded[d] - shape[d]) / shape[d], -shape[d], d))
        spec = PartitionSpec(*(None,) * dim, self.axes)
        why = f"dim {dim} of {shape} padded to {padded[dim]} and split {count} ways"
        return Decision(spec, self.label, why)


@dataclasses.dataclass(frozen=True)
class ByRule(Policy):
    """Shards leaves by the first pattern that matches their path; the tensor-parallel rule.

    Its `split_axes` are empty, so a strategy does not gather its arrays. To apply ZeRO to some
    arrays only, write a subclass of `Wrapped` that delegates to `LargestDim` for these.

    Args:
        rules: pairs of a regular expression, searched for in the path, and a PartitionSpec.
        label: the name in tables.

    Raises:
        DivisibilityError: if a split dim does not divide by its axes.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> rule = ByRule(((r"up/kernel$", PartitionSpec(None, "tp")),), label="tp")
        >>> rule("blocks/0/up/kernel", (64, 256), MeshSpec(tp=4))
        P(None, 'tp')
    """

    rules: tuple[tuple[str, PartitionSpec], ...]
    label: str = "by_rule"  # pyrefly: ignore[bad-override]

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides by the first matching rule; replicates if none matches."""
        for pattern, spec in self.rules:
            if re.search(pattern, path):
                check_divides(path, shape, spec, mesh)
                return Decision(spec, self.label, f"matches {pattern!r}")
        return Decision(PartitionSpec(), self.label, "no rule matches")


@dataclasses.dataclass(frozen=True)
class Merge(Policy):
    """Overlays policies; several may claim the same dim only if they claim the same axes.

    Fixed policies claim first; flexible ones then choose among the remaining dims.

    Args:
        policies: at least one.

    Raises:
        StrategyConflictError: if two policies claim one dim differently, or one mesh axis would
            split two dims.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> tp = ByRule(((r"up", PartitionSpec(None, "tp")),), label="tp")
        >>> both = Merge((LargestDim(("fsdp",)), tp))
        >>> both("up/kernel", (64, 256), MeshSpec(fsdp=4, tp=2))
        P('fsdp', 'tp')
    """

    policies: tuple[Policy, ...]

    @property
    def name(self) -> str:
        """The names of the parts, joined."""
        return " + ".join(policy.name for policy in self.policies)

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes of all parts."""
        return tuple(axis for policy in self.policies for axis in policy.split_axes)

    @property
    def flexible_part(self) -> Policy:
        """The flexible parts of all parts."""
        return Merge(tuple(policy.flexible_part for policy in self.policies))

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Overlays the decisions of all parts."""
        claims: list[Decision] = []
        spec = taken
        for policy in sorted(self.policies, key=lambda policy: policy.flexible):
            claim = policy.decide(path, shape, mesh, spec)
            spec = _overlay(path, shape, spec, claim, claims)
            claims.append(claim)
        deciding = [claim for claim in claims if claim.spec != PartitionSpec()] or claims[-1:]
        rule = " + ".join(claim.rule for claim in deciding)
        return Decision(spec, rule, "; ".join(claim.reason for claim in deciding))


def axes_of(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """The mesh axes that split one dim of an array; empty if it is not split.

    Example:
        >>> axes_of(PartitionSpec("dp", ("fsdp", "tp")), 1)
        ('fsdp', 'tp')
    """
    entry = spec[dim] if dim < len(spec) else None
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes that a spec names, by dim."""
    return tuple(axis for dim in range(len(spec)) for axis in axes_of(spec, dim))


def spec_of(axes: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """The spec with the given axes for each dim, without trailing `None`s.

    Example:
        >>> spec_of([(), ("dp", "fsdp"), ()])
        P(None, ('dp', 'fsdp'))
    """
    entries = list(axes)
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*entries)


def shard_count(spec: PartitionSpec, mesh: HasShape) -> int:
    """The number of distinct shards of an array with this spec."""
    return math.prod(mesh.shape[axis] for axis in spec_axes(spec))


def check_divides(path: Path, shape: Shape, spec: PartitionSpec, mesh: HasShape) -> None:
    """Raises unless every dim that a spec splits divides by its axes.

    Raises:
        DivisibilityError: with the dim, its size, and valid sizes of the axes.
        StrategyConflictError: if the spec has more dims than the array, or an unknown axis.
    """
    if lacking := {*spec_axes(spec)}.difference(mesh.shape):
        raise StrategyConflictError(
            f"{path}: {spec} names the axis {min(lacking)!r}, but the mesh has only "
            f"{', '.join(mesh.shape)}; add this axis to the mesh, or change the rule"
        )
    if len(spec) > len(shape):
        raise StrategyConflictError(
            f"{path}: {spec} names {len(spec)} dims, but the array of shape {shape} has "
            f"{len(shape)}; "
            "shorten the spec of the rule"
        )
    for dim in range(len(spec)):
        axes = axes_of(spec, dim)
        count = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % count:
            valid = [n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0][:12]
            raise DivisibilityError(
                f"{path}: dim {dim} of {shape} is split over {'×'.join(axes)}={count}, and "
                f"{shape[dim]} does not divide by {count}; choose a size among {valid}"
            )


def _overlay(
    path: Path, shape: Shape, spec: PartitionSpec, claim: Decision, earlier: list[Decision]
) -> PartitionSpec:
    entries = []
    for dim in range(max(len(spec), len(claim.spec))):
        old = axes_of(spec, dim)
        new = axes_of(claim.spec, dim)
        if old and new and old != new:
            first = next((c.rule for c in earlier if axes_of(c.spec, dim)), "an earlier policy")
            raise StrategyConflictError(
                f"{path}: dim {dim} of {shape} is claimed by {first!r} ({'×'.join(old)}) and "
                f"{claim.rule!r} ({'×'.join(new)}); leave the dim to one of them"
            )
        entries.append(old or new)
    merged = PartitionSpec(*entries)
    used = spec_axes(merged)
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise StrategyConflictError(
            f"{path}: mesh axis {twice[0]!r} is claimed for two dims of {shape} in {merged}, the "
            f"second by {claim.rule!r}; one axis can split one dim"
        )
    return merged


@dataclasses.dataclass(frozen=True)
class Wrapped(Policy):
    """A base class for policies that delegate to another one, for some arrays or in another form.

    A subclass implements `decide`.

    Args:
        policy: the other policy.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> class Matrices(Wrapped):
        ...     def decide(self, path, shape, mesh, taken=PartitionSpec()):
        ...         if len(shape) < 2:
        ...             return Decision(PartitionSpec(), self.name, "stays whole: no matrix")
        ...         return self.policy.decide(path, shape, mesh, taken)
        >>> rule = Matrices(LargestDim(("dp",)))
        >>> rule("kernel", (64, 512), MeshSpec(dp=4)), rule("bias", (4096,), MeshSpec(dp=4))
        (P(None, 'dp'), P())
    """

    policy: Policy

    @property
    def name(self) -> str:
        """The policy's name."""
        return self.policy.name

    @property
    def flexible(self) -> bool:  # pyrefly: ignore[bad-override]
        """Whether the policy is flexible."""
        return self.policy.flexible

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The policy's axes."""
        return self.policy.split_axes

    @property
    def flexible_part(self) -> Policy:
        """This wrapper around the policy's flexible part."""
        return dataclasses.replace(self, policy=self.policy.flexible_part)


@dataclasses.dataclass(frozen=True)
class PerLayer(Wrapped):
    """Shards stacked layers one by one: never splits their leading dim.

    A loop over the layers then has a shard of every layer on each rank and gathers one layer at a
    time. If the layer dim were split, all layers would have to be gathered before the loop.

    Args:
        policy: a flexible policy.
        stacks: the paths of the stacked modules.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> rule = PerLayer(LargestDim(("fsdp",)), frozenset({"blocks"}))
        >>> rule("blocks/up/kernel", (512, 64, 64), MeshSpec(fsdp=4))
        P(None, 'fsdp')
        >>> rule("head/kernel", (64, 512), MeshSpec(fsdp=4))
        P(None, 'fsdp')
    """

    stacks: frozenset[Path]

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides about one layer of a stack; other leaves are left to the policy."""
        if not any(path.startswith(f"{stack}/") for stack in self.stacks):
            return self.policy.decide(path, shape, mesh, taken)
        layer = self.policy.decide(path, shape[1:], mesh, PartitionSpec(*tuple(taken)[1:]))
        spec = PartitionSpec(None, *layer.spec) if tuple(layer.spec) else PartitionSpec()
        return Decision(spec, layer.rule, f"of each of {shape[0]} stacked layers: {layer.reason}")


def per_layer_policy(policy: Policy, stacks: frozenset[Path]) -> Policy:
    """Makes the flexible parts of a policy shard stacked layers one by one.

    Args:
        policy: any policy; its fixed parts do not change.
        stacks: the paths of the stacked modules.

    Returns:
        The policy.
    """
    if isinstance(policy, Merge):
        return Merge(tuple(per_layer_policy(part, stacks) for part in policy.policies))
    return PerLayer(policy, stacks) if policy.flexible else policy


@dataclasses.dataclass(frozen=True)
class FromMetadata(Policy):
    """Shards parameters by their `nnx.with_partitioning` annotations.

    Axes that the mesh lacks are ignored, so the same model also runs on smaller meshes.

    Args:
        annotations: pairs of a path and the annotated PartitionSpec.

    Raises:
        DivisibilityError: if an annotated dim does not divide by its axes.

    Example:
        >>> from axon_dist.mesh import MeshSpec
        >>> policy = FromMetadata((("kernel", PartitionSpec("tp", "fsdp")),))
        >>> policy("kernel", (8, 4), MeshSpec(fsdp=4))
        P(None, 'fsdp')
    """

    annotations: tuple[tuple[Path, PartitionSpec], ...]
    label = "flax metadata"

    def decide(
        self, path: Path, shape: Shape, mesh: HasShape, taken: PartitionSpec = PartitionSpec()
    ) -> Decision:
        """Decides by the annotation of the path, restricted to axes of the mesh."""
        annotation = dict(self.annotations).get(path, PartitionSpec())
        dims = (axes_of(annotation, dim) for dim in range(len(annotation)))
        spec = spec_of(tuple(axis for axis in axes if axis in mesh.shape) for axes in dims)
        check_divides(path, shape, spec, mesh)
        reason = f"annotated {annotation}" if annotation else "not annotated"
        return Decision(spec, self.label, reason)


def annotations_of(model: nnx.Module) -> tuple[tuple[Path, PartitionSpec], ...]:
    """The partitioning annotations of a model, with logical names translated by Flax's rules.

    Args:
        model: any NNX module; its arrays may be `ShapeDtypeStruct`s.

    Returns:
        Pairs of a path and its spec; empty if the model has no annotations.

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
