"""Where every array of a train state lies."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..parallel import CPUOffload
from ..sharding import optimizer_shardings, shardings
from .local_view import buffer_partition
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
    specs = buffer_partition(spec.parts.buffers, spec.reduction, spec.strategy.batch_axes)
    whole: Any = place(PartitionSpec())
    return TrainState(
        step=whole,
        params=shardings(stored.params, state.params, mesh, offload.params),
        opt_state=optimizer_shardings(
            stored.opt_state, state.params, state.opt_state, mesh, offload.opt_state
        ),
        buffers=jax.tree.map(place, specs),
        scaler=jax.tree.map(lambda _: whole, state.scaler),
        frozen=shardings(stored.params, state.frozen, mesh, offload.params),
        # Made shard by shard where the moments are, which are never less divided than parameters.
        ema=None
        if state.ema is None
        else shardings(stored.opt_state, state.ema, mesh, offload.opt_state),
    )


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
