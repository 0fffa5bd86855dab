"""Where in the user's program an instruction comes from."""

from __future__ import annotations

import os
import re

_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"(\d+) (.*)")


def source_lines(lines: list[str]) -> dict[int, str]:
    """Joins the tables at the head of an HLO module.

    XLA writes each file name, location and stack frame once and lets instructions name a frame.
    The innermost frame is the line that asked for the operation.

    Args:
        lines: the text of the module, by lines.

    Returns:
        `{stack_frame_id: "file.py:line"}`, empty where the module carries no tables.

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


def _field(row: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", row)
    return int(match.group(1)) if match else 0


def origin(attributes: str, sources: dict[int, str]) -> tuple[str, str]:
    """Returns the operation name and the `file.py:line` that an instruction's metadata names.

    Args:
        attributes: the text behind the operands of the instruction.
        sources: what `source_lines` returned for its module.

    Returns:
        `(op_name, source)`, each empty where the compiler left nothing.
    """
    op_name = re.search(r'\bop_name="([^"]*)"', attributes)
    frame = re.search(r"\bstack_frame_id=(\d+)", attributes)
    source = sources.get(int(frame.group(1)), "") if frame else ""
    inline = re.search(r'\bsource_file="([^"]*)" source_line=(\d+)', attributes)
    if inline:
        source = f"{os.path.basename(inline.group(1))}:{inline.group(2)}"
    return (op_name.group(1) if op_name else ""), source
