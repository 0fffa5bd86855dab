"""Adapters on the layers of a model, and the plain model that results from merging them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import World, build_train_step, lora, merge_lora
from axon_dist.core.errors import AxonDistWarning, ConfigError
from axon_dist.models import Transformer, TransformerConfig
from axon_dist.parallel import tensor_parallel
from axon_dist.parallel.tensor_plan import Plan, Rule

X = np.random.default_rng(0).normal(size=(2, 5, 16)).astype(np.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.out = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(self.attention(x))


def moved(model):
    """Sets the adapters to nonzero values."""
    for number, (_, variable) in enumerate(nnx.iter_graph(model)):
        if isinstance(variable, nnx.LoRAParam):
            drawn = np.random.default_rng(number).normal(size=variable.shape)
            variable[...] = jnp.asarray(0.3 * drawn, variable[...].dtype)
    return model


def adapted(paths="", **options):
    return lora(Net(nnx.Rngs(0)), 2, paths, rngs=nnx.Rngs(1), **options)


def test_a_model_computes_the_same_at_first_and_stays_itself():
    plain = Net(nnx.Rngs(0))
    model = lora(plain, 2, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(model(X), plain(X))
    assert not jax.tree.leaves(nnx.state(plain, nnx.LoRAParam))
    assert nnx.graphdef(plain) == nnx.graphdef(Net(nnx.Rngs(0)))
    kernels = lambda m: nnx.state(m, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    assert jax.tree.structure(kernels(model)) == jax.tree.structure(kernels(plain))


def test_a_layer_adds_the_product_of_its_adapter():
    layer = moved(adapted("out")).out
    a, b = layer.lora.lora_a[...], layer.lora.lora_b[...]
    want = X @ layer.kernel[...] + layer.bias[...] + (X @ a) @ b
    np.testing.assert_allclose(layer(X), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("paths", ["", "attention/(query|out)", ("out$",)])
def test_merged_kernels_compute_what_the_adapters_did(paths):
    model = moved(adapted(paths))
    plain = merge_lora(model)
    assert nnx.graphdef(plain) == nnx.graphdef(Net(nnx.Rngs(0)))
    np.testing.assert_allclose(plain(X), model(X), rtol=1e-4, atol=1e-5)
    assert np.abs(model(X) - Net(nnx.Rngs(0))(X)).max() > 0.01
    for before, after in ((model.out, plain.out), (model.attention.out, plain.attention.out)):
        if hasattr(before, "lora"):
            product = before.lora.lora_a[...] @ before.lora.lora_b[...]
            want = before.kernel[...] + product.reshape(before.kernel.shape)
            np.testing.assert_allclose(after.kernel[...], want, rtol=1e-6, atol=1e-7)


def test_a_merged_kernel_keeps_its_dtype():
    model = lora(nnx.Linear(4, 3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))
    assert model.lora.lora_a[...].dtype == jnp.float32
    assert merge_lora(moved(model)).kernel[...].dtype == jnp.bfloat16


def test_layers_without_lora_support_are_refused():
    with pytest.raises(ConfigError, match=r"rank=0, an int; give a whole number, at least 1"):
        lora(Net(nnx.Rngs(0)), 0, rngs=nnx.Rngs(1))
    with pytest.raises(ConfigError, match=r"the path 'mlp', which finds none .*attention/key, att"):
        adapted(("out", "mlp"))
    stacked = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))(nnx.Rngs(0).split(3))
    with pytest.raises(ConfigError, match=r"kernel has the shape \(3, 4, 4\): many layers stacked"):
        lora(stacked, 2, rngs=nnx.Rngs(1))


def test_adapters_that_cannot_be_merged_are_refused():
    with pytest.raises(ConfigError, match=r"merge_lora found no adapters in the model"):
        merge_lora(Net(nnx.Rngs(0)))
    alone = nnx.List([nnx.LoRA(4, 2, 4, rngs=nnx.Rngs(0))])
    with pytest.raises(ConfigError, match=r"found nnx.LoRA at 0, which belongs to no kernel"):
        merge_lora(alone)


def test_a_wider_export_keeps_the_bits_of_the_adapters():
    """Adds a small product to a bfloat16 kernel in float32, so that its bits survive."""
    model = lora(nnx.Linear(8, 8, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))
    model.lora.lora_b.set_value(jnp.full((2, 8), 1e-4))
    product = model.lora.lora_a[...] @ model.lora.lora_b[...]
    wanted = model.kernel[...].astype(jnp.float32) + product
    found = merge_lora(model, "float32").kernel[...]
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert merge_lora(model).kernel[...].dtype == jnp.bfloat16


class Tied(nnx.Module):
    """A head that multiplies by the table, in a model of the user's."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(jnp.tanh(self.embed(tokens)))


class Shared(nnx.Module):
    """Two layers with one kernel."""

    def __init__(self, rngs):
        self.one, self.two = (nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2))
        self.two.kernel = self.one.kernel

    def __call__(self, x):
        return self.two(jnp.tanh(self.one(x)))


class Wrapped(nnx.Module):
    def __init__(self, rngs):
        config = dataclasses.replace(
            TransformerConfig.preset("tiny"), tied_head=True, num_layers=1, width=16, vocab_size=16,
            num_heads=2, ffn_width=16,
        )  # fmt: skip
        self.net = Transformer(config, rngs=rngs)


def test_an_adapter_is_not_merged_into_an_array_that_something_else_reads():
    shared = lora(Shared(nnx.Rngs(0)), 2, "one", rngs=nnx.Rngs(1))
    with pytest.raises(ConfigError, match="one, two, which share one kernel") as error:
        merge_lora(shared)
    assert error.value.code == "adapter-of-shared-kernel"
    wrapped = lora(Wrapped(nnx.Rngs(0)), 2, "token_embedding", rngs=nnx.Rngs(1))
    with pytest.raises(ConfigError, match="a model whose head is tied to its embeddings"):
        merge_lora(wrapped)
    tied = lora(Tied(nnx.Rngs(0)), 2, "embed", rngs=nnx.Rngs(1))
    with pytest.warns(AxonDistWarning, match=r"as nnx\.Embed\.attend does"):
        merge_lora(tied)


class Gated(nnx.Module):
    """A fused layer whose blocks are parts of its last output dim."""

    def __init__(self, rngs):
        self.up = nnx.LinearGeneral(8, (2, 16), rngs=rngs)
        self.down = nnx.LinearGeneral((2, 8), 8, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x):
        left, right = jnp.split(self.up(x), 2, -1)
        return self.down(jax.nn.silu(left) * right)


@pytest.mark.full
def test_the_adapter_of_a_fused_layer_is_cut_like_its_kernel():
    model = lora(Gated(nnx.Rngs(0)), 2, "up", rngs=nnx.Rngs(1))
    model.up.lora.lora_b.set_value(jnp.sin(np.arange(64, dtype=np.float32).reshape(2, 32)))
    plan = Plan((Rule("up$", "column", num_fused=2), Rule("down$", "row")))
    loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
    x = np.random.default_rng(3).normal(size=(8, 4, 8)).astype(np.float32)
    expected = nnx.jit(loss_fn)(model, x)
    step = build_train_step(
        model, optax.sgd(0.1), loss_fn, tensor_parallel(plan), World.emulate(2, "tp=2")
    )
    _, metrics = step(step.init(), x)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
