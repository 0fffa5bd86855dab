"""Chains of equal units become scans that compute the same, forward, backward and in state."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.words import byte_size
from axon_dist.ir.layer_scan import find_chains, scan_over_layers
from axon_dist.ir.loop_rule import LoopCost, LoopRule, stacked_bytes
from axon_dist.ir.units import mark_units
from axon_dist.nn import ActivationCheckpointing, by_class

WIDTH = 6


class Block(nnx.Module):
    """A residual block."""

    def __init__(self, rngs, rate=0.0):
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, shared):
        return x + self.drop(jnp.tanh(self.inner(x))) * shared


class Net(nnx.Module):
    """Blocks called in a Python loop; `tap` is also used from between two layers."""

    def __init__(self, rngs, num_blocks=8, rate=0.0, tap=None):
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.blocks = nnx.List([Block(rngs, rate) for _ in range(num_blocks)])
        self.tap = tap

    def __call__(self, x):
        kept = 0.0
        for index, block in enumerate(self.blocks):
            x = block(x, self.scale)
            kept = kept + (jnp.sin(x).sum() if index == self.tap else 0.0)
        return x.sum() + kept


def functions(model, group=1, remat=None, unit_remat=None, **options):
    """The loss of the plain model, and of its rolled form, as functions of (params, rest, x)."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def forward(mark):
        def run(params, rest, x):
            module = nnx.merge(graphdef, params, rest, copy=True)
            if mark:
                mark_units(module, by_class("Block"), unit_remat)
            loss = module(x)
            return loss, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

        return run

    return forward(False), scan_over_layers(forward(True), group, remat, **options), params, rest


def scans(function, *args):
    jaxpr = jax.make_jaxpr(function)(*args)
    return [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"]


def assert_same(rolled, plain, *args):
    for actual, expected in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(rolled, has_aux=True))(*args)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(plain, has_aux=True))(*args)),
        strict=True,
    ):
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


X = jnp.asarray(np.linspace(-1, 1, 5 * WIDTH, dtype=np.float32).reshape(5, WIDTH))
NOTHING = ActivationCheckpointing().remat


@pytest.mark.sample("1-lengths0")
@pytest.mark.parametrize(
    ("group", "lengths"), [(1, [8]), (2, [4]), (3, [2, 2]), (8, [1]), (12, [8])]
)
def test_groups_compute_the_same(group, lengths):
    plain, rolled, params, rest = functions(Net(nnx.Rngs(0)), group, NOTHING)
    assert_same(rolled, plain, params, rest, X)
    found = jax.make_jaxpr(rolled)(params, rest, X)
    outer = [e for e in found.eqns if e.primitive.name in ("scan", "remat2", "checkpoint", "remat")]
    assert len(outer) == (2 if 8 % group and group < 8 else 1)
    assert lengths[0] in [e.params.get("length", lengths[0]) for e in outer]


class Signed(nnx.Module):
    """Gives its blocks zeros of both signs, and NaN."""

    def __init__(self, rngs):
        self.blocks = nnx.List([SignBlock(rngs) for _ in range(4)])

    def __call__(self, x):
        for block, zero in zip(self.blocks, (0.0, -0.0, jnp.nan, jnp.nan), strict=True):
            x = block(x, jnp.asarray(zero, jnp.float32))
        return x.sum()


class SignBlock(Block):
    """Adds or subtracts by the sign of a zero."""

    def __call__(self, x, zero):
        sign = jnp.where(jnp.isnan(zero), 2.0, jnp.where(jnp.signbit(zero), -1.0, 1.0))
        return x + jnp.tanh(self.inner(x)) * sign


def test_every_unit_of_a_chain_gets_its_own_constant():
    graphdef, state = nnx.split(Signed(nnx.Rngs(0)))

    def run(mark, state, x):
        model = nnx.merge(graphdef, state, copy=True)
        if mark:
            mark_units(model, by_class("SignBlock"))
        return model(x)

    rolled = scan_over_layers(functools.partial(run, True), 1, None)
    assert scans(rolled, state, X)
    want = jax.jit(functools.partial(run, False))(state, X)
    assert float(jax.jit(rolled)(state, X)) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.full
@pytest.mark.sample("False-expected1")
@pytest.mark.parametrize(("prefetch", "expected"), [(True, [False, True]), (False, [True, True])])
def test_programs_that_run_once_keep_their_barrier(prefetch, expected):
    barriers = []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            if "prevent_cse" in equation.params:
                barriers.append(equation.params["prevent_cse"])
            elif "jaxpr" in equation.params:
                inner = equation.params["jaxpr"]
                look(getattr(inner, "jaxpr", inner))

    model = Net(nnx.Rngs(0))
    plain, rolled, params, rest = functions(model, 3, NOTHING, prefetch=prefetch)
    look(jax.make_jaxpr(rolled)(params, rest, X).jaxpr)
    assert barriers == expected
    assert_same(rolled, plain, params, rest, X)


@pytest.mark.full
@pytest.mark.sample("None-5-lengths1", "policy-4-lengths0")
@pytest.mark.parametrize(("blocks", "lengths"), [(4, []), (5, [5])])
@pytest.mark.parametrize("remat", [None, NOTHING])
def test_a_short_chain_is_written_out(blocks, lengths, remat):
    model = Net(nnx.Rngs(0, dropout=1), blocks, rate=0.5, tap=1)
    plain, rolled, params, rest = functions(model, 1, remat, unroll=4)
    assert_same(rolled, plain, params, rest, X)
    assert scans(rolled, params, rest, X) == lengths


@pytest.mark.full
def test_a_group_is_an_iteration_of_a_loop():
    plain, rolled, params, rest = functions(Net(nnx.Rngs(0), 4), 2, NOTHING, unroll=4)
    assert_same(rolled, plain, params, rest, X)
    assert scans(rolled, params, rest, X) == [2]


class Turns(Block):
    """A block that is a loop itself."""

    def __call__(self, x, shared):
        turn = lambda carry, _: (super(Turns, self).__call__(carry, shared), None)
        return jax.lax.scan(turn, x, None, 2)[0]


@pytest.mark.full
def test_units_that_loop_are_a_loop_unless_asked():
    model = Net(nnx.Rngs(0), 3)
    model.blocks = nnx.List([Turns(nnx.Rngs(index)) for index in range(3)])
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params, rest, x, mark=True):
        module = nnx.merge(graphdef, params, rest, copy=True)
        if mark:
            mark_units(module, by_class("Turns"))
        return module(x), nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))

    for unroll, lengths in ((None, [3]), (4, [])):
        rolled = scan_over_layers(run, unroll=unroll)
        assert_same(rolled, functools.partial(run, mark=False), params, rest, X)
        assert scans(rolled, params, rest, X) == lengths


@pytest.mark.full
def test_dropout_state_is_threaded_through_the_scan():
    model = Net(nnx.Rngs(0, dropout=1), rate=0.5)
    plain, rolled, params, rest = functions(model, 2, NOTHING)
    assert_same(rolled, plain, params, rest, X)
    assert scans(rolled, params, rest, X) == [4]


@pytest.mark.full
@pytest.mark.parametrize("tap", [0, 3, 7])
def test_values_used_from_between_layers_come_out(tap):
    plain, rolled, params, rest = functions(Net(nnx.Rngs(0), tap=tap))
    assert_same(rolled, plain, params, rest, X)
    assert scans(rolled, params, rest, X) == [8]


class Unequal(nnx.Module):
    """Two chains of different widths, and a lone block of another class between them."""

    def __init__(self, rngs):
        self.first = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.lone = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.second = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in itertools.chain(self.first, [self.lone], self.second):
            x = jnp.tanh(layer(x))
        return x.sum()


def unequal(remat=None, group=1):
    graphdef, params, rest = nnx.split(Unequal(nnx.Rngs(0)), nnx.Param, ...)

    def run(params, x, mark=True):
        module = nnx.merge(graphdef, params, rest, copy=True)
        if mark:
            mark_units(module, by_class("Linear"))
        return module(x)

    return run, scan_over_layers(run, group, remat), params


@pytest.mark.full
def test_code_between_two_units_breaks_the_chain():
    """A unit must feed the next one directly: here a tanh lies between."""
    run, rolled, params = unequal()
    assert find_chains(jax.make_jaxpr(run)(params, X).jaxpr) == []
    np.testing.assert_allclose(rolled(params, X), run(params, X, False), rtol=1e-6)


@pytest.mark.full
def test_units_outside_chains_are_recomputed_alone():
    _, kept, params = unequal()
    run, rolled, _ = unequal(NOTHING, group=2)
    grad = lambda f: jax.grad(lambda p: f(p, X))
    for actual, expected in zip(
        jax.tree.leaves(grad(rolled)(params)),
        jax.tree.leaves(grad(lambda p, x: run(p, x, False))(params)),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-7)
    names = lambda f: [e.primitive.name for e in jax.make_jaxpr(f)(params, X).eqns]
    recomputed = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns[0].primitive.name
    assert names(rolled).count(recomputed) == 6
    assert recomputed not in names(kept)


class Chains(nnx.Module):
    """Two chains of different widths, joined by a plain layer."""

    def __init__(self, rngs):
        self.first = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])
        self.lone = nnx.Param(jnp.linspace(0, 1, WIDTH * 4).reshape(WIDTH, 4))
        self.second = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.first:
            x = layer(x)
        x = jnp.tanh(x @ self.lone)
        for layer in self.second:
            x = layer(x)
        return x.sum()


def test_two_chains_are_two_scans():
    graphdef, params = nnx.split(Chains(nnx.Rngs(0)))

    def run(params, x, mark=True):
        module = nnx.merge(graphdef, params, copy=True)
        if mark:
            mark_units(module, by_class("Linear"))
        return module(x)

    assert scans(scan_over_layers(run), params, X) == [3, 2]
    np.testing.assert_allclose(scan_over_layers(run)(params, X), run(params, X, False), rtol=1e-6)


class Parallel(nnx.Module):
    """Blocks that all read the same input: no chain."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        return sum(block(x).sum() for block in self.blocks)


class Skip(nnx.Module):
    """Every second call takes an operand that depends on the one before in a roundabout way."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])

    def __call__(self, x):
        shared = jnp.ones(WIDTH)
        for block in self.blocks:
            x = block(x, shared)
            shared = jnp.cos(x.mean(0))
        return x.sum()


@pytest.mark.parametrize("kind", [Parallel, Skip])
def test_flows_that_are_no_chain_are_left_as_they_are(kind):
    graphdef, params, rest = nnx.split(kind(nnx.Rngs(0, dropout=1)), nnx.Param, ...)

    def run(params, x, mark=True):
        module = nnx.merge(graphdef, params, rest, copy=True)
        if mark:
            mark_units(module, by_class("Linear" if kind is Parallel else "Block"))
        return module(x)

    assert scans(scan_over_layers(run), params, X) == []
    # To the last digits, so compiled as programs usually are.
    usual = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
    expected = usual(lambda params: run(params, X, False))(params)
    np.testing.assert_allclose(usual(scan_over_layers(run))(params, X), expected, rtol=1e-6)


def test_a_chain_keeps_its_boundaries_and_nothing_else():
    """Chen et al.: with L blocks in groups of k the backward pass holds L/k inputs."""
    net = Net(nnx.Rngs(0))
    for group, kept in ((1, 8), (2, 4), (4, 2), (8, 1)):
        _, rolled, params, rest = functions(net, group, NOTHING)
        apply = lambda p, f=rolled, r=rest: f(p, r, X)[0]
        pullback = jax.eval_shape(lambda p, apply=apply: jax.vjp(apply, p)[1], params)
        rows = [x.shape for x in jax.tree.leaves(pullback) if x.shape[-2:] == X.shape]
        assert sum(shape[0] if len(shape) > 2 else 1 for shape in rows) in (kept, kept + 1)
        saved = ActivationCheckpointing(group).num_saved(8)
        assert saved == kept + 1


def choices_of(rule, num_blocks=8, **options):
    """The choice of a rule for a chain of blocks, and the lengths of the loops."""
    told = []
    rule = dataclasses.replace(rule, tell=told.append)
    _, rolled, params, rest = functions(Net(nnx.Rngs(0), num_blocks), rule=rule, **options)
    lengths = scans(rolled, params, rest, X)
    assert [choice.num_blocks for choice in told] == [num_blocks]
    assert [choice.is_loop for choice in told] == [bool(lengths)]
    return told[0]


def test_a_loop_is_made_where_it_costs_less_than_compiling():
    slow, fast = LoopCost(bandwidth=1e3, block_seconds=1.0), LoopCost(1e12, block_seconds=1.0)
    assert not choices_of(LoopRule(cost=slow)).is_loop
    assert choices_of(LoopRule(cost=fast)).is_loop
    assert choices_of(LoopRule()).is_loop
    assert not choices_of(LoopRule(), num_blocks=4).is_loop
    assert not choices_of(LoopRule(cost=fast), num_blocks=4).is_loop
    assert "because CPUs compile slowly" in str(choices_of(LoopRule(why="CPUs compile slowly")))
    assert not choices_of(LoopRule(most=8, cost=fast)).is_loop
    assert choices_of(LoopRule(most=1, cost=slow)).is_loop
    assert choices_of(LoopRule(most=8), group=2, remat=NOTHING).is_loop


def test_devices_that_share_the_stacks_take_less_time_for_them():
    one = LoopCost(bandwidth=1e9, block_seconds=1.0)
    stacks = 10**6
    assert not one.choice(8, stacks).is_loop
    eight = dataclasses.replace(one, num_shares=8).choice(8, stacks)
    assert eight.is_loop
    assert f"{byte_size(stacks // 8)} of stacks" in eight.why
    gathers = dataclasses.replace(one, num_shares=8, most=16, loop_blocks=16)
    assert not gathers.choice(16, stacks).is_loop
    assert gathers.choice(17, 10**9).is_loop


def test_stacks_are_what_the_loop_has_on_them():
    """The operands of each block, and of its results those that its policy keeps."""
    # Twelve bytes are the key and the count of a block's stream of random numbers.
    operands = 4 * (WIDTH * WIDTH + WIDTH) + 12
    for policy, kept in (("nothing", X.size), ("dots", 2 * X.size)):
        remat = ActivationCheckpointing(policy=policy).remat
        choice = choices_of(LoopRule(cost=LoopCost(1e3, 1.0)), remat=remat)
        stacks = 8 * (operands + 4 * kept)
        assert f"a loop would stack {byte_size(stacks)}" in str(choice)


def test_residuals_of_other_platforms_are_not_stacked():
    """A branch that is not taken leaves nothing for the backward pass."""

    def block(x):
        return jax.lax.platform_dependent(x, cuda=lambda x: 2 * x, default=lambda x: jnp.sin(x) * x)

    program = jax.make_jaxpr(block)(X)
    assert stacked_bytes(program, (0,), "cuda") == 0
    assert stacked_bytes(program, (0,), "tpu") >= 4 * X.size
