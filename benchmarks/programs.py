"""Digests of lowered steps: whether a commit changed what runs, or only how it is written.

    python -m benchmarks.programs           # compares every cell with the pins
    python -m benchmarks.programs --write   # pins what is there now, and names what changed

A cell is a model, a mesh, a strategy and options. Its step is lowered to StableHLO for emulated
devices, and the text hashed without what is only a name: symbols, locations, argument labels. Pins
belong to a minor version of JAX, which may lower the same step in another way.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from axon_dist import World, build_train_step, compose, ddp, diloco, fsdp, local_sgd, lora, zero
from axon_dist.models import (
    ExpertConfig,
    Transformer,
    TransformerConfig,
    next_token_loss,
)
from axon_dist.nn import ActivationCheckpointing
from axon_dist.optim import muon
from axon_dist.parallel import (
    Strategy,
    context_parallel,
    expert_parallel,
    pipelined,
    suggest_plan,
    tensor_parallel,
)
from axon_dist.schedule import SCHEDULES

PINS = pathlib.Path(__file__).parents[1] / "tests" / "repo" / "program_digests.json"
SAMPLES, WIDTH, LENGTH = 32, 16, 8
DEFAULT = 5  # every so manieth cell is in the default tests
_NAMES = re.compile(r"@[\w.$-]+")
_LABELS = re.compile(r'(jax\.result_info|jax\.arg_info|mhlo\.memory_kind_name) = "[^"]*"')


class Net(nnx.Module):
    """Four equal blocks; with statistics of the batch, or dropout, if asked."""

    def __init__(self, rngs: nnx.Rngs, norm: bool = False, dropout: float = 0.0):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs) if norm else None
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        x = self.norm(x) if self.norm else x
        return self.dropout(x) if self.dropout else x


class LinenNet(nn.Module):
    """Two layers in Linen, which have no units."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(WIDTH)(nn.relu(nn.Dense(2 * WIDTH)(x)))


def net(**options: Any) -> Callable[[], nnx.Module]:
    """A factory of `Net`."""
    return lambda: Net(nnx.Rngs(0, dropout=1), **options)


def bridged() -> nnx.Module:
    """`LinenNet` as a module of NNX."""
    return nnx.bridge.ToNNX(LinenNet(), rngs=nnx.Rngs(0)).lazy_init(jnp.ones((1, WIDTH)))


def transformer(**changes: Any) -> Callable[[], nnx.Module]:
    """A factory of a decoder with two blocks."""
    sizes = {"vocab_size": 32, "width": WIDTH, "num_layers": 2, "num_heads": 4}
    config = TransformerConfig(**{**sizes, "max_length": LENGTH, **changes})
    return lambda: Transformer(config, rngs=nnx.Rngs(0))


def adapted() -> nnx.Module:
    """`Net` with adapters beside its layers."""
    return lora(Net(nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))


def square(model: Any, batch: Any) -> jax.Array:
    """A mean over samples."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def plan() -> Strategy:
    """Tensor parallelism as it is suggested for the decoder."""
    return tensor_parallel(suggest_plan(transformer(), jnp.ones((1, LENGTH), jnp.int32)))


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step.

    Args:
        mesh: axis sizes.
        strategy: makes the strategy.
        model: makes the model.
        options: of `build_train_step`.
        optimizer: makes the optimizer.
    """

    mesh: str
    strategy: Callable[[], Strategy]
    model: Callable[[], nnx.Module] = net()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Callable[[], optax.GradientTransformation] = lambda: optax.adam(1e-3)

    def lowered(self) -> str:
        """The step as text."""
        sizes = [int(part.split("=")[1]) for part in self.mesh.split(",")]
        world = World.emulate(math.prod(sizes), self.mesh)
        tokens = isinstance(nnx.eval_shape(self.model), Transformer)
        x = jax.ShapeDtypeStruct((SAMPLES, WIDTH), jnp.float32)
        ids = jax.ShapeDtypeStruct((SAMPLES, LENGTH + 1), jnp.int32)
        batch = {"tokens": ids} if tokens else {"x": x, "y": x}
        loss = next_token_loss if tokens else square
        step = build_train_step(
            self.model, self.optimizer(), loss, self.strategy(), world, **self.options
        )
        return step.lower(batch).as_text()


def digest(text: str) -> str:
    """The hash of a lowered program without its names."""
    numbers: dict[str, str] = {}
    unnamed = _NAMES.sub(lambda m: numbers.setdefault(m.group(), f"@{len(numbers)}"), text)
    return hashlib.sha256(_LABELS.sub("", unnamed).encode()).hexdigest()[:16]


def _cells() -> dict[str, Cell]:
    moe = transformer(experts=ExpertConfig(count=4, per_token=2))
    remat = {"remat": ActivationCheckpointing()}
    cells = {
        "ddp": Cell("dp=4", ddp),
        "ddp K=4": Cell("dp=4", ddp, options={"accumulate": 4}),
        "ddp buckets": Cell("dp=4", lambda: ddp(bucket_capacity=100)),
        "ddp overlapped": Cell("dp=4", lambda: ddp(sync="overlapped")),
        "ddp per microbatch": Cell(
            "dp=4", lambda: ddp(per="microbatch"), options={"accumulate": 2}
        ),
        "ddp linen": Cell("dp=4", ddp, bridged),
        "ddp BatchNorm": Cell("dp=4", ddp, net(norm=True)),
        "ddp dropout": Cell("dp=4", ddp, net(dropout=0.1)),
        "ddp dropout K=2": Cell("dp=4", ddp, net(dropout=0.1), {"accumulate": 2}),
        "ddp clip ema": Cell("dp=4", ddp, options={"clip_norm": 1.0, "ema": 0.9}),
        "ddp nonfinite": Cell("dp=4", ddp, options={"nonfinite": "skip"}),
        "ddp fp16": Cell("dp=4", ddp, options={"precision": "fp16"}),
        "ddp bf16": Cell("dp=4", ddp, options={"precision": "bf16"}),
        "zero1": Cell("dp=4", lambda: zero(1)),
        "zero1 K=2": Cell("dp=4", lambda: zero(1), options={"accumulate": 2}),
        "zero2 K=2": Cell("dp=4", lambda: zero(2), options={"accumulate": 2}),
        "zero3": Cell("dp=4", lambda: zero(3)),
        "shard_grad_op": Cell("fsdp=4", lambda: fsdp("shard_grad_op")),
        "full_shard": Cell("fsdp=4", fsdp),
        "full_shard K=4": Cell("fsdp=4", fsdp, options={"accumulate": 4}),
        "full_shard remat": Cell("fsdp=4", fsdp, options=remat),
        "full_shard bf16": Cell("fsdp=4", fsdp, options={"precision": "bf16"}),
        "full_shard loop": Cell("fsdp=4", fsdp, options={"unroll": 1}),
        "full_shard decoder": Cell("fsdp=4", fsdp, transformer()),
        "full_shard decoder fp8": Cell("fsdp=4", fsdp, transformer(), {"precision": "fp8"}),
        "full_shard LoRA int8": Cell(
            "fsdp=4", fsdp, adapted, {"trainable": nnx.LoRAParam, "frozen_dtype": "int8"}
        ),
        "full_shard trainable": Cell("fsdp=4", fsdp, options={"trainable": "layers/3"}),
        "full_shard muon": Cell("fsdp=4", fsdp, optimizer=lambda: muon(0.1)),
        "full_shard adafactor": Cell("fsdp=4", fsdp, optimizer=lambda: optax.adafactor(0.1)),
        "hybrid_shard": Cell("dp=2,fsdp=2", lambda: fsdp("hybrid_shard", ("dp", "fsdp"))),
        "tensor": Cell("tp=4", plan, transformer()),
        "tensor sequence": Cell("tp=4", lambda: _tensor(sequence=True), transformer()),
        "tensor rings": Cell("tp=4", lambda: _tensor(sequence=True, rings=True), transformer()),
        "fsdp + tensor": Cell("fsdp=2,tp=2", lambda: compose(fsdp(), plan()), transformer()),
        "ddp + tensor K=2": Cell(
            "dp=2,tp=2", lambda: compose(ddp(), plan()), transformer(), {"accumulate": 2}
        ),
        "context ring": Cell("cp=4", lambda: context_parallel("ring"), transformer()),
        "context ulysses": Cell("cp=4", lambda: context_parallel("ulysses"), transformer()),
        "fsdp + context": Cell(
            "fsdp=2,cp=2",
            lambda: compose(fsdp(axes=("fsdp", "cp")), context_parallel()),
            transformer(),
        ),
        "expert": Cell("ep=4", expert_parallel, moe),
        "ddp + expert capacity": Cell(
            "dp=2,ep=2", lambda: compose(ddp(), expert_parallel(capacity=1.25)), moe
        ),
        "diloco": Cell("nodes=2,dp=2", lambda: compose(diloco("nodes", every=2), ddp())),
        "local_sgd": Cell("nodes=2,fsdp=2", lambda: compose(local_sgd("nodes", every=2), fsdp())),
        "chunked loss": Cell("fsdp=4", fsdp, transformer(logits="chunked")),
        "1f1b + ddp": Cell("pp=2,dp=2", lambda: compose(pipelined(2, 4, "1f1b"), ddp())),
        "1f1b + fsdp": Cell("pp=2,fsdp=2", lambda: compose(pipelined(2, 4, "1f1b"), fsdp())),
        "pipeline tensor": Cell(
            "pp=2,tp=2", lambda: compose(pipelined(2, 4), plan()), transformer()
        ),
        "pipeline vocabulary": Cell(
            "pp=2",
            lambda: pipelined(2, 4, split_vocabulary=True),
            transformer(logits="chunked", tied_head=True),
        ),
        "pipeline dropout": Cell("pp=2", lambda: pipelined(2, 4), net(dropout=0.1)),
        "pipeline LAMB": Cell("pp=2", lambda: pipelined(2, 4), optimizer=lambda: optax.lamb(0.1)),
        "pipeline muon": Cell("pp=2", lambda: pipelined(2, 4), optimizer=lambda: muon(0.1)),
    }
    for name, row in sorted(SCHEDULES.items()):
        chunks = {} if not row.any_chunks else {"chunks": 2}
        cells[f"pipeline {name}"] = Cell("pp=2", _pipeline(name, **chunks))
    return cells


def _tensor(**options: Any) -> Strategy:
    return tensor_parallel(suggest_plan(transformer(), jnp.ones((1, LENGTH), jnp.int32)), **options)


def _pipeline(name: str, **options: Any) -> Callable[[], Strategy]:
    return lambda: pipelined(2, 4, name, **options)


CELLS: Mapping[str, Cell] = MappingProxyType(_cells())


def version() -> str:
    """The minor version of JAX that pins belong to."""
    return ".".join(jax.__version__.split(".")[:2])


def pinned() -> dict[str, str]:
    """The pins of this version of JAX; empty where there are none."""
    return json.loads(PINS.read_text()).get(version(), {}) if PINS.exists() else {}


def main() -> None:
    """Prints which cells differ from their pins."""
    parser = argparse.ArgumentParser(prog="benchmarks.programs", description=__doc__)
    parser.add_argument("--write", action="store_true", help="pin what is there now")
    before, after = pinned(), {}
    options = parser.parse_args()
    for name, cell in CELLS.items():
        after[name] = digest(cell.lowered())
        if after[name] != before.get(name):
            print(f"{name}: {before.get(name, 'not pinned')} -> {after[name]}", flush=True)
    same = sum(after[name] == before.get(name) for name in after)
    print(f"{same} of {len(after)} programs as pinned with JAX {version()}")
    if options.write:
        every = json.loads(PINS.read_text()) if PINS.exists() else {}
        every[version()] = dict(sorted(after.items()))
        PINS.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
