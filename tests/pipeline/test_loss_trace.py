"""A traced loss: which variable is what, pieces of it, and buffers known ahead of time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axon_dist.core.errors import UnsupportedError
from axon_dist.ir.pieces import variables
from axon_dist.pipeline import buffers_over_time

from .chains import BLOCKS, buffers_of, chain_loss, microbatch, params_of, traced, unit


@pytest.mark.full
def test_inputs_and_outputs_are_distinguished():
    params, buffers, batch = params_of(), buffers_of(), microbatch(0)
    trace, data = traced(chain_loss, params, buffers, batch)
    flat = jax.tree_util.tree_leaves_with_path(params)
    values = {tuple(entry.key for entry in path): leaf for path, leaf in flat}
    known = trace.known(data, [*values], dict(enumerate(values.values())))
    total, weight, *metrics = trace.cut(trace.loss).run(known)
    want = chain_loss(params, buffers, batch)
    np.testing.assert_allclose([total, weight], want[:2], rtol=1e-6)
    assert trace.metrics == ["awe", "zeal"]
    np.testing.assert_allclose(metrics, [want[2]["awe"], want[2]["zeal"]], rtol=1e-6)
    after = trace.cut(trace.new_buffers).run(known)
    assert jax.tree.unflatten(jax.tree.structure(buffers), [float(v) for v in after]) == {
        "count": 5,
        "still": 0.25,
    }


def test_calls_are_those_of_the_blocks():
    trace, _ = traced(chain_loss, params_of(), buffers_of(), microbatch(0))
    assert len(trace.calls) == len(BLOCKS)
    for call, block in zip(trace.calls, BLOCKS, strict=True):
        assert trace.params[*block, "kernel"] in trace.jaxpr.eqns[call].invars


def test_values_of_the_batch_alone_are_replicated():
    def forward(params, buffers, batch):
        shifted = batch["x"][:, 1:]
        x = layer_of(params["blocks"][0], batch["x"] * params["embed"][0, 0])
        return jnp.sum(x[:, 1:] * shifted), 1.0, {}, buffers

    layer_of = unit(lambda block, x: x * block["bias"][0])
    trace, _ = traced(forward, params_of(), buffers_of(), microbatch(0))
    pinned = trace.cut(trace.loss).pinned
    # Of two slices one is of the batch alone; the other has been through a block.
    assert [tuple(v.aval.shape) for v in pinned] == [(3, 1)]


def test_values_passed_through_a_unit_are_read_from_their_source():
    keyed = unit(lambda block, x, key: (x + jax.random.normal(key, x.shape) * block["bias"], key))

    def forward(params, buffers, batch):
        x, key = batch["x"] @ params["embed"], jax.random.key(0)
        for number in range(3):
            x, key = keyed(params["blocks"][number], x, key)
        return jnp.sum(x), 1.0, {}, {"key": jax.random.key_data(key)}

    trace, _ = traced(forward, params_of(), {"key": jnp.zeros(2, jnp.uint32)}, microbatch(0))
    operands = [trace.jaxpr.eqns[call].invars for call in trace.calls]
    is_key = lambda v: jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)
    first, *others = [[v for v in invars if is_key(v)] for invars in operands]
    assert others == [first, first]
    made = {v for call in trace.calls for v in trace.jaxpr.eqns[call].outvars if is_key(v)}
    assert all(made.isdisjoint(variables(e.invars)) for e in trace.jaxpr.eqns)


def counting(params, buffers, batch):
    """Three buffers: one stays, one counts by another, one grows by itself."""
    total, weight, metrics, _ = chain_loss(params, buffers_of(), batch)
    count, step = buffers["count"], buffers["step"]
    return (
        total,
        weight,
        metrics,
        {"count": count + step, "gauge": buffers["gauge"], "step": step * 3},
    )


def test_buffers_before_every_microbatch_and_after_the_last():
    buffers = {"count": jnp.int32(1), "gauge": jnp.float32(7), "step": jnp.int32(2)}
    trace, _ = traced(counting, params_of(), buffers, microbatch(0))
    over_time, last = buffers_over_time(trace, buffers, 4)
    now, names = buffers, sorted(buffers)
    assert [names[number] for number in over_time] == ["count", "step"]
    for number in range(4):
        for i, values in over_time.items():
            assert int(values[number]) == int(now[names[i]])
        now = counting(params_of(), now, microbatch(number))[3]
    assert {name: int(v) for name, v in last.items()} == {name: int(v) for name, v in now.items()}


@pytest.mark.parametrize("source", ["batch", "params"])
def test_a_buffer_that_depends_on_more_than_buffers_raises(source):
    def forward(params, buffers, batch):
        total, weight, metrics, changed = chain_loss(params, buffers, batch)
        given = {"batch": batch["x"], "params": params["norm"]}[source]
        return total, weight, metrics, changed | {"still": jnp.mean(given)}

    buffers = buffers_of()
    trace, _ = traced(forward, params_of(), buffers, microbatch(0))
    with pytest.raises(UnsupportedError, match=r"the buffer 'still' depends on .*nnx\.LayerNorm"):
        buffers_over_time(trace, buffers, 2)
