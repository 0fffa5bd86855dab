"""The canonical form of a step's states, which does not depend on the strategy."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import jax

from ..core.own_context import in_own_context
from ..core.tree import combine, partition
from ..core.typing import PyTree
from ..sharding import LargestDim, shardings
from ..sharding.padding import model_tree, padding_of, stored_shapes, stored_tree
from .layout import StateLayout, placed_shape
from .state import TrainState


class HasStateLayout(Protocol):
    """A step whose states have a layout."""

    @property
    def state_layout(self) -> StateLayout:
        """The layout of its states."""
        ...


class PortableForm:
    """The canonical form of a step's states, which a step of any strategy can load.

    Most strategies shard the model's own arrays, so their states are portable as they are. A
    pipeline stores the blocks of its stages in rows: its parameters and optimizer state are
    converted back to the model's form. They are then split over all mesh axes, so that no device
    holds more than its share.

    Args:
        step: the `TrainStep` whose states are converted.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from flax import nnx
        >>> from axon_dist import World, build_train_step, ddp
        >>> loss_fn = lambda model, batch: jnp.mean(model(batch["x"]))
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> step = build_train_step(model, optax.sgd(0.1), loss_fn, ddp(), World.emulate(8))
        >>> PortableForm(step).target.params["kernel"].shape
        (2, 1)
    """

    @in_own_context
    def __init__(self, step: HasStateLayout):
        layout = step.state_layout
        storage = layout.plan.state_plan.storage
        self._layout = layout
        self.target: TrainState = layout.placed_shapes
        self._is_same = storage.stage_storage is None
        if self._is_same:
            return
        optimizer: Any = layout.plan.state_plan.update.traced.optimizer
        paths = layout.spec.model_spec.frozen_paths

        def model_weights(params: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
            return partition(storage.weights(params, frozen), paths)

        def row_weights(params: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
            return storage.store(combine(params, frozen))

        to_model = functools.partial(_convert, model_weights, optimizer.state_to_model)
        to_rows = functools.partial(_convert, row_weights, optimizer.state_from_model)
        mesh = layout.spec.world.mesh
        portable = jax.eval_shape(to_model, layout.model_shapes)
        portable_shardings = shardings(LargestDim(tuple(mesh.axis_names)), portable, mesh)
        padding = padding_of(portable, portable_shardings)
        padded = dataclasses.replace(portable_shardings, padding=padding)
        stored = dataclasses.replace(stored_shapes(portable, portable_shardings), padding=padding)
        self.target = jax.tree.map(placed_shape, stored, padded)

        def from_rows(state: TrainState) -> TrainState:
            converted = stored_tree(to_model(layout.on_device(state)), portable_shardings)
            return dataclasses.replace(converted, padding=padding)

        def into_rows(state: TrainState) -> TrainState:
            converted = model_tree(
                dataclasses.replace(state, padding=None), portable, portable_shardings
            )
            return layout.padded(to_rows(converted))

        self._to_model = jax.jit(from_rows, out_shardings=padded)
        self._to_rows = jax.jit(into_rows, out_shardings=layout.state_shardings)

    @in_own_context
    def to_canonical(self, state: TrainState) -> TrainState:
        """Returns the canonical form of a state, which stays usable."""
        return state if self._is_same else self._to_model(state)

    @in_own_context
    def with_weights(self, weights: PyTree, buffers: PyTree) -> TrainState:
        """Builds the first state of a step that is not going to train, around other weights.

        Args:
            weights: trained and frozen parameters in the model's form, with the step's shardings.
            buffers: the model's, on every device.
        """
        layout = self._layout
        is_same = self._is_same
        state_shardings = layout.state_shardings
        if is_same:
            stored = layout.plan.state_plan.storage.store(weights)
        else:
            stored = partition(weights, layout.spec.model_spec.frozen_paths)
        state = layout.state_from(stored, buffers, self.target.opt_state)
        if is_same and layout.padding is not None:
            return jax.jit(layout.padded, out_shardings=state_shardings)(state)
        names = ("frozen", "buffers") if is_same else ("buffers",)
        placed = {n: jax.device_put(getattr(state, n), getattr(state_shardings, n)) for n in names}
        return self.from_canonical(dataclasses.replace(state, **placed))

    @in_own_context
    def from_canonical(self, canonical: TrainState) -> TrainState:
        """Converts a canonical state to the step's form; the exact inverse of `to_canonical`."""
        return canonical if self._is_same else self._to_rows(canonical)

    def of(self, state: TrainState) -> TrainState:
        """The deprecated name of `to_canonical`."""
        _warn_of("of", "to_canonical")
        return self.to_canonical(state)

    def take_up(self, portable: TrainState) -> TrainState:
        """The deprecated name of `from_canonical`."""
        _warn_of("take_up", "from_canonical")
        return self.from_canonical(portable)


def _warn_of(old: str, new: str) -> None:
    text = f"PortableForm.{old} is deprecated; use {new}"
    warnings.warn(text, DeprecationWarning, stacklevel=3)


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
