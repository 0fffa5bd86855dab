"""CPU-seconds of build + init + first step, against plain `jax.jit` of the same step.

    python -m benchmarks.separability [--layers 12] [--rounds 3]

What the builder traces to prove a step right, and to split it, is paid once per start. Every
program starts in a process of its own, without a compile cache; imports are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from axon_dist import World, build_train_step, compose, ddp, fsdp, pipelined
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import Strategy

DEVICES, BATCH, LENGTH = 4, 16, 32

STRATEGIES: dict[str, tuple[str, Callable[[], Strategy], str, float]] = {
    "ddp": ("dp=4", ddp, "plain", 1.2),
    "fsdp": ("fsdp=4", lambda: fsdp(min_elements=64), "plain, sharded", 2.0),
    "1f1b": ("pp=2,dp=2", lambda: compose(ddp(), pipelined(2, 4)), "plain", 2.0),
}
"""Mesh, strategy, what it is compared with, and the most that it may cost relative to that."""


def _model(layers: int) -> Callable[[], Transformer]:
    config = TransformerConfig(
        vocab_size=64, width=32, num_layers=layers, num_heads=4, max_length=LENGTH
    )
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


def _batch() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 64, (BATCH, LENGTH + 1))
    return {"tokens": tokens.astype(np.int32)}


def ours(name: str, layers: int) -> None:
    """Builds a step, makes its state, and takes one step."""
    mesh, make, *_ = STRATEGIES[name]
    world = World.emulate(DEVICES, mesh)
    step = build_train_step(
        _model(layers), optax.adamw(1e-3), next_token_loss, make(), world, batch=_batch()
    )
    _, metrics = step(step.init(), _batch())
    jax.block_until_ready(metrics)


def plain(layers: int, is_sharded: bool) -> None:
    """The same by hand: one jitted step over the whole batch, which XLA splits."""
    mesh = World.emulate(DEVICES, "dp=4").mesh
    tx, make = optax.adamw(1e-3), _model(layers)

    def init():
        pure = nnx.to_pure_dict(nnx.state(make()))
        return pure, tx.init(pure)

    graphdef, variables = nnx.split(nnx.eval_shape(make))

    def placed(x):
        dims = [n for n, size in enumerate(x.shape) if size % DEVICES == 0 and x.size >= 64]
        spec = ["dp" if is_sharded and dims and n == dims[0] else None for n in range(x.ndim)]
        return NamedSharding(mesh, PartitionSpec(*spec))

    def step(state, batch):
        params, opt_state = state

        def loss(params):
            nnx.replace_by_pure_dict(variables, params)
            returned = next_token_loss(nnx.merge(graphdef, variables), batch)
            of_all = returned[0] if isinstance(returned, tuple) else returned
            return of_all.total / of_all.weight

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    shardings = jax.tree.map(placed, jax.eval_shape(init))
    state = jax.jit(init, out_shardings=shardings)()
    batch = jax.device_put(_batch(), NamedSharding(mesh, PartitionSpec("dp")))
    run = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    jax.block_until_ready(run(state, batch)[1])


def _seconds(program: str, layers: int) -> float:
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.separability",
        "--one",
        program,
        "--layers",
        str(layers),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def main() -> int:
    """Measures in turn and prints the table; 1 where a median is beyond its bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        World.emulate(DEVICES)
        start, is_sharded = time.process_time(), given.one.endswith("sharded")
        if given.one.startswith("plain"):
            plain(given.layers, is_sharded)
        else:
            ours(given.one, given.layers)
        print(time.process_time() - start)
        return 0
    programs = [*STRATEGIES, "plain", "plain, sharded"]
    spent = [
        {program: _seconds(program, given.layers) for program in programs}
        for _ in range(given.rounds)
    ]
    columns = ("strategy", "CPU s", "plain jit", "ratio", "at most")
    table = Table(*columns, title=f"{given.layers} layers")
    ratios = {}
    for name, (_, _, other, most) in STRATEGIES.items():
        ratios[name] = statistics.median(round_[name] / round_[other] for round_ in spent)
        mine, hand = (statistics.median(round_[key] for round_ in spent) for key in (name, other))
        table.add_row(name, f"{mine:.2f}", f"{hand:.2f}", f"{ratios[name]:.2f}", str(most))
    Console().print(table)
    return int(any(ratios[name] > most for name, (*_, most) in STRATEGIES.items()))


if __name__ == "__main__":
    sys.exit(main())
