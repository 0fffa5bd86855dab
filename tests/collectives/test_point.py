import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.collectives import Mailbox, all_gather, rank, ring_all_reduce, send_recv, shift
from axon_dist.core.errors import GroupError
from axon_dist.mesh import ProcessGroup


def test_send_equals_the_messages_of_a_mailbox(make_world):
    perm = [(0, 3), (3, 1), (2, 2)]
    x = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    mailbox = Mailbox(4)
    for src, dst in perm:
        mailbox.send(x[src], src, dst)
    received = np.asarray(send_recv(x, make_world("dp=4").default_group, perm))
    for src, dst in perm:
        np.testing.assert_array_equal(received[dst], mailbox.recv(src, dst))
    assert not received[0].any()


def test_send_within_parallel_groups_and_lists(make_world):
    world = make_world("dp=2,tp=2")
    x = jnp.array([1, 2, 3, 4])
    assert send_recv(x, world.group("tp"), [(0, 1)]).tolist() == [0, 1, 0, 3]
    assert send_recv(x, world.group("dp"), [(1, 0)]).tolist() == [3, 4, 0, 0]
    assert send_recv(x, world.new_group([3, 1]), [(0, 1)]).tolist() == [1, 4, 3, 0]


@pytest.mark.parametrize("offset", [-5, -1, 0, 2, 4])
def test_shift(offset, make_world):
    group = make_world("dp=4").default_group
    x = np.array([1, 2, 3, 4], np.int32)
    np.testing.assert_array_equal(shift(x, group, offset), np.roll(x, offset))
    line = [int(x[r - offset]) if 0 <= r - offset < 4 else 0 for r in range(4)]
    assert shift(x, group, offset, wrap=False).tolist() == line


# Every size and every shape once; of eight ranks, fewer elements than ranks and more.
@pytest.mark.sample("1-shape0", "3-shape1", "8-shape1", "8-shape2")
@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_ring_equals_the_sum(shape, size, make_world):
    x = np.random.default_rng(size).normal(size=(size, *shape)).astype(np.float32)
    result = ring_all_reduce(x, make_world(f"dp={size}").default_group)
    np.testing.assert_allclose(result, np.broadcast_to(x.sum(0), x.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [4, 8])
def test_ring_takes_two_rounds_of_steps(size, make_world):
    world = make_world(f"dp={size}")
    run = world.default_group.spmd(lambda v: ring_all_reduce(v, world.default_group))
    text = jax.jit(run).lower(jnp.zeros((size, 16))).as_text()
    assert text.count("collective_permute") == 2 * (size - 1)


@pytest.mark.parametrize(
    ("perm", "message"),
    [
        ([(0, 4)], r"names ranks \[4\], but the group dp=4 has 4; .* 0\.\.3"),
        ([(-1, 0)], r"names ranks \[-1\]"),
        ([(0, 1), (0, 2)], "rank 0 sends twice; .*use several calls"),
        ([(0, 1), (2, 1)], "rank 1 receives twice"),
    ],
)
def test_impossible_permutations(perm, message, make_world):
    with pytest.raises(GroupError, match=message):
        send_recv(jnp.zeros(4), make_world("dp=4").default_group, perm)


def test_ranks_are_counted_in_the_order_of_the_groups_axes(make_world):
    """Every collective, and `rank`, counts in the order in which the group names its axes."""
    mesh = make_world("dp=2,tp=3").mesh
    group = ProcessGroup(mesh, ("tp", "dp"))
    x = jnp.arange(6.0)
    order = list(group.ranks)
    assert order == [0, 3, 1, 4, 2, 5]
    assert rank(group)[np.array(order)].tolist() == list(range(6))
    assert all_gather(x, group)[0].tolist() == order
    assert shift(x, group)[np.array(order)].tolist() == np.roll(order, 1).tolist()
    sent = send_recv(x, group, [(0, 1), (5, 2)])
    assert sent[np.array(order)].tolist() == [0, order[0], order[5], 0, 0, 0]
    rows = np.random.default_rng(0).integers(0, 9, (6, 7))
    np.testing.assert_array_equal(ring_all_reduce(rows, group), np.tile(rows.sum(0), (6, 1)))


def test_a_mesh_in_context_may_have_the_axes_in_another_order(make_world):
    group = make_world("dp=2,tp=2").default_group
    mesh = make_world("tp=2,dp=2").mesh
    run = jax.shard_map(
        lambda x: shift(x, group), mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P(("dp", "tp"))
    )
    assert jax.jit(run)(jnp.arange(4)).tolist() == [3, 0, 1, 2]
