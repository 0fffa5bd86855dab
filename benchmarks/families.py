"""Families of decoders compared with transformers: loading, logits, training, export, adapters.

    pip install -e '.[foreign]'
    python -m benchmarks.families             # the table, a row for each family
    python -m benchmarks.families gemma2 phi3

Each family is a tiny random snapshot of its torch model. A figure is the largest difference from
what torch gives for the same tokens, relative where numbers are above 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optax
import peft
import torch
import transformers
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import World
from axon_dist.models import Transformer, next_token_loss
from axon_dist.nn import lora
from axon_dist.parallel import Strategy, compose, fsdp, suggest_plan, tensor_parallel
from axon_dist.step import build_train_step
from axon_dist.weights import hub_config, load_weights, save_adapters, save_weights

TOKENS = np.random.default_rng(0).integers(0, 96, (4, 25))
STEPS = 5
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


@dataclasses.dataclass(frozen=True)
class Row:
    """A model to compare.

    Args:
        format: its key of `FORMATS`.
        kind: of the classes of transformers.
        changes: to `SIZES`.
        architecture: the class of the model, where it is not named after the kind.
    """

    format: str
    kind: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    architecture: str = ""

    def publish(self, folder: pathlib.Path) -> Any:
        """Writes a snapshot and returns the torch model that it is of."""
        config = getattr(transformers, f"{self.kind}Config")(**{**SIZES, **self.changes})
        torch.manual_seed(0)
        name = self.architecture or f"{self.kind}ForCausalLM"
        model = getattr(transformers, name)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Fresh norms and biases are all equal, and fresh kernels small.
                parameter.add_(0.1 * torch.randn(parameter.shape))
        model.save_pretrained(folder)
        return model


ROWS: Mapping[str, Row] = {
    "llama": Row("hf-llama", "Llama", {"tie_word_embeddings": True}),
    "llama 3.1": Row("hf-llama", "Llama", {"rope_scaling": LLAMA3}),
    "llama biases": Row("hf-llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": Row(
        "hf-llama", "Llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    ),
    "mistral": Row("hf-mistral", "Mistral", WINDOW),
    "mistral whole": Row("hf-mistral", "Mistral", {"sliding_window": None}),
    "qwen2": Row("hf-qwen2", "Qwen2", {"rope_scaling": YARN}),
    "qwen2 yarn, whole": Row("hf-qwen2", "Qwen2", {"rope_scaling": {**YARN, "truncate": False}}),
    "qwen2 windows": Row("hf-qwen2", "Qwen2", QWEN_WINDOWS),
    "qwen3": Row("hf-qwen3", "Qwen3"),
    "gemma2": Row(
        "hf-gemma2",
        "Gemma2",
        {**WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": Row(
        "hf-gemma3", "Gemma3Text", {**WINDOW, "sliding_window_pattern": 3}, "Gemma3ForCausalLM"
    ),
    "phi3": Row("hf-phi3", "Phi3", {"partial_rotary_factor": 0.5}),
    "olmo2": Row("hf-olmo2", "Olmo2"),
    "mixtral": Row("hf-mixtral", "Mixtral", {**EXPERTS, "num_local_experts": 4}),
    "qwen3-moe": Row(
        "hf-qwen3-moe",
        "Qwen3Moe",
        {
            **EXPERTS,
            "num_experts": 4,
            "norm_topk_prob": False,
            "moe_intermediate_size": 20,
        },
    ),
}
MESHES: Mapping[str, tuple[str, Callable[[nnx.Module], Strategy]]] = {
    "fsdp": ("fsdp=2", lambda model: fsdp(min_elements=1)),
    "fsdp x tp": (
        "fsdp=2,tp=2",
        lambda model: compose(
            fsdp(min_elements=1),
            tensor_parallel(suggest_plan(model, np.zeros((2, 8), np.int32))),
        ),
    ),
}


def factory(config: Any) -> Callable[[], Transformer]:
    """Makes models of a config."""
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


def logits_of(model: Any) -> np.ndarray:
    """The output of a torch model for `TOKENS`."""
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.float().numpy()


def differ(ours: Any, theirs: Any) -> float:
    """The largest difference, relative where numbers are above 1."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float((np.abs(ours - theirs) / np.maximum(1, np.abs(theirs))).max())


def train(model: Any) -> list[float]:
    """Losses of AdamW in torch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    tokens, losses = torch.tensor(TOKENS), []
    for _ in range(STEPS):
        logits = model(tokens[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def loaded(name: str, folder: pathlib.Path, scan_layers: bool = False) -> nnx.Module:
    """Our model with the weights of a snapshot."""
    config = hub_config(folder, scan_layers=scan_layers)
    return load_weights(factory(config), folder, ROWS[name].format)


def exported(name: str, model: nnx.Module, folder: pathlib.Path) -> Any:
    """The torch model that transformers loads from what we write."""
    save_weights(model, folder, ROWS[name].format)
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, attn_implementation="eager").float()


def steps(
    name: str, mesh: str, folder: pathlib.Path, world: Callable[[str], World]
) -> tuple[list[float], np.ndarray]:
    """Losses of AdamW on a mesh, and the logits behind it."""
    make = factory(hub_config(folder))
    axes, strategy = MESHES[mesh]
    tx = optax.adamw(1e-3, weight_decay=0.1)
    step = build_train_step(make, tx, next_token_loss, strategy(make()), world(axes))
    state, losses = load_weights(step, folder, ROWS[name].format), []
    for _ in range(STEPS):
        state, metrics = step(state, {"tokens": TOKENS})
        losses.append(float(metrics["loss"]))
    return losses, np.asarray(step.merge(state)(TOKENS))


ADAPTED = r"attention/out|mlp/down"
"""Layers that every family has for themselves: Phi-3 fuses the others."""


def adapters(
    name: str, snapshot: pathlib.Path, folder: pathlib.Path, theirs: Any
) -> tuple[float, float]:
    """How far adapters are off that peft wrote and we read, and that we wrote and peft reads."""
    targets = (
        ["o_proj"] if ROWS[name].changes.get("num_experts_per_tok") else ["o_proj", "down_proj"]
    )
    options = {"r": 3, "lora_alpha": 5, "target_modules": targets, "init_lora_weights": False}
    torch.manual_seed(1)
    made = peft.get_peft_model(theirs, peft.LoraConfig(**options))
    made.save_pretrained(folder / "theirs")
    want = logits_of(made)
    config = hub_config(snapshot)
    paths = tuple({"o_proj": "attention/out", "down_proj": "mlp/down"}[t] for t in targets)

    def make():
        return lora(Transformer(config, rngs=nnx.Rngs(0)), 3, paths, rngs=nnx.Rngs(1))

    model = load_weights(make, [snapshot, folder / "theirs"], ROWS[name].format)
    read = differ(model(TOKENS), want)
    save_adapters(model, folder / "ours", ROWS[name].format)
    auto = transformers.AutoModelForCausalLM
    base = auto.from_pretrained(snapshot, attn_implementation="eager").float()
    again = peft.PeftModel.from_pretrained(base, folder / "ours")
    return read, differ(logits_of(again), want)


def measured(name: str) -> dict[str, float]:
    """The figures of a family."""
    with tempfile.TemporaryDirectory() as folder:
        there = pathlib.Path(folder)
        theirs = ROWS[name].publish(there / "in")
        want = logits_of(theirs)
        model = loaded(name, there / "in")
        found = {"logits": differ(model(TOKENS), want)}
        found["export"] = differ(logits_of(exported(name, model, there / "out")), want)
        found["adapter in"], found["adapter out"] = adapters(
            name, there / "in", there / "peft", theirs
        )
        runs = {mesh: steps(name, mesh, there / "in", _world) for mesh in MESHES}
        auto = transformers.AutoModelForCausalLM
        fresh = auto.from_pretrained(there / "in", attn_implementation="eager").float()
        losses, behind = train(fresh), logits_of(fresh)
        for mesh, (ours, logits) in runs.items():
            found[f"5 steps, {mesh}"] = differ(ours, losses)
            found[f"logits behind, {mesh}"] = differ(logits, behind)
        return found


def _world(axes: str) -> World:
    return World.emulate(math.prod(int(part.partition("=")[2]) for part in axes.split(",")), axes)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("families", nargs="*", help=", ".join(ROWS))
    table = Table()
    World.emulate(4)
    for name in parser.parse_args().families or ROWS:
        found = measured(name)
        if not table.columns:
            for column in ("family", *found):
                table.add_column(column)
        table.add_row(name, *(f"{figure:.1e}" for figure in found.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
