"""Replicas over a slow axis equal their simulation, one after the other on one device."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, zero
from axon_dist.parallel import (
    context_parallel,
    diloco,
    fsdp,
    local_sgd,
    suggest_plan,
    tensor_parallel,
)
from tests.drawn import drawn

from . import models
from .models import Case
from .reference import METRICS, assert_close, assert_metrics
from .replicas import simulate

NUM_STEPS = 6
CASES: dict[str, Case] = models.CASES
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(1e-2, eps=1e-4),
}
OUTER = {
    "plain": lambda: optax.sgd(1.0),
    "nesterov": lambda: optax.sgd(0.7, momentum=0.9, nesterov=True),
}
WITHIN = {
    "alone": lambda model: (),
    "ddp": lambda model: (ddp(),),
    "zero1": lambda model: (zero(1, min_elements=8),),
    "fsdp": lambda model: (fsdp(min_elements=8),),
    "hsdp": lambda model: (fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8),),
    "fsdp x tp": lambda model: (fsdp(min_elements=8), tensor_parallel(suggest_plan(model))),
    "ddp x cp": lambda model: (ddp(), context_parallel()),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    within: str
    mesh: str
    model: str
    every: int
    optimizer: str = "sgd"
    outer: str = "nesterov"
    accumulate: int = 1

    def __str__(self) -> str:
        return "-".join(map(str, dataclasses.astuple(self)))


ROWS = [
    Row("fsdp", "nodes=2,fsdp=2", "mlp", 1),
    Row("ddp", "nodes=2,dp=2", "weighted", 2, "sgd", "nesterov", 2),
    Row("fsdp", "nodes=2,fsdp=2", "batchnorm", 4),
]
FULL = [
    Row("alone", "nodes=4", "mlp", 2, "adam"),
    Row("fsdp", "nodes=2,fsdp=2", "mlp", 4, "adam"),
    Row("ddp", "nodes=2,dp=2", "dropout", 2, "sgd", "plain", 2),
    *(
        Row("fsdp", "nodes=2,fsdp=4", "mlp", every, optimizer, outer, k)
        for every in (1, 2, 4)
        for optimizer in OPTIMIZERS
        for outer in OUTER
        for k in (1, 2)
    ),
    *(Row("fsdp", "nodes=2,fsdp=4", model, 2) for model in models.CASES),
    *(Row("ddp", "nodes=4,dp=2", model, 4, "sgd", "nesterov", 2) for model in models.CASES),
    Row("zero1", "nodes=2,dp=4", "mlp", 2, "adam"),
    Row("hsdp", "nodes=2,dp=2,fsdp=2", "weighted", 2),
    Row("fsdp x tp", "nodes=2,fsdp=2,tp=2", "transformer", 2),
    Row("fsdp x tp", "nodes=2,fsdp=2,tp=2", "transformer", 4, "sgd", "nesterov", 2),
    Row("ddp x cp", "nodes=2,dp=2,cp=2", "transformer", 2),
]


@functools.cache
def expected(model, every, optimizer, outer, replicas, accumulate):
    """The simulation, shared by every row that it is the oracle of."""
    made = OPTIMIZERS[optimizer](), OUTER[outer]()
    return simulate(CASES[model], *made, every, replicas, NUM_STEPS, accumulate)


def world_of(mesh):
    return World.emulate(math.prod(int(part.split("=")[1]) for part in mesh.split(",")), mesh)


@pytest.mark.sample("fsdp-nodes=2,fsdp=2-mlp-1-sgd-nesterov-1")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_replicas_one_after_the_other(row):
    check(row)


@pytest.mark.full
@pytest.mark.parametrize("row", FULL, ids=str)
def test_equals_replicas_one_after_the_other_full(row):
    check(row)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:BatchNorm at")
def test_a_metric_that_is_a_function_of_sums_with_batch_norm_and_microbatches():
    """Both replicas have the same samples, and so the same loss: the metric is that of each."""
    case, every, world = CASES["batchnorm"], 2, world_of("nodes=2,dp=2")
    case = dataclasses.replace(case, make=lambda make=case.make: drawn(make))
    twice = lambda number: jax.tree.map(lambda x: np.tile(x, (2, 1)), case.batch(number))

    def loss_fn(model, batch):
        loss = case.loss_fn(model, batch)
        return loss, {"perplexity": jnp.exp(loss)}

    made = OPTIMIZERS["sgd"](), OUTER["plain"]()
    same = dataclasses.replace(case, batch=twice)
    want = simulate(same, *made, every, replicas=2, num_steps=3, accumulate=2)
    slow = diloco("nodes", every=every, outer=OUTER["plain"]())
    step = build_train_step(
        case.make(), made[0], loss_fn, compose(slow, ddp()), world, accumulate=2
    )
    state = step.init()
    for number in range(3):
        state, metrics = step(state, twice(number))
        loss = float(metrics["loss"])
        assert loss == pytest.approx(want.losses[number], rel=1e-5)
        assert float(metrics["perplexity"]) == pytest.approx(math.exp(loss), rel=1e-5)
    assert_close(state.params, want.params, 1e-5, "parameter")


def check(row):
    """Runs one row and compares everything with the simulation."""
    case, world = CASES[row.model], world_of(row.mesh)
    replicas = world.mesh.shape["nodes"]
    want = expected(row.model, row.every, row.optimizer, row.outer, replicas, row.accumulate)
    model = case.make()
    slow = diloco("nodes", every=row.every, outer=OUTER[row.outer]())
    step = build_train_step(
        model,
        OPTIMIZERS[row.optimizer](),
        case.loss_fn,
        compose(slow, *WITHIN[row.within](model)),
        world,
        accumulate=row.accumulate,
        metrics=METRICS,
    )
    state = step.init()
    for number in range(NUM_STEPS):
        state, metrics = step(state, case.batch(number))
        assert_metrics(metrics, want.metrics[number], f"step {number}")
    assert_close(state.params, want.params, 1e-5, "parameter")
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(trained, want.buffers["common"], 1e-5, "outer parameter")
    for number, own in enumerate(want.buffers["own"]):
        row_of = jax.tree.map(lambda x, number=number: x[number], state.buffers)
        assert_close(row_of, own, 1e-5, f"buffer of replica {number}")


@pytest.mark.full
def test_fragments_synchronize_at_their_own_steps():
    case, world = CASES["mlp"], world_of("nodes=2,fsdp=2")
    outer = lambda: OUTER["nesterov"]()
    slow = diloco("nodes", every=4, outer=outer(), fragments=2)
    step = build_train_step(
        case.make(), optax.sgd(0.05), case.loss_fn, compose(slow, fsdp(min_elements=8)), world
    )
    # The first layer is the larger half of the parameters.
    is_first = lambda path: path[1].key == 0
    fragments = [(2, is_first), (0, lambda path: not is_first(path))]
    want = simulate(case, optax.sgd(0.05), outer(), 4, 2, NUM_STEPS, fragments=fragments)
    state = step.init()
    for number in range(NUM_STEPS):
        state, metrics = step(state, case.batch(number))
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-5)
    assert_close(state.params, want.params, 1e-5, "parameter")
    assert_close(state.outer, want.buffers["common"], 1e-5, "outer parameter")


@pytest.mark.full
@pytest.mark.sample("local_sgd")
@pytest.mark.parametrize(
    "slow",
    [lambda: diloco("nodes", every=1, outer=optax.sgd(1.0)), lambda: local_sgd("nodes", every=1)],
    ids=["diloco", "local_sgd"],
)
def test_an_outer_step_after_every_step_is_data_parallelism(slow):
    case = CASES["mlp"]
    made = lambda strategy, mesh: build_train_step(
        case.make(), optax.sgd(0.1), case.loss_fn, strategy, world_of(mesh)
    )
    ours = made(compose(slow(), fsdp(min_elements=8)), "nodes=2,fsdp=2")
    plain = made(ddp(), "dp=4")
    one, other = ours.init(), plain.init()
    for number in range(3):
        one, metrics = ours(one, case.batch(number))
        other, expected_ = plain(other, case.batch(number))
        assert_metrics(metrics, jax.device_get(expected_), f"step {number}")
    trained = nnx.to_pure_dict(nnx.state(ours.merge(one), nnx.Param))
    assert_close(trained, other.params, 1e-5, "parameter")
    found, want = ours.evaluate(one, case.batch(9)), plain.evaluate(other, case.batch(9))
    assert_metrics(found, jax.device_get(want), "evaluation")
