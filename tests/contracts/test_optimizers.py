"""Groups, schedules, narrow moments, norms by layer and skipped spikes equal one device."""

import functools
import math

import numpy as np
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, zero
from axon_dist.optim import Spikes, watched
from axon_dist.parallel import fsdp, pipelined
from axon_dist.train.config.optimizers import AdamW, Group
from axon_dist.train.config.rates import WarmupStableDecay

from .models import Case, mean_square, regression_batch
from .reference import assert_close, norm_of, train
from .rows import part
from .test_muon import Tower

STEPS, SPIKE = 6, 4
ROWS = {
    "ddp": (ddp, "dp=4", False),
    "zero1": (lambda: zero(1, min_elements=8), "dp=4", False),
    "fsdp": (lambda: fsdp(min_elements=8), "fsdp=4", False),
    "fsdp scanned": (lambda: fsdp(min_elements=8), "fsdp=4", True),
    "pp": (lambda: pipelined(2, 2), "pp=2", False),
    "pp scanned": (lambda: pipelined(2, 2), "pp=2", True),
    "pp x fsdp": (
        lambda: compose(fsdp(min_elements=8), pipelined(2, 2)), "pp=2,fsdp=2", True,
    ),
}  # fmt: skip


def optimizer_of(scan):
    """Everything a config can say, on a model of two blocks and a head."""
    rows = AdamW(
        learning_rate=0.05,
        eps=0.1,  # far from the sign of the gradient, which hides factors
        schedule=WarmupStableDecay(warmup_steps=2, decay_fraction=0.5),
        momentum_dtype="float32",
        groups=(Group(paths=("head",), rate=0.3, weight_decay=0.5), Group(paths=("up",), rate=2)),
    )
    return rows.build(STEPS, lambda: Tower(scan))


def batch_of(number):
    """A batch like any other; but one has targets far away."""
    batch = regression_batch(number)
    return batch if number != SPIKE else {**batch, "y": batch["y"] + 100}


def case_of(scan, batch=batch_of):
    return Case(lambda: Tower(scan), mean_square, batch)


@functools.cache
def expected(scan):
    """One device, that never sees the spike."""
    optimizer = optimizer_of(scan)
    seen = [n for n in range(STEPS) if n != SPIKE]
    return train(case_of(scan, lambda n: batch_of(seen[n])), optimizer, STEPS - 1, 2)


@pytest.mark.full
@pytest.mark.sample("fsdp")
@pytest.mark.parametrize("name", part(ROWS, ["fsdp", "pp x fsdp"]))
def test_a_watched_optimizer_of_groups_equals_one_device_without_the_spike(name):
    make, mesh, scan = ROWS[name]
    case, want, strategy = case_of(scan), expected(scan), make()
    world = World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)
    optimizer = watched(
        optimizer_of(scan), spikes=Spikes(deviations=5, window=3), norms_by_layer=True
    )
    options = {} if strategy.pipeline else {"accumulate": 2}
    step = build_train_step(case.make(), optimizer, case.loss_fn, strategy, world, **options)
    state, seen = step.init(), []
    for number in range(STEPS):
        state, metrics = step(state, case.batch(number))
        seen.append({name: float(value) for name, value in metrics.items()})
    assert [row["spike"] for row in seen] == [float(n == SPIKE) for n in range(STEPS)]
    kept = [row for number, row in enumerate(seen) if number != SPIKE]
    np.testing.assert_allclose([row["loss"] for row in kept], want.losses, rtol=1e-5)
    for row, grads in zip(kept, want.grads, strict=True):
        assert row["grad_norm/head"] == pytest.approx(norm_of(grads["head"]), rel=1e-4)
        squares = sum(row[name] ** 2 for name in row if name.startswith("grad_norm/blocks"))
        assert math.sqrt(squares) == pytest.approx(norm_of(grads["blocks"]), rel=1e-4)
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(trained, want.params, 1e-5, "parameter")
