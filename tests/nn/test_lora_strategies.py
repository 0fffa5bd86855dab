"""Scaled adapters of several ranks, on strategies: equal to the same model on one device."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import build_train_step, compose, fsdp, lora, pipelined, tensor_parallel
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import ddp, suggest_plan
from tests.one_device import trained

CONFIG = TransformerConfig(vocab_size=64, width=32, num_layers=4, num_heads=4, max_length=16)
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 8, 17)).astype(np.int32)
OPTIONS = {
    "alpha": 7.0,
    "rslora": True,
    "rank_pattern": {"attention/q": 2},
    "alpha_pattern": {"mlp": 3.0},
}


def make():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    model = lora(model, 4, ("attention", "mlp"), rngs=nnx.Rngs(1), **OPTIONS)
    for number, (_, variable) in enumerate(nnx.iter_graph(model)):
        if isinstance(variable, nnx.LoRAParam):
            random = np.random.default_rng(number)
            variable.set_value(0.1 * random.normal(size=variable.shape).astype(np.float32))
    return model


def split_by_tensor():
    return tensor_parallel(suggest_plan(make()))


WAYS = {
    "fsdp": ("fsdp=4", lambda: fsdp(min_elements=8), {}),
    "fsdp, layers in a loop": ("fsdp=4", lambda: fsdp(min_elements=8), {"scan_layers": True}),
    "fsdp 3": ("fsdp=3", lambda: fsdp(min_elements=8), {}),
    "tensor": ("tp=2", split_by_tensor, {}),
    "fsdp and tensor": (
        "fsdp=2,tp=2", lambda: compose(fsdp(min_elements=8), split_by_tensor()), {}
    ),
    "pipeline": ("pp=2", lambda: pipelined(2, 4), {}),
    "pipeline and ddp": ("pp=2,dp=2", lambda: compose(pipelined(2, 2), ddp()), {}),
}  # fmt: skip
DEFAULT = ("tensor",)


def batches(name):
    """Batches whose number of samples divides by the number of devices."""
    rows = 6 if name == "fsdp 3" else 8
    return [{"tokens": x[:rows]} for x in TOKENS]


def rows():
    for name in WAYS:
        for optimizer in ("sgd", "adam"):
            is_tried = name in DEFAULT and optimizer == "sgd"
            yield pytest.param(name, optimizer, marks=() if is_tried else pytest.mark.full)


@pytest.mark.full
@pytest.mark.sample("tensor-sgd")
@pytest.mark.parametrize(("name", "optimizer"), tuple(rows()))
def test_equals_one_device(name, optimizer, make_world):
    mesh, strategy, options = WAYS[name]
    tx = optax.sgd(0.3) if optimizer == "sgd" else optax.adam(1e-2)
    step = build_train_step(
        make, tx, next_token_loss, strategy(), make_world(mesh), trainable=nnx.LoRAParam, **options
    )
    state = step.init()
    losses = []
    for batch in batches(name):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))

    def loss(model, batch):
        found = next_token_loss(model, batch)
        return found.total / found.weight

    model = make()
    wanted = trained(model, tx, loss, batches(name), nnx.LoRAParam)
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    found = step.merge(state)
    for mine, theirs in zip(
        jax.tree.leaves(nnx.state(found, nnx.Param)),
        jax.tree.leaves(nnx.state(model, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)
