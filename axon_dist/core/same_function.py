"""Whether one function computes what another does: compared by their programs, then on numbers.

Where a strategy or a loss puts a function of its own in the place of a user's, the two are compared
first. Both are traced on small shapes. What their programs share is computed by neither: only the
operations that one of them has for itself run, on random numbers in place of what is shared. So a
comparison costs two traces and a few small products, however large the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from .compat import eval_equation, inner_programs

CLOSE = 2e-4
"""How far float32 results of one function in two spellings differ, relative to the largest."""

CLOSE_LOW = 5e-2
"""The same, where one of them computes in half precision."""

_OURS = "axon_dist."
_LOW = ("bfloat16", "float16")
_REPEATED = 2**16 + 1
"""Random numbers are drawn so many at most, and repeated: large weights need no more."""


def is_from(function: Any, *packages: str) -> bool:
    """Whether a function was written in one of some packages.

    A decorator of the user's that copies the name of what it wraps does not count as that.

    Args:
        function: a function or a method; one that this library has wrapped is asked about itself.
        packages: beginnings of names of modules, such as `"axon_dist.nn"`.

    Example:
        >>> is_from(is_from, "axon_dist.core"), is_from(jnp.sum, "axon_dist.core")
        (True, False)
    """

    def module_of(one: Any) -> str:
        code = getattr(one, "__globals__", None)
        return (code or {}).get("__name__") or type(one).__module__

    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not f"{module_of(function)}.".startswith(_OURS):
            break
        function = inner
    return f"{module_of(function)}.".startswith(packages)


def difference(
    one: Callable[..., Any], other: Callable[..., Any], arguments: Sequence[Any]
) -> str | None:
    """How the results of two functions differ; "" where they are equal.

    Args:
        one: of the arguments; may close over values of a trace and be called where JAX traces.
        other: likewise.
        arguments: concrete arrays, or shapes of what random numbers may stand for.

    Returns:
        The end of a sentence about `one`, such as `"is other than this by 0.5 of 1.2"`; or None
        where they cannot be compared, because one of them draws random numbers, for example.
    """
    try:
        with jax.default_matmul_precision("highest"):
            shapes = jax.tree.map(_shape, list(arguments))
            programs = [jax.make_jaxpr(function)(*shapes) for function in (one, other)]
    except Exception:
        return None
    given = dict(enumerate(jax.tree.leaves(list(arguments))))
    numbering = _Numbering()
    numbered = [numbering.of(program) for program in programs]
    mine, theirs = (list(x.results) for x in numbered)
    shapes_of = [[np.shape(v.aval) for v in x.jaxpr.outvars] for x in programs]
    if shapes_of[0] != shapes_of[1]:
        return f"gives arrays of shapes {shapes_of[0]}, and not {shapes_of[1]}"
    if mine == theirs:
        return ""
    is_shared = set(numbered[0].made) & set(numbered[1].made)
    try:
        with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
            values = _Values(given, numbering)
            results = [x.run(values, is_shared) for x in numbered]
    except Exception:
        return None
    is_low = any(x.is_low for x in numbered)
    return _compared(results[0], results[1], CLOSE_LOW if is_low else CLOSE)


def _compared(mine: list[np.ndarray], theirs: list[np.ndarray], close: float) -> str | None:
    for left, right in zip(mine, theirs, strict=True):
        if left.dtype.kind not in "fiub" or right.dtype.kind not in "fiub":
            return None
        left, right = left.astype(np.float64), right.astype(np.float64)
        known = np.isfinite(left) & np.isfinite(right)
        if not np.array_equal(np.isfinite(left), np.isfinite(right)):
            return "is finite where this is not, or the other way round"
        if not known.any():
            return None if left.size else ""
        worst = float(np.abs(left - right)[known].max())
        size = float(np.abs(right)[known].max())
        if not worst <= close * max(size, 1e-3):
            return f"is other than this by {worst:.2g}, where the largest number is {size:.2g}"
    return ""


def _shape(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


class _Numbering:
    """Gives values of several programs one number where they are computed in one way."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.sources: dict[int, tuple[str, Any]] = {}
        # Values are compared by identity, so they are to live as long.
        self._kept: list[Any] = []

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of_const(self, value: Any) -> int:
        if isinstance(value, Tracer) or _is_key(value):
            self._kept.append(value)
            number = self._number(("traced", id(value)))
            self.sources[number] = "traced", value
            return number
        array = np.asarray(value)
        number = self._number((array.shape, str(array.dtype), array.tobytes()))
        self.sources[number] = "const", array
        return number

    def of(self, program: ClosedJaxpr) -> _Numbered:
        """The program with a number for each of its values."""
        numbers: dict[Any, int] = {}
        jaxpr = program.jaxpr
        for variable, value in zip(jaxpr.constvars, program.consts, strict=True):
            numbers[variable] = self.of_const(value)
        for index, variable in enumerate(jaxpr.invars):
            numbers[variable] = self._number(("argument", index))
            self.sources[numbers[variable]] = "argument", (index, variable.aval)

        def read(atom: Any) -> int:
            return self.of_const(atom.val) if isinstance(atom, Literal) else numbers[atom]

        made: dict[int, Any] = {}
        for equation in jaxpr.eqns:
            operands = tuple(map(read, equation.invars))
            how = equation.primitive.name, self._said(equation), operands
            for index, variable in enumerate(equation.outvars):
                numbers[variable] = self._number((how, index))
                made.setdefault(numbers[variable], (equation, operands, index))
        results = [read(atom) for atom in jaxpr.outvars]
        return _Numbered(program, made, results)

    def _said(self, equation: Any) -> Hashable:
        """The parameters of an equation; those of derivatives change no result."""
        if equation.effects:
            return ("effect", id(equation))
        inner = list(inner_programs(equation))
        consts = [
            self.of_const(value)
            for x in equation.params.values()
            for value in (x.consts if isinstance(x, ClosedJaxpr) else ())
        ]
        plain = {
            name: value
            for name, value in equation.params.items()
            if not (inner and callable(value)) and not isinstance(value, ClosedJaxpr)
        }
        return str(sorted(plain.items())), tuple(map(str, inner)), tuple(consts)


class _Numbered:
    """A program whose values have numbers.

    Args:
        program: as it was traced.
        made: the equation, its operands and the place among its results, by number.
        results: the numbers of what it returns.
    """

    def __init__(self, program: ClosedJaxpr, made: dict[int, Any], results: list[int]):
        self.made = made
        self.results = results
        self.is_low = any(
            str(getattr(v.aval, "dtype", "")) in _LOW
            for equation in program.jaxpr.eqns
            for v in equation.outvars
        )

    def run(self, values: _Values, is_shared: set[int]) -> list[np.ndarray]:
        """The results, computed from what the programs share and from their inputs."""
        order: list[int] = []
        seen: set[int] = set()

        def visit(number: int) -> None:
            stack = [(number, False)]
            while stack:
                at, is_done = stack.pop()
                if is_done:
                    order.append(at)
                    continue
                if at in seen:
                    continue
                seen.add(at)
                stack.append((at, True))
                # Integers are computed where they can be: random ones may be out of bounds.
                if at in self.made and (at not in is_shared or not self._is_float(at)):
                    stack.extend((x, False) for x in self.made[at][1])

        for number in self.results:
            visit(number)
        known: dict[int, Any] = {}
        for number in order:
            if number in known:
                continue
            if number not in self.made:
                known[number] = values.source(number)
            elif number in is_shared and self._is_float(number):
                equation, _, index = self.made[number]
                known[number] = values.random(number, equation.outvars[index].aval)
            else:
                equation, operands, index = self.made[number]
                known[number] = eval_equation(equation, [known[x] for x in operands])[index]
        return [np.asarray(known[number]) for number in self.results]

    def _is_float(self, number: int) -> bool:
        equation, _, index = self.made[number]
        return jnp.issubdtype(equation.outvars[index].aval.dtype, jnp.floating)


class _Values:
    """What stands for the inputs of programs, and for what they share."""

    def __init__(self, given: dict[int, Any], numbering: _Numbering):
        self._given = given
        self._sources = numbering.sources
        self._made: dict[int, Any] = {}

    def source(self, number: int) -> Any:
        """An argument or a constant; numbers in place of a value of a trace."""
        kind, value = self._sources[number]
        if kind == "const":
            return value
        if kind == "traced":
            return self.random(number, jax.typeof(value))
        index, aval = value
        given = self._given[index]
        return given if isinstance(given, np.ndarray) else self.random(number, aval)

    def random(self, number: int, aval: Any) -> Any:
        """Numbers of a shape; the same for the same value of two programs."""
        if number not in self._made:
            if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                raise TypeError("draws random numbers")
            rng, size = np.random.default_rng(number), int(np.prod(aval.shape))
            drawn = rng.uniform(0.2, 1.0, min(size, _REPEATED))
            drawn *= rng.choice([-1, 1], drawn.shape) if aval.ndim > 1 else 1
            if not jnp.issubdtype(aval.dtype, jnp.floating):
                drawn = drawn > 0.5
            array = np.resize(drawn, aval.shape).astype(aval.dtype)
            self._made[number] = array
        return self._made[number]


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.extended)
