import pytest

from axon_dist.core.errors import ConfigError
from axon_dist.planner import Candidate, SlowReplicas, candidate_for
from axon_dist.train.config import RunConfig, build_strategy


@pytest.mark.parametrize(
    ("sizes", "name", "mesh"),
    [
        ({}, "ddp", "dp=1"),
        ({"tp": 4}, "tp", "dp=1,tp=4"),
        ({"pp": 2, "tp": 4}, "pp + tp", "pp=2,dp=1,tp=4"),
        ({"strategy": "shard_grad_op", "dp": 8}, "zero2", "dp=8"),
        ({"strategy": "fsdp", "pp": 2, "fsdp": 2, "tp": 2}, "pp + tp + fsdp", None),
        ({"strategy": "hybrid_shard", "dp": 2, "fsdp": 4}, "hybrid", "dp=2,fsdp=4"),
        ({"dp": 2, "ep": 4}, "ep + ddp", "dp=2,ep=4"),
        ({"ep": 8}, "ep", "dp=1,ep=8"),
        ({"replicas": 2, "slow_replicas": SlowReplicas(), "dp": 4}, "diloco + ddp", "nodes=2,dp=4"),
        (
            {
                "replicas": 2,
                "slow_replicas": SlowReplicas("local_sgd", 8, "pods"),
                "strategy": "fsdp",
                "fsdp": 2,
            },
            "local_sgd + fsdp",
            "pods=2,fsdp=2",
        ),
    ],
)
def test_names_and_meshes(sizes, name, mesh):
    candidate = Candidate(**sizes)
    assert candidate.name == name
    assert str(candidate.mesh) == (mesh or "pp=2,fsdp=2,tp=2")
    assert candidate.mesh.size == candidate.num_devices


@pytest.mark.parametrize(
    "candidate",
    [
        candidate_for("ddp", 8, num_microbatches=4),
        candidate_for("zero1", 8),
        candidate_for("shard_grad_op", 8, remat=True),
        candidate_for("full_shard", 8),
        Candidate(strategy="hybrid_shard", dp=2, fsdp=4),
        candidate_for("full_shard", 4, tp=2, sequence=True),
        candidate_for("full_shard", 2, pp=2, tp=2, num_microbatches=4),
        candidate_for(
            "full_shard", 4, replicas=2, slow_replicas=SlowReplicas(every=20), num_microbatches=2
        ),
    ],
    ids=lambda candidate: candidate.name,
)
def test_the_lines_of_a_config_are_read_by_the_config(candidate, make_world):
    lines = candidate.to_config()
    config = RunConfig.from_dict(lines)
    assert config.mesh == candidate.mesh
    world = make_world(str(config.mesh))
    strategy = build_strategy(config.parallel, None, world) if candidate.tp == 1 else None
    if strategy is not None:
        assert strategy.name.split(" + ")[-1] == candidate.strategy
        assert (strategy.outer_loop is None) == (candidate.slow_replicas is None)
    pipeline = config.parallel.get("pipeline", {})
    count = pipeline.get("num_microbatches", config.train.accumulate)
    assert count == candidate.num_microbatches


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "zero4"}, "unknown strategy 'zero4'. Did you mean 'zero"),
        ({"schedule": "1f2b"}, "PipelineSchedule got '1f2b', .* Did you mean '1f1b'"),
        ({"tp": 0}, "Candidate got tp=0, an int; give a whole number, at least 1"),
        ({"ep": 0}, "Candidate got ep=0, an int; give a whole number, at least 1"),
        (
            {"replicas": 2},
            "got replicas=2 and slow_replicas=None; several replicas need a SlowReplicas",
        ),
        ({"strategy": "hybrid_shard", "fsdp": 8}, "dp=1 and fsdp=8; .* or take fsdp"),
    ],
)
def test_impossible_candidates(fields, message):
    with pytest.raises(ConfigError, match=message):
        Candidate(**fields)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("dilocco",), "unknown strategy 'dilocco' over slow links. Did you mean 'diloco'"),
        (("diloco", 0), "diloco got axis='nodes' and every=0; .* at least 1 step"),
        (("diloco", 8, "dp"), "axis='dp' and every=8; the axis must be pods or nodes"),
    ],
)
def test_replicas_that_cannot_be(given, message):
    with pytest.raises(ConfigError, match=message):
        SlowReplicas(*given)


def test_the_old_name_of_slow_replicas_warns():
    candidate = Candidate(replicas=2, slow_replicas=SlowReplicas(), dp=4)
    with pytest.warns(DeprecationWarning, match="Candidate.apart is deprecated"):
        assert candidate.apart is candidate.slow_replicas
