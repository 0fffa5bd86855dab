"""`axon plan CONFIG --target h100:8` ranks meshes and strategies for a config."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import math
import re
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from axon_dist.core.errors import ConfigError
from axon_dist.core.files import host_memory
from axon_dist.core.plain_yaml import to_yaml
from axon_dist.core.words import AUTO, byte_size, duration, plural, si
from axon_dist.mesh.chips import EMULATED, Hardware, hardware, parse_cluster
from axon_dist.mesh.targets import parse_target, prepare_environment
from axon_dist.nn import ActivationCheckpointing
from axon_dist.ops.precision import MixedPrecision
from axon_dist.parallel import STRATEGIES
from axon_dist.planner import parse_count, parse_memory
from axon_dist.train.app import ConfigPlans, TracedPlan, plan_config
from axon_dist.train.app.config_plans import Tell
from axon_dist.train.config import RunConfig, load_config

from .values import notice

_DEFAULT_HARDWARE = "h100"

_GLOBAL_BATCH = 1024
"""The default number of samples per step: two million tokens in samples of 2048, as in GPT-3 13B
(arXiv:2005.14165, table 2.1)."""


def run(arguments: argparse.Namespace) -> int:
    """Prints the plans; the exit code is 1 if no plan fits."""
    memory = None if arguments.memory is None else parse_memory(arguments.memory)
    if (arguments.config is None) == (arguments.params is None):
        raise ConfigError("plan needs either a config or --params, such as --params 7e9")
    console = Console(highlight=False)
    is_size = arguments.config is None
    config, row, count = _of_size(arguments, console) if is_size else _of_config(arguments)
    compiled = {"target": arguments.target, "num_compiled": arguments.compile}
    with _telling() as tell, _collecting_rarely():
        ranking = plan_config(config, row, count, memory, **compiled, tell=tell)
    show_config_plans(config, ranking, console)
    return 0 if ranking.fits else 1


@contextlib.contextmanager
def _telling() -> Iterator[Tell]:
    """Shows the progress of planning: one updated line on a terminal, else a line per plan."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda name, clause: notice(f"{called(name)}: {clause}")
        return
    with console.status("reading the model") as status:
        yield lambda name, clause: status.update(f"{called(name)}: {clause}")


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """Runs the garbage collector less often: it takes a tenth of the time of planning otherwise.

    Traces are millions of objects, of which most stay until the end of a search.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _devices(arguments: argparse.Namespace) -> tuple[Hardware, int]:
    if (arguments.target is None) == (arguments.devices is None):
        raise ConfigError(
            "plan needs either --target, such as h100:8, or --devices, such as 8 --memory 80GB"
        )
    if arguments.target is None:
        return hardware(_DEFAULT_HARDWARE), arguments.devices
    if arguments.target.startswith("cpu:"):
        # Emulated devices have no known rates, so rank plans with the rates of another chip.
        count = parse_target(arguments.target).num_devices
        row = hardware(_DEFAULT_HARDWARE)
        share = host_memory() // count
        return dataclasses.replace(row, name="cpu", memory_bytes=share, wiring=EMULATED), count
    return parse_cluster(arguments.target)


def _of_size(arguments: argparse.Namespace, console: Console) -> tuple[RunConfig, Hardware, int]:
    """Makes the config of a decoder with `--params` parameters, and prints its sizes."""
    if arguments.compile:
        raise ConfigError(
            "--compile needs a config: --params does not define a program; name a config",
            code="compile-without-config",
        )
    row, num_devices = _devices(arguments)
    options = {
        "sequence_length": arguments.sequence,
        "optimizer": arguments.optimizer,
        "precision": arguments.precision,
    }
    if num_devices < 1:
        raise ConfigError(f"got --devices {num_devices}; it must be at least 1")
    rounded = -(-_GLOBAL_BATCH // num_devices) * num_devices
    config = config_of_size(
        parse_count(arguments.params),
        global_batch=rounded if arguments.batch is None else arguments.batch,
        **{name: value for name, value in options.items() if value is not None},
    )
    model = config.model
    console.print(
        f"{arguments.params} parameters: a decoder of {model.num_layers} blocks, width "
        f"{model.width}, {model.num_heads} heads, {model.vocab_size} tokens, samples of "
        f"{model.max_length} tokens"
    )
    return config, row, num_devices


def config_of_size(
    num_params: float,
    *,
    global_batch: int,
    sequence_length: int = 2048,
    optimizer: str = "adam",
    precision: str | None = None,
) -> RunConfig:
    """Makes the config of a decoder with typical proportions and about `num_params` parameters.

    A block has about 12 width**2 parameters (Kaplan et al., arXiv:2001.08361, section 2.1). As in
    GPT-3 and Llama, the width is about 128 times the number of blocks, and heads have size 128. The
    vocabulary has 32 000 tokens. Models below 50 M parameters use bytes as tokens and heads of size
    32.

    Args:
        num_params: the number of trainable parameters.
        global_batch: samples per step.
        sequence_length: tokens per sample.
        optimizer: the name of an optimizer in configs.
        precision: the name of a precision preset; None is float32.

    Raises:
        ConfigError: for a number that is not positive, or an unknown name.

    Example:
        >>> config = config_of_size(7e9, global_batch=64)
        >>> config.model.num_layers, config.model.width, config.model.num_heads
        (32, 4096, 32)
    """
    if not 1 <= num_params < math.inf:
        raise ConfigError(f"got {num_params} parameters; a model has at least one")
    head, vocabulary = (128, 32_000) if num_params >= 5e7 else (32, 256)
    depth = (num_params / (12 * 128**2)) ** (1 / 3)
    heads = _nearest(depth * 128 / head, 8 if depth >= 16 else 4)
    width = heads * head
    tied = num_params < 1e9
    tables = vocabulary * width * (1 if tied else 2)
    sizes = {"width": width, "num_heads": heads, "vocab_size": vocabulary, "tied_head": tied}
    layers = _nearest(max(num_params - tables, 0) / (12 * width**2), 4 if depth >= 16 else 1)
    model = {"num_layers": layers, "max_length": sequence_length, "scan_layers": True, **sizes}
    plain = {
        "name": "size",
        "model": {"kind": "transformer", **model},
        "data": {"kind": "text", "sequence_length": sequence_length},
        "optimizer": {"name": optimizer},
        "precision": precision,
        "train": {"global_batch": global_batch},
    }
    return RunConfig.from_dict(plain)


def _nearest(value: float, multiple: int) -> int:
    return max(1, round(value / multiple)) * multiple


def _of_config(arguments: argparse.Namespace) -> tuple[RunConfig, Hardware, int]:
    """Reads the config, and the machine to plan for."""
    typed = [f"--{name}" for name in _ONLY_WITH_PARAMS if getattr(arguments, name) is not None]
    if typed:
        raise ConfigError(
            f"got a config together with {', '.join(typed)}; the config defines these: override "
            "its values, as in train.global_batch=64",
            code="config-and-sizes",
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
    return config, row, num_devices


_ONLY_WITH_PARAMS = ("batch", "sequence", "optimizer", "precision")


def called(name: str) -> str:
    """Returns a plan's strategies with the names that the README and configs use."""
    return " + ".join(next(iter(STRATEGIES.over(part)), part) for part in name.split(" + "))


def digits(value: float) -> str:
    """Formats a number with two decimals if it is below 10, else without decimals."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def unit_of(largest: float) -> tuple[float, str]:
    """Returns the unit for byte counts up to `largest`, and its name."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")


def show_config_plans(config: RunConfig, ranking: ConfigPlans, console: Console) -> None:
    """Prints the plans of a config, the refused ones, and the config lines of the best.

    Args:
        config: the config.
        ranking: its plans.
        console: where to print.
    """
    work = ranking.work
    best = ranking.best
    rates = None
    if ranking.hardware.name == "cpu":
        rates = "h100, because emulated devices have none"
    console.print(
        f"{config.name}: {si(work.num_params, 'B')} parameters, {work.global_batch} samples per "
        f"step, {plural(ranking.num_devices, 'device')} of {byte_size(best.device_bytes)} with the "
        f"rates of {rates or ranking.hardware.name}"
    )
    console.print(
        "Best first: plans that fit into 90% of the memory, then the shortest predicted step, "
        "then the simplest among steps within 3%. Every plan's step was traced"
    )
    console.print(_table(ranking.plans, best if best.fits else None))
    console.print(_reason(best), style="bold" if ranking.fits else "bold red")
    for choice in best.loops:
        console.print(f"{called(best.candidate.name)}: {choice}")
    for why in dict.fromkeys(why for _, why in ranking.refused):
        kinds = ", ".join(called(kind) for kind, other in ranking.refused if other == why)
        clause = re.split(r"[.;] ", re.sub(r" \(.*\)", "", why))[0].rstrip(".")
        console.print(f"not {kinds}: {clause}", style="dim")
    if ranking.fits:
        _print_lines(best, config, console)
    if ranking.others:
        console.print("\nFaster, but with other numerics than this config:", style="bold")
        console.print(_table(ranking.others, None))
        for other in ranking.others[:1]:
            _print_lines(other, config, console)


def _print_lines(plan: TracedPlan, config: RunConfig, console: Console) -> None:
    """Prints the lines of a plan that replace those of its config, with the strategies' options."""
    console.print("\nLines of a config:", style="bold")
    plain = plan.config.to_dict()
    lines = {**plan.candidate.to_config(), "parallel": plain["parallel"]}
    # Also if the precision was an option of a strategy: the plan's strategies do not have it.
    own, given = (MixedPrecision.of(each.precision) for each in (plan.config, config))
    if own != given:
        lines["precision"] = plain["precision"]
    # The axes that a config names may not be those of the plan's mesh.
    if plan.config.axis_names != config.axis_names:
        lines["axis_names"] = plain["axis_names"]
    if plan.config.remat is None:
        # Without this line, the config would recompute what the plan keeps.
        lines |= {} if config.remat in (None, AUTO) else {"remat": None}
    elif plan.config.remat != ActivationCheckpointing():
        lines["remat"] = plain["remat"]
    console.print(to_yaml(lines), end="")


def _reason(plan: TracedPlan) -> str:
    """Explains the time of the best plan, or that none fits."""
    time = plan.time
    need = f"{byte_size(plan.reading.peak)} of {byte_size(plan.device_bytes)}"
    if not plan.fits:
        state = byte_size(plan.reading.state)
        return (
            f"no plan fits: {called(plan.candidate.name)} needs the least, {need}, of which "
            f"{state} are the train state"
        )
    parts = {
        "kernels": time.compute,
        "waiting in the pipeline": time.bubble,
        "the update": time.update,
        "exposed communication": time.exposed,
    }
    shares = ", ".join(f"{duration(part)} of {what}" for what, part in parts.items() if part > 0)
    return f"{called(plan.candidate.name)}: {need}; a step is {shares}"


def _table(plans: Sequence[TracedPlan], best: TracedPlan | None) -> Table:
    unit, name = unit_of(max(plan.reading.peak for plan in plans))
    is_measured = any(plan.measured is not None for plan in plans)
    caption = f"{name} per device, and sent per step; x: microbatches; steps are modelled"
    if is_measured:
        caption += "; compiled: read from the compiled program"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    # In a narrow terminal, long names wrap, but numbers are never cut.
    table.add_column("plan")
    headers = ("state", "temp", "peak", "fit", "sent", "step", "MFU")
    for header in (*headers, *(("compiled peak", "sent") if is_measured else ())):
        table.add_column(header, justify="right", no_wrap=header != "compiled peak")
    for plan in plans:
        style = "bold" if plan is best else ("" if plan.fits else "dim")
        table.add_row(*_row(plan, unit, is_measured), style=style)
    return table


def _title(plan: TracedPlan) -> str:
    """Returns the name of a plan with its schedule, expert dispatch, remat and changes."""
    one = plan.candidate
    schedule = one.schedule if one.pp > 1 else ""
    remat = "remat" if one.remat else ""
    # The step chooses how to send tokens to experts; read its choice from the traced program.
    kinds = {sent.kind for sent, _ in plan.reading.sends if "ep" in sent.axes}
    dispatch = ""
    if one.ep != 1:
        dispatch = "all_to_all" if "all-to-all" in kinds else "ring"
    details = (schedule, dispatch, remat, plan.changed)
    return ", ".join([called(one.name), *map(str, filter(None, details))])


def _row(plan: TracedPlan, unit: float, is_measured: bool) -> tuple[str, ...]:
    reading = plan.reading
    candidate = plan.candidate
    sizes = (reading.state + reading.batch, reading.temporaries, reading.peak)
    measured = ("", "") if is_measured else ()
    if plan.measured is not None:
        sent = plan.measured.collectives.total_wire_bytes()
        measured = (digits(plan.measured.memory.peak / unit), digits(sent / unit))
    # All branches of a pipeline are counted as taken, so its bytes are an upper bound.
    bound = "<" if candidate.pp > 1 else ""
    return (
        f"{_title(plan)}\n{candidate.mesh} x{candidate.num_microbatches}",
        *(digits(size / unit) for size in sizes),
        "yes" if plan.fits else "no",
        bound + digits(plan.wire_bytes / unit),
        duration(plan.time.total),
        f"{plan.utilization:.0%}" if plan.utilization else "",
        *measured,
    )
