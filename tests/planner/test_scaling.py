import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.core.errors import ConfigError
from axon_dist.planner import effective_batch, scale_lr, scaling_efficiency


@pytest.mark.parametrize(
    ("arguments", "expected"), [((8, 32), 256), ((4, 2, 4), 32), ((1, 1), 1), ((3, 5, 7), 105)]
)
def test_effective_batch(arguments, expected):
    assert effective_batch(*arguments) == expected


@given(base=st.floats(1e-6, 1), ratio=st.integers(1, 64))
def test_learning_rates(base, ratio):
    assert scale_lr(base, 32 * ratio, 32) == pytest.approx(base * ratio)
    assert scale_lr(base, 32 * ratio**2, 32, "sqrt") == pytest.approx(base * ratio)
    assert scale_lr(base, 32 * ratio, 32, "none") == base
    there = scale_lr(base, 32 * ratio, 32)
    assert scale_lr(there, 32, 32 * ratio) == pytest.approx(base)


def test_efficiency():
    assert scaling_efficiency(10, 10 / 8, 8) == 1
    assert scaling_efficiency(10, 2.5, 8) == 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: effective_batch(8, 0), "got dp=0, an int; give a whole number, at least 1"),
        (lambda: scale_lr(0.1, 2, 1, "linaer"), "rule 'linaer'. Did you mean 'linear'"),
        (
            lambda: scale_lr(0.1, 0, 1),
            "got batch=0, an int; give a whole number, at least 1",
        ),
        (lambda: scaling_efficiency(1, 0, 8), "got tn=0, an int; give a number above 0"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
