"""`axon doctor`: what is here, and what is missing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from .environment import devices, extras, mesh_suggestions, versions
from .verb import Verb


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Prints versions, devices, meshes and extras; the exit code is 1 if no backend starts."""
    console = Console(highlight=False, soft_wrap=True)
    found = devices()
    _section(console, "Versions", versions())
    _section(console, "Devices", found)
    _section(console, "Meshes", _meshes(found))
    _section(console, "Extras", _extras())
    return 0 if "devices" in found else 1


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


VERB = Verb("doctor", "Print versions, devices, and what is missing.", add_arguments, run)
