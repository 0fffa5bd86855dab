"""A train state in the form that a checkpoint keeps: the same whatever the strategy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..checkpoint import target_of
from ..core.tree import joined, parted
from ..core.typing import PyTree
from ..sharding import LargestDim, shardings
from .buffers import stack_buffers
from .state import TrainState
from .step import TrainStep
from .update import first_average


class PortableForm:
    """The model's own form of the states of a step, which a step of any strategy can take up.

    Most strategies lay the model's own arrays out over the mesh: their states are portable as they
    are. A pipeline keeps the blocks of its stages in rows, so that its parameters, and what the
    optimizer keeps of them, are put back into the form of the model; split over all axes, so that
    no device holds more than its share of them.

    Args:
        step: whose states are converted.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from axon_dist.mesh import World
        >>> from axon_dist.parallel import ddp
        >>> from axon_dist.train import build_train_step
        >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]))
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> form = PortableForm(
        ...     build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), World.emulate(8))
        ... )
        >>> form.target.params["kernel"].shape
        (2, 1)
    """

    def __init__(self, step: TrainStep):
        self._step = step
        self.target: TrainState = target_of(step.abstract_state, step.state_shardings)
        self._is_same = step.storage.rows is None
        if self._is_same:
            return
        storage, optimizer = step.storage, step.spec.stored_optimizer
        paths = step.parts.frozen_paths

        def apart(params, frozen):
            return parted(storage.weights(params, frozen), paths)

        def stored(params, frozen):
            return storage.store(joined(params, frozen))

        to_model = functools.partial(_convert, apart, optimizer.state_to_model)
        to_rows = functools.partial(_convert, stored, optimizer.state_from_model)
        portable = jax.eval_shape(to_model, step.abstract_state)
        mesh = step.world.mesh
        where = shardings(LargestDim(tuple(mesh.axis_names)), portable, mesh)
        self.target = target_of(portable, where)
        near = step.near
        self._to_model = jax.jit(lambda state: to_model(near(state)), out_shardings=where)
        self._to_rows = jax.jit(to_rows, out_shardings=step.state_shardings)

    def of(self, state: TrainState) -> TrainState:
        """The portable form of a state, which stays usable."""
        return state if self._is_same else self._to_model(state)

    def with_weights(self, weights: PyTree, buffers: PyTree) -> TrainState:
        """The first state of a step that trains nothing, with other parameters and statistics.

        Args:
            weights: in the form of the model, trained and frozen, where the step keeps them.
            buffers: the model's, on every device.
        """
        step, spec = self._step, self._step.spec
        params, frozen = parted(weights, step.parts.frozen_paths)
        stacked = jax.jit(
            lambda buffers: stack_buffers(buffers, spec.reduction, spec.num_ranks),
            out_shardings=step.state_shardings.buffers,
        )
        scaler = step.options.scaler
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=self.target.opt_state,
            buffers=stacked(buffers),
            scaler=None if scaler is None else scaler.init(),
            frozen=frozen,
            ema=first_average(step.options.ema, params),
        )
        return self.take_up(state)

    def take_up(self, portable: TrainState) -> TrainState:
        """The state of the step; the inverse of `of`, exactly."""
        return portable if self._is_same else self._to_rows(portable)


def _convert(
    weights: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    opt_state: Callable[[PyTree], PyTree],
    state: TrainState,
) -> TrainState:
    params, frozen = weights(state.params, state.frozen)
    ema = None if state.ema is None else weights(state.ema, state.frozen)[0]
    return dataclasses.replace(
        state, params=params, frozen=frozen, ema=ema, opt_state=opt_state(state.opt_state)
    )
