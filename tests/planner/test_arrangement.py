import pytest

from axon_dist.config import RunConfig, build_strategy
from axon_dist.core.errors import ConfigError
from axon_dist.planner import Arrangement, arrange


@pytest.mark.parametrize(
    ("sizes", "name", "mesh"),
    [
        ({}, "ddp", "dp=1"),
        ({"tp": 4}, "tp", "dp=1,tp=4"),
        ({"pp": 2, "tp": 4}, "pp + tp", "pp=2,dp=1,tp=4"),
        ({"strategy": "zero2", "dp": 8}, "shard_grad_op", "dp=8"),
        ({"strategy": "fsdp", "pp": 2, "fsdp": 2, "tp": 2}, "pp + tp + full_shard", None),
        ({"strategy": "hybrid_shard", "dp": 2, "fsdp": 4}, "hybrid_shard", "dp=2,fsdp=4"),
    ],
)
def test_names_and_meshes(sizes, name, mesh):
    arrangement = Arrangement(**sizes)
    assert arrangement.name == name
    assert str(arrangement.mesh) == (mesh or "pp=2,fsdp=2,tp=2")
    assert arrangement.mesh.size == arrangement.num_devices


@pytest.mark.parametrize(
    "arrangement",
    [
        arrange("ddp", 8, num_microbatches=4),
        arrange("zero1", 8),
        arrange("shard_grad_op", 8, remat=True),
        arrange("full_shard", 8),
        Arrangement(strategy="hybrid_shard", dp=2, fsdp=4),
        arrange("full_shard", 4, tp=2, sequence=True),
        arrange("full_shard", 2, pp=2, tp=2, num_microbatches=4),
    ],
    ids=lambda arrangement: arrangement.name,
)
def test_the_lines_of_a_config_are_read_by_the_config(arrangement, make_world):
    lines = arrangement.to_config()
    config = RunConfig.from_dict(lines)
    assert config.mesh == arrangement.mesh
    world = make_world(str(config.mesh))
    strategy = build_strategy(config.parallel, None, world) if arrangement.tp == 1 else None
    if strategy is not None:
        assert strategy.name == arrangement.strategy
    pipeline = config.parallel.get("pipeline", {})
    count = pipeline.get("num_microbatches", config.train.accumulate)
    assert count == arrangement.num_microbatches


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "zero4"}, "unknown strategy 'zero4'. Did you mean 'zero"),
        ({"schedule": "1f2b"}, "unknown schedule '1f2b'. Did you mean '1f1b'"),
        ({"tp": 0}, "tp=0 must be at least 1; set it so"),
        ({"strategy": "hybrid_shard", "fsdp": 8}, "dp=1 and fsdp=8; .* or take full_shard"),
    ],
)
def test_impossible_arrangements(fields, message):
    with pytest.raises(ConfigError, match=message):
        Arrangement(**fields)
