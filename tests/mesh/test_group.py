import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axon_dist.core.errors import GroupError
from axon_dist.mesh import ProcessGroup


def as_lists(group):
    return [list(ranks) for ranks in group.partition()]


def test_parallel_groups_of_three_axes(make_world):
    world = make_world("dp=2,pp=2,tp=2")
    assert as_lists(world.group("tp")) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert as_lists(world.group("pp")) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert as_lists(world.group("dp")) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert as_lists(world.group("tp", "dp")) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert as_lists(world.default_group) == [list(range(8))]


@pytest.mark.parametrize("axes", [("pp",), ("dp", "tp"), ("pp", "dp", "tp")])
def test_partitions_agree_with_jax(axes, make_world):
    """Ranks are in one group if and only if a psum over the axes adds them up."""
    world = make_world("pp=2,dp=2,tp=2")
    group = world.group(*axes)
    one_hot = jnp.eye(8)
    together = group.spmd(lambda v: jax.lax.psum(v, group.axes))(one_hot)
    for rank in range(8):
        members = group.group_of(rank)
        assert np.flatnonzero(together[rank]).tolist() == sorted(members)
        assert group.contains(rank)
        assert group.size == len(members)
    order = group.spmd(lambda _: jax.lax.axis_index(group.axes))(one_hot)
    assert [group.group_of(rank).index(rank) for rank in range(8)] == order.tolist()


def test_lists_of_ranks(make_world):
    group = make_world("dp=4").new_group([0, 1])
    assert (group.size, group.ranks, group.world_size) == (2, (0, 1), 4)
    assert group.contains(0)
    assert not group.contains(2)
    assert group.group_of(1) == (0, 1)
    assert as_lists(make_world("dp=4").new_group(np.array([3, 1]))) == [[3, 1]]
    assert str(group) == "ranks [0, 1] of 4"
    assert str(make_world("dp=4,tp=2").default_group) == "dp=4×tp=2"
    with pytest.raises(GroupError, match=r"rank 2 is not in the group \(0, 1\); ask `contains`"):
        group.group_of(2)
    with pytest.raises(GroupError, match=r"rank 9 is not in a world of 4; .* 0\.\.3"):
        group.group_of(9)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([], "empty list of ranks; a group needs at least one"),
        ([0, 0], r"ranks \[0, 0\] name a rank twice; each rank joins a group once"),
        ([0, 9], r"ranks \[9\] do not exist in a world of 8; ranks are 0\.\.7"),
        ([-1], r"ranks \[-1\] do not exist"),
        ([True], r"got the ranks \(True,\); give whole numbers"),
        ([1.0], r"got the ranks \(1.0,\); give whole numbers"),
    ],
)
def test_impossible_lists(ranks, message, world):
    with pytest.raises(GroupError, match=message):
        world.new_group(ranks)


def test_impossible_axes(make_world):
    world = make_world("dp=2,tp=2")
    with pytest.raises(GroupError, match=r"the mesh has no axis 'pp'\..* Valid: dp, tp"):
        world.group("pp")
    with pytest.raises(GroupError, match="needs at least one axis"):
        ProcessGroup(world.mesh, ())
    with pytest.raises(GroupError, match=r"axes \('dp', 'dp'\) name an axis twice"):
        ProcessGroup(world.mesh, ("dp", "dp"))
    with pytest.raises(GroupError, match=r"by ranks spans all axes .* got \('dp',\); .*new_group"):
        ProcessGroup(world.mesh, ("dp",), (0, 1))


def test_groups_are_values(make_world):
    assert make_world("dp=4").default_group == make_world("dp=4").group("dp")
    assert hash(make_world("dp=4").group("dp")) == hash(make_world("dp=4").default_group)
    assert make_world("dp=4").new_group([0]) != make_world("dp=4").new_group([1])


def test_spmd_runs_row_by_row(make_world):
    world = make_world("dp=2,tp=2")
    x = jnp.arange(8.0).reshape(4, 2)

    def function(x, tree):
        rank = jax.lax.axis_index(("dp", "tp"))
        return {"sum": x.sum() + tree["y"], "rank": rank, "constant": 3.0}

    result = world.group("tp").spmd(function)(x, {"y": np.arange(4.0)})
    np.testing.assert_array_equal(result["sum"], x.sum(1) + np.arange(4))
    assert result["rank"].tolist() == [0, 1, 2, 3]
    assert result["constant"].tolist() == [3.0] * 4
    for wrong in (jnp.zeros((3, 2)), 1.0):
        with pytest.raises(GroupError, match="must be rank-stacked: dim 0 = world size 4"):
            world.group("tp").spmd(lambda x: x)(wrong)


def test_arrays_of_another_world_are_refused_with_the_way_to_move_them(make_world):
    group = make_world("dp=4").default_group
    other = NamedSharding(make_world("dp=2").mesh, PartitionSpec())
    x = jnp.arange(4.0)
    double = group.spmd(lambda x: 2 * x)
    for elsewhere, found in ((other, "0-1"), (jax.devices()[1], "1")):
        with pytest.raises(GroupError, match=rf"on the devices {found}, .* 0-3; move") as error:
            double(jax.device_put(x, elsewhere))
        assert error.value.code == "array-on-other-devices"
    moved = jax.device_put(jax.device_put(x, other), NamedSharding(group.mesh, PartitionSpec()))
    assert double(double(moved)).tolist() == [0, 4, 8, 12]
