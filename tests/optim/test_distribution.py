"""The compiled distributed update has two all-to-alls, and no other collective between them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from axon_dist import World, build_train_step, compose, ddp, hidden_matrices, muon, tensor_parallel
from axon_dist.inspect import collectives, flops
from axon_dist.parallel import fsdp

STEPS = 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def model():
    return nnx.Sequential(*(Block(nnx.Rngs(n)) for n in range(3)))


def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


def built(mesh, strategy, optimizer=None):
    world = World.emulate(8, mesh)
    optimizer = optimizer or muon(
        0.02, ns_steps=STEPS, muon_weight_dimension_numbers=hidden_matrices(model)
    )
    return build_train_step(model(), optimizer, loss, strategy, world)


def update_of(step):
    """Compiles only the update, with its arguments sharded as in a step."""
    plan = step.plan
    placed = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    state = jax.tree.map(placed, step.abstract_state, step.state_shardings)
    grads = jax.tree.map(placed, plan.state_plan.params, plan.state_plan.grad_shardings)
    whole = NamedSharding(plan.spec.mesh, jax.sharding.PartitionSpec())
    value = jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
    places = plan.state_plan.grad_shardings, step.state_shardings.opt_state
    run = lambda g, s, p, v: plan.state_plan.update(g, s, p, value=v)
    return jax.jit(run, out_shardings=places).lower(grads, state.opt_state, state.params, value)


def of_newton_schulz(m, n):
    return STEPS * 2 * (m * m * n + m**3 + m * m * n)


def test_one_exchange_there_and_back_and_products_divided():
    step = built("fsdp=8", fsdp(min_elements=8))
    (distribution,) = step.plan.state_plan.update.distributions
    assert (distribution.count, distribution.padding, distribution.per_device) == (6, 2, 1)
    assert (
        str(distribution)
        == "6 of 16×32 distributed over fsdp: 1 on each of 8 devices, 2 of them padding"
    )
    compiled = update_of(step).compile()
    assert [c.kind for c in collectives(compiled, step.spec.mesh)] == ["all-to-all"] * 2
    # 1 matrix per device instead of all 6.
    assert flops(compiled).high == of_newton_schulz(16, 32)
    assert not re.search(r"\bwhile\(", str(compiled.as_text()))


def test_tensor_ranks_share_the_work_too():
    plan = tensor_parallel({"up$": "column", "down$": "row"})
    step = built("fsdp=2,tp=2,dp=2", compose(fsdp("fsdp", min_elements=8), plan))
    (distribution,) = step.plan.state_plan.update.distributions
    assert (distribution.moved, distribution.extra, distribution.num_ranks) == (
        ("fsdp", "tp"),
        ("dp",),
        8,
    )
    compiled = update_of(step).compile()
    kinds = [c.kind for c in collectives(compiled, step.spec.mesh)]
    assert sorted(kinds) == ["all-gather", *["all-to-all"] * 4]
    assert flops(compiled).high == of_newton_schulz(16, 32)


def test_an_optimizer_without_matrices_is_not_touched():
    step = built("fsdp=8", fsdp(min_elements=8), optax.sgd(0.1))
    assert not step.plan.state_plan.update.needs_matrices
    assert step.plan.state_plan.update.distributions == ()


@pytest.mark.full
def test_a_chain_around_it_is_distributed_as_well():
    chained = optax.chain(
        optax.clip_by_global_norm(1.0), muon(0.02, ns_steps=STEPS), optax.scale(0.5)
    )
    step = built("fsdp=8", fsdp(min_elements=8), chained)
    compiled = update_of(step).compile()
    kinds = [c.kind for c in collectives(compiled, step.spec.mesh)]
    assert kinds.count("all-to-all") == 2
    assert flops(compiled).high == of_newton_schulz(16, 32)
    rng = np.random.default_rng(0)
    state, _ = step(step.init(), {"x": rng.normal(size=(8, 16)).astype(np.float32)})
    assert int(state.step) == 1


class Experts(nnx.Module):
    """Eleven matrices in one array: over four ranks a rank holds three, one of them padding."""

    def __init__(self):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(0), (11, 3, 3)))

    def __call__(self, x):
        return jnp.einsum("bi,eij->bj", x, self.kernel[...])


@pytest.mark.full
def test_a_stack_whose_matrices_do_not_divide_over_the_ranks_equals_one_device():
    numbers = {"kernel": optax.contrib.MuonDimensionNumbers(1, 2)}
    optimizer = muon(0.1, ns_steps=STEPS, muon_weight_dimension_numbers=numbers)
    world = World.emulate(8, "dp=2,fsdp=4")
    strategy = compose(ddp(), fsdp(min_elements=1))
    step = build_train_step(Experts, optimizer, loss, strategy, world)
    batch = {"x": np.ones((8, 3), np.float32)}
    state, _ = step(step.init(), batch)
    params = {"kernel": Experts().kernel[...]}
    loss_of = lambda kernel: jnp.mean(jnp.einsum("bi,eij->bj", batch["x"], kernel) ** 2)

    @jax.jit
    def trained(params):
        grads = jax.tree.map(jax.grad(loss_of), params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    expected = trained(params)
    np.testing.assert_allclose(step.merge(state).kernel[...], expected["kernel"], atol=1e-5)
