"""Hub weights, loaded and saved: the model computes the same, and no bit changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from axon_dist.core.errors import ConfigError
from axon_dist.core.tree import leaves_with_paths
from axon_dist.models import Transformer, next_token_loss
from axon_dist.nn import lora
from axon_dist.parallel import compose, ddp, fsdp, pipelined, suggest_plan, tensor_parallel
from axon_dist.step import build_train_step
from axon_dist.weights import hub_config, load_weights, save_weights

from . import hub

TOKENS = np.random.default_rng(1).integers(0, 48, (2, 9))
FAMILIES = {
    "hf-llama": (hub.LLAMA, hub.llama_tensors, hub.llama_forward),
    "hf-gpt2": (hub.GPT2, hub.gpt2_tensors, hub.gpt2_forward),
}


def factory(config, seed=7):
    return lambda: Transformer(config, rngs=nnx.Rngs(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_published_model(family, tmp_path):
    sizes, tensors, forward = FAMILIES[family]
    hub.write(tmp_path, sizes, tensors())
    model = load_weights(factory(hub_config(tmp_path)), tmp_path, family)
    want = forward(tensors(), TOKENS)
    assert np.abs(want).max() > 3
    got = nnx.jit(lambda model: model(TOKENS))(model)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


MESHES = {
    "one device": ("dp=1", lambda model: ddp()),
    "fsdp=2": ("fsdp=2", lambda model: fsdp(min_elements=1)),
    "fsdp=4 x tp=2": (
        "fsdp=4,tp=2",
        lambda model: compose(
            fsdp(min_elements=1), tensor_parallel(suggest_plan(model, jnp.zeros((2, 8), int)))
        ),
    ),
    "pp=2": ("pp=2", lambda model: pipelined(2, 2)),
}


@pytest.mark.full
@pytest.mark.sample("hf-llama-fsdp=4 x tp=2-listed", "hf-gpt2-pp=2-stacked")
@pytest.mark.parametrize("scan_layers", [False, True], ids=["listed", "stacked"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_in_and_out_again_is_the_same_bits(family, mesh, scan_layers, make_world, tmp_path):
    sizes, tensors, _ = FAMILIES[family]
    folder = hub.write(tmp_path / "in", sizes, tensors())
    axes, strategy = MESHES[mesh]
    make = factory(hub_config(folder, scan_layers=scan_layers))
    step = build_train_step(
        make, optax.adam(1e-3), next_token_loss, strategy(make()), make_world(axes)
    )
    state = load_weights(step, folder, family)
    places = jax.tree.map(lambda x: x.sharding, state)
    assert jax.tree.all(jax.tree.map(lambda x, s, y: x.is_equivalent_to(s, y.ndim),
                                     places, step.state_shardings, state))  # fmt: skip
    is_split = any(not x.is_fully_replicated for x in jax.tree.leaves(state.params))
    assert (int(state.step), is_split) == (0, mesh != "one device")
    if not scan_layers:
        plain = load_weights(make, folder, family)
        equal = lambda x, y: np.testing.assert_array_equal(x, y)
        jax.tree.map(equal, nnx.to_pure_dict(nnx.state(step.merge(state))),
                     nnx.to_pure_dict(nnx.state(plain)))  # fmt: skip
    save_weights(state, tmp_path / "out", family, step=step)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: x.tobytes() for name, x in written.items()} == {
        name: x.tobytes() for name, x in tensors().items()
    }
    assert hub_config(tmp_path / "out", scan_layers=scan_layers) == dataclasses.replace(
        step.model_spec.abstract.config, head_dim=hub_config(tmp_path / "out").head_dim,
        ffn_width=hub_config(tmp_path / "out").ffn_width)  # fmt: skip


@pytest.mark.full
@pytest.mark.sample("fsdp=2-strategy0")
@pytest.mark.parametrize(
    ("axes", "strategy"), [("fsdp=2", fsdp(min_elements=1)), ("pp=2", pipelined(2, 2))]
)
def test_adapters_on_frozen_weights_of_a_hub(axes, strategy, make_world, tmp_path):
    folder = hub.write(tmp_path, hub.LLAMA, hub.llama_tensors())
    base = factory(hub_config(folder))
    make = lambda: lora(base(), 2, "attention/[qv]", rngs=nnx.Rngs(3))
    step = build_train_step(
        make, optax.sgd(0.1), next_token_loss, strategy, make_world(axes), trainable=nnx.LoRAParam
    )
    state = load_weights(step, folder, "hf-llama", keep=r".*/lora_[ab]")
    assert len(jax.tree.leaves(state.frozen)) > 0
    want = dict(step.weights(step.init()))
    want |= {path: None for path in want if "lora" not in path}
    plain = load_weights(base, folder, "hf-llama")
    for path, value in leaves_with_paths(nnx.to_pure_dict(nnx.state(plain))):
        want[path] = value
    found = step.weights(state)
    assert set(found) == set(want)
    for path, value in found.items():
        np.testing.assert_array_equal(value, want[path], err_msg=path)
    np.testing.assert_allclose(step.merge(state)(TOKENS), plain(TOKENS), rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match=r"no rule gives a name for .*lora_a"):
        save_weights(state, tmp_path / "out", "hf-llama", step=step)
    with pytest.raises(
        ConfigError, match=r"give its step, too: save_weights\(state, path, step=step\)"
    ):
        save_weights(state, tmp_path / "out", "hf-llama")
    with pytest.raises(ConfigError, match=r"the model has no array 'lm_heads'. Did you mean"):
        step.init({"lm_heads": jnp.zeros(3)})
    with pytest.raises(ConfigError, match=r"is float32\[16, 48\] in the model; got float32\[3\]"):
        step.init({"lm_head/kernel": jnp.zeros(3)})


@pytest.mark.full
def test_a_given_module_keeps_its_arrays_and_the_optimizer_starts_from_the_files(
    make_world, tmp_path
):
    folder = hub.write(tmp_path, hub.LLAMA, hub.llama_tensors())
    model = factory(hub_config(folder))()
    before = np.asarray(model.lm_head.kernel[...])
    tx = optax.contrib.schedule_free_sgd(0.1)  # its state has a copy of the parameters
    step = build_train_step(model, tx, next_token_loss, ddp(), make_world("dp=2"))
    state = load_weights(step, folder, "hf-llama", keep="lm_head/.*")
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.z, state.params)
    state, metrics = step(state, {"tokens": TOKENS})
    assert np.isfinite(float(metrics["loss"]))
    np.testing.assert_array_equal(model.lm_head.kernel[...], before)
