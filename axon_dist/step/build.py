"""`build_train_step`: checks its arguments and makes a `TrainStep`, which runs `one_step`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Unpack

import optax
from flax import nnx
from jax.typing import DTypeLike

from ..core.errors import warn
from ..core.own_context import AxisNames, own_context
from ..core.typing import Batch, LossFn, Trainable
from ..core.words import byte_size, first_few
from ..inspect import memory
from ..mesh import World, is_abstract
from ..nn import ActivationCheckpointing
from ..ops.precision import MixedPrecision
from ..parallel import (
    HasStrategy,
    Reduction,
    Strategy,
    as_strategy,
    overlay,
    per_layer,
    resolve_setting,
    with_masters,
)
from ..planner import AUTO, knows_memory, read_step, recompute_least, usable_bytes
from ..planner.reading import Remat
from ..sharding import FromMetadata, annotations_of
from ..sharding.policy import NO_DIM
from .batch import unwrapped
from .optimizer import unconjugated
from .options import StepKeywords, StepOptions, check_arguments, options_of, takes_step
from .parts import ModelLike, ModelSpec, split_model, stored_as
from .replicas import ReplicaForm
from .rules import check_rules
from .spec import StepSpec
from .state_form import StateLayout
from .step import TrainStep


def strategy_for(
    parts: ModelSpec,
    strategy: Strategy,
    precision: MixedPrecision | str | bool | None,
    remat: ActivationCheckpointing | None,
    names: AxisNames | None = None,
) -> Strategy:
    """Resolves every option of a strategy: precision, remat, reduction, the model's layouts.

    Without a precision, gradients are computed and sent in the dtype of the parameters.

    Args:
        parts: the model, whose variables may carry sharding annotations, and whose layers may be
            stacked.
        strategy: the user's strategy.
        precision: the step's `precision` argument, or None.
        remat: the step's `remat` argument, or None.
        names: maps the axis names of the model's annotations to mesh axes.

    Returns:
        The strategy.

    Raises:
        StrategyConflictError: when the strategy and the step disagree.
    """
    policy = None if precision is None else MixedPrecision.of(precision)
    asked = Strategy("build_train_step", precision=policy, remat=remat)
    merged = dataclasses.replace(
        strategy,
        precision=resolve_setting([strategy, asked], "precision"),
        remat=resolve_setting([strategy, asked], "remat"),
    )
    reduction = merged.reduction or Reduction()
    default = parts.dtype if merged.precision is None else merged.precision.reduce_dtype
    dtype = reduction.dtype or default
    reduction = dataclasses.replace(reduction, per=merged.reduces_per, dtype=dtype)
    resolved = dataclasses.replace(merged, reduction=reduction)
    annotations = annotations_of(parts.abstract)
    if names is not None:
        annotations = tuple((path, names.of_annotation(spec)) for path, spec in annotations)
    if any(any(spec) for _, spec in annotations):
        resolved = overlay(resolved, FromMetadata(annotations))
    if parts.stacks:
        resolved = per_layer(resolved, frozenset(parts.stacks))
    if resolved.precision is None:
        return resolved
    return with_masters(resolved, parts.frozen_paths, resolved.precision.param)


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
            model are initialized sharded.
        optimizer: any optax transformation; one that reads the loss gets it as `value`.
        loss_fn: `loss_fn(model, batch)`, returning a scalar mean or `Weighted`, alone or with a
            dict of scalar metrics. A loss with a required parameter `step` (one without a default),
            `loss_fn(model, batch, step)`, also gets the number of steps taken, an int32 scalar.
        strategy: a `Strategy`, or a wrapper such as `DDP` that makes one.
        world: the devices, and the mesh they form.
        options: what the step does besides its strategy.
        precision: a `MixedPrecision`, a preset (`"bf16"`, `"fp16"`, `"fp8"`, `"float32"`), or
            True: bfloat16 compute, float32 reductions. It must not contradict the strategy's.
        remat: what the backward pass recomputes, if the strategy sets nothing. `"auto"` recomputes
            the least that fits a device's memory with this `batch`. It estimates memory from the
            traced step, and compiles the step when the estimate is close to the limit. It
            recomputes nothing without a `batch`, or when the memory of the devices is not known, as
            for emulated ones. It changes no number.
        batch: a global batch, as arrays or `jax.ShapeDtypeStruct`s, to trace the step with. Errors
            that depend on the batch are then raised here rather than by the first call. Its leaves
            have shape [B, ...]; a leaf that all samples share is wrapped in `Shared`.
        trainable: which variables are trained: a type of Variable such as `nnx.LoRAParam`, a
            regular expression of paths such as `"head"`, a predicate `(keys, variable)` or another
            filter of nnx, or a tuple of these. The step then equals `nnx.Optimizer(model,
            optimizer, wrt=trainable)` with the gradient of `nnx.DiffState(0, trainable)`. Every
            other `nnx.Param` is frozen: it is sharded like a parameter, but has no gradient and no
            moments, and does not count in norms.
        frozen_dtype: the dtype that frozen parameters are kept in, such as `"bfloat16"`; None
            keeps each in its own. `"int8"` stores matrices as int8 with one bfloat16 scale per
            output (`precision.int8_form` says which), and vectors in their own dtype. The step
            equals one whose model has `int8 * scale` in their place, in their own dtype. They are
            stored and sent as int8 and widened in the block that reads them; within bridged Linen
            modules they are widened before they are sent. Pipelines do not support it.
        **keywords: fields of `StepOptions` by name, such as `accumulate=4`. They replace `options`,
            or override its fields.

    Returns:
        The step: `state = step.init()`, then `state, metrics = step(state, batch)`.

    Raises:
        ConfigError: when an argument, the model or an option is not valid.
        GroupError: when a wrapper is over another world's group.
        AxonDistError: from the first broken rule of `RULES`, `PIPELINE_RULES` or `REPLICA_RULES`,
            or from `TrainStep.check(batch)`.
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

        return _recomputing_least(build, batch)
    check_arguments(optimizer, loss_fn, world, remat, strategy, model)
    names = AxisNames.of(world.mesh, options_of(options, keywords, False).axis_names)
    with own_context(names):
        parts, source = split_model(model, trainable)
        resolved = strategy_for(parts, as_strategy(strategy), precision, remat, names)
        scales = resolved.precision is not None and resolved.precision.needs_scaling
        resolved_options = options_of(options, keywords, scales)
        parts = dataclasses.replace(parts, reads_step=takes_step(loss_fn))
        if resolved.precision is not None or frozen_dtype is not None:
            parts, source = stored_as(parts, source, resolved.precision, frozen_dtype)
        extended = optax.with_extra_args_support(optimizer)
        example = None if batch is None else unwrapped(batch)
        spec = StepSpec(parts, loss_fn, extended, resolved, world, resolved_options, batch=example)
        check_rules(spec)
        form = (StateLayout if resolved.slow is None else ReplicaForm)(spec, source)
        step = TrainStep(spec, form)
        _warn_of_replicated(step)
        _warn_of_ascent(step)
        if batch is not None:
            step.check(batch)
        return step


_NOTEWORTHY = 2**20
"""Warn when the arrays that no dim can split take at least this many bytes per device."""


def _warn_of_replicated(step: TrainStep) -> None:
    """Warns of large arrays that the strategy would split but whose dims are all too short.

    Small arrays, which stay whole on purpose, only appear in `step.whole` and `print(step)`.
    """
    rows = [row for row in step.whole if NO_DIM in row.decision.reason]
    size = sum(row.bytes for row in rows)
    if size < _NOTEWORTHY:
        return
    listed = [f"{row.path} {row.shape} ({byte_size(row.bytes)})" for row in rows]
    warn(
        f"{step.strategy.name} on mesh {step.world.spec} leaves {len(rows)} "
        f"array{'s' * (len(rows) > 1)} of {byte_size(size)} whole on every device, because "
        f"each of their dims is shorter than the number of shards: {first_few(listed)}. Split them "
        "over fewer devices, as hybrid_shard does, or see step.whole for all of them"
    )


def _warn_of_ascent(step: TrainStep) -> None:
    """Warns if a step would increase the loss along the imaginary parts of parameters."""
    spec = step.spec
    paths = unconjugated(spec.optimizer, spec.parts.params)
    if paths:
        warn(
            f"the parameters {first_few(paths)} are complex, and the optimizer does not conjugate "
            "their gradients. JAX gives dL/dx - i dL/dy as the gradient for x + iy, so a step "
            "against it increases the loss along the imaginary part. Conjugate it first: "
            "optax.chain(optax.stateless(lambda g, p: jax.tree.map(jnp.conj, g)), optimizer)",
            code="complex-gradient",
        )


def leaves_remat_open(step: TrainStep) -> bool:
    """Whether `remat="auto"` has to choose what a step recomputes.

    False if its strategy already says, or if the memory of a device is not known.

    Args:
        step: a step that recomputes what its strategy says.
    """
    strategy = step.strategy
    world = step.world
    if strategy.remat is not None or strategy.pipeline is not None:
        return False
    return not world.is_cpu and not is_abstract(world) and knows_memory(world)


def _recomputing_least(build: Callable[..., TrainStep], batch: Batch | None) -> TrainStep:
    """Returns the step that recomputes the least that fits, or the one its strategy describes.

    Args:
        build: makes a step with the given `remat`.
        batch: a global batch, arrays or shapes.
    """
    plain = build(remat=None)
    if batch is None or not leaves_remat_open(plain):
        return plain
    return recompute_least(
        lambda remat: plain if remat is None else build(remat=remat),
        lambda step: read_step(step, batch),
        lambda step: memory(step.lower(batch).compile()).peak,
        usable_bytes(plain.world),
    )
