"""Terms that a model adds to its loss count by samples, for any weights and any cut."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, expert_parallel, fsdp, pipelined
from axon_dist.models import (
    Transformer,
    TransformerConfig,
    next_token_loss,
    next_token_scores,
)
from axon_dist.models.config import ExpertConfig

EXPERTS = ExpertConfig(
    count=4, per_token=2, width=8, balance=0.5, balance_per="sequence", z_loss=0.05
)
CONFIG = TransformerConfig(
    vocab_size=32, width=16, num_layers=2, num_heads=2, max_length=16, experts=EXPERTS
)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)
# The first sample has nine times the targets of the last.
MASK = (np.arange(9) >= np.arange(8)[:, None]).astype(np.int8)
BATCH = {"tokens": TOKENS, "mask": MASK}
ROWS = {
    "accumulate": ("dp=1", ddp(), 2),
    "ddp": ("dp=2", ddp(), 4),
    "fsdp": ("fsdp=2", fsdp(min_elements=1), 2),
    "ep": ("ep=2", expert_parallel(), 2),
    "pp": ("pp=2", pipelined(2, 2), 1),
    "pp, dp": ("dp=2,pp=2", compose(ddp(), pipelined(2, 1)), 1),
    "pp × ep": ("pp=2,ep=2", compose(expert_parallel(), pipelined(2, 2)), 1),
}


def trained(mesh, strategy, accumulate):
    world = World.emulate(int(np.prod([int(size.split("=")[1]) for size in mesh.split(",")])), mesh)
    step = build_train_step(
        lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)),
        optax.sgd(0.3),
        next_token_loss,
        strategy,
        world,
        batch=BATCH,
        accumulate=accumulate,
    )
    state, numbers = step.init(), []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        numbers.append({name: float(metrics[name]) for name in ("loss", "balance", "router_z")})
    weights = step.weights(state)
    return numbers, {path: x for path, x in weights.items() if "report" not in path}


@pytest.fixture(scope="module")
def whole():
    return trained("dp=1", ddp(), 1)


@pytest.mark.full
@pytest.mark.sample("accumulate")
@pytest.mark.parametrize("row", ROWS)
def test_terms_of_uneven_samples_are_those_of_one_device(whole, row):
    numbers, weights = trained(*ROWS[row])
    for found, wanted in zip(numbers, whole[0], strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    for path, wanted in whole[1].items():
        np.testing.assert_allclose(jax.device_get(weights[path]), wanted, atol=2e-6, err_msg=path)


@pytest.mark.full
@pytest.mark.sample("accumulate")
@pytest.mark.parametrize("row", ["accumulate", "pp × ep"])
def test_an_evaluation_has_no_terms_of_the_last_training_batch(row):
    mesh, strategy, accumulate = ROWS[row]
    world = World.emulate(int(np.prod([int(size.split("=")[1]) for size in mesh.split(",")])), mesh)
    step = build_train_step(
        lambda: Transformer(CONFIG, rngs=nnx.Rngs(0)),
        optax.sgd(0.0),
        next_token_loss,
        strategy,
        world,
        batch=BATCH,
        accumulate=accumulate,
        ema=0.5,
    )
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    model.eval()
    wanted = float(next_token_scores(model, BATCH)[0].mean)
    state = step.init()
    for tokens in (TOKENS, np.full_like(TOKENS, 7)):
        for of in ({}, {"ema": True}):
            numbers = step.evaluate(state, BATCH, **of)
            assert numbers.keys() == {"loss"}
            assert float(numbers["loss"]) == pytest.approx(wanted, rel=1e-5)
        state, _ = step(state, {**BATCH, "tokens": tokens})
    sums = step.evaluate_sums(state, BATCH)
    assert float(sums["loss"].mean) == pytest.approx(wanted, rel=1e-5)
