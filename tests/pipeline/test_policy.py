"""Rows lie by stage, what is in no block is spread over the stages, the rest as others say."""

import pytest
from jax.sharding import PartitionSpec

from axon_dist.mesh import MeshSpec
from axon_dist.pipeline import ByStages
from axon_dist.sharding import LargestDim, Replicate

MESH = MeshSpec(pp=2, dp=4)
ROWS = frozenset({"blocks/0/kernel", "blocks/0/bias"})
ALONE = ByStages(Replicate(), "pp", ROWS)
SPLIT = ByStages(LargestDim(("dp",), min_elements=8), "pp", ROWS)


@pytest.mark.parametrize(
    ("policy", "path", "shape", "spec"),
    [
        (ALONE, "blocks/0/kernel", (2, 64, 64), PartitionSpec("pp")),
        (SPLIT, "blocks/0/kernel", (2, 16, 64), PartitionSpec("pp", None, "dp")),
        # What counts ranks is no dim of the block: it neither counts as elements nor is split.
        (SPLIT, "blocks/0/bias", (2, 4), PartitionSpec("pp")),
        (ALONE, "embed", (512, 64), PartitionSpec("pp")),
        (ALONE, "norm", (64,), PartitionSpec()),
        (SPLIT, "embed", (512, 64), PartitionSpec("dp", "pp")),
        (SPLIT, "norm", (64,), PartitionSpec("dp")),
    ],
)
def test_where_leaves_lie(policy, path, shape, spec):
    assert policy(path, shape, MESH) == spec


def test_names_and_axes():
    assert (ALONE.name, ALONE.split_axes) == ("pipeline", ())
    assert (SPLIT.name, SPLIT.split_axes) == ("pipeline + largest_dim", ("dp",))
