"""Digests of lowered programs, and the pins that say which change of the code was to change which.

    python -m tests.repo.digests            # says which cells differ from their pins
    python -m tests.repo.digests --write    # pins what there is now, and says what has changed

A digest is of the StableHLO of a step: operations, shapes, shardings, constants, layouts and what
is donated. Names of functions, of arguments and of files, and lines, are no part of it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping

from axon_dist import World
from axon_dist.inspect import lower_outer_steps
from tests.repo.digest_cells import CELLS, Cell

PINS = pathlib.Path(__file__).with_name("program_digests.json")
_LENGTH = 16

_NAMES = (
    # What JAX calls arguments and results: paths of Python attributes.
    (re.compile(r'(?:, )?jax\.(?:result|arg)_info = "(?:[^"\\]|\\.)*"'), ""),
    (re.compile(r"^module @\S+"), "module"),
    # A kernel written in Python is bytes with its own names and lines.
    (re.compile(r'(@(?:tpu_custom_call|\S*triton\S*)\(.*?backend_config = )"[^"]*"'), r"\1"),
)
_START = re.compile(r"^  (?:func\.func|sdy\.mesh) .*?@([\w.$-]+|\"[^\"]*\")")
_SYMBOL = re.compile(r"@([\w.$-]+|\"[^\"]*\")")


def digest_of(text: str) -> str:
    """The digest of a module's text.

    A function counts as what it does: where it is called, the digest of its own text replaces its
    name. So neither names nor the order of functions count, nor whether equal ones are shared.

    Args:
        text: StableHLO as `jax.stages.Lowered.as_text()` gives it.

    Example:
        >>> one = "module @a {\\n  func.func public @main() {\\n    call @f()\\n  }\\n"
        >>> one += "  func.func private @f() {\\n  }\\n}"
        >>> digest_of(one) == digest_of(one.replace("@f", "@g"))
        True
        >>> digest_of(one) == digest_of(one.replace("private", "public"))
        False
    """
    for pattern, by in _NAMES:
        text = pattern.sub(by, text)
    head, symbols = _symbols(text.splitlines())
    made: dict[str, str] = {}

    def canonical(lines: Iterable[str]) -> str:
        return _hash(_SYMBOL.sub(lambda found: f"@{name_of(found[1])}", "\n".join(lines)))

    def name_of(symbol: str) -> str:
        if symbol not in symbols:
            return symbol
        if symbol not in made:
            first, *rest = symbols[symbol]
            made[symbol] = canonical([first.replace(f"@{symbol}", "", 1), *rest])
        return made[symbol]

    return canonical([*head, "@main"])


def _symbols(lines: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The lines before and after all symbols, and those of each symbol."""
    head: list[str] = []
    symbols: dict[str, list[str]] = {}
    into = head
    for line in lines:
        start = _START.match(line)
        if start:
            into = symbols.setdefault(start[1], [])
        elif not line.startswith("   ") and line != "  }":
            into = head
        into.append(line)
    return head, symbols


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def program_texts(cell: Cell) -> list[str]:
    """The lowered step of a cell, and what follows the steps after which replicas meet."""
    step = cell.build()
    return [lowered.as_text() for lowered in (step.lower(cell.batch()), *lower_outer_steps(step))]


def digest(cell: Cell) -> str:
    """The digest of all programs of a cell."""
    texts = [digest_of(text) for text in program_texts(cell)]
    return texts[0] if len(texts) == 1 else _hash("".join(texts))


def jax_minor() -> str:
    """The version of JAX that pins are made for, such as `0.12`."""
    return ".".join(importlib.metadata.version("jax").split(".")[:2])


def versions() -> str:
    """The installed versions that decide programs besides this library."""
    names = ("jax", "flax", "optax")
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def read_pins(path: pathlib.Path) -> dict[str, dict]:
    """A file of pins: which versions it was `made with`, and `pins` by name and minor version."""
    if not path.exists():
        return {"made with": {}, "pins": {}}
    return json.loads(path.read_text())


def write_pins(path: pathlib.Path, pins: Mapping[str, object]) -> list[str]:
    """Writes the pins of the installed versions, and keeps those of others.

    Args:
        path: of the file.
        pins: by name, all that there are.

    Returns:
        What has changed, a line each.
    """
    minor, old = jax_minor(), read_pins(path)
    before = {name: row[minor] for name, row in old["pins"].items() if minor in row}
    rows = {name: {**old["pins"].get(name, {}), minor: pins[name]} for name in sorted(pins)}
    made = {**old["made with"], minor: versions()}
    line = lambda name, row: f"  {json.dumps(name)}: {json.dumps(row, sort_keys=True)}"
    body = ",\n".join(line(name, row) for name, row in rows.items())
    head = json.dumps(made, sort_keys=True)
    path.write_text(f'{{\n"made with": {head},\n"pins": {{\n{body}\n}}\n}}\n')
    return changes(before, pins)


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """How pins differ, a line each.

    Example:
        >>> changes({"a": 1, "b": 2}, {"b": 3, "c": 4})
        ['gone: a', 'changed: b', 'new: c']
    """
    said = []
    for name in sorted({*before, *after}):
        if name not in after:
            said.append(f"gone: {name}")
        elif name not in before:
            said.append(f"new: {name}")
        elif before[name] != after[name]:
            said.append(f"changed: {name}")
    return said


def reason_to_skip(path: pathlib.Path) -> str | None:
    """Why nothing of a file can be compared here; None where it can."""
    made = read_pins(path)["made with"]
    if made.get(jax_minor()) == versions():
        return None
    there = "; ".join(made[minor] for minor in sorted(made)) or "none"
    return f"{path.name} has no pins for {versions()}; it has those of {there}"


def run(path: pathlib.Path, make: Callable[[], Mapping[str, object]], command: str) -> int:
    """The command line of a file of pins: compares, or writes with `--write`."""
    parser = argparse.ArgumentParser(prog=f"python -m {command}")
    parser.add_argument("--write", action="store_true", help="pin what there is now")
    if parser.parse_args().write:
        said = write_pins(path, make())
        print("\n".join(said or ["nothing has changed"]))
        return 0
    pinned = read_pins(path)["pins"]
    before = {name: row[jax_minor()] for name, row in pinned.items() if jax_minor() in row}
    said = changes(before, make())
    print("\n".join(said or ["nothing has changed"]))
    return 1 if said else 0


def all_digests() -> dict[str, str]:
    """The digests of all cells."""
    World.emulate(8)
    return {name: digest(cell) for name, cell in CELLS.items()}


if __name__ == "__main__":
    sys.exit(run(PINS, all_digests, "tests.repo.digests"))
