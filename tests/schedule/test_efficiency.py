import pytest

from axon_dist.core.errors import ScheduleError
from axon_dist.schedule import efficiency, min_microbatches, one_f_one_b, pipeline_advice, simulate


@pytest.mark.parametrize(
    ("num_microbatches", "num_stages", "expected"),
    [
        (2, 4, 0.4),
        (4, 4, 0.5714),
        (8, 4, 0.7273),
        (16, 4, 0.8421),
        (27, 4, 0.9),
        (26, 4, 0.8966),
        (63, 8, 0.9),
        (62, 8, 0.8986),
        (7, 1, 1.0),
    ],
)
def test_efficiency(num_microbatches, num_stages, expected):
    assert round(efficiency(num_microbatches, num_stages), 4) == expected


def test_efficiency_is_what_the_simulation_finds():
    for s, m in [(1, 3), (2, 4), (4, 8), (8, 3)]:
        bubble = simulate(one_f_one_b(s, m)).bubble_fraction
        assert efficiency(m, s) == pytest.approx(1 - bubble)


@pytest.mark.parametrize(("num_stages", "least"), [(1, 1), (2, 9), (4, 27), (8, 63), (16, 135)])
def test_min_microbatches_for_nine_tenths(num_stages, least):
    assert min_microbatches(num_stages, 0.9) == least


def test_min_microbatches_is_the_least():
    for num_stages in range(2, 20):
        for target in (0.1, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99):
            least = min_microbatches(num_stages, target)
            assert efficiency(least, num_stages) >= target
            assert least == 1 or efficiency(least - 1, num_stages) < target


@pytest.mark.parametrize("target", [0, 1, 1.5, -0.1, float("nan")])
def test_targets_that_no_number_of_microbatches_reaches(target):
    with pytest.raises(ScheduleError, match=rf"target of {target}.*between 0 and 1.*try 0\.9"):
        min_microbatches(4, target)


def test_sizes_are_checked():
    with pytest.raises(ScheduleError, match="got num_microbatches=0"):
        efficiency(0, 4)
    with pytest.raises(ScheduleError, match="got num_stages=0"):
        min_microbatches(0, 0.9)


def test_advice():
    assert pipeline_advice(16, 4) == ()
    assert pipeline_advice(1, 1) == ()
    assert pipeline_advice(8, 4) == (
        "8 microbatches keep 4 stages busy 73% of the time; 16 would give 84%.",
    )
    assert "at least 2 devices are idle in every tick" in pipeline_advice(2, 4)[1]
