import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.collectives import all_reduce_sum, sync_gradients
from axon_dist.core.errors import GroupError


def over(mesh, axes, function, x):
    mapped = jax.shard_map(
        function, mesh=mesh, axis_names=set(axes), in_specs=P(*axes), out_specs=P(*axes)
    )
    return jax.jit(mapped)(x)


def test_groups_need_all_their_axes_manual(make_world):
    world = make_world("dp=2,tp=2")
    x = jnp.arange(4.0)
    for group in (world.group("tp"), world.default_group, world.new_group([0, 1])):
        with pytest.raises(
            GroupError,
            match=r"inside a shard_map over \('dp',\), where \['tp'\] are not manual; name",
        ):
            over(world.mesh, ["dp"], lambda v: all_reduce_sum(v, group), x)  # noqa: B023
    result = over(world.mesh, ["dp"], lambda v: all_reduce_sum(v, world.group("dp")), x)
    assert result.tolist() == [2, 4, 2, 4]


def test_groups_belong_to_the_mesh_they_are_used_on(make_world):
    group = make_world("dp=4").default_group
    with pytest.raises(
        GroupError, match=r"axes \{'dp': 4\}, and this shard_map runs over \{'dp': 2\}"
    ):
        over(make_world("dp=2").mesh, ["dp"], lambda v: all_reduce_sum(v, group), jnp.zeros(4))


def test_rank_stacked_arrays_inside_jit(make_world):
    group = make_world("dp=4").default_group
    assert jax.jit(lambda x: 2 * sync_gradients(x, group))(jnp.arange(4.0)).tolist() == [3] * 4


def test_inside_scans_and_branches(make_world):
    world = make_world("dp=4")
    group = world.default_group

    def body(v):
        def step(total, _):
            more = jax.lax.cond(total[0] > 0, lambda: all_reduce_sum(v, group), lambda: 0 * v)
            return total + more, None

        return jax.lax.scan(step, jnp.ones_like(v), length=3)[0]

    assert group.spmd(lambda v: body(v[None])[0])(jnp.arange(4.0)).tolist() == [19] * 4
