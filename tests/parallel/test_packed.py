"""Rows of several documents under every strategy equal the documents one by one on one device."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import context_parallel, fsdp, pipelined, tensor_parallel

CONFIG = TransformerConfig.preset("tiny", vocab_size=32, width=16, head_dim=4, ffn_width=16)
LENGTHS = ((3, 9, 5), (17,), (2, 2, 2, 2), (1, 15))


def packed():
    random = np.random.default_rng(1)
    tokens, segments = (np.zeros((len(LENGTHS), 17), np.int32) for _ in range(2))
    for row, lengths in enumerate(LENGTHS):
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        tokens[row] = random.integers(1, 32, 17)
    return {"tokens": tokens, "segments": segments}


def make(**changes):
    return Transformer(TransformerConfig(**(vars(CONFIG) | changes)), rngs=nnx.Rngs(0))


def of_documents():
    """The mean loss over all documents and its gradients, each document by itself."""
    batch, model = packed(), make()
    graph, params = nnx.split(model)
    documents = [
        tokens[segments == number][None]
        for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True)
        for number in range(1, segments.max() + 1)
    ]

    def mean(params):
        model = nnx.merge(graph, params)
        found = [next_token_loss(model, {"tokens": d}) for d in documents if d.shape[1] > 1]
        return sum(f.total for f in found) / sum(f.weight for f in found)

    return jax.jit(jax.value_and_grad(mean))(params)


STRATEGIES = {
    "ddp": ("dp=4", lambda: ddp(), {}, {}),
    "ring": ("cp=4", lambda: context_parallel("ring"), {}, {}),
    "ring in tensor": (
        "dp=2,cp=2,tp=2",
        lambda: compose(ddp(), context_parallel("ring"), tensor_parallel("transformer")),
        {"scan_layers": True},
        {},
    ),
    "ulysses": ("dp=2,cp=4", lambda: compose(ddp(), context_parallel("ulysses")), {}, {}),
    "fsdp": (
        "fsdp=4", lambda: fsdp(min_elements=8), {}, {"remat": ActivationCheckpointing(1)}
    ),
    "accumulate": ("dp=2", lambda: ddp(), {}, {"accumulate": 2}),
    "pipeline": ("pp=2", lambda: pipelined(2, 4), {}, {}),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", STRATEGIES)
def test_packed_rows_are_documents(name):
    mesh, strategy, changes, options = STRATEGIES[name]
    size = np.prod([int(part.split("=")[1]) for part in mesh.split(",")])
    world = World.emulate(int(size), mesh)
    model = make(**changes)
    step = build_train_step(model, optax.sgd(0.1), next_token_loss, strategy(), world, **options)
    grads, metrics = step.gradients(step.init(), packed())
    loss, wanted = of_documents()
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    if changes or name == "pipeline":
        return
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(np.abs(want).max(), 1e-3))
