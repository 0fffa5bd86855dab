"""The table's claims about primitives, tried on numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.compat import eval_equation
from axon_dist.ir.factors import Role, factors, factors_of
from axon_dist.ir.walk import shape_of

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
IMAGE = np.random.default_rng(1).normal(size=(2, 5, 5, 4)).astype(np.float32)
IDS = np.array([3, 1, 2, 0])

PROGRAMS = {
    "add": lambda: jax.make_jaxpr(jnp.add)(X, X),
    "select_n": lambda: jax.make_jaxpr(jnp.where)(X > 0, X, 2 * X),
    "reduce_sum": lambda: jax.make_jaxpr(lambda x: jnp.sum(x, 0))(X),
    "reduce_max": lambda: jax.make_jaxpr(lambda x: jnp.max(x, 1))(X),
    "argmax": lambda: jax.make_jaxpr(lambda x: jnp.argmax(x, 1))(X),
    "cumsum": lambda: jax.make_jaxpr(lambda x: jnp.cumsum(x, 0))(X),
    "sort": lambda: jax.make_jaxpr(lambda x: jnp.sort(x, 1))(X),
    "top_k": lambda: jax.make_jaxpr(lambda x: jax.lax.top_k(x, 2))(X),
    "reduce_window_max": lambda: jax.make_jaxpr(
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 1), "SAME")
    )(X),
    "broadcast_in_dim": lambda: jax.make_jaxpr(
        lambda x: jax.lax.broadcast_in_dim(x, (4, 3, 6), (0, 2))
    )(X),
    "reshape": lambda: jax.make_jaxpr(lambda x: x.reshape(2, 2, 6))(X),
    "squeeze": lambda: jax.make_jaxpr(lambda x: jax.lax.squeeze(x, (1,)))(X[:, None]),
    "transpose": lambda: jax.make_jaxpr(lambda x: x.T)(X),
    "rev": lambda: jax.make_jaxpr(lambda x: jax.lax.rev(x, (1,)))(X),
    "slice": lambda: jax.make_jaxpr(lambda x: x[:, 1:4])(X),
    "pad": lambda: jax.make_jaxpr(lambda x: jax.lax.pad(x, 0.0, [(0, 0, 0), (1, 0, 0)]))(X),
    "dynamic_update_slice": lambda: jax.make_jaxpr(
        lambda x, y: jax.lax.dynamic_update_slice(x, y, (0, 1))
    )(X, X[:, :2]),
    "concatenate": lambda: jax.make_jaxpr(lambda x, y: jax.lax.concatenate((x, y), 1))(X, X),
    "dot_general": lambda: jax.make_jaxpr(lambda x, y: jnp.einsum("bij,bjk->bik", x, y))(
        np.ones((2, 3, 4), np.float32), np.ones((2, 4, 5), np.float32)
    ),
    "conv_general_dilated": lambda: jax.make_jaxpr(
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )(IMAGE, np.ones((3, 3, 4, 2), np.float32)),
    "gather": lambda: jax.make_jaxpr(lambda x: x[IDS])(X),
    "gather of its own": lambda: jax.make_jaxpr(jax.vmap(lambda row, i: row[i]))(X, IDS),
    "scatter-add": lambda: jax.make_jaxpr(lambda x, y: x.at[IDS].add(y))(X, X),
    "scatter-add to its own": lambda: jax.make_jaxpr(jax.vmap(lambda row, i, y: row.at[i].add(y)))(
        X, IDS, X[:, 0]
    ),
    "cholesky": lambda: jax.make_jaxpr(jax.lax.linalg.cholesky)(np.stack([np.eye(3)] * 2)),
    "fft": lambda: jax.make_jaxpr(jnp.fft.fft)(X.astype(np.complex64)),
}
if hasattr(jax.lax, "tile_p"):  # Before JAX 0.12, a broadcast and a reshape.
    PROGRAMS["tile"] = lambda: jax.make_jaxpr(lambda x: jnp.tile(x, (1, 2)))(X)
    PROGRAMS["tile of one"] = lambda: jax.make_jaxpr(lambda x: jnp.tile(x, (2, 3)))(X[:, :1])


def equation_of(name):
    wanted = name.split()[0]
    waiting = [PROGRAMS[name]().jaxpr]
    while waiting:
        for equation in waiting.pop().eqns:
            if equation.primitive.name == wanted:
                return equation
            waiting += [p.jaxpr for p in equation.params.values() if hasattr(p, "jaxpr")]
    raise AssertionError(f"no {wanted}")


def values_of(equation, seed):
    rng = np.random.default_rng(seed)
    for atom in equation.invars:
        shape, dtype = shape_of(atom), atom.aval.dtype
        if hasattr(atom, "val"):
            yield atom.val
        elif jnp.issubdtype(dtype, jnp.integer):
            # Positions: every one another, so that what is written does not depend on an order.
            places = np.arange(int(np.prod(shape))).reshape(shape) % 4
            yield jnp.asarray(places, dtype)
        elif shape[-2:] == (3, 3):
            yield jnp.asarray(np.eye(3) * rng.uniform(1, 2, (*shape[:-2], 1, 1)), dtype)
        else:
            drawn = rng.normal(size=shape)
            yield jnp.asarray(drawn > 0 if dtype.kind == "b" else drawn, dtype)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_factor_that_passes_moves_results_at_its_own_place_alone(name):
    equation = equation_of(name)
    found = factors(equation)
    values, others = list(values_of(equation, 0)), list(values_of(equation, 1))
    before = eval_equation(equation, values)
    for factor, role in enumerate(found.roles):
        ins = [
            p for p in found.dims(factor, found.operands) if len(found.operands[p[0]][p[1]]) == 1
        ]
        outs = [p for p in found.dims(factor, found.results) if len(found.results[p[0]][p[1]]) == 1]
        if role is not Role.PASSES or not ins or not outs:
            continue
        changed = list(values)
        for operand, dim in ins:
            index = (slice(None),) * dim + (0,)
            moved = np.array(values[operand])
            moved[index] = np.asarray(others[operand])[index]
            changed[operand] = jnp.asarray(moved)
        after = eval_equation(equation, changed)
        for result, dim in outs:
            rest = (slice(None),) * dim + (slice(1, None),)
            was, now = (np.asarray(x[result]) for x in (before, after))
            np.testing.assert_array_equal(was[rest], now[rest])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_dim_is_said(name):
    equation = equation_of(name)
    found = factors(equation)
    for atoms, side in ((equation.invars, found.operands), (equation.outvars, found.results)):
        for atom, dims in zip(atoms, side, strict=True):
            assert all(numbers or n == 1 for n, numbers in zip(shape_of(atom), dims, strict=True))


def test_the_dim_of_a_result():
    found = factors(equation_of("transpose"))
    assert [found.result_dim(0, dim) for dim in range(2)] == [1, 0]
    assert factors(equation_of("reduce_sum")).role(0, 0) is Role.SUMMED


def test_a_dim_of_another_name_is_not_guessed():
    """Taken for the last one, a sort along the samples would pass for one of each sample."""
    shapes = [[(4, 3)], [(4, 3)]]
    assert factors_of("sort", {"dimension": 0}, *shapes).role(0, 0) is Role.ALONG
    assert factors_of("sort", {"dim": 0}, *shapes) is None
