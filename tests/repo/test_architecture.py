"""The rooms and who may import whom; sizes of files and functions; nothing at import time."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[2] / "axon_dist"

# A room may import the rooms of the lines below its own; siblings on one line do not meet.
LINES = [
    {"core"},
    {"launch", "hlo"},
    {"hardware"},
    {"mesh", "program"},
    {"sharding", "schedule"},
    {"collectives", "nn", "optim", "precision"},
    {"parallel", "pipeline", "checkpoint", "data", "models"},
    {"step", "planner", "inspect"},
    {"loop", "weights"},
    {"config"},
    {"app"},
    {"cli"},
]
LEVEL = {room: level for level, line in enumerate(LINES) for room in line}
# Tighter than the lines: the schedule is plain Python, models are written for one device, and the
# witness does not know what it is a witness of.
ONLY = {
    "schedule": {"core"},
    "models": {"core"},
    "inspect": {"core", "mesh", "hardware", "hlo"},
    "program": {"core"},
    "hlo": {"core"},
    "data": {"core", "mesh", "sharding"},
    "checkpoint": {"core", "mesh", "sharding"},
}
MAX_FILE = 500
MAX_FUNCTION = 60

FILES = sorted(PACKAGE.rglob("*.py"))


# Modules whose names are not ours to know: those of users, of extras, and the tables of names.
IMPORTERS = {
    "__init__.py": "public names in their rooms",
    "checkpoint/manifest.py": "versions of distributions",
    "cli/machine.py": "versions of distributions",
    "cli/verbs.py": "the module of a verb, in its own room",
    "config/own.py": "modules of users",
    "data/tokenizer.py": "an extra",
    "mesh/targets.py": "extras",
    "mesh/targets.py": "data files",
    "launch/rendezvous.py": "versions of libraries",
    "loop/extras.py": "extras",
}
# Old names of one room that a room above it defines now, found there when they are asked for.
FACES = {("config/__init__.py", "app")}


def imports_of(path: pathlib.Path):
    """Every module that a file imports, as parts below the package, with the node.

    Imports under TYPE_CHECKING count, and so do texts given to `import_module`; what is not ours
    gives nothing.
    """
    here = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - (node.level - 1)]
            target = (*base, *node.module.split(".")) if node.module else base
            names = [alias.name for alias in node.names]
            yield from (((*target, name), node) for name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            first, *rest = node.module.split(".")
            if first == "axon_dist":
                yield from (((*rest, alias.name), node) for alias in node.names)
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from ((tuple(rest), node) for first, *rest in names if first == "axon_dist")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            text = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
            first, *rest = text.split(".")
            if first == "axon_dist":
                yield tuple(rest), node


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    parts = path.relative_to(PACKAGE).parts
    if len(parts) == 1:
        return
    room = parts[0]
    assert room in LEVEL, f"{room} is a room that the picture of the rooms does not show"
    name = str(path.relative_to(PACKAGE))
    for (target, *_), node in imports_of(path):
        if target == room or target not in LEVEL or (name, target) in FACES:
            continue
        assert LEVEL[target] < LEVEL[room], f"{path}:{node.lineno}: {room} imports {target}"
        allowed = ONLY.get(room)
        assert allowed is None or target in allowed, f"{path}:{node.lineno}: {room} -> {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_few_modules_import_by_name(path):
    name = str(path.relative_to(PACKAGE))
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if any(each.split(".")[0] == "importlib" for each in names) and name not in IMPORTERS:
            literal = [target for target, at in imports_of(path) if isinstance(at, ast.Call)]
            assert literal, f"{path}:{node.lineno} imports modules by names that it does not say"


def module_of(parts: tuple[str, ...]) -> str | None:
    """The file that an import runs, relative to the package."""
    for size in range(len(parts), -1, -1):
        stem = PACKAGE.joinpath(*parts[:size])
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.exists():
                return str(file.relative_to(PACKAGE))
    return None


# The estimates by formula, which go.
CIRCLES = {("planner/activations.py", "planner/shape.py")}


def test_no_modules_import_each_other():
    """What only type checkers import counts: two such modules are one."""
    graph: dict[str, set[str]] = {}
    for path in FILES:
        name = str(path.relative_to(PACKAGE))
        targets = {module_of(tuple(parts)) for parts, _ in imports_of(path)} - {name, None}
        graph[name] = {
            t for t in targets if not t.endswith("__init__.py") and (name, t) not in CIRCLES
        }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", sorted((PACKAGE / "schedule").glob("*.py")), ids=lambda p: p.name)
def test_schedule_is_plain_python(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] in sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and not node.level:
            top = node.module.split(".")[0]
            assert top in {*sys.stdlib_module_names, "axon_dist"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body
            docstring = ast.get_docstring(node, clean=False)
            lines = node.end_lineno - body[0].lineno + 1
            lines -= docstring.count("\n") + 1 if docstring else 0
            assert lines <= MAX_FUNCTION, f"{path}:{node.lineno} {node.name} has {lines} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_globals_and_no_stubs(path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Global), f"{path}:{node.lineno} uses global"
        raised = getattr(node, "exc", None) if isinstance(node, ast.Raise) else None
        name = getattr(getattr(raised, "func", raised), "id", None)
        assert name != "NotImplementedError", f"{path}:{node.lineno} is a stub"


def test_jaxprs_are_read_in_two_rooms_alone():
    fields = {"eqns", "invars", "outvars", "constvars"}
    readers = {
        path.relative_to(PACKAGE).parts[0]
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in fields
    }
    assert readers == {"program", "pipeline"}


def test_importing_starts_no_backend_and_sets_no_variable():
    program = (
        "import os; before = dict(os.environ); import axon_dist.cli.main, axon_dist.cli.runs; "
        "from axon_dist import *; "
        "from axon_dist.core.compat import backend_started; "
        "assert not backend_started(); assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
