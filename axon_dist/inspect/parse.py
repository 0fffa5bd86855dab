"""Reads the text of an optimised HLO module into instructions and computations.

The text is the one interface that every backend offers (`jax.stages.Compiled.as_text`), even for
devices that are not present. The parser reads only what the other files of this package need.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from ..core.errors import UnsupportedError

_SHAPE = re.compile(r"\b(pred|token|opaque|(?:bf|f|s|u|c)\d\w*)\[([\d,<=]*)\]")
_BITS = re.compile(r"\D+(\d+)")
_SPECIAL_BITS = {"pred": 8, "token": 0, "opaque": 0}


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array type of a compiled program, by its XLA name such as `bf16` or `f8e4m3fn`."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """The bytes of all elements, without the padding that a tiled layout adds."""
        return math.ceil(self.size * dtype_bits(self.dtype) / 8)


def dtype_bits(dtype: str) -> int:
    """Reads the width of an element from the name of its XLA dtype.

    Example:
        >>> [dtype_bits(name) for name in ("bf16", "f32", "f8e4m3fn", "s4", "pred", "c64")]
        [16, 32, 8, 4, 8, 64]
    """
    if dtype in _SPECIAL_BITS:
        return _SPECIAL_BITS[dtype]
    match = _BITS.match(dtype)
    assert match, f"not an XLA dtype: {dtype!r}"
    return int(match.group(1))


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Lists the array types in the text of a type; for a tuple, its leaves in order.

    Example:
        >>> parse_shapes("(f32[8,2]{1,0:T(8,128)}, (bf16[4]{0}))")
        (Shape(dtype='f32', dims=(8, 2)), Shape(dtype='bf16', dims=(4,)))
    """
    return tuple(
        Shape(dtype, tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim))
        for dtype, dims in _SHAPE.findall(text)
    )


def total_bytes(shapes: tuple[Shape, ...]) -> int:
    """Adds up the bytes of several values."""
    return sum(shape.bytes for shape in shapes)


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"(\d+) (.*)")


def source_lines(lines: list[str]) -> dict[int, str]:
    """Reads the source line of each stack frame from the tables at the head of an HLO module.

    XLA writes each file name, location and stack frame once, and instructions refer to a frame. The
    innermost frame is the line that created the operation.

    Args:
        lines: the lines of the module's text.

    Returns:
        `{stack_frame_id: "file.py:line"}`; empty if the module has no tables.

    Example:
        >>> source_lines(['FileNames', '1 "/home/me/step.py"', 'FileLocations',
        ...     '1 {file_name_id=1 function_name_id=1 line=47 end_line=47}',
        ...     'StackFrames', '1 {file_location_id=1 parent_frame_id=1}'])
        {1: 'step.py:47'}
    """
    tables = _read_tables(lines)
    files = {key: os.path.basename(row.strip('"')) for key, row in tables["FileNames"].items()}
    places = {
        key: f"{files.get(_field(row, 'file_name_id'), '?')}:{_field(row, 'line')}"
        for key, row in tables["FileLocations"].items()
    }
    return {
        key: places[_field(row, "file_location_id")]
        for key, row in tables["StackFrames"].items()
        if _field(row, "file_location_id") in places
    }


_LIBRARIES = re.compile(r"(?:site|dist)-packages/(?:flax|jax|jaxlib|optax)/")


def own_lines(lines: list[str]) -> dict[int, str]:
    """Reads the same tables as `source_lines`, but skips the frames of Flax, JAX and optax.

    The innermost frame of every product of a model is the same line of `flax/nnx/nn/linear.py`; the
    line that called it identifies the layer.

    Args:
        lines: the lines of the module's text.

    Returns:
        `{stack_frame_id: "file.py:line"}` of the innermost frame outside these packages, or of the
        innermost frame if there is none.
    """
    tables = _read_tables(lines)
    innermost = source_lines(lines)
    files = tables["FileNames"]
    is_library = {
        key: bool(_LIBRARIES.search(files.get(_field(row, "file_name_id"), "")))
        for key, row in tables["FileLocations"].items()
    }
    frames = tables["StackFrames"]
    # XLA writes the parent's number (counted from 1) or that number plus 1. If it were the number
    # itself, no frame would be its own parent.
    more = int(any(_field(row, "parent_frame_id") == key for key, row in frames.items()))
    found: dict[int, str] = {}
    for key, row in sorted(frames.items()):
        parent = found.get(_field(row, "parent_frame_id") - more, "")
        inside = is_library.get(_field(row, "file_location_id"), False)
        line = parent if inside and parent else innermost.get(key, "")
        if line:
            found[key] = line
    return found


def _read_tables(lines: list[str]) -> dict[str, dict[int, str]]:
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current: dict[int, str] | None = None
    for line in lines:
        if line in tables:
            current = tables[line]
        elif current is not None and (match := _ROW.match(line)):
            current[int(match.group(1))] = match.group(2)
        elif line:
            current = None
    return tables


def _field(row: str, key: str, default: int = 0) -> int:
    match = re.search(rf"\b{key}=(\d+)", row)
    return int(match.group(1)) if match else default


def origin(attributes: str, sources: dict[int, str]) -> tuple[str, str]:
    """Returns the operation name and the `file.py:line` that an instruction's metadata names.

    Args:
        attributes: the text after the operands of the instruction.
        sources: the result of `source_lines` for its module.

    Returns:
        `(op_name, source)`; each is empty if the compiler did not keep it.
    """
    op_name = re.search(r'\bop_name="([^"]*)"', attributes)
    source = sources.get(_field(attributes, "stack_frame_id", -1), "")
    inline = re.search(r'\bsource_file="([^"]*)" source_line=(\d+)', attributes)
    if inline:
        source = f"{os.path.basename(inline.group(1))}:{inline.group(2)}"
    return (op_name.group(1) if op_name else ""), source


_MODULE = re.compile(r"HloModule ([\w.\-]+)")
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
        roles: dict[str, tuple[str, ...]] = {
            role: (name,) for role, name in _CALLED.findall(self.attributes)
        }
        for role, names in _CALLED_LIST.findall(self.attributes):
            roles[role] = tuple(_NAME.findall(names))
        return roles

    def attribute(self, key: str) -> str | None:
        """Returns the text after `key=` up to the comma that ends it, or None."""
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
        operands = (self.by_name.get(name) for name in instruction.operands)
        return tuple(shape for operand in operands if operand for shape in operand.shapes)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations, and the data of its header and tables.

    Args:
        computations: its computations, by name.
        entry: the computation where it starts.
        num_devices: how many devices it runs on.
        sources: the innermost line of each stack frame; see `source_lines`.
        name: the name of the module, such as `jit_train_step`.
        own_lines: the innermost line of each frame outside libraries; see `own_lines`.
    """

    computations: dict[str, Computation]
    entry: Computation
    num_devices: int
    sources: dict[int, str]
    name: str = ""
    own_lines: dict[int, str] = dataclasses.field(default_factory=dict)

    def called(self, instruction: Instruction) -> list[Computation]:
        """Returns the computations that an instruction runs, without reducers."""
        launches = ("call", "call-start", "async-start")
        names = (
            name
            for role, group in instruction.called.items()
            if role != "to_apply" or instruction.opcode in launches
            for name in group
        )
        return [self.computations[name] for name in names if name in self.computations]


ProgramLike: TypeAlias = Module | str | Any
"""A `jax.stages.Compiled`, its text, or the `Module` read from either."""


def as_module(program: ProgramLike) -> Module:
    """Parses a compiled program; returns a `Module` unchanged.

    Args:
        program: the result of `jax.jit(f).lower(...).compile()`, its `as_text()`, or a `Module`.

    Returns:
        The module. If several functions read it, parse it once and pass the module.

    Raises:
        UnsupportedError: if the text is not optimised HLO, such as that of an uncompiled step.
    """
    if isinstance(program, Module):
        return program
    as_text = getattr(program, "as_text", None)
    text = as_text() if as_text else str(program)
    if not text or not text.lstrip().startswith("HloModule"):
        start = (text or "").lstrip()[:40]
        raise UnsupportedError(
            f"the program must be optimised HLO, which starts with 'HloModule', but got {start!r}; "
            "pass jax.jit(f).lower(*args).compile(), and not the lowered program"
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
        num_devices=_field(lines[0], "num_partitions", 1) * _field(lines[0], "replica_count", 1),
        sources=source_lines(lines),
        own_lines=own_lines(lines),
        name=match.group(1) if (match := _MODULE.match(lines[0])) else "",
    )


def joined_lines(lines: Iterable[str]) -> Iterator[str]:
    r"""Joins instructions that span several lines, as the metadata of TPU kernels does.

    Example:
        >>> list(joined_lines(["  %k = f32[] custom-call(), metadata={", '"a": "}"', "}", "}"]))
        ['  %k = f32[] custom-call(), metadata={ "a": "}" }', '}']
    """
    pending = ""
    depth = 0
    for line in lines:
        if not pending and not (_LINE.match(line) and line.count("{") > line.count("}")):
            yield line
            continue
        bare = _QUOTED.sub("", line)
        depth += bare.count("{") - bare.count("}")
        pending = f"{pending} {line}" if pending else line
        if depth <= 0:
            yield pending
            pending = ""
            depth = 0


def _blocks(lines: list[str]) -> Iterator[tuple[bool, str, list[str]]]:
    body: list[str] | None = None
    is_entry = False
    name = ""
    for line in lines:
        if body is not None and line.startswith("}"):
            yield is_entry, name, body
            body = None
        elif body is not None:
            body.append(line)
        elif header := _HEADER.match(line):
            is_entry = bool(header.group(1))
            name = header.group(2)
            body = []


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
