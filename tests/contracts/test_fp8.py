"""Products in fp8 on every kind of mesh equal the same products on one device."""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import MixedPrecision, World, build_train_step
from axon_dist.nn import ActivationCheckpointing
from axon_dist.ops.fp8 import Fp8Dot, Fp8Layers, fp8_layers
from axon_dist.parallel import Strategy, fsdp

from .models import SAMPLES, mean_square
from .reference import assert_close, train
from .rows import part
from .test_muon import ROWS as MUON_ROWS
from .test_muon import by_plan, case_of, samples_of, sharded

STEPS = 3
# All but the products is in float32, so only rounding to fp8 could differ.
POLICY = MixedPrecision(products="fp8")
RECOMPUTED = Strategy("remat", remat=ActivationCheckpointing())
ROWS = {name: row for name, row in MUON_ROWS.items() if name not in ("fsdp", "pp")}


@functools.cache
def expected(scan, accumulate, products=True, samples=SAMPLES):
    def in_fp8(model, batch):
        if products:
            Fp8Layers(Fp8Dot(), fp8_layers(model))(model)
        return mean_square(model, batch)

    case = dataclasses.replace(case_of(scan, samples), loss_fn=in_fp8)
    return train(case, optax.sgd(0.05, momentum=0.9), STEPS, accumulate)


@pytest.mark.full
@pytest.mark.parametrize("name", part(ROWS, ["pp x fsdp"]))
def test_fp8_equals_one_device(name):
    make, mesh, accumulate, scan = ROWS[name]
    samples = samples_of(mesh, accumulate)
    want = expected(scan, accumulate, samples=samples)
    case, strategy = case_of(scan, samples), make()
    world = World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)
    options = {} if strategy.pipeline else {"accumulate": accumulate}
    step = build_train_step(
        case.make(), optax.sgd(0.05, momentum=0.9), case.loss_fn, strategy, world,
        precision=POLICY, **options,
    )  # fmt: skip
    state = step.init()
    for number in range(STEPS):
        state, metrics = step(state, case.batch(number))
        # Sums in another order move a value across a rounding boundary now and then.
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-3)
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(trained, want.params, 3e-3, "parameter")


GATHERED = {
    "fsdp": (sharded, "fsdp=8", 1, False),
    "hybrid": (
        lambda: fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8),
        "dp=2,fsdp=4",
        2,
        True,
    ),
    "fsdp x tp": (lambda: sharded(by_plan()), "fsdp=2,tp=2", 1, False),
    "fsdp x tp scanned": (lambda: sharded(by_plan()), "fsdp=4,tp=2", 2, True),
    "remat": (lambda: sharded(RECOMPUTED), "fsdp=4", 1, False),
}
COMPUTES = {"float32": POLICY, "bfloat16": MixedPrecision.fp8()}


@pytest.mark.full
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("name", GATHERED)
def test_weights_that_travel_in_fp8_change_no_bit(name, compute):
    """The largest element of the parts is that of the whole, so both round to the same values."""
    make, mesh, accumulate, scan = GATHERED[name]
    case, want = case_of(scan), expected(scan, accumulate)
    world = World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)

    def trained(policy):
        step = build_train_step(
            case.make(), optax.sgd(0.05, momentum=0.9), case.loss_fn, make(), world,
            precision=policy, accumulate=accumulate,
        )  # fmt: skip
        state, losses = step.init(), []
        for number in range(STEPS):
            state, metrics = step(state, case.batch(number))
            losses.append(float(metrics["loss"]))
        losses.append(float(step.evaluate(state, case.batch(STEPS))["loss"]))
        text = step.lower(case.batch(0)).as_text()
        return losses, nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param)), text

    policy = COMPUTES[compute]
    losses, params, _ = plain = trained(policy)
    narrow = trained(dataclasses.replace(policy, gather="fp8"))
    assert narrow[0] == losses
    jax.tree.map(np.testing.assert_array_equal, narrow[1], params)
    assert ("ui8" in narrow[2], "ui8" in plain[2]) == (True, False)
    if compute == "float32":
        assert losses[:STEPS] == pytest.approx(want.losses, rel=1e-3)
        assert_close(params, want.params, 3e-3, "parameter")


@pytest.mark.full
def test_the_reference_rounds():
    wide = expected(False, 2, products=False)
    assert abs(wide.losses[-1] - expected(False, 2).losses[-1]) > 5e-3 * wide.losses[-1]
