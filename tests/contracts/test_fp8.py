"""Products in fp8 on every kind of mesh equal the same products on one device."""

import functools
import math

import optax
import pytest
from flax import nnx

from axon_dist import MixedPrecision, World, build_train_step
from axon_dist.precision import Fp8Dot, Fp8Layers, fp8_layers

from .models import Case, mean_square, regression_batch
from .reference import assert_close, train
from .rows import part
from .test_muon import ROWS as MUON_ROWS
from .test_muon import Tower

STEPS = 3
# In float32 beside the products, rounding to fp8 is all that could differ.
POLICY = MixedPrecision(products="fp8")
ROWS = {name: row for name, row in MUON_ROWS.items() if name not in ("fsdp", "pp")}


def case_of(scan):
    return Case(lambda: Tower(scan), mean_square, regression_batch)


@functools.cache
def expected(scan, accumulate, products=True):
    def in_fp8(model, batch):
        if products:
            Fp8Layers(Fp8Dot(), fp8_layers(model))(model)
        return mean_square(model, batch)

    case = Case(lambda: Tower(scan), in_fp8, regression_batch)
    return train(case, optax.sgd(0.05, momentum=0.9), STEPS, accumulate)


@pytest.mark.parametrize("name", part(ROWS, ["pp x fsdp"]))
def test_fp8_equals_one_device(name):
    make, mesh, accumulate, scan = ROWS[name]
    case, want, strategy = case_of(scan), expected(scan, accumulate), make()
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


def test_the_reference_rounds():
    wide = expected(False, 2, products=False)
    assert abs(wide.losses[-1] - expected(False, 2).losses[-1]) > 5e-3 * wide.losses[-1]
