"""The planner compared with the compiler: predictions for a step, and its program's needs.

    python -m benchmarks.planner [--cells REGEX] [--measured FILE] [--only-known] [--json FILE]

A cell is a model, a target, a mesh with its strategies, a precision, and whether blocks are
recomputed. Its step is compiled for the target, one process for each target, and its peak memory
and the bytes that a device sends are read from the program; the planner says the same from the
model's own program alone. What was measured is kept in a file of lines, so that the planner can be
changed and asked again in seconds.
Needs the extra `cuda` for GPUs and `aot` for TPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import optax
from rich.console import Console
from rich.table import Table

from axon_dist import ActivationCheckpointing, World, build_train_step
from axon_dist.inspect import report, target_devices, trace_step
from axon_dist.mesh import abstract_world
from axon_dist.mesh.targets import parse_target, prepare_environment
from axon_dist.parallel import STRATEGIES, compose
from axon_dist.planner import Reading, read_program

from .planner_models import SUBJECTS


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step to be predicted and compiled.

    Args:
        model: a key of `SUBJECTS`.
        target: a machine.
        mesh: axes and sizes.
        strategies: names, joined by `+`.
        precision: a preset's name.
        remat: whether blocks are recomputed.
        count: microbatches.
    """

    model: str
    target: str
    mesh: str
    strategies: str
    precision: str = "bf16"
    remat: bool = False
    count: int = 1

    @property
    def name(self) -> str:
        """Its name in tables and files."""
        rest = f"{self.precision}{',remat' * self.remat}{f',x{self.count}' * (self.count > 1)}"
        return f"{self.model}@{self.target} {self.mesh} {self.strategies} {rest}"


H100, NODES, V5P, CPU = "h100:8", "h100:2x8", "v5p:2x2x2", "cpu:8"
_DATA = (
    ("dp=8", "ddp"),
    ("dp=8", "zero1"),
    ("fsdp=8", "fsdp"),
    ("dp=2,fsdp=4", "hybrid"),
)


def cells() -> Iterator[Cell]:
    """The grid."""
    for model, (mesh, name) in itertools.product(SUBJECTS, _DATA):
        yield Cell(model, H100, mesh, name)
    for model in ("gpt", "llama", "vit", "mixer", "tower", "resnet"):
        yield Cell(model, H100, "fsdp=8", "fsdp", remat=True)
    for model in ("gpt", "llama", "mixer", "tower"):
        yield Cell(model, H100, "fsdp=8", "fsdp", "float32")
        yield Cell(model, V5P, "fsdp=8", "fsdp", remat=model != "tower")
        yield Cell(model, CPU, "dp=8", "ddp", "float32")
        yield Cell(model, CPU, "fsdp=8", "fsdp", "float32", remat=model == "gpt")
    for model in ("gpt", "llama", "vit"):
        yield Cell(model, H100, "fsdp=4,tp=2", "fsdp+tensor")
        yield Cell(model, H100, "dp=2,tp=4", "ddp+sequence", remat=True)
        yield Cell(model, H100, "pp=2,dp=4", "ddp+pipeline", count=4)
        yield Cell(model, H100, "pp=4,fsdp=2", "fsdp+pipeline", count=8)
        yield Cell(model, H100, "dp=8", "ddp", count=4, remat=True)
    for model in ("gpt", "llama"):
        yield Cell(model, H100, "fsdp=4,cp=2", "fsdp+context", remat=True)
        yield Cell(model, H100, "fsdp=8", "zero2", count=2)
        yield Cell(model, NODES, "fsdp=16", "fsdp", remat=True)
        yield Cell(model, NODES, "dp=2,fsdp=8", "hybrid")
        yield Cell(model, V5P, "dp=8", "zero1")
        yield Cell(model, V5P, "fsdp=4,tp=2", "fsdp+tensor")
    for model in ("tower", "recurrent", "unet"):
        yield Cell(model, NODES, "fsdp=16", "fsdp")
        yield Cell(model, NODES, "dp=2,fsdp=8", "hybrid")
    for model in ("recurrent", "unet", "vit"):
        yield Cell(model, CPU, "fsdp=8", "fsdp", "float32")
    # XLA:CPU widens what is computed in bfloat16.
    for target, precision in ((H100, "bf16"), (CPU, "float32")):
        yield Cell("gpt", target, "pp=4,dp=2", "ddp+pipeline", precision, count=8)
        yield Cell("experts", target, "fsdp=2,ep=4", "fsdp+expert", precision)
    yield Cell("experts", H100, "fsdp=2,ep=4", "fsdp+expert", remat=True)
    yield Cell("experts", H100, "ep=8", "expert")


def global_batch(cell: Cell) -> int:
    """Samples of a step: as many on a device, whatever the mesh."""
    return SUBJECTS[cell.model].rows * MESH_SIZE[cell.target]


MESH_SIZE = {H100: 8, NODES: 16, V5P: 8, CPU: 8}


def build(cell: Cell, world: World) -> Any:
    """The train step of a cell."""
    subject = SUBJECTS[cell.model]
    piped = "pipeline" in cell.strategies
    options: dict[str, Any] = {
        "pipeline": {"num_microbatches": cell.count},
        "sequence": {"sequence": True},
    }
    row = lambda name: STRATEGIES["tensor" if name == "sequence" else name]
    made = [row(n)(subject.make, world, **options.get(n, {})) for n in cell.strategies.split("+")]
    return build_train_step(
        subject.make,
        optax.adamw(1e-3),
        subject.loss_fn,
        compose(*made),
        world,
        accumulate=1 if piped else cell.count,
        precision=cell.precision,
        remat=ActivationCheckpointing() if cell.remat else None,
    )


def predict(cell: Cell) -> Reading:
    """Reads the step of a cell in an abstract world."""
    platform = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}[parse_target(cell.target).platform]
    world = abstract_world(cell.mesh, MESH_SIZE[cell.target], platform)
    step = build(cell, world)
    program, arguments = trace_step(step, SUBJECTS[cell.model].batch(global_batch(cell)))
    num_state = len(jax.tree.leaves(step.abstract_state))
    return read_program(program, arguments, num_state, dict(world.mesh.shape), platform)


def measure(cell: Cell, devices: Any) -> dict[str, Any]:
    """Compiles the step of a cell, and reads its program."""
    world = World.init(cell.mesh, devices)
    start = time.perf_counter()
    batch = SUBJECTS[cell.model].batch(global_batch(cell))
    found = report(build(cell, world).lower(batch).compile(), world.mesh)
    ledger, memory = found.collectives, found.memory
    return {
        "cell": cell.name,
        "peak": memory.peak,
        "state": memory.arguments,
        "temporaries": memory.temporaries,
        "wire": ledger.total_wire_bytes(),
        "by_axis": {str(axis): size for axis, size in ledger.by_axis().items()},
        "by_kind": {str(kind): size for kind, size in ledger.by_kind().items()},
        "bounded": any(one.in_conditional for one in ledger),
        "flops": [found.flops.low, found.flops.high],
        "seconds": time.perf_counter() - start,
    }


def worker(target: str, names: list[str], file: pathlib.Path) -> None:
    """Measures the cells of one target, a line for each as it comes."""
    prepare_environment(target)
    devices = target_devices(target)
    wanted = {cell.name: cell for cell in cells()}
    for name in names:
        try:
            row = measure(wanted[name], devices)
        except Exception as error:  # a cell that cannot be compiled is a row of the table
            row = {"cell": name, "error": f"{type(error).__name__}: {error}"[:500]}
        with file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")
        print(row, flush=True)


def read(file: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Earlier measurements, by cell."""
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["cell"]: row for row in rows}


def compare(cell: Cell, row: dict[str, Any]) -> dict[str, Any]:
    """Predicted over measured, of memory and of bytes sent."""
    reading = predict(cell)
    sent = reading.wire_bytes / row["wire"] if row["wire"] and not row["bounded"] else None
    return {
        "cell": cell.name,
        "predicted_peak": reading.peak,
        "measured_peak": row["peak"],
        "peak": reading.peak / row["peak"],
        "state": (reading.state + reading.batch) / row["state"],
        "sent": sent,
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each cell, and how far off they are."""
    table = Table(caption="predicted over measured; nothing was run")
    table.add_column("cell", no_wrap=True)
    for column in ("predicted GB", "compiled GB", "peak", "sent"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = (f"{row[name] / 1e9:.3f}" for name in ("predicted_peak", "measured_peak"))
        sent = "-" if row["sent"] is None else f"{row['sent']:.3f}"
        table.add_row(row["cell"], *sizes, f"{row['peak']:.3f}", sent)
    Console(width=140).print(table)
    for name in ("peak", "sent"):
        off = sorted(abs(row[name] - 1) for row in rows if row[name] is not None)
        if off:
            within = sum(one <= 0.02 for one in off)
            print(
                f"{name}: {len(off)} cells, median {statistics.median(off):.1%} off, worst "
                f"{off[-1]:.1%}, within 2 %: {within}, within 10 %: "
                f"{sum(one <= 0.1 for one in off)}, within 25 %: {sum(one <= 0.25 for one in off)}"
            )


def main() -> None:
    """Measures what is missing, predicts all, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default="", metavar="REGEX")
    parser.add_argument("--measured", type=pathlib.Path, default=pathlib.Path("runs/planner.jsonl"))
    parser.add_argument("--refresh", action="store_true", help="measure again what is known")
    parser.add_argument("--only-known", action="store_true", help="compile nothing")
    parser.add_argument("--json", type=pathlib.Path, help="write the comparison there")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    file = arguments.measured
    if arguments.worker:
        target, *names = arguments.worker
        return worker(target, names, file)
    file.parent.mkdir(parents=True, exist_ok=True)
    chosen = [cell for cell in cells() if re.search(arguments.cells, cell.name)]
    known = {} if arguments.refresh else read(file)
    for target in dict.fromkeys(cell.target for cell in chosen):
        names = [c.name for c in chosen if c.target == target and c.name not in known]
        if names and not arguments.only_known:
            command = [sys.executable, "-m", "benchmarks.planner", "--measured", str(file)]
            subprocess.run([*command, "--worker", target, *names], check=True)
    known = read(file)
    done = [cell for cell in chosen if cell.name in known and "error" not in known[cell.name]]
    for cell in chosen:
        if "error" in known.get(cell.name, {}):
            print(f"{cell.name}: {known[cell.name]['error']}")
    rows = [compare(cell, known[cell.name]) for cell in done]
    show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
