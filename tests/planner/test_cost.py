import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.errors import ScheduleError
from axon_dist.mesh.chips import hardware
from axon_dist.planner import (
    Arrangement,
    Workload,
    arrange,
    estimate_step_time,
    guess_shape,
    idle_share,
)
from axon_dist.schedule import Costs, PipelineSchedule, build_schedule, simulate

WORK = Workload(shape=guess_shape(1e9), global_batch=64, precision="bf16")
H100 = hardware("h100")


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


def test_one_device_computes_and_updates():
    time = estimate_step_time(Arrangement(), WORK, H100)
    flops = WORK.flops()
    assert time.compute == pytest.approx(flops / (989e12 / 2))
    assert time.update == pytest.approx(1e9 * 32 / 3.35e12)
    assert (time.bubble, time.exposed, time.overhead) == (0, 0, 0)


def test_float32_runs_at_its_own_rate():
    slow = dataclasses.replace(WORK, precision=None)
    times = [estimate_step_time(Arrangement(), work, H100).compute for work in (slow, WORK)]
    assert times[0] == pytest.approx(2 * times[1])


def test_recomputation_is_one_more_forward():
    plain, remat = Arrangement(), Arrangement(remat=True)
    ratio = estimate_step_time(remat, WORK, H100).compute / (
        estimate_step_time(plain, WORK, H100).compute
    )
    assert ratio == pytest.approx(4 / 3)


def test_what_does_not_hide_is_exposed():
    slow = dataclasses.replace(H100, link=1e9)
    hidden = estimate_step_time(arrange("full_shard", 8), WORK, H100)
    shown = estimate_step_time(arrange("full_shard", 8), WORK, slow)
    assert hidden.exposed == 0
    assert shown.exposed == pytest.approx(shown.communication - shown.compute)
    tensor = estimate_step_time(Arrangement(tp=8), WORK, H100)
    assert tensor.exposed == tensor.communication > 0


@given(st.sampled_from(["ddp", "zero1", "shard_grad_op", "full_shard"]), st.integers(1, 6))
def test_more_devices_compute_less_each(name, power):
    few = estimate_step_time(arrange(name, 2 ** (power - 1)), WORK, H100)
    many = estimate_step_time(arrange(name, 2**power), WORK, H100)
    assert many.compute == pytest.approx(few.compute / 2)
    assert many.update <= few.update
