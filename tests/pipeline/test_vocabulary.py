"""A head that lies over the ranks by the vocabulary: where it lies, and when it is refused."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, linear_cross_entropy, pipelined
from axon_dist.core.errors import ConfigError, DivisibilityError, UnsupportedError
from axon_dist.hlo import as_module
from axon_dist.hlo.walk import visits
from axon_dist.models import Transformer, TransformerConfig, next_token_loss

SIZE, COUNT, WIDTH, TOKENS, POSITIONS = 4, 4, 32, 96, 16


def model(**changes):
    options = {"vocab_size": TOKENS, "tied_head": False, "logits": "chunked", **changes}
    config = TransformerConfig(
        width=WIDTH, num_layers=4, num_heads=2, ffn_width=32, max_length=8, **options
    )
    return Transformer(config, rngs=nnx.Rngs(0))


def compiled(make=model, loss_fn=next_token_loss, split=True):
    strategy = pipelined(SIZE, COUNT, "1f1b", split_vocabulary=split)
    world = World.emulate(SIZE, f"pp={SIZE}")
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


def test_no_rank_has_the_head_its_sums_or_its_logits_whole():
    split, whole = shapes(compiled()), shapes(compiled(split=False))
    per_rank = TOKENS // SIZE
    of_head = lambda found, count: [d for d in found if d in ((WIDTH, count), (count, WIDTH))]
    # The embedding, [V, D], is whole on every rank; the head, [D, V], is not.
    assert (WIDTH, TOKENS) in whole
    assert (WIDTH, TOKENS) not in split
    assert of_head(split, per_rank)
    assert (POSITIONS, TOKENS) in whole
    assert (POSITIONS, TOKENS) not in split
    assert (POSITIONS, per_rank) in split


class Twice(nnx.Module):
    """A head that the loss reads beside its linear cross-entropy."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(SIZE)])
        self.head = nnx.Linear(WIDTH, TOKENS, rngs=rngs)

    def hidden(self, tokens):
        x = jax.nn.one_hot(tokens[:, :-1], WIDTH)
        for layer in self.layers:
            x = x + layer(x)
        return x


def with_bias(model, batch, beside=0.0):
    head, tokens = model.head, batch["tokens"]
    loss = linear_cross_entropy(
        model.hidden(tokens), head.kernel[...], tokens[:, 1:], bias=head.bias[...]
    )
    return loss.mean + beside * jnp.sum(head.kernel[...] ** 2) if beside else loss


def test_a_bias_is_split_with_its_kernel():
    found = shapes(compiled(lambda: Twice(nnx.Rngs(0)), with_bias))
    assert (TOKENS // SIZE,) in found
    assert (WIDTH, TOKENS // SIZE) in found
    assert (WIDTH, TOKENS) not in found


@pytest.mark.parametrize(
    ("make", "loss_fn", "error", "said"),
    [
        (
            functools.partial(model, logits="whole"),
            next_token_loss,
            UnsupportedError,
            "calls linear_cross_entropy 0 times",
        ),
        (
            functools.partial(model, tied_head=True),
            next_token_loss,
            UnsupportedError,
            "its kernel is no parameter that the loss alone reads",
        ),
        (
            lambda: Twice(nnx.Rngs(0)),
            functools.partial(with_bias, beside=0.1),
            UnsupportedError,
            "its kernel is no parameter that the loss alone reads",
        ),
        (
            functools.partial(model, vocab_size=50),
            next_token_loss,
            DivisibilityError,
            "has 50 tokens.*4 ranks of 'pp'.*such as 52",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(make, loss_fn, error, said):
    with pytest.raises(error, match=said) as found:
        compiled(make, loss_fn)
    assert "or leave split_vocabulary out" in str(found.value)


def test_the_option_is_yes_or_no():
    with pytest.raises(ConfigError, match="got split_vocabulary='head'; it must be True"):
        pipelined(2, 4, split_vocabulary="head")  # type: ignore[arg-type]


def test_a_table_with_it_needs_no_option():
    def table(*args, **options):
        plan = pipelined(2, 4, *args, **options).pipeline
        assert plan is not None
        return plan.schedule

    split = table(split_vocabulary=True)
    assert split.splits_vocabulary
    assert table(split) == table(split, split_vocabulary=True) == split
