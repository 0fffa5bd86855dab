"""Dtypes by name and preset, casts that leave integers and keys alone, and autocast models."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.core.tree import floating_dtype
from axon_dist.ops.precision import MixedPrecision, autocast, cast_floating, preset_name


def test_presets():
    assert MixedPrecision.bf16() == MixedPrecision(compute="bfloat16")
    assert MixedPrecision.bf16().reduce_dtype == jnp.bfloat16
    assert MixedPrecision.fp16().reduce_dtype == jnp.float32
    assert MixedPrecision.fp16().needs_scaling
    assert not MixedPrecision.bf16().needs_scaling
    assert not MixedPrecision().is_mixed
    assert MixedPrecision().param == jnp.float32


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, MixedPrecision()),
        (False, MixedPrecision()),
        ("float32", MixedPrecision()),
        (True, MixedPrecision(compute="bfloat16", reduce="float32")),
        ("bf16", MixedPrecision.bf16()),
        ("fp16", MixedPrecision.fp16()),
        (MixedPrecision(compute=jnp.float16), MixedPrecision(compute="float16")),
    ],
)
def test_precision_of_reads_every_spelling(choice, expected):
    assert MixedPrecision.of(choice) == expected


def test_unknown_names_and_dtypes():
    with pytest.raises(ConfigError, match=r"precision: got 'bf61'. Did you mean 'bf16'"):
        MixedPrecision.of("bf61")
    with pytest.raises(ConfigError, match=r"compute dtype is 'int8'; it must be a floating-point"):
        MixedPrecision(compute="int8")
    with pytest.raises(ConfigError, match=r"reduce dtype is 'bfloat61'.*Did you mean 'bfloat16'"):
        MixedPrecision(reduce="bfloat61")
    with pytest.raises(ConfigError, match=r"buffer dtype is 'bool'"):
        floating_dtype("bool", "buffer")


def test_casts_touch_floating_leaves_alone():
    key = jax.random.key(0)
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "k": key, "flag": True}
    cast = cast_floating(tree, jnp.bfloat16)
    assert cast["w"].dtype == jnp.bfloat16
    assert cast["n"].dtype == jnp.int32
    assert cast["k"] is key
    assert cast["flag"] is True


class Net(nnx.Module):
    """Records the dtype that its inner layer computes in."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.seen = nnx.static(None)

    def __call__(self, x, mask=None):
        hidden = self.inner(x)
        self.seen = (x.dtype, hidden.dtype, None if mask is None else mask.dtype)
        return self.norm(hidden)


def test_autocast_computes_in_one_dtype_and_returns_another():
    model = autocast(Net(nnx.Rngs(0)), MixedPrecision.bf16())
    output = model(jnp.ones((2, 4)), mask=jnp.ones(2, jnp.int32))
    assert model.seen == (jnp.bfloat16, jnp.bfloat16, jnp.int32)
    assert output.dtype == jnp.float32
    assert isinstance(model, Net)
    half = autocast(Net(nnx.Rngs(0)), MixedPrecision(compute="float16", output="float16"))
    assert half(jnp.ones((2, 4))).dtype == jnp.float16


def test_statistics_of_norms_are_float32():
    """The mean of squares of 300 overflows float16 at 65504, and does not here."""
    model = autocast(Net(nnx.Rngs(0)), MixedPrecision.fp16())
    model.inner.kernel[...] = 100 * jnp.linspace(-1, 1, 32).reshape(4, 8)
    output = model(jnp.full((1, 4), 3.0))
    hidden = 300 * np.linspace(-1, 1, 32).reshape(4, 8).sum(0)
    assert np.abs(hidden).max() ** 2 > 65504
    expected = (hidden - hidden.mean()) / hidden.std()
    np.testing.assert_allclose(output[0], expected, atol=5e-3)


class Collecting(nnx.Module):
    """Leaves a term of the loss in a list."""

    def __call__(self, x, terms):
        terms.append(x.sum())
        return x


def test_a_list_or_dict_that_a_call_changes_is_the_callers():
    model = autocast(Collecting(), MixedPrecision.bf16())
    for terms in ([], nnx.List([])):
        model(jnp.ones(3), terms)
        assert [float(term) for term in terms] == [3.0]
    terms = [terms[0]]
    model(jnp.ones(3), terms)  # The first term has the compute dtype already.
    assert len(terms) == 2
    own = jnp.zeros(())
    terms = [own]
    model(jnp.ones(3), terms)
    assert terms[0] is own
    assert terms[1].dtype == jnp.bfloat16


class Rewriting(nnx.Module):
    """Changes a batch, and returns a list that it was given."""

    def __call__(self, batch, taps):
        batch["x"] = batch["x"] / 2
        batch["parts"][0]["y"] = batch.pop("y")
        taps.append(batch["x"])
        taps.append(taps.pop(0))
        return batch["x"], taps


def test_what_a_call_writes_into_nested_arguments_is_there_for_the_caller():
    model = autocast(Rewriting(), MixedPrecision(compute=jnp.bfloat16, output=jnp.float32))
    x, y, tap = jnp.ones(3), jnp.full(2, 3.0), jnp.zeros(2)
    parts, taps = [{}, "text"], [tap]
    batch = {"x": x, "y": y, "parts": parts, "n": 4}
    output, returned = model(batch, taps)
    assert output.dtype == jnp.float32
    assert returned is taps
    assert taps[1] is tap
    assert list(batch) == ["x", "parts", "n"]
    assert batch["parts"] is parts
    assert parts[0]["y"] is y
    assert [batch["x"].dtype, taps[0].dtype] == [jnp.bfloat16] * 2


def test_containers_of_nnx_without_variables_are_cast():
    model = autocast(Seeing(), MixedPrecision.bf16())
    assert model(nnx.Dict(x=jnp.ones(2))) == jnp.bfloat16
    assert model({"x": nnx.Param(jnp.ones(2))}) == jnp.float32


class Seeing(nnx.Module):
    """Returns the dtype of what it gets."""

    def __call__(self, batch):
        return batch["x"].dtype


class Outer(nn.Module):
    """Passes its own dtype to one layer, and has another that only promotes."""

    dtype: type = jnp.float32

    def setup(self):
        self.told, self.free = nn.Dense(8, dtype=self.dtype), nn.Dense(4)

    def __call__(self, x):
        return self.free(jnp.tanh(self.told(x)))


def test_layers_of_a_bridged_module_compute_in_the_dtype_too():
    model = nnx.bridge.ToNNX(Outer(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((2, 4)))
    graphdef, state = nnx.split(autocast(model, MixedPrecision.bf16()))
    call = lambda x: nnx.merge(graphdef, state, copy=True)(x)
    jaxpr = jax.make_jaxpr(call)(jnp.ones((2, 4)))
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [e.outvars[0].aval.dtype for e in products] == [jnp.bfloat16] * 2
    assert jaxpr.out_avals[0].dtype == jnp.float32


SPELLED = {
    "float32": ("float32", "fp32", "f32", "FP32", jnp.float32, np.float32, np.dtype("float32")),
    "bf16": ("bf16", "bfloat16", "BF16", "BFloat16", jnp.bfloat16, jnp.dtype("bfloat16")),
    "fp16": ("fp16", "float16", "half", "FP16", "Half", jnp.float16, np.float16),
    "fp8": ("fp8", "FP8"),
}


@pytest.mark.parametrize("name", SPELLED)
def test_every_spelling_of_a_preset_is_the_preset(name):
    for spelled in SPELLED[name]:
        assert MixedPrecision.of(spelled) == MixedPrecision.of(name)
        assert preset_name(spelled) == name
    if name != "fp8":
        dtypes = {floating_dtype(spelled, "compute") for spelled in SPELLED[name]}
        assert dtypes == {MixedPrecision.of(name).compute}


@pytest.mark.parametrize(
    "other",
    ["float64", "fp64", "f64", "double", "fp4", "int8", "tf32", "float8_e4m3fn", "FP4", jnp.int8],
)
def test_a_format_without_a_preset_is_not_taken_for_a_misspelling(other):
    with pytest.raises(ConfigError, match=r"^precision: got .{1,40}\. Valid: bf16, float32, fp16"):
        MixedPrecision.of(other)


def test_an_array_is_no_precision():
    with pytest.raises(ConfigError, match=r"precision: got Array"):
        MixedPrecision.of(jnp.ones(()))


@pytest.mark.parametrize("several", [np.generic, np.floating, np.integer])
def test_a_type_of_several_dtypes_is_no_precision(several):
    assert preset_name(several) is several
    with pytest.raises(ConfigError, match=r"^precision: got <class 'numpy"):
        MixedPrecision.of(several)
