"""Mixtures of experts equal one device however they are split, gradients of experts times one."""

import functools
import math

import jax
import pytest

from axon_dist import Strategy, World, build_train_step, compose, ddp, zero
from axon_dist.checkpoint import load_checkpoint, save_checkpoint, target_of
from axon_dist.models import ExpertConfig, next_token_loss
from axon_dist.nn import ActivationCheckpointing
from axon_dist.ops import dropless
from axon_dist.parallel import context_parallel, expert_parallel, fsdp, tensor_parallel
from axon_dist.parallel.expert import SplitExperts

from .mixtures import EXPERTS, OPTIMIZERS, SIZES
from .models import Case, token_batch, transformer
from .reference import METRICS, assert_close, assert_metrics, of_loss, train
from .rows import part

STEPS = 3
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
    "zero1": (
        "dp=2,ep=2",
        lambda: compose(zero(1, min_elements=8), expert_parallel()),
        2,
        "adam",
        {},
        {},
    ),
    "zero2": (
        "dp=2,ep=2",
        lambda: compose(zero(2, min_elements=8), expert_parallel()),
        2,
        "sgd",
        {},
        {"per_token": 1},
    ),
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
    "tp": ("ep=2,tp=2", lambda: compose(expert_parallel("ring"), tp()), 1, "sgd", {}, {}),
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


@pytest.fixture(params=["slots", "loop"])
def as_on_gpus(request, monkeypatch):
    """Experts take the way that they take where groups of rows have no product of their own."""
    monkeypatch.setattr(SplitExperts, "_lacks_groups", True)
    if request.param == "loop":
        # The busiest expert always has more than half of an even share.
        monkeypatch.setattr(dropless, "LOADS", (0.5,))
        monkeypatch.setattr(dropless, "TILE", 1)


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_equals_one_device_in_fitting_slots(name, as_on_gpus):
    test_equals_one_device(name)


@pytest.mark.full
@pytest.mark.sample("tp")
@pytest.mark.parametrize("name", part(ROWS, ["tp", "fsdp, slots, scan, remat"]))
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


def built(strategy, mesh, experts=(), **options):
    case = case_of({"num_layers": 1}, dict(experts))
    optimizer = OPTIMIZERS["adam"]()
    return case, build_train_step(
        case.make(), optimizer, case.loss_fn, strategy, world_of(mesh), **options
    )


@pytest.mark.full
def test_a_checkpoint_goes_on_with_other_ranks_and_another_form(tmp_path):
    case, one = built(compose(split(), expert_parallel("ring")), "fsdp=2,ep=2")
    state, _ = one(one.init(), case.batch(0))
    save_checkpoint(tmp_path / "c", state)
    saved = jax.device_get((state.params, state.buffers))
    want, metrics = one(state, case.batch(1))
    _, other = built(expert_parallel("all_to_all"), "ep=4")
    restored = load_checkpoint(
        tmp_path / "c", target_of(other.abstract_state, other.state_shardings)
    )
    assert_close((restored.params, restored.buffers), saved, 0.0, "leaf")
    got, found = other(restored, case.batch(1))
    assert_metrics(found, metrics, "the step after")
    assert_close(got.params, want.params, 1e-5, "parameter")


@pytest.mark.full
@pytest.mark.parametrize("form", ["ring", "all_to_all"])
def test_bf16_is_near_one_device(form):
    strategy = compose(split(), expert_parallel(form), tp())
    case, step = built(strategy, "fsdp=2,ep=2,tp=2", precision="bf16", accumulate=2)
    want = train(case, OPTIMIZERS["adam"](), 2, 2)
    state = step.init()
    for number in range(2):
        state, metrics = step(state, case.batch(number))
        # Rounding may choose another expert for a token between two.
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-2)


@pytest.mark.full
def test_a_balance_term_of_sequences_does_not_depend_on_the_microbatches():
    losses = []
    for accumulate in (1, 4):
        experts = (("balance_per", "sequence"), ("bias_rate", 0.0), ("z_loss", 0.0))
        strategy = compose(ddp(), expert_parallel())
        case, step = built(strategy, "dp=2,ep=2", experts, accumulate=accumulate)
        losses.append(float(step(step.init(), case.batch(0))[1]["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
