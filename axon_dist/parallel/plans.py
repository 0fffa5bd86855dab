"""Parts of a strategy as values: units to wrap, offload, a pipeline, slow links."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import optax
from flax import nnx

from ..collectives import Compression
from ..core.checks import is_whole
from ..core.errors import ConfigError, NamedChoice, UnsupportedError
from ..core.typing import Path
from ..ir.linen import linen_modules
from ..ir.units import block_paths
from ..mesh import World
from ..schedule import Schedule


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A pipeline as a value: which table runs, on which axis, with the model cut where.

    Args:
        schedule: the table; its microbatches are those of a step.
        axis: the mesh axis over which stages are split.
        classes: names of the block classes; empty for the blocks that the model keeps in lists.
        boundaries: the first block of each stage and the number of blocks; None for equal stages.
        costs: the cost of each block, to balance the stages by; None for equal ones.
        keeps_residuals: whether a forward pass keeps what its backward pass needs; else the
            backward pass recomputes the stage from its input.
    """

    schedule: Schedule
    axis: str = "pp"
    classes: tuple[str, ...] = ()
    boundaries: tuple[int, ...] | None = None
    costs: tuple[float, ...] | None = None
    keeps_residuals: bool = False


OUTER_LOOPS = ("diloco", "local_sgd")
"""The strategies whose replicas train independently, by name."""

DEFAULT_SYNC_EVERY = 100
"""The default number of steps between two outer steps; DiLoCo has 500 (arXiv:2311.08105)."""


@dataclasses.dataclass(frozen=True)
class OuterLoop:
    """How the replicas along a slow mesh axis train apart and synchronize.

    Each has separate parameters, moments and statistics. With the outer parameters θ, and θ_r
    those of replica r after H steps on its share of the batches,

        Δ = mean_r(θ - θ_r);    θ = θ + outer.update(Δ);    θ_r = θ

    Args:
        axis: the mesh axis; nothing else may be split over it.
        every: H, the steps between two outer steps.
        outer: the transformation whose gradient is Δ.
        compression: how Δ is compressed to be sent; None sends float32.
        fragments: into how many parts the parameters are cut; part p synchronizes H·(p+1)/P steps
            after the first of every H, so that the link carries one part at a time.
    """

    axis: str
    every: int
    outer: optax.GradientTransformationExtraArgs
    compression: Compression | None = None
    fragments: int = 1

    def due(self, step: int) -> tuple[int, ...]:
        """Which fragments synchronize after so many steps.

        Example:
            >>> plan = OuterLoop("nodes", 4, optax.with_extra_args_support(optax.sgd(1.0)), None, 2)
            >>> [plan.due(step) for step in range(1, 5)]
            [(), (0,), (), (1,)]
        """

        def at(part):
            return (self.every * (part + 1) // self.fragments) % self.every

        return tuple(part for part in range(self.fragments) if step % self.every == at(part))

    def parts(self, sizes: Mapping[Path, int]) -> tuple[frozenset[Path], ...]:
        """Cuts the parameters into the fragments, in their order and about equally large.

        Args:
            sizes: the elements of every parameter, by path.

        Returns:
            The paths of each fragment.

        Example:
            >>> plan = OuterLoop("nodes", 4, optax.with_extra_args_support(optax.sgd(1.0)), None, 2)
            >>> [sorted(part) for part in plan.parts({"a": 4, "b": 4, "c": 8})]
            [['a', 'b'], ['c']]
        """
        groups: list[set[Path]] = [set() for _ in range(self.fragments)]
        total, before = sum(sizes.values()), 0
        for path, size in sizes.items():
            # By the middle of each, so that a large one does not move its neighbours.
            groups[min((2 * before + size) * self.fragments // (2 * total), len(groups) - 1)].add(
                path
            )
            before += size
        return tuple(map(frozenset, groups))

    def wire_bytes(self, sizes: Mapping[Path, int], ranks: int) -> int:
        """Bytes that one device sends over the axis in H steps, all fragments together.

        Without compression `2(R-1)/R · 4` bytes a parameter, the ring all-reduce of float32.

        Args:
            sizes: the elements of its shard of every parameter, by path.
            ranks: R.
        """
        if self.compression is None:
            return math.floor(2 * (ranks - 1) * 4 * sum(sizes.values()) / ranks)
        parts = [[sizes[path] for path in sizes if path in part] for part in self.parts(sizes)]
        return sum(self.compression.wire_bytes(part, ranks) for part in parts)


HOST = "pinned_host"
"""The memory kind of the host that devices can copy from and to."""


class CPUOffload(NamedChoice):
    """Which arrays of the training state live in host memory between steps.

    Gradients do not outlive a step, so there is nothing of them to offload.
    """

    NONE = "none"
    PARAMS = "params"
    OPTIMIZER = "optimizer"
    FULL = "full"

    @property
    def params(self) -> str | None:
        """The memory kind of the parameters; None is the device's."""
        return HOST if self in (CPUOffload.PARAMS, CPUOffload.FULL) else None

    @property
    def opt_state(self) -> str | None:
        """The memory kind of the optimizer state; None is the device's."""
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
            f"offload {offload.value!r} needs memory of kind {HOST!r}, and {world.backend.value} "
            f"devices have {sorted(kinds)}; use CPUOffload.NONE"
        )


@dataclasses.dataclass(frozen=True)
class TransformerAutoWrapPolicy:
    """Every module of the block classes is a unit.

    Args:
        classes: block classes or their names; none means the classes of the blocks that the model
            keeps in lists, and the blocks that a bridged Linen model repeats. Within a bridged
            model, whose modules exist only while it runs, the name of a module without its number.

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
    """A module is a unit when it is called, holds enough parameters and no such module inside.

    Lists of modules are not called, and the model itself is no unit.

    Args:
        min_params: the least number of parameters of a unit.

    Raises:
        ConfigError: when `min_params` is below one.
    """

    min_params: int = 100_000_000

    def __post_init__(self) -> None:
        if not is_whole(self.min_params) or self.min_params < 1:
            raise ConfigError(f"min_params is {self.min_params}; it must be at least 1 parameter")

    def units(self, model: nnx.Module) -> frozenset[Path]:
        """The paths of the units of a model, inner modules decided first."""
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
"""Anything with `units(model)`, the paths of the modules gathered as one."""
