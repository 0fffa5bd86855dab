import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist import DDP, MixedPrecision, World, build_train_step
from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.nn import ColumnParallelLinear
from axon_dist.precision import Fp8Dot, fp8_layers, fp8_reasons
from axon_dist.precision.fp8 import BACKWARD, FORWARD, rounded

LAST_FIRST = (((1,), (0,)), ((), ()))
E4M3, E5M2 = np.dtype(FORWARD), np.dtype(BACKWARD)


def by_numpy(x, dtype):
    """Rounded by the rule, and wide again."""
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
    assert np.abs(y - x @ w).max() > 1e-2  # and it does round


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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    found = rounded(jnp.array([bad, 1.0]), FORWARD)
    assert np.isnan(float(found.values[0]))


def test_the_scale_is_that_of_all_ranks():
    """Small values of one rank lose digits beside the large ones of another, as on one device."""
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
    assert fp8_reasons(model)["lm_head"] == "is in no block"
    assert len(fp8_layers(model, ("mlp/",))) == 4 * config.num_layers


def test_why_layers_take_no_part():
    own = nnx.Linear(16, 16, dot_general=lambda *_, **__: None, rngs=nnx.Rngs(0))
    first = nnx.LinearGeneral((16, 16), 16, axis=(0, 1), rngs=nnx.Rngs(0))
    split = ColumnParallelLinear(16, 32, rngs=nnx.Rngs(0))
    narrow = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    assert fp8_reasons(nnx.Sequential(own, first, split, narrow)) == {
        "layers/0": "has a dot_general of its own",
        "layers/1": "multiplies other dims than the last",
        "layers/2": "",
        "layers/3": "is 16×8, no multiples of 16",
    }


def test_a_model_without_such_layers_is_refused_at_build():
    world = World.emulate(4, "dp=4")
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    loss = lambda model, batch: jnp.mean(model(batch["x"]) ** 2)
    ddp = DDP(model, world.group("dp"))
    with pytest.raises(UnsupportedError, match="finds no dense layer to compute in fp8"):
        build_train_step(model, optax.sgd(0.1), loss, ddp, world, precision="fp8")


def test_products_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="products is 'fp4'; it must be 'fp8', or None"):
        MixedPrecision(products="fp4")
    with pytest.raises(ConfigError, match="names layers that fp8 leaves out, and products is None"):
        MixedPrecision(skip=("mlp",))
    with pytest.raises(UnsupportedError, match="none of last with first dims"):
        Fp8Dot()(jnp.ones((16, 4)), jnp.ones((16, 4)), (((0,), (0,)), ((), ())))
