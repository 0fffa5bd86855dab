import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core import tree
from axon_dist.core.errors import ConfigError, DTypeError
from axon_dist.models import VIT_PRESETS, ViT, ViTConfig, classification_loss
from tests.drawn import drawn

SMALL = ViTConfig.preset("tiny")
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)


def plain_forward(model, images):
    """Computes the same function in float64 numpy from the weights, by patch and head."""
    weights = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(model)))
    config, size = model.config, model.config.patch_size
    apply = lambda x, layer: x @ layer["kernel"] + layer.get("bias", 0)
    starts = range(0, config.image_size, size)
    x = np.asarray(images, np.float64) / 127.5 - 1
    cut = [x[:, i : i + size, j : j + size].reshape(len(x), -1) for i in starts for j in starts]
    x = apply(np.stack(cut, 1), weights["patch_embedding"]) + weights["positions"]
    for i in range(config.num_layers):
        block = weights["blocks"][i]
        y = norm(x, block["attention_norm"])
        heads = [apply(y, block["attention"][name]) for name in "qkv"]
        mixed = np.concatenate(
            [attend(*part) for part in zip(*(np.split(h, 4, -1) for h in heads), strict=True)], -1
        )
        x = x + apply(mixed, block["attention"]["out"])
        y = gelu(apply(norm(x, block["mlp_norm"]), block["mlp"]["up"]))
        x = x + apply(y, block["mlp"]["down"])
    return apply(norm(x, weights["final_norm"]).mean(1), weights["head"])


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm(x, weights):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + SMALL.norm_eps)
    return scaled * weights["scale"] + weights["bias"]


def attend(query, key, value):
    scores = np.exp(query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1]))
    return scores / scores.sum(-1, keepdims=True) @ value


def made():
    """A model with norms around one, so that images prefer some patches to others."""
    model = drawn(lambda: ViT(SMALL, rngs=nnx.Rngs(0)))
    around_one = lambda path, x: jax.device_put(np.asarray(x) + np.float32(path[-1] == "scale"))
    nnx.update(model, nnx.map_state(around_one, nnx.state(model, nnx.Param)))
    return model


@nnx.jit
def whole(model, images):
    return model(images)


def test_forward_equals_plain_numpy():
    model = made()
    got = whole(model, IMAGES)
    np.testing.assert_allclose(got, plain_forward(model, IMAGES), rtol=1e-4, atol=1e-5)


def test_bytes_and_the_floats_that_they_mean_are_the_same_image():
    model = made()
    np.testing.assert_array_equal(model(IMAGES), model(IMAGES.astype(np.float32) / 127.5 - 1))


@pytest.mark.full
def test_every_parameter_has_a_gradient():
    model = ViT(SMALL, rngs=nnx.Rngs(0))
    batch = {"x": IMAGES, "y": np.array([1, 2, 3], np.int32)}
    grads, _ = nnx.jit(nnx.grad(classification_loss, has_aux=True))(model, batch)
    for path, leaf in tree.leaves_with_paths(nnx.to_pure_dict(grads)):
        assert float(jnp.abs(leaf).max()) > 1e-6, path


def count_params(**config):
    model = nnx.eval_shape(lambda: ViT(ViTConfig.preset(**config), rngs=nnx.Rngs(0)))
    return tree.num_params(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("name", "layers", "count"),
    # Published: 86,567,656, including a class token, its position and biases of keys, 14 x 768.
    [("b16", 12, 86_556_904), ("1b", 40, 1_012_552_296)],
)
def test_presets_have_their_parameters(name, layers, count):
    one, two = (count_params(name=name, num_layers=number) for number in (1, 2))
    assert ViTConfig.preset(name).num_layers == layers
    assert one + (layers - 1) * (two - one) == count


@pytest.mark.parametrize("name", VIT_PRESETS)
def test_presets_are_valid(name):
    ViTConfig.preset(name).validate()


def test_images_of_another_size_are_refused():
    with pytest.raises(ConfigError, match=r"images of \(8, 16, 3\) .* a model of \(16, 16, 3\)"):
        nnx.eval_shape(lambda: ViT(SMALL, rngs=nnx.Rngs(0))(IMAGES[:, :8]))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"patch_size": 5}, ConfigError, r"image_size=16 does not divide by patch_size=5"),
        ({"num_heads": 5}, ConfigError, r"width=32 does not divide by num_heads=5"),
        ({"num_layers": 0}, ConfigError, r"num_layers=0 must be at least 1"),
        ({"ffn_width": -1}, ConfigError, r"hidden_size=-1 must be at least 1"),
        ({"dropout": 1.0}, ConfigError, r"dropout=1.0 must be in \[0, 1\)"),
        ({"norm_eps": 0.0}, ConfigError, r"norm_eps=0.0 must be above 0"),
        ({"dtype": "int8"}, DTypeError, r"dtype='int8' must be a floating-point"),
        ({"attention": "flush"}, ConfigError, r"Did you mean 'flash'\?"),
    ],
)
def test_validate_names_value_and_remedy(fields, error, message):
    with pytest.raises(error, match=message):
        ViTConfig.preset("tiny", **fields).validate()


def test_preset_typos():
    with pytest.raises(ConfigError, match=r"no ViT preset 'b1'.*"):
        ViTConfig.preset("b1")
