"""The number of traces of a candidate until it fits; traces are replaced by arithmetic."""

import dataclasses
from collections import Counter

import pytest

from axon_dist.mesh.chips import hardware
from axon_dist.planner import Candidate, Reading, StepCost, Workload
from axon_dist.planner.kernel_work import KernelWork
from axon_dist.planner.placement import ProductDims
from axon_dist.train.app import config_plans
from axon_dist.train.app.steps import ModelOfZeros
from axon_dist.train.config import RunConfig

GB = 10**9
NO_TIME = StepCost(0.0, 0.0, 0.0, 0.0, 0.0)
WORK = Workload(
    num_params=GB, num_layers=8, flops=1e15, global_batch=256, activations=16 * 256 * GB
)


def search_of(config, num_devices, size):
    rest = (size, ModelOfZeros(config), None)
    return config_plans._Search(config, hardware("h100"), num_devices, *rest)


@pytest.fixture
def tries(monkeypatch):
    """Returns the plan and the tries of ddp on 4 devices, for an estimate and the true value."""

    def run(estimate, sample_bytes, fixed=4 * GB, usable=70, residuals=None):
        tried = []

        def traced(search, refused, split, one, before):
            tried.append((one.num_microbatches, one.remat))
            samples = 64 // one.num_microbatches
            whole = fixed + sample_bytes * samples // (8 if one.remat else 1)
            reading = Reading(16 * GB, 0, whole, 1.0, (), {"dp": 4})
            return config_plans.TracedPlan(
                one, RunConfig(), reading, NO_TIME, usable * GB * 10 // 9
            )

        monkeypatch.setattr(config_plans, "_traced", traced)
        size = usable * GB * 10 // 9
        config = RunConfig()
        search = search_of(config, 4, size)
        search.__dict__["work"] = dataclasses.replace(WORK, activations=256 * estimate)
        search.residuals.update({} if residuals is None else {(): residuals})
        start = Candidate(strategy="ddp", dp=4)
        split = config_plans._Split(start, RunConfig(), None, 16 * GB, 4 * GB)
        return config_plans._read(search, {}, split), tried

    return run


def test_a_right_estimate_is_traced_once(tries):
    plan, tried = tries(estimate=4 * GB, sample_bytes=4 * GB)
    assert plan.fits
    assert tried == [(8, False)]


def test_an_estimate_that_is_too_small_is_corrected(tries):
    plan, tried = tries(estimate=GB, sample_bytes=4 * GB)
    assert plan.fits
    assert tried == [(2, False), (8, False)]


def test_an_estimate_that_is_too_large_is_corrected(tries):
    plan, tried = tries(estimate=16 * GB, sample_bytes=4 * GB)
    assert plan.fits
    assert plan.candidate.num_microbatches == 8
    assert tried == [(32, False), (16, False), (8, False)]


def test_a_model_without_an_estimate_starts_with_one_microbatch(tries):
    plan, tried = tries(estimate=0, sample_bytes=4 * GB)
    assert plan.fits
    assert tried == [(1, False), (8, False)]


def test_blocks_are_recomputed_where_one_sample_does_not_fit(tries):
    plan, tried = tries(estimate=4 * GB, sample_bytes=100 * GB)
    assert plan.fits
    assert tried[-1] == (64, True)
    # The residuals of another candidate make a better first guess.
    plan, tried = tries(estimate=4 * GB, sample_bytes=100 * GB, residuals=25.0)
    assert plan.fits
    assert tried == [(64, True)]


def test_a_pipeline_computes_no_more_than_its_own_program_and_steps_without_one():
    search = search_of(RunConfig(), 4, 70 * GB)
    search.__dict__["work"] = dataclasses.replace(WORK, flops=8e15)
    work = KernelWork(
        products=Counter({ProductDims("product", 4096, 4096, 4096, 1, 2, 2, 1e15): 1})
    )
    reading = Reading(GB, 0, GB, 1e15, (), {"pp": 4}, work)
    pipeline = Candidate(pp=4, num_microbatches=8)
    whole = config_plans._time(reading, Candidate(dp=4), search).compute
    # The one-device trace counts all experts: 4/3 of 8e15 FLOPs, which four devices share.
    assert config_plans._time(reading, pipeline, search).compute == pytest.approx(whole)
    plain = config_plans.TracedPlan(
        Candidate(dp=4), RunConfig(), dataclasses.replace(reading, flops=3e14), NO_TIME, GB
    )
    search.note(plain, config_plans._Split(Candidate(dp=4), RunConfig(), None, GB, 0))
    half = config_plans._time(reading, pipeline, search).compute
    assert half == pytest.approx(4 / 3 * 0.3 * whole, rel=1e-2)
