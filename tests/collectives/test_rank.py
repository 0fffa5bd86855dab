import jax
import jax.numpy as jnp
import pytest

from axon_dist.collectives import barrier, is_main_process, rank, world_size
from axon_dist.core.errors import GroupError

from .dense import in_shard_map

PLACES = {
    "tp": ((lambda w: w.group("tp")), [0, 1] * 4),
    "dp": ((lambda w: w.group("dp")), [0] * 4 + [1] * 4),
    "dp and tp": ((lambda w: w.group("tp", "dp")), [0, 1, 0, 1, 2, 3, 2, 3]),
    "all": ((lambda w: w.default_group), list(range(8))),
    "list": ((lambda w: w.new_group([6, 1])), [-1, 1, -1, -1, -1, -1, 0, -1]),
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_rank_within_the_group(name, check_vma, make_world):
    world = make_world("dp=2,pp=2,tp=2")
    group_of, expected = PLACES[name]
    group = group_of(world)
    assert rank(group).tolist() == expected
    inside = in_shard_map(lambda v: v + rank(group), world.mesh, check_vma)
    assert inside(jnp.zeros(8, jnp.int32)).tolist() == expected
    assert world_size(group) == len(set(expected) - {-1})


def test_this_is_the_main_process():
    assert is_main_process() is True


def test_barrier_returns(make_world):
    barrier(make_world("dp=1").default_group)
    world = make_world("dp=4,tp=2")
    barrier(world.group("tp"))
    barrier(world.new_group([1, 2]))


def test_barrier_has_no_meaning_in_a_compiled_function(make_world):
    group = make_world("dp=4").default_group

    def waits(x):
        barrier(group)
        return x

    for compiled in (jax.jit(waits), group.spmd(waits)):
        with pytest.raises(GroupError, match=r"barrier.* dp=4 inside a compiled.*outside of jit"):
            compiled(jnp.zeros(4))
