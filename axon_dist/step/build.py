"""`build_train_step`: checks what is given and makes a `TrainStep`, which does `one_step`."""

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
    """The strategy with every option resolved: precision, remat, reduction, the model's layouts.

    Without a precision the gradients have the dtype of the parameters, on the wire too.

    Args:
        parts: the model, whose variables may say how they are split, and whose layers may be
            stacked.
        strategy: what the user gave.
        precision: what the step was asked for, or None.
        remat: likewise.
        names: which axes are meant by the names in the model's annotations.

    Returns:
        The strategy.

    Raises:
        StrategyConflictError: when strategy and step say different things.
    """
    policy = None if precision is None else MixedPrecision.of(precision)
    asked = Strategy("build_train_step", precision=policy, remat=remat)
    both = {field: resolve_setting([strategy, asked], field) for field in ("precision", "remat")}
    merged = dataclasses.replace(strategy, **both)
    reduction, dtypes = merged.reduction or Reduction(), merged.precision
    dtype = reduction.dtype or (parts.dtype if dtypes is None else dtypes.reduce_dtype)
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
    """Builds one jitted step that equals the same model on one device.

    The step computes, whatever the mesh,

        loss, grads = value_and_grad(loss_fn)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = params + updates

    Args:
        model: an NNX module, or a zero-argument function that makes one; the arrays of the
            latter are init sharded.
        optimizer: any optax transformation; one that looks at the loss gets it as `value`.
        loss_fn: `loss_fn(model, batch)` giving a scalar mean or `Weighted`, alone or with a dict
            of scalar metrics. One that has to be given a `step`, `loss_fn(model, batch, step)`, is
            given the number of steps taken, an int32 scalar.
        strategy: a `Strategy`, or a wrapper such as `DDP` that makes one.
        world: the devices, and the mesh they form.
        options: what the step does besides its strategy.
        precision: dtypes, a preset's name (`"bf16"`, `"fp16"`), or True, where the strategy does
            not say.
        remat: what the backward pass recomputes, where the strategy does not say. `"auto"`
            recomputes the least that fits a device's memory with this `batch`, by the traced step,
            and where that is close by the compiled one; and nothing where there is no `batch`, or
            the memory of the devices is not known, as that of emulated ones. It changes no number.
        batch: a global batch, as arrays or `jax.ShapeDtypeStruct`s, for which the step is traced:
            then also what only a batch can show is refused here, rather than by the first call.
            Its leaves have shape [B, ...]; what belongs to no sample stands in a `Shared`.
        trainable: what of the model is trained: a type of Variable such as `nnx.LoRAParam`, a
            regular expression of paths such as `"head"`, a predicate `(keys, variable)` or another
            filter of nnx, or a tuple of these. The step then equals `nnx.Optimizer(model,
            optimizer, wrt=trainable)` with the gradient of `nnx.DiffState(0, trainable)`. Every
            other `nnx.Param` is frozen: it is laid out as the strategy lays out parameters, and
            has no gradient, no moments, and no part in norms.
        frozen_dtype: the dtype that frozen parameters are kept in, such as `"bfloat16"`; None
            keeps each in its own. `"int8"` keeps matrices as whole numbers with a bfloat16 scale
            for each output (`precision.int8_form` says of which), and vectors in their own: the
            step equals the model with `int8 * scale` in their place, in their own dtype. They are
            stored and sent as eight bits and widened in the block that reads them; within bridged
            Linen modules they are widened before they are sent. Not for pipelines.
        **keywords: fields of `StepOptions` by name, such as `accumulate=4`, in place of `options`
            or over those that it has.

    Returns:
        The step: `state = step.init()`, then `state, metrics = step(state, batch)`.

    Raises:
        AxonDistError: what the first broken rule of `RULES` says, or `TrainStep.check(batch)`.
        StrategyConflictError: when precision or remat contradict the strategy's.

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
        _warn_of_whole(step)
        if batch is not None:
            step.check(batch)
        return step


_NOTEWORTHY = 2**20
"""Bytes on each device from which on arrays that no dim splits are warned of."""


def _warn_of_whole(step: TrainStep) -> None:
    """Warns of large arrays that a strategy would split and that no dim of theirs lets it.

    Small ones, which stay whole on purpose, are in `step.whole` and in `print(step)` alone.
    """
    rows = [row for row in step.whole if NO_DIM in row.decision.reason]
    size = sum(row.bytes for row in rows)
    if size < _NOTEWORTHY:
        return
    listed = [f"{row.path} {row.shape} ({byte_size(row.bytes)})" for row in rows]
    warn(
        f"{step.strategy.name} on mesh {step.world.spec} leaves {len(rows)} "
        f"array{'s' * (len(rows) > 1)} of {byte_size(size)} whole on every device, for each of "
        f"their dims is shorter than the number of shards: {first_few(listed)}. Split them over "
        "fewer devices, as hybrid_shard does, or see step.whole for all of them"
    )


def leaves_remat_open(step: TrainStep) -> bool:
    """Whether `remat="auto"` has to find out what a step recomputes.

    Not where its strategy says it, nor where it is not known how much memory a device has.

    Args:
        step: that recomputes what its strategy says.
    """
    strategy, world = step.strategy, step.world
    if strategy.remat is not None or strategy.pipeline is not None:
        return False
    return not world.is_cpu and not is_abstract(world) and knows_memory(world)


def _recomputing_least(build: Callable[..., TrainStep], batch: Batch | None) -> TrainStep:
    """The step that recomputes the least that fits; as its strategy says where that is not asked.

    Args:
        build: makes the step that recomputes what its keyword `remat` says.
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
