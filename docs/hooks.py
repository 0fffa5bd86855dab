"""What a page of the documentation has printed by commands: `<!-- run: axon ... -->`."""

import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
RUN = re.compile(r"^<!-- run: (.*) -->$", re.MULTILINE)


def on_page_markdown(markdown, **_):
    """Puts behind every such line what the command prints."""
    return RUN.sub(lambda found: shown(found[1]), markdown)


def shown(command):
    """A command and its output; Markdown where it prints that."""
    output = run(command)
    if "--markdown" in command:
        return output
    return f"```console\n$ {command}\n{output}```"


def run(command):
    """What a command of ours prints; one that fails ends the build."""
    program, *arguments = shlex.split(command)
    start = {"axon": ["-m", "axon_dist.cli"], "python": []}[program]
    done = subprocess.run(
        [sys.executable, *start, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout
