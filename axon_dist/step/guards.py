"""Refuses programs that would deadlock a pipeline, and losses that read leaked tracers."""

from __future__ import annotations

from typing import Any

import jax

from ..core.errors import UnsupportedError
from ..core.tree import shape_key
from ..core.typing import Function, PyTree
from ..inspect.computations import below_branches
from ..inspect.parse import ProgramLike, as_module, origin
from ..inspect.transfers import collective_kind
from ..ir.walk import in_branches


class DeadlockGuard:
    """`jax.jit` of a function whose compiled program is checked for deadlocks before it first runs.

    The stages of a pipeline take different branches. Reductions and gathers over the ranks of one
    stage are safe there. A permutation waits for all devices, also for those in other branches,
    and would hang the process without an error. Nobody writes one into a stage on purpose. It comes
    from layers that pass values around a ring, or from the compiler, when a program shifts an array
    along a dim that is split.

    Args:
        function: its first argument always has the same shapes; those of the others may change.
        **options: of `jax.jit`.
    """

    def __init__(self, function: Function, **options: Any):
        self._jitted = jax.jit(function, **options)
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: PyTree, *others: Any) -> Any:
        """Runs the function.

        Raises:
            UnsupportedError: when a branch of the compiled program has a permutation.
        """
        key = shape_key(others)
        if key not in self._compiled:
            compiled = self.lower(state, *others).compile()
            check_branches(compiled)
            self._compiled[key] = compiled
        return self._compiled[key](state, *others)

    def trace(self, *args: Any) -> jax.stages.Traced:
        """Traces the function.

        Raises:
            UnsupportedError: when a branch of the traced program has a permutation.
        """
        traced = self._jitted.trace(*args)
        permutes = (e for e in in_branches(traced.jaxpr.jaxpr) if e.primitive.name == "ppermute")
        _refuse({f"ppermute over {equation.params['axis_name']}" for equation in permutes})
        return traced

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers the function.

        Raises:
            UnsupportedError: when a branch of the traced program has a permutation.
        """
        return self.trace(*args).lower()


ESCAPED = (
    "a value that a block computes is kept outside of the model, as in a list to which each call "
    "appends, and the loss reads it there: a block is a separate program, and only its results "
    "can be used outside. Return the value together with the block's result, or keep it in an "
    "attribute of the block made by nnx.data, which the loss reads"
)


def trace(jitted: Any, arguments: tuple[Any, ...]) -> jax.stages.Traced:
    """Traces a jitted function.

    Raises:
        UnsupportedError: when it reads values of other traces, which become hidden arguments.
    """
    traced = jitted.trace(*arguments)
    if len(traced.jaxpr.in_avals) > len(jax.tree.leaves(arguments)):
        raise UnsupportedError(ESCAPED, code="value-escapes-block")
    return traced


def check_branches(program: ProgramLike) -> None:
    """Raises if a branch of a compiled program has a permutation.

    Args:
        program: a `jax.stages.Compiled`, its text, or a `Module`.

    Raises:
        UnsupportedError: naming the operations that the permutations come from.

    Example:
        >>> import jax.numpy as jnp
        >>> check_branches(jax.jit(jnp.sin).lower(1.0).compile())
    """
    module = as_module(program)
    _refuse(
        {
            origin(instruction.attributes, module.sources)[0] or instruction.name
            for computation in below_branches(module)
            for instruction in computation.instructions
            if collective_kind(instruction) == "collective-permute"
        }
    )


def _refuse(permutes: set[str]) -> None:
    listed = sorted(permutes)
    if listed:
        raise UnsupportedError(
            "stages of this pipeline would permute values between devices in a branch that the "
            f"other stages do not take, and wait for them forever: {', '.join(listed[:4])}. They "
            "come from calls of jax.lax.ppermute, or from the compiler where a model shifts or "
            "slices an array along a dim that a strategy splits, such as the positions under "
            "sequence=True. Leave that strategy out, or compute such a slice before the "
            "model, in the batch",
            code="permutation-in-stage",
        )
