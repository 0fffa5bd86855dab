"""Proves the train step of a strategy, of this library or a user's, like any other program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
from flax import nnx
from jax.sharding import Mesh

from ..mesh import Backend, World
from ..parallel import Strategy
from ..step import build_train_step
from ..step.portable import PortableForm
from ..step.replicas import shared_metrics
from .check import Report, prove


def prove_strategy(
    make_model: Callable[[], nnx.Module],
    optimizer: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    strategy: Strategy | Callable[[], Strategy],
    batch: Any,
    meshes: Any,
    **options: Any,
) -> Report:
    """Proves the train step of a strategy: its loss and its parameters after one step.

    Args:
        make_model: makes the model, the same each time.
        optimizer: an optax optimizer.
        loss_fn: the loss, as for `build_train_step`.
        strategy: the strategy to prove, which may have user-defined parts, or a function that makes
            it.
        batch: arrays of the global batch.
        meshes: the real sizes, as for `prove`.
        **options: options of `build_train_step`.

    Returns:
        The report.
    """

    def make(mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        chosen = strategy if isinstance(strategy, Strategy) else strategy()
        world = World(mesh, Backend.EMULATED)
        step = build_train_step(
            make_model(), optimizer, loss_fn, chosen, world, batch=batch, **options
        )
        state, form = step.init(), PortableForm(step)

        def run(batch: Any) -> tuple[Any, Any]:
            after, metrics = step.programs.step(state, step.batch_layout.place(batch), None)
            if step.programs.outer_steps:
                metrics = shared_metrics(metrics)
            return metrics["loss"], form.to_canonical(after).params

        return run, (batch,)

    return prove(make, meshes=meshes, name="train step")
