"""Emulated devices survive loops that never wait, ours and the user's own."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import build_train_step, ddp


@pytest.mark.parametrize(("limit", "waited"), [(2, [0, 1, 2]), (4, [0]), (5, [])])
def test_the_oldest_is_waited_for(world, limit, waited, monkeypatch):
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    loss = lambda m, b: jnp.mean(m(b["x"]) ** 2)
    step = build_train_step(model, optax.sgd(0.1), loss, ddp(), world)
    state, batch, losses, log = step.init(), {"x": np.ones((8, 2), np.float32)}, [], []
    monkeypatch.setattr("axon_dist.step.step.STEPS_IN_FLIGHT", limit)
    monkeypatch.setattr(jax, "block_until_ready", log.append)
    for _ in range(5):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    assert [losses.index(loss) for loss in log] == waited


OURS = """
    import jax.numpy as jnp, numpy as np, optax
    from axon_dist import World, build_train_step, ddp
    from flax import nnx
    world = World.emulate(8)
    loss = lambda m, b: jnp.mean(m(b["x"]) ** 2)
    step = build_train_step(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(.1), loss, ddp(), world)
    batch = step.place({"x": np.ones((8, 2), np.float32)})
    state = step.init()
    for _ in range(2000):
        state, metrics = step(state, batch)
    print(int(state.step))
"""
THEIRS = """
    import jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    from axon_dist import World
    world = World.emulate(8)
    body = lambda x: x + jax.lax.psum(x, "dp") / 16
    step = jax.jit(jax.shard_map(body, mesh=world.mesh, in_specs=P("dp"), out_specs=P("dp")))
    x, count = jnp.ones(8), 0
    for count in range(1, 2001):
        x = step(x) / 1.5
    x.block_until_ready()
    print(count)
"""


@pytest.mark.full
@pytest.mark.parametrize("program", [OURS, THEIRS], ids=["our step", "a psum of their own"])
def test_two_thousand_steps_without_a_wait(program):
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=240,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["2000"]
