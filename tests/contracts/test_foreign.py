"""Modules as others write them, under strategies that split models."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import ActivationCheckpointing, Reduction, World, build_train_step, fsdp, pipelined
from axon_dist.parallel import suggest_plan, tensor_parallel

from .models import Case, mean_square, regression_batch, token_batch
from .reference import assert_close, train
from .rows import part


@dataclasses.dataclass
class Config:
    """Compares, and has no hash."""

    width: int = 16


class Configured(nnx.Module):
    def __init__(self, config, rngs):
        self.config = config
        self.layer = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, x, config):
        assert config == self.config
        return x + jnp.tanh(self.layer(x))


class Net(nnx.Module):
    """Blocks that keep a config of theirs, and are given it again with every call."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(Configured(Config(), rngs) for _ in range(2))
        self.out = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, Config())
        return self.out(x)


class Shared(nn.Module):
    """Reads a parameter of its layer by hand, as Hugging Face's models share their tables."""

    def setup(self):
        self.table = nn.Embed(32, 16)

    def __call__(self, tokens):
        return self.table(tokens) @ self.table.variables["params"]["embedding"].T


def shared():
    tokens = jnp.ones((1, 8), jnp.int32)
    return nnx.bridge.ToNNX(Shared(), rngs=nnx.Rngs(0)).lazy_init(tokens)


class Block(nn.Module):
    """A residual block with a random mask, whose key Flax derives from the block's name."""

    width: int = 16

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(self.width)(jnp.tanh(nn.Dense(4 * self.width)(x)))
        return x + nn.Dropout(0.2, deterministic=False)(y)


class Stack(nn.Module):
    """Blocks that a loop makes."""

    width: int = 16
    depth: int = 3

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = Block(self.width)(x)
        return nn.Dense(4)(x)


def stacked(width=16, depth=3):
    module = nnx.bridge.ToNNX(Stack(width, depth), rngs=nnx.Rngs(0, dropout=1))
    return module.lazy_init(jnp.ones((1, width)))


def likely(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


CASES = {
    "config": Case(Net, mean_square, regression_batch),
    "shared": Case(shared, likely, token_batch),
    "stacked": Case(stacked, mean_square, regression_batch),
}
ROWS = {
    "config fsdp": ("config", "fsdp=2", lambda: fsdp(min_elements=8), {}),
    "config remat": (
        "config",
        "fsdp=2",
        lambda: fsdp(min_elements=8),
        {"remat": ActivationCheckpointing()},
    ),
    "config pipeline": ("config", "pp=2", lambda: pipelined(2, 1), {}),
    "shared fsdp": ("shared", "fsdp=2", lambda: fsdp(min_elements=8), {}),
    "shared by hand": (
        "shared",
        "fsdp=2",
        lambda: fsdp(min_elements=8, reduction=Reduction(manual=True)),
        {},
    ),
    "stacked by hand": (
        "stacked",
        "fsdp=2",
        lambda: fsdp(min_elements=8, reduction=Reduction(manual=True)),
        {"remat": ActivationCheckpointing(2)},
    ),
    "stacked pipeline": ("stacked", "pp=2", lambda: pipelined(2, 1, classes="Block"), {}),
}


@pytest.mark.full
def test_a_bridged_stack_needs_one_block_at_a_time():
    """Bytes without arguments: two gathered blocks and their gradients, not all eight."""
    width, depth = 128, 8
    make = lambda: stacked(width, depth)
    batch = {"x": jax.ShapeDtypeStruct((8, width), "float32")}
    square = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    world = World.emulate(4, "fsdp=4")
    step = build_train_step(make, optax.sgd(0.1), square, fsdp(), world)
    block = 4 * sum(x.size for x in jax.tree.leaves(step.model_spec.params["Block_0"]))
    temporaries = step.lower(batch).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < (depth - 1) * block


@pytest.mark.parametrize(
    "name",
    part(ROWS, ["config pipeline", "shared by hand"]),
)
def test_equals_one_device(name):
    case, mesh, strategy, options = ROWS[name]
    case, world = CASES[case], World.emulate(2, mesh)
    make = lambda: optax.sgd(0.1, momentum=0.9)
    want = train(case, make(), 2)
    step = build_train_step(case.make, make(), case.loss_fn, strategy(), world, **options)
    state = step.init()
    for number in range(2):
        state, metrics = step(state, case.batch(number))
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-5)
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(trained, want.params, 3e-5, "parameter")


class Prime(nnx.Module):
    """A vocabulary that no mesh divides, shared by lookup and head, around a block that divides."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.table = nnx.Embed(37, 16, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        return self.table.attend(x + self.down(nnx.gelu(self.up(x))))


@pytest.mark.full
def test_a_vocabulary_that_does_not_divide_stays_whole():
    case = Case(Prime, likely, token_batch)
    plan = suggest_plan(Prime, jnp.zeros((2, 8), jnp.int32))
    want = train(case, optax.sgd(0.1), 2)
    step = build_train_step(
        Prime, optax.sgd(0.1), likely, tensor_parallel(plan), World.emulate(2, "tp=2")
    )
    assert "37 units do not divide over tp=2" in str(step.claims.params)
    state = step.init()
    for number in range(2):
        state, metrics = step(state, case.batch(number))
        assert float(metrics["loss"]) == pytest.approx(want.losses[number], rel=1e-5)
    assert state.params["up"]["kernel"].sharding.spec == jax.sharding.PartitionSpec(None, "tp")
    trained = nnx.to_pure_dict(nnx.state(step.merge(state), nnx.Param))
    assert_close(trained, want.params, 3e-5, "parameter")
