"""Mixtures of experts in stages equal gradient accumulation on one device, as all stages do."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, zero
from axon_dist.checkpoint import load_checkpoint, save_checkpoint
from axon_dist.core.errors import UnsupportedError
from axon_dist.inspect import collectives
from axon_dist.models import ExpertConfig, next_token_loss
from axon_dist.parallel import (
    context_parallel,
    expert_parallel,
    fsdp,
    pipelined,
    tensor_parallel,
)
from axon_dist.schedule import SCHEDULES, Schedule
from axon_dist.step import PortableForm
from tests.drawn import drawn

from .mixtures import EXPERTS, OPTIMIZERS, SIZES
from .models import (
    SAMPLES,
    Case,
    mean_square_with_metrics,
    regression_batch,
    token_batch,
    transformer,
)
from .reference import METRICS, assert_close, assert_metrics, assert_same_training, train

STEPS = 3


def weighed_batch(step: int) -> dict:
    """Samples of uneven weight, those of some ranks of all but none."""
    rng = np.random.default_rng(400 + step)
    weight = rng.integers(0, 4, size=SAMPLES) * (np.arange(SAMPLES) % 8 < 5)
    return token_batch(step) | {"weight": weight.astype(np.float32)}


class NormBlock(nnx.Module):
    """A block with running statistics of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.norm(self.inner(x)))


class NormNet(nnx.Module):
    """Blocks with statistics, and a head without."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List(NormBlock(rngs) for _ in range(4))
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Same(nnx.Module):
    """Returns its input, in place of attention."""

    def __call__(self, x, *args, **kwargs):
        return x


def without_attention(**changes) -> nnx.Module:
    """A decoder whose blocks are nothing but mixtures of experts: half of the program."""

    def make():
        model = transformer(**changes)
        for block in model.blocks:
            block.attention = Same()
        return model

    return drawn(make)


def mixture(batch=token_batch, experts=(), of=transformer, **changes) -> Case:
    """A decoder whose feed-forwards are mixtures."""
    config = ExpertConfig(**EXPERTS | dict(experts))
    make = functools.partial(of, **SIZES | changes, experts=config)
    return Case(make, next_token_loss, batch)


MODELS = {
    "mixture": mixture(),
    # The model of the default run; "mixture" has attention, gates, and a shared expert.
    "weighed": mixture(weighed_batch, {"count": 4, "shared": 0}, without_attention, gated=False),
    "of sequences": mixture(experts={"balance_per": "sequence", "bias_rate": 0.0}),
    "one each": mixture(experts={"per_token": 1, "shared": 0}),
    "uneven": mixture(num_layers=5, dropout=0.1),
    "four": mixture(num_layers=4),
    "stacked": mixture(num_layers=4, dropout=0.1, scan_layers=True),
    "chunked": mixture(tied_head=False, logits="chunked"),
    "heads": mixture(num_kv_heads=4),
    "norms": Case(lambda: NormNet(nnx.Rngs(0)), mean_square_with_metrics, regression_batch),
}


def split(**options):
    return fsdp(min_elements=8, **options)


RING, SLOTS = expert_parallel("ring"), expert_parallel("all_to_all")
WITH = {
    "": (),
    "ddp": (ddp(),),
    "ring": (RING,),
    "slots": (SLOTS,),
    "ddp+ring": (ddp(), RING),
    "ddp+slots": (ddp(), SLOTS),
    "fsdp": (split(),),
    "fsdp+ring": (split(), RING),
    "fsdp+slots": (split(), SLOTS),
    "zero1+ring": (zero(1, min_elements=8), RING),
    "zero3+slots": (zero(3, min_elements=8), SLOTS),
    "tensor": (tensor_parallel("transformer"),),
    "ring+tensor": (RING, tensor_parallel("transformer")),
    "slots+sequence": (SLOTS, tensor_parallel("transformer", sequence=True)),
    "ring+ulysses": (RING, context_parallel("ulysses")),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    mesh: str
    other: str = ""
    schedule: str = "1f1b"
    microbatches: int = 4
    model: str = "mixture"
    optimizer: str = "sgd"
    backward: str = "recompute"
    split_vocabulary: bool = False

    def __str__(self) -> str:
        fields = dataclasses.astuple(self)
        return "-".join(map(str, fields[:-1])) + "-vocabulary" * self.split_vocabulary


ROWS = [Row("pp=2,ep=2", "slots", microbatches=2, model="weighed")]
FULL = [
    Row("pp=2,dp=2,ep=2", "ddp+slots", "zero_bubble_h1", 2, "weighed"),
    Row("pp=2,dp=2", "ddp", model="weighed"),
    Row("pp=2,dp=2,ep=2", "ddp+slots", "zero_bubble_h1"),
    Row("pp=2,ep=2,tp=2", "ring+tensor", microbatches=2, optimizer="adam"),
    Row("pp=1"),
    Row("pp=2", schedule="gpipe", model="uneven"),
    Row("pp=2,dp=2", "ddp", model="norms"),
    Row("pp=2", schedule="eager_1f1b", model="norms", backward="residuals"),
    Row("pp=2,dp=2", "ddp", "eager_1f1b", model="of sequences", optimizer="adam"),
    Row("pp=2,fsdp=2", "fsdp", "zero_bubble_h1", backward="residuals"),
    Row("pp=2,tp=2", "tensor", model="uneven"),
    Row("pp=2,ep=4", "ring", microbatches=8, model="one each"),
    Row("pp=2,ep=4", "slots", "gpipe", model="weighed"),
    Row("pp=4,ep=2", "slots", microbatches=8, model="four"),
    Row("pp=2,ep=2", "ring", model="uneven", backward="residuals"),
    Row("pp=2,ep=2", "slots", "eager_1f1b", model="chunked", split_vocabulary=True),
    Row("pp=2,fsdp=2,ep=2", "fsdp+ring", optimizer="adam"),
    Row("pp=2,fsdp=2,ep=2", "fsdp+slots", "zero_bubble_h1", backward="residuals"),
    Row("pp=2,dp=2,ep=2", "zero1+ring", "eager_1f1b", optimizer="adam"),
    Row("pp=2,dp=2,ep=2", "zero3+slots", backward="dots"),
    Row("pp=2,ep=2,tp=2", "slots+sequence", microbatches=2),
    Row("pp=2,ep=2,cp=2", "ring+ulysses", microbatches=2, model="heads"),
    Row("pp=2,dp=2,ep=2", "ddp+slots", "interleaved_1f1b", model="stacked"),
    Row("pp=2,tp=2", "tensor", "zero_bubble_h1", model="stacked"),
    *(
        Row("pp=2,dp=2,ep=2", ("ddp+ring", "ddp+slots")[number % 2], name, model="four")
        for number, name in enumerate(SCHEDULES)
    ),
]


@functools.cache
def expected(model, microbatches, optimizer):
    return train(MODELS[model], OPTIMIZERS[optimizer](), STEPS, microbatches)


def built(case, strategy, mesh, optimizer="sgd", **options):
    size = math.prod(int(part.split("=")[1]) for part in mesh.split(","))
    world = World.emulate(size, mesh)
    return build_train_step(
        case.make(), OPTIMIZERS[optimizer](), case.loss_fn, strategy, world, **options
    )


def check(row: Row, has_gradients: bool = True) -> None:
    """Runs one row and compares everything with one device."""
    case, want = MODELS[row.model], expected(row.model, row.microbatches, row.optimizer)
    pipe = pipelined(
        int(row.mesh[3]),
        row.microbatches,
        row.schedule,
        backward=row.backward,
        split_vocabulary=row.split_vocabulary,
    )
    strategy = compose(pipe, *WITH[row.other])
    step = built(case, strategy, row.mesh, row.optimizer, metrics=METRICS)
    assert_same_training(step, case, want, (0,) * has_gradients)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_device(row):
    check(row, has_gradients=False)


@pytest.mark.full
@pytest.mark.parametrize("row", [*ROWS, *FULL], ids=str)
def test_equals_one_device_full(row):
    check(row)


OUT_OF_ORDER = Schedule.from_csv("0F1,0F0,,0B1,0B0\n,1F1+1B1,1F0+1B0,,\n", "turned")


@pytest.mark.full
def test_a_bias_that_goes_from_microbatch_to_microbatch_needs_their_order():
    case, pipe = MODELS["mixture"], pipelined(2, 2, OUT_OF_ORDER)
    step = built(case, pipe, "pp=2")
    with pytest.raises(
        UnsupportedError, match=r"'blocks/0/mlp/bias' of stage 0 .*schedule 'turned' .*all named"
    ):
        step.lower(case.batch(0))


@pytest.mark.full
def test_without_a_bias_any_order_will_do():
    experts = {"bias_rate": 0.0, "balance_per": "sequence"}
    case = mixture(experts=experts)
    want = train(case, OPTIMIZERS["sgd"](), 1, 2)
    step = built(case, pipelined(2, 2, OUT_OF_ORDER), "pp=2")
    state, metrics = step(step.init(), case.batch(0))
    assert float(metrics["loss"]) == pytest.approx(want.losses[0], rel=1e-5)
    assert_close(state.buffers, want.buffers, 1e-5, "buffer")


@pytest.mark.full
@pytest.mark.parametrize("form", ["ring", "all_to_all"])
def test_dropped_tokens_are_those_without_a_pipeline(form):
    case, experts = MODELS["one each"], expert_parallel(form, capacity=0.75)
    found = []
    for mesh, strategy, options in (
        ("ep=2", experts, {"accumulate": 2}),
        ("pp=2,ep=2", compose(pipelined(2, 2), experts), {}),
    ):
        step = built(case, strategy, mesh, **options)
        state, metrics = step(step.init(), case.batch(0))
        found.append((metrics, step.storage.to_model(state.params)))
    assert 0.1 < float(found[0][0]["dropped"]) < 1
    assert_metrics(found[1][0], {k: float(v) for k, v in found[0][0].items()}, "the pipeline")
    assert_close(found[1][1], found[0][1], 1e-5, "parameter")


@pytest.mark.full
@pytest.mark.parametrize("form", ["ring", "all_to_all"])
def test_bf16_is_near_one_device(form):
    case, want = MODELS["mixture"], expected("mixture", 4, "adam")
    strategy = compose(pipelined(2, 4), split(), expert_parallel(form))
    step = built(case, strategy, "pp=2,fsdp=2,ep=2", "adam", precision="bf16")
    state = step.init()
    for number in range(2):
        state, metrics = step(state, case.batch(number))
        # Rounding may choose another expert for a token between two.
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-2)


@pytest.mark.full
@pytest.mark.parametrize(("form", "capacity"), [("ring", None), ("all_to_all", 1.0)])
def test_tokens_travel_thrice_where_stages_are_run_again(form, capacity):
    """Both passes of the formula, and half of them once more for the stage that is recomputed."""
    case = mixture(width=128, num_heads=2, experts={"per_token": 1})
    strategy = compose(pipelined(2, 2), expert_parallel(form, capacity))
    step = built(case, strategy, "pp=2,ep=2")
    ledger = collectives(step.lower(case.batch(0)).compile(), step.world.mesh)
    # Once each: what a tick does for one microbatch in one stage, which has one layer.
    sent = sum(row.wire_bytes for row in ledger if row.axes == ("ep",) and row.in_conditional)
    tokens = SAMPLES // 2 // 2 * 8 * 128 * 4
    # GShard, arXiv:2006.16668: a ring, or slots all to all; forward, backward and recomputed.
    slots = 2 if capacity is None else min(2, capacity)
    want = 6 * (2 - 1) / 2 * slots * tokens
    assert sent == pytest.approx(want, rel=0.05)


@pytest.mark.full
def test_a_checkpoint_goes_on_without_the_pipeline_and_is_evaluated(tmp_path):
    case, experts = MODELS["mixture"], expert_parallel()
    staged = built(case, compose(pipelined(2, 4), experts), "pp=2,ep=2")
    state, _ = staged(staged.init(), case.batch(0))
    save_checkpoint(tmp_path / "c", PortableForm(staged).to_canonical(state))
    whole = built(case, experts, "ep=4", accumulate=4)
    form = PortableForm(whole)
    restored = form.from_canonical(load_checkpoint(tmp_path / "c", form.target))
    for name, value in whole.evaluate(restored, case.batch(1)).items():
        assert float(staged.evaluate(state, case.batch(1))[name]) == pytest.approx(float(value))
    state, want = staged(state, case.batch(1))
    restored, metrics = whole(restored, case.batch(1))
    assert_metrics(metrics, {k: float(v) for k, v in want.items()}, "the step after")
    assert_close(restored.params, staged.storage.to_model(state.params), 1e-5, "parameter")
    assert_close(restored.buffers, state.buffers, 1e-5, "buffer")
