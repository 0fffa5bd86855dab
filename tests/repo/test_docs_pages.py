"""Pages of the documentation: their code runs, commands can be typed, links lead somewhere."""

import importlib
import pathlib
import re
import shlex
import tomllib

import pytest

from axon_dist.parallel import STRATEGIES
from axon_dist.train.cli.main import VERBS, _parse

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SETTINGS = (ROOT / "mkdocs.yml").read_text()
EXTRAS = {*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]}


WRITTEN = {"sbatch": "slurm", "kubectl": "jobset"}
"""Commands whose last argument is a file that `axon launch` writes, and the option that does."""


def blocks(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


CODE = [
    pytest.param("\n".join(found), id=str(page.relative_to(DOCS)))
    for page in PAGES
    if (found := blocks("python", page.read_text()))
]


@pytest.mark.parametrize("code", CODE)
def test_code_of_a_page_runs_from_top_to_bottom(code):
    exec(compile(code, "page", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(DOCS)))
def test_commands_can_be_typed_and_files_are_there(page):
    text = page.read_text()
    lines = "".join(blocks("bash", text)).replace("\\\n", "").splitlines()
    lines += re.findall(r"^(?:Printed|Drawn) by `(.*)`\.$", text, re.MULTILINE)
    for line in lines:
        program, *arguments = shlex.split(line)
        if program == "srun":
            program, *arguments = arguments
        program = pathlib.Path(program).name
        if program == "axon":
            assert _parse(arguments).verb in VERBS, line
        elif program == "pip":
            assert set(re.findall(r"\w+", arguments[-1])) <= EXTRAS, line
        elif program in WRITTEN:
            assert any(
                f"axon launch --{WRITTEN[program]} configs/{pathlib.Path(arguments[-1]).stem}." in x
                for x in lines
            ), line
        elif program == "docker":
            assert arguments[::3] == ["build", "."], line
        elif line not in ("python3 -m venv .venv", "source .venv/bin/activate"):
            assert program in ("python", "bash"), line
            assert (ROOT / arguments[0]).is_file(), line
        for name in re.findall(r"configs/[\w/]+\.yaml", line):
            assert (ROOT / name).is_file(), line
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).is_file(), target
    for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
        # The page would list the whole module in place of a function of the same name.
        assert not (ROOT / name.replace(".", "/")).with_suffix(".py").exists(), name


def test_every_page_is_in_the_menu():
    others = [page for page in PAGES if page.parent.name != "strategies"]
    for page in others:
        assert str(page.relative_to(DOCS)) in SETTINGS
    of_strategies = {row.page for row in STRATEGIES.values()}
    assert of_strategies == {page.stem for page in PAGES if page not in others}
    for name in re.findall(r"\S+\.md", SETTINGS):
        assert (DOCS / name).is_file()


def test_every_name_of_the_package_is_on_the_reference_page():
    api = (DOCS / "api.md").read_text()
    names = (ROOT / "tests" / "repo" / "public_names.txt").read_text().splitlines()
    top = [name for room, name in map(str.split, names) if room == "axon_dist"]
    assert not [name for name in top if not re.search(rf"[.`]{name}(`|$)", api, re.MULTILINE)]


@pytest.mark.full
def test_the_pages_are_built_without_a_warning(tmp_path):
    build = pytest.importorskip("mkdocs.commands.build", reason="needs the extra 'docs'")
    config = importlib.import_module("mkdocs.config")
    build.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    config_page = (tmp_path / "config" / "index.html").read_text()
    assert "train.global_batch" in config_page
    # Markdown takes braces at the end of a cell for attributes, and a code span as it is.
    assert "dp=4,tp=2 or &#123;dp: 4, tp: 2}</td>" in config_page
    assert "<code>runs/&lt;name&gt;-&lt;time&gt;</code>" in config_page
    # A number and its unit stay on one line of a cell.
    assert "33.3\u00a0%</td>" in (tmp_path / "measured" / "index.html").read_text()
    assert "bubble 27.3" in (tmp_path / "strategies" / "pipeline" / "index.html").read_text()
