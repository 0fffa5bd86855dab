"""The one reduction of a step that accumulates runs within the backward pass of its last part.

Each model reads its weights in another way; where a unit runs more than once the sums held must
still count once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import (
    ActivationCheckpointing,
    Reduction,
    Weighted,
    World,
    build_train_step,
    ddp,
    fsdp,
    zero,
)
from axon_dist.inspect import collectives
from axon_dist.ir.pieces import read_once
from axon_dist.ir.units import mark_units
from axon_dist.step.local_view import stacking_of

WIDTH, ROWS, PARTS, STEPS = 16, 32, 4, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(x))


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Twice(Listed):
    """A block that runs twice, another in every turn of a loop, and a weight read outside it."""

    def __call__(self, x):
        one, two, three = self.layers
        x = one(one(self.first(x)))
        x = nnx.fori_loop(0, 2, lambda _, pair: (pair[0], pair[0](pair[1])), (two, x))[1]
        return three(x) + 0.1 * x @ three.linear.kernel


class Branching(Listed):
    """A block that only some samples' ranks run."""

    def __call__(self, x):
        x = self.first(x)
        one, two, three = self.layers
        x = nnx.cond(jnp.sum(x**2) > 0, lambda layer, x: layer(x), lambda layer, x: x, one, x)
        return three(two(x))


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = nnx.vmap(Block)(rngs.split(3))

    def __call__(self, x):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(self.first(x), self.layers)


def loss_fn(model, batch):
    losses = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, -1)
    return Weighted(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"]))


def mean_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x), "weight": rng.uniform(size=ROWS).astype(np.float32)}


def on_one_device(make, loss):
    """Plain JAX: the gradient of the mean over the whole batch."""
    graphdef, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
    batch = make_batch()

    def value(params):
        found = loss(nnx.merge(graphdef, params, rest), batch)
        return found.total / found.weight if isinstance(found, Weighted) else found

    sgd = jax.jit(lambda p: jax.tree.map(lambda p, g: p - 0.5 * g, p, jax.grad(value)(p)))
    for _ in range(STEPS):
        params = sgd(params)
    return nnx.to_pure_dict(params)


STRATEGIES = {
    "ddp": ddp("fsdp"),
    "zero1": zero(1, "fsdp", min_elements=8),
    "full": fsdp(min_elements=8, reduction=Reduction(per="step")),
}
BLOCKS = ActivationCheckpointing(classes=("Block",))


def build(make, strategy, loss=loss_fn, **options):
    world = World.emulate(4, "fsdp=4")
    return build_train_step(
        lambda: make(nnx.Rngs(0)),
        optax.sgd(0.5),
        loss,
        strategy,
        world,
        accumulate=PARTS,
        **options,
    )


@pytest.mark.full
@pytest.mark.sample("Branchin-zero1-loss_fn-None")
@pytest.mark.parametrize(
    ("make", "name", "loss", "remat"),
    [
        (Listed, "ddp", loss_fn, BLOCKS),
        (Listed, "zero1", mean_loss, None),
        (Twice, "ddp", loss_fn, BLOCKS),
        (Branching, "zero1", loss_fn, None),
        (Stacked, "full", loss_fn, None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value))[:8],
)
def test_it_equals_one_device(make, name, loss, remat):
    # Whether a branch runs is asked of all samples; here it always does.
    separable = False if make is Branching else None
    step = build(make, STRATEGIES[name], loss, remat=remat, separable=separable)
    state = step.init()
    for _ in range(STEPS):
        state, _ = step(state, make_batch())
    expected = on_one_device(make, loss)
    close = lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, state.params, expected)


def test_reductions_of_layers_run_within_their_loop_and_once():
    """2 (N-1)/N bytes in all; those of three layers in the loop over them, not behind it."""
    step = build(Listed, ddp("fsdp"), remat=BLOCKS)
    ledger = collectives(step.lower(make_batch()).compile(), step.world.mesh)
    kernels = [row for row in ledger if row.bytes_in >= 4 * WIDTH * WIDTH]
    count = 4 * (WIDTH * WIDTH + WIDTH)
    assert ledger.total_wire_bytes("all-reduce") == pytest.approx(2 * 3 / 4 * 4 * count, rel=0.02)
    assert sorted(row.count for row in kernels) == [1, 3]


def test_a_weight_is_read_once_where_one_unit_has_it_to_itself():
    def names(make):
        graphdef, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
        found = nnx.to_flat_state(params)
        paths = ["/".join(map(str, path)) for path, _ in found]

        def run(values, x):
            flat = [(path, v.replace(new)) for (path, v), new in zip(found, values, strict=True)]
            model = nnx.merge(graphdef, nnx.from_flat_state(flat), rest)
            mark_units(model, lambda _, module: isinstance(module, Block))
            return model(x)

        values = [variable[...] for _, variable in found]
        return read_once(jax.make_jaxpr(run)(values, jnp.ones((2, WIDTH))).jaxpr, paths)

    both = lambda layer: {f"{layer}/linear/bias", f"{layer}/linear/kernel"}
    assert names(Listed) == both("layers/0") | both("layers/1") | both("layers/2")
    assert names(Twice) == {"layers/2/linear/bias"}
    assert names(Branching) == both("layers/1") | both("layers/2")
    assert names(Stacked) == both("layers")


def test_leaves_of_equal_units_are_rows_in_their_order():
    leaf = lambda n: jnp.full((2,), n)
    tree = {"layers": {str(n): {"w": leaf(n)} for n in (0, 2, 10)}, "head": leaf(7)}
    stacking = stacking_of(tree, [f"layers/{n}" for n in (10, 0, 2)])
    stacked = stacking.stack(tree)
    assert {path: x.shape for path, x in stacked.items()} == {"head": (2,), "layers/0/w": (3, 2)}
    assert list(stacked["layers/0/w"][:, 0]) == [0, 2, 10]
    jax.tree.map(np.testing.assert_array_equal, stacking.unstack(stacked), tree)
