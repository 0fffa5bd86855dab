"""The rooms and who may import whom; sizes of files and functions; nothing at import time."""

import ast
import pathlib
import re
import subprocess
import sys

from benchmarks import house

# A room may import the rooms of the lines below its own; siblings on one line do not meet: the
# picture in README.
PICTURE = (
    (pathlib.Path(__file__).parents[2] / "README.md")
    .read_text()
    .split("## Where things are")[1]
    .split("```")[1]
)
LINES = [
    set(re.split(r"\s{3,}", line)[0].split()) for line in reversed(PICTURE.strip().splitlines()[1:])
]
LEVEL = {room: level for level, line in enumerate(LINES) for room in line}
# Tighter than the lines: the schedule is plain Python, models are written for one device, and the
# witness does not know what it is a witness of.
ONLY = {
    "schedule": {"core"},
    "models": {"core", "ops"},
    "inspect": {"core", "mesh"},
    "ops": {"core"},
    "jaxpr": {"core", "ops"},
    "data": {"core", "mesh", "sharding"},
    "checkpoint": {"core", "mesh", "sharding"},
}
# Old names of a room that a room above it defines now, found there when they are asked for.
FACES = {("config/__init__.py", "app"), ("parallel/__init__.py", "step")}
MAX_FILE = 500
MAX_FUNCTION = 60


def test_imports_point_down():
    """Also those under `TYPE_CHECKING`, inside functions, and by `import_module`."""
    wrong = []
    for module in house.modules().values():
        if not module.room:
            continue  # a face at the top, which no room imports
        assert module.room in LEVEL, f"{module.room} is a room that the picture does not show"
        for use in module.uses:
            target = house.modules()[use].room
            if target in ("", module.room) or (str(module.path), target) in FACES:
                continue
            allowed = ONLY.get(module.room)
            is_below = LEVEL[target] < LEVEL[module.room]
            if not is_below or (allowed is not None and target not in allowed):
                wrong.append(f"{module.path} imports {use}")
    assert not wrong, wrong


def test_no_room_imports_itself_by_way_of_others():
    assert house.floors()[1] == 0


def test_schedule_is_plain_python():
    for module in house.modules().values():
        if module.room != "schedule":
            continue
        for node in module.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    assert alias.name.split(".")[0] in sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] in {*sys.stdlib_module_names, "axon_dist"}


def test_files_and_functions_stay_small():
    for module in house.modules().values():
        assert module.lines <= MAX_FILE, f"{module.path} has {module.lines} lines"
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                lines = node.end_lineno - node.body[0].lineno + 1
                lines -= docstring.count("\n") + 1 if docstring else 0
                assert lines <= MAX_FUNCTION, f"{module.path}:{node.lineno} {node.name}: {lines}"


def test_no_globals_and_no_stubs():
    for module in house.modules().values():
        for node in module.nodes:
            assert not isinstance(node, ast.Global), f"{module.path}:{node.lineno} uses global"
            raised = getattr(node, "exc", None) if isinstance(node, ast.Raise) else None
            name = getattr(getattr(raised, "func", raised), "id", None)
            assert name != "NotImplementedError", f"{module.path}:{node.lineno} is a stub"


def test_jaxprs_are_read_in_three_rooms_alone():
    assert house.jaxpr_readers() == ["jaxpr", "pipeline", "prove"]


def test_importing_starts_no_backend_and_sets_no_variable():
    program = (
        "import os; before = dict(os.environ); import axon_dist, axon_dist.cli.main; "
        "from axon_dist.core.compat import backend_started; "
        "assert not backend_started(); assert dict(os.environ) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
