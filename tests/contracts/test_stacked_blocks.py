"""Blocks kept stacked and run by a loop of the model's own keep the promises made for lists."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import ActivationCheckpointing, World, build_train_step, ddp, fsdp, pipelined
from axon_dist.core.errors import UnsupportedError
from axon_dist.core.modules import stacks_of
from axon_dist.core.weighted import Weighted
from axon_dist.inspect import collectives
from axon_dist.models import Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import compose

from .models import Case, regression_batch
from .reference import assert_close, train
from .rows import part

SIZES = {"vocab_size": 64, "width": 32, "num_heads": 4, "ffn_width": 64, "max_length": 16}
DEPTH = 4
TOKENS = {"tokens": np.random.default_rng(0).integers(0, 64, (8, 17))}


def transformer(**changes):
    config = TransformerConfig(**{**SIZES, "num_layers": DEPTH, "scan_layers": True, **changes})
    return Transformer(config, rngs=nnx.Rngs(0, dropout=1))


class Block(nnx.Module):
    """A residual block of Flax's layers, with dropout."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.up = nnx.Linear(32, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.up(self.norm(x))))


class Scanned(nnx.Module):
    """A user's own model: blocks made by `nnx.vmap`, run by `nnx.scan`, with or without remat."""

    def __init__(self, remat=False, depth=DEPTH):
        make = nnx.vmap(lambda rngs: Block(rngs))
        self.blocks = make(nnx.Rngs(0, dropout=1).split(depth))
        self.head = nnx.Linear(32, 4, rngs=nnx.Rngs(2))
        self.remat = remat

    def __call__(self, x):
        call = lambda block, x: block(x)
        call = nnx.remat(call) if self.remat else call
        run = nnx.scan(lambda x, block: call(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(run(x, self.blocks))


BATCH = {
    "x": np.random.default_rng(1).normal(size=(8, 32)).astype(np.float32),
    "y": np.random.default_rng(2).normal(size=(8, 4)).astype(np.float32),
}


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


KINDS = {
    "transformer": (transformer, next_token_loss, TOKENS),
    "dropout": (lambda: transformer(dropout=0.2), next_token_loss, TOKENS),
    "nnx.scan": (Scanned, squares, BATCH),
    "nnx.remat": (lambda: Scanned(remat=True), squares, BATCH),
}
REMAT = ActivationCheckpointing()
ROWS = {
    "ddp": ("dp=2", lambda: ddp(), {}),
    "ddp remat": ("dp=2", lambda: ddp(), {"remat": REMAT}),
    "ddp remat of three": ("dp=2", lambda: ddp(), {"remat": ActivationCheckpointing(3)}),
    "ddp accumulate": ("dp=2", lambda: ddp(), {"accumulate": 2}),
    "fsdp": ("fsdp=4", lambda: fsdp(), {}),
    "fsdp remat": ("fsdp=4", lambda: fsdp(), {"remat": REMAT}),
    "fsdp accumulate remat": ("fsdp=2", lambda: fsdp(), {"remat": REMAT, "accumulate": 2}),
    "pipeline": ("pp=2", lambda: pipelined(2, 2), {}),
    "pipeline remat": ("pp=2", lambda: pipelined(2, 2), {"remat": REMAT}),
    "pipeline dp": ("pp=2,dp=2", lambda: compose(pipelined(2, 2), ddp()), {}),
}


def by_hand(make, loss_fn, batch, steps, rate=0.1):
    """Plain JAX on one device."""
    graphdef, params, rest = nnx.split(make(), nnx.Param, ...)

    @jax.jit
    def step(params, rest, batch):
        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = loss_fn(model, batch)
            mean = value.total / value.weight if isinstance(value, Weighted) else value
            return mean, nnx.state(model, nnx.Not(nnx.Param))

        (value, changed), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return value, jax.tree.map(lambda p, g: p - rate * g, params, grads), changed

    losses = []
    for _ in range(steps):
        value, params, rest = step(params, rest, batch)
        losses.append(float(value))
    return losses, nnx.to_pure_dict(params)


@pytest.mark.full
@pytest.mark.parametrize("row", part(ROWS, ["fsdp accumulate remat"]))
@pytest.mark.parametrize("kind", part(KINDS, ["nnx.remat"]))
def test_stacked_blocks_train_as_on_one_device(kind, row):
    make, loss_fn, batch = KINDS[kind]
    mesh, strategy, options = ROWS[row]
    expected, params = by_hand(make, loss_fn, batch, 3)
    world = World.emulate(int(np.prod([int(n[-1]) for n in mesh.split(",")])), mesh)
    step = build_train_step(make(), optax.sgd(0.1), loss_fn, strategy(), world, **options)
    state, losses = step.init(), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    for actual, wanted in zip(jax.tree.leaves(trained), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=2e-6)


class Kept(nnx.Variable):
    """What a block keeps from one step to the next."""


class Keeping(nnx.Module):
    """A residual block that changes a buffer of its own with every call."""

    def __init__(self, keeps, rngs):
        layer = nnx.Linear(16, 16, rngs=rngs)
        self.layer = nnx.SpectralNorm(layer, rngs=rngs) if keeps == "estimate" else layer
        self.kept = Kept(jnp.ones(() if keeps == "count" else 16))
        self.keeps = keeps

    def __call__(self, x):
        if self.keeps == "estimate":
            return x + jnp.tanh(self.layer(x, update_stats=True))
        y, old = self.layer(x), self.kept[...]
        if self.keeps == "count":
            self.kept[...] = old + 1
            return x + jnp.tanh(y) / old
        if self.keeps == "mean":
            self.kept[...] = 0.9 * old + 0.1 * jax.lax.stop_gradient(y.mean(0))
            return x + jnp.tanh(y - old)
        self.kept[...] = old + jax.lax.stop_gradient(y.sum(0))
        return x + jnp.tanh(y)


class ScannedKeeping(nnx.Module):
    """Two of these blocks in a stack."""

    def __init__(self, keeps):
        make = nnx.vmap(lambda rngs: Keeping(keeps, rngs))
        self.blocks = make(nnx.Rngs(0).split(2))
        self.head = nnx.Linear(16, 4, rngs=nnx.Rngs(2))

    def __call__(self, x):
        call = lambda x, block: block(x)
        return self.head(nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks))


KEEPING_ROWS = {
    "pipeline": ("pp=2", lambda: pipelined(2, 2), {}),
    "gpipe": ("pp=2", lambda: pipelined(2, 4, "gpipe"), {}),
    "accumulate": ("dp=2", lambda: ddp(), {"accumulate": 2}),
}


@pytest.mark.sample("pipeline-estimate", "gpipe-mean", "accumulate-sum")
@pytest.mark.parametrize("keeps", ["estimate", "count", "mean", "sum"])
@pytest.mark.parametrize("row", KEEPING_ROWS)
def test_stacked_blocks_keep_the_buffers_of_one_device(row, keeps):
    """What does not depend on samples changes once per step, and means are those of the batch."""
    mesh, strategy, options = KEEPING_ROWS[row]

    def loss_fn(model, batch):
        outputs = model(batch["x"])
        return jnp.mean((outputs - batch["y"]) ** 2), {"size": jnp.mean(jnp.abs(outputs))}

    case = Case(lambda: ScannedKeeping(keeps), loss_fn, regression_batch)
    optimizer = optax.sgd(0.01, momentum=0.9)
    world = World.emulate(2, mesh)
    step = build_train_step(case.make(), optimizer, loss_fn, strategy(), world, **options)
    state, want = step.init(), train(case, optimizer, 3)
    for number in range(3):
        state, metrics = step(state, case.batch(number))
        for name in ("loss", "size"):
            np.testing.assert_allclose(metrics[name], want.metrics[number][name], rtol=1e-5)
    model = step.merge(state)
    got = (nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, nnx.Not(nnx.Param)))
    assert_close(next(got), want.params, 2e-5, "parameter")
    assert_close(next(got), want.buffers, 2e-5, "buffer")


@pytest.mark.full
def test_stages_of_a_stack_draw_what_stages_of_a_list_draw():
    losses = []
    for scan in (False, True):
        step = build_train_step(
            transformer(scan_layers=scan, dropout=0.2, num_layers=2),
            optax.sgd(0.1),
            next_token_loss,
            pipelined(2, 2),
            World.emulate(2, "pp=2"),
        )
        state = step.init()
        for _ in range(2):
            state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.full
@pytest.mark.sample("nnx.remat")
@pytest.mark.parametrize("kind", ["dropout", "nnx.remat"])
def test_stages_of_a_stack_are_one_program(kind, monkeypatch):
    """As those of a list are: no program per stage, and no weights but a rank's own."""
    make, loss_fn, batch = KINDS[kind]
    monkeypatch.setattr("axon_dist.step.pipeline_view.SwitchStages", None)
    step = build_train_step(
        make(), optax.sgd(0.1), loss_fn, pipelined(2, 2), World.emulate(2, "pp=2")
    )
    step.lower(batch)
    kernel = next(leaf for leaf in jax.tree.leaves(step.abstract_state.params) if leaf.ndim == 3)
    assert kernel.shape[0] == 2


def compiled(make, loss_fn, batch, strategy, mesh="fsdp=8", **options):
    step = build_train_step(
        make, optax.adamw(1e-3), loss_fn, strategy, World.emulate(8, mesh), **options
    )
    return step.lower(batch).compile()


def bytes_layer_by_layer(scan, remat):
    """The temporaries of a deep step whose layers are gathered one after another."""
    make = lambda: transformer(scan_layers=scan, num_layers=8, width=64, max_length=64)
    batch = {"tokens": jax.ShapeDtypeStruct((16, 65), jnp.int32)}
    found = compiled(make, next_token_loss, batch, fsdp(), remat=remat)
    blocks = [c for c in collectives(found) if c.kind == "all-gather" and c.count > 1]
    # Seven kernels, each in the forward and in the backward pass, one layer at a time.
    assert sorted({c.count for c in blocks}) == [8]
    assert len(blocks) == 14
    assert max(c.bytes_out for c in blocks) <= 64 * 64 * 4
    return found.memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_a_stack_is_gathered_and_recomputed_layer_by_layer():
    assert bytes_layer_by_layer(True, REMAT) < 0.5 * bytes_layer_by_layer(True, None)


@pytest.mark.full
def test_a_stack_needs_no_more_than_a_list():
    temp = {(s, r): bytes_layer_by_layer(s, r) for s in (False, True) for r in (None, REMAT)}
    for remat in (None, REMAT):
        assert temp[True, remat] <= 1.03 * temp[False, remat]


@pytest.mark.sample("True")
@pytest.mark.parametrize("remat", [False, True])
def test_a_checkpoint_of_the_models_own_is_not_recomputed_twice(remat):
    world = World.emulate(2, "dp=2")
    step = build_train_step(
        Scanned(remat), optax.sgd(0.1), squares, ddp(), world, remat=ActivationCheckpointing()
    )
    text = step.lower(BATCH).as_text()
    # Forward, and once more in the backward pass.
    assert text.count("stablehlo.tanh") == 2


@pytest.mark.full
def test_stacked_leaves_are_split_within_each_layer():
    """More layers than features: the largest dim would be the one that counts the layers."""
    step = build_train_step(
        lambda: Scanned(depth=64), optax.sgd(0.1), squares, fsdp(), World.emulate(8, "fsdp=8")
    )
    spec = step.state_shardings.params["blocks"]["up"]["kernel"].spec
    assert tuple(spec) == (None, "fsdp")
    assert np.isfinite(float(step(step.init(), BATCH)[1]["loss"]))


class Whole(nnx.Module):
    """A stack that loops over itself."""

    def __init__(self):
        make = nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))
        self.layers = make(nnx.Rngs(0).split(DEPTH))

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def __call__(self, x):
        return jnp.tanh(self.layers(x))


class Holder(nnx.Module):
    """Holds such a stack."""

    def __init__(self):
        self.blocks = Whole()

    def __call__(self, x):
        return self.blocks(x)[:, :4]


def test_a_stack_that_loops_over_itself_is_refused_with_what_works():
    assert stacks_of(Holder()) == {"blocks": DEPTH}
    step = build_train_step(Holder(), optax.sgd(0.1), squares, fsdp(), World.emulate(2, "fsdp=2"))
    with pytest.raises(UnsupportedError, match=r"Whole of 4 stacked layers.*nnx.scan\("):
        step.lower(BATCH)
