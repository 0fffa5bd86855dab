"""Embedding and head over the ranks by the vocabulary: where they lie, when they are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, linear_cross_entropy, pipelined
from axon_dist.core.errors import ConfigError, DivisibilityError, UnsupportedError
from axon_dist.inspect.computations import visits
from axon_dist.inspect.parse import as_module
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.pipeline.stage import MicrobatchData, Start, Wire
from axon_dist.pipeline.tables import slots_by_name
from axon_dist.schedule import Schedule, assign_slots, one_f_one_b, peak_live, with_vocabulary

SIZE, COUNT, WIDTH, TOKENS, POSITIONS = 4, 4, 32, 96, 16


def model(**changes):
    options = {"vocab_size": TOKENS, "tied_head": False, "logits": "chunked", "num_layers": SIZE}
    config = TransformerConfig(
        width=WIDTH, num_heads=2, ffn_width=32, max_length=8, **options | changes
    )
    return Transformer(config, rngs=nnx.Rngs(0))


def small(**changes):
    """A layer for each of two ranks."""
    return model(num_layers=2, **changes)


def compiled(make=model, loss_fn=next_token_loss, split=True, strategy=None):
    strategy = strategy or pipelined(SIZE, COUNT, "1f1b", split_vocabulary=split)
    assert strategy.pipeline is not None
    size = strategy.pipeline.schedule.num_devices
    world = World.emulate(size, f"pp={size}")
    step = build_train_step(make, optax.sgd(0.1), loss_fn, strategy, world)
    return step.lower({"tokens": jax.ShapeDtypeStruct((2 * COUNT, 9), jnp.int32)}).compile()


def shapes(program):
    """The shapes that the step makes, at any depth."""
    return [
        shape.dims
        for visit in visits(as_module(program))
        for instruction in visit.computation.instructions
        for shape in instruction.shapes
    ]


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.full)])
def test_no_rank_has_anything_of_the_vocabulary_whole(tied):
    make = functools.partial(model, tied_head=tied)
    split, whole = set(shapes(compiled(make))), set(shapes(compiled(make, split=False)))
    per_rank = TOKENS // SIZE
    # Tables, their casts, and the sums of their gradients; and logits.
    assert {(TOKENS, WIDTH), (POSITIONS, TOKENS)} <= whole
    assert {(per_rank, WIDTH), (POSITIONS, per_rank)} <= split
    assert not [dims for dims in split if TOKENS in dims]


@pytest.mark.full
def test_each_rank_keeps_its_part_of_tables_and_moments():
    strategy = pipelined(SIZE, COUNT, split_vocabulary=True)
    world = World.emulate(SIZE, f"pp={SIZE}")
    make = functools.partial(model, tied_head=True)
    state = build_train_step(make, optax.adam(0.1), next_token_loss, strategy, world).init()
    tables = [x for x in jax.tree.leaves(state) if x.shape == (TOKENS, WIDTH)]
    # The parameter, and two moments.
    assert len(tables) == 3
    for table in tables:
        held = {shard.device: shard.data for shard in table.addressable_shards}
        assert len(held) == SIZE
        assert {data.nbytes for data in held.values()} == {TOKENS * WIDTH * 4 // SIZE}


class Twice(nnx.Module):
    """A head that the loss reads outside of its linear cross-entropy too."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(SIZE)])
        self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)

    def hidden(self, tokens):
        x = jax.nn.one_hot(tokens[:, :-1], WIDTH)
        for layer in self.layers:
            x = x + layer(x)
        return x


def with_bias(model, batch, penalty=0.0, scale=1.0):
    head, tokens = model.head, batch["tokens"]
    kernel = head.kernel[...] if scale == 1 else head.kernel[...] * scale
    loss = linear_cross_entropy(model.hidden(tokens), kernel, tokens[:, 1:], bias=head.bias[...])
    return loss.mean + penalty * jnp.sum(head.kernel[...] ** 2) if penalty else loss


def with_table(model, batch):
    """A penalty on the embedding."""
    return next_token_loss(model, batch).mean + jnp.sum(model.token_embedding.embedding[...])


def guided(model, batch):
    """Ids that follow from a parameter."""
    found = jnp.argmax(model.final_norm.scale[...]) + batch["tokens"]
    return next_token_loss(model, batch).mean + jnp.mean(model.token_embedding(found))


@pytest.mark.full
def test_a_bias_is_split_with_its_kernel():
    found = shapes(compiled(lambda: Twice(nnx.Rngs(0)), with_bias))
    assert (TOKENS // SIZE,) in found
    assert (WIDTH, TOKENS // SIZE) in found
    assert (WIDTH, TOKENS) not in found


@pytest.mark.parametrize(
    ("make", "loss_fn", "error", "said"),
    [
        (
            functools.partial(small, logits="whole"),
            next_token_loss,
            UnsupportedError,
            "has 0 visible calls of linear_cross_entropy",
        ),
        (
            lambda: Twice(nnx.Rngs(0)),
            functools.partial(with_bias, penalty=0.1),
            UnsupportedError,
            "its kernel 'head/kernel' is also read by 'integer_pow'; only linear_cross_entropy",
        ),
        (
            lambda: Twice(nnx.Rngs(0)),
            functools.partial(with_bias, scale=2.0),
            UnsupportedError,
            "its kernel is not a parameter outside the blocks, at most cast or transposed",
        ),
        (
            functools.partial(small, tied_head=True),
            with_table,
            UnsupportedError,
            "its kernel 'token_embedding/embedding' is also read by 'reduce_sum'",
        ),
        (
            small,
            with_table,
            UnsupportedError,
            "the embedding 'token_embedding/embedding' over 'pp', and it is also read by 'reduce",
        ),
        pytest.param(
            functools.partial(small, tied_head=True),
            guided,
            UnsupportedError,
            "its kernel 'token_embedding/embedding' is also read by 'jit'",
            marks=pytest.mark.full,
        ),
        (
            functools.partial(small, vocab_size=51),
            next_token_loss,
            DivisibilityError,
            "has 51 tokens.*2 ranks of 'pp'.*such as 52",
        ),
    ],
)
def test_vocabularies_that_cannot_be_split_are_refused(make, loss_fn, error, said):
    strategy = pipelined(2, 2, "1f1b", split_vocabulary=True)
    with pytest.raises(error, match=said) as found:
        compiled(make, loss_fn, strategy=strategy)
    assert "or leave split_vocabulary out" in str(found.value)


def test_the_option_is_yes_or_no():
    with pytest.raises(ConfigError, match="got split_vocabulary='head', a str; give True or F"):
        pipelined(2, 4, split_vocabulary="head")  # type: ignore[arg-type]


def test_a_table_with_it_needs_no_option():
    def table(*args, **options):
        plan = pipelined(2, 4, *args, **options).pipeline
        assert plan is not None
        return plan.schedule

    split = table(split_vocabulary=True)
    assert split.splits_vocabulary
    assert table(split) == table(split, split_vocabulary=True) == split


V_ALONE = "0F0,,0V0,,0B0\n,1F0,1V0,1B0,"


@pytest.mark.full
def test_a_table_with_v_alone_has_no_part_of_a_tied_embedding():
    table, tied = Schedule.from_csv(V_ALONE), functools.partial(model, tied_head=True)
    with pytest.raises(UnsupportedError, match=r"is the embedding too, .* V, but not E and G"):
        compiled(tied, strategy=pipelined(2, 1, table))
    # The option asks for both.
    plan = pipelined(2, 1, table, split_vocabulary=True).pipeline
    assert plan is not None
    assert plan.schedule.splits_embedding


@pytest.mark.full
def test_a_table_with_v_alone_leaves_an_embedding_whole():
    found = shapes(compiled(strategy=pipelined(2, 1, Schedule.from_csv(V_ALONE))))
    assert (TOKENS, WIDTH) in found
    assert (WIDTH, TOKENS) not in found


def loss_of(tokens, split):
    world = World.emulate(2, "pp=2")
    strategy = pipelined(2, 2, split_vocabulary=split)
    make = functools.partial(model, tied_head=True)
    step = build_train_step(make, optax.sgd(0.1), next_token_loss, strategy, world)
    return float(step(step.init(), {"tokens": tokens})[1]["loss"])


@pytest.mark.full
def test_ids_that_the_table_has_no_row_for_are_what_they_are_on_one_device():
    tokens = np.arange(36, dtype=np.int32).reshape(4, 9)
    for odd in (-1, TOKENS):
        tokens[1, 3] = odd
        losses = [loss_of(tokens, split) for split in (True, False)]
        assert np.isnan(losses[0]) == np.isnan(losses[1]) == (odd == TOKENS)
        np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize("norm", [False, True])
def test_lookups_are_kept_only_if_the_backward_pass_reads_them(norm):
    row = lambda data: data.looked_up[0] * (data.looked_up[0] if norm else 3.0)
    start = Start(lambda rest, data: Wire([row(data)], []), {}, {}, MicrobatchData([], []))
    assert start.reads_looked_up([jnp.ones((2, 3))], [jnp.ones((2, 3))]) is norm
    table = with_vocabulary(one_f_one_b(2, 8))
    # One for the forward pass that is next, and those in flight.
    kept = peak_live(table)[0] if norm else 1
    assert slots_by_name(assign_slots(table), saves_lookups=norm)["lookups"].num_slots == kept + 1
