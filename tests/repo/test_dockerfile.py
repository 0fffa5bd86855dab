"""The Dockerfile: its paths, extras and commands exist, and its commands install the package."""

import fnmatch
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def instructions():
    """The instructions of the Dockerfile, as pairs of a name and its text."""
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines()]


def of(name):
    return [text for found, text in instructions() if found == name]


def test_it_has_only_known_instructions_in_order():
    names = [name for name, _ in instructions()]
    assert names[0] == "FROM"
    assert names[-1] == "CMD"
    assert set(names) <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}


def test_what_it_copies_exists_and_is_not_ignored():
    kept = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    for text in of("COPY"):
        *sources, _ = text.split()
        for source in sources:
            assert (ROOT / source).exists()
            assert any(fnmatch.fnmatch(source, pattern) for pattern in kept)


def test_its_python_extras_and_command_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (image,) = of("FROM")
    version = image.removeprefix("python:").removesuffix("-slim")
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
    (argument,) = of("ARG")
    name, _, extras = argument.partition("=")
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert any(f".[${{{name}}}]" in text for text in of("RUN"))
    (command,) = of("CMD")
    assert json.loads(command)[0] in project["scripts"]


@pytest.mark.full
def test_its_commands_install_a_command_that_runs(tmp_path):
    home, target = tmp_path / "axon", tmp_path / "packages"
    home.mkdir()
    for name, text in instructions():
        if name == "COPY":
            *sources, folder = text.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, home / folder)
        elif name == "RUN" and text.startswith("pip install"):
            # Its dependencies are those of this environment; they are installed in test_package.
            command = f"{sys.executable} -m {text} --no-deps --target {target}"
            env = {**os.environ, "EXTRAS": "tpu"}
            subprocess.run(command, shell=True, check=True, cwd=home, env=env)
    done = subprocess.run(
        [target / "bin" / "axon", "train", "configs/fsdp8.yaml", "--dry-run"],
        env={**os.environ, "PYTHONPATH": str(target)}, cwd=home, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fsdp=8" in done.stdout
