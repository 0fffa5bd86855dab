"""Pairs of equal equations: one from a part's program, one from the whole batch's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ..core.compat import callback_function, eval_equation, source_line
from ..core.tree import is_key
from ..core.typing import Array, PyTree
from ..ir.factors import Factors, Role, factors_of
from ..ir.walk import (
    OPENED,
    Atom,
    Aval,
    Params,
    dtype_of,
    equations,
    same,
    shape_of,
    struct_of,
)
from .abstract_values import CONSTANT, Coupling, Kind, Number, Value, Why, coupled

Constant: TypeAlias = Array | np.ndarray | Number
"""The value of a literal or a constant of a program."""

Shapes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The shapes of an array for a part of the batch and for the whole."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """An equation in the programs for a part of the batch and for the whole.

    Args:
        name: the name of the primitive.
        part_params: its parameters for a part.
        whole_params: its parameters for the whole.
        inputs: the shapes of its operands.
        outputs: the shapes of its results.
        kinds: the NumPy kinds of the first operand and the first result, such as "f" or "i".
        generator: the dtype of the first operand if that is a random key, else "".
    """

    name: str
    part_params: Params
    whole_params: Params
    inputs: tuple[Shapes, ...]
    outputs: tuple[Shapes, ...]
    kinds: tuple[str, str]
    generator: str = ""

    @cached_property
    def factors(self) -> Factors:
        """The factors of its dims in the program of the whole batch.

        Raises:
            LookupError: if they are unknown.
        """
        inputs, outputs = ([large for _, large in side] for side in (self.inputs, self.outputs))
        factors = factors_of(self.name, self.whole_params, inputs, outputs)
        if factors is None:
            raise LookupError(self.name)
        return factors

    @property
    def roles(self) -> set[Role | None]:
        """The roles of the dims of its operands that count samples."""
        return {
            self.factors.role(number, dim)
            for number, shapes in enumerate(self.inputs)
            for dim in grown(shapes)
        }

    def moved(self, value: Value, operand: int = 0) -> Value:
        """Moves rows to the dim of the result that counts their samples.

        Raises:
            Coupling: if there is no such dim.
        """
        if value.dim is None:
            return value
        dim = self.factors.result_dim(operand, value.dim)
        if dim is None:
            raise Coupling(Why.STRAY)
        return value.in_dim(dim, value.outer)


Rule: TypeAlias = Callable[[Operation, list[Value]], "Value | list[Value]"]


def grown(shapes: Shapes) -> list[int]:
    """Returns the dims of an array that count samples: those whose sizes differ."""
    return [dim for dim, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]


def as_rows(value: Value, shapes: Shapes) -> Value:
    """Turns a constant that is repeated for every sample into rows; keeps other values."""
    dims = grown(shapes)
    if value.is_constant and len(dims) == 1:
        return Value(Kind.ROWS, value.scale, dims[0], repeats=True)
    return value


def all_constant(values: Sequence[Value]) -> bool:
    """Whether no value depends on the values of the samples."""
    return all(value.is_constant for value in values)


def only_numbers(value: Value) -> Value:
    """Returns the value; raises if some of its columns are the sample's position and some not."""
    if value.positions not in ((), (True,)):
        raise Coupling(Why.NUMBERS)
    return value


def is_loop_index(value: Value, count: int) -> bool:
    """Whether a value is the iteration index of a loop over `count` samples."""
    return (
        value.is_rows
        and value.dim is None
        and value.positions == (True,)
        and value.loop_length == count
    )


def not_numbered(value: Value) -> Value:
    """Returns a value without sample positions that is not a loop's running sum; else raises."""
    if value.kind is Kind.CARRY:
        raise Coupling(Why.LOOPED)
    if value.positions:
        raise Coupling(Why.NUMBERS)
    return value


Pair: TypeAlias = tuple[JaxprEqn, JaxprEqn]
"""An equation of the part's program, and the same equation of the whole batch's."""


@dataclasses.dataclass(frozen=True, eq=False)
class PairValues:
    """The abstract values of the variables of two programs, which must correspond.

    Args:
        constant: (a literal's values in both programs) -> its abstract value.
        values: the value of each variable of the whole; all have a value number.
        numbers: the value number of each variable of the part.
        mates: for each variable of the whole, the variable of the part that corresponds to it.
    """

    constant: Callable[[Constant, Constant], Value]
    values: dict[Atom, Value] = dataclasses.field(default_factory=dict)
    numbers: dict[Atom, int] = dataclasses.field(default_factory=dict)
    mates: dict[Atom, Atom] = dataclasses.field(default_factory=dict)

    def write(self, part: Atom, whole: Atom, value: Value) -> None:
        """Sets the value of a variable of the whole, and the corresponding variable of the part."""
        self.values[whole] = value
        self.mates[whole] = part
        self.numbers[part] = value.value_number

    def read(self, part: Atom, whole: Atom) -> Value:
        """Returns the value of two atoms; COUPLED if they do not correspond."""
        if isinstance(part, Literal) or isinstance(whole, Literal):
            if isinstance(part, Literal) and isinstance(whole, Literal):
                return self.constant(part.val, whole.val)
            return coupled(Why.DIFFERS, "")
        value = self.values[whole]
        return value if self.numbers.get(part) == value.value_number else coupled(Why.DIFFERS, "")


def have_one_form(one: JaxprEqn | Jaxpr, other: JaxprEqn | Jaxpr, *names: str) -> bool:
    """Whether the named lists of two programs or equations have equal lengths."""
    return all(len(getattr(one, name)) == len(getattr(other, name)) for name in names)


_SIZED = frozenset(
    {
        "shape", "new_sizes", "reps", "sizes", "start_indices", "limit_indices", "slice_sizes",
        "indices_are_sorted", "unique_indices", "sharding", "out_sharding", "result_avals",
    }
)  # fmt: skip
"""Parameters that follow from sizes, which the rules compare, or that do not change results."""


def why_unequal(op: Operation) -> str:
    """Says why an operation's parameters differ between a part and the whole, except for sizes.

    Functions are not compared, as each trace makes them anew: what they compute is also a program
    among the parameters. Only the user's function of a callback has none.

    Returns:
        A verb phrase about the result; "" if the parameters are equal.

    Example:
        >>> square = {"y": 2}
        >>> why_unequal(Operation("integer_pow", square, {"y": 3}, (), (), ("f", "f"))) > ""
        True
        >>> why_unequal(Operation("integer_pow", square, {"y": 2}, (), (), ("f", "f")))
        ''
    """
    for name, one in op.part_params.items():
        other = op.whole_params.get(name)
        if name == "callback" and not same(callback_function(one), callback_function(other)):
            # It may read the number of samples, or be an object that nothing compares.
            return f"takes `{op.name}` {REMADE}"
        if name in _SIZED or one is other or (callable(one) and callable(other)):
            continue
        is_array = isinstance(one, np.ndarray) or isinstance(other, np.ndarray)
        # The text of a program may have the address of a function, which each trace makes anew.
        is_equal = np.array_equal(one, other) if is_array else one == other
        if not (is_equal or (not is_array and str(one) == str(other)) or same(one, other)):
            return f"takes `{op.name}` {RESIZED}"
    return ""


def are_equal_keys(one: Any, other: Any) -> bool:
    """Whether two random keys are equal; False if only one of them is a key."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    with jax.ensure_compile_time_eval():
        a, b = (np.asarray(jax.random.key_data(key)) for key in (one, other))
    return np.array_equal(a, b)


_FOLDED: MappingProxyType[str, Callable[..., Constant]] = MappingProxyType(
    {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum,
        "min": np.minimum, "neg": np.negative, "abs": np.abs, "sign": np.sign, "log": np.log,
        "log1p": np.log1p, "exp": np.exp, "expm1": np.expm1, "exp2": np.exp2, "sqrt": np.sqrt,
        "rsqrt": lambda x: 1 / np.sqrt(x), "square": np.square, "tanh": np.tanh, "pow": np.power,
        "floor": np.floor, "ceil": np.ceil, "rem": np.fmod, "eq": np.equal, "ne": np.not_equal,
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "and": np.bitwise_and, "or": np.bitwise_or, "div": np.divide,
    }
)  # fmt: skip
"""Scalar operations that are folded if their operands differ between part and whole."""


def folded(op: Operation, known: list[tuple[Number, Number]]) -> tuple[Number, Number] | None:
    """Folds an operation on scalar constants that differ between the part and the whole.

    Args:
        op: the operation.
        known: the operands, each for the part and for the whole.

    Returns:
        The results for both; None if the operands do not differ, or the operation is unknown.
    """
    # `a != a` holds for NaN alone.
    if all(a == b or (a != a and b != b) for a, b in known):
        return None
    run = _run_of(op)
    if run is None:
        return None
    kind = op.kinds[1]
    with np.errstate(all="ignore"):
        a, b = (np.asarray(run(*numbers)) for numbers in zip(*known, strict=True))
        if kind == "f":
            a = a.astype(np.float64)
            b = b.astype(np.float64)
        elif kind in "iu":
            a = np.trunc(a).astype(np.int64)
            b = np.trunc(b).astype(np.int64)
        else:
            a = a.astype(bool)
            b = b.astype(bool)
    return a.item(), b.item()


def _run_of(op: Operation) -> Callable[..., Constant] | None:
    if op.name == "integer_pow":
        return lambda x: float(x) ** op.part_params["y"]
    if op.name in ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy"):
        return float if op.kinds[1] == "f" else np.asarray
    return _FOLDED.get(op.name)


def operation(pair: Pair) -> Operation:
    """Makes the `Operation` that the rules read from a pair of equations."""
    one, two = pair
    sides = (one.invars, two.invars), (one.outvars, two.outvars)
    inputs, outputs = (
        tuple((shape_of(a), shape_of(b)) for a, b in zip(*side, strict=True)) for side in sides
    )
    keys = [str(dtype_of(v)) for v in one.invars[:1] if is_key(v.aval)]
    kinds = (_kind(one.invars), _kind(one.outvars))
    return Operation(
        one.primitive.name, one.params, two.params, inputs, outputs, kinds, "".join(keys)
    )


def _kind(atoms: Sequence[Atom]) -> str:
    """Returns the NumPy kind of the first atom's dtype; "f" for all floats and random keys."""
    dtype = (dtype_of(atoms[0]) if atoms else None) or np.float32
    # NumPy gives extended floats, such as bfloat16, the kind "V".
    is_float = (atoms and is_key(atoms[0].aval)) or jnp.issubdtype(dtype, jnp.floating)
    return "f" if is_float else np.dtype(dtype).kind


RUN_ONCE = OPENED | {"shard_map", "composite"}
"""Primitives that run an inner program once, on their operands in order."""


def is_of_jax(name: str) -> bool:
    """Guesses by its name whether a jitted function is one of JAX's own.

    Only the line that an error names depends on the guess: for a function that the user has given
    such a name, it is the line of the call, not one within the function.
    """
    modules = (jnp, jnp.linalg, jax.nn, jax.random, jax.lax, jax.scipy.special)
    return name.startswith("_") or any(hasattr(module, name) for module in modules)


def is_float(aval: Aval) -> bool:
    """Whether arrays of this kind have gradients."""
    return not is_key(aval) and jnp.issubdtype(getattr(aval, "dtype", int), jnp.inexact)


def pullback(equation: JaxprEqn, floats: list[int]) -> ClosedJaxpr:
    """Traces (operands, cotangents of the results) -> cotangents of some operands."""

    def pull(*values: Array) -> PyTree:
        operands = list(values[: len(equation.invars)])

        def run(*changed: Array) -> list[Array]:
            for index, value in zip(floats, changed, strict=True):
                operands[index] = value
            made = zip(eval_equation(equation, operands), equation.outvars, strict=True)
            return [value for value, v in made if is_float(v.aval)]

        _, back = jax.vjp(run, *(operands[index] for index in floats))
        return back(list(values[len(operands) :]))

    seeds = [v for v in equation.outvars if is_float(v.aval)]
    return jax.make_jaxpr(pull)(*map(struct_of, [*equation.invars, *seeds]))


def differing(part: Jaxpr, whole: Jaxpr, line: str) -> list[Value]:
    """Returns COUPLED results for two programs that differ, with a line of the longer one."""
    if not line:
        at = max((0, 1), key=lambda number: len((part, whole)[number].eqns))
        line = source_line((part, whole)[at].eqns[-1])
        for pair in zip(part.eqns, whole.eqns, strict=False):
            is_other = pair[0].primitive.name != pair[1].primitive.name
            if is_other or not have_one_form(*pair, "invars"):
                line = source_line(pair[at])
                break
    return [coupled(Why.DIFFERS, line)] * len(part.outvars)


NOT_FIRST = (
    "goes through a function that axon_dist.per_sample marks, with an operand or a result that "
    "does not count samples in dim 0"
)

RESIZED = "with sizes or other parameters that differ from one number of samples to another"
"""The end of a reason: the operation's parameters depend on the number of samples."""

REMADE = (
    "of a Python function that is another one in each trace, which may depend on the number of "
    "samples"
)
"""The end of a reason: the function of a callback is not known to be the same."""

WITHIN = (
    "within a function that axon_dist.per_sample marks, where every rank would draw the same; draw "
    "them before it, by jax.random.uniform, normal, bernoulli and the like"
)


def counts(body: Jaxpr, operand: int, made: int) -> bool:
    """Whether an output of a loop's body is one of its inputs plus 1."""
    result = body.outvars[made]
    source = body.invars[operand]
    makers = [e for e in body.eqns if result in e.outvars and e.primitive.name == "add"]
    steps = [atom.val for e in makers for atom in e.invars if isinstance(atom, Literal)]
    return [int(step) for step in steps] == [1] and source in makers[0].invars


def draws(called: ClosedJaxpr) -> str:
    """Returns the operation by which a marked function draws random numbers; "" if none does."""
    names = (e.primitive.name for e in equations(called.jaxpr))
    return next((name for name in names if name.startswith(("random_", "rng_", "threefry"))), "")


def promised(outputs: Sequence[Shapes], operands: list[Value]) -> list[Value]:
    """Returns the results of a function that the user marks as per-sample: rows from rows."""
    problems = (_unkept(value) for value in operands)
    problem = next((problem for problem in problems if problem is not None), None)
    places = {value.dim for value in operands if value.is_rows}
    if len(places) > 1:
        problem = problem or coupled(Why.STRAY, "")
    # In a loop over the samples, it gets one sample, without a dim that counts them.
    is_one = places == {None}

    def of(dims: list[int]) -> Value:
        if dims == ([] if is_one else [0]):
            return Value(Kind.ROWS, dim=None if is_one else 0)
        return coupled(NOT_FIRST, "") if dims else CONSTANT

    return [problem or of(grown(shapes)) for shapes in outputs]


def _unkept(value: Value) -> Value | None:
    """Returns COUPLED if the promise of a per-sample function says nothing about an operand."""
    if value.kind is Kind.COUPLED:
        return value
    if value.kind is Kind.CARRY:
        return coupled(Why.LOOPED, "")
    if value.positions:
        return coupled(Why.NUMBERS, "")
    if not (value.is_constant or value.is_rows):
        return coupled(value.why or Why.EACH, value.line)
    if value.is_scaled and not value.is_zero:
        return coupled(Why.SIZES, "")
    if value.dim not in (None, 0) or value.outer != 1:
        return coupled(NOT_FIRST, "")
    return None


def _number(value: np.ndarray) -> Number | None:
    """Returns a scalar as a Python number, or None if it is not a number."""
    if value.dtype.kind in "biuf":
        return value.item()
    # NumPy does not count bfloat16 and other extended floats as floats.
    return float(value) if jnp.issubdtype(value.dtype, jnp.floating) else None


def constant(first: np.ndarray, second: np.ndarray, ratio: float) -> Value:
    """Returns the value of a constant that may differ between a part and the whole.

    Args:
        first: the constant in the program of a part.
        second: the constant in the program of the whole.
        ratio: the samples of the whole, divided by those of a part.
    """
    kind = first.dtype.kind
    if first.shape != second.shape:
        flat = first.reshape(-1)
        if not (flat.size and (flat == flat[0]).all() and (second == flat[0]).all()):
            return coupled(Why.ONE_EACH, "")
        first = second = np.asarray(flat[0])
    one, other = (None if x.ndim else _number(x) for x in (first, second))
    if np.array_equal(first, second, equal_nan=kind in "fc"):
        return CONSTANT if one is None else Value(known=(one, one))
    if kind not in "biufV" or first.dtype != second.dtype or not first.size:
        return coupled(Why.DIFFERS, "")
    eps = 0.0 if kind in "biu" else float(jnp.finfo(first.dtype).eps)
    if not first.ndim:
        if one is None or other is None:
            return coupled(Why.DIFFERS, "")
        return grown_scalar(one, other, ratio, eps)
    a = first.astype(np.float64).reshape(-1)
    b = second.astype(np.float64).reshape(-1)
    with np.errstate(all="ignore"):
        scales = b / a
    fits = np.isfinite(scales).all() and scales[0]
    if not fits or not np.allclose(scales, scales[0], rtol=2 * eps, atol=0):
        return coupled("is an array that " + Why.SIZES, "")
    return Value(Kind.CONSTANT, _rounded(float(scales[0]), ratio, eps))


def grown_scalar(first: Number, second: Number, ratio: float, eps: float = 2**-23) -> Value:
    """Returns the value of a scalar that differs between a part and the whole.

    Args:
        first: the scalar for a part.
        second: the scalar for the whole.
        ratio: the samples of the whole, divided by those of a part.
        eps: the machine epsilon of its dtype.
    """
    known = first, second
    if first == second:
        return Value(known=known)
    has_scale = not isinstance(first, bool) and first and second and math.isfinite(second / first)
    if not has_scale:
        why = "is a number that " + Why.SIZES
        return dataclasses.replace(coupled(why, ""), known=known)
    return Value(Kind.CONSTANT, _rounded(second / first, ratio, eps), known=known)


def _rounded(scale: float, ratio: float, eps: float) -> float:
    """Replaces a scale by a (half-integer) power of the ratio that it equals up to rounding."""
    power = round(2 * math.log(abs(scale)) / math.log(ratio)) / 2 if ratio != 1 else 0.0
    exact = math.copysign(ratio**power, scale)
    return exact if math.isclose(scale, exact, rel_tol=max(2 * eps, 1e-12)) else scale
