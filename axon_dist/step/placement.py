"""Where every array of a train state lies."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..core.tree import leaves_with_paths, map_with_path
from ..core.typing import PyTree
from ..parallel import CPUOffload
from ..sharding import optimizer_shardings, shardings
from .buffers import buffer_partition
from .spec import StepSpec
from .state import TrainState


def state_shardings(spec: StepSpec, state: TrainState) -> Any:
    """Places a train state as a strategy says.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        state: of shapes.

    Returns:
        A `TrainState` of shardings.
    """
    mesh, offload, stored = spec.mesh, spec.strategy.offload, spec.storage.strategy
    place = functools.partial(NamedSharding, mesh)
    whole: Any = place(PartitionSpec())
    return TrainState(
        step=whole,
        params=shardings(stored.params, state.params, mesh, offload.params),
        opt_state=optimizer_shardings(
            stored.opt_state, state.params, state.opt_state, mesh, offload.opt_state
        ),
        buffers=jax.tree.map(place, _buffers_at_rest(spec)),
        scaler=jax.tree.map(lambda _: whole, state.scaler),
        frozen=shardings(stored.params, state.frozen, mesh, offload.params),
        # Made shard by shard where the moments are, which are never less divided than parameters.
        ema=None
        if state.ema is None
        else shardings(stored.opt_state, state.ema, mesh, offload.opt_state),
    )


def whole_buffers(spec: StepSpec, buffers: PyTree) -> PyTree:
    """The buffers as a step computes with them: what lies divided between steps is made whole.

    Args:
        spec: model, loss, optimizer, strategy, devices and options of the step.
        buffers: of a state.
    """
    whole = NamedSharding(spec.mesh, PartitionSpec())
    at_rest = dict(leaves_with_paths(_buffers_at_rest(spec)))
    is_divided = lambda path: path in spec.parts.others and at_rest[path] != PartitionSpec()
    gather = lambda path, x: jax.lax.with_sharding_constraint(x, whole) if is_divided(path) else x
    return map_with_path(gather, buffers)


def _buffers_at_rest(spec: StepSpec) -> PyTree:
    """Where buffers lie between steps: those that are no layer's statistics as parameters would."""
    parts, reduction = spec.parts, spec.reduction
    specs = buffer_partition(parts.buffers, reduction, spec.strategy.batch_axes)
    if not reduction.sync_buffers:
        return specs
    # Rules about paths are about parameters; what divides any leaf divides these too.
    policy = spec.strategy.params.flexible_part
    place = lambda path, leaf, whole: (
        policy(path, leaf.shape, spec.mesh) if path in parts.others else whole
    )
    return map_with_path(place, parts.buffers, specs)


def on_device(offload: CPUOffload, places: Any, state: TrainState) -> TrainState:
    """Copies what lives in host memory to the devices.

    Args:
        offload: what lives there.
        places: a `TrainState` of shardings.
        state: the state, within a trace.

    Returns:
        The state, all of it in device memory.
    """
    if offload is CPUOffload.NONE:
        return state
    return jax.device_put(state, jax.tree.map(lambda s: s.with_memory_kind("device"), places))
