"""Random draws of one rank's rows are those that one device would make."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import UnsupportedError
from axon_dist.ir.randomness import (
    SampleRows,
    find_rows,
    with_part,
    without_part,
)
from axon_dist.separability.interpret import follow_samples

RANKS, LOCAL = 4, 3


def traced(draw):
    return lambda samples: jax.make_jaxpr(lambda key: draw(key, samples))(jax.random.key(0))


def rows_of(draw, ranks=RANKS):
    return find_rows(traced(draw), LOCAL, ranks)


DRAWS = {
    "rows": lambda key, n: jax.random.normal(key, (n, 5)),
    "inner dim": lambda key, n: jax.random.uniform(key, (2, n, 3)),
    "bernoulli": lambda key, n: jax.random.bernoulli(key, 0.3, (n, 7)),
    "half": lambda key, n: jax.random.uniform(key, (n, 4), jnp.bfloat16),
    "split": lambda key, n: jax.random.normal(jax.random.split(key, 3)[1], (n, 2)),
    "folded": lambda key, n: jax.random.normal(jax.random.fold_in(key, 7), (n, 2)),
    "keys of samples": lambda key, n: jax.vmap(lambda k: jax.random.normal(k, (2,)))(
        jax.random.split(key, n)
    ),
    "keys of samples, split again": lambda key, n: jax.vmap(
        lambda k: jax.random.normal(jax.random.split(k)[1], (2,))
    )(jax.random.split(jax.random.fold_in(key, 1), n)),
    "in a scan": lambda key, n: jax.lax.scan(
        lambda c, k: (c + jax.random.normal(k, (n, 2)), None),
        jnp.zeros((n, 2)),
        jax.random.split(key, 3),
    )[0],
}


def own_prng():
    """A PRNG that is not registered, so JAX knows it by its object and not by a name."""
    key_of = lambda data: jax.random.wrap_key_data(data, impl="threefry2x32")
    return jax.extend.random.define_prng_impl(
        key_shape=(2,),
        seed=lambda value: jax.random.key_data(jax.random.key(value, impl="threefry2x32")),
        split=lambda data, shape: jax.random.key_data(jax.random.split(key_of(data), shape)),
        random_bits=lambda data, width, shape: (
            ~jax.random.bits(key_of(data), shape, jnp.dtype(f"uint{width}"))
        ),
        fold_in=lambda data, value: jax.random.key_data(jax.random.fold_in(key_of(data), value)),
        name="mine",
    )


CASES = [
    *[(name, "threefry2x32") for name in DRAWS],
    *[(name, impl) for impl in ("rbg", "mine") for name in ("rows", "split")],
]


@pytest.mark.sample(
    "rows-threefry2x32",
    "inner dim-threefry2x32",
    "keys of samples-threefry2x32",
    "in a scan-threefry2x32",
    "half-threefry2x32",
    "rows-rbg",
    "rows-mine",
)
@pytest.mark.parametrize(("name", "impl"), CASES)
def test_rows_of_the_global_draw(name, impl):
    draw = DRAWS[name]
    key = jax.random.key(3, impl=own_prng() if impl == "mine" else impl)
    found = rows_of(draw)
    mine = jax.jit(lambda rank: draw(with_part({"key": key}, found, rank)["key"], LOCAL))
    dim = 1 if name == "inner dim" else 0
    parts = [mine(jnp.int32(rank)) for rank in range(RANKS)]
    whole = jax.jit(lambda key: draw(key, LOCAL * RANKS))(key)
    np.testing.assert_array_equal(np.concatenate(parts, dim), whole)


def test_draws_without_samples_are_the_same_on_every_rank():
    draw = lambda key, n: jax.random.normal(key, (5, 5))
    assert rows_of(draw) == {}
    key = jax.random.key(1)
    mine = draw(with_part({"k": key}, {}, jnp.int32(2))["k"], LOCAL)
    np.testing.assert_array_equal(mine, draw(key, LOCAL))


def test_what_was_found():
    both = lambda key, n: (jax.random.normal(key, (n, 5)), jax.random.normal(key, (2, n)))
    assert rows_of(both) == {(3, 5): SampleRows(0, 12), (2, 3): SampleRows(1, 12)}


def test_keys_are_put_back_and_counts_kept():
    key = jax.random.key(0)
    buffers = {"key": key, "count": jnp.uint32(3)}
    ranked = with_part(buffers, {}, jnp.int32(1))
    assert ranked["key"].dtype != key.dtype
    back = without_part({"key": ranked["key"], "count": jnp.uint32(4)}, buffers)
    assert back["key"] is key
    assert int(back["count"]) == 4


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda key, n: [jax.random.normal(key, (2,)) for _ in range(n)],
            r"draws 3 random arrays for 3 samples and 12 for 12; random draws must not depend",
        ),
        (
            lambda key, n: (jax.random.normal(key, (n,)), jax.random.normal(key, (3,))),
            r"of shape \(3,\) both with and without a batch dim.*change the local batch size",
        ),
        (
            lambda key, n: (jax.random.split(key, n), jax.random.split(key, 3)),
            r"random keys of shape \(3,\) both with and without a batch dim.*change the local",
        ),
        (
            lambda key, n: jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(0), n)),
            r"every rank would draw the same. Keep the key in the model",
        ),
        (
            lambda key, n: jax.random.normal(key, (n, n)),
            r"of shape \(3, 3\) grows to \(12, 12\) with the batch in 2 dims",
        ),
        (
            lambda key, n: jax.random.normal(jax.random.fold_in(jax.random.key(0), 1), (n, 2)),
            r"of shape \(3, 2\), a row for every sample, from a key that it creates itself.*Rngs",
        ),
        (
            lambda key, n: jax.jit(jax.random.normal, static_argnums=1)(jax.random.key(0), (n, 2)),
            "every rank would draw the same. Keep the key in the model",
        ),
    ],
)
def test_draws_that_cannot_be_cut(draw, message):
    with pytest.raises(UnsupportedError, match=message):
        rows_of(draw)


def test_keys_of_samples_need_a_generator_that_takes_each():
    draw = DRAWS["keys of samples"]
    key = jax.random.key(0, impl="rbg")
    trace = lambda samples: jax.make_jaxpr(lambda key: draw(key, samples))(key)
    with pytest.raises(UnsupportedError, match=r"uses the first key for all.*threefry2x32"):
        find_rows(trace, LOCAL, RANKS)
    (drawn,) = follow_samples(trace, (LOCAL, LOCAL * RANKS), 0)
    assert "uses the first key for all" in drawn.why


def test_keys_made_on_the_way_may_draw_what_all_ranks_share():
    found = rows_of(
        lambda key, n: (
            DRAWS["in a scan"](key, n),
            jax.random.key(1),
            jax.random.normal(jax.random.key(0), (5,)),
        )
    )
    assert set(found) == {(3, 2)}


def test_other_threefry_settings_are_followed():
    draw, key = DRAWS["rows"], jax.random.key(3)
    with jax.threefry_partitionable(False):
        whole = draw(key, LOCAL * RANKS)
        ranked = with_part({"key": key}, rows_of(draw), jnp.int32(2))["key"]
        mine = draw(ranked, LOCAL)
    np.testing.assert_array_equal(mine, whole[6:9])
