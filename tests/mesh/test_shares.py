import dataclasses

import numpy as np
import pytest
from jax.sharding import Mesh

from axon_dist.core.errors import MeshError
from axon_dist.mesh.world import batch_parts, batch_shares


@dataclasses.dataclass(frozen=True)
class Device:
    """As much of a device as the shares look at."""

    process_index: int
    platform: str = "cpu"


class Grid:
    """As much of a mesh."""

    def __init__(self, processes, **axes):
        owners = np.array([Device(p) for p in processes], dtype=object)
        self.devices = owners.reshape(tuple(axes.values()))
        self.axis_names, self.shape = tuple(axes), axes


@pytest.mark.parametrize(
    ("mesh", "axes", "shares"),
    [
        (Grid([0, 0, 1, 1], dp=4), ["dp"], {0: 0, 1: 1}),
        (Grid([0, 1, 2, 3], dp=2, tp=2), ["dp"], {0: 0, 1: 0, 2: 1, 3: 1}),
        (Grid([0, 1, 2, 3], pp=2, dp=2), ["dp"], {0: 0, 1: 1, 2: 0, 3: 1}),
        (Grid([0, 1], tp=2), [], {0: 0, 1: 0}),
        (Grid([0, 0, 1, 1, 2, 2, 3, 3], pp=2, dp=2, tp=2), ["dp"], {0: 0, 1: 1, 2: 0, 3: 1}),
        (Grid([0, 1, 0, 1], dp=4), ["dp"], {0: 0, 1: 1}),
        (Grid([0, 0, 1, 1], dp=2, fsdp=2), ["dp", "fsdp"], {0: 0, 1: 1}),
    ],
)
def test_who_brings_which_rows(mesh, axes, shares):
    assert batch_shares(mesh, axes) == shares


def test_rows_that_two_processes_share_in_part():
    with pytest.raises(MeshError, match=r"0: \[0, 1\], 1: \[0, 2\].*reorder the mesh axes"):
        batch_shares(Grid([0, 0, 2, 1, 2, 1], pp=2, dp=3), ["dp"])


@pytest.mark.parametrize(
    ("mesh", "axes", "parts"),
    [
        (Grid([0, 0, 1, 1], dp=4), ["dp"], ({0: (0,), 1: (1,)}, 2)),
        (Grid([0, 0, 1, 1], dp=2, fsdp=2), ["dp", "fsdp"], ({0: (0,), 1: (1,)}, 2)),
        (Grid([0, 0, 1, 1], dp=2, fsdp=2), ["fsdp", "dp"], ({0: (0, 2), 1: (1, 3)}, 4)),
        (Grid([0, 1, 0, 1], dp=4), ["dp"], ({0: (0, 2), 1: (1, 3)}, 4)),
        (Grid([0, 0, 1, 1, 0, 0, 1, 1], dp=8), ["dp"], ({0: (0, 2), 1: (1, 3)}, 4)),
        (Grid([0, 1, 1, 0], dp=4), ["dp"], ({0: (0, 3), 1: (1, 2)}, 4)),
        (Grid([0, 1, 2, 3], pp=2, dp=2), ["dp"], ({0: (0,), 1: (1,), 2: (0,), 3: (1,)}, 2)),
        (Grid([0, 1], tp=2), [], ({0: (0,), 1: (0,)}, 1)),
    ],
)
def test_which_parts_of_the_rows_each_process_has(mesh, axes, parts):
    assert batch_parts(mesh, axes) == parts


def test_a_real_mesh(make_world):
    world = make_world("dp=2,tp=2")
    assert isinstance(world.mesh, Mesh)
    assert world.share_of_batch(["dp"]) == (0, 1)
    assert world.parts_of_batch(["dp"]) == ((0,), 1)
    assert world.num_batch_shares(["dp"]) == 1
