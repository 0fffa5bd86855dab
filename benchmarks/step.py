"""Our DDP step against the same step written by hand with `jax.jit` and `NamedSharding`.

    python -m benchmarks.step [--rounds 5] [--calls 4] [--devices 8]

Prints CPU-seconds per step (the least of the rounds, the figure to trust on a shared machine), the
median wall time, their ratios, and the collectives of both compiled programs.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from axon_dist import DDP, World, build_train_step
from axon_dist.inspect import collectives
from axon_dist.models import Transformer, TransformerConfig, next_token_loss

from .timing import alternate


def by_hand(model: nnx.Module, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh):
    """What an expert writes without a library: one jitted function over sharded arrays."""
    graphdef, params = nnx.split(model)
    params = nnx.to_pure_dict(params)
    whole = NamedSharding(mesh, PartitionSpec())

    def loss_fn(params, batch):
        loss = next_token_loss(nnx.merge(graphdef, params, copy=True), batch)
        return loss.total / loss.weight

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.tree.map(lambda x: jax.device_put(x, whole, may_alias=False), params)
    opt_state = jax.jit(optimizer.init, out_shardings=whole)(params)
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(whole, whole, whole))
    return jitted, params, opt_state


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--devices", type=int, default=8)
    args = parser.parse_args()

    world = World.emulate(args.devices)
    model = Transformer(TransformerConfig.preset("quickstart"), rngs=nnx.Rngs(0))
    optimizer = optax.adamw(1e-3)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 129)).astype(np.int32)

    step = build_train_step(model, optimizer, next_token_loss, DDP(model, world.group("dp")), world)
    placed = step.place({"tokens": tokens})
    jitted, params, opt_state = by_hand(model, optimizer, world.mesh)
    ours = {"state": step.init()}
    hand = {"state": (params, opt_state)}

    def run_ours():
        ours["state"], metrics = step(ours["state"], placed)
        return metrics["loss"]

    def run_by_hand():
        params, opt_state, loss = jitted(*hand["state"], placed.arrays)
        hand["state"] = (params, opt_state)
        return loss

    ledgers = {
        "axon_dist": collectives(step.lower({"tokens": tokens}).compile(), world.mesh),
        "by hand": collectives(jitted.lower(*hand["state"], placed.arrays).compile(), world.mesh),
    }
    timings = alternate({"axon_dist": run_ours, "by hand": run_by_hand}, args.rounds, args.calls)
    losses = [float(jnp.asarray(run())) for run in (run_ours, run_by_hand)]

    table = Table(title=f"DDP step, {args.devices} emulated devices")
    for column in (
        "program",
        "CPU-s/step (min)",
        "wall (median)",
        "collectives",
        "wire MB",
        "loss",
    ):
        table.add_column(column, justify="left" if column == "program" else "right")
    for (name, timing), loss in zip(timings.items(), losses, strict=True):
        ledger = ledgers[name]
        table.add_row(
            name,
            f"{timing.best_cpu:.3f}",
            f"{timing.median_wall:.3f}",
            f"{ledger.num_executions()}",
            f"{ledger.total_wire_bytes() / 1e6:.3f}",
            f"{loss:.5f}",
        )
    console = Console()
    console.print(table)
    first, second = timings["axon_dist"], timings["by hand"]
    same = ledgers["axon_dist"].by_kind() == ledgers["by hand"].by_kind()
    console.print(
        f"ratio: CPU-seconds {first.best_cpu / second.best_cpu:.3f}, "
        f"median wall {first.median_wall / second.median_wall:.3f}; "
        f"collectives identical: {same}"
    )


if __name__ == "__main__":
    main()
