"""GPUs multiply as much as was traced: no compiler pass computes a microbatch twice."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, fsdp
from axon_dist.inspect import report, target_devices
from axon_dist.mesh.targets import missing_compiler
from axon_dist.models import (
    ExpertConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
    classification_loss,
    next_token_loss,
)
from axon_dist.planner import read_step

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(missing_compiler("h100:8") is not None, reason="needs the CUDA compiler"),
]
LENGTH, VOCAB = 512, 32_768
PLAIN = TransformerConfig(vocab_size=VOCAB, width=256, num_layers=2, num_heads=2, max_length=LENGTH)
GPT = dict(
    tied_head=True, norm="layer", positions="learned", gated=False, activation="gelu", bias=True
)
GEMMA = dict(num_layers=4, windows=(128, 0), tied_head=True, norms="around", logit_softcap=30.0)
EXPERTS = ExpertConfig(count=8, per_token=2, width=256, shared=1)
VISION = ViTConfig(image_size=224, width=256, num_layers=2, num_heads=2, num_classes=1000)


class TwoKinds(nnx.Module):
    """Dense blocks, then blocks of experts, under one tied table."""

    def __init__(self):
        dense, sparse = (
            Transformer(dataclasses.replace(PLAIN, experts=experts), rngs=nnx.Rngs(0))
            for experts in (None, EXPERTS)
        )
        self.table = nnx.Embed(VOCAB, 256, rngs=nnx.Rngs(1))
        self.blocks = nnx.List([*dense.blocks, *sparse.blocks])

    def __call__(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.table.attend(x)


def plain_loss(model, batch):
    logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
    labels = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def transformer(**changes):
    config = dataclasses.replace(PLAIN, **changes)
    return lambda: Transformer(config, rngs=nnx.Rngs(0)), next_token_loss


MODELS = {
    "gpt": transformer(**GPT),
    "llama": transformer(num_kv_heads=1, scan_layers=True),
    "gemma": transformer(**GEMMA),
    "mixtral": transformer(experts=EXPERTS),
    "deepseek": (TwoKinds, plain_loss),
    "vit": (lambda: ViT(VISION, rngs=nnx.Rngs(0)), classification_loss),
}
"""Kinds of models that people train: a maker and a loss."""


def batch_of(name, rows):
    if name == "vit":
        image = jax.ShapeDtypeStruct((rows, 224, 224, 3), jnp.float32)
        return {"x": image, "y": jax.ShapeDtypeStruct((rows,), jnp.int32)}
    return {"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)}


@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_compiled_step_multiplies_what_was_traced(name, microbatches):
    make, loss_fn = MODELS[name]
    world = World.init("fsdp=8", devices=list(target_devices("h100:8")))
    step = build_train_step(
        make, optax.adamw(1e-3), loss_fn, fsdp(), world, accumulate=microbatches,
        clip_norm=1.0, precision="bf16",
    )  # fmt: skip
    batch = batch_of(name, 8 * microbatches)
    compiled = step.lower(batch).compile()
    found = report(compiled, world.mesh, traced_flops=read_step(step, batch).flops)
    assert found.flops_over_traced == pytest.approx(1, abs=0.02)
    assert found.warnings() == []
