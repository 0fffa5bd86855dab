"""What a command shows takes the place of a line "Printed by `axon ...`." or "Drawn by ..."."""

import contextlib
import io
import os
import pathlib
import re
import runpy
import shlex
import sys
import tempfile
import textwrap
from unittest import mock

from axon_dist.train.cli.main import main

ROOT = pathlib.Path(__file__).parents[1]
# Pages show what programs store and send, which is decided before XLA makes code for the CPU.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
)
WIDTH = 80
"""The number of letters that fit on a page."""
COMMAND = re.compile(r"^(Printed|Drawn) by `(.*)`\.$", re.MULTILINE)
NUMBER_BLANK = re.compile(r"(?<=\d) (?=%|\d{3}\b)")
HEADING = re.compile(r'<text [^>]*font-weight="bold">(.*)</text>')


def on_config(config, **_):
    """Lists the page of every strategy of the registry under "Strategies"."""
    table = runpy.run_path(str(ROOT / "docs" / "strategies_table.py"))
    for section in config.nav:
        if "Strategies" in section:
            section["Strategies"] = [f"strategies/{page}.md" for page in table["pages"]()]
    return config


def on_page_markdown(markdown, **_):
    """Puts what the command prints, or the picture that it draws, in place of every such line."""
    found = COMMAND.sub(lambda line: {"Printed": shown, "Drawn": drawn}[line[1]](line[2]), markdown)
    return "\n".join(unbroken(x) if x.startswith("|") else x for x in found.split("\n"))


def unbroken(row):
    """A row of a table whose numbers, such as `412 310` and `47.0 %`, stay on one line."""
    parts = row.split("`")
    parts[::2] = [NUMBER_BLANK.sub("\u00a0", text) for text in parts[::2]]
    return "`".join(parts)


def drawn(command):
    """The picture that a command draws: with `--svg FILE` for `axon`, as its output otherwise."""
    if not command.startswith("axon "):
        picture = run(command)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "picture.svg")
            run(f"{command} --svg {path}")
            picture = path.read_text()
    # The heading of a wide picture is text next to it, where it does not shrink. Markdown takes an
    # empty line for the end of HTML.
    heading = HEADING.search(picture)
    lines = [line for line in HEADING.sub("", picture).splitlines() if line.strip()]
    before = [f"**{heading[1]}**", ""] if heading else []
    return "\n".join([*before, '<div class="wide">', *lines, "</div>"])


def shown(command):
    """A command and its output; Markdown where it prints that."""
    output = run(command)
    if "--markdown" in command:
        return output
    lines = [textwrap.fill(x, WIDTH) if len(x) > WIDTH else x for x in output.splitlines()]
    return "\n".join(["```console", f"$ {command}", *lines, "```"])


def run(command):
    """What a command of ours prints; one that fails ends the build."""
    program, *arguments = shlex.split(command)
    text = io.StringIO()
    said = io.StringIO()
    width = mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH)})
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(said), width:
        if program == "axon":
            code = main(arguments)
            assert code == 0, f"{command} ends with {code}: {said.getvalue()}"
        else:
            with mock.patch.object(sys, "argv", arguments):
                runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
    return text.getvalue()
