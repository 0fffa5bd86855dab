"""`StepPlan`: the decisions that follow from a `StepSpec`, made once when the step is built."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ..core.tree import combine, shape_key
from ..core.typing import Array, LossFn, OptionValue, Path, PyTree
from ..core.words import AUTO
from ..ir.loop_rule import GATHERED_BLOCKS, LoopChoice, LoopCost, LoopRule
from ..mesh import options_row_of
from ..optim.wrappers import layer_norms
from ..pipeline import UnstackedOptimizer
from ..pipeline.optimizer import StagedOptimizer
from ..sharding import Replicate, shardings
from .compiler import compiler_options
from .model_changes import ModelChanges
from .model_spec import ModelSpec
from .optimizer import DistributedUpdate, Update, trace_update
from .options import NORMS_BY_LAYER
from .separation import Separator
from .sharing import shared_value
from .spec import StepSpec
from .storage import ParamStorage, storage_of


@dataclasses.dataclass(frozen=True, eq=False)
class StatePlan:
    """The parameters and the optimizer of a step, in the form that the state stores.

    Args:
        storage: how the state stores the parameters.
        params: the shapes of the stored trained parameters.
        frozen: the shapes of the stored frozen parameters.
        grad_shardings: the shardings of the reduced gradients, which are those of their moments.
        update: the optimizer, which distributes its work on whole matrices over devices.
        layer_norms: returns the norm of every layer of stored parameters, or of a tree like them.
    """

    storage: ParamStorage
    params: PyTree
    frozen: PyTree
    grad_shardings: PyTree
    update: DistributedUpdate
    layer_norms: Callable[[PyTree], dict[str, Array]] = layer_norms

    def on(self, spec: StepSpec) -> StatePlan:
        """Returns the same parameters and optimizer for a step derived from this one.

        Args:
            spec: the derived step, such as that of one replica, or of all of them together; its
                mesh may have manual axes.
        """
        if self.storage.stage_storage is not None:
            # The optimizer of stages is made for a mesh.
            return plan_state(spec)
        grad_shardings = shardings(self.storage.strategy.opt_state, self.params, spec.mesh)
        update = dataclasses.replace(self.update, mesh=spec.mesh)
        return dataclasses.replace(self, grad_shardings=grad_shardings, update=update)


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """The decisions that follow from the arguments of a step.

    Args:
        spec: the resolved arguments of the step.
        compiler_options: the compiler options of its programs.
        state_plan: the parameters and the optimizer, in the form that the state stores.
        changes: the changes to a model that is not cut into stages.
        separator: finds out for each batch shape whether each rank may compute the loss of its own
            samples.
        loop_choices: which blocks run as a loop; filled whenever the step is traced.
    """

    spec: StepSpec
    compiler_options: Mapping[str, OptionValue]
    state_plan: StatePlan
    changes: ModelChanges
    separator: Separator
    loop_choices: dict[LoopChoice, None]

    def with_loss(self, loss_fn: LossFn) -> StepPlan:
        """Returns the same step with another loss for the parts of a batch, such as a weighted one.

        The separator stays: its results are about the user's loss.
        """
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, loss_fn=loss_fn))

    def with_shared(self, shared: PyTree) -> StepPlan:
        """Returns the same step for batches that also have `Shared` leaves.

        Args:
            shared: nested dict of arrays or shapes; {} for nothing.
        """
        if not shared:
            return self
        separator = self.separator.with_shared(shared)
        spec = dataclasses.replace(self.spec, model_spec=separator.model_spec)
        return dataclasses.replace(self, spec=spec, separator=separator)


def plan_step(spec: StepSpec, parent: StepPlan | None = None) -> StepPlan:
    """Plans a step.

    Args:
        spec: the resolved arguments of the step.
        parent: the plan of the step that this one is derived from, as that of one replica is. Both
            share the parent's compiler options, its choices of loops, and its traced optimizer,
            which a pipeline traces again.

    Returns:
        The plan.

    Raises:
        ConfigError: when the optimizer or the compiler's options are not valid for this step.
        UnsupportedError: when the model cannot be cut into the stages of a pipeline, as one with
            fewer blocks than stages; or when a pipeline cannot run the optimizer.
        ScheduleError: when the boundaries or costs of stages do not fit the blocks.
    """
    if parent is None:
        given = spec.options.compiler_options
        deterministic = spec.options.deterministic
        options = compiler_options(spec.world, given, deterministic, spec.strategy)
        choices: dict[LoopChoice, None] = {}
        state_plan = plan_state(spec)
    else:
        options = parent.compiler_options
        choices = parent.loop_choices
        state_plan = parent.state_plan.on(spec)
    changes = changes_of_model(spec, choices)
    separator = Separator(spec, changes.change_with, _trace_key(spec, changes))
    return StepPlan(spec, options, state_plan, changes, separator, choices)


def _trace_key(spec: StepSpec, changes: ModelChanges) -> Hashable:
    """Returns all that the traces of a step's loss depend on; None if that cannot be compared."""
    model_spec = spec.model_spec
    if changes.fp8 is not None or model_spec.int8:
        return None
    shapes = shape_key((*model_spec.arguments, model_spec.frozen))
    strategy = changes.strategy
    return (
        spec.loss_fn,
        spec.mesh,
        model_spec.graphdef,
        shapes,
        changes.units,
        changes.stacked_units,
        strategy.precision,
        strategy.pipeline is None,
    )


def plan_state(spec: StepSpec) -> StatePlan:
    """Finds the parameters and the optimizer of a step, in the form that the state stores."""
    model_spec = spec.model_spec
    storage = storage_of(model_spec, spec.strategy, spec.loss_fn, spec.batch)
    optimizer, storage, update = optimizer_for(spec.optimizer, model_spec, storage, spec.mesh)
    params, frozen = jax.eval_shape(storage.store, model_spec.weights)
    # Stages whose blocks are partly trained have trained and frozen rows at the same paths.
    shapes = combine(params, frozen) if storage.stage_storage is None else params
    storage = dataclasses.replace(storage, shapes=shapes)
    policies = storage.strategy
    distributed = DistributedUpdate(
        Update.of(optimizer, params) if update is None else update,
        policies.params,
        policies.opt_state,
        spec.mesh,
    )
    grad_shardings = shardings(policies.opt_state, params, spec.mesh)
    is_staged = storage.stage_storage is not None and NORMS_BY_LAYER in spec.options.metrics
    measure = _staged_layer_norms(spec, storage) if is_staged else layer_norms
    return StatePlan(storage, params, frozen, grad_shardings, distributed, measure)


_MEASURING = optax.GradientTransformation(
    lambda params: layer_norms(params),  # Its argument has the name that optax asks for.
    lambda updates, state, params=None: (updates, layer_norms(updates)),
)
"""Measures the layers of its updates. One object, so that the candidates of a search share it."""


def _staged_layer_norms(
    spec: StepSpec, storage: ParamStorage
) -> Callable[[PyTree], dict[str, Array]]:
    """Returns the function that measures layers on the ranks of a pipeline that store them."""
    # The norms are the state of an optimizer, because only optimizers run stage by stage.
    staged, _, _ = optimizer_for(_MEASURING, spec.model_spec, storage, spec.mesh)

    def measure(tree: PyTree) -> dict[str, Array]:
        shapes = jax.eval_shape(staged.init, tree)
        first = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return staged.update(tree, first, tree, value=jnp.zeros(()))[1]

    return measure


def optimizer_for(
    optimizer: optax.GradientTransformation,
    model_spec: ModelSpec,
    storage: ParamStorage,
    mesh: Mesh,
) -> tuple[Any, ParamStorage, Update | None]:
    """Returns the optimizer for the stored form of a model's parameters.

    Args:
        optimizer: the user's optimizer.
        model_spec: the model's structure, and the shapes of its parameters and buffers.
        storage: the stored form of its parameters.
        mesh: names and sizes of the axes, over all devices.

    Returns:
        The optimizer; the storage, which knows which leaves of the optimizer's state are rows; and
        the traced update, if the parameters are stored in the model's own form.

    Raises:
        ConfigError: when the optimizer cannot work on the parameters; it gives the reason.
        UnsupportedError: when a pipeline cannot run it; it names the leaf and the operation.
    """
    extended = optax.with_extra_args_support(optimizer)
    shapes = shape_key((model_spec.weights, model_spec.frozen))
    # Not the extended one, which optax may make anew in each call.
    key = "update", optimizer, model_spec.graphdef, shapes
    update = shared_value(key, functools.partial(trace_update, extended, model_spec))
    fitting = update.optimizer
    pipeline = storage.strategy.pipeline
    if storage.stage_storage is None or pipeline is None:
        return fitting, storage, update
    if storage.stacks.counts:
        fitting = UnstackedOptimizer(fitting, storage.stacks, model_spec.params)
    staged = StagedOptimizer(
        fitting, storage.stage_storage.trained, mesh, pipeline.axis, update.extra_args
    )
    # Which leaves of the optimizer's state are rows.
    policy: Any = storage.strategy.opt_state
    policy = dataclasses.replace(policy, state_rows=staged.state_form.row_paths)
    strategy = dataclasses.replace(storage.strategy, opt_state=policy)
    return staged, dataclasses.replace(storage, strategy=strategy), None


def units_of_step(spec: StepSpec) -> frozenset[Path]:
    """Returns the paths of the modules that are gathered, freed, recomputed or looped as one."""
    strategy = _strategy_of_whole_model(spec)
    is_split = strategy.splits or bool(spec.model_spec.int8)
    if is_split or strategy.remat is not None or spec.options.scan_layers is True:
        abstract = spec.model_spec.abstract
        key = "units", abstract, strategy.wrap, strategy.remat
        return shared_value(key, functools.partial(strategy.units, abstract))
    return frozenset()


def changes_of_model(spec: StepSpec, choices: dict[LoopChoice, None]) -> ModelChanges:
    """Returns the changes to a model that is not cut into stages.

    Args:
        spec: the resolved arguments of the step.
        choices: records which blocks run as a loop.
    """
    strategy = _strategy_of_whole_model(spec)
    return ModelChanges(strategy, spec.model_spec, units_of_step(spec), loop_rule(spec, choices))


def _strategy_of_whole_model(spec: StepSpec) -> Any:
    strategy = spec.strategy
    if strategy.pipeline is not None:
        # With a pipeline, only evaluations run the whole model, and they recompute nothing.
        strategy = dataclasses.replace(strategy, remat=None)
    if spec.options.is_elastic:
        # Weights are gathered before the model runs, so blocks do not gather their own.
        strategy = dataclasses.replace(strategy, params=Replicate(), opt_state=Replicate())
    return strategy


def loop_rule(spec: StepSpec, choices: dict[LoopChoice, None]) -> LoopRule:
    """Returns the rule for which chains of blocks run as a loop.

    Args:
        spec: the resolved arguments of the step.
        choices: records what the rule decides.
    """
    options = spec.options

    def record(choice: LoopChoice) -> None:
        choices[choice] = None

    if options.scan_layers != AUTO:
        most = 1 if options.scan_layers else sys.maxsize
        return LoopRule(most, f"scan_layers={options.scan_layers} says so", tell=record)
    if options.unroll is not None:
        return LoopRule(options.unroll, f"unroll={options.unroll} says so", tell=record)
    cost, why = _loop_cost(spec)
    return LoopRule(why=why, cost=cost, tell=record)


def _loop_cost(spec: StepSpec) -> tuple[LoopCost | None, str]:
    """Returns the cost of a loop over blocks here, or None and why it is not known."""
    if spec.world.is_cpu:
        return None, "on CPUs compiling more blocks costs more time than a loop does"
    chip = options_row_of(spec.world.mesh)
    if chip is None or not chip.block_seconds:
        return None, "the cost of a loop on these devices is not known"
    strategy = spec.strategy
    if strategy.layers and spec.mesh.size > 1:
        # Loops were not measured against unrolled blocks that send around rings or to experts.
        return None, f"the cost of a loop under {strategy.name} is not known"
    # Inside `shard_map` the traced shapes are those of one rank already.
    num_shares = 1 if spec.wants_local_view else spec.num_ranks
    cost = LoopCost(chip.memory_bandwidth, chip.block_seconds, "cuda", num_shares)
    if not strategy.loops_gather_nothing and spec.mesh.size > 1:
        most = GATHERED_BLOCKS
        cost = dataclasses.replace(cost, most=most, loop_blocks=most)
    return cost, ""
