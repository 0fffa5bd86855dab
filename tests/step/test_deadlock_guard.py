"""Permutations in branches: found in compiled text, raised before they hang."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, pipelined
from axon_dist.core.errors import UnsupportedError
from axon_dist.parallel import tensor_parallel
from axon_dist.step import model_changes
from axon_dist.step.guards import DeadlockGuard, check_branches
from tests.drawn import drawn

TEXT = """\
HloModule example

%helper.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %shift = f32[4]{0} collective-permute(%p), metadata={op_name="a/b"}
}

%yes (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %call = f32[4]{0} call(%p), to_apply=%helper.1
}

%no (p: f32[4]) -> f32[4] {
  ROOT %p = f32[4]{0} parameter(0)
}

ENTRY %main (x: f32[4], i: s32[]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %out = f32[4]{0} WHERE
}
"""


def test_a_permutation_below_a_branch_is_found():
    for spelling in (
        "conditional(%i, %x, %x), branch_computations={%no, %yes}",
        "conditional(%i, %x, %x), true_computation=%yes, false_computation=%no",
    ):
        with pytest.raises(UnsupportedError, match=r"wait for them forever: a/b\. .*sequence=True"):
            check_branches(TEXT.replace("WHERE", spelling))


@pytest.mark.parametrize(
    "permute",
    [
        "f32[4] collective-permute(%p), source_target_pairs={{0,1}}",
        "(f32[4], f32[4]) collective-permute-start(%p), source_target_pairs={{0,1}}",
        # As a GPU takes one apart.
        'f32[4] send(%p), frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1}}"}',
    ],
)
@pytest.mark.parametrize(
    "way", ["fusion(%p), kind=kLoop, calls", "async-start(%p), calls", "while(%p), body"]
)
def test_a_permutation_is_found_however_it_is_spelled_and_reached(permute, way):
    text = TEXT.replace("f32[4]{0} collective-permute(%p)", permute)
    text = text.replace("call(%p), to_apply=%helper.1", f"{way}=%helper.1")
    text = text.replace("WHERE", "conditional(%i, %x, %x), branch_computations={%no, %yes}")
    with pytest.raises(UnsupportedError, match=r"wait for them forever: a/b\. "):
        check_branches(text)


def test_a_permutation_that_all_devices_take_is_fine():
    check_branches(TEXT.replace("WHERE", "call(%x), to_apply=%yes"))


class Shifted(nnx.Module):
    """Looks one position back: along a split dim, a neighbour's value."""

    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        y = self.down(jnp.tanh(self.up(x)))
        return x + jnp.pad(y[:, :-1], ((0, 0), (1, 0), (0, 0)))


class ShiftedNet(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List(Shifted(nnx.Rngs(i)) for i in range(2))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def shifted_step():
    plan = {"up$": "column", "down$": "row"}
    strategy = compose(pipelined(2, 2), tensor_parallel(plan, sequence=True))
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    world = World.emulate(4, "pp=2,tp=2")
    return build_train_step(drawn(ShiftedNet), optax.sgd(0.1), loss, strategy, world), loss


@pytest.mark.full
def test_shifts_along_a_split_dim_gather_and_equal_one_device():
    step, loss = shifted_step()
    batch = {"x": jax.random.normal(jax.random.key(0), (4, 8, 8))}
    graphdef, params, rest = nnx.split(drawn(ShiftedNet), nnx.Param, ...)
    one = lambda params: loss(nnx.merge(graphdef, params, rest, copy=True), batch)
    value, grads = jax.value_and_grad(one)(params)
    want = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    state, metrics = step(step.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)
    got = nnx.state(step.merge(state), nnx.Param)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.sample("step")
@pytest.mark.parametrize("name", ["step", "gradients"])
def test_a_pipeline_that_would_hang_raises(monkeypatch, name):
    """Without the spelling of slices the compiler permutes in a branch."""
    monkeypatch.setattr(model_changes, "SHIFTS", ())
    step, _ = shifted_step()
    state, batch = step.init(), {"x": jax.numpy.ones((4, 8, 8))}
    run = {"step": step, "gradients": step.gradients}[name]
    with pytest.raises(UnsupportedError, match="wait for them forever"):
        run(state, batch)


def test_every_program_of_a_pipeline_with_split_dims_is_guarded():
    step, _ = shifted_step()
    guarded = (step.programs.step, step.programs.gradients, step.programs.evaluate)
    assert all(isinstance(program, DeadlockGuard) for program in guarded)
