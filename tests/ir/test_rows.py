"""Programs about stacked layers, computed layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.ir.rows import Stacked, by_rows, matrixwise, whole


def normalized(x):
    return x / jnp.sum(x)


PROGRAMS = {
    "sum of all": jnp.sum,
    "max within": lambda x: jnp.max(x, 1),
    "max of all rows": lambda x: jnp.max(x, (0, 2)),
    "any": lambda x: jnp.any(x > 0.5, 2),
    "product": lambda x: jnp.prod(x, 1),
    "reshape within": lambda x: x.reshape(x.shape[0], 2, 2, 3),
    "reshape across": lambda x: x.reshape(-1),
    "transpose within": lambda x: x.swapaxes(1, 2),
    "transpose across": lambda x: x.swapaxes(0, 1),
    "broadcast": lambda x: x[:, None] + jnp.zeros((x.shape[0], 5, 4, 3)),
    "broadcast of all": lambda x: jnp.broadcast_to(x, (2, *x.shape)),
    "norm": lambda x: x / jnp.sqrt(jnp.sum(x**2, (1, 2), keepdims=True)),
    "squeeze": lambda x: jnp.squeeze(jax.lax.slice_in_dim(x, 1, 2, axis=1), 1),
    "branch": lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda x: x * 2, lambda x: x - 1, x),
    "a matrix for each row": lambda x: matrixwise(normalized, x, lead=1),
    "one array": lambda x: matrixwise(normalized, x, lead=0),
    "rows with rows": lambda x: jnp.einsum("lij,mij->lm", x, x),
}


# A single row is like several, but for what is taken of all rows or has another shape.
@pytest.mark.sample(
    *(f"3-{name}" for name in PROGRAMS),
    *(f"1-{name}" for name in ("max of all rows", "reshape across", "transpose across", "squeeze")),
)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("length", [1, 3])
def test_rows_give_what_the_array_gives(name, length):
    x = np.random.default_rng(0).uniform(size=(length, 4, 3)).astype(np.float32)
    expected = PROGRAMS[name](x)
    found = whole(by_rows(PROGRAMS[name])(Stacked(list(x))))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["max within", "reshape within", "transpose within", "norm"])
def test_per_row_operations_stack_nothing(name):
    run = lambda *rows: by_rows(PROGRAMS[name])(Stacked(rows)).rows
    program = jax.make_jaxpr(run)(*np.ones((3, 4, 3), np.float32))
    names = [equation.primitive.name for equation in program.eqns]
    assert {"stack", "concatenate"}.isdisjoint(names)
