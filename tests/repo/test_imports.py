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


def imports_in(tree):
    """All imports of a file; they are statements, so expressions are not searched."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, field, ())
            waiting += inner if isinstance(inner, list) else ()


def test_imported_names_exist():
    found = {}
    for folder in ("tests", "benchmarks", "examples", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "axon_dist" not in text:
                continue
            found_here = imports_in(ast.parse(text))
            imports = tuple(node for node in found_here if not getattr(node, "level", 0))
            for dotted in imported_names(path.relative_to(ROOT), imports):
                found.setdefault(dotted, str(path.relative_to(ROOT)))
    assert len(found) > 500
    missing = {dotted: path for dotted, path in found.items() if not exists(dotted)}
    assert not missing
