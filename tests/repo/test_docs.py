"""The public surface is documented, and the documentation says what is there."""

import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess

import pytest

import axon_dist

PACKAGE = pathlib.Path(axon_dist.__file__).parent
ROOT = PACKAGE.parent
PUBLIC = ROOT / "tests" / "repo" / "public_names.txt"
SUBPACKAGES = [
    module.name
    for module in pkgutil.iter_modules(axon_dist.__path__, "axon_dist.")
    if module.ispkg and module.name != "axon_dist.train.cli"
]


def public_names(subpackage: str):
    module = importlib.import_module(subpackage)
    for name in {*vars(module), *getattr(module, "__all__", ())}:
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value


@pytest.mark.parametrize("subpackage", ["axon_dist", *SUBPACKAGES])
def test_public_names_are_documented(subpackage):
    assert importlib.import_module(subpackage).__doc__, f"{subpackage} does not say what it is"
    for name, value in public_names(subpackage):
        assert inspect.getdoc(value), f"{subpackage}.{name} has no docstring"


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_documented_arguments_exist(subpackage):
    for name, value in public_names(subpackage):
        documented = _documented(inspect.getdoc(value) or "")
        if not documented:
            continue
        made_by = value.__init__ if inspect.isclass(value) and "__init__" in vars(value) else value
        real = set(inspect.signature(made_by).parameters)
        unknown = documented - {parameter.lstrip("*") for parameter in real}
        assert not unknown, f"{subpackage}.{name} documents {unknown}, it takes {real}"


def _documented(docstring: str) -> set[str]:
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if not section:
        return set()
    return set(re.findall(r"^    \*{0,2}(\w+):", section.group(1), re.MULTILINE))


def test_files_and_names_of_the_guide_exist():
    """Every path of CONTRIBUTING exists, and its tables are in the files that it names."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`([\w.]+(?:/[\w.]+)+/?)`", guide):
        assert (PACKAGE / path).exists() or (ROOT / path).exists() or "." in path[:1], path
    pairs = re.findall(r"`([\w/]+\.py)`: `(\w+)`", guide)
    assert len(pairs) > 8
    for path, name in pairs:
        defined = re.compile(rf"^(?:class )?{name}\b", re.MULTILINE)
        assert defined.search((PACKAGE / path).read_text()), (path, name)


def test_documented_names_are_kept_from_moving():
    pages = [(ROOT / "docs" / page).read_text() for page in ("api.md", "api/subpackages.md")]
    entries = re.findall(r"^::: (\S+)\.(\w+)$", "\n".join(pages), re.MULTILINE)
    kept = {tuple(line.split()) for line in PUBLIC.read_text().splitlines()}
    assert len(entries) > 150
    # A page may name the module of a name that the package exports.
    of_subpackages = {
        (subpackage, name)
        for subpackage, name in entries
        if subpackage in ("axon_dist", *SUBPACKAGES)
    }
    assert of_subpackages - kept == set()
    assert {name for _, name in entries} - {name for _, name in kept} == set()


def test_the_root_holds_what_it_should():
    """A test or a try that writes into the current folder leaves files there."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("no checkout of git")
    assert {path.partition("/")[0] for path in git.stdout.split()} == {
        ".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "Dockerfile",
        "LICENSE", "README.md", "SECURITY.md", "axon_dist", "benchmarks", "configs",
        "conftest.py", "docs", "examples",
        "mkdocs.yml", "pyproject.toml", "tests",
    }  # fmt: skip
