import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axon_dist.core.errors import ConfigError
from axon_dist.mesh.chips import hardware
from axon_dist.planner import (
    Apart,
    Arrangement,
    Direction,
    Workload,
    arrange,
    candidates,
    decide,
    evaluate,
    guess_shape,
    lint,
    on_best_schedule,
    recommend,
)

H100 = hardware("h100")


@pytest.mark.sample(
    "500000000.0-4-None-ddp",
    "3000000000.0-8-80000000000.0-shard_grad_op",
    "13000000000.0-4-80000000000.0-full_shard",
    "70000000000.0-8-80000000000.0-does not fit",
    "1000000000.0-1-80000000000.0-ddp",
    "175000000000.0-1024-80000000000.0-pp + tp + full_shard",
)
@pytest.mark.parametrize(
    ("params", "devices", "memory", "expected"),
    [
        (0.5e9, 4, None, "ddp"),
        (0.5e9, 4, 40e9, "ddp"),
        (3e9, 8, 80e9, "shard_grad_op"),
        (3e9, 8, 40e9, "shard_grad_op"),
        (3e9, 8, 141e9, "ddp"),
        (10e9, 8, None, "full_shard"),
        (10e9, 8, 80e9, "full_shard"),
        (10e9, 8, 40e9, "full_shard"),
        (13e9, 4, 80e9, "full_shard"),
        (30e9, 16, 80e9, "full_shard"),
        (175e9, 1024, 80e9, "pp + tp + full_shard"),
        (70e9, 8, 80e9, "does not fit"),
        (1e9, 1, 80e9, "ddp"),
    ],
)
def test_recommendations(params, devices, memory, expected):
    found = recommend(params, devices, memory)
    assert found.strategy == expected
    assert found.best.arrangement.num_devices == devices


def test_what_does_not_fit_says_so_with_numbers():
    found = recommend(70e9, 8, 80e9)
    assert not found.fits
    assert found.best.memory.states == 140e9
    assert "140 GB on each" in found.reason
    assert "take at least 16 devices" in found.reason
    assert recommend(70e9, 32, 80e9).fits


@settings(max_examples=8, deadline=None)
@given(
    params=st.floats(1e8, 2e11),
    devices=st.sampled_from([1, 2, 3, 6, 8]),
    name=st.sampled_from(["a100-40", "h100", "v5e", "v5p"]),
)
def test_every_plan_keeps_its_promises(params, devices, name):
    found = recommend(params, devices, hardware=name)
    fits = [plan.fits for plan in found.plans]
    assert fits == sorted(fits, reverse=True)
    assert len({plan.name for plan in found.plans}) == len(found.plans)
    for plan in found.plans:
        arrangement = plan.arrangement
        assert arrangement.mesh.size == devices
        pieces = arrangement.data_ranks * arrangement.num_microbatches
        assert found.work.global_batch % pieces == 0
        assert found.work.shape.num_heads % arrangement.tp == 0
        assert found.work.shape.num_layers % arrangement.pp == 0
        assert plan.memory.states >= 0.999 * 16 * params / devices - 16
        assert len(plan.reasons) == 3


def test_a_faster_plan_that_hides_everything_is_named():
    found = recommend(175e9, 1024, 80e9, precision="bf16")
    assert found.faster is not None
    assert found.faster.fits
    assert found.faster.time.total < found.best.time.total
    assert not found.faster.is_quiet
    assert recommend(0.5e9, 1, 80e9).faster is None


def test_more_memory_never_asks_for_more_sharding():
    names = [recommend(3e9, 8, size * 1e9).strategy for size in (24, 48, 141)]
    assert names == ["full_shard", "shard_grad_op", "ddp"]


def test_a_batch_that_nothing_divides():
    with pytest.raises(ConfigError, match=r"mesh of 11 devices divides global_batch=8, .* as 11$"):
        recommend(1e9, 11, global_batch=8)
    with pytest.raises(ConfigError, match=r"got num_devices=0 .* both must be positive"):
        recommend(1e9, 0)


def test_tensor_parallelism_stays_inside_a_node():
    work = Workload(shape=guess_shape(70e9), global_batch=64)
    sizes = {arrangement.tp for arrangement in candidates(work, 64, H100)}
    assert sizes == {1, 2, 4, 8}


def test_hybrid_sharding_is_tried_between_nodes():
    work = Workload(shape=guess_shape(1e9), global_batch=64)
    tried = [a for a in candidates(work, 32, H100) if a.strategy == "hybrid_shard"]
    assert {(a.dp, a.fsdp) for a in tried} == {(4, 8)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"fits": True}, Direction.DATA),
        ({"fits": True, "sequential": True}, Direction.DATA),
        ({"fits": False, "sequential": True}, Direction.PIPELINE),
        ({"fits": False, "interconnect": 450e9}, Direction.FSDP),
        ({"fits": False, "interconnect": 1.25e9}, Direction.TENSOR),
    ],
)
def test_decide(arguments, expected):
    assert decide(**arguments) is expected


def test_decide_wants_a_bandwidth():
    with pytest.raises(ConfigError, match="got interconnect=0; it must be positive, in bytes/s"):
        decide(fits=False, interconnect=0)


def rules(plan, work, row=H100):
    return {finding.rule: finding.message for finding in lint(plan, work, row)}


def test_lint_few_microbatches():
    work = Workload(shape=guess_shape(1e9), global_batch=8)
    plan = evaluate(Arrangement(pp=4, num_microbatches=8), work, H100)
    assert "8 microbatches keep 4 stages busy 73 %" in rules(plan, work)["few_microbatches"]
    plan = evaluate(Arrangement(pp=2, num_microbatches=8), work, H100)
    assert rules(plan, work) == {}


def test_lint_slow_link():
    ethernet = dataclasses.replace(H100, node_size=1, network=1.25e9)
    work = Workload(shape=guess_shape(1e9), global_batch=8)
    plan = evaluate(arrange("full_shard", 8), work, ethernet)
    assert "links of 1.25 GB/s, and wants 25 GB/s" in rules(plan, work, ethernet)["slow_link"]
    plan = evaluate(arrange("ddp", 8), work, ethernet)
    assert "slow_link" not in rules(plan, work, ethernet)


def test_lint_indivisible_batch():
    work = Workload(shape=guess_shape(1e8), global_batch=20)
    plan = evaluate(arrange("ddp", 8), work, H100)
    assert "multiple of 8, such as 24" in rules(plan, work)["indivisible_batch"]


def test_lint_forgotten_optimizer():
    work = Workload(shape=guess_shape(10e9), global_batch=8)
    plan = evaluate(arrange("full_shard", 8), work, H100)
    assert "40 GB, fit on one device, but" in rules(plan, work)["forgotten_optimizer"]
    sgd = dataclasses.replace(work, shape=guess_shape(1e9), optimizer="sgd")
    assert rules(evaluate(arrange("ddp", 8), sgd, H100), sgd) == {}


def test_a_step_has_samples():
    with pytest.raises(ConfigError, match="global_batch=0 must be at least 1 sample"):
        Workload(shape=guess_shape(1e9), global_batch=0)


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1.0, "1e400", "many"])
def test_counts_that_are_none(count):
    with pytest.raises(ConfigError, match=r"number of parameters|a number of parameters can be"):
        recommend(count, 4)


MIXTURE = dataclasses.replace(guess_shape(1e9), num_experts=8, expert_params=int(8e8))


def test_experts_are_split_where_there_are_some():
    work = Workload(shape=MIXTURE, global_batch=64, precision="bf16")
    found = list(candidates(work, 16, H100))
    assert {one.ep for one in found} == {1, 2, 4, 8}
    assert all(one.num_devices == 16 for one in found)
    assert any(one.ep > 1 and one.pp > 1 for one in found)
    assert {
        one.ep for one in candidates(Workload(shape=guess_shape(1e9), global_batch=64), 16, H100)
    } == {1}
    split, whole = (evaluate(arrange("ddp", 8 // ep, ep=ep), work, H100) for ep in (8, 1))
    # A rank has an eighth of the experts, and all of the rest.
    assert split.memory.params == pytest.approx(4 * (2e8 + 8e8 / 8), rel=1e-6)
    assert whole.memory.params == pytest.approx(4 * 1e9, rel=1e-6)
    assert {t.axis for t in split.transfers} == {"ep"}
    assert {t.kind for t in split.transfers} == {"tokens", "gradients"}


def test_replicas_over_slow_links_send_less_the_seldomer_they_meet():
    work = Workload(shape=guess_shape(1e9), global_batch=64, precision="bf16")
    found = list(candidates(work, 16, H100, Apart(every=50), 2))
    assert found
    assert all(one.num_devices == 16 and one.replicas == 2 and one.pp == 1 for one in found)
    assert not list(candidates(work, 16, H100, Apart(), 3))
    slow = dataclasses.replace(H100, network=1e8)
    plan = lambda every: evaluate(
        arrange("ddp", 8, replicas=2, apart=Apart(every=every)), work, slow
    )
    sent = lambda plan: {t.axis: t.wire_bytes for t in plan.transfers}
    # Half of the ring's two rounds, 4 bytes a parameter, every 50 steps.
    assert sent(plan(50))["nodes"] == pytest.approx(4 * 1e9 / 50)
    assert sent(plan(100))["nodes"] == pytest.approx(4 * 1e9 / 100)
    assert plan(100).time.total < plan(1).time.total
    assert plan(100).time.total < evaluate(arrange("ddp", 16), work, slow).time.total


def test_the_schedule_is_the_one_with_the_shortest_step():
    shape = dataclasses.replace(guess_shape(7e9), num_layers=32)
    work = Workload(shape=shape, global_batch=64, precision="bf16")
    base = evaluate(arrange("full_shard", 2, pp=4, num_microbatches=8), work, H100)
    best = on_best_schedule(base, work, H100)
    assert best.time.total < base.time.total
    assert best.arrangement == dataclasses.replace(
        base.arrangement, schedule=best.arrangement.schedule
    )
    alone = evaluate(arrange("ddp", 8), work, H100)
    assert on_best_schedule(alone, work, H100) == alone
