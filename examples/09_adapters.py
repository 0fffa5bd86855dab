"""Pretrained weights in, adapters trained on a frozen bfloat16 base, merged, and out again.

python examples/09_adapters.py
"""

import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from axon_dist import (
    FSDP,
    World,
    build_train_step,
    hub_config,
    load_weights,
    lora,
    merge_lora,
    save_weights,
)
from axon_dist.core.tree import num_bytes
from axon_dist.models import Transformer, TransformerConfig, next_token_loss

world = World.emulate(8, "fsdp=8")
folder = Path(tempfile.mkdtemp())


def snapshot() -> Path:
    """Stands in for the local snapshot of a hub's repository: config.json and safetensors."""
    config = TransformerConfig(vocab_size=64, width=32, num_layers=2, num_heads=4, max_length=32)
    save_weights(Transformer(config, rngs=nnx.Rngs(0)), folder / "base", "hf-llama")
    return folder / "base"


def batch_of(number: int) -> dict:
    """Sequences that count on in steps of their own."""
    draw = np.random.default_rng(number)
    first, stride = draw.integers(0, 64, (16, 1)), draw.integers(1, 4, (16, 1))
    return {"tokens": ((first + stride * np.arange(33)) % 64).astype(np.int32)}


def adapted(config: TransformerConfig) -> nnx.Module:
    """The model, with low-rank adapters on its queries and values."""
    return lora(Transformer(config, rngs=nnx.Rngs(1)), 8, "attention/[qv]", rngs=nnx.Rngs(2))


def main() -> None:
    """Imports, trains, compares bytes, merges and exports."""
    base = snapshot()
    config = hub_config(base)
    make = lambda: adapted(config)
    fsdp = FSDP(make, world.group("fsdp"), min_elements=64)
    step = build_train_step(
        make, optax.adam(1e-2), next_token_loss, fsdp, world,
        trainable=nnx.LoRAParam, frozen_dtype="bfloat16",
    )  # fmt: skip
    state = load_weights(step, base, "hf-llama", cast=True, keep=[r".*/lora_[ab]"])
    whole = build_train_step(make, optax.adam(1e-2), next_token_loss, fsdp, world).abstract_state
    kept = lambda state: num_bytes((state.params, state.frozen, state.opt_state)) / 1024
    print(f"between steps: {kept(state):.0f} KiB on all devices; training all: {kept(whole):.0f}")

    for number in range(60):
        state, metrics = step(state, batch_of(number))
        if number % 20 == 19:
            print(f"step {number + 1}: loss {float(metrics['loss']):.4f}")

    merged = merge_lora(step.merge(state))  # a plain model: kernel + lora_a @ lora_b
    save_weights(merged, folder / "tuned", "hf-llama", dtype="float32")
    plain = lambda: Transformer(config, rngs=nnx.Rngs(3))
    again = load_weights(plain, folder / "tuned", "hf-llama")
    tokens = batch_of(99)["tokens"][:, :-1]
    mine, theirs = (np.asarray(jax.nn.softmax(model(tokens))) for model in (merged, again))
    difference = np.abs(mine - theirs).max()
    print(f"exported and read again: probabilities differ by {float(difference):.1e} at most")


if __name__ == "__main__":
    main()
