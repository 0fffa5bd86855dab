"""The blocks that a pipeline cuts between, in models that keep them in no list."""

import flax.linen as nn
import jax.numpy as jnp
from flax import nnx

from axon_dist.nn import block_paths
from axon_dist.step.storage import block_keys


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(4)(jnp.tanh(nn.Dense(4)(x)))


class Tower(nn.Module):
    """Eleven blocks, of which the last is number ten."""

    @nn.compact
    def __call__(self, x):
        for number in range(11):
            x = Layer(name=f"layer_{number}")(x)
        return x


class Pair(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Tower(name="decoder")(Tower(name="encoder")(x))


def pair():
    return nnx.bridge.ToNNX(Pair(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, 4)))


def test_an_encoder_comes_before_the_decoder_and_two_before_ten():
    names = [f"layer_{number}" for number in range(11)]
    want = [(tower, name) for tower in ("encoder", "decoder") for name in names]
    assert block_keys(pair()) == want
    assert block_keys(pair(), ("decoder/layer",)) == want[11:]
    assert block_keys(pair(), ("layer", "Dense")) == want


def test_units_are_named_by_the_end_of_their_path():
    model = pair()
    assert block_paths(model, ("encoder/layer",)) == {f"encoder/layer_{i}" for i in range(11)}
    assert block_paths(model, ("coder/layer", "0")) == frozenset()
    assert len(block_paths(model, ("Dense",))) == 44
