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
ROOMS = [
    module.name
    for module in pkgutil.iter_modules(axon_dist.__path__, "axon_dist.")
    if module.ispkg and module.name != "axon_dist.train.cli"
]


def public_names(room: str):
    module = importlib.import_module(room)
    for name in {*vars(module), *getattr(module, "__all__", ())}:
        value = getattr(module, name)
        if not name.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            yield name, value


@pytest.mark.parametrize("room", ["axon_dist", *ROOMS])
def test_public_names_are_documented(room):
    assert importlib.import_module(room).__doc__, f"{room} does not say what it is"
    for name, value in public_names(room):
        assert inspect.getdoc(value), f"{room}.{name} has no docstring"


@pytest.mark.parametrize("room", ROOMS)
def test_documented_arguments_exist(room):
    for name, value in public_names(room):
        documented = _documented(inspect.getdoc(value) or "")
        if not documented:
            continue
        made_by = value.__init__ if inspect.isclass(value) and "__init__" in vars(value) else value
        real = set(inspect.signature(made_by).parameters)
        unknown = documented - {parameter.lstrip("*") for parameter in real}
        assert not unknown, f"{room}.{name} documents {unknown}, it takes {real}"


def _documented(docstring: str) -> set[str]:
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if not section:
        return set()
    return set(re.findall(r"^    \*{0,2}(\w+):", section.group(1), re.MULTILINE))


FILE = r"`([\w/.]+\.(?:py|md|yml|toml|txt|json))`"
NAMES = r"((?:`[\w.]+`(?:, (?:and )?| and | or )?)+)"
FORMS = {
    "file: names": (rf"{FILE}: {NAMES}", (0, 1)),
    "names of file": (rf"{NAMES} (?:of|in) {FILE}", (1, 0)),
    "names (file)": (rf"{NAMES} \({FILE}\)", (1, 0)),
}
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
ROUTES = GUIDE[GUIDE.index("## Where to add") : GUIDE.index("## What may change")]
ENTRIES = [" ".join(entry.split()) for entry in re.split(r"\n(?=- |\n)", ROUTES)]
"""The items of the lists that say where to add what, each in one line."""
SOURCES = [
    path.read_text()
    for top in (PACKAGE, ROOT / "benchmarks", ROOT / "docs", ROOT / "tests")
    for path in top.rglob("*.py")
]
OUTSIDE = {"path", "value", "full", "axon", "loggers"}
"""Words in code that no file of Python defines."""


def found(path: str) -> pathlib.Path | None:
    return next((root / path for root in (PACKAGE, ROOT) if (root / path).exists()), None)


def is_defined(name: str, text: str) -> bool:
    """Whether a text defines a name, and a class each of the names in it."""
    forms = r"^ *(?:class |def )?{0}\b(?=\w*(?: *[:=(\[]|$))|[\"'{{]{0}[\"'}}]"
    parts = name.split(".")
    # Most files do not have the word at all, which takes no expression to see.
    return all(part in text for part in parts) and all(
        re.search(forms.format(part), text, re.MULTILINE) for part in parts
    )


@pytest.mark.parametrize("form", FORMS)
def test_names_of_the_guide_stand_in_the_files_that_it_names(form):
    pattern, (file, names) = FORMS[form]
    pairs = [match for entry in ENTRIES for match in re.findall(pattern, entry)]
    assert pairs
    for match in pairs:
        text = found(match[file]).read_text()
        for name in re.findall(r"`([\w.]+)`", match[names]):
            assert is_defined(name, text), f"{match[file]}: {name}"


def test_where_to_add_what_exists():
    """Every file, folder, module and name that the guide for contributors shows is there."""
    for path in re.findall(FILE, GUIDE) + re.findall(r"`([\w/]+/)`", GUIDE):
        assert found(path), path
    for module in re.findall(r"`python -m ((?:tests|benchmarks)[\w.]+)", GUIDE):
        assert found(module.replace(".", "/") + ".py"), module
    for entry in ENTRIES:
        for name in re.findall(r"`([A-Za-z_]\w+(?:\.\w+)*)`", entry):
            if found(name) is None and name not in OUTSIDE:
                last = name.rpartition(".")[2]
                assert any(is_defined(last, text) for text in SOURCES), f"{name}: {entry}"


def test_documented_names_are_kept_from_moving():
    pages = [(ROOT / "docs" / page).read_text() for page in ("api.md", "api/rooms.md")]
    entries = re.findall(r"^::: (\S+)\.(\w+)$", "\n".join(pages), re.MULTILINE)
    kept = {tuple(line.split()) for line in PUBLIC.read_text().splitlines()}
    assert len(entries) > 150
    # A page may name the module of a name that the package exports.
    of_rooms = {(room, name) for room, name in entries if room in ("axon_dist", *ROOMS)}
    assert of_rooms - kept == set()
    assert {name for _, name in entries} - {name for _, name in kept} == set()


def test_the_root_holds_what_it_should():
    """A test or a try that writes into the current folder leaves files there."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("no checkout of git")
    assert {path.partition("/")[0] for path in git.stdout.split()} == {
        ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md",
        "SECURITY.md", "axon_dist", "benchmarks", "configs", "conftest.py", "docs", "examples",
        "mkdocs.yml", "pyproject.toml", "tests",
    }  # fmt: skip
