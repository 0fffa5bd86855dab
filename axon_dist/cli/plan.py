"""`axon plan CONFIG --target h100:8`: which mesh and strategies to take for it."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from axon_dist.app import plan_config
from axon_dist.config import load_config
from axon_dist.core.errors import ConfigError
from axon_dist.core.files import host_memory
from axon_dist.core.words import byte_size, plural
from axon_dist.mesh.chips import EMULATED, Hardware, hardware, parse_cluster
from axon_dist.mesh.targets import parse_target, prepare_environment
from axon_dist.planner import (
    Plan,
    Recommendation,
    TransformerShape,
    Workload,
    parse_count,
    parse_memory,
    recommend,
)

from .plan_table import (
    called,
    count_of,
    digits,
    print_lines,
    seconds,
    show_config_plans,
    unit_of,
)

_DEFAULT_HARDWARE = "h100"


def run(arguments: argparse.Namespace) -> int:
    """Prints the plans; the exit code is 1 if none fits."""
    memory = None if arguments.memory is None else parse_memory(arguments.memory)
    if (arguments.config is None) == (arguments.params is None):
        raise ConfigError("plan needs either a config or --params, such as --params 7e9")
    if arguments.config is not None:
        return _plan_config(arguments, memory)
    if arguments.compile:
        raise ConfigError("--compile needs a config, for a number of parameters is no program")
    row, num_devices = _devices(arguments)
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
    if arguments.target.startswith("cpu:"):
        return _emulated(arguments.target)
    return parse_cluster(arguments.target)


def _emulated(target: str) -> tuple[Hardware, int]:
    """Devices that the CPU makes up have no rates: those of another chip rank the plans."""
    count = parse_target(target).num_devices
    row = hardware(_DEFAULT_HARDWARE)
    share = host_memory() // count
    return dataclasses.replace(row, name="cpu", memory_bytes=share, wiring=EMULATED), count


def _workload(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The size of the model, and the options that `recommend` takes besides."""
    given = {
        "global_batch": arguments.batch,
        "sequence_length": arguments.sequence,
        "optimizer": arguments.optimizer,
        "precision": arguments.precision,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return parse_count(arguments.params), given


def _plan_config(arguments: argparse.Namespace, memory: int | None) -> int:
    """Reads the best arrangements of a config from their own steps, and compiles the best."""
    given = [f"--{name}" for name in _BESIDE if getattr(arguments, name) is not None]
    if given:
        raise ConfigError(
            f"got a config together with {', '.join(given)}; a config says these itself: replace "
            "its values behind it, as in train.global_batch=64"
        )
    if arguments.compile and arguments.target is None:
        raise ConfigError(
            f"--compile {arguments.compile} needs a machine to compile for; name it with --target, "
            "such as h100:8 or cpu:8"
        )
    config = load_config(arguments.config, arguments.overrides)
    row, num_devices = _devices(arguments)
    if arguments.compile:
        prepare_environment(arguments.target)
    found = plan_config(
        config,
        row,
        num_devices,
        memory,
        target=arguments.target,
        num_compiled=arguments.compile,
    )
    show_config_plans(config.name, found, Console(highlight=False))
    return 0 if found.fits else 1


_BESIDE = ("batch", "sequence", "optimizer", "precision")


def _show(found: Recommendation, console: Console) -> None:
    work, best = found.work, found.best
    console.print(
        f"{count_of(work.shape.num_params)} parameters, {plural(work.global_batch, 'sample')} of "
        f"{_length(work)} tokens per step, {plural(found.num_devices, 'device')} of "
        f"{byte_size(best.device_bytes)} with the rates of {found.hardware.name}"
    )
    console.print(
        "Best first: what fits, leaves half of the memory free of state, spends at most 30 % in "
        "transfers and bubble, is simple; then what is fast"
    )
    console.print(_table(found))
    reason = found.reason.replace(best.name, called(best.name), 1)
    console.print(reason, style="bold" if found.fits else "bold red")
    if found.faster is not None:
        console.print(
            f"{called(found.faster.name)} on {found.faster.arrangement.mesh} may be faster, but "
            f"is not as simple, roomy or quiet: {'; '.join(found.faster.reasons[1:])}"
        )
    for finding in found.findings:
        console.print(f"note ({finding.rule}): {finding.message}")
    if found.fits:
        print_lines(best.arrangement, console)


def _length(work: Workload) -> int:
    assert isinstance(work.shape, TransformerShape)
    return work.shape.sequence_length


def _table(found: Recommendation) -> Table:
    unit, name = unit_of(max(plan.memory.total for plan in found.plans))
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
        f"{called(name)}{', remat' if arrangement.remat else ''}\n"
        f"{arrangement.mesh} x{arrangement.num_microbatches}",
        *(digits(size / unit) for size in (*sizes, memory.total)),
        "yes" if plan.fits else "no",
        digits(plan.wire_bytes / unit),
        seconds(plan.time.total),
    )
