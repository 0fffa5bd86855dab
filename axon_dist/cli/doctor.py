"""`axon doctor`: what is here, and what is missing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from axon_dist.app import attention_rows, check_numerics
from axon_dist.mesh import World

from .environment import devices, extras, mesh_suggestions, versions
from .verb import Verb

EMULATED = 4
"""How many devices are made up where there are too few for a mesh with two axes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the check of the compiler."""
    parser.add_argument(
        "--numerics",
        nargs="?",
        const="core",
        choices=("core", "full"),
        help="compare the gradients of many operations, laid out over a mesh, with one device",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints versions, devices, meshes and extras.

    The exit code is 1 if no backend starts, or a gradient is wrong.
    """
    console = Console(highlight=False, soft_wrap=True)
    if arguments.numerics:
        # Before anything starts the backend, whose devices are counted then.
        World.emulate(EMULATED)
    found = devices()
    _section(console, "Versions", versions())
    _section(console, "Devices", found)
    _section(console, "Meshes", _meshes(found))
    if "devices" in found:
        _section(console, "Attention", attention_rows(World.init()))
    _section(console, "Extras", _extras())
    are_right = not arguments.numerics or _numerics(console, arguments.numerics == "full")
    return 0 if "devices" in found and are_right else 1


def _numerics(console: Console, full: bool) -> bool:
    """Prints what the sentinels found; returns whether all gradients are right."""
    here, emulated = World.init().mesh, World.emulate(EMULATED).mesh
    fits = here.size >= EMULATED and here.size % 2 == 0
    chosen = list((here if fits else emulated).devices.flat)
    findings = check_numerics(chosen, full=full)
    wrong = [finding for finding in findings if not finding.is_right]
    worst = max((finding.error for finding in findings if finding.is_right), default=0.0)
    rows: dict[str, Any] = {
        "devices": f"{len(chosen)} x {chosen[0].device_kind}",
        "gradients": f"{len(findings) - len(wrong)} of {len(findings)} right, error <= {worst:.1e}",
    }
    for finding in wrong:
        rows[f"{finding.sentinel}/{finding.leaf}"] = f"off by {finding.error:.1e}, {finding.layout}"
    _section(console, "Numerics", rows)
    return not wrong


def _meshes(found: Mapping[str, Any]) -> dict[str, str]:
    count = found.get("devices", 0)
    rows = {f"on {count}": "  ".join(mesh_suggestions(count))} if count else {}
    return {**rows, "emulated": "devices.emulate=8 in a config makes up 8 CPU devices"}


def _extras() -> dict[str, str]:
    rows = {extra.name: _state(extra.name, extra.missing) for extra in extras()}
    return rows or {"none": "unknown, for axon_dist is not installed: pip install ."}


def _state(name: str, missing: tuple[str, ...]) -> str:
    if not missing:
        return "installed"
    return f"lacks {', '.join(missing)}: pip install 'axon_dist[{name}]'"


def _section(console: Console, title: str, rows: Mapping[str, Any]) -> None:
    console.print(title, style="bold")
    width = max(map(len, rows))
    for label, value in rows.items():
        text = " ".join(str(value).split())
        console.print(f"  {label:<{width}}  {text}", markup=False)


VERB = Verb(
    "doctor",
    "Print versions, devices, and what is missing.",
    add_arguments,
    run,
    examples=(
        "axon doctor",
        "axon doctor --numerics",
    ),
)
