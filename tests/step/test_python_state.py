"""Blocks of one class that compute other things: by Python state, which their calls read or set."""

import contextvars
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import ActivationCheckpointing, build_train_step, ddp, fsdp
from axon_dist.core.errors import UnsupportedError
from axon_dist.ir.walk import same_program
from axon_dist.parallel import pipelined

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
ADAPTED = contextvars.ContextVar("adapted", default=True)
CONFIG, DEPTH = types.SimpleNamespace(scale=1.0), [0]


class Block(nnx.Module):
    def __init__(self, index, rngs):
        self.up, self.adapter = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.flag = (0, False, 0.0, -0.0)[index]
        self.config, self.calls, self.aux = nnx.static(CONFIG), 0, nnx.data(jnp.zeros(()))

    def __call__(self, x, flag=None):
        return x + jnp.tanh(self.up(x)) * self.scale(x, flag)

    def scale(self, x, flag):
        return 1.0


class OfContext(Block):
    def scale(self, x, flag):
        return self.adapter(x) if ADAPTED.get() else 0.5


class OfConfig(Block):
    def scale(self, x, flag):
        return self.config.scale


class OfGlobal(Block):
    def scale(self, x, flag):
        DEPTH[0] += 1
        return 1 / DEPTH[0]


class OfAttribute(Block):
    def scale(self, x, flag):
        return {bool: 3.0, int: 1.0, float: 2.0}[type(self.flag)] + np.copysign(0.1, self.flag)


class OfArgument(Block):
    def scale(self, x, flag):
        return 3.0 if flag is False or flag is True else 1.0


class OfCalls(Block):
    def scale(self, x, flag):
        self.calls += 1
        return 1 / self.calls


class KeepsData(Block):
    def scale(self, x, flag):
        self.aux = jnp.mean(x**2)
        return 1.0


KINDS = (OfContext, OfConfig, OfGlobal, OfAttribute, OfArgument, OfCalls, KeepsData)


class Net(nnx.Module):
    def __init__(self, kind):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([kind(i, rngs) for i in range(4)])

    def __call__(self, x, scale=1.0):
        DEPTH[0], CONFIG.scale = 0, scale
        for block, flag in zip(self.blocks, (0, False, 1, True), strict=True):
            x = block(x, flag)
            CONFIG.scale /= 2
        return x


def loss_fn(model, batch):
    one = model(batch["x"])
    before = ADAPTED.set(False)
    two = model(batch["x"], 0.3)
    ADAPTED.reset(before)
    return jnp.mean((one - 0.5 * two) ** 2) + sum(block.aux for block in model.blocks)


WAYS = {
    "fsdp": ("fsdp=2", lambda: fsdp(min_elements=4), {}),
    "remat": ("dp=2", ddp, {"remat": ActivationCheckpointing()}),
    "pipeline": ("pp=2", lambda: pipelined(2, 2), {}),
}


@pytest.mark.sample("OfCalls-fsdp")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_call_is_the_program_that_it_traces_to(make_world, kind, way):
    mesh, strategy, options = WAYS[way]
    want, grads = nnx.jit(nnx.value_and_grad(loss_fn))(Net(kind), BATCH)
    step = build_train_step(
        Net(kind), optax.sgd(1.0), loss_fn, strategy(), make_world(mesh), batch=BATCH,
        **options,
    )  # fmt: skip
    state, metrics = step(step.init(), BATCH)
    np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)
    moved = nnx.to_pure_dict(nnx.state(Net(kind), nnx.Param))
    moved = jax.tree.map(lambda p, g: p - g, moved, nnx.to_pure_dict(grads))
    got = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, moved)


def traced(function):
    return jax.make_jaxpr(lambda x: function(x))(jnp.ones(3)).jaxpr


def test_rules_of_differentiation_are_part_of_a_program():
    def scaled(factor):
        rule = jax.custom_vjp(lambda x: x)
        rule.defvjp(lambda x: (x, None), lambda _, ct: (factor * ct,))
        return rule

    assert same_program(traced(scaled(2.0)), traced(scaled(2.0)))
    assert not same_program(traced(scaled(2.0)), traced(scaled(3.0)))
    assert not same_program(traced(scaled(0.0)), traced(scaled(-0.0)))
    assert same_program(traced(jax.nn.gelu), traced(jax.nn.gelu))


def test_an_array_in_a_plain_attribute_is_refused(make_world):
    class Keeps(Block):
        def scale(self, x, flag):
            self.seen = nnx.static((x,))
            return 1.0

    with pytest.raises(
        UnsupportedError, match=r"keeps an array in its attribute 'seen'.*nnx\.data"
    ):
        build_train_step(
            lambda: Net(Keeps), optax.sgd(1.0), loss_fn, fsdp(min_elements=4),
            make_world("fsdp=2"), batch=BATCH,
        )  # fmt: skip


def test_an_array_where_the_module_had_none_is_refused(make_world):
    class Adds(Block):
        def scale(self, x, flag):
            self.added = nnx.data(jnp.mean(x))
            return 1.0

    with pytest.raises(UnsupportedError, match=r"adds an array at 'added'.*nnx\.data\(jnp\.zeros"):
        build_train_step(
            lambda: Net(Adds), optax.sgd(1.0), loss_fn, fsdp(min_elements=4),
            make_world("fsdp=2"), batch=BATCH,
        )  # fmt: skip


@pytest.mark.parametrize("way", ["fsdp", "pipeline"])
def test_a_value_kept_outside_of_the_model_is_refused(make_world, way):
    kept = []

    class Collects(Block):
        def scale(self, x, flag):
            kept.append(x)
            return 1.0

    def loss_fn(model, batch):
        kept.clear()
        return jnp.mean(model(batch["x"])) + sum(jnp.mean(x) for x in kept)

    def build(batch):
        mesh, strategy, _ = WAYS[way]
        return build_train_step(
            Net(Collects), optax.sgd(1.0), loss_fn, strategy(), make_world(mesh),
            batch=batch,
        )  # fmt: skip

    words = r"kept outside of the model, as in a list.*nnx\.data"
    with pytest.raises(UnsupportedError, match=words):
        build(BATCH)
    step = build(None)
    with pytest.raises(UnsupportedError, match=words + r".*batch=\.\.\. to build_train_step"):
        step(step.init(), BATCH)


class Leaves(nnx.Module):
    """Leaves an array behind in a plain attribute, a list, a dict and a list within a dict."""

    def __init__(self, rngs):
        self.up, self.seen = nnx.Linear(8, 8, rngs=rngs), None
        self.listed, self.named = nnx.List([]), nnx.Dict({})
        self.nested = nnx.Dict({"a": nnx.List([])})

    def __call__(self, x):
        x = x + jnp.tanh(self.up(x))
        self.seen, self.named["b"] = jnp.mean(jnp.tanh(x)), jnp.mean(jnp.sin(x))
        self.listed.append(jnp.mean(jnp.cos(x)))
        self.nested["a"].append(jnp.mean(jnp.tanh(2 * x)))
        return x


class Listening(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(Leaves(rngs) for _ in range(4))

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def of_what_is_left(model, batch):
    total = jnp.mean(model(batch["x"]) ** 2)
    for block in model.blocks:
        total += block.seen + 2 * block.named["b"] + 3 * sum(block.listed)
        total += 4 * sum(block.nested["a"])
        block.seen, block.listed, block.named = None, nnx.List([]), nnx.Dict({})
        block.nested = nnx.Dict({"a": nnx.List([])})
    return total


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "mesh", "options"),
    [
        (fsdp(min_elements=4), "fsdp=2", {}),
        (ddp(), "dp=2", {"remat": ActivationCheckpointing(classes=("Leaves",))}),
        (pipelined(2, 1), "pp=2", {}),
    ],
    ids=["fsdp", "remat", "pipeline"],
)
def test_what_calls_leave_behind_is_there(make_world, strategy, mesh, options):
    def plain(params, rest):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return of_what_is_left(model, BATCH)

    graphdef, params, rest = nnx.split(Listening(), nnx.Param, ...)
    loss, grads = jax.value_and_grad(plain)(params, rest)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    step = build_train_step(
        Listening, optax.sgd(0.1), of_what_is_left, strategy, make_world(mesh), batch=BATCH,
        **options,
    )  # fmt: skip
    state, metrics = step(step.init(), BATCH)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    got = nnx.state(step.merge(state), nnx.Param)
    for mine, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6)
