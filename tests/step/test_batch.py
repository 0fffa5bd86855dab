"""Batches: microbatch k is rows k*B/K to (k+1)*B/K, laid over the batch axes."""

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
