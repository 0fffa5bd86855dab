"""The files of the package and what each of them imports, read from the source."""

import ast
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping

import axon_dist

PACKAGE = pathlib.Path(axon_dist.__file__).parent


@dataclasses.dataclass(frozen=True)
class Module:
    """One file of the package.

    Attributes:
        path: relative to the package.
        nodes: all nodes of its syntax tree.
        imports: the dotted names of the modules of the package that it imports, wherever the
            import is written: at the top, in a function, or under `TYPE_CHECKING`.
        type_imports: those of them that are imported under `TYPE_CHECKING` alone.
    """

    path: pathlib.PurePath
    nodes: tuple[ast.AST, ...]
    imports: frozenset[str]
    type_imports: frozenset[str]

    @property
    def subpackage(self) -> str:
        """The folder of the file, such as `step` or `train.cli`, or "" for a file at the top."""
        folders = self.path.parts[:-1]
        return ".".join(folders[:2] if folders[:1] == ("train",) else folders[:1])

    @property
    def name(self) -> str:
        """The dotted name within the package: `step.build`, or `step` for an `__init__`."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_init(self) -> bool:
        """Whether the file is the `__init__` of a subpackage or of the package."""
        return self.path.name == "__init__.py"


_IMPORTING = (ast.ImportFrom, ast.Import, ast.Call)


def imported_names(path: pathlib.PurePath, nodes: tuple[ast.AST, ...]) -> Iterator[str]:
    """Dotted names below the package, also those given to `import_module` as a text."""
    package = path.parts[:-1]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            is_absolute = (node.module or "").split(".")[0] == "axon_dist"
            if not node.level and not is_absolute:
                continue
            base = package[: len(package) - (node.level - 1)] if node.level else ()
            stem = [part for part in (node.module or "").split(".") if part and part != "axon_dist"]
            for alias in node.names:
                yield ".".join((*base, *stem, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("axon_dist."):
                    yield alias.name.removeprefix("axon_dist.")
        elif isinstance(node, ast.Call) and "import_module" in _last_name(node.func):
            for constant in ast.walk(node):
                if isinstance(constant, ast.Constant) and "axon_dist." in str(constant.value):
                    yield str(constant.value).removeprefix("axon_dist.")


def _last_name(function: ast.expr) -> str:
    """The name by which a function is called: `f` of `f(...)` and of `module.f(...)`."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


@functools.cache
def modules() -> Mapping[str, Module]:
    """Every module of the package by its dotted name."""
    read = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        path = pathlib.PurePath(file.relative_to(PACKAGE))
        nodes = tuple(ast.walk(ast.parse(file.read_text())))
        importing = tuple(x for x in nodes if isinstance(x, _IMPORTING))
        all_names = frozenset(imported_names(path, importing))
        hidden = {x for node in nodes if _is_type_checking(node) for x in ast.walk(node)}
        run = frozenset(imported_names(path, tuple(x for x in importing if x not in hidden)))
        module = Module(path, nodes, all_names, all_names - run)
        read[module.name] = module
    exports = {name: _exports(module) for name, module in read.items()}
    return {
        name: dataclasses.replace(
            module,
            imports=frozenset(_defined_in(x, read, exports) for x in module.imports) - {"", name},
            type_imports=frozenset(_defined_in(x, read, exports) for x in module.type_imports),
        )
        for name, module in read.items()
    }


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"


def _exports(module: Module) -> Mapping[str, str]:
    """The module that defines each name which an `__init__` or a file at the top re-exports."""
    if not module.is_init and module.subpackage:
        return {}
    return {x.rpartition(".")[2]: x.rpartition(".")[0] for x in module.imports}


def _defined_in(
    name: str, read: Mapping[str, Module], exports: Mapping[str, Mapping[str, str]]
) -> str:
    """The module that an imported name comes from, or "" if it is not one of the package."""
    if name in read:
        return name
    module, _, attribute = name.rpartition(".")
    if module not in read:
        return ""
    source = exports[module].get(attribute, module)
    return source if source in read else module


def circles() -> list[tuple[str, ...]]:
    """Groups of files that import each other, directly or through others.

    Imports for type checkers alone are left out, for they run nothing. A name that is imported
    through an `__init__` counts for the file that defines it.
    """
    graph = {name: set(x.imports - x.type_imports) for name, x in modules().items()}
    reached = {name: _reachable(name, graph) for name in graph}
    groups = {
        tuple(sorted(x for x in reached[name] if name in reached[x]))
        for name in graph
        if name in reached[name]
    }
    return sorted(groups)


def _reachable(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen
