"""A model is split and merged again; its buffers stay as they were."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.core.tree import is_key
from axon_dist.ops.precision import MixedPrecision
from axon_dist.step.model_spec import split_model, stored_as
from axon_dist.step.objective import buffers_like


class Net(nnx.Module):
    """Statistics, keys, and something sown."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        y = self.drop(self.norm(self.inner(x)))
        self.mean = nnx.Intermediate(y.mean())
        return y


def make():
    return Net(nnx.Rngs(0, dropout=1))


@pytest.mark.parametrize("is_made", [True, False], ids=["module", "factory"])
def test_a_model_spec_holds_shapes_and_the_source_holds_values(is_made):
    model_spec, source = split_model(make() if is_made else make)
    assert model_spec.params["inner"]["kernel"] == jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert model_spec.shapes["inner/bias"] == (4,)
    assert {"norm", "drop"} <= model_spec.buffers.keys()
    params, buffers = source.arrays if source.make is None else source.make()
    expected = nnx.state(make(), nnx.Param)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, want)
    merged = model_spec.merge(params, buffers)
    merged.eval()
    whole = make()
    whole.eval()
    np.testing.assert_array_equal(merged(jnp.ones((2, 4))), whole(jnp.ones((2, 4))))


def test_a_factory_makes_no_array():
    big = lambda: nnx.Linear(2**20, 2**20, rngs=nnx.Rngs(0))
    model_spec, source = split_model(big)
    assert model_spec.params["kernel"].shape == (2**20, 2**20)
    assert source.arrays is None


def test_changing_a_merged_model_leaves_the_arrays():
    model_spec, source = split_model(make())
    params, buffers = source.arrays
    merged = model_spec.merge(params, buffers)
    merged.inner.kernel[...] = jnp.zeros((4, 4))
    assert float(jnp.abs(params["inner"]["kernel"]).sum()) > 0


def test_values_that_are_not_models_raise():
    with pytest.raises(ConfigError, match=r"model is a int; give an nnx\.Module.*nnx\.bridge"):
        split_model(3)
    with pytest.raises(ConfigError, match=r"no nnx\.Param.*lazy_init"):
        split_model(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


class Widening(nnx.Module):
    """Adds float32 to a statistic, and leaves something behind."""

    def __init__(self):
        self.w = nnx.Param(jnp.ones(2))
        self.stat = nnx.BatchStat(jnp.zeros(2, jnp.bfloat16))
        self.key = nnx.RngKey(jax.random.key(0), tag="dropout")

    def __call__(self, x):
        self.stat.set_value(self.stat[...] + jnp.ones(2, jnp.float32))
        self.left = nnx.Intermediate(x.sum())
        return self.w * x


def test_buffers_keep_structure_and_dtype():
    model_spec, source = split_model(Widening())
    params, buffers = source.arrays
    model = model_spec.merge(params, buffers)
    model(jnp.ones(2))
    after = buffers_like(buffers, model)
    assert after.keys() == {"stat", "key"}
    assert after["stat"].dtype == jnp.bfloat16
    assert is_key(after["key"])
    np.testing.assert_array_equal(after["stat"], [1, 1])


@pytest.mark.parametrize(
    ("old", "new"),
    [("int32", "float32"), ("bool", "int32"), ("int8", "int32"), ("float32", "complex64")],
)
def test_a_buffer_that_a_cast_would_change_is_refused(old, new):
    class Changing(nnx.Module):
        def __init__(self):
            self.stat = nnx.BatchStat(jnp.zeros(2, old))

    model = Changing()
    buffers = nnx.to_pure_dict(nnx.state(model))
    model.stat.set_value(jnp.ones(2, new))
    with pytest.raises(UnsupportedError, match=f"'stat' is {old}, but {new} after a forward pass"):
        buffers_like(buffers, model)


@pytest.mark.parametrize("model", [make(), make], ids=["module", "factory"])
def test_storage_dtypes(model):
    stored, source = stored_as(
        *split_model(model), MixedPrecision(param="bfloat16", buffer="float16")
    )
    params, buffers = source.arrays if source.make is None else source.make()
    assert stored.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    assert buffers["norm"]["var"].dtype == jnp.float16
    assert stored.buffers["norm"]["var"].dtype == jnp.float16
    assert all(is_key(x) for x in jax.tree.leaves(buffers["drop"]) if x.dtype != jnp.uint32)


def test_parameters_promote_to_one_dtype():
    model_spec, _ = split_model(make())
    assert model_spec.dtype == jnp.float32


class Table(nnx.Module):
    """A parameter that cannot be trained."""

    def __init__(self):
        self.table = nnx.Param(jnp.arange(3))


def test_parameters_without_a_gradient_and_factories_with_arguments():
    with pytest.raises(ConfigError, match=r"'table' has dtype int32.*nnx.Variable instead of"):
        split_model(Table())
    with pytest.raises(ConfigError, match=r"without arguments \(missing .*'in_features'"):
        split_model(nnx.Linear)
    with pytest.raises(ConfigError, match=r"model is a Dense.*goes through nnx.bridge.ToNNX"):
        split_model(linen.Dense(3))


def test_a_factory_with_bound_rngs_makes_what_an_eager_call_makes():
    shared = nnx.Rngs(0)
    make = functools.partial(Pair, shared, rngs=shared)
    _, source = split_model(make)
    assert int(shared.params.count[...]) == 0
    first, again = source.make()[0], source.make()[0]
    expected = nnx.to_pure_dict(nnx.state(make(), nnx.Param))
    # The eager call has drawn from the Rngs, and the source still makes the first model.
    for params in (first, again, source.make()[0]):
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_large_factory_with_bound_rngs_makes_the_same_model_in_each_trace():
    table = jnp.arange(2.0**15)
    rngs = nnx.Rngs(0)
    _, source = split_model(functools.partial(Tabled, table, rngs))
    rngs.params()
    expected = Tabled(table, nnx.Rngs(0)).inner.kernel[...]
    np.testing.assert_array_equal(source.make()[0]["inner"]["kernel"], expected)


class Pair(nnx.Module):
    """Two layers that draw in turn from one stream."""

    def __init__(self, first, rngs):
        self.first = nnx.Linear(2, 3, rngs=first)
        self.second = nnx.Linear(2, 3, rngs=rngs)


class Tabled(nnx.Module):
    """A layer next to a constant that is too large to keep with a trace."""

    def __init__(self, table, rngs):
        self.table = nnx.Param(table)
        self.inner = nnx.Linear(2, 3, rngs=rngs)


def test_a_factory_that_draws_from_rngs_it_closes_over_is_told_to_make_them():
    rngs = nnx.Rngs(0)
    with pytest.raises(ConfigError, match=r"RngCount.*make the Rngs inside the function") as error:
        split_model(lambda: nnx.Linear(2, 3, rngs=rngs))
    assert error.value.code == "model-changes-outer-object"
