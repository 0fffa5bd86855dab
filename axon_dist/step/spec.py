"""`StepSpec`: everything that defines a training step, as one value."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Set
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from ..core.errors import ConfigError, UnsupportedError, did_you_mean, warn
from ..core.tree import combine, shape_key, shapes_of
from ..core.typing import Batch, LossFn, OptionValue, Path, PyTree
from ..ir.loop_rule import GATHERED_BLOCKS, LoopChoice, LoopCost, LoopRule
from ..ir.walk import equations
from ..mesh import Backend, World, is_abstract, option_names, relative_of
from ..mesh.chips import machine_of
from ..parallel import MIX, Reduction, Strategy, map_experts, map_kernels
from ..sharding import Replicate, shardings
from .model_changes import ModelChanges
from .optimizer import DistributedUpdate, Update, optimizer_for
from .options import AUTO, ELASTIC, StepOptions
from .parts import ModelSpec
from .separable import Separator
from .storage import Storage, storage_of

_OPTIONS: MappingProxyType[Backend, dict[str, bool]] = MappingProxyType(
    {
        # XLA:CPU adds in a fixed order, whatever the number of threads.
        Backend.EMULATED: {},
        Backend.GLOO: {},
        # Scatters sort instead of racing, cuBLAS and cuDNN take algorithms with a fixed order, and
        # no kernel is chosen by how fast it was this time: a superset of
        # xla_gpu_exclude_nondeterministic_ops (openxla/xla, docs/determinism.md and #12520).
        # Triton has only kernels that autotuning picks by time, so XLA fails to find one for a
        # product that it gives to Triton (jax 0.11 and 0.12); cuBLAS has a default for each.
        Backend.NCCL: {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False},
        # The TPU compiler fixes the order.
        Backend.TPU: {},
    }
)


def deterministic_options(world: World, deterministic: bool | str = True) -> dict[str, OptionValue]:
    """Returns the compiler options under which a program gives the same bits every time.

    This holds for the same program, mesh, versions and kind of devices. Another mesh adds in
    another order, except under `"elastic"`.

    Args:
        world: the devices, and the mesh they form.
        deterministic: True, or `"elastic"` for the same bits on any number of devices.

    Returns:
        Names and values for `jax.jit(..., compiler_options=...)`; empty if nothing has to be set.

    Raises:
        UnsupportedError: for devices whose options are not known; for `"elastic"` on other devices
            than CPUs.

    Example:
        >>> deterministic_options(World.emulate(8))
        {}
    """
    if world.backend not in _OPTIONS:
        raise UnsupportedError(
            f"deterministic=True on {world.backend} devices: the options with which they give the "
            f"same bits twice are not known; use {', '.join(_OPTIONS)} devices, or leave it out",
            code="deterministic-devices",
        )
    if deterministic != ELASTIC:
        return dict(_OPTIONS[world.backend])
    if not world.is_cpu:
        raise UnsupportedError(
            f"deterministic={ELASTIC!r} on {world.backend} devices: that bits are equal on any "
            "number of ranks has been shown on CPUs alone; use emulated devices or processes on "
            "CPUs, or deterministic=True",
            code="elastic-devices",
        )
    # Whether the simplifier turns x / broadcast(y) into x * broadcast(1 / y) depends on the passes
    # before it, which differ between one partition and several. Code that is moved out of a loop is
    # fused with the code around the loop, and then other products are contracted with a sum (FMA).
    return {"xla_disable_hlo_passes": "algsimp,while-loop-invariant-code-motion"}


def compiler_options(
    world: World,
    given: Mapping[str, OptionValue | None] | None = None,
    deterministic: bool | str = False,
    strategy: Strategy | None = None,
) -> dict[str, OptionValue]:
    """Merges the compiler options of every program of a step.

    The table of chips has options that make collectives fewer and hidden, by the kind of the
    devices; emulated devices, and chips that it does not know, have none. `deterministic` adds its
    own, and the user's options take precedence.

    Args:
        world: the devices, and the mesh they form.
        given: names and values for the compiler; the value None removes an option of the chip.
        deterministic: True if every run shall give the same bits, `"elastic"` if also on any number
            of devices.
        strategy: the strategy of the step: options in the table depend on what it sends. None if it
            is not known.

    Returns:
        Names and values for `jax.jit(..., compiler_options=...)`.

    Raises:
        ConfigError: for a value of an unsupported type, an option to remove that no chip has,
            one that contradicts `deterministic`, or one that the compiler refuses.
        UnsupportedError: for `deterministic` on devices whose options are not known.

    Example:
        >>> compiler_options(World.emulate(8))
        {}
    """
    if given is not None:
        _check_values(given)
    given = dict(given or {})
    fixed = deterministic_options(world, deterministic) if deterministic else {}
    for name, value in fixed.items():
        if name in given and str(given[name]).lower() != str(value).lower():
            raise ConfigError(
                f"deterministic={deterministic} compiles with {name}={value}, and "
                f"compiler_options say {given[name]!r}; leave one of the two out"
            )
    if is_abstract(world):
        return {name: value for name, value in given.items() if value is not None}
    defaults: Mapping[str, OptionValue] = {}
    chip = None if world.is_cpu else relative_of(world.mesh)
    if chip is not None and strategy is None:
        defaults = chip.options_for(world.size)
    elif chip is not None and strategy is not None:
        parallel = False if strategy.pipeline else None
        if strategy.layers and parallel is None:
            # Each transfer around a ring consists of several arrays.
            parallel = all(x.sends_around and x.splits_positions for x in strategy.layers)
        keeps_whole, sums = strategy.keeps_weights_whole, strategy.sends_only_sums
        defaults = chip.options_for(world.size, keeps_whole, sums, parallel)
    merged = {**defaults, **fixed, **given}
    options = {name: value for name, value in merged.items() if value is not None}
    of_chip = defaults.keys() - fixed.keys() - given.keys()
    return _accepted(world, options, of_chip) if options else {}


def _check_values(options: Mapping[str, OptionValue | None]) -> None:
    known = option_names()
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, OptionValue | None):
            raise ConfigError(
                f"compiler_options has {name!r}: {value!r}; names must be strings, and values "
                "strings, numbers, True or False, or None to leave an option of the chip out"
            )
        if value is None and name not in known:
            raise ConfigError(
                f"compiler_options takes {name!r} away, which is set for no chip."
                f"{did_you_mean(name, known)}"
            )


def _accepted(
    world: World, options: Mapping[str, OptionValue], of_chip: Set[str]
) -> dict[str, OptionValue]:
    """Removes the options of the chip that this compiler does not know.

    Compiles a trivial program: otherwise an unknown name would only fail in the first step.
    """
    known = dict(options)
    refused = []
    replicated = NamedSharding(world.mesh, PartitionSpec())
    while known:
        trivial = jax.jit(lambda: jnp.zeros(()), out_shardings=replicated, compiler_options=known)
        try:
            trivial.lower().compile()
            break
        except (RuntimeError, ValueError, TypeError) as error:
            unknown = [name for name in known if f"option: '{name}'" in str(error)]
            if not unknown or unknown[0] not in of_chip:
                raise _refusal(world, known, error) from error
            refused += unknown
            known = {name: value for name, value in known.items() if name not in unknown}
    if refused:
        warn(
            f"the compiler of these {world.backend} devices does not know {', '.join(refused)}, "
            "which the table of chips has for them; steps are compiled without, and may be slower"
        )
    return known


def _refusal(world: World, options: Mapping[str, OptionValue], error: Exception) -> ConfigError:
    listed = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    return ConfigError(
        f"the compiler of these {world.backend} devices refuses its options ({error}); it was "
        f"given {listed}. Correct the one it names in compiler_options, or take it away there "
        "with the value None"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """The parameters and the optimizer of a step, in the form that the state has.

    Args:
        storage: how the state stores the parameters.
        params: the shapes of the stored trained parameters.
        frozen: the shapes of the stored frozen parameters.
        owners: the shardings of the reduced gradients, which are those of their moments.
        update: the optimizer, which distributes its work on whole matrices over devices.
    """

    storage: Storage
    params: PyTree
    frozen: PyTree
    owners: PyTree
    update: DistributedUpdate


@dataclasses.dataclass(frozen=True, eq=False)
class StepSpec:
    """The arguments of `build_train_step`, with every option resolved.

    Anything that needs a trace or a look at the model is computed on first use, and cached.

    Args:
        parts: the model's structure, and the shapes of its parameters and buffers.
        loss_fn: the user's loss.
        optimizer: an optax transformation of the model's parameters.
        strategy: the strategy for the model's own leaves.
        world: the devices, and the mesh they form.
        options: the options of the step other than its strategy.
        region: the mesh as one replica sees it in the region where the axis between replicas is
            manual, if replicas train independently; None outside of such a region.
        batch: a global batch that the step is built for, as the loss sees it, arrays or shapes;
            None if no batch is known.
        loop_choices: which blocks run as a loop; filled whenever the step is traced.

    Attributes:
        mesh: the mesh that is in context where the step is traced.
        num_microbatches: into how many microbatches a batch is cut; a pipeline has its own number.
        num_ranks: the number of ranks that split the samples of a microbatch; with
            `deterministic="elastic"` the number of logical shards.
        reduction: how the gradients of the ranks are reduced.
        compute_dtype: the dtype in which the model computes.
        is_local: whether each rank differentiates its own samples; otherwise the compiler
            partitions the work.
    """

    parts: ModelSpec
    loss_fn: LossFn
    optimizer: optax.GradientTransformationExtraArgs
    strategy: Strategy
    world: World
    options: StepOptions
    region: AbstractMesh | None = None
    batch: Batch | None = None
    loop_choices: dict[LoopChoice, None] = dataclasses.field(default_factory=dict)
    mesh: Any = dataclasses.field(init=False)
    num_microbatches: int = dataclasses.field(init=False)
    num_ranks: int = dataclasses.field(init=False)
    reduction: Reduction = dataclasses.field(init=False)
    compute_dtype: Any = dataclasses.field(init=False)
    is_local: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        strategy = self.strategy
        options = self.options
        is_elastic = options.is_elastic
        pipeline = strategy.pipeline
        precision = strategy.precision
        mesh = self.world.mesh if self.region is None else self.region
        count = options.accumulate if pipeline is None else pipeline.schedule.num_microbatches
        count = 1 if is_elastic else count
        # Axes that the mesh lacks count as 1 here; a rule refuses them later.
        ranks = math.prod(mesh.shape.get(axis, 1) for axis in strategy.batch_axes)
        reduction = strategy.reduction or Reduction()
        compute = self.parts.dtype if precision is None else precision.compute
        # Without batch axes no rank has gradients of its own to sum first. Resident parameters,
        # such as experts, get the samples of other ranks too.
        can_be_local = pipeline is None and not strategy.resident and bool(strategy.batch_axes)
        derived = {
            "mesh": mesh,
            "num_microbatches": count,
            "num_ranks": ranks if options.logical_shards is None else options.logical_shards,
            "reduction": reduction,
            "compute_dtype": compute,
            "is_local": can_be_local and (is_elastic or reduction.is_local(count, compute)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @property
    def memory_bytes(self) -> int | None:
        """The memory of a device; None if the chip is unknown."""
        # The mesh of a region of replicas is abstract, so ask that of the world.
        chip = machine_of(self.world.mesh)
        return None if chip is None else chip.memory_bytes

    def replica(self, region: bool = True) -> StepSpec:
        """Returns the step of one replica, if the strategy has replicas that train independently.

        Args:
            region: whether it is traced where the axis between replicas is manual; otherwise it is
                a step of all devices that does not split this axis.
        """
        slow = self.strategy.slow
        if slow is None:
            return self
        axes = tuple(axis for axis in self.strategy.batch_axes if axis != slow.axis)
        strategy = dataclasses.replace(self.strategy, slow=None, batch_axes=axes)
        manual = {slow.axis: AxisType.Manual}
        mesh = self.world.mesh.abstract_mesh.update_axis_types(manual) if region else None
        return dataclasses.replace(self, strategy=strategy, region=mesh)

    def together(self) -> StepSpec:
        """Returns the step of all replicas as if they synchronized on every step."""
        if self.strategy.slow is None:
            return self
        return dataclasses.replace(self, strategy=dataclasses.replace(self.strategy, slow=None))

    def microbatch(self, batch: Batch) -> tuple[int, Batch]:
        """Returns the number of samples of a microbatch over all ranks, and its shapes.

        Args:
            batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
        """
        shapes = shapes_of(batch, lead=int(self.num_microbatches > 1))
        return jax.tree.leaves(shapes)[0].shape[0], shapes

    def parts_draw(self, batch: Batch) -> bool:
        """Whether the batch is cut into parts and the loss draws random numbers for each.

        Args:
            batch: placed leaves of shape [B, ...], or [K, B/K, ...] with K microbatches.
        """
        if self.num_microbatches * self.num_ranks == 1:
            return False
        samples, shapes = self.microbatch(batch)
        program = self.separator.program(shapes, samples // self.num_ranks)
        return any(e.primitive.name.startswith("random_") for e in equations(program.jaxpr))

    @cached_property
    def compiler_options(self) -> dict[str, OptionValue]:
        """The compiler options of the programs of the step."""
        options = self.options.compiler_options
        deterministic = self.options.deterministic
        return compiler_options(self.world, options, deterministic, self.strategy)

    @cached_property
    def separator(self) -> Separator:
        """Finds out for each batch shape whether ranks may compute the loss on their own."""
        return Separator(self)

    def with_loss(self, loss_fn: LossFn) -> StepSpec:
        """Returns the same step with another loss for the parts of a batch, such as a weighted one.

        The separator is kept: its results are about the user's loss.
        """
        return self._changed("stored", "changes", "separator", loss_fn=loss_fn)

    def with_shared(self, shared: PyTree) -> StepSpec:
        """Returns the same step for batches that have more than their samples.

        Args:
            shared: nested dict of arrays or shapes; {} for nothing.
        """
        if not shared:
            return self
        key = shape_key(shared)
        if key not in self._for_shared:
            parts = dataclasses.replace(self.parts, shared=shapes_of(shared))
            self._for_shared[key] = self._changed("stored", parts=parts)
        return self._for_shared[key]

    def _changed(self, *cached: str, **changes: Any) -> StepSpec:
        """Replaces fields; keeps the cached values of the properties named in `cached`."""
        other = dataclasses.replace(self, **changes)
        vars(other).update({name: x for name, x in vars(self).items() if name in cached})
        return other

    @cached_property
    def _for_shared(self) -> dict[Any, StepSpec]:
        return {}

    @cached_property
    def stored(self) -> Stored:
        """The parameters and the optimizer in the form that the state has."""
        storage = storage_of(self.parts, self.strategy, self.loss_fn, self.batch)
        optimizer, storage, update = optimizer_for(self.optimizer, self.parts, storage, self.mesh)
        params, frozen = jax.eval_shape(storage.store, self.parts.weights)
        # Stages whose blocks are partly trained have trained and frozen rows at the same paths.
        shapes = combine(params, frozen) if storage.rows is None else params
        storage = dataclasses.replace(storage, shapes=shapes)
        update = Update.of(optimizer, params) if update is None else update
        policies = storage.strategy.params, storage.strategy.opt_state
        update = DistributedUpdate(update, *policies, self.mesh)
        owners = shardings(storage.strategy.opt_state, params, self.mesh)
        return Stored(storage, params, frozen, owners, update)

    @cached_property
    def changes(self) -> ModelChanges:
        """The changes to the model where the compiler, or each rank, runs all of it."""
        # Of a step with a pipeline, only evaluations run the whole model: they recompute nothing.
        by_stages = self.strategy.pipeline is not None
        strategy = dataclasses.replace(self.strategy, remat=None) if by_stages else self.strategy
        if self.options.is_elastic:
            # Weights are gathered before the model runs, so blocks do not gather their own.
            strategy = dataclasses.replace(strategy, params=Replicate(), opt_state=Replicate())
        units: frozenset[Path] = frozenset()
        is_split = strategy.splits or bool(self.parts.int8)
        if is_split or strategy.remat is not None or self.options.scan_layers is True:
            units = strategy.units(self.parts.abstract)
        return ModelChanges(strategy, self.parts, units, self._loop_rule())

    def _loop_rule(self) -> LoopRule:
        """Returns the rule for which chains of blocks run as a loop."""
        options = self.options
        choices = self.loop_choices

        def tell(choice: LoopChoice) -> None:
            choices[choice] = None

        if options.scan_layers != AUTO:
            most = 1 if options.scan_layers else sys.maxsize
            return LoopRule(most, f"scan_layers={options.scan_layers} says so", tell=tell)
        if options.unroll is not None:
            return LoopRule(options.unroll, f"unroll={options.unroll} says so", tell=tell)
        cost, why = self._loop_cost()
        return LoopRule(why=why, cost=cost, tell=tell)

    def _loop_cost(self) -> tuple[LoopCost | None, str]:
        """Returns the cost of a loop over blocks here, or None and why it is not known."""
        if self.world.is_cpu:
            return None, "CPUs spend more on compiling than a loop takes"
        chip = relative_of(self.world.mesh)
        if chip is None or not chip.block_seconds:
            return None, "what a loop costs on these devices is not known"
        if self.strategy.layers and self.mesh.size > 1:
            # Loops were not measured against unrolled blocks that send around rings or to experts.
            return None, f"what a loop costs under {self.strategy.name} is not known"
        # Inside `shard_map` the traced shapes are those of one rank already.
        num_shares = 1 if self.is_local else self.num_ranks
        cost = LoopCost(chip.memory_bandwidth, chip.block_seconds, "cuda", num_shares)
        if not self.strategy.keeps_weights_whole and self.mesh.size > 1:
            most = GATHERED_BLOCKS
            cost = dataclasses.replace(cost, most=most, loop_blocks=most)
        return cost, ""

    def change_layers(self, model: nnx.Module) -> None:
        """Replaces the calls of a merged model's layers by those of the strategy, in place."""
        layout = self.strategy.layout(self.world.mesh)
        # Kernels first: once a layer has mapped attention over all axes, no axis is left for the
        # kernels to split.
        modules = [module for _, module in nnx.iter_modules(model)]
        if any(hasattr(module, "attend") for module in modules):
            map_kernels(model, layout)
        if any(hasattr(module, MIX) for module in modules):
            map_experts(model, layout)
        for layers in self.strategy.layers:
            layers(model, layout)
