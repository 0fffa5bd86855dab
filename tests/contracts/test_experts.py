"""Mixtures of experts: every way to split them equals one device, gradients of experts times one."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Strategy, World, build_train_step, compose, ddp, zero
from axon_dist.models import ExpertConfig, next_token_loss
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import context_parallel, expert_parallel, fsdp, tensor_parallel

from .models import Case, token_batch, transformer
from .reference import METRICS, assert_close, assert_metrics, of_loss, train
from .rows import part

STEPS = 3
SIZES = {"width": 16, "ffn_width": 16, "vocab_size": 32, "max_length": 16, "num_layers": 2}
EXPERTS = {"count": 8, "shared": 1, "balance": 0.1, "z_loss": 0.01, "bias_rate": 0.01}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(1e-2, eps=1e-4),
}
REMAT = Strategy("remat", remat=ActivationCheckpointing())


def tp(sequence=False):
    return tensor_parallel("transformer", sequence=sequence)


def split(**options):
    return fsdp(min_elements=8, **options)


ROWS = {
    # name: (mesh, strategy, microbatches, optimizer, changes of the model, of its experts)
    "ep": ("ep=4", lambda: expert_parallel(), 1, "sgd", {}, {}),
    "ring": ("dp=2,ep=2", lambda: compose(ddp(), expert_parallel("ring")), 1, "sgd", {}, {}),
    "slots": (
        "dp=2,ep=2",
        lambda: compose(ddp(), expert_parallel("all_to_all")),
        1,
        "adam",
        {},
        {"balance_per": "sequence"},
    ),
    "dp alone": ("dp=4", lambda: ddp(), 2, "sgd", {}, {}),
    "fsdp alone": ("fsdp=4", lambda: split(), 1, "sgd", {"scan_layers": True}, {}),
    "fsdp": ("fsdp=2,ep=2", lambda: compose(split(), expert_parallel()), 2, "sgd", {}, {}),
    "fsdp, slots, scan, remat": (
        "fsdp=2,ep=2",
        lambda: compose(split(), expert_parallel("all_to_all", 4.0), REMAT),
        2,
        "adam",
        {"scan_layers": True},
        {},
    ),
    "zero1": ("dp=2,ep=2", lambda: compose(zero(1, min_elements=8), expert_parallel()), 2)
    + ("adam", {}, {}),
    "zero2": ("dp=2,ep=2", lambda: compose(zero(2, min_elements=8), expert_parallel()), 2)
    + ("sgd", {}, {"per_token": 1}),
    "hybrid": (
        "dp=2,fsdp=2,ep=2",
        lambda: compose(
            split(sharding_strategy="hybrid_shard", axes=("dp", "fsdp")),
            expert_parallel("all_to_all"),
        ),
        1,
        "sgd",
        {},
        {},
    ),
    "tp": ("ep=2,tp=2", lambda: compose(expert_parallel(), tp()), 1, "sgd", {}, {}),
    "tp, sequence": (
        "ep=2,tp=2",
        lambda: compose(expert_parallel("all_to_all"), tp(True)),
        2,
        "sgd",
        {},
        {},
    ),
    "fsdp, tp": (
        "fsdp=2,ep=2,tp=2",
        lambda: compose(split(), expert_parallel(), tp()),
        2,
        "adam",
        {"scan_layers": True},
        {},
    ),
    "cp": (
        "ep=2,cp=2",
        lambda: compose(expert_parallel(), context_parallel("ulysses")),
        1,
        "sgd",
        {"num_kv_heads": 4},
        {},
    ),
    "dp, remat": (
        "dp=2,ep=2",
        lambda: compose(ddp(), expert_parallel("all_to_all"), REMAT),
        1,
        "sgd",
        {},
        {},
    ),
    "plain feed-forward": (
        "dp=2,ep=2",
        lambda: compose(ddp(), expert_parallel()),
        1,
        "sgd",
        {"gated": False, "activation": "gelu"},
        {"shared": 0, "bias_rate": 0.0},
    ),
}


def case_of(changes, experts):
    config = ExpertConfig(**{**EXPERTS, **experts})
    make = lambda: transformer(**{**SIZES, **changes}, experts=config)
    return Case(make, next_token_loss, token_batch)


@functools.cache
def expected(changes, experts, accumulate, optimizer):
    case = case_of(dict(changes), dict(experts))
    return train(case, OPTIMIZERS[optimizer](), STEPS, accumulate)


def world_of(mesh):
    return World.emulate(math.prod(int(axis.split("=")[1]) for axis in mesh.split(",")), mesh)


@pytest.mark.parametrize("name", part(ROWS, ["ring", "fsdp, slots, scan, remat"]))
def test_equals_one_device(name):
    mesh, strategy, accumulate, optimizer, changes, experts = ROWS[name]
    keys = tuple(changes.items()), tuple(experts.items())
    want, case = expected(*keys, accumulate, optimizer), case_of(changes, experts)
    step = build_train_step(
        case.make(),
        OPTIMIZERS[optimizer](),
        case.loss_fn,
        strategy(),
        world_of(mesh),
        accumulate=accumulate,
        metrics=METRICS,
    )
    state = step.init()
    for number in range(STEPS):
        if number == 0:
            grads, metrics = step.gradients(state, case.batch(number))
            assert_close(grads, want.grads[number], 2e-5, f"gradient of step {number}")
            assert_metrics(metrics, of_loss(want.metrics[number]), f"gradients of step {number}")
        state, metrics = step(state, case.batch(number))
        assert_metrics(metrics, want.metrics[number], f"step {number}")
        assert float(metrics["dropped"]) == 0.0
    assert_close(state.params, want.params, 1e-5, "parameter")
    assert_close(state.buffers, want.buffers, 1e-5, "buffer")
