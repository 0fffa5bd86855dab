"""Blocks of bridged Linen models: found by their paths, run as units, and nothing changed by it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import UnsupportedError
from axon_dist.ir.layer_scan import find_chains
from axon_dist.ir.linen import linen_blocks
from axon_dist.ir.units import GATHER, is_unit, mark_units
from axon_dist.nn import block_paths

WIDTH, DEPTH = 4, 3


class Block(nn.Module):
    """A compact block with a random mask, its own rematerialisation, and averages."""

    remat: bool = False

    @nn.compact
    def __call__(self, x, flag=None):
        inner = nn.remat(nn.Dense) if self.remat else nn.Dense
        y = jnp.tanh(inner(WIDTH)(nn.BatchNorm(use_running_average=False)(x)))
        y = nn.Dropout(0.5, deterministic=False)(y)
        return x + (y if flag is None else y * 2)

    def size(self):
        """A number that is no array."""
        return WIDTH


class Compact(nn.Module):
    """Blocks that Flax names."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        for _ in range(DEPTH):
            x = Block(self.remat)(x)
        return nn.Dense(2)(x)


class WithSetup(nn.Module):
    """Blocks in a list, of which one is called twice, with a layer of the model's for each."""

    def setup(self):
        self.layers = [Block() for _ in range(DEPTH)]
        self.out = nn.Dense(2)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)[:, : layer.size()]
        return self.out(self.layers[0](x, flag=True))


class Borrowing(nn.Module):
    """A block that is given a layer of the model's and a variable of its own."""

    layer: nn.Module

    @nn.compact
    def __call__(self, x, other):
        return x + self.layer(nn.Dense(WIDTH)(x)) + other(x)


class Lender(nn.Module):
    """Lends its blocks one layer as an attribute and one as an argument."""

    def setup(self):
        self.layer, self.other = nn.Dense(WIDTH), nn.Dense(WIDTH)
        self.blocks = [Borrowing(self.layer) for _ in range(2)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, self.other)
        return x


class Under(nn.Module):
    """A checkpoint of the model's own around all blocks."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(Compact)(name="inner")(x)


MODELS = {
    "compact": Compact,
    "compact remat": lambda: Compact(remat=True),
    "setup": WithSetup,
    "lent": Lender,
    "under": Under,
}
BLOCKS = {
    "compact": {f"Block_{i}" for i in range(DEPTH)},
    "compact remat": {f"Block_{i}" for i in range(DEPTH)},
    "setup": {f"layers_{i}" for i in range(DEPTH)},
    "lent": {f"blocks_{i}" for i in range(2)},
    "under": {f"inner/Block_{i}" for i in range(DEPTH)},
}
X = jnp.asarray(np.linspace(-1, 1, 4 * WIDTH, dtype=np.float32).reshape(4, WIDTH))


def bridged(name):
    return nnx.bridge.ToNNX(MODELS[name](), rngs=nnx.Rngs(0, dropout=1)).lazy_init(X)


def computing(model, mark):
    """A function of the parameters: outputs and all state after two calls of the model."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def compute(params):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        mark(merged)
        outputs = [merged(X, mutable=["batch_stats"]) for _ in range(2)]
        return outputs, nnx.state(merged, nnx.Not(nnx.Param))

    return compute, params


@pytest.mark.full
@pytest.mark.sample("setup", "compact remat", "lent")
@pytest.mark.parametrize("name", MODELS)
def test_marked_models_compute_the_same_bits_and_state(name):
    model = bridged(name)
    blocks = block_paths(model)
    assert blocks == BLOCKS[name]
    found = []
    marked, params = computing(
        model, lambda m: found.extend(mark_units(m, lambda p, _: p in blocks))
    )
    plain, _ = computing(model, lambda m: None)
    gradient = lambda f: jax.jit(jax.grad(lambda p: sum(map(jnp.sum, f(p)[0]))))(params)
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, *map(values, (a, b)))
    same(jax.jit(marked)(params), jax.jit(plain)(params))
    same(gradient(marked), gradient(plain))
    assert set(found) == blocks


def values(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ["compact", "compact remat"])
def test_equal_blocks_have_one_program_and_are_a_chain(name):
    model = bridged(name)
    is_block = lambda path, _: "Block" in path and "*" not in path
    compute, params = computing(model, lambda m: mark_units(m, is_block))
    jaxpr = jax.make_jaxpr(compute)(params).jaxpr
    assert len({id(e.params["jaxpr"]) for e in jaxpr.eqns if is_unit(e)}) == 1
    # The averages of a block are its own, so that the two calls of the model are a chain each.
    assert [len(chain.calls) for chain in find_chains(jaxpr)] == [DEPTH, DEPTH]


def test_a_unit_gathers_its_own_parameters_and_no_other():
    seen = []

    def gather(weight):
        seen.append(weight.shape)
        return weight * 1

    model = bridged("setup")
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def compute(params):
        merged = nnx.merge(graphdef, params, rest, copy=True)
        mark_units(merged, lambda path, _: path == "layers_1")
        merged.layers_1["Dense_0"]["kernel"].set_metadata(**{GATHER: gather})
        merged(X, mutable=["batch_stats"])
        assert GATHER in merged.layers_1["Dense_0"]["kernel"].get_metadata()
        return merged(X, mutable=["batch_stats"])

    jaxpr = jax.make_jaxpr(compute)(params).jaxpr
    assert set(seen) == {(WIDTH, WIDTH)}
    assert sum(map(is_unit, jaxpr.eqns)) == 2


TREES = {
    "list": ({"h": {"0": {"a": {"w": 1}}, "1": {"a": {"w": 1}}}}, ["h/0", "h/1"]),
    "counted": ({f"l_{i}": {"a": {"w": 1}} for i in (10, 9)}, ["l_9", "l_10"]),
    "one more leaf in the first": (
        {"b": {"0": {"a": {"w": 1}, "r": {"w": 2}}, "1": {"a": {"w": 1}}}},
        ["b/0", "b/1"],
    ),
    "stages that differ": (
        {"s": {str(i): {"l": {str(j): {"c": {"w": 4 + i}} for j in "01"}} for i in (0, 1)}},
        ["s/0/l/0", "s/0/l/1", "s/1/l/0", "s/1/l/1"],
    ),
    "parts that differ": (
        {"b": {"0": {"a": {"w": 1}}, "1": {"a": {"w": 2}, "c": {"w": 3}}}},
        ["b/0", "b/1"],
    ),
    "shared": ({"layers": {"0": {"layers": {"0": {"a": {"w": 1}}}}}}, ["layers/0/layers/0"]),
    "two towers": (
        {t: {"l": {str(i): {"a": {"w": 1}} for i in "01"}} for t in "xy"},
        ["x/l/0", "x/l/1", "y/l/0", "y/l/1"],
    ),
    "single layers": ({"Dense_0": {"w": 1}, "Dense_1": {"w": 2}}, ["Dense_0", "Dense_1"]),
    "single layers and blocks": (
        {"Dense_0": {"w": 1}, "Dense_1": {"w": 2}, "B_0": {"a": {"w": 1}}, "B_1": {"a": {"w": 1}}},
        ["B_0", "B_1"],
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_blocks_are_found_by_their_paths(name):
    tree, expected = TREES[name]
    model = nnx.bridge.ToNNX(nn.Dense(1), rngs=nnx.Rngs(0))
    for key, child in tree.items():
        leaves = jax.tree.map(lambda size: nnx.Param(jnp.ones(size)), child)
        setattr(model, key, nnx.data(leaves))
    assert ["/".join(keys) for keys in linen_blocks(model)] == expected


class Drawing(nn.Module):
    """A block that draws from an object of NNX, which it is given."""

    @nn.compact
    def __call__(self, x, rngs):
        return nn.Dense(WIDTH)(x) * jax.random.bernoulli(rngs.dropout(), 0.5, x.shape)


class Given(nn.Module):
    """Gives its blocks what they draw from."""

    @nn.compact
    def __call__(self, x, rngs):
        for _ in range(2):
            x = Drawing()(x, rngs)
        return x


def test_a_block_that_changes_its_argument_is_refused():
    draw = nnx.Rngs(dropout=1)
    model = nnx.bridge.ToNNX(Given(), rngs=nnx.Rngs(0)).lazy_init(X, draw)
    mark_units(model, lambda path, _: path.startswith("Drawing_"))
    with pytest.raises(UnsupportedError, match=r"call of Drawing changes an argument") as caught:
        model(X, draw)
    assert caught.value.code == "linen-argument-changed"
