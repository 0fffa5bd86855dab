"""The tables of `axon plan`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from axon_dist.app import ConfigPlans, ReadPlan
from axon_dist.core.words import byte_size, plural
from axon_dist.planner import Arrangement

_NAMES = {
    "shard_grad_op": "zero2",
    "tp": "tensor",
    "pp": "pipeline",
    "cp": "context",
    "ep": "expert",
}


def called(name: str) -> str:
    """What README and configs call the strategies of a plan."""
    return " + ".join(_NAMES.get(part, part) for part in name.split(" + "))


def digits(value: float) -> str:
    """A number with as many digits as it is worth."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def unit_of(largest: float) -> tuple[float, str]:
    """The unit for numbers of bytes up to the largest."""
    return (1e9, "GB") if largest >= 1e9 else (1e6, "MB")


def seconds(time: float) -> str:
    """A time in the unit that leaves at least one."""
    for unit, scale in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if time * scale >= 1:
            return f"{time * scale:.3g}{unit}"
    return "<1us"


def count_of(number: float) -> str:
    """A number of parameters as it is spoken."""
    for unit in ("", "K", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.4g}B"


def show_config_plans(name: str, found: ConfigPlans, console: Console) -> None:
    """Prints the plans of a config, what was refused, and the lines of the best.

    Args:
        name: of the config.
        found: its plans.
        console: where to.
    """
    work, best = found.work, found.best
    rates = "h100, for emulated devices have none" if found.hardware.name == "cpu" else None
    console.print(
        f"{name}: {count_of(work.num_params)} parameters, {work.global_batch} samples per "
        f"step, {plural(found.num_devices, 'device')} of {byte_size(best.device_bytes)} with the "
        f"rates of {rates or found.hardware.name}"
    )
    console.print(
        "Best first: what fits into 90 % of the memory, then the shortest predicted step; of steps "
        "within 3 % the simplest. Each was read from its own traced step"
    )
    console.print(_table(found.plans, best if best.fits else None))
    console.print(_reason(best), style="bold" if found.fits else "bold red")
    for why in dict.fromkeys(why for _, why in found.refused):
        kinds = ", ".join(called(kind) for kind, other in found.refused if other == why)
        console.print(f"not {kinds}: {_first_clause(why)}", style="dim")
    if found.fits:
        print_lines(best.arrangement, console, _of_config(best))
    if found.others:
        console.print("\nFaster, and trains to other numbers than this config:", style="bold")
        console.print(_table(found.others, None))
        for other in found.others[:1]:
            print_lines(other.arrangement, console, _of_config(other))


def _of_config(plan: ReadPlan) -> dict[str, Any]:
    """The lines that say more than the arrangement: options of strategies, another precision."""
    plain = plan.config.to_dict()
    lines = {"parallel": plain["parallel"]}
    if plan.changed is not None and plan.arrangement.apart is None:
        lines["precision"] = plain["precision"]
    return lines


def print_lines(
    arrangement: Arrangement, console: Console, also: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Prints what a config says to run so."""
    console.print("\nLines of a config:", style="bold")
    lines = arrangement.to_config()
    lines["parallel"] = {called(name): row for name, row in lines["parallel"].items()}
    lines.update(also)
    console.print(yaml.safe_dump(lines, sort_keys=False), end="")


def _first_clause(why: str) -> str:
    """The first sentence of a refusal, without what it says in brackets."""
    plain = re.sub(r" \(.*\)", "", why)
    return re.split(r"[.;] ", plain)[0].rstrip(".")


def _reason(plan: ReadPlan) -> str:
    """Why a plan is the best, or none is."""
    time = plan.time
    need = f"{byte_size(plan.reading.peak)} of {byte_size(plan.device_bytes)}"
    if not plan.fits:
        state = byte_size(plan.reading.state)
        return (
            f"does not fit: {called(plan.arrangement.name)} comes nearest, {need}, of which "
            f"{state} are the train state"
        )
    parts = {
        "products": time.compute,
        "waiting in the pipeline": time.bubble,
        "the update": time.update,
        "transfers that nothing hides": time.exposed,
    }
    said = ", ".join(f"{seconds(part)} {what}" for what, part in parts.items() if part > 0)
    return f"{called(plan.arrangement.name)}: {need}; a step is {said}"


def _table(plans: Sequence[ReadPlan], best: ReadPlan | None) -> Table:
    unit, name = unit_of(max(plan.reading.peak for plan in plans))
    is_measured = any(plan.measured is not None for plan in plans)
    caption = f"{name} per device, and sent per step; x: microbatches; half of peak FLOP/s assumed"
    caption += "; compiled: of the program that would run" * is_measured
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    # Where columns are added, long names are folded and no number is cut.
    table.add_column("plan", no_wrap=not is_measured)
    headers = ("state", "temp", "peak", "fit", "sent", "step")
    for header in (*headers, *(("compiled peak", "sent") if is_measured else ())):
        table.add_column(header, justify="right", no_wrap=header != "compiled peak")
    for plan in plans:
        style = "bold" if plan is best else ("" if plan.fits else "dim")
        table.add_row(*_row(plan, unit, is_measured), style=style)
    return table


def _title(plan: ReadPlan) -> str:
    """What a plan is called, with what its name does not say."""
    one = plan.arrangement
    also = [str(one.schedule)] if one.pp > 1 else []
    also += [form for form in [_form(plan)] if form]
    also += ["remat"] if one.remat else []
    also += [plan.changed] if plan.changed else []
    return ", ".join([called(one.name), *also])


def _form(plan: ReadPlan) -> str | None:
    """How tokens travel to experts, which the step has chosen by bytes."""
    kinds = {sent.kind for sent, _ in plan.reading.sends if "ep" in sent.axes}
    if plan.arrangement.ep == 1:
        return None
    return "all_to_all" if "all-to-all" in kinds else "ring"


def _row(plan: ReadPlan, unit: float, is_measured: bool) -> tuple[str, ...]:
    reading, arrangement = plan.reading, plan.arrangement
    sizes = (reading.state + reading.batch, reading.temporaries, reading.peak)
    measured = ("", "") if is_measured else ()
    if plan.measured is not None:
        sent = plan.measured.collectives.total_wire_bytes()
        measured = (digits(plan.measured.memory.peak / unit), digits(sent / unit))
    # What is sent in branches that may not be taken is counted as if they were.
    bound = "<" if arrangement.pp > 1 else ""
    return (
        f"{_title(plan)}\n{arrangement.mesh} x{arrangement.num_microbatches}",
        *(digits(size / unit) for size in sizes),
        "yes" if plan.fits else "no",
        bound + digits(plan.wire_bytes / unit),
        seconds(plan.time.total),
        *measured,
    )
