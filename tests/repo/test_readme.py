"""The README's Python runs as it stands, and its commands are the ones that the gate uses."""

import pathlib
import re
import shlex
import subprocess
import sys

from axon_dist.cli.main import VERBS, _parse

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_python_runs():
    (program,) = blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(64, 64) (8, 64)\n")


def test_commands_name_files_and_verbs_that_exist():
    commands = "\n".join(blocks("bash"))
    for config in re.findall(r"configs/\w+\.yaml", commands):
        assert (ROOT / config).exists(), config
    verbs = set(re.findall(r"(?<![\w/])axon (\w+)", commands)) | {"train"}
    shown = subprocess.run(
        [sys.executable, "-m", "axon_dist.cli", "--help"], capture_output=True, text=True
    ).stdout
    for verb in verbs:
        assert verb in shown, f"axon {verb} is not a command"


def test_commands_can_be_typed():
    lines = [line.partition("  #")[0] for line in "".join(blocks("bash")).splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("axon ")]
    assert len(commands) > 15
    for arguments in commands:
        assert _parse(arguments).verb in VERBS, arguments


def test_the_test_command_is_the_gates():
    gate = (ROOT / ".ci" / "run").read_text()
    assert '-e ".[dev]"' in README
    assert '-e ".[dev]"' in gate
    assert "-m pytest -n 2" in README
    assert "-m pytest -q -n 2" in gate
