"""Units of an unmodified model become named equations, and change nothing of what it computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import UnsupportedError
from axon_dist.ir.units import GATHER, check_some, mark_units, units_of
from axon_dist.nn import by_class


class Block(nnx.Module):
    """A residual block with a mask, a flag and a count of its calls."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x, mask=None, *, double=False):
        self.calls[...] += 1
        y = self.drop(jnp.tanh(self.inner(x))) * (2 if double else 1)
        return x + (y if mask is None else y * mask), {"mean": y.mean()}


class Net(nnx.Module):
    """Three blocks that are called in different ways."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, x):
        x, _ = self.blocks[0](x)
        x, _ = self.blocks[1](x, jnp.ones(4), double=True)
        x, extra = self.blocks[2](x, mask=jnp.arange(4.0))
        return x, extra["mean"]


def run(model, x):
    output = model(x)
    return output, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def net():
    return Net(nnx.Rngs(0, dropout=1))


@pytest.mark.full
def test_marked_models_compute_the_same_bits_and_state():
    graphdef, state = nnx.split(net())
    x = jnp.linspace(-1, 1, 8).reshape(2, 4)

    def outcome(mark):
        def compute(state):
            model = nnx.merge(graphdef, state, copy=True)
            if mark:
                assert mark_units(model, by_class("Block")) == ["blocks/0", "blocks/1", "blocks/2"]
            return run(model, x)

        # To the last bit, so compiled as programs usually are.
        usual = {"xla_backend_optimization_level": 3}
        return jax.tree.leaves(jax.jit(compute, compiler_options=usual)(state))

    for expected, actual in zip(outcome(False), outcome(True), strict=True):
        if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
            expected, actual = jax.random.key_data(expected), jax.random.key_data(actual)
        np.testing.assert_array_equal(actual, expected)


def test_every_call_is_one_equation():
    model = net()
    mark_units(model, by_class("Block"))
    graphdef, state = nnx.split(model)
    jaxpr = jax.make_jaxpr(lambda s, x: nnx.merge(graphdef, s, copy=True)(x))(
        state, jnp.ones((2, 4))
    )
    assert [e.params.get("name") for e in jaxpr.eqns].count("axon_unit") == 3


def test_the_outermost_units_win():
    model = nnx.Sequential(nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))
    paths = [path for path, _ in units_of(model, by_class("Sequential", "Linear"))]
    assert paths == [""]
    inside = lambda path, module: path != "" and isinstance(module, (nnx.Linear, nnx.Sequential))
    paths = [path for path, _ in units_of(model, inside)]
    assert paths == ["layers/0"]


def test_marking_twice_changes_nothing():
    model = net()
    mark_units(model, by_class("Block"))
    once = nnx.graphdef(model.blocks[0])
    mark_units(model, by_class("Block"))
    assert nnx.graphdef(model.blocks[0]) == once
    assert type(model.blocks[0]).__name__ == "Block"
    assert isinstance(model.blocks[0], Block)


def test_a_parameter_is_gathered_inside_its_unit():
    model = nnx.Sequential(nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)))
    kernel = model.layers[0].kernel
    kernel.set_metadata(**{GATHER: lambda w: 3 * w})
    expected = 3 * jnp.ones((1, 2)) @ kernel[...]
    mark_units(model, by_class("Linear"))
    np.testing.assert_allclose(model(jnp.ones((1, 2))), expected, rtol=1e-6)


def test_remat_recomputes_a_unit():
    def residuals(remat):
        model = net()
        mark_units(model, by_class("Block"), remat)
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda p, x: nnx.merge(graphdef, p, rest, copy=True)(x)[0].sum()
        jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((2, 4))))
        return jaxpr.count("tanh")

    assert residuals(jax.checkpoint_policies.nothing_saveable) > residuals(None)


def test_no_unit_is_an_error_that_names_the_classes():
    with pytest.raises(UnsupportedError, match=r"blocks of X matches no module.*Block, .*Linear"):
        check_some([], "blocks of X", net())


class Noisy(nnx.Module):
    """A block that is given what it draws from, and a counter."""

    def __init__(self, seed):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(seed))
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, counter, rngs):
        counter.set_value(counter[...] + 1)
        return x + self.dropout(jnp.tanh(self.linear(x)), rngs=rngs) * counter[...]


class Shared(nnx.Module):
    """Blocks that share what they are given."""

    def __init__(self):
        self.blocks = nnx.List(Noisy(i) for i in range(3))
        self.counter = nnx.Variable(jnp.zeros(()))
        self.rngs = nnx.Rngs(dropout=7)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, self.counter, rngs=self.rngs)
        return x


@pytest.mark.parametrize("remat", [None, jax.checkpoint_policies.nothing_saveable])
def test_arguments_with_state_are_changed_as_their_caller_expects(remat):
    plain, marked, x = Shared(), Shared(), jnp.ones((5, 4))
    mark_units(marked, by_class("Noisy"), remat)
    for calls in (1, 2):
        np.testing.assert_allclose(marked(x), plain(x), rtol=1e-5)
        assert float(marked.counter[...]) == 3 * calls
        assert int(marked.rngs.dropout.count[...]) == int(plain.rngs.dropout.count[...]) > 0


class Returning(nnx.Module):
    """A block that returns the counter that it is given, as a model passes on a cache."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, counter):
        counter.set_value(counter[...] + 1)
        return self.linear(x) * counter[...], {"counter": counter}


def test_an_argument_that_a_unit_returns_is_the_callers_own():
    blocks = [Returning(), Returning()]
    for block in blocks:
        mark_units(block, lambda path, module: path == "")
    x, own = jnp.ones((2, 4)), nnx.Variable(jnp.zeros(()))
    counter = own
    for block in blocks:
        x, more = block(x, counter)
        counter = more["counter"]
    assert counter is own
    assert float(own[...]) == 2


class Appending(nnx.Module):
    """A block that leaves something in a list."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, extra):
        extra.append(jnp.mean(x))
        return self.linear(x)


def test_a_list_that_a_call_appends_to_is_refused():
    model = Appending()
    mark_units(model, lambda path, module: path == "")
    with pytest.raises(
        UnsupportedError, match=r"Appending changes an arg.* had 1 .* have 2.*return the value"
    ):
        model(jnp.ones((2, 4)), [])


def test_a_model_of_units_is_differentiated_within_a_loss():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.0, rngs=rngs)

        def __call__(self, x):
            return x + jnp.tanh(self.dropout(self.inner(x)))

    slope = lambda model, x: jax.grad(lambda x: jnp.sum(model(x)))(x)
    model, x = nnx.Sequential(*(Block(nnx.Rngs(i)) for i in range(2))), jnp.ones((3, 4))
    want = slope(model, x)
    graphdef, state = nnx.split(model)

    def run(state, x):
        marked = nnx.merge(graphdef, state, copy=True)
        mark_units(marked, lambda path, module: isinstance(module, Block))
        return slope(marked, x)

    # No count of the dropout has moved, and none is written back at another level of the trace.
    np.testing.assert_allclose(jax.jit(run)(state, x), want, rtol=1e-6)


class Normed(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.norm = nnx.WeightNorm(self.inner, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.norm(x)


class Jitted(nnx.Module):
    """Its parameters pass through a jitted function."""

    def __init__(self):
        self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return nnx.jit(lambda layer, x: layer(x))(self.inner, x)


class Drifting(nnx.Module):
    def __init__(self, change):
        self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.change = change

    def __call__(self, x):
        y = self.inner(x)
        self.inner.bias[...] = self.change(self.inner.bias[...])
        return y


@pytest.mark.parametrize(
    "change",
    [lambda x: x + 1, lambda x: jnp.clip(x, -1, 1), jax.nn.relu, jax.jit(lambda x: np.ones(4))],
    ids=["operation", "jitted function", "custom derivative", "constant"],
)
def test_a_unit_that_changes_its_parameters_is_refused_unless_it_normalises_them(change):
    model = nnx.Sequential(Drifting(change))
    mark_units(model, by_class("Drifting"))
    with pytest.raises(UnsupportedError, match="changes the parameter 'inner/bias' of Drifting"):
        model(jnp.ones((2, 4)))
    for unit in (Normed(), Jitted()):
        model = nnx.Sequential(unit)
        mark_units(model, by_class(type(unit).__name__))
        assert model(jnp.ones((2, 4))).shape == (2, 4)
