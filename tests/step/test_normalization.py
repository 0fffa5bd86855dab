"""BatchNorm inside a manual region uses the statistics of the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from axon_dist.step.statistics import statistics_outside_batch_norm, synchronise_statistics

X = jnp.asarray(np.float32(np.random.default_rng(0).normal(size=(16, 3))))


def test_statistics_are_those_of_the_whole_batch(world):
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def per_rank(x):
        local = nnx.merge(graphdef, state, copy=True)
        synchronise_statistics(local, ("dp",))
        return local(x), local.mean[...], local.var[...]

    run = jax.shard_map(
        per_rank, mesh=world.mesh, in_specs=P("dp"), out_specs=(P("dp"), P(), P()), check_vma=False
    )
    output, mean, var = jax.jit(run)(X)
    np.testing.assert_allclose(output, model(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(mean, model.mean[...], rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(var, model.var[...], rtol=1e-5, atol=1e-7)


class OwnStatistics(nnx.Module):
    """Keeps batch statistics that nobody knows how to average."""

    def __init__(self):
        self.seen = nnx.BatchStat(jnp.zeros(3))


class Holder(nnx.Module):
    """Holds both kinds."""

    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.own = OwnStatistics()


def test_statistics_outside_batch_norm_are_found():
    assert statistics_outside_batch_norm(Holder()) == ["own/seen"]
