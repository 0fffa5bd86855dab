import pytest

from axon_dist.core.errors import LaunchError, MeshError
from axon_dist.launch.emulation import share_of, stated_share
from axon_dist.launch.spec import LaunchSpec

FOUR = LaunchSpec(num_processes=4, process_id=3)


def test_each_process_makes_up_its_share():
    assert share_of(8, LaunchSpec()) == 8
    assert share_of(8, FOUR) == share_of(8, FOUR, stated=2) == 2
    assert (stated_share({}), stated_share({"JAX_NUM_CPU_DEVICES": "2"})) == (None, 2)


@pytest.mark.parametrize(
    ("spec", "stated", "words"),
    [
        (LaunchSpec(num_processes=3), None, r"8 emulated devices evenly among 3 processes"),
        (FOUR, 1, r"8 .* over 4 processes make 2 each, but JAX_NUM_CPU_DEVICES=1.*emulate 4"),
        (LaunchSpec(num_processes=None, source="k8s"), None, r"that k8s alone counts"),
    ],
)
def test_devices_that_cannot_be_shared(spec, stated, words):
    with pytest.raises(LaunchError, match=words):
        share_of(8, spec, stated)


def test_no_device():
    with pytest.raises(MeshError, match=r"cannot emulate 0 devices"):
        share_of(0, LaunchSpec())
