"""The rows of `benchmarks.aot` that the documentation quotes, one after another.

    python -m benchmarks.aot_table [NAME ...] [--folder runs/aot] [--again] [--list]

Every row is compiled in a process of its own, as compilers for GPUs and TPUs want it; its figures
are written to `FOLDER/NAME.json` as it ends, and a row that is there already is only printed. A
name may be a pattern such as 'pipeline-*'; without names the table of what is there is printed
with all rows that are missing run first. Nothing is run on a GPU or TPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import pathlib
import subprocess
import sys
import time
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.table import Table

from axon_dist.schedule import PipelineSchedule

_LONG = {"32k": 32_768, "128k": 131_072}


def _rows() -> dict[str, str]:
    """The arguments of every row, the cheapest first."""
    small = "--target h100:8 --model 1b --strategy"
    rows = {
        "1b-scan": f"{small} fsdp --layers scan",
        "1b-list": f"{small} fsdp",
        "7b-scan": "--target h100:8 --model 7b --layers scan",
        "8b-scan": "--target h100:8 --model 8b --layers scan",
        "1b-hybrid": f"{small} hybrid --layers scan",
        "1b-ddp": f"{small} ddp --layers scan",
        **{
            f"1b-{strategy}-k8": f"{small} {strategy} --layers scan --accumulate 8"
            for strategy in ("ddp", "zero1", "fsdp")
        },
        "7b-64": "--target h100:8x8 --model 7b --layers scan",
        "8b-64": "--target h100:8x8 --model 8b --layers scan",
        "70b-64": "--target h100:8x8 --model 70b --layers scan",
        **{
            f"{model}-fsdp8-tp8": f"--target h100:8x8 --model {model} --layers scan "
            "--mesh fsdp=8,tp=8 --tensor sequence"
            for model in ("7b", "8b", "70b")
        },
        **{
            f"ring-{name}": "--target h100:8 --model 1b --num-layers 2 --mesh fsdp=1,cp=8 "
            f"--length {length}"
            for name, length in _LONG.items()
        },
        **{
            f"ring-{name}-24": "--target h100:8 --model 1b --layers scan --mesh fsdp=1,cp=8 "
            f"--length {length}"
            for name, length in _LONG.items()
        },
        **{
            f"experts-{mesh.replace('=', '').replace(',', '-')}": f"--target {target} --model 1b "
            f"--num-layers 8 --layers scan --experts 64,4,2048 --mesh {mesh}"
            for target, mesh in (
                ("h100:8", "fsdp=8"),
                ("h100:8", "ep=8"),
                ("h100:8x8", "fsdp=8,ep=8"),
            )
        },
        "packed-32k": f"{small} fsdp --layers scan --length 32768 --documents",
        **{
            f"{chip}-{model}": f"--target {target} --model {model} --layers scan"
            for chip, target in (("a100", "a100-80:8"), ("v4", "v4:2x2x2"))
            for model in ("1b", "7b")
        },
        "v5p-1b": "--target v5p:2x2x2 --model 1b --layers scan",
        "v5p-7b": "--target v5p:2x2x2 --model 7b --layers scan",
        "v5p-64-7b": "--target v5p:4x4x4 --model 7b --layers scan",
        "v5p-64-8b": "--target v5p:4x4x4 --model 8b --layers scan",
    }
    # 48 layers divide by all numbers of chunks.
    for schedule in PipelineSchedule:
        rows[f"pipeline-{schedule}"] = (
            "--target h100:8 --model 1b --mesh pp=8 --num-layers 48 --accumulate 64 "
            f"--schedule {schedule}"
        )
    return rows


ROWS: MappingProxyType[str, str] = MappingProxyType(_rows())
"""The arguments of `benchmarks.aot` by the name of the row."""


def main() -> None:
    """Runs what is missing and prints what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/aot"))
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--list", action="store_true", help="print the rows and do nothing")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a row may take")
    args = parser.parse_args()
    names = [name for name in ROWS if any(fnmatch.fnmatch(name, p) for p in args.names)]
    if args.list:
        for name in names:
            print(f"{name:24} python -m benchmarks.aot {ROWS[name]}")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        if args.again or not (args.folder / f"{name}.json").exists():
            run(name, args.folder, args.limit)
    Console(width=150).print(table(read(args.folder, names)))


def run(name: str, folder: pathlib.Path, limit: float) -> None:
    """One row; its log is in the folder of its figures. A row that failed has only the log."""
    command = [sys.executable, "-m", "benchmarks.aot", *ROWS[name].split()]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "--json", str(folder / f"{name}.json")],
            capture_output=True,
            text=True,
            timeout=limit,
        )
        output, how = done.stdout + done.stderr, f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        output, how = "", f"left out: more than {limit:.0f} s"
    (folder / f"{name}.log").write_text(output)
    print(f"{name}: {how}, {time.perf_counter() - start:.0f} s", flush=True)


def read(folder: pathlib.Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """The figures of the rows that are there."""
    files = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def table(rows: dict[str, dict[str, Any]]) -> Table:
    """A line for each row."""
    found = Table(
        caption="per device and step; nothing was run; modelled: at peak rates; expected: at the "
        "rates that kernels reach"
    )
    for column in ("row", "target", "mesh", "strategy"):
        found.add_column(column)
    for column in ("peak GiB", "wire MB", "theory", "x", "modelled ms", "waited ms", "%"):
        found.add_column(column, justify="right")
    # Rows of files that were written before a time was expected have none.
    for column in ("expected ms", "MFU", "FLOPs of traced", "exec."):
        found.add_column(column, justify="right")
    found.add_column("s", justify="right")
    for name, row in rows.items():
        wire, least = row["wire_mb"], row["theory_mb"]
        found.add_row(
            *(name, row["target"], row["mesh"], row["schedule"] or row["strategy"]),
            f"{row['peak_gib']:.2f}",
            f"{wire:.0f}",
            f"{least:.0f}",
            f"{wire / least:.2f}" if least else "-",
            f"{row['modelled_ms']:.1f}",
            f"{row['waited_ms']:.1f}",
            f"{row['waited_ms'] / row['modelled_ms']:.1%}" if row["modelled_ms"] else "-",
            f"{row['expected_ms']:.1f}" if "expected_ms" in row else "-",
            f"{row['expected_mfu']:.1%}" if "expected_mfu" in row else "-",
            f"{row['tflop'] / row['traced_tflop']:.3f}",
            f"{row['executed']:.3f}" if "executed" in row else "",
            f"{sum(row[f'{part}_seconds'] for part in ('build', 'lower', 'compile')):.0f}",
        )
    return found


if __name__ == "__main__":
    main()
