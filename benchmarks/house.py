"""The shape of the package in numbers: sizes, imports, names, types, and what one step enters.

    python -m benchmarks.house            # the table
    python -m benchmarks.house --names    # and what is counted
    python -m benchmarks.house --write    # writes tests/repo/ratchets.json, whose figures shrink

Nothing here is a speed: every figure is a count, and the same on every machine, but for the
CPU-seconds of `axon --help`, which are printed and not pinned.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import functools
import gc
import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import axon_dist
from axon_dist import World, build_train_step, compose, ddp, fsdp, pipelined

PACKAGE = pathlib.Path(axon_dist.__file__).parent
TESTS = PACKAGE.parent / "tests"
PINS = TESTS / "repo" / "ratchets.json"

JAXPR_FIELDS = frozenset({"eqns", "invars", "outvars", "constvars"})

EMPTY_NAMES = frozenset({"found", "own", "where", "kept", "held", "told"})
"""Words that do not say what a variable is."""


@dataclasses.dataclass(frozen=True)
class Module:
    """One file of the package, read once.

    Attributes:
        path: relative to the package.
        tree: its syntax tree.
        lines: all of its lines.
        code: the lines that are neither blank, nor comment, nor docstring.
        uses: the modules of the package that it imports, wherever the import stands.
        places: what its import statements name of the package; several names of a room are one.
    """

    path: pathlib.PurePath
    tree: ast.Module
    lines: int
    code: int
    uses: frozenset[str]
    places: int

    @property
    def room(self) -> str:
        """The folder it lies in, or "" for a face at the top."""
        return self.path.parts[0] if len(self.path.parts) > 1 else ""

    @property
    def name(self) -> str:
        """Its dotted name in the package: `step.build`, or `step` for the face of a room."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its tree."""
        return _nodes(self.tree)


@functools.cache
def _nodes(tree: ast.Module) -> list[ast.AST]:
    """A tree is walked once for all that is read of it."""
    return list(ast.walk(tree))


def code_lines(path: pathlib.Path) -> int:
    """Lines that are neither blank, nor comment, nor docstring."""
    text = path.read_text()
    return _code_lines(text, ast.parse(text))


def _code_lines(text: str, tree: ast.Module) -> int:
    hidden: set[int] = set()
    for node in _nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            hidden.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(x.strip()) and not x.strip().startswith("#") and n not in hidden for n, x in lines
    )


def imported(path: pathlib.PurePath, tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """What a file imports of the package, as dotted names below it.

    Also under `TYPE_CHECKING`, inside functions, and by `import_module("axon_dist. …")`.
    """
    package = path.parts[:-1]
    for node in _nodes(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - (node.level - 1)]
            elif (node.module or "").split(".")[0] == "axon_dist":
                base = ()
            else:
                continue
            stem = [x for x in (node.module or "").split(".") if x and x != "axon_dist"]
            for alias in node.names:
                yield ".".join((*base, *stem, alias.name)), node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("axon_dist."):
                    yield alias.name.removeprefix("axon_dist."), node
        elif isinstance(node, ast.Constant) and str(node.value).startswith("axon_dist."):
            yield str(node.value).removeprefix("axon_dist."), node


def _is_own(node: ast.AST) -> bool:
    """Whether it is an import from the package."""
    return isinstance(node, ast.ImportFrom) and bool(
        node.level or (node.module or "").split(".")[0] == "axon_dist"
    )


def _place(node: ast.AST) -> str:
    assert isinstance(node, ast.ImportFrom)
    return "." * node.level + (node.module or "")


@functools.cache
def modules() -> Mapping[str, Module]:
    """Every module of the package by its dotted name."""
    read = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        text, path = file.read_text(), pathlib.PurePath(file.relative_to(PACKAGE))
        tree = ast.parse(text)
        uses = frozenset(name for name, _ in imported(path, tree))
        places = len({_place(n) for n in _nodes(tree) if _is_own(n)})
        module = Module(path, tree, text.count("\n"), _code_lines(text, tree), uses, places)
        read[module.name] = module
    faces = {name: _face(module, read) for name, module in read.items()}
    return {
        name: dataclasses.replace(
            module, uses=frozenset(_resolved(use, read, faces) for use in module.uses) - {"", name}
        )
        for name, module in read.items()
    }


def _face(module: Module, read: Mapping[str, Module]) -> Mapping[str, str]:
    """Of a room's `__init__`, or a face at the top: where each of its names is defined."""
    if module.path.name != "__init__.py" and module.room:
        return {}
    return {use.rpartition(".")[2]: use.rpartition(".")[0] for use in module.uses}


def _resolved(use: str, read: Mapping[str, Module], faces: Mapping[str, Mapping[str, str]]) -> str:
    """The module that defines what was imported."""
    if use in read:
        return use
    place, _, name = use.rpartition(".")
    if place not in read:
        return ""
    defined = faces[place].get(name, place)
    return defined if defined in read else place


def arrows() -> set[tuple[str, str]]:
    """(room, a room that it imports); a room's own face is no import."""
    rooms = {m.room for m in modules().values() if m.room}
    return {
        (module.room, modules()[use].room)
        for module in modules().values()
        for use in module.uses
        if module.room and module.path.name != "__init__.py"
        if modules()[use].room in rooms - {module.room}
    }


def floors() -> tuple[Mapping[str, int], int]:
    """The floor of every room, 1 for those that import none, and how many circles there are."""
    below = collections.defaultdict(set)
    for room, used in arrows():
        below[room].add(used)
    circles: set[frozenset[str]] = set()
    found: dict[str, int] = {}

    def floor(room: str, above: tuple[str, ...]) -> int:
        if room in above:
            circles.add(frozenset(above[above.index(room) :]))
            return 0
        if room not in found:
            found[room] = 1 + max((floor(r, (*above, room)) for r in below[room]), default=0)
        return found[room]

    for room in sorted({m.room for m in modules().values() if m.room}):
        floor(room, ())
    return found, len(circles)


def _code_modules() -> list[Module]:
    """What a room's `__init__` names is its public list, not what its code leans on."""
    return [m for m in modules().values() if m.path.name != "__init__.py"]


def most_own_imports() -> tuple[int, str]:
    """The largest number of places of the package that one file imports from, and the file."""
    most = max(_code_modules(), key=lambda m: m.places)
    return most.places, most.name


def single_users() -> list[str]:
    """Modules with exactly one user, in their own room, and in no face."""
    users = collections.defaultdict(set)
    for module in modules().values():
        for use in module.uses:
            users[use].add(module.name)
    return [
        m.name
        for m in _code_modules()
        if m.room and len(users[m.name]) == 1
        if modules()[next(iter(users[m.name]))].room == m.room
        if modules()[next(iter(users[m.name]))].path.name != "__init__.py"
    ]


def repeated_classes() -> list[str]:
    """Class names that stand in more than one module."""
    names = collections.Counter(
        node.name
        for m in modules().values()
        for node in m.tree.body
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1)


def repeated_stems() -> list[str]:
    """Module names that stand in more than one room."""
    stems = collections.Counter(m.path.stem for m in _code_modules())
    return sorted(stem for stem, count in stems.items() if count > 1)


def anys() -> int:
    """How often `Any` stands in the package."""
    return sum(
        isinstance(node, ast.Name) and node.id == "Any"
        for m in modules().values()
        for node in m.nodes
    )


def named_lambdas() -> list[str]:
    """Lambdas that are bound to a name where a function would do."""
    return [
        f"{m.path}:{node.lineno}"
        for m in modules().values()
        for node in m.nodes
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda)
    ]


def empty_names() -> list[str]:
    """Variables, parameters and functions whose name does not say what they are."""
    fields = {ast.Name: "id", ast.arg: "arg", ast.FunctionDef: "name"}
    names = [
        (m.path, node.lineno, getattr(node, fields[type(node)]))
        for m in modules().values()
        for node in m.nodes
        if isinstance(node, ast.Name | ast.arg | ast.FunctionDef)
        if not isinstance(getattr(node, "ctx", None), ast.Load)
    ]
    return [f"{path}:{line} {name}" for path, line, name in names if name in EMPTY_NAMES]


def gather_files() -> list[str]:
    """The files of the step's rooms that define something with `gather` in its name."""
    return [
        str(m.path)
        for m in modules().values()
        if m.room in {"parallel", "step", "jaxpr"}
        if any(
            isinstance(node, ast.FunctionDef | ast.ClassDef) and "gather" in node.name.lower()
            for node in m.nodes
        )
    ]


def jaxpr_readers() -> list[str]:
    """The rooms that read the equations of a traced program."""
    return sorted(
        {
            m.room
            for m in modules().values()
            for node in m.nodes
            if isinstance(node, ast.Attribute) and node.attr in JAXPR_FIELDS
        }
    )


def entered(run: Callable[[], Any]) -> set[tuple[str, int]]:
    """The functions of the package that a program enters, by file and line."""
    return {
        (code.co_filename, code.co_firstlineno)
        for code in _entered_codes(run)
        if code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<")
    }


def _called_codes(run: Callable[[], Any]) -> list[types.CodeType]:
    """What a program calls, told of each call: all that Python 3.11 has."""
    seen: dict[int, types.CodeType] = {}

    def look(frame: Any, event: str, _: Any) -> None:
        # Once for each call of anything; what it was is asked of each code once, afterwards.
        if event == "call":
            seen[id(frame.f_code)] = frame.f_code

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(seen.values())


def _entered_codes(run: Callable[[], Any]) -> list[types.CodeType]:
    """What a program calls or goes on with, told of each code once, which costs next to nothing."""
    if sys.version_info < (3, 12):
        return _called_codes(run)
    monitoring: Any = sys.monitoring
    tool, events, seen = monitoring.PROFILER_ID, monitoring.events, []

    def look(code: types.CodeType, _: int) -> Any:
        seen.append(code)
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "house")
    try:
        for event in (events.PY_START, events.PY_RESUME):
            monitoring.register_callback(tool, event, look)
        monitoring.set_events(tool, events.PY_START | events.PY_RESUME)
        monitoring.restart_events()
        run()
    finally:
        monitoring.set_events(tool, events.NO_EVENTS)
        monitoring.free_tool_id(tool)
    return seen


class Net(nnx.Module):
    """Four equal layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


@dataclasses.dataclass
class CountedLoss:
    """A loss that counts how often Python runs it, which is how often it is traced."""

    calls: int = 0

    def __call__(self, model: Any, batch: Any) -> Any:
        self.calls += 1
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


STEPS = {
    "ddp": (ddp, "dp=8"),
    "fsdp": (fsdp, "fsdp=8"),
    "1f1b+dp": (lambda: compose(ddp(), pipelined(4, 8)), "pp=4,dp=2"),
}
"""Strategies by name, each with the mesh of one step."""


def one_step(name: str, loss: CountedLoss, accumulate: int = 1) -> Callable[[], Any]:
    """Builds, and lowers one step; of one microbatch also makes the first state and runs it."""
    make, axes = STEPS[name]
    batch = {key: np.ones((32, 64), np.float32) for key in "xy"}
    world, model = World.emulate(8, axes), Net(nnx.Rngs(0))

    def run() -> None:
        step = build_train_step(model, optax.adam(1e-3), loss, make(), world, accumulate=accumulate)
        if accumulate > 1:
            step.lower(batch)
        else:
            step(step.init(), batch)

    return run


def help_seconds() -> float:
    """CPU-seconds of `axon --help`."""
    before = os.times()
    subprocess.run(
        [sys.executable, "-m", "axon_dist.cli", "--help"], check=True, capture_output=True
    )
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def static_figures() -> dict[str, float]:
    """The figures that are read from the source alone."""
    every, (levels, circles) = modules().values(), floors()
    code = sum(m.code for m in every)
    return {
        "files": len(every),
        "lines": sum(m.lines for m in every),
        "lines of code": code,
        "rooms": len({m.room for m in every if m.room}),
        "floors": max(levels.values()),
        "arrows": len(arrows()),
        "circles": circles,
        "most own imports of a file": most_own_imports()[0],
        "modules with one user in their room": len(single_users()),
        "classes of one name": len(repeated_classes()),
        "modules of one name": len(repeated_stems()),
        "Any per 100 lines of code": round(100 * anys() / code, 2),
        "lambdas bound to names": len(named_lambdas()),
        "names that say nothing": len(empty_names()),
        "files about gathering": len(gather_files()),
        "rooms that read jaxprs": len(jaxpr_readers()),
    }


def run_figures() -> dict[str, float]:
    """The figures of one step each of three strategies."""
    World.emulate(8)
    # How long a compilation takes decides what a cache of programs stores, and so what is entered.
    jax.config.update("jax_enable_compilation_cache", False)
    # A finalizer of something older may run within a step, or behind it.
    gc.disable()
    figures: dict[str, float] = {}
    for name in STEPS:
        loss = CountedLoss()
        seen = entered(one_step(name, loss))
        figures[f"functions entered, {name}"] = len(seen)
        figures[f"files entered, {name}"] = len({file for file, _ in seen})
        figures[f"traces of the loss, {name} K=1"] = loss.calls
    for name in ("ddp", "fsdp"):
        loss = CountedLoss()
        one_step(name, loss, accumulate=4)()
        figures[f"traces of the loss, {name} K=4"] = loss.calls
    return figures


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.house", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pins of the ratchets")
    parser.add_argument("--names", action="store_true", help="list what is counted")
    parser.add_argument("--json", action="store_true", help="of one step, as JSON alone")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(run_figures()))
        return
    figures = {**static_figures(), **run_figures()}
    table = Table("what", "figure")
    for name, figure in figures.items():
        table.add_row(name, str(figure))
    table.add_row("CPU-seconds of axon --help", f"{help_seconds():.2f}")
    console = Console()
    console.print(table)
    if options.names:
        console.print("one user in their room:", *single_users())
        console.print("classes of one name:", *repeated_classes())
        console.print("modules of one name:", *repeated_stems())
        console.print("names that say nothing:", *empty_names())
        console.print("about gathering:", *gather_files())
        console.print("lambdas:", *named_lambdas())
        console.print("most own imports:", most_own_imports()[1])
        console.print("floors:", *sorted(floors()[0].items(), key=lambda item: item[1]))
    if options.write:
        PINS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
