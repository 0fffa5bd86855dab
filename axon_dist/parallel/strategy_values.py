"""Values that a strategy holds: units to wrap, offload, a pipeline, an outer loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import optax
from flax import nnx

from ..collectives import Compression
from ..core.checks import is_whole
from ..core.errors import ConfigError, NamedChoice, UnsupportedError
from ..core.renamed import renamed_fields
from ..core.typing import Path
from ..ir.linen import linen_modules
from ..ir.units import block_paths
from ..mesh import World
from ..schedule import Schedule


@renamed_fields(keeps_residuals="saves_residuals")
@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A pipeline as a value: its schedule, its mesh axis, and where the model is cut.

    Args:
        schedule: the table; its microbatches are those of a step.
        axis: the mesh axis over which stages are split.
        classes: names of the block classes; empty for the blocks that the model keeps in lists.
        boundaries: the first block of each stage and the number of blocks; None for equal stages.
        costs: the cost of each block, to balance the stages by; None for equal ones.
        saves_residuals: whether a forward pass saves the values that its backward pass needs; if
            not, the backward pass recomputes the stage from its input.
    """

    schedule: Schedule
    axis: str = "pp"
    classes: tuple[str, ...] = ()
    boundaries: tuple[int, ...] | None = None
    costs: tuple[float, ...] | None = None
    saves_residuals: bool = False


DEFAULT_SYNC_EVERY = 100
"""The number of steps between two outer steps that plans try and errors suggest.

DiLoCo has 500 (arXiv:2311.08105).
"""


@dataclasses.dataclass(frozen=True)
class OuterLoop:
    """How the replicas along a slow mesh axis train independently and synchronize.

    Each replica has its own parameters, moments and statistics. Let θ be the outer parameters, and
    θ_r those of replica r after H steps on its share of the batches. Then

        Δ = mean_r(θ - θ_r);    θ = θ + outer.update(Δ);    θ_r = θ

    Args:
        axis: the mesh axis; no array may be split over it.
        every: H, the steps between two outer steps.
        outer: the transformation whose gradient is Δ.
        compression: how Δ is compressed to be sent; None sends float32.
        fragments: P, into how many fragments the parameters are cut. Fragment p synchronizes after
            H·(p+1)/P of every H steps, so that the link carries one part at a time.
    """

    axis: str
    every: int
    outer: optax.GradientTransformationExtraArgs
    compression: Compression | None = None
    fragments: int = 1

    def due(self, step: int) -> tuple[int, ...]:
        """Returns the fragments that synchronize after a number of steps.

        Example:
            >>> loop = OuterLoop("nodes", 4, optax.with_extra_args_support(optax.sgd(1.0)), None, 2)
            >>> [loop.due(step) for step in range(1, 5)]
            [(), (0,), (), (1,)]
        """

        def at(part):
            return (self.every * (part + 1) // self.fragments) % self.every

        return tuple(part for part in range(self.fragments) if step % self.every == at(part))

    def fragment_paths(self, sizes: Mapping[Path, int]) -> tuple[frozenset[Path], ...]:
        """Cuts the parameters, in their order, into fragments of about equal size.

        Args:
            sizes: the elements of every parameter, by path.

        Returns:
            The paths of each fragment.

        Example:
            >>> loop = OuterLoop("nodes", 4, optax.with_extra_args_support(optax.sgd(1.0)), None, 2)
            >>> [sorted(paths) for paths in loop.fragment_paths({"a": 4, "b": 4, "c": 8})]
            [['a', 'b'], ['c']]
        """
        groups: list[set[Path]] = [set() for _ in range(self.fragments)]
        # Parameters may all be without numbers.
        total = max(1, sum(sizes.values()))
        before = 0
        for path, size in sizes.items():
            # Assigned by the middle of its range, so that a large one does not move its neighbours.
            fragment = (2 * before + size) * self.fragments // (2 * total)
            groups[min(fragment, len(groups) - 1)].add(path)
            before += size
        return tuple(map(frozenset, groups))

    def wire_bytes(self, sizes: Mapping[Path, int], ranks: int) -> int:
        """Returns the bytes that one device sends over the axis in H steps, for all fragments.

        Without compression these are `2(R-1)/R · 4` bytes per parameter, a ring all-reduce in
        float32.

        Args:
            sizes: the elements of the device's shard of every parameter, by path.
            ranks: R.
        """
        if self.compression is None:
            return math.floor(2 * (ranks - 1) * 4 * sum(sizes.values()) / ranks)
        fragments = [
            [sizes[path] for path in sizes if path in paths] for paths in self.fragment_paths(sizes)
        ]
        return sum(self.compression.wire_bytes(fragment, ranks) for fragment in fragments)


HOST = "pinned_host"
"""The memory kind of host memory that devices can copy from and to."""


class CPUOffload(NamedChoice):
    """Which arrays of the training state live in host memory between steps.

    Gradients do not outlive a step, so they are never offloaded.
    """

    NONE = "none"
    """Everything stays in device memory."""
    PARAMS = "params"
    """The parameters."""
    OPTIMIZER = "optimizer"
    """The optimizer state."""
    FULL = "full"
    """The parameters and the optimizer state."""

    @property
    def params(self) -> str | None:
        """The memory kind of the parameters; None is device memory."""
        return HOST if self in (CPUOffload.PARAMS, CPUOffload.FULL) else None

    @property
    def opt_state(self) -> str | None:
        """The memory kind of the optimizer state; None is device memory."""
        return HOST if self in (CPUOffload.OPTIMIZER, CPUOffload.FULL) else None


def check_offload(offload: CPUOffload, world: World) -> None:
    """Raises where the devices cannot reach host memory.

    Raises:
        UnsupportedError: naming the platform and the kinds of memory it has.
    """
    if offload is CPUOffload.NONE:
        return
    kinds = world.memory_kinds()
    if HOST not in kinds:
        raise UnsupportedError(
            f"offload {offload.value!r} needs memory of kind {HOST!r}, but {world.backend.value} "
            f"devices have {sorted(kinds)}; use CPUOffload.NONE",
            code="no-host-memory",
        )


@dataclasses.dataclass(frozen=True)
class TransformerAutoWrapPolicy:
    """Every module of the block classes is a unit.

    Args:
        classes: block classes or their names. Without any, the units are the modules of every class
            that the model repeats in a list, wherever they are, and the blocks that a bridged
            Linen model repeats. The modules of a bridged model exist only while it runs and are
            given by their name without its number.

    Example:
        >>> TransformerAutoWrapPolicy("Block").classes
        ('Block',)
    """

    classes: tuple[str, ...]

    def __init__(self, *classes: type | str):
        for name in classes:
            if not isinstance(name, (str, type)):
                raise ConfigError(
                    f"TransformerAutoWrapPolicy got a {type(name).__name__}; give classes of "
                    "blocks, or their names"
                )
        names = tuple(name if isinstance(name, str) else name.__name__ for name in classes)
        object.__setattr__(self, "classes", names)

    def units(self, model: nnx.Module) -> frozenset[Path]:
        """The paths of the units of a model."""
        return block_paths(model, self.classes)


@dataclasses.dataclass(frozen=True)
class SizeBasedAutoWrapPolicy:
    """A module is a unit if it is callable, holds enough parameters, and contains no other unit.

    Lists of modules are not callable, and the model itself is never a unit.

    Args:
        min_params: the least number of parameters of a unit.

    Raises:
        ConfigError: when `min_params` is below one.
    """

    min_params: int = 100_000_000

    def __post_init__(self) -> None:
        if not is_whole(self.min_params) or self.min_params < 1:
            raise ConfigError(
                f"min_params is {self.min_params!r:.80}; it must be at least 1 parameter"
            )

    def units(self, model: nnx.Module) -> frozenset[Path]:
        """The paths of the units of a model; inner modules are decided first."""
        called = [keys for keys, module in nnx.iter_modules(model) if callable(module)]
        called += [keys for keys, _ in linen_modules(model)]
        modules = sorted(called, key=len, reverse=True)
        sizes = {
            keys: math.prod(variable.get_value().shape)
            for keys, variable in nnx.iter_graph(model)
            if isinstance(variable, nnx.Param)
        }
        wrapped: list[tuple] = []
        for keys in modules:
            count = sum(size for leaf, size in sizes.items() if leaf[: len(keys)] == keys)
            has_unit = any(inner[: len(keys)] == keys for inner in wrapped)
            if keys and not has_unit and count >= self.min_params:
                wrapped.append(keys)
        return frozenset("/".join(map(str, keys)) for keys in wrapped)


AutoWrapPolicy = TransformerAutoWrapPolicy | SizeBasedAutoWrapPolicy
"""A policy with `units(model)`, the paths of the modules that are gathered as one unit."""
