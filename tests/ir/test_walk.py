"""Functions that all readers of jaxprs share: inner programs and dependencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from axon_dist.core.compat import eval_equation
from axon_dist.ir.uniform import UNKNOWN, ZERO, uniform_values
from axon_dist.ir.walk import (
    called,
    depends_on,
    equations,
    inners,
    interpret,
    needed_for,
    same_program,
    sources_of,
)


def nested(x, flag):
    inner = jax.jit(lambda y: jax.lax.scan(lambda c, _: (jnp.sin(c), None), y, length=3)[0])
    return jax.lax.cond(flag, inner, jnp.cos, jax.checkpoint(jnp.exp)(x)) * 2.0


def test_a_kernel_is_no_call():
    """Its program reads and writes references, so it cannot be run on the operands."""

    def double(x_ref, out_ref):
        out_ref[...] = 2 * x_ref[...]

    like = jax.ShapeDtypeStruct((8,), jnp.float32)
    program = jax.make_jaxpr(pallas.pallas_call(double, out_shape=like))(like)
    (kernel,) = (e for e in equations(program.jaxpr) if e.primitive.name == "pallas_call")
    assert called(kernel) is None
    assert inners(kernel) == []


def test_every_equation_is_seen_however_deep():
    names = [e.primitive.name for e in equations(jax.make_jaxpr(nested)(1.0, True).jaxpr)]
    assert {"sin", "cos", "exp", "scan", "cond", "mul"} <= set(names)


def test_calls_have_one_program_and_loops_and_branches_none():
    found = {
        e.primitive.name: called(e) for e in equations(jax.make_jaxpr(nested)(1.0, True).jaxpr)
    }
    assert found["scan"] is found["cond"] is found["mul"] is None
    assert found["jit" if "jit" in found else "pjit"].jaxpr.eqns


def test_running_each_equation_as_it_is_computes_the_program():
    closed = jax.make_jaxpr(nested)(0.5, True)
    (result,) = interpret(closed.jaxpr, closed.consts, [0.5, True], eval_equation)
    np.testing.assert_allclose(result, nested(0.5, True), rtol=1e-6)


@pytest.mark.parametrize(("stop", "expected"), [(None, {"x", "sin", "add"}), (2, {"x", "sin"})])
def test_what_depends_on_a_source(stop, expected):
    jaxpr = jax.make_jaxpr(lambda x, y: (jnp.cos(y), jnp.sin(x) + y)[1])(1.0, 1.0).jaxpr
    names = {jaxpr.invars[0]: "x", jaxpr.invars[1]: "y"}
    names |= {e.outvars[0]: e.primitive.name for e in jaxpr.eqns}
    assert [e.primitive.name for e in jaxpr.eqns] == ["cos", "sin", "add"]
    assert {names[v] for v in depends_on(jaxpr, [jaxpr.invars[0]], stop)} == expected


def test_only_what_an_output_needs_is_kept_within_calls_too():
    both = jax.jit(lambda x, y: (jnp.sin(x), jnp.cos(y)))
    jaxpr = jax.make_jaxpr(lambda x, y, z: (*both(x, y), z))(1.0, 1.0, 1.0).jaxpr
    part, inputs = needed_for(jaxpr, [1])
    assert inputs == [1]
    assert "sin" not in {e.primitive.name for e in equations(part)}
    assert sources_of(jaxpr) == [{0}, {1}, {2}]


def test_programs_with_other_constants_in_a_jitted_function_are_not_the_same():
    traced = lambda row: jax.make_jaxpr(jax.jit(lambda x: x * row))(jnp.ones(3)).jaxpr
    first = traced(np.arange(3.0))
    assert same_program(first, traced(np.arange(3.0)))
    assert not same_program(first, traced(np.arange(3.0) + 1))


def test_a_barrier_hands_each_value_on():
    """A zero among the values that a barrier keeps together makes no other of them zero."""
    program = jax.make_jaxpr(lambda w, x: jax.lax.optimization_barrier((w, x)))(1.0, 1.0)
    found = uniform_values(program.jaxpr, program.consts, [ZERO, UNKNOWN])
    assert [value.is_zero for value in found] == [True, False]
