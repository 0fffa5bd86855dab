"""Differences between versions of JAX are in one file, and CI tests every Python."""

import ast
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
COMPAT = ROOT / "axon_dist" / "core" / "compat.py"
# Runs by its path, in a process of its own that imports no more than it must.
ALONE = ROOT / "axon_dist" / "launch" / "coordinator.py"
OTHERS = sorted({*(ROOT / "axon_dist").rglob("*.py")} - {COMPAT, ALONE})

PRIVATE = re.compile(r"jax\._src|jax\.interpreters|jaxlib\.|jax\.lib\b")
VERSIONS = {"__version__", "__version_info__", "version_info"}
WORDS = re.compile(r"_src|interpreters|jaxlib|\blib\b|version")
"""One of them is in every program that has what `PRIVATE` and `VERSIONS` say."""


def unstable(program):
    """The lines that name what JAX promises nothing about, or ask what version something is."""
    if not WORDS.search(program):
        return
    for node in ast.walk(ast.parse(program)):
        names = [alias.name for alias in getattr(node, "names", ()) if hasattr(alias, "name")]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        elif isinstance(node, ast.Attribute) and node.attr not in VERSIONS:
            names = [f"{getattr(node.value, 'id', '')}.{node.attr}"]
        asks = isinstance(node, (ast.Compare, ast.Subscript)) and any(
            isinstance(inner, ast.Attribute) and inner.attr in VERSIONS for inner in ast.walk(node)
        )
        if asks or any(PRIVATE.match(name) for name in names):
            yield node.lineno


@pytest.mark.parametrize(
    "line",
    [
        "from jax._src import core",
        "import jax._src.core",
        "from jax import lax; x = jax._src.core.Literal",
        "from jaxlib import _jax",
        "from jax.interpreters import partial_eval",
        "new = jax.__version_info__ >= (0, 11)",
        "new = tuple(map(int, jax.__version__.split('.'))) > (0, 10)",
        "minor = flax.__version__.split('.')[1]",
        "if sys.version_info >= (3, 12): pass",
    ],
)
def test_unstable_names_are_found(line):
    assert list(unstable(line))


def test_only_compat_depends_on_versions():
    lines = {str(path): list(unstable(path.read_text())) for path in OTHERS}
    assert not {path: found for path, found in lines.items() if found}


def classifiers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if "Python :: 3." in line]
    return project, found


def test_the_oldest_python_is_the_required_one():
    project, found = classifiers()
    oldest = min(found, key=lambda version: int(version.split(".")[1]))
    assert project["requires-python"] == f">={oldest}"


def test_the_readme_names_every_python():
    _, found = classifiers()
    (line,) = re.findall(r"^Python 3.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"\b3\.\d+", line)) == set(found)


def test_ci_names_tests_that_exist():
    named = re.findall(r"(?<=\s)(?:tests|axon_dist)/[\w/.]+", (ROOT / ".ci" / "run").read_text())
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []
