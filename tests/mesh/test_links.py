"""The order of devices in meshes whose slow axes lie between nodes."""

from types import SimpleNamespace

import pytest

from axon_dist import World
from axon_dist.core.errors import MeshError
from axon_dist.mesh import MeshSpec
from axon_dist.mesh.mesh_spec import by_links


def devices(nodes, kind="slice_index"):
    """One device for each entry, on the node that it names."""
    made = []
    for number, node in enumerate(nodes):
        indices = {"slice_index": 0, "process_index": 0, kind: node}
        made.append(SimpleNamespace(id=number, platform="cpu", **indices))
    return made


def ids(parts):
    return [[device.id for device in part] for part in parts]


def test_a_slow_axis_lies_between_nodes_however_devices_are_listed():
    spec = MeshSpec("nodes=2,fsdp=2,tp=2")
    assert ids(by_links(spec, devices([1, 0, 0, 1, 1, 1, 0, 0]))) == [[0, 3, 4, 5], [1, 2, 6, 7]]
    assert ids(by_links(spec, devices([0] * 4 + [1] * 4))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_node_may_have_several_replicas():
    spec = MeshSpec("nodes=4,fsdp=2")
    assert ids(by_links(spec, devices([0, 1] * 4))) == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_processes_are_nodes_where_all_is_one_slice():
    spec = MeshSpec("nodes=2,fsdp=4")
    assert ids(by_links(spec, devices([0, 1, 0, 1, 0, 1, 0, 1], "process_index"))) == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]
    # A process for each device says nothing about nodes.
    alone = by_links(spec, devices(range(8), "process_index"))
    assert ids(alone) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_meshes_without_slow_axes_keep_the_order():
    assert ids(by_links(MeshSpec("dp=4"), devices([1, 0, 1, 0]))) == [[0, 1, 2, 3]]
    assert ids(by_links(MeshSpec("nodes=2,dp=2"), devices([0] * 4))) == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("axes", "nodes", "message"),
    [
        ("fsdp=2,nodes=2", [0, 0, 1, 1], "'nodes' behind another axis.*first.*nodes=2,fsdp=2"),
        (
            "nodes=2,fsdp=4",
            [0, 0, 1, 1, 2, 2, 3, 3],
            "4 slices of 2 devices; give nodes the size 4",
        ),
        ("nodes=2,fsdp=2", [0, 0, 0, 1], "2 slices of 1 or 3 devices"),
    ],
)
def test_traffic_over_slow_links_is_refused(axes, nodes, message):
    with pytest.raises(MeshError, match=message):
        by_links(MeshSpec(axes), devices(nodes))


def test_emulated_worlds_have_slow_axes_too():
    assert World.emulate(8, "nodes=2,fsdp=4").mesh.axis_names == ("nodes", "fsdp")
