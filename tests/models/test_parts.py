"""The options of decoder families, compared with a plain numpy model that supports all of them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError, UnsupportedError
from axon_dist.core.tree import leaves_with_paths
from axon_dist.models import (
    RopeScaling,
    Transformer,
    TransformerConfig,
    next_token_loss,
    num_params,
)
from axon_dist.models.layers import LayerWindow
from axon_dist.parallel import (
    compose,
    context_parallel,
    ddp,
    fsdp,
    pipelined,
    suggest_plan,
    tensor_parallel,
)
from axon_dist.step import build_train_step
from tests.drawn import drawn
from tests.one_device import trained

TOKENS = np.random.default_rng(0).integers(0, 48, (8, 17))
BASE = TransformerConfig(
    vocab_size=48, width=24, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=40,
    max_length=32,
)  # fmt: skip
ROWS = {
    "gemma 2": {
        "norm": "rms_plus_one", "norms": "both", "windows": (4, 0), "attention_softcap": 2.0,
        "logit_softcap": 3.0, "attention_scale": 0.3, "embedding_scale": 24**0.5,
        "tied_head": True, "activation": "gelu",
    },
    "gemma 3": {
        "norm": "rms_plus_one", "norms": "both", "qk_norm": "head", "windows": (4, 4, 0),
        "local_rope_theta": 50.0, "rope_scaling": RopeScaling("linear", 3.0),
    },
    "olmo 2": {"norms": "after", "qk_norm": "all"},
    "mistral": {"windows": (5,), "qkv_bias": True, "rotary_fraction": 0.5},
    "llama 3": {"rope_scaling": RopeScaling("llama3", 8.0, 16)},
    "yarn": {"rope_scaling": RopeScaling("yarn", 4.0, 16, 1.0, 32.0)},
    "yarn and windows": {
        "windows": (4, 0), "local_rope_theta": 50.0,
        "rope_scaling": RopeScaling("yarn", 4.0, 16, 1.0, 32.0),
    },
}  # fmt: skip


def made(fields, **more):
    """Returns a config and a function that makes its model, with distinct norms and biases."""
    config = dataclasses.replace(BASE, **fields, **more)

    def make():
        model = drawn(lambda: Transformer(config, rngs=nnx.Rngs(0)))
        # Norms around one and larger kernels, so that attention prefers some positions to others.
        larger = lambda path, x: jax.device_put(1.5 * np.asarray(x) + (path[-1] == "scale"))
        nnx.update(model, nnx.map_state(larger, nnx.state(model, nnx.Param)))
        return model

    return config, make


@nnx.jit
def whole(model, tokens):
    return model(tokens)


class Plain:
    """Computes the model in float64, head by head."""

    def __init__(self, config, weights):
        self.config, self.w = config, {path: np.float64(x) for path, x in weights.items()}

    def norm(self, x, name):
        if f"{name}/scale" not in self.w:
            return x
        scale = self.w[f"{name}/scale"] + (self.config.norm == "rms_plus_one")
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.norm_eps) * scale

    def linear(self, x, name):
        return x @ self.w[f"{name}/kernel"] + self.w.get(f"{name}/bias", 0)

    def turn(self, x, window):
        config, turned = self.config, int(x.shape[-1] * self.config.rotary_fraction)
        local = window > 0 and config.local_rope_theta
        theta, pairs = local or config.rope_theta, []
        for i in range(turned // 2):
            frequency = theta ** (-2 * i / turned)
            frequency = frequency if local else slowed(frequency, i, turned // 2, config)
            pairs.append(np.arange(x.shape[1])[:, None] * frequency)
        angle, scaling = np.concatenate(pairs, 1), config.rope_scaling
        is_warm = scaling is not None and scaling.kind == "yarn" and not local
        warm = 0.1 * math.log(4.0) + 1 if is_warm else 1.0
        a, b, rest = x[..., : turned // 2], x[..., turned // 2 : turned], x[..., turned:]
        cos, sin = warm * np.cos(angle), warm * np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def scores(self, query, key, window):
        config, length = self.config, query.shape[1]
        scores = self.turn(query, window) @ self.turn(key, window).swapaxes(1, 2)
        scores = capped(scores * (config.attention_scale or 8**-0.5), config.attention_softcap)
        distance = np.arange(length)[:, None] - np.arange(length)
        hidden = (distance < 0) | ((distance >= window) if window else False)
        return np.where(hidden, -np.inf, scores)

    def attention(self, x, at, window):
        query, key, value = (self.linear(x, f"{at}/{name}") for name in "qkv")
        by_head = self.config.qk_norm == "head"
        if not by_head:
            query, key = self.norm(query, f"{at}/q_norm"), self.norm(key, f"{at}/k_norm")
        mixed = []
        for head in range(4):
            parts = ((query, head), (key, head // 2), (value, head // 2))
            q, k, v = (array[..., i * 8 : (i + 1) * 8] for array, i in parts)
            if by_head:
                q, k = self.norm(q, f"{at}/q_norm"), self.norm(k, f"{at}/k_norm")
            scores = self.scores(q, k, window)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(shares / shares.sum(-1, keepdims=True) @ v)
        return self.linear(np.concatenate(mixed, -1), f"{at}/out")

    def fed(self, x, at):
        gate, up = (self.linear(x, f"{at}/{name}") for name in ("gate", "up"))
        if self.config.activation == "silu":
            return self.linear(gate / (1 + np.exp(-gate)) * up, f"{at}/down")
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        return self.linear(0.5 * gate * (1 + np.tanh(inner)) * up, f"{at}/down")

    def __call__(self, tokens):
        config, table = self.config, self.w["token_embedding/embedding"]
        x = table[tokens] * config.embedding_scale
        for layer in range(config.num_layers):
            at = f"blocks/{layer}"
            window = config.windows[layer % len(config.windows)] if config.windows else 0
            mixed = self.attention(self.norm(x, f"{at}/attention_norm"), f"{at}/attention", window)
            x = x + self.norm(mixed, f"{at}/attention_after_norm")
            fed = self.fed(self.norm(x, f"{at}/mlp_norm"), f"{at}/mlp")
            x = x + self.norm(fed, f"{at}/mlp_after_norm")
        head = table.T if config.tied_head else self.w["lm_head/kernel"]
        return capped(self.norm(x, "final_norm") @ head, config.logit_softcap)


def capped(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def slowed(frequency, i, half, config):
    """Scales one frequency according to the scaling."""
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    if scaling.kind == "llama3":
        wave = 2 * math.pi / frequency
        if wave < scaling.original_length / scaling.high:
            return frequency
        if wave > scaling.original_length / scaling.low:
            return frequency / scaling.factor
        smooth = scaling.original_length / wave - scaling.low
        smooth /= scaling.high - scaling.low
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency
    ends = []
    for turns in (scaling.high, scaling.low):
        distance = math.log(scaling.original_length / (turns * 2 * math.pi))
        ends.append(2 * half * distance / (2 * math.log(config.rope_theta)))
    first, last = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), 2 * half - 1)
    slow = min(max((i - first) / ((last - first) or 0.001), 0), 1)
    return slow * frequency / scaling.factor + (1 - slow) * frequency


@pytest.mark.sample("gemma 3", "olmo 2", "mistral", "llama 3", "yarn and windows")
@pytest.mark.parametrize("row", ROWS)
def test_logits_are_those_of_a_plain_model(row):
    # Two layers, or as many as have different windows.
    config, make = made(ROWS[row], num_layers=max(2, len(ROWS[row].get("windows", ()))))
    model = make()
    weights = dict(leaves_with_paths(nnx.to_pure_dict(nnx.state(model, nnx.Param))))
    assert num_params(config) == sum(leaf.size for leaf in weights.values())
    want = Plain(config, weights)(TOKENS)
    np.testing.assert_allclose(whole(model, TOKENS), want, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.sample("gemma 3-stacked", "mistral-listed")
@pytest.mark.parametrize("scan_layers", [False, True], ids=["listed", "stacked"])
@pytest.mark.parametrize("row", ["gemma 3", "mistral", "yarn and windows"])
def test_a_token_at_a_time_is_the_same(row, scan_layers):
    _, make = made(ROWS[row], scan_layers=scan_layers)
    model = make()
    cache = model.start_cache(jnp.zeros(8, jnp.int32), 16)
    decode = nnx.jit(lambda model, tokens, cache: model.decode(tokens, cache))
    out, cache = decode(model, TOKENS[:, :6], cache)
    for t in range(6, 9):
        out, cache = decode(model, TOKENS[:, t : t + 1], cache)
    np.testing.assert_allclose(out, whole(model, TOKENS[:, :9])[:, -1], rtol=1e-4, atol=1e-4)


MESHES = {
    "fsdp": ("fsdp=2", lambda model: fsdp(min_elements=1)),
    "tp": ("tp=2", lambda model: tensor_parallel(suggest_plan(model, jnp.zeros((2, 8), int)))),
    "pp": ("pp=2", lambda model: pipelined(2, 2)),
    "ulysses": ("dp=2,cp=2", lambda model: compose(ddp(), context_parallel("ulysses"))),
}


# With a small eps a norm of small outputs multiplies rounding: with weights that differ by 1e-7 the
# third loss of one device itself is another by 4e-4.
STEADY = {"norm_eps": 0.1}


def layers_of(row, mesh):
    """As many as have different windows; a stage has one layer, or two if windows alternate."""
    windows = len(ROWS[row].get("windows", ()))
    if mesh != "pp":
        return max(1, windows)
    return 4 if windows > 2 else 2


@functools.cache
def on_one_device(row, scan_layers, num_layers):
    _, make = made(ROWS[row], scan_layers=scan_layers, num_layers=num_layers, **STEADY)
    mean = lambda model, batch: next_token_loss(model, batch).mean
    return trained(make(), optax.sgd(0.1), mean, [{"tokens": TOKENS}] * 3)


@pytest.mark.sample("stacked-tp-olmo 2")
@pytest.mark.parametrize("row", ["gemma 2", "gemma 3", "olmo 2", "mistral"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("scan_layers", [False, True], ids=["listed", "stacked"])
def test_every_strategy_is_one_device(row, mesh, scan_layers, make_world):
    num_layers = layers_of(row, mesh)
    _, make = made(ROWS[row], scan_layers=scan_layers, num_layers=num_layers, **STEADY)
    axes, strategy = MESHES[mesh]
    world = make_world(axes)
    model = make()
    step = build_train_step(model, optax.sgd(0.1), next_token_loss, strategy(model), world)
    state, losses = step.init(), []
    for _ in range(3):
        state, metrics = step(state, {"tokens": TOKENS})
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, on_one_device(row, scan_layers, num_layers), rtol=2e-5)


def test_windows_are_data_where_they_are_shorter_than_the_sequence():
    def kept(**fields):
        config = dataclasses.replace(BASE, **fields)
        # In one program, because the initial weights are not asked for.
        return nnx.jit(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(0)), LayerWindow))()

    assert [int(x) for x in jax.tree.leaves(kept(windows=(4, 0)))] == [4, 0, 4, 0]
    assert jax.tree.leaves(kept(windows=(4, 0), scan_layers=True))[0].tolist() == [4, 0, 4, 0]
    assert not jax.tree.leaves(kept(windows=(32, 0)))
    assert not jax.tree.leaves(kept(windows=(32, 0), attention="cudnn"))


def test_a_ring_knows_no_windows(make_world):
    _, make = made(ROWS["mistral"])
    with pytest.raises(UnsupportedError, match=r"has a window or caps .* context_parallel\('uly"):
        build_train_step(make(), optax.sgd(0.1), next_token_loss,
                         compose(ddp(), context_parallel()), make_world("dp=1,cp=2"))  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"windows": (-1,)}, r"windows=\(-1,\) must be 0 or more each; 0 sees all"),
        ({"windows": (4,), "attention": "cudnn"}, "set attention='auto', or lower max_length to"),
        ({"attention_softcap": 1.0, "attention": "flash"}, "attention_softcap=1.0: set"),
        (
            {"windows": (4,), "max_length": 4, "local_rope_theta": 1e3, "attention": "flash"},
            "got local_rope_theta=1000.0: set attention='auto', or leave local_rope_theta out.$",
        ),
        ({"logit_softcap": 1.0, "logits": "chunked"}, "needs whole logits"),
        ({"local_rope_theta": 10.0}, "no layer has one: set windows, or leave it out"),
        ({"rotary_fraction": 0.4}, "of heads of size 8 must be an even number of features"),
        ({"positions": "learned", "rotary_fraction": 0.5}, "or set positions='rotary'"),
        ({"bias": True, "qkv_bias": True}, "leave one of them out"),
        ({"norms": "below"}, "norms='below' is not a placement of norms"),
        ({"qk_norm": "heads"}, "is not a norm of queries and keys. Did you mean 'head'"),
        ({"rope_scaling": RopeScaling("ntk")}, "rope_scaling.kind='ntk' is not a kind of scaling"),
        ({"rope_scaling": RopeScaling(low=4.0)}, "low=4.0 must be below rope_scaling.high=4.0"),
        ({"rope_scaling": RopeScaling(attention_factor=2.0)}, "is an option of kind 'yarn'"),
        ({"attention_scale": 0.0}, "attention_scale=0.0 must be above 0"),
    ],
    ids=range(15),
)  # fmt: skip
def test_parts_that_do_not_go_together(fields, text):
    with pytest.raises(ConfigError, match=text):
        dataclasses.replace(BASE, **fields).validate()
