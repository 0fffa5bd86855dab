import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.core.errors import ConfigError
from axon_dist.mesh import World
from axon_dist.ops.precision import MixedPrecision
from axon_dist.parallel import STRATEGIES, estimate
from axon_dist.planner import (
    Arrangement,
    BytesPerParam,
    arrange,
    bytes_per_param,
    estimate_memory,
    model_size,
)

LINEAR = {
    "kernel": jax.ShapeDtypeStruct((100, 50), jnp.float32),
    "bias": jax.ShapeDtypeStruct((50,), jnp.float32),
}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(4, (80800, 50500, 35350, 20200)), (8, (80800, 45450, 27775, 10100)), (1, (80800,) * 4)],
)
def test_zero_stages_of_a_linear_layer(ranks, expected):
    names = ("no_shard", "zero1", "shard_grad_op", "full_shard")
    found = [estimate_memory(LINEAR, name, ranks).total for name in names]
    assert found == pytest.approx(expected, abs=2)  # each category is rounded up


@pytest.mark.parametrize("name", ["ddp", "zero1", "shard_grad_op", "full_shard"])
@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.sgd(0.1), optax.lion(1e-3)])
def test_states_agree_with_the_estimate_of_a_strategy(name, optimizer):
    world = World.emulate(4)
    theirs = estimate(STRATEGIES[name](None, world), LINEAR, world.mesh, optimizer)
    mine = estimate_memory(LINEAR, name, 4, optimizer=optimizer)
    assert (mine.params, mine.grads, mine.optimizer) == (
        theirs.param_memory_bytes,
        theirs.grad_memory_bytes,
        theirs.optim_memory_bytes,
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"), [("adam", 8), ("momentum", 4), ("sgd", 0), ("lion", 4)]
)
def test_the_optimizer_says_what_it_holds(optimizer, expected):
    assert bytes_per_param(optimizer) == BytesPerParam(4, 4, expected)


def test_adafactor_holds_rows_and_columns():
    assert bytes_per_param("adafactor").optimizer < 0.02


def test_a_half_precision_state_is_half():
    policy = MixedPrecision(param="bfloat16", compute="bfloat16")
    assert bytes_per_param("adam", policy).total == 8
    assert bytes_per_param("adam", "bf16").total == 16  # parameters stay in float32


@given(
    params=st.integers(1, 10**12),
    ranks=st.integers(1, 512),
    tp=st.integers(1, 8),
    pp=st.integers(1, 16),
)
def test_more_sharding_never_holds_more(params, ranks, tp, pp):
    names = ("ddp", "zero1", "shard_grad_op", "full_shard")
    sizes = [estimate_memory(params, arrange(n, ranks, tp=tp, pp=pp)).states for n in names]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] >= 16 * params / (ranks * tp * pp)


def test_hybrid_sharding_splits_over_its_own_ranks():
    hybrid = Arrangement(strategy="hybrid_shard", dp=4, fsdp=8)
    assert estimate_memory(8e9, hybrid).states == estimate_memory(8e9, "full_shard", 8).states


def test_model_size():
    mlp = {
        "up": {"kernel": jnp.zeros((784, 256)), "bias": jnp.zeros(256)},
        "down": {"kernel": jnp.zeros((256, 10)), "bias": jnp.zeros(10)},
    }
    assert model_size(mlp).num_params == 203530
    assert model_size(mlp).gigabytes == pytest.approx(0.000814, abs=1e-6)
    assert model_size(10e9).gigabytes == 40
    assert estimate_memory(10e9, "ddp").total == 160e9
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), mlp)
    assert model_size(half).num_bytes == 2 * 203530


def test_unknown_names():
    with pytest.raises(ConfigError, match=r"optimizer 'adamm'\. Did you mean 'adam'"):
        estimate_memory(1e9, "ddp", optimizer="adamm")
    with pytest.raises(ConfigError, match=r"strategy 'full_shad'\. Did you mean 'full_shard'"):
        estimate_memory(1e9, "full_shad", 8)


def test_layers_that_travel_in_fp8_take_a_byte_where_they_are_used():
    gathered = lambda gather: (
        estimate_memory(
            1e9, "full_shard", 8, layer_params=10**7, precision=MixedPrecision.fp8(gather=gather)
        ).gathered
    )
    assert (gathered(None), gathered("fp8")) == (4 * 10**7, 2 * 10**7)
