"""The one step builder: pure, jitted once, donated, and what is init, claimed and evaluated."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axon_dist import (
    DDP,
    FSDP,
    Pipeline,
    Strategy,
    Weighted,
    World,
    build_train_step,
    compose,
    ddp,
    fsdp,
    zero,
)
from axon_dist.core.errors import (
    ClaimError,
    ConfigError,
    MeshError,
    StrategyConflictError,
    UnsupportedError,
)
from axon_dist.inspect import bytes_per_device, lower_init, memory, separation
from axon_dist.models import MLP
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import TransformerAutoWrapPolicy
from axon_dist.step import idle_axes
from axon_dist.step.layout import StateLayout
from axon_dist.step.model_spec import split_model
from axon_dist.step.state import _is_number_of
from tests.drawn import drawn

WIDTH = 16


class Block(nnx.Module):
    """A residual block with dropout and batch statistics."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.norm(self.inner(x))))


class Net(nnx.Module):
    """Two blocks and a head."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make():
    return Net(nnx.Rngs(0, dropout=1))


@functools.cache
def drawn_net():
    """The net with weights of numpy, for tests that do not change it."""
    return drawn(make)


def make_mlp():
    return MLP((WIDTH, 24, 4), rngs=nnx.Rngs(0))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(step=0, samples=16):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(samples, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, :4])}


def build(world, model=make_mlp, strategy=None, **options):
    optimizer = options.pop("optimizer", optax.adam(1e-2))
    loss = options.pop("loss", loss_fn)
    return build_train_step(model, optimizer, loss, strategy or ddp(), world, **options)


# Options and refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": None}, "optimizer is a NoneType; give an optax transformation, such as"),
        ({"optimizer": 0.1}, "optimizer is a float"),
        ({"loss": 3}, "loss_fn is a int; give a function loss_fn.model, batch."),
        ({"strategy": "ddp"}, r"got 'ddp' for a strategy; give one such as ddp\(\)"),
        ({"remat": True}, "remat is True; it must be None or such as ActivationCheckpointing"),
        ({"scaler": True}, "got scaler=True, a bool; give a GradScaler, or None"),
        (
            {"deterministic": "yes"},
            "got deterministic='yes', a str; give True or False, or 'elastic'",
        ),
        ({"pad": 3}, "got pad=3, an int; give a string, or None"),
    ],
)
def test_arguments_of_another_kind(world, arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(world, **arguments)


def test_an_nnx_optimizer_and_a_mesh_are_told_what_to_give(world):
    model = make_mlp()
    with pytest.raises(ConfigError, match="give the optax transformation it was made of"):
        build(world, optimizer=nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
    with pytest.raises(ConfigError, match=r"world is a Mesh; give a World, made by World\.init"):
        build(world.mesh)


@pytest.mark.full
def test_a_state_that_was_used_up(world):
    step = build(world)
    state = step.init()
    step(state, batch_of())
    used = "used up by an earlier step.*go on with the state that the step returned"
    for use in (step, step.gradients, step.evaluate):
        with pytest.raises(ConfigError, match=used):
            use(state, batch_of())
    with pytest.raises(ConfigError, match=used):
        step.merge(state)


def test_a_number_in_the_state_of_an_optimizer_is_refused_with_what_to_write(make_world):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    loss_fn = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    make = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    step = build_train_step(make, optimizer, loss_fn, ddp(), make_world("dp=2"))
    batch, state = {"x": np.ones((4, 4), np.float32)}, step.init()
    state.opt_state.hyperparams["learning_rate"] = 0.0
    with pytest.raises(
        ConfigError, match=r"is a float, not an array: set it to jnp\.asarray\(0\.0, jnp\.float32\)"
    ):
        step(state, batch)
    state.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.0, jnp.float32)
    before = np.asarray(state.params["kernel"])
    np.testing.assert_array_equal(step(state, batch)[0].params["kernel"], before)


@pytest.mark.parametrize(
    ("number", "dtype", "is_advised"),
    [
        (3, "float32", True),
        (3.0, "int32", True),
        (3.5, "int32", False),
        (-1, "uint32", False),
        (10**400, "float32", False),
        (1e39, "float32", False),
        (float("nan"), "float32", False),
        (float("inf"), "int32", False),
        (True, "float32", False),
    ],
)
def test_a_number_is_advised_only_where_it_can_be_written(number, dtype, is_advised):
    assert _is_number_of(number, jnp.dtype(dtype)) == is_advised


@pytest.mark.full
def test_a_state_of_numpy_arrays(world):
    step = build(world)
    host = jax.tree.map(np.asarray, step.init())
    _, metrics = step(host, batch_of())
    assert float(step.evaluate(host, batch_of())["loss"]) == pytest.approx(float(metrics["loss"]))


@pytest.mark.full
def test_optimizers_that_look_at_the_loss(world):
    step = build(world, optimizer=optax.polyak_sgd(max_learning_rate=0.1))
    optimizer, (graph, params) = optax.polyak_sgd(max_learning_rate=0.1), nnx.split(make_mlp())
    of_params = lambda p: loss_fn(nnx.merge(graph, p), batch_of())
    loss, grads = jax.jit(jax.value_and_grad(of_params))(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params, value=loss)
    want = jax.tree.leaves(optax.apply_updates(params, updates))
    state, _ = step(step.init(), batch_of())
    for got, expected in zip(jax.tree.leaves(state.params), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate is 0; it must be a whole number of microbatches, at least"),
        ({"accumulate": True}, "accumulate=True, a bool; give a whole number"),
        ({"accumulate": 2.5}, "accumulate=2.5, a float; give a whole number"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0; it must be positive, or None"),
        ({"clip_norm": float("nan")}, "clip_norm=nan, a float; give a number, or None"),
        ({"metrics": ("los",)}, "unknown metric 'los'. Did you mean 'loss'"),
        ({"precision": "fp61"}, "precision: got 'fp61'. Did you mean 'fp16'"),
    ],
)
def test_impossible_options(world, options, message):
    with pytest.raises(ConfigError, match=message):
        build(world, **options)


def test_settings_of_strategy_and_step_must_agree(world):
    strategy = fsdp(axes=("dp",), mixed_precision="bf16")
    with pytest.raises(StrategyConflictError, match=r"precision is .* in 'fsdp' and"):
        build(world, strategy=strategy, precision="fp16")
    with pytest.raises(MeshError, match="over axis 'fsdp', which mesh dp=8 lacks"):
        build(world, strategy=fsdp("fsdp"))


def test_units_are_said_once(world):
    wrap = TransformerAutoWrapPolicy("Linear")
    remat = ActivationCheckpointing(classes=("Block",))
    with pytest.raises(StrategyConflictError, match=r"'Linear'.*checkpointing of \('Block',\)"):
        build(world, make, fsdp(axes=("dp",), auto_wrap_policy=wrap), remat=remat)
    with pytest.raises(UnsupportedError, match=r"'Blok'.*matches no module.*Block"):
        build(world, make, remat=ActivationCheckpointing(classes=("Blok",)))


# State, donation and metrics


@pytest.fixture(scope="module")
def trained():
    """A DDP step on a module, its state before and after, and how often the loss was traced."""
    traces = []

    def counted(model, batch):
        traces.append(1)
        error = model(batch["x"]) - batch["y"]
        return jnp.mean(error**2), {"absolute": jnp.mean(jnp.abs(error))}

    world = World.emulate(2)
    model = nnx.clone(drawn_net())
    step = build(world, model, loss=counted, metrics=("grad_norm", "param_norm"), clip_norm=0.5)
    first = step.init()
    after, metrics = step(first, batch_of())
    counts = [len(traces)]
    for number in range(3):
        after, metrics = step(after, batch_of(number))
    counts.append(len(traces))
    return {
        "world": world,
        "model": model,
        "step": step,
        "first": first,
        "after": after,
        "metrics": metrics,
        "counts": counts,
    }


@nnx.jit
def applied(model, x):
    return model(x)


def test_the_step_is_traced_once(trained):
    assert trained["counts"][0] == trained["counts"][1]


def test_buffers_are_donated(trained):
    """Every array of the state given is used up, and its memory reused."""
    first = jax.tree.leaves(trained["first"].params) + jax.tree.leaves(trained["first"].opt_state)
    assert all(leaf.is_deleted() for leaf in first)
    report = memory(trained["step"].lower(batch_of()).compile())
    assert report.aliased >= 0.99 * bytes_per_device(
        (trained["after"].params, trained["after"].opt_state)
    )


def test_the_module_given_stays_usable(trained):
    model = trained["model"]
    model.eval()
    assert np.isfinite(applied(model, batch_of()["x"])).all()
    for mine, fresh in zip(
        jax.tree.leaves(nnx.state(model, nnx.Param)),
        jax.tree.leaves(nnx.state(drawn_net(), nnx.Param)),
        strict=True,
    ):
        np.testing.assert_array_equal(mine, fresh)


@pytest.mark.full
def test_metrics_stay_on_the_devices(trained):
    metrics = trained["metrics"]
    assert metrics.keys() == {"loss", "absolute", "grad_norm", "param_norm"}
    for value in metrics.values():
        assert isinstance(value, jax.Array)
        assert value.shape == ()
        assert value.sharding.is_fully_replicated
    expected = optax.tree.norm(trained["after"].params)
    assert float(metrics["param_norm"]) == pytest.approx(float(expected), rel=1e-6)


def test_nothing_but_the_batch_crosses_to_the_devices(world):
    step = build(world, make_mlp())
    state, placed = step.init(), step.place(batch_of())
    state, _ = step(state, placed)
    with jax.transfer_guard("disallow"):
        state, metrics = step(state, placed)
    assert float(metrics["loss"]) > 0


def test_merge_gives_the_model_of_a_state(trained):
    merged = trained["step"].merge(trained["after"])
    merged.eval()
    head = trained["after"].params["head"]
    np.testing.assert_array_equal(merged.head.kernel[...], head["kernel"])
    output = applied(merged, batch_of()["x"])
    assert output.shape == (16, 4)


@pytest.mark.full
def test_sown_values_are_not_carried(world):
    class Sowing(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.seen = nnx.Intermediate(x.mean())
            return self.inner(x)

    step = build(world, Sowing, accumulate=2)
    state, _ = step(step.init(), batch_of())
    assert state.buffers == {}


# Clipping, composition, wrappers


@pytest.mark.full
def test_the_clipped_norm_is_that_of_the_whole_gradient(make_world):
    norms = []
    for axes, strategy in (("dp=1", ddp()), ("dp=4", ddp()), ("dp=8", zero(3, min_elements=8))):
        step = build(make_world(axes), strategy=strategy, clip_norm=0.1)
        _, metrics = step(step.init(), batch_of())
        norms.append(float(metrics["grad_norm"]))
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def test_wrappers_and_strategies_are_the_same(world):
    module = make_mlp()
    wrapped = DDP(module, world.group("dp"))
    plain, wrapper = (build(world, make_mlp, s) for s in (ddp(), wrapped))
    assert plain.strategy == wrapper.strategy
    named = build(world, make_mlp, compose(ddp(), Strategy("nothing")))
    assert named.strategy.name == "ddp + nothing"


@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "pipeline"])
def test_a_wrapper_that_is_the_strategy_may_be_the_model_too(make_world, wrap):
    world = make_world("pp=2" if wrap == "pipeline" else "dp=2")
    if wrap == "pipeline":
        layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2)]
        wrapped = Pipeline(nnx.Sequential(*layers), num_ranks=2, num_microbatches=2)
    else:
        wrapped = (DDP if wrap == "ddp" else FSDP)(make_mlp(), world.group("dp"))
    steps = [build(world, model, wrapped) for model in (wrapped.module, wrapped)]
    assert steps[0].abstract_state.params == steps[1].abstract_state.params


def test_a_wrapper_as_the_model_of_another_strategy_is_refused(world):
    wrapped = DDP(make_mlp(), world.group("dp"))
    with pytest.raises(ConfigError, match=r"model is a DistributedDataParallel.*give its \.module"):
        build(world, wrapped, zero(1))


# Initial states


@pytest.mark.sample("dp=2,fsdp=4")
@pytest.mark.parametrize("axes", ["dp=1", "dp=2", "dp=4", "dp=8", "dp=2,fsdp=4", "dp=4,fsdp=2"])
def test_arrays_are_created_with_the_same_bits_on_every_mesh(make_world, axes):
    world = make_world(axes)
    strategy = zero(3, world.mesh.axis_names, min_elements=8)
    state = build(world, make, strategy).init()
    expected = make()
    parts = (nnx.state(expected, nnx.Param), nnx.state(expected, nnx.Not(nnx.Param)))
    got = (state.params, state.buffers)
    for mine, want in zip(jax.tree.leaves(got), jax.tree.leaves(parts), strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            mine, want = jax.random.key_data(mine), jax.random.key_data(want)
        np.testing.assert_array_equal(mine, want)
    kernel = state.params["blocks"][0]["inner"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // world.size


@pytest.mark.full
def test_init_needs_a_share_and_at_most_one_block(world):
    """Eight blocks of a quarter megabyte: nothing ever holds more than a share and a block.

    First the parameters are drawn, then the moments are added in a program that keeps them.
    """

    class Wide(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(8)])

        def __call__(self, x):
            for block in self.blocks:
                x = jnp.tanh(block(x))
            return x

    step = build(world, lambda: Wide(nnx.Rngs(0)), zero(3))
    first = memory(lower_init(step).compile())
    block = 4 * (256 * 256 + 256)
    share = 3 * 8 * block / 8
    assert first.outputs <= 1.05 * share / 3
    assert first.peak <= share + block
    assert bytes_per_device(step.init().params) <= first.outputs


def test_a_given_module_is_not_initialized_again(world):
    with pytest.raises(ConfigError, match=r"given a module, whose arrays exist; give .* function"):
        lower_init(build(world, make_mlp()))


@pytest.mark.full
def test_an_optimizer_that_takes_further_arguments_and_not_the_loss(world):
    """As `optax.contrib.sam` is."""
    inner = optax.sgd(0.1)
    update = lambda grads, state, params=None, *, grad_fn=None: inner.update(grads, state, params)
    deaf = optax.GradientTransformationExtraArgs(inner.init, update)
    steps = [build(world, optimizer=optimizer) for optimizer in (deaf, inner)]
    states = [step(step.init(), batch_of())[0] for step in steps]
    jax.tree.map(np.testing.assert_array_equal, *(state.params for state in states))


# Claims


@pytest.mark.full
def test_a_step_explains_itself_and_checks_its_state(world):
    step = build(world, strategy=zero(3, min_elements=8))
    state = step.init()
    step.claims.check(state)
    kernel = next(row for row in step.claims.params.rows if row.path.endswith("0/kernel"))
    assert (kernel.ways, kernel.decision.rule) == (8, "zero3")
    compiled = step.lower(batch_of()).compile()
    step.claims.check_compiled(compiled, step.abstract_state)
    grads, _ = step.gradients(state, batch_of())
    step.claims.check(state, grads)
    whole = jax.device_put(grads, NamedSharding(world.mesh, P()))
    with pytest.raises(ClaimError, match=r"gradients under zero3: a device holds .* are claimed"):
        step.claims.check(state, whole)


@pytest.mark.sample("opt_state-optimizer state")
@pytest.mark.parametrize(
    ("field", "title"), [("params", "parameters"), ("opt_state", "optimizer state")]
)
def test_a_state_that_breaks_the_claim_is_an_error(world, field, title):
    step = build(world, strategy=zero(3, min_elements=8))
    state = step.init()
    whole = jax.device_put(getattr(state, field), NamedSharding(world.mesh, P()))
    with pytest.raises(ClaimError, match=rf"{title} under zero3(.|\n)*kernel .* instead of .* as"):
        step.claims.check(dataclasses.replace(state, **{field: whole}))
    # Also for arrays that were init elsewhere than claimed.
    places = dataclasses.replace(
        step.state_shardings, **{field: jax.tree.map(lambda x: x.sharding, whole)}
    )
    form = StateLayout(step.plan, split_model(make_mlp())[1])
    form.__dict__["state_shardings"] = places
    with pytest.raises(ClaimError, match=rf"{title} under zero3"):
        form.init({})


def test_flattened_moments_are_split_too(world):
    """`optax.flatten` keeps one vector that is like no parameter; the claim covers it."""

    class Even(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((WIDTH, 4)))

        def __call__(self, x):
            return x @ self.w

    optimizer = optax.flatten(optax.adam(1e-2))
    state = build(world, Even, zero(1, min_elements=8), optimizer=optimizer).init()
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert {leaf.addressable_shards[0].data.size for leaf in moments} == {WIDTH * 4 // 8}


# Annotations of the model's author


@pytest.mark.full
def test_annotations_of_flax_are_honoured(make_world):
    class Annotated(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))
            self.up = nnx.Linear(WIDTH, 32, kernel_init=init, rngs=rngs)
            self.down = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    losses = {}
    for axes in ("dp=1", "dp=2,tp=4"):
        world = make_world(axes)
        step = build(world, lambda: Annotated(nnx.Rngs(0)), zero(1, min_elements=8))
        state = step.init()
        if world.size > 1:
            assert state.params["up"]["kernel"].sharding.spec == P(None, "tp")
            moment = state.opt_state[0].mu["up"]["kernel"]
            assert moment.sharding.spec == P("dp", "tp")
            rule = next(r for r in step.claims.params.rows if r.path == "up/kernel").decision.rule
            assert rule == "flax metadata"
        values = []
        for number in range(2):
            state, metrics = step(state, batch_of(number))
            values.append(float(metrics["loss"]))
        losses[axes] = values
    assert losses["dp=2,tp=4"] == pytest.approx(losses["dp=1"], rel=1e-5)


# Evaluation


def weighted(model, batch):
    error = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    total = Weighted(jnp.sum(error * batch["weight"]), jnp.sum(batch["weight"]))
    return total, {"largest": jnp.max(error)}


@pytest.mark.sample("full_shard")
@pytest.mark.parametrize(
    "strategy",
    [ddp(), ddp(broadcast_buffers=False), fsdp(axes=("dp",), min_elements=8)],
    ids=["ddp", "own buffers", "full_shard"],
)
def test_evaluation_is_that_of_one_device(world, strategy):
    step = build(world, drawn_net(), strategy, loss=weighted, optimizer=optax.sgd(0.1))
    batch = batch_of() | {"weight": np.arange(16, dtype=np.float32) % 3}
    state = step.init()
    metrics = step.evaluate(state, batch)
    model = nnx.clone(drawn_net())
    model.eval()
    expected, largest = nnx.jit(weighted)(model, batch)
    want = float(expected.total / expected.weight)
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)
    assert float(metrics["largest"]) == pytest.approx(float(largest["largest"]), rel=1e-5)
    again = step.evaluate(state, batch)
    assert float(again["loss"]) == float(metrics["loss"])


def test_an_evaluation_with_own_buffers_has_their_constants(world):
    class Masked(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
            self.lowest = nnx.Variable(jnp.full((), jnp.finfo(jnp.float32).min))
            self.minus_infinity = nnx.Variable(jnp.full((), -jnp.inf))

    def loss_fn(model, batch):
        masked = jnp.where(batch["x"][:, :3] > 99, model.minus_infinity[...], 0.0)
        return jnp.mean((model.linear(batch["x"]) + 0 * model.lowest[...] + masked) ** 2)

    strategy = ddp(broadcast_buffers=False)
    step = build_train_step(Masked, optax.sgd(0.1), loss_fn, strategy, World.emulate(4, "dp=4"))
    state = step.init()
    x = np.ones((8, 4), np.float32)
    wanted = float(loss_fn(Masked(), {"x": x}))
    assert float(step.evaluate(state, {"x": x})["loss"]) == pytest.approx(wanted, rel=1e-6)
    model = step.merge(state)
    assert float(model.lowest[...]) == np.finfo(np.float32).min
    assert float(model.minus_infinity[...]) == -np.inf


@pytest.mark.full
def test_evaluation_computes_in_the_dtype_of_training(world):
    step = build(world, make, precision="bf16")
    single, half = (
        float(s.evaluate(s.init(), batch_of())["loss"]) for s in (build(world, make), step)
    )
    assert half != single
    assert half == pytest.approx(single, rel=2e-2)


# Rematerialisation


@pytest.fixture(scope="module")
def kept():
    """Gradients that keep everything, of two blocks on two devices."""
    return gradients_with(None)


def gradients_with(remat, strategy=None):
    step = build(World.emulate(2), drawn_net(), strategy, remat=remat, optimizer=optax.sgd(0.1))
    return step.gradients(step.init(), batch_of())[0]


@pytest.mark.sample("sqrt-everything")
@pytest.mark.parametrize(
    "remat",
    [
        ActivationCheckpointing(1),
        ActivationCheckpointing(2, policy="dots"),
        ActivationCheckpointing("sqrt", policy="everything"),
        ActivationCheckpointing(1, policy="offload_dots"),
    ],
    ids=lambda remat: f"{remat.interval}-{remat.policy}",
)
def test_recomputing_changes_no_gradient(kept, remat):
    for got, want in zip(
        jax.tree.leaves(gradients_with(remat)), jax.tree.leaves(kept), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


# What it prints


def test_a_step_says_what_it_is_and_which_axes_nothing_splits():
    world = World.emulate(4, "dp=2,tp=2")
    step = build(world, accumulate=2)
    assert idle_axes(step.spec) == ("tp",)
    assert repr(step) == (
        "TrainStep(ddp on mesh dp=2,tp=2 of 4 emulated devices, 2 microbatches, "
        "no strategy uses axis 'tp')"
    )


def test_old_names_of_a_step_warn_and_do_the_same(world):
    step = build(world)
    batch = batch_of()
    with pytest.warns(DeprecationWarning, match=r"TrainStep.layout .*use TrainStep.batch_layout"):
        assert step.layout is step.batch_layout
    with pytest.warns(DeprecationWarning, match=r"use axon_dist.inspect.separation"):
        assert str(step.separation(batch)) == str(separation(step, batch)) == "global view"
    with pytest.warns(DeprecationWarning, match=r"use axon_dist.inspect.lower_outer_steps"):
        assert step.lower_outer_steps() == ()
    with pytest.warns(DeprecationWarning, match=r"use TrainStep.check\(batch, own_rows=True\)"):
        step.check_rows(batch)
    with pytest.warns(DeprecationWarning, match=r"use TrainStep.replicated_arrays"):
        assert step.whole == ()
    with pytest.warns(DeprecationWarning, match=r"use print\(step\)"):
        assert step.whole_summary == ""
    with pytest.warns(DeprecationWarning, match=r"TrainStep.parts .*use TrainStep.model_spec"):
        assert step.parts is step.model_spec
    with pytest.raises(AttributeError, match="a TrainStep has no attribute 'lowers'"):
        getattr(step, "low" + "ers")


def test_a_run_that_starts_from_the_parameters_of_another_leaves_them_usable():
    loss_fn = lambda model, batch: jnp.mean((model(batch["x"]) - 1.0) ** 2)
    model = drawn(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), World.emulate(2))
    first = step.init()
    second = step.init_from(first.params)
    for _ in range(2):
        second, _ = step(second, {"x": np.ones((4, 4), np.float32)})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(first.params))
    np.testing.assert_array_equal(first.params["kernel"], model.kernel[...])
    assert not np.array_equal(second.params["kernel"], model.kernel[...])
