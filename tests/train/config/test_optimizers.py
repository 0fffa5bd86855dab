import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist.core.errors import ConfigError
from axon_dist.train.config.optimizers import OPTIMIZERS, SGD, Adam, AdamW, Lion, Muon
from axon_dist.train.config.rates import (
    RATES,
    ConstantRate,
    Cosine,
    InverseSquareRoot,
    Linear,
    WarmupStableDecay,
)
from axon_dist.train.config.read import read

PARAMS = {"w": jnp.array([1.0, -2.0, 3.0])}
GRADS = [{"w": jnp.array(values)} for values in ([1.0, 2.0, -1.0], [0.5, -3.0, 2.0])]


def run(transform):
    params, state = PARAMS, transform.init(PARAMS)
    for grads in GRADS:
        updates, state = transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return np.asarray(params["w"])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (
            AdamW(b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3, decay="all"),
            optax.adamw(0.01, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.3),
        ),
        (Adam(b1=0.8, b2=0.9, eps=1e-3), optax.adam(0.01, b1=0.8, b2=0.9, eps=1e-3)),
        (
            Lion(b1=0.8, b2=0.9, weight_decay=0.3, decay="all"),
            optax.lion(0.01, 0.8, 0.9, weight_decay=0.3),
        ),
        (
            Muon(
                momentum=0.9,
                nesterov=False,
                ns_steps=3,
                rms=0.3,
                weight_decay=0.3,
                b1=0.8,
                b2=0.9,
                decay="all",
            ),
            optax.contrib.muon(
                0.01,
                beta=0.9,
                nesterov=False,
                ns_steps=3,
                consistent_rms=0.3,
                weight_decay=0.3,
                adam_weight_decay=0.3,
                adam_b1=0.8,
                adam_b2=0.9,
            ),
        ),
        (SGD(), optax.sgd(0.01)),
        (SGD(momentum=0.9, nesterov=True), optax.sgd(0.01, 0.9, nesterov=True)),
    ],
)
def test_every_option_reaches_optax(ours, theirs):
    ours = dataclasses.replace(ours, learning_rate=0.01, schedule=ConstantRate())
    np.testing.assert_array_equal(run(ours.build(num_steps=10)), run(theirs))


def test_every_row_has_a_case_above():
    missing = "add a case above (of a schedule: below) and the class here"
    assert set(OPTIMIZERS.values()) == {AdamW, Adam, Lion, Muon, SGD}, missing
    assert set(RATES.values()) == {
        ConstantRate, Cosine, InverseSquareRoot, Linear, WarmupStableDecay,
    }, missing  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_dtype_of_the_momentum_is_kept_or_refused(name):
    given = {"schedule": "constant", "momentum_dtype": "bfloat16"}
    try:
        optimizer = read(OPTIMIZERS[name], given)
    except ConfigError as error:
        assert "momentum_dtype=bfloat16" in str(error)  # noqa: PT017
    else:
        state = jax.eval_shape(optimizer.build(1).init, {"w": jnp.ones((2, 2))})
        assert jnp.dtype("bfloat16") in {x.dtype for x in jax.tree.leaves(state)}, (
            "its rule keeps no mean of the gradients: let validate refuse momentum_dtype"
        )


@pytest.mark.parametrize(
    ("schedule", "half", "last"),
    [
        (ConstantRate(warmup_steps=4), 1.0, 1.0),
        (Cosine(warmup_steps=4, final_fraction=0.2), 0.6, 0.2),
        (Linear(warmup_steps=4, final_fraction=0.2), 0.6, 0.2),
        (WarmupStableDecay(warmup_steps=4, decay_fraction=0.5, final_fraction=0.3), 0.8, 0.3),
        (InverseSquareRoot(warmup_steps=4, timescale=4), (4 / 9) ** 0.5, (4 / 14) ** 0.5),
    ],
)
def test_schedules_rise_to_the_peak_and_end_where_they_say(schedule, half, last):
    rate = schedule.build(2.0, num_steps=14)
    seen = [float(rate(step)) for step in (0, 2, 4, 9, 14)]
    np.testing.assert_allclose(seen, [0.0, 1.0, 2.0, 2 * half, 2 * last], rtol=1e-6)


def test_a_warmup_as_long_as_the_run():
    with pytest.raises(ConfigError, match=r"warmup_steps=5 leaves no step of a run of 5 steps"):
        Cosine(warmup_steps=5).build(1.0, num_steps=5)


def test_nesterov_without_momentum():
    with pytest.raises(ConfigError, match=r"nesterov=true needs a momentum above 0, but got 0"):
        read(SGD, {"nesterov": True})


def test_a_warmup_as_a_share_of_the_run():
    by_share = Cosine(warmup_fraction=0.25).build(1.0, 40)
    by_steps = Cosine(warmup_steps=10).build(1.0, 40)
    assert [float(by_share(n)) for n in range(40)] == [float(by_steps(n)) for n in range(40)]


def test_a_warmup_that_is_said_twice():
    with pytest.raises(ConfigError, match=r"warmup_steps=3 and warmup_fraction=0.5, which both"):
        Cosine(warmup_steps=3, warmup_fraction=0.5).validate()


def test_the_rates_of_a_run_are_those_of_its_schedule():
    optimizer = SGD(learning_rate=2.0, schedule=Linear(warmup_steps=2))
    rate = optimizer.schedule.build(2.0, 8)
    np.testing.assert_allclose(optimizer.rates(8), [float(rate(n)) for n in range(8)], rtol=1e-6)
    assert SGD(learning_rate=2.0, schedule=ConstantRate()).rates(3).tolist() == [2.0] * 3


def test_norms_biases_and_embeddings_do_not_decay_unless_all_do():
    names = ("kernel", "bias", "scale", "embedding")
    params = {name: jnp.ones((2, 2)) for name in names}
    for decay, decayed in (("matrices", {"kernel"}), ("all", set(names))):
        optimizer = AdamW(schedule=ConstantRate(), decay=decay).build(1)
        still = {name: jnp.zeros((2, 2)) for name in names}
        updates, _ = optimizer.update(still, optimizer.init(params), params)
        assert {name for name in names if float(abs(updates[name]).max()) > 0} == decayed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"paths": ["("]}, r"'\(' is not a regular expression"),
        ({"paths": []}, "paths is empty"),
        ({"paths": ["head"], "frozen": True, "rate": 2}, "frozen=true with rate"),
        ({"paths": ["head"], "weight_decay": 0.1}, "this optimizer has no weight decay"),
    ],
)
def test_groups_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        read(SGD, {"groups": [given]})


def test_a_group_that_no_parameter_is_in():
    optimizer = read(SGD, {"groups": [{"paths": ["hed"], "rate": 2}]})
    with pytest.raises(ConfigError, match=r"groups\[0\].paths: no parameter of the model has hed"):
        optimizer.build(2, lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{"paths": ["head"], "rate": 0.1}, {"paths": ["head"], "rate": 2}], -0.1),
        ([{"paths": ["head"], "rate": 0.1}, {"paths": ["he"], "rate": 2}], -0.1),
        ([{"paths": ["other", "(?i)HEAD"], "rate": 0.1}], -0.1),
        ([{"paths": ["(b)(o)", r"^(h).*/(k)$", r"(h).*/\1"], "rate": 0.1}], -0.1),
    ],
)
def test_a_parameter_is_in_the_first_group_with_a_pattern_that_matches(groups, expected):
    optimizer = read(SGD, {"learning_rate": 1.0, "schedule": "constant", "groups": groups})
    params = {"head": {"h": jnp.ones(())}, "tail": jnp.ones(())}
    transform = optimizer.build(2)
    updates, _ = transform.update(params, transform.init(params), params)
    assert (float(updates["head"]["h"]), float(updates["tail"])) == (pytest.approx(expected), -1.0)


def test_groups_keep_their_names_in_checkpoints():
    optimizer = read(SGD, {"groups": [{"paths": ["head", "tail$"], "rate": 0.1}]})
    state = optimizer.build(2).init({"head": jnp.ones(())})
    assert state.inner_states.keys() == {"(?:head)|(?:tail$)", "*"}
