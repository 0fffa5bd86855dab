"""Equations of a program for two numbers of samples, side by side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.compat import eval_equation, source_line
from ..core.tree import is_key
from .sample_operation import Operation


def operation(pair: tuple[Any, Any]) -> Operation:
    """What a rule gets to see of an equation."""
    one, two = pair
    shapes = lambda left, right: tuple(
        (_shape(a), _shape(b)) for a, b in zip(left, right, strict=True)
    )
    dtype = lambda atoms: _dtype(atoms[0].aval) if atoms else np.dtype("float32")
    return Operation(
        one.primitive.name,
        one.params,
        two.params,
        shapes(one.invars, two.invars),
        shapes(one.outvars, two.outvars),
        (dtype(one.invars), dtype(one.outvars)),
        next((str(v.aval.dtype) for v in one.invars[:1] if is_key(v.aval)), ""),
    )


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _dtype(aval: Any) -> Any:
    found = getattr(aval, "dtype", np.float32)
    # Extended floats are of kind V for NumPy.
    floats = not is_key(aval) and jnp.issubdtype(found, jnp.floating)
    return np.dtype("float32") if floats or is_key(aval) else np.dtype(found)


CALLS = frozenset(
    {
        "jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "shard_map",
        "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "composite",
    }
)  # fmt: skip
"""What runs an inner program once, on its operands in order."""


def inner(pair: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """The programs that an equation calls once."""
    if pair[0].primitive.name not in CALLS:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in pair[0].params and key in pair[1].params:
            return pair[0].params[key], pair[1].params[key]
    return None


def is_of_jax(name: str) -> bool:
    """Whether a jitted function is one of JAX's own."""
    rooms = (jnp, jnp.linalg, jax.nn, jax.random, jax.lax, jax.scipy.special)
    return name.startswith("_") or any(hasattr(room, name) for room in rooms)


def is_float(aval: Any) -> bool:
    """Whether there are gradients of such an array."""
    return not is_key(aval) and jnp.issubdtype(getattr(aval, "dtype", int), jnp.inexact)


def pullback(equation: Any, floats: list[int]) -> Any:
    """The program (operands, cotangents of the results) -> cotangents of some operands."""

    def pull(*values: Any) -> Any:
        operands = list(values[: len(equation.invars)])

        def run(*changed: Any) -> list[Any]:
            for index, value in zip(floats, changed, strict=True):
                operands[index] = value
            made = zip(eval_equation(equation, operands), equation.outvars, strict=True)
            return [value for value, v in made if is_float(v.aval)]

        _, back = jax.vjp(run, *(operands[index] for index in floats))
        return back(list(values[len(operands) :]))

    seeds = [v.aval for v in equation.outvars if is_float(v.aval)]
    avals = [*(v.aval for v in equation.invars), *seeds]
    return jax.make_jaxpr(pull)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))


def parting(jaxprs: tuple[Any, Any]) -> str:
    """The line where two programs part."""
    for one, two in zip(jaxprs[0].eqns, jaxprs[1].eqns, strict=False):
        if one.primitive.name != two.primitive.name or len(one.invars) != len(two.invars):
            return source_line(one)
    longer = max(jaxprs, key=lambda jaxpr: len(jaxpr.eqns))
    return source_line(longer.eqns[-1])
