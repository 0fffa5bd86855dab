"""Our steps against the same steps written by hand with `jax.jit` and `NamedSharding`.

    python -m benchmarks.step [--rows ddp shard_grad_op full_shard "full_shard remat"] [--rounds 5]

By hand weights are gathered once and stay whole until the backward pass has used them, as
shard_grad_op does; full_shard gathers them again there, and the program by hand does so where its
blocks are rematerialised. Prints CPU-seconds per step (the least of the rounds, the figure to trust
on a shared machine), the median wall time, their ratios, and the collectives of both programs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from axon_dist import ActivationCheckpointing, World, build_train_step, ddp, fsdp
from axon_dist.inspect import collectives
from axon_dist.models import Transformer, TransformerConfig, next_token_loss

from .timing import alternate

OURS, HAND = "axon_dist", "by hand"
SMALL = 1024
"""Leaves with fewer elements stay whole in both programs."""


class Recomputed(nnx.Module):
    """A block whose forward pass is run again in the backward pass."""

    def __init__(self, block: nnx.Module):
        self.block = block

    def __call__(self, *args: Any) -> Any:
        return nnx.remat(type(self.block).__call__)(self.block, *args)


def whole(leaf: jax.Array, size: int) -> PartitionSpec:
    """Every device has the leaf."""
    return PartitionSpec()


def split(leaf: jax.Array, size: int) -> PartitionSpec:
    """Every device has a slice of the longest dim that the devices divide."""
    dims = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % size == 0]
    if leaf.size < SMALL or not dims:
        return PartitionSpec()
    longest = max(dims, key=lambda dim: leaf.shape[dim])
    return PartitionSpec(*[None] * longest, "fsdp")


@dataclasses.dataclass(frozen=True)
class Row:
    """A strategy, and what an expert writes in its place.

    Args:
        axis: of the mesh, over all devices.
        strategy: ours.
        spec: a leaf and the number of devices -> where it lies, by hand.
        options: of `build_train_step`; with any, blocks are `Recomputed` by hand.
    """

    axis: str
    strategy: Callable[[], Any]
    spec: Callable[[jax.Array, int], PartitionSpec]
    options: MappingProxyType[str, Any] = MappingProxyType({})


SHARD_GRAD_OP = Row("fsdp", lambda: fsdp("shard_grad_op", min_elements=SMALL), split)
FULL_SHARD = Row("fsdp", lambda: fsdp(min_elements=SMALL), split)
REMAT = MappingProxyType({"remat": ActivationCheckpointing()})
ROWS = MappingProxyType(
    {
        "ddp": Row("dp", ddp, whole),
        "shard_grad_op": SHARD_GRAD_OP,
        "full_shard": FULL_SHARD,
        "full_shard remat": dataclasses.replace(FULL_SHARD, options=REMAT),
    }
)
"""What is measured, by name."""


def by_hand(
    model: Transformer, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh, row: Row
):
    """What an expert writes without a library: one jitted function over sharded arrays."""
    if row.options:
        model.blocks = nnx.List([Recomputed(block) for block in model.blocks])
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    place = lambda leaf: NamedSharding(mesh, row.spec(leaf, mesh.size))

    def loss_fn(params, batch):
        loss = next_token_loss(nnx.merge(graphdef, params, copy=True), batch)
        return loss.total / loss.weight

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.tree.map(lambda x: jax.device_put(x, place(x), may_alias=False), params)
    places = jax.tree.map(place, params)
    opt_places = jax.tree.map(place, jax.eval_shape(optimizer.init, params))
    opt_state = jax.jit(optimizer.init, out_shardings=opt_places)(params)
    out = (places, opt_places, NamedSharding(mesh, PartitionSpec()))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=out)
    return jitted, params, opt_state


def measure(name: str, devices: int, rounds: int, calls: int) -> tuple[Table, str]:
    """Times both programs of a row side by side."""
    row = ROWS[name]
    world = World.emulate(devices, f"{row.axis}={devices}")
    model = Transformer(TransformerConfig.preset("quickstart"), rngs=nnx.Rngs(0))
    optimizer = optax.adamw(1e-3)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 129)).astype(np.int32)

    step = build_train_step(
        model, optimizer, next_token_loss, row.strategy(), world, **dict(row.options)
    )
    placed = step.place({"tokens": tokens})
    ours = {"state": step.init()}
    jitted, params, opt_state = by_hand(model, optimizer, world.mesh, row)
    hand = {"state": (params, opt_state)}

    def run_ours():
        ours["state"], metrics = step(ours["state"], placed)
        return metrics["loss"]

    def run_by_hand():
        params, opt_state, loss = jitted(*hand["state"], placed.arrays)
        hand["state"] = (params, opt_state)
        return loss

    ledgers = {
        OURS: collectives(step.lower({"tokens": tokens}).compile(), world.mesh),
        HAND: collectives(jitted.lower(*hand["state"], placed.arrays).compile(), world.mesh),
    }
    timings = alternate({OURS: run_ours, HAND: run_by_hand}, rounds, calls)
    losses = {OURS: float(jnp.asarray(run_ours())), HAND: float(jnp.asarray(run_by_hand()))}

    table = Table(title=f"step of {name}, {devices} emulated devices")
    table.add_column("program")
    for column in (
        "CPU-s/step (min)",
        "wall (median)",
        "collectives",
        "wire MB",
        "loss",
    ):
        table.add_column(column, justify="right")
    for program, timing in timings.items():
        table.add_row(
            program,
            f"{timing.best_cpu:.3f}",
            f"{timing.median_wall:.3f}",
            f"{ledgers[program].num_executions()}",
            f"{ledgers[program].total_wire_bytes() / 1e6:.3f}",
            f"{losses[program]:.5f}",
        )
    same = ledgers[OURS].by_kind() == ledgers[HAND].by_kind()
    text = (
        f"ratio: CPU-seconds {timings[OURS].best_cpu / timings[HAND].best_cpu:.3f}, "
        f"median wall {timings[OURS].median_wall / timings[HAND].median_wall:.3f}; "
        f"collectives identical: {same}"
    )
    return table, text


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--devices", type=int, default=8)
    args = parser.parse_args()
    World.emulate(args.devices)
    console = Console()
    for name in args.rows:
        table, ratio = measure(name, args.devices, args.rounds, args.calls)
        console.print(table)
        console.print(ratio)


if __name__ == "__main__":
    main()
