"""The cross-entropy of a linear head over a mesh: what it computes, sends and holds."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import DDP, World, build_train_step, compose, ddp
from axon_dist.inspect import collectives, flops
from axon_dist.ir.rewrite import Rewriting
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.nn import Layout, linear_cross_entropy
from axon_dist.parallel import LossOverMesh, fsdp, pipelined, tensor_parallel
from axon_dist.step.model_changes import rewritten

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(4, 6, 8)).astype(np.float32)
LABELS = RNG.integers(0, 24, size=(4, 6)).astype(np.int32)


@pytest.mark.parametrize(("classes", "num_chunks"), [(24, 3), (25, 1)])
def test_equals_the_dense_loss_and_reduces_the_head_once(classes, num_chunks):
    mesh = World.emulate(8, "fsdp=2,tp=4").mesh
    kernel = RNG.normal(size=(8, classes)).astype(np.float32)
    layout = Layout(mesh, batch=("fsdp",), vocabulary=("tp",))
    dense = lambda h, k: optax.softmax_cross_entropy_with_integer_labels(h @ k, LABELS).sum()
    loss = lambda h, k: linear_cross_entropy(h, k, LABELS, num_chunks=num_chunks).total
    split = Rewriting({LossOverMesh.replaces: LossOverMesh(layout)}).of(loss)
    want, grads = jax.jit(jax.value_and_grad(dense, argnums=(0, 1)))(HIDDEN, kernel)
    compiled = jax.jit(jax.value_and_grad(split, argnums=(0, 1))).lower(HIDDEN, kernel).compile()
    got, found = compiled(HIDDEN, kernel)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for ours, theirs in zip(found, grads, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    ledger = collectives(compiled, mesh)
    kernels = [row for row in ledger.select(axis="fsdp") if row.wire_bytes > kernel.nbytes / 8]
    assert sum(row.count for row in kernels) == 1
    # Each rank has its half of the positions, and its quarter of the classes where these divide.
    ways = 8 if classes % 4 == 0 else 2
    assert flops(compiled).high == 3 * 2 * LABELS.size * kernel.size / ways


def test_classes_may_be_split_over_two_axes():
    """As by two tensor-parallel parts of a strategy, each on an axis of its own."""
    kernel = RNG.normal(size=(8, 24)).astype(np.float32)
    mesh = World.emulate(8, "dp=2,fsdp=2,tp=2").mesh
    layout = Layout(mesh, batch=("dp",), vocabulary=("fsdp", "tp"))
    dense = lambda h, k: optax.softmax_cross_entropy_with_integer_labels(h @ k, LABELS).sum()
    loss = lambda h, k: linear_cross_entropy(h, k, LABELS).total
    split = Rewriting({LossOverMesh.replaces: LossOverMesh(layout)}).of(loss)
    want, grads = jax.jit(jax.value_and_grad(dense, argnums=(0, 1)))(HIDDEN, kernel)
    got, found = jax.jit(jax.value_and_grad(split, argnums=(0, 1)))(HIDDEN, kernel)
    assert float(got) == pytest.approx(float(want), rel=1e-6)
    for ours, theirs in zip(found, grads, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_nothing_is_rewritten_on_one_device():
    loss = lambda h, k: linear_cross_entropy(h, k, LABELS).total
    assert rewritten(loss, ddp(), World.emulate(1, "dp=1").mesh) is loss


VOCABULARY, LENGTH = 32768, 1024
STEPS = {
    "ddp": (lambda model, world: DDP(model, world.group("dp")), "dp=2", 1),
    "fsdp": (lambda model, world: fsdp(), "fsdp=2", 1),
    "tp": (lambda model, world: compose(ddp(), tensor_parallel("transformer")), "dp=2,tp=2", 2),
    "pp": (lambda model, world: compose(pipelined(2, 2), ddp()), "pp=2,dp=2", 1),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [n if n == "tp" else pytest.param(n, marks=pytest.mark.full) for n in STEPS]
)
def test_no_step_holds_all_its_logits(name):
    """The program is compiled but not run: its logits would take 2 GiB of each device."""
    strategy, mesh, parts = STEPS[name]
    world = World.emulate(2 if name in ("ddp", "fsdp") else 4, mesh)
    # A rank has 16 x 1024 positions at a time, and under tp its part of the vocabulary.
    samples = 32 * parts * (2 if name == "pp" else 1)

    def compiled(logits):
        config = TransformerConfig(
            vocab_size=VOCABULARY, width=16, num_layers=2, num_heads=1, ffn_width=16, logits=logits
        )
        make = lambda: Transformer(config, rngs=nnx.Rngs(0))
        loss = next_token_loss
        step = build_train_step(
            make, optax.sgd(0.1), loss, strategy(make, world), world, precision="bf16"
        )
        batch = {"tokens": jax.ShapeDtypeStruct((samples, LENGTH + 1), jnp.int32)}
        return step.lower(batch).compile()

    chunked, whole = compiled("auto"), compiled("whole")
    columns = VOCABULARY // (2 if name == "tp" else 1)
    positions = samples // (4 if name == "pp" else 2) * LENGTH
    assert largest_logits(whole, columns) == positions * columns
    assert largest_logits(chunked, columns) <= positions * columns / 2
    assert flops(chunked).high <= 1.01 * flops(whole).high
    saved = whole.memory_analysis().temp_size_in_bytes
    assert chunked.memory_analysis().temp_size_in_bytes < 0.8 * saved


def largest_logits(compiled, columns: int) -> int:
    """The elements of the largest float32 array that has a column for every token."""
    found = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
    shapes = [tuple(map(int, dims.split(","))) for dims in found]
    return max(int(np.prod(dims)) for dims in shapes if columns in dims)
