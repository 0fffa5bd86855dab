"""Families of decoders as transformers makes them: the same logits, the same training, and back.

Each family is a tiny random snapshot of the torch model there. Needs the extra `foreign`.
"""

import dataclasses

import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist.models import Transformer, next_token_loss
from axon_dist.parallel import compose, fsdp, suggest_plan, tensor_parallel
from axon_dist.step import build_train_step
from axon_dist.weights import hub_config, load_weights, save_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = np.random.default_rng(0).integers(0, 96, (4, 25))
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"sliding_window": 7}
QWEN_WINDOWS = {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}
EXPERTS = {"num_experts_per_tok": 2}
# By name: the format, the class of its config, and what differs from SIZES.
ROWS = {
    "llama": ("hf-llama", "Llama", {"tie_word_embeddings": True}),
    "llama 3.1": ("hf-llama", "Llama", {"rope_scaling": LLAMA3}),
    "llama biases": ("hf-llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("hf-llama", "Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "mistral": ("hf-mistral", "Mistral", WINDOW),
    "mistral whole": ("hf-mistral", "Mistral", {"sliding_window": None}),
    "qwen2": ("hf-qwen2", "Qwen2", {"rope_scaling": YARN}),
    "qwen2 windows": ("hf-qwen2", "Qwen2", QWEN_WINDOWS),
    "qwen3": ("hf-qwen3", "Qwen3", {}),
    "gemma2": ("hf-gemma2", "Gemma2", {**WINDOW, "query_pre_attn_scalar": 20,
                                       "attn_logit_softcapping": 2.0}),
    "gemma3": ("hf-gemma3", "Gemma3Text", {**WINDOW, "sliding_window_pattern": 3}),
    "phi3": ("hf-phi3", "Phi3", {"partial_rotary_factor": 0.5}),
    "olmo2": ("hf-olmo2", "Olmo2", {}),
    "mixtral": ("hf-mixtral", "Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": ("hf-qwen3-moe", "Qwen3Moe", {**EXPERTS, "num_experts": 4, "norm_topk_prob": False,
                                               "moe_intermediate_size": 20}),
}  # fmt: skip
ARCHITECTURES = {"Gemma3Text": "Gemma3ForCausalLM"}


@pytest.fixture
def published(request, tmp_path):
    """A format, a snapshot, and the torch model that it is of."""
    name, kind, changes = ROWS[request.param]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, ARCHITECTURES.get(kind, f"{kind}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh norms and biases are all alike, and fresh kernels small.
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(tmp_path / "in")
    return name, tmp_path / "in", model


def factory(config):
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


def logits_of(model, tokens=TOKENS):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def train(model, steps=5):
    """Losses of AdamW in torch, and the logits behind it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    tokens, losses = torch.tensor(TOKENS), []
    for _ in range(steps):
        logits = model(tokens[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, logits_of(model)


@pytest.mark.parametrize("published", ROWS, indirect=True)
@pytest.mark.parametrize("scan_layers", [False, True], ids=["listed", "stacked"])
def test_logits_and_the_way_back(published, scan_layers, tmp_path):
    name, folder, theirs = published
    config = hub_config(folder, scan_layers=scan_layers)
    model = load_weights(factory(config), folder, name)
    want = logits_of(theirs)
    assert np.abs(want).max() > 0.3
    np.testing.assert_allclose(model(TOKENS), want, atol=1e-4, rtol=1e-4)
    save_weights(model, tmp_path / "out", name)
    assert dataclasses.replace(hub_config(tmp_path / "out"), scan_layers=scan_layers) == (
        dataclasses.replace(config, scan_layers=scan_layers)
    )
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert type(again) is type(theirs)
    np.testing.assert_allclose(logits_of(again.float()), want, atol=1e-5, rtol=1e-5)


MESHES = {
    "fsdp": ("fsdp=2", lambda model: fsdp(min_elements=1)),
    "fsdp x tp": (
        "fsdp=2,tp=2",
        lambda model: compose(
            fsdp(min_elements=1),
            tensor_parallel(suggest_plan(model, np.zeros((2, 8), np.int32))),
        ),
    ),
}


@pytest.mark.parametrize("published", ROWS, indirect=True)
@pytest.mark.parametrize("mesh", MESHES)
def test_five_steps_are_those_of_torch(published, mesh, make_world):
    name, folder, theirs = published
    make = factory(hub_config(folder))
    axes, strategy = MESHES[mesh]
    tx = optax.adamw(1e-3, weight_decay=0.1)
    step = build_train_step(make, tx, next_token_loss, strategy(make()), make_world(axes))
    state, losses = load_weights(step, folder, name), []
    for _ in range(5):
        state, metrics = step(state, {"tokens": TOKENS})
        losses.append(float(metrics["loss"]))
    wanted, logits = train(theirs)
    np.testing.assert_allclose(losses, wanted, atol=1e-4)
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(step.merge(state)(TOKENS), logits, atol=1e-3)
