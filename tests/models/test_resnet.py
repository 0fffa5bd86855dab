import jax
import numpy as np
import pytest
from flax import nnx

from axon_dist.core import tree
from axon_dist.core.errors import ConfigError, DTypeError
from axon_dist.models import ResNet, ResNetConfig, classification_loss

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3)).astype(np.uint8)


def make(**fields):
    return ResNet(ResNetConfig.preset("tiny", **fields), rngs=nnx.Rngs(0))


@nnx.jit
def forward(model, images):
    return model(images)


@pytest.mark.parametrize(("name", "count"), [("resnet50", 25_557_032), ("resnet18", 11_689_512)])
def test_presets_have_their_published_parameters(name, count):
    """Counts parameters as torchvision does: weights, biases, and scale and shift of BatchNorm."""
    model = nnx.eval_shape(lambda: ResNet(ResNetConfig.preset(name), rngs=nnx.Rngs(0)))
    assert tree.num_params(nnx.state(model, nnx.Param)) == count


def convolve(x, kernel, stride):
    """Computes a padded convolution in float64 numpy, one output pixel at a time."""
    size = kernel.shape[0]
    half, (batch, height, width, _) = size // 2, x.shape
    x = np.pad(x, ((0, 0), (half, half), (half, half), (0, 0)))
    rows, columns = -(-height // stride), -(-width // stride)
    out = np.empty((batch, rows, columns, kernel.shape[-1]))
    for i, j in np.ndindex(rows, columns):
        window = x[:, i * stride : i * stride + size, j * stride : j * stride + size]
        out[:, i, j] = np.tensordot(window, kernel, 3)
    return out


def normed(x, layer, stride=1):
    """Computes a convolution, and BatchNorm with the statistics of the batch."""
    x = convolve(x, layer["conv"]["kernel"], stride)
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(var + 1e-5) * layer["norm"]["scale"] + layer["norm"]["bias"]


def pooled(x):
    batch, height, width, features = x.shape
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
    out = np.empty((batch, height // 2, width // 2, features))
    for i, j in np.ndindex(height // 2, width // 2):
        out[:, i, j] = x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2))
    return out


def plain_forward(model, images):
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    weights = jax.tree.map(lambda a: np.asarray(a, np.float64), state)
    relu, config = lambda x: np.maximum(x, 0), model.config
    large = config.stem == "imagenet"
    x = relu(normed(np.asarray(images) / 127.5 - 1, weights["stem"], 2 if large else 1))
    x = pooled(x) if large else x
    halving = set(np.cumsum(config.stage_sizes)[:-1])
    strided = 1 if config.block == "bottleneck" else 0
    for i, block in sorted(weights["blocks"].items()):
        y, stride = x, 2 if i in halving else 1
        for j, layer in sorted(block["layers"].items()):
            y = normed(y if j == 0 else relu(y), layer, stride if j == strided else 1)
        x = relu(y + (normed(x, block["shortcut"], stride) if "shortcut" in block else x))
    return x.mean((1, 2)) @ weights["head"]["kernel"] + weights["head"]["bias"]


@pytest.mark.full
@pytest.mark.sample("bottleneck-imagenet")
@pytest.mark.parametrize(("block", "stem"), [("basic", "small"), ("bottleneck", "imagenet")])
def test_forward_equals_plain_numpy(block, stem):
    model = make(block=block, stem=stem, stage_sizes=(2, 1))
    want = plain_forward(model, IMAGES)
    np.testing.assert_allclose(forward(model, IMAGES), want, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_evaluation_takes_the_running_statistics():
    model = make()
    before = np.asarray(model.stem.norm.mean[...])
    forward(model, IMAGES)
    after = np.asarray(model.stem.norm.mean[...])
    assert np.abs(after - before).max() > 1e-3
    model.eval()
    alone, together = forward(model, IMAGES[:1])[0], forward(model, IMAGES)[0]
    np.testing.assert_allclose(alone, together, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(model.stem.norm.mean[...], after)


@pytest.mark.full
def test_every_parameter_has_a_gradient():
    batch = {"x": IMAGES, "y": np.array([1, 2, 3, 4], np.int32)}
    grads, _ = nnx.jit(nnx.grad(classification_loss, has_aux=True))(make(), batch)
    for path, leaf in tree.leaves_with_paths(nnx.to_pure_dict(grads)):
        assert float(abs(leaf).max()) > 1e-6, path


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"stage_sizes": ()}, ConfigError, r"stage_sizes=\(\) must have at least one stage"),
        ({"stage_sizes": (2, 0)}, ConfigError, r"each of 1 block or more"),
        ({"block": "basik"}, ConfigError, r"block='basik' is not a block.*'basic'"),
        ({"stem": "large"}, ConfigError, r"stem='large' is not a stem"),
        ({"width": 0}, ConfigError, r"width=0 must be at least 1"),
        ({"norm_momentum": 1.0}, ConfigError, r"norm_momentum=1.0 must be in \[0, 1\)"),
        ({"norm_eps": 0.0}, ConfigError, r"norm_eps=0.0 must be above 0"),
        ({"param_dtype": "int8"}, DTypeError, r"param_dtype='int8' must be a floating-point"),
    ],
)
def test_validate_names_value_and_remedy(fields, error, message):
    with pytest.raises(error, match=message):
        ResNetConfig.preset("tiny", **fields).validate()


def test_preset_typos():
    with pytest.raises(ConfigError, match=r"no ResNet preset 'resnet5'.*'resnet50'"):
        ResNetConfig.preset("resnet5")
