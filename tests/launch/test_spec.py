import pytest

from axon_dist.core.errors import LaunchError
from axon_dist.launch.environment import LaunchSpec, parse_port, split_address


def test_alone_by_default():
    spec = LaunchSpec()
    assert (spec.process_id, spec.num_processes, spec.coordinator_address) == (
        0,
        1,
        "localhost:29500",
    )
    assert not spec.is_distributed
    assert spec.is_complete


def test_a_cluster_with_missing_settings_is_incomplete():
    spec = LaunchSpec(coordinator_address=None, num_processes=None, process_id=None, source="slurm")
    assert spec.is_distributed
    assert not spec.is_complete


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_processes": 0}, r"got 0 processes; start at least one"),
        ({"num_processes": 2, "process_id": 2}, r"process 2 of 2; .* from 0 to 1: .*RANK"),
        ({"num_processes": 2, "process_id": -1}, r"process -1 of 2"),
        ({"coordinator_address": "host"}, r"'host' is not host:port"),
        ({"coordinator_address": "host:none"}, r"port is 'none'.* not an integer"),
    ],
)
def test_impossible_specs(fields, words):
    with pytest.raises(LaunchError, match=words):
        LaunchSpec(**fields)


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    assert parse_port("65535", "P") == 65535
    with pytest.raises(LaunchError, match=r"P is 65536; set a port from 1 to 65535"):
        parse_port("65536", "P")
