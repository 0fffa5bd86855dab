"""`axon export RUN OUT [--format hf-llama]`: the weights of a run as safetensors."""

from __future__ import annotations

import argparse

from rich.console import Console

from axon_dist.app import export_run
from axon_dist.core.words import plural
from axon_dist.planner import parse_bytes
from axon_dist.weights import FORMATS, MAX_FILE

from .verb import Verb, add_step, notice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, where its weights go, and in which form."""
    parser.add_argument("folder", metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "out", metavar="OUT", help="a file that ends in .safetensors, or a folder for it"
    )
    parser.add_argument(
        "--format",
        default="native",
        metavar="|".join(["native", *FORMATS]),
        help="names of the tensors: native, as the model has them, or those of a hub, with a "
        "config.json beside them",
    )
    add_step(parser)
    parser.add_argument(
        "--dtype", help="of floats, such as bfloat16; as they were saved by default"
    )
    parser.add_argument(
        "--max-file", metavar="SIZE", help="cut into several files above this, such as 5GB"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes, and says what."""
    max_file = MAX_FILE if arguments.max_file is None else parse_bytes(arguments.max_file)
    count = export_run(
        arguments.folder,
        arguments.out,
        arguments.format,
        step=arguments.step,
        dtype=arguments.dtype,
        max_file=max_file,
        tell=notice,
    )
    told = f"{plural(count, 'tensor')} ({arguments.format}) in {arguments.out}"
    Console().print(told, soft_wrap=True, highlight=False, markup=False)
    return 0


VERB = Verb(
    "export",
    "Write the weights of a run as safetensors.",
    add_arguments,
    run,
    examples=(
        "axon export runs/a model.safetensors",
        "axon export runs/a out --format hf-llama --dtype bfloat16",
    ),
)
"""The row of the table of verbs."""
