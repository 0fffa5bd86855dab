"""A train state in the form that a checkpoint keeps: the same whatever the strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

from axon_dist.checkpoint import target_of
from axon_dist.core.errors import UnsupportedError
from axon_dist.core.tree import leaves_with_paths
from axon_dist.core.typing import PyTree
from axon_dist.sharding import LargestDim, shardings

from .state import TrainState
from .step import TrainStep


class PortableForm:
    """The model's own form of the states of a step, which a step of any strategy can take up.

    Most strategies lay the model's own arrays out over the mesh: their states are portable as they
    are. A pipeline keeps the blocks of its stages in rows, so that its parameters, and whatever in
    the optimizer state is shaped like them, are put back into the form of the model; split over
    all axes, so that no device holds more than its share of them.

    Args:
        step: whose states are converted.

    Raises:
        UnsupportedError: when the rows of a pipeline cannot hold the optimizer's state.

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
        stored = step.abstract_state
        to_model = functools.partial(_convert, step.storage.to_model, stored.params)
        portable = jax.eval_shape(to_model, stored)
        to_rows = functools.partial(_convert, step.storage.from_model, portable.params)
        _check_inverse(stored, jax.eval_shape(to_rows, portable))
        mesh = step.world.mesh
        where = shardings(LargestDim(tuple(mesh.axis_names)), portable, mesh)
        self.target = target_of(portable, where)
        near = step.near
        self._to_model = jax.jit(lambda state: to_model(near(state)), out_shardings=where)
        self._to_rows = jax.jit(to_rows, out_shardings=step.state_shardings)

    def of(self, state: TrainState) -> TrainState:
        """The portable form of a state, which stays usable."""
        return state if self._is_same else self._to_model(state)

    def take_up(self, portable: TrainState) -> TrainState:
        """The state of the step; the inverse of `of`, exactly."""
        return portable if self._is_same else self._to_rows(portable)


def _convert(convert: Callable[[PyTree], PyTree], params: PyTree, state: TrainState) -> TrainState:
    """Converts every subtree of a state that has the structure of its parameters."""
    structure = jax.tree.structure(params)
    is_params = lambda tree: jax.tree.structure(tree) == structure
    return jax.tree.map(lambda x: convert(x) if is_params(x) else x, state, is_leaf=is_params)


def _check_inverse(stored: TrainState, again: TrainState) -> None:
    """Rows have one dtype per leaf, and an optimizer may keep its moments in another."""
    found = dict(leaves_with_paths(again))
    for path, leaf in leaves_with_paths(stored):
        if path not in found or (found[path].shape, found[path].dtype) != (leaf.shape, leaf.dtype):
            raise UnsupportedError(
                f"the state of this pipeline cannot be saved for other strategies: {path} is "
                f"{leaf.dtype}{list(leaf.shape)}, unlike the parameter it belongs to. Give the "
                "optimizer no dtype of its own, or make the stages equal"
            )
