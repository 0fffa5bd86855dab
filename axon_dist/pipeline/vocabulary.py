"""Which parameters of a loss may lie in parts of the vocabulary, and the loss of such parts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from ..core.errors import DivisibilityError, UnsupportedError
from ..core.linear_loss import LINEAR_CROSS_ENTROPY, Operands, differentiable, find
from ..core.typing import Array
from ..program import Rewriting, variables
from .layout import Keys
from .loss_trace import LossTrace
from .stage import StageProgram

LEFT_OUT = "or leave split_vocabulary out"
_BY_TOKENS = {1: 1, 4: 0}
"""The operands of the loss that have a dim of tokens: the kernel and the bias, and which dim."""


def parted_by_tokens(trace: LossTrace, axis: str, size: int) -> dict[Keys, int]:
    """The parameters that every rank shall have its part of the vocabulary of, and their dims.

    Args:
        trace: the jaxpr of the loss, blocks as calls.
        axis: the mesh axis of the pipeline.
        size: its ranks.

    Returns:
        The dim of the tokens of the head's kernel, and of its bias where there is one, by keys.

    Raises:
        UnsupportedError: when the loss has no linear head, or something else reads its parameters.
        DivisibilityError: when its tokens do not divide over the ranks.
    """
    losses = [e for e in trace.jaxpr.eqns if e.primitive.name == LINEAR_CROSS_ENTROPY]
    if len(losses) != 1:
        raise UnsupportedError(
            f"split_vocabulary splits the linear head of a loss over {axis!r}, and this loss calls "
            f"linear_cross_entropy {len(losses)} times that a pipeline can see; it must do so "
            "once. Let it end in axon_dist.linear_cross_entropy(hidden, kernel, labels), as "
            "next_token_loss does of a model that has before_head, such as a Transformer with "
            f'logits="chunked"; {LEFT_OUT}'
        )
    (loss,) = losses
    named = {variable: keys for keys, variable in trace.params.items()}
    found: dict[Keys, int] = {}
    for position, dim in _BY_TOKENS.items():
        if position >= len(loss.invars):
            continue
        source, at = _source(trace.jaxpr, loss, loss.invars[position], dim)
        if source not in named:
            what = "kernel" if position == 1 else "bias"
            raise UnsupportedError(
                f"split_vocabulary splits the head over {axis!r}, and its {what} is no parameter "
                "that the loss alone reads, cast or transposed: a tied head is the embedding too, "
                "which the first stage reads. Give the model a head of its own, such as a "
                f"Transformer's tied_head=False; {LEFT_OUT}"
            )
        count = source.aval.shape[at]
        if count % size:
            path = "/".join(map(str, named[source]))
            raise DivisibilityError(
                f"the head {path!r} has {count} tokens, and split_vocabulary splits them over the "
                f"{size} ranks of {axis!r}; make them a multiple, such as "
                f"{-(-count // size) * size}, {LEFT_OUT}"
            )
        found[named[source]] = at
    return found


def _source(jaxpr: Any, loss: Any, atom: Any, dim: int) -> tuple[Any, int]:
    """The variable that an operand is a cast or transposed form of, read by nothing else."""
    made = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    reader = loss
    while not isinstance(atom, Literal):
        readers = [e for e in jaxpr.eqns if atom in variables(e.invars)]
        if readers != [reader] or atom in variables(jaxpr.outvars):
            return None, dim
        reader = made.get(atom)
        if reader is None:
            return atom, dim
        if reader.primitive.name == "transpose":
            dim = reader.params["permutation"][dim]
        elif reader.primitive.name != "convert_element_type":
            return None, dim
        (atom,) = reader.invars
    return None, dim


def with_parted_loss(program: StageProgram, axis: str) -> StageProgram:
    """The program whose `last` takes a rank's part of the head, and gives the loss of all ranks."""

    def of_all(equation: Any, operands: Sequence[Array]) -> list[Array]:
        how = equation.params["how"]
        run = lambda given, wants: find(how, Operands(*given), wants, axis)
        return list(differentiable(run)(*operands))

    rewriting = Rewriting({LINEAR_CROSS_ENTROPY: of_all}, lambda equation: None)
    last = functools.wraps(program.last)(rewriting.of(program.last))
    return dataclasses.replace(program, last=last)
