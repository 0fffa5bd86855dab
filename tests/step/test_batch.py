"""Batches: microbatch k is rows k*B/K to (k+1)*B/K, laid over the batch axes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axon_dist.core.errors import DivisibilityError
from axon_dist.step.batch import BatchLayout


def layout(world, microbatches=1, axes=("dp",), processes=1):
    return BatchLayout(world.mesh, axes, microbatches, processes)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("count", [1, 2])
def test_rows_go_to_their_microbatch_and_rank(world, kind, count):
    rows = np.arange(32).reshape(16, 2)
    placed = layout(world, count).place({"x": kind(rows)}).arrays["x"]
    assert placed.sharding.spec == (P(("dp",)) if count == 1 else P(None, ("dp",)))
    expected = rows if count == 1 else rows.reshape(2, 8, 2)
    np.testing.assert_array_equal(placed, expected)
    last = placed.addressable_shards[-1].data
    np.testing.assert_array_equal(last, expected[-2:] if count == 1 else expected[:, -1:])


def test_two_axes_split_samples_row_major(make_world):
    world = make_world("dp=2,fsdp=4")
    placed = layout(world, 1, ("dp", "fsdp")).place({"x": np.arange(8)}).arrays["x"]
    assert [int(s.data[0]) for s in placed.addressable_shards] == list(range(8))


def test_batches_that_cannot_be_cut(world):
    with pytest.raises(
        DivisibilityError,
        match=r"batch of 24 samples .* dp=8 and 2 microbatches.*a positive multiple of 16",
    ):
        layout(world, 2).place({"x": np.ones((24, 2))})
    with pytest.raises(DivisibilityError, match=r"'x': \(8,\), 'y': \(16,\).*needs the same"):
        layout(world).place({"x": np.ones(8), "y": np.ones(16)})
    with pytest.raises(DivisibilityError, match="every leaf needs the same"):
        layout(world).place({"x": np.float32(1)})
    with pytest.raises(DivisibilityError, match="batch of 0 samples"):
        layout(world).place({"x": np.ones((0, 2))})


def test_rows_of_several_processes_count_together(world):
    layout(world, 2, processes=2).check({"x": np.ones((8, 2))}, 2)
    with pytest.raises(DivisibilityError, match="batch of 12 samples"):
        layout(world, 2, processes=2).check({"x": np.ones((6, 2))}, 2)


def test_shapes_are_placed_without_data(world):
    shapes = {"x": jax.ShapeDtypeStruct((16, 3), jnp.float32)}
    placed = layout(world, 2).abstract(shapes).arrays["x"]
    assert placed.shape == (2, 8, 3)
    assert placed.sharding == layout(world, 2).sharding


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_replicas_have_consecutive_rows_however_many_microbatches_they_cut(make_world, kind):
    world = make_world("nodes=2,dp=4")
    whole = BatchLayout(world.mesh, ("nodes", "dp"), 2, replica_axis="nodes")
    placed = whole.place({"x": kind(np.arange(32))}).arrays["x"]
    by_rank = {shard.device: shard.data.tolist() for shard in placed.addressable_shards}
    first, second = (np.arange(16 * r, 16 * r + 16).reshape(2, 4, 2) for r in range(2))
    for replica, rows in enumerate((first, second)):
        for rank, device in enumerate(world.mesh.devices[replica]):
            assert by_rank[device] == rows[:, rank].tolist()


def test_typed_keys_follow_the_rows_of_their_replica(make_world):
    world = make_world("nodes=2")
    layout = BatchLayout(world.mesh, ("nodes",), 2, replica_axis="nodes")
    keys = jax.random.split(jax.random.key(0), 8)
    placed = layout.place({"key": keys, "x": jax.random.key_data(keys)}).arrays
    np.testing.assert_array_equal(jax.random.key_data(placed["key"]), placed["x"])


@dataclasses.dataclass(frozen=True)
class Owner:
    """As much of a world as the rows of a process need: the ranks of its devices."""

    ranks: tuple[int, ...]
    num_ranks: int

    def parts_of_batch(self, axes):
        return self.ranks, self.num_ranks


@pytest.mark.parametrize("owned", [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]])
@pytest.mark.parametrize("replica_axis", [None, "nodes"])
@pytest.mark.parametrize("count", [1, 2])
def test_the_rows_of_each_process_make_the_batch_of_one(make_world, owned, replica_axis, count):
    """Whether or not the ranks of a process are consecutive."""
    world = make_world("nodes=2,dp=2")
    whole = BatchLayout(world.mesh, ("nodes", "dp"), count, replica_axis=replica_axis)
    batch = np.arange(16) * 3
    expected = np.split(whole.split(batch), 4, axis=int(count > 1))
    for ranks in owned:
        own = dataclasses.replace(whole, num_processes=2, own_ranks=ranks)
        rows = own.rows_of(16, Owner(ranks, 4))
        got = np.split(own.split(batch[rows], is_local=True), 2, axis=int(count > 1))
        np.testing.assert_array_equal(got, [expected[rank] for rank in ranks])


def test_the_rows_of_one_process_are_the_batch(make_world):
    world = make_world("dp=2,tp=2")
    assert layout(world, 2).rows_of(8, world).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("mesh", "owned"),
    [
        ("nodes=4,dp=2", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("nodes=4,dp=2", [(0,), (1,), (2, 3), (4, 5, 6, 7)]),
        ("nodes=2,dp=4", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("nodes=4,dp=2", [(0, 1, 2), (3, 4, 5), (6, 7)]),
        ("nodes=2,dp=4", [(0, 1, 4, 5), (2, 3, 6, 7)]),
    ],
)
def test_the_rows_of_processes_are_cut_as_those_of_one_are(make_world, mesh, owned):
    """The parts of all ranks are those that one process makes, whichever process has the rows."""
    world = make_world(mesh)
    whole = BatchLayout(world.mesh, ("nodes", "dp"), 2, replica_axis="nodes")
    replicas = world.mesh.shape["nodes"]
    # A process has the rows of a microbatch that its ranks have, one replica after another.
    rows = np.arange(32).reshape(replicas, 2, 8 // replicas, 2)
    expected = np.split(whole.split(rows.reshape(-1)), 8, axis=1)
    for ranks in owned:
        own = dataclasses.replace(whole, num_processes=2, own_ranks=ranks)
        at = [divmod(rank, 8 // replicas) for rank in ranks]
        mine = [rows[r, :, [i for n, i in at if n == r]] for r in dict(at)]
        local = np.concatenate([x.swapaxes(0, 1).reshape(-1) for x in mine])
        got = own.split(local, is_local=True)
        np.testing.assert_array_equal(got, np.concatenate([expected[r] for r in ranks], axis=1))
