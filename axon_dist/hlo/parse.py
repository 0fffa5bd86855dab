"""Reads the text of an optimised HLO module into instructions and computations.

The text is the one interface that every backend offers (`jax.stages.Compiled.as_text`), also for
devices that are not here. Only what the other files of this room ask for is read.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from ..core.errors import UnsupportedError
from .shapes import Shape, parse_shapes, total_bytes
from .sources import source_lines

_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)\s(?:.*\s)?\{$")
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"')
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ?([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation: `name = type opcode(arguments), attributes`."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> int:
        """The bytes of the result."""
        return total_bytes(self.shapes)

    @property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations it names, by role: `calls`, `to_apply`, `body`, `condition`, …"""
        roles = {role: (name,) for role, name in _CALLED.findall(self.attributes)}
        for role, names in _CALLED_LIST.findall(self.attributes):
            roles[role] = tuple(_NAME.findall(names))
        return roles

    def attribute(self, key: str) -> str | None:
        """Returns the text behind `key=` up to the comma that ends it, or None."""
        match = re.search(rf"(?:^|[ ,{{]){re.escape(key)}=", self.attributes)
        if match is None:
            return None
        return _balanced_prefix(self.attributes, match.end())


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, in the order in which they are scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Its instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """The types of the operands of one of its instructions, tuples flattened."""
        found = (self.by_name.get(name) for name in instruction.operands)
        return tuple(shape for operand in found if operand for shape in operand.shapes)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations, and what its header and tables say."""

    computations: dict[str, Computation]
    entry: Computation
    num_devices: int
    sources: dict[int, str]

    def called(self, instruction: Instruction) -> list[Computation]:
        """The computations that an instruction runs; a reducer is not counted as run."""
        launches = ("call", "call-start", "async-start")
        names = (
            name
            for role, group in instruction.called.items()
            if role != "to_apply" or instruction.opcode in launches
            for name in group
        )
        return [self.computations[name] for name in names if name in self.computations]


Program: TypeAlias = Module | str | Any
"""A `jax.stages.Compiled`, its text, or the `Module` read from either."""


def as_module(program: Program) -> Module:
    """Reads a compiled program, unless it has been read already.

    Args:
        program: what `jax.jit(f).lower(...).compile()` returns, its `as_text()`, or a `Module`.

    Returns:
        The module; read it once and pass it on when several questions are asked of it.

    Raises:
        UnsupportedError: the text is not optimised HLO, such as that of a step not yet compiled.
    """
    if isinstance(program, Module):
        return program
    text = program if isinstance(program, str) else program.as_text()
    if not text or not text.lstrip().startswith("HloModule"):
        start = (text or "").lstrip()[:40]
        raise UnsupportedError(
            f"the program must be optimised HLO, which starts with 'HloModule', but got {start!r}; "
            "pass jax.jit(f).lower(*args).compile(), not what comes before .compile()"
        )
    return parse(text)


def parse(text: str) -> Module:
    """Reads the text of an HLO module.

    Example:
        >>> module = parse('''HloModule tiny, num_partitions=4
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %x = f32[8]{0} parameter(0)
        ...   ROOT %y = f32[8]{0} negate(%x)
        ... }''')
        >>> module.num_devices, module.entry.root.opcode, module.entry.root.operands
        (4, 'negate', ('x',))
    """
    lines = list(joined_lines(text.strip().splitlines()))
    computations: dict[str, Computation] = {}
    entry = ""
    for is_entry, name, body in _blocks(lines):
        computations[name] = Computation(name, tuple(filter(None, map(_instruction, body))))
        entry = name if is_entry else entry
    if not computations:
        raise UnsupportedError(f"the HLO module holds no computation: {lines[0][:80]!r}")
    return Module(
        computations=computations,
        entry=computations[entry or next(reversed(computations))],
        num_devices=_header_number(lines[0], "num_partitions")
        * _header_number(lines[0], "replica_count"),
        sources=source_lines(lines),
    )


def joined_lines(lines: Iterable[str]) -> Iterator[str]:
    r"""Joins instructions that go on over several lines, as metadata of TPU kernels does.

    Example:
        >>> list(joined_lines(["  %k = f32[] custom-call(), metadata={", '"a": "}"', "}", "}"]))
        ['  %k = f32[] custom-call(), metadata={ "a": "}" }', '}']
    """
    pending, depth = "", 0
    for line in lines:
        if not pending and not (_LINE.match(line) and line.count("{") > line.count("}")):
            yield line
            continue
        bare = _QUOTED.sub("", line)
        depth += bare.count("{") - bare.count("}")
        pending = f"{pending} {line}" if pending else line
        if depth <= 0:
            yield pending
            pending, depth = "", 0


def _header_number(header: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", header)
    return int(match.group(1)) if match else 1


def _blocks(lines: list[str]) -> Iterator[tuple[bool, str, list[str]]]:
    body: list[str] | None = None
    is_entry, name = False, ""
    for line in lines:
        if body is not None and line.startswith("}"):
            yield is_entry, name, body
            body = None
        elif body is not None:
            body.append(line)
        elif header := _HEADER.match(line):
            is_entry, name, body = bool(header.group(1)), header.group(2), []


def _instruction(line: str) -> Instruction | None:
    match = _LINE.match(line)
    if match is None:
        return None
    text = _COMMENT.sub("", line[match.end() :]) if "/*" in line else line[match.end() :]
    type_end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, type_end)
    if opcode is None:
        return None
    end = _closing(text, opcode.end() - 1)
    arguments = text[opcode.end() : end]
    return Instruction(
        name=match.group(2),
        opcode=opcode.group(1),
        shapes=parse_shapes(text[:type_end]),
        operands=tuple(_NAME.findall(arguments)),
        arguments=arguments,
        attributes=text[end + 1 :].removeprefix(", "),
        is_root=bool(match.group(1)),
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _balanced_prefix(text: str, start: int) -> str:
    depth = 0
    for match in re.compile(r'"(?:\\.|[^"\\])*"|[(\[{}\])]|,').finditer(text, start):
        token = match.group()
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
        if depth < 0 or (token == "," and depth == 0):
            return text[start : match.start()]
    return text[start:]
