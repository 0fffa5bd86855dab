"""Buffers of slots: what is written is read again, what is not written stays."""

import jax.numpy as jnp
import numpy as np

from axon_dist.pipeline.tables import add, empty, get, put, zeros

YES, NO = jnp.asarray(True), jnp.asarray(False)
VALUE = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.int32(7)}


def numbers(tree):
    return [np.asarray(tree["a"]).tolist(), int(tree["b"])]


def test_a_slot_holds_what_was_written_into_it():
    buffers = empty(VALUE, 3)
    assert [leaf.shape for leaf in (buffers["a"], buffers["b"])] == [(3, 2), (3,)]
    buffers = put(buffers, jnp.int32(1), VALUE)
    found = [numbers(get(buffers, jnp.int32(slot))) for slot in range(3)]
    assert found == [[[0, 0], 0], [[1, 2], 7], [[0, 0], 0]]


def test_nothing_is_written_where_nothing_arrives():
    buffers = put(empty(VALUE, 2), jnp.int32(0), VALUE)
    twice = {"a": 2 * VALUE["a"], "b": 2 * VALUE["b"]}
    # A slot of -1 stands for no slot; it must not wrap around to the last one.
    for slot in (-1, 0, 1):
        kept = put(buffers, jnp.int32(slot), twice, NO)
        assert [numbers(get(kept, jnp.int32(s))) for s in range(2)] == [[[1, 2], 7], [[0, 0], 0]]
    written = put(buffers, jnp.int32(1), twice, YES)
    assert [numbers(get(written, jnp.int32(s))) for s in range(2)] == [[[1, 2], 7], [[2, 4], 14]]


def test_sums_keep_their_dtype():
    (total,) = add([jnp.float32(256)], [jnp.bfloat16(1)])
    assert (float(total), total.dtype) == (257, jnp.float32)
    assert zeros([jnp.bfloat16(3)], jnp.float32)[0].dtype == jnp.float32
    assert zeros([jnp.bfloat16(3)])[0].dtype == jnp.bfloat16
