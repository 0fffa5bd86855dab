"""The strategy of a step, with nothing left unsaid about the model that it is for."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..nn import ActivationCheckpointing
from ..ops.precision import MixedPrecision
from ..parallel import Reduction, Strategy, compose, overlay, per_layer, with_masters
from ..program import stacks_of
from ..sharding import FromMetadata, annotations_of
from .parts import ModelParts


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
