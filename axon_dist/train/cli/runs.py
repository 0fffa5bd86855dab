"""The verbs for a config or a run: each calls a function of `train.app` and prints the result."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from axon_dist.core.errors import ConfigError, MeshError
from axon_dist.core.files import as_place, kind_at
from axon_dist.core.words import plural, printable, si
from axon_dist.launch import INTERRUPTED
from axon_dist.mesh import process_index
from axon_dist.ops.precision import MixedPrecision
from axon_dist.planner import parse_bytes
from axon_dist.train.app import (
    Completion,
    DataCheck,
    check_data,
    dry_run,
    evaluate,
    examine,
    export_run,
    generate_text,
    profile_run,
    profile_step,
    report_page,
    tiny,
    train,
    tune,
    verify,
)
from axon_dist.train.app.summary import two_columns
from axon_dist.train.app.verify import SPREAD
from axon_dist.train.config import (
    RunConfig,
    describe,
    load_config,
    to_markdown,
    to_text,
    with_own_precision,
)

from .values import check_output, fitted, notice, write_output


class TolerantConsole(Console):
    """A console that becomes quiet when its reader has closed the pipe, as in `| head`.

    Rich's console would exit the program, and so end a long training run.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints unless the terminal is closed, which raises a different `OSError` than a pipe."""
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Continues without output; also makes the flush at the interpreter's exit succeed."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _config(arguments: argparse.Namespace) -> RunConfig:
    return load_config(arguments.config, arguments.overrides)


def _keywords(arguments: argparse.Namespace, *but: str) -> dict[str, Any]:
    """Returns the arguments as keyword arguments of the verb's function."""
    return {n: x for n, x in vars(arguments).items() if n not in ("verb", "began", "json", *but)}


def _print(line: str) -> None:
    Console().print(fitted(line, sys.stdout), soft_wrap=True, highlight=False, markup=False)


def _write_json(arguments: argparse.Namespace, plain: object) -> None:
    """Writes the file of `--json`, if the option is given."""
    if arguments.json is not None:
        write_output("--json", arguments.json, json.dumps(plain, indent=2) + "\n")


@contextlib.contextmanager
def _ignoring_trace_requests() -> Iterator[None]:
    """Ignores SIGUSR1 outside the training loop.

    The loop handles the signal as a request for a trace. Without a handler it kills the process.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def train_config(arguments: argparse.Namespace) -> int:
    """Trains, and reports progress on standard output."""
    if not arguments.dry_run:
        with _ignoring_trace_requests():
            config = _config(arguments)
            done = train(config, TolerantConsole(), arguments.resume, began=arguments.began)
        return INTERRUPTED if done.result.is_interrupted else 0
    config = _config(arguments)
    if arguments.resume is not None:
        raise ConfigError(
            f"got --resume {arguments.resume} with --dry-run, which trains nothing; leave one of "
            "them out",
            code="resume-with-dry-run",
        )
    lines = dry_run(config).lines()
    if process_index() == 0:
        soft_wrap = not sys.stdout.isatty()
        console = TolerantConsole(soft_wrap=soft_wrap, highlight=False, markup=False)
        console.print("\n".join(lines))
    return 0


def evaluate_run(arguments: argparse.Namespace) -> int:
    """Evaluates the model of a run, and prints its metrics."""

    evaluation = evaluate(**_keywords(arguments), tell=_print)
    if process_index():
        return 0
    _print(f"{evaluation.checkpoint}: {evaluation.strategy} on mesh {evaluation.mesh}")
    unit = {"loss": f" {evaluation.unit}".rstrip()}
    rows = {
        name.replace("_", " "): f"{value:.4f}{unit.get(name, '')}".rstrip()
        for name, value in evaluation.metrics.items()
    }
    Console().print(two_columns({"samples": str(evaluation.num_samples), **rows}))
    _write_json(arguments, evaluation.to_dict())
    return 0


def generate_texts(arguments: argparse.Namespace) -> int:
    """Continues the prompts, and prints the texts."""
    completions = generate_text(**_keywords(arguments), tell=notice)
    if process_index():
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for number, completion in enumerate(completions):
        if number:
            console.rule()
        prompt = printable(completion.prompt)
        text = printable(completion.text)
        # An answer is a text of its own; a continuation is not.
        between = "\n" if arguments.chat else ""
        console.print(Text.assemble((prompt, "bold"), between, text))
        if not completion.text.strip():
            notice(empty_line(completion))
    _write_json(arguments, [dataclasses.asdict(completion) for completion in completions])
    return 0


def empty_line(completion: Completion) -> str:
    """Explains why a completion has no visible text."""
    prompt = repr(f"{printable(completion.prompt):.40}")
    if completion.is_ended and completion.num_tokens == 1:
        return f"after {prompt} the model ends the text at once; --past-end continues past that"
    count = plural(completion.num_tokens, "token")
    return f"after {prompt} the model adds {count} without visible characters, such as spaces"


def export(arguments: argparse.Namespace) -> int:
    """Writes the weights, and prints their path."""
    keywords = _keywords(arguments, "max_file")
    if arguments.max_file is not None:
        keywords["max_file"] = parse_bytes(arguments.max_file)
    count = export_run(**keywords, tell=notice)
    what = "adapters, for peft" if arguments.adapters else arguments.format
    _print(f"{plural(count, 'tensor')} ({what}) in {arguments.path}")
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Writes the page, and prints its path."""
    page = report_page(arguments.run, arguments.compare)
    place = as_place(arguments.run, "the run")
    out = arguments.out or (place if isinstance(place, Path) else Path()) / "report.html"
    check_output("--out", out)
    write_output("--out", out, page)
    _print(f"report: {out}")
    return 0


def list_keys(arguments: argparse.Namespace) -> int:
    """Prints the sections and keys."""
    sections = describe(arguments.section, nested=arguments.full)
    text = to_markdown(sections) if arguments.markdown else to_text(sections) + "\n"
    sys.stdout.write(text if arguments.markdown else fitted(text, sys.stdout))
    return 0


def check_samples(arguments: argparse.Namespace) -> int:
    """Prints the check; the exit code is 1 if data are loaded more slowly than steps use them."""
    config = _config(arguments)
    check = check_data(config, arguments.samples, arguments.seconds, not arguments.no_step)
    for line in data_lines(check):
        _print(printable(line))
    return 1 if check.keeps_up is False else 0


def data_lines(check: DataCheck) -> list[str]:
    """Formats the check as lines of text."""
    lines = [f"data: {check.description}"]
    for number, sample in enumerate(check.samples, start=1):
        lines += [f"--- sample {number}", sample]
    loaders = f"{check.num_workers} processes" if check.num_workers else "one thread"
    lines += ["---", f"loading: {_number(check.samples_per_second)} samples/s by {loaders}"]
    if check.needed_per_second is not None:
        ratio = check.samples_per_second / check.needed_per_second
        verdict = "enough" if check.keeps_up else "TOO SLOW: steps will wait for data"
        lines.append(
            f"the step takes {_number(check.needed_per_second)} samples/s on these devices: "
            f"{verdict} ({_number(ratio)} times as fast)"
        )
    if check.padding is not None:
        lines.append(f"padding: {100 * check.padding:.1f}% of the tokens")
    if check.learned is not None:
        lines.append(f"targets: {100 * check.learned:.1f}% of the tokens")
    return lines


def _number(value: float) -> str:
    """Formats a rate or a ratio, such as 0.25, 28.8k or 247."""
    return f"{value:.2g}" if value < 10 else si(value)


def _wide_console() -> Console:
    """Returns a console that does not wrap lines at 80 columns in a file or a pipe."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=max(console.width, 140))


def inspect(arguments: argparse.Namespace) -> int:
    """Compiles the step, and prints its costs."""
    config = _config(arguments)
    examination = examine(config, arguments.target)
    console = _wide_console()
    machine = examination.target.name if examination.target else "this machine"
    console.print(
        f"{config.name}: {examination.strategy} on {examination.mesh}, compiled for {machine}"
    )
    console.print(examination.parameters)
    if examination.notes is not None:
        console.print(examination.notes, highlight=False)
    console.print(examination.report)
    for line in examination.outer_step_lines():
        console.print(line, highlight=False)
    _write_json(arguments, examination.to_dict())
    return 0


def tune_step(arguments: argparse.Namespace) -> int:
    """Measures the variants of the step, and prints them."""
    config = _config(arguments)
    tuning = tune(config, arguments.rounds, arguments.calls)
    Console().print(tuning)
    _write_json(arguments, tuning.to_dict())
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """Traces some steps of a config or a run, and prints where their time goes."""
    place = as_place(arguments.place, "CONFIG or RUN")
    if isinstance(place, Path) and kind_at(place) != "a folder":
        config = load_config(arguments.place, arguments.overrides)
        found = profile_step(config, arguments.steps)
    else:
        found = profile_run(
            arguments.place, arguments.overrides, arguments.steps, trust=arguments.trust
        )
    if process_index():
        return 0
    console = _wide_console()
    console.print(found, highlight=False)
    _write_json(arguments, found.to_dict())
    return 0


_MOST_ROWS = 8
"""The number of parameters in the table of `axon verify`."""


def verify_config(arguments: argparse.Namespace) -> int:
    """Prints the difference from one device; the exit code is 1 if it exceeds the tolerance."""
    config = _config(arguments)
    steps = (2 if arguments.here else 5) if arguments.steps is None else arguments.steps
    try:
        config = tiny(config) if arguments.here else config
        verification = verify(config, steps)
    except MeshError as error:
        if not arguments.here:
            raise
        raise MeshError(f"{error}; leave out --here to emulate devices") from error
    title = f"{config.name}: {verification.strategy} on {verification.mesh} against one device"
    table = Table("what", Column("relative difference", justify="right"), title=title)
    is_explained = any(row.rounding for row in (*verification.metrics, *verification.params))
    if is_explained:
        table.add_column("rounding moves one device by", justify="right")
    ranked = verification.ranked(verification.params)
    for row in (*verification.metrics, *ranked[:_MOST_ROWS]):
        style = None if row.passes(verification.tolerance) else "red"
        rounding = [f"{row.rounding:.1e}"] if is_explained else []
        table.add_row(row.what, f"{row.relative:.1e}", *rounding, style=style)
    console = Console()
    console.print(table)
    hidden = ranked[_MOST_ROWS:]
    failing = sum(not row.passes(verification.tolerance) for row in hidden)
    more = f"{len(hidden)} more parameters are " + ("equal" if not failing else "not shown")
    more += f", of which {failing} are NOT equal" if failing else ""
    verdict = "equal" if verification.passed else "NOT equal"
    explained = ""
    if is_explained:
        explained = f", or {SPREAD:g} times the change that rounding causes on one device"
    given = with_own_precision(config).precision
    precision = given if isinstance(given, str) else f"{MixedPrecision.of(given).compute}"
    console.print(
        f"{verdict} within {verification.tolerance:.0e}{explained} "
        f"({precision}, SGD, {plural(steps, 'step')}; {more})"
    )
    return 0 if verification.passed else 1
