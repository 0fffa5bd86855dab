"""The public surface is documented, and the documentation says what is there."""

import importlib
import inspect
import pathlib
import pkgutil
import re

import pytest

import axon_dist

PACKAGE = pathlib.Path(axon_dist.__file__).parent
ROOT = PACKAGE.parent
ROOMS = [
    module.name
    for module in pkgutil.iter_modules(axon_dist.__path__, "axon_dist.")
    if module.ispkg and module.name != "axon_dist.cli"
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


def test_where_to_add_what_exists():
    """Every file and every table that the guide for contributors names is there."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = text[text.index("## Where to add") : text.index("## What may change")].splitlines()[5:]
    for row in filter(None, rows):
        for path in re.findall(r"`([\w/]+(?:\.(?:py|md|yml|txt)|/))`", row):
            assert any((root / path).exists() for root in (PACKAGE, ROOT)), f"{path}: {row}"
        for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", row):
            lines = next(r / file for r in (PACKAGE, ROOT) if (r / file).exists()).read_text()
            for name in re.findall(r"`(\w+)`", names):
                assert re.search(rf"^(class |def )?{name}\b", lines, re.MULTILINE), (
                    f"{file}: {name}"
                )
