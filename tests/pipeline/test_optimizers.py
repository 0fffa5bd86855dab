"""Optimizers as their users write them, on pipelines: equal to the same optimizer on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import build_train_step, compose, zero
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.core.tree import is_key, leaves_with_paths
from axon_dist.inspect import collectives
from axon_dist.optim import Spikes, adamw_8bit, watched
from axon_dist.optim.wrappers import layer_norms
from axon_dist.parallel import ddp, pipelined
from axon_dist.sharding import optimizer_shardings, shardings
from axon_dist.step import plan
from axon_dist.step.model_spec import split_model
from axon_dist.step.plan import optimizer_for
from axon_dist.step.sharing import sharing_steps
from axon_dist.step.storage import storage_of
from tests.drawn import drawn

WIDTH, NUM_STEPS = 40, 3
"""Kernels of 1600 elements: more than a pipeline hands around."""


class Block(nnx.Module):
    def __init__(self, hidden, rngs):
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    """Blocks of different norms, something before and behind them."""

    def __init__(self, widths):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(8, WIDTH, rngs=rngs)
        self.blocks = nnx.List(Block(width, rngs) for width in widths)
        for number, block in enumerate(self.blocks):
            block.up.kernel.set_value(block.up.kernel[...] * (1 + 3 * number))
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class StackedNet(nnx.Module):
    """Blocks in one module, a row of each array for each of them."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Linear(8, WIDTH, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(WIDTH, rngs))(nnx.Rngs(1).split(4))
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(self.embed(x), self.blocks))


def make(model):
    return StackedNet() if model == "stack" else Net(MODELS[model])


MODELS = {"rows": (WIDTH,) * 4, "holes": (WIDTH,) * 3, "vectors": (WIDTH, 24, 48)}
MODELS["equal stages"] = (WIDTH, 24, WIDTH, 24)
MODELS["one each"] = (WIDTH, 24)
CLIP = optax.clip_by_global_norm(0.5)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch():
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, :4])}


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(text):
    """`a` for leaves whose path has a text in it, else `b`."""
    label = lambda path, _: "a" if text in jax.tree_util.keystr(path) else "b"
    return lambda params: jax.tree_util.tree_map_with_path(label, params)


def split(one, other, text):
    return optax.multi_transform({"a": one, "b": other}, labels(text))


def inject(rate):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9)


def warm(peak):
    return optax.sgd(optax.linear_schedule(peak / 10, peak, 4))


def per_leaf(update):
    return optax.stateless_with_tree_map(lambda g, p: update(g))


RECIPES: dict[str, Callable[[], Any]] = {
    "sgd momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "adamw bf16 mu": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "adamw 8 bits": lambda: adamw_8bit(1e-2, weight_decay=0.5, mask=matrices, min_size=64),
    "adamw ndim mask": lambda: optax.adamw(1e-2, weight_decay=0.5, mask=matrices),
    "clip adamw": lambda: optax.chain(CLIP, optax.adamw(optax.cosine_decay_schedule(1e-2, 10))),
    "lamb": lambda: optax.lamb(1e-2),
    "clip lamb": lambda: optax.chain(CLIP, optax.lamb(1e-2)),
    "clip lars": lambda: optax.chain(CLIP, optax.lars(0.3)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "adafactor whole": lambda: optax.adafactor(1e-2),
    "clip agc": lambda: optax.chain(CLIP, optax.adaptive_grad_clip(0.01), optax.sgd(0.3)),
    "block rms": lambda: optax.chain(optax.clip_by_block_rms(1e-3), optax.sgd(0.3)),
    "centralize": lambda: optax.chain(optax.centralize(), CLIP, optax.sgd(0.3)),
    "novograd": lambda: optax.chain(CLIP, optax.novograd(1e-2)),
    "muon": lambda: optax.contrib.muon(1e-2),
    "multi steps": lambda: optax.MultiSteps(optax.chain(CLIP, optax.adamw(1e-2)), 2),
    "multi steps, skipping": lambda: optax.MultiSteps(
        optax.lamb(1e-2), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "apply if finite": lambda: optax.apply_if_finite(optax.adamw(1e-2), 2),
    "every other step": lambda: optax.conditionally_mask(
        optax.lamb(1e-2), lambda step: step % 2 == 0
    ),
    "rates per layer": lambda: split(optax.sgd(0.01), optax.sgd(0.3), "[0]"),
    "schedules per layer": lambda: split(warm(0.01), warm(0.3), "[0]"),
    "injected per layer": lambda: split(inject(0.01), inject(0.3), "[0]"),
    "another per layer": lambda: split(optax.lamb(0.01), optax.sgd(0.3), "[1]"),
    "frozen layer, clip": lambda: optax.chain(CLIP, split(optax.set_to_zero(), inject(0.3), "[0]")),
    "frozen embed, clip": lambda: optax.chain(
        CLIP, split(optax.set_to_zero(), optax.adamw(1e-2), "embed")
    ),
    "clip one layer": lambda: split(optax.chain(CLIP, optax.sgd(0.3)), optax.sgd(0.1), "[2]"),
    "lion": lambda: optax.lion(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-2, centered=True),
    "yogi": lambda: optax.yogi(1e-2),
    "lookbehind": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.55, 0), optax.sgd(0.1)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "by size": lambda: per_leaf(lambda g: -g / g.shape[0]),
    "by place": lambda: per_leaf(lambda g: -0.1 * jnp.flip(jnp.cumsum(g, axis=0), axis=0)),
}

DEFAULT = {
    "rows": (
        "clip adamw",
        "adamw 8 bits",
        "adamw ndim mask",
        "clip lamb",
        "adafactor",
        "frozen layer, clip",
        "injected per layer",
    ),
    "holes": (),
    "vectors": ("clip adamw",),
    "equal stages": ("adamw ndim mask",),
    "stack": ("clip lamb",),
}
"""The recipes that are tried on a form of storage in every run; a full one tries all."""


def gradients(params, number):
    """Gradients of different norms, some large."""
    draw = lambda x, key: jax.random.normal(key, x.shape, x.dtype) * 10.0 ** (x.size % 3 - 1)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(number), len(leaves))
    return structure.unflatten(map(draw, leaves, keys))


def trained(optimizer, params, from_model=lambda tree: tree):
    """Parameters and state after a few updates with given gradients."""

    @jax.jit
    def update(grads, state, stored, value):
        updates, state = optimizer.update(grads, state, stored, value=value)
        return optax.apply_updates(stored, updates), state

    stored = from_model(params)
    state = jax.jit(optimizer.init)(stored)
    for number in range(NUM_STEPS):
        grads = from_model(gradients(params, number))
        stored, state = update(grads, state, stored, jnp.float32(number % 2))
    return stored, state


def read(metrics):
    return {name: float(value) for name, value in metrics.items()}


def assert_equal(got, want):
    got, want = leaves_with_paths(got), leaves_with_paths(want)
    assert [path for path, _ in got] == [path for path, _ in want]
    for (path, mine), (_, theirs) in zip(got, want, strict=True):
        if is_key(theirs):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        scale = max(abs(theirs).max(), 1e-30)
        np.testing.assert_allclose(mine, theirs, 0, 1e-5 * scale, err_msg=str(path))


def cases(*models):
    """Every recipe on every form of storage."""
    for name in RECIPES:
        for model in models:
            if model != "stack" or name not in OVER_LAYERS:
                marks = () if name in DEFAULT[model] else pytest.mark.full
                yield pytest.param(name, model, marks=marks)


OVER_LAYERS = ("clip agc", "prodigy", "by place")
"""Recipes that sum or shift along the dim that counts layers."""


@pytest.mark.sample("by place")
@pytest.mark.parametrize("name", OVER_LAYERS)
def test_optimizers_across_stacked_layers_are_refused(name, make_world):
    with pytest.raises(UnsupportedError, match=r"'grads/blocks/0/\w+/kernel', and the operation"):
        check_on(name, "stack", pipelined(2, 2), make_world("pp=2"))


def check_on(name, model, strategy, world):
    model_spec, _ = split_model(make(model))
    params = nnx.to_pure_dict(nnx.state(make(model), nnx.Param))
    storage = storage_of(model_spec, strategy)
    optimizer, storage, _ = optimizer_for(RECIPES[name](), model_spec, storage, world.mesh)

    def stored(tree):
        rows = storage.from_model(tree)
        return jax.device_put(rows, shardings(storage.strategy.opt_state, rows, world.mesh))

    params_rows, state_rows = trained(optimizer, params, stored)
    want, want_state = trained(optax.with_extra_args_support(RECIPES[name]()), params)
    assert_equal(storage.to_model(params_rows), want)
    assert_equal(optimizer.state_to_model(state_rows), want_state)
    # A rank without a block keeps its zeros, which are counted in norms of all that is stored.
    again = storage.from_model(storage.to_model(params_rows))
    jax.tree.map(np.testing.assert_array_equal, again, params_rows)


@pytest.mark.full
@pytest.mark.sample("clip adamw-vectors")
@pytest.mark.parametrize(("name", "model"), list(cases(*DEFAULT)))
def test_equals_one_device(name, model, make_world):
    check_on(name, model, pipelined(2, 2), make_world("pp=2"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("clip lamb", "rows"),
        pytest.param("adafactor", "vectors", marks=pytest.mark.full),
        pytest.param("clip lamb", "vectors", marks=pytest.mark.full),
        pytest.param("adafactor", "rows", marks=pytest.mark.full),
        pytest.param("clip adamw", "rows", marks=pytest.mark.full),
        pytest.param("clip adamw", "vectors", marks=pytest.mark.full),
    ],
)
def test_equals_one_device_where_another_axis_splits_the_state(name, model, make_world):
    strategy = compose(pipelined(2, 2), zero(1, min_elements=8))
    check_on(name, model, strategy, make_world("pp=2,dp=2"))


@pytest.mark.full
@pytest.mark.parametrize("name", ["clip lamb", pytest.param("adafactor", marks=pytest.mark.full)])
def test_branches_of_ranks_move_nothing(name, make_world):
    """Ranks of unequal stages take different branches, in which a permutation would hang."""
    world = make_world("pp=2,dp=2")
    strategy = compose(pipelined(2, 2), zero(1, min_elements=8))
    step = build_train_step(Net(MODELS["vectors"]), RECIPES[name](), loss_fn, strategy, world)
    _, metrics = step(step.init(), batch())
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.full
def test_the_state_of_blocks_lies_on_their_stages_ranks(make_world):
    world = make_world("pp=2,dp=2")
    strategy = compose(pipelined(2, 2), zero(1, min_elements=8))
    for name in ("adafactor", "novograd", "muon", "frozen layer, clip"):
        for model in ("rows", "vectors"):
            model_spec, _ = split_model(make(model))
            storage = storage_of(model_spec, strategy)
            optimizer, storage, _ = optimizer_for(RECIPES[name](), model_spec, storage, world.mesh)
            params = jax.eval_shape(storage.from_model, model_spec.params)
            state = jax.eval_shape(optimizer.init, params)
            policy = storage.strategy.opt_state
            found = optimizer_shardings(policy, params, state, world.mesh)
            rows = optimizer.state_form.row_paths
            assert rows
            for path, place in leaves_with_paths(found):
                assert path not in rows or place.spec[0] == "pp", path


def test_a_step_equals_one_device(make_world):
    rates = split(optax.sgd(0.01), optax.sgd(0.1), "[1]")
    optimizer = optax.chain(CLIP, optax.adaptive_grad_clip(0.01), rates)
    model = drawn(lambda: Net((WIDTH, WIDTH)))
    for number, block in enumerate(model.blocks):
        block.up.kernel[...] *= 1 + 3 * number
    graph, state = nnx.split(model, nnx.Param)
    params = nnx.to_pure_dict(state)
    opt_state = jax.jit(optimizer.init)(params)

    @jax.jit
    def alone(params, opt_state):
        grads = jax.grad(lambda p: loss_fn(nnx.merge(graph, p), batch()))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = build_train_step(model, optimizer, loss_fn, pipelined(2, 2), make_world("pp=2"))
    stored = step.init()
    for _ in range(NUM_STEPS):
        params, opt_state = alone(params, opt_state)
        stored, _ = step(stored, batch())
    assert_equal(jax.jit(step.storage.to_model)(stored.params), params)


def test_a_search_traces_an_optimizer_and_the_norms_of_layers_once(make_world, monkeypatch):
    traced, trace = [], plan.trace_update
    monkeypatch.setattr(plan, "trace_update", lambda *given: traced.append(1) or trace(*given))
    optimizer = optax.with_extra_args_support(optax.scale(-0.1))
    factory = lambda: make("rows")
    with sharing_steps():
        for mesh in ("pp=2", "pp=2,dp=2"):
            build_train_step(
                factory, optimizer, loss_fn, pipelined(2, 2), make_world(mesh),
                metrics=("norms_by_layer",),
            )  # fmt: skip
    assert len(traced) == 2


@pytest.mark.parametrize("model", ["rows", "vectors", "stack"])
def test_layers_of_stages_have_the_norms_of_the_models_layers(model, make_world):
    shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(make(model), nnx.Param)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    step = build_train_step(
        lambda: make(model), optax.sgd(0.1), loss_fn, pipelined(2, 2), make_world("pp=2"),
        metrics=("norms_by_layer",),
    )  # fmt: skip
    found = jax.jit(step.plan.state_plan.layer_norms)(step.storage.from_model(params))
    expected = jax.jit(layer_norms)(params)
    assert len(expected) == (3 if model == "stack" else 2 + len(MODELS[model]))
    assert read(found) == pytest.approx(read(expected), rel=1e-5)


# The norms of the layers of each form of storage are measured above.
@pytest.mark.sample("one each")
@pytest.mark.parametrize("model", ["rows", "vectors", "one each", "stack"])
def test_norms_of_layers_and_of_the_whole_gradient_are_measured_before_it_is_clipped(
    model, make_world
):
    optimizer, spikes = optax.adam(0.1), Spikes(window=2)
    net, names = drawn(lambda: make(model)), ("norms_by_layer",)
    step = build_train_step(
        net, watched(optimizer, spikes=spikes), loss_fn, pipelined(2, 2), make_world("pp=2"),
        clip_norm=0.01, metrics=names,
    )  # fmt: skip
    state = step.init()
    for _ in range(2):
        state, metrics = step(state, batch())
    found = read(metrics | state.opt_state.averages["norm"]._asdict())

    alone = watched(optimizer, clip_norm=0.01, spikes=spikes, norms_by_layer=True)
    graph, weights = nnx.split(net, nnx.Param)
    params = nnx.to_pure_dict(weights)

    @jax.jit
    def train(params, state):
        of_params = lambda params: loss_fn(nnx.merge(graph, params), batch())
        loss, grads = jax.value_and_grad(of_params)(params)
        updates, state = alone.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    state = jax.jit(alone.init)(params)
    for _ in range(2):
        params, state, loss = train(params, state)
    expected = read(state.metrics | state.averages["norm"]._asdict() | {"loss": loss})
    assert found == pytest.approx(expected | {"grad_norm": found["grad_norm"]}, rel=1e-4)
    layers = [name for name in found if name.startswith("grad_norm/")]
    assert len(layers) == (3 if model == "stack" else 2 + len(MODELS[model]))
    whole = sum(found[name] ** 2 for name in layers) ** 0.5
    assert found["grad_norm"] == pytest.approx(whole, rel=1e-4)
    assert found["grad_norm"] > 0.01 < found["mean"]


@pytest.mark.full
@pytest.mark.sample("dict-pipeline", "State-ddp")
@pytest.mark.parametrize("strategy", [ddp(), pipelined(2, 2)], ids=["ddp", "pipeline"])
@pytest.mark.parametrize("form", [nnx.to_pure_dict, lambda state: state], ids=["dict", "State"])
def test_static_masks_and_labels(form, strategy, make_world):
    tree = form(nnx.state(Net(MODELS["rows"]), nnx.Param))
    rates = {"a": optax.sgd(0.1), "b": optax.sgd(0.3)}
    make = lambda mask, names: optax.chain(
        optax.masked(optax.lamb(0.1), mask),
        optax.add_decayed_weights(0.5, mask=mask),
        optax.multi_transform(rates, names),
    )
    optimizer = make(matrices(tree), labels("bias")(tree))
    model_spec, _ = split_model(Net(MODELS["rows"]))
    world = make_world("pp=2" if strategy.pipeline else "dp=2")
    storage = storage_of(model_spec, strategy)
    fitting, _, _ = optimizer_for(optimizer, model_spec, storage, world.mesh)
    params = nnx.to_pure_dict(nnx.state(Net(MODELS["rows"]), nnx.Param))
    got, state = trained(fitting, params, storage.from_model)
    want, _ = trained(optax.with_extra_args_support(make(matrices, labels("bias"))), params)
    assert_equal(storage.to_model(got), want)
    assert not any(isinstance(x, nnx.State) for x in jax.tree.leaves(state, is_leaf=is_state))


def is_state(tree):
    return isinstance(tree, nnx.State)


@pytest.mark.parametrize("strategy", [ddp(), pipelined(2, 2)], ids=["ddp", "pipeline"])
def test_a_mask_of_another_model_is_refused(strategy, make_world):
    mask = {"blocks": True}
    world = make_world("pp=2" if strategy.pipeline else "dp=2")
    with pytest.raises(ConfigError, match=r"cannot work on the parameters.*mask=lambda params"):
        build_train_step(Net(MODELS["rows"]), optax.adamw(0.1, mask=mask), loss_fn, strategy, world)


@pytest.mark.sample("rows")
@pytest.mark.parametrize("model", ["rows", "vectors"])
def test_optimizers_that_need_blocks_of_several_stages_are_refused(model, make_world):
    with pytest.raises(UnsupportedError, match=r"of 'grads/blocks/0/down/kernel', and the oper.*'"):
        build_train_step(
            Net(MODELS[model]),
            optax.flatten(optax.adam(1e-3)),
            loss_fn,
            pipelined(2, 2),
            make_world("pp=2"),
        )


@pytest.mark.full
def test_equal_blocks_are_updated_once_and_a_norm_is_one_reduction(make_world):
    """One program for all ranks, and no more communication than the norm of what is stored."""
    model_spec, _ = split_model(Net(MODELS["rows"]))
    world = make_world("pp=2")
    storage = storage_of(model_spec, pipelined(2, 2))
    clipped = optax.chain(CLIP, optax.adamw(1e-2))
    optimizer, storage, _ = optimizer_for(clipped, model_spec, storage, world.mesh)
    shapes = jax.eval_shape(storage.from_model, model_spec.params)
    placed = lambda tree, policy: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        tree,
        shardings(policy, tree, world.mesh),
    )
    params = placed(shapes, storage.strategy.params)
    state = placed(jax.eval_shape(clipped.init, shapes), storage.strategy.opt_state)
    value = jax.ShapeDtypeStruct((), jnp.float32)

    def compiled(update):
        run = lambda grads, state, params, value: update(grads, state, params, value=value)
        return jax.jit(run).lower(params, state, params, value).compile()

    rows = optax.with_extra_args_support(clipped).update
    mine, plain = compiled(optimizer.update), compiled(rows)
    kinds = lambda program: sorted(row.kind for row in collectives(program, world.mesh))
    assert kinds(mine) == kinds(plain)
    assert mine.cost_analysis()["flops"] <= 1.01 * plain.cost_analysis()["flops"]
    temp = lambda program: program.memory_analysis().temp_size_in_bytes
    assert temp(mine) <= 1.01 * temp(plain) + 256
