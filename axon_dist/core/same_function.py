"""Tests whether two functions compute the same: compares their programs, then their results.

Before a strategy or a loss replaces a user's function by its own, the two are compared. Both are
traced on small shapes. Values that both programs compute in the same way are replaced by random
numbers, so only the operations that differ run. A comparison therefore costs two traces and a few
small operations, however large the model is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Literal

from .compat import eval_equation, inner_programs
from .errors import warn

CLOSE = 2e-4
"""The tolerance for float32 results of two equivalent functions, relative to the largest value."""

CLOSE_LOW = 5e-2
"""The tolerance if one of them computes in half precision."""

_OURS = "axon_dist."
_LOW = ("bfloat16", "float16")
_WIDEST = 100
"""The largest integer that is drawn."""

_REPEATED = 2**16 + 1
"""The most random numbers that are drawn for an array; larger arrays repeat them."""


def is_from(function: Any, *packages: str) -> bool:
    """Whether a function is defined in one of the given packages.

    Wrappers of this library and of the packages are looked through: what they wrap must be from the
    packages too, as with `nnx.jit` of a user's function. A user's decorator is not, even if it
    copies the name of the wrapped function.

    Args:
        function: a function or a method.
        packages: prefixes of module names, such as `"axon_dist.nn"`.

    Example:
        >>> is_from(is_from, "axon_dist.core"), is_from(jnp.sum, "axon_dist.core")
        (True, False)
    """

    def module_of(one: Any) -> str:
        code = getattr(one, "__globals__", None)
        return (code or {}).get("__name__") or type(one).__module__

    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not f"{module_of(function)}.".startswith((_OURS, *packages)):
            break
        function = inner
    return f"{module_of(function)}.".startswith(packages)


def has_methods_from(kind: type, *packages: str) -> bool:
    """Whether all methods of a class, and of the modules among its bases, are from some packages.

    Methods are whatever a call may run: also properties, class methods and wrapped functions.

    Args:
        kind: a class of modules.
        packages: prefixes of module names, such as `"axon_dist.nn"`.
    """
    bases = (base for base in kind.__mro__ if issubclass(base, nnx.Module))
    methods = (
        method
        for base in bases
        if base is not nnx.Module
        for value in vars(base).values()
        for method in _functions_of(value)
    )
    return all(is_from(method, *packages) for method in methods)


def _functions_of(value: Any) -> list[Any]:
    """Returns the functions that an attribute of a class runs; none for plain data and classes."""
    match value:
        case property():
            return [one for one in (value.fget, value.fset, value.fdel) if one is not None]
        case staticmethod() | classmethod():
            return [value.__func__]
        case functools.partialmethod() | functools.cached_property():
            return [value.func]
    return [value] if callable(value) and not inspect.isclass(value) else []


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Whether two functions compute the same, or why that is not known.

    Args:
        is_equal: whether their results are equal.
        why: what is different, as the end of a sentence about the first function, such as
            `"differs from this by 0.5, where the largest number is 1.2"`; empty if they are equal.
        was_run: False if they could not be compared, for example because one of them raises an
            error or draws random numbers; `why` then says so.
    """

    is_equal: bool
    why: str = ""
    was_run: bool = True

    def equal_or_warn(self, name: str, otherwise: str) -> bool:
        """Whether the functions are equal; warns if that is not known.

        Args:
            name: the name of the first function.
            otherwise: what happens instead, as the end of a sentence about the first function.
        """
        if not self.was_run:
            warn(f"{name} {otherwise}: the function that would replace it {self.why}")
        return self.is_equal


def compare(
    one: Callable[..., Any], other: Callable[..., Any], arguments: Sequence[Any]
) -> Comparison:
    """Compares the results of two functions; their dtypes may differ.

    A reference that sums in a wider dtype is equal within the tolerance.

    Args:
        one: a function of the arguments; it may close over tracers.
        other: another such function.
        arguments: concrete arrays, or shapes to be filled with random numbers.
    """
    programs = []
    shapes = jax.tree.map(_shape, list(arguments))
    try:
        with jax.default_matmul_precision("highest"):
            for function in (one, other):
                programs.append(jax.make_jaxpr(function)(*shapes))
    except Exception as error:
        traced = "the latter" if programs else "it"
        return _not_run(f"{traced} raises {_named(error)} on arrays of {_described(shapes)}")
    leaves = dict(enumerate(jax.tree.leaves(list(arguments))))
    numbering = _Numbering()
    numbered = [numbering.of(program) for program in programs]
    one_shapes, other_shapes = (
        [np.shape(variable.aval) for variable in program.jaxpr.outvars] for program in programs
    )
    if one_shapes != other_shapes:
        return Comparison(False, f"returns arrays of shapes {one_shapes}, not {other_shapes}")
    if list(numbered[0].results) == list(numbered[1].results):
        return Comparison(True)
    shared = set(numbered[0].made) & set(numbered[1].made)
    try:
        values = _Values(leaves, numbering)
        inputs = _inputs(numbered, values, shared)
        # One program is compiled in much less time than each of its operations alone. It is traced
        # outside the context above, in which JAX would fold `pvary` in a `shard_map`, and fail.
        with jax.default_matmul_precision("highest"):
            run = jax.jit(lambda inputs: [x.run(inputs, shared) for x in numbered])
            compiled = run.lower(inputs).compile()
        close = CLOSE_LOW if any(x.is_low for x in numbered) else CLOSE
        found = _compared(*_results(compiled, inputs), close)
    except _DrawsError:
        return _not_run("random numbers are drawn")
    except Exception as error:
        return _not_run(f"running both on random numbers raises {_named(error)}")
    if not found.is_equal or not values.has_integers:
        return found
    try:
        wide = _inputs(numbered, _Values(leaves, numbering, is_wide=True), shared)
        results = _results(compiled, wide)
    except Exception:  # Such as FloatingPointError of `jax_debug_nans`, if one reads out of bounds.
        return found
    # Wide integers may be out of bounds as indices, and what is then read is not a number.
    are_finite = all(np.isfinite(x.astype(np.float64)).all() for each in results for x in each)
    return _compared(*results, close) if are_finite else found


def _inputs(programs: Sequence[_Numbered], values: _Values, shared: set[int]) -> dict[int, Any]:
    """The values, by number, that a run of several programs starts from."""
    with jax.ensure_compile_time_eval():
        return {k: v for x in programs for k, v in x.inputs(values, shared).items()}


def _results(
    compiled: Callable[..., Any], inputs: dict[int, Any]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    with jax.ensure_compile_time_eval():
        one, other = (list(map(np.asarray, x)) for x in compiled(inputs))
    return one, other


class _DrawsError(Exception):
    """A program draws random numbers, so its results cannot be compared."""


def _not_run(because: str) -> Comparison:
    return Comparison(False, f"cannot be compared with this, because {because}", was_run=False)


def _named(error: Exception) -> str:
    return f"{type(error).__name__} ({' '.join(str(error).split()):.200})"


def _described(shapes: Any) -> str:
    leaves = jax.tree.leaves(shapes)
    return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)


def _compared(
    one_results: list[np.ndarray], other_results: list[np.ndarray], close: float
) -> Comparison:
    for one, other in zip(one_results, other_results, strict=True):
        if not (_is_real(one) and _is_real(other)):
            return _not_run(
                f"results are {one.dtype} and {other.dtype}, which are not real numbers"
            )
        one = one.astype(np.float64)
        other = other.astype(np.float64)
        finite = np.isfinite(one) & np.isfinite(other)
        if not np.array_equal(np.isfinite(one), np.isfinite(other)):
            return Comparison(False, "is finite where this is not, or the other way round")
        if not finite.any():
            if one.size:
                return _not_run("no result of random numbers is finite")
            continue
        worst = float(np.abs(one - other)[finite].max())
        size = float(np.abs(other)[finite].max())
        if not worst <= close * max(size, 1e-3):
            why = f"differs from this by {worst:.2g}, where the largest number is {size:.2g}"
            return Comparison(False, why)
    return Comparison(True)


def _is_real(array: np.ndarray) -> bool:
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    return any(jnp.issubdtype(array.dtype, kind) for kind in kinds)


def _shape(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


class _Numbering:
    """Numbers the values of several programs; values computed in the same way share a number."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.sources: dict[int, tuple[str, Any]] = {}
        # Tracers and keys are compared by identity, so they must stay alive.
        self._alive: list[Any] = []

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of_const(self, value: Any) -> int:
        if isinstance(value, Tracer) or _is_key(value):
            self._alive.append(value)
            number = self._number(("traced", id(value)))
            self.sources[number] = "traced", value
            return number
        array = np.asarray(value)
        number = self._number((array.shape, str(array.dtype), array.tobytes()))
        self.sources[number] = "const", array
        return number

    def of(self, program: ClosedJaxpr) -> _Numbered:
        """Numbers each value of a program."""
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
            how = equation.primitive.name, self._params_key(equation), operands
            for index, variable in enumerate(equation.outvars):
                numbers[variable] = self._number((how, index))
                made.setdefault(numbers[variable], (equation, operands, index))
        results = [read(atom) for atom in jaxpr.outvars]
        return _Numbered(program, made, results)

    def _params_key(self, equation: Any) -> Hashable:
        """The parameters of an equation, without derivative rules: they change no result."""
        if equation.effects:
            return ("effect", id(equation))
        inner = list(inner_programs(equation))
        consts = [self.of_const(value) for value in _constants_in(equation.params)]
        plain = {
            name: value
            for name, value in equation.params.items()
            if not (inner and callable(value)) and not isinstance(value, ClosedJaxpr)
        }
        return str(sorted(plain.items())), tuple(map(str, inner)), tuple(consts)


class _Numbered:
    """A program with numbered values.

    Args:
        program: the traced program.
        made: maps a value's number to its equation, the equation's operands, and the index of the
            value among its results.
        results: the numbers of its outputs.
    """

    def __init__(self, program: ClosedJaxpr, made: dict[int, Any], results: list[int]):
        self.made = made
        self.results = results
        self.is_low = any(
            str(getattr(v.aval, "dtype", "")) in _LOW
            for equation in program.jaxpr.eqns
            for v in equation.outvars
        )

    def order(self, shared: set[int]) -> list[int]:
        """The numbers of the values that the results need, operands first."""
        order: list[int] = []
        seen: set[int] = set()
        stack = [(number, False) for number in reversed(self.results)]
        while stack:
            at, is_done = stack.pop()
            if is_done:
                order.append(at)
                continue
            if at in seen:
                continue
            seen.add(at)
            stack.append((at, True))
            if self._is_computed(at, shared):
                stack.extend((x, False) for x in self.made[at][1])
        return order

    def inputs(self, values: _Values, shared: set[int]) -> dict[int, Any]:
        """The values, by number, that a run starts from: sources, and random shared values."""
        known = {}
        for number in self.order(shared):
            if number not in self.made:
                known[number] = values.source(number)
            elif not self._is_computed(number, shared):
                equation, _, index = self.made[number]
                known[number] = values.random(number, equation.outvars[index].aval)
        return known

    def run(self, inputs: dict[int, Any], shared: set[int]) -> list[Any]:
        """Computes the results from the `inputs` of this program."""
        known = dict(inputs)
        for number in self.order(shared):
            if number not in known:
                equation, operands, index = self.made[number]
                known[number] = eval_equation(equation, [known[x] for x in operands])[index]
        return [known[number] for number in self.results]

    def _is_computed(self, number: int, shared: set[int]) -> bool:
        """Whether an equation is run for a value; shared floats are random numbers instead.

        Shared integers are computed too: random ones may be out of bounds as indices.
        """
        return number in self.made and (number not in shared or not self._is_drawn(number))

    def _is_drawn(self, number: int) -> bool:
        """Whether a shared value may be any number of its dtype."""
        equation, _, index = self.made[number]
        dtype = equation.outvars[index].aval.dtype
        return jnp.issubdtype(dtype, jnp.floating) or dtype == jnp.bool_


class _Values:
    """The values used for the programs' inputs and shared values.

    Args:
        arguments: the arguments by position; random numbers replace those that are not arrays.
        numbering: of the programs.
        is_wide: whether integers are drawn from many instead of 0 and 1, which are valid indices
            of almost every array but hide absolute values, maxima and the like.
    """

    def __init__(self, arguments: dict[int, Any], numbering: _Numbering, is_wide: bool = False):
        self.has_integers = False
        self._is_wide = is_wide
        self._arguments = arguments
        self._sources = numbering.sources
        self._made: dict[int, Any] = {}

    def source(self, number: int) -> Any:
        """The value of an argument or a constant; random numbers for a tracer."""
        kind, value = self._sources[number]
        if kind == "const":
            return value
        if kind == "traced":
            return self.random(number, jax.typeof(value))
        index, aval = value
        argument = self._arguments[index]
        return argument if isinstance(argument, np.ndarray) else self.random(number, aval)

    def random(self, number: int, aval: Any) -> Any:
        """Random numbers of a shape; the same whenever the value has the same number."""
        if number not in self._made:
            if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                raise _DrawsError
            rng = np.random.default_rng(number)
            size = int(np.prod(aval.shape))
            drawn = rng.uniform(0.2, 1.0, min(size, _REPEATED))
            drawn *= rng.choice([-1, 1], drawn.shape) if aval.ndim > 1 else 1
            if jnp.issubdtype(aval.dtype, jnp.integer):
                self.has_integers = True
                most = min(_WIDEST, int(jnp.iinfo(aval.dtype).max))
                least = max(-most, int(jnp.iinfo(aval.dtype).min))
                drawn = rng.integers(least, most + 1, drawn.shape) if self._is_wide else drawn > 0.5
            elif not jnp.issubdtype(aval.dtype, jnp.floating):
                drawn = drawn > 0.5
            array = np.resize(drawn, aval.shape).astype(aval.dtype)
            self._made[number] = array
        return self._made[number]


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.extended)


def _constants_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yields the constants of the programs among the parameters of an equation, at any depth."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, ClosedJaxpr):
                yield from one.consts
                for equation in one.jaxpr.eqns:
                    yield from _constants_in(equation.params)
