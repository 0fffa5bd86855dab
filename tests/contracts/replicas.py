"""The oracle of replicas that train on their own: each in turn on one device, in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from axon_dist.core.weighted import Weighted

from .reference import Trace, compiled_update, norm_of, weighted_mean


def simulate(case, optimizer, outer, every, replicas, num_steps, accumulate=1, fragments=None):
    """Trains R replicas one after the other, and has them meet every H steps.

    Args:
        fragments: pairs of the step within H at which a part meets, and a function from a path of
            keys to whether a parameter is in it; None is all of them after H steps.

    Returns:
        The trace: means over samples of what the replicas report, and of their norms; their
        parameters as rows, and with the buffers those on which they last agreed.
    """
    graphdef, params, buffers = nnx.split(case.make(), nnx.Param, ...)
    params, buffers = nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)
    fragments = fragments or [(0, lambda path: True)]
    gradient = jax.jit(jax.value_and_grad(_total_of(graphdef, case.loss_fn), has_aux=True))
    update, meet = compiled_update(optimizer), compiled_update(outer)
    own = [(params, optimizer.init(params), _of_replica(buffers, r)) for r in range(replicas)]
    draws = any(_is_key(x) for x in jax.tree.leaves(buffers))
    common, outer_states = params, [outer.init(params) for _ in fragments]
    trace = []
    for number in range(num_steps):
        reported, weights = [], []
        for r in range(replicas):
            pieces = _share(case.batch(number), r, replicas, accumulate)
            if draws:
                # A replica draws for all of its samples at once, however many microbatches it has.
                pieces = [jax.tree.map(lambda *x: np.concatenate(x), *pieces)]
            own[r], metrics, weight = _step(gradient, update, own[r], pieces)
            reported.append(metrics), weights.append(weight)
        trace.append({n: _mean(n, [m[n] for m in reported], weights) for n in reported[0]})
        for index, (at, within) in enumerate(fragments):
            if (number + 1) % every != at:
                continue
            went = [jax.tree.map(np.subtract, common, params) for params, _, _ in own]
            mean = jax.tree.map(lambda *x: sum(x) / replicas, *went)
            met, outer_states[index] = meet(mean, outer_states[index], common)
            pick = lambda path, new, old, within=within: new if within(path) else old
            common = jax.tree_util.tree_map_with_path(pick, met, common)
            own = [
                (jax.tree_util.tree_map_with_path(pick, met, params), *rest)
                for params, *rest in own
            ]
    rows = jax.tree.map(lambda *x: np.stack(x), *(params for params, _, _ in own))
    return Trace(trace, [], rows, {"common": common, "own": [b for _, _, b in own]})


def _total_of(graphdef, loss_fn):
    def total_of(params, buffers, batch):
        model = nnx.merge(graphdef, params, buffers, copy=True)
        value = loss_fn(model, batch)
        loss, extra = value if isinstance(value, tuple) else (value, {})
        loss = loss if isinstance(loss, Weighted) else Weighted(loss, 1.0)
        buffers = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        return loss.total, (loss.weight, extra, buffers)

    return total_of


def _of_replica(buffers, r):
    """The first replica draws as the model would, the others from keys folded with their number."""
    fold = lambda x: jax.random.fold_in(x, r) if _is_key(x) and r else x
    return jax.tree.map(fold, buffers)


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _share(batch, r, replicas, accumulate):
    """The microbatches of a replica: it has consecutive rows, however many it cuts them into."""
    cut = lambda leaf: np.split(np.split(np.asarray(leaf), replicas)[r], accumulate)
    leaves = {name: cut(leaf) for name, leaf in batch.items()}
    return [{name: x[k] for name, x in leaves.items()} for k in range(accumulate)]


def _step(gradient, update, state, pieces):
    params, opt_state, buffers = state
    totals, weights, extras = [], [], []
    grads = jax.tree.map(np.zeros_like, params)
    for piece in pieces:
        (total, (weight, extra, buffers)), grad = gradient(params, buffers, piece)
        grads = jax.tree.map(np.add, grads, grad)
        totals.append(float(total)), weights.append(float(weight)), extras.append(extra)
    grads = jax.tree.map(lambda g: g / sum(weights), grads)
    params, opt_state = update(grads, opt_state, params)
    metrics = {name: weighted_mean([e[name] for e in extras], weights) for name in extras[0]}
    metrics |= {"loss": sum(totals) / sum(weights), "grad_norm": norm_of(grads)}
    metrics |= {"param_norm": norm_of(params)}
    return (params, opt_state, buffers), metrics, sum(weights)


def _mean(name, reported, weights):
    """The mean of a metric over replicas: by samples, except for norms, which have no samples."""
    if name in ("grad_norm", "param_norm"):
        return float(np.mean(reported))
    return float(weighted_mean(reported, weights))
