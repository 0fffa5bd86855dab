"""What a page of the documentation has printed by commands: `<!-- run: axon ... -->`."""

import contextlib
import io
import os
import pathlib
import re
import runpy
import shlex
import sys
import textwrap
from unittest import mock

from axon_dist.cli.main import main

ROOT = pathlib.Path(__file__).parents[1]
WIDTH = 80
"""Letters that a page has room for."""
RUN = re.compile(r"^<!-- run: (.*) -->$", re.MULTILINE)


def on_page_markdown(markdown, **_):
    """Puts behind every such line what the command prints."""
    return RUN.sub(lambda found: shown(found[1]), markdown)


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
    with contextlib.redirect_stdout(text), mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH)}):
        if program == "axon":
            code = main(arguments)
            assert code == 0, f"{command} ends with {code}"
        else:
            with mock.patch.object(sys, "argv", arguments):
                runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
    return text.getvalue()
