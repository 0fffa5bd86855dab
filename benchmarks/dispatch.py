"""Host overhead per call of a tiny step against raw `jax.jit` of the same function.

    python -m benchmarks.dispatch [--calls 300] [--devices 8]

The step is so small that the time of a call is what the host spends on it.
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console

from axon_dist import DDP, World, build_train_step
from axon_dist.step.update import one_step

from .timing import alternate


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()

    world = World.emulate(args.devices)
    layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(index)) for index in range(args.layers)]
    model = nnx.Sequential(*layers)
    loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    step = build_train_step(model, optax.adam(1e-3), loss_fn, DDP(model, world.group("dp")), world)
    placed = step.place({"x": jnp.ones((8, 4))})

    raw = jax.jit(
        functools.partial(one_step, step.plan),
        donate_argnums=0,
        out_shardings=(step.state_shardings, None),
    )
    states = {"ours": step.init(), "raw": step.init()}

    def run(name, function):
        def call():
            states[name], metrics = function(states[name], placed)
            # Blocking each call keeps the queue of emulated devices out of the measurement.
            return jax.block_until_ready(metrics["loss"])

        return call

    timings = alternate(
        {"axon_dist": run("ours", step), "raw jit": run("raw", raw)}, args.rounds, args.calls
    )
    ours, hand = (min(timings[name].wall) * 1e6 for name in ("axon_dist", "raw jit"))
    Console().print(
        f"per call of a step with {args.layers} layers on {args.devices} devices: "
        f"axon_dist {ours:.0f} us, raw jit {hand:.0f} us; "
        f"ratio {ours / hand:.3f}, {ours - hand:+.0f} us"
    )


if __name__ == "__main__":
    main()
