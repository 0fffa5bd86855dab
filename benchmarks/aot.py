"""Our train step compiled for machines that are not here, compared with a hand-written one.

    python -m benchmarks.aot --target h100:8 --model 1b --strategy fsdp
        [--layers list|scan] [--accumulate K] [--per step|microbatch] [--json FILE] [--hlo FILE]
    python -m benchmarks.aot --mesh fsdp=8,tp=8 --target h100:8x8 --model 8b --tensor sequence
    python -m benchmarks.aot --mesh fsdp=1,cp=8 --model 1b --length 131072
    python -m benchmarks.aot --mesh pp=8 --schedule 1f1b --accumulate 64 --model 1b
    python -m benchmarks.aot --mesh ep=8 --experts 64,4,2048 --num-layers 8
    python -m benchmarks.aot --length 32768 --documents

The step is the whole one: the library's transformer, the strategy, AdamW, clipping by global norm,
bfloat16 compute over float32 parameters and moments, every block rematerialised, one sequence of
4096 tokens for each rank that has samples of its own and each microbatch. The axes of the mesh say
what is composed: `tp`, `cp` and `pp` bring tensor, context and pipeline parallelism, with which
`--strategy` is about the axes of samples. "theory" is what `benchmarks.aot_theory` counts.
`python -m benchmarks.aot_table` runs the rows that the documentation quotes.
Needs the extra `cuda` for GPUs and `aot` for TPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import yaml
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist import ActivationCheckpointing, Reduction, World, build_train_step
from axon_dist.inspect import Ledger, report, target_devices
from axon_dist.mesh.targets import prepare_environment
from axon_dist.models import ExpertConfig, Transformer, TransformerConfig, next_token_loss
from axon_dist.parallel import STRATEGIES, compose, resolve_name
from axon_dist.planner import read_step
from axon_dist.schedule import Costs, PipelineSchedule, Schedule, summarize

from .aot_theory import Work, theory
from .size_rows import model_flops

TENSOR = {"plain": {}, "sequence": {"sequence": True}, "rings": {"sequence": True, "rings": True}}
"""The options of tensor parallelism, by name."""
MODELS = {"1b": "1b", "7b": "7b", "8b": "8b", "70b": "llama-70b"}
"""The names of models here, and their presets."""
# What an expert's hand-written step reaches (same shapes and optimizer, best spelling and
# options): peak GiB, wire MB. Compiled with jax 0.10.2, read from the optimised program. The peaks
# of v5p are by XLA's size of temporaries, which is more than `inspect` counts there.
YARDSTICK = {
    ("h100:8", "1b", "fsdp"): (3.81, 6634),
    ("h100:8", "7b", "fsdp"): (15.64, 34518),
    ("h100:8", "8b", "fsdp"): (19.12, 38540),
    ("h100:8", "1b", "ddp"): (20.73, 4709),
    ("h100:8x8", "7b", "fsdp"): (4.32, 38833),
    ("v5p:2x2x2", "1b", "fsdp"): (4.92, 6734),
    ("v5p:2x2x2", "7b", "fsdp"): (19.13, 34718),
}


def main() -> None:
    """Compiles one step, prints its report and the comparison."""
    args = parse()
    prepare_environment(args.target)
    devices = target_devices(args.target)
    world = World.init(args.mesh or default_mesh(args.strategy, len(devices)), devices)
    config = dataclasses.replace(
        TransformerConfig.preset(MODELS[args.model]),
        scan_layers=args.layers == "scan",
        attention=args.attention,
        max_length=args.length,
        experts=args.experts,
        **({} if args.num_layers is None else {"num_layers": args.num_layers}),
    )
    start = time.perf_counter()
    step = build(config, args, world)
    tokens = jax.ShapeDtypeStruct((samples(args, world), args.length + 1), jnp.int32)
    batch = {"tokens": tokens} | ({"segments": tokens} if args.documents else {})
    built = time.perf_counter()
    lowered = step.lower(batch)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    seconds = {"build": built - start, "lower": middle - built, "compile": end - middle}

    found = report(compiled, world.mesh, traced_flops=read_step(step, batch).flops)
    if args.hlo:
        pathlib.Path(args.hlo).write_text(compiled.as_text())
    table = None if step.strategy.pipeline is None else step.strategy.pipeline.schedule
    figures = summary(args, world, config, found, table) | {
        f"{name}_seconds": value for name, value in seconds.items()
    }
    console = Console(width=120)
    console.print(found)
    console.print(compare(args, figures))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(figures, indent=1))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="h100:8")
    parser.add_argument("--model", default="1b", choices=sorted(MODELS))
    parser.add_argument(
        "--strategy", default="fsdp", choices=sorted({*STRATEGIES, *STRATEGIES.other_names})
    )
    parser.add_argument("--tensor", choices=TENSOR, default="plain", help="over tp")
    parser.add_argument("--schedule", choices=sorted(PipelineSchedule), default="eager_1f1b")
    parser.add_argument("--mesh", help="axes, such as dp=2,fsdp=4")
    parser.add_argument("--layers", default="list", choices=["list", "scan"])
    parser.add_argument("--experts", type=experts_of, help="E,k,width: none left out")
    parser.add_argument(
        "--documents",
        action="store_true",
        help="several in a row, which do not attend to each other",
    )
    parser.add_argument("--num-layers", type=int, help="fewer than the model has")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    parser.add_argument("--per", choices=["step", "microbatch"])
    parser.add_argument("--nonfinite", choices=["stop", "skip"], help="with this guard in the step")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="for the compiler, over those of the chip; without a value, the chip's goes",
    )  # fmt: skip
    parser.add_argument("--json")
    parser.add_argument("--hlo")
    arguments = parser.parse_args()
    name, implied = resolve_name(arguments.strategy)
    if not implied:
        arguments.strategy = name
    return arguments


def experts_of(text: str) -> ExpertConfig:
    """How many experts there are, how many a token goes to, and their hidden size."""
    count, per_token, width = map(int, text.split(","))
    return ExpertConfig(count=count, per_token=per_token, width=width)


def default_mesh(strategy: str, num_devices: int) -> str:
    """One data axis, or two for hybrid sharding."""
    return f"dp=2,fsdp={num_devices // 2}" if strategy == "hybrid" else f"fsdp={num_devices}"


def samples(args: argparse.Namespace, world: World) -> int:
    """The global batch: a sequence for each rank that has its own, and each microbatch."""
    shared = [world.spec.shape.get(axis, 1) for axis in ("tp", "cp", "pp")]
    return world.size // math.prod(shared) * args.accumulate


def build(config: TransformerConfig, args: argparse.Namespace, world: World) -> Any:
    """The train step of a run: AdamW, clipping, bfloat16, remat of every block."""
    factory = lambda: Transformer(config, rngs=nnx.Rngs(0))
    axes = world.spec.shape
    parts = []
    if set(axes) & {"dp", "fsdp"}:
        options = {} if args.per is None else {"reduction": Reduction(per=args.per)}
        parts.append(STRATEGIES[args.strategy](factory, world, **options))
    if "tp" in axes:
        parts.append(STRATEGIES["tensor"](factory, world, **TENSOR[args.tensor]))
    if "cp" in axes:
        parts.append(STRATEGIES["context"](factory, world))
    if "ep" in axes:
        parts.append(STRATEGIES["expert"](factory, world))
    if "pp" in axes:
        parts.append(
            STRATEGIES["pipeline"](
                factory, world, num_microbatches=args.accumulate, schedule=args.schedule
            )
        )
    return build_train_step(
        factory,
        optax.adamw(3e-4),
        next_token_loss,
        compose(*parts),
        world,
        accumulate=args.accumulate,
        clip_norm=1.0,
        nonfinite=args.nonfinite,
        precision="bf16",
        remat=ActivationCheckpointing(classes=("Block",)),
        compiler_options=options_of(args.option),
    )


def options_of(given: list[str]) -> dict[str, Any]:
    """Compiler options as the command line has them: `NAME=VALUE`, or `NAME=` to take one away."""
    pairs = (each.partition("=") for each in given)
    return {name: yaml.safe_load(value) for name, _, value in pairs}


def summary(
    args: argparse.Namespace,
    world: World,
    config: TransformerConfig,
    found: Any,
    table: Schedule | None,
) -> dict[str, Any]:
    """The figures that are compared, as plain data."""
    ledger = found.collectives
    once = ("ddp", "no_shard", "zero1")
    work = Work(
        config,
        world.spec.shape,
        args.strategy,
        args.length,
        args.accumulate,
        per=args.per or ("step" if args.strategy in once else "microbatch"),
        sequence=args.tensor != "plain",
        chunks=1 if table is None else table.chunks,
    )
    least = theory(work)
    figures = {
        **{name: getattr(args, name) for name in ("target", "model", "strategy", "layers")},
        **{name: getattr(args, name) for name in ("accumulate", "length", "num_layers")},
        "tensor": args.tensor if "tp" in world.spec.shape else None,
        "schedule": None if table is None else table.name,
        "mesh": str(world.spec),
        "jax": jax.__version__,
        "peak_gib": found.memory.peak / 2**30,
        "temporaries_gib": found.memory.temporaries / 2**30,
        "fits": found.fits,
        "wire_mb": ledger.total_wire_bytes() / 1e6,
        "by_kind_mb": {str(kind): value / 1e6 for kind, value in ledger.by_kind().items()},
        "by_axis_mb": {str(axis): value / 1e6 for axis, value in ledger.by_axis().items()},
        "exposed_mb": ledger.exposed_bytes() / 1e6,
        "light_mb": ledger.light_bytes() / 1e6,
        "waited_ms": ledger.waited() * 1e3,
        "wire_ms": ledger.seconds() * 1e3,
        "modelled_ms": ledger.step_seconds * 1e3,
        "tflop": found.flops.high / 1e12,
        "traced_tflop": (found.traced_flops or 0) / 1e12,
        "theory_mb": sum(least.values()) / 1e6,
        "theory_parts_mb": {name: value / 1e6 for name, value in least.items()},
        "attention_kernels": found.attention,
    }
    if found.time is not None:
        useful = model_flops(config, samples(args, world) * args.length, args.length)
        figures["expected_ms"] = found.time.total * 1e3
        figures["expected_mfu"] = found.time.utilization(useful / world.size)
    if table is not None:
        figures |= _in_lock_step(table, ledger)
        # The timeline of a pipeline counts one action of every kind in each tick.
        for name in ("expected_ms", "expected_mfu"):
            figures.pop(name, None)
    return figures


def _in_lock_step(table: Schedule, ledger: Ledger) -> dict[str, float]:
    """Returns the time of a pipeline's step; each tick takes as long as its busiest rank.

    The timeline of the program takes the longest branch of every conditional, so that each tick
    counts one action of every kind. The table says which of them are run together.
    """
    # Stages recompute: a backward pass for inputs counts two, for weights one, a forward pass one.
    costs = Costs(f=1, i=2, w=1)
    summary = summarize(table, costs)
    kinds = {action.phase for row in table.rows for cell in row for action in cell}
    counted = table.num_ticks * sum(map(costs.of, kinds)) / table.chunks
    waited = ledger.waited()
    run = (ledger.step_seconds - waited) * summary.lockstep_makespan / counted
    return {"executed": summary.lockstep_slowdown, "modelled_ms": (waited + run) * 1e3}


def compare(args: argparse.Namespace, figures: dict[str, Any]) -> Table:
    """One row for us, one for theory and yardstick."""
    table = Table(title=f"{args.model} {args.strategy} on {args.target} ({figures['mesh']})")
    columns = ("", "peak GiB", "temp GiB", "wire MB", "x theory", "modelled ms", "waited ms", "%")
    for column in columns:
        table.add_column(column, justify="right")
    wire, least = figures["wire_mb"], figures["theory_mb"]
    share = lambda part, whole, form: format(part / whole, form) if whole else "-"
    table.add_row(
        f"axon_dist, {args.layers}",
        f"{figures['peak_gib']:.2f}",
        f"{figures['temporaries_gib']:.2f}",
        f"{wire:.0f}",
        share(wire, least, ".3f"),
        f"{figures['modelled_ms']:.1f}",
        f"{figures['waited_ms']:.1f}",
        share(figures["waited_ms"], figures["modelled_ms"], ".1%"),
    )
    table.add_row("theory", "-", "-", f"{least:.0f}", "1", "-", "-", "-")
    yardstick = YARDSTICK.get((args.target, args.model, args.strategy))
    if yardstick and args.accumulate == 1 and not (args.mesh or args.num_layers):
        peak, total = yardstick
        table.add_row("hand-written", f"{peak:.2f}", "-", f"{total}")
        table.add_row("ratio", f"{figures['peak_gib'] / peak:.3f}", "-", f"{wire / total:.3f}")
    if "executed" in figures:
        table.caption = f"{figures['schedule']}: {figures['executed']:.3f} of the work executed"
    return table


if __name__ == "__main__":
    main()
