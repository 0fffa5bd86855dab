"""Our own train step compiled for machines that are not here, beside a hand-written yardstick.

    python -m benchmarks.aot --target h100:8 --model 1b --strategy full_shard
        [--layers list|scan] [--accumulate K] [--per step|microbatch] [--json FILE] [--hlo FILE]

The step is the whole one: the library's transformer, the strategy, AdamW, clipping by global norm,
bfloat16 compute over float32 parameters and moments, every block rematerialised, one sequence of
4096 tokens per device and microbatch. Theory is counted in ring bytes of the compute dtype:
FSDP two all-gathers of the blocks, one of embedding and head, and one reduce-scatter of the
gradients; ZeRO-1 and 2 a reduce-scatter of the gradients and one all-gather of the parameters;
DDP one all-reduce.
Needs the extra `cuda` for GPUs and `aot` for TPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import ActivationCheckpointing, Reduction, World, build_train_step
from axon_dist.hardware import prepare_environment
from axon_dist.inspect import report, target_devices
from axon_dist.models import Transformer, TransformerConfig, next_token_loss, num_params
from axon_dist.parallel import STRATEGIES, compose

SEQUENCE = 4096
TENSOR = {"plain": {}, "sequence": {"sequence": True}, "rings": {"sequence": True, "rings": True}}
# What an expert's hand-written step reaches (same shapes and optimizer, best spelling and
# options): peak GiB, wire MB. Compiled with jax 0.10.2, read from the optimised program.
YARDSTICK = {
    ("h100:8", "1b", "full_shard"): (3.81, 6634),
    ("h100:8", "7b", "full_shard"): (15.64, 34518),
    ("h100:8", "8b", "full_shard"): (19.12, 38540),
    ("h100:8", "1b", "ddp"): (20.73, 4709),
    ("h100:8x8", "7b", "full_shard"): (4.32, 38833),
    ("v5p:2x2x2", "1b", "full_shard"): (4.92, 6734),
    ("v5p:2x2x2", "7b", "full_shard"): (19.13, 34718),
}


def main() -> None:
    """Compiles one step, prints its report and the comparison."""
    args = parse()
    prepare_environment(args.target)
    devices = target_devices(args.target)
    world = World.init(args.mesh or default_mesh(args.strategy, len(devices)), devices)
    config = dataclasses.replace(
        TransformerConfig.preset(args.model),
        scan_layers=args.layers == "scan",
        attention=args.attention,
        max_length=SEQUENCE,
        **({} if args.num_layers is None else {"num_layers": args.num_layers}),
    )
    step = build(config, args, world)
    samples = world.size // world.spec.shape.get("tp", 1) * args.accumulate
    batch = {"tokens": jax.ShapeDtypeStruct((samples, SEQUENCE + 1), jnp.int32)}

    start = time.perf_counter()
    lowered = step.lower(batch)
    middle = time.perf_counter()
    compiled = lowered.compile()
    seconds = {"lower": middle - start, "compile": time.perf_counter() - middle}

    found = report(compiled, world.mesh)
    if args.hlo:
        pathlib.Path(args.hlo).write_text(compiled.as_text())
    summary = summarize(args, world, config, found, seconds)
    console = Console(width=120)
    console.print(found)
    console.print(compare(args, summary))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(summary, indent=1))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--model", default="1b", choices=["1b", "7b", "8b"])
    parser.add_argument("--strategy", default="full_shard", choices=sorted(STRATEGIES))
    parser.add_argument("--tensor", choices=TENSOR, help="with tensor parallelism")
    parser.add_argument("--mesh", help="axes, such as dp=2,fsdp=4")
    parser.add_argument("--layers", default="list", choices=["list", "scan"])
    parser.add_argument("--num-layers", type=int, help="fewer than the model has")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--per", choices=["step", "microbatch"])
    parser.add_argument("--nonfinite", choices=["stop", "skip"], help="with this guard in the step")
    parser.add_argument("--json")
    parser.add_argument("--hlo")
    return parser.parse_args()


def default_mesh(strategy: str, num_devices: int) -> str:
    """One data axis, or two for hybrid sharding."""
    return f"dp=2,fsdp={num_devices // 2}" if strategy == "hybrid_shard" else f"fsdp={num_devices}"


def build(config: TransformerConfig, args: argparse.Namespace, world: World) -> Any:
    """The train step of a run: AdamW, clipping, bfloat16, remat of every block."""
    options = {} if args.per is None else {"reduction": Reduction(per=args.per)}
    factory = lambda: Transformer(config, rngs=nnx.Rngs(0))
    strategy = STRATEGIES[args.strategy](factory, world, **options)
    if args.tensor is not None:
        tensor = STRATEGIES["tensor"](factory, world, **TENSOR[args.tensor])
        strategy = compose(strategy, tensor)
    return build_train_step(
        factory,
        optax.adamw(3e-4),
        next_token_loss,
        strategy,
        world,
        accumulate=args.accumulate,
        clip_norm=1.0,
        nonfinite=args.nonfinite,
        precision="bf16",
        remat=ActivationCheckpointing(classes=("Block",)),
    )


def summarize(
    args: argparse.Namespace, world: World, config: TransformerConfig, found: Any, seconds: dict
) -> dict[str, Any]:
    """The figures that are compared, as plain data."""
    ledger = found.collectives
    wire = ledger.total_wire_bytes()
    return {
        "target": args.target,
        "model": args.model,
        "strategy": args.strategy,
        "mesh": str(world.spec),
        "layers": args.layers,
        "accumulate": args.accumulate,
        "peak_gib": found.memory.peak / 2**30,
        "wire_mb": wire / 1e6,
        "by_kind_mb": {str(kind): value / 1e6 for kind, value in ledger.by_kind().items()},
        "by_axis_mb": {str(axis): value / 1e6 for axis, value in ledger.by_axis().items()},
        "exposed_mb": ledger.exposed_bytes() / 1e6,
        "light_mb": ledger.light_bytes() / 1e6,
        "waited_ms": ledger.waited() * 1e3,
        "wire_ms": ledger.seconds() * 1e3,
        "temporaries_gib": found.memory.temporaries / 2**30,
        "theory_mb": theory(args, world, config) / 1e6,
        **{f"{name}_seconds": value for name, value in seconds.items()},
    }


def theory(args: argparse.Namespace, world: World, config: TransformerConfig) -> float:
    """Ring bytes per device and step, with what is gathered and reduced once per microbatch."""
    shape, params = world.spec.shape, num_params(config)
    ranks = shape.get("fsdp", 1) * shape.get("dp", 1)
    ring, bf16 = (ranks - 1) / ranks, 2 * params
    root = 2 * config.vocab_size * config.width * (1 if config.tied_head else 2)
    per = args.per or ("step" if args.strategy in ("ddp", "zero1") else "microbatch")
    times = args.accumulate if per == "microbatch" else 1
    if args.strategy in ("ddp", "no_shard"):
        return 2 * ring * bf16 * times
    if args.strategy == "zero1":
        return ring * 2 * bf16
    if args.strategy in ("zero2", "shard_grad_op"):
        return ring * (bf16 * times + bf16)
    if args.strategy == "hybrid_shard":
        inner = (shape["fsdp"] - 1) / shape["fsdp"]
        across = 2 * (shape["dp"] - 1) / shape["dp"]
        return times * (inner * (3 * bf16 - root) + across * bf16 / shape["fsdp"])
    gathers = times * (2 * bf16 - root) if per == "microbatch" else bf16
    return ring * (gathers + times * bf16)


def compare(args: argparse.Namespace, summary: dict[str, Any]) -> Table:
    """One row for us, one for theory and yardstick."""
    table = Table(title=f"{args.model} {args.strategy} on {args.target} ({summary['mesh']})")
    columns = ("", "peak GiB", "temp GiB", "wire MB", "x theory", "light", "exposed", "waited ms")
    for column in columns:
        table.add_column(column, justify="right")
    wire = summary["wire_mb"]
    table.add_row(
        f"axon_dist, {args.layers}",
        f"{summary['peak_gib']:.2f}",
        f"{summary['temporaries_gib']:.2f}",
        f"{wire:.0f}",
        f"{wire / summary['theory_mb']:.3f}",
        f"{summary['light_mb'] / wire:.1%}",
        f"{summary['exposed_mb'] / wire:.1%}",
        f"{summary['waited_ms']:.1f} of {summary['wire_ms']:.1f}",
    )
    table.add_row("theory", "-", "-", f"{summary['theory_mb']:.0f}", "1", "-", "-", "-")
    yardstick = YARDSTICK.get((args.target, args.model, args.strategy))
    if yardstick and args.accumulate == 1:
        peak, total = yardstick
        table.add_row("hand-written", f"{peak:.2f}", "-", f"{total}")
        table.add_row("ratio", f"{summary['peak_gib'] / peak:.3f}", "-", f"{wire / total:.3f}")
    return table


if __name__ == "__main__":
    main()
