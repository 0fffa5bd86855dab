"""What the models of this project are found to be, and what is not known of foreign ones."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, ddp
from axon_dist.core.errors import ConfigError
from axon_dist.models import (
    ResNet,
    ResNetConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)
from axon_dist.program.sample_use import Use
from axon_dist.step.parts import take_apart
from axon_dist.step.separable import sample_use

from ..contracts.models import CASES
from ..contracts.reference import assert_close, train

IMAGES = {"x": np.zeros((4, 16, 16, 3), np.uint8), "y": np.zeros(4, np.int32)}


def found(make, loss_fn, batch):
    """The use, where a rank has two of six samples."""
    return sample_use(take_apart(make)[0], loss_fn, batch, (2, 6))


@pytest.mark.parametrize("name", CASES)
def test_the_models_of_the_contracts_are_separable(name):
    case = CASES[name]
    assert found(case.make, case.loss_fn, case.batch(0)).coupled == ""


def test_image_models_are_separable():
    vit = dataclasses.replace(ViTConfig.preset("tiny"), image_size=16, patch_size=8, dropout=0.1)
    resnet = ResNetConfig.preset("tiny")
    for make in (
        lambda: ViT(vit, rngs=nnx.Rngs(0, dropout=1)),
        lambda: ResNet(resnet, rngs=nnx.Rngs(0)),
    ):
        use = found(make, classification_loss, IMAGES)
        assert use.coupled == ""
        assert use.loss.kind is Use.MEAN


def test_a_decoder_with_dropout_in_half_precision_is_separable():
    config = dataclasses.replace(TransformerConfig.preset("tiny"), dropout=0.1)
    make = lambda: Transformer(config, rngs=nnx.Rngs(0, dropout=1))
    use = found(make, next_token_loss, CASES["transformer"].batch(0))
    assert (use.loss.kind, use.coupled) == (Use.WEIGHTED, "")


def test_statistics_of_a_mask_are_not_those_of_all_ranks():
    """Flax averages the means of the ranks, however many samples each mask leaves."""

    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            return self.norm(x, mask=x[:, :1] > 0)

    use = found(
        lambda: Masked(nnx.Rngs(0)), lambda m, b: jnp.mean(m(b["x"]) ** 2), {"x": jnp.ones((4, 3))}
    )
    assert use.loss.kind is Use.COUPLED


class LinenNorm(nn.Module):
    """Batch statistics that no one outside can average."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x)))


def test_batch_norm_of_a_bridged_model_runs_in_global_view():
    def make():
        model = nnx.bridge.ToNNX(LinenNorm(), rngs=nnx.Rngs(0))
        return model.lazy_init(jnp.ones((2, 16)), mutable=["batch_stats"])

    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"], mutable=["batch_stats"]) - batch["y"]) ** 2)

    case = dataclasses.replace(CASES["linen"], make=make, loss_fn=loss_fn)
    world = World.emulate(2, "dp=2")
    step = build_train_step(make(), optax.sgd(0.1), loss_fn, ddp(), world, accumulate=2)
    assert str(step.separation(case.batch(0))).startswith("global view, because the loss")
    want = train(case, optax.sgd(0.1), 1, accumulate=2)
    state, metrics = step(step.init(), case.batch(0))
    assert float(metrics["loss"]) == pytest.approx(want.losses[0], rel=1e-5)
    assert_close(state.params, want.params, 1e-5, "parameter")
    assert_close(state.buffers, want.buffers, 1e-5, "buffer")


def test_arrays_from_outside_may_lie_anywhere():
    """A constant of the loss that lies on a mesh, beside statistics that are averaged."""
    world = World.emulate(2, "dp=2")
    spread = jax.device_put(
        jnp.ones(4), jax.NamedSharding(world.mesh, jax.sharding.PartitionSpec("dp"))
    )
    case = CASES["batchnorm"]
    loss_fn = lambda m, b: jnp.mean((m(b["x"]) * spread - b["y"]) ** 2)
    assert found(case.make, loss_fn, case.batch(0)).coupled == ""


def test_nothing_is_looked_at_where_nothing_is_cut():
    case = CASES["mlp"]
    calls = []

    def loss_fn(model, batch):
        calls.append(len(batch["x"]))
        return case.loss_fn(model, batch)

    step = build_train_step(case.make(), optax.sgd(0.1), loss_fn, ddp(), World.emulate(4, "dp=4"))
    assert str(step.separation(case.batch(0))) == "global view"
    assert calls == []
    cut = build_train_step(
        case.make(), optax.sgd(0.1), loss_fn, ddp(), World.emulate(4, "dp=4"), accumulate=2
    )
    first = cut.separation(case.batch(0))
    assert cut.separation(case.batch(1)) is first
    assert calls == [16, 4]


def test_a_promise_is_true_or_false():
    case = CASES["mlp"]
    with pytest.raises(ConfigError, match="separable is 'yes'; it must be None or True or False"):
        build_train_step(
            case.make(), optax.sgd(0.1), case.loss_fn, ddp(), World.emulate(2, "dp=2"),
            separable="yes",
        )  # fmt: skip
