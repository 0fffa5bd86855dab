"""Where every array of a train state lies."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..parallel import CPUOffload, Reduction, Strategy
from ..sharding import optimizer_shardings, shardings
from .local_view import buffer_partition
from .parts import ModelParts
from .state import TrainState
from .storage import Storage


def state_shardings(
    state: TrainState, parts: ModelParts, strategy: Strategy, storage: Storage, mesh: Mesh
) -> Any:
    """Places a train state as a strategy says.

    Args:
        state: of shapes.
        parts: the model.
        strategy: the strategy, about the model's own leaves.
        storage: how the state holds the parameters, and what the strategy says about that.
        mesh: the mesh.

    Returns:
        A `TrainState` of shardings.
    """
    place = functools.partial(NamedSharding, mesh)
    reduction = strategy.reduction or Reduction()
    specs = buffer_partition(parts.buffers, reduction, strategy.batch_axes)
    offload, stored = strategy.offload, storage.strategy
    whole: Any = place(PartitionSpec())
    return TrainState(
        step=whole,
        params=shardings(stored.params, state.params, mesh, offload.params),
        opt_state=optimizer_shardings(
            stored.opt_state, state.params, state.opt_state, mesh, offload.opt_state
        ),
        buffers=jax.tree.map(place, specs),
        scaler=jax.tree.map(lambda _: whole, state.scaler),
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
