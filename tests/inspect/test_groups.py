import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axon_dist.mesh.group import (
    permuted_axes,
    replica_groups,
    source_target_pairs,
    spanned_axes,
)


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1','axis_0'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        (
            "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "mesh['axis_0'=2,'axis_1'=4] {'axis_1':(2)2}",
            ((0, 1), (2, 3), (4, 5), (6, 7)),
        ),
        (
            "mesh['axis_0'=2,'axis_1'=4] {'axis_1':(1)2}",
            ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ((0, 4, 1, 5), (2, 6, 3, 7))),
        (
            "mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}",
            ((3, 1), (2, 0)),
        ),
    ],
)
def test_every_notation_becomes_lists_of_devices(notation, groups):
    attributes = f"channel_id=1, replica_groups={notation}, dimensions={{0}}, metadata={{}}"
    assert replica_groups(attributes, num_devices=8) == groups


def test_an_instruction_without_groups_joins_all_devices():
    assert replica_groups("to_apply=%add", num_devices=4) == ((0, 1, 2, 3),)


def test_pairs_of_a_permute():
    assert source_target_pairs("source_target_pairs={{0,2},{2,0},{1,3}}, x=1") == (
        (0, 2),
        (2, 0),
        (1, 3),
    )
    assert source_target_pairs("source_target_pairs={}, x=1") == ()


def fake_mesh(**axes):
    class Mesh:
        axis_names = tuple(axes)
        shape = axes
        devices = np.arange(np.prod(list(axes.values()))).reshape(tuple(axes.values()))
        size = devices.size

    return Mesh()


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("tp",)),
        (((0, 2), (1, 3), (4, 6), (5, 7)), ("pp",)),
        (((0, 4), (1, 5), (2, 6), (3, 7)), ("dp",)),
        (((0, 5, 1, 4), (2, 3, 6, 7)), ("dp", "tp")),
        ((tuple(range(8)),), ("dp", "pp", "tp")),
        (tuple((i,) for i in range(8)), ()),
        (((0, 3), (1, 2), (4, 7), (5, 6)), None),
        (((0, 1),), None),
        (((0, 1, 2), (3, 4, 5, 6, 7)), None),
    ],
)
def test_groups_name_the_axes_they_span(groups, axes):
    assert spanned_axes(groups, fake_mesh(dp=2, pp=2, tp=2)) == axes


def test_without_a_mesh_no_axis_is_named():
    assert spanned_axes(((0, 1),), None) is None
    assert permuted_axes(((0, 1),), None) is None


def test_a_permute_names_the_axes_it_moves_along():
    mesh = fake_mesh(dp=2, pp=4)
    shift = tuple((4 * d + p, 4 * d + p + 1) for d in range(2) for p in range(3))
    assert permuted_axes(shift, mesh) == ("pp",)
    assert permuted_axes(((0, 7),), mesh) == ("dp", "pp")
    assert permuted_axes(((0, 0),), mesh) == ()


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4).flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.sets(st.sampled_from(range(len(sizes)))))
    )
)
def test_the_partition_along_any_axes_is_recognised(case):
    sizes, joined = case
    names = tuple("abcd"[: len(sizes)])
    mesh = fake_mesh(**dict(zip(names, sizes, strict=True)))
    rest = [dim for dim in range(len(sizes)) if dim not in joined]
    order = mesh.devices.transpose([*rest, *sorted(joined)])
    group_size = int(np.prod([sizes[dim] for dim in joined], dtype=int))
    groups = tuple(map(tuple, order.reshape(-1, group_size).tolist()))
    expected = tuple(names[dim] for dim in sorted(joined) if sizes[dim] > 1)
    assert spanned_axes(groups, mesh) == expected


def test_a_real_mesh_counts_positions_not_device_ids():
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("dp", "tp"))
    assert spanned_axes(((0, 1), (2, 3)), mesh) == ("tp",)
