"""Products of activations with weights, seen as products of two matrices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core.compat import CALLS, REMATS, eval_equation
from ..core.typing import Array
from ..program import called, interpret, is_unit


def with_joined_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose products see all dims before the contracted ones as one.

        dot(x[batch, tokens, k], w[k, n])  ->  reshape(dot(reshape(x, [batch * tokens, k]), w))

    A reshape costs nothing, and the gradient of the weight then sums over one dim instead of two.
    XLA writes a sum over two dims as one over a transposed copy of the cotangent, and computes what
    leads to the cotangent again for that copy, in an order that misses the cache: a quarter of the
    backward pass of a transformer block on CPUs.

    Only where every dim is whole on its device: dims that the compiler splits over different axes
    do not join.

    Args:
        function: of arrays; loops and functions with own derivatives are left as they are.

    Returns:
        A function of the same arguments and results, up to the order of additions.

    Example:
        >>> x, w = jax.numpy.ones((2, 3, 4)), jax.numpy.ones((4, 5))
        >>> program = jax.make_jaxpr(with_joined_rows(lambda x, w: x @ w))(x, w)
        >>> [(str(e.primitive), e.outvars[0].aval.shape) for e in program.eqns]
        [('reshape', (6, 4)), ('dot_general', (6, 5)), ('reshape', (2, 3, 5))]
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _Interpreter().run(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


class _Interpreter:
    """Runs one program; what several products share is joined once, so that it is kept once."""

    def __init__(self):
        self._joined: dict[int, tuple[Array, Array]] = {}
        self._units: dict[int, tuple[Any, Any]] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        return interpret(jaxpr, consts, values, self._equation)

    def _equation(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        inner = called(equation)
        if is_unit(equation):
            # Equal blocks stay calls of one program, differentiated and lowered once for all.
            program = {"jaxpr": self._unit(equation.params["jaxpr"])}
            return eval_equation(equation.replace(params={**equation.params, **program}), operands)
        if name in CALLS and inner is not None:
            return self.run(inner.jaxpr, inner.consts, operands)
        if name in REMATS and inner is not None:
            again = lambda *values: _Interpreter().run(inner.jaxpr, inner.consts, values)
            policy, barrier = params["policy"], params["prevent_cse"]
            return jax.checkpoint(again, policy=policy, prevent_cse=barrier)(*operands)
        if name == "dot_general":
            return [self._product(equation, *operands)]
        return eval_equation(equation, operands)

    def _unit(self, program: Any) -> Any:
        """The program of a block with its products so seen, the same one for each of its calls."""
        # An id is of one program for as long as the program is held.
        if id(program) not in self._units:
            inside = lambda *values: _Interpreter().run(program.jaxpr, program.consts, values)
            kinds = [
                jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
                if hasattr(v.aval, "weak_type")
                else v.aval
                for v in program.jaxpr.invars
            ]
            self._units[id(program)] = program, jax.make_jaxpr(inside)(*kinds)
        return self._units[id(program)][1]

    def _product(self, equation: Any, x: Array, w: Array) -> Array:
        (of_x, of_w), batch = equation.params["dimension_numbers"]
        rows = x.ndim - len(of_x)
        if any(batch) or rows < 2 or tuple(of_x) != tuple(range(rows, x.ndim)):
            (result,) = eval_equation(equation, (x, w))
            return result
        joined = self._join(x, rows)
        dims = (tuple(range(1, joined.ndim)), of_w), batch
        matrices = equation.replace(params={**equation.params, "dimension_numbers": dims})
        (result,) = eval_equation(matrices, (joined, w))
        return result.reshape(equation.outvars[0].aval.shape)

    def _join(self, x: Array, rows: int) -> Array:
        # An id is of one array for as long as the array is held.
        known = self._joined.get(id(x))
        if known is None or known[1].ndim != x.ndim - rows + 1:
            shape = math.prod(x.shape[:rows]), *x.shape[rows:]
            known = self._joined[id(x)] = x, x.reshape(shape)
        return known[1]
