"""The mean weight of a microbatch, read off the program before any of it has run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from axon_dist import Weighted, World, build_train_step
from axon_dist.core.errors import UnsupportedError
from axon_dist.parallel import ddp, pipelined
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


@pytest.mark.parametrize(("hold", "frozen"), [(jax.lax.stop_gradient, ()), (None, [("norm",)])])
def test_a_weight_may_read_parameters_outside_the_blocks_without_a_gradient(hold, frozen):
    read = hold or (lambda x: x)
    odd = lambda params, *args: (1.0, jnp.sum(read(params["norm"])), {}, buffers_of())
    params = params_of()
    trace, _ = traced(odd, params, buffers_of(), BATCHES[0])
    rest = {("norm",): params["norm"]}
    got = mean_microbatch_weight(trace, data_of(STACKED), 4, (), rest, frozen)
    assert float(got) == pytest.approx(float(jnp.sum(params["norm"])))
    if frozen:
        with pytest.raises(UnsupportedError, match="must be frozen, or wrapped in jax"):
            mean_microbatch_weight(trace, data_of(STACKED), 4, (), rest)


class Gated(nnx.Module):
    """A chain of blocks, and a gate that weighs the samples."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.gate = nnx.Param(jnp.array([1.0, 2.0, -1.0, 0.5]))

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x


def test_a_pipeline_weighs_samples_by_a_held_parameter_as_one_device_does():
    def loss_fn(model, batch):
        weight = jax.nn.sigmoid(batch["x"] @ jax.lax.stop_gradient(model.gate[...]))
        return Weighted(jnp.sum(jnp.mean(model(batch["x"]) ** 2, -1) * weight), jnp.sum(weight))

    batch = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}
    results = []
    for strategy, world in (
        (ddp(), World.emulate(1, "dp=1")),
        (pipelined(2, 2), World.emulate(2, "pp=2")),
    ):
        make = lambda: Gated(nnx.Rngs(0))
        step = build_train_step(make, optax.sgd(0.1), loss_fn, strategy, world, batch=batch)
        state, metrics = step(step.init(), batch)
        results.append((metrics["loss"], step.weights(state)))
    (one, want), (loss, got) = results
    assert float(loss) == pytest.approx(float(one), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, want)
