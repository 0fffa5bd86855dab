"""Imports the public names of a package at first use, as its type stub lists them.

`__init__.pyi` says which module defines each public name. Type checkers read it, and so does the
package at run time, so the list is written only once.
"""

import ast
import functools
import importlib
import importlib.util
import pathlib
import warnings
from collections.abc import Callable, Mapping


@functools.cache
def _read_stub(path: pathlib.Path) -> tuple[Mapping[str, str], tuple[str, ...]]:
    """Maps each name of a stub to its module, relative to the package; returns `__all__` too."""
    modules: dict[str, str] = {}
    listed: tuple[str, ...] = ()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            modules.update({alias.asname or alias.name: module for alias in node.names})
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = tuple(ast.literal_eval(node.value))
    return modules, listed or tuple(sorted(modules))


def names_of_stub(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list]]:
    """The `__getattr__` and `__dir__` of a package whose stub lists its names.

    Args:
        package: `__name__` of the package.
        file: its `__file__`; the stub has the same path and the suffix `.pyi`.

    Returns:
        `__getattr__`, which imports the module that defines a name, or the subpackage of that
        name, and `__dir__`, which lists the stub's `__all__`.
    """
    stub = pathlib.Path(file).with_suffix(".pyi")

    def module_getattr(name: str) -> object:
        if name == "__all__":
            return list(_read_stub(stub)[1])
        modules, _ = _read_stub(stub)
        if name in modules:
            return getattr(importlib.import_module(modules[name], package), name)
        inner = f"{package}.{name}"
        if not name.startswith("_") and importlib.util.find_spec(inner) is not None:
            return importlib.import_module(inner)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def module_dir() -> list[str]:
        return sorted(_read_stub(stub)[1])

    return module_getattr, module_dir


def moved(old: str, *new: str) -> Callable[[str], object]:
    """The `__getattr__` of a module whose names have moved; each use warns.

    Args:
        old: the dotted name of that module.
        new: the dotted names of the modules that have the names now, tried in this order.
    """

    def module_getattr(name: str) -> object:
        for module in new if not name.startswith("__") else ():
            found = importlib.import_module(module)
            if hasattr(found, name):
                text = f"{old}.{name} is found in {module} now"
                warnings.warn(text, DeprecationWarning, stacklevel=2)
                return getattr(found, name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return module_getattr
