"""The shape of the package in numbers: files, lines, imports, and what one step has to enter.

    python -m benchmarks.house

Nothing here is a speed: every figure is a count, and the same on every machine.
"""

from __future__ import annotations

import ast
import pathlib
import sys
from collections.abc import Callable
from typing import Any

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
H100 = ("989e12", "9.89e14")


def code_lines(path: pathlib.Path) -> int:
    """Lines that are neither blank, nor comment, nor docstring."""
    text = path.read_text()
    hidden: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            hidden.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        bool(x.strip()) and not x.strip().startswith("#") and n not in hidden for n, x in lines
    )


def own_imports(path: pathlib.Path) -> set[str]:
    """The modules of the package that a file imports, by the places it names."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    return {"." * n.level + (n.module or "") for n in nodes if n.level or _is_own(n.module)}


def walks_jaxprs(path: pathlib.Path) -> bool:
    """Whether a file reads the equations of a traced program."""
    attributes = (
        n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
    )
    return "eqns" in set(attributes)


def entered(run: Callable[[], Any]) -> int:
    """How many functions of the package a program enters, each counted once."""
    found: set[tuple[str, int]] = set()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<")
        if event == "call" and named and code.co_filename.startswith(str(PACKAGE)):
            found.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(found)


class Net(nnx.Module):
    """Four equal layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(4)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def loss_fn(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def one_step(strategy: Any, axes: str) -> Callable[[], Any]:
    """Builds, makes the first state, and takes one step."""
    batch = {key: np.ones((32, 64), np.float32) for key in "xy"}
    world, model = World.emulate(8, axes), Net(nnx.Rngs(0))

    def run() -> None:
        step = build_train_step(model, optax.adam(1e-3), loss_fn, strategy, world)
        step(step.init(), batch)

    return run


def _is_own(module: str | None) -> bool:
    return (module or "").split(".")[0] == "axon_dist"


def _untested(files: list[pathlib.Path]) -> list[str]:
    """Modules with code whose names no test imports, neither from them nor through their room."""
    text = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    names = {n for node in ast.walk(ast.parse(text)) for n in _imported(node)}
    missing = []
    for path in files:
        own = {
            n.name
            for n in ast.parse(path.read_text()).body
            if isinstance(n, ast.ClassDef | ast.FunctionDef)
        }
        if own and not own & names and path.stem not in names:
            missing.append(str(path.relative_to(PACKAGE)))
    return missing


def _imported(node: ast.AST) -> list[str]:
    return [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def main() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    # What a room's `__init__` names is its public list, not what its code leans on.
    code = [path for path in files if path.name != "__init__.py"]
    most = max(code, key=lambda path: len(own_imports(path)))
    walkers = sorted({path.relative_to(PACKAGE).parts[0] for path in files if walks_jaxprs(path)})
    rates = [p.name for p in files for _ in range(sum(p.read_text().count(r) for r in H100))]
    table = Table("what", "figure")
    table.add_row("files", str(len(files)))
    table.add_row("lines of code", str(sum(map(code_lines, files))))
    table.add_row(
        "most own imports of a file", f"{len(own_imports(most))} ({most.relative_to(PACKAGE)})"
    )
    table.add_row("rooms that walk jaxprs", ", ".join(walkers))
    table.add_row("places that state an H100's rate", f"{len(rates)} ({', '.join(rates)})")
    rows = {
        "ddp": (ddp(), "dp=8"),
        "full_shard": (fsdp(), "fsdp=8"),
        "1f1b + dp": (compose(ddp(), pipelined(4, 8)), "pp=4,dp=2"),
    }
    World.emulate(8)
    for name, (strategy, axes) in rows.items():
        count = entered(one_step(strategy, axes))
        table.add_row(f"functions entered by build, init and a step of {name}", str(count))
    table.add_row("modules that no test imports", ", ".join(_untested(files)) or "none")
    Console().print(table)


if __name__ == "__main__":
    main()
