"""Muon on every kind of mesh equals `optax.contrib.muon` on one device."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, hidden_matrices, muon, zero
from axon_dist.parallel import fsdp, pipelined, tensor_parallel

from .models import SAMPLES, Case, mean_square, regression_batch
from .reference import assert_close, train
from .rows import part

STEPS = 3
OPTIONS = {"ns_steps": 3, "consistent_rms": 0.2, "weight_decay": 0.1}


class Block(nnx.Module):
    """Two broad matrices, one of them on its side, and a square one."""

    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.mix = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x))) + self.mix(x)


class Tower(nnx.Module):
    """Blocks in a list, or stacked and scanned over, and a head."""

    def __init__(self, scan):
        rngs = nnx.Rngs(0)
        made = [nnx.Rngs(n) for n in range(2)]
        stacked = nnx.vmap(lambda rngs: Block(rngs))
        self.blocks = stacked(rngs.split(2)) if scan else nnx.List([Block(r) for r in made])
        self.head = nnx.Linear(16, 4, rngs=rngs)
        self.scan = scan

    def __call__(self, x):
        if self.scan:
            graph, rows = nnx.split(self.blocks)
            step = lambda x, row: (nnx.merge(graph, row, copy=True)(x), None)
            return self.head(jax.lax.scan(step, x, rows)[0])
        blocks: Any = self.blocks
        for block in blocks:
            x = block(x)
        return self.head(x)


def sharded(*parts):
    return compose(fsdp(min_elements=8), *parts)


def by_plan():
    return tensor_parallel({"up$": "column", "down$": "row"})


ROWS = {
    "ddp": (ddp, "dp=4", 1, False),
    "zero1": (lambda: zero(1, min_elements=8), "dp=4", 1, False),
    "zero2 accumulated": (lambda: zero(2, min_elements=8), "dp=4", 2, False),
    "fsdp": (sharded, "fsdp=4", 1, False),
    "fsdp accumulated": (sharded, "fsdp=4", 2, False),
    "fsdp scanned": (sharded, "fsdp=4", 1, True),
    "hybrid": (lambda: fsdp(axes=("fsdp",), min_elements=8), "dp=2,fsdp=2", 1, False),
    "tp": (by_plan, "tp=4", 1, False),
    "fsdp x tp": (lambda: sharded(by_plan()), "fsdp=2,tp=2", 1, False),
    "fsdp x tp scanned": (lambda: sharded(by_plan()), "fsdp=2,tp=2", 2, True),
    "pp": (lambda: pipelined(2, 2), "pp=2", 2, False),
    "pp x fsdp": (lambda: sharded(pipelined(2, 2)), "pp=2,fsdp=2", 2, False),
    "pp x fsdp scanned": (lambda: sharded(pipelined(2, 2)), "pp=2,fsdp=2", 2, True),
    # Shards of which no dim of a matrix divides.
    "fsdp of five": (sharded, "fsdp=5", 2, False),
    "zero1 of seven": (lambda: zero(1, min_elements=8), "dp=7", 2, False),
    "fsdp of three x tp": (lambda: sharded(by_plan()), "fsdp=3,tp=2", 1, False),
    "fsdp of three scanned": (sharded, "fsdp=3", 1, True),
    "pp x fsdp of three": (lambda: sharded(pipelined(2, 2)), "pp=2,fsdp=3", 2, False),
}


def samples_of(mesh, accumulate):
    """As many of the 32 samples as the ranks and microbatches divide."""
    axes = dict(axis.split("=") for axis in mesh.split(","))
    ranks = math.prod(int(n) for axis, n in axes.items() if axis not in ("tp", "pp"))
    return SAMPLES // (ranks * accumulate) * ranks * accumulate


@functools.cache
def expected(scan, accumulate, samples=SAMPLES):
    optimizer = optax.contrib.muon(
        0.05,
        muon_weight_dimension_numbers=hidden_matrices(lambda: Tower(scan)),
        **OPTIONS,
    )
    return train(case_of(scan, samples), optimizer, STEPS, accumulate)


def case_of(scan, samples=SAMPLES):
    def batch(step):
        return {name: leaf[:samples] for name, leaf in regression_batch(step).items()}

    return Case(lambda: Tower(scan), mean_square, batch)


@pytest.mark.parametrize("name", part(ROWS, ["pp x fsdp of three"]))
def test_muon_equals_one_device(name):
    make, mesh, accumulate, scan = ROWS[name]
    samples = samples_of(mesh, accumulate)
    case, want, strategy = case_of(scan, samples), expected(scan, accumulate, samples), make()
    world = World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)
    optimizer = muon(
        0.05,
        muon_weight_dimension_numbers=hidden_matrices(lambda: Tower(scan)),
        **OPTIONS,
    )
    options = {} if strategy.pipeline else {"accumulate": accumulate}
    step = build_train_step(case.make(), optimizer, case.loss_fn, strategy, world, **options)
    devices = world.size // (2 if strategy.pipeline else 1)
    assert len(step.plan.state_plan.update.distributions) == 2
    assert all(
        distribution.per_device == -(-distribution.count // devices)
        for distribution in step.plan.state_plan.update.distributions
    )
    state = step.init()
    for number in range(STEPS):
        state, metrics = step(state, case.batch(number))
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-5)
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(trained, want.params, 1e-5, "parameter")
