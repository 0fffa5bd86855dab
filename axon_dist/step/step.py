"""`build_train_step`, and the `TrainStep` that it makes: one jitted step and what a loop calls.

`axon_dist.inspect` has functions that read a step, such as the programs of its parts.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike

from ..core.checks import is_whole
from ..core.errors import AxonDistError, ConfigError, UnsupportedError, warn
from ..core.own_context import AxisNames, in_context_of_step, own_context, readable_by_caller
from ..core.tree import combine, leaves_with_paths, shape_key, shapes_of
from ..core.typing import Array, Batch, LossFn, Metrics, Path, PyTree, Trainable
from ..core.weighted import FilledBatch, Shared, Weighted
from ..core.words import AUTO, byte_size, first_few
from ..inspect import (
    coupling,
    lower_init,
    lower_outer_steps,
    memory,
    separation,
    trace_outer_steps,
    trace_step,
)
from ..ir.loop_rule import LoopChoice
from ..mesh import World, agree, checksums, digest, is_abstract
from ..nn import ActivationCheckpointing
from ..ops.precision import MixedPrecision
from ..parallel import HasStrategy, Strategy, as_strategy
from ..parallel.strategy import on_mesh
from ..planner import knows_memory, read_step, recompute_least, usable_bytes
from ..planner.reading import Remat
from ..sharding import LeafDecision
from ..sharding.padding import stored_tree
from ..sharding.policy import NO_DIM
from .batch import BatchLayout, Placed, samples_of, split_shared, unwrapped
from .describe import describe, idle_axes, replicated_arrays, summary, whole_bytes, whole_summary
from .evaluation import MetricKinds, added, adds_up, evaluation, means, pieces
from .guards import ESCAPED, DeadlockGuard, trace
from .layout import Claims, StateLayout
from .model_spec import ModelLike, ModelSpec, split_model, stored_as
from .optimizer import unconjugated
from .options import (
    StepKeywords,
    StepOptions,
    check_arguments,
    options_of,
    takes_step,
    unwrapped_model,
)
from .plan import StepPlan, plan_step
from .replicas import ReplicaLayout, shared_metrics
from .rules import check_plan, check_rules
from .sharing import shared_value
from .spec import StepSpec, strategy_for
from .state import WEIGHTS, TrainState, averaged, check_fits, check_usable

STEPS_IN_FLIGHT = 16
"""The most steps in flight on emulated devices."""

_AT_BUILD = "Pass batch=... to build_train_step to get this error when the step is built"


def build_train_step(
    model: ModelLike,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    strategy: Strategy | HasStrategy,
    world: World,
    *,
    options: StepOptions | None = None,
    precision: MixedPrecision | str | bool | None = None,
    remat: Remat = AUTO,
    batch: Batch | None = None,
    trainable: Trainable = nnx.Param,
    frozen_dtype: DTypeLike | None = None,
    **keywords: Unpack[StepKeywords],
) -> TrainStep:
    """Builds one jitted step, equal to training the same model on one device.

    On any mesh, the step computes

        loss, grads = value_and_grad(loss_fn)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = params + updates

    Args:
        model: an NNX module, or a zero-argument function that makes one. The arrays of a function's
            model are initialized sharded. If it is the wrapper that is also given as the strategy,
            the module in the wrapper is trained.
        optimizer: any optax transformation; one that reads the loss gets it as `value`.
        loss_fn: `loss_fn(model, batch)`, returning a scalar mean or `Weighted`, alone or with a
            dict of scalar metrics. A loss with a required parameter `step` (one without a default),
            `loss_fn(model, batch, step)`, also gets the number of steps taken, an int32 scalar.
        strategy: a `Strategy`, or a wrapper such as `DDP` that makes one.
        world: the devices, and the mesh they form.
        options: what the step does besides its strategy.
        precision: a `MixedPrecision`; a preset (`"bf16"`, `"fp16"`, `"fp8"`, `"float32"`); or
            True. True computes in bfloat16 and reduces gradients in float32; `"bf16"` also reduces
            them in bfloat16. It must not contradict the strategy's.
        remat: what the backward pass recomputes, if the strategy sets nothing. `"auto"` recomputes
            the least that fits a device's memory with this `batch`. It estimates memory from the
            traced step, and compiles the step when the estimate is close to the limit. It
            adds nothing without a `batch`, in a pipeline, or when the memory of the devices is not
            known, as for emulated ones. It does not change the results.
        batch: a global batch, as arrays or `jax.ShapeDtypeStruct`s, to trace the step with. Errors
            that depend on the batch are then raised here rather than by the first call. Its leaves
            have shape [B, ...]; a leaf that all samples share is wrapped in `Shared`.
        trainable: which variables are trained: a type of Variable such as `nnx.LoRAParam`, a
            regular expression of paths such as `"head"`, a predicate `(keys, variable)` or another
            filter of nnx, or a tuple of these. With a filter of nnx the step equals
            `nnx.Optimizer(model, optimizer, wrt=trainable)` with the gradient of `nnx.DiffState(0,
            trainable)`. A string is a regular expression here; nnx itself would take it for a tag.
            Every other `nnx.Param` is frozen: it is sharded like a parameter, but has no gradient
            and no moments, and does not count in norms.
        frozen_dtype: the dtype that frozen parameters are kept in, such as `"bfloat16"`; None
            keeps each in its own. `"int8"` stores matrices as int8 with one bfloat16 scale per
            output (`precision.int8_form` says which), and vectors in their own dtype. The step
            equals one whose model has `int8 * scale` in their place, in their own dtype. They are
            stored and sent as int8 and widened in the block that reads them; within bridged Linen
            modules they are widened before they are sent. Pipelines do not support it.
        **keywords: fields of `StepOptions` by name, such as `accumulate=4`; they override those of
            `options`.

    Returns:
        The step: `state = step.init()`, then `state, metrics = step(state, batch)`.

    Raises:
        ConfigError: when an argument, the model or an option is not valid.
        GroupError: when a wrapper is over another world's group.
        AxonDistError: from the first broken rule (`axon_dist.step.rules`), or from
            `TrainStep.check(batch)`.
        StrategyConflictError: when precision or remat contradict the strategy.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from axon_dist import DDP, World
        >>> world = World.emulate(8)
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
        >>> ddp = DDP(model, world.group("dp"))
        >>> step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp, world)
        >>> state = step.init()
        >>> state, metrics = step(state, {"x": jnp.ones((16, 2)), "y": jnp.ones((16, 1))})
        >>> int(state.step)
        1
    """
    # `build_step` of `axon_dist.train.app.steps` resolves `auto` itself for a config, because it
    # passes a `batch` only for pipelines.
    if isinstance(remat, str) and remat == AUTO:

        def build(remat: Remat | None) -> TrainStep:
            return build_train_step(
                model,
                optimizer,
                loss_fn,
                strategy,
                world,
                options=options,
                precision=precision,
                remat=remat,
                batch=batch,
                trainable=trainable,
                frozen_dtype=frozen_dtype,
                **keywords,
            )

        return recomputing_least(build, batch)
    model = unwrapped_model(model, strategy)
    check_arguments(optimizer, loss_fn, world, remat, strategy, model)
    names = AxisNames.of(world.mesh, options_of(options, keywords, False).axis_names)
    with own_context(names):
        split = functools.partial(split_model, model, trainable)
        is_factory = not isinstance(model, nnx.Module)
        key = ("model", model, trainable)
        model_spec, source = shared_value(key, split) if is_factory else split()
        chosen = on_mesh(as_strategy(strategy), world.mesh)
        resolved = strategy_for(model_spec, chosen, precision, remat, names)
        scales = resolved.precision is not None and resolved.precision.needs_scaling
        resolved_options = options_of(options, keywords, scales)
        if takes_step(loss_fn):
            model_spec = dataclasses.replace(model_spec, reads_step=True)
        if resolved.precision is not None or frozen_dtype is not None:
            model_spec, source = stored_as(model_spec, source, resolved.precision, frozen_dtype)
        extended = optax.with_extra_args_support(optimizer)
        example = None if batch is None else unwrapped(batch)
        spec = StepSpec(
            model_spec, loss_fn, extended, resolved, world, resolved_options, batch=example
        )
        check_rules(spec)
        plan = plan_step(spec)
        check_plan(plan)
        make_layout = StateLayout if resolved.outer_loop is None else ReplicaLayout
        step = TrainStep(make_layout(plan, source))
        _warn_of_replicated(step)
        _warn_of_ascent(step)
        if batch is not None:
            step.check(batch)
        return step


_NOTEWORTHY = 2**20
"""Warn when arrays without a dim that can be split take at least this many bytes per device."""


def _warn_of_replicated(step: TrainStep) -> None:
    """Warns of large arrays that the strategy would split but whose dims are all too short.

    Small arrays, which stay whole on purpose, only appear in `step.replicated_arrays` and
    `print(step)`.
    """
    rows = [row for row in step.replicated_arrays if NO_DIM in row.decision.reason]
    size = sum(row.bytes for row in rows)
    if size < _NOTEWORTHY:
        return
    listed = [f"{row.path} {row.shape} ({byte_size(row.bytes)})" for row in rows]
    warn(
        f"{step.strategy.name} on mesh {step.world.spec} leaves {len(rows)} "
        f"array{'s' * (len(rows) > 1)} of {byte_size(size)} whole on every device, because "
        f"each of their dims is shorter than the number of shards: {first_few(listed)}. Split them "
        "over fewer devices, as hybrid does, or see step.replicated_arrays for all of them"
    )


def _warn_of_ascent(step: TrainStep) -> None:
    """Warns if a step would increase the loss along the imaginary parts of parameters."""
    spec = step.spec
    paths = unconjugated(spec.optimizer, spec.model_spec.params)
    if paths:
        warn(
            f"the parameters {first_few(paths)} are complex, but the optimizer does not conjugate "
            "their gradients. JAX gives dL/dx - i dL/dy as the gradient for x + iy, so a step "
            "against it increases the loss along the imaginary part. Conjugate it first: "
            "optax.chain(optax.stateless(lambda g, p: jax.tree.map(jnp.conj, g)), optimizer)",
            code="complex-gradient",
        )


def leaves_remat_open(step: TrainStep) -> bool:
    """Whether `remat="auto"` has to choose what a step recomputes.

    False if its strategy already says, as a pipeline does, or if the memory of a device is not
    known.

    Args:
        step: a step that recomputes what its strategy says.
    """
    strategy = step.strategy
    world = step.world
    if strategy.remat is not None or strategy.pipeline is not None:
        return False
    return not world.is_cpu and not is_abstract(world) and knows_memory(world)


def recomputing_least(
    build: Callable[[ActivationCheckpointing | None], TrainStep], batch: Batch | None
) -> TrainStep:
    """Builds the step of `remat="auto"`: the one that recomputes least and fits into memory.

    Args:
        build: makes a step with the given `remat`.
        batch: a global batch, arrays or shapes; None recomputes nothing.

    Returns:
        The step. If the strategy sets a remat policy, that policy is used. If the memory of the
        devices is unknown, the step recomputes nothing and is not even traced.

    Raises:
        ConfigError: when nothing fits.
    """
    plain = build(None)
    if batch is None or not leaves_remat_open(plain):
        return plain
    return recompute_least(
        lambda remat: plain if remat is None else build(remat),
        lambda step: read_step(step, batch),
        lambda step: memory(step.lower(batch).compile()).peak,
        usable_bytes(plain.world),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class StepPrograms:
    """The jitted functions of a step. They take and return states that are padded as stored.

    Args:
        state_layout: the layout of its states.
        batch_layout: how its batches are cut.
        step: (state, placed batch, nonfinite flag) -> next state, metrics; donates the state.
        evaluate: (state, placed batch) -> the sums of an evaluation.
        gradients: (state, placed batch) -> reduced gradients, metrics.
        metric_kinds: how the metrics of evaluations depend on the samples.
        evaluation_plan: the plan of evaluations, which treats all replicas as one data-parallel
            group.
        outer_steps: state -> state, one for each fragment of the parameters, where replicas train
            independently; else empty.
    """

    state_layout: StateLayout
    batch_layout: BatchLayout
    step: Any
    evaluate: Any
    gradients: Any
    metric_kinds: MetricKinds
    evaluation_plan: StepPlan
    outer_steps: tuple[Any, ...]

    @property
    def keeps_state(self) -> bool:
        """Whether the state stays unchanged from the first nonfinite step on."""
        policy = self.state_layout.spec.options.nonfinite
        return policy is not None and policy.holds

    def arguments(self, batch: Batch, num_processes: int = 1) -> tuple[Any, Placed, Any]:
        """Returns the arguments of a step as shapes with shardings.

        Args:
            batch: leaves of shape [B, ...]; shapes will do.
            num_processes: how many processes load a batch of this size.
        """
        flag = jax.ShapeDtypeStruct((), bool, sharding=self.state_layout.replicated)
        placed = self.batch_layout.abstract(batch, num_processes)
        return self.state_layout.placed_shapes, placed, flag if self.keeps_state else None

    def trace(self, batch: Batch, num_processes: int = 1) -> jax.stages.Traced:
        """Traces the step for a batch; arguments as for `arguments`."""
        return trace(self.step, self.arguments(batch, num_processes))

    def lower(self, batch: Batch, num_processes: int = 1) -> jax.stages.Lowered:
        """Lowers the step for a batch; arguments as for `arguments`.

        Raises:
            UnsupportedError: when these devices have no form of an operation.
        """
        traced = self.trace(batch, num_processes)
        try:
            return traced.lower()
        except Exception as error:
            backend = self.state_layout.spec.world.backend
            raise UnsupportedError(
                f"the traced step cannot be lowered for {backend} devices: {error}. "
                "Trace the model alone for them, jax.jit(loss).lower(...), to find the operation, "
                "and use another one or another precision"
            ) from error


def programs_of(layout: StateLayout, batches: BatchLayout) -> StepPrograms:
    """Makes the jitted functions of a step.

    Args:
        layout: the layout of its states.
        batches: how its batches are cut.
    """
    plan = layout.plan
    spec = plan.spec
    pipeline = spec.strategy.pipeline
    sizes = spec.mesh.shape
    # Only the stages of a pipeline can deadlock, and only if the compiler partitions them over axes
    # that `shard_map` leaves to it. Without a pipeline no step needs the guard.
    manual = sizes.keys() if pipeline is None else {pipeline.axis, *spec.strategy.batch_axes}
    is_partitioned = any(size > 1 for axis, size in sizes.items() if axis not in manual)
    guarded = DeadlockGuard if is_partitioned else jax.jit
    jit = functools.partial(guarded, compiler_options=plan.compiler_options)
    on_device = layout.on_device
    # Replicas are evaluated together, as if they synchronized on every step.
    together = plan if spec.strategy.outer_loop is None else plan_step(spec.together(), plan)
    kinds = MetricKinds(together)

    # Profilers show a compiled program under the name of its function.
    def train_step(
        state: TrainState, placed: Placed, was_nonfinite: Array | None = None
    ) -> tuple[TrainState, Metrics]:
        new, metrics = layout.run_step(on_device(state), placed, was_nonfinite)
        return layout.padded(new), metrics

    def gradients(state: TrainState, placed: Placed) -> tuple[PyTree, Metrics]:
        result = layout.run_gradients(on_device(state), placed)
        return stored_tree(result.grads, layout.grad_shardings), result.metrics

    def evaluate(state: TrainState, placed: Placed) -> dict[str, Weighted]:
        arguments = layout.arguments(on_device(state), placed.shared)
        over_ranks = dataclasses.replace(placed, arrays=batches.over_ranks(placed.arrays))
        return evaluation(together, kinds, *arguments, over_ranks)

    return StepPrograms(
        state_layout=layout,
        batch_layout=batches,
        step=jit(
            train_step, donate_argnums=0, out_shardings=(layout.state_shardings, layout.reported)
        ),
        evaluate=jit(evaluate, out_shardings=layout.replicated),
        gradients=jit(gradients, out_shardings=(layout.grad_shardings, layout.reported)),
        metric_kinds=kinds,
        evaluation_plan=together,
        outer_steps=tuple(
            jit(_on_stored(run, layout), donate_argnums=0, out_shardings=layout.state_shardings)
            for run in layout.outer_steps
        ),
    )


def _on_stored(
    run: Callable[[TrainState], TrainState], layout: StateLayout
) -> Callable[[TrainState], TrainState]:
    """Turns a function of states without padding into one of padded states."""

    # Profilers show a compiled program under the name of its function.
    @functools.wraps(run)
    def on_stored(state: TrainState) -> TrainState:
        return layout.padded(run(layout.unpadded(state)))

    return on_stored


class TrainStep:
    """A jitted training step, made by `build_train_step`.

    Args:
        state_layout: the layout of its states, and how the first one is made.

    Attributes:
        plan: the decisions that follow from the arguments of the step.
        spec: the resolved arguments of the step.
        model_spec: the structure of the model and the shapes of its arrays.
        strategy: the strategy, with every option resolved.
        world: the devices.
        options: the options of the step other than its strategy.
        storage: how the state stores the parameters.
        compiler_options: the compiler options of its programs.
        state_layout: the layout of its states, and how the first one is made.
        batch_layout: how batches are cut.
        programs: its jitted functions.
        abstract_state: a `TrainState` of shapes.
        state_shardings: a `TrainState` of shardings.
        claims: the shardings that the strategy claims, and why; `init` checks them.
        on_device: (state) -> the state as a step computes with it: in device memory, without
            padding, buffers gathered.
        axis_names: which mesh axes the axis names in the model's code refer to.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from axon_dist import World, build_train_step, ddp
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
        >>> step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), World.emulate(8))
        >>> state, metrics = step(step.init(), {"x": jnp.ones((16, 2))})
        >>> int(state.step), "loss" in metrics
        (1, True)
    """

    def __init__(self, state_layout: StateLayout):
        plan = state_layout.plan
        spec = plan.spec
        self.plan: StepPlan = plan
        self.spec: StepSpec = spec
        self.model_spec: ModelSpec = spec.model_spec
        self.strategy: Strategy = spec.strategy
        self.world: World = spec.world
        self.options: StepOptions = spec.options
        self.storage = plan.state_plan.storage
        self.compiler_options = plan.compiler_options
        self.state_layout: StateLayout = state_layout
        self.batch_layout: BatchLayout = BatchLayout.of(spec)
        self.programs: StepPrograms = programs_of(state_layout, self.batch_layout)
        self.abstract_state: TrainState = state_layout.shapes
        self.state_shardings: TrainState = state_layout.state_shardings
        self.claims: Claims = state_layout.claims
        self.on_device: Callable[[TrainState], TrainState] = state_layout.on_device
        self.axis_names = AxisNames.of(spec.world.mesh, spec.options.axis_names)
        self._report = jax.jit(shared_metrics, out_shardings=state_layout.replicated)
        self._means = jax.jit(means)
        # State that this step keeps from call to call; none of it changes a result.
        self._agreed = set[str]()
        self._last: weakref.ref[TrainState] | None = None
        self._counted: tuple[Callable[[], TrainState | None], int] = (lambda: None, 0)
        self._in_flight = deque[Array]()
        self._sums_of_parts: dict[Any, bool] = {}

    def __repr__(self) -> str:
        return f"TrainStep({summary(self.state_layout)})"

    def __str__(self) -> str:
        """Describes the step on one screen: mesh, split and whole arrays, view, options."""
        return describe(self.state_layout, self.batch_layout)

    def __getattr__(self, name: str) -> Any:
        """Finds the deprecated name of an attribute or of a function that reads a step."""
        if name not in _OLD_NAMES:
            raise AttributeError(f"a TrainStep has no attribute {name!r}", name=name, obj=self)
        instead, get = _OLD_NAMES[name]
        warnings.warn(
            f"TrainStep.{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=2
        )
        return get(self)

    @property
    def replicated_arrays(self) -> tuple[LeafDecision, ...]:
        """The arrays that every device holds whole although the strategy splits arrays, and why.

        If it splits parameters, these are trained and frozen parameters; otherwise the parameters
        whose moments are whole. Empty under a strategy that splits no array.
        """
        return replicated_arrays(self.state_layout)

    @property
    def loop_choices(self) -> tuple[LoopChoice, ...]:
        """Which blocks run as a loop, and why, for the batches traced so far."""
        return tuple(self.plan.loop_choices)

    @in_context_of_step
    def init(self, weights: Mapping[Path, Array] | None = None) -> TrainState:
        """Makes the first state; every array is created with its final sharding.

        Args:
            weights: arrays by path that replace the model's first values, all or some, as
                `weight_targets` describes them. They are donated.

        Returns:
            The state. Its arrays are its own: the module given stays usable.

        Raises:
            ClaimError: when an array is not split as the strategy claims.
            ConfigError: when the model has no such array, or one of another shape or dtype.
            LaunchError: when the processes of the run start from different parameters.
        """
        weights = {} if weights is None else weights
        WEIGHTS.check("init", "weights", weights)
        return self.state_layout.init(weights)

    @in_context_of_step
    def init_from(self, params: PyTree) -> TrainState:
        """Makes the first state of a run that starts from the parameters of another.

        The optimizer state, the averages, the buffers and the count of steps start fresh. Frozen
        parameters are the model's own.

        Args:
            params: parameters in the form of a state of this step, such as
                `load_checkpoint(path, step, parts="params")` returns. They are copied, so the
                state that they belong to stays usable.

        Returns:
            The state. The moving average, and the outer parameters of replicas that train
            independently, start from these parameters too; if replicas differ, from their mean.

        Raises:
            ConfigError: when they do not have the structure or the shapes of this step's
                parameters.
        """
        state = self.state_layout.init({})
        if jax.tree.structure(params) != jax.tree.structure(state.params):
            found, wanted = (
                sorted(path for path, _ in leaves_with_paths(x)) for x in (params, state.params)
            )
            odd = sorted(set(found) ^ set(wanted))
            raise ConfigError(
                f"init_from got {len(found)} parameters for {len(wanted)} of the step, among "
                f"them {', '.join(odd[:4]) or 'some of another kind'}; give what "
                "load_checkpoint(path, step, parts='params') returns for this step"
            )
        for (path, got), (_, want) in zip(
            leaves_with_paths(params), leaves_with_paths(state.params), strict=True
        ):
            if jnp.shape(got) != want.shape:
                raise ConfigError(
                    f"init_from got {path!r} of shape {list(jnp.shape(got))}, and the state of "
                    f"this step has {list(want.shape)}; give what "
                    "load_checkpoint(path, step, parts='params') returns for this step"
                )
        state = self.state_layout.with_params(state, params)
        return self.state_layout.init(self.state_layout.weights(state), owns=False)

    def _check(self, state: TrainState) -> None:
        """Raises unless a state fits this step; the step's own last state is not checked again."""
        check_usable(state)
        if self._last is None or self._last() is not state:
            check_fits(state, self.abstract_state, self.state_shardings)
            self._last = weakref.ref(state)

    @property
    def weight_targets(self) -> dict[Path, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding by path of the model's arrays, without random streams."""
        return self.state_layout.weight_targets

    @in_context_of_step
    def weights(self, state: TrainState, *, ema: bool = False) -> dict[Path, Array]:
        """Returns the arrays of `weight_targets` by path, in the model's form.

        Args:
            state: a state of this step; it stays usable.
            ema: whether to take the moving average of the parameters instead.

        Returns:
            The arrays; those of a pipeline are cut out of its rows. Others may be those of the
            state itself: the next step from this state donates them, so use or copy them before.
        """
        self._check(state)
        return self.state_layout.weights(averaged(state) if ema else state)

    @readable_by_caller
    @in_context_of_step
    def __call__(
        self,
        state: TrainState,
        batch: Batch | Placed,
        was_nonfinite: Array | None = None,
        *,
        held: Array | None = None,
    ) -> tuple[TrainState, Metrics]:
        """Takes one step; the arrays of the given state are donated.

        Args:
            state: from `init` or the step before.
            batch: leaves of shape [B, ...]: the global batch, or with several processes the rows
                of this one, `own_rows`, in that order; or the result of `place`. A JAX array that
                is spread over the devices of several processes has the rows of all.
            was_nonfinite: the metric `nonfinite` of the previous step. If true, and the step was
                built with `nonfinite="stop"` or `"rollback"`, the state is returned unchanged.
            held: the deprecated name of `was_nonfinite`.

        Returns:
            The next state, and the metrics as scalars on the devices; the step does not wait for
            them.

        Raises:
            DivisibilityError: when the batch cannot be cut evenly.
            ConfigError: when an earlier step has used the state up.
            LaunchError: when, in the first batch of a shape, processes that load the same rows gave
                different ones, or processes run different programs.
            UnsupportedError: when, for a batch shape not traced before, the loss cannot be computed
                from the losses of its parts.
        """
        if held is not None:
            warnings.warn(
                "held= is deprecated; use was_nonfinite=", DeprecationWarning, stacklevel=2
            )
            was_nonfinite = held
        self._check(state)
        placed = batch if isinstance(batch, Placed) else self.batch_layout.place(batch)
        was_nonfinite = self._flag(was_nonfinite) if self.programs.keeps_state else None
        if self.world.num_processes > 1:
            self._agree_on_program(state, placed, was_nonfinite)
        # The count of steps is read from the devices only if the state is not this step's last one.
        last, count = self._counted
        if self.programs.outer_steps and last() is not state:
            count = int(state.step)
        try:
            state, metrics = self.programs.step(state, placed, was_nonfinite)
        except AxonDistError as error:
            if self.spec.batch is None:
                error.args = (f"{error}. {_AT_BUILD}",)
            raise
        except jax.errors.UnexpectedTracerError as error:
            message = f"{ESCAPED}. {_AT_BUILD}"
            raise UnsupportedError(message) from error
        if self.programs.outer_steps:
            metrics = self._report(metrics)
            for number in self.state_layout.due(count + 1):
                state = self.programs.outer_steps[number](state)
            self._counted = weakref.ref(state), count + 1
        self._last = weakref.ref(state)
        if self.world.is_cpu:
            # Each emulated device of a step in flight blocks a thread while it waits for the
            # others. If blocked threads fill the pool, the others cannot arrive, and XLA aborts.
            self._in_flight.append(metrics["loss"])
            if len(self._in_flight) > STEPS_IN_FLIGHT:
                jax.block_until_ready(self._in_flight.popleft())
        return state, metrics

    def _agree_on_program(self, *args: Any) -> None:
        """Checks, once per batch shape, that all processes run the same program on one batch."""
        shapes = str(jax.tree.map(jnp.shape, args[1:]))
        if shapes not in self._agreed:
            self._agree_on_rows(args[1])
            agree(self.world, "step", {"program": digest(self.programs.step.lower(*args))})
            self._agreed.add(shapes)

    def _agree_on_rows(self, placed: Placed) -> None:
        """Checks that processes that load the same rows gave the same ones."""
        # JAX compares the leaves that all samples share when it puts them on the devices.
        if self.batch_layout.num_processes == self.world.num_processes:
            return
        facts = {f"rows of {name}": one for name, one in checksums(placed.arrays).items()}
        axes = ", ".join(self.batch_layout.axes) or "none"
        agree(
            self.world,
            "batch",
            facts,
            advice=f"The batch axes are {axes}, and processes with the same ranks along them give "
            "the same rows: give those of step.own_rows(global_batch) on each",
            code="rows-of-processes-differ",
        )

    def _flag(self, was_nonfinite: Array | None) -> Array:
        """Places the flag of the step before; the first step gets one with the same sharding."""
        if was_nonfinite is not None:
            # Under a caller's explicit mesh the flag is on that mesh.
            return jax.device_put(was_nonfinite, self.state_layout.replicated)
        return jax.make_array_from_callback(
            (), self.state_layout.replicated, lambda _: np.zeros((), bool)
        )

    def own_rows(self, global_batch: int, *, evaluated: bool = False) -> np.ndarray:
        """Returns which rows of a global batch this process gives to a step.

        They are the rows of the ranks that its devices have along the batch axes, in the order of
        replicas, then microbatches, then ranks. With them several processes compute what one
        process computes from the global batch. Processes that differ only along other axes, such
        as that of tensor parallelism, give the same rows.

        Args:
            global_batch: the number of rows of all processes, B.
            evaluated: whether the batch is for `evaluate`, which cuts no microbatches.

        Returns:
            Row numbers, int64; `x[step.own_rows(len(x))]` are the rows of an array `x`. On one
            process all numbers in order.

        Raises:
            ConfigError: when there is no such batch.
            DivisibilityError: when the batch cannot be cut evenly.

        Example:
            >>> import optax
            >>> from axon_dist import World, build_train_step, ddp
            >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
            >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
            >>> step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), World.emulate(4))
            >>> step.own_rows(8).tolist()
            [0, 1, 2, 3, 4, 5, 6, 7]
        """
        if not is_whole(global_batch) or global_batch < 1:
            raise ConfigError(
                f"own_rows got global_batch={global_batch!r:.80}; give the number of rows that all "
                "processes have together, at least 1"
            )
        return self._cut(evaluated).rows_of(int(global_batch), self.world)

    def _cut(self, evaluated: bool) -> BatchLayout:
        """Returns how a batch is cut, which in an evaluation is into no microbatches."""
        if not evaluated:
            return self.batch_layout
        return dataclasses.replace(
            self.batch_layout, num_microbatches=1, logical_shards=1, is_evaluated=True
        )

    @in_context_of_step
    def place(self, batch: Batch) -> Placed:
        """Puts a batch on the devices ahead of time, so that a later step does not wait for it.

        Args:
            batch: as for a step.
        """
        return self.batch_layout.place(batch)

    @readable_by_caller
    @in_context_of_step
    def gradients(self, state: TrainState, batch: Batch | Placed) -> tuple[PyTree, Metrics]:
        """Computes the reduced gradients of a batch, before clipping.

        Args:
            state: a state of this step; it stays usable.
            batch: as for a step.

        Returns:
            A tree like the parameters, sharded, and padded as stored, like their moments; and the
            metrics.
        """
        self._check(state)
        placed = batch if isinstance(batch, Placed) else self.batch_layout.place(batch)
        grads, metrics = self.programs.gradients(state, placed)
        return grads, self._report(metrics) if self.programs.outer_steps else metrics

    @readable_by_caller
    @in_context_of_step
    def evaluate_sums(
        self, state: TrainState, batch: Batch, *, ema: bool = False
    ) -> dict[str, Weighted]:
        """Computes the numbers of `evaluate` as sums, which add up over batches of any sizes.

        Over several batches a metric is `sum(totals) / sum(weights)`. A `Weighted` metric has its
        own weight. A metric that is a mean over the samples is weighed by their number, and so is a
        plain scalar loss, even if it is a sum. A metric that is a sum of integers over the samples
        is a `Count`: over several batches it is `sum(totals)`. Any other metric, such as a maximum
        or a sum of floats, has the weight of the loss, so that over several batches it is the mean
        of its values for each.

        Args:
            state: a state of this step; it stays usable.
            batch: as for `evaluate`.
            ema: as for `evaluate`.

        Returns:
            `loss` and the metrics of the loss function, scalars on the devices.
        """
        self._check(state)
        state = averaged(state) if ema else state
        layout = self._cut(evaluated=True)
        if isinstance(batch, FilledBatch):
            return self._sums_of_samples(state, batch.samples, layout)
        can_place = layout.padding is not None or layout.num_processes > 1
        if can_place or samples_of(split_shared(batch)[0]) % layout.divisor == 0:
            return self.programs.evaluate(state, layout.place(batch))
        return self._sums_of_samples(state, batch, layout)

    def _sums_of_samples(
        self, state: TrainState, batch: Batch, layout: BatchLayout
    ) -> dict[str, Weighted]:
        """Computes `evaluate_sums` for any number of samples, all of which this process has."""
        if layout.padding is not None:
            samples, shared = split_shared(batch)
            batch = layout.padding.fill(samples, 1, shared)
            if shared:
                batch = combine(batch, jax.tree.map(Shared, shared))
        ranks = layout.divisor
        samples = samples_of(split_shared(batch)[0])
        if samples % ranks and not self._adds_up(batch):
            return self.programs.evaluate(state, layout.place_whole(batch))
        sums = []
        for piece in pieces(samples, ranks):
            # Indexing with all rows of one process would copy them.
            is_alone = layout.num_processes == 1
            rows = slice(None) if is_alone else layout.rows_of(piece.samples, self.world)
            counted = self.programs.evaluate(state, layout.place(piece.of(batch, rows)))
            sums.append(piece.without_copies(counted))
        return added(sums)

    def _adds_up(self, batch: Batch) -> bool:
        """Whether the `evaluate_sums` of the parts of a batch add up to that of the batch."""
        samples, shared = split_shared(batch)
        key = shape_key((shapes_of(samples), shapes_of(shared)))
        if key not in self._sums_of_parts:
            plan = self.programs.evaluation_plan.with_shared(shared)
            kinds = self.programs.metric_kinds.of(samples, shared)
            self._sums_of_parts[key] = adds_up(plan, kinds, samples)
        return self._sums_of_parts[key]

    @readable_by_caller
    @in_context_of_step
    def evaluate(self, state: TrainState, batch: Batch, *, ema: bool = False) -> dict[str, Array]:
        """Computes the loss and metrics of a batch with the model in eval mode.

        Args:
            state: a state of this step; it stays usable.
            batch: leaves of shape [B, ...], as for a step; with several processes the rows
                `own_rows(B, evaluated=True)`. If one process has all samples, B need not divide by
                the ranks: each sample still counts once.
            ema: whether to take the moving average of the parameters instead.

        Returns:
            `loss` and the metrics of the loss function, scalars on the devices.
        """
        return self._means(self.evaluate_sums(state, batch, ema=ema))

    @in_context_of_step
    def merge(self, state: TrainState, *, ema: bool = False) -> nnx.Module:
        """Returns the model with the values of a state, or with the average of its parameters.

        Where nothing is converted, its arrays are those of the state, so the next step donates
        them.
        """
        self._check(state)
        state = averaged(state) if ema else state
        if self.storage.stage_storage is not None or self.state_layout.padding is not None:
            # Rows must be in device memory before they are cut out of stacks. With padding,
            # `jitted_values` moves the state itself.
            state = state if self.state_layout.padding else self.on_device(state)
            return self.model_spec.merge(*self.state_layout.jitted_values(state))
        return self.model_spec.merge(*self.state_layout.values(state))

    @in_context_of_step
    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Lowers the step for a batch of shapes or arrays, without running or storing anything.

        Args:
            batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.

        Returns:
            The lowered step; `.compile()` it to read its memory and collectives. It is the program
            that runs, and compiles with the same `compiler_options`.
        """
        return self.programs.lower(batch)

    @in_context_of_step
    def evaluated_names(self, batch: Batch) -> tuple[str, ...]:
        """Returns the names of the metrics of `evaluate`; traces it, and compiles nothing.

        Args:
            batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.
        """
        layout = self._cut(evaluated=True)
        arguments = self.programs.state_layout.placed_shapes, layout.abstract(batch)
        return tuple(trace(self.programs.evaluate, arguments).out_info)

    @in_context_of_step
    def check(self, batch: Batch, *, own_rows: bool = False) -> None:
        """Traces and lowers the step for a batch, without compiling, or allocating arrays.

        The trace and the lowered program are cached: a step on such a batch then only has to be
        compiled. In an abstract world it only traces.

        Args:
            batch: leaves of shape [B, ...] with B the samples of all processes; shapes will do.
            own_rows: whether B counts the samples of this process alone, as for a step.

        Raises:
            AxonDistError: when the step cannot run on such a batch.
        """
        count = self.batch_layout.num_processes if own_rows else 1
        if is_abstract(self.world):
            self.programs.trace(batch, count)
        else:
            self.programs.lower(batch, count)


def _moved_to_inspect(function: Any) -> tuple[str, Callable[[TrainStep], Any]]:
    return f"axon_dist.inspect.{function.__name__}", lambda step: functools.partial(function, step)


_OLD_NAMES: MappingProxyType[str, tuple[str, Callable[[TrainStep], Any]]] = MappingProxyType(
    {
        "lower_init": _moved_to_inspect(lower_init),
        "lower_outer_steps": _moved_to_inspect(lower_outer_steps),
        "program": _moved_to_inspect(trace_step),
        "outer_step_programs": _moved_to_inspect(trace_outer_steps),
        "separation": _moved_to_inspect(separation),
        "coupling": _moved_to_inspect(coupling),
        "check_rows": (
            "TrainStep.check(batch, own_rows=True)",
            lambda step: functools.partial(step.check, own_rows=True),
        ),
        "form": ("TrainStep.state_layout", lambda step: step.state_layout),
        "layout": ("TrainStep.batch_layout", lambda step: step.batch_layout),
        "idle_axes": ("axon_dist.step.idle_axes", lambda step: idle_axes(step.spec)),
        "parts": ("TrainStep.model_spec", lambda step: step.model_spec),
        "whole": ("TrainStep.replicated_arrays", lambda step: step.replicated_arrays),
        "whole_bytes": (
            "TrainStep.replicated_arrays",
            lambda step: whole_bytes(step.replicated_arrays),
        ),
        "whole_summary": ("print(step)", lambda step: whole_summary(step.replicated_arrays)),
    }
)
"""Deprecated attributes of a `TrainStep` -> what replaces them, and its value for a step."""
