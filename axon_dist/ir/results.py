"""Compares the results of a program with its inputs: which are unchanged, or are added to."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .factors import SCATTER_ADDS
from .walk import dtype_of, inners, interpret, needed_for, same, same_program


def results_of_no_sample(
    part: ClosedJaxpr, batch: ClosedJaxpr, num_samples: int, num_results: int
) -> list[int]:
    """Returns which of the last results depend neither on the samples nor on their number.

    Args:
        part: the program of a part of a batch.
        batch: the program of the whole batch.
        num_samples: how many of the last inputs are samples.
        num_results: how many of the last results to look at. Results that are inputs passed on
            unchanged are left out.
    """
    if not all(map(same, part.consts, batch.consts)):
        return []
    first = len(part.jaxpr.invars) - num_samples
    last = len(part.jaxpr.outvars) - num_results

    def is_once(number: int) -> bool:
        made, needed = needed_for(part.jaxpr, [last + number])
        # The number of samples is computed without reading them; comparing the programs of two
        # batch sizes shows whether the result depends on it.
        is_equal = same_program(made, needed_for(batch.jaxpr, [last + number])[0])
        return is_equal and bool(made.eqns) and max(needed, default=0) < first

    return [number for number in range(num_results) if is_once(number)]


def changed_results(program: ClosedJaxpr, first: int, count: int) -> list[int]:
    """Returns which of the last results differ from the inputs that they correspond to.

    Args:
        program: any program.
        first: the position of the input that corresponds to the first of these results.
        count: how many results to look at.

    Example:
        >>> import jax
        >>> changed_results(jax.make_jaxpr(lambda x, y, z: (x, y, z + 1))(1, 2, 3), 1, 2)
        [1]
    """
    before = program.jaxpr.invars[first : first + count]
    after = program.jaxpr.outvars[len(program.jaxpr.outvars) - count :]
    return [n for n, pair in enumerate(zip(before, after, strict=True)) if pair[0] is not pair[1]]


def is_added_to(program: ClosedJaxpr, invar: int, output: int) -> bool:
    """Whether an output is an input plus a value that does not depend on that input.

    The input and every value on the way are integers, or all of them are floating-point numbers: a
    conversion between the two kinds would round a sum down.

    Args:
        program: any program.
        invar: the position of the input.
        output: the position of the output.

    Example:
        >>> import jax
        >>> program = jax.make_jaxpr(lambda n, x: (n + 2 * x, 2 * n + x, x))(1, 1)
        >>> [is_added_to(program, 0, number) for number in range(3)]
        [True, False, False]
        >>> program = jax.make_jaxpr(lambda n, x: (n + 2 * x, 0.9 * n + 0.1 * x))(1.0, 1.0)
        >>> [is_added_to(program, 0, number) for number in range(2)]
        [True, False]
        >>> loop = lambda rows: jax.lax.scan(lambda x, row: (x + 1, row + x), 0, rows)[1]
        >>> is_added_to(jax.make_jaxpr(loop)(jnp.arange(3)), 0, 0)
        True
    """

    def run(equation: JaxprEqn, addends: Sequence[int]) -> list[int]:
        """Counts how often the input is an addend of each result; any other use counts as 2."""
        name = equation.primitive.name
        if name == "scan":
            return run_loop(equation, addends)
        count = sum(addends)
        is_sum = name == "add" or (name in _ADDING and not any(addends[1:]))
        # Only a sum surely has a result: a print has none.
        is_addend = is_sum and jnp.issubdtype(dtype_of(equation.outvars[0]), kind)
        return [count if is_addend else 2 * bool(count)] * len(equation.outvars)

    def run_loop(equation: JaxprEqn, addends: Sequence[int]) -> list[int]:
        """Counts for the results of a loop what one iteration counts."""
        (loop,) = inners(equation)
        _, carries, _ = loop.split_operands(addends)
        counts = run_program(loop.program, addends)
        # If an iteration changes the count of a carry, the next one changes it again.
        return counts if counts[: len(carries)] == [*carries] else [2] * len(counts)

    def run_program(inner: ClosedJaxpr, addends: Sequence[int]) -> list[int]:
        nothing = [0] * len(inner.consts)
        return interpret(inner.jaxpr, nothing, addends, run, lambda _: 0, lambda e: True)

    is_integer = jnp.issubdtype(dtype_of(program.jaxpr.invars[invar]), jnp.integer)
    kind = jnp.integer if is_integer else jnp.inexact
    values = [int(number == invar) for number in range(len(program.jaxpr.invars))]
    return run_program(program, values)[output] == 1


_ADDING = (
    *("sub", *SCATTER_ADDS, "convert_element_type", "copy"),
    *("reshape", "broadcast_in_dim", "squeeze"),
)
"""Primitives that add to (or subtract from) their first operand, or pass it on."""
