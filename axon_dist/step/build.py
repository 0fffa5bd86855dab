"""`build_train_step`: the one place where a training step is put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax
from flax import nnx

from ..core.modules import stacks_of
from ..core.typing import Batch, LossFn, OptionValue, Trainable
from ..mesh import World
from ..nn import ActivationCheckpointing
from ..ops.precision import GradScaler, MixedPrecision
from ..parallel import (
    HasStrategy,
    Reduction,
    Strategy,
    as_strategy,
    compose,
    overlay,
    per_layer,
    with_masters,
)
from ..sharding import FromMetadata, annotations_of
from .batch import unwrapped
from .buffers import warn_of_statistics
from .options import StepOptions, check_arguments, is_told_step
from .parts import ModelLike, ModelParts, stored_as, take_apart
from .replicas import form_of
from .rules import check_rules
from .spec import StepSpec
from .state import Nonfinite, nonfinite_policy
from .step import TrainStep


def strategy_for(
    parts: ModelParts,
    strategy: Strategy,
    precision: MixedPrecision | str | bool | None,
    remat: ActivationCheckpointing | None,
) -> Strategy:
    """The strategy with everything said: precision, remat, reduction, and the model's own layouts.

    Without a precision the gradients have the dtype of the parameters, on the wire too.

    Args:
        parts: the model, whose variables may say how they are split, and whose layers may be
            stacked.
        strategy: what the user gave.
        precision: what the step was asked for, or None.
        remat: likewise.

    Returns:
        The strategy.

    Raises:
        StrategyConflictError: when strategy and step say different things.
    """
    asked = Strategy(
        "build_train_step",
        precision=None if precision is None else MixedPrecision.of(precision),
        remat=remat,
    )
    merged = dataclasses.replace(compose(strategy, asked), name=strategy.name)
    chosen = dataclasses.replace(merged, reduction=_reduction(merged, parts.dtype))
    if annotations := annotations_of(parts.abstract):
        chosen = overlay(chosen, FromMetadata(annotations))
    chosen = per_layer(chosen, frozenset(stacks_of(parts.abstract)))
    stored = parts.dtype if chosen.precision is None else chosen.precision.param
    return with_masters(chosen, parts.frozen_paths, stored)


def _reduction(strategy: Strategy, dtype: Any) -> Reduction:
    said = strategy.reduction or Reduction()
    own = dtype if strategy.precision is None else strategy.precision.reduce_dtype
    return dataclasses.replace(said, per=strategy.reduces_per, dtype=said.dtype or own)


def build_train_step(
    model: ModelLike,
    optimizer: optax.GradientTransformation,
    loss_fn: LossFn,
    strategy: Strategy | HasStrategy,
    world: World,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    precision: MixedPrecision | str | bool | None = None,
    remat: ActivationCheckpointing | None = None,
    scaler: GradScaler | None = None,
    metrics: tuple[str, ...] = ("loss",),
    nonfinite: Nonfinite | str | None = None,
    deterministic: bool = False,
    pad: str | None = None,
    compiler_options: Mapping[str, OptionValue | None] | None = None,
    batch: Batch | None = None,
    separable: bool | None = None,
    eval_kwargs: Mapping[str, Any] | None = None,
    trainable: Trainable = nnx.Param,
    frozen_dtype: Any = None,
    ema: float | None = None,
    unroll: int | None = None,
) -> TrainStep:
    """Builds one jitted step that equals the same model on one device.

    The step computes, whatever the mesh,

        loss, grads = value_and_grad(loss_fn)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
        params = params + updates

    Args:
        model: an NNX module, or a zero-argument function that makes one; the arrays of the
            latter are born sharded.
        optimizer: any optax transformation; one that looks at the loss gets it as `value`.
        loss_fn: `loss_fn(model, batch)` giving a scalar mean or `Weighted`, alone or with a dict
            of scalar metrics. One that has to be given a `step`, `loss_fn(model, batch, step)`, is
            told how many steps have been taken, an int32 scalar.
        strategy: a `Strategy`, or a wrapper such as `DDP` that makes one.
        world: the devices, and the mesh they form.
        accumulate: K microbatches per step; with a pipeline its own number.
        clip_norm: the largest global norm of the gradient.
        precision: dtypes, a preset's name (`"bf16"`, `"fp16"`), or True, where the strategy does
            not say.
        remat: what the backward pass recomputes, where the strategy does not say.
        scaler: the loss scale; float16 compute has one by default.
        metrics: which numbers a step reports.
        nonfinite: `"stop"`, `"skip"` or `"rollback"` makes a step whose loss or gradient is not
            finite keep the state, on all devices, and say so in its metric `nonfinite`; a `Trainer`
            then does what it says. None updates whatever comes, as plain JAX does.
        deterministic: compiles for the same bits in every run, which may be slower on GPUs; see
            `deterministic_options`.
        pad: the leaf of the batch that weighs samples: batches that do not divide are filled up
            with samples of weight 0 (`Padding`), and it is proven of the program that these change
            neither the loss nor a metric nor a buffer; else the step is refused. None refuses
            batches that do not divide.
        compiler_options: what XLA is told beside and over the options of the chip, which
            `hardware.HARDWARE` lists and which make collectives fewer and hidden; the value None
            takes one of them away. Every program of the step is compiled with them, and what
            `lower(batch).compile()` shows is what runs.
        batch: a global batch, as arrays or `jax.ShapeDtypeStruct`s, for which the step is traced:
            then also what only a batch can show is refused here, rather than by the first call.
            Its leaves have shape [B, ...]; what belongs to no sample stands in a `Shared`.
        separable: True promises that the loss of a batch is the (weighted) mean of those of its
            parts, False that it is not. None reads it from the program of the loss: a mean, a sum
            and `Weighted` have the value of the whole batch however it is cut, and a loss that
            couples samples is computed in global view, averaged over microbatches. A metric that
            couples them beside a loss that does not is refused where there are microbatches.
        eval_kwargs: what `evaluate` gives the call of the model in place of its own arguments, such
            as `{"deterministic": True}`. Modules of NNX are told by `eval()`, and bridged Linen
            modules, with the layers of Linen in them, as `evaluation` says; tell models of yours
            here that must know otherwise.
        trainable: what of the model is trained: a type of Variable such as `nnx.LoRAParam`, a
            regular expression of paths such as `"head"`, a predicate `(keys, variable)` or another
            filter of nnx, or a tuple of these. The step then equals `nnx.Optimizer(model,
            optimizer, wrt=trainable)` with the gradient of `nnx.DiffState(0, trainable)`. Every
            other `nnx.Param` is frozen: it is laid out as the strategy lays out parameters, and
            has no gradient, no moments, and no part in norms.
        frozen_dtype: the dtype that frozen parameters are kept in, such as `"bfloat16"`; None
            keeps each in its own. `"int8"` keeps matrices as whole numbers with a bfloat16 scale
            for each output (`precision.int8_form` says of which), and vectors in their own: the
            step equals the model with `int8 * scale` in their place, in their own dtype. They lie
            and travel as eight bits and are widened in the block that reads them; within bridged
            Linen modules they are widened before they travel. Not for pipelines.
        ema: the decay of a moving average of the trained parameters, which the state then keeps,
            `ema = decay * ema + (1 - decay) * params` after every update, from the first
            parameters on; `evaluate` and `merge` take it by `ema=True`, and a `Trainer` validates
            it.
        unroll: where a strategy splits or recomputes blocks, and these call each other, they run
            as one loop, which is compiled once. Up to so many are written out instead: each is
            compiled by itself, and what it keeps for its backward pass goes on no stack. None is 4,
            and 1 where blocks are recomputed, loop themselves, or microbatches are added up. It
            changes no number.

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
    check_arguments(optimizer, loss_fn, world, remat, strategy, model)
    parts, source = take_apart(model, trainable)
    chosen = strategy_for(parts, as_strategy(strategy), precision, remat)
    if scaler is None and chosen.precision is not None and chosen.precision.needs_scaling:
        scaler = GradScaler()
    policy = nonfinite_policy(nonfinite)
    options = StepOptions(
        accumulate=accumulate,
        clip_norm=clip_norm,
        metrics=metrics,
        scaler=scaler,
        nonfinite=policy,
        deterministic=deterministic,
        pad=pad,
        compiler_options=compiler_options,
        separable=separable,
        eval_kwargs=eval_kwargs,
        ema=ema,
        unroll=unroll,
    )
    parts = dataclasses.replace(parts, reads_step=is_told_step(loss_fn))
    parts, source = stored_as(parts, source, chosen.precision, frozen_dtype)
    extended = optax.with_extra_args_support(optimizer)
    example = None if batch is None else unwrapped(batch)
    spec = StepSpec(parts, loss_fn, extended, chosen, world, options, batch=example)
    check_rules(spec)
    warn_of_statistics(parts.abstract, spec.num_microbatches)
    step = TrainStep(spec, form_of(spec, source))
    if batch is not None:
        step.check(batch)
    return step
