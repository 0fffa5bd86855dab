"""What is kept of a program's inputs in its results: sums that grow, in loops too."""

import functools

import jax
import jax.numpy as jnp
import pytest

from axon_dist.ir.results import is_added_to

ROW_LOOPS = {
    "row added to": (lambda x, row: (x * 2, row + x), [False, True]),
    "row passed on": (lambda x, row: (x, row), [False, True]),
    "row scaled": (lambda x, row: (x, 0.9 * row + x), [False, False]),
    "row read by the carry": (lambda x, row: (x + row, row + 1), [False, False]),
}
CARRY_LOOPS = {
    "carry added to": (lambda x, row: (x + row, x + 1), [True, True]),
    "carry read": (lambda x, row: (x + row, x * row), [True, False]),
    "carry added twice": (lambda x, row: (x + x, row), [False, False]),
}


@pytest.mark.parametrize("name", ROW_LOOPS | CARRY_LOOPS)
def test_a_loop_adds_to_what_each_iteration_adds_to(name):
    body, expected = (ROW_LOOPS | CARRY_LOOPS)[name]
    program = jax.make_jaxpr(functools.partial(jax.lax.scan, body))(jnp.float32(1), jnp.ones(3))
    assert [is_added_to(program, int(name in ROW_LOOPS), number) for number in (0, 1)] == expected


def test_carries_that_change_places_are_no_sums():
    swap = lambda pair, row: ((pair[1] + row, pair[0]), None)
    program = jax.make_jaxpr(functools.partial(jax.lax.scan, swap))((1.0, 2.0), jnp.ones(2))
    assert not any(is_added_to(program, 0, number) for number in (0, 1))


def test_a_print_does_not_hide_a_sum():
    def run(total, x):
        jax.debug.print("{}", x)
        return total + x

    assert is_added_to(jax.make_jaxpr(run)(1.0, 2.0), 0, 0)
