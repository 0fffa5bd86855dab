import jax
import numpy as np
import pytest

from axon_dist.pipeline import Stages, StageStorage


def model(widths):
    """Parameters of blocks of the given widths, with something before and after them."""
    rng = np.random.default_rng(0)
    array = lambda *shape: rng.normal(size=shape).astype(np.float32)
    layers = {i: {"kernel": array(w, 2), "bias": array(w)} for i, w in enumerate(widths)}
    return {"embed": array(3, 2), "layers": layers, "norm": array(2)}


def shapes_of(params):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


PLACEMENTS = [
    ((0, 1), (0, 2, 5), (2, 2, 2, 2, 2), True),
    ((0, 1, 0, 1), (0, 1, 2, 4, 5), (2, 2, 2, 2, 2), True),
    ((0, 1, 1, 0), (0, 1, 2, 4, 5), (2, 2, 2, 2, 2), True),
    ((0, 1), (0, 2, 5), (1, 2, 3, 2, 1), False),
    ((0, 1, 1, 0), (0, 1, 2, 4, 5), (1, 2, 3, 2, 1), False),
    ((0, 1, 1), (0, 1, 3, 5), (1, 2, 3, 2, 1), False),
    ((0, 1, 1), (0, 1, 3, 5), (2, 2, 2, 2, 2), True),
]


@pytest.mark.parametrize(("placement", "boundaries", "widths", "by_blocks"), PLACEMENTS)
def test_the_model_comes_back_exactly(placement, boundaries, widths, by_blocks):
    params = model(widths)
    blocks = tuple(("layers", i) for i in range(5))
    storage = StageStorage(
        Stages(blocks, boundaries, placement, max(placement) + 1), shapes_of(params)
    )
    assert storage.by_blocks is by_blocks
    stored = storage.from_model(params)
    jax.tree.map(np.testing.assert_array_equal, storage.to_model(stored), params)
    rebuilt = storage.assemble(storage.rows_of(stored), storage.rest_of(stored))
    jax.tree.map(np.testing.assert_array_equal, rebuilt, stored)
    num_devices = max(placement) + 1
    assert all(leaf.shape[0] == num_devices for row in storage.rows_of(stored) for leaf in row)


@pytest.mark.parametrize(("placement", "boundaries", "widths", "by_blocks"), PLACEMENTS)
def test_a_stage_finds_its_blocks_in_the_rows_of_its_rank(placement, boundaries, widths, by_blocks):
    params = model(widths)
    blocks = tuple(("layers", i) for i in range(5))
    stages = Stages(blocks, boundaries, placement, max(placement) + 1)
    storage = StageStorage(stages, shapes_of(params))
    rows = storage.rows_of(storage.from_model(params))
    for stage, device in enumerate(placement):
        own = storage.chunk_rows[stages.chunk_of(stage)]
        weights = storage.block_weights(stage, [[leaf[device] for leaf in rows[r]] for r in own])
        for block in stages.blocks_of(stage):
            for name in ("kernel", "bias"):
                want = params["layers"][block][name]
                np.testing.assert_array_equal(weights["layers", block, name], want)
