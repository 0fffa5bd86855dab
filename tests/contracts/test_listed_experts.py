"""Experts that a model keeps in a list equal one device, split over `ep` beside all else."""

import functools
import math

import optax
import pytest

from axon_dist import Strategy, World, build_train_step, compose, ddp, zero
from axon_dist.checkpoint import load_checkpoint, save_checkpoint
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import (
    context_parallel,
    expert_parallel,
    fsdp,
    suggest_plan,
    tensor_parallel,
)
from axon_dist.step.canonical import PortableForm

from .listed import MIXES, listed
from .reference import METRICS, assert_close, assert_metrics, assert_trained_alike, train
from .rows import part

STEPS = 3
REMAT = Strategy("remat", remat=ActivationCheckpointing())
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2, eps=1e-4),
    "lamb": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2, eps=1e-3)),
}


def plan(mix="loop"):
    return suggest_plan(listed(mix).make)


def ep(*args, mix="loop"):
    return expert_parallel(*args, experts=plan(mix).experts)


def split(**options):
    return fsdp(min_elements=8, **options)


LISTED = expert_parallel(experts=[("experts$", None)])
ATTENDS = "loop, attends"

ROWS = {
    # name: (mesh, strategy, microbatches, optimizer, how results are added up)
    **{mix: ("ep=4", lambda mix=mix: ep(mix=mix), 1, "sgd", mix) for mix in MIXES},
    "two each": ("ep=2", lambda: ep("ring"), 2, "adam", "chosen"),
    "dp": ("dp=2,ep=2", lambda: compose(ddp(), ep()), 2, "sgd", "stacked"),
    "dp inside": ("ep=2,dp=2", lambda: compose(ep(), ddp()), 1, "sgd", "flat"),
    "norms of leaves": ("dp=2,ep=2", lambda: compose(ddp(), ep()), 1, "lamb", "loop"),
    "zero1": ("dp=2,ep=2", lambda: compose(zero(1, min_elements=8), ep()), 2, "adam", "loop"),
    "zero2": ("dp=2,ep=2", lambda: compose(zero(2, min_elements=8), ep()), 2, "sgd", "loop"),
    "fsdp": ("fsdp=2,ep=2", lambda: compose(split(), ep()), 2, "adam", "chosen"),
    "fsdp, remat": ("fsdp=2,ep=2", lambda: compose(split(), ep(), REMAT), 1, "sgd", "picked"),
    "hybrid": (
        "dp=2,fsdp=2,ep=2",
        lambda: compose(
            split(sharding_strategy="hybrid_shard", axes=("dp", "fsdp")),
            ep(),
        ),
        1,
        "sgd",
        "loop",
    ),
    "cp": ("ep=2,cp=2", lambda: compose(LISTED, context_parallel("ulysses")), 1, "sgd", ATTENDS),
    "tp": ("ep=2,tp=2", lambda: compose(ep(), tensor_parallel(plan())), 1, "sgd", "loop"),
    "tp, sequence": (
        "ep=2,tp=2",
        lambda: compose(ep(), tensor_parallel(plan(), sequence=True)),
        2,
        "sgd",
        "chosen",
    ),
    "fsdp, tp": (
        "fsdp=2,ep=2,tp=2",
        lambda: compose(split(), ep(), tensor_parallel(plan())),
        2,
        "adam",
        "stacked",
    ),
}


def case_of(mix):
    return listed("loop", attends=True) if mix == ATTENDS else listed(mix)


@functools.cache
def expected(mix, accumulate, optimizer):
    return train(case_of(mix), OPTIMIZERS[optimizer](), STEPS, accumulate)


def world_of(mesh):
    return World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)


@pytest.mark.parametrize("name", part(ROWS, ["fsdp, remat"]))
def test_equals_one_device(name):
    mesh, strategy, accumulate, optimizer, mix = ROWS[name]
    case = case_of(mix)
    step = build_train_step(
        case.make,
        OPTIMIZERS[optimizer](),
        case.loss_fn,
        strategy(),
        world_of(mesh),
        accumulate=accumulate,
        metrics=METRICS,
    )
    assert_trained_alike(step, case, expected(mix, accumulate, optimizer))


@pytest.mark.full
def test_a_checkpoint_goes_on_with_other_ranks_and_with_none(tmp_path):
    case, optimizer = listed("loop"), OPTIMIZERS["adam"]
    build = lambda strategy, mesh: build_train_step(
        case.make, optimizer(), case.loss_fn, strategy, world_of(mesh), metrics=METRICS
    )
    want = expected("loop", 1, "adam")
    one = build(compose(split(), ep()), "fsdp=2,ep=2")
    state, _ = one(one.init(), case.batch(0))
    save_checkpoint(tmp_path / "c", PortableForm(one).of(state))
    for strategy, mesh in ((ep(), "ep=4"), (ddp(), "dp=4")):
        other = build(strategy, mesh)
        form = PortableForm(other)
        state = form.take_up(load_checkpoint(tmp_path / "c", form.target))
        for number in range(1, STEPS):
            state, metrics = other(state, case.batch(number))
            assert_metrics(metrics, want.metrics[number], f"step {number}")
        assert_close(other.storage.to_model(state.params), want.params, 1e-5, "parameter")


@pytest.mark.full
def test_a_loss_of_an_evaluation_is_that_of_the_model():
    case = listed("chosen")
    step = build_train_step(
        case.make, optax.sgd(0.1), case.loss_fn, ep(mix="chosen"), world_of("ep=4"), ema=0.5
    )
    state, _ = step(step.init(), case.batch(0))
    found = float(step.evaluate(state, case.batch(1))["loss"])
    model = step.merge(state)
    assert found == pytest.approx(float(case.loss_fn(model, case.batch(1))), rel=1e-5)
    assert model.blocks[1].experts[3].up.kernel.shape == (16, 32)


@pytest.mark.full
def test_fp8_is_near_one_device():
    case, losses = listed("loop"), []
    for strategy, mesh in ((ddp(), "dp=1"), (compose(ddp(), ep()), "dp=2,ep=2")):
        step = build_train_step(
            case.make, optax.sgd(0.1), case.loss_fn, strategy, world_of(mesh), precision="fp8"
        )
        state = step.init()
        for number in range(2):
            state, metrics = step(state, case.batch(number))
        losses.append(float(metrics["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.full
def test_bf16_is_near_one_device():
    case = listed("loop")
    step = build_train_step(
        case.make,
        OPTIMIZERS["sgd"](),
        case.loss_fn,
        compose(split(), ep(), tensor_parallel(plan())),
        world_of("fsdp=2,ep=2,tp=2"),
        precision="bf16",
    )
    state, want = step.init(), expected("loop", 1, "sgd")
    for number in range(STEPS):
        state, metrics = step(state, case.batch(number))
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=2e-2)
