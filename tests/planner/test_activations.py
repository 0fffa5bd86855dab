import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.core.errors import ConfigError
from axon_dist.planner import TransformerShape, guess_shape, layer_activations, step_activations

SIZES = st.builds(
    lambda heads, layers, seq: TransformerShape(
        num_params=10**9, num_layers=layers, width=64 * heads, num_heads=heads, sequence_length=seq
    ),
    st.sampled_from([8, 16, 32]),
    st.integers(1, 64),
    st.sampled_from([128, 1024, 4096]),
)


@given(shape=SIZES, batch=st.integers(1, 8), tp=st.sampled_from([1, 2, 4, 8]))
def test_korthikanti(shape, batch, tp):
    s, b, h, a, t = shape.sequence_length, batch, shape.width, shape.num_heads, tp
    one = lambda **options: layer_activations(shape, batch, tp=tp, **options)
    scores = 5 * a * s / h
    assert one(flash=False) == pytest.approx(s * b * h * (10 + 24 / t + scores / t), abs=1)
    assert one() == pytest.approx(s * b * h * (10 + 24 / t), abs=1)
    assert one(sequence=True, flash=False) == pytest.approx(s * b * h * (34 + scores) / t, abs=1)
    # A block of FSDP keeps products: q, k, v, the attention and the hidden layer once, which are
    # split; its input and what the projection gives; and a byte per dropped element.
    assert one(remade=True) == pytest.approx(s * b * h * (2 * 2 + 2 + 8 * 2 / t), abs=1)
    # Everything but the two dropout masks doubles in float32.
    assert one(itemsize=4) == pytest.approx(s * b * h * (8 * 2 + 2 + 48 / t), abs=1)


@given(shape=SIZES, batch=st.integers(1, 8))
def test_recomputation_keeps_inputs_and_one_block(shape, batch):
    sbh = shape.sequence_length * batch * shape.width
    # A chunk of the logits of 32 000 tokens in float32, and its gradient in 16 bits.
    whole = 4 * shape.sequence_length * batch * shape.vocab_size
    logits = min(whole, 2**29) * 3 // 2
    full = step_activations(shape, batch) - logits
    remat = step_activations(shape, batch, remat=True) - logits
    remade = step_activations(shape, batch, remade=True) - logits
    assert remade == 22 * sbh * shape.num_layers
    assert step_activations(shape, batch, remade=True, remat=True) - logits == remat
    assert full == 34 * sbh * shape.num_layers
    assert remat == 2 * sbh * shape.num_layers + 34 * sbh
    assert step_activations(shape, batch, in_flight=3) - logits - full == 3 * 2 * sbh


def test_published_shapes_are_guessed():
    assert guess_shape(175e9).num_layers == 96
    assert (guess_shape(7e9).width, guess_shape(7e9).num_heads) == (4096, 32)


@given(st.floats(1e6, 1e13))
def test_a_guess_has_about_the_parameters(num_params):
    shape = guess_shape(num_params)
    assert shape.num_params == int(num_params)
    if num_params > 1e9:
        assert 12 * shape.num_layers * shape.width**2 == pytest.approx(num_params, rel=0.15)


def test_flops_per_token():
    shape = guess_shape(1e9)
    attention = 12 * shape.num_layers * shape.width * shape.sequence_length
    assert shape.flops_per_token() == 6e9 + attention
    assert shape.flops_per_token(recomputed=1) == pytest.approx((6e9 + attention) * 4 / 3)


def test_impossible_sizes():
    with pytest.raises(ConfigError, match="num_layers of the transformer is 0; it must be at"):
        TransformerShape(num_params=1, num_layers=0, width=1, num_heads=1)
    with pytest.raises(ConfigError, match="got num_params=0; a model has at least one"):
        guess_shape(0)
