"""Forms that models of other packages have: each as on one device, or refused in one sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import build_train_step, ddp, suggest_plan, tensor_parallel
from axon_dist.core.errors import ConfigError, UnsupportedError

BATCH = {"x": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)}


def square(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


class Reduces(nnx.Module):
    def __init__(self, reduce):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.reduce = reduce

    def __call__(self, x):
        return self.b(self.reduce(jnp.tanh(self.a(x))))


REDUCERS = {
    "reduce": lambda h: h - jax.lax.reduce(h, 0.0, lambda a, b: a + b, (1,))[:, None],
    "reduce_window": lambda h: (
        h
        + jax.lax.reduce_window(
            jax.lax.stop_gradient(h), -jnp.inf, jnp.logaddexp, (1, 2), (1, 1), "SAME"
        )
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_is_no_called_program(make_world, name):
    make = lambda: Reduces(REDUCERS[name])
    assert suggest_plan(make, BATCH["x"]).unplaced is not None
    want = float(square(make(), BATCH))
    world = make_world("dp=2")
    step = build_train_step(make, optax.sgd(0.1), square, ddp(), world, accumulate=2, batch=BATCH)
    assert float(step(step.init(), BATCH)[1]["loss"]) == pytest.approx(want, rel=1e-5)


class Tokens(nnx.Module):
    def __init__(self, **given):
        rngs = nnx.Rngs(0)
        self.table, self.given = nnx.Embed(16, 8, rngs=rngs), given
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens, **self.given)
        return self.table.attend(x + self.down(jnp.tanh(self.up(x))), **self.given)


@pytest.mark.full
def test_a_table_is_called_with_arguments_of_its_own(make_world):
    tokens = {"x": np.arange(24).reshape(4, 6) % 16}
    make = lambda: Tokens(out_sharding=None)
    plan = tensor_parallel(suggest_plan(make, tokens["x"]))
    step = build_train_step(make, optax.sgd(0.1), square, plan, make_world("tp=2"))
    want = float(square(make(), tokens))
    assert float(step(step.init(), tokens)[1]["loss"]) == pytest.approx(want, rel=1e-5)


def test_a_plan_for_an_annotated_model():
    noted = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mlp"))

    def make():
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.Linear(8, 16, kernel_init=noted, rngs=rngs), jnp.tanh, nnx.Linear(16, 4, rngs=rngs)
        )

    assert [str(rule.mode) for rule in suggest_plan(make, BATCH["x"]).rules] == ["column", "row"]


class Grows(nnx.Module):
    def __init__(self):
        self.a, self.mean = nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.BatchStat(jnp.zeros(8))

    def __call__(self, x):
        self.mean.set_value(x.mean(0, keepdims=True))
        return self.a(x)


def test_a_buffer_that_changes_its_shape_is_refused_with_microbatches(make_world):
    with pytest.raises(UnsupportedError, match=r"'mean' has the shape \(8,\), but \(1, 8\) after"):
        build_train_step(
            Grows, optax.sgd(0.1), square, ddp(), make_world("dp=2"), accumulate=2, batch=BATCH
        )


def test_a_variable_that_holds_a_tree_is_refused(make_world):
    class Target(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
            self.t = nnx.Variable({"k": jnp.ones(2), "b": jnp.ones(2)})

        def __call__(self, x):
            return self.a(x)

    with pytest.raises(ConfigError, match="the Variable 't' holds a dict of 2 arrays"):
        build_train_step(Target, optax.sgd(0.1), square, ddp(), make_world("dp=2"))
