"""The recipes in configs/recipes, compiled at full size for machines that are not here.

    python -m benchmarks.recipes [RECIPE@TARGET ...] [--json FILE]

Every row is `axon inspect` of a recipe in a process of its own, as compilers for GPUs and TPUs want
it. "state" is what a device holds between steps, "16 P" what parameters, gradients and two moments
in float32 come to where they are split; "peak" is all that a step needs. What a device sends in
branches that it may not take, as in a pipeline, is counted as if it took all: a bound, marked "<".
Nothing is run.
Needs the extra `cuda` for GPUs and `aot` for TPUs.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
from flax import nnx
from rich.console import Console
from rich.table import Table

from axon_dist.core.tree import num_params
from axon_dist.mesh import MeshSpec
from axon_dist.mesh.targets import parse_target
from axon_dist.train.config import RunConfig, load_config
from axon_dist.train.config.models import make_model

FOLDER = pathlib.Path(__file__).parents[1] / "configs" / "recipes"
ROWS = (
    "resnet50_ddp8@v5p:2x2x2",
    "gpt2_medium_dp4_tp2@h100:8",
    "vit_1b_fsdp16@h100:2x8",
    "vit_1b_pp4@h100:8",
    "vit_1b_pp4@h100:4x8",
    "gpt3_175b_pp8_tp4_fsdp32@v5p:8x8x16",
)
SPLITTING = ("pp", "fsdp", "tp")
"""The axes that the recipes split parameters over."""


def main() -> None:
    """Compiles the rows and prints a table as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="RECIPE@TARGET")
    parser.add_argument("--json", help="write the figures there too")
    arguments = parser.parse_args()
    found = [measure(*row.split("@")) for row in arguments.rows]
    Console(width=140).print(table(found))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(found, indent=1))


def measure(recipe: str, target: str) -> dict[str, Any]:
    """The figures of one recipe on one target."""
    path = FOLDER / f"{recipe}.yaml"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "report.json")
        start = time.perf_counter()
        command = [sys.executable, "-m", "axon_dist.train.cli", "inspect", str(path)]
        subprocess.run(
            [*command, "--target", target, "--json", str(file)], check=True, capture_output=True
        )
        report = json.loads(file.read_text())
        seconds = time.perf_counter() - start
    return figures(load_config(path), target, report) | {"seconds": seconds}


def figures(config: RunConfig, target: str, report: dict[str, Any]) -> dict[str, Any]:
    """The columns that the table shows of a report."""
    machine = parse_target(target)
    params = count_params(config)
    mesh = MeshSpec(config.mesh).resolve(machine.num_devices)
    ways = 1
    for axis in SPLITTING:
        ways *= mesh.shape.get(axis, 1)
    return {
        "recipe": config.name,
        "target": target,
        "mesh": str(mesh),
        "parameters": params,
        "theory_gb": 16 * params / ways / 1e9,
        "hbm_gb": (machine.hbm_bytes or 0) / 1e9,
        "wire_gb": report["wire_bytes"] / 1e9,
        "wire_is_bound": any(row["in_conditional"] for row in report["collectives"]),
        "wire_bytes_by_axis": report["wire_bytes_by_axis"],
        "wire_bytes_by_exposure": report["wire_bytes_by_exposure"],
        **{f"{name}_gb": size / 1e9 for name, size in report["memory"].items()},
    }


def count_params(config: RunConfig) -> int:
    """Parameters of the model, counted without making any."""
    model = nnx.eval_shape(lambda: make_model(config.model, config.seed))
    return num_params(jax.tree.leaves(nnx.state(model, nnx.Param)))


def table(rows: list[dict[str, Any]]) -> Table:
    """A line for each recipe and target, per device."""
    found = Table(caption="GB per device and step; nothing was run")
    for column in ("recipe", "target", "mesh"):
        found.add_column(column)
    for column in ("parameters", "state", "16 P", "peak", "HBM", "sent"):
        found.add_column(column, justify="right")
    for row in rows:
        sizes = (row[f"{name}_gb"] for name in ("arguments", "theory", "peak", "hbm"))
        count = f"{row['parameters'] / 1e6:,.1f} M"
        cells = (row["recipe"], row["target"], row["mesh"], count)
        sent = f"{'< ' if row['wire_is_bound'] else ''}{row['wire_gb']:.2f}"
        found.add_row(*cells, *(f"{size:.2f}" for size in sizes), sent)
    return found


if __name__ == "__main__":
    main()
