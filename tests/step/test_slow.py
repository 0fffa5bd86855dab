"""Steps of replicas over a slow axis: bytes, state, resume, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import Weighted, World, build_train_step, compose, ddp, zero
from axon_dist.checkpoint import load_checkpoint, save_checkpoint, target_of
from axon_dist.core.errors import AxonDistError, AxonDistWarning, ConfigError
from axon_dist.inspect import collectives, lower_outer_steps
from axon_dist.parallel import Strategy, diloco, fsdp, local_sgd, pipelined
from axon_dist.sharding import LargestDim
from axon_dist.step import PortableForm, plan
from axon_dist.step.replicas import Outer
from tests.drawn import drawn

OUTER = optax.sgd(1.0)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(3)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.drop(x)


@functools.cache
def net(seed=0):
    return drawn(Net, seed)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch(number=0):
    x = np.random.default_rng(number).normal(size=(16, 16)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


@functools.cache
def step_of(every=2, mesh="nodes=2,fsdp=2", size=4, **slow):
    strategy = compose(diloco("nodes", every=every, **slow), fsdp(min_elements=32))
    world = World.emulate(size, mesh)
    return build_train_step(net(), optax.adam(1e-2), loss_fn, strategy, world)


def trained(step, state, numbers):
    for number in numbers:
        state, _ = step(state, batch(number))
    return state


def bits(tree):
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(data(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.full
def test_inner_steps_send_nothing_over_the_axis_and_outer_steps_the_formula():
    for slow in ({}, {"compress": "int8"}, {"compress": "top_k", "fragments": 2}, {"fragments": 3}):
        step = step_of(4, **slow)
        inner = collectives(step.lower(batch()).compile(), step.world.mesh)
        assert inner.by_link().keys() == {"fast"}
        assert set(inner.by_axis()) == {"fsdp"}
        outer_steps = [
            collectives(lowered.compile(), step.world.mesh) for lowered in lower_outer_steps(step)
        ]
        sent = [ledger.total_wire_bytes(axis="nodes") for ledger in outer_steps]
        assert len(sent) == slow.get("fragments", 1)
        assert all(sent)
        assert [ledger.by_link()["slow"] for ledger in outer_steps] == sent
        assert sum(sent) == Outer(step.plan).wire_bytes()
    # Half of every kernel and whole biases, 2(R-1)/R times four bytes each.
    assert Outer(step_of(4).plan).wire_bytes() == 4 * 3 * (16 * 8 + 16)


@pytest.mark.full
def test_replicas_differ_between_outer_steps_and_agree_after_them():
    step = step_of(2)
    state = trained(step, step.init(), [0])
    kernel = np.asarray(state.params["layers"][0]["kernel"])
    assert not np.allclose(kernel[0], kernel[1])
    outer = np.asarray(state.outer["layers"][0]["kernel"])
    state = trained(step, state, [1])
    kernel = np.asarray(state.params["layers"][0]["kernel"])
    np.testing.assert_array_equal(kernel[0], kernel[1])
    np.testing.assert_array_equal(kernel[0], np.asarray(state.outer["layers"][0]["kernel"]))
    assert not np.allclose(outer, kernel[0])
    moments = np.asarray(state.opt_state[0].mu["layers"][0]["kernel"])
    assert not np.allclose(moments[0], moments[1])


@pytest.mark.full
def test_the_model_of_a_state_is_that_of_the_last_outer_step():
    step = step_of(2)
    state = trained(step, step.init(), [0, 1, 2])
    one = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert bits(one) == bits(state.outer)
    plain = build_train_step(
        step.merge(state), optax.sgd(0.1), loss_fn, ddp(), World.emulate(1, "dp=1")
    )
    want = plain.evaluate(plain.init(), batch(7))["loss"]
    assert float(step.evaluate(state, batch(7))["loss"]) == pytest.approx(float(want), rel=1e-6)


@pytest.mark.full
def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    # In the middle of a round, with a compression that has left something unsaid.
    step = step_of(3, compress="int8", fragments=2)
    whole = trained(step, step.init(), range(7))
    state = trained(step, step.init(), range(4))
    form = PortableForm(step)
    save_checkpoint(tmp_path / "c", form.to_canonical(state))
    restored = form.from_canonical(load_checkpoint(tmp_path / "c", form.target))
    assert bits(restored) == bits(state)
    assert bits(trained(step, restored, range(4, 7))) == bits(whole)


@pytest.mark.full
def test_a_checkpoint_goes_on_with_another_number_of_steps(tmp_path):
    step, other = step_of(2), step_of(3, "nodes=2,fsdp=4", 8)
    state = trained(step, step.init(), range(3))
    save_checkpoint(tmp_path / "c", state)
    target = target_of(other.abstract_state, other.state_shardings)
    restored = load_checkpoint(tmp_path / "c", target)
    assert bits(restored) == bits(state)
    # After the third step it meets at the sixth, not at the fourth.
    state = trained(other, restored, [3])
    kernel = np.asarray(state.params["layers"][0]["kernel"])
    assert not np.allclose(kernel[0], kernel[1])
    state = trained(other, state, [4, 5])
    assert bits(state.params["layers"][0]["kernel"][0]) == bits(state.outer["layers"][0]["kernel"])


@pytest.mark.full
@pytest.mark.sample("int8")
@pytest.mark.parametrize("compress", ["int8", "fp8", "top_k"])
def test_error_feedback_keeps_what_compression_lost(compress):
    plain = step_of(2, outer=OUTER)
    step = step_of(2, outer=OUTER, compress=compress)
    want, state = (trained(s, s.init(), range(2)) for s in (plain, step))
    for name in ("kernel", "bias"):
        met, missing = (
            np.asarray(x["layers"][1][name]) for x in (state.outer, state.outer_state["missing"])
        )
        first = np.asarray(step.init().outer["layers"][1][name])
        # The outer step is plain, so the two differ only by the omitted part.
        np.testing.assert_allclose(
            met - missing.mean(0), np.asarray(want.outer["layers"][1][name]), atol=1e-6
        )
        assert np.abs(missing).max() > 0
        assert not np.allclose(met, first)


REFUSED = {
    "axis": (
        lambda: diloco("pods", every=2),
        {},
        "over axis 'pods', which mesh nodes=2,fsdp=2 lacks. Did you mean 'nodes'",
    ),
    "pipeline": (
        lambda: compose(diloco("nodes", every=2), pipelined(2, 2, axis="fsdp")),
        {},
        "cuts each into stages over 'fsdp'; stages of a pipeline train together",
    ),
    "split": (
        lambda: compose(
            diloco("nodes", every=2), Strategy("mine", opt_state=LargestDim(("nodes",)))
        ),
        {},
        "splits arrays over it; split them over another axis",
    ),
    "batch": (
        lambda: compose(diloco("nodes", every=2), ddp("nodes")),
        {},
        "split over axis 'nodes' by 'diloco' and by 'ddp'",
    ),
    "statistics": (
        lambda: compose(diloco("nodes", every=2), ddp("fsdp", broadcast_buffers=False)),
        {},
        "one set of statistics, .*leave it at True",
    ),
    "ema": (lambda: diloco("nodes", every=2), {"ema": 0.9}, "ema=0.9 averages .*leave ema out"),
    "stop": (
        lambda: diloco("nodes", every=2),
        {"nonfinite": "stop"},
        "would have to tell each other on every step; use nonfinite='skip'",
    ),
    "empty fragments": (
        lambda: diloco("nodes", every=20, fragments=9),
        {},
        "fragments=9, but the model's 6 parameters .*use fewer",
    ),
    "fragments": (lambda: diloco("nodes", every=2, fragments=3), {}, "give at most 2 fragments"),
    "every": (lambda: diloco("nodes", every=0), {}, "every=0, an int; give a whole number, at"),
    "compress": (lambda: diloco(every=2, compress="fp4"), {}, "there is no compression 'fp4'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused_when_the_step_is_built(name):
    strategy, options, message = REFUSED[name]
    world = World.emulate(4, "nodes=2,fsdp=2")
    with pytest.raises(AxonDistError, match=re.compile(message, re.DOTALL)):
        build_train_step(Net(), optax.adam(1e-2), loss_fn, strategy(), world, **options)


@pytest.mark.full
def test_advice_of_a_refused_pipeline_works():
    world = World.emulate(4, "nodes=2,fsdp=2")
    strategy = compose(diloco("nodes", every=2), fsdp())
    step = build_train_step(
        Net(), optax.adam(1e-2), loss_fn, strategy, world, nonfinite="skip", accumulate=2
    )
    step.check(batch())


@pytest.mark.full
def test_the_optimizer_of_replicas_is_traced_once(monkeypatch):
    traced = []
    trace_update = plan.trace_update

    def counted(*args):
        traced.append(args)
        return trace_update(*args)

    monkeypatch.setattr(plan, "trace_update", counted)
    step_of.__wrapped__(every=3)
    assert len(traced) == 1


def test_gradients_are_those_of_each_replica():
    step = step_of(2)
    state = step.init()
    grads, _ = step.gradients(state, batch())
    kernel = grads["layers"][0]["kernel"]
    assert kernel.shape == (2, 16, 16)
    assert not np.allclose(kernel[0], kernel[1])


MASK = np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32)
REPORTS = {
    "one rank": (4, "nodes=4,dp=1", 1),
    "two ranks": (4, "nodes=2,dp=2", 1),
    "two microbatches": (2, "nodes=2,dp=1", 2),
}


@pytest.mark.sample("two ranks")
@pytest.mark.parametrize("row", REPORTS)
def test_the_metrics_of_a_step_are_those_of_the_samples_of_all_replicas(row):
    """Replicas with few tokens, or none, count as much as their tokens."""

    def masked(model, batch):
        each = jnp.mean((batch["x"] @ model.kernel[...]) ** 2, -1)
        total, tokens = jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"])
        return Weighted(total, tokens), {
            "tokens": tokens,
            "accuracy": Weighted(jnp.sum(batch["mask"] * (each > 10)), tokens),
            "quotient": total / jnp.maximum(tokens, 1),
            "padded": jnp.mean(each),
            "rate": 3.0,
        }

    size, mesh, count = REPORTS[row]
    build = functools.partial(
        build_train_step, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), optax.sgd(0.0), masked
    )
    one = build(ddp(), World.emulate(1))
    strategy = compose(diloco("nodes", every=4), ddp("dp"))
    step = build(strategy, World.emulate(size, mesh), accumulate=count)
    for mask in (MASK, 0 * MASK):
        batch = {"x": np.arange(64, dtype=np.float32).reshape(8, 8) / 64, "mask": mask}
        expected = one(one.init(), batch)[1]
        for metrics in (step.gradients(step.init(), batch)[1], step(step.init(), batch)[1]):
            for name in ("loss", "tokens", "accuracy", "padded", "rate"):
                np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(metrics["quotient"], metrics["loss"], rtol=1e-6)


def test_a_loss_that_is_a_sum_is_that_of_all_replicas():
    total = lambda model, batch: (jnp.sum(model(batch["x"]) ** 2), {"most": jnp.max(batch["x"])})
    step = build_train_step(
        nnx.Linear(16, 16, rngs=nnx.Rngs(0)), optax.sgd(0.0), total,
        compose(diloco("nodes", every=4), ddp("dp")), World.emulate(2, "nodes=2,dp=1"),
    )  # fmt: skip
    metrics = step(step.init(), batch())[1]
    each = step.evaluate(step.init(), batch())
    np.testing.assert_allclose(metrics["loss"], each["loss"], rtol=1e-6)
    # What does not add up is the mean over the replicas.
    halves = [x.max() for x in np.split(batch()["x"], 2)]
    np.testing.assert_allclose(metrics["most"], np.mean(halves), rtol=1e-6)


def in_two_replicas(loss_fn):
    """The step of a layer of ones, which learns nothing."""
    model = nnx.Linear(4, 4, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    strategy, world = local_sgd("nodes", every=2), World.emulate(2, "nodes=2")
    return build_train_step(model, optax.sgd(0.0), loss_fn, strategy, world)


TWO_KINDS = {"x": np.repeat(np.float32([1, 3]), 8).reshape(4, 4)}


def test_a_sum_of_one_number_of_samples_is_reported_as_a_mean_with_a_warning():
    fixed = lambda model, batch: jnp.sum(jnp.mean(model(batch["x"]), -1) * jnp.ones(2))
    step = in_two_replicas(fixed)
    with pytest.warns(AxonDistWarning, match=r"4 samples of a batch, only for the 2 of") as seen:
        _, metrics = step(step.init(), TWO_KINDS)
    assert [one.message.code for one in seen] == ["loss-of-one-size"]
    assert float(metrics["loss"]) == (2 * 4 + 2 * 12) / 2


def test_a_mistake_that_only_all_samples_show_is_raised():
    def wrong(model, batch):
        if len(batch["x"]) == 4:
            raise ConfigError("four samples", code="four")
        return jnp.mean(model(batch["x"]))

    step = in_two_replicas(wrong)
    with pytest.raises(ConfigError, match="four samples"):
        step(step.init(), TWO_KINDS)


def test_a_weight_may_depend_on_parameters_that_one_replica_computes_it_with():
    def loss_fn(model, batch):
        each = model(batch["x"])
        return Weighted(jnp.sum(each), jnp.sum(each**2))

    step = in_two_replicas(loss_fn)
    metrics = step(step.init(), TWO_KINDS)[1]
    np.testing.assert_allclose(metrics["loss"], (4 + 12) / (4**2 + 12**2), rtol=1e-6)


@pytest.mark.sample("3")
@pytest.mark.parametrize("ranks", [4, 3])
def test_a_new_run_starts_from_given_parameters(ranks):
    world = World.emulate(ranks, f"nodes={ranks}")
    loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2)
    make = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    step = build_train_step(make, optax.sgd(0.1), loss_fn, local_sgd("nodes", every=2), world)
    given = jax.tree.map(lambda x: jnp.full(x.shape, 0.7, x.dtype), step.init().params)
    state = step.init_from(given)
    for array in (step.weights(state)["kernel"], state.params["kernel"], state.outer["kernel"]):
        np.testing.assert_array_equal(array, np.full(array.shape, 0.7, np.float32))
    with pytest.raises(ConfigError, match=r"init_from got 'kernel' of shape \[2, 4\]"):
        step.init_from(given | {"kernel": jnp.ones((2, 4))})


@functools.cache
def consecutive(replicas, every):
    """Losses and means of replicas in plain JAX, each with consecutive rows of every batch."""
    model, batches = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), map(batch, range(4))
    graphdef, params = nnx.split(model)
    of_loss = lambda params, batch: loss_fn(nnx.merge(graphdef, params), batch)
    gradient = jax.jit(jax.value_and_grad(of_loss))
    own, losses = [params] * replicas, []
    for number, one in enumerate(batches):
        shares = [{k: np.split(x, replicas)[r] for k, x in one.items()} for r in range(replicas)]
        found = [gradient(mine, share) for mine, share in zip(own, shares, strict=True)]
        down = lambda p, g: p - 0.1 * g
        own = [jax.tree.map(down, p, g) for p, (_, g) in zip(own, found, strict=True)]
        losses.append(np.mean([float(loss) for loss, _ in found]))
        if (number + 1) % every == 0:
            own = [jax.tree.map(lambda *p: sum(p) / replicas, *own)] * replicas
    return losses, own[0]


WITHIN = {
    "alone": ((), "nodes=2"),
    "ddp": ((ddp(),), "nodes=2,dp=2"),
    "ddp first": ((ddp(),), "nodes=2,dp=2"),
    "zero1": ((zero(1, min_elements=1),), "nodes=2,dp=2"),
    "fsdp": ((fsdp(min_elements=1),), "nodes=2,fsdp=2"),
}


@pytest.mark.sample("2-fsdp", "4-ddp first")
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_replica_trains_on_consecutive_samples_for_any_number_of_microbatches(count, within):
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    parts, mesh = WITHIN[within]
    both = (local_sgd("nodes", every=2), *parts)
    strategy = compose(*(both if within != "ddp first" else both[::-1]))
    world = World.emulate(4 if parts else 2, mesh)
    step = build_train_step(model, optax.sgd(0.1), loss_fn, strategy, world, accumulate=count)
    state, losses, batches = step.init(), [], [batch(number) for number in range(4)]
    for one in batches:
        state, metrics = step(state, one)
        losses.append(float(metrics["loss"]))
    expected, params = consecutive(2, 2)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for path, x in step.weights(state).items():
        np.testing.assert_allclose(x, params[path][...], rtol=1e-5, atol=1e-7, err_msg=path)


@pytest.mark.full
def test_parameters_of_replicas_load_into_a_step_without_and_the_other_way_round(tmp_path):
    replicas, alone = step_of(2), step_of_one(seed=1)
    state = trained(replicas, replicas.init(), range(1))
    save_checkpoint(tmp_path / "replicas", state)
    params = load_checkpoint(tmp_path / "replicas", alone, parts="params")
    fresh = alone.init_from(params)
    assert_equal_bits(alone.weights(fresh), replicas.weights(state))
    both = load_checkpoint(tmp_path / "replicas", alone, parts=("params", "step"))
    assert int(both["step"]) == 1

    save_checkpoint(tmp_path / "alone", alone.init())
    params = load_checkpoint(tmp_path / "alone", replicas, parts="params")
    assert params["layers"][0]["kernel"].shape == (2, 16, 16)
    want = load_checkpoint(tmp_path / "alone", alone)
    fresh = replicas.init_from(params)
    assert_equal_bits(replicas.weights(fresh), alone.weights(want))
    trained(replicas, fresh, range(1))


@pytest.mark.full
def test_parameters_of_a_model_load_where_other_parts_of_it_are_frozen(tmp_path):
    whole, part = step_of_one(), step_of_one(seed=1, trainable="layers/2")
    save_checkpoint(tmp_path / "whole", whole.init())
    params = load_checkpoint(tmp_path / "whole", part, parts="params")
    trained_part = load_checkpoint(tmp_path / "whole", whole, parts="params")["layers"][2]
    assert bits(jax.tree.leaves(params)) == bits(jax.tree.leaves(trained_part))
    both = load_checkpoint(tmp_path / "whole", part, parts=("params", "frozen"))
    assert len(jax.tree.leaves(both)) == 6

    save_checkpoint(tmp_path / "part", part.init())
    params = load_checkpoint(tmp_path / "part", whole, parts="params")
    assert bits(params) == bits(step_of_one(seed=1).init().params)


@functools.cache
def step_of_one(seed=0, **options):
    world = World.emulate(2, "fsdp=2")
    return build_train_step(
        net(seed), optax.adam(1e-2), loss_fn, fsdp(min_elements=32), world, **options
    )


def assert_equal_bits(found, expected):
    assert found.keys() == expected.keys()
    assert bits(found) == bits(expected)
