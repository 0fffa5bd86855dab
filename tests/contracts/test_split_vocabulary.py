"""Embedding and head in parts over the ranks of a pipeline equal one device, in whatever model."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, fsdp, linear_cross_entropy, zero
from axon_dist.checkpoint import load_checkpoint, save_checkpoint
from axon_dist.models import next_token_loss
from axon_dist.nn import VocabParallelEmbedding
from axon_dist.parallel import pipelined
from axon_dist.step import PortableForm

from .models import SAMPLES, Case, token_batch, transformer
from .reference import METRICS, assert_same_training, train

TOKENS, WIDTH, NUM_STEPS = 32, 16, 3


class Mixer(nnx.Module):
    """A block."""

    def __init__(self, rngs, sources=1):
        self.inner = nnx.Linear(sources * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, *others):
        return x + jnp.tanh(self.inner(jnp.concatenate([x, *others], -1)))


class Words(nnx.Module):
    """Tokens, blocks, and a head that is the table of the tokens.

    Args:
        rngs: source of the initial weights.
        kind: what is done about the lookup.
    """

    def __init__(self, rngs, kind=""):
        table = VocabParallelEmbedding if kind == "own layer" else nnx.Embed
        self.kind = kind
        self.embed = table(TOKENS, 8 if kind == "factors" else WIDTH, rngs=rngs)
        if kind == "factors":
            self.up = nnx.Linear(8, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)
        if kind == "normed":
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        if kind == "two tables":
            self.other = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.layers = nnx.List([Mixer(rngs) for _ in range(4)])

    def __call__(self, tokens):
        if self.kind == "indexed":
            # Negative ids count from the end.
            x = jax.jit(lambda table, ids: table[ids - TOKENS])(self.embed.embedding[...], tokens)
        else:
            x = self.embed(tokens)
        x = self.up(x) if self.kind == "factors" else x
        x = self.norm(x) if self.kind == "normed" else 3.0 * x
        x = x + self.other(tokens[:, ::-1]) if self.kind == "two tables" else x
        start = x
        for layer in self.layers:
            x = layer(x)
        return x + start if self.kind == "skip" else x


def words_loss(model, batch):
    """Only the loss follows the last block."""
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    hidden = model(tokens)
    if model.kind == "factors":
        head = model.head
        return linear_cross_entropy(hidden, head.kernel[...], labels, bias=head.bias[...])
    return linear_cross_entropy(hidden, model.embed.embedding[...].T, labels)


class Translator(nnx.Module):
    """An encoder and a decoder that look the same table up, which is the head, too."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.encoder = nnx.List([Mixer(rngs) for _ in range(2)])
        self.decoder = nnx.List([Mixer(rngs, 2) for _ in range(2)])

    def __call__(self, source, target):
        x, y = self.embed(source), self.embed(target)
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y, x)
        return y


def translation_loss(model, batch):
    tokens = batch["tokens"]
    hidden = model(tokens[:, ::-1][:, :-1], tokens[:, :-1])
    return linear_cross_entropy(hidden, model.embed.embedding[...].T, tokens[:, 1:])


def packed_batch(step):
    """Two documents in each row, so that positions are looked up by what follows from the batch."""
    segments = np.tile(np.array([1, 1, 1, 1, 2, 2, 2, 2, 2], np.int32), (SAMPLES, 1))
    return token_batch(step) | {"segments": segments}


def words(kind=""):
    return Case(lambda: Words(nnx.Rngs(0), kind), words_loss, token_batch)


def decoder(batch=token_batch, **changes):
    options = {"width": 16, "ffn_width": 16, "vocab_size": TOKENS, "num_layers": 4} | changes
    options = {"max_length": 16, "logits": "chunked", "tied_head": True} | options
    return Case(functools.partial(transformer, **options), next_token_loss, batch)


MODELS = {
    "tied": decoder(),
    "untied": decoder(tied_head=False),
    "learned": decoder(positions="learned", dropout=0.2),
    "learned_untied": decoder(positions="learned", dropout=0.2, tied_head=False),
    "packed": decoder(packed_batch, positions="learned"),
    # As many positions as tokens: their table lies in parts, too.
    "positions": decoder(packed_batch, positions="learned", max_length=TOKENS),
    "stacked": decoder(scan_layers=True),
    "uneven": decoder(num_layers=5),
    "translator": Case(lambda: Translator(nnx.Rngs(0)), translation_loss, token_batch),
    **{
        kind.replace(" ", "_"): words(kind)
        for kind in ("indexed", "own layer", "factors", "normed", "two tables", "skip")
    },
}
WITH = {
    "": (),
    "ddp": (ddp(),),
    "fsdp": (fsdp(min_elements=8),),
    "zero1": (zero(1, min_elements=8),),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    schedule: str
    mesh: str
    model: str
    other: str = ""
    backward: str = "recompute"

    def __str__(self) -> str:
        return "-".join(dataclasses.astuple(self))


ROWS = [Row("1f1b", "pp=2,fsdp=2", "translator", "fsdp")]
FULL = [
    Row("eager_1f1b", "pp=4", "normed"),
    *(
        Row(name, "pp=2", model)
        for name in ("eager_1f1b", "gpipe", "interleaved_1f1b", "zero_bubble_h1")
        for model in ("tied", "untied", "learned", "learned_untied")
    ),
    *(Row(name, "pp=2", "learned") for name in ("looped_bfs", "zero_bubble_v", "dual_pipe_v")),
    *(
        Row("eager_1f1b", f"pp=2,{axis}=2", model, other)
        for other, axis in (("ddp", "dp"), ("zero1", "dp"), ("fsdp", "fsdp"))
        for model in ("learned", "untied")
    ),
    *(
        Row(name, "pp=2", model, backward="residuals")
        for name in ("gpipe", "zero_bubble_h1", "interleaved_1f1b")
        for model in ("learned", "normed")
    ),
    *(Row("1f1b", "pp=2", model) for model in MODELS),
    *(Row("zero_bubble_h1", "pp=4", model) for model in ("translator", "skip", "normed", "uneven")),
    Row("interleaved_1f1b", "pp=2", "stacked"),
    Row("zero_bubble_h1", "pp=2,dp=2", "translator", "ddp", "residuals"),
]


@functools.cache
def expected(model: str):
    """The one-device run, shared by every row that it is the oracle of."""
    return train(MODELS[model], optax.adam(0.01), NUM_STEPS, 4)


def check(row: Row, has_gradients: bool = True) -> None:
    """Runs one row and compares everything with one device."""
    case, want = MODELS[row.model], expected(row.model)
    sizes = {axis: int(size) for axis, size in (p.split("=") for p in row.mesh.split(","))}
    pipe = pipelined(sizes["pp"], 4, row.schedule, backward=row.backward, split_vocabulary=True)
    world = World.emulate(math.prod(sizes.values()), row.mesh)
    strategy = compose(pipe, *WITH[row.other])
    step = build_train_step(
        case.make(), optax.adam(0.01), case.loss_fn, strategy, world, metrics=METRICS
    )
    assert_same_training(step, case, want, (0,) * has_gradients)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_equals_one_device(row):
    check(row, has_gradients=False)


@pytest.mark.full
@pytest.mark.parametrize("row", [*ROWS, *FULL], ids=str)
def test_equals_one_device_full(row):
    check(row)


def losses_of(mesh, strategy, model="learned", count=NUM_STEPS, **options):
    """The losses of some steps, and the step with the state behind them."""
    sizes = [int(part.split("=")[1]) for part in mesh.split(",")]
    world, case = World.emulate(math.prod(sizes), mesh), MODELS[model]
    step = build_train_step(case.make(), optax.adam(0.01), case.loss_fn, strategy, world, **options)
    state, losses = step.init(), []
    for number in range(count):
        state, metrics = step(state, case.batch(number))
        losses.append(float(metrics["loss"]))
    return losses, step, state


SPLIT = pipelined(2, 4, split_vocabulary=True)


@pytest.mark.full
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_checkpoint_goes_on_elsewhere(model, tmp_path):
    case = MODELS[model]
    _, step, state = losses_of("pp=2", SPLIT, model)
    portable = PortableForm(step).to_canonical(state)
    names = nnx.to_pure_dict(nnx.state(case.make(), nnx.Param))
    assert jax.tree.structure(portable.params) == jax.tree.structure(names)
    save_checkpoint(tmp_path / "c", portable)
    _, metrics = step(state, case.batch(NUM_STEPS))
    others = {
        "fsdp=4": fsdp(min_elements=8),
        "pp=4": pipelined(4, 8, "1f1b", split_vocabulary=True),
        "pp=2,dp=2": compose(pipelined(2, 4), ddp()),
    }
    for mesh, strategy in others.items():
        _, other, _ = losses_of(mesh, strategy, model, count=0)
        form = PortableForm(other)
        restored = form.from_canonical(load_checkpoint(tmp_path / "c", form.target))
        _, found = other(restored, case.batch(NUM_STEPS))
        np.testing.assert_allclose(float(found["loss"]), float(metrics["loss"]), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_frozen_embedding_stays_as_it_is(model):
    trainable = lambda path, _: "token_embedding" not in path
    whole, *_ = losses_of("dp=2", ddp(), model, trainable=trainable)
    split, step, state = losses_of("pp=2", SPLIT, model, trainable=trainable)
    np.testing.assert_allclose(split, whole, rtol=1e-5)
    first: Any = MODELS[model].make()
    table = first.token_embedding.embedding[...]
    assert (step.storage.weights(state.params, state.frozen)["token_embedding"]["embedding"]
            == table).all()  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["eager_1f1b", "zero_bubble_h1"])
def test_in_half_precision(schedule):
    half = fsdp(mixed_precision=True, min_elements=8)
    pipe = pipelined(2, 4, schedule, split_vocabulary=True)
    whole, *_ = losses_of("fsdp=2", half, "tied")
    split, *_ = losses_of("pp=2,fsdp=2", compose(pipe, half), "tied")
    np.testing.assert_allclose(split, whole, rtol=2e-3)
