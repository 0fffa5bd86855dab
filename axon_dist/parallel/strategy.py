"""`Strategy`: what a parallelism decides about arrays and gradients, as one value that composes."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from flax import nnx
from jax.sharding import Mesh

from ..collectives import GradSyncStrategy
from ..core.checks import TEXTS, check_fields
from ..core.errors import ConfigError, StrategyConflictError, did_you_mean
from ..core.tree import floating_dtype
from ..core.typing import Path
from ..ir.units import block_paths, check_some
from ..nn import ActivationCheckpointing, Layout
from ..ops.precision import MixedPrecision
from ..schedule import Schedule
from ..sharding import Merge, Policy, Replicate, WithMoments, same_for_rows
from .plans import (
    AutoWrapPolicy,
    CPUOffload,
    OuterLoop,
    PipelinePlan,
    TransformerAutoWrapPolicy,
)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the gradients of the data-parallel ranks become one gradient.

    Args:
        per: `"step"` adds K microbatches up in a whole gradient on every rank and reduces once;
            `"microbatch"` reduces each, which moves K times the bytes and holds only shards. None
            has not said: another part of the strategy may, and else `Strategy.reduces_per` does.
        sync: SYNCHRONOUS reduces bucket after bucket, OVERLAPPED leaves their order to XLA.
        bucket_capacity: elements in one reduction; None leaves the grouping to XLA.
        dtype: the dtype on the wire; None is the gradients' own.
        sync_buffers: whether statistics such as BatchNorm's are those of the global batch.
        by_hand: runs per rank with collectives written out, even where the compiler would do; the
            program then has true reduce-scatters on every platform.

    Raises:
        ConfigError: for an unknown `per` or `sync`, a capacity below one, or a dtype that is not
            floating-point.
    """

    per: str | None = None
    sync: GradSyncStrategy = GradSyncStrategy.SYNCHRONOUS
    bucket_capacity: int | None = None
    dtype: Any = None
    sync_buffers: bool = True
    by_hand: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync", GradSyncStrategy(self.sync))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", floating_dtype(self.dtype, "reduce"))
        check_fields(self)
        self.validate()

    def validate(self) -> None:
        """Raises `ConfigError` unless every field has a possible value."""
        if self.per not in (None, "step", "microbatch"):
            raise ConfigError(
                f"reduction per {self.per!r:.80} is unknown."
                f"{did_you_mean(str(self.per), ['step', 'microbatch'])}"
            )
        if self.bucket_capacity is not None and self.bucket_capacity < 1:
            raise ConfigError(
                f"bucket capacity is {self.bucket_capacity} elements; it must be at least 1, or "
                "None to leave the grouping to the compiler"
            )

    @property
    def is_grouped(self) -> bool:
        """Whether several gradients are reduced together, in an order of their own."""
        return self.bucket_capacity is not None or self.sync is GradSyncStrategy.OVERLAPPED

    def is_local(self, num_microbatches: int, compute: Any = None) -> bool:
        """Whether gradients must be summed per rank before they are reduced.

        The compiler has no way to postpone a reduction, to group it, to run it in another dtype
        than the compute, or to keep statistics apart, so these need a manual region. All
        else runs in global view, where the compiler hides each reduction behind the backward pass
        of the layer before.

        Args:
            num_microbatches: how many microbatches a step has.
            compute: the compute dtype; None where it does not differ from the parameters'.
        """
        reduces_late = self.per != "microbatch" and num_microbatches > 1
        recast = None not in (self.dtype, compute) and self.dtype != compute
        return self.by_hand or reduces_late or self.is_grouped or recast or not self.sync_buffers


@dataclasses.dataclass(frozen=True)
class AdaptLayers(abc.ABC):
    """Changes the calls of a model's layers in place; a value that compares by its fields."""

    @property
    @abc.abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The mesh axes it needs."""

    @property
    def sends_around(self) -> bool:
        """Whether it passes values around a ring of ranks, which all ranks must do together."""
        return False

    @property
    def splits_positions(self) -> bool:
        """Whether its axes split the positions of a sample, so that its ranks have other data."""
        return False

    @abc.abstractmethod
    def check(self, model: nnx.Module, layout: Layout) -> None:
        """Raises where a model has no layers that it could change, or layers that it cannot.

        Args:
            model: of shapes.
            layout: the layout of the activations.
        """

    def extend(self, layout: Layout) -> Layout:
        """Adds what it splits to the layout of the activations of all layers."""
        return layout

    @abc.abstractmethod
    def __call__(self, model: nnx.Module, layout: Layout) -> None:
        """Changes a model merged inside a trace."""


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A parallelism as a record of policies; `compose` makes one of several.

    Gradients have no policy of their own: they are reduced to the sharding of their moments, which
    update them. What a rank holds before that, while it adds microbatches up, follows from the
    reduction.

    Args:
        name: what tables and conflict messages call it.
        batch_axes: the mesh axes that split dim 0 of the batch.
        params: the shardings of parameters between steps.
        opt_state: those of optimizer moments, and of the gradients that reach them.
        reduction: how gradients become one; None where the strategy has no say.
        wrap: which modules are gathered and freed as one unit, where parameters are split.
        precision: the dtypes; None where the strategy has no say.
        remat: what is recomputed in the backward pass; None where the strategy has no say.
        offload: what lives in host memory between steps.
        pipeline: how the model is cut into stages and which schedule runs them; None without.
        layers: what changes the calls of a merged model's layers, in order.
        gathers_once: whether sharded parameters are gathered once per step, in the compute dtype,
            instead of once per unit and use; `with_masters` sets it.
        resident: the batch axes along which sharded parameters are never gathered: each rank
            computes with its shard for the samples of all, as with experts.
        slow: which axis separates replicas that train on their own, and when they synchronize;
            None where all ranks take every step together.

    Example:
        >>> Strategy("dp", batch_axes=("dp",), reduction=Reduction()).name
        'dp'
    """

    name: str
    batch_axes: tuple[str, ...] = ()
    params: Policy = Replicate()
    opt_state: Policy = Replicate()
    reduction: Reduction | None = None
    wrap: AutoWrapPolicy | None = None
    precision: MixedPrecision | None = None
    remat: ActivationCheckpointing | None = None
    offload: CPUOffload = CPUOffload.NONE
    pipeline: PipelinePlan | None = None
    layers: tuple[AdaptLayers, ...] = ()
    gathers_once: bool = False
    resident: tuple[str, ...] = ()
    slow: OuterLoop | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        """What the strategy says, a line for each field that has a say."""
        given = [
            f"  {field.name}: {' '.join(str(value).split()):.160}"
            for field in dataclasses.fields(self)
            if field.name != "name"
            and (value := getattr(self, field.name)) not in (None, (), False)
        ]
        return "\n".join([f"Strategy {self.name}", *given])

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have data of their own: samples, or positions of them.

        Gradients are sums over all of these.
        """
        positions = (layers.axes for layers in self.layers if layers.splits_positions)
        return (*self.batch_axes, *(axis for axes in positions for axis in axes))

    @property
    def axes(self) -> frozenset[str]:
        """The axes of a mesh along which devices differ in what they compute or store."""
        others = {plan.axis for plan in (self.pipeline, self.slow) if plan is not None}
        split = (*self.params.split_axes, *self.opt_state.split_axes)
        within = (axis for layers in self.layers for axis in layers.axes)
        return frozenset({*self.batch_axes, *split, *within, *others})

    @property
    def reduces_per(self) -> str:
        """`"step"` or `"microbatch"`: what was said, or what the layout of the parameters asks for.

        Ranks that split the parameters are to hold no whole gradient: each microbatch is reduced.
        """
        said = None if self.reduction is None else self.reduction.per
        splits = not set(self.data_axes).isdisjoint(self.params.split_axes)
        return said or ("microbatch" if splits else "step")

    def layout(self, mesh: Mesh) -> Layout:
        """The layout of the activations of all layers."""
        layout = Layout(mesh, self.batch_axes, may_ring=self.pipeline is None)
        for layers in self.layers:
            layout = layers.extend(layout)
        return layout

    @property
    def splits(self) -> bool:
        """Whether parameters or their moments, and so gradients, are split over an axis."""
        return bool(self.params.split_axes or self.opt_state.split_axes)

    @property
    def sends_only_sums(self) -> bool:
        """Whether only sums of gradients are sent: data parallelism over replicated parameters."""
        others = self.splits or self.layers or self.pipeline is not None
        return bool(self.batch_axes) and not others

    @property
    def keeps_weights_whole(self) -> bool:
        """Whether no loop of a step gathers weights over ranks that have other samples."""
        splits = not set(self.data_axes).isdisjoint(self.params.split_axes)
        once = self.gathers_once or (self.reduction is not None and self.reduction.per == "step")
        return (once or not splits) and self.pipeline is None

    def units(self, model: nnx.Module) -> frozenset[Path]:
        """The paths of the modules that are gathered, freed and recomputed as one.

        Args:
            model: any NNX module; its leaves may be shapes.

        Raises:
            StrategyConflictError: when `wrap` and `remat` name different classes.
            UnsupportedError: when the model has none of the modules that they name.
        """
        wrap, remat = self.wrap, self.remat
        named = (remat.classes or ()) if remat is not None else ()
        units = block_paths(model, named) if named or wrap is None else wrap.units(model)
        by_class = TransformerAutoWrapPolicy
        if named and wrap not in (None, by_class(), by_class(*named)):
            raise StrategyConflictError(
                f"{wrap} says which modules are gathered as one, and activation checkpointing of "
                f"{named} which are recomputed as one; they are the same modules, so say it once"
            )
        if not units and (remat is not None or getattr(wrap, "classes", ())):
            what = f"activation checkpointing of {named or 'repeated blocks'}"
            check_some([], f"{wrap}" if remat is None else what, model)
        return units

    def holds_whole_gradients(self, num_microbatches: int) -> bool:
        """Whether a data-parallel rank holds a whole gradient while microbatches are added up.

        Where moments are whole, their gradients are; so are those of stages, reduced once per step.

        Args:
            num_microbatches: how many microbatches a step has.
        """
        reduces_once = num_microbatches > 1 and self.reduces_per == "step"
        return not self.opt_state.split_axes or self.pipeline is not None or reduces_once


class HasStrategy(Protocol):
    """A wrapper such as `DDP` that makes a strategy."""

    @property
    def strategy(self) -> Strategy:
        """The strategy it makes."""
        ...


def as_strategy(strategy: Strategy | HasStrategy) -> Strategy:
    """The strategy itself, or the one that a wrapper makes.

    Raises:
        ConfigError: when it is neither.
    """
    resolved = getattr(strategy, "strategy", strategy)
    if not isinstance(resolved, Strategy):
        what = repr(strategy) if isinstance(strategy, str) else f"a {type(strategy).__name__}"
        raise ConfigError(
            f"got {what} for a strategy; give one such as ddp(), or a wrapper such as "
            'DDP(model, world.group("dp"))'
        )
    return resolved


def axes_of(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Names of mesh axes as a tuple; one name may stand alone.

    Example:
        >>> axes_of("dp"), axes_of(["dp", "fsdp"])
        (('dp',), ('dp', 'fsdp'))
    """
    names = (axes,) if isinstance(axes, str) else axes
    TEXTS.check("a strategy", "axes", names)
    if not (named := tuple(names)):
        raise ConfigError(
            "a strategy got no axes; name at least one axis of the mesh that splits the batch, "
            'such as "dp"'
        )
    return named


def compose(*strategies: Strategy | HasStrategy) -> Strategy:
    """Makes one strategy of several: batch axes add up, policies overlay.

    Args:
        *strategies: in any order; the order of the axes comes from the mesh.

    Returns:
        A strategy whose policies raise `StrategyConflictError` when two parts claim one dim. Of
        the reduction each part says what is not a default: `compose(ddp(), fsdp())` reduces every
        microbatch, for `fsdp` keeps gradients split and `ddp` has not said `per`. An axis that
        context parallelism has for the positions splits no samples: `fsdp(axes=("fsdp", "cp"))`
        beside it splits samples over `fsdp`, and arrays over both.

    Raises:
        StrategyConflictError: when two parts split the batch over the same axis, or say
            different things about the reduction.

    Example:
        >>> data = Strategy("dp", batch_axes=("dp",), reduction=Reduction())
        >>> both = compose(data, Strategy("tp"))
        >>> both.name, both.batch_axes
        ('dp + tp', ('dp',))
    """
    parts = [as_strategy(strategy) for strategy in strategies]
    if not parts:
        raise ConfigError("compose() got no strategy; give it at least one")
    said = {field: resolve_setting(parts, field) for field in _SAID_ONCE}
    return Strategy(
        name=" + ".join(part.name for part in parts),
        batch_axes=_combined_axes(parts),
        params=_merged([part.params for part in parts]),
        opt_state=_merged([part.opt_state for part in parts]),
        reduction=_combined_reduction(parts),
        layers=tuple(layers for part in parts for layers in part.layers),
        resident=tuple(axis for part in parts for axis in part.resident),
        **said,
    )


_SAID_ONCE = ("wrap", "precision", "remat", "offload", "pipeline", "slow")
"""The fields about which those parts that say something must agree."""


def overlay(strategy: Strategy, policy: Policy) -> Strategy:
    """The strategy with a policy that has a say in every layout, before its own.

    Raises:
        StrategyConflictError: when the policies are applied, if both claim one dim of an array.
    """
    return dataclasses.replace(
        strategy,
        params=_merged([policy, strategy.params]),
        opt_state=_merged([policy, strategy.opt_state]),
    )


def per_layer(strategy: Strategy, stacks: frozenset[Path]) -> Strategy:
    """The strategy, which lays stacked layers out as it would lay out each of them.

    Args:
        strategy: any.
        stacks: the paths of the modules whose leaves have a row for each of many layers.

    Returns:
        The strategy.
    """
    return dataclasses.replace(
        strategy,
        params=same_for_rows(strategy.params, stacks),
        opt_state=same_for_rows(strategy.opt_state, stacks),
    )


def with_masters(strategy: Strategy, frozen: frozenset[Path], dtype: Any) -> Strategy:
    """Shards full-precision parameters with the optimizer state where compute is narrower.

    Where ranks split the moments of parameters that they hold whole, as in ZeRO-1 and 2, and
    compute in a narrower dtype, the parameters are sharded like their moments, and every step
    begins with an all-gather in the compute dtype. The owners' copies are the masters
    (Rajbhandari et al., arXiv:1910.02054, keep them so); what is sent is half of their bytes.

    Args:
        strategy: any, with everything said.
        frozen: the paths of parameters that no step changes; they stay whole.
        dtype: that the parameters are stored in.

    Returns:
        The strategy; itself where there is nothing to gain, or stages own the parameters.
    """
    precision, axes = strategy.precision, set(strategy.data_axes)
    splits = not axes.isdisjoint(strategy.opt_state.split_axes)
    replicates = axes.isdisjoint(strategy.params.split_axes)
    if precision is None or strategy.pipeline is not None or not (splits and replicates):
        return strategy
    if precision.compute.itemsize >= dtype.itemsize:
        return strategy
    params = WithMoments(strategy.opt_state, strategy.params, frozen)
    return dataclasses.replace(strategy, params=params, gathers_once=True)


def _merged(policies: Sequence[Policy]) -> Policy:
    saying = [policy for policy in policies if policy != Replicate()]
    if len(saying) < 2:
        return saying[0] if saying else Replicate()
    return Merge(tuple(saying))


def _combined_axes(parts: Sequence[Strategy]) -> tuple[str, ...]:
    axes: dict[str, str] = {}
    layers = (one for part in parts for one in part.layers if one.splits_positions)
    of_positions = {axis for one in layers for axis in one.axes}
    for part in parts:
        for axis in part.batch_axes:
            if axis in of_positions:
                continue
            if axis in axes:
                raise StrategyConflictError(
                    f"dim 0 of the batch is split over axis {axis!r} by {axes[axis]!r} and by "
                    f"{part.name!r}; give each its own mesh axis"
                )
            axes[axis] = part.name
    # Ranks that exchange samples are placed next to each other.
    resident = {axis for part in parts for axis in part.resident}
    return tuple(sorted(axes, key=lambda axis: axis in resident))


def _combined_reduction(parts: Sequence[Strategy]) -> Reduction | None:
    """Field by field what the parts say about the reduction; a default says nothing."""
    saying = [part for part in parts if part.reduction is not None]
    if not saying:
        return None
    said: dict[str, tuple[Any, str]] = {}
    for part in saying:
        for field in dataclasses.fields(Reduction):
            value = getattr(part.reduction, field.name)
            if value == field.default:
                continue
            first, owner = said.setdefault(field.name, (value, part.name))
            if first != value:
                raise StrategyConflictError(
                    f"reduction is {field.name}={_named(first)} in {owner!r} and "
                    f"{field.name}={_named(value)} in {part.name!r}; say it in one of them, or the "
                    "same in both"
                )
    return Reduction(**{name: value for name, (value, _) in said.items()})


def resolve_setting(parts: Sequence[Strategy], field: str) -> Any:
    """What the parts say about a field.

    Raises:
        StrategyConflictError: when two of them say different things.
    """
    silent = getattr(Strategy, field)
    saying = [part for part in parts if getattr(part, field) != silent]
    for part in saying[1:]:
        first, other = getattr(saying[0], field), getattr(part, field)
        if first != other:
            raise StrategyConflictError(
                f"{field} is {_briefly(first, other)} in {saying[0].name!r} and "
                f"{_briefly(other, first)} in {part.name!r}; say it in one of them, or the same in "
                "both"
            )
    return getattr(saying[0], field) if saying else silent


def _briefly(value: object, other: object) -> str:
    """A value, of a record only the fields in which it differs from another."""
    if not dataclasses.is_dataclass(value) or type(value) is not type(other):
        return getattr(value, "name", None) or str(value)
    differing = [
        (field.name, getattr(value, field.name))
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != getattr(other, field.name)
    ]
    return ", ".join(f"{name}={_named(item)}" for name, item in differing)


def _named(value: object) -> str:
    if isinstance(value, Schedule):
        sizes = f"{value.num_stages} stages and {value.num_microbatches} microbatches"
        return f"{value.name!r} of {sizes}"
    return repr(getattr(value, "name", value))
