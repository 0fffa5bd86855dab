import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axon_dist import Shared
from axon_dist.core.errors import ConfigError
from axon_dist.mesh.chips import hardware
from axon_dist.planner import (
    Direction,
    SlowReplicas,
    Workload,
    candidate_for,
    candidates,
    decide,
    idle_share,
    more_microbatches,
    workload_of,
)
from axon_dist.schedule import PipelineSchedule

H100 = hardware("h100")
WORK = Workload(num_params=10**9, num_layers=32, flops=1e15, global_batch=64, has_attention=True)


@pytest.mark.full
def test_every_candidate_uses_all_devices_and_divides_the_batch():
    for devices in (1, 2, 8, 16):
        found = list(candidates(WORK, devices, H100))
        assert found
        for one in found:
            assert one.mesh.size == devices
            assert WORK.global_batch % (one.data_ranks * one.num_microbatches) == 0
            assert WORK.num_layers % one.pp == 0
            assert not one.remat
            assert one.pp > 1 or one.num_microbatches == 1


@pytest.mark.full
def test_tensor_parallelism_stays_inside_a_node():
    sizes = {candidate.tp for candidate in candidates(WORK, 16, H100)}
    assert sizes == {1, 2, 4, 8}


def test_hybrid_sharding_is_tried_between_nodes():
    tried = [a for a in candidates(WORK, 16, H100) if a.strategy == "hybrid"]
    assert {(a.dp, a.fsdp) for a in tried} == {(2, 8)}


@pytest.mark.full
def test_experts_are_split_where_there_are_some():
    mixture = dataclasses.replace(WORK, num_experts=8)
    found = list(candidates(mixture, 16, H100))
    assert {one.ep for one in found} == {1, 2, 4, 8}
    assert any(one.ep > 1 and one.pp > 1 for one in found)
    assert {one.ep for one in candidates(WORK, 16, H100)} == {1}


def test_positions_are_split_where_attention_mixes_them():
    assert {one.cp for one in candidates(WORK, 4, H100)} == {1, 2, 4}
    plain = dataclasses.replace(WORK, has_attention=False)
    assert {one.cp for one in candidates(plain, 4, H100)} == {1}


def test_replicas_over_slow_links_are_no_pipelines():
    found = list(candidates(WORK, 16, H100, SlowReplicas(every=50), 2))
    assert found
    assert all(one.num_devices == 16 and one.replicas == 2 and one.pp == 1 for one in found)
    assert not list(candidates(WORK, 16, H100, SlowReplicas(), 3))


def test_the_schedule_is_the_one_that_idles_least():
    for one in candidates(WORK, 8, H100):
        if one.pp > 1:
            idle = idle_share(one.schedule, one.pp, one.num_microbatches)
            usual = idle_share(PipelineSchedule.ONE_F_ONE_B, one.pp, one.num_microbatches)
            assert idle <= usual


def test_microbatches_grow_to_the_next_number_that_divides():
    plan = candidate_for("ddp", 8)
    assert more_microbatches(plan, WORK, 3).num_microbatches == 4
    assert more_microbatches(plan, WORK, 100).num_microbatches == 8
    assert more_microbatches(dataclasses.replace(plan, num_microbatches=8), WORK, 9) is None


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
    with pytest.raises(ConfigError, match="got interconnect=0, an int; give bytes/s, above 0"):
        decide(fits=False, interconnect=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 0}, "got global_batch=0, an int; give a whole number, at least 1"),
        ({"num_params": 0}, "the model has no trainable parameters"),
    ],
)
def test_a_step_has_samples_and_parameters(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(WORK, **changes)


def square(model, batch):
    return jnp.mean(model(batch["x"]) ** 2 * batch["by_class"])


@pytest.mark.parametrize("shared", [np.ones(4, np.float32), 2.0, jax.ShapeDtypeStruct((4,), "f4")])
def test_what_all_samples_share_is_no_sample(shared):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    batch = {"by_class": Shared(shared), "x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    work = workload_of(model, square, batch)
    assert (work.global_batch, work.num_params) == (8, 20)
    assert work.flops == 2 * 2 * 8 * 4 * 4


@pytest.mark.parametrize("rows", [{}, {"x": np.float32(1)}])
def test_a_batch_to_plan_has_samples(rows):
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"give leaves of shape \[B, ...\]"):
        workload_of(model, square, {"by_class": Shared(np.ones(4)), **rows})


def test_a_model_that_names_axes_needs_no_mesh():
    class Named(nnx.Linear):
        def __call__(self, x):
            rows = jax.sharding.PartitionSpec("rows", None)
            return super().__call__(jax.lax.with_sharding_constraint(x, rows))

    init = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", None))
    batch = {"by_class": Shared(2.0), "x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    work = workload_of(lambda: Named(4, 4, kernel_init=init, rngs=nnx.Rngs(0)), square, batch)
    assert (work.global_batch, work.num_params) == (8, 20)
