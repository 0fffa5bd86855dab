"""The accuracy of image models in training and evaluation, however the batch is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Pipeline, build_train_step, compose, ddp, fsdp, tensor_parallel
from axon_dist.models import ViT, ViTConfig, classification_loss
from axon_dist.parallel import suggest_plan

CONFIG = ViTConfig.preset("tiny", image_size=8, patch_size=4, num_layers=2, num_classes=8)
IMAGES = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3)).astype(np.uint8)


def make():
    model = ViT(CONFIG, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: 3 * x, nnx.state(model, nnx.Param)))
    return model


def piped(model):
    return compose(Pipeline(model, num_ranks=2, num_microbatches=4), ddp())


STRATEGIES = {
    "ddp": ("dp=8", lambda model: ddp()),
    "fsdp and tensor": (
        "fsdp=2,tp=2",
        lambda model: compose(fsdp(), tensor_parallel(suggest_plan(model, jnp.asarray(IMAGES)))),
    ),
    "pipeline": ("pp=2,dp=2", piped),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "pipeline" else [pytest.mark.full])
        for name in STRATEGIES
    ],
)
def test_accuracy_is_that_of_one_device(make_world, name):
    axes, strategy = STRATEGIES[name]
    model = make()
    # Most labels are right, more of them in the first half of the batch.
    likeliest = np.asarray(model(IMAGES).argmax(-1))
    labels = np.where(np.arange(16) % np.where(np.arange(16) < 8, 4, 3), likeliest, likeliest + 1)
    batch = {"x": IMAGES, "y": (labels % 8).astype(np.int32)}
    want = np.mean(likeliest == batch["y"])
    assert 0 < want < 1
    step = build_train_step(
        model, optax.sgd(0.1), classification_loss, strategy(model), make_world(axes)
    )
    state = step.init()
    assert float(step.evaluate(state, batch)["accuracy"]) == pytest.approx(want)
    assert float(step(state, batch)[1]["accuracy"]) == pytest.approx(want)
