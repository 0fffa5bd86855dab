import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from axon_dist import (
    DDP,
    MixedPrecision,
    World,
    build_train_step,
    compose,
    fsdp,
    pipelined,
    tensor_parallel,
    zero,
)
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.inspect import collectives
from axon_dist.ir.walk import equations
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.nn import ColumnParallelLinear
from axon_dist.ops.fp8 import BACKWARD, FORWARD, Fp8Dot, fp8_layers, fp8_reasons, rounded
from axon_dist.parallel import Reduction

LAST_FIRST = (((1,), (0,)), ((), ()))
E4M3, E5M2 = np.dtype(FORWARD), np.dtype(BACKWARD)


def by_numpy(x, dtype):
    """Rounds to fp8 in NumPy, and casts back."""
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / float(jnp.finfo(dtype).max)))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def test_forward_in_e4m3_and_gradients_in_e5m2():
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((8, 16), (16, 32), (8, 32)))
    y, pull = jax.vjp(lambda x, w: Fp8Dot()(x, w, LAST_FIRST), x, w)
    dx, dw = pull(g)
    x8, w8, g8 = by_numpy(x, E4M3), by_numpy(w, E4M3), by_numpy(g, E5M2)
    np.testing.assert_allclose(y, x8 @ w8, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, g8 @ w8.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, x8.T @ g8, rtol=1e-5, atol=1e-5)
    assert np.abs(y - x @ w).max() > 1e-2  # and rounding does change the values


class Doubling:
    """Stands in for a gather of two equal shards, and for the reduction of their gradient."""

    def forward(self, weight):
        return jnp.concatenate([weight, weight])

    def backward(self, gradient):
        return gradient[:8] + gradient[8:]


@pytest.mark.full
def test_a_product_gathers_its_weight_and_hands_the_gradient_on():
    x, w = (jax.random.normal(jax.random.key(n), (16, 16))[: 16 - n * 8] for n in range(2))
    sharded = lambda x, w: Fp8Dot((), Doubling())(x, w, LAST_FIRST)
    joined = lambda x, w: Fp8Dot()(x, jnp.concatenate([w, w]), LAST_FIRST)
    (y, pull), (want, pull_joined) = jax.vjp(sharded, x, w), jax.vjp(joined, x, w)
    np.testing.assert_array_equal(y, want)
    for one, other in zip(pull(y), pull_joined(y), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "sums"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")]
)
def test_ranks_add_up_in_the_dtype_of_the_product(dtype, sums):
    """Provided that this dtype has enough range for values that are not scaled yet."""
    x, w = jnp.ones((8, 16), dtype), jnp.ones((16, 16), dtype)
    run = lambda x, w: jax.vjp(lambda x, w: Fp8Dot()(x, w, LAST_FIRST), x, w)[1](x)
    found = [e.outvars[0].aval.dtype.name for e in products_of(jax.make_jaxpr(run)(x, w).jaxpr)]
    assert found == 3 * [sums]


def products_of(jaxpr):
    return [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]


@pytest.mark.full
def test_several_dims_are_multiplied_as_one():
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(3, 5, 4, 8)), rng.normal(size=(4, 8, 2, 8))
    x, w = x.astype(np.float32), w.astype(np.float32)
    run = lambda x, w: Fp8Dot()(x, w, (((2, 3), (0, 1)), ((), ())))
    flat = lambda x, w: Fp8Dot()(x.reshape(15, 32), w.reshape(32, 16), LAST_FIRST)
    y, pull = jax.vjp(run, x, w)
    want, pull_flat = jax.vjp(flat, x, w)
    np.testing.assert_allclose(y.reshape(15, 16), want, rtol=1e-5, atol=1e-5)
    for a, b in zip(pull(y), pull_flat(y.reshape(15, 16)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "scale"), [([448.0, 1], 1), ([449.0, 1], 2), ([0.0, 0], 1), ([1e-3, 0], 2.0**-18)]
)
def test_scales_are_the_least_powers_of_two(values, scale):
    found = rounded(jnp.array(values), FORWARD)
    assert float(found.scale) == scale
    assert np.isfinite(found.values.astype(np.float32)).all()


# Numbers that are subnormal in e4m3, the largest ones, and the neighbours of a power of two.
SPECIAL = [0.0, 2.0**-9, 2.0**-6, 1e-30, 223.9, 224.0, 225.0, 447.0, 448.0, 449.0, 57344.0, 57345.0]


@functools.partial(jax.jit, static_argnums=1)
def once_and_again(x, dtype):
    wide = lambda x: x.values.astype(jnp.float32) * x.scale
    once = wide(rounded(x, dtype))
    return once, wide(rounded(once, dtype))


@given(
    values=st.lists(
        st.one_of(st.sampled_from(SPECIAL), st.floats(-(2.0**60), 2.0**60, width=32)),
        min_size=6,
        max_size=6,
    ),
    power=st.integers(-40, 40),
    dtype=st.sampled_from([FORWARD, BACKWARD]),
)
def test_rounding_is_idempotent(values, power, dtype):
    """Even though the second scale may be half the first, if the largest value was rounded down."""
    once, again = once_and_again(np.array(values, np.float32) * np.float32(2.0**power), dtype)
    np.testing.assert_array_equal(again, once)


def test_small_values_in_float16_stay_finite():
    """The inverse of their scale overflows float16."""
    x = jnp.full((2, 16), 1e-4, jnp.float16)
    found = rounded(x, FORWARD)
    np.testing.assert_allclose(found.values.astype(np.float32) * found.scale, 1e-4, rtol=0.07)
    y = Fp8Dot()(x, jnp.full((16, 16), 200.0, jnp.float16), LAST_FIRST)
    np.testing.assert_allclose(y, np.full((2, 16), 0.32), rtol=0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_values_stay_non_finite(bad):
    found = rounded(jnp.array([bad, 1.0]), FORWARD)
    assert np.isnan(float(found.values[0]))


@pytest.mark.full
def test_the_scale_is_that_of_all_ranks():
    """Small values of one rank lose digits to the large ones of another, as on one device."""
    world = World.emulate(4, "dp=4")
    size = jnp.array([1e4, 1.0, 1e-2, 1e-3])[:, None]
    x = size * jax.random.normal(jax.random.key(0), (4, 16))
    w = jax.random.normal(jax.random.key(1), (16, 16))

    def grads(dot, x, w):
        total = lambda x, w: jnp.sum(dot(x, w, LAST_FIRST) ** 2)
        dx, dw = jax.grad(total, (0, 1))(x, w)
        return dx, dw[None]

    def on_ranks(dot):
        run = jax.shard_map(
            lambda x, w: grads(dot, x, w), mesh=world.mesh, in_specs=(P("dp"), P()),
            out_specs=P("dp"), check_vma=False,
        )  # fmt: skip
        dx, dw = jax.jit(run)(x, w)
        return np.asarray(dx), np.asarray(dw).sum(0)

    want = [np.asarray(x) for x in grads(Fp8Dot(), x, w)]
    got, alone = on_ranks(Fp8Dot(("dp",))), on_ranks(Fp8Dot())
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1][0], rtol=1e-5)
    assert np.abs(alone[0] - want[0])[2:].max() > 1e-3 * np.abs(want[0][2:]).max()


def test_layers_are_those_of_blocks():
    config = TransformerConfig.preset("tiny", tied_head=False)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    assert len(fp8_layers(model)) == 7 * config.num_layers
    assert fp8_reasons(model)["lm_head"] == "is not in a block"
    assert len(fp8_layers(model, ("mlp/",))) == 4 * config.num_layers


def test_why_layers_take_no_part():
    own = nnx.Linear(16, 16, dot_general=lambda *_, **__: None, rngs=nnx.Rngs(0))
    first = nnx.LinearGeneral((16, 16), 16, axis=(0, 1), rngs=nnx.Rngs(0))
    split = ColumnParallelLinear(16, 32, rngs=nnx.Rngs(0))
    narrow = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    assert fp8_reasons(nnx.Sequential(own, first, split, narrow)) == {
        "layers/0": "has its own dot_general",
        "layers/1": "contracts dims other than the last",
        "layers/2": "",
        "layers/3": "is 16×8, not multiples of 16",
    }


def test_a_model_without_such_layers_is_refused_at_build():
    world = World.emulate(4, "dp=4")
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    ddp = DDP(model, world.group("dp"))
    with pytest.raises(UnsupportedError, match="finds no dense layer to compute in fp8"):
        build_train_step(model, optax.sgd(0.1), loss, ddp, world, precision="fp8")


WIDTH, DEPTH = 32, 2


class Blocks(nnx.Module):
    """Blocks with a layer that computes in fp8, and one that is too narrow for it."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Pair(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.wide = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.narrow = nnx.Linear(WIDTH, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tile(self.narrow(jnp.tanh(self.wide(x))), WIDTH // 8)


def built(strategy, mesh="fsdp=8", gather: str | None = "fp8", world=None, **options):
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    policy = MixedPrecision(products="fp8", gather=gather)
    world = world or World.emulate(8, mesh)
    return build_train_step(
        Blocks, optax.sgd(0.1), loss, strategy, world, precision=policy, **options
    )


def split_by_features():
    return compose(fsdp(min_elements=8), tensor_parallel({"wide": "column", "narrow": "row"}))


@pytest.mark.sample("fsdp")
@pytest.mark.parametrize(
    ("make", "mesh", "tp"),
    [(lambda: fsdp(min_elements=8), "fsdp=8", 1), (split_by_features, "fsdp=4,tp=2", 2)],
    ids=["fsdp", "tp"],
)
def test_fp8_weights_are_gathered_as_bytes(make, mesh, tp):
    """They are gathered twice, forward and backward; all other transfers are unchanged."""
    step = built(make(), mesh)
    batch = {"x": jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)}
    ledger = collectives(step.lower(batch).compile(), step.world.mesh)
    sent = {"u8": 0, "f32": 0}
    for row in ledger.select("all-gather", "fsdp").rows:
        (dtype,) = row.dtypes
        sent[dtype] += row.wire_bytes * row.count
    wide, narrow = DEPTH * WIDTH * WIDTH / tp, DEPTH * WIDTH * 8 / tp
    ring = 1 - tp / 8
    # The gradient of the first block's input is not needed, so its weights are gathered only once.
    again = wide - WIDTH * WIDTH / tp
    assert sent == {"u8": (wide + again) * ring, "f32": 2 * 4 * narrow * ring}
    # XLA:CPU lowers a reduce-scatter to an all-reduce.
    reduced = ledger.total_wire_bytes("all-reduce", "fsdp") / 2
    assert reduced == pytest.approx(4 * (wide + narrow) * ring, rel=0.01)


@pytest.mark.full
def test_weights_that_travel_as_bytes_change_no_bit():
    """Shards are rounded with the scale of the whole weight, so both round to the same values."""
    x = jax.random.normal(jax.random.key(0), (16, WIDTH))
    found = []
    for gather in ("fp8", None):
        step = built(fsdp("hybrid_shard", ("dp", "fsdp"), min_elements=8), "dp=2,fsdp=4", gather)
        state, losses = step.init(), []
        for _ in range(2):
            state, metrics = step(state, {"x": x})
            losses.append(float(metrics["loss"]))
        found.append((losses, jax.device_get(state.params)))
    assert found[0][0] == found[1][0]
    assert found[0][0][0] != found[0][0][1]
    jax.tree.map(np.testing.assert_array_equal, found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("strategy", "mesh", "options", "why"),
    [
        (fsdp(min_elements=8, reduction=Reduction(manual=True)), "fsdp=8", {}, "gather explicitly"),
        (fsdp(min_elements=8, reduction=Reduction(per="step")), "fsdp=8", {"accumulate": 2},
         "reduce gradients per step in float32"),
        (zero(1, min_elements=8), "dp=8", {}, "no kernel of a layer in fp8 is split"),
        (fsdp(min_elements=10**6), "fsdp=8", {}, "no kernel of a layer in fp8 is split"),
        (pipelined(2, 2), "pp=2,dp=4", {}, "a pipeline over 'pp' gathers its stages once"),
    ],
)  # fmt: skip
def test_weights_that_units_do_not_gather_cannot_travel_in_fp8(strategy, mesh, options, why):
    with pytest.raises(UnsupportedError, match=f"gather='fp8' is for .*{why}.*leave gather out"):
        built(strategy, mesh, **options)


@pytest.mark.full
def test_one_device_needs_no_gather_for_it():
    batch = {"x": jnp.ones((4, WIDTH))}
    step = built(fsdp(min_elements=8), world=World.emulate(1, "fsdp=1"))
    _, metrics = step(step.init(), batch)
    assert metrics["loss"] == pytest.approx(float(jnp.mean(Blocks()(batch["x"]) ** 2)), rel=0.1)


def test_parameters_gathered_once_do_not_travel_in_fp8():
    step = lambda: build_train_step(
        Blocks, optax.sgd(0.1), lambda model, batch: jnp.mean(model(batch["x"])),
        zero(2, min_elements=8), World.emulate(8), precision=MixedPrecision.fp8(gather="fp8"),
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="gathered once a step, all of them in the dtype"):
        step()


def test_products_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="gather is 'int8'; it must be 'fp8', or None"):
        MixedPrecision(products="fp8", gather="int8")
    with pytest.raises(ConfigError, match="gathers the weights of fp8 products, but prod"):
        MixedPrecision(gather="fp8")
    with pytest.raises(ConfigError, match="products is 'fp4'; it must be 'fp8', or None"):
        MixedPrecision(products="fp4")
    with pytest.raises(
        ConfigError, match="excludes layers from fp8 products, but products is None"
    ):
        MixedPrecision(skip=("mlp",))
    with pytest.raises(UnsupportedError, match="contract the last dims with the first dims"):
        Fp8Dot()(jnp.ones((16, 4)), jnp.ones((16, 4)), (((0,), (0,)), ((), ())))


def test_gradients_of_three_ranks_are_rounded_as_those_of_one(make_world):
    """The mean over a third of the samples has three times the gradient, not a power of two."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 16), (16, 16)))
    x[-1] *= 9

    def gradient(dot, x):
        loss = lambda w: jnp.mean(dot(x, w, LAST_FIRST) ** 2)
        return jax.grad(loss)(w)

    mesh = make_world("dp=3").mesh
    split = jax.shard_map(
        lambda x: jax.lax.pmean(gradient(Fp8Dot(("dp",)), x), "dp"),
        mesh=mesh, in_specs=P("dp"), out_specs=P(), check_vma=False,
    )  # fmt: skip
    whole = jax.jit(lambda x: gradient(Fp8Dot(), x))
    np.testing.assert_allclose(jax.jit(split)(x), whole(x), rtol=1e-5, atol=1e-6)
