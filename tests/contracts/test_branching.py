"""Models that are no chain of blocks, in pipelines: each equals one device, metrics and all."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, zero
from axon_dist.core.errors import ScheduleError, UnsupportedError
from axon_dist.models.loss import cross_entropy
from axon_dist.parallel import pipelined, tensor_parallel
from axon_dist.pipeline import Stages

from .models import Case, mean_square, mean_square_with_metrics, regression_batch, token_batch
from .reference import METRICS, assert_close, assert_metrics, train
from .rows import and_full

WIDTH = 16
NUM_STEPS = 3


class Encoder(nnx.Module):
    """A block of an encoder: what it adds is made of its input alone."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jnp.tanh(self.up(self.norm(x)))))


class Decoder(nnx.Module):
    """A block of a decoder: it looks into the encoder's output."""

    def __init__(self, rngs: nnx.Rngs):
        linear = lambda: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.q, self.k, self.v, self.out = (linear() for _ in range(4))
        self.mlp = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, y, memory):
        scores = jnp.einsum("btd,bsd->bts", self.q(y), self.k(memory)) / WIDTH**0.5
        y = y + self.out(jax.nn.softmax(scores) @ self.v(memory))
        return y + jnp.tanh(self.mlp(y))


class Seq2Seq(nnx.Module):
    """An encoder and a decoder over one embedding, the first half of a text to the second."""

    def __init__(self, rngs: nnx.Rngs, num_encoders: int = 3, num_decoders: int = 2):
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.encoder = nnx.List(Encoder(rngs) for _ in range(num_encoders))
        self.decoder = nnx.List(Decoder(rngs) for _ in range(num_decoders))

    def __call__(self, source, target):
        memory, y = self.embed(source), self.embed(target)
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            y = block(y, memory)
        return self.embed.attend(y)


class Reversed(nnx.Module):
    """Two chains, held in another order than they are called in."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = nnx.List(Encoder(rngs) for _ in range(3))
        self.outer = nnx.List(Encoder(rngs) for _ in range(3))

    def __call__(self, x):
        for block in (*self.outer, *self.inner):
            x = block(x)
        return x[:, :4]


class UNet(nnx.Module):
    """Narrower and narrower, and back, with a skip from each block down to its block up."""

    def __init__(self, rngs: nnx.Rngs):
        make = lambda sizes: nnx.List(nnx.Linear(*size, rngs=rngs) for size in sizes)
        self.down = make([(16, 12), (12, 8), (8, 6)])
        self.up = make([(12, 8), (16, 12), (24, 4)])

    def __call__(self, x):
        skips = []
        for block in self.down:
            x = jnp.tanh(block(x))
            skips.append(x)
        for block in self.up:
            x = jnp.tanh(block(jnp.concatenate([x, skips.pop()], axis=-1)))
        return x


class Chain(nnx.Module):
    """Blocks one after another.

    Args:
        blocks: they may be the same, or share parameters.
    """

    def __init__(self, blocks: list, rngs: nnx.Rngs):
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nnx.Module):
    """One block at every depth."""

    def __init__(self, rngs: nnx.Rngs):
        self.block = Encoder(rngs)

    def __call__(self, x):
        for _ in range(8):
            x = self.block(x)
        return x[:, :4]


def chain(num_blocks: int = 4, times: int = 1, dropout: float = 0.0) -> Chain:
    """Blocks of their own, the whole list called several times."""
    rngs = nnx.Rngs(0, dropout=1)
    return Chain([Encoder(rngs, dropout) for _ in range(num_blocks)] * times, rngs)


def with_common_kernels() -> nnx.Module:
    """Blocks that have one of their matrices in common."""
    model = chain()
    for block in model.blocks[1:]:
        block.up.kernel = model.blocks[0].up.kernel
    return model


def stacked() -> nnx.Module:
    """Four blocks in one module, looped over by `nnx.scan`."""

    class Stacked(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: Encoder(rngs), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=4)(make)(nnx.Rngs(0))

        def __call__(self, x):
            loop = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return loop(x, self.blocks)[:, :4]

    return Stacked()


def next_half(model, batch):
    """The tokens of the second half, each after those before it."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :5], tokens[:, 4:-1])
    return jnp.mean(cross_entropy(logits, tokens[:, 5:])), {"size": jnp.mean(jnp.abs(logits))}


def towards_itself(model, batch):
    """The model is called twice, and what it says of other inputs is a target without gradient."""
    y, target = model(batch["x"]), jax.lax.stop_gradient(model(0.9 * batch["x"]))
    apart = jnp.mean((y - target) ** 2)
    return jnp.mean((y - batch["y"]) ** 2) + apart, {"apart": apart}


def with_penalty(model, batch):
    """A gradient penalty: the loss differentiates the model by its input."""
    gradient = jax.grad(lambda x: jnp.sum(model(x)))(batch["x"])
    penalty = jnp.mean((jnp.sqrt(jnp.sum(gradient**2, axis=-1) + 1e-6) - 1) ** 2)
    return mean_square(model, batch) + 0.1 * penalty, {"penalty": penalty}


def refined(model, batch):
    """The model's output goes into it again, as in recycling."""
    first = jnp.pad(model(batch["x"]), ((0, 0), (0, 12)))
    return jnp.mean((model(batch["x"] + first) - batch["y"]) ** 2)


@dataclasses.dataclass(frozen=True)
class Branching:
    """A model with its loss.

    Args:
        case: model, loss and batches.
        needs_batch: whether only a batch shows in what order blocks are called.
        classes: what the pipeline is told of its blocks.
    """

    case: Case
    needs_batch: bool = False
    classes: tuple[str, ...] = ()


def on_numbers(make, loss_fn=mean_square_with_metrics, needs_batch=True, classes=()) -> Branching:
    """A model of sixteen features."""
    return Branching(Case(make, loss_fn, regression_batch), needs_batch, classes)


MODELS = {
    "seq2seq": Branching(Case(lambda: Seq2Seq(nnx.Rngs(0)), next_half, token_batch)),
    "seq2seq_even": Branching(Case(lambda: Seq2Seq(nnx.Rngs(0), 4, 4), next_half, token_batch)),
    "unet": on_numbers(lambda: UNet(nnx.Rngs(0)), needs_batch=False),
    "reversed": on_numbers(lambda: Reversed(nnx.Rngs(0))),
    "common": on_numbers(with_common_kernels, needs_batch=False),
    "tied": on_numbers(functools.partial(chain, 4, 2)),
    "recurrent": on_numbers(lambda: Recurrent(nnx.Rngs(0)), classes=("Encoder",)),
    "twice": on_numbers(chain, towards_itself, needs_batch=False),
    "twice_dropout": on_numbers(
        functools.partial(chain, dropout=0.2), towards_itself, needs_batch=False
    ),
    "twice_stacked": on_numbers(stacked, towards_itself, needs_batch=False),
    "penalty": on_numbers(chain, with_penalty),
    "refined": on_numbers(chain, refined),
}
COLUMNS = {"(up|q|k|v)$": "column", "(down|out)$": "row"}
WITH = {
    "dp": (ddp(),),
    "tp": (tensor_parallel(COLUMNS),),
    "zero3": (zero(3, min_elements=8),),
}
OPTIMIZERS = {"sgd": optax.sgd(0.05, momentum=0.9), "adam": optax.adam(1e-2)}


@functools.cache
def expected(model: str, microbatches: int, optimizer: str):
    """The one-device run, shared by every row that it is the oracle of."""
    return train(MODELS[model].case, OPTIMIZERS[optimizer], NUM_STEPS, microbatches)


def build(model: str, schedule: str, mesh: str, others=(), microbatches=4, optimizer="sgd", **how):
    """The step of a model in a pipeline; it sees a batch where it has to."""
    found, sizes = MODELS[model], [part.split("=") for part in mesh.split(",")]
    world = World.emulate(math.prod(int(size) for _, size in sizes), mesh)
    pipe = pipelined(int(sizes[0][1]), microbatches, schedule, classes=found.classes, **how)
    return build_train_step(
        found.case.make(),
        OPTIMIZERS[optimizer],
        found.case.loss_fn,
        compose(pipe, *(part for name in others for part in WITH[name])),
        world,
        metrics=METRICS,
        batch=found.case.batch(0) if found.needs_batch else None,
    )


ALWAYS = [
    ("twice", "1f1b", "pp=2", (), "sgd", "recompute"),
]
FULL = [
    ("unet", "eager_1f1b", "pp=3", (), "adam", "residuals"),
    ("tied", "gpipe", "pp=2,dp=2", ("dp",), "sgd", "recompute"),
    ("penalty", "zero_bubble_v", "pp=2", (), "adam", "recompute"),
    ("seq2seq", "interleaved_1f1b", "pp=2,tp=2", ("tp",), "sgd", "recompute"),
    *(
        (model, schedule, "pp=2", (), "sgd", "recompute")
        for model in MODELS
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b")
    ),
    *((model, "eager_1f1b", "pp=2", (), "adam", "recompute") for model in MODELS),
    *((model, "zero_bubble_v", "pp=2", (), "sgd", "residuals") for model in MODELS),
    *(
        (model, "eager_1f1b", mesh, others, "sgd", "recompute")
        for model in MODELS
        for mesh, others in (
            ("pp=2,dp=2", ("dp",)),
            ("pp=2,dp=2", ("zero3",)),
            ("pp=2,dp=2,tp=2", ("dp", "tp")),
        )
    ),
    ("seq2seq_even", "zero_bubble_h1", "pp=4", (), "sgd", "recompute"),
    ("unet", "zero_bubble_h1", "pp=6", (), "sgd", "recompute"),
    ("penalty", "v_min", "pp=2,tp=2", ("tp",), "sgd", "residuals"),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "schedule", "mesh", "others", "optimizer", "backward"), and_full(ALWAYS, FULL)
)
def test_equals_one_device(model, schedule, mesh, others, optimizer, backward):
    step = build(model, schedule, mesh, others, optimizer=optimizer, backward=backward)
    want, state = expected(model, 4, optimizer), step.init()
    for number in range(NUM_STEPS):
        state, metrics = step(state, MODELS[model].case.batch(number))
        assert_metrics(metrics, want.metrics[number], f"step {number}")
    assert_close(step.storage.to_model(state.params), want.params, 1e-5, "parameter")
    assert_close(state.buffers, want.buffers, 1e-5, "buffer")


def stages_of(step) -> Stages:
    """Which blocks lie on which rank."""
    assert step.storage.stage_storage is not None
    return step.storage.stage_storage.stages


@pytest.mark.sample("twice-1f1b-4-0", "recurrent-1f1b-0-1", "common-1f1b-4-1")
@pytest.mark.parametrize(
    ("model", "schedule", "num_own", "num_shared"),
    [
        # The way back through a block lies on the rank of the way there.
        ("penalty", "zero_bubble_v", 4, 0),
        ("penalty", "1f1b", 0, 4),
        # The second round of the blocks lies where the first does.
        ("tied", "interleaved_1f1b", 4, 0),
        ("tied", "1f1b", 0, 4),
        ("twice", "1f1b", 4, 0),
        ("refined", "interleaved_1f1b", 4, 0),
        ("recurrent", "1f1b", 0, 1),
        ("common", "1f1b", 4, 1),
    ],
)
def test_a_rank_keeps_what_it_alone_calls(model, schedule, num_own, num_shared):
    stages = stages_of(build(model, schedule, "pp=2"))
    assert (len(stages.blocks), len(stages.shared)) == (num_own, num_shared)


@pytest.mark.sample(
    "reversed-'inner/0', a block of stage 0, after blocks of stage 1.*batch=\\\\.\\\\.\\\\.",
    "penalty-'blocks/\\\\d', a block of stage 0.*batch=\\\\.\\\\.\\\\.",
)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("reversed", r"'inner/0', a block of stage 0, after blocks of stage 1.*batch=\.\.\."),
        ("tied", r"'blocks/0', a block of stage 0.*stores on all ranks a block that several"),
        ("penalty", r"'blocks/\d', a block of stage 0.*batch=\.\.\."),
        ("refined", r"'blocks/0', a block of stage 0.*batch=\.\.\."),
    ],
)
def test_without_a_batch_the_order_of_calls_is_asked_for(model, message):
    case = MODELS[model].case
    world = World.emulate(2, "pp=2")
    step = build_train_step(case.make(), OPTIMIZERS["sgd"], case.loss_fn, pipelined(2, 4), world)
    with pytest.raises(UnsupportedError, match=message):
        step.lower(case.batch(0))


def test_too_few_calls_raise():
    case, world = MODELS["recurrent"].case, World.emulate(2, "pp=2")
    pipe = pipelined(2, 4, classes="Encoder")
    with pytest.raises(UnsupportedError, match=r"1 block to cut.*batch=\.\.\."):
        build_train_step(case.make(), OPTIMIZERS["sgd"], case.loss_fn, pipe, world)
    with pytest.raises(UnsupportedError, match=r"16 stages.* 8 calls of blocks.*fewer stages"):
        build("recurrent", "interleaved_1f1b", "pp=4", chunks=4)


@pytest.mark.full
def test_boundaries_of_calls_count_depths():
    step = build("tied", "1f1b", "pp=2", boundaries=(0, 6, 8))
    stages = stages_of(step)
    # Six calls in the first stage: blocks 0 and 1 are called there alone, and twice.
    assert stages.blocks == (("blocks", 0), ("blocks", 1))
    assert stages.shared == (("blocks", 2), ("blocks", 3))
    with pytest.raises(ScheduleError, match=r"8 layers in 2 stages"):
        build("tied", "1f1b", "pp=2", boundaries=(0, 2, 4))
