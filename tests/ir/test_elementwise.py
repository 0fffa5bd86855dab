"""Which optimizers work element by element, so that ranks may update their parts alone."""

import jax
import jax.numpy as jnp
import optax
import pytest

from axon_dist.ir.elementwise import mixing_in

PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}


def by_place(updates, params=None):
    """Freezes the first rows of every array."""
    return jax.tree.map(lambda x: jnp.where(jnp.arange(x.shape[-1]) > 0, x, 0.0), updates)


def turned(updates, params=None):
    return jax.tree.map(lambda x: x[::-1], updates)


CASES = {
    "adamw with a schedule": (
        optax.adamw(optax.warmup_cosine_decay_schedule(0, 1, 10, 100)), None,
    ),
    "a schedule by a table": (
        optax.sgd(optax.piecewise_interpolate_schedule("linear", 1.0, {3: 0.5, 5: 0.1})), None,
    ),
    "a mask": (optax.adamw(0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)), None),
    "several steps": (optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(), None),
    "clipping by element": (optax.chain(optax.clip(1.0), optax.lion(0.1)), None),
    "clipping by norm": (optax.clip_by_global_norm(1.0), "reduce_sum"),
    "one vector of all": (optax.flatten(optax.adam(0.1)), "reshape"),
    "places": (optax.stateless(by_place), "iota"),
    "another order": (optax.stateless(turned), "rev"),
    "rows and columns": (optax.adafactor(0.1), "reduce_sum"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_first_operation_that_mixes_elements_is_named(case):
    optimizer, name = CASES[case]
    state = optimizer.init(PARAMS)
    program = jax.make_jaxpr(optimizer.update)(PARAMS, state, PARAMS)
    assert mixing_in(program) == name
