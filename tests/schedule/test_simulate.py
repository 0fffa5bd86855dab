import pytest

from axon_dist.core.errors import ConfigError, ScheduleError
from axon_dist.schedule import (
    Action,
    Costs,
    Schedule,
    eager_1f1b,
    gpipe,
    one_f_one_b,
    simulate,
    zero_bubble_h1,
)


def test_a_backward_costs_its_halves_unless_said():
    assert Costs(f=1, i=1.2, w=0.8).of(Action.parse("0B0").phase) == 2.0
    assert Costs(b=3).of(Action.parse("0B0").phase) == 3
    # A whole backward that recomputes the forward: 1 + 2.
    assert simulate(one_f_one_b(4, 8), Costs(b=3)).makespan == 11 * 4


def test_spans_of_actions():
    timeline = simulate(one_f_one_b(2, 2))
    assert timeline.span(Action.parse("0F1")) == (1, 2)
    assert timeline.span(Action.parse("1B0")) == (2, 4)
    assert timeline.span(Action.parse("0B1")) == (7, 9)
    assert timeline.work == (6, 6)
    with pytest.raises(ConfigError, match=r"the schedule has no action 5F0; give one"):
        timeline.span(Action.parse("5F0"))


def test_in_step_a_tick_lasts_as_long_as_its_slowest_device():
    timeline = simulate(one_f_one_b(2, 2), lockstep=True)
    # Ticks: F, F, B (of stage 1), B (of 0) together with F, B (of 1), B (of 0).
    assert timeline.makespan == 1 + 1 + 2 + 2 + 2 + 2
    assert timeline.span(Action.parse("1F1")) == (4, 5)


def test_actions_of_a_cell_follow_each_other():
    timeline = simulate(eager_1f1b(2, 2), lockstep=True)
    assert timeline.span(Action.parse("1F0")) == (1, 2)
    assert timeline.span(Action.parse("1B0")) == (2, 4)


def test_transfers_delay_other_devices_only():
    costs = Costs(transfer=0.5)
    # Two boundaries down and two up lie on the path of the only microbatch.
    assert simulate(one_f_one_b(3, 1), costs).makespan == 9 + 4 * 0.5
    assert simulate(one_f_one_b(3, 1), costs, lockstep=True).makespan == 9 + 4 * 0.5
    assert simulate(one_f_one_b(1, 4), costs).makespan == 12


def test_stage_weights_slow_one_stage():
    slow = Costs(stage_weights=(1, 1, 1, 2))
    assert simulate(gpipe(4, 8), slow).makespan == 33 + 8 * 3
    with pytest.raises(
        ScheduleError, match=r"got 2 stage_weights for the 4 stages.*one weight per"
    ):
        simulate(gpipe(4, 8), Costs(stage_weights=(1, 2)))


def test_peaks_in_flight_and_stashed():
    timeline = simulate(zero_bubble_h1(4, 8))
    assert timeline.peak_live == (4, 3, 2, 1)
    assert timeline.peak_stashed == (4, 4, 4, 4)


def test_the_two_bubbles():
    timeline = simulate(Schedule.from_csv("0F0,,,0B0\n,1F0,1B0,"))
    assert timeline.makespan == 6
    assert timeline.bubble_fraction == 0.5
    assert timeline.span_bubble == 0.5  # of device 0, from 0 to 6; device 1 has none


def test_idle_ticks_and_idle_devices_cost_nothing():
    table = Schedule.from_csv("0F0,,0B0\n,,")
    for lockstep in (False, True):
        timeline = simulate(table, lockstep=lockstep)
        assert timeline.makespan == 3
        assert timeline.bubble_fraction == 0.5
        assert timeline.span_bubble == 0


def test_a_deadlock_cannot_be_simulated():
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0"))


def test_a_forward_takes_time():
    with pytest.raises(ScheduleError, match=r"got the cost f=0.*use f=1"):
        Costs(f=0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["f", "i", "w", "b", "transfer"])
def test_times_are_finite_and_not_negative(name, value):
    with pytest.raises(ScheduleError, match=rf"got the cost {name}={value}.*finite.*at least 0"):
        Costs(**{name: value})


@pytest.mark.parametrize("weights", [(1, -1), (0, 0), (1, float("nan"))])
def test_weights_are_finite_and_not_all_zero(weights):
    with pytest.raises(ScheduleError, match=r"got stage_weights=\(.*at least 0"):
        Costs(stage_weights=weights)
