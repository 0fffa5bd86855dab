"""`Strategy`: a parallelism's decisions on arrays and gradients, as one composable value."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from flax import nnx
from jax.sharding import Mesh

from ..collectives import GradSyncStrategy
from ..core.checks import TEXTS, check_fields
from ..core.errors import ConfigError, StrategyConflictError, did_you_mean, warn
from ..core.renamed import renamed_attribute, renamed_fields
from ..core.tree import floating_dtype
from ..core.typing import Path
from ..ir.units import block_paths, check_some
from ..nn import ActivationCheckpointing, Layout
from ..ops.precision import MixedPrecision
from ..schedule import Schedule
from ..sharding import LargestDim, Merge, Policy, Replicate, WithMoments, Wrapped, per_layer_policy
from .strategy_values import (
    AutoWrapPolicy,
    CPUOffload,
    OuterLoop,
    PipelinePlan,
    TransformerAutoWrapPolicy,
)

DATA_AXES = ("dp", "fsdp")
"""The mesh axes that split samples, if a mesh has them: a data-parallel strategy's defaults."""

OVERLAPPED_CAPACITY = 25_000_000
"""The elements of a bucket of overlapped reductions, unless a size is given; 100 MB in float32."""


@renamed_fields(by_hand="manual")
@dataclasses.dataclass(frozen=True)
class Reduction:
    """How the gradients of the data-parallel ranks become one gradient.

    Args:
        per: `"step"` accumulates K microbatches in a whole gradient on every rank and reduces once;
            `"microbatch"` reduces each, which sends K times the bytes but holds only shards where
            the moments are split. None: another part of the strategy decides, or else
            `Strategy.reduces_per`.
        sync: with buckets, SYNCHRONOUS starts after the whole backward pass, and OVERLAPPED reduces
            a bucket when its gradients are ready and the bucket before it is done. Without buckets
            XLA decides when.
        bucket_capacity: elements in one reduction; None leaves the grouping to XLA, except that
            OVERLAPPED then uses 25 million (100 MB in float32).
        dtype: the dtype in which gradients are sent; None keeps their own.
        sync_buffers: whether statistics such as BatchNorm's are those of the global batch.
        manual: runs per rank with explicit collectives (mesh axes of type Manual in JAX), even
            where the compiler could insert them; the program then has true reduce-scatters on
            every platform.

    Raises:
        ConfigError: for an unknown `per` or `sync`, a capacity below one, or a dtype that is not
            floating-point.
        StrategyConflictError: for NO_SYNC, under which the replicas would diverge.
    """

    per: str | None = None
    sync: GradSyncStrategy = GradSyncStrategy.SYNCHRONOUS
    bucket_capacity: int | None = None
    dtype: Any = None
    sync_buffers: bool = True
    manual: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync", GradSyncStrategy(self.sync))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", floating_dtype(self.dtype, "reduce"))
        check_fields(self)
        self.validate()

    def validate(self) -> None:
        """Raises unless every field has a valid value.

        Raises:
            ConfigError: for an unknown `per`, or a capacity below one.
            StrategyConflictError: for NO_SYNC.
        """
        if self.sync is GradSyncStrategy.NO_SYNC:
            raise StrategyConflictError(
                "a training step got GradSyncStrategy.NO_SYNC, with which the replicas would "
                "diverge; to synchronize once per K microbatches, build the step with "
                "accumulate=K, or call DDP.sync_gradients on your own gradients",
                code="no-sync-in-step",
            )
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
    def capacity(self) -> int | None:
        """The elements in a bucket; None if gradients are not reduced in buckets."""
        # Only the reductions of buckets overlap, so OVERLAPPED implies buckets.
        overlaps = self.sync is GradSyncStrategy.OVERLAPPED
        is_default = self.bucket_capacity is None and overlaps
        return OVERLAPPED_CAPACITY if is_default else self.bucket_capacity

    @property
    def is_grouped(self) -> bool:
        """Whether gradients are reduced in buckets."""
        return self.capacity is not None

    @property
    def grouped_by(self) -> str:
        """The settings that ask for buckets, as in a call; a size that is a default is left out."""
        overlaps = self.sync is GradSyncStrategy.OVERLAPPED
        settings = []
        if self.bucket_capacity is not None and not (
            overlaps and self.bucket_capacity == OVERLAPPED_CAPACITY
        ):
            settings.append(f"bucket_capacity={self.bucket_capacity}")
        if overlaps:
            settings.append(f"sync={self.sync.name}")
        return " with ".join(settings)

    def is_local(self, num_microbatches: int, compute: Any = None) -> bool:
        """Whether gradients must be summed per rank before they are reduced.

        The compiler cannot postpone a reduction, group it, run it in another dtype than the
        compute, or keep statistics per rank, so these need a manual region. All other reductions
        run in global view, where the compiler hides each behind the backward pass of the previous
        layer.

        Args:
            num_microbatches: how many microbatches a step has.
            compute: the compute dtype; None where it equals the parameters'.
        """
        reduces_late = self.per != "microbatch" and num_microbatches > 1
        recast = None not in (self.dtype, compute) and self.dtype != compute
        return self.manual or reduces_late or self.is_grouped or recast or not self.sync_buffers


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
        """Whether its axes split the positions of a sample, so that its ranks hold other data."""
        return False

    @abc.abstractmethod
    def check(self, model: nnx.Module, layout: Layout) -> None:
        """Raises if a model has no layers to change, or layers that cannot be changed.

        Args:
            model: a model of shapes.
            layout: the layout of the activations.
        """

    def extend(self, layout: Layout) -> Layout:
        """Returns the layout of all activations with the splits that it adds."""
        return layout

    @abc.abstractmethod
    def __call__(self, model: nnx.Module, layout: Layout) -> None:
        """Changes a model merged inside a trace."""


@renamed_fields(resident="ungathered_axes", slow="outer_loop")
@dataclasses.dataclass(frozen=True)
class Strategy:
    """A parallelism as a record of policies; `compose` combines several.

    There is no policy for gradients: they are reduced to the sharding of their optimizer
    moments. The reduction determines what a rank holds before that, while it accumulates
    microbatches.

    Args:
        name: its name in tables and conflict messages.
        batch_axes: the mesh axes that split dim 0 of the batch.
        params: the shardings of parameters between steps.
        opt_state: the shardings of optimizer moments, and of the gradients that reach them.
        reduction: how gradients are reduced; None: not set; another part of a composed
            strategy may set it.
        wrap: which modules are gathered and freed as one unit, where parameters are split.
        precision: the dtypes; None: not set; another part of a composed strategy may set
            them.
        remat: what the backward pass recomputes; None: not set; another part of a composed
            strategy may set it.
        offload: which arrays live in host memory between steps.
        pipeline: how the model is cut into stages and which schedule runs them; None for no
            pipeline.
        layers: the changes to the calls of a merged model's layers, in order.
        gathers_once: whether sharded parameters are gathered once per step, in the compute dtype,
            instead of once per unit and use; `with_masters` sets it.
        ungathered_axes: the batch axes along which sharded parameters are never gathered: each
            rank computes with its shard for the samples of all ranks, as with experts.
        outer_loop: the axis of replicas that train independently, and when they synchronize; None
            if all ranks take every step together.
        default_axes: the axes filled in by default; `on_mesh` may replace them.

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
    ungathered_axes: tuple[str, ...] = ()
    outer_loop: OuterLoop | None = None
    default_axes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        """Lists the fields that are not at their defaults, one per line."""
        given = [
            f"  {field.name}: {' '.join(str(value).split()):.160}"
            for field in dataclasses.fields(self)
            if field.name not in ("name", "default_axes")
            and (value := getattr(self, field.name)) not in (None, (), False)
        ]
        return "\n".join([f"Strategy {self.name}", *given])

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold different data: samples, or positions of samples.

        Gradients are summed over all of them.
        """
        positions = (layers.axes for layers in self.layers if layers.splits_positions)
        return (*self.batch_axes, *(axis for axes in positions for axis in axes))

    data_axes = renamed_attribute("data_axes", "reduced_axes")

    @property
    def axes(self) -> frozenset[str]:
        """The axes of a mesh along which devices differ in what they compute or store."""
        others = {plan.axis for plan in (self.pipeline, self.outer_loop) if plan is not None}
        split = (*self.params.split_axes, *self.opt_state.split_axes)
        within = (axis for layers in self.layers for axis in layers.axes)
        return frozenset({*self.batch_axes, *split, *within, *others})

    @property
    def reduces_per(self) -> str:
        """`"step"` or `"microbatch"`, as configured, or else by the layout of the parameters.

        Ranks that split the parameters must not hold whole gradients, so they reduce each
        microbatch.
        """
        configured = None if self.reduction is None else self.reduction.per
        splits = not set(self.reduced_axes).isdisjoint(self.params.split_axes)
        return configured or ("microbatch" if splits else "step")

    def layout(self, mesh: Mesh) -> Layout:
        """The layout of the activations of all layers."""
        layout = Layout(mesh, self.batch_axes, may_ring=self.pipeline is None)
        for layers in self.layers:
            layout = layers.extend(layout)
        return layout

    @property
    def splits(self) -> bool:
        """Whether ZeRO, FSDP or experts split parameters or their moments, and so gradients."""
        return bool(self.params.split_axes or self.opt_state.split_axes)

    @property
    def sends_only_sums(self) -> bool:
        """Whether only sums of gradients are sent: data parallelism over replicated parameters."""
        others = self.splits or self.layers or self.pipeline is not None
        return bool(self.batch_axes) and not others

    @property
    def loops_gather_nothing(self) -> bool:
        """Whether the loops of a step are compiled as loops that gather no weights.

        Pipelines count as gathering: each of their ticks ends with a transfer that the next tick
        reads, which needs the same options of the compiler.
        """
        splits = not set(self.reduced_axes).isdisjoint(self.params.split_axes)
        once = self.gathers_once or (self.reduction is not None and self.reduction.per == "step")
        return (once or not splits) and self.pipeline is None

    def units(self, model: nnx.Module) -> frozenset[Path]:
        """Returns the paths of the modules that are gathered, freed and recomputed as one unit.

        Args:
            model: any NNX module; its leaves may be shapes.

        Raises:
            StrategyConflictError: when `wrap` and `remat` name different classes.
            UnsupportedError: when the model has none of the named modules.
        """
        wrap, remat = self.wrap, self.remat
        named = (remat.classes or ()) if remat is not None else ()
        units = block_paths(model, named) if named or wrap is None else wrap.units(model)
        by_class = TransformerAutoWrapPolicy
        if named and wrap not in (None, by_class(), by_class(*named)):
            raise StrategyConflictError(
                f"the wrap policy {wrap} and activation checkpointing of {named} name different "
                "modules, but modules are gathered and recomputed in the same units; set only one "
                "of the two",
                code="wrap-and-remat",
            )
        if not units and (remat is not None or getattr(wrap, "classes", ())):
            what = f"activation checkpointing of {named or 'repeated blocks'}"
            check_some([], f"{wrap}" if remat is None else what, model)
        return units

    def holds_whole_gradients(self, num_microbatches: int) -> bool:
        """Whether a data-parallel rank holds a whole gradient while it accumulates microbatches.

        Gradients are whole where moments are whole, and in pipeline stages, which reduce once per
        step.

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
    """Returns a strategy itself, or the one that a wrapper makes.

    Raises:
        ConfigError: for anything else.
    """
    resolved = getattr(strategy, "strategy", strategy)
    if not isinstance(resolved, Strategy):
        what = f"{strategy!r:.80}" if isinstance(strategy, str) else f"a {type(strategy).__name__}"
        raise ConfigError(
            f"got {what} for a strategy; give one such as ddp(), or a wrapper such as "
            'DDP(model, world.group("dp"))'
        )
    return resolved


def axis_names(axes: str | Sequence[str]) -> tuple[str, ...]:
    """Returns names of mesh axes as a tuple; a single name may be given as a string.

    Example:
        >>> axis_names("dp"), axis_names(["dp", "fsdp"])
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


def axes_or(
    axes: str | Sequence[str] | None, default: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes of a data-parallel strategy, and those of them that are defaults.

    Args:
        axes: the axes that were given; None for the default.
        default: the axis for None: `dp` for `ddp` and `zero`, `fsdp` for `fsdp`.
    """
    return ((default,), (default,)) if axes is None else (axis_names(axes), ())


def on_mesh(strategy: Strategy, mesh: Mesh) -> Strategy:
    """Replaces a default axis that the mesh lacks by the data axis that the mesh has.

    So `ddp()`, `zero(1)` and `fsdp()` each run on a mesh `dp=8` and on a mesh `fsdp=8`. Axes that
    were given stay; a rule refuses those that the mesh lacks.

    Args:
        strategy: any strategy.
        mesh: the mesh of the step.

    Returns:
        The strategy over axes of the mesh. If a default leaves a data axis of the mesh without
        work, it warns: every device along that axis computes the same.

    Example:
        >>> from axon_dist import World, ddp
        >>> on_mesh(ddp(), World.emulate(8, "fsdp=8").mesh).batch_axes
        ('fsdp',)
    """
    free = [axis for axis in DATA_AXES if axis in mesh.shape and axis not in strategy.axes]
    for default in strategy.default_axes:
        if default not in mesh.shape and len(free) == 1:
            strategy = _replace_axis(strategy, default, free.pop())
    if strategy.default_axes and (idle := [axis for axis in free if mesh.shape[axis] > 1]):
        both = tuple(axis for axis in mesh.shape if axis in DATA_AXES)
        warn(
            f"{strategy.name} got no axes and uses {', '.join(strategy.batch_axes)}; the devices "
            f"along axis {idle[0]!r} of mesh {dict(mesh.shape)} repeat the same work. Give it "
            f"axes={both}, or compose it with a strategy over {idle[0]!r}",
            code="idle-data-axis",
        )
    return strategy


def _replace_axis(strategy: Strategy, old: str, new: str) -> Strategy:
    """Returns the strategy with one data axis replaced by another, for samples and arrays."""

    def renamed(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(new if axis == old else axis for axis in axes)

    def moved(policy: Policy) -> Policy:
        if isinstance(policy, LargestDim):
            return dataclasses.replace(policy, axes=renamed(policy.axes))
        if isinstance(policy, Merge):
            return Merge(tuple(moved(part) for part in policy.policies))
        if isinstance(policy, Wrapped):
            return dataclasses.replace(policy, policy=moved(policy.policy))
        return policy

    return dataclasses.replace(
        strategy,
        batch_axes=renamed(strategy.batch_axes),
        params=moved(strategy.params),
        opt_state=moved(strategy.opt_state),
        default_axes=(),
    )


def compose(*strategies: Strategy | HasStrategy) -> Strategy:
    """Combines several strategies into one: batch axes are concatenated, policies are merged.

    The policies of the result raise `StrategyConflictError` when two parts claim one dim.

    Each part contributes the fields of its reduction that are not at their defaults:
    `compose(ddp(), fsdp())` reduces every microbatch, because `fsdp` keeps gradients split and
    `ddp` does not set `per`.

    An axis by which context parallelism splits positions splits no samples: composed with it,
    `fsdp(axes=("fsdp", "cp"))` splits samples over `fsdp`, and arrays over both.

    Args:
        *strategies: in any order. The batch is split over their axes in this order, so another
            order gives ranks other samples, and the same results.

    Returns:
        The combined strategy.

    Raises:
        StrategyConflictError: when two parts split the batch over the same axis, or disagree on
            the reduction, the precision or another field that the parts must share.

    Example:
        >>> data = Strategy("dp", batch_axes=("dp",), reduction=Reduction())
        >>> both = compose(data, Strategy("tp"))
        >>> both.name, both.batch_axes
        ('dp + tp', ('dp',))
    """
    parts = [as_strategy(strategy) for strategy in strategies]
    if not parts:
        raise ConfigError("compose() got no strategy; give it at least one")
    settings = {field: resolve_setting(parts, field) for field in _AGREED}
    return Strategy(
        name=" + ".join(part.name for part in parts),
        batch_axes=_combined_axes(parts),
        params=_merged([part.params for part in parts]),
        opt_state=_merged([part.opt_state for part in parts]),
        reduction=_combined_reduction(parts),
        layers=tuple(layers for part in parts for layers in part.layers),
        ungathered_axes=tuple(axis for part in parts for axis in part.ungathered_axes),
        default_axes=tuple(axis for part in parts for axis in part.default_axes),
        gathers_once=any(part.gathers_once for part in parts),
        **settings,
    )


_AGREED = ("wrap", "precision", "remat", "offload", "pipeline", "outer_loop")
"""The fields on which all parts that set them must agree."""


def overlay(strategy: Strategy, policy: Policy) -> Strategy:
    """Returns the strategy with another policy applied before its own to every array.

    Raises:
        StrategyConflictError: when the policies are applied, if both claim one dim of an array.
    """
    return dataclasses.replace(
        strategy,
        params=_merged([policy, strategy.params]),
        opt_state=_merged([policy, strategy.opt_state]),
    )


def per_layer(strategy: Strategy, stacks: frozenset[Path]) -> Strategy:
    """Returns the strategy with stacked layers sharded as each single layer would be.

    Args:
        strategy: any strategy.
        stacks: the paths of the modules whose leaves stack many layers in dim 0.

    Returns:
        The strategy.
    """
    return dataclasses.replace(
        strategy,
        params=per_layer_policy(strategy.params, stacks),
        opt_state=per_layer_policy(strategy.opt_state, stacks),
    )


def with_masters(strategy: Strategy, frozen: frozenset[Path], dtype: Any) -> Strategy:
    """Shards the master weights like the optimizer state if compute uses a narrower dtype.

    In ZeRO-1 and 2 ranks split the moments of parameters that they hold whole. If compute is in a
    narrower dtype, the parameters are sharded like their moments instead, and every step begins
    with an all-gather in the compute dtype. The owners' shards are the master weights, as in
    Rajbhandari et al., arXiv:1910.02054. With a dtype of half the width, half the bytes are sent.

    Args:
        strategy: any strategy, with all settings resolved.
        frozen: the paths of parameters that no step changes; they stay whole.
        dtype: the dtype in which the parameters are stored.

    Returns:
        The new strategy; the same one where nothing is gained, or where stages own the parameters.
    """
    precision = strategy.precision
    axes = set(strategy.reduced_axes)
    splits = not axes.isdisjoint(strategy.opt_state.split_axes)
    replicates = axes.isdisjoint(strategy.params.split_axes)
    if precision is None or strategy.pipeline is not None or not (splits and replicates):
        return strategy
    if precision.compute.itemsize >= dtype.itemsize:
        return strategy
    params = WithMoments(strategy.opt_state, strategy.params, frozen)
    return dataclasses.replace(strategy, params=params, gathers_once=True)


def _merged(policies: Sequence[Policy]) -> Policy:
    # Flat, so that composing in steps gives what composing at once gives.
    flat = (
        part
        for policy in policies
        for part in (policy.policies if isinstance(policy, Merge) else (policy,))
    )
    splitting = [policy for policy in flat if policy != Replicate()]
    if len(splitting) < 2:
        return splitting[0] if splitting else Replicate()
    return Merge(tuple(splitting))


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
    # The axis between replicas comes first, so that each has consecutive samples. Ungathered axes
    # come last, so that ranks that exchange samples are next to each other.
    between = {part.outer_loop.axis for part in parts if part.outer_loop is not None}
    ungathered_axes = {axis for part in parts for axis in part.ungathered_axes}
    return tuple(sorted(axes, key=lambda axis: (axis not in between, axis in ungathered_axes)))


def _combined_reduction(parts: Sequence[Strategy]) -> Reduction | None:
    """Merges the reductions of the parts field by field; a default leaves a field open."""
    reducing = [part for part in parts if part.reduction is not None]
    if not reducing:
        return None
    settings: dict[str, tuple[Any, str]] = {}
    for part in reducing:
        for field in dataclasses.fields(Reduction):
            value = getattr(part.reduction, field.name)
            if value == field.default:
                continue
            first, owner = settings.setdefault(field.name, (value, part.name))
            if first != value:
                raise StrategyConflictError(
                    f"reduction is {field.name}={_named(first)} in {owner!r} and "
                    f"{field.name}={_named(value)} in {part.name!r}; set it in only one of "
                    "them, or to the same value in both",
                    code="reductions-disagree",
                )
    return Reduction(**{name: value for name, (value, _) in settings.items()})


def resolve_setting(parts: Sequence[Strategy], field: str) -> Any:
    """Returns the value that the parts set for a field, or its default.

    Raises:
        StrategyConflictError: when two of them set different values.
    """
    default = getattr(Strategy, field)
    setting = [part for part in parts if getattr(part, field) != default]
    for part in setting[1:]:
        first = getattr(setting[0], field)
        other = getattr(part, field)
        if first != other:
            raise StrategyConflictError(
                f"{field} is {_briefly(first, other)} in {setting[0].name!r} and "
                f"{_briefly(other, first)} in {part.name!r}; set it in only one of them, or to the "
                "same value in both",
                code="strategies-disagree",
            )
    return getattr(setting[0], field) if setting else default


def _briefly(value: object, other: object) -> str:
    """Describes a value; of a dataclass, only the fields in which it differs from another."""
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
