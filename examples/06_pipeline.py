"""Pipelines: an unmodified transformer cut into stages, under several schedules, with equal losses.

python examples/06_pipeline.py
"""

import dataclasses

import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import DDP, Pipeline, World, build_train_step, compose
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.schedule import summarize

config = dataclasses.replace(TransformerConfig.preset("tiny"), num_layers=4)
tokens = np.random.default_rng(0).integers(0, config.vocab_size, (16, 33)).astype(np.int32)


def train(strategy, world: World) -> list[float]:
    """Takes three steps and returns their losses."""
    model = Transformer(config, rngs=nnx.Rngs(0))
    step = build_train_step(model, optax.adamw(1e-3), next_token_loss, strategy, world)
    state, losses = step.init(), []
    for _ in range(3):
        state, metrics = step(state, {"tokens": tokens})
        losses.append(float(metrics["loss"]))
    return losses


def main() -> None:
    """Trains on one device, then in pipelines, and prints one table."""
    table = Table(title="one model, cut into stages")
    for column in ("mesh", "schedule", "bubble", "in flight", "losses"):
        table.add_column(column)
    show = lambda losses: "  ".join(f"{loss:.5f}" for loss in losses)
    world = World.emulate(4, "pp=2,dp=2")
    alone = World.emulate(1, "dp=1")
    model = Transformer(config, rngs=nnx.Rngs(0))
    table.add_row("dp=1", "", "", "", show(train(DDP(model, alone.group("dp")), alone)))
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_h1"):
        pipe = Pipeline(model, num_ranks=2, num_microbatches=4, schedule=schedule)
        row = summarize(pipe.schedule)
        losses = train(compose(pipe, DDP(model, world.group("dp"))), world)
        table.add_row(
            "pp=2, dp=2", schedule, f"{row.bubble:.1%}", f"{row.peak_live:g}", show(losses)
        )
    Console().print(table)


if __name__ == "__main__":
    main()
