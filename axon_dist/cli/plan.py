"""`axon plan CONFIG --target h100:8`: which mesh and strategies to take for it."""

from __future__ import annotations

import argparse
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from axon_dist.config import RunConfig, load_config
from axon_dist.core.errors import ConfigError
from axon_dist.hardware import hardware, parse_cluster
from axon_dist.models import TransformerConfig, num_params
from axon_dist.planner import (
    OPTIMIZERS,
    Plan,
    Recommendation,
    TransformerShape,
    parse_bytes,
    parse_count,
    recommend,
)

from .verb import Verb, as_int

_DEFAULT_HARDWARE = "h100"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a config or a number of parameters, and the devices."""
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value")
    parser.add_argument("--target", help="hardware and how many of it: h100:8, h100:4x8, v5p:4x4x4")
    parser.add_argument("--params", help="instead of a config: parameters, such as 7e9 or 7B")
    parser.add_argument("--devices", type=as_int, help="instead of a target: how many devices")
    parser.add_argument("--memory", help="of one device, such as 80GB; the target's by default")
    parser.add_argument("--batch", type=as_int, help="with --params: samples of a step")
    parser.add_argument("--sequence", type=as_int, help="with --params: tokens of a sample")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="with --params; adam by default")
    parser.add_argument("--precision", help="with --params: float32, bf16 or fp16")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plans; the exit code is 1 if none fits."""
    row, num_devices = _devices(arguments)
    memory = None if arguments.memory is None else parse_bytes(arguments.memory)
    size, options = _workload(arguments)
    found = recommend(size, num_devices, memory, hardware=row, **options)
    _show(found, Console(highlight=False))
    return 0 if found.fits else 1


def _devices(arguments: argparse.Namespace) -> tuple[Any, int]:
    if (arguments.target is None) == (arguments.devices is None):
        raise ConfigError(
            "plan needs either --target, such as h100:8, or --devices, such as 8 --memory 80GB"
        )
    if arguments.target is None:
        return hardware(_DEFAULT_HARDWARE), arguments.devices
    return parse_cluster(arguments.target)


def _workload(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The size of the model, and the options that `recommend` takes besides."""
    if (arguments.config is None) == (arguments.params is None):
        raise ConfigError("plan needs either a config or --params, such as --params 7e9")
    given = {
        "global_batch": arguments.batch,
        "sequence_length": arguments.sequence,
        "optimizer": arguments.optimizer,
        "precision": arguments.precision,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.params is not None:
        return parse_count(arguments.params), given
    if given:
        raise ConfigError(
            f"got a config together with {', '.join(given)}; a config says these itself: replace "
            "its values behind it, as in train.global_batch=64"
        )
    return _read(load_config(arguments.config, arguments.overrides))


def _read(config: RunConfig) -> tuple[TransformerShape, dict[str, Any]]:
    model = config.model
    if not isinstance(model, TransformerConfig) or config.kind.task.item != "tokens":
        raise ConfigError(
            f"plan knows the activations of transformers on text, and {config.name} is another "
            "model; take its number of parameters instead, --params"
        )
    shape = TransformerShape(
        num_params=num_params(model),
        num_layers=model.num_layers,
        width=model.width,
        num_heads=model.num_heads,
        sequence_length=config.data.sequence_length,
        vocab_size=model.vocab_size,
    )
    return shape, {
        "global_batch": config.train.global_batch,
        "optimizer": config.optimizer.build(config.train.steps),
        "precision": config.precision,
    }


def _show(found: Recommendation, console: Console) -> None:
    work, best = found.work, found.best
    console.print(
        f"{_count(work.shape.num_params)} parameters, {work.global_batch} samples of "
        f"{work.shape.sequence_length} tokens per step, {found.num_devices} devices of "
        f"{best.device_bytes / 1e9:.3g} GB with the rates of {found.hardware.name}"
    )
    console.print(
        "Best first: what fits, leaves half of the memory free of state, spends at most 30 % in "
        "transfers and bubble, is simple; then what is fast"
    )
    console.print(_table(found))
    reason = found.reason.replace(best.name, _called(best.name), 1)
    console.print(reason, style="bold" if found.fits else "bold red")
    if found.faster is not None:
        console.print(
            f"{_called(found.faster.name)} on {found.faster.arrangement.mesh} may be faster, but "
            f"is not as simple, roomy or quiet: {'; '.join(found.faster.reasons[1:])}"
        )
    for finding in found.findings:
        console.print(f"note ({finding.rule}): {finding.message}")
    if found.fits:
        console.print("\nLines of a config:", style="bold")
        lines = best.arrangement.to_config()
        lines["parallel"] = {_called(name): row for name, row in lines["parallel"].items()}
        console.print(yaml.safe_dump(lines, sort_keys=False), end="")


def _called(name: str) -> str:
    """What README and configs call the strategies of a plan."""
    return " + ".join(_NAMES.get(part, part) for part in name.split(" + "))


_NAMES = {"shard_grad_op": "zero2", "tp": "tensor", "pp": "pipeline", "cp": "context"}


def _table(found: Recommendation) -> Table:
    unit, name = _unit(max(plan.memory.total for plan in found.plans))
    caption = f"{name} per device, and sent per step; x: microbatches; half of peak FLOP/s assumed"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    table.add_column("plan", no_wrap=True)
    for header in ("param", "grad", "opt", "act", "gath", "total", "fit", "sent", "step"):
        table.add_column(header, justify="right", no_wrap=True)
    for plan in found.plans:
        style = "bold" if plan is found.best and plan.fits else ("" if plan.fits else "dim")
        table.add_row(*_row(plan, unit), style=style)
    return table


def _row(plan: Plan, unit: float) -> tuple[str, ...]:
    memory, arrangement = plan.memory, plan.arrangement
    sizes = (memory.params, memory.grads, memory.optimizer, memory.activations, memory.gathered)
    name = arrangement.strategy if arrangement.data_ranks > 1 else plan.name
    return (
        f"{_called(name)}{', remat' if arrangement.remat else ''}\n"
        f"{arrangement.mesh} x{arrangement.num_microbatches}",
        *(_digits(size / unit) for size in (*sizes, memory.total)),
        "yes" if plan.fits else "no",
        _digits(plan.wire_bytes / unit),
        _seconds(plan.time.total),
    )


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _unit(largest: float) -> tuple[float, str]:
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")


def _seconds(time: float) -> str:
    for unit, scale in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if time * scale >= 1:
            return f"{time * scale:.3g}{unit}"
    return "<1us"


def _count(number: float) -> str:
    for unit in ("", "K", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.4g}B"


VERB = Verb(
    "plan",
    "Rank meshes and strategies for machines that are not here.",
    add_arguments,
    run,
    examples=(
        "axon plan --params 7B --devices 8 --memory 80GB",
        "axon plan configs/fsdp8.yaml --target h100:8",
    ),
)
