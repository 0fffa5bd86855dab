"""Names that tests, benchmarks, examples and docs import exist.

Programs that tests start in other processes, and tests marked `full`, are not imported by the
default run, so a renamed function would be noticed there late.
"""

import ast
import importlib
import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


def imported(path):
    """Yields module and name of each `from axon_dist... import NAME` in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("axon_dist"):
            yield from ((node.module, alias.name) for alias in node.names)


def exists(module, name):
    """Whether a module has a name, or a submodule of that name."""
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


def test_imported_names_exist():
    found = {}
    for folder in ("tests", "benchmarks", "examples", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            for module, name in imported(path):
                found.setdefault((module, name), str(path.relative_to(ROOT)))
    assert len(found) > 500
    missing = {
        f"{module}.{name}": path
        for (module, name), path in found.items()
        if not exists(module, name)
    }
    assert not missing
