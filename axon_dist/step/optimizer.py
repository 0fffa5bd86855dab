"""The optimizer of a step, in the form that its state has."""

from __future__ import annotations

from typing import Any

import optax
from jax.sharding import Mesh

from ..pipeline.optimizer import StagedOptimizer
from .parts import ModelParts
from .storage import Storage


def optimizer_for(
    optimizer: optax.GradientTransformation, parts: ModelParts, storage: Storage, mesh: Mesh
) -> Any:
    """The optimizer for the stored form of a model's parameters."""
    if storage.rows is None:
        return optax.with_extra_args_support(optimizer)
    return StagedOptimizer(optimizer, storage.rows, mesh)
