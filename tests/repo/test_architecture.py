"""The rooms and who may import whom; sizes of files and functions; nothing at import time."""

import ast
import functools
import pathlib
import subprocess
import sys

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


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    """All of a file, read once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: pathlib.Path):
    """Every room of ours that a file imports, with the node; "" for what is not ours."""
    depth = len(path.relative_to(PACKAGE).parts) - 1
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:
            here = path.relative_to(PACKAGE).parts[:-1]
            base = here[: depth - (node.level - 1)]
            target = (*base, *(node.module or "").split(".")) if node.module else base
            names = [alias.name for alias in node.names]
            yield (target[0] if target else names[0]), node
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            yield (parts[1] if parts[0] == "axon_dist" and parts[1:] else ""), node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield (parts[1] if parts[0] == "axon_dist" and parts[1:] else ""), node


def test_imports_point_down():
    for path in FILES:
        parts = path.relative_to(PACKAGE).parts
        if len(parts) == 1:
            continue
        room = parts[0]
        assert room in LEVEL, f"{room} is a room that the picture of the rooms does not show"
        for target, node in imports_of(path):
            if target == room or target not in LEVEL:
                continue
            assert LEVEL[target] < LEVEL[room], f"{path}:{node.lineno}: {room} imports {target}"
            allowed = ONLY.get(room)
            assert allowed is None or target in allowed, f"{path}:{node.lineno}: {room} -> {target}"


def test_schedule_is_plain_python():
    for path in sorted((PACKAGE / "schedule").glob("*.py")):
        for node in nodes_of(path):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                known = sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
                known = {*sys.stdlib_module_names, "axon_dist"}
            for name in names:
                assert name.split(".")[0] in known, f"{path}:{node.lineno} imports {name}"


def test_files_and_functions_stay_small():
    for path in FILES:
        count = path.read_text().count("\n")
        assert count <= MAX_FILE, f"{path} has {count} lines"
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                lines = node.end_lineno - node.body[0].lineno + 1
                lines -= docstring.count("\n") + 1 if docstring else 0
                assert lines <= MAX_FUNCTION, f"{path}:{node.lineno} {node.name} has {lines} lines"


def test_no_globals_and_no_stubs():
    for path in FILES:
        for node in nodes_of(path):
            assert not isinstance(node, ast.Global), f"{path}:{node.lineno} uses global"
            raised = getattr(node, "exc", None) if isinstance(node, ast.Raise) else None
            name = getattr(getattr(raised, "func", raised), "id", None)
            assert name != "NotImplementedError", f"{path}:{node.lineno} is a stub"


def test_jaxprs_are_read_in_two_rooms_alone():
    fields = {"eqns", "invars", "outvars", "constvars"}
    readers = {
        path.relative_to(PACKAGE).parts[0]
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in fields
    }
    assert readers == {"program", "pipeline"}


def test_importing_starts_no_backend_and_sets_no_variable():
    program = (
        "import os; before = dict(os.environ); import axon_dist, axon_dist.cli.main; "
        "from axon_dist.core.compat import backend_started; "
        "assert not backend_started(); assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
