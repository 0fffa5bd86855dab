"""Replicas that train on their own, one after the other on one device: what they must equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from axon_dist.core.tree import leaves_with_paths, map_with_path
from axon_dist.core.typing import PyTree
from axon_dist.data import LocalBatch
from axon_dist.parallel import SlowPlan
from axon_dist.step import TrainState, TrainStep

COMPARED = ("loss", "grad_norm")
"""The metrics that are compared, beside the parameters."""


def meeting_soon(slow: SlowPlan | None) -> SlowPlan | None:
    """The plan with meetings after every second step, so that a few steps have some; uncompressed.

    What travels in few bits equals nothing that one device computes.
    """
    if slow is None:
        return None
    every = min(slow.every, 2)
    fragments = min(slow.fragments, every)
    return dataclasses.replace(slow, every=every, compression=None, fragments=fragments)


def train_replicas(
    step: TrainStep,
    alone: TrainStep,
    batches: Sequence[LocalBatch],
    first: Callable[[PyTree], PyTree] = lambda params: params,
) -> tuple[dict, dict]:
    """Trains every replica of a step by a step of one device, each on its rows of the batches.

    Args:
        step: whose strategy says how many replicas there are, and when they meet.
        alone: of the same model and optimizer, on one device.
        batches: of all replicas.
        first: makes the parameters that all replicas begin with from what they would be.

    Returns:
        The means of what they report by name, and the parameters on which they last agreed by path.
    """
    plan: Any = step.strategy.slow
    count = step.world.mesh.shape[plan.axis]
    start = lambda state: dataclasses.replace(state, params=first(state.params))
    states = [_of_replica(start(alone.init()), number) for number in range(count)]
    # A step uses up the memory of its state, which shares none with what is agreed on.
    outer = jax.tree.map(jnp.copy, states[0].params)
    parts = plan.parts({path: leaf.size for path, leaf in leaves_with_paths(outer)})
    outer_states = [plan.outer.init(outer) for _ in parts]
    found: dict[str, Any] = {}
    for number, batch in enumerate(batches):
        for replica in range(count):
            share = _share(batch, replica, count, step.layout.num_microbatches)
            states[replica], metrics = alone(states[replica], share)
            for name in COMPARED:
                total = found.setdefault(metric_of(name, number), 0.0)
                found[metric_of(name, number)] = total + np.asarray(metrics[name]) / count
        for part in plan.due(number + 1):
            mean = lambda o, *p: o - sum(p) / count
            went = jax.tree.map(mean, outer, *(state.params for state in states))
            updates, outer_states[part] = plan.outer.update(went, outer_states[part], outer)
            met = optax.apply_updates(outer, updates)
            pick = lambda path, new, old, of=parts[part]: new if path in of else old
            outer = map_with_path(pick, met, outer)
            follow = lambda state, met=met, pick=pick: dataclasses.replace(
                state, params=jax.tree.map(jnp.copy, map_with_path(pick, met, state.params))
            )
            states = [follow(state) for state in states]
    return found, params_of(alone.merge(dataclasses.replace(states[0], params=outer)))


def metric_of(name: str, number: int) -> str:
    """What a metric of a step is called in a comparison."""
    return f"{name} of step {number}"


def params_of(model: nnx.Module) -> dict[str, Any]:
    """The parameters of a model by path, in host memory."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {path: np.asarray(jax.device_get(x)) for path, x in leaves_with_paths(params)}


def _of_replica(state: TrainState, number: int) -> TrainState:
    """The first replica draws as the model would, the others from keys folded with their number."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    fold = lambda x: jax.random.fold_in(x, number) if number and is_key(x) else x
    return dataclasses.replace(state, buffers=jax.tree.map(fold, state.buffers))


def _share(batch: Mapping[str, Any], replica: int, count: int, microbatches: int) -> PyTree:
    """The rows of every microbatch that a replica has."""

    def rows(leaf: Any) -> Any:
        parts = np.split(np.asarray(leaf), microbatches * count)
        return np.concatenate(parts[replica::count])

    return {name: rows(leaf) for name, leaf in batch.items()}
