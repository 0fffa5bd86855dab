"""What the loops of a compiled program carry from one turn to the next."""

from __future__ import annotations

from collections.abc import Iterator

from ..hlo.parse import Computation, Instruction, Module, Program, as_module
from ..hlo.shapes import total_bytes


def carried_bytes(program: Program) -> int:
    """Bytes per device that the outermost loop which keeps most rewrites in every turn.

    In a step that accumulates these are the sums over microbatches, of gradients and of a few
    scalars. What a loop only reads, such as weights, does not count; nor do loops within its turns.

    Args:
        program: a compiled step, or its text.

    Returns:
        The bytes, 0 without a loop.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> add = lambda total, row: (total + row, None)
        >>> sums = jax.jit(lambda rows: jax.lax.scan(add, jnp.zeros(64), rows)[0])
        >>> carried_bytes(sums.lower(jnp.ones((9, 64))).compile())  # and the number of the turn
        260
    """
    module = as_module(program)
    return max((_rewritten(module, loop) for loop in _outermost(module, module.entry)), default=0)


def _outermost(module: Module, computation: Computation) -> Iterator[Instruction]:
    for instruction in computation.instructions:
        if instruction.opcode == "while":
            yield instruction
        elif instruction.opcode in ("call", "conditional"):
            for called in module.called(instruction):
                yield from _outermost(module, called)


def _rewritten(module: Module, loop: Instruction) -> int:
    (name,) = loop.called["body"]
    body = next(c for c in module.called(loop) if c.name == name)
    pairs = zip(loop.shapes, body.root.operands, strict=True)
    made = [shape for at, (shape, operand) in enumerate(pairs) if not _is_kept(body, operand, at)]
    return total_bytes(tuple(made))


def _is_kept(body: Computation, operand: str, position: int) -> bool:
    """Whether a turn hands on what it was given at a position."""
    maker = body.by_name[operand]
    return maker.opcode == "get-tuple-element" and maker.attribute("index") == str(position)
