"""Names that tests, benchmarks, examples and docs import exist.

Programs that tests start in other processes, and tests marked `full`, are not imported by the
default run, so a renamed function would be noticed there late.
"""

import ast
import importlib
import importlib.util

from .source_tree import PACKAGE, imported_names

ROOT = PACKAGE.parent


def exists(dotted):
    """Whether a dotted name of the package is a module, or a name in one."""
    module, _, name = f"axon_dist.{dotted}".rpartition(".")
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


def test_imported_names_exist():
    found = {}
    for folder in ("tests", "benchmarks", "examples", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            nodes = tuple(ast.walk(ast.parse(path.read_text())))
            absolute = tuple(node for node in nodes if not getattr(node, "level", 0))
            imports = tuple(n for n in absolute if isinstance(n, ast.Import | ast.ImportFrom))
            for dotted in imported_names(path.relative_to(ROOT), imports):
                found.setdefault(dotted, str(path.relative_to(ROOT)))
    assert len(found) > 500
    missing = {dotted: path for dotted, path in found.items() if not exists(dotted)}
    assert not missing
