"""The number of traces of a candidate until it fits; traces are replaced by arithmetic."""

import dataclasses

import pytest

from axon_dist.mesh.chips import hardware
from axon_dist.planner import Candidate, Reading, StepCost, Workload
from axon_dist.train.app import config_plans
from axon_dist.train.app.steps import ModelOfZeros
from axon_dist.train.config import RunConfig

GB = 10**9
NO_TIME = StepCost(0.0, 0.0, 0.0, 0.0, 0.0)
WORK = Workload(
    num_params=GB, num_layers=8, flops=1e15, global_batch=256, activations=16 * 256 * GB
)


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
        search = config_plans._Search(config, hardware("h100"), 4, size, ModelOfZeros(config), None)
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
