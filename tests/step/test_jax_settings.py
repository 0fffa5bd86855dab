"""A step trains as one device does under whatever settings of JAX its user has chosen."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import (
    Weighted,
    World,
    build_train_step,
    compose,
    context_parallel,
    ddp,
    expert_parallel,
    fsdp,
    pipelined,
    tensor_parallel,
)
from axon_dist.models import (
    Transformer,
    TransformerConfig,
    generate,
    next_token_loss,
    next_token_scores,
)
from axon_dist.models.config import ExpertConfig
from tests.drawn import drawn

SETTINGS = {
    "rank promotion": {"jax_numpy_rank_promotion": "raise"},
    "dtype promotion": {"jax_numpy_dtype_promotion": "strict"},
    "nans": {"jax_debug_nans": True, "jax_debug_infs": True},
    "x64": {"jax_enable_x64": True},
    "rbg": {"jax_default_prng_impl": "rbg"},
    "threefry": {"jax_threefry_partitionable": False},
    "key reuse": {"jax_debug_key_reuse": True},
    "legacy keys": {"jax_legacy_prng_key": "error"},
    "leaks": {"jax_check_tracer_leaks": True},
    "matmul": {"jax_default_matmul_precision": "highest"},
}

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
FEATURES = {"x": X, "y": np.sin(X)}
TOKENS = {"tokens": np.random.default_rng(1).integers(0, 32, (8, 9)).astype(np.int32)}


class Dropping(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(jax.nn.gelu(self.first(x))))


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def transformer(**more):
    sizes = {"vocab_size": 32, "width": 8, "num_layers": 1, "num_heads": 2, "ffn_width": 8}
    config = TransformerConfig(**{**sizes, "max_length": 8, **more})
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


EXPERTS = ExpertConfig(count=2, per_token=1, width=8)
ROWS = {
    "fsdp": (Dropping, squares, FEATURES, fsdp(), "fsdp=4", 2),
    "tensor": (
        transformer(), next_token_loss, TOKENS,
        compose(ddp(), tensor_parallel("transformer", sequence=True)), "dp=2,tp=2", 1,
    ),
    "ring": (transformer(), next_token_loss, TOKENS, context_parallel("ring"), "cp=2", 1),
    "pipeline": (
        transformer(dropout=0.1, num_layers=2), next_token_loss, TOKENS, pipelined(2, 2), "pp=2", 1,
    ),
    "experts": (
        transformer(experts=EXPERTS), next_token_loss, TOKENS, expert_parallel(), "ep=2", 1,
    ),
}  # fmt: skip

_LOOKUP = "the leak check of JAX 0.12 refuses any shard_map that sums a jnp.where over an axis"
REFUSED_BY_JAX = {("tensor", "leaks"): _LOOKUP, ("experts", "leaks"): _LOOKUP}


@contextlib.contextmanager
def settings(values):
    old = {name: getattr(jax.config, name) for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            jax.config.update(name, value)


def losses(make, loss_fn, batch, strategy, mesh, accumulate):
    world = World.emulate(math.prod(int(part.split("=")[1]) for part in mesh.split(",")), mesh)
    # Adam's bias correction raises an integer to a power, which strict promotion refuses.
    step = build_train_step(
        make, optax.sgd(0.1, momentum=0.9), loss_fn, strategy, world,
        batch=batch, accumulate=accumulate,
    )  # fmt: skip
    state, found = step.init(), []
    for _ in range(3):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.sample("fsdp-rank promotion")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("row", ROWS)
def test_a_setting_of_jax_leaves_a_step_that_of_one_device(row, name):
    if (row, name) in REFUSED_BY_JAX:
        pytest.skip(REFUSED_BY_JAX[row, name])
    make, loss_fn, batch, strategy, mesh, accumulate = ROWS[row]
    with settings(SETTINGS[name]):
        got = losses(make, loss_fn, batch, strategy, mesh, accumulate)
        want = losses(make, loss_fn, batch, ddp(), "dp=1", 1)
    np.testing.assert_allclose(got, want, rtol=2e-5)


CUTS = {
    "ddp": (ddp(), {}),
    "accumulated": (ddp(), {"accumulate": 2}),
    "buckets": (ddp(bucket_capacity=100), {}),
    "fsdp": (fsdp(min_elements=1), {"accumulate": 2}),
    "elastic": (ddp(), {"deterministic": "elastic", "logical_shards": 4}),
}


@pytest.mark.sample("weights-accumulated", "number-buckets")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("weigh", [jnp.sum, lambda weight: 0.3], ids=["weights", "number"])
def test_a_model_in_float64_has_losses_and_gradients_in_float64(cut, weigh):
    class Product(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.asarray(np.random.default_rng(0).normal(size=(8, 8))))

    def loss_fn(model, batch):
        squares = jnp.mean((batch["x"] @ model.kernel[...]) ** 2, -1)
        return Weighted(jnp.sum(squares * batch["weight"]), weigh(batch["weight"]))

    def mean(kernel):
        model = Product()
        model.kernel[...] = kernel
        return loss_fn(model, batch).mean

    rng = np.random.default_rng(1)
    batch = {"x": rng.normal(size=(8, 8)), "weight": rng.uniform(size=8)}
    strategy, options = CUTS[cut]
    with settings(SETTINGS["x64"]):
        world = World.emulate(4)
        step = build_train_step(Product, optax.sgd(0.1), loss_fn, strategy, world, **options)
        state = step.init()
        grads, metrics = step.gradients(state, batch)
        loss, grad = jax.value_and_grad(mean)(Product().kernel[...])
        assert metrics["loss"].dtype == np.float64
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-13)
        np.testing.assert_allclose(grads["kernel"], grad, rtol=1e-12)
        if weigh is jnp.sum:
            np.testing.assert_allclose(step.evaluate(state, batch)["loss"], loss, rtol=1e-13)


@pytest.mark.parametrize(
    "more",
    [
        {"positions": "learned", "norm": "layer", "bias": True, "gated": False},
        {
            "qk_norm": "head",
            "windows": (4, 0),
            "num_layers": 2,
            "attention_softcap": 5.0,
            "num_kv_heads": 1,
        },
        {"experts": dataclasses.replace(EXPERTS, bias_rate=0.1)},
    ],
    ids=lambda more: ",".join(more),
)
def test_models_promote_no_ranks(more):
    graphdef, params, rest = nnx.split(nnx.eval_shape(transformer(**more)), nnx.Param, ...)

    def loss_of(params, rest):
        result = next_token_loss(nnx.merge(graphdef, params, rest, copy=True), TOKENS)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(result))

    with jax.numpy_rank_promotion("raise"):
        assert jax.eval_shape(jax.grad(loss_of), params, rest) is not None


class Embedded(nnx.Module):
    """A model of tokens without a cache."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(32, 8, rngs=rngs)
        self.head = nnx.Linear(8, 32, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.table(tokens))


@pytest.mark.parametrize(
    "make",
    [transformer(windows=(4, 0), num_layers=2, max_length=16), Embedded],
    ids=["windows", "no cache"],
)
def test_generation_promotes_nothing(make):
    def rows(model):
        return generate(model, [[1, 2, 3], [4]], 3, top_k=5, top_p=0.9, end=9).rows

    with settings(SETTINGS["rank promotion"] | SETTINGS["dtype promotion"]):
        model = drawn(make)
        found = rows(model)
    assert found == rows(model)


@pytest.mark.parametrize("logits", ["whole", "chunked"])
def test_weights_and_segments_of_any_dtype_are_not_promoted(logits):
    model = drawn(transformer(logits=logits))
    batch = jax.tree.map(
        jnp.asarray,
        {
            **TOKENS,
            "segments": np.ones((8, 9), np.int32),
            "mask": np.ones((8, 9), bool),
            "weight": np.arange(8),
        },
    )

    @nnx.jit
    def both(model, batch):
        return next_token_loss(model, batch), next_token_scores(model, batch)[0]

    with settings(SETTINGS["dtype promotion"]):
        losses = both(model, batch)
    assert [float(loss.weight) for loss in losses] == [8 * np.arange(8).sum()] * 2
