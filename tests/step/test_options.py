"""Options of a step: as one value, as keywords, or as both."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from axon_dist import build_train_step, ddp
from axon_dist.core.errors import ConfigError
from axon_dist.step import Nonfinite, StepOptions
from axon_dist.step.options import StepKeywords, options_of


def test_every_keyword_is_a_field():
    fields = [field.name for field in dataclasses.fields(StepOptions)]
    assert fields == list(StepKeywords.__annotations__)
    assert (StepOptions().accumulate, StepOptions().metrics) == (1, ("loss",))
    assert StepOptions().ema is None


def test_a_value_is_frozen_and_checks_its_types():
    options = StepOptions(accumulate=2)
    assert options == dataclasses.replace(StepOptions(), accumulate=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.accumulate = 3
    with pytest.raises(ConfigError, match="build_train_step got accumulate='two', a str"):
        StepOptions(accumulate="two")


def test_keywords_override_the_value():
    given = StepOptions(accumulate=4, ema=0.9)
    found = options_of(given, {"ema": 0.5, "nonfinite": "skip"}, scales=False)
    assert found == StepOptions(accumulate=4, ema=0.5, nonfinite=Nonfinite.SKIP)
    assert options_of(None, {}, scales=True).scaler is not None


@pytest.mark.parametrize(
    ("options", "keywords", "error"),
    [
        ({"accumulate": 2}, {}, "must be None or such as StepOptions"),
        (None, {"acumulate": 2}, "no argument 'acumulate'. Did you mean 'accumulate'"),
        (
            None,
            {"nonfinite": "stopp"},
            "Nonfinite got 'stopp', and has no such member. Did you mean 'stop'",
        ),
    ],
)
def test_unknown_options_are_named(options, keywords, error):
    with pytest.raises(ConfigError, match=error):
        options_of(options, keywords, scales=False)


def test_a_value_makes_the_step_that_keywords_make(make_world):
    world, batch = make_world("dp=2"), {"x": np.arange(16, dtype=np.float32).reshape(8, 2)}
    losses = []
    for given in ({"options": StepOptions(accumulate=2, clip_norm=0.1)}, {}):
        given = given or {"accumulate": 2, "clip_norm": 0.1}
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        step = build_train_step(
            model, optax.sgd(0.1), lambda m, b: jnp.mean(m(b["x"]) ** 2), ddp(), world, **given
        )
        assert step.options.accumulate == 2
        state = step.init()
        for _ in range(2):
            state, metrics = step(state, batch)
        losses.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    assert losses[0] == losses[1]
