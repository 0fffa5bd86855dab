"""Where values meet affinely: the constant and the linear parts of a program add up to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import UnsupportedError
from axon_dist.jaxpr.affine import find_meeting
from axon_dist.jaxpr.walk import Known, interpret

VALUES, ROWS, WIDTH = 3, 4, 6


def gated(values, gates, x):
    y = x
    for number, value in enumerate(values):
        y = y + gates[:, number, None] * (value - x)
    return y


def stacked(values, gates, x):
    return 2 * x - jnp.einsum("be,ebd->bd", gates, jnp.stack(values) / (1 + gates.sum()))


def selected(values, gates, x):
    made = jnp.concatenate([v[:, None] for v in values] + [x[:, None]], axis=1)
    which = jnp.argmax(gates, -1)[:, None, None]
    return jnp.where(gates[:, :1] > 0, jnp.take_along_axis(made, which, axis=1)[:, 0], x)


def folded(values, gates, x):
    rows = [jnp.transpose(v).reshape(2, -1)[::-1].reshape(WIDTH, ROWS).T for v in values]
    return jax.jit(lambda a, b: a @ (x.T @ x) + b * gates[:, :1])(rows[0], sum(rows[1:])) + 1


AFFINE = (gated, stacked, selected, folded)
REFUSED = {
    "tanh": lambda v, g, x: jnp.tanh(v[0]) + v[1] + v[2],
    "mul": lambda v, g, x: v[0] * v[1] + v[2],
    "div": lambda v, g, x: x / v[0] + v[1] + v[2],
    "select_n": lambda v, g, x: jnp.where(v[0] > 0, v[1], v[2]),
    "custom_jvp_call": lambda v, g, x: jax.nn.relu(v[0] + v[1] + v[2]).sum() + v[0].sum(),
}


def program(combine):
    """A program whose first equations make values, with where these stand."""
    rng = np.random.default_rng(0)
    gates = jnp.asarray(rng.normal(size=(ROWS, VALUES)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)
    run = lambda x, gates: combine([jnp.sin(x), jnp.cos(x), jnp.exp(x)], gates, x)
    jaxpr = jax.make_jaxpr(run)(x, gates)
    names = [equation.primitive.name for equation in jaxpr.jaxpr.eqns]
    return jaxpr, [names.index(name) for name in ("sin", "cos", "exp")], (x, gates)


@pytest.mark.parametrize("combine", AFFINE)
def test_the_parts_of_all_ranks_add_up_to_the_program(combine):
    closed, calls, given = program(combine)
    jaxpr = closed.jaxpr
    meeting = find_meeting(jaxpr, sorted(calls))
    known = Known(zip(jaxpr.constvars, closed.consts, strict=True))
    known.write(jaxpr.invars, given)
    seen = {}

    def noted(equation, operands):
        results = [equation.primitive.bind(*operands, **equation.params)]
        results = results[0] if equation.primitive.multiple_results else results
        seen.update(zip(equation.outvars, results, strict=True))
        return results

    interpret(jaxpr, closed.consts, given, noted)
    want = seen[meeting.result]
    # Only what does not depend on the values is known.
    moved = {v for n in (*meeting.calls, *meeting.between) for v in jaxpr.eqns[n].outvars}
    known.update({v: value for v, value in seen.items() if v not in moved})
    total = meeting.constant(jaxpr, known)
    total = 0 if total is None else total
    values = [seen[jaxpr.eqns[n].outvars[0]] for n in meeting.calls]
    sources = known.read(meeting.sources)
    for own in range(VALUES):
        alone = [v if n == own else jnp.zeros_like(v) for n, v in enumerate(values)]
        total = total + meeting.linear(jaxpr, sources, alone)
    np.testing.assert_allclose(total, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_linear_is_named(name):
    closed, calls, _ = program(REFUSED[name])
    with pytest.raises(UnsupportedError, match=f"'{name}'|'gt'"):
        find_meeting(closed.jaxpr, sorted(calls))


def test_slices_of_one_array_come_as_that_array():
    closed, calls, (_, gates) = program(gated)
    meeting = find_meeting(closed.jaxpr, sorted(calls))
    assert [v.aval.shape for v in meeting.sources] == [gates.shape]
