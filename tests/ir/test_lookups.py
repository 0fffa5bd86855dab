"""Reads of a table by ids, and its other reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.ir.pieces import BOUNDS, backward_slice, readers_of

TABLE = jnp.asarray(np.arange(24, dtype=np.float32).reshape(8, 3))
IDS = jnp.asarray(np.array([[1, 7], [0, 3]], np.int32))


def read(function, *args):
    jaxpr = jax.make_jaxpr(function)(TABLE, *args).jaxpr
    return jaxpr, readers_of(jaxpr, jaxpr.invars[0])


@pytest.mark.parametrize(
    ("function", "casts", "mode"),
    [
        (lambda table, ids: jnp.take(table, ids, axis=0), (), BOUNDS.FILL_OR_DROP),
        (lambda table, ids: table[ids], (), BOUNDS.PROMISE_IN_BOUNDS),
        (lambda table, ids: table.at[ids].get(mode="clip"), (), BOUNDS.CLIP),
        (
            lambda table, ids: table.astype(jnp.bfloat16)[ids],
            (jnp.bfloat16,),
            BOUNDS.PROMISE_IN_BOUNDS,
        ),
        (
            jax.jit(lambda table, ids: jax.jit(lambda t: t.astype(jnp.float16)[ids + 1])(table)),
            (jnp.float16,),
            BOUNDS.PROMISE_IN_BOUNDS,
        ),
        (
            jax.checkpoint(lambda table, ids: jnp.take(table, ids, axis=0, mode="clip")),
            (),
            BOUNDS.CLIP,
        ),
    ],
)  # fmt: skip
def test_lookups_are_found_with_their_ids(function, casts, mode):
    jaxpr, readers = read(function, IDS)
    (rows,) = readers.rows
    assert readers.others == ()
    assert rows.result is jaxpr.outvars[0]
    assert rows.casts == casts
    assert rows.mode is mode
    # What else the program makes, it makes ahead of the lookup, of the ids.
    ahead = backward_slice(jaxpr, rows.operands)
    ids = rows.ids(ahead.run({jaxpr.invars[1]: IDS}))
    table = TABLE.astype(*casts) if casts else TABLE
    np.testing.assert_array_equal(table[ids], function(TABLE, IDS))


def test_the_row_of_a_jax_scalar_is_another_read_or_a_lookup():
    for function in (
        lambda table: jnp.take(table, jnp.int32(1), axis=0),
        lambda table: jnp.where(table > 0, table, jnp.float32(0)),
    ):
        _, readers = read(function)
        assert readers.others or readers.rows


def test_gathers_that_are_not_lookups_are_not_found():
    for function in (
        lambda table, ids: jax.nn.one_hot(ids, 8) @ table,
        lambda table, ids: table[:, ids],
        lambda table, ids: table[ids, 0],
        lambda table, ids: jnp.take(table.T, ids, axis=1),
        lambda table, ids: jax.jit(lambda t: 2 * t[ids])(table),
        lambda table, ids: jax.lax.cond(
            ids[0, 0] > 0, lambda t: t[ids], lambda t: t[ids + 1], table
        ),
    ):
        _, readers = read(function, IDS)
        assert readers.rows == ()
        assert readers.others
    # Ids of the table's own are read otherwise.
    _, readers = read(lambda table, ids: table[table[0].astype(int)], IDS)
    assert readers.others
    # Another reader, or the table itself as a result, is reported with the lookup.
    _, readers = read(lambda table, ids: (table[ids], table.sum(), table), IDS)
    assert len(readers.rows) == 1
    assert [e and e.primitive.name for e in readers.others] == ["reduce_sum", None]
