"""The rows of `benchmarks.size`: which model, on which mesh of which devices."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from axon_dist import ActivationCheckpointing, World, build_train_step, compose
from axon_dist.models import (
    ExpertConfig,
    Transformer,
    TransformerConfig,
    next_token_loss,
    num_params,
)
from axon_dist.parallel import STRATEGIES, expert_parallel
from axon_dist.train.app import abstract_batch
from axon_dist.train.app.steps import build_step
from axon_dist.train.config import load_config

PARTS = ("layers", "devices", "experts", "models")
RECIPE = pathlib.Path(__file__).parents[1] / "configs/recipes/gpt3_175b_pp8_tp4_fsdp32.yaml"


@dataclasses.dataclass(frozen=True)
class Row:
    """One step to build and to compile.

    Args:
        part: one of `PARTS`.
        target: the machine.
        mesh: its axes; `tp` and `ep` add their strategies to `fsdp`.
        config: the model.
        length: tokens of a sequence.
        samples: sequences of a step on each rank that has samples of its own.
        recipe: overrides of the GPT-3 recipe, which is then built in place of all this.
    """

    part: str
    target: str
    mesh: str
    config: TransformerConfig
    length: int = 128
    samples: int = 1
    recipe: tuple[str, ...] | None = None

    def build(self, world: World) -> tuple[Any, Any]:
        """The step, and a batch of shapes for it."""
        if self.recipe is not None:
            config = load_config(RECIPE, [f"mesh={{{_spelled(self.mesh)}}}", *self.recipe])
            return build_step(config, world), abstract_batch(config)
        factory = lambda: Transformer(self.config, rngs=nnx.Rngs(0))
        parts = [STRATEGIES["fsdp"](factory, world)]
        if "tp" in world.spec.shape:
            parts.append(STRATEGIES["tensor"](factory, world, sequence=True))
        if "ep" in world.spec.shape:
            parts.append(expert_parallel("all_to_all", capacity=1.25))
        step = build_train_step(
            factory,
            optax.adamw(3e-4),
            next_token_loss,
            compose(*parts),
            world,
            clip_norm=1.0,
            precision="bf16",
            remat=ActivationCheckpointing(classes=("Block",)),
        )
        count = world.size // world.spec.shape.get("tp", 1) * self.samples
        return step, {"tokens": jax.ShapeDtypeStruct((count, self.length + 1), jnp.int32)}


def _spelled(mesh: str) -> str:
    return mesh.replace("=", ": ").replace(",", ", ")


def active_params(config: TransformerConfig) -> int:
    """The parameters that one token meets: of the experts those that it goes to."""
    experts = config.experts
    if experts is None:
        return num_params(config)
    kernels = (3 if config.gated else 2) * config.width * config.expert_size
    idle = experts.count - experts.per_token
    return num_params(config) - config.num_layers * idle * kernels


def model_flops(config: TransformerConfig, tokens: int, length: int) -> float:
    """Matrix operations that training needs: `6 N` a token, and those of causal attention."""
    table = config.vocab_size * config.width * (0 if config.tied_head else 1)
    attention = 6 * config.num_layers * config.num_heads * config.key_size * length
    return tokens * (6 * (active_params(config) - table) + attention)


def _narrow(layers: int, scan: bool, **more: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {"width": 64, "num_heads": 4, "ffn_width": 128, **more}
    return TransformerConfig(
        vocab_size=512, max_length=128, num_layers=layers, scan_layers=scan, **sizes
    )


def _slopes() -> Iterator[tuple[str, Row]]:
    for chip, target in (("h100", "h100:8"), ("v5p", "v5p:2x2x2")):
        for layers in (12, 24, 48, 96, 192):
            for form in ("scan", "list"):
                config = _narrow(layers, form == "scan")
                yield f"layers-{chip}-{form}-{layers}", Row("layers", target, "fsdp=8", config)
    # Wide enough for 4096 ranks to have a piece of every matrix.
    wide = _narrow(12, True, width=4096, num_heads=32, ffn_width=4096)
    wide = dataclasses.replace(wide, vocab_size=4096)
    for chip, shapes in (
        ("h100", ("1x8", "8x8", "64x8", "128x8", "512x8")),
        ("v5p", ("2x2x2", "4x4x4", "8x8x8", "8x8x16", "8x16x16", "16x16x16")),
    ):
        for shape in shapes:
            count = math.prod(map(int, shape.split("x")))
            row = Row("devices", f"{chip}:{shape}", f"fsdp={count}", wide)
            yield f"devices-{chip}-{count}", row
    for count in (8, 64, 256):
        config = _narrow(12, True, experts=ExpertConfig(count=count, per_token=2, width=64))
        yield f"experts-h100-{count}", Row("experts", "h100:8", "fsdp=1,ep=8", config)


def _models() -> Iterator[tuple[str, Row]]:
    dense = TransformerConfig.preset("llama-405b", scan_layers=True)
    gpt3 = TransformerConfig.preset("gpt3-175b", scan_layers=True, vocab_size=50_304)
    mixed = TransformerConfig(
        # The sizes of DeepSeek-V3 (arXiv:2412.19437, section 4.2) with plain attention, and with
        # experts in all of 58 layers in place of the last 58 of 61.
        vocab_size=129_280,
        width=7168,
        num_layers=58,
        num_heads=56,
        head_dim=128,
        max_length=4096,
        scan_layers=True,
        experts=ExpertConfig(count=256, per_token=8, width=2048, shared=1),
    )
    pods = {"v5p-1024": "v5p:8x8x16", "h100-1024": "h100:128x8"}
    large = {"v5p-2048": "v5p:8x16x16", "v5p-4096": "v5p:16x16x16", "h100-4096": "h100:512x8"}
    for name, target in pods.items():
        mesh = "pp=8,fsdp=32,tp=4"
        scanned = ("model.scan_layers=true",)
        yield f"gpt3-recipe-{name}", Row("models", target, mesh, gpt3, 2048, 48, recipe=scanned)
    for name, target in (pods | large).items():
        count = int(name.split("-")[1])
        tp = 8 if name.startswith("h100") else 4
        ranks = f"fsdp={count // tp},tp={tp}"
        yield f"gpt3-{name}", Row("models", target, ranks, gpt3, 2048, 4)
        yield f"405b-{name}", Row("models", target, ranks, dense, 8192, 1)
        yield (
            f"671b-experts-{name}",
            Row("models", target, f"fsdp={count // 64},ep=64", mixed, 4096),
        )


ROWS: MappingProxyType[str, Row] = MappingProxyType({**dict(_slopes()), **dict(_models())})
"""All rows by name."""
