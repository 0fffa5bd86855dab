import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.errors import ScheduleError
from axon_dist.planner import idle_share
from axon_dist.schedule import Costs, PipelineSchedule, build_schedule, simulate


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(PipelineSchedule)),
    stages=st.integers(2, 5),
    per_stage=st.integers(1, 5),
    recomputed=st.integers(1, 2),
)
def test_the_bubble_of_a_long_step_is_that_of_its_table(name, stages, per_stage, recomputed):
    count = stages * per_stage
    work = 3 + recomputed
    costs = Costs(f=1, i=1 + recomputed, w=1)
    try:
        table = build_schedule(name, stages, count)
    except ScheduleError:
        return
    exact = simulate(table, costs, lockstep=True).makespan / (count * work) - 1
    assert idle_share(name, stages, count, recomputed) == pytest.approx(exact)
