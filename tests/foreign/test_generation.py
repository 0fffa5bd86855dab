"""A model that is exported here continues a text in transformers token by token as it does here."""

import numpy as np
import pytest

from axon_dist.models import generate
from axon_dist.weights import hub_config, load_weights, save_weights

families = pytest.importorskip("benchmarks.families")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 20
PROMPTS = ([5, 17, 3, 88, 41, 9], [60], [2, 2, 71])
SIZES = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def llama(folder):
    return families.ROWS["llama"].publish(folder)


def qwen2(folder):
    return families.ROWS["qwen2 windows"].publish(folder)


def gpt2(folder):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Fresh weights are so small that one token wins everywhere.
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


FAMILIES = {"hf-llama": llama, "hf-gpt2": gpt2, "hf-qwen2": qwen2}


@pytest.mark.parametrize("format", FAMILIES)
def test_twenty_tokens_are_those_of_transformers(format, tmp_path):
    FAMILIES[format](tmp_path / "in")
    ours = load_weights(families.factory(hub_config(tmp_path / "in")), tmp_path / "in", format)
    save_weights(ours, tmp_path / "out", format)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    rows = generate(ours, PROMPTS, NEW, temperature=0).rows
    # A row that repeats one token would hide a wrong position or a wrong cache.
    assert max(len(set(row)) for row in rows) > 3
    for prompt, row in zip(PROMPTS, rows, strict=True):
        done = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
        assert np.array_equal(done[0, len(prompt) :], row), (prompt, row, done)
