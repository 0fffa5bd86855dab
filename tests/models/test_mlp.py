import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core import tree
from axon_dist.core.errors import ConfigError
from axon_dist.models import MLP


@nnx.jit
def called(model, x):
    return model(x)


def test_forward_equals_plain_numpy():
    model = MLP((3, 5, 4, 2), activation="tanh", rngs=nnx.Rngs(0))
    for i, layer in enumerate(model.layers):
        size = layer.bias[...].size
        layer.bias[...] = jnp.asarray(np.arange(i, i + size, dtype=np.float32))
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    want = x
    for i, layer in enumerate(model.layers):
        want = want @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
        want = np.tanh(want) if i < 2 else want
    np.testing.assert_allclose(called(model, x), want, rtol=1e-5)


def test_parameter_count():
    model = nnx.eval_shape(lambda: MLP((784, 256, 10), rngs=nnx.Rngs(0)))
    assert tree.num_params(nnx.state(model, nnx.Param)) == 203_530


def test_dropout_rests_in_evaluation():
    model = MLP((8, 64, 4), dropout=0.5, rngs=nnx.Rngs(0))
    x = np.ones((2, 8), np.float32)
    assert not np.array_equal(called(model, x), called(model, x))
    model.eval()
    np.testing.assert_array_equal(called(model, x), called(model, x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": (3,)}, r"sizes=\(3,\) must have at least an input and an output"),
        ({"sizes": (3, 0)}, r"sizes=\(3, 0\) must have .* each 1 or more"),
        ({"sizes": (3, 2), "activation": "rely"}, r"'rely'.*Did you mean 'relu'\?"),
        ({"sizes": (3, 2), "dropout": 1.5}, r"dropout=1.5 must be in \[0, 1\)"),
    ],
)
def test_errors_name_value_and_remedy(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MLP(**arguments, rngs=nnx.Rngs(0))
