"""Which subpackage may import which, and functions of a size to read."""

import ast
import pathlib
import re
import sys

from tests.repo import source_tree

# A subpackage imports those on lower lines of README's picture; those on one line do not
# import each other.
PICTURE = (
    (pathlib.Path(__file__).parents[2] / "README.md")
    .read_text()
    .split("## Where things are")[1]
    .split("```")[1]
)
LINES = [
    set(re.split(r"\s{3,}", line)[0].split()) for line in reversed(PICTURE.strip().splitlines()[1:])
]
LEVEL = {name: level for level, line in enumerate(LINES) for name in line}
# Stricter than the lines: a schedule is plain Python, models are written for one device, and what
# reads compiled programs knows nothing of the library that made them.
ONLY = {
    "schedule": {"core"},
    "models": {"core", "ops"},
    "inspect": {"core", "mesh"},
    "ops": {"core"},
    "ir": {"core", "ops"},
    "separability": {"core", "ops", "ir"},
    "data": {"core", "mesh", "sharding"},
    "checkpoint": {"core", "mesh", "sharding"},
}
# Old names of what moved, which forward to it.
OLD_NAMES = {"cli"}
MAX_FUNCTION = 60


def test_imports_point_down():
    """Also those under `TYPE_CHECKING`, inside functions, and by `import_module`."""
    wrong = []
    for module in source_tree.modules().values():
        if module.subpackage in ("", "train", *OLD_NAMES):
            continue
        assert module.subpackage in LEVEL, f"README's picture does not show {module.subpackage}"
        for name in module.imports:
            target = source_tree.modules()[name].subpackage
            if target in ("", module.subpackage):
                continue
            allowed = ONLY.get(module.subpackage)
            is_below = LEVEL[target] < LEVEL[module.subpackage]
            if not is_below or (allowed is not None and target not in allowed):
                wrong.append(f"{module.path} imports {name}")
    assert not wrong, wrong


def test_no_file_imports_itself_through_others():
    assert source_tree.circles() == []


def test_schedule_is_plain_python():
    for module in source_tree.modules().values():
        if module.subpackage != "schedule":
            continue
        for node in module.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    assert alias.name.split(".")[0] in sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] in {*sys.stdlib_module_names, "axon_dist"}


def test_functions_can_be_read_at_once():
    """Lines of code of a function, without its docstring."""
    for module in source_tree.modules().values():
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False)
                lines = node.end_lineno - node.body[0].lineno + 1
                lines -= docstring.count("\n") + 1 if docstring else 0
                assert lines <= MAX_FUNCTION, f"{module.path}:{node.lineno} {node.name}: {lines}"


def test_no_globals_and_no_stubs():
    for module in source_tree.modules().values():
        for node in module.nodes:
            assert not isinstance(node, ast.Global), f"{module.path}:{node.lineno} uses global"
            raised = getattr(node, "exc", None) if isinstance(node, ast.Raise) else None
            name = getattr(getattr(raised, "func", raised), "id", None)
            assert name != "NotImplementedError", f"{module.path}:{node.lineno} is a stub"
