"""The cells whose lowered programs are pinned: strategies, schedules, precisions and targets.

A cell is a small model on a small mesh with the options of one step. Nothing is compiled or run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh

from axon_dist import (
    MixedPrecision,
    Reduction,
    Strategy,
    World,
    build_train_step,
    compose,
    ddp,
    hidden_matrices,
    lora,
    muon,
    zero,
)
from axon_dist.mesh import Backend, MeshSpec
from axon_dist.mesh.world import PlaceholderDevice
from axon_dist.models import ExpertConfig, ResNet, ResNetConfig, next_token_loss
from axon_dist.models.loss import cross_entropy
from axon_dist.nn import ActivationCheckpointing
from axon_dist.parallel import (
    context_parallel,
    diloco,
    expert_parallel,
    fsdp,
    local_sgd,
    pipelined,
    tensor_parallel,
)
from axon_dist.schedule import SCHEDULES
from axon_dist.step import TrainStep
from tests.contracts.mixtures import EXPERTS, SIZES
from tests.contracts.models import (
    CASES,
    Case,
    mean_square,
    regression_batch,
    token_batch,
    transformer,
)
from tests.contracts.reference import METRICS

WIDTH = 16


class Block(nnx.Module):
    """Two dense layers and a residual connection."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Blocks(nnx.Module):
    """Four blocks, in a list or stacked for a scan, and a head."""

    def __init__(self, stacked: bool = False):
        rngs = nnx.Rngs(0)
        make = nnx.vmap(lambda rngs: Block(rngs))
        self.blocks = make(rngs.split(4)) if stacked else nnx.List([Block(rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)
        self.stacked = stacked

    def __call__(self, x):
        if self.stacked:
            run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.head(run(x, self.blocks))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def adapted() -> nnx.Module:
    """The blocks with low-rank adapters."""
    return lora(Blocks(), 2, "blocks", rngs=nnx.Rngs(1))


def image_batch(step: int) -> dict:
    """Sixteen images of 8 x 8 pixels in ten classes."""
    rng = np.random.default_rng(step)
    image = rng.normal(size=(16, 8, 8, 3)).astype(np.float32)
    return {"image": image, "label": rng.integers(0, 10, size=16).astype(np.int32)}


def class_loss(model: nnx.Module, batch: dict) -> jax.Array:
    """The mean cross entropy of classes."""
    return jnp.mean(cross_entropy(model(batch["image"]), batch["label"]))


def short_batch(step: int) -> dict:
    """Thirty weighted samples, which no mesh here divides."""
    return {name: leaf[:30] for name, leaf in CASES["weighted"].batch(step).items()}


def decoder(**changes: Any) -> Case:
    """A decoder of a few narrow blocks."""
    sizes = {"width": 16, "ffn_width": 16, "vocab_size": 32, "max_length": 16, "num_heads": 4}
    return Case(lambda: transformer(**sizes | changes), next_token_loss, token_batch)


def experts(**changes: Any) -> Case:
    """A decoder with a mixture of experts in every block."""
    config = ExpertConfig(width=8, **EXPERTS)
    make = lambda: transformer(**SIZES | changes, experts=config)
    return Case(make, next_token_loss, token_batch)


MODELS: Mapping[str, Case] = {
    **CASES,
    "blocks": Case(Blocks, mean_square, regression_batch),
    "stacked": Case(lambda: Blocks(stacked=True), mean_square, regression_batch),
    "adapted": Case(adapted, mean_square, regression_batch),
    "short": dataclasses.replace(CASES["weighted"], batch=short_batch),
    "resnet": Case(
        lambda: ResNet(ResNetConfig.preset("tiny"), rngs=nnx.Rngs(0)), class_loss, image_batch
    ),
    "decoder": decoder(),
    "decoder4": decoder(num_layers=4),
    "dropout4": decoder(num_layers=4, dropout=0.2),
    "chunked": decoder(num_layers=4, tied_head=False, logits="chunked"),
    "experts": experts(),
    "experts scanned": experts(scan_layers=True),
}
OPTIMIZERS: Mapping[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(1e-2, eps=1e-4),
    "muon": lambda: muon(
        0.05, muon_weight_dimension_numbers=hidden_matrices(Blocks), ns_steps=3, weight_decay=0.1
    ),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step whose lowered program is pinned.

    Args:
        mesh: axis sizes, outer to inner.
        strategy: makes the strategy.
        model: a key of `MODELS`.
        accumulate: microbatches of a step without a pipeline.
        optimizer: a key of `OPTIMIZERS`.
        options: further arguments of `build_train_step`.
        platform: what the program is lowered for; no device or plug-in of it is needed.
        quick: whether the default run of the tests has it.
    """

    mesh: str
    strategy: Callable[[], Strategy]
    model: str
    accumulate: int = 1
    optimizer: str = "sgd"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    platform: str = "cpu"
    quick: bool = False

    def build(self) -> TrainStep:
        """Builds the step; it makes no arrays."""
        case, strategy = MODELS[self.model], self.strategy()
        options = dict(self.options)
        if strategy.pipeline is None:
            options["accumulate"] = self.accumulate
        world = world_of(self.mesh, self.platform)
        optimizer = OPTIMIZERS[self.optimizer]()
        return build_train_step(case.make, optimizer, case.loss_fn, strategy, world, **options)

    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch."""
        batch = MODELS[self.model].batch(0)
        return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}


@dataclasses.dataclass(frozen=True)
class Client:
    """What JAX asks of a machine while it lowers for it: its name, and what every CPU knows, too.

    Args:
        platform: `cuda` or `tpu`.
    """

    platform: str

    def __getattr__(self, name: str) -> Any:
        # What JAX calls GPUs of one make.
        if name == "_raw_platform":
            return self.platform
        return getattr(jax.devices("cpu")[0].client, name)


@dataclasses.dataclass(frozen=True)
class LowerableDevice(PlaceholderDevice):
    """A placeholder for which JAX lowers."""

    @property
    def client(self) -> Client:
        """The machine that it is of."""
        return Client({"gpu": "cuda"}.get(self.platform, self.platform))


def world_of(mesh: str, platform: str) -> World:
    """Emulated devices for `cpu`; for `cuda` and `tpu` devices that are not here."""
    spec = MeshSpec(mesh)
    size = math.prod(spec.sizes)
    if platform == "cpu":
        return World.emulate(size, mesh)
    name, backend = {"cuda": ("gpu", Backend.NCCL), "tpu": ("tpu", Backend.TPU)}[platform]
    devices = np.array([LowerableDevice(number, name) for number in range(size)])
    types = (AxisType.Auto,) * len(spec.names)
    return World(Mesh(devices.reshape(spec.sizes), spec.names, axis_types=types), backend)


BY_HAND = Reduction(manual=True)
REMAT = ActivationCheckpointing()
UP_DOWN = {"up$": "column", "down$": "row"}


def shard(kind: str = "full_shard", axes: Any = ("fsdp",), **options: Any) -> Strategy:
    """`fsdp` that splits small arrays, too."""
    return fsdp(kind, axes, min_elements=8, **options)


def stage(number: int, *args: Any, **options: Any) -> Strategy:
    """`zero` that splits small arrays, too."""
    return zero(number, *args, min_elements=8, **options)


def hybrid() -> Strategy:
    """Split within, copied without."""
    return shard("hybrid_shard", ("dp", "fsdp"))


def tp(**options: Any) -> Strategy:
    """Tensor parallelism of the decoders."""
    return tensor_parallel("transformer", **options)


DATA: Mapping[str, Cell] = {
    "ddp": Cell("dp=8", ddp, "mlp", options={"metrics": METRICS}, quick=True),
    "ddp k4 weighted": Cell("dp=4", ddp, "weighted", 4),
    "ddp k4 batchnorm": Cell("dp=4", ddp, "batchnorm", 4),
    "ddp per microbatch dropout": Cell("dp=4", lambda: ddp(per="microbatch"), "dropout", 4),
    "ddp buckets": Cell("dp=8", lambda: ddp(bucket_capacity=100), "weighted"),
    "ddp overlapped k4": Cell("dp=4", lambda: ddp(sync="overlapped"), "dropout", 4),
    "ddp bf16 wire": Cell("dp=4", lambda: ddp(reduce_dtype="bfloat16"), "mlp", 4),
    "ddp linen": Cell("dp=8", ddp, "linen"),
    "ddp resnet": Cell("dp=4", ddp, "resnet"),
    "ddp remat": Cell("dp=4", ddp, "decoder", options={"remat": REMAT}),
    "ddp clip k4 adam": Cell(
        "dp=4", ddp, "mlp", 4, "adam", {"clip_norm": 0.1, "metrics": METRICS}, quick=True
    ),
    "ddp pad": Cell("dp=8", ddp, "short", options={"pad": "weight"}),
    "zero1 adam": Cell("dp=8", lambda: stage(1), "mlp", 1, "adam"),
    "zero1 k4 ema": Cell("dp=4", lambda: stage(1), "batchnorm", 4, options={"ema": 0.99}),
    "zero2 k4 weighted": Cell("dp=8", lambda: stage(2), "weighted", 4),
    "zero2 by hand k4": Cell("dp=4", lambda: stage(2, reduction=BY_HAND), "mlp", 4),
    "zero3 dropout": Cell("dp=4", lambda: stage(3), "dropout"),
    "shard_grad_op": Cell("fsdp=4", lambda: shard("shard_grad_op"), "blocks", 1, "adam"),
    "full_shard": Cell("fsdp=8", shard, "transformer"),
    "full_shard loop": Cell("fsdp=4", shard, "blocks", options={"unroll": 1}),
    "full_shard stacked k4": Cell("fsdp=4", shard, "stacked", 4),
    "full_shard k4 per step": Cell(
        "fsdp=4", lambda: shard(reduction=Reduction(per="step")), "dropout", 4
    ),
    "full_shard by hand k4": Cell("fsdp=4", lambda: shard(reduction=BY_HAND), "weighted", 4),
    "full_shard remat bf16 k4": Cell(
        "fsdp=4",
        shard,
        "blocks",
        4,
        "adam",
        {"remat": REMAT, "precision": "bf16", "clip_norm": 1.0},
        quick=True,
    ),
    "full_shard linen": Cell("fsdp=8", shard, "linen"),
    "full_shard resnet": Cell("fsdp=4", shard, "resnet"),
    "full_shard offload": Cell("fsdp=4", lambda: shard(cpu_offload="full"), "mlp", 4),
    "hybrid_shard k4": Cell("dp=2,fsdp=4", hybrid, "blocks", 4),
}
OTHERS: Mapping[str, Cell] = {
    "tensor": Cell("tp=4", lambda: tensor_parallel(UP_DOWN), "blocks", quick=True),
    "sequence x ddp k4": Cell("dp=2,tp=2", lambda: compose(ddp(), tp(sequence=True)), "decoder", 4),
    "sequence rings": Cell("tp=2", lambda: tp(sequence=True, rings=True), "decoder"),
    "full_shard x tensor bf16": Cell(
        "fsdp=2,tp=2",
        lambda: compose(shard(), tp()),
        "decoder",
        4,
        "adam",
        {"precision": "bf16"},
    ),
    "ddp buckets x tensor": Cell(
        "dp=2,tp=2", lambda: compose(ddp(bucket_capacity=1000), tp()), "decoder"
    ),
    "ring x ddp k4": Cell(
        "dp=2,cp=2", lambda: compose(ddp(), context_parallel("ring")), "decoder", 4
    ),
    "ring x full_shard": Cell(
        "fsdp=2,cp=2",
        lambda: compose(shard(axes=("fsdp", "cp")), context_parallel("ring")),
        "decoder",
    ),
    "ulysses x ddp x tensor": Cell(
        "dp=2,cp=2,tp=2",
        lambda: compose(ddp(), context_parallel("ulysses"), tp()),
        "decoder",
    ),
    "expert ring x ddp": Cell(
        "dp=2,ep=2", lambda: compose(ddp(), expert_parallel("ring")), "experts", quick=True
    ),
    "expert all_to_all x full_shard": Cell(
        "fsdp=2,ep=2",
        lambda: compose(shard(), expert_parallel("all_to_all", 4.0)),
        "experts scanned",
        4,
        options={"remat": REMAT},
    ),
    "expert x tensor": Cell("ep=2,tp=2", lambda: compose(expert_parallel(), tp()), "experts"),
    "diloco x full_shard": Cell(
        "nodes=2,fsdp=2", lambda: compose(diloco(every=4), shard()), "blocks", quick=True
    ),
    "diloco fragments x ddp k4": Cell(
        "nodes=2,dp=2", lambda: compose(diloco(every=4, fragments=2), ddp()), "dropout", 4
    ),
    "local_sgd int8": Cell("nodes=4", lambda: local_sgd(every=2, compress="int8"), "mlp"),
    "bf16 zero2 k4": Cell("dp=4", lambda: stage(2), "blocks", 4, options={"precision": "bf16"}),
    "fp16 full_shard k4": Cell(
        "fsdp=4",
        shard,
        "blocks",
        4,
        options={"precision": "fp16", "nonfinite": "skip", "clip_norm": 1.0},
    ),
    "fp8 ddp": Cell("dp=4", ddp, "blocks", options={"precision": "fp8"}),
    "fp8 gather full_shard": Cell(
        "fsdp=4", shard, "stacked", options={"precision": MixedPrecision.fp8(gather="fp8")}
    ),
    "lora int8 full_shard": Cell(
        "fsdp=4",
        shard,
        "adapted",
        1,
        "adam",
        {"trainable": nnx.LoRAParam, "frozen_dtype": "int8", "ema": 0.9},
        quick=True,
    ),
    "trainable zero1 k4": Cell(
        "dp=4", lambda: stage(1), "blocks", 4, "adam", {"trainable": ("up", "head")}
    ),
    "muon full_shard": Cell("fsdp=4", shard, "blocks", 1, "muon"),
    "muon zero2 k4": Cell("dp=4", lambda: stage(2), "blocks", 4, "muon"),
}


def pipe(*others: Callable[[], Strategy], schedule: str = "1f1b", count: int = 4, **more: Any):
    """A pipeline of two ranks composed with other strategies."""
    return lambda: compose(
        pipelined(2, count, schedule, **more), *(strategy() for strategy in others)
    )


PIPELINES: Mapping[str, Cell] = {
    **{
        f"pipeline {name}": Cell("pp=2", pipe(schedule=name), "decoder4")
        for name in sorted(SCHEDULES)
    },
    "pipeline x ddp x sequence": Cell(
        "pp=2,dp=2,tp=2", pipe(ddp, lambda: tp(sequence=True)), "decoder4"
    ),
    "pipeline x full_shard residuals bf16": Cell(
        "pp=2,fsdp=2",
        pipe(shard, backward="residuals"),
        "dropout4",
        optimizer="adam",
        options={"precision": "bf16", "clip_norm": 1.0},
    ),
    "pipeline x zero1 vocabulary": Cell(
        "pp=2,dp=2", pipe(lambda: stage(1), split_vocabulary=True), "chunked"
    ),
    "pipeline x ulysses": Cell(
        "pp=2,cp=2", pipe(lambda: context_parallel("ulysses"), count=2), "decoder4"
    ),
    "pipeline x expert": Cell("pp=2,ep=2", pipe(expert_parallel, count=2), "experts"),
    "pipeline x full_shard muon": Cell(
        "pp=2,fsdp=2", pipe(shard, count=2), "blocks", optimizer="muon"
    ),
    "pipeline weighted layers": Cell("pp=2", pipe(), "weighted", quick=True),
}
TARGETS: Mapping[str, Cell] = {
    "cuda full_shard bf16": Cell(
        "fsdp=8", shard, "blocks", 1, "adam", {"precision": "bf16"}, "cuda"
    ),
    "cuda pipeline x ddp": Cell("pp=2,dp=2", pipe(ddp), "blocks", platform="cuda"),
    "cuda full_shard decoder": Cell("fsdp=8", shard, "decoder", platform="cuda"),
    "tpu full_shard bf16": Cell(
        "fsdp=8", shard, "decoder", 1, "adam", {"precision": "bf16"}, "tpu", quick=True
    ),
    "tpu pipeline x full_shard": Cell(
        "pp=2,fsdp=2", pipe(shard, schedule="zero_bubble_h1"), "blocks", platform="tpu"
    ),
    "tpu full_shard x tensor k4": Cell(
        "fsdp=4,tp=2", lambda: compose(shard(), tp()), "decoder", 4, platform="tpu"
    ),
}
CELLS: Mapping[str, Cell] = dict(sorted({**DATA, **OTHERS, **PIPELINES, **TARGETS}.items()))
"""All cells by name."""
