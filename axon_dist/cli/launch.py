"""`axon launch -n N [options] -- CMD`: several processes on this host, owned and watched."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from axon_dist.launch import LaunchPlan, launch

from .verb import Verb, as_file, as_int, as_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how many processes, where they meet, and what happens when one fails."""
    add = parser.add_argument
    add("-n", "--num-processes", type=as_int, default=1, help="processes on this host")
    add("--devices-per-process", type=as_int, help="CPU devices that each process makes up")
    add("--nnodes", type=as_int, default=1, help="hosts that run this command")
    add("--node-rank", type=as_int, default=0, help="which of them this is, from 0")
    add("--master-addr", default="localhost", help="the host of rank 0")
    add("--master-port", type=as_int, help="a free port there; found by itself on a single host")
    add(
        "--max-restarts",
        type=as_int,
        default=0,
        help="starts again after a failure; let CMD resume",
    )
    add("--elastic", action="store_true", help="restart without the processes that were lost")
    add(
        "--rejoin-after",
        type=as_number,
        metavar="SECONDS",
        help="with --elastic: start all again after so long on fewer, between two steps",
    )
    add("--grace", type=as_number, default=5.0, help="seconds for the others after one failed")
    add(
        "--log-dir", type=as_file, help="the folder for rank-<r>.log; runs/launch-<time> by default"
    )
    add("command", nargs=argparse.REMAINDER, metavar="-- CMD", help="what every rank runs")


def run(arguments: argparse.Namespace) -> int:
    """Launches; the exit code is that of the rank that failed first."""
    command = arguments.command
    plan = LaunchPlan(
        command=tuple(command[1:] if command[:1] == ["--"] else command),
        num_processes=arguments.num_processes,
        nnodes=arguments.nnodes,
        node_rank=arguments.node_rank,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
        devices_per_process=arguments.devices_per_process,
        max_restarts=arguments.max_restarts,
        elastic=arguments.elastic,
        rejoin_after=arguments.rejoin_after,
        grace=arguments.grace,
        log_dir=arguments.log_dir or Path(time.strftime("runs/launch-%Y%m%d-%H%M%S")),
    )
    return launch(plan, _tell)


def _tell(line: str) -> None:
    print(f"axon launch: {line}", file=sys.stderr, flush=True)


VERB = Verb(
    "launch",
    "Start several processes on this host, and watch over them.",
    add_arguments,
    run,
    examples=(
        "axon launch -n 4 -- axon train configs/quickstart.yaml",
        "axon launch -n 2 --devices-per-process 4 -- python train.py",
        "axon launch -n 8 --max-restarts 9 -- axon train CONFIG checkpoint.memory_every=20 "
        "--resume auto",
    ),
)
