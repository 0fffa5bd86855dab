"""`axon generate RUN --prompt TEXT`: the model of a run goes on with a text."""

from __future__ import annotations

import argparse
import dataclasses
import json

from rich.console import Console
from rich.text import Text

from axon_dist.app import Completion, generate_text
from axon_dist.collectives import is_main_process

from .verb import Verb, add_run, as_file, as_int, as_number, check_output, notice, write_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the run, the prompts, and how tokens are drawn."""
    add_run(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        required=True,
        metavar="TEXT",
        help="what to go on with; may be repeated",
    )
    parser.add_argument("--tokens", type=as_int, default=100, metavar="N", help="at most; 100")
    parser.add_argument(
        "--temperature",
        type=as_number,
        default=1.0,
        metavar="T",
        help="0 takes the likeliest token, 1 draws as the model says (1)",
    )
    parser.add_argument(
        "--top-k", type=as_int, metavar="K", help="draw among the K likeliest tokens"
    )
    parser.add_argument(
        "--top-p", type=as_number, metavar="P", help="draw among the likeliest that add up to P"
    )
    parser.add_argument("--seed", type=as_int, default=0, help="of the draws (0)")
    parser.add_argument(
        "--past-end", action="store_true", help="go on where the model ends the document"
    )
    parser.add_argument("--json", type=as_file, metavar="FILE", help="write the texts there too")


def run(arguments: argparse.Namespace) -> int:
    """Generates and prints."""
    check_output("--json", arguments.json)
    found = generate_text(
        arguments.folder,
        arguments.prompt,
        arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        stops=not arguments.past_end,
        step=arguments.step,
        overrides=arguments.overrides,
        one_device=arguments.one_device,
        tell=notice,
    )
    if not is_main_process():
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for number, completion in enumerate(found):
        if number:
            console.rule()
        console.print(_text(completion))
    if arguments.json is not None:
        plain = [dataclasses.asdict(completion) for completion in found]
        write_output("--json", arguments.json, json.dumps(plain, indent=2) + "\n")
    return 0


def _text(completion: Completion) -> Text:
    return Text.assemble((_shown(completion.prompt), "bold"), _shown(completion.text))


def _shown(text: str) -> str:
    """A text for a terminal, which must not obey what a model writes."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


VERB = Verb(
    "generate",
    "Go on with a text as the model of a run would.",
    add_arguments,
    run,
    examples=(
        'axon generate runs/a --prompt "def main("',
        'axon generate runs/a --prompt "To be" --tokens 50 --temperature 0 --one-device',
    ),
)
