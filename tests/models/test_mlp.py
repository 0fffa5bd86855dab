import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core import tree
from axon_dist.core.errors import ConfigError
from axon_dist.models import MLP


def test_forward_equals_plain_numpy():
    model = MLP((3, 5, 4, 2), activation="tanh", rngs=nnx.Rngs(0))
    for i, layer in enumerate(model.layers):
        layer.bias[...] = jnp.arange(layer.bias[...].size, dtype=jnp.float32) + i
    x = np.asarray(jax.random.normal(jax.random.key(0), (6, 3)))
    want = x
    for i, layer in enumerate(model.layers):
        want = want @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
        want = np.tanh(want) if i < 2 else want
    np.testing.assert_allclose(model(x), want, rtol=1e-5)


def test_parameter_count():
    model = nnx.eval_shape(lambda: MLP((784, 256, 10), rngs=nnx.Rngs(0)))
    assert tree.num_params(nnx.state(model, nnx.Param)) == 203_530


def test_dropout_rests_in_evaluation():
    model = MLP((8, 64, 4), dropout=0.5, rngs=nnx.Rngs(0))
    x = jnp.ones((2, 8))
    assert not np.array_equal(model(x), model(x))
    model.eval()
    np.testing.assert_array_equal(model(x), model(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": (3,)}, r"sizes=\(3,\) must name at least an input and an output"),
        ({"sizes": (3, 0)}, r"sizes=\(3, 0\) must name .* each 1 or more"),
        ({"sizes": (3, 2), "activation": "rely"}, r"'rely'.*Did you mean 'relu'\?"),
        ({"sizes": (3, 2), "dropout": 1.5}, r"dropout=1.5 must lie in \[0, 1\)"),
    ],
)
def test_errors_name_value_and_remedy(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MLP(**arguments, rngs=nnx.Rngs(0))
