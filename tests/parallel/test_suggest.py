"""Plans read off models: the whole Megatron plan, with no hint, and what cannot be placed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.models import (
    MLP,
    ResNet,
    ResNetConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from axon_dist.nn import ParallelMLP
from axon_dist.parallel import suggest_plan, tensor_parallel

from .foreign import GPT, Decoder, bridged


def transformer(**changes):
    config = dataclasses.replace(TransformerConfig.preset("tiny"), **changes)
    return lambda: Transformer(config, rngs=nnx.Rngs(0, dropout=1))


def modes(plan):
    return {rule.pattern.strip("^$"): rule.mode.value for rule in plan.rules}


def of_blocks(prefix):
    return {
        **dict.fromkeys((f"{prefix}attention/{name}" for name in "qkv"), "column"),
        f"{prefix}attention/out": "row",
        f"{prefix}mlp/gate": "column",
        f"{prefix}mlp/up": "column",
        f"{prefix}mlp/down": "row",
        f"{prefix}attention_norm": "sequence",
        f"{prefix}mlp_norm": "sequence",
        "final_norm": "sequence",
        "token_embedding": "vocab",
    }


@pytest.mark.parametrize("scan", [False, True])
def test_the_whole_plan_of_the_transformer(scan):
    plan = suggest_plan(transformer(scan_layers=scan, dropout=0.1))
    prefix = "blocks/" if scan else r"blocks/\d+/"
    assert modes(plan) == of_blocks(prefix) | {"lm_head": "vocab"}
    assert plan.unplaced == ()
    q, k = (plan.rule_of(f"{prefix}attention/{name}".replace(r"\d+", "0")) for name in "qk")
    assert (q.multiple_of, q.optional) == (16, False)
    assert (k.multiple_of, k.optional) == (16, True)


def test_a_fused_kernel_hides_no_heads():
    """cuDNN's attention refuses float32, the dtype that the model is traced in."""
    plan = suggest_plan(transformer(attention="cudnn"))
    assert modes(plan) == of_blocks(r"blocks/\d+/") | {"lm_head": "vocab"}


def test_a_tied_head_shares_the_split_table():
    assert modes(suggest_plan(transformer(tied_head=True))) == of_blocks(r"blocks/\d+/")


@pytest.mark.parametrize(
    ("cut", "num_fused", "stacked"),
    [("slices", 3, False), ("reshape", 3, True), ("per_head", 1, False)],
)
def test_one_kernel_for_queries_keys_and_values(cut, num_fused, stacked):
    plan = suggest_plan(lambda: GPT(cut, nnx.Rngs(0)))
    assert modes(plan) == {
        r"h/\d+/c_attn": "column",
        r"h/\d+/c_proj": "row",
        r"h/\d+/c_fc": "column",
        r"h/\d+/c_out": "row",
        r"h/\d+/ln_1": "sequence",
        r"h/\d+/ln_2": "sequence",
        "ln_f": "sequence",
        "wte": "vocab",
    }
    rule = plan.rule_of("h/0/c_attn")
    assert (rule.num_fused, rule.stacked) == (num_fused, stacked)
    assert [left.path for left in plan.unplaced] == ["wpe/embedding"]


def test_bare_parameters_of_another_layout():
    plan = suggest_plan(lambda: Decoder(nnx.Rngs(0)))
    assert modes(plan) == {
        "vocabulary": "vocab",
        "ask": "column",
        "keys": "column",
        "contents": "column",
        "answer": "row",
        "expand": "column",
        "contract": "row",
        "predict": "vocab",
    }
    dims = {rule.pattern.strip("^$"): rule.dim for rule in plan.rules}
    assert (dims["ask"], dims["answer"], dims["vocabulary"]) == (-2, -3, -2)
    assert plan.rule_of("expand").num_fused == 2
    assert plan.rule_of("keys").optional
    assert not plan.rule_of("ask").optional


def test_a_bridged_linen_module():
    plan = suggest_plan(bridged, jax.ShapeDtypeStruct((2, 8, 16), jnp.float32))
    found = modes(plan)
    assert found["Dense_1"] == "column"
    assert found["Dense_2"] == "row"
    assert found["SelfAttention_0/query"] == "column"
    assert found["SelfAttention_0/out"] == "row"
    assert plan.rule_of("SelfAttention_0/out").dim == -3
    assert [left.path for left in plan.unplaced] == ["Dense_0/kernel"]


def test_an_odd_chain_leaves_its_last_kernel_whole():
    plan = suggest_plan(lambda: MLP((16, 24, 24, 4), rngs=nnx.Rngs(0)))
    assert modes(plan) == {"layers/0": "column", "layers/1": "row"}
    (left,) = plan.unplaced
    assert (left.path, left.reason) == ("layers/2/kernel", "a dim is the model's output")


def test_it_prints_reasons_and_what_it_could_not_place():
    text = str(suggest_plan(lambda: GPT("slices", nnx.Rngs(0))))
    assert "its outputs reach h/*/c_proj feature by feature; 3 blocks are side by side" in text
    assert "wpe/embedding" in text
    assert "no product with activations" in text


def test_a_model_that_no_guess_fits_asks_for_its_inputs():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.mlp = ParallelMLP(4, 8, rngs=rngs)

        def __call__(self, x, y):
            return self.mlp(x + y)

    make = lambda: Two(nnx.Rngs(0))
    with pytest.raises(
        UnsupportedError, match=r"inputs tried .*int32\[2, 12\].*give sugg"
    ) as refused:
        suggest_plan(make)
    assert refused.value.code == "no-example-inputs"
    assert "parallel.tensor.plan" in str(refused.value)
    x = jnp.ones((2, 4))
    assert modes(suggest_plan(make, x, x)) == {"mlp/up": "column", "mlp/down": "row"}
    Two.example_inputs = lambda self: (x, x)
    assert modes(suggest_plan(make)) == {"mlp/up": "column", "mlp/down": "row"}


def test_example_inputs_that_are_no_tuple_are_refused():
    class One(nnx.Module):
        def example_inputs(self):
            return jnp.ones((2, 4))

    with pytest.raises(ConfigError, match=r"One\.example_inputs returned a \w+; it must") as bad:
        suggest_plan(One)
    assert bad.value.code == "bad-example-inputs"


def test_models_of_images_say_what_they_take():
    vit = suggest_plan(lambda: ViT(ViTConfig.preset("tiny"), rngs=nnx.Rngs(0)))
    assert {"column", "row", "sequence"} == set(modes(vit).values())
    resnet = suggest_plan(lambda: ResNet(ResNetConfig.preset("tiny"), rngs=nnx.Rngs(0)))
    assert "stem/conv/kernel" in [layer.path for layer in resnet.unplaced]


class Told(nnx.Module):
    """Takes a tree and flags, and holds an array that is no Variable."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.shift = nnx.data(jnp.ones(16))

    def __call__(self, batch, double=False, *, scale=None):
        x = batch["x"] if isinstance(batch, dict) else batch
        hidden = self.up(x) * self.shift.reshape(16)
        hidden = hidden if scale is None else hidden * scale
        return self.down(hidden) * (2 if double else 1)


@pytest.mark.parametrize("make", [lambda: Told, Told], ids=["factory", "instance"])
@pytest.mark.parametrize(
    ("inputs", "keywords"),
    [
        (({"x": np.ones((2, 8), np.float32)}, True), {"scale": np.ones((), np.float32)}),
        ((jax.ShapeDtypeStruct((2, 8), jnp.float32),), {"double": True}),
        ((), {"double": True}),
    ],
)
def test_trees_flags_and_raw_arrays(make, inputs, keywords):
    plan = suggest_plan(make(), *inputs, **keywords)
    assert {rule.pattern: rule.mode.value for rule in plan.rules} == {
        "^up$": "column",
        "^down$": "row",
    }


@pytest.mark.parametrize("norm", [nnx.WeightNorm, nnx.SpectralNorm])
def test_normalised_weights_stay_whole_with_a_reason(norm):
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.up = norm(nnx.Linear(8, 16, rngs=rngs), rngs=rngs)
            self.down = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            flags = {"update_stats": True} if norm is nnx.SpectralNorm else {}
            return self.down(self.up(x, **flags))

    for model in (Net, Net()):
        plan = suggest_plan(model, jnp.ones((2, 8)))
        assert not plan.rules
        assert {left.path for left in plan.unplaced} >= {"down/kernel"}


class Experts(nnx.Module):
    """Matrices of several experts in one parameter, taken by number in a loop or as rows."""

    def __init__(self, rows):
        draw = lambda *shape: nnx.Param(jax.random.normal(jax.random.key(0), shape))
        self.up, self.down, self.rows = draw(3, 8, 16), draw(3, 16, 8), rows

    def __call__(self, x):
        if self.rows:
            pairs = zip(jnp.unstack(self.up[...]), jnp.unstack(self.down[...]), strict=True)
            return x + sum(jnp.tanh(x @ up) @ down for up, down in pairs)
        number = jnp.int32(1)
        taken = jnp.tanh(x @ jnp.take(self.up[...], number, axis=0)) @ self.down[number]
        return x + taken + sum(jnp.tanh(x @ self.up[i]) @ self.down[i] for i in range(3))


@pytest.mark.parametrize("rows", [False, True])
def test_matrices_of_experts_are_split_each(rows):
    plan = suggest_plan(lambda: Experts(rows), jnp.ones((2, 8)))
    found = [(rule.pattern, rule.mode.value, rule.dim) for rule in plan.rules]
    assert found == [("^down$", "row", -2), ("^up$", "column", -1)]


def test_an_empty_plan_says_why_of_each_layer():
    layer = lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    plan = suggest_plan(layer, jnp.ones((2, 4)))
    assert not plan.rules
    with pytest.raises(UnsupportedError) as caught:
        tensor_parallel(plan).layers[0].check(layer(), None)
    assert str(caught.value) == (
        "the plan has no rules, and would split nothing. kernel stays whole: a dim is the model's "
        "output; a dim is a dim of the model's input. Give a plan of patterns and modes, or leave "
        "tensor_parallel out"
    )
