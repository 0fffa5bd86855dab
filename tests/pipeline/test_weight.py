"""The mean weight of a microbatch, read off the program before any of it has run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from axon_dist import World
from axon_dist.core.errors import UnsupportedError
from axon_dist.pipeline import MicrobatchData, mean_microbatch_weight

from .chains import buffers_of, chain_loss, microbatch, params_of, traced

BATCHES = [microbatch(number) for number in range(4)]
STACKED = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *BATCHES)


def data_of(stacked):
    leaves = jax.tree.leaves(stacked)
    return lambda index: MicrobatchData(
        jax.tree.leaves(buffers_of()), [leaf[index] for leaf in leaves]
    )


def test_it_is_the_mean_over_microbatches():
    trace, _ = traced(chain_loss, params_of(), buffers_of(), BATCHES[0])
    want = np.mean([np.sum(batch["weight"]) for batch in BATCHES])
    assert float(mean_microbatch_weight(trace, data_of(STACKED), 4, ())) == pytest.approx(want)


def test_it_is_the_mean_over_the_ranks_that_share_the_batch():
    trace, _ = traced(chain_loss, params_of(), buffers_of(), BATCHES[0])
    world = World.emulate(2, "dp=2")
    run = jax.shard_map(
        lambda stacked: mean_microbatch_weight(trace, data_of(stacked), 2, ("dp",)),
        mesh=world.mesh, in_specs=PartitionSpec("dp"), out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    want = np.mean([np.sum(batch["weight"]) for batch in BATCHES])
    assert float(jax.jit(run)(STACKED)) == pytest.approx(want)


def test_no_weight_at_all_is_not_divided_by():
    trace, _ = traced(chain_loss, params_of(), buffers_of(), BATCHES[0])
    nothing = STACKED | {"weight": jnp.zeros_like(STACKED["weight"])}
    assert float(mean_microbatch_weight(trace, data_of(nothing), 4, ())) == 1


def test_a_plain_mean_has_none():
    plain = lambda *args: (chain_loss(*args)[0], 1.0, {}, buffers_of())
    trace, _ = traced(plain, params_of(), buffers_of(), BATCHES[0])
    assert mean_microbatch_weight(trace, data_of(STACKED), 4, ()) is None


def test_a_weight_that_depends_on_a_parameter_raises():
    odd = lambda params, *args: (1.0, jnp.sum(params["norm"]), {}, buffers_of())
    trace, _ = traced(odd, params_of(), buffers_of(), BATCHES[0])
    with pytest.raises(UnsupportedError, match="weight of the loss depends on the parameter 'norm"):
        mean_microbatch_weight(trace, data_of(STACKED), 4, ())
