"""Experts in a list: what a device holds of them, what travels, and what is refused."""

import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp
from axon_dist.core.errors import ConfigError, DivisibilityError, UnsupportedError
from axon_dist.inspect import collectives
from axon_dist.parallel import expert_parallel, fsdp, local_sgd, pipelined, suggest_plan
from tests.contracts.listed import (
    EXPERTS,
    HIDDEN,
    MIXES,
    WIDTH,
    FeedForward,
    Listed,
    listed,
    sequences,
    square,
)
from tests.contracts.rows import part

SPLIT = expert_parallel(experts=[("experts$", None)])


def built(make, strategy=SPLIT, mesh="ep=4", loss=square, optimizer=None, **options):
    size = math.prod(int(axis.split("=")[1]) for axis in mesh.split(","))
    world = World.emulate(size, mesh)
    return build_train_step(
        make, optimizer or optax.adam(1e-2), loss, strategy, world, batch=sequences(0), **options
    )


def mixed(mix, make=FeedForward):
    return lambda: Listed(mix, 1, make)


@pytest.mark.parametrize("mix", part(MIXES, ["chosen"]))
def test_lists_of_experts_are_found(mix):
    plan = suggest_plan(mixed(MIXES[mix]), jnp.ones((2, 3, 8)))
    assert plan.experts == (("^blocks/0/experts$", None),)
    assert "a list of experts, all called on the same" in str(plan)


@pytest.mark.full
def test_a_device_holds_its_share_of_the_experts_and_tokens_alone_travel():
    step = built(listed("loop").make, compose(ddp(), SPLIT), "dp=2,ep=2")
    one = 2 * WIDTH * HIDDEN + WIDTH + HIDDEN  # two matrices and two biases
    state = step.init()
    experts = jax.tree.leaves([block["experts"] for block in state.params["blocks"].values()])
    assert sum(leaf.size for leaf in experts) == 2 * EXPERTS * one
    held = [leaf.addressable_shards[0].data.size for leaf in experts]
    assert sum(held) == EXPERTS * one
    # Parameters and both moments of Adam, beside what every device has whole.
    others = sum(leaf.size for leaf in jax.tree.leaves(state.params)) - 2 * EXPERTS * one
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert sum(x.addressable_shards[0].data.size for x in moments) == 2 * (sum(held) + others)

    batch = sequences(0)
    ledger = collectives(step.lower(batch).compile(), step.world.mesh)
    tokens = batch["x"].shape[0] * batch["x"].shape[1] // 4  # of a rank
    # 4 (c - 1) A of a layer: tokens there and results back, and their gradients; of the gates half.
    activations, gates = 4 * tokens * WIDTH, 4 * tokens * EXPERTS
    for kind, times in (("all-gather", 2), ("reduce-scatter", 2)):
        sent = ledger.total_wire_bytes(kind, "ep")
        assert sent == 2 * (times * activations + gates)
    assert ledger.total_wire_bytes("all-to-all", "ep") == 0
    reduced = [row for row in ledger.rows if row.kind == "all-reduce" and "ep" in row.axes]
    assert sum(row.wire_bytes * row.count for row in reduced) < 8 * (others + 2)


class Normed(FeedForward):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.norm = nnx.BatchNorm(HIDDEN, rngs=rngs)


def numbered(make):
    """Makes experts that know their number."""
    numbers = itertools.count()
    return lambda rngs: make(rngs, next(numbers) % EXPERTS)


def sized(rngs, number):
    return FeedForward(rngs, 8 + number)


class Scaled(FeedForward):
    def __init__(self, rngs, number):
        super().__init__(rngs)
        self.factor = float(number)

    def __call__(self, x):
        return super().__call__(x) * self.factor


class Both(FeedForward):
    def __call__(self, x):
        return super().__call__(x), x


def squared(layer, x, gates):
    return x + sum(expert(x) ** 2 * gates[..., :1] for expert in layer.experts)


def in_turn(layer, x, gates):
    for expert in layer.experts:
        x = expert(x)
    return x


def masked(layer, x, gates):
    return sum(e(x * gates[..., n, None]) for n, e in enumerate(layer.experts))


def some(layer, x, gates):
    return x + sum(expert(x) for expert in layer.experts[:3])


def twice(layer, x, gates):
    return layer.experts[0](x) + layer.experts[0](x) + layer.experts[1](x)


def apart(layer, x, gates):
    made = [expert(x) for expert in layer.experts]
    return jnp.tanh(made[0]) + sum(made[1:])


def pairs(layer, x, gates):
    return sum(expert(x)[0] for expert in layer.experts)


def unused(layer, x, gates):
    return x


def weighed(model, batch):
    return square(model, batch) + jnp.sum(model.blocks[0].experts[1].up.kernel[...] ** 2)


def tied(rngs=None):
    model = Listed(MIXES["loop"], 1)
    model.blocks[0].experts[2].up.kernel = model.blocks[0].experts[0].up.kernel
    return model


WHY = r"the experts 'blocks/0/experts', 4 in a list, cannot be split over 'ep': "
TODO = ".*called once, with the same arguments.*added up. Stack them.*nnx.vmap"

REFUSED = {
    "square": (
        lambda: built(mixed(squared)),
        WHY + ".*'(integer_pow|square)', which is not linear",
    ),
    "one through tanh": (lambda: built(mixed(apart)), WHY + ".*'tanh', which is not lin" + TODO),
    "in turn": (lambda: built(mixed(in_turn)), WHY + ".*(other arguments|read what others)" + TODO),
    "other inputs": (lambda: built(mixed(masked)), WHY + ".*expert 1 with other arguments" + TODO),
    "some": (lambda: built(mixed(some)), WHY + ".*calls only the experts 0, 1, 2" + TODO),
    "twice": (lambda: built(mixed(twice)), WHY + ".*calls expert 0 again before all 4" + TODO),
    "two arrays": (lambda: built(mixed(pairs, Both)), WHY + ".*more than one array" + TODO),
    "no call": (lambda: built(mixed(unused)), WHY + ".*is never called" + TODO),
    "other programs": (
        lambda: built(mixed(MIXES["loop"], numbered(Scaled))),
        WHY + ".*compute different",
    ),
    "read elsewhere": (
        lambda: built(mixed(MIXES["loop"]), loss=weighed),
        WHY + "'blocks/0/experts/1/up/kernel' is read elsewhere than in a call" + TODO,
    ),
    "statistics": (
        lambda: built(mixed(MIXES["loop"], Normed)),
        "expert 'blocks/0/experts/0' has 'norm/.*', which is no parameter.*Stack them",
    ),
    "shapes": (
        lambda: built(mixed(MIXES["loop"], numbered(sized))),
        "experts blocks/0/experts/0 and blocks/0/experts/1 have parameters of other.*Stack them",
    ),
    "tied": (lambda: built(tied), "'blocks/0/experts/./up/kernel' is an expert's and has another"),
    "a capacity": (
        lambda: built(
            mixed(MIXES["loop"]), expert_parallel(capacity=2.0, experts=[("experts$", None)])
        ),
        "capacity=2.0 are for modules with the methods.*in a list tokens go as a ring.*Leave both",
    ),
    "no such list": (
        lambda: built(mixed(MIXES["loop"]), expert_parallel(experts=[("expert$", None)])),
        "found no stacked experts and no list of them: patterns 'expert\\$'; the parameters are",
    ),
    "stages": (
        lambda: built(lambda: Listed(MIXES["loop"]), compose(pipelined(2, 2), SPLIT), "pp=2,ep=2"),
        "list 'blocks/0/experts' lie in rows along 'ep', and axis 'pp' would keep.*Leave it out",
    ),
    "eight bits": (
        lambda: built(mixed(MIXES["loop"]), trainable="router|inner|outer", frozen_dtype="int8"),
        "lie in rows along 'ep', and frozen_dtype='int8' would keep.*Leave it out",
    ),
    "some frozen": (
        lambda: built(mixed(MIXES["loop"]), trainable="experts/0/"),
        "is trained and .* is frozen",
    ),
}


@pytest.mark.parametrize("name", part(REFUSED, ["square", "tied"]))
def test_refused(name):
    build, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        build()


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(DivisibilityError, match=r"4 experts in a list.*ep=8.*among \[1, 2, 4\]"):
        built(mixed(MIXES["loop"]), SPLIT, "ep=8")


def test_a_pattern_of_lists_is_a_regular_expression():
    with pytest.raises(ConfigError, match="regular expression"):
        expert_parallel(experts=[("(", None)])


@pytest.mark.full
def test_slow_links_are_refused():
    with pytest.raises(Exception, match=r"along axis 'ep'.*leave expert_parallel out"):
        built(mixed(MIXES["loop"]), compose(local_sgd("dp", every=2), SPLIT), "dp=2,ep=2")


@pytest.mark.full
def test_lists_that_are_no_experts_are_not_found():
    for mix in (in_turn, squared, masked, some, twice):
        assert suggest_plan(mixed(mix), jnp.ones((2, 3, 8))).experts == ()


class Stacked(nnx.Module):
    """What is said to do about a list that cannot be split."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(8, WIDTH, rngs=rngs)
        self.router = nnx.Linear(WIDTH, EXPERTS, rngs=rngs)
        self.experts = nnx.vmap(FeedForward)(rngs.split(EXPERTS))
        self.outer = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = self.inner(x)
        gates = nnx.softmax(self.router(x))
        made = nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(self.experts, x)
        return self.outer(x + jnp.einsum("...e,e...d->...d", gates, made))


@pytest.mark.full
def test_experts_stacked_as_the_refusals_say_are_split():
    make = lambda: Stacked(nnx.Rngs(0))
    found = suggest_plan(make, jnp.ones((2, 3, 8))).experts
    assert {path for path, dim in found} >= {"^experts/down/kernel$", "^experts/up/kernel$"}
    step = built(make, compose(fsdp(), expert_parallel(experts=found)), "fsdp=2,ep=2")
    state = step.init()
    assert state.params["experts"]["up"]["kernel"].sharding.spec[0] == "ep"
    one = built(make, ddp(), "dp=1")
    want = one(one.init(), sequences(0))[1]["loss"]
    assert float(step(state, sequences(0))[1]["loss"]) == pytest.approx(float(want), rel=1e-5)
