"""The host's cost of building a step: time, text and memory by layers, devices and experts.

    python -m benchmarks.size [PART ...] [--folder runs/size] [--again] [--list] [--limit SECONDS]

The parts are `layers`, `devices`, `experts` and `models`, or patterns of the names of rows such as
'layers-h100-scan-*'. Every row is built and compiled in a process of its own, so that its peak of
memory is its own; its figures are written to `FOLDER/NAME.json` as it ends, and a row that is there
already is only printed. The models of the first three parts are narrow: what compiling them costs
is structure. Of the last part what counts is what a step needs where it would run.

`build` is `build_train_step`, `trace` and `lower` what `TrainStep.lower` takes, `compile` XLA.
Equations are those of the traced step, programs within it included; "lowered" is StableHLO as text,
"compiled" that of the optimised program. "host" is the peak of the process. The least time of a
step is its matrix operations at the peak rate of the chip and what they wait for transfers;
the predicted one is `inspect.model_time`. Nothing is run.
Needs the extra `cuda` for GPUs and `aot` for TPUs.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from axon_dist import World
from axon_dist.inspect import report, target_devices, trace_step
from axon_dist.ir.walk import equations
from axon_dist.mesh.targets import parse_target, prepare_environment
from axon_dist.models import num_params

from .size_rows import PARTS, ROWS, Row, model_flops


def main() -> None:
    """Runs what is missing and prints what is there; with `--row`, one row here and now."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/size"))
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--list", action="store_true", help="print the rows and do nothing")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a row may take")
    parser.add_argument("--row", metavar="NAME", help="measure this row in this process")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(ROWS[args.row]), indent=1))
        return
    names = [name for name in ROWS if _is_asked(name, args.names)]
    if args.list:
        for name in names:
            print(f"{name:28} {ROWS[name].target:14} {ROWS[name].mesh}")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if args.again or not (args.folder / f"{name}.json").exists():
            run(name, args.folder, args.limit)
    found = read(args.folder, names)
    console = Console(width=160)
    if slopes := {name: row for name, row in found.items() if ROWS[name].part != "models"}:
        console.print(slope_table(slopes))
    if models := {name: row for name, row in found.items() if ROWS[name].part == "models"}:
        console.print(model_table(models))


def _is_asked(name: str, asked: list[str]) -> bool:
    return any(ROWS[name].part == each or fnmatch.fnmatch(name, each) for each in asked)


def run(name: str, folder: pathlib.Path, limit: float) -> None:
    """One row in a process of its own; of one that fails, what it said is kept."""
    command = [sys.executable, "-m", "benchmarks.size", "--row", name]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        how = f"exit {done.returncode}"
        file = folder / (f"{name}.json" if done.returncode == 0 else f"{name}.log")
        file.write_text(done.stdout if done.returncode == 0 else done.stderr)
    except subprocess.TimeoutExpired:
        how = f"left out: more than {limit:.0f} s"
    print(f"{name}: {how}, {time.perf_counter() - start:.0f} s", flush=True)


def measure(row: Row) -> dict[str, Any]:
    """The figures of one row; the peaks of memory are those of this process."""
    prepare_environment(row.target)
    found: dict[str, Any] = {"target": row.target, "mesh": row.mesh, "jax": jax.__version__}
    clock = Clock(found)
    world = World.init(row.mesh, target_devices(row.target))
    clock.lap("devices")
    step, batch = row.build(world)
    clock.lap("build")
    program, _ = trace_step(step, batch)
    clock.lap("trace")
    lowered = step.lower(batch)
    clock.lap("lower")
    compiled = lowered.compile()
    clock.lap("compile")
    found["equations"] = sum(1 for _ in equations(program.jaxpr))
    found["lowered_mb"] = len(lowered.as_text()) / 1e6
    found["compiled_mb"] = len(compiled.as_text()) / 1e6
    found["parameters"] = num_params(row.config)
    return found | where_it_runs(row, step, batch, report(compiled, world.mesh))


class Clock:
    """Notes the seconds of each part of a row, and the peak of memory behind it."""

    def __init__(self, found: dict[str, Any]):
        self._found, self._last = found, time.perf_counter()

    def lap(self, name: str) -> None:
        """Ends a part."""
        now = time.perf_counter()
        self._found[f"{name}_seconds"], self._last = now - self._last, now
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._found[f"{name}_host_gb"] = peak * 1024 / 1e9


def where_it_runs(row: Row, step: Any, batch: Any, found: Any) -> dict[str, Any]:
    """The memory that a step needs on a device, and its least time."""
    machine, ledger = found.machine, found.collectives
    tokens = jax.tree.leaves(batch)[0]
    count = tokens.shape[0] * row.length
    flops = model_flops(row.config, count, row.length) / step.world.size
    compute, waited = found.flops.high / machine.rate("bfloat16"), ledger.waited()
    return {
        "fits": found.fits,
        "peak_gb": found.memory.peak / 1e9,
        "arguments_gb": found.memory.arguments / 1e9,
        "memory_gb": machine.memory_bytes / 1e9,
        "by_axis_gb": {axis: size / 1e9 for axis, size in ledger.by_axis().items()},
        "exposed_gb": ledger.exposed_bytes() / 1e9,
        "light_gb": ledger.light_bytes() / 1e9,
        "wire_seconds": ledger.seconds(),
        "waited_seconds": waited,
        "tokens": count,
        "model_tflops": flops / 1e12,
        "executed_tflops": found.flops.high / 1e12,
        "least_seconds": compute + waited,
        "predicted_seconds": found.time.total,
        "predicted_mfu": found.time.utilization(flops),
        "in_branches": any(one.in_conditional for one in ledger),
    }


def read(folder: pathlib.Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """The figures of the rows that are there."""
    files = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def slope_table(rows: dict[str, dict[str, Any]]) -> Table:
    """The cost of a row to the host."""
    table = Table(caption="seconds; text in MB; peak of the process in GB; nothing was run")
    table.add_column("row")
    parts = ("build", "trace", "lower", "compile")
    for column in (*parts, "equations", "lowered", "compiled", "host before", "host"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(
            name,
            *(f"{row[f'{part}_seconds']:.2f}" for part in parts),
            f"{row['equations']}",
            f"{row['lowered_mb']:.2f}",
            f"{row['compiled_mb']:.2f}",
            f"{row['devices_host_gb']:.2f}",
            f"{row['compile_host_gb']:.2f}",
        )
    return table


def model_table(rows: dict[str, dict[str, Any]]) -> Table:
    """The memory of a row on each device."""
    table = Table(caption="per device and step; nothing was run")
    for column in ("row", "mesh"):
        table.add_column(column)
    for column in ("P, B", "peak of HBM, GB", "GB sent by axis", "exposed"):
        table.add_column(column, justify="right")
    for column in ("step s", "predicted s", "MFU", "tokens/s", "host s", "host GB"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        axes = row["by_axis_gb"].items()
        sent = ", ".join(f"{axis} {size:.1f}" for axis, size in axes if size > 0.05)
        bound = "< " if row["in_branches"] else ""
        total = sum(row["by_axis_gb"].values())
        devices = parse_target(row["target"]).num_devices
        host = sum(row[f"{part}_seconds"] for part in ("build", "trace", "lower", "compile"))
        table.add_row(
            name,
            row["mesh"],
            f"{row['parameters'] / 1e9:.1f}",
            f"{row['peak_gb']:.1f} of {row['memory_gb']:.0f}" + ("" if row["fits"] else " NO"),
            f"{bound}{sent}",
            f"{row['exposed_gb'] / total:.0%}" if total else "-",
            f"{row['least_seconds']:.2f}",
            f"{row['predicted_seconds']:.2f}",
            f"{row['predicted_mfu']:.0%}",
            f"{row['tokens'] / row['predicted_seconds'] / devices:.0f}",
            f"{host:.0f}",
            f"{row['compile_host_gb']:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
