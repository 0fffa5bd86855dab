import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist.checkpoint import load_checkpoint, save_checkpoint
from axon_dist.parallel import compose, ddp, fsdp, pipelined
from axon_dist.step import PortableForm, build_train_step


class Block(nnx.Module):
    def __init__(self, rngs, width=16):
        self.up, self.down = nnx.Linear(16, width, rngs=rngs), nnx.Linear(width, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Tower(nnx.Module):
    def __init__(self, widths):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List(Block(rngs, width) for width in widths)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


EQUAL, UNEQUAL = (16, 16, 16, 16), (16, 32, 8, 16)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch():
    x = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    return {"x": x, "y": x[:, :4]}


def step_of(world, strategy, widths=EQUAL, tx=None):
    return build_train_step(lambda: Tower(widths), tx or optax.adam(1e-2), loss_fn, strategy, world)


def bits(tree):
    return jax.tree.map(lambda x: np.asarray(x).tobytes(), tree)


@pytest.mark.full
@pytest.mark.parametrize(
    ("widths", "others"),
    [
        (EQUAL, [("fsdp=8", fsdp()), ("pp=2,dp=2", compose(pipelined(2, 4), ddp()))]),
        pytest.param(UNEQUAL, [("dp=4", ddp()), ("pp=4", pipelined(4, 4))], marks=pytest.mark.full),
    ],
)
def test_a_pipeline_goes_on_without_one_and_with_another(widths, others, make_world, tmp_path):
    step = step_of(make_world("pp=4"), pipelined(4, 4), widths)
    form = PortableForm(step)
    state, _ = step(step.init(), batch())
    portable = form.to_canonical(state)
    assert bits(form.from_canonical(portable)) == bits(state)
    assert bits(portable.params) == bits(step.storage.to_model(state.params))
    save_checkpoint(tmp_path / "c", portable)
    following = bits(form.to_canonical(step(state, batch())[0]).params)

    for axes, strategy in others:
        other = step_of(make_world(axes), strategy, widths)
        other_form = PortableForm(other)
        restored = load_checkpoint(tmp_path / "c", other_form.target)
        assert bits(restored) == bits(portable)
        again, _ = other(other_form.from_canonical(restored), batch())
        leaves = zip(jax.tree.leaves(bits(other_form.to_canonical(again).params)),
                     jax.tree.leaves(following), strict=True)  # fmt: skip
        for mine, theirs in leaves:
            if axes == "pp=4":
                assert mine == theirs
            mine, theirs = (np.frombuffer(x, np.float32) for x in (mine, theirs))
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_no_device_holds_all_of_a_pipelines_portable_form(make_world):
    step = step_of(make_world("pp=4"), pipelined(4, 4), (64,) * 4)
    portable = PortableForm(step).to_canonical(step.init())
    kernel = portable.params["blocks"][0]["up"]["kernel"]
    assert kernel.shape == (16, 64)
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)


@pytest.mark.full
def test_without_a_pipeline_nothing_is_converted(make_world):
    step = step_of(make_world("dp=2"), ddp())
    form, state = PortableForm(step), step.init()
    assert form.to_canonical(state) is state
    assert form.from_canonical(state) is state


@pytest.mark.full
@pytest.mark.sample("bfloat16-rows")
@pytest.mark.parametrize("widths", [EQUAL, UNEQUAL], ids=["rows", "vectors"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
        lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        lambda: optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
        lambda: optax.contrib.muon(1e-2),
    ],
    ids=["bfloat16", "factored", "masked", "partitioned"],
)
def test_moments_of_any_shape_have_the_models_form(make, widths, make_world):
    step = step_of(make_world("pp=4"), pipelined(4, 4), widths, make())
    form, state = PortableForm(step), step.init()
    noise = lambda x: jax.random.normal(jax.random.key(x.size), x.shape).astype(x.dtype)
    portable = jax.tree.map(noise, form.to_canonical(state))
    plain = jax.eval_shape(make().init, jax.eval_shape(step.storage.to_model, state.params))
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(portable.opt_state) == shapes(plain)
    assert bits(form.to_canonical(form.from_canonical(portable))) == bits(portable)
